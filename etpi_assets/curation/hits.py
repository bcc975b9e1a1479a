"""Hooks for the faults that checks find: every check counts them, and a caller may take each."""

from __future__ import annotations

from typing import Protocol


class OnHit(Protocol):
    """Takes a fault: its place (`rollout/agent/turn`, or a beginning of it), its kind, a detail, and where it is.

    `mark` is the number of an id of the conversation, or a text within it.
    """

    def __call__(self, place: str, kind: str, detail: str, mark: int | str | None = None) -> None: ...


def ignore(place: str, kind: str, detail: str, mark: int | str | None = None) -> None:
    """Take nothing."""
