"""Calls and rollouts on several nodes: the same records as by threads, whatever dies, and no node with other code."""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
import time
from concurrent.futures import wait
from pathlib import Path
from types import SimpleNamespace

import pytest

from etpi_assets.resources import Resources
from etpi_assets.rollouts.assets import raw_rollouts
from etpi_assets.rollouts.collect import _stays, rollout_executor
from etpi_assets.specs.plugins import GROUPS
from etpi_assets.tasks.assets import tasks
from etpi_cluster.code import PLUGIN_GROUPS, code_hash
from etpi_cluster.fan_out import ClusterExecutor, OtherCode, WorkerKind, WorkersDied
from etpi_resources.backend import BackendError
from etpi_resources.engines import EngineUnavailable
from etpi_resources.engines.endpoints import Endpoints
from etpi_resources.engines.openai import OpenAIEngine
from etpi_resources.lake.lake import Lake, Ref
from tests.support.graph import write_spec
from tests.support.waiting import until

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[2]
TABLES = ("rollouts", "agents", "turns", "messages")
CLOCK = {"started_at", "wall_seconds", "at"}
"""The columns that may differ from run to run."""
TASKS = 12


def hold(seconds: float) -> tuple[int, float, float]:
    """Return the process, and when the call began and ended."""
    begun = time.time()
    time.sleep(seconds)
    return os.getpid(), begun, time.time()


def die_once(marker: str, number: int) -> int:
    """Kill this process at the first call of number 3."""
    if number == 3 and not os.path.exists(marker):
        Path(marker).touch()
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(0.05)
    return number


def die(number: int) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def fail(number: int) -> None:
    raise ZeroDivisionError(f"call {number}")


def own_key() -> str | None:
    return os.environ.get("TEACHER_KEY")


def test_calls_use_every_slot_of_every_node(on_cluster):
    with ClusterExecutor(log=lambda line: None) as executor:
        calls = [future.result() for future in [executor.submit(hold, 0.5) for _ in range(16)]]
    most = max(sum(begun <= at < ended for _, begun, ended in calls) for _, at, _ in calls)
    assert most == 4 and len({pid for pid, _, _ in calls}) == 2


def test_calls_of_a_killed_worker_run_again(on_cluster, tmp_path):
    log: list[str] = []
    with ClusterExecutor(log=log.append) as executor:
        futures = [executor.submit(die_once, str(tmp_path / "died"), number) for number in range(20)]
        assert [future.result() for future in futures] == list(range(20))
    assert any("run again elsewhere" in line for line in log)


def test_calls_of_a_killed_node_run_again(on_cluster):
    on_cluster.add("three", slots=2)
    with ClusterExecutor(log=lambda line: None) as executor:
        assert sum(executor.places.values()) == 6
        futures = [executor.submit(hold, 0.2) for _ in range(60)]
        until(lambda: on_cluster.pids("three", "ray::CallWorker.call"))
        on_cluster.kill("three", "raylet/raylet")
        assert len([future.result() for future in futures]) == 60


def test_call_that_kills_its_workers_is_the_error(on_cluster):
    with (
        ClusterExecutor(WorkerKind(tries=2), log=lambda line: None) as executor,
        pytest.raises(WorkersDied, match="2 workers .* node"),
    ):
        executor.submit(die, 1).result()


def test_error_of_a_call_names_its_node(on_cluster):
    with ClusterExecutor(log=lambda line: None) as executor:
        future = executor.submit(fail, 7)
        with pytest.raises(ZeroDivisionError, match="call 7") as caught:
            future.result()
    assert any("on node" in note and "in fail" in note for note in caught.value.__notes__)


def test_node_with_other_code_is_refused(on_cluster):
    with ClusterExecutor(code="0" * 16, log=lambda line: None) as executor:
        futures = [executor.submit(hold, 0.0) for _ in range(3)]
        wait(futures)
    for future in futures:
        with pytest.raises(OtherCode, match=rf"node .* \(hash {code_hash()}\) .*\({'0' * 16}\)"):
            future.result()


def test_hash_changes_with_any_file_of_a_package(tmp_path, monkeypatch):
    package = tmp_path / "plugged"
    (package / "prompts").mkdir(parents=True)
    (package / "__init__.py").write_text("")
    (package / "prompts" / "a.jinja").write_text("one")
    monkeypatch.syspath_prepend(tmp_path)
    first = code_hash("plugged")
    (package / "prompts" / "a.jinja").write_text("two")
    assert code_hash("plugged") == first, "it is computed once in a process"
    code_hash.cache_clear()
    assert code_hash("plugged") != first
    assert all(group.startswith(PLUGIN_GROUPS) for group in GROUPS.values()), "code of every kind of plugin is compared"


def test_cluster_without_sandboxes_is_an_error(on_cluster):
    with pytest.raises(BackendError, match=" etpi_nothing"):
        ClusterExecutor(WorkerKind(resource="etpi_nothing"))


def test_keys_come_from_the_environment_of_the_node(on_cluster, monkeypatch):
    monkeypatch.setenv("TEACHER_KEY", "the key of the step")
    with ClusterExecutor(log=lambda line: None) as executor:
        assert executor.submit(own_key).result() == "the key of the node"
    endpoint = OpenAIEngine("m", url="http://localhost:1/v1", key_env="TEACHER_KEY", template_kwargs={"a": 1})
    for client in (endpoint, Endpoints(["http://localhost:1"], key_env="TEACHER_KEY")):
        pickled = pickle.dumps(client)
        assert b"the key" not in pickled and b"TEACHER_KEY" in pickled
    copy = pickle.loads(pickle.dumps(endpoint))
    assert copy.fingerprint() == endpoint.fingerprint()
    copy.close()


def test_engine_in_this_process_or_at_its_loopback_stays():
    class Engine:
        name, portable, urls = "m", False, ("http://127.0.0.1:8000",)

    engine = Engine()
    assert "in this process" in _stays(engine, ["10.0.0.1"])  # type: ignore[arg-type]
    engine.portable = True  # type: ignore[misc]
    assert "127.0.0.1:8000 is an address of this node alone" in _stays(engine, ["10.0.0.1"])  # type: ignore[arg-type]
    assert _stays(engine, ["127.0.0.1"]) == ""  # type: ignore[arg-type]


def test_failed_collection_says_why_the_engines_servers_ended(on_cluster):
    engine = SimpleNamespace(name="m", portable=True, urls=(), exit_reason=lambda: "node a: the vLLM server was killed")
    runtime = SimpleNamespace(engine=engine, sandboxes=SimpleNamespace(name="bubblewrap"))
    refused = EngineUnavailable("http://127.0.0.3:1: ConnectError (6 tries)")
    with (
        pytest.raises(EngineUnavailable, match="node a: the vLLM server was killed\n.* run it again"),
        rollout_executor(runtime, 1, lambda line: None),  # type: ignore[arg-type]
    ):
        raise refused


# --- rollout sets ----------------------------------------------------------------------------------------------------


def lake_with_tasks(folder: Path) -> Resources:
    write_spec(
        folder / "specs", "suites", "little", f'extends = "coop_tiny_shared"\n[params]\ntrain = {TASKS}\nheldout = 24\n'
    )
    text = f'extends = "coop_tiny_shared_strong"\nsuite = "little"\ntasks = {TASKS}\nk = 2\n'
    write_spec(folder / "specs", "rollout_sets", "little", text)
    resources = Resources(lake=Lake(folder / "lake"), specs_folder=folder / "specs")
    tasks.execute("little", resources, log=lambda line: None)
    return resources


def tables(resources: Resources) -> dict[str, list[dict]]:
    ref = Ref("raw_rollouts", "rollout_set", "little")
    rows = {name: resources.lake.read(ref, name).to_pylist() for name in TABLES}
    return {name: [{k: v for k, v in row.items() if k not in CLOCK} for row in rows[name]] for name in TABLES}


@pytest.fixture(scope="module")
def by_threads(tmp_path_factory) -> dict[str, list[dict]]:
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("ETPI_CLUSTER", raising=False)
        resources = lake_with_tasks(tmp_path_factory.mktemp("threads"))
        assert not raw_rollouts.execute("little", resources, log=lambda line: None).manifest.blocked
    return tables(resources)


def test_rollout_set_over_nodes_resumes_after_a_kill_and_equals_threads(on_cluster, by_threads, tmp_path):
    resources = lake_with_tasks(tmp_path)
    code = (
        f"import sys; sys.path[:0] = {sys.path!r}\nfrom pathlib import Path\n"
        "from tests.cluster.test_fan_out import *\n"
        f"folder = Path({str(tmp_path)!r})\n"
        "raw_rollouts.execute('little', Resources(lake=Lake(folder / 'lake'), specs_folder=folder / 'specs'))"
    )
    step = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT)
    journals = tmp_path / "lake"

    def finished() -> list[bytes]:
        lines = [file.read_bytes() for file in journals.rglob("journal-*.jsonl")]
        return [line for line in b"".join(lines).splitlines(keepends=True) if line.endswith(b"\n")]

    until(lambda: len(finished()) >= 5 or step.poll() is not None, 60)
    step.send_signal(signal.SIGKILL)
    step.wait()
    kept = len(finished())
    assert 5 <= kept < 2 * TASKS
    until(lambda: not any(on_cluster.pids(name, text) for name in ("one", "two") for text in ("CallWorker", "bwrap")))
    log: list[str] = []
    assert not raw_rollouts.execute("little", resources, log=log.append).manifest.blocked
    assert any("rollouts run on 2 nodes, 4 at once" in line for line in log), log
    assert tables(resources) == by_threads
    assert len({row["rollout_id"] for row in by_threads["rollouts"]}) == 2 * TASKS
