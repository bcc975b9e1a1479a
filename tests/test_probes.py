"""The serving probes: each fault of serving turns its own probe red, and a clean serving turns none."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from etpi_assets.evaluation import probes
from etpi_resources.engines import Completion, ServedModel
from etpi_resources.lake.lake import folder_hash

HERE = Path(__file__).parent

CALL = "<tool_call>\n<function=bash>\n<parameter=command>\nls\n</parameter>\n</function>\n</tool_call>"
PROMPTS = [probes.Prompt(f"task{i}/agent1", [1, 2, i], []) for i in range(10)]


def _turns(text: str = CALL, ids: list[int] | None = None) -> list[Completion]:
    return [Completion(p.ids, [7, 8] if ids is None else ids, None, text, "stop", "sft-abc") for p in PROMPTS]


def _verdicts(*answers: probes.Answer) -> dict[str, bool]:
    return {c.name: c.passed for c in probes.verdicts([a.row("c" * 16, "sft", 0) for a in answers])}


def _chats(**message: object) -> list[Completion]:
    """Chat turns that generated CALL, and what the server's parsers made of it."""
    return [replace(turn, message={"role": "assistant", **message}) for turn in _turns()]


STRUCTURED = [{"id": "c1", "function": {"name": "bash", "arguments": '{"command": "ls"}'}}]


def test_a_clean_serving_fires_nothing(tmp_path):
    (tmp_path / "adapter.safetensors").write_bytes(b"weights")
    trained = {p.source: list(p.ids) for p in PROMPTS}
    listing = [ServedModel("sft-0123456789ab", str(tmp_path), "base")]
    answers = (
        probes.served_root(listing, "sft-0123456789ab", tmp_path, folder_hash(tmp_path)),
        probes.content_visible("train", PROMPTS, _chats(content="", reasoning="r", tool_calls=STRUCTURED)),
        probes.calls_round_trip("train", PROMPTS, _chats(content="", tool_calls=STRUCTURED)),
        probes.served_name(SimpleNamespace(name="sft-0123456789ab"), "0123456789abcdef"),  # pyright: ignore
        probes.ids_returned("train", PROMPTS, _turns()),
        probes.prompt_parity({p.source: p.ids for p in PROMPTS}, trained),
        probes.differs_from_base(_turns(), _turns(ids=[9]), 0.5),
        probes.parses("heldout", PROMPTS, _turns(), 0.8),
    )
    assert all(_verdicts(*answers).values()) and len(answers) == len(_verdicts())


@pytest.mark.parametrize(
    ("name", "answer"),
    [
        ("served_name", probes.served_name(SimpleNamespace(name="plan-first"), "0123456789abcdef")),  # pyright: ignore
        ("ids_returned", probes.ids_returned("train", PROMPTS, _turns(ids=[]))),
        ("prompt_parity", probes.prompt_parity({"a": [1, 5, 3]}, {"a": [1, 2, 3]})),
        ("served_root", probes.served_root([ServedModel("sft", "/old", "base")], "sft", HERE, None)),
        ("served_root", probes.served_root([ServedModel("base", str(HERE), None)], "sft", HERE, None)),
        ("served_root", probes.served_root([ServedModel("sft", str(HERE), None)], "sft", HERE, "0123456789abcdef")),
        ("content_visible", probes.content_visible("train", PROMPTS, _chats(content="\n", reasoning=CALL))),
        ("calls_round_trip", probes.calls_round_trip("train", PROMPTS, _chats(content="ls"))),
        ("calls_round_trip", probes.calls_round_trip("train", PROMPTS, _chats(content=CALL.replace("ls", "rm")))),
        ("differs_from_base", probes.differs_from_base(_turns(), _turns(), 0.5)),
        ("first_turn_parses", probes.parses("train", PROMPTS, _turns(text=""), 0.8)),
        ("first_turn_parses", probes.parses("train", PROMPTS, _turns(text="ls -la"), 0.8)),
    ],
)
def test_a_fault_turns_its_own_probe_red(name: str, answer: probes.Answer):
    found = _verdicts(answer)
    assert [probe for probe, passed in found.items() if not passed] == [name]


def test_what_only_a_server_can_get_wrong_is_not_asked_of_another_engine():
    words = {c.name: c.message for c in probes.verdicts([])}
    assert all("not applicable" in words[probe] for probe in probes.SERVER_PROBES)
    assert "not applicable" not in words["ids_returned"]


def test_parity_says_where_the_prompt_departs():
    answer = probes.prompt_parity({"a": [1, 5, 3]}, {"a": [1, 2, 3]})
    assert answer.detail["first_departure"] == ("a", {"at": 1, "served": [5, 3], "trained": [2, 3]})


def test_a_failure_names_the_remedy():
    (failed,) = [
        c
        for c in probes.verdicts([probes.parses("train", PROMPTS, _turns(""), 0.8).row("c", "sft", 0)])
        if not c.passed
    ]
    assert failed.blocking and "Remedy:" in failed.message and "seed 0 on train prompts" in failed.message
