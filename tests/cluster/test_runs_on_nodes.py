"""Dagster runs on a cluster: a real Ray of three nodes, a real Postgres, jobs launched by command and from the page.

The nodes are raylets of this machine. `a` and `c` have sandboxes, `b` has a stand-in for a GPU, the head has nothing.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from etpi.web.ui import WORKSPACE
from etpi_resources.lake.lake import Lake, Ref
from etpi_resources.process.supervise import supervised
from tests.support.graph import write_spec
from tests.support.lakes import journaled
from tests.support.postgres import PASSWORD, PostgresServer
from tests.support.ray_nodes import NEEDS_RAY, RayNodes, command_line
from tests.support.small_specs import DATA_ALONE, write_small_specs
from tests.support.waiting import until
from tests.support.web_server import free_port

pytestmark = [pytest.mark.slow, NEEDS_RAY]
ADDRESS = "127.0.0.2"  # Ray replaces 127.0.0.1 by the machine's own address
SECONDS = 300.0
ON_GPU = 'extends = "first"\nrequires = "gpu"\n'
SHARDED = 'requires = "gpu"' + DATA_ALONE.replace('kind = "none"', 'kind = "tiny"').replace(
    '[train]\nmethod = "none"', '[train]\nmethod = "full"\nshards = 4'
)

LAUNCH = """mutation($params: ExecutionParams!) { launchRun(executionParams: $params) {
  __typename ... on LaunchRunSuccess { run { runId } } ... on PythonError { message }
  ... on InvalidSubsetError { message }
  ... on RunConfigValidationInvalid { errors { message } } } }"""

TERMINATE = """mutation($run: String!) { terminateRun(runId: $run) {
  __typename ... on PythonError { message } ... on TerminateRunFailure { message } } }"""
LEFT = ("execute_step", "execute_run", "bwrap", "call_worker", "ray::Worker")


@dataclass
class Site:
    """The cluster, and the environment of whoever launches runs on it."""

    ray: RayNodes
    lake: Path
    environment: dict[str, str]
    page: str = ""

    def command(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", *arguments],
            env=self.environment, cwd=self.lake, capture_output=True, text=True, check=False,
        )  # fmt: skip

    def launched_from_page(self, job: str, partition: str, assets: list[str]) -> str:
        selector = {
            "repositoryLocationName": "etpi", "repositoryName": "__repository__", "jobName": job,
            "assetSelection": [{"path": [asset]} for asset in assets],
        }  # fmt: skip
        tags = [{"key": "dagster/partition", "value": partition}]
        params = {"selector": selector, "runConfigData": {}, "executionMetadata": {"tags": tags}}
        answer = ask(self.page, LAUNCH, params=params)["launchRun"]
        assert answer["__typename"] == "LaunchRunSuccess", answer
        return answer["run"]["runId"]

    def events(self, run_id: str) -> list[Any]:
        return [entry for entry in self._instance().all_logs(run_id) if entry.dagster_event or entry.message]

    def ended(self, run_id: str) -> str:
        """Wait for the run's end and return its status."""
        instance = self._instance()

        def status() -> str | None:
            run = instance.get_run_by_id(run_id)
            return run.status.value if run and run.is_finished else None

        return until(status, SECONDS, lambda: self.told(run_id))

    def told(self, run_id: str) -> str:
        lines = [f"{entry.step_key}: {entry.message}" for entry in self.events(run_id)]
        return "\n".join([*lines, *(f"{step}: {error}" for step, error in self._errors(run_id).items())])

    def nodes_of(self, run_id: str, step: str) -> list[str]:
        """Return the nodes that a step was on, in order."""
        words = [entry.message for entry in self.events(run_id) if entry.step_key == step]
        return [word.removeprefix("on node ") for word in words if word.startswith("on node ")]

    def failure(self, run_id: str, step: str) -> str:
        return self._errors(run_id)[step].message

    def _errors(self, run_id: str) -> dict[str, Any]:
        """Return the error of each failed step."""
        data = [e.dagster_event for e in self.events(run_id) if e.dagster_event and e.dagster_event.is_step_failure]
        return {event.step_key: event.step_failure_data.error for event in data}

    def _instance(self) -> Any:
        import dagster as dg

        return dg.DagsterInstance.from_config(self.environment["DAGSTER_HOME"])


@pytest.fixture(scope="module")
def site(postgres_server: PostgresServer) -> Iterator[Site]:
    folder = Path(tempfile.mkdtemp(prefix="etpi-", dir="/tmp"))  # sockets need a short path
    lake = folder / "lake"
    lake.mkdir()
    (folder / "ray").mkdir()
    passwords = folder / "pgpass"
    passwords.write_text(f"127.0.0.1:{postgres_server.port}:*:etpi:{PASSWORD}\n")
    passwords.chmod(0o600)
    node_environment = {"PGPASSFILE": str(passwords), "RAY_raylet_start_wait_time_s": "150"}
    ray = RayNodes(
        folder / "ray", lake, ADDRESS, accelerator="etpi_stand_in", postgres=postgres_server.new_database(), jobs=True,
        environment=node_environment,
    )  # fmt: skip
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("RAY_", "ETPI_", "PG"))}
    specs = write_small_specs(folder / "specs")
    write_spec(specs, "experiments", "on_gpu", ON_GPU)
    write_spec(specs, "experiments", "sharded", SHARDED)
    environment = {
        **clean, **node_environment, "ETPI_CLUSTER": str(ray.settings), "ETPI_SPECS": str(specs),
        "DAGSTER_HOME": str(lake / ".dagster_home"),
    }  # fmt: skip
    with closing(ray):
        ray.add("a", cpus=2, slots=2, environment=node_environment)
        ray.add("b", cpus=2, resources={"etpi_stand_in": 1}, environment=node_environment)
        ray.add("c", cpus=2, slots=2, environment=node_environment)
        site = Site(ray, lake, environment)
        done = site.command("etpi", "cluster", "init", "--force")
        assert done.returncode == 0, done.stderr
        with _page(site):
            yield site
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(autouse=True)
def environment_of_the_site(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("ETPI_CLUSTER", "PGPASSFILE"):
        monkeypatch.setenv(name, site.environment[name])


@pytest.mark.long
def test_lost_node_has_its_step_run_again_on_another(site: Site) -> None:
    """The run is launched by command; the node of its step is killed in the middle."""
    write_spec(
        Path(site.environment["ETPI_SPECS"]), "suites", "long", 'extends = "coop_tiny_shared"\n[params]\ntrain = 200\n'
    )
    tags = json.dumps({"dagster/partition": "long"})
    launched = site.command(
        "dagster", "job", "launch", "-m", "etpi_assets.definitions", "-j", "prepare_suite", "--tags", tags,
        "--run-id", "11111111-1111-4111-8111-111111111111",
    )  # fmt: skip
    assert launched.returncode == 0, launched.stderr
    run = "11111111-1111-4111-8111-111111111111"

    def begun() -> str | None:
        return (site.nodes_of(run, "tasks") or [None])[0]

    first = until(begun, SECONDS, lambda: site.told(run))
    site.ray.end(first)
    assert site.ended(run) == "SUCCESS", site.told(run)
    assert {first, *site.nodes_of(run, "tasks")} == {"a", "c"}  # the other node with sandboxes
    assert Lake(site.lake).current(Ref("tasks", "suite", "long")) is not None
    assert PASSWORD not in _jobs(site)


def test_page_launches_a_step_where_the_stand_in_for_a_gpu_is(site: Site) -> None:
    run = site.launched_from_page("train", "on_gpu", ["base_checkpoint"])
    assert site.ended(run) == "SUCCESS", site.told(run)
    assert site.nodes_of(run, "base_checkpoint") == ["b"]


def test_step_that_no_node_can_serve_fails_before_anything_runs(site: Site) -> None:
    run = site.launched_from_page("train", "sharded", ["experiment_spec", "base_checkpoint", "sft_checkpoint"])
    assert site.ended(run) == "FAILURE"
    reason = site.failure(run, "experiment_spec")
    assert "sft_checkpoint of sharded" in reason
    assert "etpi_stand_in 4" in reason and "b (CPU 2, etpi_stand_in 1)" in reason
    assert not site.nodes_of(run, "experiment_spec")


@pytest.mark.skipif(not os.environ.get("ETPI_TEST_CLUSTER"), reason="minutes: make test-cluster")
def test_ctrl_c_stops_the_run_and_leaves_no_process(site: Site) -> None:
    specs = Path(site.environment["ETPI_SPECS"])
    write_spec(specs, "suites", "slow", 'extends = "coop_tiny_shared"\n[params]\ntrain = 800\n')
    write_spec(
        specs, "rollout_sets", "slow_strong", 'extends = "coop_tiny_shared_strong"\nsuite = "slow"\ntasks = 24\nk = 1\n'
    )
    write_spec(specs, "experiments", "slow", DATA_ALONE.replace("little_strong", "slow_strong"))
    printed = site.lake.parent / "ctrl-c.log"
    with printed.open("wb") as log:
        etpi = subprocess.Popen(
            [sys.executable, "-m", "etpi", "run", "slow"], env=site.environment, cwd=site.lake.parent, stdout=log,
            stderr=log, stdin=subprocess.DEVNULL, start_new_session=True,
        )  # fmt: skip
    try:
        until(lambda: b"experiment_inputs: on node" in printed.read_bytes(), SECONDS, printed.read_text)
        os.killpg(etpi.pid, signal.SIGINT)  # as a terminal does
        assert etpi.wait(timeout=120) == 130, printed.read_text()
    finally:
        if etpi.poll() is None:
            os.killpg(etpi.pid, signal.SIGKILL)
    told = printed.read_text()
    run = re.search(r"run_experiment of \w+: run (\S+)", told)
    assert run and "Traceback" not in told and f"stopping run {run[1]}" in told, told
    assert site.ended(run[1]) == "CANCELED"
    _no_process_is_left(site)
    assert Lake(site.lake).current(Ref("tasks", "suite", "slow")) is None


@pytest.mark.skipif(not os.environ.get("ETPI_TEST_CLUSTER"), reason="minutes: make test-cluster")
def test_run_stopped_from_the_page_in_the_middle_of_a_collection_leaves_no_process(site: Site) -> None:
    specs = Path(site.environment["ETPI_SPECS"])
    write_spec(
        specs, "rollout_sets", "many", 'extends = "coop_tiny_shared_strong"\nsuite = "little"\ntasks = 24\nk = 24\n'
    )
    prepared = site.launched_from_page("prepare_suite", "little", ["suite_spec", "tasks"])
    assert site.ended(prepared) == "SUCCESS", site.told(prepared)
    run = site.launched_from_page("collect_rollouts", "many", ["rollout_set_spec", "raw_rollouts"])
    until(lambda: journaled(site.lake, "many"), SECONDS, lambda: site.told(run))
    answer = ask(site.page, TERMINATE, run=run)["terminateRun"]
    assert answer["__typename"] == "TerminateRunSuccess", answer
    assert site.ended(run) == "CANCELED"
    _no_process_is_left(site)
    assert 0 < len(journaled(site.lake, "many")) < 24 * 24
    again = site.launched_from_page("collect_rollouts", "many", ["rollout_set_spec", "raw_rollouts"])
    assert site.ended(again) == "SUCCESS", site.told(again)


def _no_process_is_left(site: Site) -> None:
    """Wait until no step, rollout or sandbox runs on a node."""

    def left() -> list[str]:
        pids = [pid for name in ("head", "a", "b", "c") for word in LEFT for pid in site.ray.pids(name, word)]
        return [command_line(pid) for pid in pids]

    until(lambda: not left(), SECONDS, left)


def _jobs(site: Site) -> str:
    """Return all that Ray's list of jobs shows."""
    from etpi_cluster.nodes import job_client
    from etpi_cluster.settings import read

    return "".join(map(str, job_client(read(site.ray.settings)).list_jobs()))


def _page(site: Site) -> Any:
    """Start Dagster's web page; a context manager that ends it."""
    from contextlib import contextmanager

    @contextmanager
    def page() -> Iterator[None]:
        port = free_port("127.0.0.1")
        site.page = f"http://127.0.0.1:{port}/graphql"
        line = [sys.executable, "-m", "dagster_webserver", "-w", str(WORKSPACE), "-h", "127.0.0.1", "-p", str(port)]
        with (site.lake.parent / "page.log").open("wb") as log:
            process = subprocess.Popen(
                supervised(line, grace=3.0), env=site.environment, cwd=site.lake, stdout=log, stderr=log,
                stdin=subprocess.DEVNULL,
            )  # fmt: skip
        try:
            until(lambda: _answers(site.page), SECONDS)
            yield
        finally:
            process.terminate()
            process.wait()

    return page()


def _answers(url: str) -> bool:
    try:
        ask(url, "{ version }")
    except OSError:
        return False
    return True


def ask(url: str, query: str, **variables: Any) -> Any:
    body = json.dumps({"query": query, "variables": variables}).encode()
    request = urllib.request.Request(url, body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=120) as answer:
        told = json.load(answer)
    assert "errors" not in told, told
    return told["data"]
