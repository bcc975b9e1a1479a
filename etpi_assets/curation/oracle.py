"""The check `labels_equal_template`: what is trained from messages equals `apply_chat_template` of its tokenizer.

The oracle reads the recorded messages and the finished pairs. It calls the student's tokenizer as transformers loads
it, and shares no code with the functions that render, mask, cut and encode. So it repeats a few rules in its own words:
where a message has its thoughts, and how flattened calls are written.

Of recorded ids, only texts are compared: other histories and labels than the template's are counted, not refused.

Differences that the spec asks for are counted by name: `think_stripped`, `tail_closed`, `empty_block_omitted` (a turn
without thoughts), `thoughts_as_text` (the template has no place for them), `roles_fitted` (it refuses a role), and
`control_as_text` (a message quotes a control token, so texts are compared). Prose beside calls is left out where the
template does not write it before them; `label_syntax` counts it. Any other difference fails.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from etpi_assets.curation.steering import Messages
from etpi_assets.specs.experiment import PairsSection
from etpi_assets.trajectories.tables import iter_turns
from etpi_resources.chat.format import DATE, ChatFormat
from etpi_resources.lake.checks import CheckOutcome

NAME = "labels_equal_template"
CHARACTERS = 250_000
"""Characters of prompts in a block of rollouts that are rendered again: all turns of small sets, some of large ones."""
_NATIVE = 12_000
"""The same for recorded ids, of which only texts are compared, and differences are counted."""
_TEXT = 48
"""Characters shown of each side from the first difference on."""
_KEYS = ("thinking", "reasoning_content", "reasoning")
_SHELLS = {"bash", "shell", "sh", "terminal", "execute_bash", "run_bash", "run_command", "execute_command"}
_FLAT = re.compile(r"^\[tool_use ([^\]\n]{1,200})\] (?=\{)", re.MULTILINE)
_OTHER = re.compile(
    r"\s*(?:<(?P<tag>thinking|thought)>|(?P<square>\[THINK\])|(?P<begin><\|begin_of_thought\|>)|◁think▷)(?P<inside>.*?)"
    r"(?(tag)</(?P=tag)>|(?(square)\[/THINK\]|(?(begin)<\|end_of_thought\|>|◁/think▷)))",
    re.DOTALL,
)
"""A think block in another spelling, at the beginning of a text."""
_LEADING_BLOCK = re.compile(r"^\s*<think>\s*</think>[\r\n]*")
Key = tuple[str, str, int]


class _NotComparable(Exception):
    """A conversation that no template renders from its messages; the message is the reason's name."""


class _Contradiction(Exception):
    """A turn for which the spec's settings exclude each other; the message says which."""


@dataclass
class _Turn:
    """One turn as the template renders it.

    Attributes:
        prompt, output: the texts up to the turn, and of the turn with its end.
        differences: the names of those that the spec asks for.
        edits: those of `_EDITS` that the template needs.
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
    """Those of `_EDITS` that conversations needed so far; they are tried first."""

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
        conversations = _conversations(block, defaults, self.tools)
        chosen = self._sample(pairs, conversations)
        quoted = {agent: self._quoted_controls(conversations[agent]) for agent in {key[:2] for key in chosen}}
        for key, prompt, output in iter_turns(pairs):
            if key not in chosen or output is None:
                continue
            try:
                expected = self._expected(conversations[key[:2]], key[2])
            except _NotComparable as reason:
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

    def _sample(self, pairs: pa.Table, conversations: Mapping[tuple[str, str], _Conversation]) -> set[Key]:
        """Return the turns that are compared: all, or the last of a conversation and as many as `CHARACTERS` allow.

        They are in the order of a hash. Without that last one, no turn late in a long conversation would be compared.
        """
        columns = (pairs[name].to_pylist() for name in ("rollout_id", "agent_id", "turn"))
        keys = [key for key in zip(*columns, strict=True) if key[:2] in conversations]
        keys.sort(key=lambda key: hashlib.sha256(repr(key).encode()).digest())
        chosen = {max((key for key in keys if key[:2] == keys[0][:2]), key=lambda key: key[2])} if keys else set()
        left = _NATIVE if self.section.capture == "native" else CHARACTERS
        for key in keys:
            cost = conversations[key[:2]].characters_before(key[2])
            if key not in chosen and cost <= left:
                chosen.add(key)
                left -= cost
        return chosen

    def _expected(self, conversation: _Conversation, turn: int) -> _Turn:
        """Render a turn from its messages."""
        tools = conversation.tools
        writer = _Writer(self.chat, tools)
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
        plain = plain if head.startswith(plain) else _common(plain, head)
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
        before = _common(plain + header, head)
        body = body.removeprefix(head[len(before) :]) if "</think>" in head[len(before) :] else body
        rendered.output = self._label(
            body, None if strips else thought, opened + tail if open_tail else "", strips, rendered
        )
        return rendered

    def _label(self, body: str, thought: str | None, opening: str, strips: bool, rendered: _Turn) -> str:
        """Return the label in what the template writes after a turn's header.

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
            return ("" if opening else "<think>\n") + f"{thought}\n</think>\n\n{body}"
        if opening and body.startswith(opening):
            return body.removeprefix(opening)
        if opening and not thought:
            rendered.differences.append("thoughts_as_text")
            return "\n</think>\n\n" + body
        return body

    def _render(self, messages: list[Any], tools: Any, rendered: _Turn, prompt: bool = False, **more: Any) -> str:
        """Call the tokenizer's template with the messages in the roles of the turn.

        Raises:
            _NotComparable: the template refuses the messages.
        """
        fitted = _fitted(messages, rendered.edits)
        text = _applied(self.chat, fitted, tools, prompt, {**self.template_kwargs, **more})
        if text is None:
            raise _NotComparable("refused_by_template")
        return text

    def _edits(self, messages: list[Any], tools: Any) -> Sequence[str]:
        """Return the fewest of `_EDITS` with which the template takes the messages and shows their texts."""
        probes = {index: f"shown{index}ofprobe" for index, m in enumerate(messages) if m["role"] in ("system", "tool")}
        messages = [{**m, "content": probes.get(index, m["content"])} for index, m in enumerate(messages)]
        usable, tried = None, []
        for edits in [(), tuple(e for e in _EDITS if e in self._needed), *_SUBSETS]:
            fitted = _fitted(messages, edits)
            if fitted in tried:
                continue
            tried.append(fitted)
            text = _applied(self.chat, fitted, tools, False, self.template_kwargs)
            if text is not None and all(probe in text for probe in probes.values()):
                self._needed.update(edits)
                return edits
            usable = edits if usable is None and text is not None else usable
        return usable or ()

    def _difference(self, expected: _Turn, prompt: np.ndarray, output: np.ndarray) -> str | None:
        """Return the first difference of a pair from its rendering, None if they are equal."""
        tokenizer = tokenizer_of(self.chat)
        for part, text, ids in (("prompt", expected.prompt, prompt), ("label", expected.output, output)):
            wanted = tokenizer(text, add_special_tokens=False)["input_ids"]
            trained = ids.tolist()
            if part == "label":
                wanted = _until_end(wanted, trained, tokenizer, cut="cut_at_limit" in expected.differences)
            if wanted == trained:
                continue
            decoded = [_decode(tokenizer, side) for side in (trained, wanted)]
            if decoded[0] == decoded[1] and _quotes_control(text, tokenizer, trained):
                expected.differences.append("control_as_text")
                continue
            at = next(
                (i for i, (a, b) in enumerate(zip(trained, wanted, strict=False)) if a != b),
                min(len(trained), len(wanted)),
            )
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

    def _quoted_controls(self, conversation: _Conversation) -> list[str]:
        text = json.dumps([conversation.tools, *map(_texts, conversation.rows)], ensure_ascii=False)
        added = tokenizer_of(self.chat).added_tokens_decoder.values()
        return [token.content for token in added if token.special and token.content in text]

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


@dataclass(frozen=True)
class _Conversation:
    """One agent's rows of `messages`, with its rollout's tools and the reasons for which its turns ended."""

    rows: Sequence[Mapping[str, Any]]
    tools: list[Any] | None
    finish: Mapping[int, str | None]
    replaced: bool = False

    def truncated(self, turn: int) -> bool:
        return self.finish.get(turn) == "length"

    def without(self, tokens: Sequence[str]) -> _Conversation:
        """Return the conversation with a letter in place of each of the tokens."""
        pattern = re.compile("|".join(map(re.escape, sorted(tokens, key=len, reverse=True))))
        rows = [
            {**row, **{key: text and pattern.sub("x", text) for key, text in _texts(row).items()}} for row in self.rows
        ]
        tools = json.loads(pattern.sub("x", json.dumps(self.tools, ensure_ascii=False)))
        return replace(self, rows=rows, tools=tools)

    def characters_before(self, turn: int) -> int:
        total = len(json.dumps(self.tools)) if self.tools else 0
        for row in self.rows:
            total += len(row["content"] or "") + len(row["tool_calls"] or "")
            if row["kind"] == "action" and row["turn"] == turn:
                break
        return total

    def rows_of(self, turn: int) -> list[Mapping[str, Any]]:
        return [
            row for row in self.rows if row["role"] == "assistant" and row["kind"] == "action" and row["turn"] == turn
        ]

    def thought(self, turn: int) -> str:
        return "\n".join(filter(None, (_split(row)[0] for row in self.rows_of(turn))))

    def until(self, turn: int, writer: _Writer, *, think: bool) -> tuple[int, list[dict[str, Any]]]:
        """Return the position of a turn's message, and the messages through it."""
        messages: list[dict[str, Any]] = []
        results, spoken = 0, None
        for row in self.rows:
            if spoken is not None and not (row["kind"] == "action" and row["turn"] == turn):
                break
            if row["role"] == "assistant":
                message = writer.assistant(row, think)
                joins = row["kind"] == "action" and messages and messages[-1].get("turn") == row["turn"]
                if joins:
                    message = _together(messages.pop(), message)
                message["turn"] = row["turn"] if row["kind"] == "action" else None
                messages.append(message)
                results = 0
                if row["kind"] == "action" and row["turn"] == turn:
                    spoken = len(messages) - 1
                continue
            message = {"role": row["role"], "content": re.sub(r"\A\[tool_result\] ?", "", row["content"] or "")}
            if row["role"] == "tool":
                caller = next((m for m in reversed(messages) if m["role"] == "assistant"), {})
                if calls := caller.get("tool_calls"):
                    call = calls[min(results, len(calls) - 1)]
                    message |= {"tool_call_id": call["id"], "name": call["function"]["name"]}
                results += 1
            messages.append(message)
        if spoken is None:
            raise _NotComparable("turn_without_message")
        for message in messages:
            message.pop("turn", None)
            if "tool_calls" in message:
                message["tool_calls"] = [{**c, "id": f"call{n:05d}"} for n, c in enumerate(message["tool_calls"])]
        return spoken, messages


@dataclass(frozen=True)
class _Writer:
    """Writes a recorded row as the message that a caller of `apply_chat_template` would pass."""

    chat: ChatFormat
    tools: Any

    def assistant(self, row: Mapping[str, Any], think: bool) -> dict[str, Any]:
        thought, text = _split(row)
        calls = json.loads(row["tool_calls"]) if row["tool_calls"] else []
        if self.chat.calls_in_content and (calls or _FLAT.search(text)):
            raise _NotComparable("calls_in_content")
        flat, text = _flattened(text)
        written = [self._call(call, number) for number, call in enumerate([*flat, *calls])]
        key = next((k for k in _KEYS if re.search(rf"[.'\"]{k}\b", self.chat.template)), None)
        if written and think and thought and key and not _takes_beside_calls(self.chat, key):
            thought, text = "\n\n".join(filter(None, (thought, text))), ""
        if written and not _takes_beside_calls(self.chat):
            text = ""
        message: dict[str, Any] = {"role": "assistant", "content": text}
        if key is not None:
            message[key] = (thought or "") if think else ""
            if not message[key] and ("think>" not in text or "think>" not in self.chat.template):
                del message[key]  # templates test whether the key is there
        elif think and thought:
            verbatim = row["content"] or ""
            message["content"] = (
                f"<think>\n{thought}\n</think>\n\n{text}" if row.get("reasoning") else _unflattened(verbatim)
            )
        if written:
            message["tool_calls"] = written
        return message

    def unreadable(self, rows: Sequence[Mapping[str, Any]]) -> bool:
        """Return whether one of the rows' structured calls has no name, or no object of arguments."""
        try:
            for row in rows:
                for call in json.loads(row["tool_calls"] or "[]"):
                    self._call(call, 0)
        except _NotComparable:
            return True
        return False

    def _call(self, raw: Any, number: int) -> dict[str, Any]:
        function = raw.get("function", raw) if isinstance(raw, dict) else {}
        name, arguments = function.get("name"), function.get("arguments", function.get("input"))
        if isinstance(arguments, str):
            try:
                arguments = json.loads(arguments, strict=False) if arguments.strip() else None
            except ValueError as error:
                raise _NotComparable("unreadable_call") from error
        arguments = {} if arguments is None else arguments
        if not isinstance(name, str) or not isinstance(arguments, dict):
            raise _NotComparable("unreadable_call")
        offered = {(tool.get("function") or tool).get("name") for tool in self.tools or () if isinstance(tool, dict)}
        if name not in offered and name.lower() in _SHELLS and "bash" in offered:
            name = "bash"
        return {"id": f"call{number:05d}", "type": "function", "function": {"name": name, "arguments": arguments}}


def labels_outcome(counted: Mapping[str, Any], chat: ChatFormat, *, native: bool) -> CheckOutcome:
    """Judge the figures."""
    compared, total, wrong = counted["compared"], counted["labels"], counted["wrong"]
    differences, skipped = Counter(counted["asked"]), Counter(counted["skipped"])
    figures: dict[str, object] = {"labels": total, "compared": compared, "wrong": wrong, **differences}
    figures |= {f"skipped_{name}": n for name, n in skipped.items()}
    if native:
        message = (
            f"The labels are recorded ids, which recorded_text compares with the recorded text. {compared} of {total} "
            f"turns were rendered again: {differences['own_history']} have another history, as captured, and "
            f"{differences['own_label']} another label than the template writes; both are trained as recorded."
        )
        return CheckOutcome(NAME, True, message, figures=figures)
    listed = ", ".join(f"{name} {n}" for name, n in sorted(differences.items())) or "none"
    left_out = f" Not comparable: {', '.join(f'{name} {n}' for name, n in sorted(skipped.items()))}." if skipped else ""
    if wrong:
        advice = (
            " A student would train on text that serving never renders: compare base.tokenizer, base.chat_template and "
            "serving.template_kwargs with the model's own, and report it with that turn."
        )
        message = (
            f"{wrong} of {compared} compared turns are not what the chat template of {chat.name} writes for the same "
            f"messages, first {counted['first'][0]}. Differences that the spec asks for: {listed}."
            f"{advice if wrong > counted['contradicting'] else ''}{left_out}"
        )
        return CheckOutcome(NAME, False, message, figures=figures)
    message = (
        f"{compared} of {total} turns, prompt and label, are token for token what the chat template of {chat.name} "
        f"writes; differences that the spec asks for: {listed}.{left_out}"
    )
    return CheckOutcome(NAME, True, message, figures=figures)


@lru_cache
def tokenizer_of(chat: ChatFormat) -> Any:
    """Return the student's tokenizer as transformers loads it, with the student's template."""
    folder = Path(chat.name)
    if chat.name.startswith("hub:"):
        from huggingface_hub import snapshot_download

        repo, _, commit = chat.name.removeprefix("hub:").partition("@")
        folder = Path(snapshot_download(repo, revision=commit or None, local_files_only=True))
    if not (folder / "tokenizer_config.json").is_file():
        return chat.tokenizer
    from transformers import AutoTokenizer  # seconds, so only where it is needed

    try:
        tokenizer = AutoTokenizer.from_pretrained(folder)
    except Exception:  # transformers does not know the class that the folder names; etpi reads its tokenizer.json
        return chat.tokenizer
    tokenizer.chat_template = chat.template
    return tokenizer


_EDITS = (
    "join_first_systems",
    "later_system_as_user",
    "first_system_in_user",
    "loose_result_as_user",
    "result_as_user",
    "join_users",
)
"""Changes of roles, in their order, for messages that a template refuses or does not show."""
_SUBSETS = [edits for size in range(len(_EDITS) + 1) for edits in combinations(_EDITS, size)]


def _fitted(messages: list[Any], edits: Sequence[str]) -> list[Any]:
    """Return the messages with the changes of `_EDITS` that are named."""
    fitted: list[Any] = []
    for message in messages:
        role, earlier = message["role"], fitted[-1]["role"] if fitted else None
        only_systems = all(m["role"] == "system" for m in fitted)
        joins = "join_first_systems" in edits and role == earlier == "system" and only_systems
        if role == "system" and fitted and not joins and "later_system_as_user" in edits:
            role = "user"
        follows = "tool_call_id" in message and earlier in ("assistant", "tool")
        if role == "tool" and ("result_as_user" if follows else "loose_result_as_user") in edits:
            role = "user"
        joins |= "first_system_in_user" in edits and role == "user" and earlier == "system" and only_systems
        joins |= "join_users" in edits and role == earlier == "user"
        message = message if role == message["role"] else {"role": role, "content": message["content"]}
        if joins:
            message = {**message, "content": f"{fitted.pop()['content']}\n\n{message['content']}"}
        fitted.append(message)
    return fitted


def _applied(
    chat: ChatFormat, messages: Sequence[Any], tools: Any, prompt: bool, kwargs: Mapping[str, Any]
) -> str | None:
    """Call the tokenizer's template; None if it refuses the messages, with arguments as objects and as JSON text."""
    for as_text in (False, True):
        shown = [_with_text_arguments(m) if as_text else m for m in messages]
        try:
            return str(
                tokenizer_of(chat).apply_chat_template(
                    shown, tools=tools, tokenize=False, add_generation_prompt=prompt,
                    **{"strftime_now": DATE.strftime, **kwargs},
                )
            )  # fmt: skip
        except Exception:  # templates raise various errors for what they refuse
            continue
    return None


@lru_cache
def _takes_beside_calls(chat: ChatFormat, key: str = "") -> bool:
    """Return whether the template writes the text of a message before its calls, with thoughts under `key` if given."""
    call = {"id": "call00000", "type": "function", "function": {"name": "callofprobe", "arguments": {"x": "y"}}}
    message = {"role": "assistant", "content": "textofprobe", "tool_calls": [call], **({key: "thought"} if key else {})}
    text = _applied(chat, [{"role": "user", "content": "x"}, message], None, False, {})
    return text is not None and (bool(key) or 0 <= text.find("textofprobe") < text.find("callofprobe"))


def _conversations(
    block: Mapping[str, pa.Table], defaults: Mapping[tuple[str, str], Messages], tools: Sequence[Any] | None
) -> dict[tuple[str, str], _Conversation]:
    """Return the conversation of each agent, its first messages replaced by those that a student reads."""
    recorded = dict(zip(*(block["rollouts"][name].to_pylist() for name in ("rollout_id", "tools")), strict=True))
    rows: defaultdict[tuple[str, str], list[Any]] = defaultdict(list)
    for row in block["messages"].to_pylist():
        rows[row["rollout_id"], row["agent_id"]].append(row)
    turns: defaultdict[tuple[str, str], dict[int, Any]] = defaultdict(dict)
    for row in block["turns"].select(["rollout_id", "agent_id", "turn", "finish_reason", "parse_error"]).to_pylist():
        turns[row["rollout_id"], row["agent_id"]][row["turn"]] = row
    created = {}
    for key, of_agent in rows.items():
        of_agent.sort(key=lambda row: row["index"])
        offered = list(tools) if tools is not None else json.loads(recorded[key[0]] or "null") or None
        replaced = False
        if key in defaults:
            first = [m for m in of_agent if m["kind"] == "prompt"]
            replaced = [m["content"] for m in first] != [m["content"] for m in defaults[key]]
            of_agent = [
                *({**m, "kind": "prompt", "turn": None, "tool_calls": None} for m in defaults[key]),
                *(_as_answered(m, turns[key], offered) for m in of_agent if m["kind"] != "prompt"),
            ]
        finish = {turn: row["finish_reason"] for turn, row in turns[key].items()}
        created[key] = _Conversation(of_agent, offered, finish, replaced)
    return created


def _as_answered(row: Mapping[str, Any], turns: Mapping[int, Any], tools: Any) -> Mapping[str, Any]:
    """Return a row whose role, if it answers a turn, is the one in which the agent loop would answer."""
    if row["kind"] != "observation":
        return row
    read = row["turn"] in turns and turns[row["turn"]]["parse_error"] is None
    return {**row, "role": "tool" if tools and read else "user"}


def _split(row: Mapping[str, Any]) -> tuple[str | None, str]:
    """Return a row's thoughts, and its text without them."""
    text, separate = row["content"] or "", row.get("reasoning") or None
    stripped = text.lstrip()
    if (other := _OTHER.match(text)) and "<think>" not in text and "</think>" not in text:
        inside = other["inside"].strip("\r\n")
        if separate and separate.strip() != inside.strip():
            return separate, text
        return inside or None, text[other.end() :].lstrip("\r\n")
    if stripped.startswith("<think>") and "</think>" in stripped:
        inside, rest = _at_closing_tag(stripped.removeprefix("<think>"))
        if separate and separate.strip() != inside.strip() and rest.split("\n")[0].strip():
            return separate, text
        inside = inside.strip("\r\n")
        return (f"{separate}\n{inside}" if separate and separate.strip() != inside.strip() else inside), rest.lstrip(
            "\r\n"
        )
    fenced = False
    for number, line in enumerate(lines := text.split("\n")):
        if line.lstrip().startswith(("```", "~~~")):
            fenced = not fenced
        before = "\n".join(lines[:number])
        if "<think>" in re.sub(r"`[^`\n]*`", "", before) or "<tool_call>" in before:
            break
        if not fenced and not separate and line.strip() == "</think>":
            return before.strip("\r\n"), "\n".join(lines[number + 1 :]).lstrip("\r\n")
    return separate, text


def _at_closing_tag(text: str) -> tuple[str, str]:
    """Return what is before and after the first `</think>` that is not in code, or the first of all."""
    parts = text.split("</think>")
    fences = re.compile(r"^[ \t]*(?:```|~~~)", re.MULTILINE)
    for number in range(1, len(parts)):
        before = "</think>".join(parts[:number])
        line, after = before.rpartition("\n")[2], parts[number].partition("\n")[0]
        fenced = len(fences.findall(before)) % 2 and fences.search("</think>".join(parts[number:]))
        if not fenced and not (line.count("`") % 2 and "`" in after):
            return before, "</think>".join(parts[number:])
    return parts[0], "</think>".join(parts[1:])


def _flattened(text: str) -> tuple[list[Any], str]:
    """Return the calls `[tool_use NAME] {…}` at the end of a text, and the text before them."""
    calls: list[Any] = []
    places: list[tuple[int, int, Any]] = []
    for match in _FLAT.finditer(text):
        if places and match.start() < places[-1][1]:
            continue
        try:
            arguments, end = json.JSONDecoder(strict=False).raw_decode(text, match.end())
        except (ValueError, RecursionError):
            continue
        places.append((match.start(), end, {"name": match[1], "arguments": arguments}))
    bound = len(text)
    while places and not text[places[-1][1] : bound].strip():
        bound, _, call = places.pop()
        calls.insert(0, call)
    return calls, text[:bound].rstrip() if calls else text


def _texts(row: Mapping[str, Any]) -> dict[str, str | None]:
    return {key: row.get(key) for key in ("content", "reasoning", "tool_calls")}


def _unflattened(text: str) -> str:
    return _flattened(text)[1]


def _together(earlier: dict[str, Any], later: dict[str, Any]) -> dict[str, Any]:
    joined = {**earlier, **later}
    for key in ("content", *_KEYS):
        if key in joined:
            joined[key] = "\n".join(part for part in (earlier.get(key), later.get(key)) if part)
    if calls := [*earlier.get("tool_calls", []), *later.get("tool_calls", [])]:
        joined["tool_calls"] = calls
    return joined


def _with_text_arguments(message: Mapping[str, Any]) -> Mapping[str, Any]:
    calls = [
        {**c, "function": {**c["function"], "arguments": json.dumps(c["function"]["arguments"], ensure_ascii=False)}}
        for c in message.get("tool_calls", ())
    ]
    return {**message, "tool_calls": calls} if calls else message


def _until_end(wanted: list[int], trained: list[int], tokenizer: Any, *, cut: bool) -> list[int]:
    """Return the ids of a label without the white space that follows its end, or without its end if it was cut."""
    specials = set(tokenizer.all_special_ids) | {i for i, t in tokenizer.added_tokens_decoder.items() if t.special}
    while wanted and wanted[-1] not in specials and not _decode(tokenizer, wanted[-1:]).strip():
        wanted = wanted[:-1]
    return wanted[:-1] if cut and wanted and wanted[-1] in specials else wanted


def _quotes_control(text: str, tokenizer: Any, trained: list[int]) -> bool:
    """Return whether the text has control tokens that the trained ids have as plain text."""
    specials = [t.content for t in tokenizer.added_tokens_decoder.values() if t.special]
    counts = Counter(trained)
    return any(text.count(s) > counts[tokenizer.convert_tokens_to_ids(s)] for s in specials if s in text)


def _decode(tokenizer: Any, ids: Sequence[int]) -> str:
    return tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)


def _common(left: str, right: str) -> str:
    at = next((i for i, (a, b) in enumerate(zip(left, right, strict=False)) if a != b), min(len(left), len(right)))
    return left[:at]
