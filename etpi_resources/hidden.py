"""Characters of a text that a page does not show, or that change how it reads."""

from __future__ import annotations

import re

_HIDDEN = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069]")
"""Control characters, which a browser drops, and those that reorder text: code could read other than it runs."""


def with_hidden(text: str) -> str:
    """Return a text with hidden characters as ⟨U+202E⟩."""
    return _HIDDEN.sub(lambda match: f"⟨U+{ord(match[0]):04X}⟩", text) if _HIDDEN.search(text) else text
