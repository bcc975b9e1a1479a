"""A live vLLM server with each of TRL's Qwen3 templates and the real vocabulary: prompt parity, and grammars for every
ending of the prompt."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from etpi_assets.agent.prompts import render_prompts
from etpi_assets.resources import Resources
from etpi_assets.rollouts.assets import raw_rollouts
from etpi_assets.scoring.assets import scored_rollouts
from etpi_assets.specs.rollout_set import AgentSection
from etpi_resources.chat.format import Tail, load_chat_format
from etpi_resources.engines.vllm_server import VllmServer
from etpi_resources.lake.lake import Ref
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

TEMPLATES = ("qwen3", "qwen3_instruct_2507", "qwen3_5_think", "qwen3_5_nothink", "qwen3_6")
TOOLS = 'tools = ["bash", "send_message"]'
NO_THINKING = "template_kwargs = {enable_thinking = false}"
SLOTS = "[SECTION]\nslots = ['STATE', 'ACTION', 'EXPECT']\nmax_chars = 8\n"


@dataclass
class TemplateServer:
    """A server with one template, and the messages of a prompt."""

    template: str
    models: Models
    server: VllmServer
    messages: list[dict[str, str]]

    @property
    def tail(self) -> Tail:
        return self.models.chat.tail_form(self.models.chat.prompt_ids(self.messages))


@pytest.fixture(scope="module", params=TEMPLATES)
def live(request, tmp_path_factory):
    chat = load_chat_format("qwen3", request.param)
    models = make_models(tmp_path_factory.mktemp(request.param), chat)
    calls = "qwen3_xml" if "<function=" in chat.template else "hermes"
    server = start(models, models.base.parent / "log", **{"tool-call-parser": calls})
    messages = render_prompts(AgentSection(), TASKS[0], FAMILY.roles(TASKS[0])[0])
    yield TemplateServer(request.param, models, server, messages)
    server.close()


def test_prompt_parity_fails_if_only_serving_has_tools_or_a_template_argument(live, tmp_path, monkeypatch):
    attach(monkeypatch, live.server)
    chat = live.models.chat
    closed = chat.prompt_ids(live.messages, enable_thinking=False) != chat.prompt_ids(live.messages)
    assert closed == (live.template not in ("qwen3_instruct_2507", "qwen3_5_nothink"))
    for name, given, red in (
        ("both", {"agent": TOOLS, "trained_with": ("bash", "send_message")}, set()),
        ("serving", {"agent": TOOLS}, {"prompt_parity"}),
        ("closed", {"serving": NO_THINKING}, {"prompt_parity"} if closed else set()),
    ):
        resources = serving_lake(tmp_path / name, live.models, live.models.adapter, template=live.template, **given)
        assert set(failed_probes(resources)) == red, name


def test_all_turns_adhere_with_a_grammar_and_none_without(live, tmp_path):
    """The model is random, so without a grammar it never adheres."""
    if live.tail == "closed":
        pytest.skip("the prompt closes the block: a grammar is refused (tests/test_grammars.py)")
    lake = little_lake(tmp_path)
    engine = f'kind = "vllm"\nmodel = "{live.server.name}"\nurls = ["{live.server.url}"]'
    # The slot names and 24 characters of up to four bytes, each perhaps a token: max_tokens cuts no constrained turn.
    agent = f'tokenizer = "{live.models.base}"\nmax_steps = 2\nmax_tokens = 128\nmax_model_len = 4096\n'
    for name, section in (("bound", "agent.grammar"), ("free", "scoring.structure")):
        rollout_set(tmp_path, name, engine, agent, tasks=2, more=SLOTS.replace("SECTION", section))
    resources = Resources(lake=lake, specs_folder=tmp_path / "specs")
    adheres, contents = {}, {}
    for name in ("bound", "free"):
        for asset in (raw_rollouts, scored_rollouts):
            assert not asset.execute(name, resources, log=lambda line: None).manifest.blocked
        rows = resources.lake.read(Ref("scored_rollouts", "rollout_set", name), "turn_scores").to_pylist()
        adheres[name] = [row["adheres"] for row in rows]
        turns = resources.lake.read(Ref("raw_rollouts", "rollout_set", name), "turns").to_pylist()
        contents[name] = [turn["content"] for turn in turns]
        assert turns[0]["content"].startswith("<think>\nSTATE: ") == (name == "bound" and live.tail == "none")
    assert len(adheres["bound"]) == 8 and all(adheres["bound"]) and not any(adheres["free"]), contents
