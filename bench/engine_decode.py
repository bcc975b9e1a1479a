"""Measure the gain on a CPU of attending to each conversation at its own length instead of the longest one's.

    python bench/engine_decode.py [ROUNDS]

A model of the tiny base's shape with random weights continues 12 and 48 conversations greedily, with prompts of 100 to
1,500 ids; a third of the slots is idle. Each round runs the same prompts both ways, on one thread; the ids must be the
same. Figures are medians of CPU time.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch
from machine import machine
from transformers import Qwen3Config, Qwen3ForCausalLM

from etpi_resources.chat.format import ChatFormat, load_chat_format
from etpi_resources.engines import Request, Sampler
from etpi_resources.engines.transformers import TransformersEngine

SHAPE = {
    "hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 4, "head_dim": 64, "max_position_embeddings": 4096, "tie_word_embeddings": True,
}  # fmt: skip
ANSWER = 48
LENGTHS = (100, 1500)


def answered(engine: TransformersEngine, prompts: list[list[int]], name: str) -> tuple[float, list[list[int]]]:
    """Return (CPU seconds after the prompts were read, the ids of each answer)."""

    def ask(number: int, tokens: int, which: list[int]) -> list[list[int]]:
        requests = [
            Request(f"{name}{i}/{number}", f"{name}{i}", prompts[i], [], Sampler(max_tokens=tokens)) for i in which
        ]
        return [list(completion.output_ids or []) for completion in engine.complete(requests)]

    ask(0, 1, list(range(len(prompts))))
    busy = [i for i in range(len(prompts)) if i % 3]
    began = time.process_time()
    answers = ask(1, ANSWER, busy)
    return time.process_time() - began, answers


def engine_of(folder: Path, chat: ChatFormat, *, by_row: bool) -> TransformersEngine:
    engine = TransformersEngine(folder, "bench", chat)
    if not by_row:
        engine._model.set_attn_implementation("sdpa")
    return engine


def main() -> None:
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 5
    torch.set_num_threads(1)
    torch.manual_seed(0)
    chat = load_chat_format("tiny")
    vocabulary = len(chat.tokenizer)
    with tempfile.TemporaryDirectory() as name:
        Qwen3ForCausalLM(Qwen3Config(vocab_size=vocabulary, **SHAPE)).save_pretrained(name)
        for conversations in (12, 48):
            lengths = torch.linspace(*LENGTHS, conversations).int()[torch.randperm(conversations)].tolist()
            prompts = [torch.randint(10, vocabulary - 50, (length,)).tolist() for length in lengths]
            took: dict[bool, list[float]] = {True: [], False: []}
            for round_ in range(rounds):
                answers_by_way = []
                for by_row in took:
                    engine = engine_of(Path(name), chat, by_row=by_row)
                    seconds, answers = answered(engine, prompts, f"{round_}-")
                    engine.close()
                    took[by_row].append(seconds)
                    answers_by_way.append(answers)
                assert answers_by_way[0] == answers_by_way[1]
            ratios = [together / alone for together, alone in zip(took[False], took[True], strict=True)]
            print(
                f"{conversations} conversations, two in three busy: {statistics.median(took[True]):.2f} s of CPU, "
                f"{statistics.median(took[False]):.2f} together: {statistics.median(ratios):.2f} times "
                f"({min(ratios):.2f} to {max(ratios):.2f})"
            )


if __name__ == "__main__":
    print(machine(), flush=True)
    main()
