"""Rollout sets whose agents are models behind servers: what is captured, what stops, what is resumed, and no key."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from etpi_assets.curation.retokenise import retokenise
from etpi_assets.resources import Resources
from etpi_assets.rollouts.assets import raw_rollouts
from etpi_assets.specs.load import SpecError
from etpi_assets.tasks.family import Task
from etpi_assets.tasks.table import task_table
from etpi_assets.worlds.coop_tiny_shared import CoopTinyShared
from etpi_resources.chat.format import load_chat_format
from etpi_resources.engines import EngineUnavailable
from etpi_resources.lake.lake import Lake, LakeError, Ref
from tests.support.graph import write_spec
from tests.support.loopback import SUBMITS, Loopback, echo_key, status
from tests.support.small_lake import put

TASKS = [t for t in CoopTinyShared().load("little", 0, {"train": 2, "heldout": 1}) if isinstance(t, Task)]
KEY = "sk-planted-4711"
LISTS = '<tool_call>\n{"name": "bash", "arguments": {"command": "ls"}}\n</tool_call>'


@pytest.fixture
def world(tmp_path, monkeypatch):
    monkeypatch.setenv("TEACHER_KEY", KEY)
    with Loopback() as server:
        yield World(tmp_path, server)


class World:
    def __init__(self, root: Path, server: Loopback) -> None:
        self.root, self.server, self.said = root, server, list[str]()
        self.lake = Lake(root / "lake")
        put(self.lake, "tasks", "little", {"tasks": task_table(TASKS).to_pylist()})
        write_spec(self.root / "specs", "suites", "little", 'extends = "coop_tiny_shared"\n')

    def collect(self, engine: str, agent: str = ""):
        head = 'title = "t"\nkind = "live"\nsuite = "little"\nsplit = "train"\n'
        write_spec(
            self.root / "specs",
            "rollout_sets",
            "few",
            f'{head}[engine]\nteacher = "t"\n{engine}\n[agent]\nmax_steps = 4\n{agent}\n',
        )
        resources = Resources(lake=self.lake, specs_folder=self.root / "specs")
        return raw_rollouts.execute("few", resources, log=self.said.append)

    def rows(self, table: str) -> list[dict]:
        return self.lake.read(Ref("raw_rollouts", "rollout_set", "few"), table).to_pylist()

    def vllm(self, **more: str) -> str:
        lines = {"kind": "vllm", "model": "teacher", **more}
        return "\n".join(f"{k} = {json.dumps(v)}" for k, v in lines.items()) + f'\nurls = ["{self.server.url}"]'

    def hosted(self) -> str:
        return f'kind = "openai"\nmodel = "teacher"\nurls = ["{self.server.url}/v1"]\napi_key_env = "TEACHER_KEY"'


def first_lists(body: dict) -> str:
    return LISTS if not any(m["role"] == "assistant" for m in body["messages"]) else SUBMITS


def test_a_hosted_teacher_is_captured_as_text_and_its_calls_become_the_students(world, capsys):
    def message(body, text):
        if text is not LISTS:
            return {"content": text}
        call = {"id": "c1", "type": "function", "function": {"name": "bash", "arguments": '{"command": "ls"}'}}
        return {"content": "Look.", "reasoning_content": "hm", "tool_calls": [call, call | {"id": "c2"}]}

    world.server.say, world.server.message = first_lists, message
    outcome = world.collect(world.hosted(), 'tools = ["bash"]')
    assert not outcome.manifest.blocked and outcome.metadata["captures"] == {"none": 8}
    asked = [body for _, body in world.server.seen if len(body["messages"]) > 2]
    for body in asked:
        told = body["messages"][2:]
        assert [m["role"] for m in told] == ["assistant", "tool", "tool"] and "reasoning" not in told[0]
        assert [m["tool_call_id"] for m in told[1:]] == ["c1", "c2"] and body["tools"][0]["function"]["name"] == "bash"
    turn = world.rows("turns")[0]
    assert turn["reasoning"] == "hm" and turn["content"] == "Look." and turn["prompt_tokens"] is None
    assert [a["command"] for a in json.loads(turn["actions"])] == ["ls", "ls"]
    one = [m for m in world.rows("messages") if (m["rollout_id"], m["agent_id"]) == (turn["rollout_id"], "agent1")]
    chat = load_chat_format("tiny")
    first, *_ = retokenise(one, chat)
    assert first.bare is not None
    whole, bare = chat.decode(first.output_ids), chat.decode(first.bare[1])
    assert bare.startswith("Look.\n<tool_call>\n<function=bash>\n<parameter=command>\nls\n")
    assert whole == f"<think>\nhm\n</think>\n\n{bare}"
    assert all(KEY not in text for text in [*world.said, *capsys.readouterr()])
    assert not [path for path in world.root.rglob("*") if path.is_file() and KEY.encode() in path.read_bytes()]


def test_a_refused_key_stops_the_set_and_is_written_nowhere(world, capsys):
    world.server.always = echo_key
    for engine in (world.hosted(), world.vllm(api_key_env="TEACHER_KEY")):
        with pytest.raises(EngineUnavailable) as caught:
            world.collect(engine)
        assert KEY not in str(caught.value) and "$TEACHER_KEY" in str(caught.value)
    assert all(KEY not in text for text in [*world.said, *capsys.readouterr()])
    assert not [path for path in world.root.rglob("*") if path.is_file() and KEY.encode() in path.read_bytes()]


def test_a_key_pasted_into_a_spec_is_refused_without_repeating_it(world):
    with pytest.raises(SpecError, match="engine: api_key_env") as caught:
        world.collect(world.vllm(api_key_env=KEY))
    assert KEY not in str(caught.value)


def test_chat_requests_record_the_drift_that_a_template_causes(world):
    def thinks(body):
        return f"<think>\nhm\n</think>\n\n{first_lists(body)}"

    # The server's template takes earlier thoughts out of the prompt, as Qwen3's does.
    world.server.say, world.server.chat = thinks, load_chat_format("tiny", "qwen3")
    world.server.message = lambda body, text: {"content": text}
    outcome = world.collect(world.vllm(request="chat"))
    assert not outcome.manifest.blocked
    later = [row for row in world.rows("turns") if row["turn"]]
    assert len(later) == 4 and outcome.metadata["turns_with_drift"] == 4
    for row in later:
        drift = json.loads(row["drift"])
        assert drift["expected_text"].startswith("<think>") and "<think>" not in drift["found_text"]


def test_an_engine_that_stops_answering_stops_the_set_which_is_then_resumed(world):
    world.server.say = lambda body: SUBMITS
    world.server.faults = [None, None] + [status(401)] * 20
    with pytest.raises(EngineUnavailable):
        world.collect(world.vllm())
    world.server.faults.clear()
    before = len(world.server.seen)
    outcome = world.collect(world.vllm())
    assert not outcome.manifest.blocked and outcome.manifest.rows["rollouts"] == 2
    assert {row["error"] for row in world.rows("rollouts")} == {None}
    assert 2 <= len(world.server.seen) - before <= 4


def test_without_ids_nothing_is_kept(world):
    world.server.change = lambda answer: {**answer, "choices": [{**answer["choices"][0], "token_ids": None}]}
    with pytest.raises(EngineUnavailable, match="retokenised"):
        world.collect(world.vllm())
    journals = list(world.lake.root.rglob("journal-*.jsonl"))
    assert all(path.stat().st_size == 0 for path in journals)


def test_a_models_files_are_pinned(world, tmp_path):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    for kind in ("transformers", "vllm"):
        with pytest.raises(LakeError, match=r"[0-9a-f]{16}.*sha256"):
            world.collect(f'kind = "{kind}"\nmodel = "{tmp_path / "model"}"')
    with pytest.raises(LakeError, match="checkpoint:0123456789abcdef"):
        world.collect('kind = "transformers"\nmodel = "checkpoint:0123456789abcdef"')
    with pytest.raises(LakeError, match="hub:a/b@main"):
        world.collect('kind = "vllm"\nmodel = "hub:a/b@main"')


def test_a_model_in_this_process_acts(world, tmp_path):
    from tests.support.models import make_base

    folder = make_base(tmp_path / "made", load_chat_format("tiny"))
    checkpoint, _ = world.lake.adopt_checkpoint(folder)
    outcome = world.collect(f'kind = "transformers"\nmodel = "checkpoint:{checkpoint}"', "max_tokens = 8")
    assert not outcome.manifest.blocked and set(outcome.metadata["captures"]) == {"native"}
    assert {row["engine"] for row in world.rows("rollouts")} == {"transformers"}


@pytest.mark.parametrize(
    ("engine", "words"),
    [
        ('kind = "openai"\nmodel = "m"', 'kind = "openai" .*`urls`'),
        ('kind = "vllm"', "`model`"),
        ('kind = "transformers"\nmodel = "m"\nrequest = "chat"', r"engine\.request .*vllm"),
        ('kind = "vllm"\nmodel = "m"\nurls = ["http://a"]\noptions = {seed = 1}', "`options` .*`urls`"),
    ],
)
def test_incomplete_engine_section_names_the_missing_key(world, engine, words):
    with pytest.raises(SpecError, match=words):
        world.collect(engine)
