"""A live vLLM server on this machine's CPU: capture, adapters, the faults that serving_probe detects, and the end of
killed servers."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from etpi_assets.agent.prompts import render_prompts
from etpi_assets.agent.tools import tool_schemas
from etpi_assets.graph import GRAPH
from etpi_assets.resources import Resources
from etpi_assets.rollouts.assets import raw_rollouts
from etpi_assets.specs.rollout_set import AgentSection
from etpi_resources.chat.format import load_chat_format
from etpi_resources.chat.grammars import ThinkGrammar
from etpi_resources.engines import EngineUnavailable, Request, Sampler
from etpi_resources.engines import vllm as vllm_module
from etpi_resources.engines.endpoints import Endpoints
from etpi_resources.engines.transformers import TransformersEngine
from etpi_resources.engines.vllm import VllmEngine, loaded_adapter
from etpi_resources.engines.vllm_server import VllmServer
from etpi_resources.lake import catalog
from etpi_resources.lake.lake import Lake, Ref, folder_hash
from etpi_resources.process.locks import machine_locks
from tests.support.serving import (
    FAMILY,
    NEEDS_VLLM,
    TASKS,
    Models,
    attach,
    failed_probes,
    little_lake,
    make_models,
    rollout_set,
    serving_lake,
    start,
)

pytestmark = NEEDS_VLLM

CHAT = load_chat_format("qwen3")
REPORT = catalog.sql_folder() / "reports" / "drift_by_rollout_set.sql"


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> Models:
    return make_models(tmp_path_factory.mktemp("models"), CHAT)


@pytest.fixture(scope="module")
def server(models, tmp_path_factory) -> Iterator[VllmServer]:
    server = start(models, tmp_path_factory.mktemp("server") / "log", **{"tool-call-parser": "hermes"})
    yield server
    server.close()


@pytest.fixture
def engine(server) -> Iterator[VllmEngine]:
    engine = VllmEngine(Endpoints([server.url], exit_reason=server.exit_reason), server.name, CHAT)
    yield engine
    engine.close()


def requests(n: int, max_tokens: int = 24, **more: Any) -> list[Request]:
    first_turns = []
    for task in TASKS[:n]:
        for role in FAMILY.roles(task):
            name, messages = f"{task.task_id}/{role.agent_id}", render_prompts(AgentSection(), task, role)
            first_turns.append(
                Request(name, name, CHAT.prompt_ids(messages), messages, Sampler(max_tokens=max_tokens), **more)
            )
    return first_turns


def test_greedy_output_equals_the_transformers_engine(engine, models):
    transformers = TransformersEngine(models.base, "base", CHAT)
    batch = requests(len(TASKS))
    assert len(batch) >= 50
    try:
        for served, local, request in zip(engine.complete(batch), transformers.complete(batch), batch, strict=True):
            assert served.prompt_ids == request.prompt_ids and served.output_ids == local.output_ids
            assert served.text == local.text and served.finish_reason == local.finish_reason
            assert served.logprobs == pytest.approx(local.logprobs, abs=1e-3)
    finally:
        transformers.close()


def test_chat_request_renders_the_prompt_of_the_same_template(engine):
    for tools in ([], tool_schemas(("bash", "send_message"))):
        (request,) = requests(1, tools=tools or ())[:1]
        (turn,) = engine.chat([request])
        assert turn.prompt_ids == CHAT.prompt_ids(request.messages, tools=tools or None)
        assert turn.output_ids and turn.logprobs and turn.message and turn.message["role"] == "assistant"


def test_grammar_constrains_the_think_block(engine):
    (request,) = requests(1, max_tokens=400, grammar=ThinkGrammar.of(max_chars=12))[:1]
    (turn,) = engine.complete([request])
    assert turn.text.startswith("<think>\nSTATE: ") and "\nACTION: " in turn.text and "\nEXPECT: " in turn.text


def test_adapter_is_served_until_unloaded_and_its_name_cannot_be_reused(engine, server, models):
    endpoints, batch, name = Endpoints([server.url]), requests(2), f"sft-{folder_hash(models.adapter)}"
    with loaded_adapter(endpoints, name, models.adapter):
        adapted = VllmEngine(endpoints, name, CHAT)
        (card,) = [card for card in adapted.list_models() if card.name == name]
        assert (card.root, card.parent) == (str(models.adapter), server.name)
        pairs = zip(adapted.complete(batch), engine.complete(batch), strict=True)
        assert all(turn.output_ids != base.output_ids for turn, base in pairs)
        with (
            pytest.raises(EngineUnavailable, match="name that is taken"),
            loaded_adapter(endpoints, name, models.zeros),
        ):
            pass
        adapted.close()
    assert name not in [card.name for card in engine.list_models()]


# --- rollout sets ----------------------------------------------------------------------------------------------------


def test_drift_of_chat_requests_is_recorded_and_token_requests_have_none(server, models, tmp_path):
    lake = little_lake(tmp_path)
    agent = f'tokenizer = "{models.base}"\nmax_steps = 3\nmax_tokens = 16\nmax_model_len = 4096\n'
    for request in ("tokens", "chat"):
        engine = f'kind = "vllm"\nmodel = "{server.name}"\nurls = ["{server.url}"]\nrequest = "{request}"'
        rollout_set(tmp_path, request, engine, agent)
    resources = Resources(lake=lake, specs_folder=tmp_path / "specs")
    for request in ("tokens", "chat"):
        outcome = raw_rollouts.execute(request, resources, log=lambda line: None)
        assert not outcome.manifest.blocked and outcome.manifest.rows["rollouts"] == 8
    with catalog.connect(catalog.build(lake, GRAPH.values())) as db:
        rows = {row["rollout_set"]: row for row in db.execute(REPORT.read_text()).to_arrow_table().to_pylist()}
    for row in rows.values():
        assert row["without_ids"] == 0 and row["turns"] == 48 and row["later_turns"] == 32
    assert (rows["tokens"]["extend_the_last"], rows["tokens"]["with_drift"]) == (32, 0)
    # A random model's text re-tokenises to other ids; each difference is recorded with both texts.
    chat = rows["chat"]
    assert chat["with_drift"] > 0 and chat["extend_the_last"] + chat["with_drift"] == 32
    turns = lake.read(Ref("raw_rollouts", "rollout_set", "chat"), "turns").to_pylist()
    assert {row["capture"] for row in turns} == {"native"}
    drifts = [json.loads(row["drift"]) for row in turns if row["drift_at"] is not None]
    assert all(drift["expected_ids"] != drift["found_ids"] and drift["found_text"] for drift in drifts)


# --- the serving probe -----------------------------------------------------------------------------------------------


@pytest.fixture
def attached(server, monkeypatch):
    attach(monkeypatch, server)


def test_served_adapter_passes_the_probe(models, tmp_path):
    """The asset itself starts the server, loads the adapter and ends the server."""
    options = "\n[serving.options]\ndtype = 'float32'\nenforce-eager = true\nmax-model-len = 4096\n"
    resources = serving_lake(tmp_path, models, models.adapter, serving=options)
    assert failed_probes(resources) == {}
    rows = resources.lake.read(Ref("serving_probe", "experiment", "e"), "probes").to_pylist()
    probes = {row["probe"] for row in rows if row["role"] == "sft"}
    assert {"served_root", "content_visible", "calls_round_trip", "prompt_parity", "differs_from_base"} <= probes
    assert not [p for p in psutil.process_iter(["cmdline"]) if str(tmp_path) in " ".join(p.info["cmdline"] or ())]


@pytest.mark.usefixtures("attached")
@pytest.mark.parametrize(
    ("options", "check"),
    [
        ({"agent": 'tools = ["bash"]'}, "prompt_parity"),
        ({"serving": "template_kwargs = {enable_thinking = false}"}, "prompt_parity"),
    ],
)
def test_probe_detects_tools_and_arguments_that_only_serving_has(models, tmp_path, options, check):
    failed = failed_probes(serving_lake(tmp_path, models, models.adapter, **options))
    assert set(failed) == {check}


@pytest.mark.usefixtures("attached")
def test_probe_detects_an_adapter_of_zeros(models, tmp_path):
    assert set(failed_probes(serving_lake(tmp_path, models, models.zeros))) == {"differs_from_base"}


@pytest.mark.usefixtures("attached")
def test_probe_detects_a_reused_adapter_name(server, models, tmp_path, monkeypatch):
    resources, name = serving_lake(tmp_path, models, models.adapter), f"sft-{folder_hash(models.adapter)}"
    with loaded_adapter(Endpoints([server.url]), name, models.zeros):
        with pytest.raises(EngineUnavailable, match="unloaded"):
            failed_probes(resources)
        # A program that skips the load because the name exists serves the old weights.
        monkeypatch.setattr(vllm_module, "loaded_adapter", lambda *arguments: nullcontext())
        failed = failed_probes(resources)
        assert set(failed) == {"served_root", "differs_from_base"} and str(models.zeros) in failed["served_root"]


def test_probe_detects_a_reasoning_parser_that_takes_the_output(models, tmp_path):
    options = "\n[serving.options]\ndtype = 'float32'\nenforce-eager = true\nreasoning-parser = 'deepseek_r1'\n"
    failed = failed_probes(serving_lake(tmp_path, models, models.adapter, serving=options + "max-model-len = 4096\n"))
    assert "content_visible" in failed and "reasoning parser" in failed["content_visible"]


# --- ends ------------------------------------------------------------------------------------------------------------


def test_killed_server_leaves_no_process_and_the_set_resumes(models, tmp_path):
    """First the run is killed, then only its server."""
    pin = f'kind = "vllm"\nmodel = "{models.base}"\nsha256 = "{folder_hash(models.base)}"\n'
    agent = f'tokenizer = "{models.base}"\nmax_steps = 3\nmax_tokens = 16\nmax_model_len = 4096\n'
    rollout_set(tmp_path, "live", pin + "[engine.options]\ndtype = 'float32'\nenforce-eager = true\n", agent)
    lake = little_lake(tmp_path)
    script = (
        "from etpi_assets.resources import Resources; from etpi_assets.rollouts.assets import raw_rollouts\n"
        "from etpi_resources.lake.lake import Lake; from pathlib import Path\n"
        f"raw_rollouts.execute('live', Resources(lake=Lake(Path({str(lake.root)!r})),"
        f" specs_folder=Path({str(tmp_path / 'specs')!r})))\n"
    )
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    for victim in ("run", "server"):
        for log in lake.root.glob("scratch/servers/*.log"):
            log.unlink()
        run = subprocess.Popen([sys.executable, "-c", script], env=environment, stderr=subprocess.PIPE, text=True)
        url = wait_for(lambda: serving_url(lake), run)
        owned = [psutil.Process(run.pid), *psutil.Process(run.pid).children(recursive=True)]
        if victim == "run":
            os.kill(run.pid, signal.SIGKILL)
        else:
            for process in owned:
                if "EngineCore" in process.name() or "EngineCore" in " ".join(process.cmdline()):
                    process.kill()
        _, stderr = run.communicate(timeout=300)
        assert run.returncode != 0
        assert victim == "run" or "vLLM server" in stderr or "answers" in stderr, stderr
        _, alive = psutil.wait_procs(owned, timeout=60)
        assert not alive
        with machine_locks().hold(lake.root / "locks" / "server.lock", wait=False), pytest.raises(httpx.ConnectError):
            httpx.get(f"{url}/health", trust_env=False)
    resources = Resources(lake=lake, specs_folder=tmp_path / "specs")
    outcome = raw_rollouts.execute("live", resources, log=lambda line: None)
    assert not outcome.manifest.blocked and outcome.manifest.rows["rollouts"] == 8


def serving_url(lake: Lake) -> str | None:
    """Return the URL of the lake's server once it answers."""
    for log in lake.root.glob("scratch/servers/*.log"):
        text = log.read_text(errors="replace")
        for word in text.split():
            if word.startswith("http://127.0.0.1:") and "Application startup complete" in text:
                return word.rstrip("/")
    return None


def wait_for(what: Any, run: subprocess.Popen[str], seconds: float = 600) -> str:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and run.poll() is None:
        if result := what():
            return result
        time.sleep(0.2)
    raise AssertionError(f"the run ended or hung: {run.communicate(timeout=5)[1]}")
