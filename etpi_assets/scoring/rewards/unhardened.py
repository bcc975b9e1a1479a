"""The terminal rewards exactly as their source states them, for comparison with the hardened ones (`terminal`).

They can be hacked. Train on them only to show that; tests/test_rewards.py lists what degenerate answers score.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from etpi_assets.scoring.rewards.attempt import Attempt
from etpi_assets.scoring.rewards.terminal import KEYWORDS, request_of, requested_verbs, shortness, text_of

PATTERN = re.compile(r"^<thinking>\s*[\s\S]+?\s*</thinking>\s*```bash\n[\s\S]+?\n```$")


def form(attempt: Attempt) -> float:
    """Return 1.0 if the pattern matches, else 0.0. Blank thinking, repeated tags and a trailing newline pass."""
    return float(PATTERN.match(text_of(attempt)) is not None)


def relevance(attempt: Attempt, *, keywords: Mapping[str, Sequence[str]] = KEYWORDS) -> float:
    """Count the requested verbs that occur anywhere in the answer, comments and echo included."""
    text = text_of(attempt)
    return float(sum(re.search(rf"\b{re.escape(v)}\b", text) is not None for v in _requested(attempt, keywords)))


def conciseness(attempt: Attempt, *, free: int = 300, scale: int = 300) -> float:
    """Score as the hardened function does, without the contract: an empty answer earns 1.0."""
    return shortness(text_of(attempt), free, scale)


def _requested(attempt: Attempt, keywords: Mapping[str, Sequence[str]]) -> set[str]:
    return requested_verbs(request_of(attempt), keywords)
