"""Small recorded runs in the forms that other programs write, made for the tests of the importers."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

PAIR_OPTIONS = {"message_commands": ["coop-send", "coop-broadcast"], "receive_commands": ["coop-recv"]}


def write(path: Path, value: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value), encoding="utf-8")
    return path


def call(name: str, **arguments: Any) -> dict[str, str]:
    """A flattened call, as adapters of command-line agents write it."""
    return {"role": "assistant", "content": f"[tool_use {name}] {json.dumps(arguments)}"}


def result(text: str) -> dict[str, str]:
    return {"role": "user", "content": f"[tool_result] {text}"}


def said(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


def mail(sender: str, to: str, text: str) -> str:
    return json.dumps([{"from": sender, "to": to, "content": text, "timestamp": 1784199609.2}], indent=2)


def flattened_messages(me: str = "agent1", other: str = "agent2") -> list[dict[str, str]]:
    """Five turns: broadcast with a call beside it, a receive, an edit with text, a submit, a closing word."""
    return [
        {"role": "user", "content": f"**Title**: moor the boat\n\nYou are {me}, beside {other}."},
        said(""),
        call("Bash", command=f'coop-broadcast "{me}: I take src/moor.py first"'),
        call("Read", file_path="/repo/src/moor.py"),
        result("(Bash completed with no output)"),
        result("1\tdef moor():\n2\t    pass"),
        call("Bash", command="coop-recv"),
        result(mail(other, me, f"{other}: mine is src/sail.py")),
        said("Both plans fit."),
        call("Edit", file_path="/repo/src/moor.py", old_string="pass", new_string="return 4", replace_all=False),
        result("The file /repo/src/moor.py has been updated."),
        call("Bash", command="git diff > patch.txt"),
        result(""),
        said("Done: `moor` returns 4."),
    ]


def pair_run(
    root: Path,
    *,
    where: str = "run_a/coop/harbor_task/7/f1_f3",
    messages: Sequence[list[Any]] | None = None,
    statuses: Sequence[str] = ("Submitted", "Submitted"),
    errors: Sequence[str | None] = (None, None),
    verdict: dict[str, Any] | None = None,
    conversation: list[dict[str, Any]] | None = None,
) -> Path:
    """A run folder of two agents with features 1 and 3."""
    folder = root / where
    repo, task = folder.parent.parent.name, int(folder.parent.name)
    said_by = messages or [flattened_messages(), flattened_messages("agent2", "agent1")]
    agents = {}
    for number, (feature, talk) in enumerate(zip((1, 3), said_by, strict=True)):
        agent = f"agent{number + 1}"
        agents[agent] = {"feature_id": feature, "status": statuses[number], "error": errors[number]}
        head = {"repo": repo, "task_id": task, "feature_id": feature, "agent_id": agent, "model": "helmsman-2"}
        write(folder / f"agent{feature}_traj.json", {**head, "status": statuses[number], "messages": talk})
    about = {"repo": repo, "task_id": task, "features": [1, 3], "model": "helmsman-2"}
    times = {"started_at": "2026-03-01T09:00:00.5", "duration_seconds": 61.5}
    write(folder / "result.json", {**about, **times, "agents": agents})
    if verdict is not None:
        write(folder / "eval.json", verdict)
    if conversation is not None:
        write(folder / "conversation.json", conversation)
    return folder


def verdict(*, merge: str = "clean", passed: Sequence[bool] = (True, True), **more: Any) -> dict[str, Any]:
    features = {
        f"feature{i + 1}": {"feature_id": (1, 3)[i], "passed": ok, "tests_passed": 5, "tests_failed": 0 if ok else 2}
        for i, ok in enumerate(passed)
    }
    alone = {f"feature{i + 1}_independent": {"passed": True, "reason": None} for i in range(2)}
    base = {
        "apply_status": {"agent1": "applied", "agent2": "applied"},
        "merge": {"status": merge, "strategy": "naive", "diff": ""}, "both_passed": all(passed), "error": None,
        "evaluated_at": "2026-03-01T10:00:00",
    }  # fmt: skip
    return {**base, **features, **alone, **more}


def native_turn(prompt: list[int], output: list[int], command: str, at: Any = 1000.0, **extra: Any) -> dict[str, Any]:
    """An assistant message with the ids the server read and wrote."""
    arguments = json.dumps({"command": command})
    return {
        "role": "assistant", "content": None,
        "tool_calls": [{"id": "c", "type": "function", "function": {"name": "bash", "arguments": arguments}}],
        "extra": {
            "timestamp": at, "response": {"choices": [{"finish_reason": "tool_calls"}], "usage": {}},
            "token_capture": {"prompt_token_ids": prompt, "output_token_ids": output}, **extra,
        },
    }  # fmt: skip


def tool_result(text: str, code: int = 0, at: Any = 1001.0) -> dict[str, Any]:
    body = f"<returncode>{code}</returncode>\n<output>\n{text}</output>"
    return {"role": "tool", "tool_call_id": "c", "content": body, "extra": {"returncode": code, "timestamp": at}}


def native_messages(first: str = 'send_message agent2 "plan: I\'ll take src/moor.py"') -> list[dict[str, Any]]:
    mail = "[Message from agent2 — agent2 is BLOCKED waiting for your reply]: mine is src/sail.py"
    return [
        {"role": "system", "content": "You work in a pair."},
        {"role": "user", "content": "Moor the boat."},
        native_turn([1, 2, 3], [10, 11], first),
        tool_result("Message sent to agent2"),
        {"role": "user", "content": mail},
        native_turn([1, 2, 3, 10, 11, 4], [12, 13], "sed -i s/4/5/ src/moor.py", at="2026-03-01T09:00:00Z"),
        tool_result("sed: no such file", code=2),
    ]


def windowed_history(form: str) -> dict[str, Any]:
    """A `.traj` in one of the three action forms: `fenced`, `xml` or `tool_calls`."""
    steps = []
    for thought, action in (("Look around.", "ls -a"), ("That was all.", "submit")):
        body = {
            "fenced": f"{thought}\n```\n{action}\n```",
            "xml": f"{thought}\n<command>\n{action}\n</command>",
            "tool_calls": thought,
        }[form]
        step: dict[str, Any] = {"role": "assistant", "content": body, "thought": thought, "action": f"{action}\n"}
        if form == "tool_calls":
            arguments = json.dumps({"command": action})
            step["tool_calls"] = [{"function": {"name": "bash", "arguments": arguments}, "id": "c", "type": "function"}]
        role = "tool" if form == "tool_calls" else "user"
        steps += [step, {"role": role, "content": "main.py\nbash-$", "message_type": "observation"}]
    history = [
        {"role": "system", "content": "You have a terminal.", "message_type": "system_prompt"},
        {"role": "user", "content": "Here is a demonstration.", "is_demo": True},
        {"role": "assistant", "content": "```\nfind_file x\n```", "action": "find_file x", "is_demo": True},
        {"role": "user", "content": "Fix the bug.", "message_type": "observation"},
        *steps,
    ]
    info = {"exit_status": "submitted (exit_cost)", "submission": "diff --git a/main.py b/main.py\n"}
    replay = json.dumps({"agent": {"model": {"name": "helmsman-2"}}})
    return {"environment": "main", "trajectory": [], "history": history, "info": info, "replay_config": replay}


def bare_list() -> list[dict[str, str]]:
    return [
        {"role": "system", "content": "One block a response."},
        {"role": "user", "content": "Fix the colon."},
        {"role": "assistant", "content": "Look.\n\n```mswea_bash_command\ncat a.py\n```"},
        {"role": "user", "content": "<returncode>1</returncode>\n<output>\ncat: a.py\n</output>"},
        {"role": "assistant", "content": "```bash\necho COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT && git diff\n```"},
        {"role": "user", "content": "diff --git a/b.py b/b.py"},
    ]
