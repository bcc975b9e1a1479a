"""`make gpu-run`: its stages are experiments of the size that its first line says."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import pytest

from etpi_assets.evaluation.rollouts import conditions
from etpi_assets.specs.load import load_specs
from etpi_resources.engines.vllm_server import PROGRAM_VARIABLE

ROOT = Path(__file__).parents[2]


@pytest.fixture
def gpu_run(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(ROOT / "bench"))
    return importlib.import_module("gpu_run")


@pytest.mark.parametrize("cpu", [False, True])
def test_every_stage_has_at_most_48_rollouts_and_10_steps(
    gpu_run: Any, cpu: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu_run.write_specs(tmp_path / "experiments", cpu)
    monkeypatch.setenv("ETPI_SPECS", str(tmp_path))
    specs = load_specs()
    experiments = [f"gpu_run_{name}" for name, keys in gpu_run.stages(cpu).items() if keys]
    assert set(experiments) <= set(specs.experiments) and len(experiments) == 6
    for name in experiments:
        spec = specs.experiments[name]
        assert spec.evaluate and spec.train.max_steps == 10
        evaluated = sum(len(conditions(spec.evaluate, role)) for role in spec.evaluate.roles)
        rounds = spec.rl.steps * spec.rl.device_batch * spec.rl.accumulate if spec.rl.method == "grpo" else 0
        assert evaluated * (spec.evaluate.tasks or 0) + rounds <= 48
        assert spec.rl.method == "none" or (spec.rl.beta > 0 and spec.rl.steps <= 10)


@pytest.mark.parametrize("cpu", [False, True])
def test_stage_that_cannot_run_says_why(
    gpu_run: Any, cpu: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(PROGRAM_VARIABLE, str(tmp_path / "vllm"))
    assert str(tmp_path) in gpu_run.command_of("vllm_grpo", cpu) and "tiny" in gpu_run.command_of("base", True)
    assert gpu_run.command_of("sft_lora", cpu)[-2:] == ["run", "gpu_run_sft_lora"]
    monkeypatch.setenv(PROGRAM_VARIABLE, sys.executable)
    assert gpu_run.command_of("vllm_grpo", cpu)[-2:] == ["run", "gpu_run_vllm_grpo"]


@pytest.mark.parametrize(("result", "status"), [("rc 0", 0), ("rc -9", 1), ("rc 2", 1), ("stopped after 3 s", 1)])
def test_stage_that_did_not_end_well_is_a_failure(
    gpu_run: Any, result: str, status: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_run, "run_stage", lambda *given: {"result": result, "seconds": 1.0})
    monkeypatch.setattr("sys.argv", ["gpu_run", "--cpu", "--folder", str(tmp_path), "base", "sft_lora"])
    assert gpu_run.main() == status


def test_stages_of_the_cpu_are_run_again_on_a_gpu(
    gpu_run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran = []
    monkeypatch.setattr(gpu_run, "run_stage", lambda *given: ran.append(given) or {"result": "rc 0", "seconds": 1.0})
    for argument in (["--cpu"], ["--cpu"], []):
        monkeypatch.setattr("sys.argv", ["gpu_run", *argument, "--folder", str(tmp_path), "sft_lora"])
        assert gpu_run.main() == 0
    assert len(ran) == 2
