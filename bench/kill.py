"""Kill runs at random moments in every stage, run them again, and compare the lake with that of an undisturbed run.

    python bench/kill.py 100 --folder FOLDER [--only kill_data] [--seed 0]

Each experiment runs undisturbed once. Then its runs are killed in one asset after the other, at a random moment of
each, until the experiment is finished; this repeats until there were enough kills. In turn, SIGKILL or SIGINT goes to
the client's process group (Ctrl-C), and to the code server, to the process of the run or to the client alone. After
each, the client ends, no process of the lake is alive, and every pointer, manifest, file and checkpoint is whole. At
the end:

- tables equal those of the undisturbed run, except for times;
- tables with samples of a student have the same keys: every step, sample and rollout once;
- no rollout that was finished before a kill was run again;
- nothing is left in the folders of unfinished work.

Finished experiments are listed in FOLDER/kills.json; the same command continues after them. `kill_rl_vllm` needs vLLM
and is skipped, with a message, where it is not installed.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path

import psutil
import pyarrow as pa
from machine import machine

from etpi_assets.asset import label
from etpi_assets.graph import GRAPH
from etpi_resources.engines.endpoints import EngineUnavailable
from etpi_resources.engines.vllm_server import vllm_program
from etpi_resources.lake.audit import audit
from etpi_resources.lake.lake import Lake, Ref
from etpi_resources.lake.parquet import read

GRACE = 20.0
"""Seconds within which every process of a killed run must have ended."""
LONG = 4.0
"""Seconds from which on an asset is killed twice."""
RESTART = 3.0
"""Seconds that a run needs until it continues with the first unfinished asset."""

VICTIMS = {"code server": "dagster api grpc", "worker": "multiprocessing.spawn"}
"""Parts of the command lines of processes below the client."""
END = 120.0
"""Seconds within which a client must have ended whose runs cannot go on."""
STRIKES = (
    ("group", signal.SIGKILL), ("client", signal.SIGKILL), ("code server", signal.SIGKILL), ("worker", signal.SIGKILL),
    ("group", signal.SIGINT), ("client", signal.SIGINT), ("code server", signal.SIGINT), ("worker", signal.SIGINT),
)  # fmt: skip
"""Processes and signals, in the order in which they are used; SIGINT to the group is a Ctrl-C at the terminal."""

SUITES = {
    "kill_coop": 'extends = "coop_tiny_shared"\n[params]\ntrain = 40\nheldout = 20\n',
    "kill_terminal": 'extends = "terminal_tiny"\n[params]\ntrain = 60\nheldout = 12\n',
}
ROLLOUT_SETS = {
    "kill_coop_strong": 'extends = "coop_tiny_shared_strong"\nsuite = "kill_coop"\ntasks = 24\nk = 1\n',
    "kill_terminal_teacher": 'extends = "terminal_tiny_teacher"\nsuite = "kill_terminal"\ntasks = 60\n',
}
_NO_GATES = "teacher = {}\nformat_exposure = 0\nrole_balance = 0.0\nplan_paths_in_task = 0.0\n"
# A student this untrained earns none of the other rewards.
_RL = (
    'suite = "kill_terminal"\nsteps = 6\nsave_steps = 2\ndevice_batch = 16\nlearning_rate = 1e-3\n'
    'rewards = [{function = "conciseness_unhardened", params = {free = 0, scale = 100}}]\n'
)
_REINFORCED = (
    'extends = "terminal_grpo_tiny"\nrollout_sets = ["kill_terminal_teacher"]\n[train]\nepochs = 2.0\n'
    '[evaluate]\nsuite = "kill_terminal"\ntasks = 8\n[probe]\nmin_parse = 0.0\n'
)
EXPERIMENTS = {
    "kill_data": 'extends = "plan_first_tiny"\nrollout_sets = ["kill_coop_strong"]\nevaluate = "none"\n'
    '[base]\nkind = "none"\ntokenizer = "tiny"\nchat_template = "tiny"\n'
    f'[train]\nmethod = "none"\n[gates]\n{_NO_GATES}',
    "kill_sft": 'extends = "plan_first_tiny"\nrollout_sets = ["kill_coop_strong"]\n[train]\nepochs = 1.0\n'
    f'[evaluate]\nsuite = "kill_coop"\ntasks = 4\n[probe]\nmin_parse = 0.0\n[gates]\n{_NO_GATES}',
    "kill_rl": f"{_REINFORCED}[rl]\n{_RL}",
    "kill_rl_vllm": f'{_REINFORCED}[rl]\nengine = "vllm"\n{_RL}',
}
"""Small experiments that together run every asset."""

BY_A_MODEL = {
    "rl_checkpoint", "serving_probe", "eval_rollouts", "eval_metrics", "rl_rewards", "leaderboard",
}  # fmt: skip
"""Assets with samples of a model, which depend on the machine's load: requests that share a batch are rounded alike."""
KEYS = {
    "training_log": ("step",),
    "rl_samples": ("step", "place"),
    "rollouts": ("task_id", "sample", "seed", "checkpoint_role", "decoding"),
    "metrics": ("checkpoint_role", "seed", "decoding", "metric"),
    "leaderboard": ("experiment", "checkpoint_role", "decoding", "metric"),
}
"""The keys that are compared in tables of BY_A_MODEL; of others, nothing is compared."""


@dataclass
class Attempt:
    """An experiment that was killed until it was finished.

    Attributes:
        during: for each kill, the asset that was the next to be finished.
        struck: for each kill, the process and the signal.
        differences: everything that violates an invariant; empty if all hold.
    """

    experiment: str
    seed: int
    during: list[str] = field(default_factory=list)
    struck: list[str] = field(default_factory=list)
    differences: list[str] = field(default_factory=list)
    seconds: float = 0.0


class Run:
    """A running `etpi run EXPERIMENT`; reads from the lake which assets are finished."""

    def __init__(self, folder: Path, lake: Path, experiment: str) -> None:
        environment = {name: value for name, value in os.environ.items() if not name.startswith(("ETPI_", "DAGSTER_"))}
        environment |= {"ETPI_DATA": str(lake), "ETPI_SPECS": str(folder / "specs"), "PYTHONUNBUFFERED": "1"}
        if "ETPI_VLLM" in os.environ:
            environment["ETPI_VLLM"] = os.environ["ETPI_VLLM"]
        self.finished: list[tuple[str, float]] = []
        self.lines: list[str] = []
        self._news = threading.Condition()
        self._ended = False
        self.start = time.monotonic()
        self._process = subprocess.Popen(
            [sys.executable, "-m", "etpi", "run", experiment],
            cwd=folder, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            text=True, start_new_session=True,
        )  # fmt: skip
        self._threads = [
            threading.Thread(target=work, daemon=True) for work in (self._read, lambda: self._watch(Lake(lake)))
        ]
        for thread in self._threads:
            thread.start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        self.lines += (line.rstrip() for line in self._process.stdout)

    def _watch(self, lake: Lake) -> None:
        while not self._ended:
            self._ended = self._process.poll() is not None
            labels = [label(ref.asset, ref.key) for asset in GRAPH for ref in lake.refs(asset)]
            known = {name for name, _ in self.finished}
            with self._news:
                self.finished += [(name, time.monotonic() - self.start) for name in labels if name not in known]
                self._news.notify_all()
            time.sleep(0.1)

    def wait_for(self, label: str) -> bool:
        """Wait until that asset is finished; return False if the run ended before."""
        with self._news:
            self._news.wait_for(lambda: self._ended or any(label == name for name, _ in self.finished))
            return any(label == name for name, _ in self.finished)

    def strike_after(self, seconds: float, name: str, number: int) -> bool:
        """Signal a process after that number of seconds; return False if the run ended by itself before."""
        try:
            self._process.wait(seconds)
            return False
        except subprocess.TimeoutExpired:
            pass
        while self._process.poll() is None:
            if name == "group":
                os.killpg(self._process.pid, number)
            elif pid := self._process.pid if name == "client" else self._below(VICTIMS[name]):
                os.kill(pid, number)
            else:
                time.sleep(0.05)  # it is not there yet
                continue
            return True
        return False

    def end(self) -> bool:
        """Wait until a struck client has ended; after END seconds, kill its process group and return False."""
        try:
            self.wait(END)
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, signal.SIGKILL)
            self.wait()
            return False
        return True

    def _below(self, part: str) -> int | None:
        for process in psutil.Process(self._process.pid).children(recursive=True):
            with suppress(psutil.Error):
                line = " ".join(process.cmdline())
                if part in line and "supervise.py" not in line:
                    return process.pid
        return None

    def wait(self, seconds: float | None = None) -> int:
        """Wait for its end and return its exit status. Raises subprocess.TimeoutExpired."""
        status = self._process.wait(seconds)
        for thread in self._threads:
            thread.join(GRACE)
        return status


def undisturbed(folder: Path, experiment: str) -> tuple[Path, list[tuple[str, float]]]:
    """Run an experiment without kills, unless an earlier call did; return its lake and [(asset, seconds)] in order.

    Raises:
        SystemExit: it failed.
    """
    place = folder / "undisturbed" / experiment
    lake, timeline = place / "data", place / "timeline.json"
    if not timeline.exists():
        shutil.rmtree(place, ignore_errors=True)
        place.mkdir(parents=True)
        run = Run(folder, lake, experiment)
        if run.wait():
            sys.exit(f"{experiment} fails without a kill:\n" + "\n".join(run.lines[-15:]))
        moments = [0.0, *(at for _, at in run.finished)]
        gaps = [(label, at - before) for (label, at), before in zip(run.finished, moments, strict=False)]
        timeline.write_text(json.dumps(gaps))
    return lake, [(label, float(seconds)) for label, seconds in json.loads(timeline.read_text())]


def killed_until_finished(folder: Path, experiment: str, seed: int, most: int, kills: int) -> Attempt:
    """Kill an experiment up to `most` times, each time in a later asset, finish it and compare.

    Args:
        kills: the number of kills before, which decides which of STRIKES comes next.
    """
    attempt, rng, began = Attempt(experiment, seed), random.Random(f"{experiment} {seed}"), time.monotonic()
    reference, timeline = undisturbed(folder, experiment)
    lake = folder / "killed" / experiment / "data"
    shutil.rmtree(lake.parent, ignore_errors=True)
    lake.mkdir(parents=True)
    targets = [place for place, (_, seconds) in enumerate(timeline) for _ in range(2 if seconds > LONG else 1)]
    chosen = sorted(rng.sample(targets, min(most, len(targets))))
    done: set[str] = set()
    started: dict[str, str] = {}
    for place in chosen:
        if timeline[place][0] in done:
            continue
        name, sent = STRIKES[(kills + len(attempt.struck)) % len(STRIKES)]
        run = Run(folder, lake, experiment)
        before = timeline[place - 1][0] if place else None
        if before and before not in done:
            run.wait_for(before)
            span = timeline[place][1]
        else:
            span = RESTART + timeline[place][1]
        if not run.strike_after(rng.uniform(0, span), name, sent):
            if status := run.wait():
                attempt.differences.append(f"ended with {status} before a kill: " + " | ".join(run.lines[-5:]))
            break
        ended = run.end()
        done |= {label for label, _ in run.finished}
        attempt.during.append(next((label for label, _ in timeline if label not in done), "the end"))
        attempt.struck.append(f"{name} {sent.name}")
        print(f"  {attempt.struck[-1]} before {attempt.during[-1]}: the client returned {run.wait()}", flush=True)
        seen = [line for line in run.lines if line.startswith("Traceback")]
        seen += [] if ended else [f"the client lived for {END:.0f} s: " + " | ".join(run.lines[-5:])]
        attempt.differences += [
            f"after {attempt.struck[-1]} before {attempt.during[-1]}: {fault}" for fault in [*seen, *faults(lake)]
        ]
        started = {**_journaled(lake), **started}
    last = Run(folder, lake, experiment)
    if last.wait():
        attempt.differences.append("the last run failed: " + " | ".join(last.lines[-5:]))
    else:
        attempt.differences += [*faults(lake), *unfinished(lake), *differences(reference, lake)]
        attempt.differences += again(lake, started)
    attempt.seconds = time.monotonic() - began
    return attempt


def faults(lake: Path) -> Iterator[str]:
    """Yield the processes of a lake that are alive after GRACE seconds, and everything in it that is damaged."""
    deadline = time.monotonic() + GRACE
    while (alive := list(_processes(lake))) and time.monotonic() < deadline:
        time.sleep(0.1)
    yield from (f"still running: {line}" for line in alive)
    for damage in audit(Lake(lake), deep=True).damages:
        yield f"damaged: {damage.path.relative_to(lake)}: {damage.fault}"


def _processes(lake: Path) -> Iterator[str]:
    """Yield the command lines of processes that name the lake in their arguments or environment."""
    for process in psutil.process_iter():
        try:
            words = process.cmdline()
            if str(lake) in " ".join(words) or process.environ().get("ETPI_DATA") == str(lake):
                yield " ".join(words)[:200]
        except psutil.Error:
            continue


def unfinished(lake: Path) -> Iterator[str]:
    """Yield the files of unfinished work that a finished run left."""
    for folder in (".staging", "scratch/parts", "scratch/reinforce"):
        yield from (f"left behind: {path.relative_to(lake)}" for path in (lake / folder).rglob("*") if path.is_file())


def _journaled(lake: Path) -> dict[str, str]:
    """Return {rollout id: its start, as the journals have it}."""
    started = {}
    for journal in (lake / "scratch").rglob("journal-*.jsonl"):
        for line in journal.read_bytes().splitlines(keepends=True):
            if line.endswith(b"\n"):
                row = json.loads(line)
                started[row["key"]] = str(row["rows"]["rollouts"][0]["started_at"])
    return started


def again(lake: Path, started: dict[str, str]) -> Iterator[str]:
    """Yield the rollouts that the journals had before a kill and have another start of now."""
    now = _journaled(lake)
    yield from (f"rolled out again: {key}" for key, at in started.items() if now.get(key) != at)


def differences(reference: Path, lake: Path) -> Iterator[str]:
    """Yield how the current versions of two lakes differ, times excepted."""
    expected, actual = Lake(reference), Lake(lake)
    if sorted(map(str, expected.refs())) != sorted(map(str, actual.refs())):
        yield f"other partitions: {set(expected.refs()) ^ set(actual.refs())}"
        return
    for ref in expected.refs():
        for table in GRAPH[ref.asset].tables:
            left, right = (_comparable(lake, ref, table) for lake in (expected, actual))
            if (left is None) != (right is None):
                yield f"{ref}: one of the lakes has no version"
            elif left is not None and right is not None and not left.equals(right):
                yield (
                    f"{ref}: {table} has {right.num_rows} rows, {left.num_rows} undisturbed, and they differ"
                    f" in {'; '.join(_columns_that_differ(left, right)) or 'their columns'}"
                )


def _columns_that_differ(left: pa.Table, right: pa.Table) -> Iterator[str]:
    """Yield each column that differs, with its first two values that do."""
    for name in left.column_names:
        if name in right.column_names and left[name] != right[name]:
            pairs = zip(left[name].to_pylist(), right[name].to_pylist(), strict=False)
            yield next((f"{name}: {one} undisturbed, {other}" for one, other in pairs if one != other), name)


def _comparable(lake: Lake, ref: Ref, table: str) -> pa.Table | None:
    """Return what must be equal in both lakes: rows without times, or the sorted keys where a student sampled."""
    if table == "reports":
        return None
    manifest = lake.blocked(ref) or lake.current(ref)
    if manifest is None:
        return None
    rows = read(table, lake.files_of(manifest, table))
    if ref.asset in BY_A_MODEL:
        if table not in KEYS:
            return None
        return rows.select(list(KEYS[table])).sort_by([(name, "ascending") for name in KEYS[table]])
    timed = [field.name for field in rows.schema if "seconds" in field.name or pa.types.is_timestamp(field.type)]
    return rows.drop_columns(timed)


def write_specs(folder: Path) -> None:
    """Write the specs of the experiments into `folder/specs`."""
    for noun, specs in {"suites": SUITES, "rollout_sets": ROLLOUT_SETS, "experiments": EXPERIMENTS}.items():
        (folder / "specs" / noun).mkdir(parents=True, exist_ok=True)
        for name, text in specs.items():
            (folder / "specs" / noun / f"{name}.toml").write_text(text)


def possible() -> list[str]:
    """Return the experiments that can run here."""
    try:
        vllm_program()
        return list(EXPERIMENTS)
    except EngineUnavailable as error:
        print(f"skipped: kill_rl_vllm: {error}")
        return [name for name in EXPERIMENTS if name != "kill_rl_vllm"]


def main() -> int:
    """Kill as often as requested and print what happened; return 1 if an invariant does not hold."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("kills", type=int, nargs="?", default=100)
    parser.add_argument("--folder", type=Path, help="where the lakes are; a temporary folder by default")
    parser.add_argument("--only", choices=list(EXPERIMENTS), help="one of the experiments; all that can run by default")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    print(machine(), flush=True)
    names = [options.only] if options.only else possible()
    with tempfile.TemporaryDirectory() as temporary:
        folder = (options.folder or Path(temporary)).resolve()
        folder.mkdir(parents=True, exist_ok=True)
        return kill(folder, names, options.kills, options.seed)


def kill(folder: Path, names: list[str], kills: int, seed: int) -> int:
    """Kill runs of these experiments until there were so many kills; return 1 if an invariant does not hold."""
    write_specs(folder)
    record = folder / "kills.json"
    attempts = [Attempt(**row) for row in json.loads(record.read_text())] if record.exists() else []
    while (left := kills - (done := sum(len(attempt.during) for attempt in attempts))) > 0:
        number = len(attempts)
        attempt = killed_until_finished(folder, names[number % len(names)], seed + number, left, done)
        attempts.append(attempt)
        record.write_text(json.dumps([asdict(attempt) for attempt in attempts], indent=1))
        state = "equal" if not attempt.differences else "NOT EQUAL"
        print(f"{attempt.experiment}: {len(attempt.during)} kills, {attempt.seconds:.0f} s, {state}", flush=True)
        for line in attempt.differences:
            print(f"  {line}", flush=True)
    _show(attempts)
    return 1 if any(attempt.differences for attempt in attempts) else 0


def _show(attempts: list[Attempt]) -> None:
    during = Counter(label.partition(" of ")[0] for attempt in attempts for label in attempt.during)
    struck = Counter(name for attempt in attempts for name in attempt.struck)
    for title, counts in (("killed before this asset was finished", during), ("process and signal", struck)):
        print(f"\n| {title} | kills |\n|---|---|")
        for name, number in counts.most_common():
            print(f"| {name} | {number} |")
    whole = sum(not attempt.differences for attempt in attempts)
    print(f"\n{during.total()} kills, {len(attempts)} experiments finished, {whole} equal to the undisturbed run")


if __name__ == "__main__":
    sys.exit(main())
