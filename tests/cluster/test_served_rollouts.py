"""Rollouts, the serving probe and evaluation with vLLM servers that etpi starts on the nodes' GPUs.

A program with vLLM's protocol serves a real small model (`tests.support.fake_vllm`).
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from etpi_assets.evaluation.assets import eval_rollouts
from etpi_assets.rollouts.assets import raw_rollouts
from etpi_resources.chat.format import load_chat_format
from etpi_resources.lake.lake import Ref, folder_hash
from tests.support.ray_nodes import RayNodes
from tests.support.serving import Models, failed_probes, make_models, rollout_set, serving_lake

pytestmark = pytest.mark.slow
TASKS = 3
AGENT = 'tokenizer = "qwen3"\nmax_steps = 2\nmax_tokens = 12'
NODES = ("one", "two")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    return make_models(tmp_path_factory.mktemp("models"), load_chat_format("qwen3"))


@pytest.fixture(autouse=True)
def key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_API_KEY", "the key of the servers")


def servers_left(cluster: RayNodes) -> list[int]:
    return [pid for name in NODES for pid in cluster.pids(name, "fake_vllm")]


def test_rollouts_on_nodes_ask_the_servers_on_nodes(on_cluster: RayNodes, models: Models, tmp_path: Path) -> None:
    resources = serving_lake(tmp_path, models, models.adapter)
    engine = f'kind = "vllm"\nmodel = "{models.base}"\nsha256 = "{folder_hash(models.base)}"'
    rollout_set(tmp_path, "asked", engine, AGENT, tasks=TASKS)
    log: list[str] = []
    assert not raw_rollouts.execute("asked", resources, log=log.append).manifest.blocked
    assert any("rollouts run on 2 nodes, 4 at once" in line for line in log), log
    ref = Ref("raw_rollouts", "rollout_set", "asked")
    rollouts = resources.lake.read(ref, "rollouts").to_pylist()
    assert len(rollouts) == TASKS and not any(row["error"] for row in rollouts)
    turns = resources.lake.read(ref, "turns").to_pylist()
    assert turns and all(row["output_ids"] for row in turns)
    logs = sorted(resources.lake.scratch("servers").glob("*.log"))
    assert [path.suffixes[-2] for path in logs] == [".0", ".1"]
    assert not servers_left(on_cluster)


@pytest.mark.long
def test_probe_and_evaluation_of_an_adapter_use_servers_on_nodes(
    on_cluster: RayNodes, models: Models, tmp_path: Path
) -> None:
    options = "[serving.options]\nmax-model-len = 4096\n"
    resources = serving_lake(tmp_path, models, models.adapter, serving=options, agent="max_steps = 2")
    assert failed_probes(resources) == {}
    log: list[str] = []
    assert not eval_rollouts.execute("e", resources, log=log.append).manifest.blocked
    assert any("rollouts run on 2 nodes" in line for line in log), log
    rows = resources.lake.read(Ref("eval_rollouts", "experiment", "e"), "rollouts").to_pylist()
    assert {row["teacher"] for row in rows} == {
        f"sft-{folder_hash(models.adapter)}", f"base-{folder_hash(models.base)[:12]}"
    }, json.dumps(rows[0], default=str)  # fmt: skip
    assert not servers_left(on_cluster)
