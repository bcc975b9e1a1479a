"""The reasons for which curation drops rollouts and turns, each with the spec key that keeps them."""

from __future__ import annotations

from collections.abc import Mapping

_KEYS = {
    "no_reward": 'select.min_reward = "none"',
    "low_reward": "select.min_reward",
    "excluded_repo": "select.exclude_repos",
    "duplicate": 'select.duplicates = "keep"',
    "part_of_another": 'select.duplicates = "keep"',
    "repeated_turn": 'select.duplicates = "keep"',
    "exit_error": 'select.exit = "any"',
    "exit_limit": 'select.exit = "any"',
    "exit_other": 'select.exit = "any"',
    "not_correct": "select.shortest_correct = false",
    "not_the_shortest": "select.shortest_correct = false",
    "over_max_rollouts": "select.max_rollouts",
    "not_captured": "pairs.capture",
    "unparseable": "pairs.drop_unparseable = false",
    "truncated": "pairs.drop_truncated = false",
    "over_max_length": "dataset.max_length",
    "heldout_repo": "dataset.heldout_repos",
}
"""Reason -> the key that would keep the dropped rows, with its value if only one does."""


def keeping(reason: str) -> str | None:
    """Return the key that would keep rows dropped for a reason; None if none does."""
    return _KEYS.get(reason) or ("select.require" if reason.startswith("no_") else None)


def listed_with_keys(reasons: Mapping[str, int]) -> str:
    """Return counts of reasons, most first, as words: "unparseable 4 (pairs.drop_unparseable = false keeps them)"."""
    words = []
    for reason, count in sorted(reasons.items(), key=lambda item: -item[1]):
        key = keeping(reason)
        key = f"another {key}" if key and "=" not in key else key
        words.append(f"{reason} {count}" + (f" ({key} keeps {'them' if count > 1 else 'it'})" if key else ""))
    return ", ".join(words) or "none"
