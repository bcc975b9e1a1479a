"""Assemble the recorded calls of a foreign harness into the agents of a rollout.

A call is linked to the call that it continues:

- `exact`: its prompt begins with that call's prompt and output, id for id; `drift`: only its messages do.
- `rewritten`: it begins like an earlier call that other calls already continue, as after a compaction.
- `root`: none of these.

If several calls continue the same one, the longest continuation keeps the conversation, but never one that the
harness's headers name as a helper's. The harness discarded a single call beside it: `retry` if both have the same
messages, else `dropped`. Nothing else is guessed: two equal helpers at once are two.
"""

from __future__ import annotations

import json
import re
from bisect import insort
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, Literal

from etpi_assets.trajectories.records import Action, AgentRecord, Message, Turn
from etpi_resources.capture.conversation import normalised
from etpi_resources.capture.dialects import HELPER_HEADERS
from etpi_resources.chat.tool_forms.call import NO_CALL
from etpi_resources.token_ids import begins_with

Role = Literal["main", "helper", "summary", "side", "dropped", "retry"]
ReadActions = Callable[[str, Sequence[Any] | None], tuple[list[Action], str | None]]
"""(text of a turn, its structured calls) -> its actions, and the reason if there are none."""

_QUOTING = re.compile(r"[\s\"'\\]+")


class CaptureError(ValueError):
    """The recorded calls contradict each other; the rollout cannot be used."""


@dataclass(frozen=True)
class Assembled:
    """The agents of a rollout, main first, the schemas of main's tools, and counts of calls.

    Of a conversation that is not trained, main has the messages, with its role and number as their kind ("side1").
    """

    agents: list[AgentRecord]
    tools: list[Any] | None
    figures: dict[str, Any]


@dataclass(eq=False)
class _Node:
    """One answered call.

    Attributes:
        path: a number for each beginning of its messages with the answer, from the empty one to all of them. Equal
            beginnings of two calls have equal numbers.
        after: the number of calls of its longest continuation, itself included, as `_count_after` sets it.
    """

    row: Mapping[str, Any]
    path: list[int]
    parent: _Node | None = None
    link: str = "root"
    children: list[_Node] = field(default_factory=list)
    after: int = 1

    @property
    def asked(self) -> int:
        """The number of its messages without the answer."""
        return self.path[-2]

    @property
    def tools(self) -> str:
        return self.row["tools_hash"]

    @property
    def helper(self) -> list[str | None]:
        """The values of the headers that name a helper."""
        return [self.row["headers"].get(name) for name in HELPER_HEADERS]

    @property
    def ended(self) -> float:
        return self.row["at"] + self.row["seconds"]

    def asked_begins_with(self, other: _Node) -> bool:
        """Return whether its messages begin with those of another call, whose answer apart."""
        length = len(other.path) - 1
        return length < len(self.path) and self.path[length - 1] == other.asked


class _Paths:
    """Numbers the beginnings of conversations, so that calls are compared in constant time."""

    def __init__(self) -> None:
        self._numbers: dict[tuple[int, str], int] = {}
        self._keys: dict[int, tuple[Any, str]] = {}  # rows share their messages; each is kept, so that its id is too

    def of(self, messages: Iterable[Mapping[str, Any]]) -> list[int]:
        path = [0]
        for message in messages:
            step = (path[-1], self._key(message))
            path.append(self._numbers.setdefault(step, len(self._numbers) + 1))
        return path

    def _key(self, message: Mapping[str, Any]) -> str:
        if id(message) not in self._keys:
            self._keys[id(message)] = message, json.dumps(normalised(dict(message)), sort_keys=True)
        return self._keys[id(message)][1]


def assemble(
    rows: Iterable[Mapping[str, Any]],
    task: str | None,
    read_actions: ReadActions,
    *,
    main: AgentRecord,
    trained: Collection[Role] = (),
) -> Assembled:
    """Assemble the rows of an attempt's log (`etpi_resources.capture.store.read_log`).

    Args:
        task: a text that main's first prompt contains; None: main is the first conversation.
        main: the record of the main agent, to be filled.
        trained: the roles besides main whose calls are turns too.

    Raises CaptureError: a call's output, log-probabilities and text do not belong together.
    """
    counts: Counter[str] = Counter()
    nodes, paths = list[_Node](), _Paths()
    for row in rows:
        if "output_ids" in row:
            _require_consistent(row)
            nodes.append(_Node(row, paths.of((*row["messages"], row["message"]))))
        elif "joined" in row:
            counts["joined"] += 1
        elif "call" in row:
            counts["refused"] += 1
    nodes.sort(key=lambda node: node.row["at"])
    _link(nodes)
    chains = _chains(nodes)
    roles = _roles(chains, task)
    agents, numbers, untrained = [main], Counter[str](), Counter[str]()
    untrained_tokens = 0
    for chain, role in sorted(zip(chains, roles, strict=True), key=lambda pair: pair[1] != "main"):
        numbers[role] += 1
        name = f"{role}{numbers[role]}"
        if role == "main":
            _add_turns(main, chain, read_actions)
        elif role in trained:
            agents.append(AgentRecord(name, "", role, "Submitted"))
            _add_turns(agents[-1], chain, read_actions)
        else:
            for row, new in _exchanges(chain):
                main.messages += [_message(row, message, name) for message in (*new, row["message"])]
            untrained[role] += len(chain)
            untrained_tokens += sum(len(node.row["output_ids"]) for node in chain)
    turns = sum(len(agent.turns) for agent in agents)
    tools = next((chain[0].row["tools"] for chain, role in zip(chains, roles, strict=True) if role == "main"), None)
    figures = {
        "calls": len(nodes) + counts["refused"] + counts["joined"],
        "turns": turns,
        "untrained": dict(untrained),
        "untrained_tokens": untrained_tokens,
        "refused": counts["refused"],
        "joined": counts["joined"],
        "links": dict(Counter(node.link for node in nodes)),
    }
    if len(nodes) != turns + untrained.total():
        raise CaptureError(f"the calls do not reconcile: {figures}")
    return Assembled(agents, list(tools) if tools else None, figures)


def _require_consistent(row: Mapping[str, Any]) -> None:
    output, logprobs, message = row["output_ids"], row["logprobs"], row["message"]
    if logprobs is not None and len(logprobs) != len(output):
        raise CaptureError(f"call {row['call']}: {len(logprobs)} log-probabilities for {len(output)} output ids")
    names = [call["function"]["name"] for call in message.get("tool_calls") or ()]
    parts = [message.get("content"), message.get("reasoning"), *names]
    text = "".join(filter(str.isalnum, row["text"]))
    if unlike := next((part for part in parts if part and "".join(filter(str.isalnum, part)) not in text), None):
        raise CaptureError(f"call {row['call']}: the answer {unlike[:80]!r} is not in the text of its ids")


def _link(nodes: Sequence[_Node]) -> None:
    """Set parents, links and children. `nodes` are in the order of their requests."""
    by_length: list[_Node] = []  # earlier calls; those with the most messages, then the latest, come last
    answered: defaultdict[tuple[str, int], list[_Node]] = defaultdict(list)
    roots: defaultdict[tuple[str, int], list[_Node]] = defaultdict(list)
    for at, node in enumerate(nodes):
        link, parent = "exact", _exact(node, by_length)
        if parent is None:
            link, parent = "drift", _continued(node, answered)
        if parent is None and node.row["tools"] and (parent := _continued(node, roots, with_children=True)):
            link = "rewritten"
            _count_after(nodes[:at])
            while parent.children:
                parent = max(parent.children, key=lambda child: child.after)
        if parent is None:
            roots[node.tools, node.asked].append(node)
        else:
            node.parent, node.link = parent, link
            parent.children.append(node)
        answered[node.tools, node.path[-1]].append(node)
        insort(by_length, node, key=lambda other: (len(other.path), other.row["at"]))
    _count_after(nodes)


def _exact(node: _Node, earlier: Sequence[_Node]) -> _Node | None:
    """Return the last of the calls that the prompt continues id for id."""
    for other in reversed(earlier):
        if _has_ended(other, node) and begins_with(node.row["prompt_ids"], other.row["history"]):
            return other
    return None


def _continued(
    node: _Node, earlier: Mapping[tuple[str, int], Sequence[_Node]], *, with_children: bool = False
) -> _Node | None:
    """Return the latest call with the longest beginning of the node's messages."""
    for beginning in reversed(node.path[:-1]):
        for other in reversed(earlier.get((node.tools, beginning), ())):
            if _has_ended(other, node) and (other.children or not with_children):
                return other
    return None


def _has_ended(other: _Node, node: _Node) -> bool:
    return other.ended <= node.row["at"] + 1e-3


def _count_after(nodes: Sequence[_Node]) -> None:
    for node in reversed(nodes):  # children come later
        node.after = 1 + max((child.after for child in node.children), default=0)


def _chains(nodes: Sequence[_Node]) -> list[list[_Node]]:
    """Return the conversations: the longest continuation of each call, each other continuation as a new chain."""
    roots = [node for node in nodes if node.parent is None]
    _set_thrown_away(roots)
    starts, chains = list(roots), []
    while starts:
        chain = [starts.pop(0)]
        while following := chain[-1].children:
            _set_thrown_away(following)
            of_agent = [node for node in following if node.helper == chain[-1].helper]
            goes_on = max(of_agent, key=lambda node: (node.after, node.link not in ("retry", "dropped")), default=None)
            if goes_on and goes_on.link in ("retry", "dropped"):
                goes_on = None
            starts += [node for node in following if node is not goes_on]
            if goes_on is None:
                break
            chain.append(goes_on)
        chains.append(chain)
    return sorted(chains, key=lambda chain: chain[0].row["at"])


def _set_thrown_away(siblings: Sequence[_Node]) -> None:
    """Link calls without a continuation, beside one that the harness made instead of them."""
    for node in siblings:
        if node.children:
            continue
        later = [other for other in siblings if other is not node and _may_replace(other, node)]
        if any(other.asked == node.asked for other in later):
            node.link = "retry"
        elif any(other.asked_begins_with(node) and other.row["at"] > node.row["at"] for other in later):
            node.link = "dropped"


def _may_replace(node: _Node, other: _Node) -> bool:
    """Return whether two calls are of one agent, with tools, and do not overlap in time."""
    alike = node.tools == other.tools and bool(node.row["tools"]) and node.helper == other.helper
    return alike and not (node.row["at"] < other.ended and other.row["at"] < node.ended)


def _roles(chains: Sequence[Sequence[_Node]], task: str | None) -> list[Role]:
    with_tools = any(chain[0].row["tools"] for chain in chains)
    heard = _heard(chains)
    roles: list[Role] = []
    for chain in chains:
        first = chain[0]
        if first.link in ("retry", "dropped") and len(chain) == 1:
            roles.append("retry" if first.link == "retry" else "dropped")
        elif _returns_as_user(first, heard):
            roles.append("summary")
        elif with_tools and not first.row["tools"]:
            roles.append("side")
        elif len(chain) == 1 and first.parent is not None and not any(first.helper):
            roles.append("dropped")
        elif "main" not in roles and not any(first.helper) and _has_task(first.row, task):
            roles.append("main")
        else:
            roles.append("helper")
    return roles


def _has_task(row: Mapping[str, Any], task: str | None) -> bool:
    users = (message["content"] for message in row["messages"] if message["role"] == "user")
    return task is None or any(_letters(task) in _letters(content) for content in users)


def _letters(text: str) -> str:
    """Return a text without the characters that harnesses add or change when they quote it."""
    return _QUOTING.sub("", text)


def _heard(chains: Sequence[Sequence[_Node]]) -> dict[str, float]:
    """Return each user message and the time of the last request that has it."""
    heard: dict[str, float] = {}
    for node in sorted((node for chain in chains for node in chain), key=lambda node: node.row["at"]):
        heard |= {m["content"]: node.row["at"] for m in node.row["messages"] if m["role"] == "user"}
    return heard


def _returns_as_user(node: _Node, heard: Mapping[str, float]) -> bool:
    """Return whether a later prompt tells the call's output in a user message, as a summary of the work so far."""
    text = (node.row["message"].get("content") or "").strip()
    if not text or len(node.row["messages"]) <= 2:
        return False
    before = {(message.get("content") or "").strip() for message in node.row["messages"]}
    return any(
        at > node.ended - 1e-3 and text in content and content.strip() not in before for content, at in heard.items()
    )


def _add_turns(agent: AgentRecord, chain: Sequence[_Node], read_actions: ReadActions) -> None:
    for number, (row, new) in enumerate(_exchanges(chain)):
        if number:
            agent.turns[-1].observation = "\n".join(m["content"] for m in new if m["role"] != "assistant")
        for message in new:
            kind = "prompt" if number == 0 else "other" if message["role"] == "assistant" else "observation"
            agent.messages.append(_message(row, message, kind, number - 1 if number else None))
        agent.messages.append(_message(row, row["message"], "action", number))
        agent.turns.append(_turn(number, row, read_actions))


def _exchanges(chain: Sequence[_Node]) -> Iterator[tuple[Mapping[str, Any], list[Mapping[str, Any]]]]:
    """Yield each call of a conversation with the messages that are new in it."""
    path = [0]
    for node in chain:
        prompt = node.path[:-1]
        shared = enumerate(zip(path, prompt, strict=False))
        known = next((at for at, (old, new) in shared if old != new), min(len(path), len(prompt)))
        yield node.row, node.row["messages"][known - 1 :]
        path = node.path


def _message(row: Mapping[str, Any], message: Mapping[str, Any], kind: str, turn: int | None = None) -> Message:
    reasoning, calls = message.get("reasoning"), message.get("tool_calls")
    return Message(message["role"], message.get("content") or "", turn, kind, reasoning, calls, _at(row))


def _turn(number: int, row: Mapping[str, Any], read_actions: ReadActions) -> Turn:
    actions, error = read_actions(row["text"], row["message"].get("tool_calls"))
    message = row["message"]
    answers = row["tools"] and not message.get("tool_calls") and bool((message.get("content") or "").strip())
    if error == NO_CALL and answers and row["finish"] != "length":
        error = None  # an answer in words: the harness offers tools, and reads structured calls alone
    return Turn(
        turn=number,
        content=row["text"],
        prompt_ids=row["prompt_ids"].tolist(),
        output_ids=row["output_ids"],
        logprobs=row["logprobs"],
        capture="native",
        finish_reason=row["finish"],
        reasoning=message.get("reasoning"),
        actions=actions,
        parse_error=error,
        at=_at(row),
    )


def _at(row: Mapping[str, Any]) -> datetime:
    return datetime.fromtimestamp(row["at"], UTC)
