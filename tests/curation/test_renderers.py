"""Prompts and labels against the package `renderers`, which renders the same families without their templates."""

from __future__ import annotations

import json
import re
import sys
from typing import Any

import pytest

from etpi_assets.curation.retokenise import retokenise
from etpi_resources.chat.format import ChatFormat, load_chat_format
from tests.support.students import CONSUMERS, FAMILIES, byte_tokenizer

TOOL = {
    "type": "function",
    "function": {
        "name": "run",
        "description": "Run.",
        "parameters": {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]},
    },
}
CALL = {"id": "c0", "type": "function", "function": {"name": "run", "arguments": {"command": "ls -a"}}}
TALK: list[dict[str, Any]] = [
    {"role": "system", "content": "Act."},
    {"role": "user", "content": "Go."},
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "c0", "name": "run", "content": "a.py"},
    {"role": "assistant", "content": "Look at `a`."},
    {"role": "user", "content": "Next."},
    {"role": "assistant", "content": "Done."},
]
_TAGS = ["<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<arg_key>"]
_TAGS += ["</arg_key>", "<arg_value>", "</arg_value>"]
NAMES = {"qwen3": "Qwen3", "qwen3_6": "Qwen36", "llama3_1": "Llama3", "glm4_5": "GLM45"}
"""Family -> the beginning of its configuration's name in `renderers`."""


def renderer_of(name: str, chat: ChatFormat) -> Any:
    """Return the package's renderer of a family; skip where `make consumers` did not install the package."""
    sys.path.append(str(CONSUMERS))
    try:
        renderers = pytest.importorskip("renderers")
        from renderers import configs  # pyright: ignore

        return renderers, renderers.create_renderer(chat.tokenizer, getattr(configs, f"{NAMES[name]}RendererConfig")())
    finally:
        sys.path.remove(str(CONSUMERS))


def format_of(name: str) -> ChatFormat:
    if name.startswith("qwen"):
        return load_chat_format("qwen3", name)
    tokenizer = byte_tokenizer(FAMILIES[name])
    tokenizer.add_tokens(_TAGS)
    return ChatFormat(name, tokenizer, tokenizer.chat_template)


def rows() -> list[dict[str, Any]]:
    turn, found = -1, []
    for index, message in enumerate(TALK):
        acts = message["role"] == "assistant"
        turn += acts
        calls = json.dumps(message["tool_calls"]) if "tool_calls" in message else None
        kind = "action" if acts else "prompt" if turn < 0 else "observation"
        row = {"index": index, "turn": turn if turn >= 0 else None, "kind": kind, "tool_calls": calls}
        found.append({**row, "role": message["role"], "content": message["content"], "reasoning": None})
    return found


@pytest.mark.parametrize("tools", [None, [TOOL]], ids=["bare", "tools"])
@pytest.mark.parametrize("name", NAMES)
def test_prompts_and_labels_are_those_of_the_package(name: str, tools: Any) -> None:
    chat = format_of(name)
    renderers, renderer = renderer_of(name, chat)
    for turn, at in zip(retokenise(rows(), chat, tools=tools), (2, 4, 6), strict=True):
        prompt = renderer.render_ids(TALK[:at], tools=tools, add_generation_prompt=True)
        sample = renderers.build_training_sample(
            renderer, TALK[: at + 1], tools=tools, ensure_final_stop=True, message_loss_mask=[0] * at + [1]
        )
        label = [number for number, trained in zip(sample.token_ids, sample.loss_mask, strict=True) if trained]
        assert chat.decode(turn.prompt_ids) == chat.decode(prompt) and turn.prompt_ids == list(prompt)
        assert said(chat, label) == said(chat, turn.output_ids)


def said(chat: ChatFormat, label: list[int]) -> str:
    """Return a label's text without its end and without an empty think block.

    The package closes a block of Qwen 3.6's prompt in the prompt, writes GLM's empty block, and ends a last turn of GLM
    with the end of text, where etpi writes the beginning of the message that follows.
    """
    return re.sub(r"\A\s*(?:<think>)?\s*</think>\s*", "", chat.decode(label[:-1]))
