"""Examine a few rows of a training file: read them, build their pairs, and take the faults that checks find."""

from __future__ import annotations

import hashlib
import json
import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import accumulate, pairwise, takewhile
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from etpi.audit.heldout import HeldOut
from etpi.audit.report import SHOWN, Example, Report
from etpi.init.student import read_student
from etpi_assets.curation import recorded_text
from etpi_assets.curation.captured import captured_agents
from etpi_assets.curation.id_rows import has_bodies, mask_faults
from etpi_assets.curation.label_syntax import LabelSyntax
from etpi_assets.curation.pair_blocks import of_rollouts
from etpi_assets.curation.pairs import CapturedAgent, make_pairs
from etpi_assets.curation.student_form import StudentForm
from etpi_assets.curation.template_check import TemplateCheck
from etpi_assets.importers import importer_named, read_options, secrets
from etpi_assets.importers.account import Account
from etpi_assets.importers.format import ImportResult
from etpi_assets.importers.source import without_padding
from etpi_assets.importers.token_rows import ids_and_labels
from etpi_assets.specs.experiment import GatesSection, PairsSection
from etpi_assets.specs.section import SpecError
from etpi_assets.tasks.family import RejectedInput
from etpi_assets.trajectories.calls import stored_call
from etpi_assets.trajectories.records import RolloutRecord, own_messages
from etpi_assets.trajectories.tables import iter_turns, to_tables
from etpi_resources.chat.format import ChatFormat
from etpi_resources.chat.marks import CALL, THINK, THINK_END, other_tags, split_thought, without_code
from etpi_resources.chat.tool_forms import Call
from etpi_resources.chat.tool_forms.call import function_schema, tool_name
from etpi_resources.labels import IGNORE_INDEX
from etpi_resources.outside import loads
from etpi_resources.rows import is_table
from etpi_resources.rows.bounded import Unreadable

_REFUSED = {
    "empty": "all_masked", "bad_token_ids": "bad_ids", "foreign_ids": "foreign_ids",
    **dict.fromkeys(("preference", "no_response", "non_text_content"), "other_training"),
}  # fmt: skip
"""Reason of a refused row -> kind; others are unreadable."""
_BEFORE, _AFTER = 32, 96
"""Tokens of an example before its fault or label, and from there on."""
_LAST_TURN, _FEW = 20, 4
_TOOLS = re.compile(r"<tools>(.*?)</tools>", re.DOTALL)
Key = tuple[str, str, int]


class RawRow(NamedTuple):
    """A row that is not yet read."""

    format: str
    unit: Path
    source: str
    number: int
    row: Any


class Chain(NamedTuple):
    """A conversation: its place, a digest, and (digest of its beginning, label tokens) of each turn."""

    place: str
    whole: int
    turns: Sequence[tuple[int, int]]


@dataclass
class _Block:
    """The rows of a block.

    Attributes:
        records: rollout -> its record. ids: rollout -> the ids and labels of a row that has them.
        hits: (place, kind, detail, mark). structural: rollouts whose ids are not the messages that they decode to.
    """

    report: Report = field(default_factory=Report)
    records: dict[str, RolloutRecord] = field(default_factory=dict)
    ids: dict[str, tuple[list[int], list[int]]] = field(default_factory=dict)
    hits: list[tuple[str, str, str, int | str | None]] = field(default_factory=list)
    structural: set[str] = field(default_factory=set)
    firsts: list[int] = field(default_factory=list)

    def hit(self, place: str, kind: str, detail: str, mark: int | str | None = None) -> None:
        self.hits.append((place, kind, detail, mark))


def _unpacked(item: RawRow | ImportResult) -> Sequence[RawRow | ImportResult]:
    """Return the conversations of a row of ids that a trainer packed, each as a row.

    They begin by `seq_lengths` (TRL), where `position_ids` begin again, or by their numbers in `attention_mask`
    (LLaMA-Factory's `neat_packing`). A column that is no list of numbers is left to the reader of the row.
    """
    if not isinstance(item, RawRow) or item.format != "trl" or not isinstance(item.row, Mapping):
        return [item]
    row, ids = item.row, item.row.get("input_ids")
    lengths, positions, seen = (_numbers(row.get(name)) for name in ("seq_lengths", "position_ids", "attention_mask"))
    if not isinstance(ids, list) or not (lengths or positions or max(seen, default=0) > 1):
        return [item]
    starts = [*accumulate(lengths)][:-1]
    padding = next((i for i, token in enumerate(ids) if token != ids[0]), 0)
    starts = starts or [i for i, after in enumerate(pairwise(positions)) if i > padding and after == (0, 1)]
    starts = starts or [i + 1 for i, (before, after) in enumerate(pairwise(seen)) if after > before > 0]
    if not starts:
        return [item]
    columns = {key: value for key, value in row.items() if isinstance(value, list) and len(value) == len(ids)}
    if seen:
        columns["attention_mask"] = [int(number > 0) for number in seen]
    edges = pairwise([0, *starts, len(ids)])
    return [item._replace(row={key: value[a:b] for key, value in columns.items()}) for a, b in edges]


def _numbers(column: Any) -> list[int]:
    return column if isinstance(column, list) and all(type(number) is int for number in column) else []


class Examiner:
    """Examines blocks of rows; created once in each worker process, which loads the tokenizer.

    Raises SpecError, ValueError: the model, or the held-out tasks, cannot be read.
    """

    def __init__(self, model: str, heldout: Path | None = None, columns: Mapping[str, str] | None = None) -> None:
        student = read_student(model)
        if student.chat is None:
            raise SpecError(f"model {model}: {student.unknown}")
        self._chat, self._context = student.chat, student.context
        self._held = HeldOut.read(heldout, self._chat) if heldout else None
        self._lengths = self._held.lengths if self._held else []
        keeps: dict[str, Any] = {"history_think": "keep", "strip_think": False, "drop_unparseable": False}
        self._rendered = PairsSection(capture="retokenised", drop_truncated=False, **keeps)
        self._native = PairsSection(capture="native", drop_truncated=False, **keeps)
        self._syntax = LabelSyntax(self._chat, GatesSection())
        self._check = TemplateCheck(self._chat, self._rendered, {})
        self._account = Account()
        options = {"tokenizer": self._chat.name, "capture": "native", **({"map": columns} if columns else {})}
        self._options = read_options(options, self._account)
        self._form = StudentForm(self._chat)
        self._opens_call = self._chat.words.form if self._chat.inline_id(CALL) is not None else None
        self._compared = False
        self._examples = Counter[str]()  # the first ones of a worker's rows are among the first of the file

    def __call__(self, items: Sequence[RawRow | ImportResult]) -> tuple[Report, list[Chain], list[int]]:
        """Return the report of the rows, their conversations, and the tokens of first prompts."""
        block, conversations = _Block(), [each for item in items for each in _unpacked(item)]
        block.report.rows = len(conversations)
        block.report.heldout, self._lengths = self._lengths, []  # once: the parent has no tokenizer to count them
        for item in conversations:
            self._read(item, block)
        chains = list[Chain]()
        for is_ids in (True, False):
            records = [r for name, r in block.records.items() if (name in block.ids) is is_ids]
            if records:
                chains += self._examine(records, block, is_ids)
        block.report.unread, self._account.evidence = self._account.evidence, defaultdict(Counter)
        return block.report, chains, block.firsts

    def _read(self, item: RawRow | ImportResult, block: _Block) -> None:
        """Read a row, and take the faults that only the row itself shows."""
        ids = labels = None
        faults = []
        if isinstance(item, RawRow):
            raw, options = item, self._options
            row = raw.row
            try:
                if raw.format == "trl" and isinstance(row, Mapping) and "input_ids" in row:
                    ids, labels = _unpadded(*ids_and_labels(row, f"{raw.source}, row {raw.number}"), self._chat)
                    if (last := max(ids, default=0)) >= self._chat.vocab_size:
                        raise Unreadable("foreign_ids", f"id {last} is beyond the {self._chat.vocab_size} of the model")
                    faults = list(mask_faults(ids, labels, self._chat))
                    row = {k: row[k] for k in ("tools", "id") if k in row} | {"input_ids": ids, "labels": labels}
            except Unreadable as refused:
                item = RejectedInput(raw.source, refused.reason, refused.detail, raw.number)
            else:
                of_row = importer_named(raw.format).of_row
                assert of_row is not None
                item = of_row(row, raw.number, raw.unit, raw.source, options)
            if isinstance(item, RolloutRecord) and (detail := _schema_fault(raw.row, item, is_table(raw.unit))):
                block.hit(item.rollout_id, "schemas", detail)
        if isinstance(item, RejectedInput) and item.reason in ("not_a_rollout", "empty_file"):
            block.report.rows -= 1
            block.report.notes.append(f"{item.source} holds no messages, and was not read.")
            return
        if isinstance(item, RejectedInput):
            kind = _REFUSED.get(item.reason, "unreadable")
            place = f"{item.source}, row {item.row}" if item.row is not None else item.source
            spans = _spans(ids, [False] * len(ids), None, self._chat) if ids else ()
            block.report.tokens += len(ids or ())
            detail = f"{item.reason}: {item.detail.removeprefix(place).lstrip(':, ')}"
            block.report.finding(kind).add(1, 0, [Example(place, detail[:300], spans)])
            return
        block.records[item.rollout_id] = item
        if ids is not None and labels is not None:
            block.ids[item.rollout_id] = ids, labels
            for turn, kind, detail, at in faults:
                block.hit(item.rollout_id + (f"/agent1/{turn}" if turn is not None else ""), kind, detail, at)
                if kind != "no_end" or at >= len(ids):
                    block.structural.add(item.rollout_id)

    def _examine(self, records: Sequence[RolloutRecord], block: _Block, is_ids: bool) -> list[Chain]:
        """Build the pairs of the records, and take the faults of curation's checks."""
        tables = of_rollouts(to_tables(records), frozenset(record.rollout_id for record in records))
        section = self._native if is_ids else self._rendered
        agents = list(captured_agents(tables, section, self._chat, lambda task, agent: None, {}, None))
        if is_ids:
            agents = [_with_messages(agent, block.records[agent.rollout_id]) for agent in agents]
        built = make_pairs(agents, section, self._chat)
        pairs = built["pairs"]
        for row in built["dropped"].to_pylist():
            place = f"{row['rollout_id']}/{row['agent_id']}/{row['turn']}"
            block.hit(place, "differs", f"{row['reason']}: {row['detail']}")
        judged = [agent for agent in agents if agent.rollout_id not in block.structural]
        shown = [agent if agent.tools else replace(agent, tools=_tools_in_text(agent)) for agent in judged]
        self._syntax.figures(shown, pairs, built["dropped"], block.hit)
        if is_ids:
            for agent in judged if has_bodies(self._chat) else ():
                block.report.compared += 1
                if difference := self._check.whole(agent, block.ids[agent.rollout_id][0]):
                    block.hit(agent.rollout_id, *difference)
        elif not self._compared:  # etpi rendered these, so a few suffice
            self._compared, self._syntax.most_rendered = True, 0
            few = [agent.rollout_id for agent in agents[:_FEW]]
            sample = pairs.filter(pc.field("rollout_id").isin(pa.array(few, pa.string())))
            block.report.compared += self._check.figures(agents, sample, block.hit)["compared"]
        rendered = pairs.set_column(
            pairs.schema.get_field_index("capture"), "capture", pa.array(["retokenised"] * len(pairs), pa.string())
        )
        recorded_text.tool_figures(tables, rendered, None, self._chat, block.hit)
        recorded_text.result_figures(tables["messages"], rendered, block.hit)
        block.report.call_tokens += sum(pairs["format_tokens"].to_pylist())
        turns = {key: (prompt, output) for key, prompt, output in iter_turns(pairs) if output is not None}
        chains = [chain for record in records for chain in self._of_record(record, turns, block)]
        self._count(turns, block, {record.rollout_id for record in records})
        return chains

    def _of_record(self, record: RolloutRecord, turns: Mapping[Key, Any], block: _Block) -> Iterator[Chain]:
        """Take the faults that a conversation shows without its tokens; yield its chains."""
        name, is_ids = record.rollout_id, record.rollout_id in block.ids
        offered = [*map(tool_name, record.tools or ())]
        if keys := secrets.found(record):
            block.hit(name, "secret", ", ".join(keys))
        reward = (record.outcome or {}).get("reward")
        if reward is not None and reward <= 0:
            block.hit(name, "failed", f"its reward is {reward:g}")
        if self._held and (detail := self._held.leak(record)):
            block.hit(name, "leak", detail)
        for agent in record.agents:
            digest, chained = hashlib.blake2b(repr(record.tools).encode() if record.tools else b"", digest_size=8), []
            for turn in agent.turns:
                if turn.finish_reason == "length":
                    block.hit(f"{name}/{agent.agent_id}/{turn.turn}", "truncated", "it was cut at the output limit")
            messages = own_messages(agent)
            if self._held:
                opening = takewhile(lambda message: message.role != "assistant", messages)
                block.firsts.append(len(self._chat.encode(" ".join(message.content for message in opening))))
            for message in messages:
                text, thought = message.content or "", split_thought(message.content or "", message.reasoning)
                digest.update(repr((message.role, thought.rest, thought.inside, message.tool_calls)).encode())
                spoken = message.role == "assistant" and message.kind == "action"
                place = f"{name}/{agent.agent_id}/{message.turn}"
                if not is_ids and self._chat.has_control(text):
                    token = self._chat.first_control(text)
                    mark = text[max(0, text.index(token) - 8) : text.index(token)] + token
                    block.hit(place if spoken else name, "control", f"{token!r} in a message of {message.role!r}", mark)
                if not spoken:
                    continue
                if name not in block.structural:
                    self._of_turn(place, text, message, offered, block)
                pair = turns.get((name, agent.agent_id, message.turn or 0))
                if pair is not None:
                    chained.append((int.from_bytes(digest.digest(), "big"), len(pair[1])))
                    length = len(pair[0]) + len(pair[1])
                    if self._context and length > self._context:
                        block.hit(place, "too_long", f"{length:,} tokens, the model's context is {self._context:,}")
            if messages and messages[-1].role == "user" and agent.turns and name not in block.structural:
                block.hit(f"{name}/{agent.agent_id}", "no_answer", repr(messages[-1].content[:80]))
            yield Chain(record.source or name, int.from_bytes(digest.digest(), "big"), chained)

    def _of_turn(self, place: str, text: str, message: Any, offered: Sequence[Any], block: _Block) -> None:
        thought, plain = split_thought(text, message.reasoning), without_code(text)
        unopened = plain.count(THINK_END) > plain.count(THINK) + self._form.opened and not message.reasoning
        if thought.opened or thought.again or unopened:
            why = "not closed" if thought.opened else "twice" if thought.again else "not opened"
            mark = THINK if thought.opened else THINK_END
            block.hit(place, "think", f"a block of thoughts is {why}: {text[:60]!r}", mark)
        tags, template = other_tags(text) or other_tags(thought.rest), self._chat.template
        if tags and THINK in template and tags[0] not in template:
            block.hit(place, "think", f"thoughts in {tags[0]}, which the template does not write", tags[0])
        if message.reasoning and not self._form.thought_key:
            block.hit(place, "think_lost", f"{message.reasoning[:60]!r} is recorded apart from the text")
        if not (thought.rest.strip() or thought.inside or message.tool_calls):
            block.hit(place, "empty_turn", "no text and no call")
        if CALL in plain and self._opens_call and not any(isinstance(c, Call) for c in self._opens_call.parse(plain)):
            block.hit(place, "syntax", f"a {CALL} that no parser reads as a call: {text[:60]!r}", CALL)
        names = (stored_call(call).name for call in message.tool_calls or ())
        if strange := [name for name in names if name and offered and name not in offered]:
            detail = f"calls {strange[0]}, the row offers {', '.join(map(str, offered))}"[:200]
            block.hit(place, "not_offered", detail, strange[0])

    def _count(self, turns: Mapping[Key, Any], block: _Block, names: set[str]) -> None:
        """Add the tokens of the turns to the report, and the hits with those that they hit."""
        report, of_rollout = block.report, defaultdict[str, list[Key]](list)
        ends: defaultdict[tuple[str, str], int] = defaultdict(int)
        for key, (prompt, output) in turns.items():
            of_rollout[key[0]].append(key)
            report.labels += 1
            report.label_tokens += len(output)
            report.turns[min(key[2], _LAST_TURN)] += len(output)
            ends[key[:2]] = max(ends[key[:2]], len(prompt) + len(output))
        report.tokens += sum(ends.values())
        report.longest = max([report.longest, *ends.values()])
        for name in names:
            record = block.records[name]
            if record.tools:
                calls = [bool(m.tool_calls) for a in record.agents for m in own_messages(a) if m.kind == "action"]
                report.offered, report.calling = report.offered + len(calls), report.calling + sum(calls)
                tokens = sum(len(turns[key][1]) for key in of_rollout[name])
                report.offering = (report.offering[0] + 1, report.offering[1] + tokens)
        counted: defaultdict[str, tuple[set[str], set[Key]]] = defaultdict(lambda: (set(), set()))
        for place, kind, detail, mark in block.hits:
            name, _, rest = place.partition("/")
            if name not in names:
                continue
            agent, _, turn = rest.rpartition("/")
            keys = [k for k in of_rollout[name] if not rest or k[1] == (agent or rest)]
            keys = [k for k in keys if not agent or str(k[2]) == turn] or of_rollout[name]
            rows, hit = counted[kind]
            hit.update(keys)
            finding = report.finding(kind)
            if name not in rows and self._examples[kind] < SHOWN:
                self._examples[kind] += 1
                spans = self._shown(name, keys, turns, mark, block)
                finding.examples.append(Example(_place(block.records[name]), detail[:300], spans))
            rows.add(name)
        for kind, (rows, keys) in counted.items():
            report.finding(kind).add(len(rows), sum(len(turns[key][1]) for key in keys), ())

    def _shown(self, name: str, keys: Sequence[Key], turns: Mapping[Key, Any], mark: Any, block: _Block) -> list[Any]:
        """Return the tokens of an example around its fault."""
        if name in block.ids:
            ids, labels = block.ids[name]
            trained = [label != IGNORE_INDEX for label in labels]
        elif keys:
            prompt, output = turns[keys[0]]
            ids, trained = [*prompt.tolist(), *output.tolist()], [False] * len(prompt) + [True] * len(output)
        else:
            return []
        return _spans(ids, trained, mark, self._chat)


def _place(record: RolloutRecord) -> str:
    source, _, row = (record.source or record.rollout_id).rpartition("#")
    return f"{source}, row {row}" if source else row


def _with_messages(agent: CapturedAgent, record: RolloutRecord) -> CapturedAgent:
    """Return the agent of a row of ids with the messages and tools that its ids decode to."""
    tools = [function_schema(tool) for tool in record.tools or ()] or None
    return replace(agent, tools=tools, messages=[vars(message) for message in own_messages(record.agents[0])])


def _tools_in_text(agent: CapturedAgent) -> list[Any] | None:
    """Return the schemas that the prompt of a row of ids shows, where the template writes one a line (Hermes, Qwen)."""
    text = "".join(m["content"] for m in agent.messages[:1])
    lines = [line for part in _TOOLS.findall(text) for line in part.splitlines() if line.startswith("{")]
    with suppress(ValueError):
        return [loads(line) for line in lines] or None
    return None


def _unpadded(ids: list[int], labels: list[int], chat: ChatFormat) -> tuple[list[int], list[int]]:
    """Return the ids and labels without padding that no attention mask names; one end of a turn is left."""
    used = np.flatnonzero((np.asarray(ids) != chat.pad_id) | (np.asarray(labels) != IGNORE_INDEX))
    if not len(used):
        return ids, labels
    chosen = slice(int(used[0]), int(used[-1]) + 1 + (chat.pad_id in chat.end_ids))
    return ids[chosen], labels[chosen]


def _schema_fault(row: Any, record: RolloutRecord, padded: bool) -> str | None:
    """Return what of a row's schemas or arguments a chat API would not have sent as it is."""
    if not isinstance(row, Mapping):
        return None
    value = row.get("tools")
    if isinstance(value, str):
        try:
            value = loads(value)
        except ValueError:
            return None
    if isinstance(value, list) and record.tools is not None and value != record.tools:
        written = next((a for a, b in zip(value, record.tools, strict=False) if a != b), value)
        return f"the row has {json.dumps(written, default=str)[:200]}"
    messages = row.get("messages") if padded else None
    for message in messages if isinstance(messages, list) else ():
        calls = message.get("tool_calls") if isinstance(message, Mapping) else None
        for call in calls if isinstance(calls, list) else ():
            arguments = (call.get("function") or call).get("arguments") if isinstance(call, Mapping) else None
            if isinstance(arguments, Mapping) and without_padding(arguments) != arguments:
                return f"the table adds nulls to arguments: {json.dumps(arguments, default=str)[:200]}"
    return None


def _spans(ids: Sequence[int], trained: Sequence[bool], mark: int | str | None, chat: ChatFormat) -> list[Any]:
    """Return the tokens around a mark, or from the first label on, as (text, state, whether it is the fault).

    A mark behind the ids, or where a turn lacks its end, is an empty place that gets a sign.
    """
    first = next((i for i, label in enumerate(trained) if label), 0)
    at, fault = first, range(0)
    if isinstance(mark, int):
        at, fault = mark, range(mark, mark + 1)
    elif mark:
        texts = np.cumsum([len(chat.decode([token])) for token in ids])
        whole, start = chat.decode(ids), int(texts[first - 1]) if first else 0
        if (place := whole.find(mark, start)) >= 0 or (place := whole.find(mark)) >= 0:
            at = int(np.searchsorted(texts, place, side="right"))
            fault = range(at, int(np.searchsorted(texts, place + len(mark), side="left")) + 1)
    begin, end = max(0, at - _BEFORE), min(len(ids), at + _AFTER)
    spans: list[Any] = [(f"… {begin} tokens … ", "cut", False)] if begin else []
    for i in range(begin, end):
        spans.append((chat.decode(ids[i : i + 1]), "label" if trained[i] else "context", i in fault))
    if isinstance(mark, int) and mark >= len(ids):
        spans.append((" ∅ the end of the turn is missing ", "cut", True))
    return spans + ([(f" … {len(ids) - end} tokens …", "cut", False)] if end < len(ids) else [])
