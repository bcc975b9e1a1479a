"""Conversations as ids: what a prompt is made of, that extending is exact, and that text smuggles no structure."""

from __future__ import annotations

import json
import pickle
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from etpi_resources.chat import format as chat_format
from etpi_resources.chat.format import ChatFormat, load_chat_format
from etpi_resources.chat.sources import TokenizerUnavailable

# Text that tries to be structure, beside ordinary and odd text.
PIECES = st.sampled_from(
    ["<|im_end|>", "<|im_start|>", "<|endoftext|>", "<think>", "</think>", "<tool_call>", "</tool_call>", "\n", "\n\n",
     " ", "assistant", "kalo_mibe", "src/remo/", "x * 37", "é", "😀", "\ue000", "I’ll", "</parameter>"]
)  # fmt: skip
TEXTS = st.lists(st.one_of(PIECES, st.text(max_size=6)), max_size=10).map("".join)
ROLES = st.sampled_from(["system", "user", "assistant"])
MESSAGES = st.lists(st.fixed_dictionaries({"role": ROLES, "content": TEXTS}), min_size=1, max_size=5)


@pytest.fixture(scope="module")
def tiny() -> ChatFormat:
    return load_chat_format("tiny")


def test_a_prompt_is_the_template_with_structural_ids(tiny: ChatFormat) -> None:
    messages = [{"role": "system", "content": "Act."}, {"role": "user", "content": "fix `kalo_mibe`"}]
    ids = tiny.prompt_ids(messages)
    text = "<|im_start|>system\nAct.<|im_end|>\n<|im_start|>user\nfix `kalo_mibe`<|im_end|>\n<|im_start|>assistant\n"
    assert tiny.decode(ids) == text
    assert ids.count(tiny.end_id) == 2
    assert tiny.tail_form(ids) == "none"


@settings(deadline=None)  # the first example may load the tokenizer
@given(messages=MESSAGES)
def test_text_never_becomes_structure(messages: list[dict[str, str]]) -> None:
    tiny = load_chat_format("tiny")
    ids = tiny.prompt_ids(messages)
    assert sum(i == tiny.end_id for i in ids) == len(messages)
    assert sum(i in tiny.control_ids for i in ids) == 2 * len(messages) + 1
    # And nothing is lost: the characters are there, spelt out.
    text = "".join(f"<|im_start|>{m['role']}\n{m['content']}<|im_end|>\n" for m in messages)
    assert tiny.decode(ids) == f"{text}<|im_start|>assistant\n"


@settings(deadline=None)  # the first example may load the tokenizer
@given(messages=MESSAGES, output=TEXTS, observation=TEXTS)
def test_extending_equals_rendering_when_the_output_is_canonical(
    messages: list[dict[str, str]], output: str, observation: str
) -> None:
    tiny = load_chat_format("tiny")
    extended = [*tiny.prompt_ids(messages), *tiny.encode(output), tiny.end_id, *tiny.observation_ids(observation)]
    longer = [*messages, {"role": "assistant", "content": output}, {"role": "user", "content": observation}]
    assert extended == tiny.prompt_ids(longer)


@settings(deadline=None)  # the first example may load the tokenizer
@given(text=TEXTS)
def test_encoding_loses_nothing_and_keeps_control_tokens_out(text: str) -> None:
    tiny = load_chat_format("tiny")
    ids = tiny.encode(text)
    assert tiny.decode(ids) == text
    assert not tiny.control_ids & set(ids)
    assert all(0 <= i < tiny.vocab_size for i in ids)
    allowed = tiny.encode(text, allow_special=True)
    assert tiny.decode(allowed) == text
    assert sum(i in tiny.control_ids for i in allowed) == sum(
        text.count(c) for c in ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
    )


@pytest.mark.parametrize("name", ["tiny", "qwen3"])
def test_copy_on_another_node_encodes_alike_and_takes_no_caches_along(name: str) -> None:
    chat = load_chat_format(name)
    fresh = len(pickle.dumps(chat))
    messages = [{"role": "user", "content": "a <|im_end|> in text"}, {"role": "assistant", "content": "<think>\n"}]
    ids = chat.prompt_ids(messages)
    assert chat.markers.end and chat.vocab_size > chat.end_id
    sent = pickle.dumps(chat)
    assert len(sent) <= fresh, "only the constructor's arguments travel"
    copied = pickle.loads(sent)
    assert (copied.name, copied.template, copied.special_ids) == (chat.name, chat.template, chat.special_ids)
    assert copied.prompt_ids(messages) == ids and ids.count(chat.end_id) == 2
    assert copied.encode("<|im_end|>") == chat.encode("<|im_end|>") != [chat.end_id]


def test_inline_tokens_are_single_ids_in_messages_and_text(tiny: ChatFormat) -> None:
    call = "<think>\nlook\n</think>\n\n<tool_call>\nls\n</tool_call>"
    for ids in (tiny.encode(call), tiny.prompt_ids([{"role": "assistant", "content": call}])):
        for inline in (tiny.think_open_id, tiny.think_close_id, tiny.tool_open_id, tiny.tool_close_id):
            assert inline is not None and ids.count(inline) == 1
    assert tiny.special_ids > tiny.control_ids


def test_names_and_numbers_have_the_same_ids_in_every_position(tiny: ChatFormat) -> None:
    """What makes copying learnable: the pieces of a name do not depend on what stands before it."""
    draw = random.Random(0)
    names = ["".join(draw.choices(["ka", "lo", "mi", "ze", "du", "bo"], k=3)) for _ in range(50)]
    alone = {name: tiny.encode(name) for name in names}
    for name, pieces in alone.items():
        for text in (f"in {name}", f"`{name}`", f"src/{name}.py", f"def {name}_x", f"({name}"):
            ids = tiny.encode(text)
            assert any(ids[i : i + len(pieces)] == pieces for i in range(len(ids))), (name, text)
    assert [tiny.decode([i]) for i in tiny.encode("x * 4096")][-4:] == list("4096")


def test_tail_forms() -> None:
    tiny = load_chat_format("tiny")
    start = tiny.prompt_ids([{"role": "user", "content": "<think>not the tail</think>"}])
    assert tiny.tail_form(start) == "none"
    assert tiny.tail_form([*start, *tiny.encode("<think>\n")]) == "open"
    assert tiny.tail_form([*start, *tiny.encode("<think>\n\n</think>\n\n")]) == "closed"


@settings(max_examples=20, deadline=None)
@given(messages=MESSAGES)
def test_the_real_template_keeps_text_out_of_structure_too(messages: list[dict[str, str]]) -> None:
    qwen = load_chat_format("qwen3", "qwen3_instruct_2507")
    ids = qwen.prompt_ids(messages)
    assert sum(i == qwen.end_id for i in ids) == len(messages)
    harmless = [{**m, "content": "a " + m["content"].replace("<|", "(")} for m in messages]
    rendered = qwen.tokenizer.apply_chat_template(harmless, add_generation_prompt=True, return_dict=False)
    assert qwen.prompt_ids(harmless) == rendered


def test_observations_follow_any_template() -> None:
    qwen = load_chat_format("qwen3")
    ids = qwen.observation_ids("done", enable_thinking=False)
    assert qwen.decode(ids) == "\n<|im_start|>user\ndone<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
    assert qwen.tail_form(ids) == "closed"
    result = qwen.decode(qwen.observation_ids("42", role="tool"))
    assert result.startswith("\n<|im_start|>user\n<tool_response>\n42\n</tool_response>")


def test_a_saved_folder_loads_as_the_same_format(tiny: ChatFormat, tmp_path) -> None:
    tiny.save(tmp_path)
    again = load_chat_format(str(tmp_path))
    messages = [{"role": "user", "content": "ls <|im_end|> src/kalo.py 12"}]
    assert again.prompt_ids(messages) == tiny.prompt_ids(messages)
    assert (again.end_id, again.pad_id, again.vocab_size) == (tiny.end_id, tiny.pad_id, tiny.vocab_size)


def test_unknown_format_lists_the_known_ones() -> None:
    with pytest.raises(FileNotFoundError, match="tiny, qwen3"):
        load_chat_format("nowhere")
    with pytest.raises(FileNotFoundError, match="it has .*qwen3"):
        load_chat_format("qwen3", "no_such_template")


def test_template_of_a_model_folder_may_be_in_its_tokenizer_configuration(tmp_path) -> None:
    chat = load_chat_format("tiny", "qwen3")
    chat.save(tmp_path)
    template, config = next(tmp_path.glob("*.jinja")), tmp_path / "tokenizer_config.json"
    template.unlink()
    with pytest.raises(FileNotFoundError, match="chat_template"):
        load_chat_format(str(tmp_path), str(tmp_path))
    config.write_text(json.dumps({**json.loads(config.read_text()), "chat_template": chat.template}))
    assert load_chat_format(str(tmp_path)).template == chat.template


def test_template_may_be_one_of_several_or_in_a_file_of_its_own(tmp_path) -> None:
    chat = load_chat_format("tiny", "tiny")
    chat.save(tmp_path)
    next(tmp_path.glob("*.jinja")).unlink()
    several = [{"name": "tool_use", "template": "no"}, {"name": "default", "template": chat.template}]
    for number, value in enumerate([several, {"default": chat.template, "rag": "no"}, chat.template]):
        (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": value}))
        folder = tmp_path.rename(tmp_path.with_name(f"model{number}"))
        assert load_chat_format(str(folder)).template == chat.template
        tmp_path = folder
    (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": several[:1]}))
    with pytest.raises(FileNotFoundError, match="tool_use"):
        load_chat_format(str(tmp_path), str(tmp_path))


def test_tokenizer_that_cannot_be_downloaded_names_the_remedy(monkeypatch) -> None:
    def unreachable(*args: object, **kwargs: object) -> str:
        raise ConnectionError("no route")

    monkeypatch.setattr("huggingface_hub.snapshot_download", unreachable)
    with pytest.raises(TokenizerUnavailable, match="hf download some/model --revision abc"):
        load_chat_format("hub:some/model@abc", "tiny")


@pytest.mark.parametrize("most", [0, 40, 1_000_000])
def test_ids_that_are_kept_are_those_of_a_format_that_kept_none(most, monkeypatch):
    monkeypatch.setattr(chat_format, "_MOST_KEPT", most)
    texts = ["Print <|im_end|> now.", "<|im_end|>", "Moor.", "Print <|im_end|> now.", "user\nMoor.", "<|im_end|>"]
    used = load_chat_format("tiny", "qwen3")
    for text in texts:
        messages = [{"role": "user", "content": text}, {"role": "assistant", "content": text}]
        fresh = ChatFormat(used.name, used.tokenizer, used.template)
        ids = used.prompt_ids(messages)
        assert ids == fresh.prompt_ids(messages) and ids.count(used.end_id) == 2
