"""Training divided over two processes is training in one, however unevenly the steps divide: the same weights, figures
and files; and when one of the processes dies, the run ends and says so."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError
from safetensors.torch import load_file

from etpi_assets.specs.load import load_specs
from etpi_assets.specs.training import TrainSection
from etpi_resources.process.supervise import descendants
from etpi_resources.trainers.contracts import SftWorkerResult
from etpi_resources.trainers.pipes import WorkerFailed, run_worker
from etpi_resources.trainers.workers import sft_worker
from etpi_resources.trainers.workers.plan import MicroBatch
from etpi_resources.trainers.workers.sharding import batches_of_rank
from tests.support.sequences import built, conversation, pairs_of
from tests.support.sft import config_of, digest, in_process, rank_of
from tests.support.tiny_training import learnable, make_base, write

torch.set_num_threads(1)
SAME = 1e-4
"""Largest difference of a tensor from one process's, as a share of how far training moved it (norms, float32)."""


@given(st.lists(st.integers(1, 50), min_size=1, max_size=60), st.integers(1, 9), st.integers(1, 5))
def test_every_micro_batch_of_a_step_goes_to_one_rank_and_all_ranks_run_equally_many(lengths, accumulate, ranks):
    batches = [MicroBatch((i,), 64 * length) for i, length in enumerate(lengths)]
    taken = [batches_of_rank(batches, accumulate, rank, ranks) for rank in range(ranks)]
    assert len({len(mine) for mine in taken}) == 1
    if ranks == 1:
        assert taken == [list(range(len(batches)))]
    rounds = -(-accumulate // ranks)
    for step, first in enumerate(range(0, len(batches), accumulate)):
        of_step = [i for mine in taken for i in mine[step * rounds : (step + 1) * rounds] if i is not None]
        assert sorted(of_step) == list(range(first, min(first + accumulate, len(batches))))


def test_spec_refuses_an_optimizer_whose_states_cannot_be_sharded():
    section = {"optimizer": "adamw_8bit"}
    assert "shards" not in TrainSection.model_validate(section).model_dump(), "off, it leaves the section's hash alone"
    with pytest.raises(ValidationError, match="'adamw_8bit', .*adamw_torch,"):
        TrainSection.model_validate({**section, "shards": 2})
    assert TrainSection.model_validate({**section, "shards": 2, "method": "lora"}).shards == 2, "an adapter is whole"


@pytest.mark.slow
def test_wrong_number_of_processes_is_refused(tmp_path):
    base, files = make_base(tmp_path / "base"), [write(learnable(2), tmp_path / "s.parquet")]
    with pytest.raises(RuntimeError, match="train.shards = 2.* 1 started.*processes=train.shards"):
        in_process(tmp_path / "run", config_of(base, files, shards=2))


def forked(path: Path) -> Path:
    """Conversations that fork and conversations that do not, two of their repositories held out for validation."""
    told = [conversation(seed, 4, keep=seed % 2 == 0) for seed in range(14)]
    pairs = pairs_of(*told, repo=[f"repo{n}" for n in range(len(told))])
    _, sequences, _ = built(pairs, upweight_factor=4.0, val_fraction=0.15)
    pq.write_table(sequences, path)
    return path


def chains(path: Path) -> Path:
    return write(learnable(7, validation=3), path)


COLD_START = load_specs().experiments["grpo_tcr_4b"].train.model_dump(exclude={"shards"})
CASES = {
    # Steps of three sequences over two processes, each pass ending within a step, the last step of one sequence.
    "grpo_tcr_4b": (
        chains,
        COLD_START | {"batch_sequences": 3, "dtype": "fp32", "learning_rate": 1e-3, "stop_at_used": False},
    ),
    # Packed rows of trees, five a step.
    "forks": (forked, {"batch_tokens": 320, "micro_tokens": 64, "epochs": 1.5, "save_steps": 2, "learning_rate": 1e-3}),
    "lora": (
        chains,
        {
            "method": "lora",
            "batch_sequences": 3,
            "epochs": 2.0,
            "save_steps": 2,
            "learning_rate": 1e-2,
            "gradient_checkpointing": True,
        },
    ),
    # A pass over a tree, before the adapter is there, gathers the base's embeddings.
    "lora forks": (
        forked,
        {
            "method": "lora",
            "batch_tokens": 320,
            "micro_tokens": 64,
            "epochs": 1.5,
            "save_steps": 2,
            "learning_rate": 1e-2,
        },
    ),
}


@pytest.mark.slow
@pytest.mark.usefixtures("own_threads")
@pytest.mark.parametrize("case", CASES)
def test_two_processes_give_the_same_checkpoints_as_one(tmp_path, case):
    make, train = CASES[case]
    base, files = make_base(tmp_path / "base"), [make(tmp_path / "sequences.parquet")]
    config = config_of(base, files, **train, shards=2)
    two = run_worker(sft_worker.MODULE, config, tmp_path / "two", SftWorkerResult, processes=2, echo=None).model_dump(
        mode="json"
    )
    one = in_process(tmp_path / "one", config_of(base, files, **train)).model_dump(mode="json")

    assert two["plan"] == one["plan"] and two["plan"]["accumulate"] % 2
    assert two["plan"]["layout"] == ("trees" if "forks" in case else "rows")
    assert two["counted"] == one["counted"] and two["counted"]["labels"] == two["counted"]["labels_planned"]
    log = [json.loads(line) for line in (tmp_path / "two" / "metrics.jsonl").read_text().splitlines()]
    assert log == two["log"] and len(log) == len(one["log"])
    for mine, wanted in zip(two["log"], one["log"], strict=True):
        measured = {key for key, figure in wanted.items() if figure is not None} - {"seconds"}
        assert measured == {key for key, figure in mine.items() if figure is not None} - {"seconds"}
        assert {key: mine[key] for key in measured} == pytest.approx({key: wanted[key] for key in measured}, rel=1e-5)

    steps = [checkpoint["folder"] for checkpoint in one["checkpoints"]]
    assert [c["folder"] for c in two["checkpoints"]] == steps and len(steps) > 1
    assert [c["final"] for c in two["checkpoints"]] == [c["final"] for c in one["checkpoints"]]
    before, lora = load_file(base / "model.safetensors"), "lora" in case
    weights = {"model.safetensors", *(["adapter/adapter_model.safetensors"] if lora else [])}
    for step in steps:
        files_of = [digest(tmp_path / name / step) for name in ("one", "two")]
        others = [{name: text for name, text in found.items() if name not in weights} for found in files_of]
        assert set(files_of[0]) >= weights and others[0] == others[1], "other files than weights"
        mine, wanted = (load_file(tmp_path / name / step / "model.safetensors") for name in ("two", "one"))
        assert set(mine) == set(wanted) == set(before), "tied weights must be stored once"
        for name in wanted:
            moved = (wanted[name] - before[name]).norm()
            assert moved > 0 or lora, (step, name)
            assert (mine[name] - wanted[name]).norm() <= SAME * moved + 1e-7 * lora, (step, name)
    saved = two["saved"]
    assert saved["differing"] == [] and saved["reload_difference"] < 1e-6
    assert saved["zero_adapters"] == [] if lora else saved["unchanged"] == []
    assert two["device"].startswith("2 x ")


@pytest.mark.slow
def test_killed_rank_ends_the_run_with_its_reason_and_leaves_no_process(tmp_path):
    base, files = make_base(tmp_path / "base"), [write(learnable(60), tmp_path / "s.parquet")]
    before, killed = set(descendants(os.getpid())), []

    def kill_second() -> None:
        log = tmp_path / "run" / "metrics.jsonl"
        while not (log.exists() and len(log.read_text().splitlines()) > 1):
            time.sleep(0.05)
        killed.extend(pid for pid in descendants(os.getpid()) if rank_of(pid) == "1")
        os.kill(killed[0], signal.SIGKILL)

    killer = threading.Thread(target=kill_second, daemon=True)
    killer.start()
    with pytest.raises(WorkerFailed, match="(?s)signal 9.*rank 1 of 2 .*SIGKILL"):
        config = config_of(base, files, shards=2, epochs=5000.0)
        run_worker(sft_worker.MODULE, config, tmp_path / "run", SftWorkerResult, processes=2, echo=None)
    killer.join()
    assert set(descendants(os.getpid())) <= before
    assert not (tmp_path / "run" / "result.json").exists()
