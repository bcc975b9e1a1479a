"""Configurations of the fine-tuning worker, and running it in this process."""

from __future__ import annotations

import hashlib
from pathlib import Path

from etpi_assets.specs.training import TrainSection
from etpi_assets.training.sft import settings
from etpi_resources.trainers.contracts import SftWorkerConfig, SftWorkerResult
from etpi_resources.trainers.workers import sft_worker
from etpi_resources.trainers.workers.reporting import CONFIG_FILE, Worker


def config_of(base: Path, files: list[Path], micro_tokens: int = 512, seed: int = 0, **train) -> SftWorkerConfig:
    defaults = {"dtype": "fp32", "batch_tokens": 1024, "epochs": 1.0}
    return SftWorkerConfig(
        label="sft", base=str(base), base_name="tiny", files=tuple(map(str, files)), seed=seed, chat_template=None,
        device="auto", micro_tokens=micro_tokens, train=settings(TrainSection.model_validate({**defaults, **train})),
    )  # fmt: skip


def worker_in(folder: Path, config: SftWorkerConfig) -> Worker[SftWorkerConfig]:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / CONFIG_FILE).write_text(config.model_dump_json())
    return Worker(folder, SftWorkerConfig)


def in_process(folder: Path, config: SftWorkerConfig) -> SftWorkerResult:
    result = sft_worker.run(worker_in(folder, config))
    assert result is not None
    return result


def digest(folder: Path) -> dict[str, str]:
    return {
        p.relative_to(folder).as_posix(): hashlib.sha256(p.read_bytes()).hexdigest()
        for p in sorted(folder.rglob("*")) if p.is_file()
    }  # fmt: skip


def rank_of(pid: int) -> str | None:
    """The RANK in a process's environment."""
    try:
        variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return None
    return next((v.removeprefix(b"RANK=").decode() for v in variables if v.startswith(b"RANK=")), None)
