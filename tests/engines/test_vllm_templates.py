"""A live vLLM server behind each of TRL's Qwen3 templates, with the real vocabulary: what it renders is what was
trained, departures are found, and a grammar binds the think block wherever the prompt leaves it."""

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
    probe_room,
    rollout_set,
    start,
)

pytestmark = NEEDS_VLLM

TEMPLATES = ("qwen3", "qwen3_instruct_2507", "qwen3_5_think", "qwen3_5_nothink", "qwen3_6")
TOOLS = 'tools = ["bash", "send_message"]'
NO_THINKING = "template_kwargs = {enable_thinking = false}"
SLOTS = "[SECTION]\nslots = ['STATE', 'ACTION', 'EXPECT']\nmax_chars = 8\n"


@dataclass
class Live:
    """A server behind one template, and what its prompts end in."""

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
    yield Live(request.param, models, server, messages)
    server.close()


def test_parity_holds_for_what_was_trained_and_for_nothing_else(live, tmp_path, monkeypatch):
    """With the tools on both sides; with them at serving alone; with another argument of the template at serving."""
    attach(monkeypatch, live.server)
    chat = live.models.chat
    closed = chat.prompt_ids(live.messages, enable_thinking=False) != chat.prompt_ids(live.messages)
    assert closed == (live.template not in ("qwen3_instruct_2507", "qwen3_5_nothink"))
    for name, given, red in (
        ("both", {"agent": TOOLS, "trained_with": ("bash", "send_message")}, set()),
        ("serving", {"agent": TOOLS}, {"prompt_parity"}),
        ("closed", {"serving": NO_THINKING}, {"prompt_parity"} if closed else set()),
    ):
        room = probe_room(tmp_path / name, live.models, live.models.adapter, template=live.template, **given)
        assert set(failed_probes(room)) == red, name


def test_a_grammar_binds_the_block_wherever_the_prompt_leaves_it(live, tmp_path):
    """Adherence of a random model, measured on its turns: all that were bound, none that were held against it alone."""
    if live.tail == "closed":
        pytest.skip("the prompt closes the block: a grammar is refused (tests/test_grammars.py)")
    lake = little_lake(tmp_path)
    engine = f'kind = "vllm"\nmodel = "{live.server.name}"\nurls = ["{live.server.url}"]'
    # The names and 24 characters of at most four bytes, each of which may be a token: no bound turn is cut.
    agent = f'tokenizer = "{live.models.base}"\nmax_steps = 2\nmax_tokens = 128\nmax_model_len = 4096\n'
    for name, section in (("bound", "agent.grammar"), ("free", "scoring.structure")):
        rollout_set(tmp_path, name, engine, agent, tasks=2, more=SLOTS.replace("SECTION", section))
    resources = Resources(lake=lake, specs_folder=tmp_path / "specs")
    found, said = {}, {}
    for name in ("bound", "free"):
        for asset in (raw_rollouts, scored_rollouts):
            assert not asset.execute(name, resources, log=lambda line: None).manifest.blocked
        rows = resources.lake.read(Ref("scored_rollouts", "rollout_set", name), "turn_scores").to_pylist()
        found[name] = [row["adheres"] for row in rows]
        turns = resources.lake.read(Ref("raw_rollouts", "rollout_set", name), "turns").to_pylist()
        said[name] = [turn["content"] for turn in turns]
        assert turns[0]["content"].startswith("<think>\nSTATE: ") == (name == "bound" and live.tail == "none")
    assert len(found["bound"]) == 8 and all(found["bound"]) and not any(found["free"]), said
