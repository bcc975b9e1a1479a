"""Look at recorded runs, a bounded number of them, and write the specs that train a student on them."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from itertools import islice
from pathlib import Path
from typing import Any

from etpi.init import preview
from etpi.init.experiment import NewExperiment, strips_think
from etpi.init.student import Student
from etpi.init.write import FORMAT, NewSpec, quoted, rendered
from etpi.run.console import say
from etpi_assets.curation.joins import Paths, join, paths_of
from etpi_assets.curation.recorded_text import unanswered
from etpi_assets.curation.retokenise import conversation
from etpi_assets.curation.student_form import StudentForm
from etpi_assets.importers import IMPORTERS, Plan, count_found, import_runs, plan, read_map, secrets
from etpi_assets.importers.account import Account, Finding, findings
from etpi_assets.importers.data import map_tables
from etpi_assets.specs.experiment import GatesSection
from etpi_assets.specs.load import SpecError
from etpi_assets.specs.paths import expand
from etpi_assets.trajectories.records import AgentRecord, RolloutRecord, Turn, exit_kind, own_messages
from etpi_assets.trajectories.tables import to_tables, worst_exit
from etpi_resources.chat.marks import CALL, split_thought
from etpi_resources.chat.report import report
from etpi_resources.chat.tool_forms import Call, parse_structured
from etpi_resources.chat.tool_forms.call import tool_name
from etpi_resources.process.progress import Progress
from etpi_resources.rows import iter_rows, row_files
from etpi_resources.templates import templates

ASSISTANTS = ("claude_code", "codex", "gemini_cli", "qwen_code")
"""Formats of sessions of coding assistants, whose keys are masked unless the user chooses otherwise."""
LOOK_ROLLOUTS = 1000
LOOK_SECONDS = 20.0
"""The most rollouts and seconds of the look; more are counted, but not read."""
_SHOWN, _LISTED = 5, 20
COUNTED_BYTES = 4 * 2**30
"""A larger input is not counted."""
_MEANING = {
    "teacher": "the model that wrote the runs, for lineage and reports",
    "tokenizer": "of the recorded token ids; it has to be the student's",
    "ignore": "columns and keys that may stay unread",
    "secrets": "keys and tokens in the runs: keep, mask or quarantine",
}
_CHOICES = {
    "mask": "masked; a turn that wrote one is not trained",
    "quarantine": "the rollouts are quarantined",
    "keep": "kept and trained",
}
_LICENCES = ("license", "licence")


@dataclass
class Survey:
    """Measurements of recorded runs.

    Attributes:
        path: as the user wrote it.
        inputs: rollouts and refused inputs of the whole path; None: too large to count.
        options: importer options that the data need.
        refused: reason -> number, first detail.
        lengths: tokens of each conversation, as recorded or in the student's template; characters without one.
        native_turns, same_turns, foreign_turns: turns whose generated ids were recorded; those of them whose text the
            student's tokenizer decodes from the ids, and those whose text it does not.
        unrendered: why the student's template cannot write a conversation -> number.
        unreadable: why turns have no readable action -> number.
        paths: what tells which rollouts have turns of others, see `curation.joins`.
        copies, parts: rollouts that are an earlier one again, or of whose turns others have all.
        broken: rollouts that an error or a limit ended.
        exits: how the runs ended -> number.
        unread: columns and keys that no path of the format reads.
        unread_files: files that could hold runs and that no format reads, each with the reason.
        secrets, with_secrets: keys and tokens of each kind; rollouts with any.
        unanswered: the first response of a conversation whose calls have no results -> 1.
        first: the first rollout that a run selects; else the first with a turn.
    """

    path: str
    format: str
    inputs: int | None
    options: dict[str, Any] = field(default_factory=dict)
    looked: int = 0
    rollouts: int = 0
    refused: Counter[str] = field(default_factory=Counter)
    first_refusal: dict[str, str] = field(default_factory=dict)
    turns: list[int] = field(default_factory=list)
    lengths: list[int] = field(default_factory=list)
    unrendered: Counter[str] = field(default_factory=Counter)
    roles: Counter[str] = field(default_factory=Counter)
    offered: Counter[str] = field(default_factory=Counter)
    called: Counter[str] = field(default_factory=Counter)
    with_tools: int = 0
    tagged_turns: int = 0
    think_turns: int = 0
    unreadable: Counter[str] = field(default_factory=Counter)
    truncated_turns: int = 0
    paths: dict[str, Paths] = field(default_factory=dict)
    copies: int = 0
    parts: int = 0
    broken: int = 0
    native_turns: int = 0
    same_turns: int = 0
    foreign_turns: int = 0
    answers: int = 0
    rewards: list[float] = field(default_factory=list)
    repos: Counter[str] = field(default_factory=Counter)
    teachers: Counter[str] = field(default_factory=Counter)
    licences: Counter[str] = field(default_factory=Counter)
    exits: Counter[str] = field(default_factory=Counter)
    unread: list[Finding] = field(default_factory=list)
    unread_files: list[str] = field(default_factory=list)
    secrets: Counter[str] = field(default_factory=Counter)
    with_secrets: int = 0
    unanswered: Counter[str] = field(default_factory=Counter)
    first: RolloutRecord | None = None
    formats: list[str] = field(default_factory=list)

    @property
    def ones(self) -> int:
        """Return the number of rollouts with a reward of 1 or more."""
        return sum(reward >= 1 for reward in self.rewards)

    @property
    def lost(self) -> int:
        """Return the number of refused inputs that are, or may be, runs."""
        return self.refused.total() - self.refused["not_a_rollout"]

    @property
    def stopping(self) -> list[Finding]:
        """Return the columns and keys that stop an import."""
        return [finding for finding in self.unread if finding.stops]

    @property
    def passing(self) -> list[Finding]:
        """Return the unread columns and keys that stop nothing."""
        return [finding for finding in self.unread if not finding.stops]

    @property
    def of_assistant(self) -> bool:
        """Return whether they are sessions of a coding assistant, of one program alone."""
        return self.format in ASSISTANTS

    @property
    def lacks_schemas(self) -> bool:
        """Return whether tools were called, and no rollout records schemas."""
        return bool(self.called) and not self.with_tools

    @property
    def native(self) -> bool:
        """Return whether every turn has ids, and none of them is seen to be of another tokenizer."""
        return bool(self.same_turns) and not self.foreign_turns and self.native_turns == sum(self.turns)


def survey(
    source: str,
    format: str,
    student: Student,
    columns: str | None = None,
    keys: str | None = None,
    ignore: Sequence[str] = (),
) -> Survey:
    """Look at the runs below a path: the first LOOK_ROLLOUTS of them, for at most LOOK_SECONDS.

    Rows of token ids alone are read with the student's tokenizer.

    Args:
        columns: the map of rows of no known format, which gives them the format `mapped`.
        ignore: columns and keys that may stay unread (`options.ignore`).
        keys: what is done with keys and tokens; None: they are masked if there are any, or in sessions of assistants.

    Raises SpecError: there is nothing at the path, its format is not recognised, or a bad map.
    """
    path = expand(source)
    try:
        options: dict[str, Any] = {"map": read_map(columns)} if columns else {}
        if ignore:
            options["ignore"] = ignore
        chosen = plan("mapped" if columns else format, path)
        name = chosen.formats[0] if len(chosen.formats) == 1 else "auto"
        result = _look(Survey(source, name, _count(chosen, name, path), options), path, student)
        if result.refused["needs_tokenizer"] and not result.rollouts:
            options["tokenizer"] = student.names.get("tokenizer", "tiny")
            result = _look(Survey(source, name, result.inputs, options), path, student)
    except (FileNotFoundError, ValueError) as error:
        raise SpecError(str(error)) from error
    result.unread_files = [f"{item.source} ({item.reason})" for item in chosen.unread]
    result.formats = chosen.formats
    result.licences = _licences(path)
    if result.native:
        result.options["tokenizer"] = student.names.get("tokenizer", "tiny")
    if keys or result.secrets or result.of_assistant:
        result.options["secrets"] = keys or "mask"
    return result


def _count(chosen: Plan, format: str, path: Path) -> int | None:
    size = sum(unit.stat().st_size for _, units in chosen.inputs for unit in units if unit.is_file())
    return count_found(format, path) if size <= COUNTED_BYTES else None


def _look(result: Survey, path: Path, student: Student) -> Survey:
    """Add the first rollouts and refusals to the survey, and return it."""
    end = time.monotonic() + LOOK_SECONDS
    progress = Progress(f"{path}", "runs read", min(result.inputs or LOOK_ROLLOUTS, LOOK_ROLLOUTS), say)
    account = Account()
    for item in islice(import_runs(result.format, path, result.options, account), LOOK_ROLLOUTS):
        result.looked += 1
        progress.advance()
        if isinstance(item, RolloutRecord):
            _add(result, item, student)
        else:
            result.refused[item.reason] += 1
            place = f"{item.source}, row {item.row or 0}"
            detail = item.detail.removeprefix(place).lstrip(":, ")  # which often names its place
            result.first_refusal.setdefault(item.reason, f"{place}: {detail}")
        if time.monotonic() > end:
            break
    result.unread = findings(account.figures())
    again = Counter(equal for _, equal in join(list(result.paths), result.paths).covered.values())
    result.copies, result.parts = again[True], again[False]
    return result


def _add(result: Survey, rollout: RolloutRecord, student: Student) -> None:
    result.rollouts += 1
    result.repos[rollout.repo or "unknown"] += 1
    result.teachers[rollout.teacher or "unknown"] += 1
    result.with_tools += bool(rollout.tools)
    result.offered.update({name for tool in rollout.tools or () if (name := tool_name(tool))})
    if rollout.agents[:1] and rollout.agents[0].turns and not (result.first and _selected(result.first)):
        result.first = rollout if _selected(rollout) else result.first or rollout
    held = secrets.found(rollout)
    result.secrets += held
    result.with_secrets += bool(held)
    reward = (rollout.outcome or {}).get("reward")
    if reward is not None:
        result.rewards.append(reward)
    result.paths |= paths_of(to_tables([rollout]))
    result.broken += exit_kind(worst_exit(agent.exit_status for agent in rollout.agents)) != "ended"
    for agent in rollout.agents:
        result.exits[agent.exit_status] += 1
        messages = ({"role": m.role, "turn": m.turn, "tool_calls": m.tool_calls} for m in own_messages(agent))
        if place := unanswered(messages):
            result.unanswered[f"{rollout.source}: {place}"] += 1
        result.turns.append(len(agent.turns))
        result.roles.update(message.role for message in agent.messages)
        last = agent.turns[-1] if agent.turns else None
        result.answers += last is not None and not last.actions and last.parse_error is None
        for turn in agent.turns:
            _add_turn(result, turn, student)
        for message in agent.messages:
            calls = (parse_structured(raw) for raw in message.tool_calls or ())
            result.called.update(call.name for call in calls if isinstance(call, Call))
        result.lengths.append(_length(result, agent, rollout.tools, student))


def _selected(rollout: RolloutRecord) -> bool:
    """Return whether a run trains on the rollout where rewards select: it has a reward of 1 and no error."""
    failed = any(exit_kind(agent.exit_status) == "error" for agent in rollout.agents)
    return not failed and ((rollout.outcome or {}).get("reward") or 0) >= 1


def _add_turn(result: Survey, turn: Turn, student: Student) -> None:
    result.tagged_turns += CALL in turn.content
    result.think_turns += split_thought(turn.content, turn.reasoning).inside is not None
    if turn.parse_error is not None:
        result.unreadable[turn.parse_error] += 1
    result.truncated_turns += turn.finish_reason == "length"
    if turn.output_ids is not None and turn.capture == "native":
        result.native_turns += 1
        if student.chat is not None and turn.content:
            same = turn.content.strip() in student.chat.decode(turn.output_ids)
            result.same_turns += same
            result.foreign_turns += not same


def _length(result: Survey, agent: AgentRecord, tools: Sequence[Any] | None, student: Student) -> int:
    """Return the length of a conversation; why it cannot be rendered goes into `unrendered`."""
    last = agent.turns[-1] if agent.turns else None
    if last and last.prompt_ids is not None and last.output_ids is not None:
        return len(last.prompt_ids) + len(last.output_ids)
    if student.chat is not None:
        try:
            messages, _ = conversation(map(vars, own_messages(agent)), StudentForm(student.chat, tools))
            return len(student.chat.prompt_ids(messages, tools=tools))
        except Exception as error:  # a template raises what its author chose
            result.unrendered[" ".join(str(error).split())] += 1
    return sum(len(message.content) for message in own_messages(agent))


def _licences(path: Path) -> Counter[str]:
    files = row_files(sorted(path.rglob("*")) if path.is_dir() else [path])
    rows = (value for file in files[:1] for _, value in islice(iter_rows(file), 100))
    return Counter(str(row[key]) for row in rows if isinstance(row, Mapping) for key in _LICENCES if row.get(key))


def summary(result: Survey, student: Student, preset: str | None) -> str:
    """Return the survey as a few lines, counts first."""
    texts = {"counted": _counted, "listed": _listed, "findings": _findings, "spread": _spread, "number": "{:,}".format}
    return (
        templates(Path(__file__).parent, **texts)
        .get_template("survey.txt.jinja")
        .render(
            s=result,
            student=student,
            strips_think=strips_think(preset),
            over=sum(length > student.context for length in result.lengths) if student.context else 0,
            problems=[finding for finding in report(student.chat) if finding.problem] if student.chat else [],
            choices=_CHOICES,
            skip_rate=GatesSection().skip_rate,
            shown=_SHOWN,
        )
        .rstrip("\n")
    )


def preview_lines(result: Survey, student: Student, preset: str | None) -> list[str]:
    """Return the first conversation as it will be trained, or why it cannot be shown."""
    shown = _preview(result, student, preset)
    if isinstance(shown, str):
        return [f"  not shown: {shown}"] if shown else []
    place = (result.first.source if result.first else None) or "the first conversation"
    return preview.lines(shown, place.replace("#", ", row ", 1)) if shown else []


def facts(result: Survey, student: Student, preset: str | None) -> dict[str, Any]:
    """Return what was seen as JSON values: the counts, and the first conversation as it will be trained."""
    left_out = ("paths", "first", "unread", "turns", "lengths", "rewards")
    values = {f.name: getattr(result, f.name) for f in fields(result) if f.name not in left_out}
    shown = _preview(result, student, preset)
    conversation = {"error": shown} if isinstance(shown, str) else {"parts": preview.as_json(shown)}
    unread = [{**vars(each), "name": each.name} for each in result.unread]
    numbers = {"turns": sum(result.turns), "rewards": len(result.rewards)}
    return {**values, "unread": unread, **numbers, "first": conversation}


def _preview(result: Survey, student: Student, preset: str | None) -> list[preview.TextSpan] | str:
    """Return the parts of the first conversation; why the template does not take it, if so."""
    first = result.first and secrets.without_secrets(result.first, result.options.get("secrets", "keep"))
    if not isinstance(first, RolloutRecord):
        return "" if first is None else first.detail
    try:
        return preview.parts(first, student, native=result.native, strips_think=strips_think(preset))
    except Exception as error:  # a template raises what its author chose
        return f"the first conversation: {' '.join(str(error).split())}"


def format_spec(name: str, columns: Mapping[str, str]) -> NewSpec:
    """Return the format that a map of columns is, as a TOML file of the user's."""
    tables = map_tables(columns)
    needs = [columns[key] for key in ("messages", "prompt", "answer") if key in columns]
    lines = [f"title = {quoted(f'Rows of {name}')}", f"claims = [{quoted(needs)}]"]
    for table, slots in tables.items():
        lines += [f"[{table}]", *(f"{quoted(key)} = {quoted(value)}" for key, value in slots.items())]
    return NewSpec(FORMAT, name, "\n".join(lines) + "\n")


def format_name(name: str) -> str:
    """Return a name for a new format that etpi does not use."""
    return f"{name}_rows" if name in IMPORTERS else name


def rollout_set_spec(name: str, result: Survey, teacher: str | None, licence: str | None) -> NewSpec:
    """Return the rollout set that imports the runs; `teacher`, if the runs do not name the model that wrote them."""
    path = result.path if "${" in result.path else str(Path(result.path).expanduser().absolute())
    options = {k: v for k, v in result.options.items() if k != "map"} | ({"teacher": teacher} if teacher else {})
    format, licence = result.format, licence or next(iter(result.licences), "")
    values = {"path": path, "file": Path(path).name, "licence": licence, "options": options, "meaning": _MEANING}
    values |= {"format": format_name(name) if "map" in result.options else format, "lacks": result.lacks_schemas}
    return NewSpec("rollout_set", name, rendered("imported", survey=result, **values))


def experiment_spec(name: str, result: Survey, student: Student, preset: str | None, trains: bool = False) -> NewSpec:
    """Return the experiment that builds the student's data set from the runs, and trains it if it `trains`."""
    return NewExperiment(
        name,
        student,
        native=result.native,
        min_reward=_min_reward(result),
        longest=max(result.lengths, default=0) if student.chat else 0,
        repositories=len(result.repos),
        calls=bool(result.tagged_turns or result.called),
        preset=preset,
        trains=trains,
    ).spec()


def _min_reward(result: Survey) -> str:
    if ones := result.ones:
        return f"min_reward = 1.0   # {ones} of {result.rollouts} rollouts reach it; the others are not trained on"
    if result.rewards:
        return f'min_reward = "none"   # no reward reaches 1; the highest is {max(result.rewards):g}'
    return 'min_reward = "none"   # the runs have no rewards'


def _spread(values: Sequence[int]) -> str:
    ordered = sorted(values)
    return f"median {ordered[len(ordered) // 2]:,}, longest {ordered[-1]:,}, {sum(ordered):,} in all"


def _findings(unread: Sequence[Finding]) -> str:
    return _listed([f"{each.name} ({each.kind}, {each.count:,})" for each in unread], _LISTED)


def _counted(names: Counter[str]) -> str:
    return _listed([f"{name} {n:,}" for name, n in names.most_common()])


def _listed(words: Sequence[str], most: int = _SHOWN) -> str:
    more = f", and {len(words) - most} more" if len(words) > most else ""
    return ", ".join(words[:most]) + more
