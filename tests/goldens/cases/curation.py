"""Scores and rewards of rollouts; selected rollouts, pairs, weights, splits and merged sequences."""

from __future__ import annotations

import json
from typing import Any

import pyarrow as pa

from etpi_assets.agent.contract import format_contract
from etpi_assets.agent.prompts import render_prompts, steering_text
from etpi_assets.curation.captured import captured_agents
from etpi_assets.curation.joins import join, paths_of
from etpi_assets.curation.merge import branches, merge_savings
from etpi_assets.curation.pairs import CapturedAgent, CapturedTurn, make_pairs
from etpi_assets.curation.retokenise import retokenise
from etpi_assets.curation.select import resolved, select
from etpi_assets.curation.steering import FirstPrompt, SteeringNgrams, splice
from etpi_assets.curation.upweight import loss_by_turn, shares
from etpi_assets.scoring.advantage import group_advantages
from etpi_assets.scoring.behaviours import ScoringOptions, score
from etpi_assets.scoring.rewards.attempt import Attempt
from etpi_assets.scoring.rewards.functions import FUNCTIONS, function_named
from etpi_assets.scoring.rewards.verdict import read_reward
from etpi_assets.specs.experiment import DatasetSection, PairsSection, SelectSection
from etpi_assets.specs.rollout_set import AgentSection, ScoringSection
from etpi_assets.tasks.family import Role, Task
from etpi_assets.trajectories.tables import to_tables
from etpi_resources.chat.format import ChatFormat, load_chat_format
from etpi_resources.lake.schemas import from_rows
from tests.goldens.cases.agent import ids
from tests.goldens.golden import case
from tests.support.conversations import tables_of
from tests.support.own_runs import TOOLS, recorded_run
from tests.support.rollouts import PLAN, REPLY, agent, planning_pair, rollout, run, say, tasks
from tests.support.sequences import CHAIN, FORK, built, pairs_of, weigh
from tests.support.students import chat_of

# --- scores and rewards -----------------------------------------------------------------------------------------------


@case("scoring", "behaviours")
def behaviours() -> dict[str, Any]:
    replies = (say(REPLY, "agent1"), {"agent1": PLAN})
    work = [run("cat src/harbor/tides.py"), run("sed -i s/1/7/ src/harbor/tides.py")]
    others = [run("cat src/harbor/quay.py"), run("sed -i s/1/7/ src/harbor/quay.py")]
    records = [
        planning_pair("planned"),
        rollout(agent("agent1", [run("ls"), *work]), agent("agent2", [replies, *others]), rollout_id="one_plans"),
        rollout(agent("agent1", [say("Hello."), *work]), agent("agent2", [say("Hi.", "agent1")]), rollout_id="vague"),
        rollout(agent("agent1", [(say(PLAN), {"agent2": REPLY})]), agent("agent2", [replies]), rollout_id="idle"),
        rollout(agent("agent1", ["I would plan.", *work], role="solo"), rollout_id="solo"),
        rollout(agent("agent1", work), rollout_id="broken", error="sandbox: gone", outcome={}),
        planning_pair("other task", task_id="t2"),
    ]
    tables = to_tables(records)
    return score(
        tables["rollouts"],
        tables["agents"],
        tables["turns"],
        tasks(),
        ScoringOptions(ScoringSection()),
        tables["messages"],
    )


@case("scoring", "verdicts")
def read_verdicts() -> list[Any]:
    outcomes = [
        {"reward": 1.0, "verdict": "passed"}, {"reward": 0.25, "verdict": "failed_tests"},
        {"reward": None, "verdict": "unknown"},
        {"reward": 0.5}, {}, {"verdict": "merge_conflict", "reward": 0},
    ]  # fmt: skip
    return [vars(read_reward(json.dumps(outcome), None, "r")) for outcome in outcomes] + [
        vars(read_reward(None, "sandbox: gone", "r"))
    ]


ANSWERS = (
    format_contract("I count and search.", "wc -l a.txt && grep x a.txt | tar -cf b.tar a.txt"),
    "<thinking>a</thinking><thinking>b</thinking>\n```bash\nwc -l a.txt\n```", "wc -l a.txt", "",
    format_contract("a", "# wc grep tar\nls"), format_contract("a", "false && wc a.txt; find . | xargs wc"),
    format_contract("I explain at length. " * 30, "wc -l a.txt"),
)  # fmt: skip


for function_name in FUNCTIONS:

    @case("rewards", f"function {function_name}")
    def _(name: str = function_name) -> dict[str, Any]:
        """The value of a function for each answer, or its error."""
        values: list[Any] = []
        for text in ANSWERS:
            attempt = Attempt("r1", "t1", "Count the lines of a.txt, then search it and pack it.", text)
            try:
                values.append(float(function_named(name)(attempt)))
            except Exception as error:
                values.append(type(error).__name__)
        return {"values": values}


@case("rewards", "advantages")
def advantages() -> Any:
    groups = [1.0, 0.0, 0.5, 0.0, 1.0, 1.0, 1.0, 1.0, 0.25, 0.5, 0.75, 1.0]
    return {
        "scaled": group_advantages(groups, 4, eps=1e-4, ddof=1),
        "population": group_advantages(groups, 4, eps=1e-6, ddof=0),
        "centred": group_advantages(groups, 4, eps=1e-4, ddof=1, scale=False),
    }


# --- selection --------------------------------------------------------------------------------------------------------

CANDIDATES: list[dict[str, Any]] = [
    {"id": "long", "output_tokens": 120, "turns": 2},
    {"id": "turns", "output_tokens": 90, "turns": 9, "sample": 1},
    {"id": "late", "output_tokens": 90, "turns": 8, "sample": 3},
    {"id": "best", "output_tokens": 90, "turns": 8, "sample": 2},
    {"id": "wrong", "output_tokens": 10, "reward": 0.0, "verdict": "failed_tests"},
    {"id": "partial", "task_id": "t2", "reward": 0.5, "verdict": "failed_tests"},
    {"id": "unplanned", "task_id": "t2", "plan_first": False},
    {"id": "unknown", "task_id": "t3", "reward": None, "verdict": "unknown"},
    {"id": "broken", "task_id": "t3", "infrastructure_error": True, "reward": None, "plan_first": None},
    {"id": "cut", "task_id": "t3", "exit_status": "LimitsExceeded"},
]


def candidates() -> tuple[pa.Table, pa.Table]:
    facts = {"task_id": "t1", "sample": 0, "origin": "set", "rollout_set": "s", "repo": "harbor", "teacher": "strong"}
    solved = {
        "reward": 1.0, "verdict": "passed", "plan_first": True, "plan_content": True, "follow_through": 1.0,
        "plan_content_published": True, "output_tokens": 100, "turns": 10, "exit_status": "Submitted",
        "infrastructure_error": False,
    }  # fmt: skip
    rollouts, scores = [], []
    for row in CANDIDATES:
        rollouts.append({"rollout_id": row["id"], **{key: row.get(key, value) for key, value in facts.items()}})
        scores.append({"rollout_id": row["id"], **{key: row.get(key, value) for key, value in solved.items()}})
    return from_rows("rollouts", rollouts), from_rows("scores", scores)


SELECTIONS = {
    "all": SelectSection(min_reward=None, require=(), shortest_correct=False),
    "shortest": SelectSection(min_reward=1.0, shortest_correct=True),
    "best": SelectSection(min_reward=0.5, shortest_correct=False, require=()),
    "default": SelectSection(),
}
for selection_name in SELECTIONS:

    @case("selection", selection_name)
    def _(name: str = selection_name) -> dict[str, Any]:
        rollouts, scores = candidates()
        section, rule = resolved(SELECTIONS[name], rollouts, scores)
        chosen = select(rollouts, scores, section)
        return {"rule": rule, "selected": chosen["selected"], "dropped": chosen["dropped"].drop_columns(["detail"])}


@case("selection", "shared turns")
def shared_turns() -> Any:
    """A run saved after its first turn, a retry, and a run of another task."""
    go, later = ({"role": "user", "content": text} for text in ("Go.", "Next."))
    first, second, third = ({"role": "assistant", "content": text} for text in ("a", "b", "c"))
    talks = [[go, first], [go, first, later, second, later, third], [go, first, later, third], [later, first]]
    joined = join([f"r{number}" for number in range(len(talks))], paths_of(tables_of(*talks)))
    return {"covered": dict(joined.covered), "repeated": dict(joined.repeated)}


# --- pairs ------------------------------------------------------------------------------------------------------------

CALL = "<tool_call>\n<function=bash>\n<parameter=command>\nls\n</parameter>\n</function>\n</tool_call>"


def captured(chat: ChatFormat) -> CapturedAgent:
    """Return four captured turns: one that thinks, a call, one that cannot be read, one after a history that forks."""
    texts = (f"<think>\nI look.\n</think>\n\n{CALL}", CALL, "No action.", f"<think>\nAgain.\n</think>\n\n{CALL}")
    prompt, turns = chat.prompt_ids([{"role": "system", "content": "Act."}, {"role": "user", "content": "Go."}]), []
    for number, text in enumerate(texts):
        output = [*chat.encode(text, allow_special=True), chat.end_id]
        turns.append(CapturedTurn(number, ids(prompt), ids(output), "native"))
        prompt = [*(prompt if number != 2 else prompt[:-3]), *output, *chat.observation_ids(f"seen {number}")]
    return CapturedAgent("r1", "agent1", turns, finished=True)


PAIRS = {
    "kept": {"strip_think": False, "history_think": "keep", "drop_unparseable": False},
    "stripped": {"strip_think": True, "history_think": "strip"},
    "default": {},
}
for pairs_name in PAIRS:

    @case("pairs", pairs_name)
    def _(name: str = pairs_name) -> dict[str, Any]:
        chat = load_chat_format("tiny")
        made = make_pairs([captured(chat)], PairsSection(**{"capture": "native", **PAIRS[name]}), chat)
        return {"pairs": made["pairs"], "dropped": made["dropped"].drop_columns(["detail"])}


@case("pairs", "recorded")
def recorded_pairs() -> dict[str, Any]:
    """Recorded runs in the vocabulary of a student, with calls, and an answer in words."""
    chat = chat_of("qwen3")
    agents = []
    for number in range(2):
        rows = [
            {**m, "turn": None if m["role"] in ("system", "user") else max(0, index - 2) // 2,
             "kind": "action" if m["role"] == "assistant" else "observation"}
            for index, m in enumerate(recorded_run(number, 3)["messages"])
        ]  # fmt: skip
        turns = [
            CapturedTurn(t.turn, ids(t.prompt_ids), ids(t.output_ids), "retokenised", calls=t.calls)
            for t in retokenise(rows, chat, tools=TOOLS)
        ]
        agents.append(CapturedAgent(f"r{number}", "agent1", turns, finished=True, tools=TOOLS))
    made = make_pairs(agents, PairsSection(capture="retokenised", strip_think=False), chat)
    return {"pairs": made["pairs"], "dropped": made["dropped"].drop_columns(["detail"])}


@case("pairs", "schemas and arguments")
def schemas_and_arguments() -> dict[str, Any]:
    """A tool's schema in the shape of MCP, and a call in a history whose arguments cannot be read."""
    call = {"id": "c", "type": "function", "function": {"name": "run", "arguments": "{cut"}}
    spoken = [{"role": "assistant", "content": "", "tool_calls": [call]}, {"role": "tool", "content": "Not valid."}]
    go, done = {"role": "user", "content": "Go."}, {"role": "assistant", "content": "Done."}
    tables = tables_of([go, *spoken, done], tools=[{"name": "run", "inputSchema": {"type": "object"}}])
    section, chat = PairsSection(capture="retokenised", drop_unparseable=False), chat_of("qwen3")
    made = make_pairs(captured_agents(tables, section, chat, lambda task, name: None, {}), section, chat)
    return {"pairs": made["pairs"], "dropped": made["dropped"].drop_columns(["detail"])}


@case("pairs", "steering")
def steering() -> dict[str, Any]:
    chat = load_chat_format("tiny")
    task, role = Task("t1", "s", "harbor", "train", "Moor.", {}, "h"), Role("agent1", "f1", "Moor.", "agent2")
    steered, plain = (render_prompts(AgentSection(steering=steers), task, role) for steers in (True, False))
    default = FirstPrompt(plain, ids(chat.prompt_ids(plain)))
    captured_ids = ids([*chat.prompt_ids(steered), 7, 8, 9])
    result, spliced = splice(captured_ids, steered, default, chat)
    text = steering_text(AgentSection(prompt="coop"), role)
    grams = SteeringNgrams.build([text], [m["content"] for m in plain], chat)
    return {
        "ids": result,
        "spliced": spliced,
        "ngrams": {k: len(v) for k, v in vars(grams).items() if hasattr(v, "__len__")},
    }


@case("pairs", "captured")
def captured_of_tables() -> list[Any]:
    tables = to_tables([planning_pair("r1"), planning_pair("r2")])
    chat = load_chat_format("tiny")

    def default(task_id: str | None, agent_id: str) -> FirstPrompt:
        return FirstPrompt(
            [{"role": "user", "content": agent_id}], ids(chat.prompt_ids([{"role": "user", "content": agent_id}]))
        )

    return [
        {"agent": (a.rollout_id, a.agent_id), "turns": [(t.turn, t.prompt, t.output, t.capture) for t in a.turns]}
        for a in captured_agents(tables, PairsSection(capture="native"), chat, default, {})
    ]


# --- data sets --------------------------------------------------------------------------------------------------------

DATASETS: dict[str, dict[str, Any]] = {
    "weights": {"upweight_turns": (0, 1), "upweight_factor": 12.0},
    "copies": {"upweight_turns": (0, 1), "upweight_factor": 3.0, "upweight_form": "duplicate"},
    "unmerged": {"merge": False},
    "short": {"max_length": 64},
}
for dataset_name in DATASETS:

    @case("dataset", dataset_name)
    def _(name: str = dataset_name) -> dict[str, Any]:
        pairs = pairs_of(
            CHAIN, FORK, [([1] * 60, [2] * 5)], [([3, 3], [4])], repo=["harbor", "quay", "skiff", "harbor"]
        )
        rows, sequences, dropped = built(pairs, **DATASETS[name])
        return {
            "rows": rows,
            "sequences": sequences,
            "dropped": dropped.drop_columns(["detail"]),
            "branches": [branch for sequence in sequences.to_pylist() for branch in branches(sequence)],
            "savings": merge_savings(rows, pairs, sequences),
            "loss": loss_by_turn(rows),
            "shares": shares(loss_by_turn(rows)),
        }


@case("dataset", "splits")
def splits() -> dict[str, Any]:
    repos = [f"repo{n}" for n in range(12)]
    pairs = pairs_of(*[CHAIN] * 12, repo=repos)
    sections = {
        "by_repo": DatasetSection(val_fraction=0.25),
        "heldout": DatasetSection(val_fraction=0.0, heldout_repos=("repo3",)),
        "by_task": DatasetSection(val_fraction=0.25, val_by="conversation"),
    }
    weighed = {name: weigh(pairs, section, heldout_tasks={"t5"}) for name, section in sections.items()}
    return {
        name: {
            "rows": tables["dataset_rows"].select(["pair_id", "split"]),
            "dropped": tables["dropped"].drop_columns(["detail"]),
        }
        for name, tables in weighed.items()
    }
