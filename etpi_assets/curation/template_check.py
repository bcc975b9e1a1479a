"""The check `labels_equal_template`: labels within their prompts are what the student's chat template writes.

A conversation is rendered whole and encoded as the tokenizer does it, and each prompt with its label must begin those
ids. A label that does not is compared with the template's text before and after its turn. Differences that the spec
asks for are counted by name: `think_stripped`, `tail_closed`, `empty_block_omitted` (a turn without thoughts),
`thoughts_as_text` (the template has no place for them), `roles_fitted` (it refuses a role), `cut_at_limit`, and
`control_as_text` (a message quotes a control token, so texts are compared).
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Any

import numpy as np
import pyarrow as pa

from etpi_assets.checks import OnHit, ignore, outcome
from etpi_assets.curation.lost import listed_with_keys
from etpi_assets.curation.pairs import CapturedAgent, CapturedTurn
from etpi_assets.curation.retokenise import conversation
from etpi_assets.curation.student_form import StudentForm
from etpi_assets.specs.experiment import PairsSection
from etpi_assets.trajectories.tables import Key, iter_turns
from etpi_resources.chat.format import ChatFormat, TemplateRefuses
from etpi_resources.chat.marks import EMPTY_BLOCK, THINK, THINK_END, split_thought, think_block
from etpi_resources.lake.check_outcome import CheckOutcome, listed
from etpi_resources.token_ids import begins_with, common_prefix

ENCODED, RENDERED = 250_000, 2_000_000
"""Characters of prompts in a block of rollouts whose turns are rendered one by one: compared as ids, and as texts."""
_TEXT = 48
"""Characters shown of each side from the first difference on."""
_MASK = "\uf8ff"
"""Stands for a control token that is plain text."""


class _Contradiction(Exception):
    """Settings of the spec that exclude each other for a turn; the message says which."""


@dataclass
class _Expected:
    """A turn as the template writes it: its prompt, its label through the end, and differences that the spec wants."""

    prompt: str
    label: str
    differences: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class _Conversation:
    """One agent's messages as the student's template takes them.

    Attributes:
        history, spoken, bare: as prompts have them, with all thoughts, and without.
        positions: turn -> its place in each.
        thoughts: turn -> its thoughts.
        tools: the schemas.
    """

    history: list[dict[str, Any]]
    spoken: list[dict[str, Any]]
    bare: list[dict[str, Any]]
    positions: Mapping[int, int]
    thoughts: Mapping[int, str]
    tools: Any

    def characters(self, turn: int) -> int:
        return sum(len(str(message)) for message in self.history[: self.positions[turn] + 1])

    def masked(self, tokens: re.Pattern[str]) -> _Conversation:
        """Return the conversation with `_MASK` in place of each of the tokens."""
        held = json.dumps([self.history, self.spoken, self.bare, self.tools], ensure_ascii=False)
        history, spoken, bare, tools = json.loads(tokens.sub(_MASK, held))
        thoughts = {turn: tokens.sub(_MASK, text) for turn, text in self.thoughts.items()}
        return replace(self, history=history, spoken=spoken, bare=bare, thoughts=thoughts, tools=tools)


@dataclass(frozen=True)
class TemplateCheck:
    """Compares the pairs of a block of rollouts with the template's own rendering of the same messages."""

    chat: ChatFormat
    section: PairsSection
    template_kwargs: Mapping[str, Any]

    def whole(self, agent: CapturedAgent, ids: Sequence[int]) -> tuple[str, str, int] | None:
        """Return the first difference of a conversation's ids from the template's: its kind, a detail, and where it is.

        Kinds: "differs", "other_split" for other ids of the same text, "think_history" for thoughts of earlier turns
        that the template leaves out, and "truncated" for ids that end within a message. White space after the last
        message may be missing.
        """
        try:
            text = self._render(self._conversation(agent).spoken, agent.tools)
        except TemplateRefuses as refused:
            return "differs", f"the template refuses the messages: {refused}", 0
        want = self._ids(text)
        at = common_prefix(np.asarray(ids), np.asarray(want))
        left, right = (self.chat.decode(side[at : at + _TEXT])[:_TEXT] for side in (list(ids), want))
        if not (left.strip() or right.strip()):
            return None
        if self.chat.decode(ids).rstrip() == text.rstrip():
            return "other_split", f"token {at}: other ids than the tokenizer has for {left[:12]!r}", at
        if not left or (not right and self.chat.markers.header.startswith(left.strip())):
            return "truncated", f"the row ends within a message, at token {len(ids)}", len(ids)
        kind = "think_history" if left.lstrip().startswith(THINK) and THINK_END in text else "differs"
        return kind, f"token {at}: {left!r} is trained, the template writes {right!r}", at

    def figures(self, agents: Sequence[CapturedAgent], pairs: pa.Table, hit: OnHit = ignore) -> dict[str, Any]:
        """Return the figures of agents whose ids were rendered from messages."""
        of_agent = {(agent.rollout_id, agent.agent_id): agent for agent in agents}
        counted: dict[str, Any] = {**_NOTHING, "labels": len(pairs)}
        differing, skipped, first = Counter[str](), Counter[str](), list[str]()
        encoded, rendered = ENCODED, RENDERED
        for name, group in groupby(iter_turns(pairs), key=lambda row: row[0][:2]):
            agent, rows = of_agent[name], [(key, prompt, output) for key, prompt, output in group if output is not None]
            last = rows[-1][0]
            turns = {turn.turn: turn for turn in agent.turns}
            talk, quoted = self._conversation(agent), self._quoted(agent)
            talk = talk.masked(quoted) if quoted else talk
            whole = None
            with suppress(TemplateRefuses):
                text = "" if quoted else self._render(talk.history[: talk.positions[last[2]] + 1], talk.tools)
                whole = np.asarray(self._ids(text), dtype=np.int32) if text else None
            for key, prompt, output in sorted(rows, key=lambda row: (row[0] != last, _hash(row[0]))):
                in_place = whole is not None and begins_with(whole, prompt, output[: self._length(output)])
                as_ids = encoded > 0
                if not as_ids and not in_place and rendered <= 0:
                    skipped["not_sampled"] += 1
                    continue
                difference = None
                if as_ids or not in_place:
                    cost = talk.characters(key[2])
                    encoded, rendered = encoded - cost * as_ids, rendered - cost
                    try:
                        expected = self._expected(talk, turns[key[2]])
                        difference = self._difference(expected, prompt, output, as_ids, quoted)
                        differing.update(expected.differences)
                    except TemplateRefuses:
                        skipped["refused_by_template"] += 1
                        continue
                    except _Contradiction as contradiction:
                        difference = str(contradiction)
                        counted["contradicting"] += 1
                counted["compared"] += 1
                counted["wrong"] += difference is not None
                if difference:
                    hit("/".join(map(str, key)), "differs", difference)
                    first.append(f"{'/'.join(map(str, key))}: {difference}")
        return counted | {"asked": dict(differing), "skipped": dict(skipped), "first": first[:1]}

    def _conversation(self, agent: CapturedAgent) -> _Conversation:
        student = StudentForm(self.chat, agent.tools, self.template_kwargs)
        spoken, turns = conversation(agent.messages, student)
        bare, _ = conversation(agent.messages, replace(student, thoughts=False))
        actions = [m for m in agent.messages if m["role"] == "assistant" and m["kind"] == "action"]
        inside = [(m["turn"], split_thought(m["content"] or "", m.get("reasoning")).inside) for m in actions]
        thoughts = {turn: "\n".join(text for t, text in inside if t == turn and text) for turn, _ in turns}
        history = spoken if self.section.history_think == "keep" else bare
        return _Conversation(history, spoken, bare, dict(turns), thoughts, agent.tools)

    def _quoted(self, agent: CapturedAgent) -> re.Pattern[str] | None:
        """Return what matches the control tokens that the messages or tools quote; None if they quote none."""
        texts = [[m.get(key) for key in ("content", "reasoning", "tool_calls")] for m in agent.messages]
        quoted = self.chat.controls_in(json.dumps([agent.tools, texts], ensure_ascii=False))
        return re.compile("|".join(map(re.escape, sorted(quoted, key=len, reverse=True)))) if quoted else None

    def _expected(self, talk: _Conversation, turn: CapturedTurn) -> _Expected:
        """Render the messages up to a turn, and through it. Raises TemplateRefuses, _Contradiction."""
        position, tools = talk.positions[turn.turn], talk.tools
        before = talk.history[:position]
        head, plain = self._render(before, tools, prompt=True), self._render(before, tools)
        plain = plain if head.startswith(plain) else os.path.commonprefix([plain, head])
        header, opened, tail = head[len(plain) :].partition(THINK)
        open_tail = bool(opened) and THINK_END not in tail
        strips = self.section.strip_think and not (self.section.strip_rule == "opened" and open_tail)
        thought = "" if strips else talk.thoughts[turn.turn]
        message = (talk.bare if strips else talk.spoken)[position]
        full = self._render([*before, message], tools)
        if full.startswith(plain):
            body = full[len(plain) :].removeprefix(header)
        else:  # the template writes earlier messages otherwise once this one follows: take it from a small conversation
            user = [{"role": "user", "content": "x"}]
            body = self._render([*user, message], tools)[len(self._render(user, tools)) :].removeprefix(header)
        expected = _Expected(head, "")
        notes = {
            "think_stripped": bool(talk.thoughts[turn.turn]) and strips,
            "cut_at_limit": turn.truncated,
            "roles_fitted": self.chat.roles.fit(before) != before,
            "tail_closed": strips and open_tail,
        }
        expected.differences = [name for name, holds in notes.items() if holds]
        if opened and not open_tail and thought:
            raise _Contradiction(
                "the prompt closes the think block that the label has; set pairs.strip_think = true, or "
                "serving.template_kwargs.enable_thinking = true"
            )
        if strips and open_tail:
            expected.prompt = head = self._render(before, tools, prompt=True, enable_thinking=False)
        added = head[len(os.path.commonprefix([plain + header, head])) :]
        body = body.removeprefix(added) if THINK_END in added else body
        expected.label = self._label(body, thought, opened + tail if open_tail and not strips else "", strips, expected)
        return expected

    def _label(self, body: str, thought: str, opening: str, strips: bool, expected: _Expected) -> str:
        """Return the label within the text that the template writes after a turn's header.

        Args:
            opening: the open think block at the end of the prompt, if there is one.
        """
        if not (thought or opening):
            label = EMPTY_BLOCK.sub("", body, count=1)
            expected.differences += ["empty_block_omitted"] if label != body and not strips else []
            return label
        if (thought and thought.strip() not in body) or (opening and not thought and not body.startswith(opening)):
            expected.differences.append("thoughts_as_text")
            body = body.lstrip("\r\n") if thought else body
            return think_block(thought).removeprefix(f"{THINK}\n" if opening else "") + body
        return body.removeprefix(opening)

    def _render(self, messages: list[Any], tools: Any, prompt: bool = False, **more: Any) -> str:
        """Return what the template writes for messages in roles that it takes. Raises TemplateRefuses."""
        return self.chat.written(self.chat.roles.fit(messages), tools, prompt, **{**self.template_kwargs, **more})

    def _length(self, output: np.ndarray) -> int:
        """Return the number of ids of a label before its end."""
        return len(self.chat.without_end(output.tolist()))

    def _ids(self, text: str) -> list[int]:
        return self.chat.tokenizer(text, add_special_tokens=False)["input_ids"]

    def _difference(
        self, expected: _Expected, prompt: np.ndarray, output: np.ndarray, as_ids: bool, quoted: re.Pattern[str] | None
    ) -> str | None:
        """Return the first difference of a pair from its rendering, None if they are equal.

        Args:
            as_ids: whether equal texts may have other ids.
            quoted: as `_quoted`; then texts are compared.
        """
        written = self.chat.without_end(output.tolist())
        if "cut_at_limit" in expected.differences and len(written) < len(output):
            return "label: the turn was cut at the limit, and its end is trained"
        if quoted:
            return self._quoting_difference(expected, prompt.tolist(), written, output, quoted)
        if not as_ids and self.chat.decode(prompt.tolist()) == expected.prompt:
            text = self.chat.decode(written)
            if expected.label.startswith(text) and self._ends(expected.label[len(text) :], output):
                return None
        head, whole, alone = map(self._ids, (expected.prompt, expected.prompt + expected.label, expected.label))
        # If an id spans the border, the label's are its own.
        label = whole[len(head) :] if whole[: len(head)] == head else alone
        rest = label[len(written) :]
        if label[: len(written)] == written and self._ends(self.chat.decode(rest), output):
            label = written
        for part, trained, wanted in (("prompt", prompt.tolist(), head), ("label", written, label)):
            if trained == wanted:
                continue
            at = common_prefix(np.asarray(trained), np.asarray(wanted))
            left, right = (repr(self.chat.decode(side[at : at + _TEXT])[:_TEXT]) for side in (trained, wanted))
            return f"{part}, token {at}: {left} is trained, the template writes {right}"
        return None

    def _ends(self, rest: str, output: np.ndarray) -> bool:
        """Return whether the text after a label only ends the turn, as the label does if it ends."""
        rest = rest.lstrip()
        has_end = self._length(output) < len(output)
        end = self.chat.decode(output[-1:].tolist()) if has_end else self.chat.first_control(rest)
        return not rest or bool(end and rest.startswith(end))

    def _quoting_difference(
        self, expected: _Expected, prompt: list[int], written: list[int], output: np.ndarray, quoted: re.Pattern[str]
    ) -> str | None:
        """Return the difference of a pair from a rendering in which `_MASK` stands for the control tokens quoted.

        Texts are compared without white space, of which the tokenizer drops some beside control tokens.
        """
        for part, text, ids in (("prompt", expected.prompt, prompt), ("label", expected.label, written)):
            runs = [
                (control, self.chat.decode(run)) for control, run in groupby(ids, self.chat.control_ids.__contains__)
            ]
            trained = "".join(run if control else quoted.sub(_MASK, run) for control, run in runs)
            wanted, trained = ("".join(side.split()) for side in (text, trained))
            ended = part == "label" and wanted.startswith(trained) and self._ends(wanted[len(trained) :], output)
            if wanted != trained and not ended:
                return f"{part}: a quoted {quoted.pattern} is trained as a control token, or the text is another"
            expected.differences += ["control_as_text"] if _MASK in text else []
        return None


_NOTHING = {"labels": 0, "compared": 0, "wrong": 0, "contradicting": 0, "asked": {}, "skipped": {}, "first": []}


def native_figures(pairs: pa.Table, rendered: pa.Table, chat: ChatFormat) -> dict[str, Any]:
    """Count the recorded ids of a few turns whose text is another than that rendered from their messages.

    Args:
        rendered: the pairs of the same rollouts, rendered from messages.
    """
    texts = {key: sides for key, *sides in iter_turns(rendered)}
    shared = [(sides, texts[key]) for key, *sides in iter_turns(pairs) if key in texts]
    differing = Counter[str]()
    for trained, again in shared:
        for name, *sides in zip(("own_history", "own_label"), trained, again, strict=True):
            left, right = (chat.decode([] if side is None else side.tolist()).rstrip() for side in sides)
            differing[name] += left != right
    return {**_NOTHING, "labels": len(pairs), "compared": len(shared), "asked": dict(+differing)}


def labels_outcome(counted: Mapping[str, Any], chat: ChatFormat, bound: float, *, native: bool) -> CheckOutcome:
    """Judge the figures.

    Args:
        bound: the most that may be refused, as a share of the labels (gates.turns_lost).
    """
    compared, total, wrong = counted["compared"], counted["labels"], counted["wrong"]
    differences, skipped = Counter(counted["asked"]), Counter(counted["skipped"])
    figures = {"labels": total, "compared": compared, "wrong": wrong, **differences}
    figures |= {f"skipped_{name}": n for name, n in skipped.items()}
    if native:
        history, label = differences["own_history"], differences["own_label"]
        return outcome("labels_equal_template", True, figures, case="native", own_history=history, own_label=label)
    words = {
        "template": chat.name,
        "bound": bound,
        "differences": listed(dict(sorted(differences.items()))),
        "first": "".join(counted["first"][:1]),
        "left_out": listed_with_keys(skipped) if skipped else "",
        "refused": sum(skipped.values()) - skipped["not_sampled"] > bound * total,
    }
    passed = False if wrong or words["refused"] else True if compared else None
    hint = "wrong" if wrong > counted["contradicting"] else ""
    return outcome("labels_equal_template", passed, figures, hint=hint, **words)


def _hash(key: Key) -> bytes:
    """Return a number by which turns are in an order that has nothing to do with them."""
    return hashlib.sha256(repr(key).encode()).digest()
