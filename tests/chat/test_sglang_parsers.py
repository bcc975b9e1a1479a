"""Labels are read by SGLang's parsers of the same form: an implementation that shares nothing with etpi's."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import MagicMock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from etpi_resources.chat.format import ChatFormat
from etpi_resources.chat.tool_forms import FORMS, Call
from tests.support.own_runs import TOOLS
from tests.support.students import FAMILIES, byte_tokenizer

DETECTORS = {
    "qwen3": "hermes:Hermes", "qwen3_6": "qwen3_coder:Qwen3Coder", "llama3_1": "llama32:Llama32",
    "mistral_v3": "mistral:Mistral", "gemma4": "gemma4:Gemma4",
}  # fmt: skip
"""Family -> SGLang's detector, as module:class. Its detector for gpt-oss reads a recipient only after the channel, and
the family's template writes it before; its detector for Mistral reads no call ids, which tokenizer v11 writes."""
FORM_DETECTORS = {
    "mistral_v11": "mistral:Mistral",
    "glm": "glm4_moe:Glm4Moe", "deepseek_v3": "deepseekv3:DeepSeekV3", "deepseek_v3_1": "deepseekv31:DeepSeekV31",
}  # fmt: skip
"""Forms whose families no test trains."""
NOT_HERE = ("triton", "triton.language", "triton.runtime", "triton.compiler", "IPython", "IPython.display", "traitlets")
"""A compiler for GPUs and programs for notebooks, which SGLang's protocol imports and its parsers never call."""


class _Absent(ModuleType):
    __path__: list[str] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return MagicMock()


@pytest.fixture(scope="module", autouse=True)
def sglang(consumers: Path) -> Iterator[None]:
    """Let SGLang be imported in this module alone."""
    before = set(sys.modules)
    sys.path.append(str(consumers))
    absent = [name for name in NOT_HERE if name not in sys.modules]
    sys.modules.update({name: _Absent(name) for name in absent})
    yield
    sys.path.remove(str(consumers))
    for name in set(sys.modules) - before:
        if name in absent or name.split(".")[0] == "sglang":
            del sys.modules[name]


def read(detector: str, text: str) -> list[tuple[str, dict[str, Any]]]:
    """Return the calls that SGLang reads from a turn."""
    module, _, name = detector.partition(":")
    reader = getattr(importlib.import_module(f"sglang.srt.function_call.{module}_detector"), f"{name}Detector")()
    protocol = importlib.import_module("sglang.srt.entrypoints.openai.protocol")
    result = reader.detect_and_parse(text, [protocol.Tool(**tool) for tool in TOOLS])
    return [(call.name, json.loads(call.parameters)) for call in result.calls]


_FORMATS: dict[str, ChatFormat] = {}
COMMANDS = st.text(st.sampled_from("ab01 \n\"'{}[]$;|é"), min_size=1, max_size=30).map(lambda text: f"x{text}y")


@pytest.mark.parametrize("family", DETECTORS)
@settings(max_examples=40, deadline=None)
@given(command=COMMANDS, timeout=st.integers(0, 999))
def test_label_of_a_family_is_read_as_the_same_call(family: str, command: str, timeout: int) -> None:
    if family not in _FORMATS:
        tokenizer = byte_tokenizer(FAMILIES[family])
        _FORMATS[family] = ChatFormat(family, tokenizer, tokenizer.chat_template)
    chat = _FORMATS[family]
    call = Call("execute_bash", {"command": command, "timeout": timeout})
    text = chat.decode(chat.without_end(chat.turn_ids("", [call], tools=TOOLS)))
    assert read(DETECTORS[family], text) == [(call.name, dict(call.arguments))]


@pytest.mark.parametrize("form", FORM_DETECTORS)
@settings(max_examples=40, deadline=None)
@given(command=COMMANDS, timeout=st.integers(0, 999))
def test_rendered_form_is_read_as_the_same_call(form: str, command: str, timeout: int) -> None:
    call = Call("execute_bash", {"command": command, "timeout": timeout})
    assert read(FORM_DETECTORS[form], FORMS[form].render([call])) == [(call.name, dict(call.arguments))]
