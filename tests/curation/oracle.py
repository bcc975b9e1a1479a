"""An oracle of labels: what is trained from messages equals `apply_chat_template` of its tokenizer.

The oracle reads the recorded messages (`recorded_messages`) and the finished pairs. It calls the student's tokenizer as
transformers loads it, and shares no code with the functions that render, mask, cut and encode.

Of recorded ids, only texts are compared: other histories and labels than the template's are counted, not refused.

Differences that the spec asks for are counted by name: `think_stripped`, `tail_closed`, `empty_block_omitted` (a turn
without thoughts), `thoughts_as_text` (the template has no place for them), `roles_fitted` (it refuses a role), and
`control_as_text` (a message quotes a control token, so texts are compared). Prose beside calls is left out where the
template does not write it before them; `label_syntax` counts it. Any other difference fails.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from etpi_assets.curation.steering import Messages
from etpi_assets.specs.experiment import PairsSection
from etpi_assets.trajectories.tables import iter_turns, turn_keys
from etpi_resources.chat.format import ChatFormat
from etpi_resources.token_ids import common_prefix
from tests.curation.recorded_messages import (
    EDITS,
    SUBSETS,
    Conversation,
    MessageWriter,
    NotComparable,
    controls_of,
    conversations_of,
    rendered_text,
    texts_of,
    tokenizer_of,
    with_edits,
    written_last,
    written_next,
)

CHARACTERS = 250_000
"""Characters of prompts in a block of rollouts that are rendered again: all turns of small sets, some of large ones."""
_NATIVE = 12_000
"""The same for recorded ids, of which only texts are compared, and differences are counted."""
_TEXT = 48
"""Characters shown of each side from the first difference on."""
_BREAKS = "\r\n"
_LEADING_BLOCK = re.compile(r"^\s*<think>\s*</think>[\r\n]*")
Key = tuple[str, str, int]


class _Contradiction(Exception):
    """A turn for which the spec's settings exclude each other; the message says which."""


@dataclass
class _Turn:
    """One turn as the template renders it.

    Attributes:
        prompt, output: the texts up to the turn, and of the turn with its end.
        differences: the names of those that the spec asks for.
        edits: those of `EDITS` that the template needs.
    """

    prompt: str
    output: str
    differences: list[str] = field(default_factory=list)
    edits: Sequence[str] = ()


@dataclass(frozen=True)
class Oracle:
    """Renders recorded conversations with the student's tokenizer, and compares pairs with them.

    Attributes:
        chat: the student's format. Only its name, tokenizer, template and `calls_in_content` are used.
        template_kwargs: arguments of the template, as in serving.
        tools: the schemas that all prompts offer; None for each rollout's own.
    """

    chat: ChatFormat
    section: PairsSection
    template_kwargs: Mapping[str, Any]
    tools: Sequence[Any] | None
    _needed: set[str] = field(default_factory=set)
    """Those of `EDITS` that conversations needed so far; they are tried first."""

    def figures(
        self, block: Mapping[str, pa.Table], pairs: pa.Table, defaults: Mapping[tuple[str, str], Messages]
    ) -> dict[str, Any]:
        """Return the figures of a block of rollouts.

        Args:
            block: its tables `rollouts`, `turns` and `messages`.
            defaults: (rollout_id, agent_id) -> the messages that replace the first ones of an agent.
        """
        counted: dict[str, Any] = {
            "labels": len(pairs), "compared": 0, "asked": {}, "skipped": {}, "wrong": 0, "contradicting": 0, "first": []
        }  # fmt: skip
        native = self.section.capture == "native"
        if native:  # a model wrote them, so one conversation of a block is enough to count
            sampled = block["messages"]["rollout_id"].slice(0, 1).to_pylist()
            is_sampled = pc.field("rollout_id").isin(pa.array(sampled, pa.string()))
            block, pairs = {k: t.filter(is_sampled) for k, t in block.items()}, pairs.filter(is_sampled)
        if not len(pairs):
            return counted
        differences: Counter[str] = Counter()
        skipped: Counter[str] = Counter()
        conversations = conversations_of(block, defaults, self.tools)
        chosen = self._sample(pairs, conversations)
        quoted = {agent: self._quoted_controls(conversations[agent]) for agent in {key[:2] for key in chosen}}
        for key, prompt, output in iter_turns(pairs):
            if key not in chosen or output is None:
                continue
            try:
                expected = self._expected(conversations[key[:2]], key[2])
            except NotComparable as reason:
                skipped[str(reason)] += 1
                continue
            except _Contradiction as contradiction:
                difference = None if native else str(contradiction)
                counted["contradicting"] += not native
            else:
                difference = (self._count_texts if native else self._difference)(expected, prompt, output)
                if not native and not difference and (tokens := quoted[key[:2]]):
                    masked = self._expected(conversations[key[:2]].without(tokens), key[2])
                    difference = self._trained_control(tokens, masked, prompt, output)
                differences.update(expected.differences)
            counted["compared"] += 1
            if difference:
                counted["wrong"] += 1
                counted["first"] += [f"{'/'.join(map(str, key))}: {difference}"][: 1 - len(counted["first"])]
        return counted | {"asked": dict(differences), "skipped": dict(skipped)}

    def _sample(self, pairs: pa.Table, conversations: Mapping[tuple[str, str], Conversation]) -> set[Key]:
        """Return the turns that are compared: all, or the last of a conversation and as many as `CHARACTERS` allow.

        They are in the order of a hash. Without that last one, no turn late in a long conversation would be compared.
        """
        keys = [key for key in turn_keys(pairs) if key[:2] in conversations]
        keys.sort(key=lambda key: hashlib.sha256(repr(key).encode()).digest())
        chosen = {max((key for key in keys if key[:2] == keys[0][:2]), key=lambda key: key[2])} if keys else set()
        left = _NATIVE if self.section.capture == "native" else CHARACTERS
        for key in keys:
            cost = conversations[key[:2]].characters_before(key[2])
            if key not in chosen and cost <= left:
                chosen.add(key)
                left -= cost
        return chosen

    def _expected(self, conversation: Conversation, turn: int) -> _Turn:
        """Render a turn from its messages."""
        tools = conversation.tools
        writer = MessageWriter(self.chat, tools)
        if writer.unreadable(conversation.rows_of(turn)):
            raise _Contradiction(
                "the label has a structured call that cannot be read, as text; set pairs.drop_unparseable = true, or "
                "mend its `arguments` in the source"
            )
        position, messages = conversation.until(turn, writer, think=self.section.history_think == "keep")
        rendered = _Turn("", "", ["steering_removed"] if conversation.replaced else [])
        rendered.edits = self._edits(messages, tools)
        if rendered.edits:
            rendered.differences.append("roles_fitted")
        head = self._render(messages[:position], tools, rendered, prompt=True)
        plain = self._render(messages[:position], tools, rendered)
        plain = plain if head.startswith(plain) else os.path.commonprefix([plain, head])
        header, opened, tail = head[len(plain) :].partition("<think>")
        open_tail = bool(opened) and "</think>" not in tail
        strips = self.section.strip_think and not (self.section.strip_rule == "opened" and open_tail)
        _, whole = conversation.until(turn, writer, think=not strips)
        full = self._render([*messages[:position], whole[position]], tools, rendered)
        if full.startswith(plain):
            body = full[len(plain) :].removeprefix(header)
        else:  # the template writes earlier messages otherwise once this one follows: take it from a small conversation
            small = [{"role": "user", "content": "x"}]
            before = self._render(small, tools, rendered)
            body = self._render([*small, whole[position]], tools, rendered)[len(before) :].removeprefix(header)
        thought = conversation.thought(turn)
        if opened and not open_tail and thought and not strips:
            raise _Contradiction(
                "the prompt closes the think block that the label has; set pairs.strip_think = true, or "
                "serving.template_kwargs.enable_thinking = true"
            )
        if strips and open_tail:
            rendered.differences.append("tail_closed")
            head = self._render(messages[:position], tools, rendered, prompt=True, enable_thinking=False)
        if thought and strips:
            rendered.differences.append("think_stripped")
        if conversation.truncated(turn):
            rendered.differences.append("cut_at_limit")
        rendered.prompt = head
        before = os.path.commonprefix([plain + header, head])
        body = body.removeprefix(head[len(before) :]) if "</think>" in head[len(before) :] else body
        rendered.output = self._label(
            body, None if strips else thought, opened + tail if open_tail else "", strips, rendered
        ) + written_next(self.chat, "tool_calls" in whole[position])
        return rendered

    def _label(self, body: str, thought: str | None, opening: str, strips: bool, rendered: _Turn) -> str:
        """Return the label within the text that the template writes after a turn's header.

        Args:
            opening: the open think block at the end of the prompt, if there is one.
        """
        if strips or not (thought or opening):
            label = _LEADING_BLOCK.sub("", body, count=1)
            if label != body and not strips:
                rendered.differences.append("empty_block_omitted")
            return label
        if thought and thought.strip() not in body:
            rendered.differences.append("thoughts_as_text")
            return ("" if opening else "<think>\n") + f"{thought}\n</think>\n\n{body.lstrip(_BREAKS)}"
        if opening and body.startswith(opening):
            return body.removeprefix(opening)
        if opening and not thought:
            rendered.differences.append("thoughts_as_text")
            return "\n</think>\n\n" + body
        return body

    def _render(self, messages: list[Any], tools: Any, rendered: _Turn, prompt: bool = False, **more: Any) -> str:
        """Call the tokenizer's template with the messages in the roles of the turn.

        Raises:
            NotComparable: the template refuses the messages.
        """
        fitted = with_edits(messages, rendered.edits)
        text = rendered_text(self.chat, fitted, tools, prompt, {**self.template_kwargs, **more})
        if text is None:
            raise NotComparable("refused_by_template")
        return text

    def _edits(self, messages: list[Any], tools: Any) -> Sequence[str]:
        """Return the fewest of `EDITS` with which the template takes the messages and shows their texts."""
        probes = {index: f"shown{index}ofprobe" for index, m in enumerate(messages) if m["role"] in ("system", "tool")}
        messages = [{**m, "content": probes.get(index, m["content"])} for index, m in enumerate(messages)]
        usable, tried = None, []
        for edits in [(), tuple(e for e in EDITS if e in self._needed), *SUBSETS]:
            fitted = with_edits(messages, edits)
            if fitted in tried:
                continue
            tried.append(fitted)
            text = rendered_text(self.chat, fitted, tools, False, self.template_kwargs)
            if text is not None and all(probe in text for probe in probes.values()):
                self._needed.update(edits)
                return edits
            usable = edits if usable is None and text is not None else usable
        return usable or ()

    def _difference(self, expected: _Turn, prompt: np.ndarray, output: np.ndarray) -> str | None:
        """Return the first difference of a pair from its rendering, None if they are equal."""
        tokenizer, controls = tokenizer_of(self.chat), controls_of(self.chat)
        head, label = _ids_of_both(expected.prompt, expected.output, tokenizer)
        if (closing := written_last(self.chat)) and label[-len(closing) :] == closing:
            label = label[: -len(closing)]
        label = _until_end(label, tokenizer, controls.values(), cut="cut_at_limit" in expected.differences)
        for part, text, ids, wanted in (
            ("prompt", expected.prompt, prompt, head), ("label", expected.output, output, label)
        ):  # fmt: skip
            trained = ids.tolist()
            if wanted == trained:
                continue
            decoded = [_decode(tokenizer, side) for side in (trained, wanted)]
            # Some tokenizers write a blank after a control token.
            if len({"".join(side.split()) for side in decoded}) == 1 and _quotes_control(text, controls, trained):
                expected.differences.append("control_as_text")
                continue
            at = common_prefix(np.asarray(trained), np.asarray(wanted))
            sides = (_decode(tokenizer, side[at : at + _TEXT])[:_TEXT] for side in (trained, wanted))
            left, right = map(repr, sides)
            return f"{part}, token {at}: {left} is trained, the template writes {right}"
        return None

    def _count_texts(self, expected: _Turn, prompt: np.ndarray, output: np.ndarray) -> None:
        """Note which parts of a pair with recorded ids have another text than its rendering."""
        tokenizer = tokenizer_of(self.chat)
        for name, text, ids in (("own_history", expected.prompt, prompt), ("own_label", expected.output, output)):
            if _decode(tokenizer, ids.tolist()).rstrip() != text.rstrip():
                expected.differences.append(name)

    def _quoted_controls(self, conversation: Conversation) -> list[str]:
        text = json.dumps([conversation.tools, *map(texts_of, conversation.rows)], ensure_ascii=False)
        return [token for token in controls_of(self.chat) if token in text]

    def _trained_control(
        self, tokens: Sequence[str], masked: _Turn, prompt: np.ndarray, output: np.ndarray
    ) -> str | None:
        """Return which control token that messages quote is a control token in the ids, None if none is.

        `_difference` does not see it, because the tokenizer parses such text itself.

        Args:
            masked: the turn as rendered from messages without these tokens.
        """
        for part, text, ids in (("prompt", masked.prompt, prompt), ("label", masked.output, output)):
            for token in tokens:
                number = tokenizer_of(self.chat).convert_tokens_to_ids(token)
                if np.count_nonzero(ids == number) > text.count(token):
                    return f"{part}: {token!r} within a message is trained as a control token, not as its text"
        return None


def _ids_of_both(prompt: str, label: str, tokenizer: Any) -> tuple[list[int], list[int]]:
    """Return the ids of a prompt, and of its label as the tokenizer reads both together.

    If an id spans the border, the label's are its own.
    """
    head, whole, alone = (
        tokenizer(text, add_special_tokens=False)["input_ids"] for text in (prompt, prompt + label, label)
    )
    return head, whole[len(head) :] if whole[: len(head)] == head else alone


def _until_end(wanted: list[int], tokenizer: Any, controls: Collection[int], *, cut: bool) -> list[int]:
    """Return the ids of a label without the white space that follows its end, or without its end if it was cut."""
    specials = {*tokenizer.all_special_ids, *controls}
    while wanted and wanted[-1] not in specials and not _decode(tokenizer, wanted[-1:]).strip():
        wanted = wanted[:-1]
    return wanted[:-1] if cut and wanted and wanted[-1] in specials else wanted


def _quotes_control(text: str, controls: Mapping[str, int], trained: list[int]) -> bool:
    """Return whether the text has control tokens that the trained ids have as plain text."""
    counts = Counter(trained)
    return any(text.count(token) > counts[number] for token, number in controls.items() if token in text)


def _decode(tokenizer: Any, ids: Sequence[int]) -> str:
    return tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
