"""Output of `etpi run` other than metrics: next steps, failures, and the state of an experiment's chain."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from etpi.run import CATALOG
from etpi.run.columns import aligned
from etpi_assets.curation.lost import listed_with_keys
from etpi_assets.graph import GRAPH
from etpi_assets.planning.planner import Step
from etpi_assets.specs.folders import FOLDERS, SpecFolder, where_read
from etpi_assets.specs.load import Specs
from etpi_resources.lake.lake import Lake, Ref
from etpi_resources.links import experiment_page, view_url
from etpi_resources.process.progress import clock

_USUAL = ("ok", "missing", "waiting")
"""States in small letters; the others need a look."""


def ending(lake: Lake, experiments: Sequence[str]) -> str:
    """Return the last lines of a run without a failure: where its results are, and what to do next."""
    pages = {name: path for name in experiments if (path := _page(lake, name))}
    reports = list(pages.values()) or (["none yet; `etpi status` lists missing assets"] if experiments else [])
    rows = [["report" if n == 0 else "", text] for n, text in enumerate(reports)]
    rows += [["etpi view" if n == 0 else "", view_url(experiment_page(name))] for n, name in enumerate(pages)]
    rows += [
        ["etpi ui", "http://localhost:3000 (the graph, and a page for every asset)"],
        ["etpi sql", "the lake in DuckDB's shell; `etpi sql --list`: the reports"],
    ]
    lines = f"Results:\n{aligned([[f'  {name}', text] for name, text in rows])}"
    if not experiments:
        return lines
    first = experiments[0]
    manifests = [lake.current(Ref(asset, "experiment", first)) for asset in ("sft_checkpoint", "rl_checkpoint")]
    trained = any(m and m.tables.get("checkpoints", {}).get("rows") for m in manifests)
    return f"{lines}\nNext: etpi export {first} --format {'model' if trained else 'trl'} --to {first}_export"


def failures_table(failures: Mapping[str, Sequence[str]]) -> str:
    """List the experiments that failed, their reasons, and what to do next."""
    reasons = [f"  {name}: {reason}" for name, lines in failures.items() for reason in lines]
    first = next(iter(failures))
    status = "" if first in ("publish_catalog", CATALOG) else f" (`etpi status {first}` says what is missing)"
    how = f"the same command again{status}"
    return "\n".join(
        [
            f"etpi: failed: {', '.join(failures)}.",
            *reasons,
            f"Fix the cause, then run {how}; finished assets are not computed again. `etpi ui` shows the whole log.",
        ]
    )


def folders_table(folders: Sequence[SpecFolder], specs: Specs | None) -> str:
    """Return the folders of the user's specs, with numbers of specs and errors; `specs` is None if they do not load."""
    if not folders:
        return where_read(folders)
    lines = []
    for folder in folders:
        entries = [entry for entry in specs.entries() if entry.file.is_relative_to(folder.path)] if specs else []
        counts = [f"{sum(e.set == name for e in entries)} {below}" for name, below in FOLDERS.items()]
        invalid = [str(entry.error) for entry in entries if entry.error]
        head = ", ".join([*counts, *([f"{len(invalid)} invalid"] if invalid else [])]) if specs else "not read"
        lines.append(f"specs: {folder.path} ({folder.origin}): {head}")
        lines += [f"  {line}" for text in (*folder.problems, *invalid) for line in text.splitlines()]
    return "\n".join(lines)


def states_table(experiment: str, steps: Sequence[Step], everything: bool) -> str:
    """Tabulate an experiment's chain: all steps, or only stale, changed, blocked and invalid ones.

    A step has its state, its reason, and the time that it took last; an error of a spec is shown once.
    """
    counts = Counter(step.state for step in steps)
    title = f"{experiment}: " + ", ".join(f"{n} {_label(state)}" for state, n in counts.items())
    shown = [s for s in steps if everything or (s.reason if s.state == "ok" else s.state not in _USUAL)]
    rows, errors = [], set[str]()
    for step in shown:
        took = f"took {clock(step.seconds)} last time" if step.seconds else ""
        reason = "" if step.reason in errors else step.reason.replace("\n", " ")
        errors |= {step.reason} if step.state == "invalid" else set()
        kept = f"kept; --rebuild {step.asset} computes it again" if step.kept and step.state == "outdated" else ""
        facts = "; ".join(filter(None, [reason, kept, took]))
        rows.append(["", step.asset, step.key, _label(step.state), facts])
    return f"{title}\n{aligned(rows)}" if rows else title


def _label(state: str) -> str:
    return state if state in _USUAL else state.upper()


def steps_json(name: str, steps: Sequence[Step]) -> dict[str, Any]:
    """Return the state of a chain for programs: the number of steps by state, and every step."""
    rows = [{n: getattr(s, n) for n in ("asset", "set", "key", "state", "reason", "kept", "seconds")} for s in steps]
    return {"name": name, "states": dict(Counter(step.state for step in steps)), "steps": rows}


def lost_lines(steps: Sequence[Step], lake: Lake) -> list[str]:
    """Return a line for each step's newest version that dropped something: how much, why, and the key."""
    lines = []
    for step in steps:
        ref = Ref(step.asset, step.set, step.key)
        manifest = lake.blocked(ref) or lake.current(ref)
        for check in manifest.checks if manifest else ():
            figures = check["figures"]
            if figures.get("dropped") and "offered" in figures:
                lost = f"{figures['dropped']:,} of {figures['offered']:,}: {listed_with_keys(figures['reasons'])}"
                lines.append(f"  dropped by {step.asset}: {lost}")
            elif figures.get("quarantined") and "quarantined" in GRAPH[step.asset].tables:
                of_version = f"FROM quarantined WHERE asset = '{step.asset}' AND {step.set} = '{step.key}'"
                why = f'etpi sql -c "SELECT source, row, reason, detail {of_version}"'
                count = f"{figures['quarantined']:,} of {figures['found']:,} inputs"
                lines.append(f"  quarantined by {step.asset} of {step.key}: {count}; each with its reason: {why}")
    return lines


def step_lines(steps: Sequence[Step]) -> list[str]:
    """Return one line for each partition key of the steps: its assets, in order."""
    keys: dict[tuple[str, str], list[str]] = {}
    for step in steps:
        keys.setdefault((step.set, step.key), []).append(step.asset)
    return [f"  {set_name.replace('_', ' ')} {key}: {', '.join(assets)}" for (set_name, key), assets in keys.items()]


def _page(lake: Lake, experiment: str) -> str | None:
    ref = Ref("experiment_report", "experiment", experiment)
    if lake.current(ref) is None or lake.blocked(ref):
        return None
    rows = lake.read(ref, "reports").to_pylist()
    return next((str(lake.root / row["path"]) for row in rows if row["kind"] == "html"), None)
