"""Trackers get what training_log and metrics have, outside of every hash; none that fails costs a training."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys

import pytest

from etpi.run import preflight
from etpi_assets.evaluation.assets import report_metrics
from etpi_assets.specs.experiment import ExperimentSpec
from etpi_assets.specs.training import TrainSection
from etpi_assets.training import sft
from etpi_resources.lake.lake import Lake
from etpi_resources.lake.schemas import from_rows
from etpi_resources.trainers.contracts import Tracking
from etpi_resources.trainers.trackers import TrackerMissing, require_trackers
from etpi_resources.trainers.workers import tracking as of_worker
from tests.support.reinforcement import make, prepared, rows
from tests.support.sft import config_of, in_process, worker_in
from tests.support.tiny_training import learnable, make_base, make_speaking_base, write

BOTH = '["tensorboard", "trackio"]'
KEY = "sk-0123456789-not-to-be-kept"

pytestmark = pytest.mark.skipif(
    not all(importlib.util.find_spec(name) for name in ("tensorboard", "trackio")), reason="needs tensorboard, trackio"
)


def trackio_runs(lake: Lake, project: str = "etpi") -> dict[str, list[dict]]:
    """Every run's logged dictionaries, read with trackio's own storage in a process of its own."""
    program = (
        "import json, sys\nfrom trackio.sqlite_storage import SQLiteStorage as s\n"
        "runs = {name: s.get_logs(sys.argv[1], name) for name in s.get_runs(sys.argv[1])}\n"
        "print(json.dumps(runs, default=str))"
    )
    environment = {**os.environ, "TRACKIO_DIR": str(lake.root / "trackers" / "trackio")}
    done = subprocess.run([sys.executable, "-c", program, project], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def board(lake: Lake, run: str) -> dict[str, dict[int, float]]:
    """A run's scalars, read with tensorboard's own reader: tag -> step -> value."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(lake.root / "trackers" / "tensorboard" / run), size_guidance={"scalars": 0})
    events.Reload()
    return {tag: {e.step: e.value for e in events.Scalars(tag)} for tag in events.Tags()["scalars"]}


@pytest.fixture(autouse=True)
def _own_environment(monkeypatch):
    """What a training in this process sets must not reach other tests."""
    for name in ("TENSORBOARD_LOGGING_DIR", "TRACKIO_DIR", "WANDB_DIR", "MLFLOW_TRACKING_URI"):
        monkeypatch.delenv(name, raising=False)
    before = dict(os.environ)
    yield
    for name in os.environ.keys() - before.keys():
        del os.environ[name]
    os.environ.update(before)


@pytest.mark.slow
def test_trackers_have_every_step_of_reinforcement_as_the_lake_has_it(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_API_KEY", KEY)
    base = make_speaking_base(tmp_path / "base")
    lake = prepared(tmp_path, base)
    spec = tmp_path / "specs" / "experiments" / "first.toml"
    spec.write_text(f"{spec.read_text()}[train]\nreport_to = {BOTH}\n")
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    outcome = make(tmp_path, lake, "rl_checkpoint")
    assert not outcome.manifest.blocked, outcome.manifest.failures
    log = rows(lake, "training_log")
    scalars = board(lake, "first-seed0-rl")
    [logged] = [runs for name, runs in trackio_runs(lake).items() if name == "first-seed0-rl"]
    for name in ("loss", "reward", "reward_std", "learning_rate", "parsed", "logprob_gap", "entropy", "tokens"):
        wanted = {line["step"]: line[name] for line in log}
        assert scalars[f"train/{name}"] == pytest.approx(wanted, rel=1e-6), name
        of_trackio = {line["train/global_step"]: line[f"train/{name}"] for line in logged if f"train/{name}" in line}
        assert of_trackio == pytest.approx(wanted), name
    assert not list((tmp_path / "work").iterdir()), "nothing is written into the working directory"
    keys = [path for path in lake.root.rglob("*") if path.is_file() and KEY.encode() in path.read_bytes()]
    assert not keys, "the service's key is in a file of the lake"

    # The same without a tracker is the same training: nothing is stale, and nothing is reported again.
    spec.write_text(spec.read_text().replace(f"report_to = {BOTH}\n", ""))
    assert make(tmp_path, lake, "rl_checkpoint").skipped
    spec.write_text(f"{spec.read_text()}report_to = {BOTH}\n")
    assert make(tmp_path, lake, "rl_checkpoint").skipped
    assert len(trackio_runs(lake)) == 1


@pytest.mark.slow
def test_trackers_have_the_lines_of_fine_tuning_and_number_a_second_run(tmp_path):
    base = make_base(tmp_path / "base")
    files = [write(learnable(24, validation=4), tmp_path / "sequences.parquet")]
    tracking = Tracking(report_to=("tensorboard",), run_name="e-seed0-sft", folder=str(tmp_path / "trackers"))
    config = config_of(base, files, epochs=2.0).model_copy(update={"tracking": tracking})
    result = in_process(tmp_path / "run", config)
    scalars = board(Lake(tmp_path), "e-seed0-sft")
    for tag, column in {
        "train/loss": "loss", "train/learning_rate": "learning_rate", "eval/loss": "val_loss",
        "train/mean_token_accuracy": "token_accuracy", "train/num_tokens": "tokens",
    }.items():  # fmt: skip
        wanted = {line.step: value for line in result.log if (value := getattr(line, column)) is not None}
        assert len(wanted) > 1 and scalars[tag] == pytest.approx(wanted, rel=1e-6), tag
    assert of_worker.begin_run(tracking) == "e-seed0-sft-2", "a second start is a run of its own"
    assert of_worker.begin_run(tracking, resumed=True) == "e-seed0-sft-2", "a resumed one goes on"


@pytest.mark.slow
def test_a_tracker_that_fails_does_not_end_the_training(tmp_path, capsys):
    base = make_base(tmp_path / "base")
    files = [write(learnable(24), tmp_path / "sequences.parquet")]
    (tmp_path / "trackers").mkdir()
    (tmp_path / "trackers" / "tensorboard").write_text("not a folder")
    tracking = Tracking(report_to=("tensorboard",), run_name="e-seed0-sft", folder=str(tmp_path / "trackers"))
    result = in_process(tmp_path / "run", config_of(base, files).model_copy(update={"tracking": tracking}))
    assert result.log[-1].step == result.plan.steps
    warnings = [line for line in capsys.readouterr().out.splitlines() if "WARNING: TensorBoardCallback failed" in line]
    assert len(warnings) == 1, "once, and then the tracker is off"


@pytest.mark.slow
def test_metrics_of_evaluation_are_a_run_of_the_same_project(tmp_path):
    lake, said = Lake(tmp_path / "data"), list[str]()
    measured = [
        {"experiment": "e", "checkpoint_role": role, "seed": seed, "decoding": "greedy", "metric": "solved",
         "value": value, "n": 8}
        for role, seed, value in (("base", None, 0.5), ("sft", 0, 0.25), ("sft", 1, 1.0), ("sft", None, 0.625))
    ]  # fmt: skip
    table = from_rows("metrics", measured)
    report_metrics(lake, "e", ("tensorboard", "trackio"), table, said.append)
    wanted = {"base/greedy/solved": 0.5, "sft/greedy/solved": 0.625}
    assert {tag: values[0] for tag, values in board(lake, "e-eval").items()} == wanted, said
    [[logged]] = trackio_runs(lake).values()
    assert {name: logged[name] for name in wanted} == wanted

    # A tracker that is down costs a warning; the others get the values.
    (lake.root / "trackers" / "tensorboard").rename(tmp_path / "aside")
    (lake.root / "trackers" / "tensorboard").write_text("not a folder")
    report_metrics(lake, "e", ("tensorboard", "trackio"), table, said.append)
    assert said[-1].startswith("WARNING: the metrics of e were not reported") and "tensorboard: " in said[-1]
    assert list(trackio_runs(lake)) == ["e-eval", "e-eval-2"]


def test_ranks_other_than_0_report_nothing(tmp_path, monkeypatch):
    tracking = Tracking(report_to=("tensorboard",), run_name="e", folder=str(tmp_path / "trackers"))
    config = config_of(tmp_path, []).model_copy(update={"tracking": tracking})
    assert of_worker.tracking_arguments(worker_in(tmp_path / "0", config))["run_name"] == "e"
    monkeypatch.setenv("RANK", "1")
    assert of_worker.tracking_arguments(worker_in(tmp_path / "1", config)) == {"report_to": "none"}


def test_trackers_are_outside_of_every_hash(tmp_path):
    plain, tracked = TrainSection(), TrainSection.model_validate({"report_to": ["wandb"]})
    assert tracked.report_to == ("wandb",) and plain.model_dump() == tracked.model_dump()
    base = {
        "experiment": "a", "base_id": "b", "base_folder": tmp_path, "files": {}, "seed": 0, "chat_template": "t",
        "gpu": False, "dtype": "fp32", "code": "c",
    }  # fmt: skip
    requests = [sft.SftRequest(train=plain, **base), sft.SftRequest(train=tracked, report_to=("wandb",), **base)]
    assert len({request.key for request in requests}) == 1
    with pytest.raises(ValueError, match="tensorboard"):
        TrainSection.model_validate({"report_to": ["tensorbord"]})


def test_a_missing_tracker_stops_a_run_before_it_begins(monkeypatch):
    lacking = {"mlflow"}
    found = importlib.util.find_spec
    monkeypatch.setattr(
        "etpi_resources.trainers.trackers.find_spec", lambda name: None if name in lacking else found(name)
    )
    require_trackers(("tensorboard", "trackio"))
    with pytest.raises(TrackerMissing, match="pip install mlflow"):
        require_trackers(("mlflow", "tensorboard"))

    class Step:
        asset, set, key = "sft_checkpoint", "experiment", "e"

    class Loaded:
        def get(self, set: str, key: str) -> ExperimentSpec:
            spec = {"title": "e", "rollout_sets": ["r"], "base": {"kind": "tiny"}, "evaluate": "none"}
            return ExperimentSpec.model_validate({**spec, "train": {"report_to": ["mlflow"]}})

    monkeypatch.setattr(preflight, "open_steps", list)
    monkeypatch.delenv("ETPI_TRAINER_PYTHON", raising=False)
    with pytest.raises(TrackerMissing, match=r"sft_checkpoint of e: .*pip install mlflow"):
        preflight.require_libraries([Step()], Loaded())  # pyright: ignore[reportArgumentType]
