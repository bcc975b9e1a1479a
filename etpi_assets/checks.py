"""The checks: what each catches, what to do when it fails, whether it blocks, its bound and the words of its messages.

Their data are in `checks.toml`, which no asset's code version covers, so that better words recompute nothing. The
functions beside the data they judge only count, and call `judged`; or `measured` or `outcome`, if they decide
otherwise.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from etpi_assets.graph import nearest
from etpi_resources.lake.check_outcome import CheckOutcome, percent


@dataclass(frozen=True)
class CheckInfo:
    """A check of one asset.

    Attributes:
        catches: the faults that fail it.
        remedy: what to do then.
        real: for a blocking check, what a real model of billions of weights, in bfloat16 on a GPU, does there: seen, or
            reasoned; "exact" where weights do not matter.
        answers: the failure of published work that it answers, unless docs/faults.md already names it.
        blocking: whether a failure stops every consumer; otherwise it only warns.
        may_warn: whether it only warns in some cases, although it is blocking; `catches` says in which.
        bound: the key of the spec's `gates` that has its floor or bound.
        limit: "floor" or "bound", and the format of its figures: "floor .3f".
        most, least: the bound of a share that no spec changes; messages have it as {bound}.
        faults, of: for `judged`, the counts of faults and of all cases.
        figures: for `judged`, the names of the figures to store; without them, all whole numbers.
        says: templates of messages, by case: "passes", "fails" (by default as "passes"), "idle" (nothing to decide), or
            another one of the check's function. A template may name figures, "{passes}", and the following.
        hints: what to do ("{hint}"), by cause; "" for every other cause.
        parts: words ("{KEY?}") that are left out where the figure KEY is 0 or empty.
        problems: sentences of a failure ("{problems}"), of the figures that are neither 0 nor empty.
    """

    catches: str
    remedy: str
    real: str = ""
    answers: str = ""
    blocking: bool = True
    may_warn: bool = False
    bound: str = ""
    limit: str = ""
    most: float | None = None
    least: float | None = None
    faults: Sequence[str] = ()
    of: str = ""
    figures: Sequence[str] = ()
    says: Mapping[str, str] = field(default_factory=dict)
    hints: Mapping[str, str] = field(default_factory=dict)
    parts: Mapping[str, str] = field(default_factory=dict)
    problems: Mapping[str, str] = field(default_factory=dict)

    @property
    def fixed(self) -> float | None:
        """The bound, whichever there is."""
        return self.least if self.most is None else self.most

    @property
    def description(self) -> str:
        """The text on Dagster's web page."""
        return f"{self.catches} Remedy: {self.remedy}"


_TABLES = tomllib.loads(Path(__file__).with_suffix(".toml").read_text("utf-8"))
_OVERRIDABLE = _TABLES.pop("overridable")["assets"]
_SHARED = _TABLES.pop("shared")


def _info(name: str, as_in: str = "", **values: Any) -> CheckInfo:
    """Return a check with its values, and those of the asset's check of that name, or of the table, in `as_in`."""
    shared = _SHARED[as_in] if as_in in _SHARED else _TABLES[as_in][name] if as_in else {}
    values |= {key: shared.get(key, {}) | value for key, value in values.items() if isinstance(value, dict)}
    return CheckInfo(**shared | values)


CHECKS: Mapping[str, Mapping[str, CheckInfo]] = {
    asset: {name: _info(name, **table) for name, table in checks.items()} for asset, checks in _TABLES.items()
}
"""Asset -> check -> its description, in the order in which the asset reports them."""

OVERRIDABLE = tuple(name for asset in _OVERRIDABLE for name in CHECKS[asset])
"""The checks that `gates.override` may name."""

_SHOWN = 3
_BY_NAME = {name: info for asset in reversed(CHECKS) for name, info in CHECKS[asset].items()}
"""Checks of one name block alike and have the words of the first."""


def is_blocking(asset: str, check: str) -> bool:
    """Return whether a check is declared to stop every consumer when it fails."""
    info = CHECKS.get(asset, {}).get(check)
    return info is None or info.blocking


def undeclared(asset: str, outcomes: Iterable[CheckOutcome]) -> list[str]:
    """Return the failed checks that block although they are declared to warn, or the other way round."""
    infos = CHECKS.get(asset, {})
    return [
        outcome.name
        for outcome in outcomes
        if (info := infos.get(outcome.name))
        and not outcome.passed
        and outcome.blocking != info.blocking
        and not (info.blocking and info.may_warn)
    ]


def outcome(
    name: str,
    passed: bool | None,
    figures: Mapping[str, Any] | None = None,
    *,
    case: str = "",
    hint: str = "",
    **values: Any,
) -> CheckOutcome:
    """Return the outcome of a check with its message, from the figures and values.

    Args:
        passed: None if there is nothing to decide.
        case: the key of `CheckInfo.says`; by default that of the verdict.
        hint: the key of `CheckInfo.hints`.

    Raises:
        KeyError: there is no such check, or its template names an unknown figure.
    """
    if name not in _BY_NAME:
        raise KeyError(f"checks.toml has no check {name!r}{nearest(name, _BY_NAME)}")
    info, figures = _BY_NAME[name], figures or {}
    words = {**figures, **({} if info.fixed is None else {"bound": percent(info.fixed)}), **values}
    words |= {f"{key}?": text.format_map(words) if words.get(key) else "" for key, text in info.parts.items()}
    problems = [text.format_map(words) for key, text in info.problems.items() if words.get(key)]
    words = {"problems": "; ".join(problems), **words}
    if info.hints:
        words["hint"] = info.hints.get(hint, info.hints.get("", "")).format_map(words)
    template = info.says.get(case or {True: "passes", False: "fails", None: "idle"}[passed], info.says["passes"])
    if "{passes}" in template:
        words["passes"] = info.says["passes"].format_map(words)
    message = template.format_map(words)
    if passed is None:
        return CheckOutcome.not_applicable(name, message, figures)
    return CheckOutcome(name, passed, message, info.blocking, figures)


def measured(name: str, value: float, section: Any, figures: Mapping[str, Any], **values: Any) -> CheckOutcome:
    """Return the outcome of a gate whose value is compared with its floor or bound in the section `gates`, if set."""
    info = _BY_NAME[name]
    word, form = info.limit.split()
    limit = getattr(section, info.bound)
    if limit is None:
        return outcome(name, None, figures, value=value, limit=f"no {word}", **values)
    passed = value >= limit if word == "floor" else value <= limit
    return outcome(name, passed, figures, value=value, limit=f"{word} {limit:{form}}", **values)


def within(name: str, share: float) -> bool:
    """Return whether a share keeps the check's bound of checks.toml."""
    info = _BY_NAME[name]
    return share <= info.most if info.most is not None else share >= (info.least or 0.0)


def part(name: str, key: str, **values: Any) -> str:
    """Return a sentence of a check's `parts`."""
    return _BY_NAME[name].parts[key].format_map(values)


def faulty(rows: Iterable[Any]) -> dict[str, Any]:
    """Return the number of faulty rows and the first of them, which `merged` of `rollout_checks` adds up."""
    names = list(rows)
    return {"n": len(names), "first": names[:_SHOWN]}


def judged(name: str, counted: Mapping[str, Any], *, holds: bool = True, **values: Any) -> CheckOutcome:
    """Return the outcome of a check that fails if there are faults, or more than its bound as a share of all cases.

    Its table names the counts of `faults`, of all cases (`of`), and the `figures` to store. A message may name each
    kind of `faulty` rows by their number, {KIND_first}, the {first} of all kinds, and the {share} of faults.

    Args:
        holds: a further condition to pass.
    """
    info, words, first = _BY_NAME[name], dict(counted), []
    for key, value in counted.items():
        if isinstance(value, Mapping) and "first" in value:
            shown = [tuple(row) if isinstance(row, list) else row for row in value["first"][:_SHOWN]]
            words |= {key: value["n"], f"{key}_first": shown}
            first += shown
    cases = words[info.of] if info.of else 1
    share = sum(words.get(fault, 0) for fault in info.faults or info.problems) / max(1, cases)
    words |= {"share": share, "percent": percent(share)}
    stored = info.figures or [key for key, value in words.items() if isinstance(value, int)]
    passed = holds and share <= (info.most or 0.0) if cases or "idle" not in info.says else None
    figures = {key: words[key] for key in stored if key in words}
    return outcome(name, passed, figures, **{"first": first[:_SHOWN], **words, **values})


class OnHit(Protocol):
    """Takes a fault that a check finds: its place (`rollout/agent/turn`, or a beginning of it), its kind, a detail, and
    where it is.

    `mark` is the number of an id of the conversation, or a text within it.
    """

    def __call__(self, place: str, kind: str, detail: str, mark: int | str | None = None) -> None: ...


def ignore(place: str, kind: str, detail: str, mark: int | str | None = None) -> None:
    """Take nothing: every check counts its faults, and only some callers take each."""
