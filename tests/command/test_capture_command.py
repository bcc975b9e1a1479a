"""`etpi capture`: what it records survives its death, and is imported with the ids of its own vocabulary alone."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from etpi.init.student import Student
from etpi.init.trajectories import survey
from etpi_assets.importers import import_runs
from etpi_assets.trajectories.records import RolloutRecord
from etpi_resources.chat.format import load_chat_format
from tests.support.loopback import Loopback

CHAT = load_chat_format("qwen3")
TOOLS = [{"type": "function", "function": {"name": "bash", "parameters": {"type": "object"}}}]


@contextmanager
def captured(folder: Path, url: str, tokenizer: str = "qwen3"):
    """Run the command; yield the process, and a client of the path /a/work/v1."""
    options = ["--url", url, "--model", "teacher", "--tokenizer", tokenizer, "--to", str(folder), "--port", "0"]
    command = [sys.executable, "-m", "etpi", "capture", *options]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=os.environ) as process:
        assert process.stderr
        base = process.stderr.readline().partition("base URL ")[2].partition("/a/")[0]
        headers = {"authorization": f"Bearer {(folder / 'key').read_text()}"}
        with httpx.Client(base_url=f"{base}/a/work/v1", headers=headers, trust_env=False, timeout=30) as client:
            yield process, client
        process.kill()


def refusal(to: Path, url: str, port: int, tokenizer: str = "qwen3") -> str:
    """Return the message of a command that does not serve."""
    options = ["--url", url, "--model", "teacher", "--tokenizer", tokenizer, "--to", str(to), "--port", str(port)]
    done = subprocess.run([sys.executable, "-m", "etpi", "capture", *options], capture_output=True, text=True)
    assert done.returncode == 1 and "Traceback" not in done.stderr, done.stderr
    return done.stderr


def ask(client: httpx.Client, messages: list) -> httpx.Response:
    return client.post("/chat/completions", json={"model": "policy", "messages": messages, "tools": TOOLS})


def test_a_tokenizer_that_is_not_there_is_named_before_anything_is_written(tmp_path):
    assert "--tokenizer nope" in refusal(tmp_path / "to", "http://127.0.0.1:1", 0, "nope")
    assert not (tmp_path / "to").exists()


@pytest.mark.long
def test_a_killed_proxy_keeps_every_answered_call_and_goes_on(tmp_path):
    with Loopback("teacher", CHAT) as upstream:
        upstream.say = lambda body: f"answer {len(upstream.seen)}"
        messages = [{"role": "user", "content": "Fix it."}]
        with captured(tmp_path, upstream.url) as (process, client):
            first = ask(client, messages).json()["choices"][0]["message"]
            messages += [first, {"role": "user", "content": "Go on."}]
            upstream.delay = 5.0
            threading.Timer(1.0, process.kill).start()
            with pytest.raises(httpx.HTTPError):
                ask(client, messages)
        upstream.delay = 0.0
        with (tmp_path / "work.jsonl").open("a") as log:
            log.write('{"attempt": "work", "call": 2, "outp')
        with captured(tmp_path, upstream.url) as (process, client):
            messages.append(ask(client, messages).json()["choices"][0]["message"])
            port = int(client.base_url.port or 0)
            assert "another `etpi capture` writes to" in refusal(tmp_path, upstream.url, 0)
            assert f"port {port} of 127.0.0.1 is in use" in refusal(tmp_path / "other", upstream.url, port)
            files = len(list(Path(f"/proc/{process.pid}/fd").iterdir()))
            for name in range(20):
                body = {"model": "policy", "messages": [{"role": "user", "content": "x"}]}
                client.post(f"{client.base_url.join('/')}a/task{name}/v1/chat/completions", json=body)
            assert len(list(Path(f"/proc/{process.pid}/fd").iterdir())) < files + 10, "no file stays open"
            for log in tmp_path.glob("task*"):
                log.unlink()
        with Loopback("teacher", tiny := load_chat_format("tiny")) as other:
            with captured(tmp_path, other.url, "tiny") as (_, client):
                assert ask(client, messages).status_code == 409
            assert tiny.vocabulary_hash != CHAT.vocabulary_hash
    (record,) = import_runs("capture", tmp_path, {"tokenizer": "qwen3"})
    assert isinstance(record, RolloutRecord)
    first, second = record.agents[0].turns
    assert [turn.content for turn in (first, second)] == ["answer 1", "answer 3"]
    assert second.prompt_ids and second.prompt_ids[: len(first.prompt_ids or ())] == first.prompt_ids
    assert record.outcome and record.outcome["details"]["capture"]["links"] == {"root": 1, "exact": 1}
    for options, reason in (({}, "needs_tokenizer"), ({"tokenizer": "tiny"}, "bad_token_ids")):
        (refused,) = import_runs("capture", tmp_path, options)
        assert not isinstance(refused, RolloutRecord) and refused.reason == reason
    student = Student({"tokenizer": "qwen3", "chat_template": "qwen3"}, CHAT)
    runs = survey(str(tmp_path), "capture", student)
    assert runs.native and runs.options == {"tokenizer": "qwen3"}
