"""GRPO: from a checkpoint, tasks and an `rl` section to checkpoints in the lake and rows of its tables.

The worker process holds the policy and generates, unless vLLM servers of this process do. Tasks, sandboxes, judging and
rewards stay in this process, and the two communicate over `policy_link`. So the worker needs no etpi_assets, and a
rollout of reinforcement goes through the same loop, judge and recording as any other.
"""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from etpi_assets.agent.loop import Identity
from etpi_assets.resources import HardwareMissing, accelerator_count, accelerators
from etpi_assets.specs.training import RLSection
from etpi_assets.training import checkpoints
from etpi_assets.training.checkpoints import GrpoReport, TrainingRequest, adopt_checkpoints
from etpi_assets.training.device import confirm_dtype
from etpi_assets.training.forests import agents_of
from etpi_assets.training.rounds import (
    RewardedSample,
    RLEnvironment,
    Rounds,
    drop_rounds_from,
    first_prompt,
    read_rounds,
    task_hashes,
)
from etpi_assets.training.served_teacher import served_teacher
from etpi_assets.training.sft_checks import proofs
from etpi_assets.trajectories.records import RolloutRecord
from etpi_assets.trajectories.tables import to_tables
from etpi_resources.backend import BackendError, backend
from etpi_resources.engines.vllm_options import accelerators_of, lora_options, named
from etpi_resources.hashes import json_hash
from etpi_resources.lake import stored_trainings
from etpi_resources.lake.lake import Lake
from etpi_resources.lake.schemas import from_rows
from etpi_resources.trainers.contracts import (
    GrpoLogLine,
    GrpoSettings,
    GrpoWorkerConfig,
    GrpoWorkerResult,
    PublishConfig,
)
from etpi_resources.trainers.interpreter import visible
from etpi_resources.trainers.pipes import WorkerFailed, run_worker
from etpi_resources.trainers.policy_link import Generate, PolicyServer, largest_gap
from etpi_resources.trainers.trackers import tracking_of
from etpi_resources.trainers.workers.grpo_worker import last_complete_step

if TYPE_CHECKING:
    from etpi_resources.trainers.policy_servers import ServerPlan

WORKER = "etpi_resources.trainers.workers.grpo_worker"
PROBE_IDS = 128
"""Most ids of the prompt that proves a hand-over; the trainer has all of their logits in memory at the same time."""
_WHERE_SERVED = {"teacher_engine": {"urls", "api_key_env", "timeout"}}
"""Keys that say where a teacher is served, and change no result: a killed run resumes with other servers of it."""
RESUME_CHECKPOINTS = 10
"""About how many checkpoints a long run has to resume from."""


@dataclass(frozen=True, kw_only=True)
class GrpoRequest(TrainingRequest):
    """One run of reinforcement.

    Attributes:
        section: the spec's.
        environment: tasks, judge, sandboxes, chat format.
        teacher_folder: of the model that the section pins as its teacher.
    """

    section: RLSection
    environment: RLEnvironment
    teacher_folder: Path | None = None

    @property
    def label(self) -> str:
        """Return the prefix of the trainer's log lines."""
        return f"grpo of {self.experiment}, seed {self.seed}"

    @property
    def key(self) -> str:
        """Return the hash of all inputs of the result."""
        return self._key(self.section)

    @property
    def rollouts_key(self) -> str:
        """Return the hash in rollout ids, which seed the sampler: that of the same rounds in one process."""
        section = self.section
        alone = {"processes": 1, "sharded": False, "accumulate": section.processes * section.accumulate}
        alone |= {"servers": 1, "placement": "apart"}
        return self._key(section.model_copy(update=alone))

    def _key(self, section: RLSection) -> str:
        depends = {
            "base": self.base_id,
            "section": section.model_dump(mode="json", exclude=_WHERE_SERVED) | {"dtype": self.dtype},
            "seed": self.seed,
            "tasks": [task.content_hash for task in self.environment.tasks],
            "chat_template": self.environment.chat.template,
            "template_kwargs": dict(self.environment.template_kwargs),
            "code": self.code,
        }
        return json_hash(depends)[:16]

    @property
    def identity(self) -> Identity:
        """Return the names and keys of the recorded rollouts."""
        return Identity(
            spec_key=self.rollouts_key,
            origin="rl",
            engine="policy",
            teacher=f"policy-{self.base_id[:12]}",
            experiment=self.experiment,
            checkpoint_role="rl",
            checkpoint_id=self.base_id,
            seed=self.seed,
            decoding=f"t{self.section.agent.temperature:g}",
        )


def reinforce_once(
    lake: Lake, request: GrpoRequest, *, context: Any = None, echo: Callable[[str], None] = print
) -> GrpoReport:
    """Train, resume a run that was killed, or return the report of the same training done before.

    Raises:
        BackendError: its processes do not fit on this node.
        BadReward, RolloutsFailed: a rollout cannot be rewarded or trained on; the message names it.
        WorkerFailed: the trainer failed; the message holds its last lines.
    """

    machines, processes = backend(), request.section.processes
    if machines and machines.spans_nodes(processes):
        raise BackendError(
            f"{request.label}: rl.processes = {processes} needs more accelerators than this node has, and rollouts "
            "reach their trainer on one node alone; lower it"
        )

    def reinforce(folder: Path) -> dict[str, Any]:
        rounds_folder = lake.root / "checkpoints" / "rounds" / request.key
        resume = _prepare(folder, rounds_folder, request.label, echo)
        with ExitStack() as stack:
            section, environment = request.section, request.environment
            opened = served_teacher(section, environment.chat, lake, rounds_folder, _probe(request))
            teacher = stack.enter_context(opened)
            rounds = Rounds(section, environment, request.identity, request.seed, rounds_folder, teacher)
            publish = generating = None
            if section.engine == "vllm":
                publish, generating = _start_servers(stack, lake, request, folder, echo)
            server = stack.enter_context(
                PolicyServer(
                    rounds, request.identity.teacher or "", rounds.record, generating,
                    section.ahead, section.partial_rollouts == "continue",
                )
            )  # fmt: skip
            config = worker_config(lake, request, str(server.path), resume, publish)
            try:
                result = run_worker(
                    WORKER, config, folder, GrpoWorkerResult, processes=processes, context=context, echo=echo
                )
            except WorkerFailed:
                if server.error is not None:
                    raise server.error from None
                raise
        confirm_dtype(result, request.dtype, request.label)
        rounds_path = rounds_folder.relative_to(lake.root).as_posix()
        return adopt_checkpoints(lake, folder, result) | {"rounds": rounds_path}

    def passes(report: Mapping[str, Any]) -> bool:
        return all(check.passed for check in proofs({request.seed: GrpoReport(**report, reused=False)}))

    def adopt() -> None:
        hashes = {task.content_hash for task in request.environment.tasks}
        config = worker_config(lake, request, "", None, None)
        request.adopt_older(lake, "reinforce", config, lambda rounds: not task_hashes(rounds) - hashes)

    report = stored_trainings.train_once(
        lake, request.key, "reinforce", reinforce, passes=passes, label=request.label, log=echo, adopt=adopt
    )
    return GrpoReport.model_validate(report)


def _prepare(folder: Path, rounds_folder: Path, label: str, echo: Callable[[str], None]) -> int | None:
    """Remove files that the run does not continue from; return the step to resume from, if any."""
    resume = last_complete_step(folder)
    if resume is None:
        shutil.rmtree(folder)
    dropped = drop_rounds_from(rounds_folder, resume or 0)
    if resume is not None:
        echo(f"{label}: resuming from step {resume}; {dropped} later rounds will be rolled out again")
    return resume


def worker_config(
    lake: Lake, request: GrpoRequest, link: str, resume: int | None, publish: PublishConfig | None
) -> GrpoWorkerConfig:
    section, environment = request.section, request.environment
    return GrpoWorkerConfig(
        label=request.label,
        base=str(request.base_folder),
        base_name=request.base_id,
        link=link,
        tasks=len(environment.tasks),
        seed=request.seed,
        chat_template=environment.chat.template,
        end_ids=tuple(sorted(environment.chat.end_ids)),
        device="cuda" if request.gpu else "auto",
        resume=resume,
        resume_every=max(1, section.steps // RESUME_CHECKPOINTS // section.iterations) * section.iterations,
        tracking=tracking_of(lake, request.report_to, f"{request.experiment}-seed{request.seed}-rl"),
        publish=publish,
        teacher=str(request.teacher_folder) if request.teacher_folder else None,
        rl=settings(section),
    )


def settings(section: RLSection) -> GrpoSettings:
    names = GrpoSettings.model_fields.keys() - {"temperature"}
    values = {name: getattr(section, name) for name in names}
    return GrpoSettings.model_validate({**values, "temperature": section.agent.temperature})


# --- servers ---------------------------------------------------------------------------------------------------------


def _probe(request: GrpoRequest) -> list[int]:
    """Return the prompt whose log-probs show which weights a server has."""
    return first_prompt(request.section, request.environment, request.environment.tasks[0])[:PROBE_IDS]


def _start_servers(
    stack: ExitStack, lake: Lake, request: GrpoRequest, folder: Path, echo: Callable[[str], None]
) -> tuple[PublishConfig, Generate]:
    """Start the vLLM servers of a policy until `stack` closes; return how the trainer hands weights to them, and the
    function that opens them as an engine."""
    from etpi_resources.trainers.policy_servers import PolicyServers, weights_folder

    plan = server_plan(lake, request)
    echo(f"{request.label}: starting {len(plan.environments)} x vLLM, which logs to {plan.log}")
    versions = request.section.ahead + 1
    shared = stack.enter_context(weights_folder(request.key, folder, request.base_folder, versions))
    servers = stack.enter_context(PolicyServers(plan, request.environment.chat))
    return PublishConfig(folder=str(shared), probe=tuple(plan.probe), bound=plan.bound), servers.generating


def server_plan(lake: Lake, request: GrpoRequest) -> ServerPlan:
    """Return the servers of a policy and their devices.

    Raises:
        HardwareMissing: there are fewer devices than trainer and servers take.
    """
    from etpi_resources.trainers.policy_servers import ServerPlan, stored_dtype_name

    section = request.section
    dtype, sleeping = stored_dtype_name(request.base_folder), section.placement == "shared" and accelerators()
    options: dict[str, Any] = {
        "dtype": dtype,
        "max-model-len": section.max_prompt_tokens + section.max_response_tokens,
    }
    if section.tuning == "lora":
        options |= lora_options(section.lora_rank)
    if sleeping:
        options["enable-sleep-mode"] = True
    if not accelerators():
        # On a CPU vLLM packs new weights into new tensors, and a compiled graph would keep using the old ones.
        options["enforce-eager"] = True
    options |= named(section.options)
    return ServerPlan(
        base=request.base_folder,
        name=request.base_id,
        options=options,
        environments=server_devices(section),
        log=lake.scratch("servers") / f"policy-{request.key}.log",
        locks=[lake.machine_lock_file(f"server-{n}" if n else "server") for n in range(section.servers)],
        sleeping=sleeping,
        probe=_probe(request),
        bound=largest_gap(request.dtype, options["dtype"]),
    )


def server_devices(section: RLSection) -> list[dict[str, str]]:
    """Return the variable with each server's GPUs: those behind the trainer's, or with `placement = "shared"` the same.

    Raises:
        HardwareMissing: this process may use too few GPUs.
    """
    if not accelerators():
        return [{} for _ in range(section.servers)]
    each, there = accelerators_of(section.options), accelerator_count()
    if there < section.gpus:
        raise HardwareMissing(
            f"rl.processes = {section.processes} and rl.servers = {section.servers} of {each} GPUs each need "
            f"{section.gpus} GPUs, and this process may use {there} (CUDA_VISIBLE_DEVICES, or /dev/nvidia*); lower "
            'them, or set rl.placement = "shared": then servers are on the trainer\'s GPUs and sleep while it trains'
        )
    first = 0 if section.placement == "shared" else section.processes
    return [visible(first + n * each, each) for n in range(section.servers)]


# --- rows ----------------------------------------------------------------------------------------------------------


def checkpoint_rows(request: GrpoRequest, report: GrpoReport) -> list[dict[str, Any]]:
    """Rows of the table `checkpoints`, in order of steps."""
    shared = {
        "experiment": request.experiment,
        "role": "rl",
        "seed": request.seed,
        "method": request.section.tuning,
        "parent_id": request.base_id,
        "wall_seconds": report.log[-1].seconds,
    }
    return checkpoints.checkpoint_rows(report, shared, request.section, {})


def log_rows(request: GrpoRequest, report: GrpoReport) -> list[dict[str, Any]]:
    """Rows of the table `training_log`."""
    key = {"experiment": request.experiment, "role": "rl", "seed": request.seed}
    return [key | line.model_dump(exclude={"gradient_norm", "response_tokens", "truncated"}) for line in report.log]


def recorded(lake: Lake, requests: Mapping[int, GrpoRequest], reports: Mapping[int, GrpoReport]) -> dict[str, pa.Table]:
    """Return all rollouts of all seeds as tables: rollouts, agents, turns, messages, rewards, rl_samples."""
    rollouts: list[tuple[RewardedSample, RolloutRecord, np.ndarray | None]] = []
    for seed, request in requests.items():
        for sample, record, statistics in read_rounds(lake.root / reports[seed].rounds):
            rollouts.append((sample, _relabelled(record, request), statistics))
    decode = next(iter(requests.values())).environment.chat.decode
    tables = to_tables((record for _, record, _ in rollouts), decode)
    samples, rewards = [], []
    for sample, record, statistics in rollouts:
        key = {"rollout_id": record.rollout_id, "task_id": record.task_id, "seed": record.seed, "step": sample.step}
        columns = {name: None if value in ((), []) else value for name, value in vars(sample).items()}
        columns["version"] = sample.step if sample.version is None else sample.version
        del columns["scores"]
        names, values = ("policy_logprobs", "entropies", "teacher_logprobs"), () if statistics is None else statistics
        by_token: dict[str, Any] = dict(zip(names, values, strict=False))
        if len(values) == 3:
            by_token["token_advantage"] = token_advantage(requests[record.seed or 0].section, sample, record, values[2])
        samples.append(columns | by_token | key)
        rewards += [key | {"applied": True, **vars(score)} for score in sample.scores]
    return {**tables, "rl_samples": from_rows("rl_samples", samples), "rewards": from_rows("rewards", rewards)}


def token_advantage(section: RLSection, sample: RewardedSample, record: RolloutRecord, teacher: np.ndarray) -> float:
    """Return the mean of the advantages of a rollout's tokens, as `PolicyTrainer` gives them in `opd`."""
    sampled = [p for agent in agents_of(record) for turn in agent.turns for p in turn.logprobs or ()]
    whole = sample.advantage
    if sample.agent_advantages:
        whole = float(np.average(sample.agent_advantages, weights=sample.agent_tokens))
    gap = float(np.mean(teacher, dtype=np.float64) - np.mean(sampled))
    return section.distil_weight * gap + section.outcome_weight * whole


def _relabelled(record: RolloutRecord, request: GrpoRequest) -> RolloutRecord:
    """Give the rollout this experiment's name and a new id, since experiments may share a training."""
    record.rollout_id = hashlib.sha256(f"{request.experiment}/rl/{record.rollout_id}".encode()).hexdigest()[:32]
    record.experiment = request.experiment
    return record


def figures(report: GrpoReport) -> dict[str, Any]:
    """Figures of a run for the asset's page; "a -> b" are means over its first and last tenth."""
    log = report.log
    tenth = max(1, len(log) // 10)

    def mean(lines: Sequence[GrpoLogLine], name: str) -> float:
        return round(sum(getattr(line, name) for line in lines) / len(lines), 3)

    shown = {
        name: f"{mean(log[:tenth], name)} -> {mean(log[-tenth:], name)}"
        for name in ("reward", "parsed", "solved", "called")
    }
    return {
        "steps": log[-1].step,
        **shown,
        "groups without variance": mean(log, "constant_groups"),
        "seconds": {name: round(value, 1) for name, value in report.seconds},
        "device": report.device,
        "resumed from step": report.resumed,
        "trained before": report.reused,
    }
