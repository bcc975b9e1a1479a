"""Reinforcement through the real trainer: its gradient is the definition's, rollouts are kept, a killed run goes on."""

from __future__ import annotations

import json
import shutil
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from etpi_assets.checks import CHECKS
from etpi_assets.graph import GRAPH
from etpi_assets.specs.training import RLSection
from etpi_assets.tasks.family import RejectedInput
from etpi_assets.training import assets, grpo
from etpi_assets.trajectories.records import AgentRecord, RolloutRecord, Turn
from etpi_resources.chat.format import load_chat_format
from etpi_resources.engines.slots import Slots
from etpi_resources.lake.catalog import build, connect
from etpi_resources.lake.lake import Lake, folder_hash
from etpi_resources.trainers.contracts import PublishConfig
from etpi_resources.trainers.policy_link import Sample
from etpi_resources.trainers.workers import grpo_worker, hand_over, policy_trainer
from etpi_resources.trainers.workers.checkpointing import load_model
from etpi_resources.trainers.workers.device import Compute
from tests.support.policy_updates import FixedLink, made_samples, worker_in
from tests.support.reinforcement import kill_when, make, own_statistics, prepared, rows
from tests.support.tiny_training import make_speaking_base

pytestmark = pytest.mark.slow
torch.set_num_threads(1)


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    return make_speaking_base(tmp_path_factory.mktemp("base"))


def catalog_of(lake: Lake, path: Path):
    return connect(build(lake, GRAPH.values(), path))


def test_every_rollout_is_recorded_and_in_the_checkpoint_s_lineage(tmp_path, base, monkeypatch):
    lake, rejected = prepared(tmp_path, base), RejectedInput("unproved", "reference_fails", "x")
    monkeypatch.setattr(assets.Proving, "_outcomes", lambda self: iter([rejected, *self.offered]))
    outcome = make(tmp_path, lake, "rl_checkpoint")
    assert not outcome.manifest.blocked, outcome.manifest.failures
    assert [(r["asset"], r["source"]) for r in rows(lake, "quarantined")] == [("rl_checkpoint", "unproved")]
    (figures,) = [check["figures"] for check in outcome.manifest.checks if check["name"] == "prompts_fit"]
    assert (figures["tasks"], figures["quarantined"], figures["found"]) == (8, 1, 9)
    assert [check["name"] for check in outcome.manifest.checks] == list(CHECKS["rl_checkpoint"])
    checkpoints = rows(lake, "checkpoints")
    assert [(r["role"], r["step"], r["final"]) for r in checkpoints] == [("rl", 2, False), ("rl", 4, True)]
    assert {r["parent_id"] for r in checkpoints} == {folder_hash(base)}
    samples, log = rows(lake, "rl_samples"), rows(lake, "training_log")
    assert [(r["step"], r["place"]) for r in samples] == [(s, p) for s in range(4) for p in range(8)]
    assert {r["origin"] for r in rows(lake, "rollouts")} == {"rl"} and len(rows(lake, "rewards")) == 64
    assert [line["step"] for line in log] == [1, 2, 3, 4]
    for line in log:
        mine = [r for r in samples if r["step"] == line["step"] - 1]
        assert line["reward"] == pytest.approx(sum(r["reward"] for r in mine) / 8)
        assert line["parsed"] == sum(r["parsed"] for r in mine) / 8
        assert line["logprob_gap"] < 1e-4 and line["entropy"] > 0 and line["clip_share"] == 0
        assert line["staleness"] == 0 and 0 <= line["constant_groups"] < 1
    assert not list(lake.scratch("reinforce").iterdir()), "what the trainer left behind must be gone"
    own_statistics(lake)
    at_start = [r for r in samples if r["step"] == 0]
    after_two = [r for r in samples if r["step"] == 2]
    by_weights(lake, base, at_start)
    by_weights(lake, lake.checkpoint_dir(checkpoints[0]["checkpoint_id"]), after_two)

    again = make(tmp_path, lake, "rl_rewards")
    assert all(c["passed"] for c in again.manifest.checks)
    assert [r["value"] for r in rows(lake, "rewards", "rl_rewards")] == [r["value"] for r in rows(lake, "rewards")]

    with catalog_of(lake, tmp_path / "etpi.duckdb") as catalog:
        final = checkpoints[1]["checkpoint_id"]
        query = "SELECT rollout_id, task_id, weight, origin, turn FROM lineage WHERE checkpoint_id = ? ORDER BY ALL"
        result = catalog.execute(query, [final]).fetchall()
        expected = sorted((r["rollout_id"], r["task_id"], r["advantage"], "rl", 0) for r in samples)
        assert result == expected
        counts = "SELECT count(*) FROM {} WHERE origin = 'rl' AND experiment = 'first'"
        for view, n in (("rollouts", 32), ("turns", 32), ("agents", 32), ("full_turns", 32), ("messages", 128)):
            assert catalog.execute(counts.format(view)).fetchone() == (n,), view
        early = "SELECT count(*) FROM lineage WHERE checkpoint_id = ?"
        assert catalog.execute(early, [checkpoints[0]["checkpoint_id"]]).fetchone() == (16,)

    # Another experiment that asks for the same trains nothing, and has rollouts of its own.
    prepared(tmp_path, base, "second")
    monkeypatch.setattr(assets.grpo, "run_worker", lambda *a, **k: pytest.fail("trained again"))
    make(tmp_path, lake, "rl_checkpoint", "second")
    theirs = rows(lake, "rl_samples", name="second")
    assert [r["advantage"] for r in theirs] == [r["advantage"] for r in samples]
    assert not {r["rollout_id"] for r in theirs} & {r["rollout_id"] for r in samples}


def by_weights(lake: Lake, folder: Path, samples: list[dict]) -> None:
    """Assert that the statistics of these samples are those of the checkpoint in `folder`, in a pass of their own."""
    model = load_model(folder, torch.float32)
    turns = {turn["rollout_id"]: turn for turn in rows(lake, "turns")}
    for sample in samples:
        turn = turns[sample["rollout_id"]]
        own = Sample(turn["suffix_ids"], turn["output_ids"], [1] * len(turn["output_ids"]), turn["logprobs"], 0.0, 0.0)
        logprobs, entropies = naive_statistics(model, own, 0.9)
        assert sample["policy_logprobs"] == pytest.approx(logprobs.tolist(), abs=1e-4)
        assert sample["entropies"] == pytest.approx(entropies.tolist(), abs=1e-4)


def test_hybrid_policy_generates_with_the_trainer_s_log_probs(tmp_path):
    """Its recurrent layers, read a token at a time while rolling out and a whole row at once in the update, agree."""
    lake = prepared(tmp_path, make_speaking_base(tmp_path / "base", hybrid=True), steps="2", save_steps="2")
    outcome = make(tmp_path, lake, "rl_checkpoint")
    assert not outcome.manifest.blocked, outcome.manifest.failures
    log = rows(lake, "training_log")
    assert [line["step"] for line in log] == [1, 2] and len(rows(lake, "rl_samples")) == 16
    assert all(line["logprob_gap_max"] < 1e-3 and line["entropy"] > 0 for line in log)
    own_statistics(lake)
    (final,) = rows(lake, "checkpoints")
    assert "linear_attention" in (lake.checkpoint_dir(final["checkpoint_id"]) / "config.json").read_text()


def test_killed_run_resumes_from_its_last_checkpoint(tmp_path, base):
    """SIGKILL to the whole run after its third checkpoint: no step is missing or doubled afterwards."""
    lake = prepared(tmp_path, base, steps="20", device_batch="4")
    kill_when(tmp_path, lambda: list(tmp_path.glob("data/scratch/reinforce/*/trl/checkpoint-6/whole")))
    [staging] = tmp_path.glob("data/scratch/reinforce/*")
    log, size = staging / "metrics.jsonl", -1
    while size != log.stat().st_size:  # the supervisor ends the worker, which may have been within a step
        size = log.stat().st_size
        time.sleep(1.5)
    [kept] = tmp_path.glob("data/checkpoints/rounds/*")
    before = {path.name: path.read_bytes() for path in sorted(kept.iterdir())}
    resumed_at = grpo_worker.last_complete_step(staging)
    assert resumed_at and resumed_at >= 6 and not (staging / "result.json").exists()

    outcome = make(tmp_path, lake, "rl_checkpoint")
    assert not outcome.manifest.blocked, outcome.manifest.failures
    assert outcome.metadata["seed 0"]["resumed from step"] == resumed_at
    assert [line["step"] for line in rows(lake, "training_log")] == list(range(1, 21))
    assert [r["step"] for r in rows(lake, "checkpoints")] == list(range(2, 21, 2))
    after = {path.name: path.read_bytes() for path in sorted(kept.iterdir())}
    assert list(after) == [f"round-{step:06d}.{of}" for step in range(20) for of in ("jsonl", "tokens")]
    early = [name for name in before if name < f"round-{resumed_at:06d}"]
    assert len(early) == 2 * resumed_at and all(after[name] == before[name] for name in early)


# --- the gradient ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("hybrid", [False, True], ids=["dense", "hybrid"])
@pytest.mark.parametrize("tuning", ["full", "lora"])
def test_policy_in_16_bits_trains_against_its_reference(tmp_path, base, tuning, hybrid):
    """Autocast to bfloat16 as on a GPU; a CPU's own training is in float32."""
    start = make_speaking_base(tmp_path / "hybrid", hybrid=True) if hybrid else base
    moved = {}
    for dtype in ("bf16", "fp32"):
        rate = 1e-3 if tuning == "full" else 0.3
        worker = worker_in(tmp_path, start, beta=0.04, tuning=tuning, steps=2, dtype=dtype, learning_rate=rate)
        trainer, engine = grpo_worker.build_trainer(
            worker, load_model(start, torch.float32), FixedLink(made_samples()), compute=Compute(False, dtype)
        )
        policy: Any = trainer.model
        before = {name: p.detach().clone() for name, p in policy.named_parameters() if p.requires_grad}
        try:
            assert isinstance(engine._slots, Slots), "a wrapper of 16 bits must not cost the engine its cache"
            trainer.train()
        finally:
            engine.close()
        after = dict(policy.named_parameters())
        moved[dtype] = torch.cat([(after[name].detach() - old).flatten() for name, old in before.items()])
        kl = [line["kl"] for line in trainer.state.log_history[:2]]
        assert kl[0] == pytest.approx(0.0, abs=1e-2) and kl[1] > kl[0]
    assert {p.dtype for p in after.values()} == {torch.float32}
    assert 0 < (moved["bf16"] - moved["fp32"]).norm() < 0.1 * moved["fp32"].norm()


def test_no_row_of_any_pass_has_more_samples_than_the_device_batch(tmp_path, base, monkeypatch):
    """Passes of the reference and of the old log-probs score a whole round, of 8 samples here."""
    packed, pack = [], policy_trainer.pack_samples
    monkeypatch.setattr(
        policy_trainer, "pack_samples", lambda samples, *rest: (packed.append(len(samples)), pack(samples, *rest))[1]
    )
    worker = worker_in(tmp_path, base, beta=0.04, iterations=2, steps=2)
    trainer, engine = grpo_worker.build_trainer(
        worker, load_model(base, torch.float32), FixedLink(made_samples()), compute=Compute(False, "fp32")
    )
    engine.close()
    trainer.train()
    assert set(packed) == {4} and len(packed) == 8, "two of each model for the round, two for each update"


def naive_statistics(model, sample: Sample, temperature: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probs and entropies of a sample's own ids, each (n,)."""
    with torch.no_grad():
        ids = torch.tensor([[*sample.prompt_ids, *sample.completion_ids]])
        logp = (model(input_ids=ids).logits[0] / temperature).log_softmax(-1)
    logp = logp[len(sample.prompt_ids) - 1 : -1][torch.tensor(sample.mask).bool()]
    own = torch.tensor(sample.completion_ids)[torch.tensor(sample.mask).bool()]
    return logp.gather(1, own[:, None])[:, 0], -(logp.exp() * logp).sum(-1)


def naive_gradient(
    base: Path, samples: list[Sample], temperature: float, loss: str, weights: list[torch.Tensor] | None = None
) -> dict[str, torch.Tensor]:
    """Of -A log p, a loop over rollouts and tokens: mean of a sequence then of sequences, or mean over all tokens. Each
    token counts by its weight, if there are any."""
    model = load_model(base, torch.float32)
    total = torch.zeros(())
    tokens = sum(sum(s.mask) for s in samples)
    for number, s in enumerate(samples):
        logits = model(input_ids=torch.tensor([[*s.prompt_ids, *s.completion_ids]])).logits[0] / temperature
        logp = logits.log_softmax(-1)
        counted = [(at, token) for at, token in enumerate(s.completion_ids) if s.mask[at] == 1]
        factors = weights[number] if weights else torch.ones(len(counted))
        own = sum(w * logp[len(s.prompt_ids) + at - 1, token] for w, (at, token) in zip(factors, counted, strict=True))
        total = total - s.advantage * own / (tokens if loss == "dapo" else len(samples) * sum(s.mask))
    total.backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("loss", ["grpo", "dapo"])
def test_one_step_is_the_policy_gradient_of_the_advantages(tmp_path, base, loss):
    worker, samples = worker_in(tmp_path, base, loss=loss), made_samples()
    model = load_model(base, torch.float32)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    trainer, engine = grpo_worker.build_trainer(worker, model, FixedLink(samples), compute=Compute(False, "fp32"))
    try:
        trainer.train()
    finally:
        engine.close()
    assert trainer.no_trees is None, "the update is over trees"
    wanted = naive_gradient(base, samples, 0.7, loss)
    moved = {name: before[name] - p.detach() for name, p in model.named_parameters()}
    flat = [torch.cat([x[name].flatten() for name in wanted]) for x in (moved, wanted)]
    assert float((flat[0] - flat[1]).norm() / flat[1].norm()) < 1e-4
    # What was read carries no loss: the gap counts the policy's own ids alone.
    assert sum(tokens for _, _, tokens, _ in trainer.gaps) == sum(sum(s.mask) for s in samples)


@pytest.mark.parametrize("outcome_weight", [0.0, 0.5])
def test_distillation_weights_the_gradient_of_each_token_by_the_teacher(tmp_path, base, outcome_weight):
    samples, scorer = made_samples(), load_model(base, torch.float32)
    samples[5] = Sample([5], [5], [0], [0.0], 0.0, 0.0, left_out="truncated")
    with torch.no_grad():
        for parameter in scorer.parameters():
            parameter.mul_(1.1)
    scorer.save_pretrained(tmp_path / "teacher")
    trained = [s for s in samples if not s.left_out]
    scores = [naive_statistics(scorer, sample, 0.7)[0] for sample in trained]
    weights = [own + 7.0 + outcome_weight * s.advantage for own, s in zip(scores, trained, strict=True)]
    worker = worker_in(tmp_path, base, teacher=tmp_path / "teacher", loss="dapo", outcome_weight=outcome_weight)
    model = load_model(base, torch.float32)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    trainer, engine = grpo_worker.build_trainer(worker, model, FixedLink(samples), compute=Compute(False, "fp32"))
    engine.close()
    trainer.train()
    assert trainer.no_trees is None, "the teacher scores trees too"
    wanted = naive_gradient(base, [replace(s, advantage=1.0) for s in trained], 0.7, "dapo", weights)
    moved = {name: before[name] - p.detach() for name, p in model.named_parameters()}
    flat = [torch.cat([x[name].flatten() for name in wanted]) for x in (moved, wanted)]
    assert float((flat[0] - flat[1]).norm() / flat[1].norm()) < 1e-4
    kept = trainer.statistics.take()[2]
    assert kept == pytest.approx(torch.cat(scores).numpy(), abs=1e-4)
    ((gap, tokens),) = trainer.teacher_gaps
    assert gap / tokens == pytest.approx(float(-(torch.cat(scores) + 7).mean()), abs=1e-3)
    assert trainer.seconds["teacher"] > 0


@pytest.mark.parametrize(("rewards_of_agents", "wanted"), [([], 0.5 * 2.0), ([1.0, 5.0], 0.5 * (1.0 + 2 * 5.0) / 3)])
def test_recorded_advantage_of_tokens_is_the_mean_of_those_that_trained(rewards_of_agents, wanted):
    section = RLSection.model_validate(
        {"method": "opd", "teacher": "checkpoint:t", "suite": "s", "distil_weight": 3.0, "outcome_weight": 0.5,
         "rewards": [{"function": "outcome"}]}
    )  # fmt: skip
    sample: Any = SimpleNamespace(advantage=2.0, agent_advantages=rewards_of_agents, agent_tokens=[1, 2])
    agents = [
        AgentRecord(name, "", "solo", "Submitted", [Turn(0, "", [1], [2] * len(logprobs), logprobs)])
        for name, logprobs in {"agent1": [-1.0], "agent2": [-2.0, -3.0]}.items()
    ]
    record = RolloutRecord("r", "rl", "s", "t", "repo", agents)
    teacher = np.array([-1.0, -1.0, -1.0], dtype="<f4")
    assert grpo.token_advantage(section, sample, record, teacher) == pytest.approx(3.0 * (2.0 - 1.0) + wanted)


@pytest.mark.parametrize("correction", ["token_truncate", "token_mask", "sequence_truncate", "sequence_mask"])
def test_correction_weights_the_gradient_of_each_token(tmp_path, base, correction):
    worker = worker_in(tmp_path, base, loss="dapo", correction=correction, correction_max=1.05)
    model, samples, weights = load_model(base, torch.float32), [], []
    noise, average, over = torch.Generator().manual_seed(1), *correction.split("_")
    for sample in made_samples():
        own, _ = naive_statistics(model, sample, 0.7)
        apart = 0.1 * torch.randn(len(own), generator=noise)
        ratio = (apart.sum().expand_as(apart) if average == "sequence" else apart).exp()
        weights.append(ratio.clamp(max=1.05) if over == "truncate" else torch.where(ratio > 1.05, 0.0, ratio))
        sampled = torch.zeros(len(sample.mask))
        sampled[torch.tensor(sample.mask).bool()] = own - apart
        samples.append(replace(sample, logprobs=sampled.tolist()))
    wanted = naive_gradient(base, samples, 0.7, "dapo", weights)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    trainer, engine = grpo_worker.build_trainer(worker, model, FixedLink(samples), compute=Compute(False, "fp32"))
    trainer.train()
    moved = {name: before[name] - p.detach() for name, p in model.named_parameters()}
    flat = [torch.cat([x[name].flatten() for name in wanted]) for x in (moved, wanted)]
    difference = float((flat[0] - flat[1]).norm() / flat[1].norm())
    print(f"{correction}: {difference:.1e} of the loop's gradient")
    assert difference < 2e-6
    total, above, tokens = (sum(column) for column in zip(*trainer.weights, strict=True))
    assert total == pytest.approx(float(torch.cat(weights).sum()), rel=1e-4) and 0 < above < tokens


@pytest.mark.parametrize("layout", ["trees", "rows"])
def test_statistics_are_of_the_policy_before_the_first_update_in_the_order_of_the_round(tmp_path, base, layout):
    samples = made_samples()
    samples[5] = Sample([5], [5], [0], [0.0], 0.0, 0.0, left_out="truncated")
    worker = worker_in(tmp_path, base, steps=2, iterations=2)
    model = load_model(base, torch.float32)
    compute = Compute(gpu=False, dtype="fp32")
    trainer, engine = grpo_worker.build_trainer(worker, model, FixedLink(samples), compute=compute)
    assert trainer.no_trees is None
    trainer.no_trees = None if layout == "trees" else "the test wants rows"
    try:
        trainer.train()
    finally:
        engine.close()
    statistics = trainer.statistics.take()
    assert len(statistics) == 2 and trainer.statistics.take() is None
    before = load_model(base, torch.float32)
    wanted = [naive_statistics(before, sample, 0.7) for sample in samples if not sample.left_out]
    for place, found in enumerate(statistics):
        expected = torch.cat([of_sample[place] for of_sample in wanted]).numpy()
        assert np.allclose(found, expected, atol=1e-4)


def test_rollout_that_ends_its_turn_is_not_truncated_whatever_ends_the_tokenizer_s_text(tmp_path, base):
    start, end = tmp_path / "base", load_chat_format("tiny").end_id
    shutil.copytree(base, start)
    file = start / "tokenizer_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"eos_token": "<|endoftext|>"}))
    samples = [replace(sample, completion_ids=[*sample.completion_ids[:-1], end]) for sample in made_samples()]
    samples[0] = replace(samples[0], completion_ids=[*samples[0].completion_ids[:-1], 999])
    worker = worker_in(tmp_path, start)
    worker.config = worker.config.model_copy(update={"end_ids": (end,)})
    model = load_model(start, torch.float32)
    link = FixedLink(samples)
    trainer, engine = grpo_worker.build_trainer(worker, model, link, compute=Compute(False, "fp32"))
    engine.close()
    grpo_worker.add_log(worker, trainer, link)
    trainer.train()
    assert trainer.state.log_history[0]["completions/clipped_ratio"] == 1 / 8


def test_run_is_resumed_between_rounds_alone(tmp_path, base):
    worker, link = worker_in(tmp_path, base, steps=6, iterations=2, save_steps=5), FixedLink(made_samples())
    model = load_model(base, torch.float32)
    trainer, engine = grpo_worker.build_trainer(worker, model, link, compute=Compute(False, "fp32"))
    engine.close()
    grpo_worker.add_log(worker, trainer, link)
    trainer.train()
    assert grpo_worker.last_complete_step(tmp_path) == 4
    assert [path.name for path in sorted(tmp_path.glob("step-*"))] == ["step-5", "step-6"]


class RowsLink(FixedLink):
    """Records the rows of each round, and stops the run before the round of step `until`."""

    def __init__(self, until: int | None = None) -> None:
        super().__init__(made_samples())
        self.until, self.rows = until, dict[int, list[int]]()

    def roll_out(self, step, rows, engine, later=None) -> list[Sample]:
        if step == self.until:
            raise KeyboardInterrupt
        self.rows[step] = list(rows)
        return self.samples


@pytest.mark.parametrize(("iterations", "resumed_at"), [(1, 6), (2, 12)])
def test_resumed_run_trains_on_the_tasks_of_an_uncut_run(tmp_path, base, iterations, resumed_at):
    """Over three epochs of 8 tasks, two a round; resumed within the second, also where a round has two steps."""

    def trained_on(folder: Path, link: RowsLink, resume: int | None = None) -> dict[int, list[int]]:
        folder.mkdir(exist_ok=True)
        worker = worker_in(
            folder, base, resume=resume, steps=12 * iterations, iterations=iterations, learning_rate=0.01
        )
        model = load_model(base, torch.float32)
        trainer, engine = grpo_worker.build_trainer(worker, model, link, compute=Compute(False, "fp32"))
        engine.close()
        grpo_worker.add_log(worker, trainer, link)
        with suppress(KeyboardInterrupt):
            trainer.train(resume_from_checkpoint=grpo_worker.resume_folder(worker))
        return link.rows

    uncut = trained_on(tmp_path / "uncut", RowsLink())
    assert len(uncut) == 12 and len(set(map(tuple, uncut.values()))) > 4, "each epoch has its own order"
    begun = trained_on(tmp_path / "killed", RowsLink(until=resumed_at))
    assert grpo_worker.last_complete_step(tmp_path / "killed") == resumed_at
    assert begun | trained_on(tmp_path / "killed", RowsLink(), resumed_at) == uncut


def test_log_probs_of_another_policy_stop_the_update_if_there_is_a_bound(tmp_path, base):
    worker, model = worker_in(tmp_path, base, accumulate=4), load_model(base, torch.float32)
    link, compute = FixedLink(made_samples(16)), Compute(gpu=False, dtype="fp32")
    trainer, engine = grpo_worker.build_trainer(worker, model, link, compute=compute)
    trainer.largest_gap = 0.1
    trainer._bound_gap(12.0, 12)  # one odd token of a short rollout
    trainer._bound_gap(1.0, 300)
    with pytest.raises(RuntimeError, match="nan nats"):
        trainer._bound_gap(float("nan"), 12)
    try:
        with pytest.raises(RuntimeError, match=r"step 0: .*log-probs"):
            trainer.train()
    finally:
        engine.close()
    assert trainer.state.global_step == 0


def test_every_rank_frees_its_memory_before_servers_wake(tmp_path, base, monkeypatch):
    worker, events = worker_in(tmp_path, base, engine="vllm"), []
    publish = PublishConfig(folder=str(tmp_path), probe=(1, 2), bound=1.0)
    worker.config = worker.config.model_copy(update={"publish": publish})
    link = SimpleNamespace(roll_out=lambda *_: events.append("servers wake"), publish_seconds=0.0)
    model = load_model(base, torch.float32)
    trainer, _ = grpo_worker.build_trainer(worker, model, link, compute=Compute(gpu=True, dtype="fp32"))
    monkeypatch.setattr(hand_over.Publisher, "publish", lambda *_: events.append("published"))
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: events.append("freed"))
    monkeypatch.setattr(trainer.accelerator, "wait_for_everyone", lambda: events.append("all ranks"))
    trainer._roll_out(0, range(8))
    assert events == ["published", "freed", "all ranks", "servers wake"]


def test_full_size_spec_gives_valid_trainer_arguments(tmp_path):
    """The full-size spec, as far as this machine goes: it resolves, and TRL takes its arguments."""
    from etpi_assets.specs.load import load_specs

    rl = load_specs().experiments["terminal_grpo_0_8b"].rl
    arguments = grpo_worker.trainer_arguments(grpo.settings(rl), tmp_path, 0, Compute(gpu=False, dtype="bf16"))
    assert (arguments.num_generations, arguments.learning_rate, arguments.max_steps) == (4, 5e-6, 200)
    assert (arguments.per_device_train_batch_size, arguments.gradient_accumulation_steps) == (4, 2)
    assert (arguments.warmup_steps, arguments.optim, arguments.beta) == (10, "paged_adamw_32bit", 0.04)
    assert (arguments.loss_type, arguments.temperature, arguments.max_completion_length) == ("grpo", 0.9, 256)
