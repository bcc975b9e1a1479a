"""Experiments side by side: each lane a process of its own that runs one experiment after the other.

Belongs here: how many lanes, what a lane is told and answers, and its share of the machine. Does not belong here: what
brings an experiment (`runner`), the tables across experiments, which come after (`cli`), or the look of what is shown
(`console`).

A network of the embedded world keeps little more than one core busy, so on a machine without an accelerator two
experiments at once take little longer than one. Not so where both rest on what is not made yet: one makes it and the
other waits. So a lane takes what has least in common with what the others run. It runs under the supervisor, so it ends
with whoever started it, and everything it started with it.

The protocol: a lane reads names of experiments on its stdin, a line each, and writes events on its stdout, a JSON
object a line, of one key: `line` (text to show), `activity` (fields of an `Activity`, or null), and, once for each
experiment, `failures` (why it failed, a line a step; empty where it succeeded). Anything else that its jobs print goes
to stderr.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from threading import Lock
from typing import IO, Any, TextIO

from etpi_assets.graph import GRAPH, JOBS
from etpi_assets.resources import accelerators
from etpi_assets.runs.runner import Runner
from etpi_assets.specs.load import Specs, load_specs
from etpi_resources.process.progress import WORKER_VARIABLE, Activity, display, shown_on
from etpi_resources.process.supervise import supervised

MOST = 4
"""Lanes; each holds a base, a batch in training and an interpreter: some 1 GB."""

OWN = tuple(name for name in JOBS["run_experiment"][1] if GRAPH[name].set == "experiment")
"""What a lane makes of an experiment: the rest is across experiments."""


def lanes_here(experiments: int) -> int:
    """How many lanes for so many experiments: one where an accelerator is shared by all, else one a core."""
    return 1 if accelerators() else max(1, min(experiments, os.cpu_count() or 1, MOST))


def side_by_side(
    names: Sequence[str], specs: Specs, specs_folder: Path | None = None, consent: Collection[str] = ()
) -> dict[str, list[str]]:
    """Run experiments, as many at once as there are lanes: why each failed, in order; empty where it succeeded.

    Args:
        consent: as for `Runner`.

    Raises:
        KeyboardInterrupt: this process was asked to stop; the lanes have ended.
    """
    lanes = lanes_here(len(names))
    waiting = Waiting({name: rests_on(name, specs) for name in names})
    started: list[subprocess.Popen[str]] = []
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    with ThreadPoolExecutor(lanes) as pool:
        try:
            started += (_start(number, lanes, specs_folder, consent) for number in range(lanes))
            served = pool.map(lambda lane: _serve(lane, waiting), started)
            ended = {name: failures for answers in served for name, failures in answers.items()}
        except BaseException:
            for lane in started:
                lane.terminate()
            raise
        finally:  # the pool waits for its threads, and they for their lanes
            for lane in started:
                lane.wait()
            signal.signal(signal.SIGTERM, before)
    return {name: ended.get(name, ["no process was left to run it"]) for name in names}


class Waiting:
    """Experiments that no lane has taken yet, in order."""

    def __init__(self, parts: Mapping[str, Collection[str]]) -> None:
        """`parts`: what each rests on, by name."""
        self._parts = {name: frozenset(found) for name, found in parts.items()}
        self._left, self._running, self._lock = list(parts), list[str](), Lock()

    def taken(self) -> Iterator[str]:
        """One lane's experiments; each counts as running until the next is asked for, or the iterator is closed."""
        while name := self._take():
            try:
                yield name
            finally:
                with self._lock:
                    self._running.remove(name)

    def _take(self) -> str | None:
        with self._lock:
            if not self._left:
                return None
            name = min(self._left, key=self._in_common)
            self._left.remove(name)
            self._running.append(name)
            return name

    def _in_common(self, name: str) -> int:
        return sum(len(self._parts[name] & self._parts[other]) for other in self._running)


def rests_on(name: str, specs: Specs) -> set[str]:
    """Names of what an experiment rests on that others may rest on too: suites, rollout sets, and its base."""
    keys = {
        f"{kind} {key}" for kind in ("suite", "rollout_set") for key in specs.upstream_keys("experiment", name, kind)
    }
    return keys | {f"base {specs.experiments[name].base.model_dump_json()}"}


def _start(number: int, lanes: int, specs_folder: Path | None, consent: Collection[str]) -> subprocess.Popen[str]:
    threads = str(max(1, (os.cpu_count() or 1) // lanes))
    return subprocess.Popen(
        supervised([sys.executable, "-m", "etpi_assets.runs.pool", str(specs_folder or ""), *sorted(consent)]),
        env={"OMP_NUM_THREADS": threads, **os.environ, WORKER_VARIABLE: str(number)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def _serve(lane: subprocess.Popen[str], waiting: Waiting) -> dict[str, list[str]]:
    """Hand names to a lane until none waits, then let it end: the failures of each. A lane that dies fails what it
    had."""
    assert lane.stdin and lane.stdout
    ended: dict[str, list[str]] = {}
    with suppress(BrokenPipeError), lane.stdout, lane.stdin:
        for name in waiting.taken():
            ended[name] = ["the process that ran it was killed; the machine may have run out of memory"]
            print(name, file=lane.stdin, flush=True)
            if (failures := _answer(lane.stdout, source=str(lane.pid))) is None:
                break
            ended[name] = failures
    return ended


def _answer(events: IO[str], source: str) -> list[str] | None:
    """Show a lane's events until it answers: the failures of its experiment; None where the lane died."""
    try:
        for text in events:
            event = json.loads(text)
            if "line" in event:
                display().line(event["line"])
            elif "activity" in event:
                display().show(Activity(**event["activity"]) if event["activity"] else None, source)
            else:
                return event["failures"]
        return None
    finally:
        display().show(None, source)


class LaneDisplay:
    """Sends everything to the process that started this lane."""

    def __init__(self, events: TextIO) -> None:
        self._events, self._lock = events, Lock()

    def line(self, text: str) -> None:
        self.send({"line": text})

    def show(self, activity: Activity | None, source: str = "") -> None:
        self.send({"activity": asdict(activity) if activity else None})

    def send(self, event: Mapping[str, Any]) -> None:
        """Write an event."""
        with self._lock:
            print(json.dumps(event), file=self._events, flush=True)


def main(arguments: Sequence[str]) -> int:
    """A lane's own process: `python -m etpi_assets.runs.pool SPECS [CONSENT ...]`; SPECS may be empty."""
    answers = LaneDisplay(os.fdopen(os.dup(sys.stdout.fileno()), "w"))
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    folder = Path(arguments[0]) if arguments and arguments[0] else None
    with shown_on(answers):
        runner = Runner(load_specs(folder), folder, arguments[1:])
        try:
            for line in sys.stdin:
                answers.send({"failures": runner.bring(line.strip(), OWN)})
        except KeyboardInterrupt:
            return 130
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
