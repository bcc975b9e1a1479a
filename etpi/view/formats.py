"""Text of values on a page: numbers, rates, verdicts, times. Filters of the templates."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from datetime import datetime
from html import escape
from typing import Any

from markupsafe import Markup

from etpi_resources.hidden import with_hidden

LONGEST = 200_000
"""Characters of one text on a page: a page of megabytes stops the browser, and the server while it writes it."""
LONGEST_DIFF = 5_000
"""Lines of one patch on a page."""
GOOD, BAD = ("passed", "Submitted"), ("failed_tests", "low_reward", "merge_conflict", "no_patch", "infrastructure")


def rate(value: float | None, metric: str = "") -> str:
    """Return a share as a percentage; a mean ("_per_") as a number."""
    if value is None:
        return "–"
    return f"{value:.1f}" if "_per_" in metric else f"{100 * value:.1f} %"


def delta(row: Mapping[str, Any]) -> str:
    """Return the difference of a row of `figures`, in points or in the metric's unit; paired by task, with its
    interval, where the report has it."""
    if row["base"] is None or row["student"] is None:
        return ""
    mean = "_per_" in row["metric"]
    values = [row["student"] - row["base"] if row["difference"] is None else row["difference"]]
    if row["change_low"] is not None:
        values += [row["change_low"], row["change_high"]]
    figures = [f"{value if mean else 100 * value:+.1f}" for value in values]
    figures = ["0.0" if figure[1:] == "0.0" else figure.replace("-", "−") for figure in figures]
    return figures[0] + (f" [{figures[1]},\N{NO-BREAK SPACE}{figures[2]}]" if len(figures) > 1 else "")


def direction(row: Mapping[str, Any]) -> str:
    """Return the class of a change: better or worse where the report's rules say so, else none."""
    return {"improved": "better", "fell": "worse"}.get(row["word"] or "", "")


def count(value: float | None) -> str:
    return "–" if value is None else f"{value:,.0f}"


def figure(value: float | None, digits: int = 3) -> str:
    return "–" if value is None else f"{value:,.{digits}f}"


def tone(word: str | None) -> str:
    """Return the class of a verdict or exit status."""
    if word in GOOD:
        return "good"
    return "bad" if word in BAD else "neutral" if word in (None, "unknown") else "warn"


def moment(value: datetime | None) -> str:
    return "–" if value is None else value.strftime("%Y-%m-%d %H:%M:%S")


def seconds(value: float | None) -> str:
    if value is None:
        return "–"
    return f"{value:.{1 if value < 10 else 0}f} s" if value < 120 else f"{value / 60:.0f} min"


def diff_lines(text: str) -> list[tuple[str, str]]:
    """Return the lines of a unified diff as (class, line), `LONGEST_DIFF` at most."""
    kinds = (("+++", "meta"), ("---", "meta"), ("diff ", "meta"), ("@@", "place"), ("+", "added"), ("-", "removed"))
    lines = text.splitlines()
    shown = [
        (next((kind for start, kind in kinds if line.startswith(start)), "context"), line)
        for line in lines[:LONGEST_DIFF]
    ]
    more = len(lines) - LONGEST_DIFF
    return shown if more <= 0 else [*shown, ("meta", f"[{more:,} more lines: `etpi sql` reads them from the view]")]


def as_json(value: Any) -> str:
    return json.dumps(value, indent=1, ensure_ascii=False, default=str)


def svg(chart: str) -> Markup:
    """Return a chart of `etpi_resources.charts` for a page whose policy forbids style attributes."""
    return Markup(re.sub(r' style="[^"]*"', "", chart))


def code(text: str) -> Markup:
    """Return a sentence with its `names` as code."""
    return Markup(re.sub(r"`([^`\n]+)`", r"<code>\1</code>", escape(with_hidden(text))))


def visible(value: Any) -> Any:
    """Return a text of a transcript with hidden characters as ⟨U+202E⟩, cut to `LONGEST`; anything else as it is."""
    if not isinstance(value, str) or isinstance(value, Markup):
        return value
    if len(value) > LONGEST:
        value = f"{value[:LONGEST]}\n[{len(value) - LONGEST:,} more characters: `etpi sql` reads them from the view]"
    return with_hidden(value)


def anchor(text: str) -> str:
    """Return a text as part of an element's id."""
    return re.sub(r"[^A-Za-z0-9_-]", "-", text)


FILTERS: dict[str, Callable[..., Any]] = {
    function.__name__: function
    for function in (
        rate, delta, direction, code, count, figure, tone, moment, seconds, diff_lines, as_json, anchor, svg,
    )
}  # fmt: skip
