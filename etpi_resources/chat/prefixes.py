"""Whether a chat template only ever appends: then one rendering of a conversation holds every prompt of it.

Belongs here: deciding it for conversations of one shape. Does not belong here: ids, or any template's name.

Templates differ: one writes a message once and for all; another takes the thoughts out of earlier messages when a new
question comes. Whether a conversation is written anew depends on its shape: which roles and tags follow one another. So
the template is tried on small conversations of the same shape, in which any message is followed by any other that comes
after it in the conversation, and it is held to append if none is written anew. Trying costs tens of milliseconds a
shape, and a set of trajectories has few shapes.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

ASSISTANT = "<|im_start|>assistant\n"
TURN = "<|im_start|>"

Render = Callable[[list[Any]], str]
"""Messages to text, the generation prompt after them."""

_Kinds = tuple[str, ...]
_Following = frozenset[tuple[str, str]]
_STOOD_IN = "x"

# Shapes that would want more walks count as written anew: trying them would cost more than rendering every prompt.
_MOST_WALKS = 200


def tags(template: str) -> tuple[str, ...]:
    """The tags a template may look for in a text, longest first: its string literals with `<` in them that it compares,
    gives to a method or filter, or names; not those it only writes."""
    from jinja2 import Environment
    from jinja2.nodes import Assign, Call, Compare, Const, Filter, Keyword, Operand

    # Loop controls and generation blocks are what transformers adds to Jinja; marks of a block hold no tags.
    source = re.sub(r"\{%-?\s*(?:end)?generation\s*-?%\}", "", template)
    tree = Environment(extensions=["jinja2.ext.loopcontrols"]).parse(source)
    operands = []
    for node in tree.find_all((Assign, Call, Compare, Filter, Keyword)):
        for child in node.iter_child_nodes():
            operands.append(child.expr if isinstance(child, Operand) else child)
    found = {node.value for node in operands if isinstance(node, Const) and isinstance(node.value, str)}
    pieces = {text.strip() for text in found if "<" in text}
    return tuple(sorted(pieces, key=lambda piece: (-len(piece), piece)))


class Shapes:
    """The shapes of conversations that one template was tried on.

    Args:
        tags: what of a text decides how it is written, besides white space at its ends and around these.
    """

    def __init__(self, tags: Sequence[str]) -> None:
        self._tags = re.compile("(" + "|".join(map(re.escape, tags)) + ")") if tags else None
        self._good: dict[tuple[str, _Kinds, _Kinds], _Following] = {}
        self._bad: set[tuple[str, _Kinds, _Kinds, _Following]] = set()

    def appends(self, messages: Sequence[Mapping[str, Any]], render: Render, setting: str) -> bool:
        """Whether the prompts of every assistant message of the conversation are prefixes of its rendering.

        Args:
            render: the template with its settings; called with small messages of the same kinds.
            setting: tells settings apart, so that what is known of one is not taken for another.
        """
        kinds = [json.dumps(self._kind(message), sort_keys=True, default=str) for message in messages]
        first = next((i for i, m in enumerate(messages) if m.get("role") == "assistant"), len(kinds))
        head, start = tuple(kinds[:first]), tuple(kinds[first : first + 1])
        following = frozenset(zip(kinds[first:], kinds[first + 1 :], strict=False))
        # What holds for a shape holds for every part of it: shapes are joined as long as they hold together.
        place = (setting, head, start)
        good = self._good.get(place)
        if good is not None and following <= good:
            return True
        if (*place, following) in self._bad:
            return False
        for joined in ([good | following] if good else []) + [following]:
            if self._try(head, start, sorted(joined), render):
                self._good[place] = joined
                return True
        self._bad.add((*place, following))
        return False

    def _try(self, head: _Kinds, start: _Kinds, following: Sequence[tuple[str, str]], render: Render) -> bool:
        """Whether any message is written otherwise once any other has come: on a walk from the one to an assistant
        message, whose prompt holds it, to the other and to an assistant message again."""
        texts: dict[tuple[str, ...], str] = {}
        after: dict[str, list[str]] = {}
        for kind, successor in following:
            after.setdefault(kind, []).append(successor)
        kinds = {*start, *(kind for pair in following for kind in pair)}
        if (len(following) + 1) * len(kinds) * sum(map(_speaks, kinds)) > _MOST_WALKS:
            return False
        for walk in _walks([*((kind,) for kind in start), *following], after):
            earlier = None
            for at in (at for at, kind in enumerate(walk) if _speaks(kind)):
                if walk[:at] not in texts:
                    try:
                        texts[walk[:at]] = render([json.loads(kind) for kind in (*head, *walk[:at])])
                    except Exception:  # a template may refuse a conversation; the caller sees it refuse the real one
                        return False
                if not _continues(texts[walk[:at]], earlier):
                    return False
                earlier = texts[walk[:at]]
        return True

    def _kind(self, value: Any) -> Any:
        """The value with its texts stood in for: tags, and white space beside them and at the ends, stay."""
        if isinstance(value, str):
            parts = self._tags.split(value) if self._tags else [value]
            return "".join(part if n % 2 else _stand_in(part) for n, part in enumerate(parts))
        if isinstance(value, Mapping):
            return {key: item if key == "role" else self._kind(item) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [self._kind(item) for item in value]
        return value


def _walks(starts: Sequence[tuple[str, ...]], after: Mapping[str, Sequence[str]]) -> Iterator[tuple[str, ...]]:
    """From each start to every assistant message there is, from there to every kind, and to an assistant message: by
    the shortest ways there are."""
    kinds = sorted(set(after) | {kind for successors in after.values() for kind in successors})
    for start in starts:
        for speaker in filter(_speaks, kinds):
            spoken = _way(start, lambda kind, wanted=speaker: kind == wanted, after)
            if spoken is None:
                continue
            yield spoken
            for wanted in kinds:
                there = _way(spoken, lambda kind, wanted=wanted: kind == wanted, after)
                back = there and _way(there, _speaks, after)
                if back:
                    yield back


def _speaks(kind: str) -> bool:
    return '"role": "assistant"' in kind


def _way(
    walk: tuple[str, ...], wanted: Callable[[str], bool], after: Mapping[str, Sequence[str]]
) -> tuple[str, ...] | None:
    """The walk, at least one message longer, to the nearest wanted kind; None where there is no way."""
    level, seen = [walk], set()
    while level:
        level = [(*way, kind) for way in level for kind in after.get(way[-1], ()) if kind not in seen]
        for way in level:
            if wanted(way[-1]):
                return way
        seen |= {way[-1] for way in level}
    return None


def _continues(text: str, earlier: str | None) -> bool:
    """Whether a prompt begins with an earlier one up to its generation prompt, writes an assistant message there, and
    ends in the same generation prompt."""
    header = text.rfind(TURN)
    if not text.startswith(ASSISTANT, header):
        return False
    if earlier is None:
        return text.count(ASSISTANT) == 1
    at = earlier.rfind(TURN)
    return (
        text.startswith(earlier[:at])
        and text.startswith(ASSISTANT, at)
        and text[header:] == earlier[at:]
        and text.count(ASSISTANT) == earlier.count(ASSISTANT) + 1
    )


def _stand_in(text: str) -> str:
    """One letter for a text, with the kinds of white space at its ends; nothing for nothing."""
    core = text.strip()
    if not core:
        return _kinds_of_space(text)
    start = text.index(core)
    return _kinds_of_space(text[:start]) + _STOOD_IN + _kinds_of_space(text[start + len(core) :])


def _kinds_of_space(text: str) -> str:
    """White space with runs of one character made single: `\\n\\n  ` is `\\n `."""
    return re.sub(r"(.)\1+", r"\1", text, flags=re.DOTALL)
