"""Collect rollouts for a long time from two vLLM servers that fail in every way; show what entered the lake.

    python bench/soak.py --minutes 30 [--tasks 256] [--rate 0.05]

Rounds of `--tasks` rollouts of two agents, 64 at once, in real sandboxes. The first round has no faults. In the others
a share of requests is answered late, cut, with an error, with another model's answer or with wrong ids, and all are
refused for 2 s in every 20. In every third round a server restarts with other weights under the same name. The run
must stop; then the server gets its first weights back and the run is repeated. After each round:

- every rollout is in the published version once, and all checks pass;
- every turn has the ids that a faultless server gives for its prompt;
- memory, threads, open files and child processes do not grow.

The servers are tests/support/faulty_server.py, whose answers are a function of the prompt.
"""

from __future__ import annotations

import argparse
import gc
import socket
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

import psutil
from machine import machine

from etpi_assets.resources import Resources
from etpi_assets.rollouts.assets import raw_rollouts
from etpi_assets.tasks.assets import tasks as tasks_asset
from etpi_resources.chat.format import load_chat_format
from etpi_resources.engines import EngineUnavailable
from etpi_resources.lake.lake import Lake, Ref

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
from tests.support.faulty_server import NAME, reply  # noqa: E402
from tests.support.graph import write_spec  # noqa: E402

RESTART_EVERY = 3
"""In every third round a server restarts with other weights."""
MIDWAY = 2
"""So many rollouts are finished before."""
ATTEMPTS = 10
"""A run that stops is started again at most so often in a round."""
SET = """
title = "A set for the soak"
kind = "live"
suite = "soak"
seed = {seed}
[engine]
kind = "vllm"
teacher = "teacher"
model = "{model}"
urls = [{urls}]
[agent]
tokenizer = "tiny"
max_steps = 8
max_model_len = 4096
max_tokens = 128
"""


@dataclass
class Round:
    """The figures of one round; see `main`."""

    number: int
    tasks: int
    seconds: float = 0.0
    restarts: int = 0
    stops: list[str] = field(default_factory=list)
    rollouts: int = 0
    errors: int = 0
    wrong: list[str] = field(default_factory=list)
    megabytes: float = 0.0
    threads: int = 0
    files: int = 0
    children: int = 0


class Servers:
    """Two faulty servers as processes of their own, on fixed ports; a context manager."""

    def __init__(self) -> None:
        self._ports = [_free_port() for _ in range(2)]
        self._processes: dict[int, subprocess.Popen[str]] = {}

    @property
    def urls(self) -> list[str]:
        return [f"http://127.0.0.1:{port}" for port in self._ports]

    def __enter__(self) -> Servers:
        self.start(0.0)
        return self

    def __exit__(self, *exc: object) -> None:
        for place in list(self._processes):
            self.stop(place)

    def start(self, rate: float, weights: int = 0, places: tuple[int, ...] = (0, 1)) -> None:
        """Start these servers, again if they run."""
        for place in places:
            self.stop(place)
            words = [
                "--port",
                self._ports[place],
                "--weights",
                weights,
                "--rate",
                rate,
                "--seed",
                time.time_ns() % 10**6,
            ]
            process = subprocess.Popen(
                [sys.executable, "-m", "tests.support.faulty_server", *map(str, words)],
                cwd=ROOT, stdout=subprocess.PIPE, text=True,
            )  # fmt: skip
            assert process.stdout is not None and process.stdout.readline() == "ready\n"
            self._processes[place] = process

    def stop(self, place: int) -> None:
        if process := self._processes.pop(place, None):
            process.kill()
            process.wait()
            if process.stdout:
                process.stdout.close()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def play(folder: Path, servers: Servers, number: int, tasks: int, rate: float) -> Round:
    """Collect one rollout set, with a restart in every third round, and verify what was published."""
    row, began = Round(number, tasks), time.monotonic()
    servers.start(rate)
    urls = ", ".join(f'"{url}"' for url in servers.urls)
    name = f"soak_{number}"
    write_spec(folder / "specs", "rollout_sets", name, SET.format(seed=number, model=NAME, urls=urls))
    resources = Resources(lake=Lake(folder / "data"), specs_folder=folder / "specs")
    journals = resources.lake.scratch(f"rollouts/{name}")
    restarting = threading.Thread(target=_restart_midway, args=(row, servers, rate, journals), daemon=True)
    if number % RESTART_EVERY == 0:
        restarting.start()
    for _ in range(ATTEMPTS):
        try:
            raw_rollouts.execute(name, resources, log=lambda line: None)
            break
        except EngineUnavailable as error:
            row.stops.append(str(error))
            if "other weights" in str(error):
                restarting.join()
                servers.start(rate, 0, (1,))
    if number % RESTART_EVERY == 0:
        restarting.join()
    row.seconds = time.monotonic() - began
    _judge(row, resources.lake, name)
    _footprint(row)
    return row


def _restart_midway(row: Round, servers: Servers, rate: float, journals: Path) -> None:
    """Start the second server again with other weights when some rollouts are finished.

    The restart is counted, and so must be noticed, only if the run still waits for a rollout when the server stops.
    """
    while _finished(journals) < MIDWAY:
        time.sleep(0.02)
    servers.stop(1)
    row.restarts = int(_finished(journals) < row.tasks)
    servers.start(rate, 1, (1,))


def _finished(journals: Path) -> int:
    return sum(path.read_bytes().count(b"\n") for path in journals.rglob("journal-*[0-9a-f].jsonl"))


def _judge(row: Round, lake: Lake, name: str) -> None:
    """Count rollouts and errors, and compare every turn with the answer of a faultless server."""
    ref, chat = Ref("raw_rollouts", "rollout_set", name), load_chat_format("tiny")
    manifest = lake.current(ref)
    if manifest is None:
        row.wrong.append("nothing was published")
        return
    row.wrong += [f"{check['name']}: {check['message']}" for check in manifest.checks if not check["passed"]]
    rollouts = lake.read(ref, "rollouts").to_pylist()
    row.rollouts, row.errors = len({r["rollout_id"] for r in rollouts}), sum(r["error"] is not None for r in rollouts)
    if len(rollouts) != row.rollouts:
        row.wrong.append(f"{len(rollouts) - row.rollouts} rollouts twice")
    whole: dict[tuple[str, str, int], list[int]] = {}
    for turn in lake.read(ref, "turns").sort_by([("rollout_id", "ascending"), ("turn", "ascending")]).to_pylist():
        key = turn["rollout_id"], turn["agent_id"]
        prompt = [*whole.get((*key, turn["prefix_turn"]), []), *turn["suffix_ids"]]
        whole[(*key, turn["turn"])] = [*prompt, *turn["output_ids"]]
        if turn["output_ids"] != [*chat.encode(reply(chat, prompt)), chat.end_id]:
            row.wrong.append(f"turn {turn['turn']} of {key} has other ids than the server's answer")
    if row.restarts and not any("other weights" in stop for stop in row.stops):
        row.wrong.append("nobody noticed the restart with other weights")


def _footprint(row: Round) -> None:
    gc.collect()
    process = psutil.Process()
    row.megabytes = process.memory_info().rss / 1e6
    row.threads, row.files = process.num_threads(), process.num_fds()
    row.children = len(process.children(recursive=True))


def show(row: Round) -> None:
    """Print a row of the table."""
    cells = (
        row.number, row.rollouts, f"{row.seconds:.0f}", row.errors, len(row.stops), row.restarts, len(row.wrong),
        f"{row.megabytes:.0f}", row.threads, row.files, row.children,
    )  # fmt: skip
    print("| " + " | ".join(map(str, cells)) + " |", flush=True)
    for line in (*row.stops, *row.wrong[:5]):
        print(f"  {line[:300]}", flush=True)


def soak(folder: Path, minutes: float, tasks: int, rate: float) -> list[Round]:
    """Play rounds for that number of minutes, at least one of each kind, and return them."""
    write_spec(
        folder / "specs", "suites", "soak", f'extends = "coop_tiny_shared"\n[params]\ntrain = {tasks}\nheldout = 24\n'
    )
    lake = Lake(folder / "data")
    tasks_asset.execute("soak", Resources(lake=lake, specs_folder=folder / "specs"), log=lambda line: None)
    rows, deadline = list[Round](), time.monotonic() + minutes * 60
    with Servers() as servers:
        while len(rows) < RESTART_EVERY or time.monotonic() < deadline:
            rows.append(play(folder, servers, len(rows) + 1, tasks, rate if rows else 0.0))
            show(rows[-1])
    return rows


def main() -> int:
    """Print a row for each round; return 1 if anything wrong was published."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--tasks", type=int, default=256, help="rollouts in a round")
    parser.add_argument("--rate", type=float, default=0.05, help="share of requests with a fault")
    options = parser.parse_args()
    print(machine(), flush=True)
    print(
        "| round | rollouts | s | infrastructure errors | stops | restarts | wrong | MB | threads | files | children |"
    )
    print("|---|---|---|---|---|---|---|---|---|---|---|", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        rows = soak(Path(folder), options.minutes, options.tasks, options.rate)
    rollouts, errors = sum(row.rollouts for row in rows), sum(row.errors for row in rows)
    print(f"{len(rows)} rounds, {rollouts} rollouts, {errors} with an infrastructure error")
    return 1 if any(row.wrong for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
