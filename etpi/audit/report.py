"""The report of an audit: findings of kinds that are data, as text for a terminal, as JSON, and as a page."""

from __future__ import annotations

import tomllib
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click

from etpi_resources.hidden import with_hidden
from etpi_resources.templates import templates

LEVELS = ("error", "warning", "note")
SHOWN = 3
"""Examples of a finding."""
_HERE = Path(__file__).parent
_COLOURS = {"error": "red", "warning": "yellow", "note": "cyan"}
_TURNS, _WIDTH = 8, 150
_SUMMED = ("rows", "tokens", "label_tokens", "labels", "compared", "call_tokens", "offered", "calling")


@dataclass(frozen=True)
class Kind:
    """A kind of finding, a table of kinds.toml."""

    level: str
    title: str
    remedy: str
    trainer: str = ""
    floor: float = 0.0


KINDS = {name: Kind(**table) for name, table in tomllib.loads((_HERE / "kinds.toml").read_text("utf-8")).items()}


@dataclass
class Example:
    """A row with a finding. `spans`: its tokens as (text, "context", "label" or "cut", whether it is the fault)."""

    row: str
    detail: str
    spans: Sequence[tuple[str, str, bool]] = ()


@dataclass
class Finding:
    """Rows with one kind of fault; `tokens`: their label tokens that it hits, each once."""

    kind: str
    rows: int = 0
    tokens: int = 0
    examples: list[Example] = field(default_factory=list)

    def add(self, rows: int, tokens: int, examples: Sequence[Example]) -> None:
        self.rows, self.tokens = self.rows + rows, self.tokens + tokens
        self.examples = [*self.examples, *examples][:SHOWN]


@dataclass
class Report:
    """Figures and findings of a file.

    Attributes:
        tokens, label_tokens: of all rows, and those with a label. turns: label tokens by turn; the last is 20 or more.
        labels, compared: turns with a label; rows of ids and turns that were compared with the template.
        call_tokens: label tokens that are the syntax of calls.
        offered, calling: turns of rows that offer tools, and those of them that call one.
        offering: (rows, label tokens) of those rows.
        heldout: lengths of the held-out tasks' prompts, in tokens.
        unread: evidence of the columns and keys that no path reads (`importers.account`).
    """

    path: str = ""
    format: str = ""
    rows: int = 0
    tokens: int = 0
    label_tokens: int = 0
    labels: int = 0
    compared: int = 0
    call_tokens: int = 0
    longest: int = 0
    offered: int = 0
    calling: int = 0
    offering: tuple[int, int] = (0, 0)
    heldout: Sequence[int] = ()
    unread: dict[tuple[str, str], Counter[str]] = field(default_factory=dict)
    turns: Counter[int] = field(default_factory=Counter)
    findings: dict[str, Finding] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def finding(self, kind: str) -> Finding:
        return self.findings.setdefault(kind, Finding(kind))

    def add(self, part: Report) -> None:
        """Add the figures and findings of further rows."""
        for name in _SUMMED:
            setattr(self, name, getattr(self, name) + getattr(part, name))
        self.offering = (self.offering[0] + part.offering[0], self.offering[1] + part.offering[1])
        self.longest = max(self.longest, part.longest)
        self.heldout = self.heldout or part.heldout
        for key, counts in part.unread.items():
            self.unread.setdefault(key, Counter()).update(counts)
        self.turns.update(part.turns)
        self.notes += part.notes
        for kind, new in part.findings.items():
            self.finding(kind).add(new.rows, new.tokens, new.examples)

    def share(self, finding: Finding) -> float:
        """Return the share of the label tokens that a finding hits; the share of the rows if they have no labels."""
        if finding.tokens:
            return finding.tokens / self.label_tokens
        return finding.rows / max(1, self.rows)

    def ranked(self) -> list[Finding]:
        """Return the findings, those that hit most labels first, and notes last."""
        above = [f for f in self.findings.values() if self.share(f) >= KINDS[f.kind].floor]
        return sorted(
            above, key=lambda f: (KINDS[f.kind].level == "note", -self.share(f), LEVELS.index(KINDS[f.kind].level))
        )

    def failed(self, level: str, bound: float) -> list[str]:
        """Return the kinds of a level of LEVELS, or a graver one, whose share is above the bound; none for "never"."""
        levels = LEVELS[: LEVELS.index(level) + 1] if level in LEVELS else ()
        return [f.kind for f in self.ranked() if KINDS[f.kind].level in levels and self.share(f) > bound]

    def by_turn(self) -> list[tuple[str, float]]:
        """Return (turn, share of the label tokens) of the first turns, counted from 0."""
        total = max(1, sum(self.turns.values()))
        return [(f"{turn}{'+' * (turn == 20)}", n / total) for turn, n in sorted(self.turns.items())]


def terminal(report: Report, seconds: float) -> Iterator[str]:
    """Yield the lines for a terminal."""
    yield (
        f"{report.path}: {report.rows:,} rows ({report.format}), {report.label_tokens:,} of {report.tokens:,} tokens "
        f"are labels, in {report.labels:,} turns; the longest row has {report.longest:,}. {seconds:.1f} s. Rows are "
        "counted from 0."
    )
    for finding in report.ranked():
        kind = KINDS[finding.kind]
        share = click.style(f"{100 * report.share(finding):5.1f} %", fg=_COLOURS[kind.level], bold=True)
        yield f"\n{share}  {click.style(kind.title, bold=True)} ({kind.level} {finding.kind}, {finding.rows:,} rows)"
        for example in finding.examples:
            yield f"         {example.row}: {' '.join(example.detail.split())}"[:_WIDTH]
            yield from _coloured(example.spans)
        yield f"         a trainer {kind.trainer}"
        yield f"         remedy: {kind.remedy}"
    turns = ", ".join(f"{turn} {100 * share:.0f} %" for turn, share in report.by_turn()[:_TURNS])
    calls = 100 * report.call_tokens / max(1, report.label_tokens)
    yield f"\nlabel tokens by turn: {turns or 'none'}; syntax of calls {calls:.1f} %"
    yield from report.notes
    if not report.ranked():
        yield f"Nothing was found. Next: etpi init runs {report.path} --model MODEL"


def _coloured(spans: Sequence[tuple[str, str, bool]]) -> Iterator[str]:
    """Yield an example on one line: labels in green, the fault inverted."""
    fault = next((i for i, span in enumerate(spans) if span[2]), None)
    around = spans[max(0, fault - 10) : fault + 12] if fault is not None else [s for s in spans if s[1] == "label"][:24]
    styled = [
        click.style(repr(text)[1:-1], fg="green" if state == "label" else None, dim=state != "label", reverse=is_fault)
        for text, state, is_fault in around
    ]
    if styled:
        yield f"         ▌ {''.join(styled)}"


def as_json(report: Report, failed: Sequence[str]) -> dict[str, Any]:
    """Return the report as JSON of a version; rows are counted from 0."""
    return {
        "version": 1,
        **{name: getattr(report, name) for name in ("path", "format", *_SUMMED[:6], "longest", "notes")},
        "label_share_by_turn": {turn: round(share, 6) for turn, share in report.by_turn()},
        "failed": list(failed),
        "findings": [
            {
                "kind": f.kind,
                "level": KINDS[f.kind].level,
                "rows": f.rows,
                "label_tokens": f.tokens,
                "share": round(report.share(f), 6),
                **{name: getattr(KINDS[f.kind], name) for name in ("title", "remedy", "trainer")},
                "examples": [{"row": e.row, "detail": e.detail} for e in f.examples],
            }
            for f in report.ranked()
        ],
    }


def page(report: Report) -> str:
    """Return the report as one page that loads nothing."""
    environment = templates(_HERE)
    return with_hidden(environment.get_template("page.html.jinja").render(report=report, kinds=KINDS))
