"""The checks of `raw_rollouts` and `eval_rollouts`, as plain functions.

Figures are computed per part of a set (`*_figures`), summed by `merged`, and judged by `*_outcome`.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from typing import Any

import orjson
import pyarrow as pa
import pyarrow.compute as pc

from etpi_assets.checks import judged, outcome, within
from etpi_assets.trajectories.tables import iter_prompts, prompts_digest
from etpi_resources.lake.check_outcome import CheckOutcome

_SHOWN = 3
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
    errors = [error for error in tables["rollouts"]["error"].to_pylist() if error is not None]
    return {
        "prompts": prompt_figures(digests, tables),
        "capture": capture_figures(tables, live=live),
        "counts": count_figures(tables) | {"read": dict(read or {})},
        "drift": drift_figures(tables["turns"]),
        "exits": dict(Counter(tables["rollouts"]["exit_status"].to_pylist())),
        "reasons": dict(Counter(tables["quarantined"]["reason"].to_pylist())),
        "errors": len(errors),
        "first_error": errors[:1],
    }


def set_outcomes(figures: Mapping[str, Any], *, total: int, live: bool) -> list[CheckOutcome]:
    """Judge the figures of a whole set of `total` rollouts and refusals."""
    return [
        judged("prompts_reconstruct", figures["prompts"]),
        captures_outcome(figures["capture"], live=live, errors=figures["first_error"]),
        counts_outcome(figures["counts"], total=total, quarantined=sum(figures["reasons"].values())),
        drift_outcome(figures["drift"]),
        budget_exhausted({"the set": figures["exits"]}, "agent.max_steps or agent.max_model_len"),
    ]


def set_metadata(figures: Mapping[str, Any]) -> dict[str, Any]:
    """Return the figures that the asset shows."""
    return {
        "exits": figures["exits"],
        "captures": figures["capture"]["captures"],
        "turns_with_drift": figures["drift"]["drifted"],
        "quarantined": figures["reasons"],
        "infrastructure_errors": figures["errors"],
        "first_error": (figures["first_error"] or [""])[0],
    }


def prompt_figures(digests: Mapping[str, str], tables: Mapping[str, pa.Table]) -> dict[str, Any]:
    """Count the prompts decoded from `turns`, and name the rollouts with one that is not the captured one."""
    total, bad = 0, []
    seen: set[str] = set()
    captured = tables["turns"].filter(pc.field("suffix_ids").is_valid())  # most imported runs have no ids
    for rollout_id, prompts in groupby(iter_prompts(captured), key=lambda item: item[0][0]):
        turns = [(agent_id, turn, ids) for (_, agent_id, turn), ids in prompts]
        total += len(turns)
        seen.add(rollout_id)
        if digests.get(rollout_id) != prompts_digest(turns):
            bad.append(rollout_id)
    bad += [rollout_id for rollout_id in digests.keys() - seen if digests[rollout_id] != prompts_digest([])]
    stored = pc.sum(pc.list_value_length(tables["turns"]["suffix_ids"])).as_py() or 0  # pyright: ignore[reportAttributeAccessIssue]
    whole = pc.sum(tables["turns"]["prompt_tokens"]).as_py() or 0  # pyright: ignore[reportAttributeAccessIssue]
    figures = {"prompts": total, "broken_rollouts": len(bad), "stored_ids": stored, "prompt_ids": whole}
    return figures | {"first": sorted(bad)[:_SHOWN]}


def capture_figures(tables: Mapping[str, pa.Table], *, live: bool) -> dict[str, Any]:
    """Count the turns of each capture, and name native ones, in a live set all, that have no ids."""
    without: list[str] = []
    captures: Counter[str] = Counter()
    columns = ["rollout_id", "agent_id", "turn", "capture", "prompt_tokens", "output_tokens"]
    for rollout_id, agent_id, turn, capture, prompt, output in zip(
        *(tables["turns"][name].to_pylist() for name in columns), strict=True
    ):
        captures[capture] += 1
        if (live or capture == "native") and (capture != "native" or not prompt or not output):
            without.append(f"{rollout_id}/{agent_id}/{turn}")
    return {"captures": dict(captures), "without": without}


def captures_outcome(figures: Mapping[str, Any], *, live: bool, errors: Sequence[str] = ()) -> CheckOutcome:
    """Judge the figures; the message has the first of the rollouts' errors, if no turn was captured."""
    captures, without = Counter(figures["captures"]), figures["without"]
    shown = {"captures": dict(captures), "turns_without_ids": len(without)}
    if live and not captures:
        why = f"the first rollout's error is: {errors[0].strip()[:_ERROR]}" if errors else "no rollout has an error"
        return outcome("native_ids_present", False, shown, case="empty", why=why)
    return outcome("native_ids_present", not without, shown, native=captures["native"], first=without[:_SHOWN])


def count_figures(tables: Mapping[str, pa.Table]) -> dict[str, Any]:
    """Count agents and turns, and describe those that are missing or of no rollout."""
    problems: list[str] = []
    rollouts = dict(zip(*(tables["rollouts"][name].to_pylist() for name in ("rollout_id", "agents")), strict=True))
    names = [tables["agents"][name].to_pylist() for name in ("rollout_id", "agent_id", "turns")]
    agent_counts = Counter(names[0])
    if wrong := [name for name, agents in rollouts.items() if agent_counts[name] != agents]:
        problems.append(f"{len(wrong)} rollouts whose `agents` is not their number, first {wrong[:_SHOWN]}")
    if unknown := agent_counts.keys() - rollouts.keys():
        problems.append(f"agents of {len(unknown)} unknown rollouts, first {sorted(unknown)[:_SHOWN]}")
    turn_counts = {(rollout_id, agent_id): turns for rollout_id, agent_id, turns in zip(*names, strict=True)}
    turns = _agents_in(tables["turns"])
    if wrong := [key for key, n in turn_counts.items() if turns[key] != n]:
        problems.append(f"{len(wrong)} agents have another number of turns than `agents.turns`, first {wrong[:_SHOWN]}")
    if unknown := (turns.keys() | _agents_in(tables["messages"]).keys()) - turn_counts.keys():
        problems.append(f"turns or messages of {len(unknown)} unknown agents, first {sorted(unknown)[:_SHOWN]}")
    ids = tables["rollouts"]["rollout_id"].to_pylist()
    calls = tables["messages"]["tool_calls"].drop_null().to_pylist()
    stored = {"messages": tables["messages"].num_rows, "calls": sum(map(_length, calls))}
    return {"ids": ids, "agents": len(names[0]), "turns": turns.total(), "problems": problems, "stored": stored}


def _length(text: str) -> int:
    """Return the number of items of a JSON array."""
    try:
        return len(orjson.loads(text))
    except ValueError:  # NaN and long integers are read by the standard library alone
        return len(json.loads(text))


def counts_outcome(figures: Mapping[str, Any], *, total: int, quarantined: int) -> CheckOutcome:
    """Judge the figures."""
    ids, problems = figures["ids"], list(figures["problems"])
    if twice := [key for key, n in Counter(ids).items() if n > 1]:
        problems.insert(0, f"{len(twice)} rollout ids occur more than once, first {twice[:_SHOWN]}")
    if len(ids) + quarantined != total:
        problems.insert(0, f"{len(ids)} rollouts + {quarantined} quarantined is not the {total} found")
    stored = figures["stored"]
    problems += [
        f"{n} {name} were read, {stored[name]} are stored"
        for name, n in figures.get("read", {}).items()
        if n != stored[name]
    ]
    shown = {
        "found": total,
        "rollouts": len(ids),
        "quarantined": quarantined,
        "agents": figures["agents"],
        "turns": figures["turns"],
        **stored,
    }
    return outcome("counts_reconcile", not problems, shown, problems="; ".join(problems))


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
    return {"later": native.num_rows - agents, "drifted": native.num_rows - native["drift_at"].null_count}


def drift_outcome(figures: Mapping[str, Any]) -> CheckOutcome:
    """Warn if many turns drift."""
    drifted, later = figures["drifted"], figures["later"]
    share = drifted / max(1, later)
    shown = {"later_turns": later, "with_drift": drifted, "share": share}
    return outcome("drift_bounded", within("drift_bounded", share), shown)


def merged(figures: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Sum the figures of several parts: add numbers, join lists, merge mappings recursively."""
    whole: dict[str, Any] = {}
    for part in figures:
        for name, value in part.items():
            if name not in whole:
                whole[name] = merged([value]) if isinstance(value, Mapping) else value
                if isinstance(value, list):
                    whole[name] = list(value)
            elif isinstance(value, Mapping):
                whole[name] = merged([whole[name], value])
            elif isinstance(value, list):
                whole[name].extend(value)
            else:
                whole[name] += value
    return whole


def _agents_in(table: pa.Table) -> Counter[tuple[str, str]]:
    return Counter(zip(table["rollout_id"].to_pylist(), table["agent_id"].to_pylist(), strict=True))
