"""Measure an epoch on merged sequences against per-turn rows in TRL's SFTTrainer: `python bench/merged_training.py`.

`ETPI_TRAJECTORIES` names the folder of recorded runs. The data is one whole conversation in the real Qwen3 vocabulary,
with the histories of `merged_tokens`: of the conversations that have at most a given number of tokens as rows, the one
whose saving is nearest to the saving of all. An epoch is one optimiser step over its turns. SFTTrainer processes one
row per forward pass, so without padding; our trainer processes as many tokens per pass as the longest row or tree has.
Each epoch has its own process and one thread. The two ways alternate, and the CPU seconds of the second epoch count.
The losses of both epochs must be equal, which shows that the first gradient was.

There are two Qwen3 models with random weights. One has the real vocabulary: most of its work is the output matrix, and
on a CPU TRL scores every position, ours only the trained ones. The other has ids folded into 4,096, so that the layers
dominate; attention, which merging saves less of, has a larger share there than in a real model.
"""

from __future__ import annotations

import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from machine import machine
from merged_tokens import Conversation, dataset, format_of, recorded
from recorded import LONGEST

from etpi_resources.labels import IGNORE_INDEX

ROUNDS = 2
SAME = 1e-4
"""Largest relative difference of losses that rounding explains in float32."""
LAYERS = {"hidden_size": 128, "intermediate_size": 512, "num_hidden_layers": 2, "num_attention_heads": 2}
MODELS: dict[str, tuple[int, int]] = {"ids folded into 4,096": (4096, 70_000), "real vocabulary": (151_936, 24_000)}
"""Vocabulary, and the most tokens that an epoch's per-turn rows have."""


def representative(messages: list[Conversation], history: str, most: int) -> Conversation:
    """Return the conversation of at most `most` tokens whose saving is nearest to that of all conversations."""
    from etpi_assets.curation.merge import merge_savings

    savings = []
    for conversation in messages:
        pairs, rows, sequences = dataset(history, [conversation])
        savings.append(merge_savings(rows, pairs, sequences))
    whole = sum(s["row_tokens"] for s in savings) / sum(s["sequence_tokens"] for s in savings)
    fit = [i for i, s in enumerate(savings) if s["row_tokens"] <= most]
    return messages[min(fit, key=lambda i: abs(savings[i]["ratio"] - whole))]


def save_model(place: Path, history: str, vocabulary: int) -> None:
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    format_of(history).save(place)
    torch.manual_seed(0)
    config = Qwen3Config(
        **LAYERS, vocab_size=vocabulary, num_key_value_heads=1, head_dim=16, max_position_embeddings=LONGEST,  # pyright: ignore[reportArgumentType]
        tie_word_embeddings=True,
    )  # fmt: skip
    Qwen3ForCausalLM(config).save_pretrained(place)


def prepare(place: Path, conversation: Conversation, history: str, vocabulary: int) -> tuple[int, str]:
    """Write the model, merged sequences and per-turn rows; return (tokens of the longest, a description)."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    from etpi_assets.trajectories.tables import iter_prompts

    pairs, rows, sequences = dataset(history, [conversation])
    plain = []
    for (_, prompt), output in zip(iter_prompts(pairs), pairs["output_ids"].to_pylist(), strict=True):
        plain.append({"input_ids": [*prompt.tolist(), *output], "labels": [IGNORE_INDEX] * len(prompt) + output})
    assert len(rows) == len(plain)
    save_model(place, history, vocabulary)
    ids = [[i % vocabulary for i in one] for one in sequences["input_ids"].to_pylist()]
    at, kind = sequences.schema.get_field_index("input_ids"), sequences.schema.field("input_ids")
    pq.write_table(sequences.set_column(at, kind, pa.array(ids, kind.type)), place / "sequences.parquet")
    folded = [{k: [i % vocabulary if i >= 0 else i for i in ids] for k, ids in row.items()} for row in plain]
    pq.write_table(pa.Table.from_pylist(folded), place / "rows.parquet")
    apart, real = [len(row["input_ids"]) for row in plain], [len(one) for one in ids]
    return max(*apart, *real), (
        f"{sum(apart):,} tokens in {len(apart)} rows of at most {max(apart):,}, {sum(real):,} in {len(real)} trees of "
        f"at most {max(real):,} ({sum(apart) / sum(real):.1f}x), {sum(rows['output_tokens'].to_pylist()):,} trained on"
    )


def ours(place: Path, row_tokens: int) -> Any:
    import torch

    from etpi_assets.specs.training import TrainSection
    from etpi_assets.training.sft import settings
    from etpi_resources.trainers.contracts import SftWorkerConfig
    from etpi_resources.trainers.workers import sft_worker
    from etpi_resources.trainers.workers.checkpointing import load_model
    from etpi_resources.trainers.workers.collate import read_sequences
    from etpi_resources.trainers.workers.device import Compute
    from etpi_resources.trainers.workers.reporting import CONFIG_FILE, Worker

    sft_worker.GRADIENT_NORM = 1e9  # pyright: ignore[reportAttributeAccessIssue]
    train = TrainSection(
        dtype="fp32", epochs=2, batch_tokens=10**9, optimizer="sgd", learning_rate=0.1, schedule="constant",
        warmup_ratio=0,
    )  # fmt: skip
    config = SftWorkerConfig(
        label="merged", base=str(place), base_name="base", files=(), seed=0, chat_template=None, device="auto",
        micro_tokens=row_tokens, train=settings(train),
    )  # fmt: skip
    (place / "ours").mkdir(exist_ok=True)
    (place / "ours" / CONFIG_FILE).write_text(config.model_dump_json())
    model = load_model(place, torch.float32)
    stored = read_sequences([place / "sequences.parquet"], "train", vocabulary=1 << 20, longest=LONGEST)
    layout = sft_worker.lay_out(stored, config, row_tokens, model)
    assert layout.plan.steps == 2, "an epoch is one step"
    worker, compute = Worker(place / "ours", SftWorkerConfig), Compute(gpu=False, dtype="fp32")
    trainer = sft_worker.build_trainer(worker, model, layout.plan, layout.sequences, compute=compute, replicated=False)
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


def measure(trainer: Any, figure: str = "loss", figure_of: Callable[[], float] | None = None) -> None:
    """Train two steps in this process; print the second one's cost, the peak memory, and a figure of both steps.

    Every way of computing the figure must give the same value. `figure_of` returns it; without, the trainer logs it."""
    from transformers import TrainerCallback

    marks: list[tuple[float, float]] = []
    figures: list[float] = []

    class Marks(TrainerCallback):
        def on_step_end(self, *args: Any, **named: Any) -> None:
            marks.append((time.perf_counter(), time.process_time()))
            if figure_of:
                figures.append(figure_of())

        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **named: Any) -> None:
            if logs and figure in logs and not figure_of:
                figures.append(float(logs[figure]))

    before = peak()
    trainer.add_callback(Marks())
    trainer.train()
    (wall, cpu), (wall_end, cpu_end) = marks
    measured = {"wall": wall_end - wall, "cpu": cpu_end - cpu, "peak": peak(), "added": peak() - before}
    print(json.dumps({**measured, "figures": figures[:2]}))


def peak() -> float:
    """Return the peak resident memory in MB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def compare(script: str, what: str, place: Path, ways: tuple[str, str], *arguments: str) -> None:
    """Run the baseline and ours alternately, one process each (`script --one WAY PLACE ...`), and print their ratios.

    Raises:
        AssertionError: the figures that must be the same are not.
    """
    from etpi_resources.trainers.interpreter import ENVIRONMENT

    seen: dict[str, list[dict[str, Any]]] = {way: [] for way in ways}
    environment = {**ENVIRONMENT, **os.environ, "OMP_NUM_THREADS": "1"}
    for _ in range(ROUNDS):
        for way, runs in seen.items():
            command = [sys.executable, script, "--one", way, str(place), *arguments]
            done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
            runs.append(json.loads(done.stdout.splitlines()[-1]))
    base, mine = (seen[way] for way in ways)
    for a, b in zip(base, mine, strict=True):
        same = [abs(x - y) <= SAME * abs(x) for x, y in zip(a["figures"], b["figures"], strict=True)]
        assert len(same) == 2 and all(same), f"not the same: {a['figures']} and {b['figures']}"
    ratios = [a["cpu"] / b["cpu"] for a, b in zip(base, mine, strict=True)]
    cpu, wall, top, added = (
        [statistics.median(run[key] for run in runs) for runs in (base, mine)]
        for key in ("cpu", "wall", "peak", "added")
    )
    print(
        f"{what}: {cpu[0]:.1f} s of CPU by {ways[0]}, {cpu[1]:.1f} s by {ways[1]}: {statistics.median(ratios):.1f} "
        f"times ({min(ratios):.1f} to {max(ratios):.1f}), in wall time {wall[0] / wall[1]:.1f}; figures "
        f"{base[0]['figures']} and {mine[0]['figures']}; peak memory {top[0]:.0f} and {top[1]:.0f} MB, of it in "
        f"training {added[0]:.0f} and {added[1]:.0f} MB; load {os.getloadavg()[0]:.0f}",
        flush=True,
    )


def main() -> None:
    if sys.argv[1:2] == ["--one"]:
        way, place, row_tokens = sys.argv[2], Path(sys.argv[3]), int(sys.argv[4])
        if way == "TRL":
            measure(theirs(place))
        else:
            trainer = ours(place, row_tokens)

            def loss() -> float:
                window, trainer.window = trainer.window, type(trainer.window)()
                return window.loss()

            measure(trainer, figure_of=loss)
        return
    print(machine(), flush=True)
    messages = recorded()
    for model, (vocabulary, most) in MODELS.items():
        for history in ("kept", "strip-think"):
            with tempfile.TemporaryDirectory() as name:
                conversation = representative(messages, history, most)
                longest, words = prepare(Path(name), conversation, history, vocabulary)
                print(f"{history}, {model}: {words}", flush=True)
                row_tokens = -(-longest // 64) * 64
                compare(__file__, f"{history}, {model}", Path(name), ("TRL", "merged"), str(row_tokens))


if __name__ == "__main__":
    main()
