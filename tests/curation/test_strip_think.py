"""Stripping think blocks on ids: the whole table, ids that stay, and outputs that are dropped."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

from etpi_assets.agent import think
from etpi_assets.curation.pairs import format_tokens
from etpi_assets.curation.strip_think import (
    AFTER_CALL,
    EMPTY,
    QUOTED,
    SECOND,
    UNCLOSED,
    close_tail,
    has_think,
    strip_history,
    strip_output,
    thinks_in_history,
    without_tail,
)
from etpi_resources.chat.format import ChatFormat, load_chat_format
from etpi_resources.chat.tool_forms import Call
from tests.support.students import FAMILIES, chat_of, smollm2

CHAT = load_chat_format("tiny")
QWEN = load_chat_format("qwen3")
CALL = "<tool_call>\n<function=bash>\n<parameter=command>\nls\n</parameter>\n</function>\n</tool_call>"
USER = {"role": "user", "content": "x"}


def ids(text, chat=CHAT):
    return np.asarray(chat.encode(text, allow_special=True), dtype=np.int32)


def text(result, chat=CHAT):
    return chat.decode(np.asarray(result).tolist())


@pytest.mark.parametrize("chat", [CHAT, QWEN], ids=["tiny", "qwen3"])
@pytest.mark.parametrize(
    ("tail", "output", "left"),
    [
        ("none", f"{CALL}<|im_end|>", f"{CALL}<|im_end|>"),
        ("none", f"<think>\nhm\n</think>\n\n{CALL}<|im_end|>", f"{CALL}<|im_end|>"),
        ("none", f"hm\n</think>\n\n{CALL}<|im_end|>", f"{CALL}<|im_end|>"),
        ("none", "<think>\nhm", UNCLOSED),
        ("open", f"{CALL}<|im_end|>", UNCLOSED),
        ("open", f"hm\n</think>\n\n{CALL}<|im_end|>", f"{CALL}<|im_end|>"),
        ("open", f"<think>\nhm\n</think>\n\n{CALL}<|im_end|>", f"{CALL}<|im_end|>"),
        ("open", "<think>\nhm", UNCLOSED),
        ("closed", f"{CALL}<|im_end|>", f"{CALL}<|im_end|>"),
        ("closed", f"hm\n</think>\n\n{CALL}<|im_end|>", f"{CALL}<|im_end|>"),
        ("closed", f"<think>hm</think>{CALL}<|im_end|>", f"{CALL}<|im_end|>"),
        ("closed", "<think>\nhm", UNCLOSED),
        # A closing id after the first call is ignored, whatever the tail.
        ("none", f"{CALL}</think><|im_end|>", AFTER_CALL),
        ("open", f"{CALL}</think>ok<|im_end|>", UNCLOSED),
        ("none", f"<think>{CALL}</think>ok<|im_end|>", UNCLOSED),
        ("none", f"<think>a</think>{CALL}<think>b</think><|im_end|>", AFTER_CALL),
        # A second block.
        ("none", f"<think>a</think><think>b</think>{CALL}<|im_end|>", SECOND),
        ("open", f"a</think>b</think>{CALL}<|im_end|>", SECOND),
        ("none", "The tag `</think>` ends it. Go on.<|im_end|>", QUOTED),
        # Nothing is left to learn.
        ("none", "<think>\nhm\n</think>\n\n<|im_end|>", EMPTY),
        # Text before the block goes with it; blanks after the newlines stay.
        ("none", f"Well. <think>a</think>\n\n  {CALL}<|im_end|>", f"  {CALL}<|im_end|>"),
    ],
)
def test_output_is_kept_cut_or_dropped_as_in_the_table(chat, tail, output, left):
    result = strip_output(ids(output, chat), tail, chat)
    if result.reason is not None:
        assert result.reason == left
        assert text(result.ids, chat) == output, "a dropped row is left as it was"
    else:
        assert text(result.ids, chat) == left and not has_think(result.ids, chat)
        assert result.removed == len(ids(output, chat)) - len(result.ids)


@pytest.mark.parametrize("output", ["Write </think> after it.", '{"name": "run", "parameters": {"x": "</think>"}}'])
def test_tag_in_prose_or_call_of_a_vocabulary_without_tags_never_cuts(output):
    chat = chat_of("llama3_1")
    written = np.asarray(chat.encode(output), dtype=np.int32)
    result = strip_output(written, "none", chat)
    assert result.reason == QUOTED and np.array_equal(result.ids, written)


def test_id_that_joins_a_newline_with_text_stays_whole():
    joined = QWEN.encode("\n\n}")
    assert len(joined) > 1, "the premise: newlines are ids of their own here"
    by_hand = np.asarray([QWEN.think_close_id, *QWEN.encode("\n"), *QWEN.encode("\n\n"), *QWEN.encode(" \n"), 9707])
    assert text(strip_output(by_hand, "open", QWEN).ids, QWEN) == " \nHello"


def without_tags() -> ChatFormat:
    """Return the tiny format with a vocabulary in which think and call tags are no tokens."""
    whole = json.loads(CHAT.tokenizer.backend_tokenizer.to_str())
    whole["added_tokens"] = [token for token in whole["added_tokens"] if token["special"]]
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(json.dumps(whole)), eos_token="<|im_end|>", pad_token="<|endoftext|>"
    )
    return ChatFormat("plain", tokenizer, CHAT.template)


PLAIN = without_tags()


@pytest.mark.parametrize("tail", ["none", "open", "closed"])
@pytest.mark.parametrize(
    "output",
    [
        f"{CALL}<|im_end|>", f"<think>\nhm\n</think>\n\n{CALL}<|im_end|>", f"hm\n</think>\n\n{CALL}<|im_end|>",
        "<think>\nhm", f"<think>hm</think>{CALL}<|im_end|>", f"{CALL}</think><|im_end|>",
        "<think>\nhm\n</think>\n\n<|im_end|>",
        f"<think>a</think><think>b</think>{CALL}<|im_end|>", f"Well. <think>a é</think>\n\n  {CALL}<|im_end|>",
    ],
)  # fmt: skip
def test_vocabulary_without_tags_is_stripped_as_one_with_them(tail, output):
    assert PLAIN.think_open_id is None and PLAIN.tool_open_id is None
    with_tags, without = strip_output(ids(output), tail, CHAT), strip_output(ids(output, PLAIN), tail, PLAIN)
    assert without.reason == with_tags.reason
    assert text(without.ids, PLAIN) == text(with_tags.ids)
    assert text(ids(output, PLAIN)[: without.removed], PLAIN) + text(without.ids, PLAIN) == output
    assert bool(format_tokens(ids(output, PLAIN), PLAIN)) == bool(format_tokens(ids(output), CHAT))
    counts = [
        [f(ids(output, chat).tolist(), chat, tail) > 0 for f in (think.think_tokens, think.post_think_tokens)]
        for chat in (CHAT, PLAIN)
    ]
    assert counts[0] == counts[1]


token = st.one_of(
    st.sampled_from([CHAT.think_open_id, CHAT.think_close_id, CHAT.tool_open_id, CHAT.end_id, *CHAT.encode("\n\n\n")]),
    st.integers(0, CHAT.vocab_size - 1),
)
outputs = st.lists(token, max_size=40).map(lambda result: np.asarray(result, dtype=np.int32))
tails = st.sampled_from(["none", "open", "closed"])


@given(outputs, tails)
def test_kept_ids_are_a_suffix_without_think_ids(output, tail):
    result = strip_output(output, tail, CHAT)
    assert np.array_equal(result.ids, output[result.removed :])
    if result.reason is None:
        assert not has_think(result.ids, CHAT)
        cut = output[: result.removed]
        assert not result.removed or CHAT.think_close_id in cut
        assert CHAT.tool_open_id not in cut, "no call is ever cut"
        assert text(output) == text(cut) + text(result.ids) or "�" in text(output)


@given(outputs, tails)
def test_stripping_twice_is_stripping_once(output, tail):
    once = strip_output(output, tail, CHAT)
    if once.reason is None:
        again = strip_output(once.ids, "closed", CHAT)
        assert again.removed == 0 and again.reason is None and np.array_equal(again.ids, once.ids)


@given(outputs, tails)
def test_agent_loop_strips_the_same_block(output, tail):
    result = strip_output(output, tail, CHAT)
    if result.reason is None:
        assert think.strip_think(output.tolist(), CHAT, tail) == result.ids.tolist()


# --- tails and history -------------------------------------------------------------------------------------------


def test_open_tail_becomes_the_templates_closed_tail():
    plain = np.asarray(QWEN.prompt_ids([USER]), dtype=np.int32)
    opened = np.concatenate([plain, ids("<think>\n", QWEN)])
    closed = QWEN.prompt_ids([USER], enable_thinking=False)
    assert close_tail(opened, QWEN).tolist() == closed
    assert close_tail(plain, QWEN) is plain
    assert close_tail(np.asarray(closed), QWEN).tolist() == closed


def test_template_that_cannot_close_an_open_tail_raises():
    opened = np.concatenate([np.asarray(CHAT.prompt_ids([USER]), dtype=np.int32), ids("<think>\n")])
    with pytest.raises(ValueError, match=r"tiny.*pairs\.strip_think = false"):
        close_tail(opened, CHAT)


def conversation(*turns):
    messages = [USER]
    for output in turns:
        messages += [{"role": "assistant", "content": output}, {"role": "user", "content": "<think>not mine</think>"}]
    return np.asarray(CHAT.prompt_ids(messages), dtype=np.int32)


def test_history_loses_only_its_think_blocks():
    thinking = conversation(f"<think>\nhm\n</think>\n\n{CALL}", f"<think>ha</think>{CALL}", CALL)
    result, removed = strip_history(thinking, CHAT)
    assert text(result) == text(conversation(CALL, CALL, CALL)), "other roles keep their words"
    assert removed == len(thinking) - len(result) > 0
    assert strip_history(result, CHAT)[1] == 0


def test_history_keeps_unclosed_blocks_and_the_templates_empty_block():
    for output in (f"<think>{CALL}", "<think>hm", f"<think>\n\n</think>\n\n{CALL}", f"{CALL}</think>"):
        prompt = conversation(output, CALL)
        result, removed = strip_history(prompt, CHAT)
        assert removed == 0 and np.array_equal(result, prompt)


@pytest.mark.parametrize("name", [*FAMILIES, "smollm2"])
def test_recorded_history_of_any_family_is_stripped_and_what_stays_is_seen(name):
    chat = load_chat_format(str(smollm2())) if name == "smollm2" else chat_of(name)

    def history(said):
        first = without_tail(np.asarray(chat.prompt_ids([USER]), dtype=np.int32), chat)
        later = chat.observation_ids("Write </think>.")
        return np.asarray([*first, *chat.as_history(chat.encode(said)), *later], dtype=np.int32)

    thinking = history("<think>\nhm\n</think>\n\nDone.")
    assert thinks_in_history(thinking, chat)
    result, _ = strip_history(thinking, chat)
    assert result.tolist() == history("Done.").tolist() and not thinks_in_history(result, chat)
    for said, seen in (
        ("<think>\nhm\n</think>\n\nDone.\n<think>\nha\n</think>\nSo.", True), ("<think>\nhm", True),
        ("<think>\n\n</think>\n\nDone.", False), ("The tag `</think>` ends it.", False),
    ):  # fmt: skip
        assert strip_history(history(said), chat)[1] == 0 and thinks_in_history(history(said), chat) is seen


@pytest.mark.parametrize("name", ["mistral_v3", "mistral_v11", "llama3_1", "gpt_oss"])
def test_recorded_history_after_a_tools_result_is_stripped(name):
    chat = chat_of(name)
    call = chat.as_history(chat.turn_ids("", [Call("run", {"x": "</think>"})]))
    first = [*chat.prompt_ids([USER]), *call, *chat.observation_ids("<think>x</think>", "tool", tool="run")]

    def history(text):
        ids = [*first, *chat.as_history(chat.encode(text)), *chat.observation_ids("Go.")]
        return np.asarray(ids, dtype=np.int32)

    result, _ = strip_history(history("<think>\nhm\n</think>\n\nDone."), chat)
    assert result.tolist() == history("Done.").tolist()


def test_generation_prompt_is_not_stripped():
    prompt = np.concatenate([conversation(CALL), ids("<think>\nhm\n</think>\n\nSo: ")])
    assert strip_history(prompt, CHAT)[1] == 0
