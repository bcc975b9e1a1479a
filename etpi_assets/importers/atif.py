"""Harbor's Agent Trajectory Interchange Format (ATIF), versions 1.0 to 1.8: one document per trajectory.

Each continuation and each subagent has its own prompt, so each becomes an agent of the rollout. Copied context and
steps that no model wrote (`llm_call_count` 0) become context, never turns. `harbor` reads the folders of trials.

Harbor's documents of Claude Code's sessions list the steps of sub-agents too. Older ones have a step for each block of
a response. Their results have Harbor's notes after the text that the model read.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, fields
from itertools import takewhile
from pathlib import Path
from typing import Any

from etpi_assets.importers.calls import content_text, count_keys, read_calls
from etpi_assets.importers.conversation import Message, Options, RunInfo, fill_agent, finish_of, joined, set_ids
from etpi_assets.importers.format import source_of
from etpi_assets.importers.run_info import TASK_COMPLETE, build_rollout, exit_by_action, exit_name, run_info
from etpi_assets.importers.source import (
    as_list,
    as_mapping,
    content_hash,
    field,
    int32_field,
    list_field,
    no_run,
    text_field,
    to_utc,
)
from etpi_assets.importers.spec import load
from etpi_assets.trajectories.records import Action, AgentRecord, RolloutRecord
from etpi_resources.inside import is_file_inside
from etpi_resources.outside import loads
from etpi_resources.rows import files_below
from etpi_resources.rows.bounded import Unreadable, attempt, read_json

_VERSION = re.compile(r"ATIF-v1\.(\d+)")
_NEWEST = 8
_JSON = (".json", ".json.gz", ".json.zst")
_NO_MODEL = "<synthetic>"
"""Model of the messages that Claude Code writes itself, such as the errors of the provider."""
EXPORT_KEY = "etpi"
"""Key of `extra` under which etpi's exports keep values that the format has no field for."""
_FINISHES = ("metrics.extra.finish_reason", f"extra.{EXPORT_KEY}.finish_reason", "extra.stop_reason")


def claims(value: Any) -> bool:
    return isinstance(value, dict) and str(value.get("schema_version", "")).startswith("ATIF-")


def units(root: Path) -> list[Path]:
    """Return every JSON file that no other document refers to."""
    files = files_below(root, *_JSON)
    continued = {other for file in files for other in documents_beside(file)}
    return [file for file in files if file not in continued]


def documents_beside(file: Path) -> list[Path]:
    """Return the files that a document names as its continuation or as its subagents' documents."""
    if ".cont-" not in file.name and not re.search(r"traj|atif", file.name):
        return []
    if not claims(value := attempt(read_json, file)):
        return []
    names = [text_field(value, "continued_trajectory_ref"), *(path for path, _ in _subagent_refs(value))]
    return sorted({other for name in names if name and (other := _referenced_file(file, name)) is not None})


def _referenced_file(file: Path, name: str) -> Path | None:
    """Return the file of that name, relative to the document's folder; None if it is missing or outside the folder."""
    target = file.parent / name
    return target if "://" not in name and is_file_inside(file.parent, name) and target != file else None


def record(unit: Path, root: Path, options: Options) -> RolloutRecord:
    """Read one document as a rollout.

    Raises Unreadable: as `no_run`, `unknown_version`, `empty`, `bad_token_ids`, `missing_trajectory`, or as
    `read_json`.
    """
    value = read_json(unit)
    if not claims(value):
        raise no_run(value, f"{unit.name} is no ATIF document: it has no `schema_version` of one")
    rollout = rollout_of(value, unit, options, unit.name.partition(".")[0])
    rollout.rollout_id = content_hash(source_of(unit, root), [unit, *documents_beside(unit)])
    return rollout


@dataclass(frozen=True)
class _AgentDocument:
    """The document of one agent. `name`: its file, for error messages."""

    agent_id: str
    document: Mapping[str, Any]
    name: str


def rollout_of(document: Mapping[str, Any], path: Path, options: Options, where: str) -> RolloutRecord:
    """Build the rollout of a document and the files it refers to, without a rollout id."""
    exported = field(document, "extra", EXPORT_KEY)
    exported = exported if isinstance(exported, dict) else {}
    facts = {"tools": field(document, "agent", "tool_definitions"), **exported, "metadata": document.get("extra")}
    info = run_info(facts, options)
    agents = [_agent(part, options, info) for part in _agent_documents(document, path)]
    agents = [agent for agent in agents if agent.messages]
    if not any(agent.turns for agent in agents):
        raise Unreadable("empty", f"{path.name}: no step that a model made")
    rollout = build_rollout(agents, info, text_field(document, "session_id") or where)
    rollout.teacher = rollout.teacher or _model(document)
    return rollout


def _model(document: Mapping[str, Any]) -> str | None:
    """Return the model of the first step that a model wrote; Harbor states that of a sub-agent for the agent."""
    models = (text_field(step, "model_name") for step in list_field(document, "steps") if _is_own(step))
    return next(filter(None, models), None) or text_field(document, "agent", "model_name")


def _is_own(step: Any) -> bool:
    """Return whether a step belongs to the document's agent, and not to a sub-agent of Claude Code."""
    return field(step, "extra", "is_sidechain") is not True


def _agent_documents(document: Mapping[str, Any], path: Path) -> Iterator[_AgentDocument]:
    """Yield the document, its continuations in order, then all their subagents, each once."""
    chain: list[tuple[Mapping[str, Any], Path]] = [(document, path)]
    while name := text_field(chain[-1][0], "continued_trajectory_ref"):
        file = _referenced_file(path, name)
        if file is None:
            raise Unreadable("missing_trajectory", f"{path.name} continues in {name!r}, which does not stand beside it")
        if file in [previous for _, previous in chain]:
            break
        chain.append((as_mapping(read_json(file), file.name), file))
    agent_id = text_field(document, "extra", EXPORT_KEY, "agent_id") or "agent1"
    conversations = [(inner, file) for part, file in chain for inner in _conversations(part, file)]
    for number, (part, file) in enumerate(conversations):
        yield _AgentDocument(agent_id if number == 0 else f"{agent_id}-{number + 1}", part, file.name)
    seen: set[str] = set()
    for part, file in chain:
        for label, inner, source in _subagents(part, file):
            label = (label or f"subagent{len(seen) + 1}").replace("/", "_")
            if label not in seen and label != agent_id:
                seen.add(label)
                yield _AgentDocument(label, inner, source)


def _conversations(part: Mapping[str, Any], file: Path) -> Iterator[Mapping[str, Any]]:
    """Yield the document of each conversation in a document: Terminus begins one after each summary.

    A system step refers to the three sub-agents that summarised. The turns after it read the task, the questions
    that the second of them asked, and the answers, but not the steps before.

    Raises Unreadable: `missing_trajectory` without the file of the questions.
    """
    steps = list_field(part, "steps")
    cuts = [i for i, step in enumerate(steps) if field(step, "source") == "system" and _refs_of(step)]
    if not cuts:
        yield part
        return
    task = list(takewhile(lambda step: field(step, "source") != "agent", steps))
    yield {**part, "steps": steps[: cuts[0]]}
    for cut, end in zip(cuts, [*cuts[1:], len(steps)], strict=True):
        if not (later := steps[cut + 1 : end]):
            continue
        name = next((name for name, _ in _refs_of(steps[cut]) if "questions" in name), "of its questions")
        if (other := _referenced_file(file, name)) is None:
            summary = f"{file.name}, steps[{cut}] is a summary, whose file {name!r} does not stand beside"
            raise Unreadable("missing_trajectory", summary)
        questions = as_list(field(read_json(other), "steps"), f"{other.name}.steps")
        prompt = [{**as_mapping(step, f"{other.name}.steps[]"), "is_copied_context": True} for step in questions]
        yield {**part, "steps": [*task, *prompt, *later]}


def _subagents(part: Mapping[str, Any], file: Path) -> Iterator[tuple[str | None, Mapping[str, Any], str]]:
    """Yield (id, document, file name) of the embedded subagents, then of those in their own files."""
    for inner in list_field(part, "subagent_trajectories"):
        if isinstance(inner, dict):
            yield text_field(inner, "trajectory_id"), inner, file.name
    for name, label in _subagent_refs(part):
        if (other := _referenced_file(file, name)) is not None:
            yield label or other.stem, as_mapping(read_json(other), other.name), other.name


def _subagent_refs(document: Mapping[str, Any]) -> Iterator[tuple[str, str | None]]:
    """Yield (path, id) of the subagents' files that observations refer to."""
    return (ref for step in list_field(document, "steps") for ref in _refs_of(step))


def _refs_of(step: Any) -> list[tuple[str, str | None]]:
    """Return `_subagent_refs` of one step."""
    lists = [field(result, "subagent_trajectory_ref") for result in list_field(step, "observation", "results")]
    refs = [ref for refs in lists for ref in (refs if isinstance(refs, list) else [refs])]
    return [(name, text_field(ref, "trajectory_id")) for ref in refs if (name := text_field(ref, "trajectory_path"))]


def _agent(part: _AgentDocument, options: Options, info: RunInfo) -> AgentRecord:
    version = text_field(part.document, "schema_version")
    if (known := _VERSION.fullmatch(version or "")) is None or int(known[1]) > _NEWEST:
        raise Unreadable("unknown_version", f"{part.name}: schema_version {version!r}; 1.0 to 1.{_NEWEST} are read")
    entries = [entry for response in _responses(part) for entry in response]
    count_keys(part.document["steps"], "atif", options.unread)
    exported = field(part.document, "extra", EXPORT_KEY)
    patch = field(exported, "patch")
    agent = AgentRecord(
        agent_id=part.agent_id,
        feature_id=text_field(exported, "feature_id") or "",
        role=text_field(exported, "role") or "solo",
        exit_status=exit_name(text_field(exported, "exit_status")) or info.exit_status or "unknown",
        patch=patch if isinstance(patch, str) else info.patch if part.agent_id == "agent1" else None,
    )
    fill_agent(agent, entries, options, bare_calls=True, answers="answered")
    if agent.exit_status == "unknown" and agent.turns:
        agent.exit_status = exit_by_action(agent.turns[-1].actions)
    return agent


def _responses(part: _AgentDocument) -> list[list[Message]]:
    """Return the entries of each step; steps of Claude Code that are blocks of one response are one.

    Such steps have the response's metrics, or only the first one has them.
    """
    responses: list[list[Message]] = []
    agent = text_field(part.document, "agent", "name") or ""
    in_blocks, last = agent == "claude-code", None
    for i, raw in enumerate(as_list(part.document.get("steps"), f"{part.name}.steps")):
        if not _is_own(raw):
            continue
        entries = list(_step(raw, f"{part.name}.steps[{i}]"))
        if agent.startswith("terminus") and raw["source"] == "agent" and not raw.get("tool_calls"):
            entries[0].actions = entries[0].actions or _typed(entries[0].text)
        metrics = raw.get("metrics") if raw["source"] == "agent" else None
        if in_blocks and raw["source"] == "agent" and last and metrics in (None, last):
            message, *results = responses[-1]
            responses[-1] = [joined([message, entries[0]]), *results, *entries[1:]]
        else:
            responses.append(entries)
            last = metrics
    return responses


def _step(raw: Any, name: str) -> Iterator[Message]:
    step = as_mapping(raw, name)
    source, text = step.get("source"), content_text(step.get("message"), name)
    at = to_utc(step.get("timestamp"))
    kind = text_field(step, "extra", EXPORT_KEY, "kind")
    results = field(step, "observation", "results")
    if results is None and _as_read(step):  # Harbor writes no observation for an empty result
        results = [{}]
    results = [] if results is None else as_list(results, f"{name}.observation.results")
    if source in ("system", "user"):
        yield Message("system" if source == "system" else "user", text, time=at, kind=kind)
    elif source == "agent":
        copied, calls = step.get("is_copied_context") is True, step.get("llm_call_count")
        written = as_list(step.get("tool_calls") or [], f"{name}.tool_calls")
        call = written[0] if len(written) == 1 else None
        filler = f"Executed {field(call, 'function_name')}"  # which Harbor writes for a call without text
        if call is not None and text in (filler, f"{filler} {field(call, 'tool_call_id')}"):
            text = ""
        called = [field(c, "extra", EXPORT_KEY, "call") or c for c in written]
        entry = Message("assistant", text, read_calls(called, name, load("atif")[0]), time=at)
        entry.thought = text_field(step, "reasoning_content")
        entry.actions = _exported_actions(field(step, "extra", EXPORT_KEY, "actions"))
        entry.trained = not copied and not (type(calls) is int and calls == 0) and step.get("model_name") != _NO_MODEL
        entry.kind = "prompt" if copied else kind
        reasons = (text_field(step, *place.split(".")) for place in _FINISHES)
        entry.finish = finish_of(next(filter(None, reasons), None))
        metrics = step.get("metrics")
        prompt, output = field(metrics, "prompt_token_ids"), field(metrics, "completion_token_ids")
        # Metrics of several calls are sums, so their ids are not one turn's.
        if prompt and output is not None and not (type(calls) is int and calls > 1):
            set_ids(entry, prompt, output, field(metrics, "logprobs"), f"{name}.metrics")
            if text_field(metrics, "extra", EXPORT_KEY, "capture") == "retokenised":
                entry.capture = "retokenised"
        yield entry
    else:
        raise Unreadable("unknown_role", f"{name} has source {source!r}; known are system, user, agent")
    for i, result in enumerate(results):
        read = _as_read(result) or (_as_read(step) if len(results) == 1 else None) or result
        text = content_text(field(read, "content"), f"{name}.observation.results[{i}]")
        exported = field(result, "extra", EXPORT_KEY)
        role = text_field(exported, "role") or ("tool" if step.get("tool_calls") else "user")
        yield Message(
            "user" if role == "user" else "tool",
            text,
            time=to_utc(field(exported, "at")),
            kind=text_field(exported, "kind"),
            exit_code=int32_field(exported, "exit_code"),
            result_of=text_field(result, "source_call_id") or text_field(read, "tool_use_id"),
            inbox=_exported_inbox(field(exported, "inbox")),
        )


def _typed(text: str) -> list[Action] | None:
    """Return the actions of a raw answer of Terminus: text around an object with `commands` and `task_complete`."""
    with suppress(ValueError):
        answer = loads(text[text.index("{") : text.rindex("}") + 1])
        keys = [text_field(command, "keystrokes") for command in list_field(answer, "commands")]
        done = [TASK_COMPLETE] if field(answer, "task_complete") is True else []
        return [Action("bash", key, form="fenced") for key in [*keys, *done] if key and key.strip()]
    return None


def _as_read(place: Any) -> Mapping[str, Any] | None:
    """Return Claude Code's result block as the model read it, from the `extra` of a result or of its step."""
    block = field(place, "extra", "tool_result_metadata", "raw_tool_result")
    return block if isinstance(block, dict) and "content" in block else None


def _exported_actions(value: Any) -> list[Action] | None:
    """Return the actions that an etpi export kept for a turn; None if there are none or they are malformed."""
    if not isinstance(value, list) or not value:
        return None
    names = {f.name for f in fields(Action)}
    if not all(isinstance(a, dict) and set(a) == names and isinstance(a["command"], str) for a in value):
        return None
    if not all(isinstance(text, str | None) for a in value for text in (a["kind"], a["to"], a["message"], a["form"])):
        return None
    return [Action(**{**a, "pure": bool(a["pure"]), "wait": bool(a["wait"])}) for a in value]


def _exported_inbox(value: Any) -> list[dict[str, str]] | None:
    """Return the inbox messages that an etpi export kept for an observation."""
    if not isinstance(value, list):
        return None
    return [{key: text_field(message, key) or "" for key in ("from", "message")} for message in value]
