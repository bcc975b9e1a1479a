"""Losses, gradients, plans and logs of both trainers on a tiny model, what becomes of them in tables, and bases."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from transformers import AutoModelForCausalLM

from etpi_assets.evaluation import blame
from etpi_assets.specs.experiment import BaseSection
from etpi_assets.specs.training import TrainSection
from etpi_assets.tiny_bases import shipped
from etpi_assets.training import curves, sft
from etpi_assets.training.checkpoints import LakeCheckpoint, SftReport, pointer
from etpi_resources.lake.schemas import from_rows
from etpi_resources.trainers.contracts import FirstPass, PhaseSeconds, PlanSummary, SavedFigures, SftLogLine
from etpi_resources.trainers.workers import grpo_worker, influence, sft_worker
from etpi_resources.trainers.workers.checkpointing import load_model
from etpi_resources.trainers.workers.collate import collate, read_sequences
from etpi_resources.trainers.workers.device import Compute
from etpi_resources.trainers.workers.label_head import add_label_head
from etpi_resources.trainers.workers.plan import PlanSettings, make_plan
from etpi_resources.trainers.workers.tree_attention import refuses_trees
from tests.goldens.folders import new_folder
from tests.goldens.golden import case
from tests.support.policy_updates import FixedLink, made_samples
from tests.support.policy_updates import worker_in as grpo_worker_in
from tests.support.sft import config_of, worker_in
from tests.support.tiny_training import learnable, make_base, make_speaking_base, sequence, write

FORKS = {"node_starts": [0, 20, 25], "node_parents": [-1, 0, 0], "node_positions": [0, 20, 20]}


@contextmanager
def one_thread() -> Iterator[None]:
    """Compute on one thread, on which models this small are faster."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def with_written_weights(folder: Path) -> Path:
    """Replace a model's random weights by waves, which no generator of random numbers changes."""
    model = AutoModelForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        for number, parameter in enumerate(model.parameters()):
            if parameter.dim() > 1:
                wave = [0.08 * math.sin(1.0 + 1.7 * number + 2.3 * at) for at in range(parameter.numel())]
                parameter.copy_(torch.tensor(wave).view_as(parameter))
    model.save_pretrained(folder)
    return folder


@cache
def base() -> Path:
    return with_written_weights(make_base(new_folder()))


@cache
def speaking_base() -> Path:
    return with_written_weights(make_speaking_base(new_folder()))


def moved(model: torch.nn.Module, train: Callable[[], object]) -> dict[str, Any]:
    """Return by how much each tensor moved; with plain SGD of learning rate 1 that is the gradient."""
    before = {name: p.detach().clone() for name, p in model.named_parameters() if p.requires_grad}
    train()
    after = dict(model.named_parameters())
    return {name.replace(".", "/"): (old - after[name].detach()).flatten().tolist() for name, old in before.items()}


# --- fine-tuning ------------------------------------------------------------------------------------------------------


def rows() -> list[dict[str, Any]]:
    tree = sequence("tree", [*range(3, 34)], [(22, 25, 1.0), (27, 31, 2.0)]) | FORKS
    return [*learnable(5, validation=2), tree]


@case("trainer.sft", "gradient")
def sft_gradient() -> dict[str, Any]:
    """The gradient of one accumulated step over sequences and a tree, and the loss of its first pass."""
    plain = {
        "optimizer": "sgd",
        "learning_rate": 1.0,
        "schedule": "constant",
        "warmup_ratio": 0.0,
        "batch_tokens": 10**6,
    }
    folder = new_folder()
    config = config_of(base(), [write(rows(), folder / "sequences.parquet")], micro_tokens=256, **plain)
    stored, _ = sft_worker.read_splits(config)
    with one_thread(), patch.object(sft_worker, "GRADIENT_NORM", 1e9):
        model = load_model(base(), torch.float32)
        layout = sft_worker.lay_out(stored, config, 256, model)
        trainer = sft_worker.build_trainer(
            worker_in(folder / "run", config), model, layout.plan, layout.sequences,
            compute=Compute(False, "fp32"), replicated=False,
        )  # fmt: skip
        gradient = moved(model, trainer.train)
    return {
        "gradient": gradient,
        "loss": trainer.first_pass.loss(),
        "accuracy": trainer.first_pass.accuracy(),
        "weight": float(trainer.first_pass.weight),
    }


@case("trainer.sft", "training")
def sft_training() -> dict[str, Any]:
    """The log of a short training of all weights and of an adapter: losses, learning rates, plan."""
    result = {}
    for method in ("full", "lora"):
        folder = new_folder()
        config = config_of(
            base(), [write(rows(), folder / "sequences.parquet")], method=method, lora_rank=4, epochs=3.0,
            batch_tokens=256, learning_rate=1e-2,
        )  # fmt: skip
        with one_thread():
            report = sft_worker.run(worker_in(folder / "run", config))
        assert report is not None
        result[method] = {
            "log": [line.model_dump(exclude={"seconds"}) for line in report.log],
            "plan": report.plan.model_dump(exclude={"layout_because"}),
            "counted": report.counted,
            "changed": report.saved.changed_share,
        }
    return result


@case("trainer.sft", "batches")
def sft_batches() -> dict[str, Any]:
    """Plans of micro-batches, and one collated in rows and one packed."""
    file = write(rows(), new_folder() / "sequences.parquet")
    sequences = read_sequences([file], "train", vocabulary=64, longest=512)
    result = {}
    for name, packed in (("rows", False), ("packed", True)):
        settings = PlanSettings(
            epochs=2.0,
            max_steps=None,
            batch_tokens=300,
            micro_tokens=150,
            schedule="cosine",
            warmup=0.1,
            seed=3,
            packed=packed,
        )
        lengths, weights = sequences.lengths().tolist(), sequences.totals(sequences.weights).tolist()
        plan = make_plan(lengths, sequences.rows.tolist(), weights, settings)
        batch = collate(plan.batches[0], sequences, 1)
        result[name] = {
            "batches": [vars(batch) if hasattr(batch, "__dict__") else batch for batch in plan.batches],
            "tensors": {k: v for k, v in batch.items() if isinstance(v, torch.Tensor)},
        }
    return result


# --- reinforcement ----------------------------------------------------------------------------------------------------


def grpo_step(**section: Any) -> dict[str, Any]:
    worker = grpo_worker_in(new_folder(), speaking_base(), **section)
    with one_thread():
        model = load_model(speaking_base(), torch.float32)
        compute = Compute(False, "fp32")
        trainer, engine = grpo_worker.build_trainer(worker, model, FixedLink(samples()), compute=compute)
        try:
            gradient = moved(model, trainer.train)
        finally:
            engine.close()
    statistics = trainer.statistics.take()
    assert statistics is not None
    history = trainer.state.log_history[0]
    kept = ("loss", "grad_norm", "entropy", "kl", "clip_ratio/region_mean", "completions/mean_length")
    return {
        "gradient": gradient,
        "logprobs": statistics[0],
        "entropies": statistics[1],
        "log": {name: history[name] for name in kept if name in history},
        "gaps": list(trainer.gaps),
        "weights": list(trainer.weights),
    }


def samples() -> list[Any]:
    """Return samples of the support module with ids that no random numbers choose."""
    made = made_samples()
    for index, sample in enumerate(made):
        sample.prompt_ids[:] = [(7 * at + 31 * (index // 3)) % 1000 for at in range(len(sample.prompt_ids))]
        sample.completion_ids[:] = [(13 * at + 57 * index) % 1000 for at in range(len(sample.completion_ids))]
    return made


LOSSES: dict[str, dict[str, Any]] = {
    "grpo": {"loss": "grpo"},
    "dapo corrected": {"loss": "dapo", "correction": "token_truncate", "correction_max": 1.05},
    "reference": {"loss": "grpo", "beta": 0.04},
}
for loss_name in LOSSES:

    @case("trainer.grpo", loss_name)
    def _(name: str = loss_name) -> dict[str, Any]:
        return grpo_step(**LOSSES[name])


@case("trainer.grpo", "distilled")
def distilled() -> dict[str, Any]:
    """A step whose tokens have advantages from a teacher, and their groups' halved."""
    teacher, folder = load_model(speaking_base(), torch.float32), new_folder()
    with torch.no_grad():
        for parameter in teacher.parameters():
            parameter.mul_(1.1)
    teacher.save_pretrained(folder)
    return grpo_step(loss="dapo", teacher=folder, outcome_weight=0.5)


# --- blame ------------------------------------------------------------------------------------------------------------


@case("blame", "influence")
def influence_by_gradients() -> dict[str, Any]:
    """The held-out objective of a few rollouts, and the influence of sequences and a tree on it, by their gradients."""
    tasks = [f"t{n}" for n in range(6)]
    seen = blame.seen_tasks(tasks, 0.5)
    rollouts = [
        {"rollout_id": f"r{n}", "task_id": task, "checkpoint_role": "sft", "seed": 0, "decoding": "t1"}
        for n, task in enumerate(tasks)
    ]
    scores = [
        {"rollout_id": f"r{n}", "task_id": task, "reward": float(n % 2), "infrastructure_error": False}
        for n, task in enumerate(tasks)
    ]
    found = blame.advantages(from_rows("rollouts", rollouts), from_rows("scores", scores), "solved", 0, set(tasks))
    turns = [
        {"rollout_id": f"r{n}", "agent_id": "agent1", "turn": 0, "suffix_ids": [3, 4 + n], "output_ids": [5, 9 + n, 7]}
        for n in range(6)
    ]
    task_of = {row["rollout_id"]: row["task_id"] for row in rollouts}
    heldout = blame.heldout_sequences(from_rows("turns", turns), task_of, found, 100)
    folder = new_folder()
    limits = {"vocabulary": 64, "longest": 512}
    with one_thread():
        model = load_model(base(), torch.float32)
        assert refuses_trees(model) is None
        add_label_head(model)
        parts = [
            (sign, read_sequences([write(heldout.to_pylist(), folder / "heldout.parquet")], split, **limits))
            for split, sign in (("raised", 1.0), ("lowered", -1.0))
        ]
        objective = [(sign, influence.Rows.of(part, 256, 0, trees=True)) for sign, part in parts]
        direction = influence.gradient(model.eval(), objective)
        stored = read_sequences([write(rows(), folder / "sequences.parquet")], "train", **limits)
        training = influence.Rows.of(stored, 256, 0, trees=True)
        products = [
            influence.along(influence.gradient(model, [(1.0, training.only([n]))]), direction)
            for n in range(len(stored))
        ]
    return {"seen": sorted(seen), "advantages": found, "heldout": heldout, "influences": products}


# --- tables and bases -------------------------------------------------------------------------------------------------


@case("training", "tables")
def training_tables() -> dict[str, Any]:
    """Rows of checkpoints and logs of written reports, and curves of a log."""
    saved = SavedFigures(dtype="float32", compared_in="float32", changed_share=0.5, differing=())
    plan = PlanSummary(
        steps=2, sequences=3, epochs=1.0, weighted_rows=9.0, padding=0.1, shapes=((1, 128),), layout="rows", branches=3,
        layout_because="", step_weight=30.0, accumulate=2,
    )  # fmt: skip
    log = [
        SftLogLine(step=n, epoch=n / 2, loss=3.0 - n, val_loss=None, learning_rate=1e-3, tokens=64 * n, seconds=1.0)
        for n in (1, 2)
    ]
    seconds, device = PhaseSeconds(start=1.0, train=2.0, save=0.5), {"device": "cpu", "dtype": "fp32", "libraries": {}}
    step = LakeCheckpoint(
        checkpoint_id="c" * 8, adapter_hash="a" * 8, step=2, final=True, train_loss=1.0, val_loss=None
    )
    counted = FirstPass(complete=True, labels=9, labels_planned=9, tokens=64, tokens_planned=64)
    report = SftReport(
        checkpoints=(step,),
        reused=False,
        log=tuple(log),
        counted=counted,
        plan=plan,
        saved=saved,
        seconds=seconds,
        **device,
    )
    train = TrainSection(method="lora")
    request = sft.SftRequest(
        experiment="e", base_id="b", base_folder=Path("b"), seed=0, gpu=False, dtype="fp32", code="", files={},
        train=train, chat_template="t",
    )  # fmt: skip
    checkpoints = sft.checkpoint_rows(request, report, "v1")
    points = [{"step": n, "loss": 3.0 / n, "val_loss": 3.5 / n if n % 2 == 0 else None, "seed": 0} for n in range(1, 7)]
    return {
        "checkpoints": [{k: v for k, v in row.items() if k != "hyperparameters"} for row in checkpoints],
        "log": sft.log_rows(request, report),
        "curves": [str(curve) for curve in curves.curves(points)],
    }


@case("base", "shipped")
def shipped_bases() -> Any:
    return [recipe.model_dump(mode="json") for recipe in shipped()]


@case("base", "pointers")
def pointers() -> Any:
    """What a base of the hub points to, pinned to a commit and not."""
    bases = [BaseSection(kind="hub", repo="a/b", revision=revision) for revision in ("c" * 40, "main")]
    return [[found, check.passed] for found, check in map(pointer, bases)]
