"""Files of assistants and of evaluation and training programs: what arrives, and that no input breaks an importer."""

from __future__ import annotations

import json
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from etpi_assets.curation.joins import join, paths_of
from etpi_assets.importers import count_found, import_runs, sessions
from etpi_assets.importers.conversation import Message, set_ids
from etpi_assets.importers.sessions import paths
from etpi_assets.tasks.family import RejectedInput
from etpi_assets.trajectories.records import AgentRecord, RolloutRecord
from etpi_assets.trajectories.tables import from_tables, to_tables
from etpi_resources.rows import bounded
from etpi_resources.rows.bounded import Unreadable
from tests.support.fuzz import JUNK, places, replaced
from tests.support.rows import detect
from tests.support.sessions import (
    FILES,
    batch_rows,
    claude_line,
    claude_session,
    codex_session,
    episode,
    gemini_records,
    inspect_log,
    inspect_sample,
    nemo_row,
    qwen_session,
    result,
    tau2_results,
    trace,
    use,
    write_archive,
    write_zstd_archive,
)


def write(folder: Path, name: str, lines: list[Any]) -> Path:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(json.dumps(line) for line in lines))
    return path


def read(path: Path, format: str = "auto") -> list[RolloutRecord | RejectedInput]:
    results = list(import_runs(format, path))
    assert len(results) == count_found(format, path)
    records = [item for item in results if isinstance(item, RolloutRecord)]
    assert from_tables(to_tables(records)) == records
    return results


def only(path: Path) -> RolloutRecord:
    (item,) = read(path)
    assert isinstance(item, RolloutRecord), item
    return item


def talk(agent: AgentRecord) -> list[tuple[str, int | None, str]]:
    return [(message.role, message.turn, message.content) for message in agent.messages]


def commands(agent: AgentRecord) -> list[int]:
    return [len(turn.actions) for turn in agent.turns]


@pytest.mark.parametrize("format", FILES)
def test_format_is_recognised_by_its_shape(tmp_path, format):
    for name, lines in FILES[format]:
        assert detect(write(tmp_path, name, lines)) == format
        assert all(isinstance(item, RolloutRecord) for item in read(tmp_path / name))


def test_claude_code_has_an_agent_for_each_branch_continuation_and_sub_agent(tmp_path):
    rollout = only(write(tmp_path, "s.jsonl", claude_session()))
    main, branch, continued, helper = rollout.agents
    assert [(a.agent_id, a.role) for a in rollout.agents] == [
        ("agent1", "solo"),
        ("agent1-branch1", "branch"),
        ("agent1-continuation1", "continuation"),
        ("agent1.t3", "subagent"),
    ]
    assert talk(main) == [
        ("user", None, "Moor the boat."),
        ("assistant", 0, ""),
        ("tool", 0, "one"),
        ("tool", 0, "two"),
        ("assistant", 1, "Moored."),
    ]
    assert (main.turns[0].reasoning, main.exit_status, commands(main)) == ("hm", "Submitted", [2, 0])
    assert talk(branch) == [("user", None, "Moor the boat."), ("assistant", 0, "No.")]
    assert talk(continued)[:3] == [
        ("user", None, "Summary: it is moored."),
        ("assistant", None, "Moored."),
        ("user", None, "Check."),
    ]
    assert [turn.content for turn in helper.turns] == ["A pier."]
    assert (rollout.task_id, rollout.repo, rollout.teacher) == ("0b1f", "pier", "claude-x")
    assert rollout.sampler == {"usage": {"input_tokens": 60, "output_tokens": 12}}, (
        "a response of three lines counts once"
    )


def test_history_that_resuming_copied_is_trained_once(tmp_path):
    def session(name: str, *texts: str) -> list[dict[str, Any]]:
        lines = [claude_line("u0", None, "user", "Moor the boat.")]
        for n, text in enumerate(texts):
            time, content = f"2026-03-01T10:00:0{n}Z", [{"type": "text", "text": text}]
            lines.append(claude_line(f"a{n}", f"u{n}", "assistant", content, id=f"m{text}", timestamp=time))
            lines.append(claude_line(f"u{n + 1}", f"a{n}", "user", "On."))
        return [{**line, "sessionId": name} for line in lines]

    write(tmp_path, "a.jsonl", session("a", "1", "2", "3"))
    write(tmp_path, "b.jsonl", session("b", "1", "2"))
    write(tmp_path, "c.jsonl", session("c", "1", "2"))
    write(tmp_path, "other/d.jsonl", session("d", "1"))
    rollouts = [item for item in read(tmp_path) if isinstance(item, RolloutRecord)]
    assert [len(rollout.agents[0].turns) for rollout in rollouts] == [3, 2, 2, 1], "each file is read whole"
    names = [rollout.rollout_id for rollout in rollouts]
    joined = join(names, paths_of(to_tables(rollouts)))
    assert not joined.repeated and {name: joined.covered[name][0] for name in names[1:]} == dict.fromkeys(
        names[1:], names[0]
    ), "the longest trains what several have"


def test_session_in_which_another_model_went_on_is_read(tmp_path):
    blocks = [{"type": "fallback", "from": {"model": "a"}, "to": {"model": "b"}}, {"type": "text", "text": "Moored."}]
    lines = [claude_line("u", None, "user", "Moor."), claude_line("a", "u", "assistant", blocks, id="m")]
    assert talk(only(write(tmp_path, "s.jsonl", lines)).agents[0])[1:] == [("assistant", 0, "Moored.")]


def test_session_that_searched_for_tools_is_read(tmp_path):
    references = [{"type": "tool_reference", "tool_name": name} for name in ("Fetch", "Moor")]
    lines = [
        claude_line("u", None, "user", "Moor."),
        claude_line("a", "u", "assistant", [use("t1", query="moor")], id="m"),
        claude_line("r", "a", "user", [{**result("t1", ""), "content": references}]),
    ]
    assert talk(only(write(tmp_path, "s.jsonl", lines)).agents[0])[-1] == ("tool", 0, "Fetch\nMoor")


def test_file_of_a_sub_agent_names_its_session_and_call(tmp_path):
    lines = [
        claude_line("p1", None, "user", "Look.", isSidechain=True, agentId="ab1"),
        claude_line("p2", "p1", "assistant", [{"type": "text", "text": "A pier."}], id="m", isSidechain=True),
    ]
    path = write(tmp_path, "0b1f/subagents/agent-ab1.jsonl", lines)
    (path.parent / "agent-ab1.meta.json").write_text('{"toolUseId": "t3"}')
    rollout = only(path)
    assert (rollout.task_id, rollout.agents[0].agent_id, rollout.agents[0].role) == (
        "0b1f/ab1",
        "agent1.t3",
        "subagent",
    )


def test_line_that_a_crash_cut_is_dropped_and_a_damaged_one_refused(tmp_path):
    path = write(tmp_path, "s.jsonl", claude_session())
    whole = path.read_text()
    path.write_text(whole[:-40])
    assert len(only(path).agents) == 4
    path.write_text(whole.replace('{"type": "attachment"', '{"type": "attachment', 1))
    (item,) = read(path, "claude_code")
    assert isinstance(item, RejectedInput) and item.reason == "bad_json"


def test_codex_has_an_agent_for_each_rollback_and_compaction(tmp_path):
    rollout = only(write(tmp_path, "rollout-1.jsonl", codex_session()))
    first, branch, continued = rollout.agents
    assert [a.agent_id for a in rollout.agents] == ["agent1", "agent1-branch1", "agent1-continuation1"]
    assert talk(first)[:5] == [
        ("system", None, "You are a coder."),
        ("system", None, "Be brief."),
        ("user", None, "Moor the boat."),
        ("assistant", 0, "I look."),
        ("tool", 0, "moor.py"),
    ]
    assert (first.turns[0].reasoning, commands(first)) == ("hm", [2, 0, 0])
    assert [turn.content for turn in branch.turns] == ["Checked."]
    assert [turn.content for turn in continued.turns] == ["Done."]
    assert (rollout.task_id, rollout.teacher, rollout.repo) == ("s0/s1", "gpt-x", "pier")
    assert rollout.tools and rollout.tools[0]["function"]["name"] == "lookup"


def test_tokens_that_codex_repeats_count_once(tmp_path):
    def event(last: int, total: int) -> dict[str, Any]:
        info = {"last_token_usage": {"input_tokens": last}, "total_token_usage": {"input_tokens": total}}
        return {"type": "event_msg", "payload": {"type": "token_count", "info": info}}

    lines = [*codex_session(), event(7, 100), event(7, 100), event(50, 100), event(3, 103)]
    rollout = only(write(tmp_path, "rollout-1.jsonl", lines))
    assert rollout.sampler == {"usage": {"input_tokens": 5 + 7 + 3, "output_tokens": 1}}, "a resumed session goes on"


def test_codex_finds_tools_and_hears_other_agents(tmp_path):
    tools = {"type": "tool_search_output", "call_id": "s1", "tools": [{"name": "lookup"}]}
    message = {"type": "agent_message", "author": "/root/a", "recipient": "/root", "content": [{"type": "input_text"}]}
    message["content"][0]["text"] = "The pier is full."
    payloads = [
        {"type": "additional_tools", "tools": []},
        {"type": "tool_search_call", "call_id": "s1", "execution": "client", "arguments": {"query": "look"}},
        tools,
        message,
    ]
    lines = [*codex_session()[:4], *({"type": "response_item", "payload": payload} for payload in payloads)]
    agent = only(write(tmp_path, "rollout-1.jsonl", lines)).agents[0]
    assert [
        (call["function"]["name"], call["function"]["arguments"]) for call in agent.messages[3].tool_calls or ()
    ] == [("tool_search", {"query": "look"})]
    assert talk(agent)[4:] == [("tool", 0, '[{"name": "lookup"}]'), ("user", 0, "The pier is full.")]


def test_turns_after_a_compaction_without_its_history_are_no_turns(tmp_path):
    lines = codex_session()
    for line in lines:
        line["payload"].pop("replacement_history", None)
    rollout = only(write(tmp_path, "rollout-1.jsonl", lines))
    assert [a.agent_id for a in rollout.agents] == ["agent1", "agent1-branch1"]


def test_document_of_another_program_is_no_empty_gemini_session(tmp_path):
    file = write(tmp_path, "trajectory.json", [{"schema_version": "ATIF-v1.7", "steps": []}])
    (refusal,) = import_runs("gemini_cli", file)
    assert isinstance(refusal, RejectedInput) and refusal.reason == "unknown_form" and "sessionId" in refusal.detail


def test_gemini_cli_takes_a_rewind_as_a_branch(tmp_path):
    rollout = only(write(tmp_path, "session-1.jsonl", gemini_records()))
    first, branch = rollout.agents
    assert talk(first)[:4] == [
        ("user", None, "Moor the boat."),
        ("assistant", 0, "I look."),
        ("tool", 0, "moor.py"),
        ("assistant", 1, "Moored."),
    ]
    assert (first.turns[0].reasoning, [turn.content for turn in branch.turns]) == ("Look: hm", ["Thanks."])
    assert rollout.sampler == {"usage": {"input": 4, "output": 2}} and rollout.teacher == "gemini-x"


def test_qwen_code_has_a_branch_for_a_rewind_and_a_continuation_for_a_compaction(tmp_path):
    rollout = only(write(tmp_path, "chat.jsonl", qwen_session()))
    main, continued, branch = rollout.agents
    assert talk(main) == [
        ("user", None, "Moor the boat."),
        ("assistant", 0, "I look."),
        ("tool", 0, "moor.py"),
        ("assistant", 1, "Moored."),
    ]
    assert (main.turns[0].reasoning, [action.command for action in main.turns[0].actions]) == (
        "hm",
        ['run {"command": "ls"}'],
    )
    assert talk(continued)[1:] == [
        ("assistant", None, "Got it."),
        ("user", None, "Check."),
        ("assistant", 0, "Checked."),
    ]
    assert (branch.role, [turn.content for turn in branch.turns]) == ("branch", ["Sunk."])
    usage = {"promptTokenCount": 5, "candidatesTokenCount": 2}
    assert (rollout.sampler, rollout.teacher, rollout.repo) == ({"usage": usage}, "qwen-x", "pier")


def test_path_of_qwen_code_begins_after_a_line_that_is_missing(tmp_path):
    lines = [line for line in qwen_session() if line["uuid"] not in ("1", "2")]
    main = only(write(tmp_path, "chat.jsonl", lines)).agents[0]
    assert talk(main) == [("tool", None, "moor.py"), ("assistant", 0, "Moored.")]


def test_nemo_gym_has_ids_schemas_and_reward(tmp_path):
    rollout = only(write(tmp_path, "r.jsonl", [nemo_row()]))
    first, last = rollout.agents[0].turns
    assert (first.content, first.reasoning, len(first.actions), first.capture) == ("I look.", "hm", 2, "none")
    assert (last.prompt_ids, last.output_ids, last.logprobs) == ([1, 2], [3, 4], [-0.5, -0.25])
    assert rollout.outcome == {"reward": 1.0, "verdict": "passed"} and rollout.teacher == "helmsman-2"
    assert rollout.tools and set(rollout.tools[0]) == {"type", "function"}
    assert rollout.sampler == {"temperature": 0.5, "usage": {"output_tokens": 7}}


def test_verifiers_has_a_branch_for_each_leaf_and_the_weighted_reward(tmp_path):
    rollout = only(write(tmp_path, "traces.jsonl", [episode()]))
    first, branch = rollout.agents
    assert talk(first) == [
        ("user", None, "Moor the boat."),
        ("assistant", 0, "I look."),
        ("tool", 0, "moor.py"),
        ("assistant", 1, "Moored."),
    ]
    assert (first.turns[0].prompt_ids, first.turns[0].output_ids) == ([5, 6, 7], [8, 9])
    assert (first.turns[1].finish_reason, [t.content for t in branch.turns], branch.role) == (
        "stop",
        ["Again."],
        "branch",
    )
    assert rollout.outcome == {"reward": 1.0, "verdict": "passed"} and rollout.task_id == "moor-1"


def test_verifiers_has_the_lowest_reward_of_several_agents_and_all_usage(tmp_path):
    traces = [trace(), {**trace(), "agent": {"name": "other"}, "rewards": {"solved": {"score": 0.25}}}]
    for number, one in enumerate(traces):
        one["calls"][0]["usage"] = {"prompt_tokens": 5, "completion_tokens": 2, "cost": None}
        one["nodes"][5]["semantic_parents"] = [{"node": 1, "type": ("subagent_call", "compaction")[number]}]
    rollout = only(write(tmp_path, "traces.jsonl", [{**episode(), "traces": traces}]))
    assert rollout.outcome and rollout.outcome["reward"] == 0.25
    assert rollout.sampler == {"temperature": 1.0, "usage": {"prompt_tokens": 10, "completion_tokens": 4}}
    assert [agent.role for agent in rollout.agents] == ["solo", "subagent", "solo", "continuation"]


def test_completion_that_repeats_its_prompt_is_the_rest(tmp_path):
    question = {"role": "user", "content": "Moor?"}
    row = {
        "prompt": [question],
        "completion": [{**question, "tool_calls": None}, {"role": "assistant", "content": "Moored."}],
    }
    assert talk(only(write(tmp_path, "results.jsonl", [row])).agents[0]) == [
        ("user", None, "Moor?"),
        ("assistant", 0, "Moored."),
    ]


def test_call_that_the_provider_ran_is_refused_in_logs_of_inspect(tmp_path):
    sample = inspect_sample()
    part = {"type": "tool_use", "tool_type": "web_search", "name": "web_search", "arguments": "{}", "result": "found"}
    sample["messages"][5]["content"] = [part, {"type": "text", "text": "Moored."}]
    (item,) = read(write(tmp_path, "log.json", [inspect_log(sample)]))
    assert isinstance(item, RejectedInput) and item.reason == "unknown_form"


@pytest.mark.parametrize("kind", ["json", "deflate", "stored", "zstd"])
def test_inspect_reads_every_kind_of_log(tmp_path, kind):
    log, path = inspect_log(inspect_sample()), tmp_path / f"log.{'json' if kind == 'json' else 'eval'}"
    if kind == "json":
        path.write_text(json.dumps(log))
    elif kind == "zstd":
        write_zstd_archive(path, log)
    else:
        write_archive(path, log, zipfile.ZIP_DEFLATED if kind == "deflate" else zipfile.ZIP_STORED)
    rollout = only(path)
    agent = rollout.agents[0]
    assert talk(agent)[:2] == [("user", None, "Moor the boat."), ("assistant", None, "Like this.")]
    assert (agent.turns[0].reasoning, agent.turns[0].observation) == ("hm", "too slow")
    assert rollout.outcome == {"reward": 1.0, "verdict": "passed", "scores": {"match": 1.0, "speed": 0.25}}
    assert (rollout.task_id, rollout.repo) == ("moor/pier__moor-12", "pier/moor")
    assert rollout.sampler == {"temperature": 0.5, "usage": {"m": {"output_tokens": 7}}}


@pytest.mark.parametrize(("eval", "reason"), [(1, "unknown_form"), ({}, "not_a_rollout")])
def test_document_that_is_no_log_is_lost_only_if_it_may_be_a_run(tmp_path, eval, reason):
    log = inspect_log(inspect_sample()) if eval else {"status": "success", "eval": eval}
    (item,) = read(write(tmp_path, "log.json", [{**log, "eval": eval}]), "inspect")
    assert isinstance(item, RejectedInput) and item.reason == reason


def test_archives_that_are_damaged_or_made_to_exhaust_memory_are_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(bounded, "_SMALL_BYTES", 1 << 16)
    path = write_archive(tmp_path / "log.eval", inspect_log(inspect_sample(), inspect_sample()))
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    (item,) = read(path, "inspect")
    assert isinstance(item, RejectedInput) and item.reason == "bad_zip"
    broken = bytearray(whole)
    broken[whole.find(b"samples/1_epoch_1.json") + 40] ^= 255
    path.write_bytes(bytes(broken))
    assert [getattr(item, "reason", "read") for item in read(path)] == ["read", "bad_zip"]
    with zipfile.ZipFile(path, "w", zipfile.ZIP_BZIP2) as archive:
        archive.writestr("header.json", json.dumps(inspect_log()))
        archive.writestr("samples/0_epoch_1.json", b" " * (4 << 20))
    (item,) = read(path)
    assert isinstance(item, RejectedInput) and item.reason == "decompression_bomb"


def test_tau2_has_the_agents_view(tmp_path):
    rollout = only(write(tmp_path, "results.json", [tau2_results()]))
    agent = rollout.agents[0]
    assert talk(agent) == [
        ("system", None, "# Policy"),
        ("assistant", None, "Hi! How can I help?"),
        ("user", None, "Find it."),
        ("assistant", 0, ""),
        ("tool", 0, "found"),
        ("assistant", 1, "Please reboot."),
        ("user", 1, "Thanks ###STOP###"),
    ]
    assert [turn.parse_error for turn in agent.turns] == [None, None] and agent.exit_status == "Submitted"
    assert (rollout.task_id, rollout.teacher, rollout.sample_seed) == ("telecom/7", "helmsman-2", 300)
    assert rollout.sampler == {"temperature": 0.0, "usage": {"completion_tokens": 7}}


def test_folder_of_simulations_is_read_with_its_document(tmp_path):
    results = tau2_results()
    (simulation,) = results.pop("simulations")
    path = write(tmp_path, "results.json", [results])
    write(tmp_path, "simulations/x.json", [simulation])
    write(tmp_path, "simulations/y.json", [{**simulation, "messages": [], "ticks": [1]}])
    assert detect(tmp_path) == "tau2"
    found = read(tmp_path)
    assert [getattr(item, "reason", "read") for item in found] == ["read", "unknown_form"]
    assert [item.source for item in found if isinstance(item, RolloutRecord)] == [f"{path.name}#0"]


def test_answers_of_a_batch_are_joined_with_their_requests(tmp_path):
    requests, answers = batch_rows()
    write(tmp_path, "in.jsonl", requests)
    write(tmp_path, "out.jsonl", [*answers, {**answers[1], "custom_id": "lost"}])
    assert detect(tmp_path) == "openai_batch"
    items, chat, failed, lost = read(tmp_path)
    assert isinstance(items, RolloutRecord) and len(items.agents[0].turns) == 2 and items.task_id == "c1"
    assert isinstance(chat, RolloutRecord) and talk(chat.agents[0]) == [
        ("user", None, "Moor?"),
        ("assistant", 0, "Moored."),
    ]
    assert chat.sampler == {"temperature": 0.5, "usage": {"total_tokens": 9}} and chat.teacher == "helmsman-2"
    assert [getattr(item, "reason", None) for item in (failed, lost)] == ["errored", "no_prompt"]


def test_answers_behind_a_damaged_first_row_are_read_and_the_row_is_lost(tmp_path):
    requests, answers = batch_rows()
    for name, rows in {"in.jsonl": requests, "out.jsonl": answers, "other.jsonl": answers[:1]}.items():
        path = write(tmp_path, name, rows)
        path.write_text("{\n" + path.read_text() if name != "other.jsonl" else "{")
    (tmp_path / "errors.jsonl").write_text("")
    fates = [(item.source or "", getattr(item, "reason", "read")) for item in read(tmp_path, "openai_batch")]
    assert [reason for source, reason in fates if source.startswith("out")] == [
        "truncated_json",
        "read",
        "read",
        "errored",
    ]
    assert [reason for source, reason in fates if not source.startswith("out")] == ["truncated_json", "not_a_rollout"]
    assert count_found("openai_batch", tmp_path) == len(fates)


def test_answer_whose_id_two_batches_use_is_refused_unless_one_file_has_all_requests(tmp_path):
    requests, answers = batch_rows()
    other = [{**row, "body": {**row["body"], "user": "2"}} for row in requests]
    write(tmp_path, "in-1.jsonl", requests)
    write(tmp_path, "in-2.jsonl", other[:1])
    out = write(tmp_path, "out-1.jsonl", answers)
    assert [getattr(item, "reason", "read") for item in read(out)] == ["read", "read", "errored"]
    write(tmp_path, "in-2.jsonl", other)
    refused = [item for item in read(out) if isinstance(item, RejectedInput)]
    assert [item.reason for item in refused] == ["ambiguous_request", "ambiguous_request", "errored"]
    second = refused[1]
    assert "in-1.jsonl and in-2.jsonl have different requests 'c0'" in second.detail and "folder" in second.detail
    write(tmp_path, "in-2.jsonl", requests)
    assert [getattr(item, "reason", "read") for item in read(out)] == ["read", "read", "errored"], "equal requests"


def test_branches_that_repeat_too_much_are_refused(monkeypatch):
    monkeypatch.setattr(sessions, "_MOST_COPIED", 1000)
    deep = {str(i): str(i - 1) if i else None for i in range(300)}
    wide = {f"leaf{i}": "299" for i in range(10)}
    with pytest.raises(Unreadable, match="too_large"):
        list(paths({**deep, **wide}, set(wide)))


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data(), format=st.sampled_from(sorted(FILES)))
def test_no_value_anywhere_breaks_an_importer(tmp_path_factory, data: st.DataObject, format: str) -> None:
    root = tmp_path_factory.mktemp("fuzz")
    name, lines = data.draw(st.sampled_from(FILES[format]))
    value: Any = lines
    for _ in range(data.draw(st.integers(0, 3))):
        value = replaced(value, data.draw(st.sampled_from(places(value))), data.draw(JUNK))
    text = "\n".join(json.dumps(line) for line in (value if isinstance(value, list) else [value]))
    cut = data.draw(st.one_of(st.none(), st.integers(0, len(text))))
    (root / name).write_text(text[:cut])
    results = read(root, format)
    assert all(item.reason != "unconvertible" for item in results if isinstance(item, RejectedInput)), results


def test_log_probs_are_those_that_a_column_holds():
    turn = Message("assistant")
    set_ids(turn, [1], [2, 3], [-0.1, 1e-240], "x")
    assert turn.logprobs == [float(np.float32(-0.1)), 0.0]
    with pytest.raises(Unreadable, match="bad_logprobs"):
        set_ids(turn, [1], [2], [-1e39], "x")
