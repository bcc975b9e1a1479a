"""A small dataset out of rollouts of the embedded world, for tests of what stands between rollouts and training."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from itertools import islice
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from etpi_assets.agent.loop import Identity, RolloutJob, RolloutRuntime, run_rollout
from etpi_assets.curation import merge, select
from etpi_assets.curation.captured import captured_agents
from etpi_assets.curation.default_prompt import student_prompt
from etpi_assets.curation.pairs import CapturedAgent, make_pairs
from etpi_assets.curation.steering import FirstPrompt
from etpi_assets.scoring.behaviours import ScoringOptions, score
from etpi_assets.specs.experiment import DatasetSection, PairsSection, SelectSection
from etpi_assets.specs.rollout_set import AgentSection, ScoringSection
from etpi_assets.tasks.table import task_table
from etpi_assets.trajectories.tables import to_tables
from etpi_lab.worlds.coop_tiny import FAMILY
from etpi_lab.worlds.coop_tiny.emulated import EmulatedFactory, UnjudgedCoopTiny
from etpi_lab.worlds.coop_tiny.generate import generate_tasks
from etpi_lab.worlds.coop_tiny.policy import CoopTinyPolicy, CoopTinySkill
from etpi_resources.chat.format import load_chat_format
from etpi_resources.engines.scripted import ScriptedEngine
from tests.support.sequences import weigh

CHAT = load_chat_format("tiny")
TASKS = list(islice(generate_tasks("made", 0, "train"), 6))
HELDOUT = list(islice(generate_tasks("made", 0, "heldout"), 4))


@cache
def rollouts(steering: bool = True, history_think: Any = "keep") -> Mapping[str, pa.Table]:
    """Six rollouts of a teacher that thinks aloud and is at times unreadable, all judged to have passed."""
    agent = AgentSection(steering=steering, history_think=history_think, max_steps=16)
    skill = CoopTinySkill(verbose_think=0.6, malformed=0.05, markdown=0.05, ack=0.3)
    engine = ScriptedEngine(CoopTinyPolicy(skill, 0), CHAT, "made")
    identity = Identity(spec_key="made", origin="set", engine="scripted", teacher="made", rollout_set="made")
    runtime = RolloutRuntime(UnjudgedCoopTiny(), engine, EmulatedFactory(), CHAT)
    records = []
    for task in TASKS:
        record = run_rollout(RolloutJob(task, agent, identity), runtime)
        assert record.error is None, record.error
        record.outcome = {"reward": 1.0, "verdict": "passed"}
        records.append(record)
    return to_tables(records)


def default(task_id: str | None, agent_id: str) -> FirstPrompt:
    task = next(task for task in TASKS if task.task_id == task_id)
    role = next(role for role in FAMILY.roles(task) if role.agent_id == agent_id)
    messages = student_prompt(AgentSection(steering=True), task, role)
    return FirstPrompt(messages, CHAT.prompt_ids(messages))


@dataclass(frozen=True)
class Dataset:
    """What the curation stage makes of the rollouts."""

    tables: Mapping[str, pa.Table]
    scores: pa.Table
    agent_scores: pa.Table
    selected: pa.Table
    agents: list[CapturedAgent]
    pairs: pa.Table
    pairs_dropped: pa.Table
    rows: pa.Table
    sequences: pa.Table
    dropped: pa.Table
    tasks: pa.Table


def dataset(
    pairs: Mapping[str, Any] | None = None,
    weights: Mapping[str, Any] | None = None,
    *,
    steering: bool = True,
    history_think: str = "keep",
) -> Dataset:
    """The dataset under the sections `pairs` and `dataset`, each given by the keys that are not its defaults."""
    return _dataset(json.dumps(pairs or {}), json.dumps(weights or {}), steering, history_think)


@cache
def _dataset(pairs: str, weights: str, steering: bool, history_think: str) -> Dataset:
    section, dataset_section = (
        PairsSection(**{"capture": "native", **json.loads(pairs)}),
        DatasetSection(**{"upweight_turns": (0, 1, 2), **json.loads(weights)}),
    )
    tables, tasks = rollouts(steering, history_think), task_table([*TASKS, *HELDOUT])
    scored = score(tables["rollouts"], tables["agents"], tables["turns"], tasks, ScoringOptions(ScoringSection()))
    chosen = select.select(tables["rollouts"], scored["scores"], SelectSection(min_reward=1.0, shortest_correct=True))
    names = chosen["selected"]["rollout_id"].to_pylist()
    taken = {name: table.filter(pc.field("rollout_id").isin(names)) for name, table in tables.items()}
    agents = list(captured_agents(taken, section, CHAT, default, {}))
    made = make_pairs(agents, section, CHAT)
    weighed = weigh(made["pairs"], dataset_section)
    rows, sequences = merge.merge(weighed["dataset_rows"], made["pairs"], 2048)
    return Dataset(
        tables, scored["scores"], scored["agent_scores"], chosen["selected"], agents, made["pairs"], made["dropped"],
        rows, sequences, weighed["dropped"], tasks,
    )  # fmt: skip
