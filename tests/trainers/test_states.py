"""A fine-tuning that was killed continues from its last complete state, and ends as if it had not been killed."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file

from etpi_resources.trainers.workers.states import COMPLETE_MARK, States, last_complete_step
from tests.support.sft import config_of, in_process
from tests.support.tiny_training import learnable, make_base, write

torch.set_num_threads(1)
TRAIN = {"batch_sequences": 3, "epochs": 3.0, "save_steps": 2, "learning_rate": 1e-2}


class Killed(BaseException):
    """Ends a training in the middle of a step, as SIGKILL would."""


@pytest.fixture
def killed_after(monkeypatch):
    """Ends a training after the step that follows the given one, whose state is the last complete."""

    def arm(step: int) -> None:
        whole = States.save_if_due

        def save(self, at, log):
            if at > step:
                raise Killed
            whole(self, at, log)

        monkeypatch.setattr(States, "save_if_due", save)

    return arm


@pytest.mark.slow
@pytest.mark.usefixtures("own_threads")
@pytest.mark.parametrize("method", ["full", "lora"])
def test_killed_training_ends_with_the_weights_and_losses_of_an_uninterrupted_one(
    tmp_path, method, killed_after, monkeypatch, capsys
):
    base, files = make_base(tmp_path / "base"), [write(learnable(7, validation=3), tmp_path / "s.parquet")]
    dropout = {"lora_dropout": 0.1} if method == "lora" else {}
    config = config_of(base, files, **TRAIN, method=method, **dropout)
    whole = in_process(tmp_path / "whole", config)
    assert not (tmp_path / "whole" / "states").exists(), "a short run saves no state"

    config = config.model_copy(update={"state_seconds": 0.0})
    killed_after(5)
    with pytest.raises(Killed):
        in_process(tmp_path / "run", config)
    monkeypatch.undo()
    folder = tmp_path / "run"
    assert last_complete_step(folder) == 5
    shutil.copytree(folder / "states" / "step-5", folder / "states" / "step-6")
    (folder / "states" / "step-6" / COMPLETE_MARK).unlink()

    resumed = in_process(folder, config)
    assert "continuing from step 5 of 7" in capsys.readouterr().out, "the newer state has no mark"
    for mine, wanted in zip(resumed.log, whole.log, strict=True):
        assert mine.model_dump(exclude={"seconds"}) == wanted.model_dump(exclude={"seconds"})
    assert [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()] == [
        line.model_dump() for line in resumed.log
    ]
    assert resumed.counted == whole.counted and resumed.checkpoints == whole.checkpoints
    for checkpoint in whole.checkpoints:
        mine, wanted = (
            load_file(tmp_path / name / checkpoint.folder / "model.safetensors") for name in ("run", "whole")
        )
        assert all(torch.equal(mine[name], wanted[name]) for name in wanted), checkpoint.folder


@pytest.mark.slow
def test_state_of_other_batches_is_not_continued(tmp_path):
    base, files = make_base(tmp_path / "base"), [write(learnable(7), tmp_path / "s.parquet")]
    config = config_of(base, files, **TRAIN).model_copy(update={"state_seconds": 0.0})
    in_process(tmp_path / "run", config)
    other = config.model_copy(update={"seed": 1})
    again = in_process(tmp_path / "run", other)
    assert again.log[0].step == 0 and again.log[1].step == 1
    assert again.log[-1].loss == in_process(tmp_path / "fresh", other).log[-1].loss
