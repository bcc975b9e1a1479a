"""The serving probes: each serving fault fails its own probe, and a clean server fails none."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from etpi_assets.evaluation import probes
from etpi_resources.engines import Completion, ServedModel
from etpi_resources.lake.lake import folder_hash

CALL = "<tool_call>\n<function=bash>\n<parameter=command>\nls\n</parameter>\n</function>\n</tool_call>"
PROMPTS = [probes.ProbePrompt(f"task{i}/agent1", [1, 2, i], []) for i in range(10)]


def _turns(text: str = CALL, ids: list[int] | None = None) -> list[Completion]:
    return [Completion(p.ids, [7, 8] if ids is None else ids, None, text, "stop", "sft-abc") for p in PROMPTS]


def _verdicts(*results: probes.ProbeResult) -> dict[str, bool]:
    return {c.name: c.passed for c in probes.verdicts([a.row("c" * 16, "sft", 0) for a in results])}


def _chats(**message: object) -> list[Completion]:
    """Return chat turns that generated CALL, with `message` as the server's parsers returned it."""
    return [replace(turn, message={"role": "assistant", **message}) for turn in _turns()]


def base_turns(turns):
    return probes.BaseTurns(turns, turns)


STRUCTURED = [{"id": "c1", "function": {"name": "bash", "arguments": '{"command": "ls"}'}}]


def test_every_probe_passes_on_a_clean_server(tmp_path):
    (tmp_path / "adapter.safetensors").write_bytes(b"weights")
    trained = {p.source: list(p.ids) for p in PROMPTS}
    listing = [ServedModel("sft-0123456789ab", str(tmp_path), "base")]
    results = (
        probes.served_root(listing, "sft-0123456789ab", tmp_path, folder_hash(tmp_path)),
        probes.content_visible("train", PROMPTS, _chats(content="", reasoning="r", tool_calls=STRUCTURED)),
        probes.calls_round_trip("train", PROMPTS, _chats(content="", tool_calls=STRUCTURED)),
        probes.served_name(SimpleNamespace(name="sft-0123456789ab"), "0123456789abcdef"),  # pyright: ignore
        probes.ids_returned("train", PROMPTS, _turns()),
        probes.prompt_parity({p.source: p.ids for p in PROMPTS}, trained),
        probes.differs_from_base(_turns(), base_turns(_turns(ids=[9])), 0.5),
        probes.parses("heldout", PROMPTS, _turns(), 0.8),
    )
    assert all(_verdicts(*results).values()) and len(results) == len(_verdicts())


@pytest.mark.parametrize(
    ("name", "result"),
    [
        ("served_name", probes.served_name(SimpleNamespace(name="plan-first"), "0123456789abcdef")),  # pyright: ignore
        ("ids_returned", probes.ids_returned("train", PROMPTS, _turns(ids=[]))),
        ("prompt_parity", probes.prompt_parity({"a": [1, 5, 3]}, {"a": [1, 2, 3]})),
        ("content_visible", probes.content_visible("train", PROMPTS, _chats(content="\n", reasoning=CALL))),
        ("calls_round_trip", probes.calls_round_trip("train", PROMPTS, _chats(content="ls"))),
        ("calls_round_trip", probes.calls_round_trip("train", PROMPTS, _chats(content=CALL.replace("ls", "rm")))),
        ("differs_from_base", probes.differs_from_base(_turns(), base_turns(_turns()), 0.5)),
        ("first_turn_parses", probes.parses("train", PROMPTS, _turns(text=""), 0.8)),
        ("first_turn_parses", probes.parses("train", PROMPTS, _turns(text="ls -la"), 0.8)),
    ],
)
def test_each_serving_fault_fails_only_its_own_probe(name: str, result: probes.ProbeResult):
    assert [probe for probe, passed in _verdicts(result).items() if not passed] == [name]


@pytest.mark.parametrize(
    ("name", "folder", "content_hash"),
    [("sft", "/old", None), ("base", ".", None), ("sft", ".", "0123456789abcdef")],
    ids=["folder", "name", "weights"],
)
def test_other_folder_name_or_weights_fail_served_root(
    tmp_path: Path, name: str, folder: str, content_hash: str | None
) -> None:
    listing = [ServedModel(name, str(tmp_path / folder), "base")]
    result = probes.served_root(listing, "sft", tmp_path, content_hash)
    assert [probe for probe, passed in _verdicts(result).items() if not passed] == ["served_root"]


def test_second_server_with_another_folder_fails_served_root(tmp_path: Path) -> None:
    listing = [ServedModel("sft", str(folder), "base") for folder in (tmp_path, tmp_path / "old")]
    assert probes.served_root(listing[:1], "sft", tmp_path, None).passed
    assert not probes.served_root(listing, "sft", tmp_path, None).passed


def test_prompt_ids_other_than_those_sent_fail() -> None:
    turns = _turns()
    for prompt_ids in (None, [1, 2], [1, 2, 0, 3]):
        wrong = [replace(turns[0], prompt_ids=prompt_ids), *turns[1:]]
        assert not probes.ids_returned("train", PROMPTS, wrong).passed


def test_blank_turn_is_no_answer_in_words() -> None:
    agent = probes.AgentSection(action_format="tool_or_answer")
    assert probes.parses("train", PROMPTS, _turns(text="Moored."), 0.8, agent).passed
    assert not probes.parses("train", PROMPTS, _turns(text=" \n"), 0.8, agent).passed


def test_one_failed_seed_fails_and_intermediate_checkpoints_do_not_decide() -> None:
    failed, passed = (probes.parses("train", PROMPTS, _turns(text=text), 0.8) for text in ("", CALL))
    rows = [passed.row("c" * 16, "sft", 0), failed.row("d" * 16, "sft", 1)]
    assert not {c.name: c.passed for c in probes.verdicts(rows)}["first_turn_parses"]
    rows = [passed.row("c" * 16, "sft", 0), failed.row("d" * 16, "sft", 0, step=5)]
    assert {c.name: c.passed for c in probes.verdicts(rows)}["first_turn_parses"]


@pytest.mark.parametrize(
    ("logprob", "again", "passed"), [(-0.002, 0.0, False), (-0.05, 0.0, True), (-0.05, -0.1, False), (-1.5, -0.1, True)]
)
def test_policy_that_says_what_the_base_says_but_surer_differs(logprob: float, again: float, passed: bool):
    """`again`: by how much the base's own probabilities differ when it is asked twice."""
    trained, base, repeated = (
        [replace(turn, logprobs=[p] * len(turn.output_ids or ())) for turn in _turns()] for p in (logprob, 0.0, again)
    )
    assert probes.differs_from_base(trained, probes.BaseTurns(base, repeated), 0.5).passed is passed


@pytest.mark.parametrize(
    ("logprob", "again", "words"),
    [(0.0, 0.0, "other weights were served"), (-0.002, 0.0, "trained too little"), (-0.05, -0.1, "other weights")],
)
def test_message_tells_too_little_training_from_wrong_weights(logprob: float, again: float, words: str):
    trained, base, repeated = (
        [replace(turn, logprobs=[p] * len(turn.output_ids or ())) for turn in _turns()] for p in (logprob, 0.0, again)
    )
    failed = probes.differs_from_base(trained, probes.BaseTurns(base, repeated), 0.5)
    (check,) = [c for c in probes.verdicts([failed.row("c" * 16, "sft", 0)]) if not c.passed]
    assert words in check.message


def test_other_ids_prove_nothing_where_the_base_does_not_repeat_its_own():
    drifting = probes.BaseTurns(_turns(), _turns(ids=[9]))
    assert not probes.differs_from_base(_turns(ids=[9]), drifting, 0.5).passed


def _sure(ids: list[int], logprob: float) -> list[Completion]:
    return [replace(turn, logprobs=[logprob] * len(ids)) for turn in _turns(ids=ids)]


@pytest.mark.parametrize(("logprob", "passed"), [(-0.01, True), (-1.45, False)])
def test_other_first_ids_at_another_probability_differ_where_the_base_repeats_nothing(logprob: float, passed: bool):
    """A base that wavers between two first ids at -1.4 and -1.5; the trained turn begins with a third."""
    wavering = probes.BaseTurns(_sure([7, 8], -1.4), _sure([9, 8], -1.5))
    assert probes.differs_from_base(_sure([5, 6], logprob), wavering, 0.5).passed is passed


def test_other_first_ids_that_leave_each_other_no_probability_differ_where_the_base_repeats_nothing():
    """Both are sure of their first ids, so that their log-probabilities are near each other."""
    sure, again, trained = (
        [replace(turn, logprobs=[logprob, -0.7]) for turn in _turns(ids=ids)]
        for ids, logprob in (([7, 8], -0.1), ([7, 9], -0.2), ([5, 6], -0.02))
    )
    assert probes.differs_from_base(trained, probes.BaseTurns(sure, again), 0.5).passed


def test_start_of_reinforcement_that_seldom_acts_blocks_nothing():
    failed, passed = (probes.parses("train", PROMPTS, _turns(text=text), 0.8) for text in ("", CALL))
    rows = [failed.row("c" * 16, "sft", 0), passed.row("d" * 16, "rl", 0)]
    verdict = {c.name: c.passed for c in probes.verdicts(rows)}
    assert verdict["first_turn_parses"] and not _verdicts(failed)["first_turn_parses"]


def test_student_that_does_not_act_yet_is_told_to_train_longer():
    failed = probes.parses("train", PROMPTS, _turns(text="```\n"), 0.8).row("c" * 16, "sft", 0)
    assert "train.epochs" in {c.name: c.message for c in probes.verdicts([failed])}["first_turn_parses"]


def test_server_probes_do_not_apply_to_an_engine_in_this_process():
    messages = {c.name: c.message for c in probes.verdicts([])}
    assert all("in this process" in messages[probe] for probe in ("served_root", "content_visible", "calls_round_trip"))


def test_a_probe_without_prompts_is_not_applicable_and_blocks_nothing():
    empty = [probes.parses("train", (), (), 0.8), probes.ids_returned("train", (), ()), probes.prompt_parity({}, {})]
    for check in probes.verdicts([result.row("c", "sft", 0) for result in empty]):
        assert check.passed and not check.applicable
    both = [probes.parses("train", (), (), 0.8), probes.parses("heldout", PROMPTS, _turns(text="ls"), 0.8)]
    checks = {c.name: c for c in probes.verdicts([result.row("c", "sft", 0) for result in both])}
    assert not checks["first_turn_parses"].passed, "prompts of the other kind still decide"


def test_prompt_parity_shows_the_first_mismatch():
    result = probes.prompt_parity({"a": [1, 5, 3]}, {"a": [1, 2, 3]})
    assert result.detail["first_departure"] == ("a", {"at": 1, "served": [5, 3], "trained": [2, 3]})


def test_failed_probe_names_remedy_seed_and_prompts():
    (failed,) = [
        c
        for c in probes.verdicts([probes.parses("train", PROMPTS, _turns(""), 0.8).row("c", "sft", 0)])
        if not c.passed
    ]
    assert failed.blocking and "Remedy:" in failed.message and "seed 0 on train prompts" in failed.message
