"""The dtype of a training: one rule, never bfloat16 on a CPU, and part of what names a training."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from etpi_assets.specs.training import RLSection, TrainSection
from etpi_assets.training import device, grpo, sft
from etpi_resources.lake.lake import Ref
from etpi_resources.trainers.contracts import SftWorkerResult, TrainingFigures
from etpi_resources.trainers.pipes import WorkerFailed, run_worker
from etpi_resources.trainers.precision import Gpu, overruled, training_dtype
from tests.support import reinforcement, tiny_training
from tests.support.recording_worker import RECORDER
from tests.support.sft import config_of

NEW, OLD = Gpu(bf16=True), Gpu(bf16=False)


@pytest.mark.parametrize(
    ("requested", "gpu", "used"),
    [
        ("auto", NEW, "bf16"), ("auto", OLD, "fp32"), ("auto", None, "fp32"),
        ("bf16", NEW, "bf16"), ("bf16", OLD, "bf16"), ("bf16", None, "fp32"),
        ("fp32", NEW, "fp32"), ("fp32", OLD, "fp32"), ("fp32", None, "fp32"),
    ],
)  # fmt: skip
def test_dtype_follows_the_spec_on_a_gpu_and_is_float32_on_a_cpu(requested, gpu, used):
    assert training_dtype(requested, gpu) == used
    assert (overruled(requested, used) is not None) == (requested == "bf16" and gpu is None)


def test_default_dtype_is_auto():
    assert (TrainSection().dtype, RLSection().dtype) == ("auto", "auto")


@pytest.fixture
def recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Have a worker's module recorded in its own process; what it multiplied, as {operation: dtypes}, afterwards."""
    operations = tmp_path / "operations.json"
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
    monkeypatch.setenv("RECORDED_OPERATIONS", str(operations))

    def of(worker: str) -> str:
        monkeypatch.setenv("RECORDED_WORKER", worker)
        return RECORDER

    of.found = lambda: json.loads(operations.read_text())
    return of


def assert_float32(matches: dict[str, list[str]]) -> None:
    assert matches["mm"] and any("scaled_dot_product" in name for name in matches), "nothing was recorded"
    assert {name: dtypes for name, dtypes in matches.items() if "torch.bfloat16" in dtypes} == {}


@pytest.mark.slow
@pytest.mark.parametrize("method", ["full", "lora"])
def test_fine_tuning_multiplies_no_bfloat16_on_a_cpu_and_warns(tmp_path: Path, recorded, method: str):
    base = tiny_training.make_base(tmp_path / "base")
    files = [tiny_training.write(tiny_training.learnable(12, validation=2), tmp_path / "sequences.parquet")]
    config = config_of(base, files, method=method, dtype="bf16", max_steps=2)
    said: list[str] = []
    result = run_worker(recorded(sft.WORKER), config, tmp_path / "run", SftWorkerResult, echo=said.append)
    assert result.dtype == "fp32"
    (warning,) = [line for line in said if "bf16" in line]
    assert warning.startswith('sft: warning: dtype = "bf16" is not used on a CPU') and "same model" in warning
    assert_float32(recorded.found())


@pytest.mark.slow
def test_reinforcement_multiplies_no_bfloat16_on_a_cpu(tmp_path: Path, recorded, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(grpo, "WORKER", recorded(grpo.WORKER))
    base = tiny_training.make_speaking_base(tmp_path / "base")
    lake = reinforcement.prepared(tmp_path, base, steps="2", save_steps="2", dtype='"bf16"')
    outcome = reinforcement.make(tmp_path, lake, "rl_checkpoint")
    assert not outcome.manifest.blocked, outcome.manifest.failures
    (row,) = lake.read(Ref("rl_checkpoint", "experiment", "first"), "checkpoints").to_pylist()
    assert row["dtype"] == "fp32" and json.loads(row["hyperparameters"])["dtype"] == "bf16"
    assert_float32(recorded.found())


def request(**changes) -> sft.SftRequest:
    default = sft.SftRequest(
        experiment="e", base_id="b", base_folder=Path("b"), files={}, train=TrainSection(), seed=0, chat_template="t",
        gpu=False, dtype="fp32", code="c",
    )  # fmt: skip
    return replace(default, **changes)


def test_training_in_float32_is_not_reused_for_one_in_bfloat16():
    assert request().key != request(dtype="bf16").key
    # What counts is what is computed in, not how the spec came to it.
    assert request(train=TrainSection(dtype="fp32")).key == request().key
    assert request(train=TrainSection(dtype="bf16"), dtype="bf16").key == request(dtype="bf16").key


def test_worker_that_computed_in_another_dtype_fails():
    figures = TrainingFigures.model_construct(dtype="fp32", device="cpu")
    with pytest.raises(WorkerFailed, match="fp32 on cpu.*bf16"):
        device.confirm_dtype(figures, "bf16", "sft of e")
    device.confirm_dtype(figures, "fp32", "sft of e")


@pytest.fixture
def fresh():
    """The trainer's GPU is looked up once per process; forget the answer of other tests."""
    device.trainer_gpu.cache_clear()
    yield
    device.trainer_gpu.cache_clear()


@pytest.mark.usefixtures("fresh")
def test_gpu_is_looked_up_in_the_trainer_s_interpreter_and_only_if_there_is_a_device(tmp_path, monkeypatch):
    monkeypatch.setenv("ETPI_TRAINER_PYTHON", str(tmp_path / "python"))
    monkeypatch.setattr(device, "accelerators", lambda: False)
    assert device.dtype_here("auto") == "fp32", "no interpreter is started"
    device.trainer_gpu.cache_clear()
    monkeypatch.setattr(device, "accelerators", lambda: True)
    (tmp_path / "python").write_text("#!/bin/sh\necho a warning; echo '{\"bf16\": true}'\n")
    (tmp_path / "python").chmod(0o755)
    assert device.dtype_here("auto") == "bf16" and device.dtype_here("fp32") == "fp32"
    device.trainer_gpu.cache_clear()
    (tmp_path / "python").write_text("#!/bin/sh\necho no torch here >&2; exit 3\n")
    with pytest.raises(RuntimeError, match="status 3: no torch here.*ETPI_TRAINER_PYTHON"):
        device.dtype_here("auto")


def test_training_s_key_and_config_import_no_torch():
    program = "import sys, etpi_assets.training.sft, etpi_assets.training.device; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", program], check=True)
