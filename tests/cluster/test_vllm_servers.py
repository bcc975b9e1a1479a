"""vLLM servers as actors: where they listen, who waits for whom, and that none outlives its step or its node."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest

from etpi_cluster import vllm_servers
from etpi_cluster.code import code_hash
from etpi_cluster.vllm_servers import ClusterServers, ServedFiles
from etpi_resources.backend import BackendError
from etpi_resources.engines import EngineUnavailable
from tests.cluster.conftest import VLLM_KEY
from tests.support.ray_nodes import RayNodes
from tests.support.waiting import until

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[2]
NODES = {"one": "127.0.0.3", "two": "127.0.0.4"}


@pytest.fixture
def checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that `light_vllm` serves; this process knows the servers' key."""
    monkeypatch.setenv("VLLM_API_KEY", VLLM_KEY)
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    (folder / "light").touch()
    return folder


def serve(
    folder: Path, say: Callable[[str], None] = lambda line: None, *, options: Mapping[str, Any] | None = None
) -> ClusterServers:
    log = folder.parent / "logs" / "student.log"
    return ClusterServers(folder, "student", log=log, options=options or {}, say=say)


def served_by(cluster: RayNodes, name: str) -> list[int]:
    """Return the processes of the servers on a node."""
    return cluster.pids(name, "light_vllm.py") + cluster.pids(name, "engine-of-")


def test_a_server_for_each_gpu_listens_on_its_nodes_address_and_asks_for_the_key(
    on_cluster: RayNodes, checkpoint: Path
) -> None:
    with closing(serve(checkpoint, options={"seed": 7})) as servers:
        assert sorted(urlsplit(url).hostname or "" for url in servers.urls) == sorted(NODES.values())
        assert servers.key_env == "VLLM_API_KEY" and servers.exit_reason() is None
        for url in servers.urls:
            listed = [
                httpx.get(f"{url}/v1/models", headers=headers, timeout=60).status_code
                for headers in ({}, {"Authorization": f"Bearer {VLLM_KEY}"})
            ]
            assert listed == [401, 200]
            with pytest.raises(httpx.ConnectError):
                httpx.get(f"http://127.0.0.1:{urlsplit(url).port}/health", timeout=60)
        assert all(served_by(on_cluster, name) for name in NODES)
    assert not any(served_by(on_cluster, name) for name in NODES)
    logs = sorted((checkpoint.parent / "logs").iterdir())
    assert [log.name for log in logs] == ["student.0.log", "student.1.log"]
    assert all("--seed 7" in log.read_text() for log in logs)


def test_second_step_waits_until_the_first_ends(
    on_cluster: RayNodes, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    with closing(serve(checkpoint)) as first:
        monkeypatch.setattr(vllm_servers, "PLACE_SECONDS", 1.0)
        second: list[ClusterServers] = []
        step = threading.Thread(target=lambda: second.append(serve(checkpoint, said.append)))
        step.start()
        until(lambda: said)
        assert said == ["student waits for 1 GPU: other steps hold them"] and not second
        assert len(first.urls) == 2
    step.join(30)
    with closing(second[0]) as servers:
        assert servers.urls and servers.exit_reason() is None


def test_servers_end_with_a_killed_step(on_cluster: RayNodes, checkpoint: Path) -> None:
    code = (
        f"import sys; sys.path[:0] = {sys.path!r}\n"
        "from pathlib import Path\nfrom tests.cluster.test_vllm_servers import serve\n"
        f"servers = serve(Path({str(checkpoint)!r}))\nprint(*servers.urls, flush=True)\n"
        "import time; time.sleep(600)\n"
    )
    step = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert step.stdout is not None
    assert len(step.stdout.readline().split()) == 2 and all(served_by(on_cluster, name) for name in NODES)
    step.kill()
    step.wait()
    step.stdout.close()
    until(lambda: not any(served_by(on_cluster, name) for name in NODES), 30)


def test_rollouts_go_on_without_a_dead_server_and_the_last_ones_end_is_the_error(
    on_cluster: RayNodes, checkpoint: Path
) -> None:
    said: list[str] = []
    with closing(serve(checkpoint, said.append)) as servers:
        for dead, name in enumerate(NODES):
            assert len(said) == 1 + dead
            for pid in on_cluster.pids(name, "light_vllm.py"):
                os.kill(pid, signal.SIGKILL)
            until(lambda name=name: not served_by(on_cluster, name))
            until(lambda dead=dead: servers.exit_reason() is not None or len(said) == 2 + dead)
        reason = servers.exit_reason()
    assert reason and all(f"({address}): the vLLM server of student" in reason for address in NODES.values())
    assert "SIGKILL" in reason and "light vllm" in reason


def test_servers_of_a_lost_node_end_and_the_reason_names_it(on_cluster: RayNodes, checkpoint: Path) -> None:
    program = ROOT / "tests" / "support" / "light_vllm.py"
    script = checkpoint.parent / "vllm"
    script.write_text(f'#!/bin/sh\nPYTHONPATH={ROOT} exec {sys.executable} {program} "$@"\n')
    script.chmod(0o755)
    on_cluster.add("box", gpus=2, address="127.0.0.5", environment={"ETPI_VLLM": str(script), "VLLM_API_KEY": VLLM_KEY})
    with closing(serve(checkpoint, options={"tensor-parallel-size": 2})) as servers:
        assert [urlsplit(url).hostname for url in servers.urls] == ["127.0.0.5"]
        on_cluster.kill("box", "raylet/raylet")
        until(servers.exit_reason, 60)
        assert f"the vLLM server of student at {servers.urls[0]} ended with its node" in (servers.exit_reason() or "")
        until(lambda: not served_by(on_cluster, "box"), 30)


@pytest.mark.long
def test_checkpoint_that_cannot_be_served_names_the_node_and_the_log(on_cluster: RayNodes, checkpoint: Path) -> None:
    (checkpoint / "broken").touch()
    with pytest.raises(EngineUnavailable, match=r"node .* \(127\.0\.0\.[34]\): (?s:.)*this checkpoint is broken"):
        serve(checkpoint)


def test_more_gpus_than_any_node_has_is_an_error_at_once(on_cluster: RayNodes, checkpoint: Path) -> None:
    with pytest.raises(BackendError, match=" 8 GPU .*: .* 1"):
        serve(checkpoint, options={"tensor_parallel_size": 4, "data-parallel-size": 2})


def test_node_with_other_code_files_or_key_serves_nothing(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    alike = {"folder": str(checkpoint), "name": "student", "sizes": {"light": 0}, "code": code_hash(), "has_key": True}
    assert ServedFiles(**alike).differs() is None
    for changed, message in (
        ({"code": "0" * 16}, f"{code_hash()}.*{'0' * 16}"),
        ({"sizes": {"light": 0, "model.safetensors": 5}}, "model.safetensors, .*0 "),
        ({"has_key": False}, "VLLM_API_KEY"),
    ):
        error = ServedFiles(**{**alike, **changed}).differs()
        with pytest.raises((BackendError, EngineUnavailable), match=message):
            raise error  # type: ignore[misc]
    monkeypatch.delenv("VLLM_API_KEY")
    assert "set on the step's node alone" in str(ServedFiles(**alike).differs())
