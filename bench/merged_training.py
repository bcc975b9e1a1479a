"""Training on merged sequences against the per-turn rows through TRL's SFTTrainer: tokens, time, memory.

Run: `ETPI_TRAJECTORIES=<folder> python bench/merged_training.py [ROW_TOKENS]`. The runs are those of `cooperbench-logs`
in that folder, in the real Qwen3 vocabulary and templates. First, of every conversation: tokens an epoch processes as
per-turn rows and as merged sequences, where the history is kept (`qwen3`), where the learnt turns have no think block
and the history has (made up: a turn thinks what it says, captured natively; every turn forks), and where the template
writes the history anew (`qwen3_5_think`; every turn forks).

Then an epoch of training, one optimiser step over the same turns, those of at most MOST tokens up to ROW_TOKENS tokens
of per-turn rows (default 24,000): a process each, in turns, SFTTrainer with a row a forward pass, so without padding,
ours with forward passes of as many tokens as the longest row. The losses of both epochs are compared. Models are Qwen3
of random weights: one with the real vocabulary, where TRL scores every position on a CPU and ours the learnt ones; one
with ids folded into 4,096, where the layers count.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

MOST = 6144
ROUNDS = 2
MODELS: dict[str, dict[str, int]] = {
    "real vocabulary": {"vocab_size": 151_936, "hidden_size": 64, "num_hidden_layers": 2},
    "ids folded into 4,096": {"vocab_size": 4096, "hidden_size": 128, "num_hidden_layers": 3},
}
HISTORIES = ("kept", "strip-think", "re-rendered")


def captured(history: str, messages: list[list[dict[str, Any]]]) -> Iterator[Any]:
    """The conversations as captured agents."""
    import numpy as np

    from etpi_assets.curation.pairs import CapturedAgent, CapturedTurn
    from etpi_assets.curation.retokenise import retokenise

    chat = format_of(history)
    for number, told in enumerate(messages):
        facts = {"task_id": told[0]["rollout_id"], "repo": "made", "teacher": "recorded"}
        turns, history_ids = [], np.empty(0, dtype=np.int32)
        before = 0
        for turn in retokenise(told, chat):
            prompt, output = (np.asarray(ids, dtype=np.int32) for ids in (turn.prompt_ids, turn.output_ids))
            if history == "strip-think":
                history_ids = np.concatenate([history_ids, prompt[before:]])
                before = len(prompt) + len(output)
                newline = chat.encode("\n")
                words = [i for i in output[:-1].tolist() if i not in (chat.tool_open_id, chat.tool_close_id)]
                thought = [
                    chat.think_open_id,
                    *newline,
                    *words,
                    *newline,
                    chat.think_close_id,
                    *newline,
                    *newline,
                ]
                said = np.concatenate([np.asarray(thought, dtype=np.int32), output])
                turns.append(CapturedTurn(turn.turn, history_ids, said, "native"))
                history_ids = np.concatenate([history_ids, said])
            else:
                turns.append(CapturedTurn(turn.turn, prompt, output, "retokenised"))
        yield CapturedAgent(told[0]["rollout_id"], f"{number}", turns, facts=facts)


def format_of(history: str) -> Any:
    from etpi_resources.chat_format import load_chat_format

    return load_chat_format("qwen3", "qwen3_5_think" if history == "re-rendered" else "qwen3")


def dataset(history: str, messages: list[list[dict[str, Any]]], most: int) -> tuple[Any, Any, Any]:
    """(pairs, dataset rows, sequences)."""
    from etpi_assets.curation.merge import merge
    from etpi_assets.curation.pairs import make_pairs
    from etpi_assets.curation.upweight import weigh
    from etpi_assets.specs.experiment import DatasetSection, PairsSection

    strip = history == "strip-think"
    section = PairsSection(capture="native" if strip else "retokenised", strip_think=strip, history_think="keep")
    pairs = make_pairs(captured(history, messages), section, format_of(history))["pairs"]
    rows = weigh(pairs, DatasetSection(val_fraction=0.0, max_length=most))["dataset_rows"]
    merged = merge(rows, pairs, most)
    return pairs, merged["dataset_rows"], merged["sequences"]


def compare_tokens(messages: list[list[dict[str, Any]]]) -> None:
    import numpy as np

    from etpi_assets.curation.merge import saving
    from etpi_resources.prefix_tree import Tree
    from etpi_resources.trainers.workers.plan import make_pass

    for history in HISTORIES:
        began = time.process_time()
        pairs, rows, sequences = dataset(history, messages, 40_960)
        saved = saving(rows, pairs, sequences)
        trees = [Tree.stored(row) for row in sequences.to_pylist()]
        own = sum(len(indices) for tree in trees for indices, _ in tree.branches())
        lengths = [tree.length for tree in trees]
        room = -(-max(lengths) // 64) * 64
        padded = sum(batch.tokens for batch in make_pass(lengths, room, np.random.default_rng(0), packed=True))
        print(
            f"{history}: {len(rows)} turns, {len(trees)} sequences, {sum(tree.forks for tree in trees)} of them fork; "
            f"{saved['row_tokens']:,} tokens as rows, {own:,} as branches, {saved['sequence_tokens']:,} as trees: "
            f"{saved['ratio']:.1f}x fewer than rows, {own / saved['sequence_tokens']:.1f}x fewer than branches; packed "
            f"in rows of {room:,}: {sum(lengths) / padded:.3f} real; {time.process_time() - began:.0f} s of CPU",
            flush=True,
        )


def prepare(folder: Path, messages: list[list[dict[str, Any]]], history: str, row_tokens: int) -> int:
    """Write models, merged sequences and per-turn rows; how many tokens the longest of either has."""
    import pyarrow as pa
    import pyarrow.parquet as pq
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    from etpi_assets.rollouts.tables import iter_prompts

    chosen, total = [], 0
    for told in sorted(messages, key=lambda told: sum(len(m["content"] or "") for m in told)):
        pairs, rows, sequences = dataset(history, [told], MOST)
        tokens = sum(pairs["input_tokens"].to_pylist()[: len(rows)])
        if len(rows) >= 8:
            chosen.append(told)
            total += tokens
        if total >= row_tokens:
            break
    pairs, rows, sequences = dataset(history, chosen, MOST)
    outputs = dict(zip(pairs["pair_id"].to_pylist(), pairs["output_ids"].to_pylist(), strict=True))
    taken, plain = set(rows["pair_id"].to_pylist()), []
    for key, prompt in iter_prompts(pairs):
        name = "/".join(map(str, key))
        if name in taken:
            output = outputs[name]
            plain.append({"input_ids": [*prompt.tolist(), *output], "labels": [-100] * len(prompt) + output})
    longest = max(max(len(r["input_ids"]) for r in plain), max(len(ids) for ids in sequences["input_ids"]))
    for name, size in MODELS.items():
        place = folder / name
        format_of(history).save(place)
        torch.manual_seed(0)
        config = Qwen3Config(
            **size, intermediate_size=3 * size["hidden_size"], num_attention_heads=4, num_key_value_heads=2,  # pyright: ignore[reportArgumentType]
            head_dim=size["hidden_size"] // 4, max_position_embeddings=2 * MOST, tie_word_embeddings=True,
        )  # fmt: skip
        Qwen3ForCausalLM(config).save_pretrained(place)
        fold = size["vocab_size"]
        ids = [[i % fold for i in one] for one in sequences["input_ids"].to_pylist()]
        at = sequences.schema.get_field_index("input_ids")
        kind = sequences.schema.field("input_ids")
        pq.write_table(sequences.set_column(at, kind, pa.array(ids, kind.type)), place / "sequences.parquet")
        folded = [{k: [i % fold if i >= 0 else i for i in ids] for k, ids in row.items()} for row in plain]
        pq.write_table(pa.Table.from_pylist(folded), place / "rows.parquet")
    real = sum(len(ids) for ids in sequences["input_ids"])
    learnt = sum(rows["output_tokens"].to_pylist())
    apart = sum(len(row["input_ids"]) for row in plain)
    print(
        f"{history}: {len(chosen)} conversations, {len(plain)} turns of at most {MOST:,} tokens; rows have {apart:,} "
        f"tokens, {len(sequences)} trees {real:,}, {learnt:,} of them learnt",
        flush=True,
    )
    return -(-longest // 64) * 64


def ours(place: Path, room: int) -> Any:
    import torch

    from etpi_assets.specs.training import TrainSection
    from etpi_resources.trainers.workers import sft_worker
    from etpi_resources.trainers.workers.checkpointing import load_model
    from etpi_resources.trainers.workers.collate import read_sequences
    from etpi_resources.trainers.workers.reporting import CONFIG_FILE, Worker

    sft_worker.GRADIENT_NORM = 1e9  # pyright: ignore[reportAttributeAccessIssue]
    train = TrainSection(
        dtype="fp32", epochs=2, batch_tokens=10**9, optimizer="sgd", learning_rate=0.1, schedule="constant",
        warmup_ratio=0,
    )  # fmt: skip
    config = {"base": str(place), "seed": 0, "train": train.model_dump()}
    (place / "ours").mkdir(exist_ok=True)
    (place / "ours" / CONFIG_FILE).write_text(json.dumps(config))
    model = load_model(place, torch.float32)
    stored = read_sequences([place / "sequences.parquet"], "train", vocabulary=1 << 20, longest=2 * MOST)
    sequences, plan, layout, because = sft_worker.lay_out(stored, config, room, model)
    print(f"layout {layout}: {because}; {1 - plan.padding(sequences.lengths().tolist()):.3f} real", file=sys.stderr)
    assert plan.steps == 2, "an epoch is one step"
    trainer = sft_worker.build_trainer(Worker(place / "ours"), model, plan, sequences, gpu=False, at_once=False)
    trainer.pad_id = 0  # the tokenizer's is beyond a folded vocabulary
    return trainer


def theirs(place: Path) -> Any:
    import datasets
    import pyarrow.parquet as pq
    import torch
    from transformers import AutoTokenizer
    from trl.trainer.sft_config import SFTConfig
    from trl.trainer.sft_trainer import SFTTrainer

    from etpi_resources.trainers.workers.checkpointing import load_model

    rows = pq.read_table(place / "rows.parquet")
    return SFTTrainer(
        model=load_model(place, torch.float32),
        args=SFTConfig(
            output_dir=str(place / "trl"), max_steps=2, per_device_train_batch_size=1,
            gradient_accumulation_steps=len(rows), learning_rate=0.1, optim="sgd", lr_scheduler_type="constant",
            max_grad_norm=1e9, max_length=None, packing=False, completion_only_loss=False, bf16=False, use_cpu=True,
            gradient_checkpointing=False, report_to="none", logging_steps=1, save_strategy="no", disable_tqdm=True,
        ),
        train_dataset=datasets.Dataset(rows),
        processing_class=AutoTokenizer.from_pretrained(place, local_files_only=True),
    )  # fmt: skip


def one(who: str, place: Path, room: int) -> None:
    """Two epochs, a step each, in this process; prints what the second one took, and both losses."""
    from transformers import TrainerCallback

    trainer = ours(place, room) if who == "ours" else theirs(place)
    marks: list[tuple[float, float]] = []
    losses: list[float] = []
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

    class Marks(TrainerCallback):
        def on_train_begin(self, *args: Any, **named: Any) -> None:
            marks.append((time.perf_counter(), time.process_time()))

        def on_step_end(self, *args: Any, **named: Any) -> None:
            marks.append((time.perf_counter(), time.process_time()))
            if who == "ours":
                window = trainer.window
                losses.append(window.loss())
                trainer.window = type(window)()

        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **named: Any) -> None:
            if logs and "loss" in logs:
                losses.append(float(logs["loss"]))

    trainer.add_callback(Marks())
    trainer.train()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    (_, _), (wall, cpu), (wall_end, cpu_end) = marks
    found = {"wall": wall_end - wall, "cpu": cpu_end - cpu, "peak": peak / 1024, "added": (peak - before) / 1024}
    print(json.dumps({**found, "losses": losses[:2]}))


def measured(who: str, place: Path, room: int) -> dict[str, Any]:
    from etpi_resources.trainers.pipes import ENVIRONMENT

    command = [sys.executable, __file__, "--one", who, str(place), str(room)]
    done = subprocess.run(command, env={**ENVIRONMENT, **os.environ}, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def main() -> int:
    if sys.argv[1:2] == ["--one"]:
        one(sys.argv[2], Path(sys.argv[3]), int(sys.argv[4]))
        return 0
    root = os.environ.get("ETPI_TRAJECTORIES")
    if not root:
        print("ETPI_TRAJECTORIES names no folder of recorded runs", file=sys.stderr)
        return 2
    from retokenise import conversations

    messages = conversations(Path(root))
    compare_tokens(messages)
    for history in ("kept", "strip-think"):
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            room = prepare(folder, messages, history, int(sys.argv[1]) if len(sys.argv) > 1 else 24_000)
            for model in MODELS:
                mine, base = [], []
                for _ in range(ROUNDS):
                    base.append(measured("trl", folder / model, room))
                    mine.append(measured("ours", folder / model, room))
                wall, cpu, peak, added = (
                    (min(run[k] for run in base), min(run[k] for run in mine)) for k in ("wall", "cpu", "peak", "added")
                )
                print(
                    f"{history}, {model}: an epoch {wall[0]:.1f} s by TRL, {wall[1]:.1f} s merged, "
                    f"{wall[0] / wall[1]:.1f} times (CPU {cpu[0] / cpu[1]:.1f}); losses {base[0]['losses']} and "
                    f"{mine[0]['losses']}; peak memory {peak[0]:.0f} and {peak[1]:.0f} MB, of training alone "
                    f"{added[0]:.0f} and {added[1]:.0f} MB; load {os.getloadavg()[0]:.0f}",
                    flush=True,
                )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
