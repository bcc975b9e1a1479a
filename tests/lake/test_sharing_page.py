"""docs/sharing.md: its session, typed on two machines that share a bucket."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from etpi_resources.lake.audit import audit
from etpi_resources.lake.exchange.bucket import Bucket, ref_of
from etpi_resources.lake.lake import Lake, Ref
from tests.support import buckets
from tests.support.docs_pages import blocks

pytest.importorskip("obstore")
PAGE = Path(__file__).resolve().parents[2] / "docs" / "sharing.md"


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_the_session_of_two_people_runs_as_typed(tmp_path, monkeypatch):
    program = tmp_path / "bin" / "etpi"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -m etpi "$@"\n')
    program.chmod(0o755)
    with buckets.server("moto", tmp_path / "server") as variables:
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        for block in blocks(PAGE):
            home = tmp_path / block.machine
            home.mkdir(exist_ok=True)
            own = buckets.environment(variables)
            own |= {
                "ETPI_DATA": str(home / "data"),
                "BUCKET": "s3://lakes/team",
                "PATH": f"{program.parent}:{own['PATH']}",
            }
            subprocess.run(["bash", "-euxo", "pipefail", "-c", block.commands], check=True, cwd=home, env=own)
        index, _ = Bucket("s3://lakes/team").index()
    keys = {ref_of(name).key for name in index.partitions}
    assert keys == {"coop_tiny_shared", "coop_tiny_shared_weak"}
    ann, ben = Lake(tmp_path / "ann" / "data"), Lake(tmp_path / "ben" / "data")
    for ref in (Ref("tasks", "suite", "coop_tiny_shared"), Ref("raw_rollouts", "rollout_set", "coop_tiny_shared_weak")):
        assert ann.current(ref) == ben.current(ref) is not None
    assert ann.current(Ref("upweighted_dataset", "experiment", "plan_first_tiny_weak"))
    assert not audit(ann, deep=True).damages and not audit(ben, deep=True).damages
