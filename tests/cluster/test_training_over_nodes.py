"""Training over two nodes is training in one process; when a rank is killed, all end, and the next run continues.

The nodes are two raylets of this machine; a custom resource stands in for an accelerator.
"""

from __future__ import annotations

import json
import os
import re
import signal
import tempfile
import threading
import time
from contextlib import suppress
from pathlib import Path

import dagster as dg
import pytest
import torch
from safetensors.torch import load_file

pytest.importorskip("ray", reason="needs Ray: pip install etpi-cluster")

from etpi_cluster.over_nodes import spans_nodes
from etpi_resources.backend import BackendError
from etpi_resources.process.supervise import descendants
from etpi_resources.trainers.contracts import SftWorkerResult
from etpi_resources.trainers.pipes import WorkerFailed, run_worker
from etpi_resources.trainers.workers import sft_worker
from etpi_resources.trainers.workers.states import last_complete_step
from tests.support.ray_nodes import RayNodes, connected
from tests.support.sft import config_of, in_process, rank_of
from tests.support.tiny_training import learnable, make_base, write

pytestmark = pytest.mark.slow
torch.set_num_threads(1)
SAME = 1e-4
"""Largest difference of a tensor from one process's, as a share of how far training moved it (norms, float32)."""
TRAIN = {"batch_sequences": 3, "epochs": 2.0, "save_steps": 2, "learning_rate": 1e-2}


@pytest.fixture(scope="module")
def nodes(tmp_path_factory):
    """Two nodes with an accelerator each, and this process as a driver on the first."""
    with tempfile.TemporaryDirectory(prefix="r", dir="/tmp") as folder:  # Ray's sockets need a short path
        cluster = RayNodes(
            Path(folder), tmp_path_factory.mktemp("lake"), "127.0.0.2", head={"stand_in": 1}, accelerator="stand_in"
        )
        try:
            cluster.add("other", address="127.0.0.3", resources={"stand_in": 1})
            with connected(cluster):
                yield cluster
        finally:
            cluster.close()


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny")
    return make_base(folder / "base"), [write(learnable(7, validation=3), folder / "s.parquet")]


def same_training(base: Path, two: tuple[Path, SftWorkerResult], one: tuple[Path, SftWorkerResult]) -> None:
    for mine, wanted in zip(two[1].log, one[1].log, strict=True):
        measured = {key: figure for key, figure in wanted.model_dump(exclude={"seconds"}).items() if figure is not None}
        assert {key: getattr(mine, key) for key in measured} == pytest.approx(measured, rel=1e-5)
    assert [c.folder for c in two[1].checkpoints] == [c.folder for c in one[1].checkpoints]
    assert two[1].counted == one[1].counted
    before = load_file(base / "model.safetensors")
    for checkpoint in one[1].checkpoints:
        mine, wanted = (load_file(folder / checkpoint.folder / "model.safetensors") for folder in (two[0], one[0]))
        for name in wanted:
            moved = (wanted[name] - before[name]).norm()
            assert (mine[name] - wanted[name]).norm() <= SAME * moved + 1e-7, (checkpoint.folder, name)


def ranks_running() -> dict[str, int]:
    """Rank -> pid of the ranks of all nodes, which are below this process."""
    pids = descendants(os.getpid())
    return {rank: pid for pid in pids if (rank := rank_of(pid)) is not None}


def open_to_all(pids: list[int]) -> list[str]:
    """Addresses of the sockets of these processes that listen on all interfaces."""
    inodes = set()
    for pid in pids:
        for descriptor in Path(f"/proc/{pid}/fd").glob("*"):
            with suppress(OSError):
                inodes.update(re.findall(r"socket:\[(\d+)\]", os.readlink(descriptor)))
    rows = [line.split() for name in ("tcp", "tcp6") for line in Path(f"/proc/net/{name}").read_text().splitlines()]
    return [row[1] for row in rows if row[3] == "0A" and row[9] in inodes and set(row[1].partition(":")[0]) == {"0"}]


def test_more_accelerators_than_all_nodes_have_are_refused_at_once(nodes, tiny, tmp_path):
    assert spans_nodes(2, "stand_in") and not spans_nodes(1, "stand_in")
    config = config_of(*tiny, **TRAIN, shards=3)
    with pytest.raises(BackendError, match="shards = 3 .*'stand_in'.* 2 .*127.0.0.2, .*: 1, .*127.0.0.3, .*: 1"):
        run_worker(sft_worker.MODULE, config, tmp_path / "run", SftWorkerResult, processes=3, echo=None)


def test_lora_over_two_nodes_is_lora_in_one_process_and_its_messages_reach_the_step(nodes, tiny, tmp_path, capsys):
    train = {**TRAIN, "method": "lora"}
    results = {}

    @dg.asset
    def trained(context):
        config = config_of(*tiny, **train, shards=2)
        results["two"] = run_worker(
            sft_worker.MODULE, config, tmp_path / "two", SftWorkerResult, processes=2, context=context
        )
        return dg.MaterializeResult()

    with dg.instance_for_test() as instance:
        run = dg.materialize([trained], instance=instance)
        messages = [entry.user_message for entry in instance.all_logs(run.run_id)]
    assert any(
        re.search(r"2 ranks over 2 nodes: rank 0 on .*\(127.0.0.\d, \w+\), rank 1 on", line) for line in messages
    )
    assert sum("lora fine-tuning in fp32 on 2 x cpu" in line for line in messages) == 1, "rank 0 alone logs"
    assert "__dagster_pipes_version" not in (tmp_path / "two" / "worker.log").read_text()
    one = in_process(tmp_path / "one", config_of(*tiny, **train))
    same_training(tiny[0], (tmp_path / "two", results["two"]), (tmp_path / "one", one))


@pytest.mark.long
def test_killed_rank_ends_all_and_the_next_run_continues_to_the_same_result(nodes, tiny, tmp_path):
    config = config_of(*tiny, **TRAIN, shards=2).model_copy(update={"state_seconds": 0.0})
    folder, seen = tmp_path / "two", {}

    def kill_second() -> None:
        while (last_complete_step(folder) or 0) < 2:
            time.sleep(0.005)
        running = ranks_running()
        seen["open"] = open_to_all(list(running.values()))
        os.kill(running["1"], signal.SIGKILL)
        seen.update(running)

    killer = threading.Thread(target=kill_second, daemon=True)
    killer.start()
    began = time.monotonic()
    with pytest.raises(WorkerFailed, match=r"(?s)rank 1 of 2, .* \(127.0.0.\d, \w+\), .*SIGKILL"):
        run_worker(sft_worker.MODULE, config, folder, SftWorkerResult, processes=2, echo=None)
    killer.join()
    assert seen["open"] == [] and not ranks_running() and time.monotonic() - began < 60
    assert not (folder / "result.json").exists()
    step = last_complete_step(folder)
    assert step is not None and step >= 2

    lines: list[str] = []
    result = run_worker(sft_worker.MODULE, config, folder, SftWorkerResult, processes=2, echo=lines.append)
    assert any(re.search(rf"continuing from step {step} of 5", line) for line in lines), lines
    one = in_process(tmp_path / "one", config_of(*tiny, **TRAIN))
    same_training(tiny[0], (folder, result), (tmp_path / "one", one))
    log = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert log == [line.model_dump() for line in result.log]
