"""The experiments that ship: their data reach the training."""

from __future__ import annotations

from pathlib import Path

import pytest

from etpi_assets.specs.load import load_shipped
from tests.command.test_tiny_run import ROOT, run


@pytest.mark.long
def test_data_of_each_demo_pass_the_checks_before_its_training(tmp_path: Path) -> None:
    specs = load_shipped()
    demos = [path.stem for path in (ROOT / "etpi_assets/specs/experiments/demo").glob("*.toml")]
    names = [name for name in demos if specs.get("experiment", name).train.method != "none"]
    assert {"plan_first_tiny", "plan_first_smol_lora", "running_sum_tiny"} <= set(names)
    (tmp_path / "specs/experiments").mkdir(parents=True)
    done = run(tmp_path, "run", "--data-only", *names)
    assert done.returncode == 0, done.stderr
