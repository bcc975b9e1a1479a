"""The tokenizer's files in a model's folder.

etpi's ids are those of tokenizer.json as it is. transformers 5 reads only the vocabulary from that file where
tokenizer_config.json names a class like LlamaTokenizer, and the class brings rules of its own: text of DeepSeek-R1's
distillation to Qwen3-8B loses its blanks, and Llama 2 encodes a blank at the start otherwise. So checkpoints and
servers name PreTrainedTokenizerFast, which changes no rule, wherever the named class reads a folder otherwise.
transformers 5 also saves the name TokenizersBackend, which transformers 4 refuses.
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from etpi_resources.inside import files_in
from etpi_resources.outside import loads, read_object

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast

TOKENIZER_CONFIG = "tokenizer_config.json"
CHAT_TEMPLATE = "chat_template.json"
PROBE = "def halve(n):\n    return n // 2  # 50 %, naïve\n<think>\n</think>\n<tool_call>"
"""A text that different tokenizers encode differently."""

_FILES = (
    "tokenizer.json", TOKENIZER_CONFIG, "special_tokens_map.json", "added_tokens.json", "vocab.json", "merges.txt",
    "chat_template.jinja", CHAT_TEMPLATE,
)  # fmt: skip
_MOST_GROWTH, _MOST_IDS = 1000, 1 << 24
_PLAIN, _NEW = "PreTrainedTokenizerFast", "TokenizersBackend"


def read_tokenizer(folder: Path, **special: str) -> PreTrainedTokenizerFast:
    """Return the tokenizer of tokenizer.json, with the special tokens of the folder's configuration and `special`."""
    from transformers import PreTrainedTokenizerFast

    core = _core(folder)
    config = _config(folder)
    named = {name: config.get(name) for name in ("bos_token", "eos_token", "pad_token", "unk_token")}
    texts = {name: token.get("content") if isinstance(token, dict) else token for name, token in named.items()}
    # transformers would add a token that the vocabulary lacks, with an id for which the model has no row.
    texts = {
        name: text
        for name, text in {**texts, **special}.items()
        if isinstance(text, str) and core.token_to_id(text) is not None
    }
    return PreTrainedTokenizerFast(tokenizer_object=_Moved(core), clean_up_tokenization_spaces=False, **texts)


def _core(folder: Path) -> Tokenizer:
    """Read tokenizer.json. Raises ValueError if it is none."""
    from tokenizers import Tokenizer

    file = folder / "tokenizer.json"
    try:
        core = Tokenizer.from_file(str(file))
    except BaseException as error:  # a panic of the library is no Exception
        if isinstance(error, KeyboardInterrupt | SystemExit):
            raise
        raise ValueError(f"{file} is no tokenizer: {error}"[:500]) from None
    if core.normalizer and _growth(loads(core.normalizer.__getstate__())) > _MOST_GROWTH:
        raise ValueError(f"{file} is refused: its normalizer makes a text more than {_MOST_GROWTH} times longer")
    return core


def _growth(normalizer: Mapping[str, Any]) -> int:
    """Return how many times longer a normalizer can make a text: each step may replace a character by a text."""
    steps = normalizer.get("normalizers", ())
    return max(len(normalizer.get("content", "")), 1) * math.prod(map(_growth, steps))


def vocab_size(core: Tokenizer) -> int:
    """Return the largest id plus one. Raises ValueError if it is too large: tables have a row for each id."""
    if (size := max(core.get_vocab(with_added_tokens=True).values()) + 1) > _MOST_IDS:
        raise ValueError(f"the tokenizer has the id {size - 1:,}; at most {_MOST_IDS:,} ids are read, numbered from 0")
    return size


class _Moved:
    """A tokenizer that transformers takes as it is, where it would copy one: 100 MB and a second."""

    def __init__(self, core: Any) -> None:
        self._core = core

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return self._core


def pad_id(tokenizer: PreTrainedTokenizerFast) -> int:
    """Return the id that fills rows: the pad token, else the end of text, else 0."""
    return next((i for i in (tokenizer.pad_token_id, tokenizer.eos_token_id) if isinstance(i, int)), 0)


@lru_cache
def misread(folder: Path) -> bool:
    """Return whether AutoTokenizer of the installed transformers refuses a folder, or reads other ids or other text.

    A process compares a folder once: that takes seconds for a large vocabulary, and every saved step asks.
    """
    from transformers import AutoTokenizer

    if not (folder / "tokenizer.json").is_file():
        return False
    files_in(folder)  # transformers opens some of them by name
    plain = _core(folder)
    try:
        auto = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False).backend_tokenizer
    except Exception:  # a class that is not known, or that the folder does not fit
        return True
    for text in (PROBE, f" {PROBE}"):
        ids = plain.encode(text, add_special_tokens=False).ids
        if auto.encode(text, add_special_tokens=False).ids != ids or auto.decode(ids) != plain.decode(ids):
            return True
    return False


def copy_tokenizer(source: Path, folder: Path) -> None:
    """Copy the files to `folder`; the configuration names a class that every transformers reads as tokenizer.json."""
    files = set(files_in(source))
    for name in _FILES:
        if source / name in files:
            shutil.copyfile(source / name, folder / name)
    config = _config(source)
    if config.get("tokenizer_class") == _NEW or misread(source):
        config.pop("auto_map", None)
        text = json.dumps(config | {"tokenizer_class": _PLAIN}, indent=2, ensure_ascii=False)
        (folder / TOKENIZER_CONFIG).write_text(text + "\n", encoding="utf-8")


def _config(folder: Path) -> dict[str, object]:
    file = folder / TOKENIZER_CONFIG
    return read_object(file) if file.is_file() else {}
