"""Several checkpoints served at once, and the evaluation of all their conditions at once."""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from etpi_assets.agent.loop import RolloutRuntime
from etpi_assets.evaluation.rollouts import conditions, roll_out
from etpi_assets.rollouts.teachers import reference_policy
from etpi_assets.specs.experiment import EvaluateSection
from etpi_assets.tasks.family import Task
from etpi_assets.worlds.coop_tiny_shared import CoopTinyShared
from etpi_resources.chat.format import load_chat_format
from etpi_resources.chat.tokenizer_files import PROBE
from etpi_resources.engines import Completion, Engine, Request
from etpi_resources.engines.scripted import ScriptedEngine
from etpi_resources.engines.serving import Checkpoint, VllmServing
from etpi_resources.engines.vllm import VllmEngine
from etpi_resources.engines.vllm_server import PROGRAM_VARIABLE
from etpi_resources.sandboxes.bubblewrap import BubblewrapFactory

# It answers once a second server has started.
PROGRAM = f"""#!{sys.executable}
import json, os, pathlib, signal, sys, time
sys.path.insert(0, {str(Path(__file__).parents[2])!r})
from tests.support.web_server import WebServer
folder, options = pathlib.Path(sys.argv[2]), dict(zip(sys.argv[3::2], sys.argv[4::2]))
(folder.parent / (folder.name + ".started")).touch()
while len([*folder.parent.glob("*.started")]) < 2:
    time.sleep(0.01)
models = {{"data": [{{"id": options["--served-model-name"], "root": str(folder)}}]}}
tokens = {{"tokens": json.loads(os.environ["PROBE_IDS"])}}
def respond(request):
    request.reply(200, models if request.command == "GET" else tokens)
with WebServer(respond, int(options["--port"])):
    signal.pause()
"""
CHAT = load_chat_format("tiny")


def end_of(engine: Engine) -> Callable[[], str | None]:
    """Return the function that says why the engine's server ended; None while it runs."""
    assert isinstance(engine, VllmEngine)
    return engine.exit_reason


def test_servers_of_several_checkpoints_start_together_and_none_in_use_is_ended(tmp_path, monkeypatch):
    program = tmp_path / "vllm"
    program.write_text(PROGRAM)
    program.chmod(0o755)
    monkeypatch.setattr("etpi_resources.engines.vllm_server.START_SECONDS", 60.0)
    monkeypatch.setenv(PROGRAM_VARIABLE, str(program))
    monkeypatch.setenv("PROBE_IDS", json.dumps(CHAT.encode(PROBE)))
    first, second, third = (Checkpoint(tmp_path / role, role[0] * 64, role) for role in ("base", "sft", "rl"))
    more: Any = {"options": {}, "template_kwargs": {}, "logs": tmp_path / "logs", "lock": tmp_path / "lock"}
    with closing(VllmServing(CHAT, [first, second, third], **more, at_once=2)) as serving:
        with serving.engine(first) as engine:
            ended = end_of(engine)
        with serving.engine(second) as engine:
            assert ended() is None
            kept = end_of(engine)
            with serving.engine(third) as other:
                assert ended() and kept() is None and end_of(other)() is None
        with serving.engine(first):
            assert kept()


class Waiting(ScriptedEngine):
    """Answers first turns once all of them have been requested."""

    all_there: threading.Barrier

    def complete(self, requests: Sequence[Request]) -> list[Completion]:
        if requests[0].request_id.endswith("/0"):
            self.all_there.wait(60)
        return super().complete(requests)


def test_all_conditions_of_all_served_checkpoints_run_at_once(tmp_path: Path):
    family = CoopTinyShared()
    tasks = [t for t in family.load("coop_tiny_shared", 0, {"train": 1, "heldout": 1}) if isinstance(t, Task)][:1]
    # Two trainings that end with the same weights share their rollouts.
    trained = [Checkpoint(tmp_path, "s" * 64, "sft", seed=seed) for seed in (0, 1)]
    checkpoints = [Checkpoint(tmp_path, "b" * 64, "base"), *trained]
    Waiting.all_there = threading.Barrier(4)
    planned = conditions(EvaluateSection(suite="coop_tiny_shared"), "sft")
    engines = [Waiting(reference_policy(family), CHAT, c.name) for c in checkpoints]
    runtimes = [RolloutRuntime(family, engine, BubblewrapFactory(), CHAT) for engine in engines]
    served = [(c, runtime, planned) for c, runtime in zip(checkpoints, runtimes, strict=True)]
    rows = [
        (record.checkpoint_role, record.seed, record.decoding, record.error)
        for record in roll_out(served, tasks, tmp_path, experiment="e")
    ]
    named = [("base", None), ("sft", 0), ("sft", 1)]
    assert rows == [(*name, decoding, None) for name in named for decoding in ("greedy", "t1")]
