"""Processes of sandboxes that are killed from outside at random moments: no verdict, no exit code, nothing lost."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections import Counter
from contextlib import suppress

import pytest

from etpi_assets.agent.actions import format_action
from etpi_assets.agent.loop import SUBMIT, Identity, RolloutJob, RolloutRuntime, run_rollout
from etpi_assets.rollouts.collect import run_with_retry
from etpi_assets.specs.rollout_set import AgentSection
from etpi_assets.tasks.family import Family, Role, SandboxNeeds, Task, Verdict
from etpi_resources.chat.format import load_chat_format
from etpi_resources.engines.scripted import ScriptedEngine
from etpi_resources.sandboxes.bubblewrap import BubblewrapFactory, BubblewrapSandbox, _descendants

CHAT = load_chat_format("tiny")
COMMANDS = ["for i in $(seq 300); do echo $i; done > b.txt; exit 5", "sleep 0.1", "printf done > a.txt"]


class Judged(Family):
    """A family whose judge runs the agent's file in a sandbox of its own."""

    def roles(self, task):
        return [Role("agent1", "f", "do it", None)]

    def needs(self, task):
        return SandboxNeeds()

    def workspace(self, task, role):
        return {"a.txt": "start\n"}

    def judge(self, task, final, sandboxes):
        with sandboxes.create(final["agent1"]) as box:
            passed = box.run("sleep 0.1; grep -q done a.txt").exit_code == 0
        return Verdict(float(passed), "passed" if passed else "no_patch", {})


class Watched(BubblewrapFactory):
    """Remembers the sandboxes that run now."""

    def __init__(self) -> None:
        self.running: list[int] = []

    def create(self, *args, **more) -> BubblewrapSandbox:
        sandbox, popen = super().create(*args, **more), self.running
        enter = BubblewrapSandbox._start_guest

        def start(guest: bytes) -> None:
            popen.append(sandbox._process.pid)  # type: ignore[union-attr]
            enter(sandbox, guest)

        sandbox._start_guest = start  # type: ignore[method-assign]
        return sandbox


def policy(request) -> str:
    turn = sum(message["role"] == "assistant" for message in request.messages)
    return str(format_action([*COMMANDS, f"echo {SUBMIT}"][min(turn, len(COMMANDS))]))


def rollout(factory: BubblewrapFactory):
    engine = ScriptedEngine(policy, CHAT, "t")
    runtime = RolloutRuntime(Judged(), engine, factory, CHAT)  # pyright: ignore[reportArgumentType]
    task = Task("t1", "suite", "repo", "train", "do it", {}, "hash")
    job = RolloutJob(task, AgentSection(max_tokens=128), Identity("spec", "set", "scripted", "t"))
    return run_rollout(job, runtime)


def killed_after(seconds: float, rng: random.Random):
    """Roll out once, with one process of its sandboxes killed after some time."""
    factory, results = Watched(), []
    thread = threading.Thread(target=lambda: results.append(rollout(factory)))
    thread.start()
    time.sleep(seconds)
    with suppress(OSError, IndexError):
        outer = factory.running[-1]
        os.kill(rng.choice([outer, *_descendants(outer)[:1]]), signal.SIGKILL)
    thread.join()
    return results[0]


def is_whole(record) -> bool:
    codes = [turn.exit_code for agent in record.agents for turn in agent.turns]
    return record.outcome["reward"] == 1.0 and codes == [5, 0, 0, 0]


@pytest.mark.parametrize(
    ("kills", "seed"), [(6, 0), pytest.param(100, 1, marks=[pytest.mark.long, pytest.mark.timeout(3600)])]
)
def test_killed_sandbox_is_an_infrastructure_error_and_never_a_verdict(kills, seed):
    rng, kinds = random.Random(seed), Counter[str]()
    started = time.monotonic()
    assert is_whole(rollout(BubblewrapFactory()))
    whole = time.monotonic() - started
    for _ in range(kills):
        record = killed_after(rng.uniform(0, 1.1 * whole), rng)
        codes = [turn.exit_code for agent in record.agents for turn in agent.turns]
        assert [code for code in codes if code is not None] == [5, 0, 0, 0][: len([c for c in codes if c is not None])]
        if record.error is None:
            assert is_whole(record)
        else:
            assert record.outcome["verdict"] == "infrastructure" and "SandboxStopped" in record.error
        kinds[record.error.split(":")[0] if record.error else "whole"] += 1
    print(dict(kinds))
    assert sum(kinds.values()) == kills


def test_rollout_whose_sandbox_was_killed_runs_again():
    class Killed(Watched):
        def create(self, *args, **more) -> BubblewrapSandbox:
            sandbox = super().create(*args, **more)
            request = sandbox._request

            def killed(body: bytes, seconds: float) -> bytes:
                os.kill(self.running[-1], signal.SIGKILL)
                return request(body, seconds)

            sandbox._request = killed  # type: ignore[method-assign]
            return sandbox

    records = [rollout(Killed()), rollout(BubblewrapFactory())]
    assert "SandboxStopped" in (records[0].error or "") and (records[0].outcome or {})["reward"] is None
    left = records.copy()
    assert run_with_retry(lambda *_: left.pop(0), Task("t1", "s", "r", "train", "x", {}, "h"), 0) is records[1]
    assert is_whole(records[1])
