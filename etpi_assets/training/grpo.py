"""Reinforcement as a recipe: what is asked of the trainer, how a run that was killed goes on, and what becomes of its
checkpoints, rollouts and lines.

Belongs here: from a checkpoint, tasks and an `rl` section to checkpoints in the lake and rows of its tables. Not here:
the training itself (`etpi_resources.trainers.workers.grpo_worker`), rounds of rollouts (`rounds`), Dagster.

The trainer holds the policy and generates; tasks, sandboxes, judging and rewards stay here, and the two speak over
`policy_link`. So the worker needs nothing of etpi_assets, and a rollout of reinforcement is run by the same loop,
judged by the same family and recorded in the same form as any other.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa

from etpi_assets.agent.loop import Identity
from etpi_assets.specs.training import RLSection
from etpi_assets.training.device import confirm_dtype
from etpi_assets.training.rounds import Ground, Lesson, Rounds, drop_after, first_prompt, read_rounds
from etpi_assets.training.sft_checks import proofs
from etpi_assets.trajectories.records import RolloutRecord
from etpi_assets.trajectories.tables import to_tables
from etpi_resources.hashes import json_hash
from etpi_resources.lake import kept
from etpi_resources.lake.lake import Lake
from etpi_resources.lake.schemas import from_rows
from etpi_resources.trainers.pipes import WorkerFailed, run_worker
from etpi_resources.trainers.policy_link import PolicyServer
from etpi_resources.trainers.workers.grpo_worker import last_whole
from etpi_resources.trainers.workers.precision import Dtype

WORKER = "etpi_resources.trainers.workers.grpo_worker"
RESUME_CHECKPOINTS = 10
"""A run of many steps can be resumed from about so many of them."""

LOGGED = (
    "step", "loss", "learning_rate", "tokens", "seconds", "reward", "reward_std", "parsed", "solved", "called",
    "constant_groups", "staleness", "logprob_gap", "logprob_gap_max", "entropy", "clip_share", "kl",
)  # fmt: skip
"""What of a trainer's line stands in `training_log`."""


@dataclass(frozen=True)
class Request:
    """One run of reinforcement.

    Attributes:
        experiment: whose it is; no part of the result.
        base_id, base_folder: the checkpoint it starts from, and where its files are.
        section: the spec's. seed: order of the tasks and of the draws.
        ground: tasks, judge, sandboxes, chat format.
        gpu: whether a GPU is required; otherwise one is used where there is one.
        dtype: what the passes compute in here, whatever the section leaves open.
        code: version of the code that rolls out, rewards and trains.
    """

    experiment: str
    base_id: str
    base_folder: Path
    section: RLSection
    seed: int
    ground: Ground
    gpu: bool
    dtype: Dtype
    code: str

    @property
    def label(self) -> str:
        """What the trainer's lines are headed."""
        return f"grpo of {self.experiment}, seed {self.seed}"

    @property
    def key(self) -> str:
        """What the result depends on, as a hash."""
        depends = {
            "base": self.base_id,
            "section": self.section.model_dump(mode="json") | {"dtype": self.dtype},
            "seed": self.seed,
            "tasks": [task.content_hash for task in self.ground.tasks],
            "chat_template": self.ground.chat.template,
            "template_kwargs": dict(self.ground.template_kwargs),
            "code": self.code,
        }
        return json_hash(depends)[:16]

    @property
    def identity(self) -> Identity:
        """What its rollouts are recorded under."""
        return Identity(
            spec_key=self.key,
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
    lake: Lake, request: Request, *, context: Any = None, echo: Callable[[str], None] = print
) -> dict[str, Any]:
    """Train, go on where a killed run stopped, or find what the same request gave before.

    Returns:
        The worker's result (see `grpo_worker.run`), its checkpoints with `checkpoint_id` and `adapter_hash` instead of
        folders, `rounds` (the folder of its rollouts, relative to the lake's root) and `reused`.

    Raises:
        BadReward, RolloutsFailed: a row cannot be rewarded or learnt from; the message names it.
        WorkerFailed: the trainer failed; the message holds its last lines.
    """

    def reinforce(folder: Path) -> dict[str, Any]:
        for task in request.ground.tasks:
            first_prompt(request.section, request.ground, task)
        rounds_folder = lake.root / "checkpoints" / "rounds" / request.key
        resume = last_whole(folder)
        if resume is None:
            shutil.rmtree(folder)
        dropped = drop_after(rounds_folder, resume or 0)
        if resume is not None:
            echo(f"{request.label}: going on from step {resume}; {dropped} later rounds will be rolled out again")
        rounds = Rounds(request.section, request.ground, request.identity, request.seed, rounds_folder)
        with PolicyServer(rounds, request.identity.teacher or "policy") as server:
            try:
                config = worker_config(lake, request, str(server.path), resume)
                report = run_worker(WORKER, config, folder, context=context, echo=echo)
            except WorkerFailed:
                if server.error is not None:
                    raise server.error from None
                raise
        confirm_dtype(report, request.dtype, request.label)
        report["checkpoints"] = [kept.adopt(lake, folder, checkpoint) for checkpoint in report["checkpoints"]]
        report["rounds"] = rounds_folder.relative_to(lake.root).as_posix()
        return report

    return kept.once(
        lake,
        request.key,
        "reinforce",
        reinforce,
        good=lambda report: all(check.passed for check in proofs({request.seed: report})),
        what=request.label,
        log=echo,
    )


def worker_config(lake: Lake, request: Request, link: str, resume: int | None) -> dict[str, Any]:
    """The trainer's configuration (see `grpo_worker`)."""
    section, ground = request.section, request.ground
    return {
        "label": request.label,
        "base": str(request.base_folder),
        "base_name": request.base_id,
        "link": link,
        "tasks": len(ground.tasks),
        "seed": request.seed,
        "chat_template": ground.chat.template,
        "device": "cuda" if request.gpu else "auto",
        "resume": resume,
        "resume_every": max(1, section.steps // RESUME_CHECKPOINTS),
        "server": _server(lake, request) if section.engine == "vllm" else None,
        "rl": section.model_dump(mode="json"),
    }


def _server(lake: Lake, request: Request) -> dict[str, Any]:
    """What the trainer starts its vLLM with (see `HandedPolicy`)."""
    section, ground = request.section, request.ground
    return {
        "options": section.options,
        "log": str(lake.scratch("servers") / f"policy-{request.key}.log"),
        "lock": str(lake.lock_file("server")),
        "probe": first_prompt(section, ground, ground.tasks[0]),
    }


# --- rows ----------------------------------------------------------------------------------------------------------


def checkpoint_rows(request: Request, report: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Rows of the table `checkpoints`, in order of steps."""
    settings = {**request.section.model_dump(mode="json"), **{name: report[name] for name in ("device", "libraries")}}
    rows = []
    for checkpoint in report["checkpoints"]:
        path = f"checkpoints/{checkpoint['checkpoint_id']}"
        rows.append(
            {
                "checkpoint_id": checkpoint["checkpoint_id"],
                "experiment": request.experiment,
                "role": "rl",
                "seed": request.seed,
                "step": checkpoint["step"],
                "final": checkpoint["final"],
                "method": request.section.tuning,
                "dtype": report["dtype"],
                "path": path,
                "adapter_path": f"{path}/adapter" if checkpoint["adapter_hash"] else None,
                "adapter_hash": checkpoint["adapter_hash"],
                "parent_id": request.base_id,
                "train_loss": checkpoint["train_loss"],
                "wall_seconds": report["log"][-1]["seconds"],
                "hyperparameters": json.dumps(settings, sort_keys=True),
            }
        )
    return rows


def log_rows(request: Request, report: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Rows of the table `training_log`."""
    key = {"experiment": request.experiment, "role": "rl", "seed": request.seed}
    return [{**key, **{name: line[name] for name in LOGGED}} for line in report["log"]]


def recorded(
    lake: Lake, requests: Mapping[int, Request], reports: Mapping[int, Mapping[str, Any]]
) -> dict[str, pa.Table]:
    """Every rollout of every seed as tables: rollouts, agents, turns, messages, rewards, rl_samples."""
    lessons: list[tuple[Lesson, RolloutRecord]] = []
    for seed, request in requests.items():
        for lesson, record in read_rounds(lake.root / reports[seed]["rounds"], request.key):
            lessons.append((lesson, _relabelled(record, request)))
    decode = next(iter(requests.values())).ground.chat.decode
    tables = to_tables((record for _, record in lessons), decode)
    samples, rewards = [], []
    for lesson, record in lessons:
        key = {"rollout_id": record.rollout_id, "task_id": record.task_id, "seed": record.seed, "step": lesson.step}
        figures = (
            "place", "reward", "advantage", "parsed", "solved", "called", "prompt_tokens", "policy_tokens",
            "read_tokens",
        )  # fmt: skip
        samples.append(key | {name: getattr(lesson, name) for name in figures})
        rewards += [key | {"applied": True, **vars(score)} for score in lesson.scores]
    return {**tables, "rl_samples": from_rows("rl_samples", samples), "rewards": from_rows("rewards", rewards)}


def _relabelled(record: RolloutRecord, request: Request) -> RolloutRecord:
    """The rollout as this experiment's: an id of its own, since another experiment may share the training."""
    record.rollout_id = hashlib.sha256(f"{request.experiment}/rl/{record.rollout_id}".encode()).hexdigest()[:32]
    record.experiment = request.experiment
    return record


def figures(report: Mapping[str, Any]) -> dict[str, Any]:
    """What the asset's page shows of a run: its first and last tenth side by side."""
    log = report["log"]
    tenth = max(1, len(log) // 10)

    def mean(lines: list[Mapping[str, Any]], name: str) -> float:
        return round(sum(line[name] for line in lines) / len(lines), 3)

    shown = {
        name: f"{mean(log[:tenth], name)} -> {mean(log[-tenth:], name)}"
        for name in ("reward", "parsed", "solved", "called")
    }
    return {
        "steps": log[-1]["step"],
        **shown,
        "groups without variance": mean(log, "constant_groups"),
        "seconds": {name: round(value, 1) for name, value in report["seconds"].items()},
        "device": report["device"],
        "resumed from step": report["resumed"],
        "trained before": report["reused"],
    }
