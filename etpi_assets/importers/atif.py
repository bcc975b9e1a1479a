"""Harbor's Agent Trajectory Interchange Format, versions 1.0 to 1.8: one document a trajectory.

Belongs here: a document's steps as messages and turns, its continuations and subagents, and files that are such
documents. Does not belong here: the folders of trials (`harbor`).

Each continuation and each subagent read a conversation of its own, so each is an agent of the rollout. Steps that are
copied context are read, never learnt; so are steps that no model made (`llm_call_count` 0).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from etpi_assets.importers.conversation import Entry, Options, build_agent, finish_of, token_ids
from etpi_assets.importers.facts import Facts, exit_by_action, exit_name, facts, made_of
from etpi_assets.importers.format import ROWS, Look, of_runs, source_of
from etpi_assets.importers.source import (
    Unreadable,
    as_list,
    as_mapping,
    content_hash,
    content_text,
    field,
    read_json,
    text_field,
    to_utc,
    tool_calls,
)
from etpi_assets.trajectories.records import Action, AgentRecord, RolloutRecord

_VERSION = re.compile(r"ATIF-v1\.(\d+)")
_NEWEST = 8
_JSON = (".json", ".json.gz", ".json.zst")
OURS = "etpi"
"""The key of `extra` under which an export keeps what the format has no field for."""


def claims(look: Look) -> bool:
    for file in [f for f in look.files if f.name.endswith(_JSON)][:8]:
        try:
            if is_document(read_json(file)):
                return True
        except Unreadable:
            continue
    return False


def is_document(value: Any) -> bool:
    return isinstance(value, dict) and str(value.get("schema_version", "")).startswith("ATIF-")


def units(root: Path) -> list[Path]:
    """Every JSON file that no other one continues into."""
    files = sorted(f for f in root.rglob("*") if f.name.endswith(_JSON) and f.is_file()) if root.is_dir() else [root]
    continued = {other for file in files for other in documents_beside(file)}
    return [file for file in files if file not in continued]


def documents_beside(file: Path) -> list[Path]:
    """The files that stand beside a document and that it names as its continuation or as its subagents' own."""
    if ".cont-" not in file.name and not re.search(r"traj|atif", file.name):
        return []
    try:
        value = read_json(file)
    except Unreadable:
        return []
    if not is_document(value):
        return []
    names = [text_field(value, "continued_trajectory_ref"), *(path for path, _ in _referred(value))]
    return sorted({beside for name in names if name and (beside := _beside(file, name)) is not None})


def _beside(file: Path, name: str) -> Path | None:
    """The file of that relative name in a document's folder or below; None where there is none."""
    if "\0" in name or "://" in name or Path(name).is_absolute() or ".." in Path(name).parts or len(name) > 500:
        return None
    found = file.parent / name
    return found if found.is_file() and found != file else None


def record(unit: Path, root: Path, options: Options) -> RolloutRecord:
    """Raises Unreadable: `not_a_rollout`, `unknown_version`, `empty`, `bad_token_ids`, `missing_trajectory` or as the
    file says."""
    value = read_json(unit)
    if not is_document(value):
        raise Unreadable("not_a_rollout", f"{unit.name} is no ATIF document: it has no `schema_version` of one")
    made = rollout_of(value, unit, options, unit.name.partition(".")[0])
    made.rollout_id = content_hash(source_of(unit, root), [unit, *documents_beside(unit)])
    return made


@dataclass(frozen=True)
class _Part:
    """One document of a rollout: the agent it becomes."""

    agent_id: str
    document: Mapping[str, Any]
    name: str


def rollout_of(document: Mapping[str, Any], path: Path, options: Options, where: str) -> RolloutRecord:
    """The rollout of a document and what it refers to, relative to `path`; its id is still to be given."""
    ours = field(document, "extra", OURS)
    found = facts({**(ours if isinstance(ours, dict) else {}), "metadata": document.get("extra")}, options)
    agents = [_agent(part, options, found) for part in _parts(document, path)]
    agents = [agent for agent in agents if agent.messages]
    if not any(agent.turns for agent in agents):
        raise Unreadable("empty", f"{path.name}: no step that a model made")
    made = made_of(agents, found, text_field(document, "session_id") or where)
    made.teacher = found.teacher or text_field(document, "agent", "model_name")
    return made


def _parts(document: Mapping[str, Any], path: Path) -> Iterator[_Part]:
    """The document, its continuations in order, then all their subagents, each once."""
    chain: list[tuple[Mapping[str, Any], Path]] = [(document, path)]
    while name := text_field(chain[-1][0], "continued_trajectory_ref"):
        file = _beside(path, name)
        if file is None:
            raise Unreadable("missing_trajectory", f"{path.name} continues in {name!r}, which does not stand beside it")
        if file in [known for _, known in chain]:
            break
        chain.append((as_mapping(read_json(file), file.name), file))
    ours = text_field(document, "extra", OURS, "agent_id") or "agent1"
    for number, (part, file) in enumerate(chain):
        yield _Part(ours if number == 0 else f"{ours}-{number + 1}", part, file.name)
    seen: set[str] = set()
    for part, file in chain:
        for label, inner, source in _subagents(part, file):
            label = (label or f"subagent{len(seen) + 1}").replace("/", "_")
            if label not in seen and label != ours:
                seen.add(label)
                yield _Part(label, inner, source)


def _subagents(part: Mapping[str, Any], file: Path) -> Iterator[tuple[str | None, Mapping[str, Any], str]]:
    """(id, document, where) of those embedded, then of those in files of their own."""
    embedded = part.get("subagent_trajectories")
    for inner in embedded if isinstance(embedded, list) else ():
        if isinstance(inner, dict):
            yield text_field(inner, "trajectory_id"), inner, file.name
    for name, label in _referred(part):
        if (beside := _beside(file, name)) is not None:
            yield label or beside.stem, as_mapping(read_json(beside), beside.name), beside.name


def _referred(document: Mapping[str, Any]) -> Iterator[tuple[str, str | None]]:
    """(path, id) of the subagents' files that observations refer to."""
    steps = document.get("steps")
    for step in steps if isinstance(steps, list) else ():
        results = field(step, "observation", "results")
        for result in results if isinstance(results, list) else ():
            references = field(result, "subagent_trajectory_ref")
            for reference in references if isinstance(references, list) else (references,):
                if name := text_field(reference, "trajectory_path"):
                    yield name, text_field(reference, "trajectory_id")


def _agent(part: _Part, options: Options, found: Facts) -> AgentRecord:
    version = _VERSION.fullmatch(text_field(part.document, "schema_version") or "")
    if version is None or int(version[1]) > _NEWEST:
        said = part.document.get("schema_version")
        raise Unreadable("unknown_version", f"{part.name}: schema_version {said!r}; 1.0 to 1.{_NEWEST} are read")
    steps = as_list(part.document.get("steps"), f"{part.name}.steps")
    entries = [entry for i, step in enumerate(steps) for entry in _step(step, f"{part.name}.steps[{i}]")]
    ours = field(part.document, "extra", OURS)
    patch = field(ours, "patch")
    agent = build_agent(
        entries,
        agent_id=part.agent_id,
        feature_id=text_field(ours, "feature_id") or "",
        role=text_field(ours, "role") or "solo",
        exit_status=exit_name(text_field(ours, "exit_status")) or found.exit_status or "unknown",
        options=options,
        bare_calls=True,
        patch=patch if isinstance(patch, str) else found.patch if part.agent_id == "agent1" else None,
    )
    if agent.exit_status == "unknown" and agent.turns:
        agent.exit_status = exit_by_action(agent.turns[-1].actions)
    return agent


def _step(raw: Any, name: str) -> Iterator[Entry]:
    step = as_mapping(raw, name)
    source, text = step.get("source"), content_text(step.get("message"), name)
    at = to_utc(step.get("timestamp"))
    kind = text_field(step, "extra", OURS, "kind")
    results = field(step, "observation", "results")
    if source in ("system", "user"):
        yield Entry("system" if source == "system" else "user", text, at=at, kind=kind)
    elif source == "agent":
        copied, calls = step.get("is_copied_context") is True, step.get("llm_call_count")
        entry = Entry(
            "assistant", text, _calls(step.get("tool_calls"), name), text_field(step, "reasoning_content"), at
        )
        entry.actions = _done(field(step, "extra", OURS, "actions"))
        entry.learn = not copied and not (type(calls) is int and calls == 0)
        entry.kind = "prompt" if copied else kind
        entry.finish_reason = finish_of(
            text_field(step, "metrics", "extra", "finish_reason") or text_field(step, "extra", OURS, "finish_reason")
        )
        if not (type(calls) is int and calls > 1):  # of several calls at once the figures are sums
            _captured(entry, step.get("metrics"), name)
        yield entry
    else:
        raise Unreadable("unknown_role", f"{name} has source {source!r}; known are system, user, agent")
    for i, result in enumerate(as_list(results, f"{name}.observation.results") if results is not None else ()):
        seen = content_text(field(result, "content"), f"{name}.observation.results[{i}]")
        mine = field(result, "extra", OURS)
        role = text_field(mine, "role") or ("tool" if step.get("tool_calls") else "user")
        yield Entry(
            "user" if role == "user" else "tool",
            seen,
            at=to_utc(field(mine, "at")),
            kind=text_field(mine, "kind"),
            exit_code=code if type(code := field(mine, "exit_code")) is int else None,
            inbox=_mail(field(mine, "inbox")),
        )


def _done(value: Any) -> list[Action] | None:
    """What an export of ours says a turn did; None where it says nothing that can be taken."""
    if not isinstance(value, list) or not value:
        return None
    names = {f.name for f in fields(Action)}
    if not all(isinstance(a, dict) and set(a) == names and isinstance(a["command"], str) for a in value):
        return None
    if not all(isinstance(text, str | None) for a in value for text in (a["kind"], a["to"], a["message"], a["form"])):
        return None
    return [Action(**{**a, "pure": bool(a["pure"]), "wait": bool(a["wait"])}) for a in value]


def _mail(value: Any) -> list[dict[str, str]] | None:
    """Messages that an export of ours says an observation showed."""
    if not isinstance(value, list):
        return None
    told = [{"from": text_field(m, "from"), "message": text_field(m, "message")} for m in value]
    return [{key: text or "" for key, text in mail.items()} for mail in told]


def _calls(value: Any, name: str) -> list[dict[str, Any]] | None:
    if value is None:
        return None
    made = []
    for call in as_list(value, f"{name}.tool_calls"):
        given = as_mapping(call, f"{name}.tool_calls[]")
        kept = field(given, "extra", OURS, "call")  # the call as captured, where it is an export of ours
        function = {"name": given.get("function_name"), "arguments": given.get("arguments")}
        made.append(
            kept
            if isinstance(kept, dict)
            else {"id": given.get("tool_call_id"), "type": "function", "function": function}
        )
    return tool_calls(made, name)


def _captured(entry: Entry, metrics: Any, name: str) -> None:
    """The ids of a turn whose prompt and completion are both there; what has one of them alone is not native."""
    prompt, output = field(metrics, "prompt_token_ids"), field(metrics, "completion_token_ids")
    if not prompt or output is None:
        return
    entry.prompt_ids = token_ids(prompt, f"{name}.metrics.prompt_token_ids")
    entry.output_ids = token_ids(output, f"{name}.metrics.completion_token_ids")
    entry.logprobs = logprobs(field(metrics, "logprobs"), len(entry.output_ids), f"{name}.metrics.logprobs")
    if text_field(metrics, "extra", OURS, "capture") == "retokenised":
        entry.capture = "retokenised"


def logprobs(value: Any, count: int, name: str) -> list[float] | None:
    """Log-probabilities, one an output id; None where there are none. Raises Unreadable: `bad_logprobs`."""
    if not value:
        return None
    numbers = value if isinstance(value, list) else []
    if len(numbers) != count or not all(
        isinstance(x, int | float) and not isinstance(x, bool) and x == x for x in numbers
    ):
        raise Unreadable("bad_logprobs", f"{name}: not one number for each of the {count} output ids")
    return [float(x) for x in numbers]


FORMAT = of_runs(
    "atif",
    title="Harbor's Agent Trajectory Interchange Format, 1.0 to 1.8, with continuations and subagents",
    files="`*.json`, also with `.gz` or `.zst`, a document a file; a continuation is part of what it continues",
    keeps="messages, reasoning, calls, observations, times, token ids and log-probabilities; copied context and steps "
    "without a model are read, never learnt; continuations and subagents are agents of their own",
    loses="costs and token counts, tool definitions, reasoning effort, notes, images (such a file is quarantined), "
    "ids of steps that sum several model calls",
    claims=claims,
    units=units,
    record=record,
    rank=ROWS,
)
