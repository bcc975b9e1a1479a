"""A grammar of structured thinking: named slots of one line each inside the think block.

It is written as GBNF, vLLM's `structured_outputs`, llguidance's Lark and a regular expression. `engines.masks` masks
logits with it; `etpi_assets.scoring.structure` counts the turns that adhere to it.

The block of the slots STATE, ACTION and EXPECT is

    <think>
    STATE: one line
    ACTION: one line
    EXPECT: one line
    </think>

and the text after it is free. A line is not blank and contains no `<`. Every tag and control token begins with `<`, so
engines that match ids and engines that match text agree on the end of the block, and no tool call is inside it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from etpi_resources.chat.format import ChatFormat
from etpi_resources.chat.marks import THINK, THINK_END, spans

OPENING, CLOSING = f"{THINK}\n", THINK_END
SLOTS = ("STATE", "ACTION", "EXPECT")
MAX_CHARS = 2000
"""The largest bound of a line, llama.cpp's limit for a repetition."""

_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_-]{0,39}")
# Explicit character classes: engines differ in what `\s` matches.
_FIRST, _OTHER = r"[^ \t\r\n<]", r"[^\r\n<]"


@dataclass(frozen=True)
class ThinkGrammar:
    """A think block of named lines.

    Attributes:
        slots: the names, in order.
        bounds: maximum number of characters of each slot's line, without the blank after the colon; None: no bound.
        opened: the part of the opening `<think>\\n` that the prompt already ends with; see `after`.
    """

    slots: tuple[str, ...] = SLOTS
    bounds: tuple[int | None, ...] = (None, None, None)
    opened: str = ""

    @classmethod
    def of(cls, slots: Sequence[str] = SLOTS, max_chars: int | Mapping[str, int] | None = None) -> ThinkGrammar:
        """Return the grammar of these slots; `max_chars` bounds every line, or the lines of the slots that it names.

        Raises:
            ValueError: there are no slots; a name occurs twice or has characters other than ASCII letters, digits, `_`
                and `-`; a bound names an unknown slot or is outside 1 to MAX_CHARS.
        """
        if wrong := [name for name in slots if not _NAME.fullmatch(name)]:
            raise ValueError(f"slot {wrong[0]!r}: a name is a letter and at most 39 ASCII letters, digits, `_` or `-`")
        if not slots or len(set(slots)) < len(slots):
            raise ValueError(f"slots {list(slots)}: name at least one slot, and each slot once")
        named = max_chars if isinstance(max_chars, Mapping) else dict.fromkeys(slots, max_chars)
        if unknown := sorted(set(named) - set(slots)):
            raise ValueError(f"max_chars bounds {', '.join(unknown)}, but the slots are {', '.join(slots)}")
        bounds = tuple(named.get(name) for name in slots)
        if wrong := [bound for bound in bounds if bound is not None and not 1 <= bound <= MAX_CHARS]:
            raise ValueError(f"max_chars = {wrong[0]}: a line has 1 to {MAX_CHARS} characters")
        return cls(tuple(slots), bounds)

    def after(self, prompt_ids: Sequence[int], chat: ChatFormat) -> ThinkGrammar:
        """Return the grammar for the text after a prompt, which may already open the block.

        Raises:
            ValueError: the prompt closes its think block, or does not open it with `<think>` and at most a newline.
        """
        tail = chat.tail_form(prompt_ids)
        if tail == "none":
            return replace(self, opened="")
        if tail == "closed":
            raise ValueError(
                f"chat format {chat.name!r}: its prompts close the think block, so the grammar would constrain "
                "nothing; set enable_thinking = true for the template, or remove the grammar from the agent section"
            )
        start = spans(prompt_ids, THINK, chat)[-1][0]
        opened = chat.decode(prompt_ids[start:])
        if not opened or not OPENING.startswith(opened):
            raise ValueError(f"chat format {chat.name!r}: its prompts end in {opened!r}, expected {OPENING!r}")
        return replace(self, opened=opened)

    @property
    def opening(self) -> str:
        """The part of `<think>\\n` that the model still has to write."""
        return OPENING.removeprefix(self.opened)

    def pattern(self) -> str:
        """Return a regular expression of the block alone, from the end of the prompt through `</think>`."""
        lines = "".join(f"{name}: {_line(bound)}\n" for name, bound in zip(self.slots, self.bounds, strict=True))
        return f"{self.opening}{lines}{CLOSING}"

    def gbnf(self) -> str:
        """Return the block and free text after it as GBNF, for llama.cpp and xgrammar."""
        rules = {bound: f"line-{bound or 'any'}" for bound in self.bounds}
        texts = [f"{self.opening}{self.slots[0]}: ", *(f"\n{name}: " for name in self.slots[1:]), f"\n{CLOSING}"]
        lines = [rules[bound] for bound in self.bounds]
        parts = [part for pair in zip(map(_quoted, texts), [*lines, "rest"], strict=True) for part in pair]
        body = "".join(f"{name} ::= {_line(bound)}\n" for bound, name in rules.items())
        return f'root ::= {" ".join(parts)}\n{body}rest ::= ([^\\n] | "\\n")*\n'

    def structured_outputs(self) -> dict[str, Any]:
        """Return the `structured_outputs` field of a request to vLLM.

        The server must run without a reasoning parser, or with `enable_in_reasoning`: otherwise it applies the grammar
        only after the think block.
        """
        return {"grammar": self.gbnf()}

    def lark(self, *, tokens: bool = True) -> str:
        """Return the block alone as llguidance's Lark.

        Args:
            tokens: the vocabulary has the tags as tokens, which the grammar names; otherwise they are text.
        """
        opening = self.opening
        start = [THINK] if tokens and opening.startswith(THINK) else []
        before = opening.removeprefix(THINK) if tokens else opening
        for number, name in enumerate(self.slots):
            start += [_quoted(f"{before}{name}: "), f"LINE_{number}"]
            before = "\n"
        lines = "".join(f"LINE_{number}: /{_line(bound)}/\n" for number, bound in enumerate(self.bounds))
        closing = f"<{CLOSING[1:-1]}>" if tokens else _quoted(CLOSING)
        return f'start: {" ".join(start)} "\\n" {closing}\n{lines}'


def _line(bound: int | None) -> str:
    if bound == 1:
        return _FIRST
    return f"{_FIRST}{_OTHER}*" if bound is None else f"{_FIRST}{_OTHER}{{0,{bound - 1}}}"


def _quoted(text: str) -> str:
    return '"' + text.replace("\n", "\\n") + '"'
