"""No version is published that contains the value of a key."""

from __future__ import annotations

from pathlib import Path

import pytest

from etpi_resources import secrets
from etpi_resources.lake.lake import Lake, Ref, SecretFound
from etpi_resources.lake.schemas import from_rows

KEY = "sk-test-0123456789abcdef"
REF = Ref("raw_rollouts", "rollout_set", "few")


@pytest.fixture
def lake(tmp_path: Path) -> Lake:
    return Lake(tmp_path)


def publish(lake: Lake, text: str, **options):
    rows = from_rows("turns", [{"rollout_id": "r", "agent_id": "a", "turn": 0, "content": text}])
    return lake.publish(REF, {"turns": rows}, input_key="k", inputs={}, spec_hash="s", **options)


@pytest.mark.parametrize("variable", ["OPENAI_API_KEY", "HF_TOKEN", "MY_SECRET", "DB_PASSWORD"])
def test_table_with_the_value_of_a_key_is_not_published(lake, monkeypatch, variable):
    monkeypatch.setenv(variable, KEY)
    with pytest.raises(SecretFound, match=variable) as caught:
        publish(lake, f"curl -H 'Authorization: Bearer {KEY}'")
    assert "content" in str(caught.value) and KEY not in str(caught.value)
    assert lake.current(REF) is None and not list(lake.root.rglob("*.parquet"))


def test_manifest_with_the_value_of_a_key_is_not_published(lake, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    with pytest.raises(SecretFound, match="OPENAI_API_KEY"):
        publish(lake, "fine", notes={"url": f"http://x/{KEY}"})


def test_variable_that_a_spec_names_as_key_counts_whatever_its_name(lake, monkeypatch):
    monkeypatch.setattr(secrets, "_read", set())
    monkeypatch.setenv("MY_PROVIDER", KEY)
    publish(lake, f"before it was read: {KEY}")
    assert secrets.read_secret("MY_PROVIDER") == KEY
    with pytest.raises(SecretFound, match="MY_PROVIDER"):
        publish(lake, f"after: {KEY}")


@pytest.mark.parametrize(("variable", "value"), [("HF_TOKEN", "short"), ("SSH_PRIVATE_KEY", "/root/.ssh/id_ed25519")])
def test_short_values_and_paths_are_no_secrets(lake, monkeypatch, variable, value):
    monkeypatch.setenv(variable, value)
    publish(lake, f"the text has {value}")
