"""Errors for mistyped names: the given name, the nearest names, and all of them if they are few."""

from __future__ import annotations

from collections.abc import Collection

from etpi_assets.specs.plugins import near
from etpi_resources.lake.manifest import LakeError

MOST_LISTED = 30


class UnknownName(LakeError, LookupError):
    """A table, column, partition, report or variable that does not exist; the message names the nearest."""

    @classmethod
    def of(cls, what: str, name: str, known: Collection[str], remedy: str = "") -> UnknownName:
        """Return the error for a name.

        Args:
            what: what kind of name it is, with an article: "a table".
            remedy: a sentence to add.
        """
        listed = ", ".join(sorted(known)[:MOST_LISTED]) + (", ..." if len(known) > MOST_LISTED else "")
        hint = near(str(name), sorted(known))
        return cls(f"{name!r} is not {what}.{hint} There are: {listed or 'none'}.{' ' if remedy else ''}{remedy}")
