"""Every format of the table: the page is what the code does, and thoughts and calls are found in each."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from docs.generate import chat_formats as chat_table
from etpi_assets.agent.actions import read_actions
from etpi_assets.curation.retokenise import retokenise
from etpi_assets.curation.strip_think import close_tail, has_think, strip_history, strip_output
from etpi_resources.chat.format import load_chat_format

pytestmark = pytest.mark.skipif(
    find_spec("dashscope") is None, reason="dashscope, which ships the Qwen3 ranks, is not installed"
)

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "chat_formats.md"
TASK = {"role": "user", "content": "fix it"}
PIECES = ["ls", " -a", "é😀", "\n", " ", "'", '"', "\\", "{", "}", "<", ">", "&&", "你好", "\t"]
COMMANDS = st.lists(st.sampled_from(PIECES), min_size=1, max_size=8).map("".join).map(str.strip).filter(bool)
THOUGHTS = st.text(alphabet="ab é😀\n.", min_size=1, max_size=20)


def test_chat_formats_page_is_current() -> None:
    assert PAGE.read_text(encoding="utf-8") == chat_table.page(), "make docs"


def test_figures_that_other_pages_cite() -> None:
    rows = {name: chat_table.row(name) for name in ("qwen3", "qwen3_instruct_2507", "qwen3_5_think", "qwen3_5_nothink")}
    assert [row["tail"].split(" / ")[0] for row in rows.values()] == ["none", "none", "open", "closed"]
    assert [row["call"] for row in rows.values()] == ["hermes", "hermes", "qwen_xml", "qwen_xml"]


@pytest.mark.parametrize("name", chat_table.TEMPLATES)
@pytest.mark.parametrize("thinking", [None, True, False])
@settings(max_examples=5, deadline=None)
@given(command=COMMANDS, thought=THOUGHTS)
def test_thoughts_and_calls_of_captured_turns(name: str, thinking: bool | None, command: str, thought: str) -> None:
    """Native ids: the template's tail, a thought where that leaves room for one, a call in the template's form."""
    chat, kwargs = load_chat_format("qwen3", name), {} if thinking is None else {"enable_thinking": thinking}
    prompt = chat.prompt_ids([TASK], **kwargs)
    tail, call = chat.tail_form(prompt), chat_table.call_text(chat, command)
    written = {"none": f"<think>\n{thought}\n</think>\n\n", "open": f"{thought}\n</think>\n\n", "closed": ""}[
        tail
    ] + call
    output = np.asarray([*chat.encode(written), chat.end_id], dtype=np.int32)
    stripped = strip_output(output, tail, chat)
    assert stripped.reason is None and not has_think(stripped.ids, chat)
    assert stripped.ids.tolist() == [*chat.encode(call), chat.end_id]
    for text in (written, chat.decode(stripped.ids.tolist()[:-1])):
        (action,), error = read_actions(text)
        assert (action.kind, action.command, error) == ("bash", command, None)
    closed = close_tail(np.asarray(prompt, dtype=np.int32), chat).tolist()
    assert closed == (chat.prompt_ids([TASK], enable_thinking=False) if tail == "open" else prompt)


@pytest.mark.parametrize("name", chat_table.TEMPLATES)
@settings(max_examples=5, deadline=None)
@given(command=COMMANDS, thought=THOUGHTS)
def test_thoughts_and_calls_of_retokenised_turns(name: str, command: str, thought: str) -> None:
    """Text as ids: no think block that the template would put before an output, whatever it does to the history."""
    chat = load_chat_format("qwen3", name)
    said = f"<think>\n{thought}\n</think>\n\n{chat_table.call_text(chat, command)}"
    plain = chat_table.call_text(chat, command)
    kinds = {"user": "prompt", "assistant": "action", "tool": "observation"}
    messages = [
        {"role": role, "content": content, "turn": turn, "kind": kinds[role], "tool_calls": None}
        for role, content, turn in [
            ("user", "fix it", None), ("assistant", said, 0), ("tool", "a.py", 0), ("assistant", plain, 1),
        ]
    ]  # fmt: skip
    first, second = retokenise(messages, chat)
    tail = chat.tail_form(first.prompt_ids)
    if thought.strip():
        written = f"<think>\n{thought.strip()}\n</think>\n\n{plain}"
        written = written.removeprefix("<think>\n" if tail == "open" else "")
        assert chat.decode(first.output_ids[:-1]).split() == written.split()
    for turn in (first, second):
        ids = np.asarray(turn.output_ids, dtype=np.int32)
        stripped = strip_output(ids, tail, chat)
        assert stripped.reason is None
        label = turn.bare[1] if turn.bare else turn.output_ids
        assert label == stripped.ids.tolist() == [*chat.encode(plain), chat.end_id]
        (action,), _ = read_actions(chat.decode(turn.output_ids[:-1]))
        assert action.command == command
    history, removed = strip_history(np.asarray(second.prompt_ids, dtype=np.int32), chat)
    if thought.strip():  # an empty block is the template's own, and stays
        assert removed > 0 and f"<think>\n{thought.strip()}" not in chat.decode(history.tolist())
