"""`hf upload` of an export, against a hub on the loopback interface, and the data set that readers get from there."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from datasets import load_dataset

from etpi_assets.exports import export
from etpi_assets.resources import Resources
from tests.support.curation import CurationLake
from tests.support.hub_server import TOKEN, HubServer


@pytest.mark.slow
def test_uploaded_export_is_the_folder_and_loads_as_a_data_set(tmp_path: Path):
    curation = CurationLake.with_rollouts(tmp_path / "curation")
    assert curation.failures("clean") == {}
    resources = Resources(lake=curation.lake, specs_folder=curation.folder / "specs")
    folder = tmp_path / "out"
    export("clean", "hub", folder, resources)
    with HubServer() as hub:
        environment = os.environ | {"HF_ENDPOINT": hub.url, "HF_TOKEN": TOKEN, "HF_HUB_DISABLE_XET": "1"}
        words = [Path(sys.executable).with_name("hf"), "upload", "lab/data", folder, "--repo-type", "dataset"]
        uploaded = subprocess.run(words, env=environment, capture_output=True, text=True)
        assert uploaded.returncode == 0, uploaded.stderr
        received = {name: data for name, data in hub.repos["datasets/lab/data"]["main"].items() if name[0] != "."}
    files = {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    assert received == files
    for name, data in received.items():
        (tmp_path / "back" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "back" / name).write_bytes(data)
    rows = load_dataset(str(tmp_path / "back"), "tokens", split="train", cache_dir=str(tmp_path / "cache"))
    assert rows["input_ids"] == pq.read_table(folder / "tokens/train.parquet")["input_ids"].to_pylist()
    assert "## Lineage" in received["README.md"].decode()
