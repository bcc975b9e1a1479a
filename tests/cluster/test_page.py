"""docs/cluster.md: its commands, typed on two bare machines in the order of the page, end in a finished experiment."""

from __future__ import annotations

import os

import pytest

from etpi_resources.lake.lake import Lake
from etpi_resources.lake.manifest import Ref
from tests.support import machines
from tests.support.docs_pages import Block, blocks
from tests.support.machines import ROOT, SHARED
from tests.support.small_specs import write_small_specs

PAGE = ROOT / "docs" / "cluster.md"
EXPERIMENT = os.environ.get("ETPI_TEST_EXPERIMENT", "first")
"""The experiment that the test has the page run; `plan_first_tiny`, the page's own, takes much longer."""


def test_page_sets_up_both_machines_and_names_no_address():
    typed = blocks(PAGE)
    assert {block.machine for block in typed} == {"head", "worker"}
    text = "\n".join(block.commands for block in typed)
    for command in ("initdb", "ray start --head", "ray start --address", "etpi cluster doctor", "etpi run"):
        assert command in text
    assert "0.0.0.0" not in text and "RAY_AUTH_MODE=token" in text and "PGPASSFILE" in text


@pytest.fixture(scope="module")
def bare():
    """Two machines on which nothing runs, with a shared folder."""
    if reason := machines.missing():
        pytest.skip(reason)
    started = machines.Machines({"head": 1, "worker": 1})
    try:
        yield started
    finally:
        started.close()


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.skipif(not os.environ.get("ETPI_TEST_CLUSTER"), reason="several machines: make test-cluster")
def test_commands_of_the_page_lead_from_bare_machines_to_a_finished_experiment(bare):
    write_small_specs(bare.shared / "specs")
    given = {
        "EXPERIMENT": EXPERIMENT,
        "ETPI_SPECS": str(SHARED / "specs"),
        "RAY_raylet_start_wait_time_s": "240",  # a busy machine
    }
    printed = [_typed(bare, block, given) for block in blocks(PAGE)]
    examined = next(text for text in printed if "2 nodes: 0 faults" in text)
    assert f"run_experiment of {EXPERIMENT}: done in" in examined
    lake = Lake(bare.shared / "lake")
    assert lake.current(Ref("experiment_report", "experiment", EXPERIMENT)) is not None
    assert all(machine.processes() == {} for machine in bare.by_name.values())


def _typed(bare: machines.Machines, block: Block, given: dict[str, str]) -> str:
    done = bare[block.machine].run("bash", "-euo", "pipefail", "-c", block.commands, timeout=3600, **given)
    return done.stdout + done.stderr
