"""Traces of verifiers and prime-rl (`traces.jsonl`): episodes whose messages form a graph, a branch for each leaf.

The older results (`prompt` and `completion`) are rows of the format `trl`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence, Set
from typing import Any

from etpi_assets.importers.conversation import Message, Options, fill_agent, finish_of, set_ids
from etpi_assets.importers.format import Row
from etpi_assets.importers.generic import read_message
from etpi_assets.importers.run_info import add_usage, build_rollout, run_info, sampler_of
from etpi_assets.importers.sessions import paths
from etpi_assets.importers.source import as_list, as_mapping, field, number_field, text_field, to_utc
from etpi_assets.importers.spec import load
from etpi_assets.trajectories.records import AgentRecord, RolloutRecord
from etpi_resources.rows.bounded import Unreadable

_LINKS = {"subagent_call": "subagent", "compaction": "continuation"}


def record(row: Row, where: str, options: Options) -> RolloutRecord:
    """Read an episode, or a trace alone.

    Raises Unreadable: `errored` or `empty` if no model answered, `bad_reward`, or as `read_message`.
    """
    traces = _listed({"traces": [row], **row}, "traces", where)
    errors = "; ".join(text for t in (row, *traces) for e in _listed(t, "errors", where) if (text := _error(e)))
    trained = [trace for trace in traces if field(trace, "agent", "trainable") is not False] or traces
    agents = [agent for number, trace in enumerate(trained) for agent in _agents(trace, number, where, options)]
    if not agents:
        raise Unreadable("errored" if errors else "empty", f"{where}: no answer; {errors[:300] or 'no error'}")
    calls = [call for trace in trained for call in _listed(trace, "calls", where)]
    usage = Counter[str]()
    for call in calls:
        add_usage(usage, call.get("usage"))
    data = field(trained[0], "task", "data")
    facts = {**data, "metadata": data.get("info")} if isinstance(data, dict) else {}
    facts["instance_id"] = text_field(trained[0], "task", "key") or text_field(facts, "instance_id")
    facts["teacher"] = next((m for c in calls if (m := text_field(c, "model"))), None)
    facts["reward"] = min((r for t in trained if (r := _reward(t, where)) is not None), default=None)
    facts["tools"] = trained[0].get("tools")
    settings = next((s for c in calls if isinstance(s := c.get("sampling"), dict)), {})
    info = run_info(facts, options)
    info.rollout.sampler, info.rollout.error = sampler_of(settings, dict(usage)), errors
    return build_rollout(agents, info, where)


def _listed(value: Mapping[str, Any], key: str, where: str) -> list[Mapping[str, Any]]:
    """Return the objects in a list under a key; none if there is no list. Raises Unreadable: `unknown_form`."""
    name, items = f"{where}, {key}[]", as_list(value.get(key) or [], f"{where}, {key}")
    return [as_mapping(item, name) for item in items]


def _error(error: Any) -> str:
    return ": ".join(filter(None, (text_field(error, "type"), text_field(error, "message"))))


def _reward(trace: Mapping[str, Any], where: str) -> float | None:
    """Return the sum of the weighted rewards; None if scoring did not run."""
    rewards = as_mapping(trace.get("rewards") or {}, f"{where}, rewards")
    scores = [(number_field(r, "score"), number_field(r, "weight")) for r in rewards.values()]
    known = [score * (1.0 if weight is None else weight) for score, weight in scores if score is not None]
    return sum(known) if known else None


def _agents(trace: Mapping[str, Any], number: int, where: str, options: Options) -> list[AgentRecord]:
    """Return an agent for each branch of a trace; messages that branches share are context in all but one."""
    nodes = _listed(trace, "nodes", where)
    parents = {i: p if type(p := node.get("parent")) is int and 0 <= p < i else None for i, node in enumerate(nodes)}
    turns = {i for i, n in enumerate(nodes) if n.get("sampled") is True and field(n, "message", "role") == "assistant"}
    calls = _listed(trace, "calls", where)
    finishes = {str(call.get("node")): finish_of(text_field(call, "finish_reason")) for call in calls}
    name = f"{text_field(trace, 'agent', 'name') or 'agent'}{number + 1}"
    shared: set[int] = set()
    agents: list[AgentRecord] = []
    for path in sorted(paths(parents, turns), key=lambda path: path[-1]):
        entries = _entries(nodes, path, turns - shared, finishes, f"{where}, nodes", options)
        role = _role([nodes[i] for i in path if i not in shared], f"{where}, nodes")
        shared.update(path)
        branch = f"{name}-branch{len(agents)}" if agents else name
        agent = AgentRecord(branch, "", role or ("branch" if agents else "solo"), "unknown")
        agents.append(fill_agent(agent, entries, options, answers="all"))
    return agents


def _role(nodes: Sequence[Mapping[str, Any]], name: str) -> str | None:
    """Return the role that links between the conversations of a harness give to these nodes."""
    links = [link for node in nodes if node.get("semantic_parents") for link in _listed(node, "semantic_parents", name)]
    return next((role for link in links if (role := _LINKS.get(text_field(link, "type") or ""))), None)


def _entries(
    nodes: Sequence[Mapping[str, Any]],
    path: Sequence[int],
    trained: Set[int],
    finishes: Mapping[str, str | None],
    name: str,
    options: Options,
) -> list[Message]:
    """Read the messages of the nodes on a path; those in `trained` are turns."""
    entries: list[Message] = []
    before: list[int] = []
    spec = load("verifiers")[0]
    for i in path:
        node, messages = nodes[i], list[Message]()
        read_message(node.get("message"), messages, name, i, spec, options.unread)
        time = to_utc(node.get("timestamp"))
        for entry in messages:
            entry.time = time
            if entry.role == "assistant":
                entry.trained, entry.finish = i in trained, finishes.get(str(i))
        entries += messages
        if ids := node.get("token_ids"):
            of_node = f"{name}[{i}]"
            as_list(ids, f"{of_node}.token_ids")
            if messages and messages[-1].trained and messages[-1].role == "assistant":
                mask = as_list(node.get("mask"), f"{of_node}.mask")
                start = next((at for at, sampled in enumerate(mask) if sampled), len(ids))
                set_ids(messages[-1], [*before, *ids[:start]], ids[start:], node.get("logprobs"), of_node)
            before += ids
    return entries
