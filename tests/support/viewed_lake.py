"""A small lake for tests of `etpi view`: two agents who write hostile texts, a teacher, base and student, a data set in
two versions with a branching sequence, and a rollout of reinforcement.

Token id i of the tokenizer "tiny" reads "<i>"; 40 is "</script>" and 41 a line break.
"""

from __future__ import annotations

import json
from datetime import timedelta
from pathlib import Path
from typing import Any

from starlette.testclient import TestClient

from etpi.view.app import make_app
from etpi_assets.graph import GRAPH
from etpi_resources.lake import catalog
from etpi_resources.lake.lake import Lake
from tests.support.small_lake import AT, checkpoint, dataset_row, merged, metric, put, rollout, score, spec

HOSTILE = "<script>alert('x')</script>\u202e\x1b"
WORDS = [f"<{number}>" for number in range(40)] + ["</script>", "\n"] + [f"<{number}>" for number in range(42, 60)]
NAMES = {
    "teacher": "trainedon1", "dropped": "dropped1", "base": "heldbase1", "student": "heldsft1", "rl": "reinforced1",
}  # fmt: skip
SET, STUDY = "teacher_set", "study"


def action(command: str = "", to: str | None = None, message: str | None = None) -> dict[str, Any]:
    kind = "send_message" if to else "bash"
    return {"kind": kind, "command": command, "to": to, "message": message, "form": "xml", "pure": True}


def turn(rollout_id: str, agent: str, number: int, content: str, *actions: Any, **more: Any) -> dict[str, Any]:
    """Return a turn; its prompt is [1, 2, 3, 4] and then what each turn before it wrote and read."""
    row = {
        "rollout_id": rollout_id, "agent_id": agent, "turn": number, "prefix_turn": number - 1 if number else None,
        "suffix_ids": [30 + number] if number else [1, 2, 3, 4], "output_ids": [10 + number, 20, 40],
        "logprobs": [-0.1, -1.2, -5.0], "capture": "native", "prompt_tokens": 4 + 4 * number, "output_tokens": 3,
        "finish_reason": "stop", "content": content, "think_tokens": 1, "actions": json.dumps(actions),
        "observation": f"observation of {agent} {number}", "exit_code": 0, "inbox": "[]",
        "at": AT + timedelta(seconds=number),
    }  # fmt: skip
    return row | more


def conversation(rollout_id: str, **columns: Any) -> dict[str, list[dict[str, Any]]]:
    """Return rows of a rollout of two agents: agent1 sends a plan that agent2 reads a round later, then both work."""
    plan = f"plan: you take b {HOSTILE}"
    inbox = json.dumps([{"from": "agent1", "message": plan}])
    begins = f"<think>who does what {HOSTILE}</think>first words"
    looks = action(f"cat a # {HOSTILE}")
    turns = [
        turn(rollout_id, "agent1", 0, begins, action(to="agent2", message=plan)),
        turn(rollout_id, "agent1", 1, "second words", looks, observation=f"content {HOSTILE}"),
        turn(rollout_id, "agent2", 0, "other words", action("ls"), exit_code=2),
        turn(rollout_id, "agent2", 1, "answer words", action("sed -i s/1/2/ b"), inbox=inbox),
    ]
    agents = [
        {"rollout_id": rollout_id, "agent_id": name, "feature_id": f"f{place}", "role": role, "turns": 2,
         "exit_status": "Submitted", "output_tokens": 6}
        for place, (name, role) in enumerate((("agent1", "proposer"), ("agent2", "responder")))
    ]  # fmt: skip
    messages = [
        {"rollout_id": rollout_id, "agent_id": name, "index": index, "turn": None, "role": role, "kind": "prompt",
         "content": f"{role} prompt of {name} {HOSTILE}", "at": AT}
        for name in ("agent1", "agent2")
        for index, role in enumerate(("system", "user"))
    ]  # fmt: skip
    diff = f"--- a/a.py\n+++ b/a.py\n@@ -1 +1 @@\n-old line\n+new line {HOSTILE}\n"
    row = rollout(rollout_id, "strong", final_files=json.dumps({"agent1": diff}), **columns)
    return {"rollouts": [row], "agents": agents, "turns": turns, "messages": messages}


def outcome(verdict: str) -> str:
    capture = {"calls": 6, "turns": 4, "untrained": {"side": 1}, "refused": 1, "joined": 0, "links": {"drift": 2}}
    details = {"features": {"f1": verdict == "passed"}, "output": f"Traceback\n{HOSTILE}", "capture": capture}
    return json.dumps({"reward": float(verdict == "passed"), "verdict": verdict, "details": details})


def pairs(rollout_id: str) -> list[dict[str, Any]]:
    """Return the pairs of agent1: steering (id 2) is spliced out, and the first output id stripped."""
    return [
        {"pair_id": f"{rollout_id}/agent1/{number}", "rollout_id": rollout_id, "agent_id": "agent1",
         "turn": number, "prefix_turn": number - 1 if number else None,
         "suffix_ids": [31] if number else [1, 3, 4], "output_ids": [20, 40], "input_tokens": 3 + 3 * number,
         "capture": "native", "prompt_edit": "spliced+stripped" if number else "spliced", "think_removed": 1,
         "format_tokens": 0, "metadata": json.dumps({"source_output_tokens": 3, "tail": HOSTILE})}
        for number in range(2)
    ]  # fmt: skip


def dataset(rollout_id: str, weights: tuple[float, ...]) -> dict[str, list[dict[str, Any]]]:
    """Return rows of as many turns as weights, and one sequence: a root of 3 ids with two branches, in the loss."""
    rows = [
        dataset_row(
            rollout_id, "agent1", number, dataset_row_id=f"{rollout_id}-{number}", weight=weight, output_tokens=2,
            sequence_id="seq1", span_start=3 + 3 * number, span_end=5 + 3 * number,
        )
        for number, weight in enumerate(weights)
    ]  # fmt: skip
    sequence = {
        "sequence_id": "seq1", "split": "train", "rollout_id": rollout_id, "agent_id": "agent1",
        "input_ids": [1, 3, 4, 20, 40, 31, 21, 41], "node_starts": [0, 3, 5], "node_parents": [-1, 0, 0],
        "node_positions": [0, 3, 3], "span_starts": [3, 6], "span_ends": [5, 8], "span_weights": list(weights[:2]),
        "rows": len(weights),
    }  # fmt: skip
    return {"dataset_rows": rows, "sequences": [sequence]}


def make(root: Path) -> Lake:
    lake = Lake(root)
    put(lake, "suite_spec", "coop", spec("suite", "coop", "Two agents", family="coop_tiny_shared"))
    task = {"suite": "coop", "repo": "harbor", "split": "train", "instruction": f"fold it {HOSTILE}"}
    put(lake, "tasks", "coop", {"tasks": [task | {"task_id": name} for name in ("t1", "t2")]})
    content = {"kind": "live", "suite": "coop", "k": 1, "agent": {"tokenizer": "tiny"}, "engine": {"teacher": "strong"}}
    put(lake, "rollout_set_spec", SET, spec("rollout_set", SET, "Teacher", **content))
    base: dict[str, Any] = {"kind": "tiny", "tokenizer": "tiny"}
    study = {"rollout_sets": [SET], "seeds": [0], "base": base, "train": {"method": "full"}, "note": HOSTILE}
    put(lake, "experiment_spec", STUDY, spec("experiment", STUDY, f"A study {HOSTILE}", **study))
    _rollouts(lake)
    chosen = {"rollout_id": NAMES["teacher"], "rollout_set": SET, "task_id": "t1", "repo": "harbor"}
    left = {"stage": "selection", "rollout_id": NAMES["dropped"], "reason": "reward_below_minimum", "detail": "0 < 1"}
    selected = {"selected": [chosen | {"rule": "shortest_correct"}], "dropped": [left]}
    put(lake, "selected_trajectories", STUDY, selected)
    put(lake, "tito_pairs", STUDY, {"pairs": pairs(NAMES["teacher"])})
    put(lake, "upweighted_dataset", STUDY, dataset(NAMES["teacher"], (1.0, 1.0, 1.0)))
    version = put(lake, "upweighted_dataset", STUDY, dataset(NAMES["teacher"], (12.0, 1.0))).version
    put(lake, "base_checkpoint", STUDY, {"checkpoints": [checkpoint("base0", STUDY, "base")]})
    sft = checkpoint("sft1", STUDY, "sft", parent_id="base0", dataset_version=version, seed=0, step=7)
    log = [{"experiment": STUDY, "role": "sft", "seed": 0, "step": step, "loss": 1.0 / step} for step in (1, 2, 3)]
    put(lake, "sft_checkpoint", STUDY, {"checkpoints": [sft], "training_log": log})
    metrics = [metric(STUDY, role, "solved", value) for role, value in (("base", 1.0), ("sft", 0.5))]
    scores = [score(NAMES["base"], 1.0, False), score(NAMES["student"], 0.0, True)]
    pooled = {"metrics": [row | {"seed": None} for row in metrics], "scores": [s | {"task_id": "t2"} for s in scores]}
    put(lake, "eval_metrics", STUDY, pooled)
    return lake


def _rollouts(lake: Lake) -> None:
    taught = conversation(NAMES["teacher"], rollout_set=SET, outcome=outcome("passed"), seed=0)
    dropped = conversation(
        NAMES["dropped"], rollout_set=SET, outcome=outcome("failed_tests"), task_id="t2", repo="quay", sample=1,
        exit_status="LimitsExceeded", started_at=AT + timedelta(days=1),
    )  # fmt: skip
    side = {"rollout_id": NAMES["dropped"], "agent_id": "agent1", "turn": None, "kind": "side1", "at": AT}
    for index, role in enumerate(("user", "assistant"), 2):
        dropped["messages"].append({**side, "index": index, "role": role, "content": f"side {role} {HOSTILE}"})
    put(lake, "raw_rollouts", SET, merged(taught, dropped))
    scores = [score(NAMES["teacher"], 1.0, True), score(NAMES["dropped"], 0.0, False) | {"output_tokens": 99}]
    put(lake, "scored_rollouts", SET, {"scores": scores})
    held = {"origin": "eval", "experiment": STUDY, "decoding": "t1", "task_id": "t2", "sample_seed": 0}
    base = conversation(NAMES["base"], **held, checkpoint_role="base", outcome=outcome("passed"))
    student = conversation(NAMES["student"], **held, checkpoint_role="sft", seed=0, outcome=outcome("failed_tests"))
    put(lake, "eval_rollouts", STUDY, merged(base, student))
    own = {"origin": "rl", "experiment": STUDY, "checkpoint_role": "rl", "seed": 0, "task_id": "t1"}
    sample = {
        "rollout_id": NAMES["rl"], "task_id": "t1", "seed": 0, "step": 2, "place": 0, "reward": 0.5, "advantage": 0.25,
        "parsed": True, "solved": True, "policy_tokens": 6, "read_tokens": 2,
        "policy_logprobs": [-9.0] * 3 + [-0.1, -1.2, -4.0], "entropies": [9.0] * 3 + [0.0, 0.9, 2.0],
    }  # fmt: skip
    put(lake, "rl_checkpoint", STUDY, conversation(NAMES["rl"], **own) | {"rl_samples": [sample]})


def build(lake: Lake, path: Path) -> Path:
    return catalog.build(lake, GRAPH.values(), path, vocabularies={"tiny": WORDS})


def client(lake: Lake, path: Path) -> TestClient:
    return TestClient(make_app(lake, path), base_url="http://localhost", raise_server_exceptions=True)


def put_blame(lake: Lake) -> None:
    """Publish influences of the teacher's turns, the second of which lowered the metric, and on a held-out task."""
    rows = [
        {"seed": 0, "step": 7, "objective": "solved", "dataset_row_id": f"{NAMES['teacher']}-{turn}",
         "rollout_id": NAMES["teacher"], "agent_id": "agent1", "turn": turn, "influence": sum(values),
         "influences": values}
        for turn, values in enumerate([[0.5, 2.0], [-2.0, 0.0]])
    ]  # fmt: skip
    task = {"seed": 0, "step": 7, "objective": "solved", "task_id": "t2", "influence": 0.25}
    tasks = [task | {"rollout_id": NAMES["teacher"]}]
    put(lake, "blame", STUDY, {"blame": rows, "blame_tasks": tasks})
