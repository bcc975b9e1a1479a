"""An experiment on three machines is the experiment on one machine, though a worker dies in mid-training."""

from __future__ import annotations

import pytest

from tests.support import lakes
from tests.support.cluster_runs import EXPERIMENT
from tests.support.waiting import until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]  # a fixture's time counts too

TIMED = ("raw_rollouts", "sft_checkpoint", "model_card", "experiment_report", "catalog")
"""Assets whose rows hold seconds, so that another run of the same is another version."""


def test_rollouts_run_on_both_workers(runs, collected):
    spread = [line for line in runs.messages(collected) if "rollouts run on 2 nodes" in line]
    assert spread and "worker1" in spread[0] and "worker2" in spread[0]


def test_worker_killed_in_mid_training_leaves_the_experiment_equal_to_one_machines(
    services, runs, collected, shared_lake, alone
):
    """The suite and rollouts were launched by command, the experiment from the web page."""
    run = runs.by_web_page("run_experiment", EXPERIMENT)
    until(lambda: lakes.training_states(shared_lake) or runs.has_ended(run), 500, "it trains")
    training = [machine for machine in services.workers if services.running(machine, "sft_worker")]
    assert training, runs.messages(run)[-20:]
    training[0].kill_everything()
    services.start_ray(training[0])
    runs.succeed(run, 500)
    assert any("continuing from step" in line for line in runs.messages(run))
    on = runs.nodes_of(run)
    print(on)
    assert on["sft_checkpoint"][0] == training[0].name and len(on["sft_checkpoint"]) == 2
    assert {name for nodes in on.values() for name in nodes} == {"worker1", "worker2"}

    reference = alone()
    assert lakes.differences(reference, shared_lake) == []
    versions = lakes.hashes(shared_lake)
    other = {name for name, version in lakes.hashes(reference).items() if versions.get(name) != version}
    assert all(name.split(" ")[0] in TIMED for name in other), other
    assert lakes.damages(shared_lake) == []
    services.await_no_orphans()
