"""Find markers such as `<think>`: in token ids by token or text, and in a message by its structure.

In a vocabulary with a token for a marker, that id is the marker. In any other (Llama, Mistral, SmolLM2) the marker is
plain text, whose ends are mapped to token boundaries. Recorded ids have no other structure. A message has more: its
thoughts are at its beginning, and a tag that its prose or code quotes is text.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from etpi_resources.chat.format import ChatFormat

THINK, THINK_END, CALL, CALL_END = "<think>", "</think>", "<tool_call>", "</tool_call>"
Span = tuple[int, int]
_OTHER_TAGS = (
    ("<thinking>", "</thinking>"),
    ("<thought>", "</thought>"),
    ("[THINK]", "[/THINK]"),
    ("<|begin_of_thought|>", "<|end_of_thought|>"),
    ("◁think▷", "◁/think▷"),
)
"""Tags of thoughts in messages that other models wrote. `<reasoning>` is left, since tasks ask for it as a form."""
_CODE = re.compile(
    r"^[ \t]*(```|~~~).*?(?:^[ \t]*\1[^\n]*$|\Z)|(?<!`)(`++)[^\n]{0,4000}?(?<!`)\2(?!`)", re.MULTILINE | re.DOTALL
)
EMPTY_BLOCK = re.compile(rf"\A\s*{THINK}\s*{THINK_END}[\r\n]*")
"""A block without thoughts at the beginning, with the line breaks after it, as some templates add it to every turn."""
_FIRST_LINE = re.compile(rf"^[ \t]*{THINK}", re.MULTILINE)
_LAST_LINE = re.compile(rf"^[ \t]*{THINK_END}[ \t]*(?:\r?\n|\Z|{CALL})", re.MULTILINE)


class Thought(NamedTuple):
    """The text of an assistant message.

    Attributes:
        inside: its thoughts without tags; None if it has none.
        rest: the text after them, without the line breaks between.
        opened: whether the text opens a block that it does not close.
        again: whether `rest` has a further block.
    """

    inside: str | None
    rest: str
    opened: bool = False
    again: bool = False


def split_thought(content: str, separate: str | None = None) -> Thought:
    """Split the text of a message into its thoughts and the rest.

    Thoughts are a block at the beginning, in any known spelling, or the text before a `</think>` on a separate
    line, because a prompt may have opened the block. Tags in code, within a line of prose, or after a call are text. If
    the message's thoughts are recorded separately, a block whose last line goes on is text too.

    Args:
        separate: the message's thoughts, if they are recorded separately from its text.
    """
    if THINK not in content and THINK_END not in content:
        other = other_block(content)
        if other is None or (separate and separate.strip() != other[0].strip()):
            return Thought(separate or None, content)
        return Thought(other[0].strip("\r\n") or None, other[1].lstrip("\r\n"))
    start = len(content) - len(content.lstrip())
    if content.startswith(THINK, start):
        end = without_code(content).find(THINK_END, start)  # thoughts may quote the tag
        end = content.find(THINK_END, start) if end < 0 else end
        if end < 0:
            return Thought(separate or None, content, opened=True)
        inside, rest = content[start + len(THINK) : end], content[end + len(THINK_END) :]
        if separate and separate.strip() != inside.strip() and rest.partition("\n")[0].strip():
            return Thought(separate, content)
    else:
        masked = without_code(content)
        close = _LAST_LINE.search(masked)
        call = masked.find(CALL)
        if separate or close is None or 0 <= call < close.start() or THINK in masked[: close.start()]:
            return Thought(separate or None, content, again=not separate and _has_block(content))
        at = masked.index(THINK_END, close.start())
        inside, rest = content[:at], content[at + len(THINK_END) :]
    inside = inside.strip("\r\n")
    if separate and separate.strip() != inside.strip():
        inside = f"{separate}\n{inside}"
    return Thought(inside if inside.strip() else None, rest.lstrip("\r\n"), again=not separate and _has_block(rest))


def other_tags(text: str) -> tuple[str, str] | None:
    """Return the tags of a think block in another spelling at the beginning of a text; else None."""
    return next((tags for tags in _OTHER_TAGS if text.lstrip().startswith(tags[0]) and tags[1] in text), None)


def other_block(text: str) -> tuple[str, str] | None:
    """Return the inside of a think block in another spelling at the beginning of a text, and the rest; else None."""
    if (tags := other_tags(text)) is None:
        return None
    inside, _, rest = text.lstrip().removeprefix(tags[0]).partition(tags[1])
    return inside, rest


def think_block(thought: str) -> str:
    """Return thoughts as a block of text, for templates that have no other place for them."""
    return f"{THINK}\n{thought}\n{THINK_END}\n\n"


def without_code(content: str) -> str:
    """Return the text with blanks in place of fenced and inline code, so that positions stay."""
    return (
        _CODE.sub(lambda match: re.sub(r"[^\n]", " ", match[0]), content)
        if "`" in content or "~~~" in content
        else content
    )


def _has_block(text: str) -> bool:
    """Return whether the text has a block that begins a line, or ends on a line of its own, outside code."""
    if THINK not in text and THINK_END not in text:
        return False
    plain = without_code(text)
    opening = _FIRST_LINE.search(plain)
    closed = opening is not None and THINK_END in plain[opening.end() :]
    return closed or _LAST_LINE.search(plain) is not None


def spans(ids: Sequence[int] | np.ndarray, marker: str, chat: ChatFormat) -> list[Span]:
    """Return the [start, end) positions of a marker in the ids, in order.

    Where the marker's text begins or ends inside an id, the span has the whole id.
    """
    token = chat.inline_id(marker)
    if token is not None:
        return [(at, at + 1) for at in np.flatnonzero(np.asarray(ids) == token).tolist()]
    numbers = [int(number) for number in ids]
    text = chat.decode(numbers)
    places = [match.start() for match in re.finditer(re.escape(marker), text)]
    return [
        (_ids_before(numbers, at, chat, whole=False), _ids_before(numbers, at + len(marker), chat)) for at in places
    ]


def contains(ids: Sequence[int] | np.ndarray, markers: Sequence[str], chat: ChatFormat) -> bool:
    """Return whether one of the markers is among the ids."""
    tokens = [chat.inline_id(marker) for marker in markers]
    numbers = [token for token in tokens if token is not None]
    if len(numbers) == len(tokens):
        among = np.asarray(ids)
        return any((among == number).any() for number in numbers)
    text = chat.decode([int(number) for number in ids])
    return any(marker in text for marker in markers)


def _ids_before(ids: Sequence[int], end: int, chat: ChatFormat, *, whole: bool = True) -> int:
    """Return how many ids have the first `end` characters of the text.

    Args:
        whole: count an id that has character `end - 1` and more; otherwise leave it out.
    """
    low, high = 0, len(ids)
    while low < high:
        middle = (low + high) // 2
        if len(chat.decode(ids[:middle])) < end:
            low = middle + 1
        else:
            high = middle
    return low if whole or low == 0 or len(chat.decode(ids[:low])) == end else low - 1
