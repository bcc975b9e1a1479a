"""Count what no path of a format reads: columns, and keys of messages and calls, and what their values look like.

Only evidence is counted, so counts of parts of an import add up.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from etpi_assets.importers.spec import Unread
from etpi_assets.trajectories.records import exit_kind

_NAMED = {
    "loss": re.compile(r"(^|_)(train|training|trainable|trained|loss|mask|masked|weight|learn|ignore)(_|$)", re.I),
    "verdict": re.compile(r"reward|score|pass|resolv|success|correct|verif|grade|result|outcome|solved|fail", re.I),
    "system": re.compile(r"system|instruction|persona|preamble|developer", re.I),
    "media": re.compile(r"image|video|audio|picture|media|screenshot", re.I),
    "exit": re.compile(r"(^|_)(exit|stop|end|ended|finish|terminat\w*|state|status)(_|$)", re.I),
}
"""Kind of a key -> words of its name."""
_MEDIA = re.compile(r"data:(?:image|video|audio)/|\S+\.(?:png|jpe?g|webp|gif|mp4|wav|mp3)(?:[?#]\S*)?\Z", re.I)
_CODED = re.compile(r"diff --git|--- a/|[A-Za-z0-9+/=_-]{32,}\Z|<\|")
_SYSTEM = re.compile(r"\s*(?:You are|You're|Your task|# ?(?:Role|Instructions)|Act as)\b", re.I)
_TRUE, _FALSE = ("1", "true", "1.0", "yes"), ("0", "false", "0.0", "no")
_VERDICTS = frozenset(("pass", "passed", "fail", "failed", "correct", "incorrect", "success", "failure", "resolved"))
_REWARDED = "read reward"
"""The figure that counts rows whose reward was read; it is no finding."""
_WORDS, _STATUS = 3, 100
"""Words from which a value is text, and characters of one that may say how a run ended."""


@dataclass(frozen=True)
class Finding:
    """A column or key that no path reads.

    Attributes:
        where: "row", "message", "call", or "event" for a key of a program's log or an environment's facts.
        key: its name, with dots within objects.
        count: its occurrences with a value.
        kind: what the values look like: media, messages, system, verdict, loss, exit, flag, calls, text, number, other.
        stops: the import stops until a format or `options.ignore` names it; never for events.
    """

    where: str
    key: str
    count: int
    kind: str
    stops: bool

    @property
    def name(self) -> str:
        """Return the name that `options.ignore` takes."""
        return self.key if self.where == "row" else f"{self.where}.{self.key}"


@dataclass
class Account:
    """Evidence by (where, key)."""

    evidence: defaultdict[tuple[str, str], Counter[str]] = field(default_factory=lambda: defaultdict(Counter))

    def counting(self, ignore: Sequence[str]) -> Unread:
        """Return the function that readers call; names in `ignore` are not counted."""
        ignored = frozenset(ignore)

        def count(where: str, key: str, value: Any) -> None:
            for name, inner in _leaves(key, value, 2):
                full = name if where == "row" else f"{where}.{name}"
                if full not in ignored and key not in ignored and f"{where}.{key}" not in ignored:
                    counts = self.evidence[where, name]
                    for word in ("count", *_evidence(inner)):
                        counts[word] += 1

        return count

    def figures(self) -> dict[str, dict[str, int]]:
        """Return the evidence as figures that add up: "where key" -> counts."""
        return {f"{where} {key}": dict(counts) for (where, key), counts in self.evidence.items()}


def findings(figures: Mapping[str, Mapping[str, int]]) -> list[Finding]:
    """Judge the figures of an account, those that stop first.

    Beside a reward that was read, another verdict is a part of it or a second opinion, and stops nothing.
    """
    judged, rewarded = [], figures.get(_REWARDED, {}).get("count", 0)
    for name, counts in figures.items():
        if name == _REWARDED:
            continue
        where, _, key = name.partition(" ")
        kind, stops = _judged(where, key.rpartition(".")[2], Counter(counts))
        stops &= where != "event" and (kind != "verdict" or counts["count"] > rewarded)
        judged.append(Finding(where, key, counts["count"], kind, stops))
    return sorted(judged, key=lambda each: (not each.stops, each.where, each.key))


def _leaves(key: str, value: Any, depth: int) -> Iterator[tuple[str, Any]]:
    """Yield the values below a key; an object that is a call, a message or a file is one value."""
    is_whole = isinstance(value, dict) and (
        _is_call(value) or ("role" in value and len(value) > 1) or {"bytes", "path"} <= value.keys()
    )
    if isinstance(value, dict) and depth and value and not is_whole:
        for name, inner in value.items():
            yield from _leaves(f"{key}.{name}", inner, depth - 1)
    elif value not in (None, "", [], {}):
        yield key, value


def _evidence(value: Any) -> set[str]:
    """Return what a value, or the items of a list, look like."""
    if isinstance(value, list):
        return {word for item in value[:20] for word in _evidence(item)}
    if isinstance(value, dict):
        shown = (v for v in value.values() if isinstance(v, str) and _MEDIA.match(v))
        if "bytes" in value or "image_url" in value or next(shown, None):
            return {"media"}
        if "role" in value and len(value) > 1:
            return {"messages"}
        words = any(isinstance(v, str) and len(v.split()) >= _WORDS for v in value.values())
        return {"calls"} if _is_call(value) else {"words"} if words else {"other"}
    lowered = str(value).strip().lower()
    if lowered in (*_TRUE, *_FALSE):
        number = isinstance(value, int | float) and not isinstance(value, bool)
        return {"true" if lowered in _TRUE else "false", "digit" if number or lowered[0] in "01" else "flag"}
    if not isinstance(value, str):
        return {"share" if isinstance(value, int | float) and 0 <= value <= 1 else "number"}
    if _MEDIA.match(value):
        return {"media"}
    if lowered in _VERDICTS:
        return {"verdict", "true" if lowered in ("pass", "passed", "correct", "success", "resolved") else "false"}
    broken = set[str]() if exit_kind(value[:_STATUS]) == "ended" else {"broken"}
    if len(value.split()) >= _WORDS and not _CODED.match(value):
        return ({"words", "system"} if _SYSTEM.match(value) else {"words"}) | broken
    return {"other"} | broken


def _is_call(value: Mapping[str, Any]) -> bool:
    """Return whether an object has a name, and an object or JSON text of one beside it; also one level down."""
    values = list(value.values())
    named = any(isinstance(v, str) and v.replace("-", "_").replace(".", "_").isidentifier() for v in values)
    holds = any(isinstance(v, dict) or (isinstance(v, str) and v[:1] == "{") for v in values)
    return (named and holds) or any(isinstance(v, dict) and _is_call(v) for v in values)


def _judged(where: str, name: str, counts: Counter[str]) -> tuple[str, bool]:
    """Return the kind of a key's values, and whether it stops the import."""
    count, of_message = counts["count"], where == "message"
    named = next((kind for kind, words in _NAMED.items() if words.search(name)), None)
    flags = counts["flag"] + counts["digit"] + counts["verdict"]
    varies = bool(counts["true"] and counts["false"])
    if 2 * counts["media"] >= count:
        return "media", True
    if counts["messages"] and where == "row":
        return "messages", True
    if counts["system"] and where == "row":
        return "system", True
    if counts["broken"] and named == "exit" and where == "row":
        return "exit", True
    if flags >= count:
        if of_message:
            return named or "flag", named in ("loss", "media") or (varies and named is None)
        stops = varies and (named in ("verdict", "loss") or not counts["digit"])
        return named or "flag", stops or (named == "verdict" and bool(counts["false"]))
    if of_message and ((named == "loss" and (counts["share"] or flags)) or counts["calls"]):
        return "loss" if named == "loss" and (counts["share"] or flags) else "calls", True
    if 2 * counts["words"] >= count:
        return ("system" if named == "system" else "text"), of_message or (where == "row" and named == "system")
    return named or ("number" if counts["number"] + counts["share"] >= count else "other"), False
