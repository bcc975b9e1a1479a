"""Prompt ids, labels and appended observations of each template family, and calls read back."""

from __future__ import annotations

import itertools
from typing import Any

from etpi_assets.curation.retokenise import retokenise
from etpi_resources.chat.format import ChatFormat, load_chat_format
from etpi_resources.chat.tool_forms import FORMS, Call
from tests.goldens.golden import case
from tests.support import students, vocabularies

TOOL = {
    "type": "function",
    "function": {
        "name": "bash",
        "description": "Run.",
        "parameters": {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]},
    },
}
TALK = ("Hi", "Hi, look", "  look \n", "\nlook\n\n", "look", "    look:\n  Hi", "é", "Hi")
CALL = Call("bash", {"command": "cat a.py <<'E'\n</s> <|im_end|> \"x\"\nE"})


def talk(chat: ChatFormat) -> dict[str, Any]:
    """Return prompts and labels of a conversation of texts, and what the format read off its template."""
    sides = itertools.cycle([("user", "observation"), ("assistant", "action")])
    rows = [
        {"role": role, "content": text, "kind": kind, "turn": number // 2}
        for number, ((role, kind), text) in enumerate(zip(sides, TALK, strict=False))
    ]
    turns = retokenise(rows, chat)
    return {
        "prompts": [turn.prompt_ids for turn in turns],
        "labels": [turn.output_ids for turn in turns],
        "appended": chat.observation_ids(" look \n"),
        "history": chat.as_history(turns[0].output_ids),
        "ends": sorted(chat.end_ids),
        "tail": chat.tail_form(turns[0].prompt_ids),
    }


def calling(chat: ChatFormat) -> dict[str, Any]:
    """Return a prompt with tools, the label of a call, its result, and the call read back."""
    if chat.tool_form is None:
        return {}
    label = chat.ended(chat.turn_ids("I look.", [CALL], tools=[TOOL]))
    return {
        "form": chat.tool_form.name,
        "prompt": chat.prompt_ids(
            [{"role": "system", "content": "Fix bugs."}, {"role": "user", "content": "Go."}], tools=[TOOL]
        ),
        "label": label,
        "result": chat.observation_ids("a.py", "tool", tool="bash"),
        "read": [str(call) for call in chat.tool_form.parse(chat.decode(chat.without_end(label)))],
    }


for vocabulary in vocabularies.VOCABULARIES:

    @case("chat", f"vocabulary {vocabulary}")
    def _(name: str = vocabulary) -> dict[str, Any]:
        return talk(vocabularies.chat_of(name))


for family in sorted(students.FAMILIES.keys() - students.OF_CONSUMERS):

    @case("chat", f"template {family}")
    def _(name: str = family) -> dict[str, Any]:
        chat = students.chat_of(name)
        return {**talk(chat), **calling(chat)}


@case("chat", "tiny")
def tiny() -> dict[str, Any]:
    chat = load_chat_format("tiny")
    return {**talk(chat), "vocabulary": chat.vocabulary_hash, "template": chat.template}


@case("chat", "forms")
def forms() -> dict[str, Any]:
    """What each form of calls writes, and what it reads of calls with faults."""
    calls = [Call("bash", {"command": "ls -a\necho é"}), Call("bash", {"command": "pwd"})]
    more = Call("edit", {"path": "a.py", "line": 3, "all": True, "text": "é\n"})
    result = {}
    for name, form in FORMS.items():
        text = form.render(calls)
        faulty = [
            text[:-12],
            text.replace('"', "'", 1),
            f"I look. {text} Done.",
            text + text,
            text.replace("bash", "", 1),
        ]
        read = [[str(call) for call in form.parse(each)] for each in (text, *faulty)]
        try:
            typed: str | None = form.render([more])
        except ValueError:
            typed = None
        result[name] = {
            "text": text,
            "read": read,
            "typed": typed,
            "again": typed and list(map(str, form.parse(typed))),
        }
    return result
