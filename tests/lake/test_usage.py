"""`etpi du` counts every file once, and its sum is that of `du`."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from etpi.life.pages import WIDTH, usage_page
from etpi_resources.lake.lake import Lake, Ref
from etpi_resources.lake.references import References
from etpi_resources.lake.usage import refs_of, usage
from tests.support import small_lake


def lake_with_everything(root: Path) -> Lake:
    lake = small_lake.make(root)
    staged = lake.scratch("model")
    (staged / "model.safetensors").write_bytes(bytes(100_000))
    checkpoint, folder = lake.adopt_checkpoint(staged)
    for experiment in ("one", "two"):
        base = small_lake.checkpoint(checkpoint, experiment, "base")
        small_lake.put(lake, "base_checkpoint", experiment, {"checkpoints": [base]})
    for name in ("scratch/rollouts/few/journal.jsonl", "reports/strong/report.html", ".damaged/then/x", "notes.txt"):
        path = lake.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(bytes(9000))
    os.link(lake.root / "notes.txt", lake.root / "scratch" / "linked")
    orphan = lake.root / "tito_pairs/pairs/experiment=strong/version=0123456789abcdef/part-0.parquet"
    orphan.parent.mkdir()
    orphan.write_bytes(bytes(50_000))
    small_lake.put(lake, "tito_pairs", "strong", {})
    return lake


def test_the_sum_is_that_of_du_and_a_shared_checkpoint_counts_once(tmp_path: Path) -> None:
    lake = lake_with_everything(tmp_path / "data")
    used = usage(lake)
    counted = subprocess.run(["du", "-s", "-B1", lake.root], capture_output=True, text=True, check=True).stdout
    assert used.total == int(counted.split()[0])
    (shared,) = used.checkpoints
    assert shared.users == ("base of one", "base of two") and shared.bytes >= 100_000
    pairs = used.versions[Ref("tito_pairs", "experiment", "strong")]
    assert pairs["unnamed"] >= 50_000 and pairs["past"] > 0 and pairs["current"] > 0
    assert used.other["scratch/rollouts"] >= 9000 and used.other[".damaged"] >= 9000


def test_the_page_fits_and_names_what_it_counts(tmp_path: Path) -> None:
    lake = lake_with_everything(tmp_path / "data")
    used, references = usage(lake), References(lake)
    page = usage_page("data", used)
    assert max(map(len, page.splitlines())) <= WIDTH
    for name in ("tito_pairs", "experiment strong", "base of one, base of two", "journals of collected rollouts"):
        assert name in page
    one = usage_page("data", used, ["one"], refs_of(references, ["one"]))
    assert "base_checkpoint" in one and "tito_pairs" not in one and "base of two" in one
