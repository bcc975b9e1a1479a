"""The checks of `raw_rollouts` and `eval_rollouts`, as plain functions.

Figures are computed per part of a set (`*_figures`), summed by `merged`, and judged by `*_outcome`.
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import reduce
from itertools import chain, groupby
from operator import add
from typing import Any

import orjson
import pyarrow as pa
import pyarrow.compute as pc

from etpi_assets.checks import faulty, judged, outcome, within
from etpi_assets.trajectories.tables import iter_prompts, prompts_digest, turn_keys
from etpi_resources.lake.check_outcome import CheckOutcome
from etpi_resources.lake.stored import counts

_ERROR = 500
"""Characters shown of an error."""


def set_figures(
    tables: Mapping[str, pa.Table], digests: Mapping[str, str], *, live: bool, read: Mapping[str, int] | None = None
) -> dict[str, Any]:
    """Compute the figures of a part of a rollout set, which has whole rollouts.

    Args:
        digests: rollout_id -> `tables.captured_digest` of the record, for every rollout.
        live: whether every turn has to be native.
        read: the numbers of messages and calls of the records, if the rows have to be as many.
    """
    errors = tables["rollouts"]["error"].drop_null().to_pylist()
    return {
        "prompts": prompt_figures(digests, tables),
        "capture": capture_figures(tables["turns"], live=live),
        "counts": count_figures(tables) | {"read": dict(read or {})},
        "drift": drift_figures(tables["turns"]),
        "exits": dict(counts(tables["rollouts"], "exit_status")),
        "reasons": dict(counts(tables["quarantined"], "reason")),
        "errors": len(errors),
        "first_error": errors[:1],
    }


def set_outcomes(figures: Mapping[str, Any], *, total: int, live: bool) -> list[CheckOutcome]:
    """Judge the figures of a whole set of `total` rollouts and refusals."""
    return [
        judged("prompts_reconstruct", figures["prompts"]),
        captures_outcome(figures["capture"], live=live, errors=figures["first_error"]),
        counts_outcome(figures["counts"], total=total, quarantined=sum(figures["reasons"].values())),
        judged("drift_bounded", figures["drift"]),
        budget_exhausted({"the set": figures["exits"]}, "agent.max_steps or agent.max_model_len"),
    ]


def set_metadata(figures: Mapping[str, Any]) -> dict[str, Any]:
    """Return the figures that the asset shows."""
    return {
        "exits": figures["exits"],
        "captures": figures["capture"]["captures"],
        "turns_with_drift": figures["drift"]["with_drift"],
        "quarantined": figures["reasons"],
        "infrastructure_errors": figures["errors"],
        "first_error": (figures["first_error"] or [""])[0],
    }


def prompt_figures(digests: Mapping[str, str], tables: Mapping[str, pa.Table]) -> dict[str, Any]:
    """Count the prompts decoded from `turns`, and the rollouts with one that is not the captured one."""
    total, stored = 0, dict[str, str]()
    captured = tables["turns"].filter(pc.field("suffix_ids").is_valid())  # most imported runs have no ids
    for rollout_id, prompts in groupby(iter_prompts(captured), key=lambda item: item[0][0]):
        turns = [(agent_id, turn, ids) for (_, agent_id, turn), ids in prompts]
        total += len(turns)
        stored[rollout_id] = prompts_digest(turns)
    empty = prompts_digest([])
    names = digests.keys() | stored.keys()
    broken = sorted(name for name in names if digests.get(name) != stored.get(name, empty))
    lengths = pc.list_value_length(tables["turns"]["suffix_ids"])  # pyright: ignore[reportAttributeAccessIssue]
    sums = {"stored_ids": lengths, "prompt_ids": tables["turns"]["prompt_tokens"]}
    return {
        "prompts": total,
        "broken_rollouts": faulty(broken),
        **{name: pc.sum(column).as_py() or 0 for name, column in sums.items()},  # pyright: ignore[reportAttributeAccessIssue]
    }


def capture_figures(turns: pa.Table, *, live: bool) -> dict[str, Any]:
    """Count the turns of each capture, and native ones, in a live set all, that have no ids."""
    columns = (turns[name].to_pylist() for name in ("capture", "prompt_tokens", "output_tokens"))
    without = [
        f"{rollout_id}/{agent_id}/{turn}"
        for (rollout_id, agent_id, turn), capture, prompt, output in zip(turn_keys(turns), *columns, strict=True)
        if (live or capture == "native") and (capture != "native" or not prompt or not output)
    ]
    return {"captures": dict(counts(turns, "capture")), "turns_without_ids": faulty(without)}


def captures_outcome(figures: Mapping[str, Any], *, live: bool, errors: Sequence[str] = ()) -> CheckOutcome:
    """Judge the figures; the message has the first of the rollouts' errors, if no turn was captured."""
    captured = bool(figures["captures"]) or not live
    why = f"the first rollout's error is: {errors[0].strip()[:_ERROR]}" if errors else "no rollout has an error"
    native, case = figures["captures"].get("native", 0), "" if captured else "empty"
    return judged("native_ids_present", figures, holds=captured, case=case, native=native, why=why)


def count_figures(tables: Mapping[str, pa.Table]) -> dict[str, Any]:
    """Count agents and turns, and those that are missing or of no rollout."""
    rollouts = dict(zip(*(tables["rollouts"][name].to_pylist() for name in ("rollout_id", "agents")), strict=True))
    agents = counts(tables["agents"], "rollout_id")
    turns_of = dict(zip(_agents_in(tables["agents"]), tables["agents"]["turns"].to_pylist(), strict=True))
    turns, messages = (Counter(_agents_in(tables[name])) for name in ("turns", "messages"))
    calls = tables["messages"]["tool_calls"].drop_null().to_pylist()
    return {
        "ids": tables["rollouts"]["rollout_id"].to_pylist(),
        "agents": agents.total(),
        "turns": turns.total(),
        "other_agents": faulty(name for name, n in rollouts.items() if agents[name] != n),
        "unknown_rollouts": faulty(sorted(agents.keys() - rollouts.keys())),
        "other_turns": faulty(key for key, n in turns_of.items() if turns[key] != n),
        "unknown_agents": faulty(sorted((turns.keys() | messages.keys()) - turns_of.keys())),
        "stored": {"messages": messages.total(), "calls": sum(map(_length, calls))},
    }


def _length(text: str) -> int:
    """Return the number of items of a JSON array."""
    try:
        return len(orjson.loads(text))
    except ValueError:  # NaN and long integers are read by the standard library alone
        return len(json.loads(text))


def counts_outcome(figures: Mapping[str, Any], *, total: int, quarantined: int) -> CheckOutcome:
    """Judge the figures."""
    ids, stored, read = Counter(figures["ids"]), figures["stored"], figures.get("read", {})
    counted = {
        "found": total, "rollouts": ids.total(), "quarantined": quarantined, **figures, **stored,
        "lost": ids.total() + quarantined != total,
        "repeated": faulty(name for name, n in ids.items() if n > 1),
        **{f"lost_{name}": n != stored[name] for name, n in read.items()},
    }  # fmt: skip
    return judged("counts_reconcile", counted)


def tasks_as_asked(requested: int | None, had: int, split: str, rejected: int | None = None) -> CheckOutcome:
    """Warn if the suite has fewer tasks than the spec requests; rates then rest on fewer tasks.

    Args:
        requested: number of tasks in the spec; None: no limit, as for imports.
        had: number of tasks used.
        rejected: tasks that could not be proved, where no other check of the asset counts them.
    """
    case = "unlimited" if requested is None else ""
    figures = {"asked": requested, "had": had}
    if rejected is not None:
        figures |= {"found": had + rejected, "quarantined": rejected}
    return outcome("tasks_as_asked", requested is None or had >= requested, figures, case=case, split=split)


LIMITS = ("LimitsExceeded", "ContextWindowExceeded")
"""Exit statuses of an agent whose budget of turns, time or context ended before it submitted."""


def budget_exhausted(exits: Mapping[str, Mapping[str, int]], budgets: str) -> CheckOutcome:
    """Warn if most rollouts ended in a limit: then rates measure the budget, and not the model.

    Args:
        exits: exit statuses with their numbers of rollouts, for each group that is judged alone, such as a checkpoint.
        budgets: the keys that raise the budget.
    """
    rows = [(name, sum(counts.get(s, 0) for s in LIMITS), sum(counts.values())) for name, counts in exits.items()]
    figures = {name: {"ended_in_limits": ended, "rollouts": total} for name, ended, total in rows}
    shown = "; ".join(f"{name} {ended} of {total}" for name, ended, total in rows) or "none"
    exhausted = [
        (name, ended, total) for name, ended, total in rows if total and not within("budget_exhausted", ended / total)
    ]
    problems = "; ".join(f"{ended} of {total} rollouts of {name}" for name, ended, total in exhausted)
    return outcome("budget_exhausted", not exhausted, figures, ended=shown, problems=problems, budgets=budgets)


def drift_figures(turns: pa.Table) -> dict[str, int]:
    """Count the native turns after an agent's first, and those whose prompt does not extend the turn before."""
    native = turns.filter(pc.field("capture") == "native")
    agents = native.group_by(["rollout_id", "agent_id"]).aggregate([]).num_rows
    return {"later_turns": native.num_rows - agents, "with_drift": native.num_rows - native["drift_at"].null_count}


def merged(figures: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Sum the figures of several parts: add numbers, join lists, merge mappings recursively."""
    of_name: defaultdict[str, list[Any]] = defaultdict(list)
    for part in figures:
        for name, value in part.items():
            of_name[name].append(value)
    return {name: _sum(values) for name, values in of_name.items()}


def _sum(values: Sequence[Any]) -> Any:
    if isinstance(values[0], Mapping):
        return merged(values)
    return list(chain(*values)) if isinstance(values[0], list) else reduce(add, values)


def _agents_in(table: pa.Table) -> Iterator[tuple[str, str]]:
    return zip(table["rollout_id"].to_pylist(), table["agent_id"].to_pylist(), strict=True)
