"""The page of a running list of experiments: an HTML file that reloads itself until the list is finished."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from html import escape
from pathlib import Path

from etpi_lab.repeat.forecast import Forecast, State, cpu, duration
from etpi_resources.links import view_url

RELOAD_SECONDS = 15
_STYLE = """
body { font: 15px/1.45 system-ui, sans-serif; color: #2a2f36; max-width: 62rem; margin: 2rem auto; padding: 0 1rem }
table { border-collapse: collapse; width: 100% }
td, th { text-align: left; padding: .25rem .6rem; border-bottom: 1px solid #d9dde3 }
.bar { background: #d9dde3; height: 10px; border-radius: 5px }
.bar div { background: #0b6e4f; height: 10px; border-radius: 5px }
.done { color: #0b6e4f } .failed { color: #c0392b }
.small { color: #5b6573; font-size: 13px }
figure { margin: 1.5rem 0 }
"""


def write(
    path: Path,
    title: str,
    forecast: Forecast,
    failures: Mapping[str, Sequence[str]],
    *,
    running: bool,
    mine: Sequence[str] = (),
    body: str = "",
) -> None:
    """Write the page; readers see the old or the new one whole.

    Args:
        failures: experiment -> lines of this run's failed steps.
        running: whether the page reloads itself.
        mine: the experiments of this call's share; the others are run elsewhere.
        body: HTML below the table.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    beside.write_text(render(title, forecast, failures, running=running, mine=mine, body=body), encoding="utf-8")
    beside.replace(path)


def render(
    title: str,
    forecast: Forecast,
    failures: Mapping[str, Sequence[str]],
    *,
    running: bool,
    mine: Sequence[str],
    body: str,
) -> str:
    """Return the page."""
    share = 100 * len(forecast.finished) / max(1, len(forecast.states))
    reload = f'<meta http-equiv="refresh" content="{RELOAD_SECONDS}">' if running else ""
    live = f' · <a href="{escape(view_url("/live"))}">what runs now</a> (etpi view)' if running else ""
    rows = "".join(
        _row(state, failures.get(state.name, ()), not mine or state.name in mine) for state in forecast.states
    )
    at = datetime.now(UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8">{reload}<title>{escape(title)}</title>'
        f'<meta name="viewport" content="width=device-width"><style>{_STYLE}</style></head><body>'
        f"<h1>{escape(title)}</h1><p>{escape(forecast.line())}{live}</p>"
        f'<div class="bar"><div style="width:{share:.1f}%"></div></div>'
        f'<p class="small">{at}; machine: {escape(cpu())}. Times are recorded seconds of the same steps.</p>'
        f"{body}<h2>Experiments</h2><table><tr><th>experiment</th><th>state</th><th>took</th><th>about left</th></tr>"
        f"{rows}</table></body></html>\n"
    )


def _row(state: State, failed: Sequence[str], here: bool) -> str:
    if failed or state.blocked:
        word, tone = f"failed: {failed[0] if failed else state.blocked}", "failed"
    elif not state.open:
        word, tone = "finished", "done"
    else:
        word, tone = f"{state.open} steps open" + ("" if here else ", in another share"), ""
    took = duration(state.spent) if state.spent else "–"
    left = duration(state.left) if state.left else "–" if not state.open else "unknown"
    cells = f'<td>{escape(state.name)}</td><td class="{tone}">{escape(word)}</td><td>{took}</td><td>{left}</td>'
    return f"<tr>{cells}</tr>"
