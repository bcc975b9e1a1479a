"""Write the page that compares chat formats: `python -m etpi_resources.chat.table > docs/chat_formats.md`.

The cells are the properties of a template that matter to token-in/token-out data, measured on small conversations.
"""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from typing import Any

from etpi_resources.chat.format import ChatFormat, load_chat_format
from etpi_resources.chat.tool_forms import FORMS, Call, ToolForm

TEMPLATES = (
    "qwen3", "qwen3_training", "qwen3_instruct_2507", "qwen3_instruct_2507_training", "qwen3_5_think",
    "qwen3_5_think_training", "qwen3_5_nothink", "qwen3_5_nothink_training", "qwen3_6", "qwen3_6_training",
)  # fmt: skip
"""TRL's templates in the table; all with the Qwen3 vocabulary."""

COMMAND = "ls -a"
_TASK = {"role": "user", "content": "fix it"}
_THOUGHT = "<think>\nhm\n</think>\n\n"
_CALL = [{"type": "function", "function": {"name": "bash", "arguments": {"command": COMMAND}}}]
_TOOLS = [{"type": "function", "function": {"name": "bash", "description": "run", "parameters": {"type": "object"}}}]
_SWITCH: tuple[dict[str, Any], ...] = ({}, {"enable_thinking": True}, {"enable_thinking": False})

_HEAD = """# Chat formats

What each chat template does to the ids of a conversation. This page is made by rendering with TRL's templates and the
Qwen3 vocabulary (`python -m etpi_resources.chat.table > docs/chat_formats.md`); a test holds it to the code.

"""
_FOOT = """
- **tail**: what the generation prompt ends in, with `enable_thinking` unset / true / false. `open`: `<think>` and a
  newline; `closed`: an empty think block; `none`: neither. Strip-think turns an open tail into the closed one, and
  serving must then say `enable_thinking = false` too (`serving.template_kwargs`).
- **thoughts**: what becomes of the think block of an earlier turn while tool results follow one another, and once the
  user speaks again. `empty`: the template writes an empty block in its place.
- **appends**: whether every prompt of a conversation begins with the one before it (up to its generation prompt), in a
  loop of tool results, in a loop of user messages, and in a loop of tool results after which the user speaks again;
  without thoughts / with them. Where it does, re-tokenising renders the conversation once; where it does not, every
  prompt is rendered by itself, and `tito_pairs` counts such conversations (`conversations_the_template_writes_anew`).
- **extends**: whether rendering a turn again gives the ids that were generated: prompt, output with its call in the
  template's own form, observation. `no` is why etpi's own loop never renders again; `-`: the tail leaves no thought.
- **call**: the form in which the template writes tool calls (`etpi_resources/chat/tool_forms`), found by rendering a
  probe call and reading it back. The template renders structured calls of a data set as labels in this form,
  and serving reads it with the parser of the same form.
- **observation**: ids that stand before and after a tool result's own, from the end of the assistant's turn on, and
  with a user message instead.

## Tool calls

The check `label_syntax` of `tito_pairs` blocks a data set whose labels call tools in another syntax than the template
asks for, cannot be read back, lack the end-of-turn token, or lose the last turn of finished conversations. A template
that writes calls in none of the known forms is refused with the text that it wrote and the forms that were tried.

| form | a call (⏎ is a line break) |
| --- | --- |
{forms}
"""


def page() -> str:
    """Return the page."""
    rows = [row(name) for name in TEMPLATES]
    columns = [name for name in rows[0] if name != "observation"]
    lines = [_line(columns), _line(["---"] * len(columns))]
    lines += [_line([f"{entry[name]}" for name in columns]) for entry in rows]
    shared: dict[str, list[str]] = {}
    for entry in rows:
        shared.setdefault(entry["observation"], []).append(f"`{entry['template']}`")
    observations = "".join(f"\n{', '.join(names)}:\n\n{text}\n" for text, names in shared.items())
    foot = _FOOT.replace("{forms}", "\n".join(_line([f"`{form.name}`", _example(form)]) for form in FORMS.values()))
    return f"{_HEAD}{chr(10).join(lines)}\n{foot}\n## Observations\n{observations}"


def _example(form: ToolForm) -> str:
    text = form.render([Call("bash", {"command": COMMAND})])
    return "<code>" + html.escape(text).replace("|", "&#124;").replace("\n", "⏎<br>").replace("`", "&#96;") + "</code>"


def row(name: str) -> dict[str, str]:
    """Return {column: cell} of one template; cells are plain markdown."""
    chat = load_chat_format("qwen3", name)
    return {
        "template": name,
        "tail": " / ".join(chat.tail_form(chat.prompt_ids([_TASK], **switch)) for switch in _SWITCH),
        "thoughts, tools follow": _thought(chat, {"role": "tool", "content": "a.py"}),
        "thoughts, user follows": _thought(chat, {"role": "user", "content": "and now?"}),
        "appends, tools": _appends(chat, ("tool", "tool")),
        "appends, users": _appends(chat, ("user", "user")),
        "appends, tools then user": _appends(chat, ("tool", "user")),
        "extends, no thought": _extends(chat, ""),
        "extends, thought": _extends(chat, _THOUGHT),
        "call": chat.tool_form.name if chat.tool_form else "none",
        "tools in the prompt": _tools(chat),
        "observation": _observations(chat),
    }


def call_text(chat: ChatFormat, command: str = COMMAND) -> str:
    """Return a bash call in the form in which the template writes structured calls."""
    calls = [{"type": "function", "function": {"name": "bash", "arguments": {"command": command}}}]
    text = _rendered(chat, [_TASK, {"role": "assistant", "content": "", "tool_calls": calls}])
    return text[text.index("<tool_call>") : text.rindex("</tool_call>") + len("</tool_call>")]


def _thought(chat: ChatFormat, following: Mapping[str, str]) -> str:
    spoken = {"role": "assistant", "content": f"{_THOUGHT}Look."}
    text = _rendered(chat, [_TASK, spoken, following])
    turn = text[text.index("assistant\n") : text.index("Look.")]
    if "hm" in turn:
        return "kept"
    return "empty" if "<think>" in turn else "cut"


def _appends(chat: ChatFormat, roles: tuple[str, str]) -> str:
    verdicts = []
    for thought in ("", _THOUGHT):
        spoken = {"role": "assistant", "content": f"{thought}Look."}
        loop = [spoken, {"role": roles[0], "content": "a.py"}] * 3
        last = [spoken, {"role": roles[1], "content": "b.py"}, spoken]
        verdicts.append("yes" if chat.renders_once([_TASK, *loop, *last]) else "no")
    return " / ".join(verdicts)


def _extends(chat: ChatFormat, thought: str) -> str:
    """Return whether prompt + output + observation ids equal the same messages rendered again."""
    prompt = chat.prompt_ids([_TASK])
    tail = chat.tail_form(prompt)
    if thought and tail == "closed":
        return "-"
    written = (thought.removeprefix("<think>\n") if tail == "open" else thought) + call_text(chat)
    if not thought and tail == "open":
        written = "\n</think>\n\n" + written
    captured = [*prompt, *chat.encode(written), chat.end_id, *chat.observation_ids("a.py", role="tool")]
    again = [_TASK, {"role": "assistant", "content": thought, "tool_calls": _CALL}, {"role": "tool", "content": "a.py"}]
    return "yes" if chat.prompt_ids(again) == captured else "no"


def _tools(chat: ChatFormat) -> str:
    text = _rendered(chat, [{"role": "system", "content": "Act."}, _TASK], tools=_TOOLS)
    return "after the system text" if text.index("Act.") < text.index("<tools>") else "before the system text"


def _observations(chat: ChatFormat) -> str:
    lines = []
    for role in ("tool", "user"):
        ids = chat.observation_ids("ok", role=role)
        at = ids.index(chat.encode("ok")[0])
        lines.append(f"- {role}: `{ids[:at]}` … `{ids[at + 1 :]}`")
    return "\n".join(lines)


def _rendered(chat: ChatFormat, messages: Sequence[Mapping[str, Any]], tools: Sequence[Any] | None = None) -> str:
    return chat.decode(chat.prompt_ids(messages, tools=tools))


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    print(page(), end="")
