"""A run's task, repository, model, reward and exit status, under the column names that data sets use for them."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

from etpi_assets.importers.calls import read_tools
from etpi_assets.importers.conversation import Message, Options, RunInfo
from etpi_assets.importers.source import field, int32_field, number_field, text_field, to_utc
from etpi_assets.importers.spec import Node, Spec, Unread, at, base, json_value, silent
from etpi_assets.trajectories.records import Action, AgentRecord, RolloutRecord
from etpi_resources.rows.bounded import Unreadable

_TEXTS = {
    **dict.fromkeys(("true", "yes", "pass", "passed", "success", "successful", "resolved", "resolved full"), 1.0),
    **dict.fromkeys(("correct", "solved"), 1.0),
    **dict.fromkeys(("false", "no", "fail", "failed", "failure", "unresolved", "resolved no", "resolved partial"), 0.0),
    **dict.fromkeys(("incorrect", "unsolved", "wrong", "error"), 0.0),
}
"""Words that are verdicts."""
_NO_REWARD = ("", "none", "null", "n/a", "nan")
_TRUNCATED = ("length", "max_tokens", "max_output_tokens")
_SAMPLER = ("temperature", "top_p", "max_tokens", "max_completion_tokens", "max_output_tokens", "seed")
TASK_COMPLETE = "mark_task_complete"
"""Name that Harbor gives to Terminus' statement that the task is done."""
_INSTANCE = re.compile(
    r"(?:[^/]*/)*(?P<owner>[^/]+?)__(?P<name>[^/]+?)(?:-\d+(?:(?:__|[-_.:@#/+]).*)?|\.[0-9a-f]{8}\..+)", re.DOTALL
)
_SUBMITS = re.compile(r"\becho\s+['\"]?(?:COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT|MINI_SWE_AGENT_FINAL_OUTPUT)")
_SUBMITTED_ON_EXIT = re.compile(r"submitted \((\w+)\)")


def run_info(
    row: Any,
    options: Options,
    spec: Spec | None = None,
    place: Mapping[str, str] | None = None,
    shown: Sequence[Message] = (),
) -> RunInfo:
    """Read the facts of a run from the options, then the row, then the objects that the format has `within` it.

    Args:
        place: "@file" and "@folder" -> names of the file and its folder.
        shown: the messages; a column whose text they have is not counted as unread. Without a format none is.

    Raises Unreadable: `unknown_form` if a column of tool schemas holds something else, `bad_reward` if a reward does.
    """
    counted = options.unread is not silent and isinstance(row, Mapping) and spec is not None
    spec = spec or base()
    paths, places = spec.paths["run"], [row]
    places += [held for path in paths.get("within", ()) if (held := _object(at(row, path))) is not None]

    def values(slot: str) -> Iterator[tuple[str, Any]]:
        for held in places:
            for path in paths.get(slot, ()):
                value = at(held, path) if path and path[0] in held else None
                if value not in (None, "") and value == value:  # pandas writes NaN where a value is missing
                    yield ".".join(map(str, path)), value

    def first(slot: str) -> str | None:
        texts = (text_field(value) for _, value in values(slot))
        names = (place[str(p[0])] for p in paths.get(slot, ()) if place and p and p[0] in place)
        return next(filter(None, texts), None) or next(iter(names), None)

    reward, ended, numbered = None, first("exit"), False
    for slot in ("reward", "flag"):  # others use a `flag` for an answer or a class
        for key, value in values(slot):
            stated = reward_of(key, value) if slot == "reward" or isinstance(value, bool) else None
            if stated is None and value not in _NO_REWARD:
                options.unread("row", key, value)  # it is not understood
            reward = stated if reward is None else reward
    if (task := first("task")) is None and (task := first("numbered")) is not None:
        numbered = task.isdecimal()
    if task and (scope := first("scope")):
        task = f"{scope}/{task}"
    ended = exit_name(ended, spec)
    truncated = ended in _TRUNCATED or any(value is True for _, value in values("truncated"))
    settings = [value for path in paths.get("settings", ()) if isinstance(value := at(row, path), dict)]
    if counted:
        _count_unread(row, spec, options.unread, shown)
        options.unread("read", "reward", reward)
    tools = next((tools for key, value in values("tools") if (tools := read_tools(value, key, spec))), None)
    rollout = imported(
        [],
        task,
        options.repo or first("repo") or repo_of(task or ""),
        teacher=options.teacher or first("model"),
        outcome=outcome_of(reward),
        tools=tools,
        error=first("error"),
        sampler=sampler_of({k: v for held in settings for k, v in held.items()}, spec.first("run", "usage", row)),
        sample_seed=int32_field(spec.first("run", "seed", row)),
        started_at=to_utc(spec.first("run", "started", row)),
        wall_seconds=number_field(spec.first("run", "seconds", row)),
    )
    return RunInfo(rollout, first("patch"), None if ended in _TRUNCATED else ended, truncated, numbered)


def _count_unread(row: Mapping[str, Any], spec: Spec, unread: Unread, shown: Sequence[Message]) -> None:
    """Count the columns that no path reads, also within objects that paths lead into."""
    where: str = spec.data.get("columns", "row")
    tree, within = spec.trees["run"], {path[0] for path in spec.paths["run"].get("within", ())}
    texts: str | None = None
    for key, value in row.items():
        node = tree.get(key)
        if value in (None, "", [], {}) or (node is not None and (node.slots or node.known) and key not in within):
            continue
        contents = [field(m, "content") for m in (value if isinstance(value, list) else [value]) if field(m, "role")]
        if contents or (isinstance(value, str) and len(value) > _LONG):  # messages or a text that were read elsewhere
            texts = "\n".join(message.text for message in shown) if texts is None else texts
            if all(isinstance(text, str) and text.strip()[:_COMPARED] in texts for text in contents or [value]):
                continue
        below = {**(tree if key in within else {}), **(node.below if node else {})}
        _count_below(value, below, str(key), lambda name, value: unread(where, name, value))


def _count_below(value: Any, tree: Mapping[Any, Node], name: str, unread: Callable[[str, Any], None]) -> None:
    if not tree or (inner := _object(value)) is None:
        unread(name, value)
        return
    for key, held in inner.items():
        if (node := tree.get(key)) is None or (node.below and not node.slots and isinstance(held, Mapping)):
            _count_below(held, node.below if node else {}, f"{name}.{key}", unread)


_LONG, _COMPARED = 40, 2000


def imported(agents: list[AgentRecord], task_id: str | None, repo: str, **columns: Any) -> RolloutRecord:
    """Build a rollout without a rollout id. `columns`: further fields of the record."""
    return RolloutRecord("", "set", None, task_id, repo, agents, **columns)


def build_rollout(agents: list[AgentRecord], info: RunInfo, where: str) -> RolloutRecord:
    """Return the rollout of a run with its agents. `where` is the task id if the row has none."""
    rollout = info.rollout
    if info.numbered:
        rollout.task_id = f"{where.rpartition(', row ')[0] or where}:{rollout.task_id}"
    rollout.agents, rollout.task_id = agents, rollout.task_id or where
    rollout.error = (rollout.error or "")[:500] or None
    times = (turn.at for agent in agents for turn in agent.turns if turn.at)
    rollout.started_at = rollout.started_at or next(times, None)
    return rollout


def outcome_of(reward: float | None) -> dict[str, Any] | None:
    """Derive a verdict from a bare reward, which says of no tests whether they ran; None if there is no reward."""
    return None if reward is None else {"reward": reward, "verdict": "passed" if reward >= 1 else "low_reward"}


def exit_name(status: str | None, spec: Spec | None = None) -> str | None:
    """Map an exit status to etpi's name; an unknown status stays as written."""
    match = _SUBMITTED_ON_EXIT.fullmatch(status or "")
    return (spec or base()).exits.get(match[1] if match else status or "", status)


def exit_by_action(last_actions: Sequence[Action]) -> str:
    """Derive an exit status from the last turn's commands, for runs that do not record one."""
    commands = [action.command for action in last_actions]
    submits = any(_SUBMITS.search(c) or c.split()[:1] in (["submit"], ["finish"], [TASK_COMPLETE]) for c in commands)
    return "Submitted" if submits else "unknown"


def sampler_of(settings: Mapping[str, Any], usage: Any) -> dict[str, Any] | None:
    """Return the sampling settings that a run recorded, and the usage of its responses; None if there are none."""
    known = {key: settings[key] for key in _SAMPLER if settings.get(key) is not None}
    return {**known, **({"usage": usage} if usage else {})} or None


def add_usage(total: Counter[str], usage: Any) -> None:
    """Add the counts of tokens in the usage of one response, as far as there are any."""
    for key, count in usage.items() if isinstance(usage, dict) else ():
        if type(count) is int and 0 <= count < 2**53:
            total[str(key)] += count


def repo_of(instance_id: str) -> str:
    """Return "owner/name" of an instance id of SWE-bench ("owner__name-123") or SWE-smith
    ("owner__name.0a1b2c3d.lm_modify__9x8y"), and "unknown" for other ids.

    Folders before an instance id, and a number of an attempt behind it, say nothing of the repository.

    A split by repository then keeps all of the unknown ones on one side.
    """
    match = _INSTANCE.fullmatch(instance_id)
    return f"{match['owner']}/{match['name']}" if match else "unknown"


def _object(value: Any) -> Mapping[str, Any] | None:
    """Return a column that holds an object, or JSON text of one; None for anything else."""
    value = json_value(value) if isinstance(value, str) else value
    return value if isinstance(value, Mapping) else None


def reward_of(name: str, value: Any) -> float | None:
    """Return a number or a flag, which may be text; None for a value that is neither.

    Raises Unreadable: `bad_reward` for a `reward` that is neither, and not empty.
    """
    if isinstance(value, bool):
        return float(value)
    text = value.strip().lower().replace("_", " ") if isinstance(value, str) else None
    if value is None or text in _NO_REWARD:
        return None
    number = number_field(value) if text is None else _TEXTS.get(text)
    with suppress(ValueError):
        number = number_field(float(text)) if number is None and text is not None else number
    if number is None and name == "reward":
        raise Unreadable("bad_reward", f"reward is {str(value)[:40]!r}; write a number, true or false, or no reward")
    return number
