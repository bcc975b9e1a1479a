"""Compare rendering by the bounded process with transformers' own, in this process: `python bench/rendering.py`.

Conversations are of an agent with long histories (half) and of short questions (half). They are rendered one by one,
and in bulk as curation does. The ratios are of the medians of alternating rounds.
"""

from __future__ import annotations

import json
import os
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
from etpi_resources.chat.sources import map_conversations, render_template

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

    def one(talk: list[Any]) -> str:
        return render_template(chat.tokenizer, template, talk)

    def here() -> list[str]:
        return [str(chat.tokenizer.apply_chat_template(t, chat_template=template, tokenize=False)) for t in talks]

    ways: dict[str, Callable[[], list[str]]] = {
        "in_process": here,
        "one_by_one": lambda: list(map(one, talks)),
        "bulk": lambda: list(map_conversations(template, one, talks)),
    }
    assert len({tuple(render()) for render in ways.values()}) == 1
    rounds = list[list[float]]()
    for _ in range(ROUNDS):
        rounds.append([])
        for render in ways.values():
            bounds._rendered_small.cache_clear()
            start = perf_counter()
            render()
            rounds[-1].append(perf_counter() - start)
    seconds = dict(zip(ways, map(median, zip(*rounds, strict=True)), strict=True))
    ratios = {f"{name}_ratio": seconds[name] / seconds["in_process"] for name in ("one_by_one", "bulk")}
    row = {"conversations": len(talks), "seconds": seconds, **ratios, "load": os.getloadavg()[0]}
    print(json.dumps({"machine": machine(), **row}, indent=1))


if __name__ == "__main__":
    main()
