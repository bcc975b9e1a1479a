"""Reinforcement whose rollouts servers generate: they have the weights of each step, or the run stops and ends them.

Without vLLM a program of the same arguments and endpoints stands in for it, over real weights (`fake_vllm`).
"""

from __future__ import annotations

import os
import shutil
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from etpi_assets import resources
from etpi_assets.resources import HardwareMissing
from etpi_assets.specs.training import RLSection
from etpi_assets.training import grpo
from etpi_assets.training.grpo import WORKER
from etpi_resources.chat.format import load_chat_format
from etpi_resources.engines import EngineUnavailable
from etpi_resources.engines.vllm_server import PROGRAM_VARIABLE
from etpi_resources.trainers import policy_servers
from etpi_resources.trainers.pipes import WorkerFailed
from etpi_resources.trainers.policy_link import Link, Published
from etpi_resources.trainers.policy_servers import HandOverFailed, PolicyServers, ServerPlan, weights_folder
from tests.support.fake_vllm import write_fake_vllm
from tests.support.reinforcement import BY_VLLM, LORA, judge, make, prepared, processes, rows
from tests.support.tiny_training import make_speaking_base

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    return make_speaking_base(tmp_path_factory.mktemp("base"))


@pytest.fixture(autouse=True)
def _stand_in(tmp_path, monkeypatch):
    """What is started as vLLM."""
    monkeypatch.setenv(PROGRAM_VARIABLE, str(write_fake_vllm(tmp_path / "bin" / "vllm")))


@pytest.fixture
def gpus(monkeypatch):
    """Let the run believe that it has four GPUs; the stand-ins print the ones that they were given."""
    monkeypatch.setattr(grpo, "accelerators", lambda: True)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6,7")


def devices_of_servers(lake) -> list[set[str]]:
    """Return the GPUs of each server, by its log."""
    logs = sorted(lake.scratch("servers").glob("policy-*.log"), key=lambda log: (len(log.name), log.name))
    return [{line.split()[-1] for line in log.read_text().splitlines() if line.startswith("/")} for log in logs]


def test_an_adapter_is_served_by_two_servers_under_its_versions(tmp_path, base, gpus, monkeypatch):
    for name, text in (("vllm/__init__.py", "raise SystemExit"), ("vllm-0.26.0.dist-info/METADATA", "Version: 0.26.0")):
        (tmp_path / "installed" / name).parent.mkdir(parents=True)
        (tmp_path / "installed" / name).write_text(text)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "installed"), prepend=os.pathsep)  # the trainer need not import it
    messages: list[str] = []
    send = Link.send
    monkeypatch.setattr(Link, "send", lambda self, *m: (messages.append(m[0]), send(self, *m))[1])
    lake = prepared(tmp_path, base, **BY_VLLM, **LORA, servers="2")
    outcome = make(tmp_path, lake, "rl_checkpoint")
    assert not outcome.manifest.blocked, outcome.manifest.failures
    judge(lake, base)
    assert devices_of_servers(lake) == [{"5"}, {"6"}], "the trainer has 4"
    assert set(messages) == {"answer"}, "no completion goes through the link"
    models = {turn["model"] for turn in rows(lake, "turns")} if "model" in rows(lake, "turns")[0] else set()
    assert all(name.endswith(("+0", "+1", "+2", "+3")) for name in models)
    log = rows(lake, "training_log")
    assert all(line["publish_seconds"] > 0 and line["rollout_seconds"] > 0 for line in log)


SHARDED: dict[str, Any] = {
    "processes": "2",
    "device_batch": "4",
    "sharded": "true",
    "placement": '"shared"',
    "optimizer": '"adamw_torch"',
}


def calls_of_server(lake) -> list[str]:
    """Return the routes that were called of the only server, in order; rollouts as one."""
    [log] = lake.scratch("servers").glob("policy-*.log")
    routes = [line.split()[0] for line in log.read_text().splitlines() if line.startswith("/")]
    return [route for route, before in zip(routes, ["", *routes], strict=False) if route != before]


def test_sharded_policy_is_served_on_the_devices_of_its_trainers_which_it_leaves_to_them(
    tmp_path, base, gpus, monkeypatch
):
    monkeypatch.setenv("FAKE_VLLM", "0.26")
    monkeypatch.setenv("VLLM_API_KEY", "secret")
    lake = prepared(tmp_path, base, **BY_VLLM, **SHARDED, correction='"token_truncate"')
    before_updates, send = [], Link.send

    def sent(self, *message) -> None:
        if message[0] == "answer" and message[2] is not None:  # of a round, not of its statistics
            before_updates.append(calls_of_server(lake)[-1])
        send(self, *message)

    monkeypatch.setattr(Link, "send", sent)
    outcome = make(tmp_path, lake, "rl_checkpoint")
    assert not outcome.manifest.blocked, outcome.manifest.failures
    judge(lake, base)
    assert devices_of_servers(lake) == [{"4"}]
    wake = ["/wake_up?tags=weights", "/collective_rpc", "/reset_prefix_cache", "/wake_up?tags=kv_cache"]
    calls = calls_of_server(lake)
    assert calls == ["/sleep?level=1", *(len(calls) // 6 * [*wake, "/v1/completions", "/sleep?level=2"])]
    assert before_updates == len(calls) // 6 * ["/sleep?level=2"]
    assert all(line["weight_mean"] == pytest.approx(1.0, abs=1e-3) for line in rows(lake, "training_log"))


@pytest.mark.parametrize(
    "tuning", [pytest.param(LORA, id="an adapter", marks=pytest.mark.long), pytest.param({}, id="all weights")]
)
def test_servers_generate_rounds_ahead_from_the_weights_of_their_versions(tmp_path, base, tuning):
    lake = prepared(tmp_path, base, **BY_VLLM, **tuning, ahead="1", correction='"token_truncate"')
    outcome = make(tmp_path, lake, "rl_checkpoint")
    assert not outcome.manifest.blocked, outcome.manifest.failures
    samples = rows(lake, "rl_samples")
    assert [(r["step"], r["version"]) for r in samples[::8]] == [(0, 0), (1, 0), (2, 1), (3, 2)]
    assert len(samples) == 32
    loads = "/v1/load_lora_adapter" if tuning else "/collective_rpc"
    assert calls_of_server(lake).count(loads) == 3, "weights are loaded once, also for two rounds"
    assert not list(lake.scratch("reinforce").iterdir()) and not processes(lake, base)


def test_too_few_gpus_are_refused_with_the_keys(tmp_path, monkeypatch):
    monkeypatch.setattr(grpo, "accelerators", lambda: True)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2")
    with pytest.raises(HardwareMissing, match=r" 4 GPUs.* 3 .*rl\.placement"):
        grpo.server_devices(RLSection(engine="vllm", processes=2, servers=2))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    monkeypatch.setattr(resources, "DEVICES", tmp_path)
    for name in ("nvidia0", "nvidiactl"):
        (tmp_path / name).touch()
    with pytest.raises(HardwareMissing, match=" 2 GPUs.* 1 "):
        grpo.server_devices(RLSection(engine="vllm"))
    shared = grpo.server_devices(RLSection(engine="vllm", placement="shared"))
    assert shared == [{"CUDA_VISIBLE_DEVICES": "0"}]


def test_weights_are_handed_over_in_memory_only_if_they_fit_there(tmp_path, monkeypatch):
    memory, base = tmp_path / "memory", tmp_path / "base"
    memory.mkdir()
    base.mkdir()
    (base / "model.safetensors").write_bytes(bytes(1000))
    monkeypatch.setattr(policy_servers, "MEMORY", memory)
    for free, parent in ((1500, tmp_path / "run"), (1700, memory)):
        monkeypatch.setattr(shutil, "disk_usage", lambda path, free=free: SimpleNamespace(free=free))
        with weights_folder("p", tmp_path / "run", base) as folder:
            assert folder.parent == parent and folder.stat().st_mode & 0o777 == 0o700
        assert not folder.exists()


def test_server_that_ended_is_named_before_the_round(tmp_path, monkeypatch):
    """Without a process: the second of two servers has exited."""
    servers = [
        SimpleNamespace(
            url=f"http://127.0.0.1:{n}", name="p", key_env=None, exit_reason=lambda why=why: why, close=lambda: None
        )
        for n, why in enumerate((None, "the vLLM server was killed by signal 9"), 1)
    ]
    monkeypatch.setattr(PolicyServers, "_start", lambda self, number: servers[number])
    monkeypatch.setattr(policy_servers, "VllmEngine", lambda *arguments: SimpleNamespace(close=lambda: None))
    files = [tmp_path / "lock", tmp_path / "lock-1"]
    plan = ServerPlan(tmp_path, "p", {}, [{}, {}], tmp_path / "log", files, False, (1, 2), 1.0)
    chat = load_chat_format("tiny")
    with (
        PolicyServers(plan, chat) as running,
        pytest.raises(EngineUnavailable, match="signal 9"),
        running.generating(1, Published(str(tmp_path), False, [0.0])),
    ):
        pass


@pytest.mark.parametrize(
    "layout",
    [
        pytest.param({**LORA, "placement": '"shared"'}, id="an adapter, one process"),
        pytest.param(SHARDED, id="sharded over two", marks=pytest.mark.long),
    ],
)
def test_killed_worker_ends_its_server_and_the_run_resumes(tmp_path, base, layout):
    lake = prepared(tmp_path, base, **BY_VLLM, **layout)

    def kill() -> None:
        while not list(lake.root.glob("checkpoints/rounds/*/round-000002.jsonl")):
            time.sleep(0.02)
        workers = [p for p in processes(lake, base) if p.cmdline()[1:3] == ["-m", WORKER]]
        next(p for p in workers if p.environ().get("RANK", "0") == "0").kill()

    threading.Thread(target=kill, daemon=True).start()
    with pytest.raises(WorkerFailed, match="signal 9|SIGKILL"):
        make(tmp_path, lake, "rl_checkpoint")
    assert not processes(lake, base)
    outcome = make(tmp_path, lake, "rl_checkpoint")
    assert not outcome.manifest.blocked, outcome.manifest.failures
    assert outcome.metadata["seed 0"]["resumed from step"] in (1, 2, 3)
    assert not [call for call in calls_of_server(lake) if call.startswith("/sleep")], "vLLM refuses it without a GPU"
    judge(lake, base)


def test_one_of_two_servers_that_keeps_its_old_weights_stops_the_run(tmp_path, base, gpus, monkeypatch):
    monkeypatch.setenv("FAKE_VLLM", "deaf 6")
    lake = prepared(tmp_path, base, **BY_VLLM, servers="2")
    with pytest.raises(HandOverFailed, match=r"(?s)step 1:.*vLLM.*rl\.engine = "):
        make(tmp_path, lake, "rl_checkpoint")
    [kept] = (lake.root / "checkpoints" / "rounds").iterdir()
    assert [path.name for path in kept.glob("*.jsonl")] == ["round-000000.jsonl"], (
        "nothing was rolled out with old weights"
    )
    assert not processes(lake, base)
