"""A structured think block: one definition, and every form of it accepts the same texts."""

from __future__ import annotations

import re

import llguidance
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from etpi_assets.specs.rollout_set import AgentSection, RolloutSetSpec
from etpi_resources.chat.format import load_chat_format
from etpi_resources.chat.grammars import ThinkGrammar
from etpi_resources.engines.masks import GrammarMasks
from tests.support.grammars import GRAMMARS, NAMES, blocks, vocabulary
from tests.support.students import chat_of, smollm2


def accepts(matcher: llguidance.LLMatcher, ids: list[int]) -> bool:
    return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()


class Bytes:
    """A vocabulary of the 256 bytes and an end: what a form says of text, whatever the pieces."""

    eos_token_id, bos_token_id = 256, None
    tokens = [bytes([byte]) for byte in range(256)] + [b"<|end|>"]
    special_token_ids = (256,)

    def __call__(self, text: str) -> list[int]:
        return list(text.encode())


BYTES = llguidance.LLTokenizer(llguidance.TokenizerWrapper(Bytes()))


@pytest.mark.parametrize("grammar", GRAMMARS, ids=lambda g: f"{len(g.slots)}-{g.bounds[0]}-{g.opened!r}")
@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_every_form_takes_the_same_texts(name: str, grammar: ThinkGrammar, data: st.DataObject) -> None:
    chat = load_chat_format(name)
    text = data.draw(blocks(grammar))
    wanted = re.fullmatch(grammar.pattern(), chat.decode(chat.encode(text))) is not None
    by_ids = llguidance.LLMatcher(vocabulary(name), llguidance.LLMatcher.grammar_from_lark(grammar.lark()), log_level=0)
    assert accepts(by_ids, chat.encode(text)) is wanted
    tags_as_text = llguidance.LLMatcher.grammar_from_lark(grammar.lark(tokens=False))
    by_bytes = llguidance.LLMatcher(BYTES, tags_as_text, log_level=0)
    assert accepts(by_bytes, list(text.encode())) is (re.fullmatch(grammar.pattern(), text) is not None)
    # The text form: the block, and anything at all behind it.
    rest = data.draw(st.sampled_from(["", "\n\n<tool_call>\nls\n</tool_call>", "</think>\n\n\n", "é\r\n<"]))
    by_text = llguidance.LLMatcher(BYTES, llguidance.grammar_from("grammar", grammar.gbnf()), log_level=0)
    assert accepts(by_text, list((text + rest).encode())) is (
        re.fullmatch(grammar.pattern() + r"[\s\S]*", text + rest) is not None
    )


@pytest.mark.parametrize("name", ["llama3_1", "smollm2"])
def test_vocabulary_without_think_tokens_is_masked(name: str) -> None:
    chat = load_chat_format(str(smollm2())) if name == "smollm2" else chat_of(name)
    masks, block = GrammarMasks(chat), "<think>\nSTATE: a\nACTION: b\nEXPECT: c\n</think>"
    state = masks.start(ThinkGrammar.of())
    for token in chat.encode(block):
        logits = torch.zeros(1, chat.vocab_size)
        masks.apply([state], logits)
        assert logits[0, token] == 0 and not state.finished
        assert torch.isinf(logits[0, chat.end_id]), "a turn cannot end within the block"
        state.consume(token)
    assert state.finished
    outside = chat.encode("STATE")[0]
    with pytest.raises(RuntimeError, match=f"token {outside} "):
        masks.start(ThinkGrammar.of()).consume(outside)


def test_the_block_of_the_reference_is_one() -> None:
    text = "<think>\nSTATE: tests fail in a.py\nACTION: read it, to see why\nEXPECT: a bug\n</think>"
    assert re.fullmatch(ThinkGrammar.of().pattern(), text)
    assert not re.fullmatch(ThinkGrammar.of(max_chars=10).pattern(), text)
    assert not re.fullmatch(ThinkGrammar.of(("STATE", "ACTION")).pattern(), text)


@pytest.mark.parametrize("name", NAMES)
def test_grammar_begins_at_end_of_prompt(name: str) -> None:
    chat, grammar = load_chat_format(name), ThinkGrammar.of()
    plain = chat.prompt_ids([{"role": "user", "content": "<think>\nnot the tail"}])
    assert grammar.after(plain, chat).opening == "<think>\n"
    assert grammar.after([*plain, *chat.encode("<think>\n")], chat).opening == ""
    assert grammar.after([*plain, *chat.encode("<think>")], chat).opening == "\n"
    with pytest.raises(ValueError, match="enable_thinking = true"):
        grammar.after([*plain, *chat.encode("<think>\n\n</think>\n\n")], chat)
    with pytest.raises(ValueError, match=re.escape(r"'<think>\nSo:'")):
        grammar.after([*plain, *chat.encode("<think>\nSo:")], chat)


@pytest.mark.parametrize(
    ("slots", "bound", "words"),
    [
        ((), None, r"slots \[\]"),
        (("A", "A"), None, r"slots \['A', 'A'\]"),
        (("A b",), None, "slot 'A b'"),
        (("A",), {"B": 3}, "bounds B"),
        (("A",), 0, "1 to 2000"),
    ],
)
def test_invalid_grammar_is_rejected(slots: tuple[str, ...], bound: int | dict[str, int] | None, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        ThinkGrammar.of(slots, bound)


def test_agent_section_sets_the_grammar() -> None:
    asked = AgentSection.model_validate({"grammar": {"slots": ["PLAN"], "max_chars": 80}})
    assert asked.grammar and asked.grammar.grammar() == ThinkGrammar.of(("PLAN",), 80)
    assert AgentSection.model_validate(asked.model_dump(mode="json")) == asked
    # A knob that is off leaves what identifies a rollout as it was.
    off = AgentSection.model_validate({"grammar": "none"})
    assert off == AgentSection() and "grammar" not in off.identity()
    assert asked.identity()["grammar"] == {"slots": ["PLAN"], "max_chars": 80}
    with pytest.raises(ValueError, match="max_chars .*STEP.*STATE, ACTION, EXPECT"):
        AgentSection.model_validate({"grammar": {"max_chars": {"STEP": 1}}})
    scripted = {"title": "x", "kind": "live", "suite": "s", "engine": {"kind": "scripted", "teacher": "t"}}
    with pytest.raises(ValueError, match=r"agent\.grammar"):
        RolloutSetSpec.model_validate({**scripted, "agent": {"grammar": {}}})


def test_vllm_gets_the_text_form() -> None:
    assert ThinkGrammar.of().structured_outputs() == {"grammar": ThinkGrammar.of().gbnf()}
