"""The journal and the collection on it: nothing finished is lost, rerun or doubled, whatever is killed."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest

from etpi_assets.agent.loop import Identity, RolloutJob, RolloutRuntime, rollout_id, run_rollout
from etpi_assets.rollouts.collect import collect
from etpi_assets.rollouts.journal import Journal, JournalError, to_line
from etpi_assets.specs.rollout_set import AgentSection
from etpi_assets.tasks.family import Task
from etpi_assets.trajectories.records import RolloutRecord
from etpi_assets.trajectories.tables import to_tables
from etpi_assets.worlds.coop_tiny_shared import CoopTinyShared
from etpi_assets.worlds.coop_tiny_shared.policy import CoopTinySharedPolicy, SharedSkill
from etpi_resources.chat.format import load_chat_format
from etpi_resources.engines import EngineUnavailable
from etpi_resources.engines.scripted import ScriptedEngine
from etpi_resources.sandboxes import SandboxUnavailable
from etpi_resources.sandboxes.bubblewrap import BubblewrapFactory
from tests.support.finished import TASKS, made
from tests.support.waiting import until

# --- the file ------------------------------------------------------------------------------------------------------


def test_appended_rollouts_are_read_back(tmp_path):
    with Journal(tmp_path, "spec") as journal:
        journal.append(made(TASKS[0], 0))
        assert journal.has(TASKS[0], 0) and not journal.has(TASKS[0], 1)
    with Journal(tmp_path, "spec") as journal:
        assert journal.get(TASKS[0], 0) == made(TASKS[0], 0)
        with pytest.raises(KeyError, match=" t1 sample "):
            journal.get(TASKS[1], 0)


def test_another_spec_or_another_text_of_the_task_is_another_rollout(tmp_path):
    with Journal(tmp_path, "spec") as journal:
        journal.append(made(TASKS[0], 0))
        assert not journal.has(dataclasses.replace(TASKS[0], content_hash="edited"), 0)
    with Journal(tmp_path, "other") as journal:
        assert not journal.has(TASKS[0], 0)


@pytest.mark.parametrize("cut", [1, 20, 400])
def test_a_torn_last_line_is_cut_off(tmp_path, cut):
    with Journal(tmp_path, "spec") as journal:
        journal.append(made(TASKS[0], 0))
        journal.append(made(TASKS[1], 0))
        path = journal.path
    whole = path.read_bytes()
    path.write_bytes(whole[:-cut])
    with Journal(tmp_path, "spec") as journal:
        assert journal.has(TASKS[0], 0) and not journal.has(TASKS[1], 0)
        journal.append(made(TASKS[1], 0))
    assert path.read_bytes() == whole


def test_a_line_under_a_wrong_key_is_refused(tmp_path):
    with Journal(tmp_path, "spec") as journal:
        journal.append(made(TASKS[0], 0))
        path = journal.path
    record = made(TASKS[1], 0)
    for change in (
        {"task_id": "t2"},
        {"task_hash": "edited"},
        {"sample": 1},
    ):
        path.write_bytes(to_line(dataclasses.replace(record, **change), "spec"))
        with pytest.raises(JournalError, match="line 1: key"), Journal(tmp_path, "spec"):
            pass
    line = json.loads(to_line(record, "spec"))
    line["rows"]["turns"][0]["suffix_ids"] = [9]
    path.write_text(json.dumps(line) + "\n")
    with pytest.raises(JournalError, match="captured"), Journal(tmp_path, "spec"):
        pass
    path.write_text("garbage\n")
    with pytest.raises(JournalError, match="line 1"), Journal(tmp_path, "spec"):
        pass


def test_rollout_is_written_only_once(tmp_path):
    with Journal(tmp_path, "spec") as journal:
        record = made(TASKS[0], 0)
        journal.append(record)
        with pytest.raises(JournalError, match=record.rollout_id):
            journal.append(record)
        path = journal.path
    path.write_bytes(path.read_bytes() * 2)
    with pytest.raises(JournalError, match=f"line 2: {record.rollout_id} "), Journal(tmp_path, "spec"):
        pass


def test_append_after_an_interrupted_one_overwrites_nothing(tmp_path, monkeypatch):
    """The signal that stops a run raises KeyboardInterrupt in the thread that appends, most often while it syncs."""

    def interrupted(descriptor):
        monkeypatch.undo()
        raise KeyboardInterrupt

    long = made(TASKS[0], 0, error="long" * 100)
    with Journal(tmp_path, "spec") as journal:
        monkeypatch.setattr(os, "fdatasync", interrupted)
        with pytest.raises(KeyboardInterrupt):
            journal.append(long)
        journal.append(made(TASKS[1], 0))
        assert journal.get(TASKS[0], 0) == long
    with Journal(tmp_path, "spec") as journal:
        assert [journal.get(task, 0) for task in TASKS[:2]] == [long, made(TASKS[1], 0)]


def test_journal_admits_one_process(tmp_path):
    with (
        Journal(tmp_path, "spec"),
        pytest.raises(JournalError, match=f" process {os.getpid()} "),
        Journal(tmp_path, "spec"),
    ):
        pass


# --- collecting ----------------------------------------------------------------------------------------------------


def collected(run, journal, k=1, concurrency=1, **more) -> list[RolloutRecord]:
    with ThreadPoolExecutor(concurrency) as executor:
        return list(collect(TASKS, k, [(run, journal)], executor=executor, **more))


def test_each_rollout_runs_once_and_results_are_in_order(tmp_path):
    ran: list[tuple[str, int]] = []
    done: list[int] = []

    def run(task, sample):
        time.sleep(0.01 * (3 - int(task.task_id[1])))
        ran.append((task.task_id, sample))
        return made(task, sample)

    with Journal(tmp_path, "spec") as journal:
        journal.append(made(TASKS[2], 1))
        records = collected(run, journal, 2, 4, advance=done.append)
        assert collected(run, journal, 2, 4) == records
    wanted = [(task, sample) for task in TASKS for sample in range(2)]
    assert [r.rollout_id for r in records] == [rollout_id(task, sample, "spec") for task, sample in wanted]
    assert sorted(ran) == sorted((t.task_id, s) for t, s in wanted if (t.task_id, s) != ("t2", 1))
    assert done[0] == 1 and sum(done) == 8


def test_runs_are_collected_together_each_into_its_own_journal(tmp_path):
    both = threading.Barrier(2)

    def run(task, sample, key):
        both.wait(60)
        return made(task, sample, key)

    with Journal(tmp_path, "one") as one, Journal(tmp_path, "two") as two, ThreadPoolExecutor(2) as executor:
        runs = [(partial(run, key=journal.spec_key), journal) for journal in (one, two)]
        records = list(collect(TASKS[:1], 1, runs, executor=executor))
        assert records == [journal.get(TASKS[0], 0) for journal in (one, two)]
    assert [record.rollout_id for record in records] == [rollout_id(TASKS[0], 0, key) for key in ("one", "two")]


def test_infrastructure_error_is_retried_once_and_then_kept(tmp_path):
    calls: list[str] = []

    def run(task, sample):
        calls.append(task.task_id)
        broken = task is TASKS[0] or (task is TASKS[1] and calls.count("t1") == 1)
        return made(task, sample, error="boom" if broken else None)

    with Journal(tmp_path, "spec") as journal:
        records = collected(run, journal)
    assert [r.error for r in records] == ["boom", None, None, None]
    assert [calls.count(f"t{i}") for i in range(4)] == [2, 2, 1, 1]


def test_unavailable_sandbox_stops_the_collection(tmp_path):
    started: list[str] = []

    def run(task, sample):
        started.append(task.task_id)
        if task is TASKS[1]:
            raise SandboxUnavailable("install it")
        return made(task, sample)

    with Journal(tmp_path, "spec") as journal:
        with pytest.raises(SandboxUnavailable, match="install it"):
            collected(run, journal, 200)
        assert 200 <= len(journal) < 400 and len(started) == len(journal) + 1


def test_other_weights_stop_the_collection_and_finished_rollouts_are_kept(tmp_path):
    started: list[int] = []

    def run(task, sample):
        started.append(sample)
        return made(task, sample)

    def check():
        if len(journal) == 3:
            raise EngineUnavailable("other weights")

    with Journal(tmp_path, "spec") as journal:
        with pytest.raises(EngineUnavailable):
            collected(run, journal, 200, check=check)
        assert 3 <= len(journal) == len(started)


def test_interrupted_collection_starts_no_rollout_and_keeps_running_ones_without_an_infrastructure_error(tmp_path):
    futures: list[Future[RolloutRecord]] = []
    started: list[int] = []
    all_cancelled = threading.Event()

    class Recorded(ThreadPoolExecutor):
        def submit(self, fn, /, *args, **kwargs):
            futures.append(super().submit(fn, *args, **kwargs))
            return futures[-1]

    def run(task, sample):
        started.append(sample)
        if sample:
            all_cancelled.wait(5)
        return made(task, sample, error="the engine is gone" if sample == 4 else None)

    def check():
        while sum(future.running() for future in futures) < 5:
            time.sleep(0.01)
        waiting = [future for future in futures if not future.running() and not future.done()]
        left = iter(range(len(waiting) - 1, -1, -1))
        for future in waiting:
            future.add_done_callback(lambda _: next(left) or all_cancelled.set())
        raise KeyboardInterrupt

    with Journal(tmp_path, "spec") as journal, Recorded(5) as executor:
        with pytest.raises(KeyboardInterrupt):
            collect(TASKS, 100, [(run, journal)], executor=executor, check=check)
        assert set(started) == set(range(6))
        assert [sample for sample in range(100) if journal.has(TASKS[0], sample)] == [0, 1, 2, 3, 5]


def test_threads_do_not_tear_lines(tmp_path):
    with Journal(tmp_path, "spec") as journal:
        threads = [
            threading.Thread(target=lambda t=task: [journal.append(made(t, s)) for s in range(50)]) for task in TASKS
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    with Journal(tmp_path, "spec") as journal:
        assert len(journal) == 200
        assert all(journal.get(task, s) == made(task, s) for task in TASKS for s in range(50))


# --- kill -9 -------------------------------------------------------------------------------------------------------

K = 2


def collect_world(folder: Path, count: int = 10) -> list[RolloutRecord]:
    family, chat = CoopTinyShared(), load_chat_format("tiny")
    tasks = [
        task for task in family.load("coop_tiny_shared", 1, {"train": count, "heldout": 0}) if isinstance(task, Task)
    ]
    engine = ScriptedEngine(CoopTinySharedPolicy(SharedSkill()), chat, "t")
    identity = Identity(spec_key="world", origin="set", engine="scripted")
    runtime = RolloutRuntime(family, engine, BubblewrapFactory(), chat)
    ran = folder / "ran"
    folder.mkdir(exist_ok=True)

    def run(task, sample):
        record = run_rollout(RolloutJob(task, AgentSection(), identity, sample), runtime)
        with ran.open("a") as log:
            log.write(record.rollout_id + "\n")
        return record

    with Journal(folder, "world") as journal, ThreadPoolExecutor(4) as executor:
        return list(collect(tasks, K, [(run, journal)], executor=executor))


def timeless(records: list[RolloutRecord]):
    for record in records:
        record.started_at = record.wall_seconds = None
        for agent in record.agents:
            for item in (*agent.turns, *agent.messages):
                item.at = None
    return to_tables(records)


def test_killed_collection_resumes(tmp_path):
    folder = tmp_path / "killed"
    folder.mkdir()
    child = subprocess.Popen(
        [sys.executable, "-c", f"import sys; sys.path[:0] = {sys.path!r}\n"
         f"from tests.rollouts.test_journal import *; collect_world(Path({str(folder)!r}))"],
        cwd=Path(__file__).parents[2],
    )  # fmt: skip
    journal = folder / "journal-world.jsonl"
    until(lambda: journal.exists() and journal.read_bytes().count(b"\n") >= 5, every=0.005)
    assert child.poll() is None
    os.kill(child.pid, signal.SIGKILL)
    child.wait()
    finished = [
        json.loads(line)["key"] for line in journal.read_bytes().splitlines(keepends=True) if line.endswith(b"\n")
    ]
    assert 5 <= len(finished) < 10 * K
    before = (folder / "ran").read_text().split()
    resumed = collect_world(folder)
    again = (folder / "ran").read_text().split()[len(before) :]
    assert set(again).isdisjoint(finished), "what was finished ran again"
    assert len(again) == len(set(again)) == 10 * K - len(finished)
    whole = collect_world(tmp_path / "whole")
    assert timeless(resumed) == timeless(whole)
    assert all(r.outcome and r.outcome["verdict"] != "infrastructure" for r in whole)
