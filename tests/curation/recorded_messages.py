"""Recorded conversations as a caller of `apply_chat_template` passes them, and that call, for the oracle of labels.

It shares no code with the functions that build labels. So it repeats a few rules in its own words: where a message has
its thoughts, how flattened calls are written, and which roles a template takes.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import combinations
from pathlib import Path
from typing import Any

import pyarrow as pa

from etpi_assets.curation.steering import Messages
from etpi_resources.chat.bounds import TemplateUnbounded
from etpi_resources.chat.format import ChatFormat
from etpi_resources.chat.sources import render_template

_KEYS = ("thinking", "reasoning_content", "reasoning")
_SHELLS = {"bash", "shell", "sh", "terminal", "execute_bash", "run_bash", "run_command", "execute_command"}
_FLAT = re.compile(r"^\[tool_use ([^\]\n]{1,200})\] (?=\{)", re.MULTILINE)
_OTHER = re.compile(
    r"\s*(?:<(?P<tag>thinking|thought)>|(?P<square>\[THINK\])|(?P<begin><\|begin_of_thought\|>)|◁think▷)(?P<inside>.*?)"
    r"(?(tag)</(?P=tag)>|(?(square)\[/THINK\]|(?(begin)<\|end_of_thought\|>|◁/think▷)))",
    re.DOTALL,
)
"""A think block in another spelling, at the beginning of a text."""


class NotComparable(Exception):
    """A conversation that no template renders from its messages; the message is the reason's name."""


@dataclass(frozen=True)
class Conversation:
    """One agent's rows of `messages`, with its rollout's tools and the reasons for which its turns ended."""

    rows: Sequence[Mapping[str, Any]]
    tools: list[Any] | None
    finish: Mapping[int, str | None]
    replaced: bool = False

    def truncated(self, turn: int) -> bool:
        return self.finish.get(turn) == "length"

    def without(self, tokens: Sequence[str]) -> Conversation:
        """Return the conversation with a letter in place of each of the tokens."""
        pattern = re.compile("|".join(map(re.escape, sorted(tokens, key=len, reverse=True))))
        rows = [
            {**row, **{key: text and pattern.sub("x", text) for key, text in texts_of(row).items()}}
            for row in self.rows
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

    def until(self, turn: int, writer: MessageWriter, *, think: bool) -> tuple[int, list[dict[str, Any]]]:
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
            raise NotComparable("turn_without_message")
        for message in messages:
            message.pop("turn", None)
            if "tool_calls" in message:
                message["tool_calls"] = [{**c, "id": f"call{n:05d}"} for n, c in enumerate(message["tool_calls"])]
        return spoken, messages


@dataclass(frozen=True)
class MessageWriter:
    """Writes a recorded row as the message that a caller of `apply_chat_template` would pass."""

    chat: ChatFormat
    tools: Any

    def assistant(self, row: Mapping[str, Any], think: bool) -> dict[str, Any]:
        thought, text = _split(row)
        calls = json.loads(row["tool_calls"]) if row["tool_calls"] else []
        if self.chat.calls_in_content and (calls or _FLAT.search(text)):
            raise NotComparable("calls_in_content")
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
                f"<think>\n{thought}\n</think>\n\n{text}" if row.get("reasoning") else _flattened(verbatim)[1]
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
        except NotComparable:
            return True
        return False

    def _call(self, raw: Any, number: int) -> dict[str, Any]:
        function = raw.get("function", raw) if isinstance(raw, dict) else {}
        name, arguments = function.get("name"), function.get("arguments", function.get("input"))
        if isinstance(arguments, str):
            try:
                arguments = json.loads(arguments, strict=False) if arguments.strip() else None
            except ValueError as error:
                raise NotComparable("unreadable_call") from error
        arguments = {} if arguments is None else arguments
        if not isinstance(name, str) or not isinstance(arguments, dict):
            raise NotComparable("unreadable_call")
        offered = {(tool.get("function") or tool).get("name") for tool in self.tools or () if isinstance(tool, dict)}
        if name not in offered and name.lower() in _SHELLS and "bash" in offered:
            name = "bash"
        return {"id": f"call{number:05d}", "type": "function", "function": {"name": name, "arguments": arguments}}


@lru_cache
def tokenizer_of(chat: ChatFormat) -> Any:
    """Return the student's tokenizer as transformers loads its tokenizer.json, with the student's template.

    AutoTokenizer replaces rules of that file with those of the class that the folder names, as LlamaTokenizer.
    """
    folder = Path(chat.name)
    if chat.name.startswith("hub:"):
        from huggingface_hub import snapshot_download

        repo, _, commit = chat.name.removeprefix("hub:").partition("@")
        folder = Path(snapshot_download(repo, revision=commit or None, local_files_only=True))
    if not (folder / "tokenizer_config.json").is_file():
        return chat.tokenizer
    from transformers import PreTrainedTokenizerFast  # seconds, so only where it is needed

    try:
        tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    except Exception:  # transformers does not take the folder's settings; etpi reads its tokenizer.json
        return chat.tokenizer
    tokenizer.chat_template = chat.template
    return tokenizer


@lru_cache
def controls_of(chat: ChatFormat) -> dict[str, int]:
    """Return {control token: id}: the special tokens, and others that the template writes around messages."""
    texts = [{"role": role, "content": "x"} for role in ("user", "assistant", "user")]
    around = (rendered_text(chat, texts, None, False, {}) or "") + (
        rendered_text(chat, texts[:1], None, True, {}) or ""
    )
    added = {
        token.content: (number, token.special) for number, token in tokenizer_of(chat).added_tokens_decoder.items()
    }
    written = {text for text in added if text in around and text.strip("\r\n\t ") and "think" not in text}
    return {text: number for text, (number, special) in added.items() if special or text in written}


@lru_cache
def written_last(chat: ChatFormat) -> list[int]:
    """Return the ids that the template writes after the end of a last turn, but not of an earlier one (Phi-3)."""
    texts = [{"role": role, "content": "textofprobe"} for role in ("user", "assistant", "user")]
    last, earlier = (
        tokenizer_of(chat)(
            (rendered_text(chat, shown, None, False, {}) or "").split("textofprobe")[2:3] or [""],
            add_special_tokens=False,
        )["input_ids"][0]
        for shown in (texts[:2], texts)
    )
    ends = [at + 1 for at, number in enumerate(last) if number in controls_of(chat).values()]
    return next((last[at:] for at in ends if earlier[at : len(last)] != last[at:]), [])


@lru_cache
def written_next(chat: ChatFormat, called: bool) -> str:
    """Return the text through the first control token of the message after a turn, where no other ends a turn (GLM).

    Args:
        called: whether the turn has calls, so that a result follows.
    """
    user = {"role": "user", "content": "x"}
    answer, result = {"role": "assistant", "content": "textofprobe"}, {"role": "tool", "name": "x", "content": "x"}
    calling = {"id": "call00000", "type": "function", "function": {"name": "x", "arguments": {"x": "y"}}}
    turn = [user, {**answer, "content": "", "tool_calls": [calling]} if called else answer]
    following = {**result, "tool_call_id": "call00000"} if called else user
    answered, last, longer = (
        rendered_text(chat, shown, None, False, {}) or "" for shown in ([user, answer], turn, [*turn, following])
    )
    after, rest = answered.partition("textofprobe")[2], longer.removeprefix(last)
    if "eos_token" in chat.template or any(token in after for token in controls_of(chat)):
        return ""
    opening = (token for token in controls_of(chat) if rest.lstrip().startswith(token))
    return next((rest[: rest.index(token)] + token for token in opening), "")


EDITS = (
    "join_first_systems",
    "later_system_as_user",
    "first_system_in_user",
    "loose_result_as_user",
    "result_as_user",
    "join_users",
)
"""Changes of roles, in their order, for messages that a template refuses or does not show."""
SUBSETS = [edits for size in range(len(EDITS) + 1) for edits in combinations(EDITS, size)]


def with_edits(messages: list[Any], edits: Sequence[str]) -> list[Any]:
    """Return the messages with the changes of `EDITS` that are named."""
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


def rendered_text(
    chat: ChatFormat, messages: Sequence[Any], tools: Any, prompt: bool, kwargs: Mapping[str, Any]
) -> str | None:
    """Call the tokenizer's template; None if it refuses the messages, with arguments as objects and as JSON text."""
    for as_text in (False, True):
        shown = [_with_text_arguments(m) if as_text else m for m in messages]
        try:
            return render_template(tokenizer_of(chat), chat.template, shown, tools, prompt, **kwargs)
        except TemplateUnbounded:
            raise
        except Exception:  # templates raise various errors for what they refuse
            continue
    return None


@lru_cache
def _takes_beside_calls(chat: ChatFormat, key: str = "") -> bool:
    """Return whether the template writes the text of a message before its calls, with thoughts under `key` if given."""
    call = {"id": "call00000", "type": "function", "function": {"name": "callofprobe", "arguments": {"x": "y"}}}
    message = {"role": "assistant", "content": "textofprobe", "tool_calls": [call], **({key: "thought"} if key else {})}
    text = rendered_text(chat, [{"role": "user", "content": "x"}, message], None, False, {})
    return text is not None and (bool(key) or 0 <= text.find("textofprobe") < text.find("callofprobe"))


def conversations_of(
    block: Mapping[str, pa.Table], defaults: Mapping[tuple[str, str], Messages], tools: Sequence[Any] | None
) -> dict[tuple[str, str], Conversation]:
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
        own = [_wrapped(tool) for tool in json.loads(recorded[key[0]] or "null") or ()]
        offered = list(tools) if tools is not None else own or None
        replaced = False
        if key in defaults:
            first = [m for m in of_agent if m["kind"] == "prompt"]
            replaced = [m["content"] for m in first] != [m["content"] for m in defaults[key]]
            of_agent = [
                *({**m, "kind": "prompt", "turn": None, "tool_calls": None} for m in defaults[key]),
                *(_as_answered(m, turns[key], offered) for m in of_agent if m["kind"] != "prompt"),
            ]
        finish = {turn: row["finish_reason"] for turn, row in turns[key].items()}
        created[key] = Conversation(of_agent, offered, finish, replaced)
    return created


def _wrapped(tool: Any) -> Any:
    """Return a schema as OpenAI's clients send it."""
    if "function" in tool:
        return {"type": "function", "function": tool["function"]}
    names = {"input_schema": "parameters", "inputSchema": "parameters"}
    return {"type": "function", "function": {names.get(k, k): v for k, v in tool.items() if k != "type"}}


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


def texts_of(row: Mapping[str, Any]) -> dict[str, str | None]:
    """Return the columns of a row that are text."""
    return {key: row.get(key) for key in ("content", "reasoning", "tool_calls")}


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
