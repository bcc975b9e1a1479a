"""Read an experiment's selected trajectories, data set and checkpoints from the lake, with their data versions.

Blocked versions are never read. Conversations are returned as the student reads them: the steering in the first
messages is replaced by the default prompt, if the suite's family knows it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from etpi_assets.agent.tools import tool_schemas
from etpi_assets.curation.default_prompt import DefaultPrompts, student_format
from etpi_assets.curation.retokenise import conversation
from etpi_assets.curation.student_form import StudentForm
from etpi_assets.graph import GRAPH
from etpi_assets.planning.planner import require
from etpi_assets.resources import Resources
from etpi_assets.specs.rollout_set import AgentSection
from etpi_assets.tasks.table import read_tasks
from etpi_assets.trajectories.records import AgentRecord, RolloutRecord, own_messages
from etpi_assets.trajectories.tables import TABLES, from_tables, iter_prompts
from etpi_resources.chat.format import ChatFormat
from etpi_resources.chat.tool_forms.call import function_schema
from etpi_resources.lake.lake import Lake, Manifest, Ref
from etpi_resources.lake.parquet import schema_of
from etpi_resources.lake.stored import Stored, batches
from etpi_resources.token_ids import arrays

DATASET = ("selected_trajectories", "tito_pairs", "upweighted_dataset")
CHECKPOINTS = ("sft_checkpoint", "rl_checkpoint")


def rendered_messages(
    rows: Sequence[Mapping[str, Any]], student: StudentForm
) -> tuple[list[dict[str, Any]], list[tuple[int, int]]]:
    """Return `conversation` in roles that the template takes, so that other programs can render it too."""
    messages, positions = conversation(rows, student)
    fitted = [dict(message) for message in student.chat.roles.fit(messages)]
    places = ([at for at, m in enumerate(each) if m["role"] == "assistant"] for each in (messages, fitted))
    moved = dict(zip(*places, strict=True))
    return fitted, [(turn, moved[position]) for turn, position in positions]


@dataclass(frozen=True)
class StudentConversation:
    """One agent's conversation, as the student's chat template renders it.

    Attributes:
        messages: {"role", "content"} messages, with `tool_calls` if the template writes tool calls. Under etpi's own
            templates the calls are part of the content.
        trained: positions of the messages that are turns of the data set.
        tools: the schemas of the tools that the prompts offer; None if they offer none.
    """

    record: RolloutRecord
    agent: AgentRecord
    split: str
    messages: list[dict[str, Any]]
    trained: tuple[int, ...]
    tools: list[Any] | None = None


class ExportSource:
    """Reads an experiment from the lake for exporters.

    Args:
        assets: the exported assets, the last stage last.

    Raises:
        SpecError: the experiment is unknown.
        MissingInput: on reading, an exported asset is not built.
        BlockedInput: on reading, a check of an exported asset failed.
    """

    def __init__(self, experiment: str, resources: Resources, assets: Sequence[str] = DATASET) -> None:
        self.experiment, self.specs, self.assets = experiment, resources.specs, assets
        self.lake: Lake = resources.lake
        self.spec = self.specs.get("experiment", experiment)

    def versions(self) -> dict[str, str]:
        """Return {"asset/key": version} of the exported assets and of all their inputs."""
        versions: dict[str, str] = {}
        todo = [self._ref(asset) for asset in self.assets]
        while todo:
            ref = todo.pop()
            manifest = require(ref, self.specs, self.lake)
            versions[f"{ref.asset}/{ref.key}"] = manifest.version
            for name, version in manifest.inputs.items():
                asset, _, key = name.partition("/")
                if name not in versions:
                    versions[name] = version
                    if asset in GRAPH:
                        todo.append(Ref(asset, GRAPH[asset].set, key))
        return dict(sorted(versions.items()))

    def agent_sections(self) -> list[AgentSection]:
        """Return the agent sections of the evaluation and of the rollout sets that trained the student."""
        evaluated = [self.spec.evaluate.agent] if self.spec.evaluate else []
        return [*evaluated, *(self.specs.get("rollout_set", name).agent for name in self.spec.rollout_sets)]

    def manifest(self) -> Manifest:
        """Of the data set, or what else is exported."""
        return self.lake.require(self._ref(self.assets[-1]))

    def table(self, asset: str, table: str) -> pa.Table:
        return self.lake.read(self._ref(asset), table)

    def stored(self, asset: str, table: str) -> Stored:
        """Return the table of `table` for reading in pieces."""
        return Stored(table, self.lake.files(self._ref(asset), table))

    def checkpoints(self) -> list[dict[str, Any]]:
        """Return the rows of `checkpoints`: those of fine-tuning, then those of reinforcement."""
        return [row for asset in CHECKPOINTS for row in self.table(asset, "checkpoints").to_pylist()]

    def records(self) -> Iterator[RolloutRecord]:
        """Yield the selected rollouts, in the order of the rollout sets in the selection."""
        for name, rollout_ids in self._selected.items():
            tables = {
                table: self.lake.read(Ref("raw_rollouts", "rollout_set", name), table).filter(
                    pc.field("rollout_id").isin(rollout_ids)
                )
                for table in TABLES
            }
            yield from from_tables(tables)

    def agents(self) -> int:
        """Return the number of agents of the selected rollouts."""
        count = 0
        for name, rollout_ids in self._selected.items():
            agents = self.lake.read(Ref("raw_rollouts", "rollout_set", name), "agents", columns=["rollout_id"])
            count += len(agents.filter(pc.field("rollout_id").isin(rollout_ids)))
        return count

    def conversations(self) -> Iterator[StudentConversation]:
        """Yield the conversations of all agents with turns in the data set."""
        turns: dict[tuple[str, str], dict[int, str]] = {}
        for row in self.rows.select(["rollout_id", "agent_id", "turn", "split"]).to_pylist():
            turns.setdefault((row["rollout_id"], row["agent_id"]), {})[row["turn"]] = row["split"]
        for record in self.records():
            for agent in record.agents:
                splits = turns.get((record.rollout_id, agent.agent_id))
                if splits is None:
                    continue
                tools = self._tools(record)
                student = StudentForm(self.chat, tools, thoughts=not self.spec.pairs.strip_think)
                messages, turns_at = rendered_messages(self._messages(record, agent), student)
                trained = tuple(position for turn, position in turns_at if turn in splits)
                yield StudentConversation(record, agent, next(iter(splits.values())), messages, trained, tools)

    def pairs(self) -> Iterator[tuple[Mapping[str, Any], np.ndarray, Mapping[str, Any]]]:
        """Yield (row of `dataset_rows`, whole prompt ids (n,) int32, row of `pairs`), in the order of the pairs.

        `output_ids` is an int32 array. A batch of pairs, and the columns of `dataset_rows`, are in memory.
        """
        rows = self.rows.combine_chunks()
        place_of = {name: place for place, name in enumerate(rows["pair_id"].to_pylist())}
        pairs = self.stored("tito_pairs", "pairs")
        prompts = iter_prompts(pairs)
        columns = [name for name in schema_of(pairs.name, None).names if name not in ("suffix_ids", "output_ids")]
        for batch in batches(pairs, [*columns, "output_ids"]):
            plain = batch.select(columns).to_pylist()
            places = [place_of.get(pair["pair_id"]) for pair in plain]
            kept = iter(rows.take([place for place in places if place is not None]).to_pylist())
            of_batch = islice(prompts, len(plain))
            outputs = arrays(batch["output_ids"])
            for pair, place, output, (_, prompt) in zip(plain, places, outputs, of_batch, strict=True):
                if place is not None:
                    yield next(kept), prompt, {**pair, "output_ids": output}

    def sequences(self, split: str) -> Iterator[dict[str, Any]]:
        """Yield the rows of `sequences` of a split, lists as arrays; a batch of them is in memory."""
        sequences = self.stored("upweighted_dataset", "sequences")
        schema = schema_of(sequences.name, None)
        listed = [field.name for field in schema if pa.types.is_list(field.type)]
        plain = [name for name in schema.names if name not in listed]
        for batch in batches(sequences, schema.names):
            ids = [arrays(batch[name]) for name in listed]
            for row, *lists in zip(batch.select(plain).to_pylist(), *ids, strict=True):
                if row["split"] == split:
                    yield {**row, **dict(zip(listed, lists, strict=True))}

    @cached_property
    def rows(self) -> pa.Table:
        return self.table("upweighted_dataset", "dataset_rows")

    @cached_property
    def rewards(self) -> dict[str, float | None]:
        """Rollout id -> its reward at selection."""
        selected = self.table("selected_trajectories", "selected")
        return dict(zip(selected["rollout_id"].to_pylist(), selected["reward"].to_pylist(), strict=True))

    @cached_property
    def chat(self) -> ChatFormat:
        return student_format(self.spec)

    def first_messages(self, record: RolloutRecord, agent: AgentRecord) -> list[dict[str, Any]]:
        """Return the messages that a student reads before the agent's first turn."""
        thoughts = not self.spec.pairs.strip_think
        rows, student = self._messages(record, agent), StudentForm(self.chat, self._tools(record), thoughts=thoughts)
        messages, positions = rendered_messages(rows, student)
        return messages[: positions[0][1]] if positions else messages

    def _messages(self, record: RolloutRecord, agent: AgentRecord) -> list[dict[str, Any]]:
        """Return message rows with the default prompt in place of the captured one, if the suite's family knows it."""
        captured = [vars(message) for message in own_messages(agent)]
        default = self._default_prompts[record.rollout_set or ""](record.task_id, agent.agent_id)
        if default is None:
            return captured
        rest = [message for message in captured if message["kind"] != "prompt"]
        return [{**m, "turn": None, "kind": "prompt", "tool_calls": None} for m in default.messages] + rest

    @cached_property
    def capture(self) -> str:
        """The capture of the pairs, which `pairs.capture = "auto"` leaves to the rollouts."""
        captures = self.lake.read(self._ref("tito_pairs"), "pairs", columns=["capture"])["capture"].unique().to_pylist()
        return " and ".join(captures) or self.spec.pairs.capture

    def _tools(self, record: RolloutRecord) -> list[Any] | None:
        """Return the tool schemas that the agent's prompts offer, as in `tito_pairs`."""
        rollout_set = self.specs.get("rollout_set", record.rollout_set or "")
        native = self.capture == "native"
        schemas = tool_schemas(rollout_set.agent.tools if native else self.spec.pairs.tools)
        return [*map(function_schema, record.tools or ())] or None if schemas is None else schemas

    @cached_property
    def _default_prompts(self) -> dict[str, DefaultPrompts]:
        """Rollout set -> the first prompts of a student at its tasks."""
        sets = {name: self.specs.get("rollout_set", name) for name in self.spec.rollout_sets}
        suites = {spec.suite for spec in sets.values() if spec.suite and spec.kind != "imported"}
        tables = [self.lake.read(Ref("tasks", "suite", suite), "tasks") for suite in sorted(suites)]
        tasks = {task.task_id: task for table in tables for task in read_tasks(table)}
        return {name: DefaultPrompts(self.specs, self.spec, spec, tasks, None) for name, spec in sets.items()}

    @cached_property
    def _selected(self) -> dict[str, list[str]]:
        selected: dict[str, list[str]] = {}
        for row in self.table("selected_trajectories", "selected").to_pylist():
            selected.setdefault(row["rollout_set"], []).append(row["rollout_id"])
        return selected

    def _ref(self, asset: str) -> Ref:
        return Ref(asset, "experiment", self.experiment)
