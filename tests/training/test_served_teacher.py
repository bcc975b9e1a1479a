"""Distillation by a teacher behind vLLM servers: its numbers are those of the same teacher in the trainer.

A server of the same endpoints over the real weights (`fake_vllm`) stands in for vLLM.
"""

from __future__ import annotations

import random
from contextlib import AbstractContextManager, closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pydantic import ValidationError

from etpi_assets.specs.training import RLSection
from etpi_assets.training.forests import as_forest
from etpi_assets.training.served_teacher import served_teacher
from etpi_assets.trajectories.records import AgentRecord, RolloutRecord, Turn
from etpi_resources.chat.format import load_chat_format
from etpi_resources.engines import EngineUnavailable
from etpi_resources.engines.vllm_server import VllmServer
from etpi_resources.lake.lake import Lake
from etpi_resources.trainers.policy_link import Sample
from etpi_resources.trainers.workers import grpo_worker
from etpi_resources.trainers.workers.checkpointing import load_model, logits_of
from etpi_resources.trainers.workers.device import Compute
from tests.support.fake_vllm import FakeVllm
from tests.support.loopback import Loopback, Refusal
from tests.support.models import make_base
from tests.support.policy_updates import FixedLink, worker_in
from tests.support.reinforcement import RL, make, prepared, rows
from tests.support.serving import NEEDS_VLLM
from tests.support.tiny_training import make_speaking_base

CHAT = load_chat_format("tiny")
OPD: dict[str, Any] = {"method": "opd", "suite": "s", "agent": {"temperature": 1.0}}


def engine_at(url: str, **keys: Any) -> dict[str, Any]:
    return {"kind": "vllm", "teacher": "big", "model": "big", "urls": [url], **keys}


def section_at(url: str) -> RLSection:
    return RLSection.model_validate(
        {**OPD, "teacher_engine": engine_at(url), "max_prompt_tokens": 100, "max_response_tokens": 100}
    )


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    return make_speaking_base(tmp_path_factory.mktemp("base"))


@pytest.fixture(scope="module")
def teacher(tmp_path_factory) -> Path:
    return make_base(tmp_path_factory.mktemp("teacher"), CHAT)


def forked_rollout(number: int) -> RolloutRecord:
    """Two agents; the first has two turns that extend each other, one that forks within them, and a third after the
    second; the other shares the beginning of the first prompt."""
    draw = random.Random(number)

    def ids(n: int) -> list[int]:
        return [draw.randrange(CHAT.vocab_size) for _ in range(n)]

    def turn(at: int, prompt: list[int]) -> Turn:
        output = ids(draw.randrange(3, 9))
        return Turn(at, "", prompt, output, [-7.0] * len(output))

    first = turn(0, ids(12 + number))
    begin = [*(first.prompt_ids or ()), *(first.output_ids or ())]
    second = turn(1, [*begin, *ids(4)])
    helper = turn(2, [*begin[:-2], *ids(3)])
    third = turn(3, [*(second.prompt_ids or ()), *(second.output_ids or ()), *ids(2)])
    agents = [
        AgentRecord("agent1", "", "solo", "Submitted", [first, second, helper, third]),
        AgentRecord("agent2", "", "solo", "Submitted", [turn(0, [*begin[:6], *ids(5)])]),
    ]
    return RolloutRecord(f"r{number}", "rl", "s", "t", "repo", agents)


def of_output(model: Any, prompt: list[int], output: list[int]) -> list[float]:
    """The log-probs of a turn's output, in a pass of its own."""
    logprobs = logits_of(model, torch.tensor([[*prompt, *output]]))[0].log_softmax(-1)
    return [float(logprobs[len(prompt) - 1 + at, token]) for at, token in enumerate(output)]


def sample_of(record: RolloutRecord, advantage: float, by_teacher: list[float] | None) -> Sample:
    forest, values = as_forest(record), iter(by_teacher or ())
    scores = None if by_teacher is None else [next(values) if own else 0.0 for own in forest.mask]
    return Sample(
        forest.prompt, forest.completion, forest.mask, forest.logprobs, 0.0, advantage, forks=forest.forks,
        teacher_logprobs=scores,
    )  # fmt: skip


def updated(folder: Path, base: Path, samples: list[Sample], teacher: Path | None, **rl: Any) -> tuple[Any, Any]:
    """Return the statistics and the weights after one step."""
    folder.mkdir()
    worker = worker_in(folder, base, teacher=teacher, agent={"temperature": 1.0}, outcome_weight=0.5, **rl)
    model = load_model(base, torch.float32)
    trainer, engine = grpo_worker.build_trainer(worker, model, FixedLink(samples), compute=Compute(False, "fp32"))
    engine.close()
    trainer.train()
    assert (trainer.seconds.get("teacher", 0.0) > 0) == (teacher is not None)
    return trainer.statistics.take(), torch.cat([p.detach().flatten() for p in model.parameters()])


@pytest.mark.slow
def test_served_teacher_trains_as_the_same_teacher_in_the_trainer(tmp_path, base, teacher):
    records = [forked_rollout(number) for number in range(8)]
    with FakeVllm(teacher, "big") as server:
        section, scored = section_at(server.url), []
        server.scores = lambda body: (scored.append(body["prompt"]), FakeVllm.scores(server, body))[1]
        with served_teacher(section, CHAT, Lake(tmp_path / "lake"), tmp_path, [1, 2]) as served:
            assert served is not None
            by_teacher = [served.score(record) for record in records]
    assert len(scored) == 1 + 3 * 8, "one request for each branch, after that for the context"
    advantages = np.linspace(-1, 1, 8)
    local = [sample_of(*each, None) for each in zip(records, advantages, strict=True)]
    own, moved = updated(tmp_path / "local", base, local, teacher)
    remote = [sample_of(*each) for each in zip(records, advantages, by_teacher, strict=True)]
    other, served_moved = updated(
        tmp_path / "served", base, remote, None, method="opd", teacher_engine=engine_at("http://h")
    )
    start = torch.cat([p.detach().flatten() for p in load_model(base, torch.float32).parameters()])
    assert own.shape == other.shape == (3, sum(map(len, by_teacher)))
    assert other[2] == pytest.approx(own[2], abs=1e-4)
    assert float((moved - served_moved).norm()) < 1e-4 * float((moved - start).norm())


@pytest.mark.slow
def test_run_records_the_teacher_s_log_probs_of_every_id_of_the_policy(tmp_path, base, teacher):
    agent = RL["agent"].replace("0.9", "1.0")
    with FakeVllm(teacher, "big") as server:
        engine = f'{{kind = "vllm", teacher = "big", model = "big", urls = ["{server.url}"]}}'
        lake = prepared(tmp_path, base, method='"opd"', agent=agent, steps="2", teacher_engine=engine)
        outcome = make(tmp_path, lake, "rl_checkpoint")
    assert not outcome.manifest.blocked, outcome.manifest.failures
    model, turns = load_model(teacher, torch.float32), {turn["rollout_id"]: turn for turn in rows(lake, "turns")}
    gaps: dict[int, list[float]] = {}
    for sample in rows(lake, "rl_samples"):
        turn = turns[sample["rollout_id"]]
        prompt, output = turn["suffix_ids"], turn["output_ids"]
        wanted = of_output(model, prompt, output)
        assert sample["teacher_logprobs"] == pytest.approx(wanted, abs=1e-4)
        assert sample["token_advantage"] == pytest.approx(np.mean(wanted) - np.mean(turn["logprobs"]), abs=1e-4)
        gaps.setdefault(sample["step"] + 1, []).extend(np.subtract(turn["logprobs"], wanted))
    for line in rows(lake, "training_log"):
        assert line["teacher_gap"] == pytest.approx(np.mean(gaps[line["step"]]), abs=1e-4)
        assert line["teacher_seconds"] is None


def refuse(body: dict[str, Any]) -> list[float]:
    raise Refusal(400, "This model's maximum context length is 128 tokens")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model": "other"}, r"\['other'\].*'big'"),
        ({"vocabulary": load_chat_format("qwen3")}, "tokenizer 'tiny'"),
        ({"scores": refuse}, "maximum context length is 128"),
        ({"change": lambda answer: {"choices": [{"text": ""}]}}, "`prompt_logprobs`"),
    ],
)
def test_server_of_another_model_or_form_is_refused_at_the_start(tmp_path, change, message):
    with Loopback("big") as server:
        for name, value in change.items():
            setattr(server, name, value)
        opened = served_teacher(section_at(server.url), CHAT, Lake(tmp_path / "lake"), tmp_path, [1, 2])
        with pytest.raises(EngineUnavailable, match=f"rl.teacher_engine: .*{message}"), opened:
            pass


def test_id_without_probability_is_no_advantage(tmp_path):
    with Loopback("big") as server:
        opened = served_teacher(section_at(server.url), CHAT, Lake(tmp_path / "lake"), tmp_path, [1, 2])
        with opened as served:
            assert served is not None
            assert set(served.score(forked_rollout(0))) == {-0.5}
            server.scores = lambda body: [-9999.0] * (len(body["prompt"]) - 1)
            with pytest.raises(RuntimeError, match=" rollout r0 "):
                served.score(forked_rollout(0))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"method": "grpo"}, r"rl\.method = .opd"),
        ({"teacher": "checkpoint:t"}, r"rl\.teacher or rl\.teacher_engine"),
        ({"teacher_engine": None}, r"rl\.teacher or rl\.teacher_engine"),
        ({"teacher_engine": engine_at("http://h") | {"kind": "openai"}}, 'rl.teacher_engine .*kind = "vllm"'),
        ({"teacher_engine": engine_at("http://h") | {"urls": []}}, 'kind = "vllm" and `urls`'),
        ({"agent": {"temperature": 0.9}}, "rl.agent.temperature = 1"),
        ({"repeatable": True}, r"rl\.repeatable .*rl\.teacher_engine"),
    ],
)
def test_section_with_a_teacher_that_cannot_score_is_refused(change, message):
    whole = {**OPD, "teacher_engine": engine_at("http://h"), "rewards": [{"function": "outcome"}]}
    assert RLSection.model_validate(whole).teacher_engine
    with pytest.raises(ValidationError, match=message):
        RLSection.model_validate({**whole, **change})


def real_vllm(folder: Path, log: Path) -> AbstractContextManager[Any]:
    options = {"dtype": "float32", "enforce-eager": True, "max-model-len": 256}
    return closing(VllmServer(folder, "big", log=log, options=options))


def stand_in(folder: Path, log: Path) -> AbstractContextManager[Any]:
    return FakeVllm(folder, "big")


@pytest.mark.parametrize(
    "serve", [pytest.param(real_vllm, marks=NEEDS_VLLM), pytest.param(stand_in, marks=pytest.mark.slow)]
)
def test_each_id_is_scored_in_its_own_branch(tmp_path, teacher, serve):
    record = forked_rollout(0)
    with serve(teacher, tmp_path / "log") as server:
        opened = served_teacher(section_at(server.url), CHAT, Lake(tmp_path / "lake"), tmp_path, [1, 2])
        with opened as served:
            assert served is not None
            scores = served.score(record)
            served.require_same_weights()
    model, wanted = load_model(teacher, torch.float32), []
    for turn in (turn for agent in record.agents for turn in agent.turns):
        wanted += of_output(model, turn.prompt_ids or [], turn.output_ids or [])
    assert scores == pytest.approx(wanted, abs=1e-4)
