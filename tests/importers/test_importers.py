"""Runs that other programs recorded: every input becomes a rollout or a refusal, and what is taken is right."""

from __future__ import annotations

import gzip
import json
import os
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from etpi_assets.importers import UnknownFormat, count_found, import_runs
from etpi_assets.importers.cooperbench import outcome
from etpi_assets.importers.source import to_utc
from etpi_assets.tasks.family import RejectedInput
from etpi_assets.trajectories.records import RolloutRecord
from etpi_assets.trajectories.tables import from_tables, to_tables
from tests.support.fuzz import JUNK, places, replaced
from tests.support.recorded_runs import (
    PAIR_OPTIONS,
    bare_list,
    call,
    flattened_messages,
    native_messages,
    native_turn,
    pair_run,
    result,
    said,
    tool_result,
    verdict,
    windowed_history,
    write,
)
from tests.support.rows import detect


def taken(root: Path, format: str = "auto", options: dict[str, Any] | None = None) -> list[RolloutRecord]:
    """What is imported, where nothing may be refused."""
    matches = list(import_runs(format, root, options))
    assert not [item for item in matches if isinstance(item, RejectedInput)]
    return [item for item in matches if isinstance(item, RolloutRecord)]


def refused(root: Path, format: str = "auto", options: dict[str, Any] | None = None) -> RejectedInput:
    """Why the one input is refused."""
    (item,) = import_runs(format, root, options)
    assert isinstance(item, RejectedInput), item
    return item


# --- CooperBench, flattened to text ---------------------------------------------------------------------------------


def test_a_run_folder_becomes_one_rollout_with_a_turn_a_response(tmp_path: Path) -> None:
    pair_run(tmp_path, verdict=verdict())
    (record,) = taken(tmp_path, options=PAIR_OPTIONS)
    assert (record.task_id, record.repo) == ("harbor_task/7/f1_f3", "harbor_task")
    assert (record.origin, record.engine, record.teacher) == ("set", "imported", "helmsman-2")
    assert record.source == "run_a/coop/harbor_task/7/f1_f3"
    assert record.started_at == datetime(2026, 3, 1, 9, 0, 0, 500_000, tzinfo=UTC)
    assert record.wall_seconds == 61.5
    first = record.agents[0]
    assert (first.agent_id, first.feature_id, first.exit_status) == ("agent1", "1", "Submitted")
    kinds = [[(a.kind, a.form) for a in turn.actions] for turn in first.turns]
    assert kinds == [
        [("send_message", "bracket"), ("bash", "bracket")],
        [("bash", "bracket")],
        [("bash", "bracket")],
        [("bash", "bracket")],
        [],
    ]
    opening = first.turns[0].actions[0]
    assert (opening.to, opening.message, opening.pure) == (None, "agent1: I take src/moor.py first", True)
    assert (
        first.turns[0].observation
        == "[tool_result] (Bash completed with no output)\n[tool_result] 1\tdef moor():\n2\t    pass"
    )
    assert first.turns[1].inbox == [{"from": "agent2", "message": "agent2: mine is src/sail.py"}]
    assert first.turns[2].content.startswith("Both plans fit.\n[tool_use Edit] {")
    assert first.turns[4].parse_error is None, "a finished agent's last text is its answer"
    assert {turn.capture for turn in first.turns} == {"none"}


@pytest.mark.parametrize(
    ("feature", "link"),
    [("/../../../../../../../secret", None), (1, "agent1.patch"), (1, "agent1_full_traj.json")],
)
def test_patch_outside_the_run_folder_is_not_read(tmp_path: Path, feature: Any, link: str | None) -> None:
    folder = pair_run(tmp_path / "runs")
    (folder / "agent").mkdir()
    (tmp_path / "secret.patch").write_text("hunter2")
    if link:
        (folder / link).symlink_to(tmp_path / "secret.patch")
    file = folder / "agent1_traj.json"
    write(file, {**json.loads(file.read_text()), "feature_id": feature})
    refusal = refused(tmp_path / "runs", "cooperbench")
    assert refusal.reason == "link_outside" and "hunter2" not in str(refusal)


def test_agent_whose_name_is_a_path_adds_no_file_of_another_folder(tmp_path: Path) -> None:
    folder = pair_run(tmp_path / "runs")
    segments = [{"kind": "agent", "messages": native_messages()}]
    write(tmp_path / "other_full_traj.json", {"segments": segments})
    data = json.loads((folder / "agent1_traj.json").read_text())
    (folder / "x").mkdir()
    for path in (folder / "agent1_traj.json", folder / "result.json"):
        path.unlink()
    write(folder / "agent1_traj.json", {**data, "agent_id": "x/../../../../../../../other"})
    (record,) = taken(tmp_path / "runs", "cooperbench")
    assert sorted(len(agent.turns) for agent in record.agents) == [5, 5]


def test_every_message_is_kept_as_captured_with_its_turn(tmp_path: Path) -> None:
    pair_run(tmp_path)
    (record,) = taken(tmp_path, options=PAIR_OPTIONS)
    kept = record.agents[0].messages
    assert [m.content for m in kept] == [m["content"] for m in flattened_messages()]
    assert [m.turn for m in kept] == [None, 0, 0, 0, 0, 0, 1, 1, 2, 2, 2, 3, 3, 4]
    assert [m.kind for m in kept[:7]] == [
        "prompt",
        "action",
        "action",
        "action",
        "observation",
        "observation",
        "action",
    ]
    assert {m.role for m in kept} == {"user", "assistant", "tool"}


def test_roles_and_times_follow_the_conversation_for_any_type_of_time(tmp_path: Path) -> None:
    events = [
        {
            "from": "agent1",
            "to": "agent2",
            "message": "agent1: I take src/moor.py first",
            "timestamp": "2026-03-01T09:00:09Z",
        },
        {"from": "agent2", "to": "agent1", "message": "agent2: I take src/moor.py first", "timestamp": 1772355605.5},
        {"from": "agent2", "to": "agent1", "message": "later", "timestamp": "1772355999000"},
        {"from": "agent2", "to": "agent1", "message": "no time", "timestamp": None},
    ]
    pair_run(tmp_path, conversation=events)
    (record,) = taken(tmp_path, options=PAIR_OPTIONS)
    assert {a.agent_id: a.role for a in record.agents} == {"agent1": "responder", "agent2": "proposer"}
    assert record.agents[0].turns[0].at == datetime(2026, 3, 1, 9, 0, 9, tzinfo=UTC)
    assert record.agents[1].turns[0].at == datetime(2026, 3, 1, 9, 0, 5, 500_000, tzinfo=UTC)
    assert record.agents[0].turns[1].at is None


def test_provider_refusal_is_an_infrastructure_error_and_no_turn(tmp_path: Path) -> None:
    cut = [*flattened_messages("agent2", "agent1")[:-1], said("Failed to authenticate. API Error: 401 token revoked.")]
    pair_run(tmp_path, messages=[flattened_messages(), cut], statuses=("Submitted", "Error"))
    (record,) = taken(tmp_path, options=PAIR_OPTIONS)
    assert record.error == "agent2: Failed to authenticate. API Error: 401 token revoked."
    assert [len(agent.turns) for agent in record.agents] == [5, 4]
    assert [agent.exit_status for agent in record.agents] == ["Submitted", "Error"]
    assert record.agents[1].messages[-1].kind == "other"


def test_a_crashed_agent_stays_in_its_pair(tmp_path: Path) -> None:
    pair_run(
        tmp_path, messages=[flattened_messages(), []], statuses=("Submitted", "Error"), errors=(None, "no container")
    )
    (record,) = taken(tmp_path)
    assert [len(agent.turns) for agent in record.agents] == [5, 0]
    assert record.error == "agent2: no container"


def test_thinking_blocks_are_kept_apart(tmp_path: Path) -> None:
    talk = [{"role": "user", "content": "Go."}, said("[thinking] first look"), call("Bash", command="ls"), result("a")]
    pair_run(tmp_path, messages=[talk, talk])
    (record,) = taken(tmp_path)
    turn = record.agents[0].turns[0]
    assert (turn.reasoning, turn.content) == ("first look", '[tool_use Bash] {"command": "ls"}')


@pytest.mark.parametrize(
    ("status", "error", "reason", "says"),
    [("Error", "no container: timed out", "errored", "no container"), ("Submitted", None, "empty", "status Submitted")],
)
def test_runs_without_a_turn_are_refused_with_what_is_known(
    tmp_path: Path, status: str, error: str | None, reason: str, says: str
) -> None:
    pair_run(tmp_path, messages=[[], []], statuses=(status, status), errors=(error, error))
    refusal = refused(tmp_path)
    assert (refusal.source, refusal.reason) == ("run_a/coop/harbor_task/7/f1_f3", reason)
    assert says in refusal.detail


def test_a_pair_with_one_trajectory_is_no_pair(tmp_path: Path) -> None:
    (pair_run(tmp_path) / "agent3_traj.json").unlink()
    refusal = refused(tmp_path)
    assert refusal.reason == "missing_trajectory"
    assert "no trajectory of agent2" in refusal.detail


def test_two_trajectories_of_one_agent_are_refused(tmp_path: Path) -> None:
    folder = pair_run(tmp_path)
    (folder / "agent5_traj.json").write_bytes((folder / "agent3_traj.json").read_bytes())
    assert refused(tmp_path).reason == "duplicate_agent"


def test_solo_runs(tmp_path: Path) -> None:
    folder = tmp_path / "r/solo/harbor_task/7/f1_f3"
    write(
        folder / "solo_traj.json",
        {"features": [1, 3], "agent_id": "solo", "model": "m", "status": "Submitted", "messages": flattened_messages()},
    )
    (folder / "solo.patch").write_text("diff --git a/x b/x\n")
    (record,) = taken(tmp_path)
    agent = record.agents[0]
    assert (agent.agent_id, agent.role, agent.feature_id, agent.patch) == (
        "solo",
        "solo",
        "1+3",
        "diff --git a/x b/x\n",
    )
    assert record.outcome is None


@pytest.mark.parametrize(
    ("given", "reward", "code"),
    [
        (verdict(), 1.0, "passed"),
        (verdict(passed=(True, False)), 0.0, "failed_tests"),
        (verdict(merge="conflicts", passed=(False, False)), 0.0, "merge_conflict"),
        (verdict(merge="conflicts"), 1.0, "passed"),
        (verdict(passed=(False, False), apply_status={"agent1": "skipped", "agent2": "skipped"}), 0.0, "no_patch"),
        (verdict(passed=(False, False), error="no image"), None, "infrastructure"),
        ({}, 0.0, "failed_tests"),
    ],
)
def test_verdicts(given: dict[str, Any], reward: float | None, code: str) -> None:
    matches = outcome(given)
    assert (matches["reward"], matches["verdict"]) == (reward, code)


def test_merge_conflict_keeps_each_agents_patch() -> None:
    matches = outcome(verdict(merge="conflicts", passed=(False, False)))
    assert matches["features"]["3"] == {"passed": False, "tests_passed": 5.0, "tests_failed": 2.0, "independent": True}


# --- CooperBench with token ids -------------------------------------------------------------------------------------


def test_captured_ids_make_native_turns(tmp_path: Path) -> None:
    pair_run(tmp_path, messages=[native_messages(), native_messages()])
    (record,) = taken(tmp_path)
    first, second = record.agents[0].turns
    assert [(t.capture, t.prompt_ids, t.output_ids, t.finish_reason) for t in (first, second)] == [
        ("native", [1, 2, 3], [10, 11], "stop"),
        ("native", [1, 2, 3, 10, 11, 4], [12, 13], "stop"),
    ]
    assert (first.actions[0].kind, first.actions[0].to, first.actions[0].form) == (
        "send_message",
        "agent2",
        "tool_calls",
    )
    assert first.inbox == [{"from": "agent2", "message": "mine is src/sail.py"}]
    assert (first.exit_code, second.exit_code) == (0, 2)
    assert [m.kind for m in record.agents[0].messages].count("inbox") == 1
    assert (first.at, second.at) == (datetime(1970, 1, 1, 0, 16, 40, tzinfo=UTC), datetime(2026, 3, 1, 9, tzinfo=UTC))
    tables = to_tables([record])
    assert from_tables(tables) == [record]
    assert tables["turns"]["prefix_turn"].to_pylist() == [None, 0, None, 0]


def test_neighbouring_requests_are_not_joined(tmp_path: Path) -> None:
    """Where a message is a request, two in a row are two turns: only flattened blocks belong together."""
    talk = [*native_messages()[:2], native_turn([1], [2], "ls"), native_turn([1, 2], [3], "pwd")]
    pair_run(tmp_path, messages=[talk, talk])
    (record,) = taken(tmp_path)
    assert [turn.output_ids for turn in record.agents[0].turns] == [[2], [3]]


@pytest.mark.parametrize("ids", [[], None, [1, "2"], [-1], [2**31], [True]])
def test_an_empty_or_odd_capture_is_no_capture(tmp_path: Path, ids: Any) -> None:
    talk = [*native_messages()[:2], native_turn([1], ids, "ls")]
    pair_run(tmp_path, messages=[talk, talk])
    assert refused(tmp_path).reason == "bad_token_ids"


def compacted(captured: bool) -> tuple[list[Any], list[Any]]:
    """The last window of a compacted conversation, and its segments."""
    opening = native_messages()[:2]
    turns = [native_turn([1] * n, [n], f"echo {n}") for n in range(1, 5)]
    if not captured:
        for turn in turns:
            del turn["extra"]["token_capture"]
    summary = {"role": "assistant", "content": "so far", "extra": {"summary": True}}
    before = [*opening, turns[0], tool_result("one"), turns[1], tool_result("two"), turns[2]]
    after = [*opening, summary, turns[1], tool_result("two"), turns[2], tool_result("three"), turns[3]]
    segments = [{"kind": "solver", "messages": before}, {"kind": "summarizer", "messages": [summary]}]
    return after, [*segments, {"kind": "solver", "messages": after}]


def test_a_compacted_conversation_with_ids_has_every_turn_once(tmp_path: Path) -> None:
    window, segments = compacted(captured=True)
    folder = pair_run(tmp_path, messages=[window, native_messages()])
    write(folder / "agent1_full_traj.json", {"messages": window, "segments": segments})
    (record,) = taken(tmp_path)
    turns = record.agents[0].turns
    assert [turn.output_ids for turn in turns] == [[1], [2], [3], [4]]
    assert "three" in (turns[2].observation or "")
    assert [m.content for m in record.agents[0].messages if m.kind == "other"] == ["so far"]


@pytest.mark.parametrize(("captured", "whole"), [(False, True), (True, False), (False, False)])
def test_a_compacted_conversation_whose_prompts_are_lost_is_refused(
    tmp_path: Path, captured: bool, whole: bool
) -> None:
    window, segments = compacted(captured)
    folder = pair_run(tmp_path, messages=[window, native_messages()])
    if whole:
        write(folder / "agent1_full_traj.json", {"segments": segments})
    assert refused(tmp_path).reason == "compacted"


# --- mini-swe-agent and SWE-agent -----------------------------------------------------------------------------------


def test_a_bare_list_of_messages(tmp_path: Path) -> None:
    write(tmp_path / "fix.traj.json", bare_list())
    (record,) = taken(tmp_path)
    agent = record.agents[0]
    assert (record.task_id, record.repo, agent.role, agent.exit_status) == ("fix", "unknown", "solo", "Submitted")
    assert [a.command for t in agent.turns for a in t.actions][0] == "cat a.py"
    assert [turn.exit_code for turn in agent.turns] == [1, None]


def test_a_trajectory_with_its_info(tmp_path: Path) -> None:
    info = {"exit_status": "LimitsExceeded", "submission": "diff", "config": {"model": {"model_name": "helmsman-2"}}}
    talk = [*native_messages(), {"role": "exit", "content": "LimitsExceeded", "extra": {}}]
    write(
        tmp_path / "b/pier__moor-12.traj.json",
        {"info": info, "messages": talk, "trajectory_format": "mini-swe-agent-1.1"},
    )
    (record,) = taken(tmp_path)
    agent = record.agents[0]
    assert (record.task_id, record.repo, record.teacher) == ("pier__moor-12", "pier/moor", "helmsman-2")
    assert (agent.exit_status, agent.patch) == ("LimitsExceeded", "diff")
    assert [turn.capture for turn in agent.turns] == ["native", "native"]
    assert record.started_at == agent.turns[0].at


def test_files_beside_trajectories_are_accounted_for(tmp_path: Path) -> None:
    write(tmp_path / "a.traj.json", bare_list())
    write(tmp_path / "empty.traj.json", bare_list()[:2])
    write(tmp_path / "preds.json", {"pier__moor-12": {"model_patch": "diff", "instance_id": "pier__moor-12"}})
    write(tmp_path / "numbers.json", [1, 2])
    write(tmp_path / "settings.json", {"x": 1})
    write(tmp_path / "cut.traj.json", {"info": {}})
    write(tmp_path / "renamed.json", {"messages": 3})
    (tmp_path / "nested.json").write_text("[" * 900 + "]" * 900)
    matches = list(import_runs("auto", tmp_path))
    assert len(matches) == count_found("auto", tmp_path) == 8
    reasons = {item.source: item.reason for item in matches if isinstance(item, RejectedInput)}
    assert reasons == {
        "cut.traj.json": "unknown_form",
        "empty.traj.json": "empty",
        "nested.json": "not_a_rollout",
        "numbers.json": "not_a_rollout",
        "preds.json": "not_a_rollout",
        "renamed.json": "unknown_form",
        "settings.json": "not_a_rollout",
    }


@pytest.mark.parametrize("form", ["fenced", "xml", "tool_calls"])
def test_windowed_agents_in_every_action_form(tmp_path: Path, form: str) -> None:
    write(tmp_path / "deep/pier__moor-12.traj", windowed_history(form))
    (record,) = taken(tmp_path)
    agent = record.agents[0]
    assert [(a.command, a.form) for t in agent.turns for a in t.actions] == [("ls -a", form), ("submit", form)]
    assert (agent.exit_status, record.repo, record.teacher) == ("LimitsExceeded", "pier/moor", "helmsman-2")
    assert agent.patch == "diff --git a/main.py b/main.py\n"
    # The demonstration is read, never learnt.
    assert [(m.kind, m.turn) for m in agent.messages[1:3]] == [("prompt", None), ("prompt", None)]


def test_history_without_trajectory_is_judged_by_its_last_action(tmp_path: Path) -> None:
    write(tmp_path / "x.traj", {"history": windowed_history("fenced")["history"]})
    write(tmp_path / "y.traj", {"trajectory": []})
    record, refusal = import_runs("swe_agent", tmp_path)
    assert isinstance(record, RolloutRecord) and record.agents[0].exit_status == "Submitted"
    assert isinstance(refusal, RejectedInput) and refusal.reason == "unknown_form"


# --- what every format survives -------------------------------------------------------------------------------------

GOOD = json.dumps(bare_list()).encode()
SURROGATE = json.dumps([*bare_list(), {"role": "user", "content": "\ud83d"}]).encode()


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "empty_file"),
        (b" \n", "empty_file"),
        (GOOD[:-40], "truncated_json"),
        (GOOD[: GOOD.index(b"colon")], "truncated_json"),
        (GOOD.replace(b'"role"', b"role", 1), "bad_json"),
        (b"[" * 200_000, "bad_json"),
        (GOOD.replace(b"colon", b"col\xff"), "not_utf8"),
        (SURROGATE, "lone_surrogate"),
        (gzip.compress(GOOD, mtime=0)[:-20], "bad_gzip"),
        (b"\x28\xb5\x2f\xfd....", "bad_zstd"),
        (json.dumps([{"role": "narrator", "content": "x"}]).encode(), "unknown_role"),
        (
            json.dumps([{"role": "user", "content": [{"type": "image_url", "image_url": "u"}]}]).encode(),
            "non_text_content",
        ),
        (json.dumps([{"role": "user", "content": 5}]).encode(), "unknown_form"),
        (json.dumps(bare_list()[2:]).encode(), "no_prompt"),
    ],
)
def test_unreadable_input_is_quarantined_with_its_reason(tmp_path: Path, data: bytes, reason: str) -> None:
    (tmp_path / "x.traj.json").write_bytes(data)
    refusal = refused(tmp_path)
    assert refusal.reason == reason
    assert len(refusal.detail) > 10


def test_unusual_valid_files_are_read(tmp_path: Path) -> None:
    nul = json.dumps([*bare_list(), {"role": "user", "content": "\x00 \U0001f600"}]).encode()
    (tmp_path / "a.traj.json.gz").write_bytes(gzip.compress(nul))
    (tmp_path / "b.traj.json").write_bytes(b"\xef\xbb\xbf" + nul)
    first, second = taken(tmp_path)
    assert first.agents[0].messages[-1].content == second.agents[0].messages[-1].content == "\x00 \U0001f600"
    assert from_tables(to_tables([first, second])) == [first, second]


def test_null_padding_arguments_and_role_names(tmp_path: Path) -> None:
    def calls(arguments: Any) -> list[dict[str, Any]]:
        return [{"id": None, "function": {"name": "bash", "arguments": arguments, "strict": None}, "type": None}]

    talk = [
        {
            "role": "human",
            "content": [{"type": "text", "text": "Go.", "image_url": None}, {"type": "text", "text": "On."}],
        },
        {"role": "gpt", "content": None, "tool_calls": calls({"command": "ls", "path": None})},
        {"role": "function", "content": "a"},
        {"role": "model", "content": "", "tool_calls": calls('{"command": "pwd"}')},
        {"role": "environment", "content": "/"},
        {"role": "assistant", "content": "x", "tool_calls": json.dumps(calls('{"command": "id"}'))},
    ]
    write(tmp_path / "x.traj.json", talk)
    agent = taken(tmp_path)[0].agents[0]
    assert [a.command for turn in agent.turns for a in turn.actions] == ["ls", "pwd", "id"]
    assert [m.role for m in agent.messages] == ["user", "assistant", "tool", "assistant", "tool", "assistant"]
    assert agent.messages[0].content == "Go.\nOn."
    assert agent.messages[1].tool_calls == [
        {"type": "function", "function": {"name": "bash", "arguments": {"command": "ls"}}}
    ]


@pytest.mark.parametrize(
    ("value", "moment"),
    [
        (1772355605.5, datetime(2026, 3, 1, 9, 0, 5, 500_000, tzinfo=UTC)),
        (1772355605500, datetime(2026, 3, 1, 9, 0, 5, 500_000, tzinfo=UTC)),
        (1772355605500000, datetime(2026, 3, 1, 9, 0, 5, 500_000, tzinfo=UTC)),
        (1772355605500000000, datetime(2026, 3, 1, 9, 0, 5, 500_000, tzinfo=UTC)),
        ("1772355605.5", datetime(2026, 3, 1, 9, 0, 5, 500_000, tzinfo=UTC)),
        ("2026-03-01T10:00:05+01:00", datetime(2026, 3, 1, 9, 0, 5, tzinfo=UTC)),
        ("2026-03-01T09:00:05Z", datetime(2026, 3, 1, 9, 0, 5, tzinfo=UTC)),
        ("2026-03-01 09:00:05", datetime(2026, 3, 1, 9, 0, 5, tzinfo=UTC)),
        (None, None), ("", None), ("soon", None), (True, None), ([1], None), (float("nan"), None), (1e300, None),
        (10**400, None),
    ],
)  # fmt: skip
def test_times_of_every_type(value: Any, moment: datetime | None) -> None:
    assert to_utc(value) == moment


# --- formats, options, accounts -------------------------------------------------------------------------------------


def test_format_is_detected_or_must_be_named(tmp_path: Path) -> None:
    pair_run(tmp_path / "pairs")
    write(tmp_path / "mini/x.traj.json", bare_list())
    write(tmp_path / "windowed/x.traj", windowed_history("xml"))
    (tmp_path / "nothing").mkdir()
    assert [detect(tmp_path / n) for n in ("pairs", "mini", "windowed")] == [
        "cooperbench",
        "mini_swe_agent",
        "swe_agent",
    ]
    assert detect(tmp_path) == "mini_swe_agent+cooperbench+swe_agent"
    assert sum(isinstance(item, RolloutRecord) for item in import_runs("auto", tmp_path)) == 3
    with pytest.raises(UnknownFormat):
        detect(tmp_path / "nothing")
    with pytest.raises(ValueError, match="'swe_agent'"):
        list(import_runs("sweagent", tmp_path))
    with pytest.raises(FileNotFoundError, match="path"):
        list(import_runs("auto", tmp_path / "absent"))
    (record,) = taken(tmp_path / "mini/x.traj.json")
    assert record.source == "x.traj.json"


def test_options_are_checked(tmp_path: Path) -> None:
    pair_run(tmp_path)
    with pytest.raises(ValueError, match="'message_commands'"):
        list(import_runs("auto", tmp_path, {"message_command": ["x"]}))
    with pytest.raises(ValueError, match="is not a list"):
        list(import_runs("auto", tmp_path, {"message_commands": "coop-send"}))
    (record,) = taken(tmp_path, options={"teacher": "t"})
    assert record.teacher == "t"


def test_ids_depend_only_on_path_and_content(tmp_path: Path) -> None:
    for name in ("one", "two"):
        for run in ("run_a", "run_b"):
            pair_run(tmp_path / name, where=f"{run}/coop/harbor_task/7/f1_f3")
    first, again = taken(tmp_path / "one"), taken(tmp_path / "two")
    assert [r.rollout_id for r in first] == [r.rollout_id for r in again]
    assert len({r.rollout_id for r in first}) == 2
    assert [r.sample for r in first] == [0, 1]
    pair_run(tmp_path / "two", where="run_a/coop/harbor_task/7/f1_f3", verdict=verdict())
    changed = taken(tmp_path / "two")
    assert changed[0].rollout_id != first[0].rollout_id and changed[1].rollout_id == first[1].rollout_id


def test_stray_files_among_runs_are_refused_by_name(tmp_path: Path) -> None:
    pair_run(tmp_path)
    write(tmp_path / "run_a/summary.json", {"runs": 1})
    write(tmp_path / "run_a/agent1.json", {"messages": native_messages()})
    matches = list(import_runs("auto", tmp_path))
    assert [getattr(item, "reason", "taken") for item in matches] == ["taken", "taken", "not_a_rollout"]


FILES = {
    "mini_swe_agent": ("x.traj.json", {"info": {"exit_status": "Submitted"}, "messages": native_messages()}),
    "swe_agent": ("x.traj", windowed_history("tool_calls")),
}


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data(), format=st.sampled_from([*FILES, "cooperbench"]))
def test_no_value_anywhere_breaks_an_importer(tmp_path_factory, data: st.DataObject, format: str) -> None:
    root = tmp_path_factory.mktemp("fuzz")
    if format == "cooperbench":
        talk = data.draw(st.sampled_from([native_messages(), flattened_messages()]))
        events = [{"from": "agent1", "message": "hi", "timestamp": 5}]
        folder = pair_run(root, messages=[talk, talk], verdict=verdict(), conversation=events)
        file = folder / data.draw(
            st.sampled_from(["agent1_traj.json", "result.json", "eval.json", "conversation.json"])
        )
    else:
        name, value = FILES[format]
        file = write(root / name, value)
    value = json.loads(file.read_text())
    for _ in range(data.draw(st.integers(1, 3))):
        value = replaced(value, data.draw(st.sampled_from(places(value))), data.draw(JUNK))
    text = json.dumps(value)
    cut = data.draw(st.one_of(st.none(), st.integers(0, len(text))))
    file.write_text(text[:cut])
    matches = list(import_runs(format, root))
    assert len(matches) == count_found(format, root) == 1
    records = [item for item in matches if isinstance(item, RolloutRecord)]
    assert from_tables(to_tables(records)) == records
    assert not any(isinstance(item, RejectedInput) and item.reason == "unconvertible" for item in matches)


# --- the real thing, where it is at hand ----------------------------------------------------------------------------


@pytest.mark.skipif("ETPI_TRAJECTORIES" not in os.environ, reason="ETPI_TRAJECTORIES names no folder of recorded runs")
def test_recorded_runs_reconcile() -> None:
    root = Path(os.environ["ETPI_TRAJECTORIES"])
    for name, options in (("cooperbench-logs", PAIR_OPTIONS), ("mini-swe-agent", {}), ("swe-agent", {})):
        matches = list(import_runs("auto", root / name, options))
        records = [item for item in matches if isinstance(item, RolloutRecord)]
        refusals = [item for item in matches if isinstance(item, RejectedInput)]
        assert len(records) + len(refusals) == count_found("auto", root / name) > 0
        assert all(agent.turns for record in records for agent in record.agents)
        turns = [turn for record in records for agent in record.agents for turn in agent.turns]
        last = {id(agent.turns[-1]) for record in records for agent in record.agents}
        assert not [turn for turn in turns if turn.parse_error and id(turn) not in last]
        assert from_tables(to_tables(records)) == records
