"""Rollout sets of foreign harnesses in bubblewrap: captured, graded, bounded from outside, and resumed."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from etpi_assets.agent import harness
from etpi_assets.evaluation.rollouts import harness_as_trained
from etpi_assets.resources import Resources
from etpi_assets.rollouts.assets import raw_rollouts
from etpi_assets.specs.experiment import EvaluateSection
from etpi_assets.specs.rollout_set import RolloutSetSpec
from etpi_assets.tasks.family import Task
from etpi_assets.tasks.table import task_table
from etpi_assets.worlds.repo_fix_tiny import FAMILY
from etpi_resources.capture import server
from etpi_resources.capture.server import new_key
from etpi_resources.capture.store import read_log
from etpi_resources.chat.format import load_chat_format
from etpi_resources.engines import EngineUnavailable
from etpi_resources.engines.scripted import ScriptedEngine
from etpi_resources.lake.lake import Lake, Ref
from tests.support.graph import write_spec
from tests.support.real_harnesses import HARNESS, write_harness
from tests.support.small_lake import put
from tests.support.waiting import until

pytestmark = [pytest.mark.slow]
TOOL = {"type": "function", "function": {"name": "bash", "parameters": {"type": "object"}}}
TASKS = [t for t in FAMILY.load("little", 0, {"train": 2, "heldout": 1}) if isinstance(t, Task)]

SPEC = """title = "t"
kind = "agent"
suite = "little"
split = "train"
[engine]
kind = "reference"
teacher = "reference"
[agent]
max_model_len = 8000
max_tokens = 1000
[harness]
name = "custom"
version = "1"
folder = "{folder}"
command = "python3 -B {{folder}}/harness.py {{task_file}}"
env = {{ BASE = "{{base_url}}/v1", KEY = "{{key}}"{env} }}
{more}
"""


class World:
    def __init__(self, root: Path) -> None:
        self.root, self.lake, self.said = root, Lake(root / "lake"), list[str]()
        put(self.lake, "tasks", "little", {"tasks": task_table(TASKS).to_pylist()})
        write_spec(self.root / "specs", "suites", "little", 'extends = "repo_fix_tiny"\n')
        self.folder = root / "harness"
        write_harness(self.folder)

    def collect(self, more: str = "", env: str = ""):
        write_spec(self.root / "specs", "rollout_sets", "foreign", SPEC.format(folder=self.folder, more=more, env=env))
        resources = Resources(lake=self.lake, specs_folder=self.root / "specs")
        return raw_rollouts.execute("foreign", resources, log=self.said.append)

    def rows(self, table: str) -> list[dict]:
        return self.lake.read(Ref("raw_rollouts", "rollout_set", "foreign"), table).to_pylist()

    def logs(self) -> list[Path]:
        return sorted(self.root.rglob("calls/*.jsonl"))


@pytest.fixture
def world(tmp_path):
    return World(tmp_path)


def test_a_harness_is_captured_graded_and_its_key_is_nowhere(world, monkeypatch):
    """Its commands print their environment, as a model's may."""
    keys = _keys(monkeypatch)
    (world.folder / "harness.py").write_text(HARNESS.replace('"-c", command]', '"-c", command + "; echo key=$KEY"]'))
    outcome = world.collect()
    assert len(keys) == 2 and not outcome.manifest.blocked and outcome.metadata["captures"] == {"native": 4}
    rollouts, turns = world.rows("rollouts"), world.rows("turns")
    assert [json.loads(row["outcome"])["reward"] for row in rollouts] == [1.0, 1.0]
    capture = json.loads(rollouts[0]["outcome"])["details"]["capture"]
    assert capture["links"] == {"root": 1, "exact": 1} and capture["calls"] == capture["turns"] == 2
    assert [row["prefix_turn"] for row in turns] == [None, 0] * 2 and {r["role"] for r in world.rows("agents")} == {
        "main"
    }
    assert json.loads(rollouts[0]["tools"])[0]["function"]["name"] == "bash"
    assert len(world.logs()) == 2 and "key=[key]" in world.rows("messages")[2]["content"]
    parts = [row[column] for table in ("rollouts", "messages", "turns") for row in world.rows(table) for column in row]
    files = [file.read_text(errors="replace") for file in world.root.rglob("*") if file.is_file()]
    prompts = [load_chat_format("qwen3").decode(row["suffix_ids"]) for row in turns]
    assert not any(key in text for key in keys for text in [*map(str, parts), *files, *prompts, *world.said])
    world.collect("max_calls = 9")
    assert len(world.logs()) == 4, "another budget is another set of attempts"


def _keys(monkeypatch) -> list[str]:
    keys = list[str]()
    monkeypatch.setattr(server, "new_key", lambda: keys.append(new_key()) or keys[-1])
    return keys


def test_attempts_wait_for_the_memory_of_others(world, monkeypatch):
    monkeypatch.setattr(harness, "_MEMORY", memory := harness._Memory(3))
    running, most = set[int](), list[int]()
    answer = ScriptedEngine.complete

    def complete(self, requests):
        running.add(threading.get_ident())
        most.append(len(running))
        time.sleep(0.3)
        running.discard(threading.get_ident())
        return answer(self, requests)

    monkeypatch.setattr(ScriptedEngine, "complete", complete)
    assert world.collect("memory_gib = 2").metadata["captures"] == {"native": 4} and max(most) == 1
    assert memory._free == 3 and world.collect("memory_gib = 8").metadata["captures"] == {"native": 4}


def test_no_process_of_the_machine_shows_a_key_in_its_arguments(world, monkeypatch):
    keys, seen, over = _keys(monkeypatch), set[str](), threading.Event()

    def look() -> None:
        while not over.wait(0.02):
            seen.update(" ".join(process.info["cmdline"]) for process in _processes())

    watching = threading.Thread(target=look)
    watching.start()
    world.collect()
    over.set()
    watching.join()
    assert any("harness.py" in line for line in seen), "the premise: the harness was seen"
    assert len(keys) == 2 and not any(key in line for key in keys for line in seen)


CALLS = """
import json, os, sys, urllib.request
text = f"{open('/tmp/task.md').read()} What now, {os.getpid()}?"
body = {"model": "policy", "messages": [{"role": "user", "content": text}], "tools": json.loads(sys.argv[1])}
headers = {"authorization": "Bearer " + os.environ["KEY"], "content-type": "application/json"}
urllib.request.urlopen(urllib.request.Request(
    os.environ["BASE"] + "/chat/completions", json.dumps(body).encode(), headers)).read()
"""


def test_a_command_that_calls_the_proxy_spends_the_budget_and_is_never_main(world):
    (world.folder / "calls.py").write_text(CALLS)
    call = f"python3 -B {world.folder}/calls.py '[]' && python3 -B {world.folder}/calls.py '{json.dumps([TOOL])}'; "
    (world.folder / "harness.py").write_text(HARNESS.replace('"-c", command]', f'"-c", {call!r} + command]'))
    world.collect()
    for row in world.rows("rollouts"):
        capture = json.loads(row["outcome"])["details"]["capture"]
        assert (row["exit_status"], capture["calls"], capture["turns"]) == ("Submitted", 6, 2)
        assert capture["untrained"] == {"side": 2, "helper": 2}
    chat, turns = load_chat_format("qwen3"), world.rows("turns")
    assert len(turns) == 4 and not any("What now, " in chat.decode(row["suffix_ids"]) for row in turns)
    world.collect("max_calls = 3")
    for row in world.rows("rollouts"):
        assert row["exit_status"] == "LimitsExceeded" and json.loads(row["outcome"])["details"]["capture"]["turns"] == 1


def test_a_harness_that_ignores_its_budget_is_ended_and_graded(world):
    started = time.monotonic()
    world.collect("max_calls = 1\nseconds = 60", env=', STUBBORN = "1"')
    assert time.monotonic() - started < 40
    for row in world.rows("rollouts"):
        outcome = json.loads(row["outcome"])
        assert (row["exit_status"], outcome["verdict"], outcome["details"]["capture"]["turns"]) == (
            "LimitsExceeded",
            "passed",
            1,
        )
        assert outcome["details"]["capture"]["refused"] >= 1


def test_a_harness_that_takes_too_long_is_ended_and_graded(world):
    (world.folder / "harness.py").write_text(HARNESS.replace("sys.exit(0)", "import time; time.sleep(60)"))
    world.collect("seconds = 5")
    assert [row["exit_status"] for row in world.rows("rollouts")] == ["LimitsExceeded"] * 2
    assert [json.loads(row["outcome"])["reward"] for row in world.rows("rollouts")] == [1.0, 1.0]


def test_a_killed_harness_is_graded_by_what_it_left(world):
    (world.folder / "harness.py").write_text(HARNESS.replace("sys.exit(0)", "os.kill(os.getpid(), 9)"))
    world.collect()
    assert [row["exit_status"] for row in world.rows("rollouts")] == ["HarnessError"] * 2
    assert [json.loads(row["outcome"])["reward"] for row in world.rows("rollouts")] == [1.0, 1.0]
    assert len(world.rows("turns")) == 4


def test_a_harness_in_a_container_reaches_only_the_proxy(engine, world):
    reach = "import socket; s = socket.socket(); s.settimeout(1); sys.exit(9 * (s.connect_ex(('1.1.1.1', 80)) == 0))"
    (world.folder / "harness.py").write_text(HARNESS.replace("        sys.exit(0)", f"            {reach}"))
    spec = SPEC.format(folder=world.folder, more="", env="")
    write_spec(
        world.root / "specs",
        "rollout_sets",
        "foreign",
        spec.replace('kind = "agent"', 'kind = "agent"\nsandbox = "docker"'),
    )
    resources = Resources(lake=world.lake, specs_folder=world.root / "specs")
    outcome = raw_rollouts.execute("foreign", resources, log=world.said.append)
    assert outcome.metadata["captures"] == {"native": 4}, outcome.metadata
    assert [json.loads(row["outcome"])["reward"] for row in world.rows("rollouts")] == [1.0, 1.0]
    assert [row["exit_status"] for row in world.rows("rollouts")] == ["Submitted"] * 2


COLLECT = """
import sys
from pathlib import Path
from tests.rollouts.test_harness_rollouts import Resources, Lake, raw_rollouts
root = Path(sys.argv[1])
raw_rollouts.execute("foreign", Resources(lake=Lake(root / "lake"), specs_folder=root / "specs", concurrency=1))
"""


def test_a_killed_run_loses_no_call_mixes_none_and_is_continued(world):
    slow = HARNESS.replace(
        "    for call in", "    import time; time.sleep(float(os.environ['PAUSE']))\n    for call in"
    )
    (world.folder / "harness.py").write_text(slow)
    write_spec(
        world.root / "specs", "rollout_sets", "foreign", SPEC.format(folder=world.folder, more="", env=', PAUSE = "2"')
    )
    run = subprocess.Popen([sys.executable, "-c", COLLECT, str(world.root)], start_new_session=True)

    def answered(log: Path) -> list[list[int]]:
        return [row["output_ids"] for row in read_log(log) if "output_ids" in row]

    def journaled() -> list[str]:
        return [json.loads(line)["key"] for file in world.root.rglob("journal-*.jsonl") for line in file.open()]

    until(lambda: len(world.logs()) == 2 and journaled() and all(map(answered, world.logs())), 120)
    assert run.poll() is None, "the premise: it is killed in its second attempt"
    os.killpg(run.pid, signal.SIGKILL)
    run.wait()
    (kept,), before = journaled(), {log: answered(log) for log in world.logs()}
    harness = str(world.folder / "harness.py")
    until(lambda: not any(harness in process.info["cmdline"] for process in _processes()), 20, every=0.2)
    world.collect(env=', PAUSE = "2"')
    again = [log for log in world.logs() if log not in before]
    assert len(again) == 1 and not again[0].name.startswith(kept)
    assert {log: answered(log) for log in before} == before, "calls of a killed attempt stay, and nothing joins them"
    assert [json.loads(row["outcome"])["details"]["capture"]["calls"] for row in world.rows("rollouts")] == [2, 2]
    finished = [log for log in world.logs() if log.name.startswith(kept)] + again
    sampled = [ids for log in finished for ids in answered(log)]
    assert sorted(sampled) == sorted(row["output_ids"] for row in world.rows("turns"))


def _processes():
    return [process for process in psutil.process_iter(["cmdline"]) if process.info["cmdline"]]


def test_a_harness_without_a_call_is_an_infrastructure_error(world):
    (world.folder / "harness.py").write_text("import os; print('no model', os.environ['KEY'])")
    outcome = world.collect()
    assert outcome.metadata["first_error"] == "harness: RuntimeError: custom made no call, exit 0: no model [key]\n"


def test_a_harness_that_changes_the_task_is_an_infrastructure_error(world):
    (world.folder / "harness.py").write_text(HARNESS.replace("open(sys.argv[1]).read()", '"Do something."'))
    assert "and no conversation contains the task" in world.collect().metadata["first_error"]


def test_only_the_proxy_can_be_reached(world):
    probe = """
import glob, socket, sys
def reaches(family, address):
    with socket.socket(family) as s:
        s.settimeout(1)
        try: s.connect(address); return True
        except OSError: return False
print("REACHES", reaches(socket.AF_INET, ("127.0.0.1", 8200)), reaches(socket.AF_INET, ("127.0.0.1", PORT)),
      reaches(socket.AF_INET, ("1.1.1.1", 80)), sorted(p.split("/")[-1] for p in glob.glob("/run/downloads/*")))
"""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = str(listening.getsockname()[1])
        (world.folder / "harness.py").write_text(probe.replace("PORT", port))
        error = world.collect().metadata["first_error"]
    assert "REACHES True False False ['file0', 'forward.py', 'socket', 'start.sh']" in error


def test_an_attempt_without_ids_stops_the_collection(world, monkeypatch):
    complete = ScriptedEngine.complete

    def no_ids(self, requests):
        return [replace(done, prompt_ids=None, output_ids=None) for done in complete(self, requests)]

    monkeypatch.setattr(ScriptedEngine, "complete", no_ids)
    with pytest.raises(EngineUnavailable, match="return_token_ids"):
        world.collect()
    monkeypatch.setattr(ScriptedEngine, "complete", complete)
    assert world.collect().metadata["captures"] == {"native": 4}


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("codex", "codex 0.171.0 is to run, but .* has none: npm install --prefix"),
        ("mini-swe-agent", "/usr/bin/python3 -m venv"),
    ],
)
def test_a_harness_that_is_not_installed_stops_before_the_first_attempt(world, name, why):
    write_spec(
        world.root / "specs",
        "rollout_sets",
        "foreign",
        SPEC.format(folder=world.folder, more="", env="").replace("custom", name).replace('version = "1"', ""),
    )
    with pytest.raises(EngineUnavailable, match=why):
        raw_rollouts.execute("foreign", Resources(lake=world.lake, specs_folder=world.root / "specs"))


def test_a_template_without_later_system_messages_stops_before_the_first_attempt(world, monkeypatch):
    from etpi_resources.chat.roles import Roles

    monkeypatch.setattr(Roles, "probe", classmethod(lambda cls, *a, **k: Roles(later_system=False)))
    from etpi_resources.chat.format import load_chat_format

    load_chat_format.cache_clear()
    with pytest.raises(EngineUnavailable, match="custom .*'tiny'"):
        world.collect("later_system = true")
    load_chat_format.cache_clear()
    assert not world.logs()


OPENAI = {"kind": "openai", "teacher": "t", "model": "m", "urls": ["http://h"]}
HEAD = {"title": "t", "suite": "s", "engine": {"kind": "reference", "teacher": "r"}}
CUSTOM = {"name": "custom", "version": "1", "folder": "/x", "command": "run"}


def test_specs_of_harnesses():
    spec = RolloutSetSpec.model_validate(
        {**HEAD, "kind": "agent", "harness": {"name": "codex", "folder": "/x", "max_calls": 3}}
    )
    assert spec.agent.harness and spec.agent.harness.version == "0.171.0" and spec.agent.harness.max_calls == 3
    assert RolloutSetSpec.model_validate(spec.model_dump(mode="json")) == spec
    assert "harness" not in RolloutSetSpec.model_validate({**HEAD, "kind": "live"}).model_dump(mode="json")
    assert EvaluateSection.model_validate({"suite": "s", "harness": CUSTOM}).agent.harness
    for wrong, why in (
        ({"kind": "agent"}, 'kind = "agent" .*\\[harness\\]'),
        ({"kind": "live", "harness": CUSTOM}, 'kind = "agent" .*\\[harness\\]'),
        ({"kind": "agent", "harness": {**CUSTOM, "command": "run --key {key}"}}, r"harness\.command .*\{key\}"),
        ({"kind": "agent", "harness": CUSTOM, "engine": OPENAI}, 'engine.kind = "openai"'),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=why):
            RolloutSetSpec.model_validate({**HEAD, **wrong})


def test_an_evaluation_in_another_harness_or_version_warns():
    def of(**more):
        return RolloutSetSpec.model_validate({**HEAD, "kind": "agent", "harness": {**CUSTOM, **more}})

    live = RolloutSetSpec.model_validate({**HEAD, "kind": "live"})
    imported = RolloutSetSpec.model_validate({"title": "t", "kind": "imported", "format": "capture", "path": "x"})
    own, theirs = EvaluateSection(suite="s").agent, of().agent
    for agent, sets, same in (
        (theirs, [of(max_calls=9)], True),
        (theirs, [of(version="2")], False),
        (theirs, [of(), live], False),
        (own, [of()], False),
        (own, [live], True),
        (theirs, [imported], True),
    ):
        outcome = harness_as_trained(agent, sets)
        assert (outcome.passed, outcome.blocking) == (same, False), outcome.message
