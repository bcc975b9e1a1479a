"""Rounds of reinforcement in harnesses: every id that the policy generated is in a sample's loss once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from etpi_assets.agent.loop import Identity
from etpi_assets.specs.harness import PRESETS
from etpi_assets.specs.rollout_set import AgentSection
from etpi_assets.specs.training import RewardTerm, RLSection
from etpi_assets.training.forests import RolloutsFailed
from etpi_assets.training.rounds import RLEnvironment, Rounds, read_rounds
from etpi_assets.worlds.repo_fix_tiny import FAMILY
from etpi_resources.engines import Completion, Request
from etpi_resources.engines.scripted import ScriptedEngine
from etpi_resources.sandboxes.bubblewrap import BubblewrapFactory
from etpi_resources.trainers.policy_link import Sample
from tests.support.real_harnesses import CHAT, TASK, fixes, folder_of, section, write_harness


class Policy(ScriptedEngine):
    """Solves the task in every second rollout, in the others ends at once; counts the ids that it generates."""

    def __init__(self) -> None:
        super().__init__(self.answer, CHAT, "policy", noncanonical=0.0)
        self.sessions, self.generated = list[str](), 0

    def answer(self, request: Request) -> str:
        session = request.session.split("/")[0]
        if session not in self.sessions:
            self.sessions.append(session)
        return fixes(request) if self.sessions.index(session) % 2 else "Done."

    def complete(self, requests: Sequence[Request]) -> list[Completion]:
        completions = super().complete(requests)
        self.generated += sum(len(completion.output_ids or ()) for completion in completions)
        return [replace(c, logprobs=[-0.5] * len(c.output_ids or ()), version=0) for c in completions]


def round_of(folder, agent: AgentSection, policy: Policy, **more) -> Sequence[Sample]:
    values = {"max_prompt_tokens": 50000, "max_response_tokens": 10000, **more}
    section = RLSection(
        method="grpo", suite="s", agent=agent, rewards=(RewardTerm(function="outcome"),), group_size=2, device_batch=2,
        accumulate=1, **values,
    )  # fmt: skip
    environment = RLEnvironment([TASK], FAMILY, BubblewrapFactory(), CHAT)
    identity = Identity("k" * 16, "rl", "policy", teacher="p", experiment="e", checkpoint_role="rl", seed=0)
    return Rounds(section, environment, identity, 0, folder)(0, [0, 0], policy)


def round_in(folder, agent: AgentSection) -> None:
    policy = Policy()
    samples = round_of(folder, agent, policy)
    assert sorted(sample.solved for sample in samples) == [0.0, 1.0] and all(sample.advantage for sample in samples)
    rows = [row for row, *_ in read_rounds(folder)]
    assert {row.version for row in rows} == {0}, "turns are those that the engine generated"
    assert sum(sum(sample.mask) for sample in samples) == sum(row.policy_tokens for row in rows)
    assert policy.generated == sum(row.policy_tokens + (row.untrained_tokens or 0) for row in rows)


@pytest.fixture
def own(tmp_path):
    """Return a function that returns the agent of a small harness of our own."""
    folder = tmp_path / "harness"
    write_harness(folder)
    command = "python3 -B {folder}/harness.py {task_file}"
    env = {"BASE": "{base_url}/v1", "KEY": "{key}"}
    return lambda helpers: section("custom", str(folder), version="1", command=command, env=env, helpers=helpers)


@pytest.mark.parametrize("helpers", ["record", "all"])
def test_round_of_a_harness_trains_every_call(tmp_path, own, helpers):
    round_in(tmp_path / "rounds", own(helpers))


def test_rollouts_in_which_every_call_was_refused_are_broken(tmp_path, own):
    small = {"max_prompt_tokens": 8, "max_response_tokens": 8}
    with pytest.raises(RolloutsFailed, match="16 ids"):
        round_of(tmp_path / "rounds", own("all"), Policy(), **small)
    samples = round_of(tmp_path / "kept", own("all"), Policy(), **small, max_broken=1.0)
    assert {sample.left_out for sample in samples} == {"broken"}


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize("name", PRESETS)
def test_round_of_an_unmodified_harness_trains_every_call(name, tmp_path):
    round_in(tmp_path, section(name, folder_of(name), helpers="all"))


def test_settings_that_a_harness_cannot_keep_are_refused():
    agent = {"harness": {"name": "mini-swe-agent", "folder": "/x", "helpers": "all"}, "temperature": 1.0}
    values = {"method": "grpo", "suite": "s", "rewards": [{"function": "outcome"}], "agent": agent}
    assert RLSection.model_validate(values).agent.harness
    for change, words in (
        ({"repeatable": True}, r"rl\.repeatable"),
        ({"rewards": [{"function": "outcome", "of": "agent"}]}, r"rl\.rewards: of = .agent"),
        ({"correction": "sequence_mask"}, 'helpers = "record"'),
        ({"importance_sampling_level": "sequence"}, 'helpers = "record"'),
    ):
        with pytest.raises(ValueError, match=words):
            RLSection.model_validate({**values, **change})
