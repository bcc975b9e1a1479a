"""Measure a GRPO update of a group packed as a tree against its rows in TRL: `python bench/merged_update.py`.

`ETPI_TRAJECTORIES` names the folder of recorded runs. A group is 8 samples of one prompt in the real Qwen3 vocabulary.
Since no recorded run was sampled twice, the prompt is a conversation's history at its first or at its last turn, and
the samples are eight of its turns (see `merged_training`). The baseline is GRPOTrainer's own log-probabilities of
prompt and sample, 8 rows; the tree contains the prompt once. Rollouts, advantages and loss are the same, and so must be
the gradient norms of two updates. The CPU seconds of the second update count; each way has its own process and one
thread.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from machine import machine
from merged_tokens import dataset, recorded
from merged_training import MODELS, compare, measure, representative, save_model

GROUP = 8
MODEL = "ids folded into 4,096"


def prepare(place: Path, conversation: Any, turn: int, vocabulary: int) -> str:
    """Write the model and a group that answers the conversation's turn `turn`; return a description."""
    from etpi_assets.trajectories.tables import iter_prompts

    pairs = dataset("kept", [conversation])[0]
    prompt = [ids.tolist() for _, ids in iter_prompts(pairs)][turn]
    samples = pairs["output_ids"].to_pylist()[:GROUP]
    assert len(samples) == GROUP
    folded = [[i % vocabulary for i in ids] for ids in (prompt, *samples)]
    save_model(place, "kept", vocabulary)
    (place / "group.json").write_text(json.dumps(folded))
    own = sum(map(len, samples))
    rows, tree = GROUP * len(prompt) + own, len(prompt) + own
    return (
        f"prompt of {len(prompt):,} tokens, {GROUP} samples of {own // GROUP:,}; {rows / tree:.1f}x the tokens as rows"
    )


def updater(way: str, place: Path) -> Any:
    import datasets
    import torch
    from transformers import AutoTokenizer

    from etpi_assets.specs.training import RLSection
    from etpi_assets.training.grpo import settings
    from etpi_resources.trainers.policy_link import Sample
    from etpi_resources.trainers.workers.checkpointing import load_model
    from etpi_resources.trainers.workers.device import Compute
    from etpi_resources.trainers.workers.grpo_worker import trainer_arguments
    from etpi_resources.trainers.workers.policy_trainer import PolicyTrainer

    prompt, *answers = json.loads((place / "group.json").read_text())
    samples = [
        Sample(prompt, ids, [1] * len(ids), [0.0] * len(ids), 0.0, (-1.0) ** i * (1 + i))
        for i, ids in enumerate(answers)
    ]
    section = {
        "method": "grpo", "suite": "s", "rewards": [{"function": "format"}], "steps": 2, "group_size": GROUP,
        "device_batch": GROUP, "accumulate": 1, "beta": 0.0, "dtype": "fp32", "optimizer": "sgd", "learning_rate": 0.1,
        "schedule": "constant", "max_grad_norm": 1e9,
        "max_response_tokens": max(map(len, answers)),
    }  # fmt: skip
    rl = settings(RLSection.model_validate(section))
    tokenizer = AutoTokenizer.from_pretrained(place, local_files_only=True)
    tokenizer.pad_token_id = 0  # its own is beyond a folded vocabulary
    trainer: Any = PolicyTrainer(
        lambda step, rows: samples,
        rl,
        model=load_model(place, torch.float32),
        args=trainer_arguments(rl, place / way, 0, Compute(gpu=False, dtype="fp32")),
        train_dataset=datasets.Dataset.from_dict({"prompt": ["0"] * GROUP}),
        processing_class=tokenizer,
    )
    assert trainer.no_trees is None
    if way == "TRL":
        trainer.no_trees = "the baseline"
        trainer.model.set_attn_implementation("sdpa")
    return trainer


def main() -> None:
    if sys.argv[1:2] == ["--one"]:
        measure(updater(sys.argv[2], Path(sys.argv[3])), "grad_norm")
        return
    print(machine(), flush=True)
    vocabulary, most = MODELS[MODEL]
    conversation = representative(recorded(), "kept", most)
    for name, turn in (("after the first prompt", 0), ("after a whole history", -1)):
        with tempfile.TemporaryDirectory() as folder:
            print(f"{name}: {prepare(Path(folder), conversation, turn, vocabulary)}", flush=True)
            compare(__file__, name, Path(folder), ("TRL", "tree"))


if __name__ == "__main__":
    main()
