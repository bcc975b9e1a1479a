"""Test whether a chat template is append-only: whether one rendering of a conversation contains all its prompts.

Some templates never change an earlier message; others remove the thoughts of earlier messages at the next user message.
The result depends on the shape of the conversation, that is on the roles and tags that follow one another. So the
template renders small conversations of the same shape, which contain every pair of successive messages of the real one.
If no earlier message changes, the template counts as append-only for this shape. A test takes tens of milliseconds per
shape, and a set of trajectories has few shapes.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

Render = Callable[[list[Any]], str]
"""Messages -> text, with the generation prompt after them."""

_Kinds = tuple[str, ...]
_Following = frozenset[tuple[str, str]]
_PLACEHOLDER = "x"

# A shape with more walks counts as not append-only, because testing it would cost more than rendering every prompt.
_MOST_WALKS = 200


def tags(template: str) -> tuple[str, ...]:
    """Return the tags that a template may search for in a text, longest first.

    These are the string literals with `<` that it compares, assigns, or passes to a method or filter. Literals that it
    only writes are not among them.
    """
    from jinja2 import Environment
    from jinja2.nodes import Assign, Call, Compare, Const, Filter, Keyword, Operand

    # transformers adds loop controls and generation blocks to Jinja; the delimiters of a block contain no tags.
    source = re.sub(r"\{%-?\s*(?:end)?generation\s*-?%\}", "", template)
    tree = Environment(extensions=["jinja2.ext.loopcontrols"]).parse(source)
    operands = []
    for node in tree.find_all((Assign, Call, Compare, Filter, Keyword)):
        for child in node.iter_child_nodes():
            operands.append(child.expr if isinstance(child, Operand) else child)
    literals = {node.value for node in operands if isinstance(node, Const) and isinstance(node.value, str)}
    pieces = {text.strip() for text in literals if "<" in text}
    return tuple(sorted(pieces, key=lambda piece: (-len(piece), piece)))


class AppendOnlyProbe:
    """Test whether a template is append-only, and cache the result for each shape of conversation.

    Args:
        tags: the parts of a text that the template may react to. White space at the ends of a text and around tags
            counts too.
        header: the text before an assistant's text. turn: the control token that it begins with.
    """

    def __init__(self, tags: Sequence[str], header: str, turn: str) -> None:
        self._header, self._turn = header, turn
        self._tags = re.compile("(" + "|".join(map(re.escape, tags)) + ")") if tags else None
        self._good: dict[tuple[str, _Kinds, _Kinds], _Following] = {}
        self._bad: set[tuple[str, _Kinds, _Kinds, _Following]] = set()

    def appends(self, messages: Sequence[Mapping[str, Any]], render: Render, setting: str) -> bool:
        """Return whether the prompts of every assistant message are prefixes of the conversation's rendering.

        Args:
            render: the template with its settings. It is called with small messages of the same kinds.
            setting: identifies these settings; results are cached per setting.
        """
        kinds = [json.dumps(self._kind(message), sort_keys=True, default=str) for message in messages]
        first = next((i for i, m in enumerate(messages) if m.get("role") == "assistant"), len(kinds))
        head, start = tuple(kinds[:first]), tuple(kinds[first : first + 1])
        following = frozenset(zip(kinds[first:], kinds[first + 1 :], strict=False))
        # A shape that passes covers all its parts, so passing shapes are joined as long as the joined shape passes too.
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
        """Return whether no message changes when a later one is added.

        Each walk leads from a message to an assistant message, whose prompt contains it, then over another message to
        an assistant message again.
        """
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
                    except Exception:  # the caller gets the error when it renders the real conversation
                        return False
                if not self._continues(texts[walk[:at]], earlier):
                    return False
                earlier = texts[walk[:at]]
        return True

    def _continues(self, text: str, earlier: str | None) -> bool:
        """Return whether a prompt extends an earlier one.

        It has to begin with the earlier one up to its generation prompt, have an assistant message there, and
        end in the same generation prompt.
        """
        header = text.rfind(self._turn)
        if not text.startswith(self._header, header):
            return False
        if earlier is None:
            return text.count(self._header) == 1
        at = earlier.rfind(self._turn)
        return (
            text.startswith(earlier[:at])
            and text.startswith(self._header, at)
            and text[header:] == earlier[at:]
            and text.count(self._header) == earlier.count(self._header) + 1
        )

    def _kind(self, value: Any) -> Any:
        """Return the value with a placeholder for each text; tags and white space next to tags and ends are kept."""
        if isinstance(value, str):
            parts = self._tags.split(value) if self._tags else [value]
            return "".join(part if n % 2 else _stand_in(part) for n, part in enumerate(parts))
        if isinstance(value, Mapping):
            return {key: item if key == "role" else self._kind(item) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [self._kind(item) for item in value]
        return value


def _walks(starts: Sequence[tuple[str, ...]], after: Mapping[str, Sequence[str]]) -> Iterator[tuple[str, ...]]:
    """Yield the shortest walks from each start to each assistant message, and on over each kind to the next one."""
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
    """Return the walk, extended by the fewest messages (at least one) to a wanted kind; None if there is no way."""
    level, seen = [walk], set()
    while level:
        level = [(*way, kind) for way in level for kind in after.get(way[-1], ()) if kind not in seen]
        for way in level:
            if wanted(way[-1]):
                return way
        seen |= {way[-1] for way in level}
    return None


def _stand_in(text: str) -> str:
    """Return a letter in place of a text, between the kinds of white space at its ends; \"\" for an empty text."""
    core = text.strip()
    if not core:
        return _kinds_of_space(text)
    start = text.index(core)
    return _kinds_of_space(text[:start]) + _PLACEHOLDER + _kinds_of_space(text[start + len(core) :])


def _kinds_of_space(text: str) -> str:
    """Return white space with each run of the same character shortened to one: `\\n\\n  ` becomes `\\n `."""
    return re.sub(r"(.)\1+", r"\1", text, flags=re.DOTALL)
