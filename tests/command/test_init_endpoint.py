"""`etpi init --endpoint`: a look at a server's models, and specs that collect rollouts from it."""

from __future__ import annotations

import pytest

from etpi import cli
from etpi_assets.specs.load import load_specs
from etpi_assets.tasks.family import Task
from etpi_assets.worlds.coop_tiny_shared import CoopTinyShared
from etpi_assets.worlds.coop_tiny_shared.policy import SharedSkill
from etpi_resources.lake.lake import Lake, Ref
from tests.support.graph import write_spec
from tests.support.hosted_teacher import HostedTeacher
from tests.support.loopback import Loopback
from tests.support.models import make_base
from tests.support.web_server import WebServer

SIZES = {"train": 2, "heldout": 0}


@pytest.fixture
def cwd(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_spec(
        tmp_path / "specs", "suites", "little", 'extends = "coop_tiny_shared"\n[params]\ntrain = 2\nheldout = 0\n'
    )
    return tmp_path


def init(url: str, *words: str) -> int:
    return cli.main(["init", "--endpoint", url, "--suite", "little", "--yes", "--name", "mine", *words])


@pytest.mark.slow
def test_rollouts_are_collected_with_the_written_specs(cwd, monkeypatch):
    tasks = [task for task in CoopTinyShared().load("little", 0, SIZES) if isinstance(task, Task)]
    skill = SharedSkill(plan_first=1.0, wrong_edit=0.0)
    monkeypatch.setenv("TEACHER_KEY", "secret")
    monkeypatch.setenv("DAGSTER_HOME", str(cwd / "home"))
    with HostedTeacher(tasks, skill, steering=False) as server:
        server.key = "secret"
        assert init(f"{server.url}/v1", "--api-key-env", "TEACHER_KEY") == 0
        spec = load_specs().rollout_sets["mine"]
        assert spec.engine and (spec.engine.kind, spec.engine.model) == ("openai", "teacher")
        assert (spec.engine.urls, spec.engine.api_key_env) == ((f"{server.url}/v1",), "TEACHER_KEY")
        assert (spec.agent.max_model_len, spec.agent.max_tokens) == (4096, 1024)
        assert "secret" not in (cwd / "specs/rollout_sets/mine.toml").read_text()
        assert cli.main(["run", "mine"]) == 0
    lake = Lake.open()
    assert len(lake.read(Ref("raw_rollouts", "rollout_set", "mine"), "rollouts")) == SIZES["train"]
    assert len(lake.read(Ref("upweighted_dataset", "experiment", "mine"), "dataset_rows")) > 0


def test_vllm_server_of_a_known_tokenizer_records_ids(cwd, capsys):
    from etpi_resources.chat.format import load_chat_format

    folder = make_base(cwd / "served", load_chat_format("tiny", "qwen3"))
    with Loopback() as server:
        server.root = str(folder)
        assert init(server.url, "--student", str(folder)) == 0
    specs = load_specs()
    engine, agent = specs.rollout_sets["mine"].engine, specs.rollout_sets["mine"].agent
    assert engine and (engine.kind, engine.urls, agent.tokenizer) == ("vllm", (server.url,), str(folder))
    assert specs.experiments["mine"].pairs.capture == "native"


def test_vllm_server_of_an_unknown_tokenizer_is_used_for_text(cwd):
    with Loopback() as server:
        assert init(server.url) == 0
    specs = load_specs()
    engine = specs.rollout_sets["mine"].engine
    assert engine and (engine.kind, engine.urls) == ("openai", (f"{server.url}/v1",))
    assert specs.experiments["mine"].pairs.capture == "retokenised"


@pytest.mark.parametrize(
    ("words", "terms"),
    [
        (("--model", "other"), ("teacher", "--model other")),
        (("--suite", "litle"), ("'little'",)),
        (("--api-key-env", "NO_SUCH_KEY"), ("export NO_SUCH_KEY",)),
    ],
)
def test_mistakes_name_the_remedy_and_write_nothing(cwd, capsys, words, terms):
    with Loopback() as server:
        assert init(server.url, *words) == 1
    text = capsys.readouterr().err
    assert all(term in text for term in terms)
    assert not (cwd / "specs/rollout_sets").exists()


@pytest.mark.parametrize(
    "url", ["http://[::1", "http://h:port", "http://a..b", "http://", "host/v1", "http://u:s3cret@h"]
)
def test_address_that_is_none_or_has_a_password_is_refused(cwd, capsys, url):
    assert init(url) == 1
    assert "s3cret" not in "".join(capsys.readouterr())


def test_refused_key_and_absent_server_name_the_option(cwd, capsys, monkeypatch):
    monkeypatch.setenv("TEACHER_KEY", "another")
    with Loopback() as server:
        server.key = "secret"
        assert init(server.url) == 1
        assert "--api-key-env" in capsys.readouterr().err
        assert init(server.url, "--api-key-env", "TEACHER_KEY") == 1
        assert "the key in TEACHER_KEY" in capsys.readouterr().err
    assert init(server.url) == 1
    assert server.url in capsys.readouterr().err


@pytest.mark.parametrize(
    "card", [{"max_model_len": "32768"}, {"max_model_len": [1]}, {"max_model_len": True}, {"max_model_len": -1},
             {"root": "x" * 100_000, "owned_by": "vllm"}, {"id": "a\"\n\\b"}],
)  # fmt: skip
def test_odd_card_of_a_model_is_read(cwd, card):
    with Loopback() as server:
        server.models = [{"id": "teacher", **card}]
        assert init(server.url) == 0
    engine = load_specs().rollout_sets["mine"].engine
    assert engine and engine.model == card.get("id", "teacher")


@pytest.mark.parametrize("status", [301, 302, 307, 308])
def test_server_that_moved_names_its_new_address(cwd, capsys, status):
    with WebServer(lambda handler: handler.reply(status, location="https://host/new/v1/models")) as server:
        assert init(server.url) == 1
    assert "moved to https://host/new/v1;" in capsys.readouterr().err


def test_list_of_models_without_an_envelope_is_read(cwd):
    with Loopback() as server:
        server.models = [{"id": "teacher", "object": "model"}]
        assert init(server.url) == 0
    engine = load_specs().rollout_sets["mine"].engine
    assert engine and engine.model == "teacher"


def test_error_of_the_server_is_shown_without_the_key(cwd, capsys, monkeypatch):
    monkeypatch.setenv("TEACHER_KEY", "sk-planted")
    with Loopback() as server:
        server.models = {"error": "the key sk-planted is not valid"}
        assert init(server.url, "--api-key-env", "TEACHER_KEY") == 1
    text = capsys.readouterr().err
    assert "the key $TEACHER_KEY is not valid" in text and "sk-planted" not in text
