"""How a step's Ray job is looked after: waiting for resources, Ray's own timeout, a lost node, a failed process."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("ray")
from dagster_shared.error import SerializableErrorInfo
from ray.job_submission import JobStatus

from etpi_assets.specs.load import load_specs
from etpi_cluster.nodes import Node, alive_nodes
from etpi_cluster.placement import executor as module
from etpi_cluster.placement.executor import _NodeExecutor, _NodeSteps
from etpi_cluster.settings import Cluster

SETTINGS = Cluster(lake=Path("/lake"), postgres="postgresql://etpi@head/etpi", ray="head:6379", jobs="http://head:8265")


@dataclass
class Jobs:
    """Ray's jobs, as their client shows them."""

    submitted: dict[str, dict[str, Any]] = field(default_factory=dict)
    states: dict[str, SimpleNamespace] = field(default_factory=dict)
    silent: bool = False

    def submit_job(self, **job: Any) -> None:
        name = job["submission_id"]
        self.submitted[name] = job
        self.states[name] = SimpleNamespace(
            status=JobStatus.RUNNING, driver_node_id=None, error_type=None, driver_exit_code=None, message="",
            submission_id=name,
        )  # fmt: skip

    def get_job_info(self, name: str) -> SimpleNamespace:
        if self.silent:
            raise ConnectionError("no route")
        if name not in self.states:
            raise RuntimeError("Request failed with status code 404: no such job")
        return self.states[name]

    def list_jobs(self) -> list[SimpleNamespace]:
        return list(self.states.values())

    def get_job_logs(self, name: str) -> str:
        return "Traceback\nModuleNotFoundError: etpi_assets"

    def end(self, **state: Any) -> None:
        """The last job ends."""
        vars(self.states[list(self.states)[-1]]).update(state)


@dataclass
class FakeRay:
    """The handler with a fake Ray: `nodes` are alive, `tick` lets a second pass."""

    steps: _NodeSteps
    jobs: Jobs
    nodes: list[Node]
    told: list[str]
    clock: SimpleNamespace
    attempt: int = 0

    def context(self, key: str, partition: str) -> Any:
        retry = SimpleNamespace(get_attempt_count=lambda _: self.attempt)
        return SimpleNamespace(
            execute_step_args=SimpleNamespace(
                step_keys_to_execute=[key],
                known_state=SimpleNamespace(get_retry_state=lambda: retry),
                job_origin=SimpleNamespace(executable_path="/venv/bin/python"),
                get_command_env=lambda: [{"name": "DAGSTER_COMPRESSED_EXECUTE_STEP_ARGS", "value": "x"}],
            ),
            dagster_run=SimpleNamespace(run_id="run", job_name="job", tags={"dagster/partition": partition}),
            get_step_context=lambda _: None,
        )

    def launch(self, key: str = "tasks", partition: str = "coop_tiny_shared") -> None:
        list(self.steps.launch_step(self.context(key, partition)))

    def check(self, key: str = "tasks", partition: str = "coop_tiny_shared", after: float = 2.0) -> str:
        """Return why the step is unhealthy after so many seconds; "" if it is healthy."""
        self.clock.now += after
        result = self.steps.check_step_health(self.context(key, partition))
        return "" if result.is_healthy else str(result.unhealthy_reason)


def worker(**free: float) -> Node:
    total = {"CPU": 2.0, "etpi_sandbox": 4.0}
    return Node("id", "worker", "10.0.0.2", False, total, {**total, **free})


@pytest.fixture
def ray(monkeypatch: pytest.MonkeyPatch) -> FakeRay:
    jobs, told, clock, nodes = Jobs(), [], SimpleNamespace(now=1000.0), [worker()]
    monkeypatch.setattr(module, "alive_nodes", lambda _: nodes)
    monkeypatch.setattr(module.time, "monotonic", lambda: clock.now)
    events = SimpleNamespace(
        step_worker_starting=lambda *_, message, **__: message,
        engine_event=lambda _, message, *__: told.append(message) or message,
    )
    monkeypatch.setattr(module, "DagsterEvent", events)
    return FakeRay(_NodeSteps(SETTINGS, jobs, load_specs()), jobs, nodes, told, clock)  # pyright: ignore[reportArgumentType]


def test_step_asks_ray_for_what_it_needs(ray: FakeRay) -> None:
    ray.launch()
    (job,) = ray.jobs.submitted.values()
    assert job["entrypoint"] == "/venv/bin/python -m dagster api execute_step"
    assert job["entrypoint_num_cpus"] == 1 and job["entrypoint_resources"] == {"etpi_sandbox": 4}
    assert ray.check() == ""


def test_one_step_does_not_inherit_the_resources_of_another(ray: FakeRay) -> None:
    ray.launch()
    ray.launch("catalog", "")
    assert list(ray.jobs.submitted.values())[-1]["entrypoint_resources"] is None


def test_step_waits_here_until_resources_are_free(ray: FakeRay) -> None:
    ray.nodes[:] = [worker(etpi_sandbox=0.0)]
    ray.launch()
    for _ in range(1000):
        assert ray.check() == ""
    assert not ray.jobs.submitted
    assert len(ray.told) == 1 and "waiting" in ray.told[0]
    ray.nodes[:] = [worker()]
    assert ray.check() == ""
    assert len(ray.jobs.submitted) == 1


def test_step_that_ray_gave_up_to_start_is_submitted_again(ray: FakeRay) -> None:
    """Another run was faster: the job would have waited in Ray, which fails it after 15 minutes."""
    ray.launch()
    ray.jobs.end(status=JobStatus.FAILED, error_type="JOB_SUPERVISOR_ACTOR_START_TIMEOUT")
    assert ray.check() == "" and ray.check() == ""
    assert len(ray.jobs.submitted) == 2


def test_step_without_any_node_fails_at_once_naming_what_is_offered(ray: FakeRay) -> None:
    ray.nodes[:] = [Node("h", "head", "10.0.0.1", True, {}, {})]
    ray.launch()
    reason = ray.check()
    assert "tasks of coop_tiny_shared" in reason and "etpi_sandbox" in reason and "head (nothing)" in reason
    assert not ray.jobs.submitted and not ray.steps.is_lost("tasks")


@pytest.mark.parametrize(
    ("ending", "again"),
    [
        ({"status": JobStatus.FAILED, "error_type": "JOB_SUPERVISOR_ACTOR_DIED"}, True),  # its node was lost
        ({"status": JobStatus.FAILED, "driver_exit_code": -9}, True),  # killed
        ({"status": JobStatus.FAILED, "driver_exit_code": 1}, False),  # its own failure
        ({"status": JobStatus.STOPPED}, False),  # a person stopped it
    ],
)
def test_only_a_step_whose_node_was_lost_runs_again(ray: FakeRay, ending: dict[str, Any], again: bool) -> None:
    ray.launch()
    ray.jobs.end(**ending)
    assert ray.check() == ""  # Dagster may not have read the job's last events
    assert ray.check(after=10.0)
    assert ray.steps.is_lost("tasks") is again


def test_process_that_failed_shows_its_last_lines(ray: FakeRay) -> None:
    ray.launch()
    ray.jobs.end(status=JobStatus.FAILED, driver_exit_code=1)
    ray.check()
    assert "ModuleNotFoundError: etpi_assets" in ray.check(after=10.0)


def test_lost_step_waits_a_while_for_a_node_to_come_back(ray: FakeRay) -> None:
    ray.nodes[:] = []
    ray.attempt = 1
    ray.launch()
    assert ray.check() == ""
    assert "etpi_sandbox" in ray.check(after=module.RETURN_SECONDS)


def test_silent_ray_is_not_taken_for_a_lost_step_at_once(ray: FakeRay) -> None:
    ray.launch()
    ray.jobs.silent = True
    assert ray.check() == ""
    ray.jobs.silent = False
    assert ray.check() == ""
    ray.jobs.silent = True
    assert ray.check() == ""
    assert "not answered" in ray.check(after=module.OUTAGE_SECONDS)
    assert ray.steps.is_lost("tasks")


def test_process_that_resumes_a_run_finds_its_jobs(ray: FakeRay) -> None:
    ray.launch()
    resumed = _NodeSteps(SETTINGS, ray.jobs, load_specs())  # pyright: ignore[reportArgumentType]
    assert resumed.check_step_health(ray.context("tasks", "coop_tiny_shared")).is_healthy
    with pytest.raises(RuntimeError):  # Dagster then launches it
        resumed.check_step_health(ray.context("raw_rollouts", "coop_tiny_shared_strong"))


def test_lost_step_is_retried_three_times_and_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    lost = {"tasks"}
    steps = SimpleNamespace(is_lost=lost.__contains__)
    executor = _NodeExecutor.__new__(_NodeExecutor)
    executor._steps = steps  # pyright: ignore[reportAttributeAccessIssue]
    monkeypatch.setattr(module.DagsterEvent, "step_retry_event", lambda *_: "again")
    monkeypatch.setattr(module.StepDelegatingExecutor, "log_failure_or_retry_event_after_error", lambda *_: "failed")

    def event(key: str, attempts: int) -> Any:
        context = SimpleNamespace(step=SimpleNamespace(key=key))
        retry = SimpleNamespace(get_attempt_count=lambda _: attempts)
        error = SerializableErrorInfo("Step tasks failed health check: why", [], None)
        return executor.log_failure_or_retry_event_after_error(
            context, error, SimpleNamespace(get_retry_state=lambda: retry)
        )

    assert [event("tasks", attempt) for attempt in range(4)] == ["again", "again", "again", "failed"]
    assert event("raw_rollouts", 0) == "failed"


def test_free_resources_are_read_from_the_dashboard() -> None:
    """The dashboard spells names of resources in camel case where it tells what is used."""
    node = {
        "node_id": "1", "node_name": "n", "node_ip": "10.0.0.2", "is_head_node": False, "state": "ALIVE",
        "resources_total": {"CPU": 4.0, "etpi_sandbox": 8.0},
    }  # fmt: skip
    usage = {"1": {"CPU": [1.0, 4.0], "etpiSandbox": [6.0, 8.0]}}
    answers = {
        "/api/v0/nodes": {"result": {"result": [node, {**node, "node_id": "2", "state": "DEAD"}]}},
        "/api/cluster_status": {"clusterStatus": {"loadMetricsReport": {"usageByNode": usage}}},
    }

    def answer(_: str, path: str, **__: Any) -> Any:
        return SimpleNamespace(status_code=200, json=lambda: {"data": answers[path.partition("?")[0]]})

    (read,) = alive_nodes(SimpleNamespace(_do_request=answer))  # pyright: ignore[reportArgumentType]
    assert read.free == {"CPU": 3.0, "etpi_sandbox": 2.0}
