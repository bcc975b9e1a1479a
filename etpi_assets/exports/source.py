"""What an experiment has to export: its selected trajectories, its data set, its checkpoints, and the versions they
are of.

Belongs here: reading the lake for exporters. Does not belong here: any format, or writing.

An export never reads what is blocked. Conversations are given as a student reads them: steering, which stands in the
first messages alone, is replaced by the default prompt wherever the suite's family knows one.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from etpi_assets.agent.prompts import render_prompts
from etpi_assets.agent.tools import tool_schemas
from etpi_assets.curation.retokenise import conversation
from etpi_assets.curation.student_form import StudentForm
from etpi_assets.graph import GRAPH
from etpi_assets.resources import Resources
from etpi_assets.specs.experiment import ExperimentSpec
from etpi_assets.specs.rollout_set import RolloutSetSpec
from etpi_assets.tasks.families import load_family
from etpi_assets.tasks.family import Task
from etpi_assets.tasks.table import read_tasks
from etpi_assets.trajectories.records import AgentRecord, RolloutRecord
from etpi_assets.trajectories.tables import TABLES, from_tables, iter_prompts
from etpi_resources.chat.format import ChatFormat, load_chat_format
from etpi_resources.lake.lake import Lake, Manifest, Ref

DATASET = ("selected_trajectories", "tito_pairs", "upweighted_dataset")
CHECKPOINTS = ("sft_checkpoint", "rl_checkpoint")


@dataclass(frozen=True)
class Conversation:
    """One agent's conversation as the student's chat template is given it: {"role", "content"} messages, and
    `tool_calls` where the template writes calls (inside the content under etpi's own templates).

    Attributes:
        learnt: positions of the messages that are turns of the data set.
        tools: the schemas that the prompts offer, None where they offer none.
    """

    record: RolloutRecord
    agent: AgentRecord
    split: str
    messages: list[dict[str, Any]]
    learnt: tuple[int, ...]
    tools: list[Any] | None = None


class ExportSource:
    """An experiment in the lake.

    Args:
        assets: what is exported of it, the last of them what came last.

    Raises, on reading: MissingInput where what is exported is not built, BlockedInput where a check of it failed;
    SpecError where there is no such experiment.
    """

    def __init__(self, experiment: str, resources: Resources, assets: Sequence[str] = DATASET) -> None:
        self.experiment, self.specs, self.assets = experiment, resources.specs, assets
        self.lake: Lake = resources.lake
        spec = self.specs.get("experiment", experiment)
        assert isinstance(spec, ExperimentSpec)
        self.spec = spec

    def versions(self) -> dict[str, str]:
        """Every data version that the export rests on, as {"asset/key": version}: what is exported, and all it was
        made of."""
        found: dict[str, str] = {}
        todo = [self._ref(asset) for asset in self.assets]
        while todo:
            ref = todo.pop()
            manifest = self.lake.require(ref)
            found[f"{ref.asset}/{ref.key}"] = manifest.version
            for name, version in manifest.inputs.items():
                asset, _, key = name.partition("/")
                if name not in found:
                    found[name] = version
                    if asset in GRAPH:
                        todo.append(Ref(asset, GRAPH[asset].set, key))
        return dict(sorted(found.items()))

    def manifest(self) -> Manifest:
        """Of the data set, or what else is exported."""
        return self.lake.require(self._ref(self.assets[-1]))

    def table(self, asset: str, table: str) -> pa.Table:
        return self.lake.read(self._ref(asset), table)

    def checkpoints(self) -> list[dict[str, Any]]:
        """Rows of `checkpoints`, what fine-tuning made before what reinforcement made of it."""
        return [row for asset in CHECKPOINTS for row in self.table(asset, "checkpoints").to_pylist()]

    def records(self) -> Iterator[RolloutRecord]:
        """The selected rollouts, in the order of selection's rollout sets."""
        for name, wanted in self._selected.items():
            tables = {
                table: self.lake.read(Ref("raw_rollouts", "rollout_set", name), table).filter(
                    pc.field("rollout_id").isin(wanted)
                )
                for table in TABLES
            }
            yield from from_tables(tables)

    def conversations(self) -> Iterator[Conversation]:
        """The agents that have turns in the data set, whatever else was selected."""
        turns: dict[tuple[str, str], dict[int, str]] = {}
        for row in self.rows.select(["rollout_id", "agent_id", "turn", "split"]).to_pylist():
            turns.setdefault((row["rollout_id"], row["agent_id"]), {})[row["turn"]] = row["split"]
        for record in self.records():
            for agent in record.agents:
                taken = turns.get((record.rollout_id, agent.agent_id))
                if taken is None:
                    continue
                tools = self._tools(record)
                told, positions = conversation(self._messages(record, agent), StudentForm(self.chat, tools))
                learnt = tuple(position for turn, position in positions if turn in taken)
                yield Conversation(record, agent, next(iter(taken.values())), told, learnt, tools)

    def pairs(self) -> Iterator[tuple[Mapping[str, Any], np.ndarray, Mapping[str, Any]]]:
        """(row of `dataset_rows`, whole input ids (n,) int32, row of `pairs`), in the order of the pairs."""
        rows = {row["pair_id"]: row for row in self.rows.to_pylist()}
        pairs = self.table("tito_pairs", "pairs")
        plain = pairs.drop_columns(["suffix_ids"]).to_pylist()
        for pair, (_, prompt) in zip(plain, iter_prompts(pairs), strict=True):
            if pair["pair_id"] in rows:
                yield rows[pair["pair_id"]], prompt, pair

    @cached_property
    def rows(self) -> pa.Table:
        """`dataset_rows`."""
        return self.table("upweighted_dataset", "dataset_rows")

    @cached_property
    def rewards(self) -> dict[str, float | None]:
        """rollout_id -> the reward it was selected with."""
        selected = self.table("selected_trajectories", "selected")
        return dict(zip(selected["rollout_id"].to_pylist(), selected["reward"].to_pylist(), strict=True))

    @cached_property
    def chat(self) -> ChatFormat:
        """The student's chat format."""
        return load_chat_format(self.spec.base.tokenizer, self.spec.base.chat_template)

    def first_messages(self, record: RolloutRecord, agent: AgentRecord) -> list[dict[str, Any]]:
        """What a student reads before the agent's first turn."""
        told, positions = conversation(self._messages(record, agent), StudentForm(self.chat, self._tools(record)))
        return told[: positions[0][1]] if positions else told

    def _messages(self, record: RolloutRecord, agent: AgentRecord) -> list[dict[str, Any]]:
        """Rows as `conversation` reads them, the default prompt in the place of the captured one."""
        told = [
            {
                "role": m.role,
                "content": m.content,
                "turn": m.turn,
                "kind": m.kind,
                "tool_calls": json.dumps(m.tool_calls) if m.tool_calls else None,
            }
            for m in agent.messages
        ]
        default = self._default(record, agent)
        if default is None:
            return told
        rest = [message for message in told if message["kind"] != "prompt"]
        return [{**m, "turn": None, "kind": "prompt", "tool_calls": None} for m in default] + rest

    def _tools(self, record: RolloutRecord) -> list[Any] | None:
        """The schemas that the agent's prompts offer, as `tito_pairs` has them."""
        rollout_set = self.specs.get("rollout_set", record.rollout_set or "")
        assert isinstance(rollout_set, RolloutSetSpec)
        native = self.spec.pairs.capture == "native"
        named = tool_schemas(rollout_set.agent.tools if native else self.spec.pairs.tools)
        return record.tools if named is None else named

    def _default(self, record: RolloutRecord, agent: AgentRecord) -> list[dict[str, str]] | None:
        rollout_set = self.specs.get("rollout_set", record.rollout_set or "")
        assert isinstance(rollout_set, RolloutSetSpec)
        if rollout_set.kind == "imported" or rollout_set.suite is None or record.task_id not in self._tasks:
            return None
        task = self._tasks[record.task_id]
        family = load_family(self.specs.suites[rollout_set.suite].family)
        role = next(role for role in family.roles(task) if role.agent_id == agent.agent_id)
        return render_prompts(rollout_set.agent.model_copy(update={"steering": False}), task, role)

    @cached_property
    def _tasks(self) -> dict[str, Task]:
        sets = [self.specs.get("rollout_set", name) for name in self.spec.rollout_sets]
        suites = {s.suite for s in sets if isinstance(s, RolloutSetSpec) and s.suite and s.kind != "imported"}
        tables = [self.lake.read(Ref("tasks", "suite", suite), "tasks") for suite in sorted(suites)]
        return {task.task_id: task for table in tables for task in read_tasks(table)}

    @cached_property
    def _selected(self) -> dict[str, list[str]]:
        selected: dict[str, list[str]] = {}
        for row in self.table("selected_trajectories", "selected").to_pylist():
            selected.setdefault(row["rollout_set"], []).append(row["rollout_id"])
        return selected

    def _ref(self, asset: str) -> Ref:
        return Ref(asset, "experiment", self.experiment)
