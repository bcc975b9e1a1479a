"""The token ids of a rollout as a forest: all turns of all agents, with each shared prefix once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from etpi_assets.curation.prefix_trees import GrowingTree
from etpi_assets.trajectories.records import AgentRecord, RolloutRecord
from etpi_resources.lake.check_outcome import BadData
from etpi_resources.trainers.policy_link import Fork

_ROOT = np.array([-1], dtype=np.int32)
"""An id before every prompt, so that turns that share no id have a tree in common."""
_NO_ROW: Mapping[str, Any] = {}


class RolloutsFailed(BadData):
    """A round cannot be trained on; the message names the rollout or task and what to do."""


@dataclass(frozen=True)
class Forest:
    """The ids of a rollout, of each branch those that no earlier one has; see `policy_link.Sample`.

    Attributes:
        owners: of each id of the completion, the number of its agent among `agents_of`.
        branches: how many branches each agent adds.
    """

    prompt: list[int]
    completion: list[int]
    mask: list[int]
    logprobs: list[float]
    forks: list[Fork]
    owners: list[int]
    branches: list[int]


def agents_of(record: RolloutRecord) -> list[AgentRecord]:
    """Return the agents with turns, in the order of the view `rl_turns`."""
    return sorted((agent for agent in record.agents if agent.turns), key=lambda agent: agent.agent_id)


def as_forest(record: RolloutRecord) -> Forest:
    """Return the turns of all agents: each follows the ids of earlier turns as far as they agree with its prompt, and
    begins a new branch there unless these are the last ids. Every id that the policy generated has mask 1 once.

    Raises:
        RolloutsFailed: a turn has no ids or log-probs, or there is no turn.
    """
    agents, tree = agents_of(record), GrowingTree()
    ids, mask, logprobs, owners = list[int](), list[int](), list[float](), list[int]()
    forks, branches = list[Fork](), [0] * len(agents)
    for number, agent in enumerate(agents):
        for turn in agent.turns:
            if turn.prompt_ids is None or turn.output_ids is None or turn.logprobs is None:
                raise RolloutsFailed(
                    f"rollout {record.rollout_id} of task {record.task_id}, {agent.agent_id} turn {turn.turn}: the "
                    "engine reported no ids or log-probs"
                )
            prompt = np.concatenate([_ROOT, np.array(turn.prompt_ids, dtype=np.int32)])
            match = tree.match(prompt)
            after = match.node.start + match.offset - 2 if match.node else -1  # without the root, an index of `ids`
            if after != len(ids) - 1:
                forks.append(Fork(len(ids), after))
            branches[number] += after != len(ids) - 1 or not ids
            tree.add(prompt, np.array(turn.output_ids, dtype=np.int32), _NO_ROW, match)
            read = turn.prompt_ids[match.tokens - 1 if match.node else 0 :]
            ids += [*read, *turn.output_ids]
            mask += [0] * len(read) + [1] * len(turn.output_ids)
            logprobs += [0.0] * len(read) + [*turn.logprobs]
            owners += [number] * (len(read) + len(turn.output_ids))
    if not agents:
        raise RolloutsFailed(f"rollout {record.rollout_id} of task {record.task_id} has no turn")
    edge = len(agents[0].turns[0].prompt_ids or ())
    return Forest(ids[:edge], ids[edge:], mask[edge:], logprobs[edge:], forks, owners[edge:], branches)
