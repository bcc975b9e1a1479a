"""Conditions of evaluations, probes of a served model, metrics and changes, tables of reports, and resolved specs."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pyarrow as pa

from etpi_assets.evaluation import probes
from etpi_assets.evaluation.metrics import measure, paired_changes, teacher_of, threshold_checks
from etpi_assets.evaluation.probe_plan import ProbePlan, PromptRenderer
from etpi_assets.evaluation.rollouts import checkpoint_rows, conditions, every_condition_ran, infrastructure_held
from etpi_assets.reports.changes import changes, changes_table
from etpi_assets.reports.leaderboard import EvaluatedExperiment, TeacherData, leaderboard, teacher_ceiling
from etpi_assets.resolved_specs.assets import _spec
from etpi_assets.scoring.intervals import decide, mean, rate, wilson
from etpi_assets.specs.experiment import EvaluateSection, MetricsSection, ProbeSection
from etpi_assets.specs.rollout_set import AgentSection
from etpi_assets.specs.suite import SuiteSpec
from etpi_assets.tasks.families import load_family
from etpi_assets.worlds import names
from etpi_resources.chat.format import load_chat_format
from etpi_resources.engines import Completion, ServedModel
from etpi_resources.lake.check_outcome import CheckOutcome
from etpi_resources.lake.schemas import from_rows
from tests.goldens.cases.tasks import world
from tests.goldens.golden import case

ROLES = ("base", "sft", "rl")


def outcome(check: CheckOutcome) -> dict[str, Any]:
    """Return a check's result without its sentence."""
    return {"name": check.name, "passed": check.passed, "blocking": check.blocking, "figures": check.figures}


# --- evaluation and probes --------------------------------------------------------------------------------------------


@case("evaluation", "conditions")
def evaluation_conditions() -> dict[str, Any]:
    section = EvaluateSection.model_validate(
        {"suite": "s", "steering_probe": True, "sample_seeds": [0, 1],
         "decodings": [{"name": "greedy", "temperature": 0.0}, {"name": "t1", "temperature": 1.0}],
         "budgets": [{"name": "short", "max_steps": 3}]}
    )  # fmt: skip
    kept = ("prompt", "steering", "max_steps", "max_tokens", "temperature", "top_p")
    return {
        role: [
            (c.decoding, c.sample_seed, *(getattr(c.agent, name) for name in kept)) for c in conditions(section, role)
        ]
        for role in ROLES
    }


@case("evaluation", "checks")
def evaluation_checks() -> list[Any]:
    expected: dict[tuple[str, int | None, str, int], int] = {(role, 0, "greedy", 0): 20 for role in ROLES}
    rows = [
        {"rollout_id": f"{role}{n}", "task_id": f"t{n}", "checkpoint_role": role, "seed": 0, "decoding": "greedy",
         "sample_seed": 0, "error": "sandbox: gone" if role == "sft" and n < 3 else None}
        for role in ROLES for n in range(20)
    ]  # fmt: skip
    tables = [from_rows("rollouts", part) for part in (rows, rows[1:], [*rows, rows[0]])]
    checkpoints = [{"role": role, "seed": seed, "step": step, "final": False} for role, seed, step in
                   (("rl", 0, 4), ("sft", 1, 2), ("sft", 0, 4), ("sft", 0, 2), ("base", None, 0))]  # fmt: skip
    ran = [outcome(every_condition_ran(table, expected)) for table in tables]
    ordered = checkpoint_rows(from_rows("checkpoints", checkpoints))
    return [
        *ran,
        outcome(infrastructure_held(tables[0])),
        *({"role": r["role"], "seed": r["seed"], "step": r["step"], "final": r["final"]} for r in ordered),
    ]


CALL = "<tool_call>\n<function=bash>\n<parameter=command>\nls\n</parameter>\n</function>\n</tool_call>"


@case("probes", "plan")
def probe_plan() -> dict[str, Any]:
    chat = load_chat_format("tiny")
    agent = AgentSection(prompt="repo_fix_tiny")
    renderer = PromptRenderer(load_family("repo_fix_tiny"), chat, agent, {})
    tasks = world("repo_fix_tiny")
    rows = [
        {"pair_id": f"p{n}", "task_id": task.task_id, "agent_id": "agent1", "turn": 0}
        for n, task in enumerate(tasks[:3])
    ]
    first = {row["pair_id"]: [n, n + 1] for n, row in enumerate(rows)}
    plan = ProbePlan.build(renderer, ProbeSection(prompts=2), tasks, rows, first)
    outputs = [[*chat.encode(text), chat.end_id] for text in (CALL, "Words.", CALL.replace("ls", "pwd"))]
    pairs = [{"pair_id": f"p{n}", "suffix_ids": [n], "output_ids": output} for n, output in enumerate(outputs)]
    of_data = ProbePlan.of_data(chat, ProbeSection(prompts=2), pairs)
    return {
        "train": [{"source": p.source, "ids": p.ids} for p in plan.train],
        "heldout": [{"source": p.source, "ids": p.ids} for p in plan.heldout],
        "trained": plan.trained_ids,
        "of_data": [p.source for p in of_data.train],
        "of_data_tokens": of_data.agent.max_tokens,
    }


@case("probes", "verdicts")
def probe_verdicts() -> list[Any]:
    """The verdict of each probe on a served model without faults, and on one with its fault."""
    prompts = [probes.ProbePrompt(f"task{n}/agent1", [1, 2, n], []) for n in range(10)]

    def turns(text: str = CALL, ids: list[int] | None = None) -> list[Completion]:
        return [Completion(p.ids, [7, 8] if ids is None else ids, None, text, "stop", "sft-abc") for p in prompts]

    def chats(**message: Any) -> list[Completion]:
        return [replace(turn, message={"role": "assistant", **message}) for turn in turns()]

    calls = [{"id": "c1", "function": {"name": "bash", "arguments": '{"command": "ls"}'}}]
    called = chats(content="", tool_calls=calls)
    named: Any = [SimpleNamespace(name="sft-0123456789ab"), SimpleNamespace(name="plan-first")]
    same = probes.BaseTurns(turns(), turns())
    other = probes.BaseTurns(turns(ids=[9]), turns(ids=[9]))
    results = [
        *(probes.served_name(engine, "0123456789abcdef") for engine in named),
        *(probes.ids_returned("train", prompts, each) for each in (turns(), turns(ids=[]))),
        *(probes.prompt_parity({"a": ids}, {"a": [1, 2, 3]}) for ids in ([1, 2, 3], [1, 5, 3])),
        *(probes.content_visible("train", prompts, each) for each in (called, chats(content="\n", reasoning=CALL))),
        *(probes.calls_round_trip("train", prompts, each) for each in (called, chats(content="ls"))),
        *(probes.differs_from_base(turns(), base, 0.5) for base in (other, same)),
        *(probes.parses("heldout", prompts, each, 0.8) for each in (turns(), turns("ls -la"))),
        probes.served_root([ServedModel("x", None, None)], "sft", None, None),  # type: ignore[arg-type]
    ]  # fmt: skip
    rows = [result.row("c" * 16, "sft", 0) for result in results]
    return [{k: v for k, v in row.items() if k not in ("detail", "message", "examples")} for row in rows] + [
        outcome(check) for check in probes.verdicts(rows)
    ]


# --- metrics and reports ----------------------------------------------------------------------------------------------


def evaluated(tasks: int = 8) -> tuple[pa.Table, pa.Table, pa.Table]:
    """Return rollouts, scores and agent scores of three roles, two seeds and two agents a rollout."""
    rollouts, scores, agents = [], [], []
    for number, role in enumerate(ROLES):
        for seed in (0, 1):
            for task in range(tasks):
                name = f"{role}{seed}{task}"
                key = {"rollout_id": name, "task_id": f"t{task}"}
                rollouts.append(
                    {**key, "origin": "eval", "checkpoint_role": role, "seed": seed, "sample_seed": 0,
                     "exit_status": "Submitted" if task % 4 else "LimitsExceeded", "repo": "harbor", "sample": 0,
                     "decoding": "greedy",
                     "outcome": json.dumps({"reward": 1.0, "verdict": "passed"})}
                )  # fmt: skip
                solved = (task + seed + 2 * number) % 4 > 1
                scores.append(
                    {**key, "plan_first": (task + number) % 3 != 0, "plan_content": task % 2 == 0,
                     "reward": float(solved), "verdict": "passed" if solved else "failed_tests",
                     "infrastructure_error": name == "sft17",
                     "output_tokens": 100 + 7 * task, "turns": 4 + number, "exit_status": "Submitted"}
                )  # fmt: skip
                for agent in ("agent1", "agent2"):
                    agents.append(
                        {"rollout_id": name, "agent_id": agent, "exit_status": "Submitted", "turns": 4,
                         "follow_through": (task + number) % 2 == 0 or agent == "agent1",
                         "parse_rate": 0.75 + 0.05 * number, "think_tokens": 8 + task,
                         "post_think_tokens": 20, "output_tokens": 40 + task, "tool_turns": task % 3}
                    )  # fmt: skip
    return from_rows("rollouts", rollouts), from_rows("scores", scores), from_rows("agent_scores", agents)


@case("metrics", "tables")
def metrics() -> dict[str, Any]:
    rollouts, scores, agents = evaluated()
    return {
        "metrics": [
            row for row in measure(rollouts, scores, agents, experiment="e").to_pylist() if row["seed"] in (None, 1)
        ],
        "changes": [
            {"metric": c.metric, "before": c.before, "after": c.after, **vars(c.change)}
            for c in paired_changes(rollouts, scores, agents, "base", "sft")
        ],
        "teacher": teacher_of(scores, agents, "e"),
    }


@case("metrics", "intervals")
def intervals() -> dict[str, Any]:
    hits = [1, 1, 0, 1, 1, 1, 0, 1]
    clusters = ["a", "a", "b", "b", "c", "c", "d", "d"]
    estimates = {"rate": rate(hits, clusters), "mean": mean([3.0, 5.0, 4.0, 8.0], ["a", "b", "c", "d"], [1, 2, 1, 2])}
    decided = {name: [decide(e, bound)[0] for bound in (0.1, 0.7, 0.99)] for name, e in estimates.items() if e}
    return {**estimates, "decided": decided, "wilson": [wilson(81, 263), wilson(0, 20), wilson(3, 3)]}


@case("metrics", "thresholds")
def thresholds() -> list[Any]:
    table = measure(*evaluated(), experiment="e")
    section = MetricsSection(thresholds={"plan_first": 0.2, "plan_content": 0.9, "follow_through": 0.5})
    return [outcome(check) for check in threshold_checks(table, section, ["sft", "rl"])]


@case("reports", "tables")
def report_tables() -> dict[str, Any]:
    rollouts, scores, agents = evaluated()
    entries = [
        EvaluatedExperiment(name, name.title(), measure(rollouts, scores, agents, experiment=name))
        for name in ("b", "a")
    ]
    teachers = {"a": TeacherData(scores, frozenset({"sft00", "sft02"}), ("strong",), frozenset({"plan_first"}))}
    return {
        "leaderboard": leaderboard(entries),
        "ceiling": teacher_ceiling(entries, teachers),
        "changes": changes_table(
            "a", changes(rollouts, scores, agents, ["pass", "plan_first", "think_tokens_per_turn"])
        ),
    }


# --- specs and worlds -------------------------------------------------------------------------------------------------


@case("spec_rows", "suite")
def spec_rows() -> dict[str, Any]:
    spec = SuiteSpec.model_validate({"title": "Small", "family": "coop_tiny_shared", "params": {"train": 3}})
    specs = SimpleNamespace(entry=lambda set, key: SimpleNamespace(file="small.toml"))
    run: Any = SimpleNamespace(spec=spec, node=SimpleNamespace(set="suite"), key="small", specs=specs)
    (row,) = _spec(run).tables["specs"].to_pylist()
    resolved = json.loads(row["spec"])
    return {**{k: row[k] for k in ("kind", "name", "title")}, **{k: resolved[k] for k in ("title", "family", "params")}}


@case("worlds", "names")
def world_names() -> dict[str, Any]:
    result = {}
    for heldout in (False, True):
        generator = names.NameGenerator(random.Random(7), heldout=heldout)
        kinds = (generator.function, generator.module, generator.directory, generator.word)
        result[str(heldout)] = [kind() for kind in kinds * 2]
    return {**result, "heldout": [names.is_heldout(name) for name in ("remo", "kalo_mibe", "dofuni")]}
