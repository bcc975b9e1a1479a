"""Count the tokens of an epoch as per-turn rows and as merged sequences: `python bench/merged_tokens.py`.

`ETPI_TRAJECTORIES` names the folder of recorded runs; the script reads every conversation of `cooperbench-logs`, with
the real Qwen3 vocabulary and templates. It compares three histories:

- kept (`qwen3`);
- strip-think: trained turns have no think block and the history has one, so every turn forks. The recorded runs have no
  think blocks, so each turn gets one with a copy of its text, captured natively;
- re-rendered (`qwen3_5_think`): the template renders the history differently at each turn, so every turn forks.

It counts tokens as rows, as one row per branch (the result of merging plain prefixes), and as trees, and then packs the
trees in rows of several lengths.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

from machine import machine
from recorded import LONGEST, runs_folder
from retokenise import conversations

Conversation = list[dict[str, Any]]
"""The messages of one agent."""

HISTORIES = ("kept", "strip-think", "re-rendered")
ROW_TOKENS = (16_384, 65_536)
"""Tokens of a packed row; the length of the longest tree is measured too."""


def captured(history: str, messages: list[Conversation]) -> Iterator[Any]:
    """Return the conversations as captured agents."""
    import numpy as np

    from etpi_assets.curation.pairs import CapturedAgent, CapturedTurn
    from etpi_assets.curation.retokenise import retokenise

    chat = format_of(history)
    for number, conversation in enumerate(messages):
        facts = {"task_id": conversation[0]["rollout_id"], "repo": "made", "teacher": "recorded"}
        turns, history_ids = [], np.empty(0, dtype=np.int32)
        before = 0
        for turn in retokenise(conversation, chat):
            prompt, output = (np.asarray(ids, dtype=np.int32) for ids in (turn.prompt_ids, turn.output_ids))
            if history == "strip-think":
                history_ids = np.concatenate([history_ids, prompt[before:]])
                before = len(prompt) + len(output)
                newline = chat.encode("\n")
                words = [i for i in output[:-1].tolist() if i not in (chat.tool_open_id, chat.tool_close_id)]
                # The block, and the empty line that the template writes after it.
                thought = [chat.think_open_id, *newline, *words, *newline, chat.think_close_id, *newline, *newline]
                said = np.concatenate([np.asarray(thought, dtype=np.int32), output])
                turns.append(CapturedTurn(turn.turn, history_ids, said, "native"))
                history_ids = np.concatenate([history_ids, said])
            else:
                turns.append(CapturedTurn(turn.turn, prompt, output, "retokenised"))
        yield CapturedAgent(conversation[0]["rollout_id"], f"{number}", turns, facts=facts)


def format_of(history: str) -> Any:
    from etpi_resources.chat.format import load_chat_format

    return load_chat_format("qwen3", "qwen3_5_think" if history == "re-rendered" else "qwen3")


def dataset(history: str, messages: list[Conversation], longest: int = LONGEST) -> tuple[Any, Any, Any]:
    """Return (pairs, dataset rows, sequences) of at most `longest` tokens."""

    from etpi_assets.curation.merge import merge
    from etpi_assets.curation.pairs import make_pairs
    from etpi_assets.curation.upweight import RowRule, weigh_pairs, with_split
    from etpi_assets.specs.experiment import DatasetSection, PairsSection

    strip = history == "strip-think"
    section = PairsSection(capture="native" if strip else "retokenised", strip_think=strip, history_think="keep")
    pairs = make_pairs(captured(history, messages), section, format_of(history))["pairs"]
    chosen = DatasetSection(val_fraction=0.0, max_length=longest)
    rows = with_split(weigh_pairs(pairs, RowRule(chosen))["dataset_rows"], chosen, ())
    return pairs, *merge(rows, pairs, longest)


def recorded() -> list[Conversation]:
    """Return the conversations of the recorded runs; exit if no folder is named."""
    return conversations(runs_folder().parent)


def main() -> None:
    import numpy as np

    from etpi_assets.curation.merge import merge_savings
    from etpi_resources.prefix_tree import PrefixTree
    from etpi_resources.trainers.workers.plan import pack

    messages = recorded()
    for history in HISTORIES:
        began = time.process_time()
        pairs, rows, sequences = dataset(history, messages)
        saved = merge_savings(rows, pairs, sequences)
        trees = [PrefixTree.from_row(row) for row in sequences.to_pylist()]
        own = sum(len(indices) for tree in trees for indices, _ in tree.branches())
        lengths = [tree.length for tree in trees]
        print(
            f"{history}: {len(rows)} turns, {len(trees)} sequences, {sum(tree.has_branches for tree in trees)} with "
            "several branches; "
            f"{saved['row_tokens']:,} tokens as rows, {own:,} as branches, {saved['sequence_tokens']:,} as trees: "
            f"{saved['ratio']:.1f}x fewer than rows, {own / saved['sequence_tokens']:.1f}x fewer than branches; "
            f"{time.process_time() - began:.0f} s of CPU",
            flush=True,
        )
        for row_tokens in (-(-max(lengths) // 64) * 64, *ROW_TOKENS):
            packed = pack(lengths, row_tokens, np.random.default_rng(0))
            share = sum(lengths) / sum(length for _, length in packed)
            print(f"  packed in {len(packed)} rows, of {row_tokens:,} tokens or a longer tree's: {share:.3f} are real")


if __name__ == "__main__":
    print(machine(), flush=True)
    main()
