"""Replace arbitrary values of nested JSON, for fuzzing importers."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

JUNK = st.one_of(
    st.none(), st.booleans(), st.integers(-(2**70), 2**70), st.floats(), st.text(max_size=8), st.just([]), st.just({}),
    st.just([{}]), st.just({"function": None}), st.lists(st.integers(), max_size=2),
)  # fmt: skip


def places(value: Any, at: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Return the path of every value within nested dicts and lists."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [at] + [place for key, item in inner for place in places(item, (*at, key))]


def replaced(value: Any, at: tuple[Any, ...], new: Any) -> Any:
    """Return a copy with the value at that path replaced."""
    if not at:
        return new
    copy = dict(value) if isinstance(value, dict) else list(value)
    copy[at[0]] = replaced(value[at[0]], at[1:], new)
    return copy
