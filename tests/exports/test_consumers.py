"""Exports as read by their target packages: verl's data sets (`make consumers`).

The packages run in a separate process with their own path, because their dependencies conflict with etpi's.
"""

from __future__ import annotations

from pathlib import Path

import pyarrow.parquet as pq
import pytest

from etpi_assets.exports import export
from etpi_assets.resources import Resources
from etpi_resources.chat.format import load_chat_format
from tests.support.curation import CurationLake
from tests.support.students import VERL_SFT, read_by

pytestmark = pytest.mark.usefixtures("consumers")

VERL_RL = """
from omegaconf import OmegaConf
from verl.utils import hf_tokenizer
from verl.utils.dataset.rl_dataset import RLHFDataset, collate_fn

settings = OmegaConf.create({"max_prompt_length": 4096, "cache_dir": arguments["folder"]})
rows = RLHFDataset(arguments["file"], hf_tokenizer(arguments["tokenizer"]), settings)
batch = collate_fn([rows[i] for i in range(len(rows))])
names = ("index", "data_source", "reward_model", "raw_prompt")
answer = [dict(zip(names, row)) for row in zip(*(batch[name].tolist() for name in names))]
"""


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Export a small experiment, and save its tokenizer."""
    curation = CurationLake.with_rollouts(tmp_path_factory.mktemp("curation"))
    assert curation.failures("clean") == {}
    for name in ("verl_sft", "verl_rl"):
        export(
            "clean", name, curation.folder / name, Resources(lake=curation.lake, specs_folder=curation.folder / "specs")
        )
    load_chat_format("tiny").save(curation.folder / "tokenizer")
    return curation.folder


def test_verl_loss_covers_exactly_the_assistant_messages(exported: Path) -> None:
    file = exported / "verl_sft/data/train.parquet"
    trained = read_by(VERL_SFT, file=file, tokenizer=exported / "tokenizer")
    rows = pq.read_table(file).to_pylist()
    for text, row in zip(trained, rows, strict=True):
        written = [m["content"] for m in row["messages"] if m["role"] == "assistant"]
        assert text == "".join(f"{content}<|im_end|>\n" for content in written)


def test_verl_prompts_are_those_of_the_student(exported: Path) -> None:
    file = exported / "verl_rl/data/train.parquet"
    prompts = read_by(VERL_RL, file=file, tokenizer=exported / "tokenizer", folder=exported / "cache")
    rows = pq.read_table(file).to_pylist()
    assert [row["index"] for row in prompts] == list(range(len(rows)))
    assert [row["raw_prompt"] for row in prompts] == [row["prompt"] for row in rows]
    assert [row["reward_model"]["ground_truth"] for row in prompts] == [row["extra_info"]["task_id"] for row in rows]
