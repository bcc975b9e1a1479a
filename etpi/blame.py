"""The work of `etpi blame`: which groups and rollouts raised or lowered a metric, and specs that train without them."""

from __future__ import annotations

import random
from collections import Counter, defaultdict
from collections.abc import Collection, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np

from etpi.init.write import NewSpec, quoted, spec_name, write_specs
from etpi.run.columns import aligned, cell, figure
from etpi_assets.scoring.intervals import mean, paired_difference, permutation_p
from etpi_assets.specs.load import load_specs
from etpi_assets.specs.section import SpecError
from etpi_resources.lake import taint
from etpi_resources.lake.catalog import connect
from etpi_resources.lake.questions import reports

BY = {"teacher": "teacher", "sampler": "sampler", "repo": "repo", "importer": "importer", "task": "task_id"}
"""Option of `--by` -> column of the report `blame_rollouts`."""
_COLUMNS = ["rollout_id", "harm", "influence", "task_id", "teacher", "worst_agent", "worst_turn", "worst_influence"]
_SHARED = ("teacher", "sampler", "repo", "importer", "rollout_set", "exit_status", "verdict_trust", "worst_turn")
SHOWN = 10
Row = dict[str, Any]


def blame(experiment: str, by: str, share: float, retrain: bool) -> int:
    """Print the groups of an experiment's training rollouts, the worst and best rollouts, what the worst share has in
    common, and the retrainings that were run; with `retrain` write their specs.

    Raises:
        LakeError: there is no catalog. SpecError: the catalog has no blame of the experiment; the specs exist.
    """
    rollouts = _ask("blame_rollouts", experiment=experiment)
    if not rollouts:
        raise SpecError(
            f"the catalog has no blame of {experiment}. Add a section [blame] to its spec (docs/blame.md) and run "
            f"`etpi run {experiment}`; if a check refused it, `etpi status {experiment}` says why"
        )
    worst = [row for row in rollouts[: round(share * len(rollouts))] if row["harm"] < 0]
    best = sorted(rollouts, key=lambda row: -row["influence"])
    print(f"{experiment}: influence of {len(rollouts)} training rollouts on {rollouts[0]['objective']}")
    print(_groups(rollouts, BY[by], by))
    for title, rows in (("worst", rollouts[:SHOWN]), ("best", best[:SHOWN])):
        print(f"\nThe {len(rows)} {title} rollouts")
        print(aligned([_COLUMNS, *([cell(row[name]) for name in _COLUMNS] for row in rows)]))
    print(f"\nIn common among the {len(worst)} worst ({share:.0%} of the rollouts, those with harm):")
    print(aligned(_in_common(worst, rollouts)) or "nothing that the others have less often")
    if lines := _retrained(experiment, rollouts[0]["objective"]):
        print(f"\nRetrained, on the held-out tasks that blame did not read\n{aligned(lines)}")
    if retrain and len(worst) in (0, len(rollouts)):
        raise SpecError(f"{len(worst)} of {len(rollouts)} rollouts lowered the metric of {experiment}; change --share")
    if retrain:
        blamed = sorted(row["rollout_id"] for row in worst)
        chance = random.Random(0).sample(sorted(row["rollout_id"] for row in rollouts), len(blamed))
        arms = {"worst": (blamed, "blamed rollouts"), "random": (sorted(chance), "rollouts at random")}
        # Fewer rows in as many epochs are fewer steps, which can cost more than the rows did.
        train, longer = load_specs().get("experiment", experiment).train, len(rollouts) / (len(rollouts) - len(blamed))
        lengths = {key: value * longer for key in ("epochs", "use_epoch") if (value := getattr(train, key))}
        _write(experiment, {f"{name}_{round(100 * share)}": arm for name, arm in arms.items()}, lengths)
        print(f"`etpi blame {experiment}` then compares them on the tasks that blame did not read")
    return 0


def _ask(report: str, **values: Any) -> list[Row]:
    with connect() as connection:
        for name, value in values.items():
            connection.execute(f"SET VARIABLE {name} = $value", {"value": value})
        connection.execute(reports()[report].text)
        names = [column[0] for column in connection.description or ()]
        return [dict(zip(names, row, strict=True)) for row in connection.fetchall()]


def _groups(rollouts: Sequence[Row], column: str, by: str) -> str:
    """Return each group's mean influence and mean place in the order of harm (0: the worst, 1: the last), the worst
    first, with intervals clustered by task. The test is of places: one influence can outweigh all others."""
    labels, tasks = ([str(row[name]) for row in rollouts] for name in (column, "task_id"))
    places = np.linspace(0, 1, len(rollouts)).tolist()
    lines = []
    for name in sorted(set(labels)):
        rows, cells = [i for i, label in enumerate(labels) if label == name], []
        for values in ([row["influence"] for row in rollouts], places):
            estimate = mean([values[i] for i in rows], [tasks[i] for i in rows], [1] * len(rows))
            assert estimate is not None, "a group has a rollout"
            interval = f"[{estimate.ci_low:.3g}, {estimate.ci_high:.3g}]" if estimate.clusters > 1 else ""
            cells += [f"{estimate.value:.3g}", interval]
        lines.append((np.mean([places[i] for i in rows]), [cell(rollouts[rows[0]][column]), str(len(rows)), *cells]))
    head = [by, "rollouts", "mean influence", "95 %", "mean place", "95 %"]
    p = permutation_p(places, labels, tasks)
    more = f"\n... and {len(lines) - 2 * SHOWN} more" if len(lines) > 2 * SHOWN else ""
    return f"{aligned([head, *(cells for _, cells in sorted(lines)[: 2 * SHOWN])], right=(1, 2, 4))}{more}\n" + (
        "one group" if p is None else f"p = {p:.3g} that the places of groups differ by chance (permutation)"
    )


def _in_common(worst: Sequence[Row], rollouts: Sequence[Row]) -> list[list[str]]:
    """Return the values that are commonest among the worst, compared with all rollouts."""
    lines = []
    for name in _SHARED:
        among, everywhere = Counter(cell(r[name]) for r in worst), Counter(cell(r[name]) for r in rollouts)
        for value, count in among.items():
            shares = count / len(worst), everywhere[value] / len(rollouts)
            if count > 2 and shares[0] > 1.2 * shares[1]:
                lines.append((shares[1] - shares[0], [name, value, f"{shares[0]:.0%}", f"of all {shares[1]:.0%}"]))
    return [cells for _, cells in sorted(lines)[:SHOWN]]


def _retrained(experiment: str, metric: str) -> list[list[str]]:
    """Return the changes of the metric by the retrainings that were run, paired by task, on tasks unseen by blame: each
    against the experiment, and those without the worst against those without as many at random."""
    values: dict[str, dict[str, tuple[float, float]]] = defaultdict(dict)
    for row in _ask("blame_retrained", experiment=experiment, metric=metric):
        if row["unseen"]:
            values[row["experiment"]][row["task_id"]] = row["total"], row["size"]
    pairs = [(name, other) for name in sorted(values) for other in (experiment, name.replace("_worst_", "_random_"))]
    lines = []
    for name, other in pairs:
        if name != other and (tasks := sorted(values[name].keys() & values.get(other, {}).keys())):
            change = paired_difference([values[name][t] for t in tasks], [values[other][t] for t in tasks])
            interval = figure(change.value, change.ci_low, change.ci_high, signed=True)
            lines.append([name, f"against {other}", f"{len(tasks)} tasks", f"{metric} {interval}"])
    return lines


def without(experiment: str, roots: Sequence[str]) -> int:
    """Write a spec that trains without the rollouts of roots (`taint.ROOTS`).

    Raises:
        LakeError: an unknown root. SpecError: none of its rollouts trains the experiment, or all that do are of them.
    """
    with connect() as connection:
        leave_out([experiment], taint.roots_of(connection, roots) or (), roots)
    return 0


def leave_out(experiments: Sequence[str], of_roots: Collection[str], roots: Sequence[str]) -> None:
    """Write specs of experiments without rollouts. Raises SpecError if one trains on none of them, or on them alone."""
    for experiment in experiments:
        trained = {row["rollout_id"] for row in _ask("training_rollouts", experiment=experiment)}
        left_out = sorted(trained.intersection(of_roots))
        if not left_out or len(left_out) == len(trained):
            raise SpecError(f"{experiment} trains on {len(left_out)} of {len(trained)} rollouts of {', '.join(roots)}")
        _write(experiment, {spec_name("_".join(roots)): (left_out, f"rollouts of {', '.join(roots)}")})


def _write(
    experiment: str, arms: Mapping[str, tuple[Sequence[str], str]], lengths: Mapping[str, float] = MappingProxyType({})
) -> None:
    """Write specs that train without rollouts: the end of the name -> the rollouts, and words for them.

    Args:
        lengths: keys of [train] that differ.
    """
    train = "".join(f"{key} = {value:.4f}\n" for key, value in lengths.items())
    specs = [
        NewSpec(
            "experiment",
            f"{experiment}_without_{name}",
            f"extends = {quoted(experiment)}\ntitle = {quoted(f'{experiment} without {len(left_out)} {words}')}\n"
            f'blame = "none"\n\n[select]\nexclude_rollouts = {quoted(left_out)}\n'
            + (f"\n[train]\n{train}" if train else ""),
        )
        for name, (left_out, words) in arms.items()
    ]
    for file in write_specs(specs):
        print(f"wrote {file}")
    print(f"Next: etpi run {' '.join(spec.name for spec in specs)}")
