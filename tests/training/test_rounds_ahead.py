"""Rollouts a round ahead: they run while the trainer trains, and each turn keeps the version of its weights."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from etpi_assets.graph import GRAPH
from etpi_assets.specs.training import RLSection
from etpi_resources.engines import Completion, Engine, Request, Sampler
from etpi_resources.lake import catalog
from etpi_resources.trainers.policy_link import PolicyServer, Published, Sample, connect
from etpi_resources.trainers.workers import grpo_worker
from etpi_resources.trainers.workers.checkpointing import load_model
from etpi_resources.trainers.workers.device import Compute
from tests.support.policy_updates import FixedLink, made_samples, worker_in
from tests.support.reinforcement import kill_when, make, prepared, rows
from tests.support.tiny_training import make_speaking_base

torch.set_num_threads(1)
CORRECTED = {"correction": '"token_truncate"'}
LONG = {
    "agent": '{prompt = "terminal_tiny", max_steps = 4, max_tokens = 12, temperature = 0.9}',
    "max_response_tokens": "900",
    # Varies with every token: turns of an untrained policy are almost all as long as they may be.
    "rewards": '[{function = "conciseness_unhardened", params = {free = 0, scale = 1000}}]',
}


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    return make_speaking_base(tmp_path_factory.mktemp("base"))


# --- the link --------------------------------------------------------------------------------------------------------


class Weights:
    """Servers whose weights are published; a turn takes until the event of its rollout's turn is set."""

    name = "servers"

    def __init__(self) -> None:
        self.loaded: list[int] = []
        self.running = 0

    @contextmanager
    def generating(self, step: int, published: Published) -> Iterator[Weights]:
        assert not self.running, "weights change while a turn is generated"
        self.loaded.append(step)
        yield self

    def complete(self, requests: Sequence[Request]) -> list[Completion]:
        self.running += 1
        time.sleep(0.01)
        self.running -= 1
        return [Completion([1], [2], [0.0], "", "stop", self.name) for _ in requests]

    def fingerprint(self):
        return {}

    def close(self) -> None: ...


def turn(engine: Engine) -> int | None:
    [completion] = engine.complete([Request("r/0", "r", [1], (), Sampler())])
    return completion.version


@pytest.mark.parametrize("continues", [False, True])
def test_turns_continue_under_new_weights_or_finish_with_those_that_began(continues):
    first_turn, second_turn, versions = threading.Event(), threading.Event(), dict[int, list[int | None]]()

    def roll_out(step: int, rows: Sequence[int], engine: Engine) -> list[Sample]:
        versions[step] = [turn(engine)]
        if step == 1:
            first_turn.set()
            second_turn.wait(0.5 if not continues else 20)
        if step == 2:
            second_turn.set()
        versions[step].append(turn(engine))
        return [Sample([1], [2], [1], [0.0], 0.0, 0.0)]

    weights, published = Weights(), Published("/nowhere", False, ())
    with (
        PolicyServer(roll_out, "policy", None, weights.generating, 1, continues) as server,
        connect(str(server.path)) as client,
    ):
        client.roll_out(0, [0], published, {1: [0]})
        first_turn.wait(20)
        client.roll_out(1, [0], published, {2: [0]})
        client.roll_out(2, [0], published)
    assert versions[0] == [0, 0] and versions[2][0] == 1
    assert versions[1] == ([0, 1] if continues else [0, 0])
    assert weights.loaded == [0, 1], "weights are loaded once, also for two rounds"


def test_weights_never_change_within_a_turn_nor_to_older_ones():
    def roll_out(step: int, rows: Sequence[int], engine: Engine) -> list[Sample]:
        with ThreadPoolExecutor(8) as pool:
            seen = list(pool.map(lambda row: [turn(engine) or 0 for _ in range(4)], rows))
        assert all(turns == sorted(turns) for turns in seen)
        oldest = min(min(turns) for turns in seen)
        return [Sample([1], [2], [1], [0.0], 0.0, 0.0, version=oldest)]

    weights, ahead, last = Weights(), 3, 12
    with (
        PolicyServer(roll_out, "policy", None, weights.generating, ahead, True) as server,
        connect(str(server.path)) as client,
    ):
        for step in range(last):
            later = {first: range(8) for first in range(step + 1, min(last, step + ahead + 1))}
            [sample] = client.roll_out(step, range(8), Published("/nowhere", False, ()), later)
            assert step - ahead <= (sample.version or 0) <= step
    assert weights.loaded == sorted(set(weights.loaded))


def test_round_ahead_that_fails_stops_the_trainer_at_that_round():
    def roll_out(step: int, rows: Sequence[int], engine: Engine) -> list[Sample]:
        if step == 1:
            raise ValueError("row 7 has no reward")
        return [Sample([1], [2], [1], [0.0], 0.0, 0.0)]

    weights, published = Weights(), Published("/nowhere", False, ())
    with (
        PolicyServer(roll_out, "policy", None, weights.generating, 1) as server,
        connect(str(server.path)) as client,
    ):
        assert len(client.roll_out(0, [0], published, {1: [7]})) == 1
        with pytest.raises(ConnectionError, match="step 1 .*row 7 has no reward"):
            client.roll_out(1, [7], published, {2: [0]})


@pytest.mark.parametrize(
    ("change", "needs"),
    [
        ({"correction": "none"}, "rl.correction"),
        ({"engine": "vllm", "placement": "shared"}, "rl.placement"),
        ({"repeatable": True}, "rl.repeatable"),
        ({"method": "opd", "teacher": "checkpoint:t"}, "rl.method"),
    ],
)
def test_settings_that_need_fresh_rollouts_refuse_a_round_ahead(change, needs):
    section = {"method": "grpo", "suite": "s", "rewards": [{"function": "outcome"}], "correction": "token_mask"}
    assert RLSection.model_validate({**section, "ahead": 2}).ahead == 2
    assert RLSection.model_validate({**section, **change}).ahead == 0
    with pytest.raises(ValueError, match=f"rl.ahead = 1 .*{needs}"):
        RLSection.model_validate({**section, **change, "ahead": 1})


# --- the trainer -----------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_rows_ahead_are_those_that_the_trainer_comes_to(tmp_path, base):
    """Over three epochs of 8 tasks, two a round."""
    worker = worker_in(tmp_path, base, steps=12)
    model = load_model(base, torch.float32)
    trainer, engine = grpo_worker.build_trainer(
        worker, model, FixedLink(made_samples()), compute=Compute(False, "fp32")
    )
    engine.close()
    seen, rollouts = [], trainer._rollouts
    trainer.rollout_func = lambda prompts, own: (seen.append([int(p) for p in prompts]), rollouts(prompts, own))[1]
    trainer.train()
    assert seen == [trainer.rows[step] for step in range(12)] and len(set(map(tuple, seen))) > 4


class Waiting:
    """Rolls out one turn a row through the policy; an update waits until the next round is done."""

    def __init__(self) -> None:
        self.done: dict[int, threading.Event] = {step: threading.Event() for step in range(4)}
        self.rounds: dict[int, list[Sample]] = {}

    def __call__(self, step: int, rows: Sequence[int], engine: Engine) -> list[Sample]:
        requests = [
            Request(f"{step}/{place}", f"{step}/{place}", [5 + row, 6], (), Sampler(0.7, max_tokens=9))
            for place, row in enumerate(rows)
        ]
        self.rounds[step] = [
            Sample(c.prompt_ids or (), c.output_ids or (), [1] * len(c.output_ids or ()), c.logprobs or (), 0.0,
                   (-1.0) ** place, version=c.version)
            for place, c in enumerate(engine.complete(requests))
        ]  # fmt: skip
        self.done[step].set()
        return self.rounds[step]


@pytest.mark.slow
@pytest.mark.parametrize("tuning", ["full", "lora"])
def test_next_round_ends_before_the_update_and_is_corrected_by_the_ratio_of_both_weights(
    tmp_path, base, tuning, monkeypatch
):
    worker = worker_in(
        tmp_path, base, steps=4, ahead=1, correction="token_truncate", tuning=tuning,
        learning_rate=1.0 if tuning == "full" else 30.0,
    )  # fmt: skip
    model, rollouts = load_model(base, torch.float32), Waiting()
    with PolicyServer(rollouts, "policy", None, None, 1) as server, connect(str(server.path)) as client:
        trainer, engine = grpo_worker.build_trainer(worker, model, client, compute=Compute(False, "fp32"))
        weights, seen = list[dict[str, torch.Tensor]](), list[tuple[Any, torch.Tensor]]()
        loss, correct = trainer.compute_loss, trainer._correct

        def compute_loss(model: Any, inputs: Any, *rest: Any, **named: Any) -> torch.Tensor:
            step = trainer.state.global_step
            if len(weights) == step:
                weights.append({name: p.detach().clone() for name, p in model.named_parameters()})
            if step < 3:
                assert rollouts.done[step + 1].wait(60), "the next round waits for the update"
            return loss(model, inputs, *rest, **named)

        monkeypatch.setattr(trainer, "compute_loss", compute_loss)
        monkeypatch.setattr(trainer, "_correct", lambda logps: (seen.append((trainer._pass, logps)), correct(logps)))
        trainer.train()
        engine.close()
    versions = {step: {s.version for s in samples} for step, samples in rollouts.rounds.items()}
    assert versions == {0: {0}, 1: {0}, 2: {1}, 3: {2}}
    assert {lag for _, _, _, lag in trainer.gaps} == {0, 1}
    fresh, stale = (max(largest for _, largest, _, lag in trainer.gaps if lag == wanted) for wanted in (0, 1))
    assert fresh < 1e-4 < 1e-2 < stale, "the weights moved, and rollouts are of those before"
    # The sampled log-probs are those of the version that the samples name.
    policy: Any = trainer.model
    for step, samples in rollouts.rounds.items():
        policy.load_state_dict(weights[samples[0].version or 0], strict=False)
        for sample in samples[:3]:
            ids = torch.tensor([[*sample.prompt_ids, *sample.completion_ids]])
            with torch.no_grad():
                logits = policy(input_ids=ids).logits[0, len(sample.prompt_ids) - 1 : -1] / 0.7
            of_version = logits.log_softmax(-1).gather(1, torch.tensor(sample.completion_ids)[:, None])[:, 0]
            assert list(sample.logprobs) == pytest.approx(of_version.tolist(), abs=1e-4), step
    total, _, tokens = (sum(column) for column in zip(*trainer.weights, strict=True))
    wanted = [
        (logps - inputs["sampling_per_token_logps"]).exp().clamp(max=3.0)[inputs["completion_mask"].bool()].sum()
        for inputs, logps in seen
    ]
    assert total == pytest.approx(float(sum(wanted)), rel=1e-4) and abs(total / tokens - 1) > 1e-4


# --- whole runs ------------------------------------------------------------------------------------------------------


def judge(lake, path: Path, ahead: int, steps: int) -> None:
    """Assert that every round is recorded once, lags at most `ahead` steps, and that the view has turns' versions."""
    samples, log = rows(lake, "rl_samples"), rows(lake, "training_log")
    assert [(r["step"], r["place"]) for r in samples] == [(s, p) for s in range(steps) for p in range(8)]
    assert [line["step"] for line in log] == list(range(1, steps + 1))
    assert len({r["rollout_id"] for r in samples}) == 8 * steps == len(rows(lake, "rollouts"))
    lags = [r["step"] - r["version"] for r in samples]
    assert 0 < max(lags) <= ahead and min(lags) == 0 and max(line["staleness_max"] for line in log) == max(lags)
    catalog.build(lake, GRAPH.values(), path)
    with catalog.connect(path) as connection:
        turns = "SELECT count(*), count(version), max(step - version) FROM rl_turns"
        assert connection.execute(turns).fetchone() == (len(rows(lake, "turns")),) * 2 + (max(lags),)
        oldest = "SELECT count(*) FROM (SELECT rollout_id, min(version) AS v FROM rl_turns GROUP BY ALL) AS t "
        oldest += "INNER JOIN rl_samples AS s ON t.rollout_id = s.rollout_id AND t.v = s.version"
        assert connection.execute(oldest).fetchone() == (8 * steps,)
        final = rows(lake, "checkpoints")[-1]["checkpoint_id"]
        lineage = "SELECT count(DISTINCT rollout_id) FROM lineage WHERE checkpoint_id = ?"
        assert connection.execute(lineage, [final]).fetchone() == (8 * steps,)


@pytest.mark.slow
@pytest.mark.parametrize("partial", ["finish", "continue"])
def test_run_ahead_is_recorded_as_one_that_alternates(tmp_path, base, partial):
    lake = prepared(tmp_path, base, ahead="2", partial_rollouts=f'"{partial}"', **CORRECTED, **LONG)
    outcome = make(tmp_path, lake, "rl_checkpoint")
    assert not outcome.manifest.blocked, outcome.manifest.failures
    judge(lake, tmp_path / "catalog.duckdb", 2, 4)


@pytest.mark.long
@pytest.mark.parametrize("partial", ["finish", "continue"])
def test_killed_run_ahead_resumes_and_doubles_nothing(tmp_path, base, partial):
    """SIGKILL to the whole run after its third checkpoint, when a later round is recorded, and others run."""
    several = {"device_batch": "1", "accumulate": "8", "save_steps": "20", "steps": "20"}
    lake = prepared(tmp_path, base, **several, ahead="2", partial_rollouts=f'"{partial}"', **CORRECTED)

    def ahead() -> tuple[int, list[Path]]:
        """Return the last checkpoint, and the recorded rounds that are later."""
        steps = [grpo_worker.last_complete_step(path) or 0 for path in tmp_path.glob("data/scratch/reinforce/*")]
        rounds = tmp_path.glob("data/checkpoints/rounds/*/round-*.jsonl")
        return max(steps, default=0), [path for path in rounds if int(path.stem[6:]) > max(steps, default=0)]

    kill_when(tmp_path, lambda: ahead()[0] >= 6 and ahead()[1])
    time.sleep(3)  # the supervisor ends the worker
    resumed_at, _ = ahead()
    outcome = make(tmp_path, lake, "rl_checkpoint")
    assert not outcome.manifest.blocked, outcome.manifest.failures
    assert outcome.metadata["seed 0"]["resumed from step"] == resumed_at
    judge(lake, tmp_path / "catalog.duckdb", 2, 20)
    versions = {r["step"]: r["version"] for r in rows(lake, "rl_samples")}
    assert all(versions[step] >= resumed_at for step in range(resumed_at, 20)), "earlier weights are gone"
