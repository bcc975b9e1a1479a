"""The program that takes the place of vLLM in tests: the engine, the adapters and the hand-over cannot tell."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from etpi_assets.agent.prompts import render_prompts
from etpi_assets.specs.rollout_set import AgentSection
from etpi_resources.chat.format import load_chat_format
from etpi_resources.chat.grammars import ThinkGrammar
from etpi_resources.engines import EngineUnavailable, Request, Sampler, vllm_server
from etpi_resources.engines.endpoints import Endpoints
from etpi_resources.engines.transformers import TransformersEngine
from etpi_resources.engines.vllm import RELOAD_ENVIRONMENT, VllmEngine, loaded_adapter, reload_weights
from etpi_resources.engines.vllm_server import LOOPBACK, PROGRAM_VARIABLE, VllmServer
from etpi_resources.lake.lake import folder_hash
from etpi_resources.trainers.workers.checkpointing import attach_adapter
from tests.support.fake_vllm import write_fake_vllm
from tests.support.serving import FAMILY, TASKS, Models, failed_probes, make_models, serving_lake, start
from tests.support.web_server import WebServer

pytestmark = pytest.mark.slow
CHAT = load_chat_format("qwen3")


@pytest.fixture(scope="module")
def program(tmp_path_factory) -> Iterator[Path]:
    path = write_fake_vllm(tmp_path_factory.mktemp("bin") / "a folder" / "vllm")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(PROGRAM_VARIABLE, str(path))
        yield path


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> Models:
    return make_models(tmp_path_factory.mktemp("models"), CHAT)


@pytest.fixture(scope="module")
def server(program, models, tmp_path_factory) -> Iterator[VllmServer]:
    server = start(models, tmp_path_factory.mktemp("server") / "log", **{"tool-call-parser": "hermes"})
    yield server
    server.close()


def engine_of(server: VllmServer, name: str = "") -> VllmEngine:
    return VllmEngine(Endpoints([server.url], exit_reason=server.exit_reason), name or server.name, CHAT)


def request(task: int = 0, **more: object) -> Request:
    role = FAMILY.roles(TASKS[task])[0]
    messages = render_prompts(AgentSection(), TASKS[task], role)
    return Request(f"r{task}", "s", CHAT.prompt_ids(messages), messages, Sampler(max_tokens=12), **more)  # type: ignore[arg-type]


def test_answers_are_those_of_the_checkpoint_with_their_ids(server, models):
    local = TransformersEngine(models.base, "base", CHAT)
    engine = engine_of(server)
    try:
        (mine,), (wanted,) = engine.complete([request()]), local.complete([request()])
        assert (mine.output_ids, mine.text, mine.finish_reason) == (
            wanted.output_ids, wanted.text, wanted.finish_reason
        )  # fmt: skip
        assert mine.logprobs == pytest.approx(wanted.logprobs, abs=1e-4)
        (turn,) = engine.chat([request()])
        assert turn.prompt_ids == request().prompt_ids and turn.output_ids == wanted.output_ids
    finally:
        engine.close()
        local.close()


def test_adapter_is_served_under_its_name_until_it_is_unloaded(server, models):
    endpoints, name = Endpoints([server.url]), f"sft-{folder_hash(models.adapter)}"
    base = engine_of(server)
    with loaded_adapter(endpoints, name, models.adapter):
        adapted = engine_of(server, name)
        (card,) = [card for card in adapted.list_models() if card.name == name]
        assert (card.root, card.parent) == (str(models.adapter), server.name)
        assert adapted.complete([request()])[0].output_ids != base.complete([request()])[0].output_ids
        with pytest.raises(EngineUnavailable, match="taken"), loaded_adapter(endpoints, name, models.zeros):
            pass
        adapted.close()
    assert [card.name for card in base.list_models()] == [server.name]
    base.close()


def test_handed_weights_change_its_log_probabilities(models, program, tmp_path):
    merged = attach_adapter(models.base, models.adapter).merge_and_unload()
    merged.save_pretrained(tmp_path / "handed")
    options = {"logprobs-mode": "processed_logprobs"}
    log = tmp_path / "log"
    server = VllmServer(models.base, "policy", log=log, options=options, environment=RELOAD_ENVIRONMENT)
    engine = engine_of(server)
    try:
        before = engine.prompt_logprobs(request().prompt_ids[:40])
        reload_weights(Endpoints([server.url]), tmp_path / "handed")
        after = engine.prompt_logprobs(request().prompt_ids[:40])
        assert len(before) == 39 and before != pytest.approx(after, abs=1e-3)
        assert engine.complete([request()])[0].logprobs
    finally:
        engine.close()
        server.close()


def test_another_program_that_took_the_port_is_avoided(models, program, tmp_path, monkeypatch):
    with WebServer(lambda handler: handler.reply(200, b"ok")) as taken:
        ports = iter([taken.port, vllm_server._free_port(LOOPBACK)])
        monkeypatch.setattr(vllm_server, "_free_port", lambda host: next(ports))
        server = VllmServer(models.base, "policy", log=tmp_path / "log")
        assert server.url != taken.url
        server.close()


def test_grammar_is_refused_rather_than_ignored(server):
    engine = engine_of(server)
    with pytest.raises(RuntimeError, match="no grammar; install vLLM"):
        engine.complete([request(grammar=ThinkGrammar.of(max_chars=12))])
    engine.close()


def test_probe_of_a_served_checkpoint_finds_an_adapter_without_effect(program, models, tmp_path):
    options = "[serving.options]\nmax-model-len = 4096\n"
    assert failed_probes(serving_lake(tmp_path / "well", models, models.adapter, serving=options)) == {}
    failed = failed_probes(serving_lake(tmp_path / "zeros", models, models.zeros, serving=options))
    assert "differs_from_base" in failed
