"""`etpi lab sweeps`: run declared sweeps in shares; write plots, tables and sentences, and a page of the progress."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from html import escape
from pathlib import Path

from etpi_assets.reports.markdown import markdown_table
from etpi_assets.scoring.intervals import Estimate
from etpi_assets.specs.load import SpecError, nearest
from etpi_lab.analysis import sweeps
from etpi_lab.analysis.results import first_turn_loss_share, reader
from etpi_lab.analysis.sweeps import Point, Sweep
from etpi_lab.repeat.dose_plot import dose_plot
from etpi_lab.repeat.forecast import Forecast
from etpi_lab.repeat.running import Campaign, cost_sentence
from etpi_lab.repeat.share import Share
from etpi_resources.lake.lake import Lake

_FOOT = """Generated from the lake by `{command}`; do not edit. The sweep was declared before it ran (`etpi lab
sweeps --plan` prints the declaration with its power calculation). A point is the difference of two experiments that
differ in one setting, with its 95 % interval over training seeds and tasks (`lab/docs/seeds.md`); the sentence follows
from the intervals by the rules of `etpi_lab/analysis/sweeps.py`. "Would want" is the design that would decide a level.
"""


def chosen(names: Sequence[str]) -> dict[str, Sweep]:
    """Read sweeps by name or file; all shipped ones by default.

    Raises:
        SpecError: there is no such sweep, or its file is invalid.
    """
    shipped = sweeps.declared()
    read: dict[str, Sweep] = {}
    for name in names or shipped:
        path = Path(name) if name.endswith(".toml") else shipped.get(name)
        if path is None:
            raise SpecError(
                f"there is no sweep {name!r}. Did you mean {nearest(name, list(shipped))!r}? Or name a .toml"
            )
        read[path.stem] = sweeps.load(path)
    return read


def plan(names: Sequence[str]) -> int:
    """Print the declared analyses with their power calculations; always 0."""
    for name, sweep in chosen(names).items():
        print("\n".join(sweeps.plan_lines(name, sweep)))
    return 0


def run(
    names: Sequence[str], target: Path, share: Share, *, table_only: bool = False, seeds: Sequence[int] = ()
) -> int:
    """Run sweeps, by default all shipped ones, and write of each a page and a plot, `target`/NAME.md and NAME.svg.

    Args:
        seeds: fewer seeds than declared, for a trial; the page says so.
    """
    read = chosen(names)
    folder = Lake.open().scratch("sweep_specs")
    for file, text in (item for sweep in read.values() for item in sweep.specs(seeds)):
        (folder / file).parent.mkdir(parents=True, exist_ok=True)
        (folder / file).write_text(text, encoding="utf-8")
    minutes = {
        sweeps.repetition(name): sweep.minutes * len(seeds or sweep.seeds)
        for sweep in read.values()
        for name in sweep.experiments()
    }
    typed = {Path(name).stem: name for name in names}
    options = "".join(f" --seed {seed}" for seed in seeds)
    few = ", ".join(map(str, seeds))
    trial = f"A trial on seeds {few}: fewer than declared, so nothing is concluded." if seeds else ""
    target.mkdir(parents=True, exist_ok=True)

    def write(state: Forecast) -> str:
        lake, pictures = Lake.open(), []
        for name, sweep in read.items():
            judged = _judged(lake, sweep)
            picture, conclusion = _plot(sweep, judged), sweeps.sentence(sweep, judged)
            (target / f"{name}.svg").write_text(picture, encoding="utf-8")
            parts = [
                f"# {sweep.title}",
                trial,
                f"**{conclusion}**",
                f"![{sweep.title}]({name}.svg)",
                _table(sweep, judged),
                _declaration(name, sweep),
                _cost(state, sweep),
                _FOOT.replace("{command}", f"etpi lab sweeps {typed.get(name, name)}{options}"),
            ]
            (target / f"{name}.md").write_text("\n\n".join(filter(None, parts)), encoding="utf-8")
            pictures.append(f"<h2>{escape(sweep.title)}</h2><p>{escape(conclusion)}</p><figure>{picture}</figure>")
        return "".join(pictures)

    progress = Lake.open().scratch("progress") / "sweeps.html"
    code = Campaign("Sweeps", list(minutes), folder, share, progress, write, minutes).run(table_only=table_only)
    print(f"wrote {', '.join(str(target / f'{name}.md') for name in read)}; the same with progress: {progress}")
    return code


def _judged(lake: Lake, sweep: Sweep) -> list[Point]:
    repeated = {name: sweeps.repetition(name) for name in sweep.experiments()}
    measured: Mapping[str, float] = {}
    if sweep.variable.measure == "first_turn_loss_share":
        shares = {level.less: first_turn_loss_share(lake, repeated[level.less]) for level in sweep.level}
        measured = {name: share for name, share in shares.items() if share is not None}
    return sweeps.points(sweep, reader(lake, repeated), measured)


def _between(point: Point) -> Estimate | None:
    return point.verdict.over_seeds or point.verdict.between


def _plot(sweep: Sweep, judged: Sequence[Point]) -> str:
    curves: dict[str, list[tuple[float, str, float, float, float]]] = {}
    for point in judged:
        curve = curves.setdefault(point.level.series, [])
        if between := _between(point):
            text = sweeps.shown(sweep.variable, point.x)
            curve.append((point.x, text, between.value, between.ci_low, between.ci_high))
    figure = f"difference in {sweep.figure_in_words()}"
    return dose_plot(sweep.title, list(curves.items()), sweep.variable.label, figure, sweep.least, sweep.variable.log)


def _cost(state: Forecast, sweep: Sweep) -> str:
    """Return what the finished experiments of one sweep took."""
    swept = {sweeps.repetition(name) for name in sweep.experiments()}
    return cost_sentence(replace(state, states=tuple(each for each in state.states if each.name in swept)))


def _declaration(name: str, sweep: Sweep) -> str:
    lines = "\n".join(f"- {line.strip()}" for line in list(sweeps.plan_lines(name, sweep))[1:])
    return f"Declared:\n\n{lines}\n\n{' '.join(sweep.notes.split())}".strip()


def _table(sweep: Sweep, judged: Sequence[Point]) -> str:
    rows = []
    for point in judged:
        verdict, over, tasks = point.verdict, point.verdict.over_seeds, point.verdict.between
        rows.append(
            [
                point.level.series,
                sweeps.shown(sweep.variable, point.x),
                f"{verdict.less.value:.2f} → {verdict.more.value:.2f}" if verdict.less and verdict.more else "–",
                f"{tasks.value:+.2f} [{tasks.ci_low:+.2f}, {tasks.ci_high:+.2f}]" if tasks else "–",
                f"[{over.ci_low:+.2f}, {over.ci_high:+.2f}]" if over else "–",
                point.word,
                point.wants() or "–",
            ]
        )
    head = ["curve", sweep.variable.label, "without → with", "difference, over tasks", "over seeds and tasks", "seen",
            "would want"]  # fmt: skip
    if not any(point.level.series for point in judged):
        head, rows = head[1:], [row[1:] for row in rows]
    return markdown_table(head, rows).strip()
