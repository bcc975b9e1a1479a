"""The Qwen3 vocabulary and template, built from installed packages alone."""

from __future__ import annotations

import subprocess
import sys
import unicodedata
from importlib.util import find_spec

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from etpi_resources.chat.format import load_chat_format
from etpi_resources.chat.tokenizers import qwen3

pytestmark = pytest.mark.skipif(
    find_spec("dashscope") is None, reason="dashscope, which ships the ranks, is not installed"
)


def test_ids_are_those_of_the_published_checkpoints() -> None:
    tokenizer = qwen3.load_tokenizer()
    assert (len(tokenizer), tokenizer.model_max_length) == (151_669, 131_072)
    assert tokenizer.encode("Hello world") == [9707, 1879]
    known = {
        "<|endoftext|>": 151643, "<|im_start|>": 151644, "<|im_end|>": 151645, "<tool_call>": 151657,
        "</tool_call>": 151658, "<tool_response>": 151665, "</tool_response>": 151666, "<think>": 151667,
        "</think>": 151668,
    }  # fmt: skip
    assert {text: tokenizer.convert_tokens_to_ids(text) for text in known} == known
    # The generation prompt and the empty think block, whose ids every serving log of the model shows.
    chat = load_chat_format("qwen3")
    assert chat.prompt_ids([{"role": "user", "content": "Hello world"}], enable_thinking=False) == [
        151644, 872, 198, 9707, 1879, 151645, 198, 151644, 77091, 198, 151667, 271, 151668, 271,
    ]  # fmt: skip


@pytest.fixture(scope="module")
def ranks() -> dict[bytes, int]:
    return qwen3._ranks(qwen3._package_file("dashscope", "resources/qwen.tiktoken", install="dashscope"))


def ranked(text: str, ranks: dict[bytes, int]) -> list[int]:
    """What the byte-pair ranks say directly: the pair whose union ranks lowest is joined first."""
    parts = [text.encode()[i : i + 1] for i in range(len(text.encode()))]
    while len(parts) > 1:
        result = [ranks.get(a + b, 1 << 30) for a, b in zip(parts, parts[1:], strict=False)]
        best = min(range(len(result)), key=result.__getitem__)
        if result[best] == 1 << 30:
            break
        parts[best : best + 2] = [parts[best] + parts[best + 1]]
    return [ranks[part] for part in parts]


@settings(max_examples=200, deadline=None)
@given(word=st.text(alphabet=st.characters(categories=["L"]), min_size=1, max_size=24))
def test_merges_follow_the_ranks(ranks: dict[bytes, int], word: str) -> None:
    word = unicodedata.normalize("NFC", word)
    if not all(c.isalpha() for c in word):
        return
    assert qwen3.load_tokenizer().encode(word) == ranked(word, ranks)


@settings(max_examples=100, deadline=None)
@given(st.text(max_size=60))
def test_text_survives(text: str) -> None:
    chat = load_chat_format("qwen3")
    assert chat.decode(chat.encode(text)) == unicodedata.normalize("NFC", text)


def test_loading_imports_no_hub_client() -> None:
    code = (
        "import sys; from etpi_resources.chat.tokenizers.qwen3 import load_tokenizer, chat_template; load_tokenizer(); "
        "chat_template(); print([m for m in ('dashscope', 'trl', 'torch', 'aiohttp') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip().splitlines()[-1] == "[]"


def test_templates_are_trls() -> None:
    assert "<|im_start|>" in qwen3.chat_template("qwen3")
    with pytest.raises(FileNotFoundError, match="qwen3_instruct_2507"):
        qwen3.chat_template("qwen9")


def test_missing_package_and_wrong_vocabulary_are_refused(tmp_path) -> None:
    with pytest.raises(ModuleNotFoundError, match="pip install 'x'"):
        qwen3._package_file("no_such_package", "y", install="'x'")
    (tmp_path / "ranks").write_text("YQ== 0\n")
    with pytest.raises(ValueError, match="1 byte-pair ranks"):
        qwen3._ranks(tmp_path / "ranks")
