"""A small lake with every asset in it, made by hand: what the catalog and the report queries are tested on.

One task of two agents, rolled out twice by a strong teacher and once by a weak one; experiment `strong` trains on the
first rollout and is evaluated, experiment `follow_up` starts from its checkpoint, experiment `blocked` is stopped by a
check. `random_turns` makes turn tables with forks, and the prompts they stand for.
"""

from __future__ import annotations

import json
import random
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pyarrow as pa

from etpi_assets.graph import GRAPH
from etpi_assets.reports.changes import STORED, changes, changes_table
from etpi_resources.lake.check_outcome import CheckOutcome
from etpi_resources.lake.lake import Lake, Manifest, Ref
from etpi_resources.lake.schemas import empty, from_rows
from etpi_resources.prefix_tree import CHAIN

AT = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)
Prompts = dict[tuple[str, str, int], list[int] | None]
Rows = dict[str, list[dict[str, Any]]]
"""Table -> its rows."""


def random_turns(
    rng: random.Random, rollouts: int, turns: int, fork: float, ids: int = 4, captured: float = 1.0
) -> tuple[list[dict[str, Any]], Prompts]:
    """Rows of `turns` (keys, prefix_turn, suffix_ids, output_ids) and the whole prompts they stand for, by the plain
    definition: a prompt is that of the turn it extends, its output, and the suffix. With probability `fork` a turn
    extends any earlier turn or none, otherwise the last."""
    rows, prompts = [], {}
    for number in range(rollouts):
        for agent in ("agent1", "agent2")[: 1 + number % 2]:
            whole: dict[int, list[int]] = {}
            for turn in range(turns):
                key = {"rollout_id": f"r{number}", "agent_id": agent, "turn": turn}
                if rng.random() > captured:
                    rows.append(key | {"prefix_turn": None, "suffix_ids": None, "output_ids": None})
                    prompts[f"r{number}", agent, turn] = None
                    continue
                prefix = max(whole, default=None)
                if rng.random() < fork:
                    prefix = rng.choice([None, *whole])
                suffix = [rng.randrange(1000) for _ in range(rng.randrange(ids + 1))]
                output = [rng.randrange(1000) for _ in range(rng.randrange(1, ids + 1))]
                prompt = [*(whole[prefix] if prefix is not None else []), *suffix]
                whole[turn] = prompt + output
                prompts[f"r{number}", agent, turn] = prompt
                rows.append(
                    key
                    | {"prefix_turn": prefix, "suffix_ids": suffix, "output_ids": output, "prompt_tokens": len(prompt)}
                )
    return rows, prompts


def put(lake: Lake, asset: str, key: str, tables: Rows, **more: Any) -> Manifest:
    """Publish rows as an asset's version; its other tables are empty."""
    node = GRAPH[asset]
    filled: dict[str, pa.Table] = {name: empty(name) for name in node.tables}
    filled |= {name: from_rows(name, rows) for name, rows in tables.items()}
    keys = {"input_key": f"{asset}:{key}", "inputs": {}, "spec_hash": "s"}
    return lake.publish(Ref(asset, node.set, key), filled, **keys | more)


def spec(noun: str, name: str, title: str, **content: Any) -> Rows:
    return {"specs": [{"kind": noun, "name": name, "title": title, "spec": json.dumps(content), "sha256": name}]}


PASSED = {"reward": 1.0, "verdict": "passed"}


def rollout(rollout_id: str, teacher: str, **more: Any) -> dict[str, Any]:
    row = {
        "rollout_id": rollout_id, "origin": "set", "suite": "coop", "task_id": "t1", "task_hash": "h", "repo": "harbor",
        "sample": 0, "engine": "scripted", "teacher": teacher, "exit_status": "Submitted", "agents": 2,
        "outcome": json.dumps(PASSED), "started_at": AT, "wall_seconds": 2.5,
    }  # fmt: skip
    return row | more


def conversation(rollout_id: str, think: int = 2) -> Rows:
    """Two agents of three turns; each prompt extends the last by two ids."""
    turns, agents, messages = [], [], []
    for number, agent in enumerate(("agent1", "agent2")):
        agents.append(
            {
                "rollout_id": rollout_id, "agent_id": agent, "feature_id": f"f{number}", "role": "proposer",
                "exit_status": "Submitted", "turns": 3, "output_tokens": 9,
            }
        )  # fmt: skip
        for turn in range(3):
            action = {"kind": "bash", "command": f"cat file{turn}", "form": "xml"}
            if turn == 0:
                action = {"kind": "send_message", "command": "send_message partner", "to": "agent2", "message": "plan"}
            turns.append(
                {
                    "rollout_id": rollout_id, "agent_id": agent, "turn": turn,
                    "prefix_turn": turn - 1 if turn else None, "suffix_ids": [1, 2] if turn else [10, 11, 12],
                    "output_ids": [20 + turn, 30, 40], "logprobs": [-0.1, -0.2, -0.3], "capture": "native",
                    "prompt_tokens": 3 + 5 * turn, "output_tokens": 3, "finish_reason": "stop",
                    "content": f"turn {turn}", "think_tokens": think - turn, "actions": json.dumps([action]),
                    "observation": "ok", "exit_code": 0, "inbox": "[]", "at": AT,
                }
            )  # fmt: skip
            messages.append(
                {"rollout_id": rollout_id, "agent_id": agent, "index": turn, "turn": turn, "role": "assistant",
                 "content": f"turn {turn}", "kind": "action", "at": AT}
            )  # fmt: skip
    return {"agents": agents, "turns": turns, "messages": messages}


def merged(*parts: Rows) -> Rows:
    return {name: [row for part in parts for row in part.get(name, [])] for name in parts[0]}


def score(rollout_id: str, reward: float, plan: bool) -> dict[str, Any]:
    return {
        "rollout_id": rollout_id, "task_id": "t1", "repo": "harbor", "reward": reward,
        "verdict": "passed" if reward == 1 else "failed_tests", "plan_first": plan,
        "plan_first_reason": None if plan else "ls before the first message", "plan_content": plan,
        "follow_through": 1.0 if plan else 0.0, "output_tokens": 18, "turns": 6, "exit_status": "Submitted",
        "infrastructure_error": False,
    }  # fmt: skip


def agent_scores(rollout_id: str, follows: bool) -> list[dict[str, Any]]:
    return [
        {"rollout_id": rollout_id, "agent_id": agent, "plan_first": follows, "follow_through": follows, "turns": 3,
         "output_tokens": 9, "think_tokens": 6, "parse_rate": 1.0, "exit_status": "Submitted"}
        for agent in ("agent1", "agent2")
    ]  # fmt: skip


def turn_scores(rollout_id: str, adhering: int) -> list[dict[str, Any]]:
    """Both agents' three turns; the first `adhering` of each keep to the structure."""
    return [
        {"rollout_id": rollout_id, "agent_id": agent, "turn": turn, "think_tokens": 20 - turn,
         "post_think_tokens": 30 + turn, "adheres": turn < adhering}
        for agent in ("agent1", "agent2")
        for turn in range(3)
    ]  # fmt: skip


def checkpoint(checkpoint_id: str, experiment: str, role: str, **more: Any) -> dict[str, Any]:
    row: dict[str, Any] = {
        "checkpoint_id": checkpoint_id, "experiment": experiment, "role": role, "step": 0, "final": True,
        "method": role,
    }  # fmt: skip
    return row | {"path": f"checkpoints/{checkpoint_id}", "wall_seconds": 12.0, "hyperparameters": "{}", **more}


def dataset_row(rollout_id: str, agent: str, turn: int, **more: Any) -> dict[str, Any]:
    row = {
        "dataset_row_id": f"d-{rollout_id}-{agent}-{turn}", "pair_id": f"{rollout_id}/{agent}/{turn}",
        "rollout_id": rollout_id, "agent_id": agent, "turn": turn, "task_id": "t1", "repo": "harbor",
        "teacher": "strong", "split": "train", "weight": 1.0, "copies": 1, "output_tokens": 3,
        "sequence_id": f"s-{agent}", "span_start": 3 + 5 * turn, "span_end": 6 + 5 * turn,
    }  # fmt: skip
    return row | more


def dataset(rollout_id: str) -> Rows:
    rows = [dataset_row(rollout_id, agent, turn) for agent in ("agent1", "agent2") for turn in range(3)]
    for row in rows:
        row["weight"] = 12.0 if row["turn"] == 0 else 1.0
    rows[-1]["split"] = "val"
    sequence = {"sequence_id": "s-agent1", "split": "train", "rollout_id": rollout_id, "agent_id": "agent1", "rows": 3}
    return {"dataset_rows": rows, "sequences": [{**sequence, **CHAIN, "input_ids": [10, 11, 12, 20, 30, 40]}]}


def metric(experiment: str, role: str, name: str, value: float) -> dict[str, Any]:
    return {
        "experiment": experiment, "checkpoint_role": role, "seed": None if role == "teacher" else 0,
        "decoding": "t1", "metric": name, "value": value, "n": 24, "unit": "pair", "ci_low": value - 0.1,
        "ci_high": value + 0.05, "interval": "wilson", "excluded": 0,
    }  # fmt: skip


def make(root: Path) -> Lake:
    lake = Lake(root)
    put(lake, "suite_spec", "coop", spec("suite", "coop", "Two agents", family="coop_tiny_shared"))
    task = {"task_id": "t1", "suite": "coop", "repo": "harbor", "split": "train", "instruction": "fold the lantern"}
    refused = {"asset": "tasks", "source": "t2", "reason": "reference_fails", "detail": "mend the task"}
    put(lake, "tasks", "coop", {"tasks": [task], "quarantined": [refused]})
    content: dict[str, Any] = {"kind": "live", "suite": "coop", "k": 2, "agent": {"tokenizer": "tiny"}}
    for teacher in ("strong", "weak"):
        name = f"{teacher}_set"
        put(lake, "rollout_set_spec", name, spec("rollout_set", name, name, **content, engine={"teacher": teacher}))
    blind = {"outcome": json.dumps(PASSED | {"details": {"verdict_trust": "blind"}})}
    strong = [
        rollout("r1", "strong", rollout_set="strong_set", sampler=json.dumps({"temperature": 0.7}), **blind),
        rollout("r2", "strong", rollout_set="strong_set", sample=1),
    ]
    raw = merged(conversation("r1"), conversation("r2", think=3))
    put(lake, "raw_rollouts", "strong_set", {"rollouts": strong, **raw})
    scores = [score("r1", 1.0, True), score("r2", 0.0, False)]
    behaviours = agent_scores("r1", True) + agent_scores("r2", False)
    held = turn_scores("r1", 3) + turn_scores("r2", 1)
    put(lake, "scored_rollouts", "strong_set", {"scores": scores, "agent_scores": behaviours, "turn_scores": held})
    weak = rollout("r3", "weak", rollout_set="weak_set", exit_status="LimitsExceeded")
    put(lake, "raw_rollouts", "weak_set", {"rollouts": [weak], **conversation("r3")})
    scored = {"scores": [score("r3", 1.0, False)], "agent_scores": agent_scores("r3", False)}
    put(lake, "scored_rollouts", "weak_set", scored)
    _strong(lake)
    _follow_up(lake)
    _reinforced(lake)
    _blocked(lake)
    board = {"experiment": "strong", "title": "Strong teacher", "checkpoint_role": "sft", "decoding": "t1"}
    figures = {"metric": "plan_first", "value": 0.9, "n": 24, "ci_low": 0.7, "ci_high": 1.0, "seeds": 1}
    put(lake, "leaderboard", "all", {"leaderboard": [board | figures]})
    ceiling = {
        "experiment": "strong", "teacher": "strong", "filtered": True, "checkpoint_role": "sft", "decoding": "t1",
        "metric": "plan_first", "n": 24, "teacher_value": 0.957, "selected_value": 1.0, "student_value": 0.9,
    }  # fmt: skip
    put(lake, "teacher_ceiling", "all", {"teacher_ceiling": [ceiling]})
    return lake


def _experiment(lake: Lake, name: str, title: str, rollouts: str, base: dict[str, str], method: str) -> None:
    content = {"rollout_sets": [rollouts], "seeds": [0], "base": base, "train": {"method": method}}
    put(lake, "experiment_spec", name, spec("experiment", name, title, **content))


def _curated(lake: Lake, experiment: str, rollout_id: str) -> Manifest:
    """Selection, pairs and data set of one rollout."""
    taken = {
        "rollout_id": rollout_id, "rollout_set": "strong_set", "task_id": "t1", "repo": "harbor", "teacher": "strong",
        "rule": "shortest_correct",
    }  # fmt: skip
    left = {"stage": "selection", "rollout_id": "r2", "reason": "reward_below_minimum", "detail": "0.0 < 1.0"}
    put(lake, "selected_trajectories", experiment, {"selected": [taken], "dropped": [left]})
    kept = ("rollout_id", "agent_id", "turn", "prefix_turn", "suffix_ids", "output_ids", "capture")
    pairs = [
        {
            "pair_id": f"{rollout_id}/{t['agent_id']}/{t['turn']}", "metadata": json.dumps({"task_id": "t1"}),
            "input_tokens": t["prompt_tokens"], "prompt_edit": "none", "think_removed": 0, "format_tokens": 2,
            **{name: t[name] for name in kept},
        }
        for t in conversation(rollout_id)["turns"]
    ]  # fmt: skip
    gone = {"stage": "pairs", "rollout_id": rollout_id, "agent_id": "agent2", "turn": 3, "reason": "unparseable"}
    put(lake, "tito_pairs", experiment, {"pairs": pairs, "dropped": [gone]})
    return put(lake, "upweighted_dataset", experiment, dataset(rollout_id))


def _strong(lake: Lake) -> None:
    _experiment(lake, "strong", "Strong teacher", "strong_set", {"kind": "tiny", "tokenizer": "tiny"}, "full")
    version = _curated(lake, "strong", "r1").version
    put(lake, "base_checkpoint", "strong", {"checkpoints": [checkpoint("base0", "strong", "base")]})
    sft = {"parent_id": "base0", "dataset_version": version, "seed": 0, "label_tokens": 15, "train_loss": 0.1}
    last = checkpoint("sft1", "strong", "sft", **sft, step=200)
    rows = [checkpoint("sft1-100", "strong", "sft", **sft, step=100, final=False), last]
    line = {"experiment": "strong", "role": "sft", "seed": 0}
    log = [line | {"step": step, "loss": 1 / (step + 1)} for step in range(3)]
    put(lake, "sft_checkpoint", "strong", {"checkpoints": rows, "training_log": log})
    put(lake, "rl_checkpoint", "strong", {})
    blamed = {
        "seed": 0, "step": 200, "objective": "solved", "dataset_row_id": "d-r1-agent1-0", "rollout_id": "r1",
        "agent_id": "agent1", "turn": 0, "influence": -1.0, "influences": [-1.5, 0.5, 0.0],
    }  # fmt: skip
    put(lake, "blame", "strong", {"blame": [blamed]})
    probe = {"role": "sft", "seed": 0, "probe": "first_turn_message", "prompt_set": "heldout", "n": 20, "passed": True}
    early, late = {"checkpoint_id": "sft1-100", "step": 100, "value": 0.5}, {"checkpoint_id": "sft1", "value": 1.0}
    put(lake, "serving_probe", "strong", {"probes": [probe | early, probe | late]})
    held = {"origin": "eval", "experiment": "strong", "seed": 0, "decoding": "t1"}
    evaluated = [rollout(f"e-{role}", role, **held, checkpoint_role=role) for role in ("base", "sft")]
    talk = merged(conversation("e-base"), conversation("e-sft"))
    put(lake, "eval_rollouts", "strong", {"rollouts": evaluated, **talk})
    metrics = [
        metric("strong", role, name, value)
        for name in ("plan_first", "follow_through", "solved")
        for role, value in (("base", 0.1), ("sft", 0.9), ("teacher", 0.95))
    ]
    scores = [score("e-base", 0.0, False), score("e-sft", 1.0, True)]
    figures = {"metrics": metrics, "scores": scores, "agent_scores": agent_scores("e-sft", True)}
    put(lake, "eval_metrics", "strong", figures)
    report = {"experiment": "strong", "kind": "html", "path": "reports/strong/report.html", "bytes": 10}
    put(lake, "experiment_report", "strong", {"reports": [report], "changes": _changes(lake, "strong")})
    put(lake, "model_card", "strong", {"reports": [report | {"kind": "model_card"}]})


def _follow_up(lake: Lake) -> None:
    """Starts from the checkpoint of `strong`, on a rollout of its own; its data set was rebuilt since it trained."""
    _experiment(lake, "follow_up", "From the strong student", "strong_set", {"kind": "path"}, "lora")
    version = _curated(lake, "follow_up", "r3").version
    put(lake, "base_checkpoint", "follow_up", {"checkpoints": [checkpoint("sft1", "follow_up", "base")]})
    sft = {"parent_id": "sft1", "dataset_version": version, "seed": 0, "step": 50}
    put(lake, "sft_checkpoint", "follow_up", {"checkpoints": [checkpoint("sft2", "follow_up", "sft", **sft)]})
    _curated(lake, "follow_up", "r2")


def _reinforced(lake: Lake) -> None:
    """Two attempts of a step by the student of `strong`, and an evaluation: what the reinforced checkpoint parses and
    solves, the fine-tuned one did not."""
    samples = [
        {"rollout_id": f"s-{place}", "task_id": "t1", "seed": 0, "step": 0, "place": place, "parsed": True,
         "solved": called, "called": called, "reward": float(called), "advantage": 0.7 if called else -0.7,
         # Of six turns of three ids; the second attempt was left out of the loss.
         "policy_logprobs": [-0.01 * at for at in range(18)] if called else None,
         "entropies": [0.1 * at for at in range(18)] if called else None}
        for place, called in enumerate((True, False))
    ]  # fmt: skip
    of: dict[str, Any] = {"experiment": "reinforced", "seed": 0}
    sampler = json.dumps({"temperature": 1.0, "top_p": 1.0, "max_tokens": 128, "seed": 0})
    trained = {
        "checkpoints": [checkpoint("rl1", "reinforced", "rl", parent_id="sft1", seed=0, step=1)],
        "rl_samples": samples,
        "rollouts": [rollout(f"s-{place}", "sft1", origin="rl", sampler=sampler, **of) for place in (0, 1)],
    }
    put(lake, "rl_checkpoint", "reinforced", trained | merged(conversation("s-0"), conversation("s-1")))
    outcome = json.dumps({"reward": 0.0, "verdict": "failed_tests", "details": {"depth": 3, "right": 2}})
    of |= {"origin": "eval", "decoding": "t1", "outcome": outcome}
    evaluated = [rollout(f"f-{role}", role, checkpoint_role=role, **of) for role in ("sft", "rl")]
    talk = merged(conversation("f-sft"), conversation("f-rl"))
    put(lake, "eval_rollouts", "reinforced", {"rollouts": evaluated, **talk})
    unread = [row | {"parse_rate": 0.5} for row in agent_scores("f-sft", True)]
    scores = [score("f-sft", 0.0, True), score("f-rl", 1.0, True)]
    put(lake, "eval_metrics", "reinforced", {"scores": scores, "agent_scores": unread + agent_scores("f-rl", True)})
    put(lake, "experiment_report", "reinforced", {"changes": _changes(lake, "reinforced")})


def _changes(lake: Lake, experiment: str) -> list[dict[str, Any]]:
    rollouts = lake.read(Ref("eval_rollouts", "experiment", experiment), "rollouts")
    metrics = Ref("eval_metrics", "experiment", experiment)
    scores, agents = (lake.read(metrics, table) for table in ("scores", "agent_scores"))
    return changes_table(experiment, changes(rollouts, scores, agents, STORED)).to_pylist()


def _blocked(lake: Lake) -> None:
    _experiment(lake, "blocked", "Weak teacher", "weak_set", {"kind": "tiny"}, "full")
    message = "plan_first of the teacher is 0.13, below 0.7; choose another"
    gate = CheckOutcome("teacher_gate", False, message, figures={"n": 24})
    note = CheckOutcome("role_balance", True, "0.5 of rows are proposers'", blocking=False)
    put(lake, "upweighted_dataset", "blocked", dataset("r3"), checks=(gate, note))


PAIRS = Ref("tito_pairs", "experiment", "plan_first")


def turns(count: int, start: int = 0) -> pa.Table:
    rows = [
        {"rollout_id": f"r{i // 4}", "agent_id": "agent1", "turn": i % 4, "output_ids": [i, i + 1],
         "capture": "native", "suffix_ids": [7, i] if i % 3 else None, "logprobs": [-0.5, -1.25],
         "content": f"turn {i}"}
        for i in range(start, start + count)
    ]  # fmt: skip
    return from_rows("turns", rows)


def publish(lake: Lake, ref: Ref = PAIRS, rows: int = 5, input_key: str = "k", **options):
    options = {"inputs": {"raw_rollouts/s": "v1"}, "spec_hash": "h", **options}
    return lake.publish(ref, {"turns": turns(rows)}, input_key=input_key, **options)
