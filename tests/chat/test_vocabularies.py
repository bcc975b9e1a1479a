"""Ids under the rules of real vocabularies about blanks, prefixes and control tokens: those of transformers alone."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest

from etpi_assets.curation.retokenise import retokenise
from etpi_resources.chat.format import ChatFormat, TemplateRefuses, load_chat_format
from etpi_resources.chat.report import report
from tests.support.vocabularies import VOCABULARIES, chat_of, tokenizer

TALK = ["Hi", "Hi, look", "  look \n", "\nlook\n\n", "look", "    look:\n  Hi", "é", "Hi"]


def rows(texts: list[str]) -> list[dict[str, Any]]:
    """Return the rows of a conversation whose texts are the user's and the assistant's in turn."""
    roles = itertools.cycle([("user", "observation"), ("assistant", "action")])
    return [
        {"role": role, "content": text, "kind": kind, "turn": index // 2}
        for index, ((role, kind), text) in enumerate(zip(roles, texts, strict=False))
    ]


def ids(name: str, texts: list[str], *, prompt: bool) -> list[int]:
    """Return the ids as a caller of transformers gets them."""
    messages = [{"role": row["role"], "content": row["content"]} for row in rows(texts)]
    return tokenizer(name).apply_chat_template(messages, add_generation_prompt=prompt, return_dict=False)


@pytest.mark.parametrize("name", VOCABULARIES)
def test_prompts_and_labels_are_the_ids_of_the_whole_conversation(name: str) -> None:
    turns = retokenise(rows(TALK), chat_of(name))
    for number, turn in enumerate(turns):
        before = TALK[: 2 * number + 1]
        assert turn.prompt_ids == ids(name, before, prompt=True)
        whole = ids(name, [*before, TALK[2 * number + 1]], prompt=False)
        trained = [*turn.prompt_ids, *turn.output_ids]
        assert trained == whole[: len(trained)]
        after = chat_of(name).decode(whole[len(trained) :], skip_special=name == "phi3")
        assert not after.strip(), "the label has everything through the end of the turn"


@pytest.mark.parametrize("name", VOCABULARIES)
def test_appended_observation_is_the_conversation_rendered_again(name: str) -> None:
    chat = chat_of(name)
    (turn,) = retokenise(rows(["Hi", "look"]), chat)
    appended = [*turn.prompt_ids, *chat.as_history(turn.output_ids), *chat.observation_ids(" look \n")]
    assert appended == ids(name, ["Hi", "look", " look \n"], prompt=True)


@pytest.mark.parametrize("name", VOCABULARIES)
def test_token_around_messages_is_text_within_one(name: str) -> None:
    chat = chat_of(name)
    written = [
        token for token in chat.tokenizer.get_added_vocab() if token in chat.template or token == chat.markers.end
    ]
    for token in written:
        number = chat.tokenizer.get_added_vocab()[token]
        plain, quoting = (chat.prompt_ids([{"role": "user", "content": text}]) for text in ("Hi", f"Hi {token} look"))
        assert plain.count(number) == quoting.count(number), token
        assert token in chat.decode(quoting)


def test_format_of_chatml_needs_no_token_that_pads(tmp_path: Path) -> None:
    tokenizer("chatml_with_prefix").save_pretrained(tmp_path)
    chat = load_chat_format(str(tmp_path))
    assert chat.chatml
    assert chat.pad_id == chat.end_id
    assert len(chat.tokenizer) == len(tokenizer("chatml_with_prefix")), (
        "no token is added that the model has no row for"
    )


def test_template_with_other_tokens_of_that_spelling_is_no_chatml() -> None:
    assert chat_of("phi4").markers.header == "<|im_start|>assistant<|im_sep|>"
    assert chat_of("kimi").markers.header == "<|im_assistant|>assistant<|im_middle|>"


def test_template_that_fails_in_python_is_reported() -> None:
    template = "{% for tool in tools %}{{ tool }}{% endfor %}" + VOCABULARIES["chatml_with_prefix"].template
    chat = ChatFormat("fails", tokenizer("chatml_with_prefix"), template)
    with pytest.raises(TemplateRefuses, match="TypeError"):
        chat.prompt_ids([{"role": "user", "content": "Hi"}])
    assert "TypeError" in report(chat)[0].problem
