"""What a step asks of the nodes, and what is said where none offers it."""

from __future__ import annotations

from pathlib import Path

import pytest

from etpi_assets.specs.load import Specs, load_specs
from etpi_cluster.nodes import Node, serves
from etpi_cluster.placement.needs import need_of
from etpi_cluster.session import SANDBOXES
from etpi_resources.engines.vllm_options import accelerators_of
from tests.support.graph import write_spec
from tests.support.small_specs import write_small_specs

TRAINED = 'extends = "plan_first_tiny"\nrequires = "gpu"\n'


def node(name: str, **offered: float) -> Node:
    return Node(name, name, "10.0.0.1", name == "head", offered, offered)


HEAD, WORKER, BOX = node("head"), node("worker", CPU=8, etpi_sandbox=16), node("box", CPU=8, GPU=2)
NODES = [HEAD, WORKER, BOX]


@pytest.fixture(scope="module")
def specs(tmp_path_factory: pytest.TempPathFactory) -> Specs:
    folder: Path = write_small_specs(tmp_path_factory.mktemp("specs"))
    write_spec(folder, "experiments", "on_gpu", TRAINED)
    write_spec(folder, "experiments", "sharded", f"{TRAINED}[train]\nshards = 2\n")
    write_spec(folder, "experiments", "wide", f"{TRAINED}[train]\nshards = 3\n")
    return load_specs(folder)


def own(specs: Specs, asset: str, key: str) -> dict[str, float]:
    return dict(need_of(asset, key, specs, NODES, "GPU").step)


@pytest.mark.parametrize(
    ("asset", "key", "placed"),
    [
        ("experiment_spec", "on_gpu", "worker box"),
        ("catalog", "all", "worker box"),
        ("tito_pairs", "on_gpu", "worker box"),
        ("tasks", "little", "worker"),
        ("raw_rollouts", "little_strong", "worker box"),  # it directs actors on the nodes with sandboxes
        ("sft_checkpoint", "plan_first_tiny", "worker box"),
        ("sft_checkpoint", "on_gpu", "box"),
        ("sft_checkpoint", "sharded", "box"),
        ("eval_rollouts", "plan_first_tiny", "worker"),
    ],
)
def test_step_is_placed_where_its_needs_are_met(specs: Specs, asset: str, key: str, placed: str) -> None:
    need = need_of(asset, key, specs, NODES, "GPU")
    assert [n.name for n in NODES if serves(n, need.step)] == placed.split()
    assert need.missing(NODES, "head:6379") is None


def test_no_step_asks_for_nothing_and_light_ones_ask_little(specs: Specs) -> None:
    assert 0 < own(specs, "experiment_report", "on_gpu")["CPU"] < own(specs, "tito_pairs", "on_gpu")["CPU"]


def test_shards_are_taken_of_one_node_if_one_has_them_else_of_several(specs: Specs) -> None:
    assert own(specs, "sft_checkpoint", "sharded")["GPU"] == 2
    wide = need_of("sft_checkpoint", "wide", specs, NODES, "GPU")
    assert "GPU" not in wide.step and wide.ranks == {"GPU": 3.0}
    assert wide.missing(NODES, "head:6379")
    assert wide.missing([*NODES, node("more", CPU=1, GPU=1)], "head:6379") is None


def test_reinforcement_takes_the_gpus_of_its_processes_and_its_servers(tmp_path: Path) -> None:
    folder = write_small_specs(tmp_path)
    layout = "[rl]\nrepeatable = false\nprocesses = 2\naccumulate = 1\n"
    served = 'engine = "vllm"\nservers = 2\nplacement = "PLACE"\n[rl.options]\ntensor-parallel-size = 2\n'
    start = f'extends = "terminal_grpo_tiny"\nrequires = "gpu"\n{layout}'
    write_spec(folder, "experiments", "alone", start)
    for place in ("apart", "shared"):
        write_spec(folder, "experiments", place, start + served.replace("PLACE", place))
    specs = load_specs(folder)
    taken = {name: own(specs, "rl_checkpoint", name)["GPU"] for name in ("alone", "apart", "shared")}
    assert taken == {"alone": 2, "apart": 6, "shared": 4}


def test_evaluation_on_a_gpu_needs_it_and_sandboxes_on_one_node(specs: Specs) -> None:
    need = need_of("eval_rollouts", "on_gpu", specs, NODES, "GPU")
    told = need.missing(NODES, "head:6379")
    assert told and "GPU 1" in told and SANDBOXES in told
    assert "worker (CPU 8, etpi_sandbox 16)" in told and "box (CPU 8, GPU 2)" in told  # what the nodes offer
    assert "ray start --address=head:6379" in told and "--num-gpus=1" in told  # the remedy
    assert need.missing([*NODES, node("both", CPU=8, GPU=1, etpi_sandbox=16)], "head:6379") is None


def test_rollouts_need_a_node_with_sandboxes_though_the_step_takes_none(specs: Specs) -> None:
    need = need_of("raw_rollouts", "little_strong", specs, [HEAD, BOX], "GPU")
    assert SANDBOXES not in need.step
    assert SANDBOXES in str(need.missing([HEAD, BOX], "head:6379"))


def test_servers_are_placed_by_the_accelerators_that_one_takes(specs: Specs, tmp_path: Path) -> None:
    folder = write_small_specs(tmp_path)
    options = "[serving]\nengine = 'vllm'\n[serving.options]\ntensor-parallel-size = 2\ndata_parallel_size = 2\n"
    write_spec(folder, "experiments", "served", f"{TRAINED}{options}")
    for asset in ("serving_probe", "eval_rollouts"):
        need = need_of(asset, "served", load_specs(folder), NODES, "GPU")
        assert "GPU" not in need.step and {"GPU": 4.0} in need.actors
        assert "GPU 4" in str(need.missing(NODES, "head:6379"))
    assert accelerators_of({"tensor-parallel-size": 2, "--data-parallel-size": 2, "max-model-len": 4096}) == 4


def test_resource_can_stand_in_for_gpus(specs: Specs) -> None:
    need = need_of("sft_checkpoint", "on_gpu", specs, [HEAD, node("box", CPU=1, stand_in=1)], "stand_in")
    assert need.step["stand_in"] == 1 and "GPU" not in need.step


def test_step_that_computes_an_experiments_inputs_needs_what_each_of_them_needs(
    specs: Specs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ETPI_DATA", str(tmp_path))
    monkeypatch.delenv("ETPI_CLUSTER", raising=False)
    need = need_of("experiment_inputs", "first", specs, NODES, "GPU")
    tasks = need_of("tasks", "little", specs, NODES, "GPU")
    assert tasks.step[SANDBOXES] and need.step == tasks.step, "rollouts need less of the step's own node"
    assert {SANDBOXES: 1.0} in need.actors and len(need.actors) == 1
    lacking = need_of("experiment_inputs", "first", specs, [HEAD, BOX], "GPU")
    assert SANDBOXES in str(lacking.missing([HEAD, BOX], "head:6379"))
