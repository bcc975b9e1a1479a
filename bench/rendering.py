"""Compare rendering by the bounded process with transformers' own, in this process: `python bench/rendering.py`.

Conversations are of an agent with long histories (half) and of short questions (half). The ratio is of the medians of
alternating rounds.
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Callable
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

from machine import machine

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from etpi_resources.chat import bounds
from etpi_resources.chat.format import load_chat_format
from etpi_resources.chat.sources import render_template

ROUNDS = 7


def conversations(count: int) -> list[list[dict[str, str]]]:
    """Return `count` conversations, each different from the others."""
    rng = random.Random(0)

    def text(words: int) -> str:
        return " ".join(rng.choices(["def", "return", "the", "file", "test", "fails", "\n", "ls -la", "é"], k=words))

    talks = []
    for number in range(count):
        turns, words = (20, 150) if number % 2 else (1, 30)
        talk = [{"role": "system", "content": text(60)}]
        for _ in range(turns):
            talk += [{"role": "user", "content": text(words)}, {"role": "assistant", "content": text(words)}]
        talks.append(talk)
    return talks


def main() -> None:
    chat, talks = load_chat_format("qwen3"), conversations(400)
    template = chat.template + "{# not one that etpi ships #}"

    def seconds(render: Callable[[list[Any]], str]) -> float:
        start = perf_counter()
        for talk in talks:
            render(talk)
        return perf_counter() - start

    def here(talk: list[Any]) -> str:
        return str(chat.tokenizer.apply_chat_template(talk, chat_template=template, tokenize=False))

    def bounded(talk: list[Any]) -> str:
        return render_template(chat.tokenizer, template, talk)

    assert [here(talk) for talk in talks] == [bounded(talk) for talk in talks]
    rounds = []
    for _ in range(ROUNDS):
        bounds._rendered_small.cache_clear()
        rounds.append((seconds(here), seconds(bounded)))
    plain, process = (median(column) for column in zip(*rounds, strict=True))
    row = {"conversations": len(talks), "in_process_s": plain, "bounded_s": process, "ratio": process / plain}
    print(json.dumps({"machine": machine(), **row}, indent=1))


if __name__ == "__main__":
    main()
