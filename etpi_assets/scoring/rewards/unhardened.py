"""The terminal rewards as their source words them, kept beside the hardened ones so that the difference can be seen.

Belongs here: the literal readings, hackable as they are. Does not belong here: anything an experiment should train on
unless it means to show what these invite. Tests say what degenerate answers score under both.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from etpi_assets.scoring.rewards.attempt import Attempt
from etpi_assets.scoring.rewards.terminal import KEYWORDS, asked_verbs, request_of, shortness, words_of

PATTERN = re.compile(r"^<thinking>\s*[\s\S]+?\s*</thinking>\s*```bash\n[\s\S]+?\n```$")


def form(attempt: Attempt) -> float:
    """1.0 where the pattern matches, else 0.0. It lets blank thinking, repeated tags and a trailing newline pass."""
    return float(PATTERN.match(words_of(attempt)) is not None)


def relevance(attempt: Attempt, *, keywords: Mapping[str, Sequence[str]] = KEYWORDS) -> float:
    """How many of the verbs that the request asks for stand anywhere in the answer: comments and echo included."""
    text = words_of(attempt)
    return float(sum(re.search(rf"\b{re.escape(v)}\b", text) is not None for v in _asked(attempt, keywords)))


def conciseness(attempt: Attempt, *, free: int = 300, scale: int = 300) -> float:
    """As the hardened one, whatever the form: an empty answer earns all of it."""
    return shortness(words_of(attempt), free, scale)


def _asked(attempt: Attempt, keywords: Mapping[str, Sequence[str]]) -> set[str]:
    return asked_verbs(request_of(attempt), keywords)
