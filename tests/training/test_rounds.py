"""A round of reinforcement: what the trainer is told, what is kept, and what stops the run."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from itertools import islice
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import etpi_assets.training.rounds
from etpi_assets.agent.loop import Identity, rollout_id
from etpi_assets.scoring.advantage import group_advantages
from etpi_assets.scoring.rewards import functions
from etpi_assets.scoring.rewards.attempt import BadReward
from etpi_assets.scoring.rewards.rescore import rescore_rollouts, rewards_as_applied
from etpi_assets.specs.rollout_set import AgentSection, EngineSection
from etpi_assets.specs.training import RewardTerm, RLSection
from etpi_assets.tasks.families import load_family
from etpi_assets.training import grpo_checks
from etpi_assets.training.forests import RolloutsFailed, as_forest
from etpi_assets.training.grpo_checks import prompts_fit
from etpi_assets.training.rounds import (
    REFILL,
    NoVariance,
    RLEnvironment,
    Rounds,
    drop_rounds_from,
    first_prompt,
    read_rounds,
    with_prompts_that_fit,
)
from etpi_assets.training.served_teacher import ServedTeacher, served_teacher
from etpi_assets.trajectories.records import AgentRecord, RolloutRecord, Turn
from etpi_assets.worlds.terminal_tiny.generate import KEYWORDS, generate_tasks
from etpi_resources.chat.format import load_chat_format
from etpi_resources.engines import Completion, EngineUnavailable, Request
from etpi_resources.lake.check_outcome import BadData, CheckOutcome
from etpi_resources.lake.lake import Lake
from etpi_resources.lake.schemas import from_rows
from etpi_resources.sandboxes.bubblewrap import BubblewrapFactory
from etpi_resources.trainers.policy_link import Fork
from tests.support.loopback import Loopback, Refusal, status

CHAT = load_chat_format("tiny")
TASKS = list(islice(generate_tasks("s", 0, "train"), 8))
ASKED = {"keywords": {verb: list(words) for verb, words in KEYWORDS.items()}}
TERMS = (
    RewardTerm(function="format", weight=1.5, params=ASKED),
    RewardTerm(function="relevance", params=ASKED),
)
AGENT = AgentSection(prompt="terminal_tiny", action_format="thinking_bash", max_steps=1, max_tokens=80)
SECTION = RLSection(method="grpo", suite="s", agent=AGENT, rewards=TERMS, max_response_tokens=80)

ENVIRONMENT = RLEnvironment(TASKS, load_family("terminal_tiny"), BubblewrapFactory(), CHAT)


class Mixed:
    """A policy that answers right, with another verb, or out of form, in turn by sample; two turns where asked."""

    name = "policy"

    def __init__(self, broken: int = 0) -> None:
        self.broken = broken

    def complete(self, requests: Sequence[Request]) -> list[Completion]:
        if self.broken > 0:
            self.broken -= 1
            raise OSError("the socket is gone")
        return [self._one(request) for request in requests]

    def _one(self, request: Request) -> Completion:
        command = request.privileged["payload"]["command"]
        form = random.Random(request.request_id).randrange(3)
        right = f"<thinking>a</thinking>\n```bash\n{command}\n```"
        text = [right, right.replace(command, f"ls {command.partition(' ')[2]}"), command][form]
        ids = [*CHAT.encode(text), CHAT.end_id]
        return Completion(list(request.prompt_ids), ids, [-0.25] * len(ids), text, "stop", self.name)

    def fingerprint(self):
        return {}

    def close(self) -> None:
        """Nothing is held."""


def rounds(folder, section: RLSection = SECTION, teacher: ServedTeacher | None = None) -> Rounds:
    identity = Identity("k" * 16, "rl", "policy", teacher="p", experiment="e", checkpoint_role="rl", seed=0)
    return Rounds(section, ENVIRONMENT, identity, 0, folder, teacher)


def test_round_is_rewarded_stored_and_read_back(tmp_path):
    samples = rounds(tmp_path)(3, [2, 2, 2, 2, 5, 5, 5, 5], Mixed())
    kept = list(read_rounds(tmp_path))
    assert [rewarded.place for rewarded, *_ in kept] == list(range(8)) and {rewarded.step for rewarded, *_ in kept} == {
        3
    }
    assert len({record.rollout_id for _, record, _ in kept}) == 8
    for sample, (rewarded, record, _) in zip(samples, kept, strict=True):
        [turn] = record.agents[0].turns
        assert (record.origin, record.experiment, record.sample) == ("rl", "e", 12 + rewarded.place % 4)
        assert list(sample.prompt_ids) == turn.prompt_ids and list(sample.completion_ids) == turn.output_ids
        assert set(sample.mask) == {1} and set(sample.logprobs) == {-0.25}
        assert (sample.reward, sample.advantage) == (rewarded.reward, rewarded.advantage)
        values = {score.function: score.value for score in rewarded.scores}
        assert rewarded.reward == 1.5 * values["format"] + values["relevance"]
        assert rewarded.parsed == (turn.parse_error is None) >= bool(values["format"])
        assert rewarded.solved == (record.outcome or {})["reward"] == (values["relevance"] == 1.0)
    for at in (0, 4):
        assert sum(sample.advantage for sample in samples[at : at + 4]) == pytest.approx(0.0, abs=1e-9)
    assert {rewarded.reward for rewarded, *_ in kept} == {0.0, 2.5}
    forms = {(rewarded.parsed, rewarded.solved) for rewarded, *_ in kept}
    assert len(forms) == 3, "the policy must have answered all three ways"


def test_dropped_round_is_rolled_out_again_with_the_same_samples(tmp_path):
    one = rounds(tmp_path)
    for step in range(4):
        one(step, [step] * 4, Mixed())
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    (tmp_path / ".round-000004.jsonl.a1").write_text("torn")
    assert drop_rounds_from(tmp_path, 2) == 2
    assert sorted(path.name for path in tmp_path.iterdir()) == ["round-000000.jsonl", "round-000001.jsonl"]
    one(2, [2] * 4, Mixed())
    again = json.loads((tmp_path / "round-000002.jsonl").read_text().splitlines()[0])
    first = json.loads(before["round-000002.jsonl"].splitlines()[0])
    assert again == first


def test_statistics_of_tokens_are_kept_beside_their_round(tmp_path):
    one = rounds(tmp_path)
    tokens = [[sum(sample.mask) for sample in one(step, [step] * 4, Mixed())] for step in (0, 1)]
    values = np.arange(2 * sum(tokens[0]), dtype="<f4").reshape(2, -1)
    values[:, : tokens[0][0]] = np.nan  # the first sample was not in the loss
    one.record(0, values.tobytes())
    first, *others = [statistics for _, _, statistics in read_rounds(tmp_path)]
    assert first is None and all(statistics is None for statistics in others[3:]), "round 1 was not trained on"
    assert np.array_equal(np.concatenate(others[:3], axis=1), values[:, tokens[0][0] :])
    assert [s.shape for s in others[:3]] == [(2, n) for n in tokens[0][1:]]
    assert drop_rounds_from(tmp_path, 0) == 2 and not list(tmp_path.iterdir())
    one(0, [0] * 4, Mixed())
    one.record(0, values[:, :9].tobytes())
    with pytest.raises(BadData, match=r"round-000000\.tokens .*18 .*104 "):
        list(read_rounds(tmp_path))


def test_a_missing_or_nan_reward_stops_the_run_with_the_row(tmp_path, monkeypatch):
    def nan(attempt, **params):
        return float("nan") if attempt.task_id == TASKS[1].task_id else 1.0

    monkeypatch.setitem(functions.FUNCTIONS, "format", nan)  # pyright: ignore[reportArgumentType]
    with pytest.raises(BadReward, match=f"{TASKS[1].task_id}.*'format'.*nan"):
        rounds(tmp_path)(0, [0] * 4 + [1] * 4, Mixed())
    assert not list(tmp_path.iterdir()), "a round without rewards must not be stored"


def test_broken_rollout_is_retried_once_and_then_names_the_task(tmp_path):
    assert len(rounds(tmp_path)(0, [0] * 4, Mixed(broken=1))) == 4
    with pytest.raises(RolloutsFailed, match=f"{TASKS[0].task_id}.*socket"):
        rounds(tmp_path)(1, [0] * 4, Mixed(broken=99))


class Fragile(Mixed):
    """Breaks every request whose rollout is in `samples`."""

    def __init__(self, broken: set[int], refills: bool = False) -> None:
        super().__init__()
        self.samples, self.refills = broken, refills
        self.ids = {
            rollout_id(TASKS[0], s + extra, "k" * 16) for s in broken for extra in ((0, REFILL) if refills else (0,))
        }

    def complete(self, requests: Sequence[Request]) -> list[Completion]:
        if any(request.session.split("/")[0] in self.ids for request in requests):
            raise OSError("the sandbox is gone")
        return super().complete(requests)


@pytest.mark.parametrize("refills", [False, True])
def test_broken_rollout_is_replaced_or_left_out_below_the_bound(tmp_path, refills):
    section = SECTION.model_copy(update={"max_broken": 0.25})
    samples = rounds(tmp_path, section)(0, [0] * 4, Fragile({1}, refills))
    assert [sample.left_out for sample in samples] == [None, "broken" if refills else None, None, None]
    assert [sample.replaced for sample in samples] == [0, 1, 0, 0]
    kept = list(read_rounds(tmp_path))
    assert [row.left_out for row, _, _ in kept] == [s.left_out for s in samples] + ["replaced"]
    assert kept[1][1].sample == 1 + REFILL and kept[4][1].sample == 1 and kept[4][1].error
    assert kept[4][0].place == 1 and len({record.rollout_id for _, record, _ in kept}) == 5
    if refills:
        assert samples[1].advantage == 0.0 and not any(samples[1].mask) and kept[1][1].error
        rest = [samples[n].reward for n in (0, 2, 3)]
        assert [samples[n].advantage for n in (0, 2, 3)] == group_advantages(rest, 3, eps=1e-8, ddof=1)
    else:
        assert any(samples[1].mask)
    with pytest.raises(RolloutsFailed, match=r"2 rollouts .* 4 .*rl\.max_broken .0\.25."):
        rounds(tmp_path, section)(1, [0] * 4, Fragile({4, 5}))


class Uneven(Mixed):
    """Answers the first task in the same way in every sample."""

    def _one(self, request: Request) -> Completion:
        if request.privileged["payload"]["command"] == TASKS[0].payload["command"]:
            request = replace(request, request_id="one")
        return super()._one(request)


def test_groups_without_variance_are_replaced_by_groups_of_other_tasks(tmp_path):
    section = SECTION.model_copy(update={"refill": 3})
    samples = rounds(tmp_path, section)(3, [0] * 4 + [2] * 4, Uneven())
    assert all(any(s.advantage for s in samples[at : at + 4]) for at in (0, 4))
    kept = list(read_rounds(tmp_path))
    aside = [(row.left_out, record.task_id) for row, record, _ in kept[8:]]
    assert [row.left_out for row, _, _ in kept[:8]] == [None] * 8 and set(aside) >= {("constant", TASKS[0].task_id)}
    assert [s.replaced for s in samples] == [sum(row.place == place for row, *_ in kept[8:]) for place in range(8)]
    of_group = [{record.task_id for _, record, _ in kept[at : at + 4]} for at in (0, 4)]
    assert [len(tasks) for tasks in of_group] == [1, 1] and not of_group[0] & of_group[1]
    assert TASKS[0].task_id not in of_group[0] | of_group[1]
    again = rounds(tmp_path, section)(3, [0] * 4 + [2] * 4, Uneven())
    assert again == samples and len(list(read_rounds(tmp_path))) == len(kept), "as after a kill"


def test_run_stops_after_groups_without_variance_in_a_row(tmp_path, monkeypatch):
    monkeypatch.setattr(etpi_assets.training.rounds, "CONSTANT_GROUPS", 4)
    equal, mixed = ([0] * 4 + [0] * 4), ([0] * 4 + [2] * 4)
    run = rounds(tmp_path)
    run(0, equal, Uneven())
    run(1, mixed, Uneven())  # one of its groups varies
    run(2, equal, Uneven())
    with pytest.raises(NoVariance, match=r" 4 groups.* step 3,.*rl\.group_size"):
        run(3, equal, Uneven())
    assert {row.step for row, *_ in read_rounds(tmp_path)} == {0, 1, 2, 3}, "what was rolled out is kept"
    monkeypatch.setenv("ETPI_KEEP_GOING", "1")
    run(4, equal, Uneven())


@pytest.mark.parametrize("weight", [0.0, 0.5])
def test_run_on_a_teachers_probabilities_alone_needs_no_variance(tmp_path, monkeypatch, weight):
    monkeypatch.setattr(etpi_assets.training.rounds, "CONSTANT_GROUPS", 2)
    section = SECTION.model_copy(update={"method": "opd", "teacher": "checkpoint:t", "outcome_weight": weight})
    with pytest.raises(NoVariance) if weight else nullcontext():
        rounds(tmp_path, section)(0, [0] * 4 + [0] * 4, Uneven())


SERVED = SECTION.model_copy(
    update={"method": "opd", "max_broken": 1.0, "teacher_engine": EngineSection(
        kind="vllm", teacher="t", model="big", urls=("http://127.0.0.1:1",), timeout=2.0
    )}
)  # fmt: skip


@contextmanager
def served_rounds(folder, server: Loopback, **changes: Any) -> Iterator[Rounds]:
    assert SERVED.teacher_engine
    engine = SERVED.teacher_engine.model_copy(update={"urls": (server.url,)})
    section = SERVED.model_copy(update={"teacher_engine": engine, **changes})
    with served_teacher(section, CHAT, Lake(folder / "lake"), folder / "rounds", [1, 2]) as teacher:
        yield rounds(folder / "rounds", section, teacher)


def refuse_thoughts(body: dict[str, Any]) -> list[float]:
    if CHAT.encode("<thinking>")[0] in body["prompt"][-60:]:
        raise Refusal(400, "the prompt is too long")
    return [-0.5] * (len(body["prompt"]) - 1)


def test_rollout_that_the_teacher_s_server_refuses_is_broken(tmp_path):
    with Loopback("big") as server, served_rounds(tmp_path, server) as run:
        server.scores = refuse_thoughts
        samples = run(0, [0] * 4 + [1] * 4, Mixed())
        kept = list(read_rounds(tmp_path / "rounds"))
        run.section = run.section.model_copy(update={"max_broken": 0.0})
        with pytest.raises(RolloutsFailed, match=r"rl\.teacher_engine: .*the prompt is too long"):
            run(1, [0] * 4 + [1] * 4, Mixed())
    refused = [bool(record.error) for _, record, _ in kept[:8]]
    assert [sample.left_out == "broken" for sample in samples] == refused and 0 < sum(refused) < 8
    assert any(sample.replaced and not sample.left_out for sample in samples)
    for sample in samples:
        assert sample.teacher_logprobs == [0.0 if sample.left_out else -0.5] * len(sample.mask)


def test_teacher_with_other_weights_than_in_the_first_round_stops_the_run(tmp_path):
    with Loopback("big") as server:
        with served_rounds(tmp_path, server) as run:
            run(0, [0] * 4, Mixed())
        server.scores = lambda body: [-0.55] * (len(body["prompt"]) - 1)
        with served_rounds(tmp_path, server) as run:
            with pytest.raises(EngineUnavailable, match=r"'big' .* 0\.050 nats"):
                run(1, [0] * 4, Mixed())
            assert {row.step for row, *_ in read_rounds(tmp_path / "rounds")} == {0}
            assert drop_rounds_from(tmp_path / "rounds", 0) == 1
            run(0, [0] * 4, Mixed())


def test_teacher_that_no_longer_takes_the_key_stops_the_run(tmp_path):
    with Loopback("big") as server, served_rounds(tmp_path, server) as run:
        server.always = status(401)
        with pytest.raises(EngineUnavailable, match="401"):
            run(0, [0] * 4, Mixed())
    assert not list((tmp_path / "rounds").iterdir())


def test_round_that_is_killed_in_a_refill_leaves_nothing_behind(tmp_path):
    class Killed(Uneven):
        def _one(self, request: Request) -> Completion:
            if request.privileged["payload"]["command"] not in [TASKS[n].payload["command"] for n in (0, 2)]:
                raise KeyboardInterrupt
            return super()._one(request)

    section = SECTION.model_copy(update={"refill": 1})
    with pytest.raises(KeyboardInterrupt):
        rounds(tmp_path, section)(0, [0] * 4 + [2] * 4, Killed())
    assert not list(tmp_path.glob("*round-*"))


def test_tasks_with_a_too_long_prompt_are_left_out_and_counted():
    lengths = [len(first_prompt(SECTION, ENVIRONMENT, task)) for task in TASKS]
    section = SECTION.model_copy(update={"max_prompt_tokens": sorted(lengths)[len(lengths) // 2]})
    fitting = with_prompts_that_fit(section, ENVIRONMENT)
    assert 0 < len(fitting.tasks) < len(TASKS) and len(fitting.tasks) + len(fitting.left_out) == len(TASKS)
    assert all(len(first_prompt(section, ENVIRONMENT, t)) <= section.max_prompt_tokens for t in fitting.tasks)
    check = prompts_fit(section, len(fitting.tasks), fitting.left_out)
    assert not check.passed and not check.blocking and fitting.left_out[0] in check.message
    one = section.model_copy(update={"tasks": 1, "accumulate": 1})
    assert len(with_prompts_that_fit(one, ENVIRONMENT).tasks) == 1
    with pytest.raises(RolloutsFailed, match=r"rl\.suite has 1 tasks.* 2; .*rl\.processes"):
        with_prompts_that_fit(section.model_copy(update={"tasks": 1}), ENVIRONMENT)
    assert prompts_fit(section, 3, ()).passed


def test_prompts_that_are_all_too_long_raise_with_the_option():
    with pytest.raises(RolloutsFailed, match=r" 8 tasks .*rl\.max_prompt_tokens \(20\)"):
        with_prompts_that_fit(SECTION.model_copy(update={"max_prompt_tokens": 20}), ENVIRONMENT)


class Cut(Mixed):
    """Ends its answers to requests whose hash is below `below` before the last id."""

    below = "8"

    def _one(self, request: Request) -> Completion:
        whole = super()._one(request)
        if request.request_id < self.below:
            return replace(whole, output_ids=(whole.output_ids or ())[:-1], logprobs=(whole.logprobs or ())[:-1])
        return whole


@pytest.mark.parametrize("masked", [False, True])
def test_rollouts_that_are_cut_are_counted_whether_or_not_they_are_trained_on(tmp_path, masked):
    samples = rounds(tmp_path, SECTION.model_copy(update={"mask_truncated": masked}))(0, [0] * 4 + [1] * 4, Cut())
    cut = [record.agents[0].turns[0].output_ids[-1] != CHAT.end_id for _, record, _ in read_rounds(tmp_path)]
    assert 0 < sum(cut) < 8 and [sample.truncated for sample in samples] == cut
    assert [sample.left_out == "truncated" for sample in samples] == [masked and each for each in cut]


def test_round_of_which_nothing_is_trained_is_read_with_the_statistics_of_none(tmp_path):
    engine, made = Cut(), rounds(tmp_path, SECTION.model_copy(update={"mask_truncated": True}))
    engine.below = "g"
    assert {sample.left_out for sample in made(0, [0] * 4 + [1] * 4, engine)} == {"truncated"}
    made.record(0, b"")
    assert [values for *_, values in read_rounds(tmp_path)] == [None] * 8


def test_several_turns_become_one_branch_with_observations_masked_and_fork_where_they_part():
    turns = [
        Turn(0, "a", prompt_ids=[1, 2], output_ids=[3, 4], logprobs=[-1.0, -2.0], capture="native"),
        Turn(1, "b", prompt_ids=[1, 2, 3, 4, 7, 8, 9], output_ids=[5], logprobs=[-3.0], capture="native"),
    ]
    record = RolloutRecord("r", "rl", "s", "t", "repo", [AgentRecord("agent1", "f", "solo", "Submitted", turns)])
    chain = as_forest(record)
    assert (chain.prompt, chain.completion, chain.mask) == ([1, 2], [3, 4, 7, 8, 9, 5], [1, 1, 0, 0, 0, 1])
    assert chain.logprobs == [-1.0, -2.0, 0.0, 0.0, 0.0, -3.0] and not chain.forks
    turns[1].prompt_ids = [1, 2, 4, 4, 7, 8, 9]
    forked = as_forest(record)
    assert (forked.completion, forked.mask) == ([3, 4, 4, 4, 7, 8, 9, 5], [1, 1, 0, 0, 0, 0, 0, 1])
    assert forked.forks == [Fork(4, 1)] and forked.branches == [2]
    turns[1].prompt_ids, turns[1].logprobs = [1, 2, 3, 4], None
    with pytest.raises(RolloutsFailed, match="rollout r of task t, agent1 turn 1: "):
        as_forest(record)


def test_old_rollouts_are_scored_again_by_a_changed_reward_without_running(tmp_path, monkeypatch):
    rounds(tmp_path)(0, [0] * 4, Mixed())
    kept = list(read_rounds(tmp_path))
    keys = [{"rollout_id": rewarded.rollout_id, "seed": 0, "step": rewarded.step} for rewarded, *_ in kept]
    samples = from_rows("rl_samples", keys)
    rows = [key | vars(s) for key, (rewarded, *_) in zip(keys, kept, strict=True) for s in rewarded.scores]
    applied = from_rows("rewards", [row | {"applied": True} for row in rows])
    tasks = {task.task_id: task for task in TASKS}
    records = [record for _, record, _ in kept]
    again = rescore_rollouts(records, tasks, samples, TERMS)
    assert rewards_as_applied(applied, again).passed
    assert [r["value"] for r in again.to_pylist()] == [r["value"] for r in applied.to_pylist()]

    monkeypatch.setitem(functions.FUNCTIONS, "format", lambda attempt, keywords: 0.5)  # pyright: ignore[reportArgumentType]
    functions.version_of.cache_clear()
    changed = rescore_rollouts(records, tasks, samples, TERMS)
    outcome = rewards_as_applied(applied, changed)
    functions.version_of.cache_clear()
    assert not outcome.passed and not outcome.blocking and "format on 4 rollouts" in outcome.message
    assert {r["value"] for r in changed.to_pylist() if r["function"] == "format"} == {0.5}
    heavier = [term.model_copy(update={"weight": 9.0}) if term.function == "format" else term for term in TERMS]
    for terms in (heavier, TERMS[1:]):
        other = rewards_as_applied(applied, rescore_rollouts(records, tasks, samples, terms))
        assert not other.passed and other.figures == {"format": 4}


def test_section_that_cannot_be_trained_on_is_refused():
    for change, words in (
        ({"agent": AGENT.model_copy(update={"top_p": 0.9})}, r"rl\.agent .*top_p = 1"),
        ({"agent": AGENT.model_copy(update={"temperature": 0.0})}, r"rl\.agent .*temperature .*0:"),
        ({"agent": {**AGENT.model_dump(), "grammar": {}}}, r"rl\.agent\.grammar"),
        ({"device_batch": 6, "accumulate": 1}, r"multiple of rl\.group_size"),
        ({"rewards": ()}, "`rewards`"),
        ({"tasks": 1, "accumulate": 2}, r"rl\.tasks = 1, .* 2 "),
        ({"sharded": True, "tuning": "full"}, 'rl.sharded .*rl.engine = "vllm"'),
        ({"sharded": True, "engine": "vllm", "tuning": "lora"}, 'rl.sharded .*rl.tuning = "full"'),
        ({"sharded": True, "engine": "vllm", "optimizer": "adamw_8bit"}, "rl.sharded .*'adamw_8bit'"),
    ):
        with pytest.raises(ValueError, match=words):
            RLSection.model_validate({**SECTION.model_dump(), **change})


@pytest.mark.parametrize(
    ("rewards", "cause"), [((0.0, 0.0), "groups have equal rewards"), ((0.0, 1.0), "changed nothing")]
)
def test_weights_that_did_not_change_are_put_down_to_equal_rewards(monkeypatch, rewards, cause) -> None:
    monkeypatch.setattr(grpo_checks, "proofs", lambda reports: [CheckOutcome("differs", False, "changed nothing")])
    section = SECTION.model_copy(update={"steps": 1, "group_size": 2})
    rows = [{"rollout_id": str(n), "task_id": "t", "seed": 0, "step": 0, "reward": r, "advantage": 0.0, "version": 0}
            for n, r in enumerate(rewards)]  # fmt: skip
    tables = {"rl_samples": from_rows("rl_samples", rows), "rollouts": from_rows("rollouts", []),
              "rewards": from_rows("rewards", []), "turns": from_rows("turns", [])}  # fmt: skip
    report: Any = SimpleNamespace(dtype="float32", saved=SimpleNamespace(dtype="float32"), log=[])
    outcomes = {outcome.name: outcome for outcome in grpo_checks.checks(section, {0: report}, tables, 1, [])}
    assert not outcomes["differs"].passed and cause in outcomes["differs"].message
