"""The training assets: what they ask of the trainer, publish, refuse, and do not do twice."""

from __future__ import annotations

import base64
import json
import math
import os
from pathlib import Path
from typing import Any

import dagster as dg
import pytest

from etpi_assets.asset import Outcome, asset_definitions
from etpi_assets.checks import CHECKS
from etpi_assets.orchestration.materialize import RESOURCE, build_asset
from etpi_assets.resources import Resources
from etpi_assets.specs.rollout_set import ServerSection
from etpi_assets.specs.training import BaseSection, RLSection, TrainSection
from etpi_assets.training import checkpoints, sft, sft_checks
from etpi_assets.training.checkpoints import SftReport
from etpi_assets.training.curves import loss_plot
from etpi_resources.checkpoints import checkpoint_folder
from etpi_resources.lake.lake import BlockedInput, Lake, LakeError, Ref, folder_hash
from etpi_resources.lake.schemas import empty, from_rows
from etpi_resources.trainers.contracts import GrpoSettings, SftLogLine, SftSettings
from etpi_resources.trainers.pipes import WorkerFailed
from tests.support.docs_pages import stopped
from tests.support.graph import ROLLOUT_SET, SUITE, write_spec
from tests.support.tiny_training import learnable, make_base

ASSETS = asset_definitions()
DATASET = Ref("upweighted_dataset", "experiment", "first")
TINY_FORMAT = 'tokenizer = "tiny"\nchat_template = "tiny"'
TRAIN = {
    "dtype": '"fp32"', "batch_tokens": "2048", "epochs": "3", "learning_rate": "1e-2",
}  # fmt: skip


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    return make_base(tmp_path_factory.mktemp("base"))


class Training:
    """A lake with a dataset an experiment, specs whose base is a local folder, and the training definitions."""

    def __init__(self, folder: Path, base: Path) -> None:
        self.folder, self.base, self.lake = folder, base, Lake(folder / "data")
        write_spec(folder / "specs", "suites", "small", SUITE)
        write_spec(folder / "specs", "rollout_sets", "few", ROLLOUT_SET)

    def experiment(self, name: str = "first", seeds: str = "[0]", base: str | None = None, **train: str) -> None:
        section = "\n".join(f"{key} = {value}" for key, value in {**TRAIN, **train}.items())
        based = base or f'kind = "path"\npath = "{self.base}"\nsha256 = "{folder_hash(self.base)}"'
        text = (
            f'title = "e"\nrollout_sets = ["few"]\nevaluate = {{suite = "small"}}\nseeds = {seeds}\n'
            f"[base]\n{based}\n{TINY_FORMAT}\n[train]\n{section}\n"
        )
        write_spec(self.folder / "specs", "experiments", name, text)

    def dataset(self, rows: list[dict], name: str = "first") -> None:
        tables = {"dataset_rows": empty("dataset_rows"), "dropped": empty("dropped")}
        tables["sequences"] = from_rows("sequences", rows)
        ref = Ref("upweighted_dataset", "experiment", name)
        self.lake.publish(ref, tables, input_key="x", inputs={}, spec_hash="x")

    def make(self, asset: str, name: str = "first") -> Outcome:
        resources = Resources(lake=self.lake, specs_folder=self.folder / "specs")
        return ASSETS[asset].execute(name, resources, log=lambda line: None)

    def rows(self, asset: str, table: str, name: str = "first") -> list[dict]:
        return self.lake.read(Ref(asset, "experiment", name), table).to_pylist()

    def failures(self, outcome: Outcome) -> dict[str, str]:
        return {check["name"]: check["message"] for check in outcome.manifest.failures}


@pytest.fixture
def training(tmp_path, base) -> Training:
    return Training(tmp_path, base)


@pytest.mark.slow
def test_every_seed_has_checkpoints_log_and_checks(training, monkeypatch):
    training.experiment(seeds="[0, 1]", save_steps="4")
    training.dataset(rows := learnable(40, validation=6))
    assert not training.failures(training.make("base_checkpoint"))
    outcome = training.make("sft_checkpoint")
    assert not outcome.manifest.blocked, training.failures(outcome)
    assert [check["name"] for check in outcome.manifest.checks] == list(CHECKS["sft_checkpoint"])
    assert outcome.manifest.seeds == [0, 1]

    checkpoints = training.rows("sft_checkpoint", "checkpoints")
    labels = sum(sum(r["span_ends"]) - sum(r["span_starts"]) for r in rows if r["split"] == "train")
    dataset = training.lake.require(DATASET).version
    [parent] = training.rows("base_checkpoint", "checkpoints")
    for seed in (0, 1):
        own = [row for row in checkpoints if row["seed"] == seed]
        assert [row["final"] for row in own] == [False] * (len(own) - 1) + [True] and len(own) > 1
        assert [row["step"] for row in own[:-1]] == list(range(4, own[-1]["step"], 4))
        for row in own:
            assert folder_hash(training.lake.root / row["path"]) == row["checkpoint_id"]
            assert (row["parent_id"], row["dataset_version"]) == (parent["checkpoint_id"], dataset)
            assert row["label_tokens"] == labels
            assert json.loads(row["hyperparameters"])["learning_rate"] == 0.01
        log = [row for row in training.rows("sft_checkpoint", "training_log") if row["seed"] == seed]
        assert log[0]["step"] == 0 and log[-1]["step"] == own[-1]["step"]
        assert log[-1]["val_loss"] == own[-1]["val_loss"] < log[0]["val_loss"]
    finals = {row["checkpoint_id"] for row in checkpoints if row["final"]}
    assert len(finals) == 2, "another seed must be another model"
    assert not list(training.lake.scratch("train").iterdir()), "what the trainer left behind must be gone"
    assert len(outcome.metadata["loss"]) < 50_000

    # A second experiment that shares base, data and training trains nothing, and is a version of its own all the same.
    def refuse(*arguments, **named):
        raise AssertionError("trained again")

    monkeypatch.setattr(sft, "run_worker", refuse)
    training.experiment("second", seeds="[1]", save_steps="4")
    training.dataset(rows, "second")
    training.make("base_checkpoint", "second")
    training.make("sft_checkpoint", "second")
    again = training.rows("sft_checkpoint", "checkpoints", "second")
    assert [r["checkpoint_id"] for r in again] == [r["checkpoint_id"] for r in checkpoints if r["seed"] == 1]
    assert {row["experiment"] for row in again} == {"second"}
    # Another knob is another training.
    training.experiment("second", seeds="[1]", save_steps="4", learning_rate="2e-2")
    with pytest.raises(AssertionError, match="trained again"):
        training.make("sft_checkpoint", "second")


@pytest.mark.slow
def test_under_dagster_the_trainer_s_progress_reaches_the_run_s_log(training):
    training.experiment(max_steps="2")
    training.dataset(learnable(20, validation=4))
    training.make("base_checkpoint")
    resources = Resources(lake=training.lake, specs_folder=training.folder / "specs")
    asset = build_asset(ASSETS["sft_checkpoint"], resources.specs)
    with dg.DagsterInstance.ephemeral() as instance:
        result = dg.materialize([asset], partition_key="first", resources={RESOURCE: resources}, instance=instance)
        said = [entry.user_message for entry in instance.all_logs(result.run_id)]
    assert result.success
    assert [
        line for line in said if line.startswith("sft_checkpoint of first: seed 0, step 2/2 ") and "(loss " in line
    ], said
    [created] = result.asset_materializations_for_node("sft_checkpoint")
    assert {"loss", "seed 0"} <= set(created.metadata)


@pytest.mark.slow
def test_an_adapter_is_published_beside_the_merged_model(training):
    training.experiment(method='"lora"', lora_rank="4", max_steps="3")
    training.dataset(learnable(20, validation=4))
    training.make("base_checkpoint")
    outcome = training.make("sft_checkpoint")
    assert not outcome.manifest.blocked, training.failures(outcome)
    [row] = training.rows("sft_checkpoint", "checkpoints")
    assert row["adapter_path"] == f"{row['path']}/adapter"
    assert folder_hash(training.lake.root / row["adapter_path"]) == row["adapter_hash"]


@pytest.mark.parametrize("method", ["lora", "full"])
def test_training_without_effect_is_blocked(training, method):
    training.experiment(method=f'"{method}"', learning_rate="0.0", max_steps="2")
    training.dataset(learnable(12, validation=4))
    training.make("base_checkpoint")
    failures = training.failures(training.make("sft_checkpoint"))
    which = "adapter_not_zero" if method == "lora" else "weights_differ_from_base"
    assert set(failures) == {which, "weights_differ_from_base", "loss_finite_and_falls"}
    assert "learning_rate" in failures[which]
    with pytest.raises(BlockedInput, match=which):
        training.lake.require(Ref("sft_checkpoint", "experiment", "first"))
    assert not (training.lake.root / "checkpoints" / "trained").exists(), "a failed training must not be found again"


IGNORES_LABELS = """
from etpi_resources.labels import IGNORE_INDEX
from etpi_resources.trainers.workers import collate

whole = collate.collate
def masked(*arguments):
    batch = whole(*arguments)
    batch["labels"][:, ::2] = IGNORE_INDEX
    return batch
collate.collate = masked
"""


def test_trainer_that_ignores_labels_is_blocked_though_its_loss_falls(training, monkeypatch):
    (training.folder / "sitecustomize.py").write_text(IGNORES_LABELS)
    monkeypatch.setenv("PYTHONPATH", str(training.folder), prepend=os.pathsep)
    training.experiment()
    training.dataset(learnable(40, validation=4))
    training.make("base_checkpoint")
    failed = training.failures(training.make("sft_checkpoint"))
    assert set(failed) == {"label_tokens_match"}, "its loss falls"
    stopped(
        "labels that the trainer ignores, while its loss looks healthy", "sft_checkpoint", failed, "label_tokens_match",
        "the trainer ignores or cuts data",
    )  # fmt: skip


@pytest.mark.slow
def test_loss_that_is_not_finite_ends_the_training_with_a_remedy(training):
    training.experiment(learning_rate="1e18", warmup_ratio="0.0", max_steps="20")
    training.dataset(learnable(40, validation=4))
    training.make("base_checkpoint")
    with pytest.raises(WorkerFailed, match=r"step .*train\.learning_rate"):
        training.make("sft_checkpoint")


def test_missing_base_or_sequences_raise_with_the_remedy(training):
    training.dataset(learnable(4))
    training.experiment(method='"none"')
    training.make("base_checkpoint")
    assert "train.method" in training.make("sft_checkpoint").manifest.notes["not_applicable"]
    assert training.rows("sft_checkpoint", "checkpoints") == []

    training.experiment(base='kind = "none"')
    assert "base.kind" in training.make("base_checkpoint").manifest.notes["not_applicable"]
    with pytest.raises(LakeError, match='base.kind = "none"'):
        training.make("sft_checkpoint")

    training.experiment()
    training.make("base_checkpoint")
    training.dataset([row | {"split": "val"} for row in learnable(4)])
    with pytest.raises(LakeError, match="upweighted_dataset .*`dropped`"):
        training.make("sft_checkpoint")


def test_reinforcement_without_method_is_not_applicable(training):
    training.experiment(method='"none"')
    training.dataset(learnable(2))
    for asset in ("base_checkpoint", "sft_checkpoint"):
        training.make(asset)
    training.lake.publish(
        Ref("tasks", "suite", "small"), {"tasks": empty("tasks"), "quarantined": empty("quarantined")},
        input_key="x", inputs={}, spec_hash="x",
    )  # fmt: skip
    notes = training.make("rl_checkpoint").manifest.notes
    assert notes["not_applicable"] == 'nothing is reinforced: rl.method = "none"'


# --- bases -----------------------------------------------------------------------------------------------------------


def test_local_base_with_other_files_than_the_specs_hash_is_refused(training):
    training.experiment(base=f'kind = "path"\npath = "{training.base}"\nsha256 = "0123456789abcdef"')
    failures = training.failures(training.make("base_checkpoint"))
    message = failures[checkpoints.PINNED]
    assert folder_hash(training.base) in message and "0123456789abcdef" in message
    training.experiment(base='kind = "path"\npath = "/nowhere"\nsha256 = "0"')
    with pytest.raises(LakeError, match="/nowhere.*config.json"):
        training.make("base_checkpoint")


def test_a_hub_base_is_a_pinned_pointer_that_is_fetched_only_when_needed(training, monkeypatch):
    commit = "c1899de289a04d12100db370d81485cdf75e47ca"
    training.experiment(base=f'kind = "hub"\nrepo = "Qwen/Qwen3-0.6B"\nrevision = "{commit}"')
    assert not training.failures(training.make("base_checkpoint"))
    [row] = training.rows("base_checkpoint", "checkpoints")
    assert row["path"] == f"hub:Qwen/Qwen3-0.6B@{commit}" and row["final"] and row["role"] == "base"
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(training.folder / "empty"))
    with pytest.raises(LakeError, match=f"Qwen/Qwen3-0.6B at {commit} .*hf download"):
        checkpoint_folder(training.lake.root, row["path"])

    training.experiment(base='kind = "hub"\nrepo = "Qwen/Qwen3-0.6B"\nrevision = "main"')
    assert "name the commit" in training.failures(training.make("base_checkpoint"))[checkpoints.PINNED]


def test_hub_models_folder_is_the_hub_clients(monkeypatch, tmp_path):
    asked = {}

    def download(repo, *, revision, allow_patterns):
        asked.update(repo=repo, revision=revision, patterns=allow_patterns)
        return str(tmp_path)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    row, _ = checkpoints.pointer(BaseSection(kind="hub", repo="a/b", revision="c" * 40))
    assert checkpoint_folder(tmp_path, row["path"]) == tmp_path
    assert asked["repo"] == "a/b" and asked["revision"] == "c" * 40
    assert not any(p.endswith((".bin", ".pt", ".pkl")) for p in asked["patterns"]), "pickled weights run code"


# --- the checks, one fault each --------------------------------------------------------------------------------------


def report(**changes) -> SftReport:
    """A report that passes every check, but for the changes to its fields."""
    default: dict[str, Any] = {
        "counted": {"complete": True, "labels": 50, "labels_planned": 50, "tokens": 90, "tokens_planned": 90,
                    "weights": 150.0, "weights_planned": 150.0},
        "log": [{"val_loss": 3.0}, {"loss": 2.9}, {"val_loss": 1.0, "loss": 1.1}],
        "saved": {
            "dtype": "float32", "compared_in": "float32", "base_difference": 0.3, "changed_share": 0.9, "differing": [],
            "reload_difference": 0.0, "merge_difference": 1e-6, "adapters": 14, "zero_adapters": [],
        },
        "plan": {
            "steps": 2, "sequences": 4, "epochs": 1.0, "weighted_rows": 4.0, "padding": 0.0, "shapes": [(1, 64)],
            "layout": "rows", "branches": 4, "layout_because": "nothing forks", "step_weight": 1.0, "accumulate": 1,
        },
        "seconds": {"start": 0.0, "train": 0.0, "save": 0.0}, "device": "cpu", "dtype": "fp32", "libraries": {},
        "checkpoints": [], "reused": False,
    }  # fmt: skip
    for name, value in changes.items():
        default[name] = {**default[name], **value} if isinstance(value, dict) else value
    line = dict.fromkeys(SftLogLine.model_fields) | {"epoch": 0.0, "tokens": 0, "seconds": 0.0}
    default["log"] = [{**line, "step": step, **measured} for step, measured in enumerate(default["log"])]
    return SftReport.model_validate(default)


FAULTS = {
    "labels ignored": ("label_tokens_match", {"counted": {"labels": 49}}, "49 labels entered.*dataset has 50"),
    "sequences left out": ("label_tokens_match", {"plan": {"sequences": 3}}, "3 of 4 sequences were read"),
    "part of a pass": (
        "label_tokens_match", {"counted": {"complete": False, "labels": 20, "labels_planned": 21}}, "dataset has 21"),
    "weights ignored": ("label_tokens_match", {"counted": {"weights": 50.0}}, "50.0 weights.*dataset has 150.0"),
    "weights of a part": (
        "label_tokens_match", {"counted": {"complete": False, "weights": 20.0, "weights_planned": 60.0}}, "has 60.0"),
    "sequences cut": ("no_sequence_cut", {"counted": {"tokens": 80}}, "80 tokens entered.*dataset has 90"),
    "loss rises": ("loss_finite_and_falls", {"log": [{"val_loss": 1.0}, {"val_loss": 2.0, "loss": 2.0}]},
                   "1.000 -> 2.000.*learning_rate"),
    "loss rises, no validation": (
        "loss_finite_and_falls",
        {"log": [{"loss": 1.0}, {"loss": 2.0}]}, "training loss 1.000 -> 2.000"),
    "loss that does not change": ("loss_finite_and_falls", {"log": [{"val_loss": 1.0}, {"val_loss": 1.0}]}, "not fall"),
    "loss not finite on the way": (
        "loss_finite_and_falls", {"log": [{"val_loss": 2.0}, {"val_loss": math.inf}, {"val_loss": 1.0}]}, "not finite"),
    "loss not finite": ("loss_finite_and_falls", {"log": [{"val_loss": 1.0}, {"val_loss": math.nan}]}, "not finite"),
    "lost in rounding": (
        "weights_differ_from_base", {"saved": {"changed_share": 0.0}}, "rounded to float32.*learning_rate"),
    "a part frozen": (
        "weights_differ_from_base", {"saved": {"unchanged": ["lm_head"], "trained": 3}}, "1 of 3.*lm_head"),
    "a dead adapter": ("adapter_not_zero", {"saved": {"zero_adapters": ["q.lora_B"]}}, "1 of 14.*q.lora_B"),
    "no adapter": ("adapter_not_zero", {"saved": {"adapters": 0}}, "0 of 0"),
    "saved otherwise": ("reload_equals_saved", {"saved": {"differing": ["norm"]}}, "norm.*do not serve"),
    "logits differ": ("reload_equals_saved", {"saved": {"reload_difference": 0.0005}}, "0.0005"),
    "merged wrongly": ("reload_equals_saved", {"saved": {"merge_difference": 0.01}}, "0.01"),
    "logits differ in 16 bits": (
        "reload_equals_saved", {"saved": {"compared_in": "bfloat16", "reload_difference": 0.02}}, "0.02"),
}  # fmt: skip
SPLIT = sft_checks.TrainingSplit(sequences=4, labels=50, tokens=90, weights=150.0)


def test_a_good_report_passes_every_check():
    assert all(check.passed and check.blocking for check in sft_checks.checks({0: report(), 1: report()}, SPLIT))


EPOCHS = [{"val_loss": 2.0}, {"val_loss": 1.0, "loss": 1.5}, {"val_loss": 3.0, "loss": 0.1}]
STEPS = [{"val_loss": 2.0}, {"loss": 1.0}, {"loss": 1.2}, {"loss": 0.9, "val_loss": 1.5}]
"""A validation after the checkpoint that is used judges it, not the losses of two steps."""


@pytest.mark.parametrize(("log", "used", "passed"), [(EPOCHS, 1, True), (EPOCHS, 2, False), (STEPS, 2, True)])
def test_loss_is_judged_until_the_checkpoint_that_is_used(log: list[dict[str, float]], used: int, passed: bool):
    saved = [
        {"checkpoint_id": "x", "adapter_hash": None, "step": s, "final": s == used, "train_loss": 1.0, "val_loss": 1.0}
        for s in (1, 2)
    ]
    outcomes = sft_checks.checks({0: report(log=log, checkpoints=saved)}, SPLIT)
    assert {outcome.name for outcome in outcomes if not outcome.passed} == (
        set() if passed else {"loss_finite_and_falls"}
    )


def test_rounding_of_a_merge_in_16_bits_and_logits_that_were_not_compared_block_nothing():
    rounded = {"compared_in": "bfloat16", "merge_difference": 0.06}
    apart = {"reload_difference": None, "merge_difference": None}
    for saved in (rounded, apart):
        (outcome,) = (c for c in sft_checks.proofs({0: report(saved=saved)}) if c.name == "reload_equals_saved")
        assert outcome.passed, outcome.message


@pytest.mark.parametrize("fault", FAULTS)
def test_each_fault_fails_its_check_and_names_the_seed(fault):
    import re

    name, changes, words = FAULTS[fault]
    outcomes = {check.name: check for check in sft_checks.checks({0: report(), 7: report(**changes)}, SPLIT)}
    assert not outcomes[name].passed
    assert re.search(words, outcomes[name].message) and "seed 7" in outcomes[name].message
    assert "seed 0" not in outcomes[name].message


def test_settings_have_every_key_of_their_spec_section_or_leave_it_to_the_starter():
    of_starter = {
        "method", "suite", "tasks", "tasks_from", "min_trust", "agent", "sandbox", "rewards", "scale_advantage",
        "advantage_eps", "advantage_ddof", "max_broken", "refill", "mask_truncated", "teacher", "teacher_engine",
        "partial_rollouts", "stop_at_used",
    }  # fmt: skip
    of_server = set(ServerSection.model_fields) | {"engine", "options", "servers", "placement"}
    assert set(SftSettings.model_fields) == set(TrainSection.model_fields) - {"report_to"}
    of_property = {"temperature", "round_size", "last_step"}
    assert set(GrpoSettings.model_fields) - of_property == set(RLSection.model_fields) - of_starter - of_server


def test_request_s_key_follows_everything_the_result_depends_on(tmp_path):
    def request(**changes) -> sft.SftRequest:
        train = TrainSection.model_validate(changes.pop("train", {}))
        same = {
            "experiment": "a", "base_id": "b", "base_folder": tmp_path, "files": {tmp_path / "f": "sha"}, "seed": 0,
            "chat_template": "t", "gpu": False, "dtype": "fp32", "code": "c",
        }  # fmt: skip
        return sft.SftRequest(train=train, **{**same, **changes})

    key = request().key
    assert request(experiment="other", base_folder=Path("/elsewhere"), files={Path("/g"): "sha"}).key == key
    others = [
        request(base_id="x"), request(files={tmp_path / "f": "x"}), request(seed=1), request(chat_template="x"),
        request(code="x"), request(train={"epochs": 3.0}), request(dtype="bf16"),
    ]  # fmt: skip
    assert len({key, *(other.key for other in others)}) == len(others) + 1


def test_loss_plot_is_small_and_shows_the_logged_values():
    log = [
        {"seed": seed, "step": step, "loss": 5.0 / step if step else None, "val_loss": 4.0 if step % 100 == 0 else None}
        for seed in (0, 1) for step in range(300)
    ]  # fmt: skip
    plot = loss_plot(log)
    assert len(plot) < 50_000
    svg = base64.b64decode(plot.rpartition(",")[2].rstrip(")")).decode()
    assert svg.count("<polyline") == 4  # two seeds, training and validation
