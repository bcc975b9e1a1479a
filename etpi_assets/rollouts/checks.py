"""What must hold of captured rollouts before anything is built on them.

Belongs here: the checks of `raw_rollouts` and `eval_rollouts`, as plain functions. Does not belong here: the checks of
what is made from rollouts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from itertools import groupby

import pyarrow as pa
import pyarrow.compute as pc

from etpi_assets.rollouts.tables import iter_prompts, prompts_digest
from etpi_resources.checks import CheckOutcome

_SHOWN = 3


def prompts_reconstruct(digests: Mapping[str, str], tables: Mapping[str, pa.Table]) -> CheckOutcome:
    """Every prompt read back from `turns` equals the prompt as captured, id for id.

    `digests`: rollout_id -> `tables.captured_digest` of the record, for every rollout.
    """
    total, bad = 0, []
    seen: set[str] = set()
    for rollout_id, prompts in groupby(iter_prompts(tables["turns"]), key=lambda item: item[0][0]):
        turns = [(agent_id, turn, ids) for (_, agent_id, turn), ids in prompts]
        total += len(turns)
        seen.add(rollout_id)
        if digests.get(rollout_id) != prompts_digest(turns):
            bad.append(rollout_id)
    bad += [rollout_id for rollout_id in digests.keys() - seen if digests[rollout_id] != prompts_digest([])]
    stored = pc.sum(pc.list_value_length(tables["turns"]["suffix_ids"])).as_py() or 0  # pyright: ignore[reportAttributeAccessIssue]
    whole = pc.sum(tables["turns"]["prompt_tokens"]).as_py() or 0  # pyright: ignore[reportAttributeAccessIssue]
    message = f"{total} prompts read back as captured; {stored} ids are stored for {whole}."
    if bad:
        message = (
            f"Prompts of {len(bad)} rollouts do not read back as captured, first {sorted(bad)[:_SHOWN]}: the prefix "
            "encoding is broken; do not use this version."
        )
    figures = {"prompts": total, "broken_rollouts": len(bad), "stored_ids": stored, "prompt_ids": whole}
    return CheckOutcome("prompts_reconstruct", not bad, message, figures=figures)


def native_ids_present(tables: Mapping[str, pa.Table], *, live: bool) -> CheckOutcome:
    """No turn that claims native capture lacks ids; in a live set every turn is native and there are turns at all."""
    without: list[str] = []
    captures: Counter[str] = Counter()
    columns = ["rollout_id", "agent_id", "turn", "capture", "prompt_tokens", "output_tokens", "finish_reason"]
    for row in tables["turns"].select(columns).to_pylist():
        captures[row["capture"]] += 1
        expected = live or row["capture"] == "native"
        if expected and (row["capture"] != "native" or not row["prompt_tokens"] or not row["output_tokens"]):
            without.append(f"{row['rollout_id']}/{row['agent_id']}/{row['turn']}")
    figures = {"captures": dict(captures), "turns_without_ids": len(without)}
    if live and not captures:
        message = "No turn was captured at all: an empty capture is a failure; look at the rollouts' `error`."
        return CheckOutcome("native_ids_present", False, message, figures=figures)
    message = (
        f"{captures['native']} native turns, all with ids."
        if not without
        else f"{len(without)} turns have no token ids, first {without[:_SHOWN]}: the engine did not return them; use "
        "one that captures natively, or import the rollouts and re-tokenise."
    )
    return CheckOutcome("native_ids_present", not without, message, figures=figures)


def counts_reconcile(tables: Mapping[str, pa.Table], *, found: int, quarantined: int) -> CheckOutcome:
    """Rollouts + quarantined = found, ids are unique, and agents, turns and messages all belong to a rollout and are as
    many as their parents say."""
    rollouts, agents = tables["rollouts"].to_pylist(), tables["agents"].to_pylist()
    problems: list[str] = []
    if len(rollouts) + quarantined != found:
        problems.append(f"{len(rollouts)} rollouts + {quarantined} quarantined is not the {found} found")
    if twice := [key for key, n in Counter(row["rollout_id"] for row in rollouts).items() if n > 1]:
        problems.append(f"{len(twice)} rollout ids occur more than once, first {twice[:_SHOWN]}")
    seats = Counter(row["rollout_id"] for row in agents)
    if wrong := [row["rollout_id"] for row in rollouts if seats[row["rollout_id"]] != row["agents"]]:
        problems.append(f"{len(wrong)} rollouts have another number of agents than they say, first {wrong[:_SHOWN]}")
    if lost := seats.keys() - {row["rollout_id"] for row in rollouts}:
        problems.append(f"agents of {len(lost)} unknown rollouts, first {sorted(lost)[:_SHOWN]}")
    said = {(row["rollout_id"], row["agent_id"]): row["turns"] for row in agents}
    turns = _agents_in(tables["turns"])
    if wrong := [key for key, n in said.items() if turns[key] != n]:
        problems.append(f"{len(wrong)} agents have another number of turns than they say, first {wrong[:_SHOWN]}")
    if lost := (turns.keys() | _agents_in(tables["messages"]).keys()) - said.keys():
        problems.append(f"turns or messages of {len(lost)} unknown agents, first {sorted(lost)[:_SHOWN]}")
    figures = {
        "found": found,
        "rollouts": len(rollouts),
        "quarantined": quarantined,
        "agents": len(agents),
        "turns": turns.total(),
    }
    message = "; ".join(problems) or f"{found} found = {len(rollouts)} rollouts + {quarantined} quarantined."
    if problems:
        message += ". Rows were lost or doubled on the way here; do not use this version."
    return CheckOutcome("counts_reconcile", not problems, message, figures=figures)


def _agents_in(table: pa.Table) -> Counter[tuple[str, str]]:
    return Counter(zip(table["rollout_id"].to_pylist(), table["agent_id"].to_pylist(), strict=True))
