"""Dagster's executor on a cluster: each step of a run is a Ray job on a node that offers what the step needs.

Dagster decides which step is next. This module submits it where it can run, waits here (not in Ray, which fails a job
that waits for 15 minutes) while the resources are taken, fails a step at once that no node can serve, and has a step
run again whose node was lost. A step that failed by itself, such as by a check, is not run again.

dagster-ray's executor is not used: its settings override those of a step and leak from one step to the next, it falls
back to the run's own process where a variable is missing, and it leaves a job that nobody can serve pending.
"""

from __future__ import annotations

import shlex
import time
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import dagster as dg

from etpi_assets.graph import GRAPH
from etpi_assets.orchestration.partitions import PARTITION_TAG
from etpi_assets.specs.load import Specs, load_specs
from etpi_cluster.code import code_hash
from etpi_cluster.environment import CODE_VARIABLE, inherited_working_dir, passed_on
from etpi_cluster.jobs import RUN_LABEL, STEP_LABEL
from etpi_cluster.nodes import CPU, Node, alive_nodes, described, job_client, serves
from etpi_cluster.placement.dagster_private import (
    CheckStepHealthResult,
    DagsterEvent,
    EngineEventData,
    RetryMode,
    StepDelegatingExecutor,
    StepHandler,
    StepHandlerContext,
    StepRetryData,
)
from etpi_cluster.placement.needs import EXPERIMENT_INPUTS, LIGHT, Need, need_of
from etpi_cluster.settings import Cluster, cluster

if TYPE_CHECKING:
    from ray.job_submission import JobSubmissionClient

LOST_NODES = 3
"""Number of times that a step is run again because its node was lost."""
RETURN_SECONDS = 180.0
"""Time that a step whose node was lost waits for a suitable node; a restarted machine comes back."""
OUTAGE_SECONDS = 600.0
"""Time that Ray may be silent before its jobs are considered lost."""
_SLEEP_SECONDS, _HEALTH_SECONDS = 0.5, 2
_LOG_LINES = 15
_DAGSTERS_WORDS = "failed health check: "
"""Text that Dagster writes before the reason of a step that `check_step_health` fails."""
_MODULE = ("-m", "dagster")
"""After the interpreter: Dagster itself would write `dagster`, which the PATH of a node's Ray need not have."""


@dg.executor(
    name="ray_nodes",
    config_schema={},
    requirements=[
        dg.ExecutorRequirement.RECONSTRUCTABLE_JOB,
        dg.ExecutorRequirement.NON_EPHEMERAL_INSTANCE,
        dg.ExecutorRequirement.PERSISTENT_OUTPUTS,
    ],
)
def node_executor(_: dg.InitExecutorContext) -> dg.Executor:
    """Run each step as a Ray job on a node that offers what it needs."""
    settings = cluster()
    return _NodeExecutor(_NodeSteps(settings, job_client(settings), load_specs()))


class _NodeExecutor(StepDelegatingExecutor):
    """Dagster's executor for steps that run elsewhere; what it retries are steps whose node was lost."""

    def __init__(self, steps: _NodeSteps) -> None:
        super().__init__(
            steps,
            # A step does not retry itself: its assets have no retry policy.
            retries=RetryMode.ENABLED,
            sleep_seconds=_SLEEP_SECONDS,
            check_step_health_interval_seconds=_HEALTH_SECONDS,
            # Ray starts no job twice, and a resumed run submits a step again that had begun on a lost node.
            should_verify_step=False,
        )
        self._steps = steps

    def execute(self, plan_context: Any, execution_plan: Any) -> Generator[DagsterEvent, None, None]:
        self._steps.planned = tuple(execution_plan.step_keys_to_execute)
        yield from super().execute(plan_context, execution_plan)

    def log_failure_or_retry_event_after_error(
        self, step_context: Any, err_info: Any, known_state: Any
    ) -> DagsterEvent:
        reason = err_info.message.partition(_DAGSTERS_WORDS)[2] or err_info.message
        err_info = err_info._replace(message=reason)
        attempts = known_state.get_retry_state().get_attempt_count(step_context.step.key)
        if self._steps.is_lost(step_context.step.key) and attempts < LOST_NODES:
            return DagsterEvent.step_retry_event(step_context, StepRetryData(error=err_info, seconds_to_wait=0))
        return super().log_failure_or_retry_event_after_error(step_context, err_info, known_state)


@dataclass
class _Step:
    """One attempt of a step.

    Attributes:
        waits_since: when it began to wait for resources (monotonic); None once it is submitted.
        submission: the id of its Ray job, once it has one.
        submissions: how many jobs this attempt has had; another follows where Ray gave up before it started.
        problem: why it fails without having been submitted.
        lost: whether its node was lost.
        ended_since: when its job was first seen to have ended.
        silent_since: since when Ray has not answered.
        logged: the last message of the run's log about its waiting.
        node: where it runs, once the run's log says so.
    """

    attempt: int
    waits_since: float | None = None
    submission: str = ""
    submissions: int = 0
    problem: str = ""
    lost: bool = False
    ended_since: float | None = None
    silent_since: float | None = None
    logged: str = ""
    node: str = ""


class _NodeSteps(StepHandler):
    """Submits steps as Ray jobs and looks after them."""

    def __init__(self, settings: Cluster, client: JobSubmissionClient, specs: Specs) -> None:
        super().__init__()
        self._settings, self._client, self._specs = settings, client, specs
        self._steps: dict[str, _Step] = {}
        self.planned: Sequence[str] = ()

    @property
    def name(self) -> str:
        return "Ray nodes"

    def is_lost(self, step_key: str) -> bool:
        """Return whether the step's last attempt ended with its node."""
        return step_key in self._steps and self._steps[step_key].lost

    def launch_step(self, step_handler_context: StepHandlerContext) -> Iterator[DagsterEvent]:
        """Submit a step, or let it wait; a step that nobody can serve fails in the next `check_step_health`."""
        key = _key(step_handler_context)
        step = self._steps[key] = _Step(_attempt(step_handler_context, key), waits_since=time.monotonic())
        with suppress(OSError, RuntimeError):  # `check_step_health` tries again, and counts how long Ray is silent
            self._try_to_submit(step_handler_context, step)
        yield DagsterEvent.step_worker_starting(
            step_handler_context.get_step_context(key),
            message=f"{key} is Ray job {step.submission}" if step.submission else f"{key} is not submitted yet",
            metadata={"Ray job": step.submission or "none yet"},
        )

    def check_step_health(self, step_handler_context: StepHandlerContext) -> CheckStepHealthResult:
        """Submit a step that waits, and find out whether one that was submitted is still there."""
        key = _key(step_handler_context)
        step = self._steps.get(key)
        if step is None:  # this process resumes a run that another began
            step = self._steps[key] = self._resumed(step_handler_context, key)
        try:
            if step.waits_since is not None:
                self._try_to_submit(step_handler_context, step)
            reason = step.problem or self._ended(step_handler_context, step)
            step.silent_since = None
        except (OSError, RuntimeError) as error:  # requests' errors are OSErrors
            step.silent_since = step.silent_since or time.monotonic()
            if time.monotonic() - step.silent_since < OUTAGE_SECONDS:
                return CheckStepHealthResult.healthy()
            step.lost, reason = True, f"Ray has not answered for {OUTAGE_SECONDS:g} s: {error}"
        return CheckStepHealthResult.unhealthy(reason) if reason else CheckStepHealthResult.healthy()

    def terminate_step(self, step_handler_context: StepHandlerContext) -> Iterator[DagsterEvent]:
        """Stop a step's job; Ray sends SIGTERM, and SIGKILL a minute later."""
        key = _key(step_handler_context)
        step = self._steps.get(key)
        if step is not None and step.submission:
            yield DagsterEvent.engine_event(
                step_handler_context.get_step_context(key), f"Stopping Ray job {step.submission}", EngineEventData()
            )
            self._client.stop_job(step.submission)

    # --- submitting ------------------------------------------------------------------------------------------------

    def _try_to_submit(self, context: StepHandlerContext, step: _Step) -> None:
        """Submit the step if a node has what it needs free now; note why not."""
        key, nodes = _key(context), alive_nodes(self._client)
        need = self._need(context, key, nodes)
        if missing := need.missing(nodes, self._settings.ray):
            waited = time.monotonic() - (step.waits_since or 0)
            if step.attempt == 0 or waited > RETURN_SECONDS:
                step.problem = f"{self._label(context, key)}: {missing}"
            else:
                self._tell(context, step, f"its node was lost: {missing}. Waiting {RETURN_SECONDS:g} s for one")
            return
        if not step.logged and step.attempt == 0 and step.submissions == 0:
            self._refuse_later_steps(context, step, nodes)
            if step.problem:
                return
        if not any(serves(node, need.step, now=True) for node in nodes):
            wanted = ", ".join(f"{name} {amount:g}" for name, amount in need.step.items())
            self._tell(context, step, f"waiting for a node with {wanted} free; alive are {described(nodes)}")
            return
        step.submission = self._submit(context, key, need.step, step)
        step.submissions += 1
        step.waits_since = None

    def _refuse_later_steps(self, context: StepHandlerContext, step: _Step, nodes: Sequence[Node]) -> None:
        """Fail the first step of a run if no node can serve one of its later steps, before anything is computed."""
        if len(self._steps) > 1:
            return
        for later in self.planned:
            if missing := self._need(context, later, nodes).missing(nodes, self._settings.ray):
                step.problem = f"{self._label(context, later)}, a later step of this run: {missing}"
                return

    def _submit(self, context: StepHandlerContext, key: str, amounts: Mapping[str, float], step: _Step) -> str:
        run, args = context.dagster_run, context.execute_step_args
        submission = _submission(run.run_id, key, step.attempt, step.submissions)
        custom = {name: amount for name, amount in amounts.items() if name not in (CPU, "GPU")}
        environment = {
            "DAGSTER_RUN_JOB_NAME": run.job_name,
            "DAGSTER_RUN_STEP_KEY": key,
            **{variable["name"]: variable["value"] for variable in args.get_command_env()},
            **passed_on(),
            CODE_VARIABLE: code_hash(),
        }
        self._client.submit_job(
            entrypoint=shlex.join([args.job_origin.executable_path, *_MODULE, "api", "execute_step"]),
            submission_id=submission,
            metadata={"dagster/job": run.job_name, STEP_LABEL: key, RUN_LABEL: run.run_id},
            runtime_env={"env_vars": environment, **inherited_working_dir()},
            entrypoint_num_cpus=amounts.get(CPU, LIGHT),
            entrypoint_num_gpus=amounts.get("GPU"),
            entrypoint_resources=custom or None,
        )
        return submission

    def _need(self, context: StepHandlerContext, key: str, nodes: Sequence[Node]) -> Need:
        if key not in GRAPH and key != EXPERIMENT_INPUTS:  # a step of a job that is no asset
            return Need({CPU: LIGHT})
        partition = context.dagster_run.tags.get(PARTITION_TAG, "")
        try:
            return need_of(key, partition, self._specs, nodes, self._settings.accelerator)
        except Exception:  # no or an unknown partition, an invalid spec: the step itself says so
            return Need({CPU: LIGHT})

    def _label(self, context: StepHandlerContext, key: str) -> str:
        partition = context.dagster_run.tags.get(PARTITION_TAG)
        return f"{key} of {partition}" if partition else key

    def _tell(self, context: StepHandlerContext, step: _Step, message: str) -> None:
        """Write a line to the run's log, once."""
        if message != step.logged:
            step.logged = message
            DagsterEvent.engine_event(context.get_step_context(_key(context)), message, EngineEventData())

    # --- looking after submitted steps -----------------------------------------------------------------------------

    def _ended(self, context: StepHandlerContext, step: _Step) -> str:
        """Return why the step's job has ended without Dagster's event of the step's end; empty if it has not."""
        from ray.job_submission import JobStatus

        if not step.submission:
            return ""
        try:
            job = self._client.get_job_info(step.submission)
        except RuntimeError as error:
            if "404" not in str(error):
                raise
            step.lost = True
            return f"Ray does not know job {step.submission} any more; was its head restarted?"
        if job.driver_node_id and not step.node:
            names = {node.id: node.name or node.address for node in alive_nodes(self._client)}
            step.node = names.get(job.driver_node_id, job.driver_node_id)
            self._tell(context, step, f"on node {step.node}")
        if not job.status.is_terminal():
            step.ended_since = None
            return ""
        if job.error_type == "JOB_SUPERVISOR_ACTOR_START_TIMEOUT":
            step.submission, step.waits_since = "", time.monotonic()  # others were faster: it waits here again
            return ""
        # The events that the job wrote last may not be read yet.
        step.ended_since = step.ended_since or time.monotonic()
        if time.monotonic() - step.ended_since < 3 * _HEALTH_SECONDS:
            return ""
        if job.status is JobStatus.STOPPED:
            return f"Ray job {step.submission} was stopped"
        code = job.driver_exit_code
        step.lost = job.status is JobStatus.FAILED and (code is None or code < 0 or code > 128)
        if step.lost:
            return f"the node or the process of Ray job {step.submission} was lost: {_short(job.message)}"
        return f"Ray job {step.submission} ended with exit code {code} and reported no result. {self._log(step)}"

    def _log(self, step: _Step) -> str:
        try:
            lines = self._client.get_job_logs(step.submission).strip().splitlines()
        except (OSError, RuntimeError):
            return ""
        return "Its last lines:\n" + "\n".join(lines[-_LOG_LINES:]) if lines else ""

    def _resumed(self, context: StepHandlerContext, key: str) -> _Step:
        """Return the state of a step that an earlier process of this run submitted; raise RuntimeError if none did."""
        step = _Step(_attempt(context, key))
        known = {job.submission_id for job in self._client.list_jobs()}
        while (name := _submission(context.dagster_run.run_id, key, step.attempt, step.submissions)) in known:
            step.submission, step.submissions = name, step.submissions + 1
        if not step.submission:
            raise RuntimeError(f"{key} waited for a node and was not submitted")
        return step


def _key(context: StepHandlerContext) -> str:
    keys = context.execute_step_args.step_keys_to_execute
    assert keys, "Dagster launches one step at a time"
    return keys[0]


def _attempt(context: StepHandlerContext, key: str) -> int:
    known = context.execute_step_args.known_state
    return known.get_retry_state().get_attempt_count(key) if known else 0


def _submission(run_id: str, key: str, attempt: int, submissions: int) -> str:
    """Return the id of a step's Ray job; the same in a process that resumes the run."""
    return f"dagster-step-{run_id}-{key.replace('.', '-')}-{attempt}-{submissions}"


def _short(message: str | None) -> str:
    line = " ".join((message or "no reason given").split())
    return line if len(line) < 300 else f"{line[:300]} ..."
