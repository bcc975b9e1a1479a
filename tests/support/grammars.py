"""Think grammars, and blocks that may or may not adhere to them."""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec

import llguidance
from hypothesis import strategies as st

from etpi_resources.chat.format import load_chat_format
from etpi_resources.chat.grammars import ThinkGrammar

HAS_QWEN = find_spec("dashscope") is not None


NAMES = ["tiny", *(["qwen3"] if HAS_QWEN else [])]


GRAMMARS = [
    ThinkGrammar.of(), ThinkGrammar.of(max_chars=5), ThinkGrammar.of(("PLAN", "next-step"), {"PLAN": 1}),
    ThinkGrammar(opened="<think>\n"), ThinkGrammar(opened="<think>"),
]  # fmt: skip


# Lines that fit, lines that almost do, and what tries to leave the block.
LINES = st.one_of(
    st.text(alphabet="ab: é😀你\u2028", min_size=1, max_size=7),
    st.sampled_from(
        ["", " x", "x ", "a < b", "</think>", "<tool_call>", "x\r", "\t", "<|im_end|>", "STATE: x", "12345"]
    ),
)


@st.composite
def blocks(draw: st.DrawFn, grammar: ThinkGrammar) -> str:
    """A text that the grammar takes, or one or two faults away from it."""
    text = grammar.opening + "".join(f"{name}: {draw(LINES)}\n" for name in grammar.slots) + "</think>"
    fault = draw(st.integers(0, 5))
    at = draw(st.integers(0, len(text)))
    if fault == 0:
        return text[:at]
    if fault == 1:
        return text[:at] + draw(st.sampled_from(["\n", " ", "x", "<", "<think>"])) + text[at:]
    if fault == 2:
        return text[:at] + text[at + 1 :]
    return text


@cache
def vocabulary(name: str) -> llguidance.LLTokenizer:
    chat = load_chat_format(name)
    return llguidance.LLTokenizer(chat.tokenizer.backend_tokenizer.to_str(), eos_token=chat.end_id, slices=[])
