"""Sandboxes that are killed from outside, at random moments or by the kernel: no verdict, no exit code."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path

import pytest

from etpi_assets.agent.actions import format_action
from etpi_assets.agent.loop import SUBMIT, Identity, RolloutJob, RolloutRuntime, run_rollout
from etpi_assets.rollouts.collect import run_with_retry
from etpi_assets.specs.rollout_set import AgentSection
from etpi_assets.tasks.family import Family, Role, SandboxNeeds, Task, Verdict
from etpi_resources.chat.format import load_chat_format
from etpi_resources.engines.scripted import ScriptedEngine
from etpi_resources.sandboxes import Limits, SandboxStopped
from etpi_resources.sandboxes.bubblewrap import BubblewrapFactory, BubblewrapSandbox, _descendants
from etpi_resources.sandboxes.memory_group import GROUP_VARIABLE, MemoryGroup

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


class Watched:
    """Remembers the sandbox that started last."""

    def __init__(self, factory) -> None:
        self.factory, self.name, self.last = factory, factory.name, None

    def create(self, *args, **more):
        sandbox = self.factory.create(*args, **more)
        start = sandbox._start_guest

        def remember_and_start(guest: bytes) -> None:
            self.last = sandbox
            start(guest)

        sandbox._start_guest = remember_and_start
        return sandbox


def processes(sandbox) -> list[int]:
    """Return the guest, and the process outside that started it and watches it."""
    if isinstance(sandbox, BubblewrapSandbox):
        return [sandbox._process.pid, *_descendants(sandbox._process.pid)[:1]]  # type: ignore[union-attr]
    guest = sandbox._engine.client.inspect_container(sandbox._id)["State"]["Pid"]
    monitor = int(Path(f"/proc/{guest}/stat").read_text().rpartition(")")[2].split()[1])
    return [guest, monitor] if "conmon" in Path(f"/proc/{monitor}/comm").read_text() else [guest]


def policy(request) -> str:
    turn = sum(message["role"] == "assistant" for message in request.messages)
    return str(format_action([*COMMANDS, f"echo {SUBMIT}"][min(turn, len(COMMANDS))]))


def rollout(factory):
    engine = ScriptedEngine(policy, CHAT, "t")
    runtime = RolloutRuntime(Judged(), engine, factory, CHAT)  # pyright: ignore[reportArgumentType]
    task = Task("t1", "suite", "repo", "train", "do it", {}, "hash")
    job = RolloutJob(task, AgentSection(max_tokens=128), Identity("spec", "set", "scripted", "t"))
    return run_rollout(job, runtime)


def killed_after(factory, seconds: float, rng: random.Random):
    """Roll out once, with one process of its sandboxes killed after some time."""
    factory, results = Watched(factory), []
    thread = threading.Thread(target=lambda: results.append(rollout(factory)))
    thread.start()
    time.sleep(seconds)
    with suppress(OSError, AttributeError, ValueError):  # none has started, or the last has ended
        os.kill(rng.choice(processes(factory.last)), signal.SIGKILL)
    thread.join()
    return results[0]


def is_whole(record) -> bool:
    codes = [turn.exit_code for agent in record.agents for turn in agent.turns]
    return record.outcome["reward"] == 1.0 and codes == [5, 0, 0, 0]


@pytest.mark.parametrize(
    ("kills", "seed"), [(6, 0), pytest.param(100, 1, marks=[pytest.mark.long, pytest.mark.timeout(3600)])]
)
def test_killed_sandbox_is_an_infrastructure_error_and_never_a_verdict(factory, kills, seed):
    rng, kinds = random.Random(seed), Counter[str]()
    started = time.monotonic()
    assert is_whole(rollout(factory))
    whole = time.monotonic() - started
    for _ in range(kills):
        record = killed_after(factory, rng.uniform(0, 1.1 * whole), rng)
        codes = [turn.exit_code for agent in record.agents for turn in agent.turns]
        assert [code for code in codes if code is not None] == [5, 0, 0, 0][: len([c for c in codes if c is not None])]
        if record.error is None:
            assert is_whole(record)
        else:
            assert record.outcome["verdict"] == "infrastructure" and "SandboxStopped" in record.error
        kinds[record.error.split(":")[0] if record.error else "whole"] += 1
    print(dict(kinds))
    assert sum(kinds.values()) == kills


@pytest.mark.parametrize("killed", [0, -1], ids=["bubblewrap", "guest"])
@pytest.mark.parametrize("waits", [True, False])
def test_sandbox_that_is_killed_while_it_starts_was_stopped_from_outside(killed, waits):
    class Killed(Watched):
        def create(self, *args, **more):
            sandbox = super().create(*args, **more)
            start = sandbox._start_guest

            def start_and_kill(guest: bytes) -> None:
                start(guest)
                os.kill(processes(sandbox)[killed], signal.SIGKILL)
                if waits:
                    sandbox._process.wait()

            sandbox._start_guest = start_and_kill
            return sandbox

    with pytest.raises(SandboxStopped), Killed(BubblewrapFactory()).create({"a.txt": "start"}):
        pass


def test_rollout_whose_sandbox_was_killed_runs_again():
    class Killed(Watched):
        def create(self, *args, **more):
            sandbox = super().create(*args, **more)
            request = sandbox._request

            def killed(body: bytes, seconds: float) -> bytes:
                os.kill(processes(sandbox)[0], signal.SIGKILL)
                return request(body, seconds)

            sandbox._request = killed
            return sandbox

    records = [rollout(Killed(BubblewrapFactory())), rollout(BubblewrapFactory())]
    assert "SandboxStopped" in (records[0].error or "") and (records[0].outcome or {})["reward"] is None
    left = records.copy()
    assert run_with_retry(lambda *_: left.pop(0), Task("t1", "s", "r", "train", "x", {}, "h"), 0) is records[1]
    assert is_whole(records[1])


EAT = "import os, sys; sys.stdin.readline(); os.fork()\nx = []\nwhile True: x.append(b'x' * (1 << 20))"
"""Two processes, so that the kernel does not take one of them for the largest."""


def until_closed(sandbox) -> None:
    """Wait until the guest has ended, no longer: an engine removes the control group, which alone can tell why."""
    for _ in range(1000):
        if sandbox._channel.is_closed():
            return
        time.sleep(0.01)
    pytest.fail("the guest is alive after 10 s")


def use_up(own: Path, beside: Path | None = None) -> None:
    """Let processes in `beside` use up its control group's memory until the kernel has killed one in `own`."""
    eater = subprocess.Popen([sys.executable, "-c", EAT], stdin=subprocess.PIPE, start_new_session=True)
    ((beside or own) / "cgroup.procs").write_text(str(eater.pid))
    assert eater.stdin
    eater.stdin.write(b"\n")
    eater.stdin.flush()
    with suppress(FileNotFoundError):  # the group goes with its container
        while "oom_kill 0" in (own / "memory.oom_control").read_text():
            time.sleep(0.01)
    os.killpg(eater.pid, signal.SIGKILL)
    eater.wait()


def use_up_with_others(own: Path) -> None:
    """Let the groups that are beside a sandbox's run out of memory together, and the kernel kill a process of its."""
    (beside := own.parent / f"beside-{os.getpid()}").mkdir()
    (own.parent / "memory.limit_in_bytes").write_text(str(100 << 20))
    use_up(own, beside)
    (own.parent / "memory.limit_in_bytes").write_text("-1")
    MemoryGroup(beside).close()


@pytest.fixture
def own_group(factory, monkeypatch):
    """Return a sandbox that runs, and its control group, which is in another that nothing else is in."""
    if not Path("/sys/fs/cgroup/memory").is_dir() or (outer := MemoryGroup.create(1 << 40)) is None:
        pytest.skip("needs control groups of version 1, as root")
    monkeypatch.setenv(GROUP_VARIABLE, str(outer.statistics.parent))
    with suppress(SandboxStopped), factory.create({}, Limits(memory_bytes=64 << 20, file_bytes=8 << 20)) as sandbox:
        yield sandbox, sandbox._group.statistics.parent
    outer.close()


@pytest.mark.parametrize("end", [use_up, use_up_with_others])
def test_guest_that_the_kernel_kills_ended_by_itself_only_at_its_own_limit(own_group, end):
    sandbox, own = own_group
    for pid in (own / "cgroup.procs").read_text().split():
        Path("/proc", pid, "oom_score_adj").write_text("1000")
    end(own)
    until_closed(sandbox)
    if end is use_up:
        assert sandbox.run("echo on").output == "[the sandbox has ended]"
    else:
        with pytest.raises(SandboxStopped, match="SIGKILL"):
            sandbox.run("echo on")


def test_command_that_the_kernel_kills_below_the_limit_of_its_sandbox_has_no_result(own_group):
    sandbox, own = own_group
    assert sandbox.run("kill -KILL $$").exit_code == 137
    timer = threading.Timer(1, use_up_with_others, [own])
    timer.start()
    with pytest.raises(SandboxStopped, match="ran out of memory"):
        sandbox.run("sleep 20")
    timer.join()
