"""Keys in imported runs: masked, quarantined or kept, and never trained once they are masked."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from etpi_assets.importers import import_runs
from etpi_assets.importers.bulk import ImportSource, import_in_bulk
from etpi_assets.importers.secrets import found, without_secrets
from etpi_assets.tasks.family import RejectedInput
from etpi_assets.trajectories.records import AgentRecord, Message, RolloutRecord, Turn
from etpi_assets.trajectories.tables import from_tables, to_tables
from tests.support.rows import called, write_lines

KEYS = {
    "Anthropic key": "sk-ant-api03-" + "a1B2" * 8,
    "OpenAI key": "sk-proj-" + "a1B2" * 8,
    "GitHub token": "ghp_" + "a1B2" * 9,
    "AWS key": "AKIA" + "ABCD" * 4,
    "Google key": "AIza" + "a1B2_" * 7,
    "Hugging Face token": "hf_" + "aB" * 17,
    "Telegram token": "123456789:AA" + "a1B2_" * 6 + "abc",
    "Twilio key": "SK" + "a1b2" * 8,
    "npm token": "npm_" + "a1B2" * 9,
    "other token": "lin_api_" + "a1B2" * 10,
    "private key": "-----BEGIN PGP PRIVATE KEY BLOCK-----\n\nMIIE\n-----END PGP PRIVATE KEY BLOCK-----",
    "password in a URL": "moor:h4rb0ur",
}


def talk(key: str, *, in_call: bool = False, in_result: bool = True) -> dict[str, Any]:
    call = called(command=f"export KEY={key}" if in_call else "env")
    return {
        "messages": [
            {"role": "user", "content": "Moor the boat."},
            {"role": "assistant", "content": "I look.", "tool_calls": [call]},
            {"role": "tool", "content": f"KEY={key}" if in_result else "moor.py", "tool_call_id": "c1"},
            {"role": "assistant", "content": "Moored."},
        ]
    }


def read(tmp_path: Path, row: dict[str, Any], choice: str) -> RolloutRecord | RejectedInput:
    (item,) = import_runs("messages", write_lines(tmp_path / "a.jsonl", [row]), {"secrets": choice})
    if isinstance(item, RolloutRecord):
        assert from_tables(to_tables([item])) == [item]
    return item


@pytest.mark.parametrize("kind", KEYS)
def test_key_in_a_result_is_masked_everywhere(tmp_path, kind):
    key = f"https://{KEYS[kind]}@pier.example" if "URL" in kind else KEYS[kind]
    kept = read(tmp_path, talk(key), "keep")
    assert isinstance(kept, RolloutRecord) and found(kept) == {kind: 1} and key in kept.agents[0].messages[2].content
    masked = read(tmp_path, talk(key), "mask")
    assert isinstance(masked, RolloutRecord) and len(masked.agents[0].turns) == 2 and not found(masked)
    assert KEYS[kind] not in repr(masked) and f"[masked {kind}]" in (masked.agents[0].turns[0].observation or "")


@pytest.mark.parametrize(
    "text",
    [
        "pul-" + "requests" * 4, "a.r8_" + "a1B2" * 8, "gsk_a1b2", "SK" + "moor" * 8, "ico-arrow-left-small-2x",
        "r8_test_conv2d_of_the_pier", 'grep -rn -e "-----BEGIN RSA PRIVATE KEY-----" .',
    ],
)  # fmt: skip
def test_words_that_begin_like_a_key_stay(tmp_path, text):
    kept = read(tmp_path, talk(text), "mask")
    assert isinstance(kept, RolloutRecord) and text in kept.agents[0].messages[2].content


def test_turn_that_wrote_a_key_is_context(tmp_path):
    masked = read(tmp_path, talk(KEYS["AWS key"], in_call=True, in_result=False), "mask")
    assert isinstance(masked, RolloutRecord)
    agent = masked.agents[0]
    assert [(m.role, m.turn, m.kind) for m in agent.messages] == [
        ("user", None, "prompt"),
        ("assistant", None, "other"),
        ("tool", None, "observation"),
        ("assistant", 1, "action"),
    ]
    assert [turn.content for turn in agent.turns] == ["Moored."] and KEYS["AWS key"] not in repr(masked)


def test_rollout_is_quarantined_by_choice_or_if_nothing_is_left_to_train(tmp_path):
    row = talk(KEYS["GitHub token"])
    item = read(tmp_path, row, "quarantine")
    assert isinstance(item, RejectedInput) and (item.source, item.row, item.reason) == ("a.jsonl", 0, "secrets")
    assert "1 GitHub token" in item.detail and KEYS["GitHub token"] not in item.detail
    row["messages"] = [{"role": "user", "content": "Key?"}, {"role": "assistant", "content": KEYS["GitHub token"]}]
    assert isinstance(read(tmp_path, row, "mask"), RejectedInput)
    with pytest.raises(ValueError, match=r"options\.secrets"):
        read(tmp_path, row, "hide")


def test_recorded_ids_are_quarantined_because_they_cannot_be_masked(tmp_path):
    capture = {"token_capture": {"prompt_token_ids": [1], "output_token_ids": [2]}}
    row = talk(KEYS["AWS key"])
    row["messages"][1]["extra"] = capture
    item = read(tmp_path, row, "mask")
    assert isinstance(item, RejectedInput) and "ids" in item.detail


@pytest.mark.parametrize("ids", [None, [1, 2]])
def test_error_outcome_and_details_of_refusals_are_masked(ids):
    key = KEYS["AWS key"]
    turn = Turn(0, "Moored.", prompt_ids=ids, output_ids=ids)
    agent = AgentRecord("a", "", "solo", "Submitted", [turn], [Message("assistant", "Moored.", turn=0, kind="action")])
    outcome = {"reward": 1.0, "verdict": "passed", "details": {"log": [key]}}
    item = RolloutRecord("r", "set", None, "t", None, [agent], error=f"bad key {key}", outcome=outcome)
    masked = without_secrets(item, "mask")
    assert isinstance(masked, RolloutRecord) and masked.agents == item.agents and masked.outcome
    assert (masked.error, masked.outcome["details"]) == ("bad key [masked AWS key]", {"log": ["[masked AWS key]"]})
    assert isinstance(without_secrets(item, "quarantine"), RejectedInput) and without_secrets(item, "keep") is item
    refusal = RejectedInput("a.jsonl", "bad_json", f"near {key}", 3)
    for choice in ("mask", "quarantine"):
        assert without_secrets(refusal, choice) == replace(refusal, detail="near [masked AWS key]")


def test_bulk_import_masks_too(tmp_path):
    path = write_lines(tmp_path / "a.jsonl", [talk(KEYS["AWS key"])])
    source = ImportSource("messages", str(path), {"secrets": "mask"}, "set", None)
    created = import_in_bulk(source, tmp_path / "spill", hashes={}, workers=1)
    texts = [row["content"] for batch in created.tables["messages"] for row in batch.to_pylist()]
    assert "KEY=[masked AWS key]" in texts
