"""Rollouts that fork, and rollouts of several agents: an update has the gradient of a loop over their turns."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from etpi_assets.training.forests import as_forest
from etpi_assets.trajectories.records import AgentRecord, RolloutRecord, Turn
from etpi_resources.trainers.policy_link import Sample
from etpi_resources.trainers.workers import grpo_worker, policy_trainer
from etpi_resources.trainers.workers.checkpointing import load_model
from etpi_resources.trainers.workers.device import Compute
from tests.support.agent_loop import SUBMITS, bash, roll, script
from tests.support.policy_updates import FixedLink, made_samples, worker_in
from tests.support.tiny_training import make_speaking_base

pytestmark = pytest.mark.slow
torch.set_num_threads(1)


@pytest.fixture(scope="module")
def bases(tmp_path_factory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("base")
    return {
        "dense": make_speaking_base(folder / "dense"), "hybrid": make_speaking_base(folder / "hybrid", hybrid=True)
    }  # fmt: skip


def stripped(sample: int) -> RolloutRecord:
    think = "<think>\nthoughts of {} about it\n</think>\n\n"
    one = [think.format(sample) + bash("ls"), think.format(2) + bash("cat a.txt"), think.format(3) + SUBMITS]
    two = [think.format(sample % 2) + bash("ls dir"), SUBMITS][sample % 3 == 0 :]
    return roll(script(agent1=one, agent2=two), history_think="strip")


def compacted(sample: int) -> RolloutRecord:
    lines = [bash(f"echo {n + sample}") for n in range(4 + sample % 2)]
    return roll(script(agent1=[*lines, SUBMITS], agent2=[*lines[:2], SUBMITS]), compact_after=2)


def synthetic(sample: int) -> RolloutRecord:
    """Turns that extend, fork from, repeat, or share nothing with earlier ones."""
    rng = np.random.default_rng(sample // 2)
    agents = []
    for number in range(1 + sample % 3):
        history, turns = rng.integers(0, 1000, 6).tolist(), []
        for turn in range(5):
            output = rng.integers(0, 1000, rng.integers(1, 7)).tolist()
            turns.append(Turn(turn, "", history, output, [-7.0] * len(output)))
            match rng.integers(0, 4):
                case 0:
                    history = [*history, *output, *rng.integers(0, 1000, 3).tolist()]
                case 1:
                    history = [*history, *output[: len(output) // 2], *rng.integers(0, 1000, 4).tolist()]
                case 2:
                    history = rng.integers(0, 1000, 4).tolist()
                case _:
                    pass  # the same prompt again
        agents.append(AgentRecord(f"a{number}", "f", "solo", "Submitted", turns))
    return RolloutRecord(f"r{sample}", "rl", "s", "t", "r", agents)


def cut_short(sample: int) -> RolloutRecord:
    """A second turn that keeps the beginning of a long first prompt, and is shorter than that prompt."""
    rng = np.random.default_rng(sample)
    first = rng.integers(0, 1000, 40).tolist()
    prompts = first, [*first[:10], *rng.integers(0, 1000, 4).tolist()]
    outputs = (rng.integers(0, 1000, 6).tolist() for _ in prompts)
    turns = [
        Turn(n, "", prompt, output, [-7.0] * 6) for n, (prompt, output) in enumerate(zip(prompts, outputs, strict=True))
    ]
    return RolloutRecord(f"r{sample}", "rl", "s", "t", "r", [AgentRecord("a", "f", "solo", "Submitted", turns)])


MAKERS = {"strip": stripped, "compact": compacted, "synthetic": synthetic, "cut_short": cut_short}


def samples_of(records: list[RolloutRecord]) -> list[Sample]:
    made = []
    for index, record in enumerate(records):
        for turn in (turn for agent in record.agents for turn in agent.turns):
            turn.logprobs = [-7.0] * len(turn.output_ids or [])
        forest = as_forest(record)
        advantage = (-1.0) ** index * (0.5 + 0.2 * index)
        own = [advantage * (1 + owner) for owner in forest.owners]
        made.append(
            Sample(
                forest.prompt, forest.completion, forest.mask, forest.logprobs, float(index), advantage,
                forks=forest.forks, advantages=own,
            )
        )  # fmt: skip
    return made


def loop_gradient(base: Path, records: list[RolloutRecord], samples: list[Sample], loss: str) -> dict:
    """Of -A log p, turn by turn, each in the prompt that the model read."""
    model, total = load_model(base, torch.float32), torch.zeros(())
    lengths = [sum(len(turn.output_ids or []) for agent in r.agents for turn in agent.turns) for r in records]
    for record, sample, length in zip(records, samples, lengths, strict=True):
        for number, agent in enumerate(record.agents):
            for turn in agent.turns:
                prompt, output = list(turn.prompt_ids or []), list(turn.output_ids or [])
                logp = (model(input_ids=torch.tensor([[*prompt, *output]])).logits[0] / 0.7).log_softmax(-1)
                own = sum(logp[len(prompt) + at - 1, token] for at, token in enumerate(output))
                by = {
                    "grpo": len(records) * length, "dapo": sum(lengths), "dr_grpo": len(records) * 256,
                    "bnpo": None,
                }[loss]  # fmt: skip
                total = total - sample.advantage * (1 + number) * own / by
    total.backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def update(folder: Path, base: Path, samples: list[Sample], **rl: Any) -> tuple[dict[str, torch.Tensor], Any]:
    """Return how one SGD step at a learning rate of 1 moves each parameter, and the trainer."""
    worker = worker_in(folder, base, **rl)
    model = load_model(base, torch.float32)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    trainer, engine = grpo_worker.build_trainer(worker, model, FixedLink(samples), compute=Compute(False, "fp32"))
    if engine:
        engine.close()
    trainer.train()
    return {name: before[name] - p.detach() for name, p in model.named_parameters()}, trainer


def difference(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    """Return the norm of the difference over that of the second."""
    flat = [torch.cat([x[name].flatten() for name in other]) for x in (one, other)]
    return float((flat[0] - flat[1]).norm() / flat[1].norm())


@pytest.mark.parametrize(
    ("kind", "model_kind", "loss"),
    [
        *((kind, model_kind, "grpo") for kind in MAKERS for model_kind in ("dense", "hybrid")),
        *(("cut_short", "dense", loss) for loss in ("dapo", "dr_grpo")),
    ],
)
def test_forked_rollouts_train_every_turn_once_where_it_was_generated(tmp_path, bases, kind, model_kind, loss):
    base = bases[model_kind]
    records = [MAKERS[kind](sample) for sample in range(8)]
    samples = samples_of(records)
    assert sum(len(sample.forks) for sample in samples) >= 8
    for record, sample in zip(records, samples, strict=True):
        assert sum(sample.mask) == sum(len(t.output_ids or []) for a in record.agents for t in a.turns)
    moved, trainer = update(tmp_path, base, samples, loss=loss)
    assert (trainer.no_trees is None) == (model_kind == "dense")
    assert difference(moved, loop_gradient(base, records, samples, loss)) < 1e-5
    assert sum(tokens for _, _, tokens, _ in trainer.gaps) == sum(sum(s.mask) for s in samples)


@pytest.mark.parametrize("model_kind", ["dense", "hybrid"])
@pytest.mark.parametrize(
    "objective", [{}, {"beta": 0.1}, {"entropy_coef": 0.1}, {"iterations": 2, "steps": 2}], ids=str
)
def test_pass_in_parts_has_the_update_of_the_whole_pass(tmp_path, bases, model_kind, objective):
    samples = samples_of([synthetic(sample) for sample in range(8)])
    updates = []
    for most in (None, 60):
        folder = tmp_path / str(most)
        folder.mkdir()
        updates.append(update(folder, bases[model_kind], samples, loss="dapo", pass_tokens=most, **objective)[0])
    assert difference(*updates) < 1e-5


@pytest.mark.parametrize("loss", ["grpo", "dapo", "dr_grpo"])
def test_rollout_that_is_left_out_changes_nothing(tmp_path, bases, loss):
    samples = samples_of([stripped(sample) for sample in range(8)])
    out = Sample([5], [5], [0], [0.0], 0.0, 0.0, left_out="broken")
    both = []
    for name, some, batch in (("left_out", [*samples[:4], out, *samples[4:7]], 4), ("kept", samples[:7], 7)):
        folder = tmp_path / name
        folder.mkdir()
        group = {"group_size": 7, "accumulate": 1, "device_batch": 7} if batch == 7 else {}
        both.append(update(folder, bases["dense"], some, loss=loss, **group)[0])
    assert difference(*both) < 1e-5


OBJECTIVES: list[dict[str, Any]] = [
    {"loss": "cispo", "clip_high": 5.0}, {"loss": "sapo"}, {"delta": 1.5}, {"importance_sampling_level": "sequence"},
    {"entropy_coef": 0.3}, {"top_entropy_quantile": 0.5}, {"off_policy_mask_threshold": 0.1},
    {"correction": "token_truncate", "correction_min": 0.5, "correction_max": 0.9},
    {"correction": "token_mask", "correction_min": 0.5, "correction_max": 0.9},
    {"beta": 0.2, "use_bias_correction_kl": False},
]  # fmt: skip


@pytest.mark.parametrize("objective", OBJECTIVES, ids=str)
def test_objective_of_trees_is_that_of_rows(tmp_path, bases, objective, monkeypatch):
    """TRL computes the rows of rollouts that do not fork; of one update, and of a second on the same rollouts."""
    samples = made_samples()
    updates = []
    for trees in (True, False):
        folder = tmp_path / str(trees)
        folder.mkdir()
        if not trees:
            monkeypatch.setattr(policy_trainer, "refuses_trees", lambda model: "rows")
        updates.append(
            update(folder, bases["dense"], samples, **{"iterations": 2, "steps": 2, "learning_rate": 0.3, **objective})
        )
    (moved, trainer), (rows, _) = updates
    assert trainer.no_trees is None and difference(moved, rows) < 1e-4
