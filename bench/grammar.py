"""Measure the tokens per second of the in-process engine with and without a grammar: `python bench/grammar.py`.

Random models with the tiny and with the real Qwen3 vocabulary complete 32 requests at temperature 1. The grammar
constrains every token (long lines); the baseline is the same requests without it. The script measures CPU seconds of
this process, in short rounds that alternate the order, and prints the median of the rounds' ratios.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import torch
from machine import machine

from etpi_resources.chat.format import load_chat_format
from etpi_resources.chat.grammars import ThinkGrammar
from etpi_resources.engines import Request, Sampler
from etpi_resources.engines.transformers import TransformersEngine

REQUESTS, TOKENS, ROUNDS = 32, 48, 7
SIZES = {"tiny": (1024, 128), "qwen3": (151_936, 256)}
"""Vocabulary with the padding ids that a model has, and hidden size."""


def make(name: str, folder: Path) -> None:
    """Write a random Qwen3-architecture model of 3 layers to the folder."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    vocabulary, hidden = SIZES[name]
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=vocabulary, hidden_size=hidden, intermediate_size=3 * hidden, num_hidden_layers=3,
        num_attention_heads=4, num_key_value_heads=2, head_dim=32, tie_word_embeddings=True,
    )  # fmt: skip
    Qwen3ForCausalLM(config).save_pretrained(folder)


def seconds(engine: TransformersEngine, requests: list[Request]) -> float:
    """Return CPU seconds per token."""
    start = time.process_time()
    completions = engine.complete(requests)
    return (time.process_time() - start) / sum(len(completion.output_ids or []) for completion in completions)


def main() -> None:
    for name in SIZES:
        chat = load_chat_format(name)
        with tempfile.TemporaryDirectory() as folder:
            make(name, Path(folder))
            engine = TransformersEngine(Path(folder), name, chat)
            try:
                for grammar in (ThinkGrammar.of(), ThinkGrammar.of(max_chars=400)):
                    prompt = chat.prompt_ids([{"role": "user", "content": "fix it"}])
                    sampler = Sampler(temperature=1.0, max_tokens=TOKENS)
                    bound = [Request(f"{i}/0", f"{i}", prompt, [], sampler, grammar) for i in range(REQUESTS)]
                    free = [replace(request, grammar=None) for request in bound]
                    for requests in (bound[:1], free[:1]):  # compile the grammar, touch the weights
                        seconds(engine, requests)
                    ways, costs = {"bound": bound, "free": free}, {"bound": list[float](), "free": list[float]()}
                    for number in range(ROUNDS):
                        for way in sorted(ways, reverse=bool(number % 2)):
                            costs[way].append(seconds(engine, ways[way]))
                    ratios = [without / ours for ours, without in zip(costs["bound"], costs["free"], strict=True)]
                    ours, without = (1 / statistics.median(costs[way]) for way in ways)
                    print(
                        f"{name}, lines of at most {grammar.bounds[0]} characters: {ours:.0f} tokens a CPU second "
                        f"with the grammar, {without:.0f} without, {statistics.median(ratios):.2f} times "
                        f"(rounds {min(ratios):.2f} to {max(ratios):.2f})",
                        flush=True,
                    )
            finally:
                engine.close()


if __name__ == "__main__":
    print(machine(), flush=True)
    main()
