"""A bad spec file fails alone, with one message that names file, key and remedy; no absurd value is accepted."""

from __future__ import annotations

from pathlib import Path

import pytest

from etpi_assets.specs.load import SpecError, load_specs
from etpi_assets.specs.rollout_set import EngineSection, ServerSection
from etpi_resources.engines import EngineUnavailable
from etpi_resources.engines.vllm_server import arguments
from tests.support.graph import write_spec

PARENT = 'extends = "plan_first_tiny"\n'
ROLLOUTS = 'extends = "coop_tiny_shared_strong"\n'
ENGINE = 'engine = {kind = "openai", teacher = "t", model = "m", urls = ["%s"]}'
OPENAI = f'title = "t"\nkind = "live"\nsuite = "coop_tiny_shared"\n{ENGINE}\n'


def symlink_loop(path: Path) -> None:
    path.symlink_to(path.name)


def folder(path: Path) -> None:
    path.mkdir()


FILES = {
    "a link to itself": symlink_loop,
    "a folder": folder,
    "bytes that are no text": lambda path: path.write_bytes(b'title = "\xff\xfe"'),
    "a NUL": lambda path: path.write_bytes(b'title = "a\0b"'),
    "an integer of 5,000 digits": lambda path: path.write_text(f"{PARENT}seeds = [{'9' * 5000}]"),
    "tables nested deep": lambda path: path.write_text(PARENT + "published = " + "{a = " * 3000 + "1" + "}" * 3000),
    "tables nested 30 deep": lambda path: path.write_text(PARENT + "published = " + "{a = " * 30 + "1" + "}" * 30),
    "lists nested deep": lambda path: path.write_text(PARENT + "seeds = " + "[" * 6000 + "]" * 6000),
    "a key of many parts": lambda path: path.write_text(f"{PARENT}{'.'.join('a' * 50_000)} = 1"),
    "a key of quoted parts": lambda path: path.write_text(PARENT + " . ".join(['"a \\"b"', "'c'"] * 25_000) + " = 1"),
    "a table of many parts": lambda path: path.write_text(f"{PARENT}[{'.'.join('a' * 50_000)}]"),
    "two megabytes": lambda path: path.write_text(PARENT + "#" * (2 << 20)),
}


@pytest.mark.parametrize("kind", FILES)
def test_bad_file_fails_alone(tmp_path, kind):
    write_spec(tmp_path, "experiments", "good", PARENT)
    bad = tmp_path / "experiments" / "bad.toml"
    FILES[kind](bad)
    specs = load_specs(tmp_path)
    assert specs.get("experiment", "good") and specs.get("experiment", "plan_first_tiny")
    with pytest.raises(SpecError) as caught:
        specs.get("experiment", "bad")
    assert str(bad) in str(caught.value) and len(str(caught.value)) < 500


@pytest.mark.parametrize(
    ("kind", "text", "key"),
    [
        ("experiments", PARENT + "train.learning_rate = inf", "train.learning_rate"),
        ("experiments", PARENT + "train.learning_rate = nan", "train.learning_rate"),
        ("experiments", PARENT + "train.learning_rate = -1.0", "train.learning_rate"),
        ("experiments", PARENT + "train.epochs = 1e12", "train.epochs"),
        ("experiments", PARENT + "train.lora_rank = 0", "train.lora_rank"),
        ("experiments", PARENT + "dataset.upweight_factor = inf", "dataset.upweight_factor"),
        ("experiments", PARENT + "seeds = [-5]", "seeds.0"),
        ("experiments", PARENT + "seeds = []", "seeds"),
        ("experiments", PARENT + "evaluate.tasks = -3", "evaluate.tasks"),
        ("experiments", PARENT + 'evaluate.agent.prompt = "../../../etc"', "evaluate.agent.prompt"),
        ("experiments", PARENT + 'metrics.scoring.path_pattern = "(["', "metrics.scoring.path_pattern"),
        ("rollout_sets", ROLLOUTS + "k = 1000000000", "k"),
        ("rollout_sets", ROLLOUTS + "agent.temperature = inf", "agent.temperature"),
        ("rollout_sets", ROLLOUTS + 'agent.max_steps = "twelve"', "agent.max_steps"),
    ],
)
def test_absurd_value_is_refused_by_key(tmp_path, kind, text, key):
    file = write_spec(tmp_path, kind, "bad", text)
    with pytest.raises(SpecError) as caught:
        load_specs(tmp_path).get(kind.removesuffix("s"), "bad")
    assert str(caught.value).startswith(f"{file}: {key}: ")


def test_message_shows_the_refused_value(tmp_path):
    write_spec(tmp_path, "rollout_sets", "bad", ROLLOUTS + 'agent.max_steps = "twelve"')
    with pytest.raises(SpecError, match="'twelve'"):
        load_specs(tmp_path).get("rollout_set", "bad")


def test_long_chain_of_extends_is_refused_and_a_short_one_loads(tmp_path):
    for i in range(100):
        write_spec(tmp_path, "experiments", f"c{i}", f'extends = "c{i + 1}"\n' if i < 99 else PARENT)
    specs = load_specs(tmp_path)
    assert specs.get("experiment", "c90")
    with pytest.raises(SpecError, match="extends"):
        specs.get("experiment", "c0")


def test_long_name_is_refused(tmp_path):
    write_spec(tmp_path, "experiments", "n" * 240, PARENT)
    with pytest.raises(SpecError, match="100"):
        load_specs(tmp_path).get("experiment", "n" * 240)


@pytest.mark.parametrize(
    "url", ["http://user:hunter2-secret@host/v1", "http://hunter2-secret@host/v1", "host:8000", "file:///etc"]
)
def test_url_with_a_password_or_without_a_host_is_refused_and_not_repeated(tmp_path, url):
    write_spec(tmp_path, "rollout_sets", "bad", OPENAI % url)
    with pytest.raises(SpecError) as caught:
        load_specs(tmp_path).get("rollout_set", "bad")
    assert "engine.urls" in str(caught.value) and "hunter2-secret" not in str(caught.value)


CODE = {"trust-remote-code": True, "tool_parser_plugin": "x.py", "trust-rem": True, "compilation-config.backend": "x.y"}


@pytest.mark.parametrize("name", CODE)
def test_options_that_load_code_need_the_specs_and_the_users_consent(name, monkeypatch):
    monkeypatch.delenv("ETPI_ALLOW_CODE", raising=False)
    options = {name: CODE[name]}
    with pytest.raises(ValueError, match="allow_code = true"):
        ServerSection(engine="vllm", options=options)
    with pytest.raises(ValueError, match="allow_code = true"):
        EngineSection(kind="vllm", teacher="t", model="m", options=options)
    section = ServerSection(engine="vllm", options=options, allow_code=True)
    with pytest.raises(EngineUnavailable, match="--allow-code"):
        arguments(section.options)
    monkeypatch.setenv("ETPI_ALLOW_CODE", "1")
    assert len(arguments(section.options)) >= 1
    harmless = {"trust-remote-code": False, "compilation-config": {"mode": 0}, "distributed-executor-backend": "mp"}
    monkeypatch.delenv("ETPI_ALLOW_CODE")
    assert arguments(ServerSection(engine="vllm", options=harmless).options)
