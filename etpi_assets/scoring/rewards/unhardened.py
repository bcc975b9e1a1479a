"""The terminal rewards exactly as their source states them, for comparison with the hardened ones (`terminal`).

They can be hacked. Train on them only to show that; tests/scoring/test_rewards.py lists what degenerate answers score.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from etpi_assets.scoring.rewards.attempt import Attempt
from etpi_assets.scoring.rewards.terminal import KEYWORDS, request_of, requested_verbs, shortness, text_of

_MIDDLE = re.compile(r"</thinking>\s*```bash\n")


def form(attempt: Attempt) -> float:
    r"""Return 1.0 if `^<thinking>\s*[\s\S]+?\s*</thinking>\s*```bash\n[\s\S]+?\n```$` matches, else 0.0.

    Blank thinking, repeated tags and a trailing newline pass. The parts are sought one by one, since the pattern itself
    takes time that grows with the cube of blanks.
    """
    text = text_of(attempt).removesuffix("\n")
    middle = _MIDDLE.search(text, len("<thinking>") + 1)
    closed = middle is not None and text.endswith("\n```") and len(text) - len("\n```") > middle.end()
    return float(closed and text.startswith("<thinking>"))


def relevance(attempt: Attempt, *, keywords: Mapping[str, Sequence[str]] = KEYWORDS) -> float:
    """Count the requested verbs that occur anywhere in the answer, comments and echo included."""
    text, verbs = text_of(attempt), requested_verbs(request_of(attempt), keywords)
    return float(sum(re.search(rf"\b{re.escape(verb)}\b", text) is not None for verb in verbs))


def conciseness(attempt: Attempt, *, free: int = 300, scale: int = 300) -> float:
    """Score as the hardened function does, without the contract: an empty answer earns 1.0."""
    return shortness(text_of(attempt), free, scale)
