"""Measure the import of recorded runs against DuckDB's `read_json` of the same files, and the growth of memory.

Run: `ETPI_TRAJECTORIES=<folder> python bench/import_runs.py [COPIES]`. It copies each run of `cooperbench-logs` in that
folder COPIES times; without the variable it generates runs of two agents. etpi parses, normalises, reads the actions,
quarantines, checks and publishes four tables; DuckDB only reads the same JSON and writes it as parquet, with one query
per kind of file.
"""

from __future__ import annotations

import json
import os
import random
import resource
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import duckdb
from machine import machine

from etpi_assets.importers.bulk import ImportSource, import_in_bulk
from etpi_resources.lake.lake import Lake, Ref

OPTIONS = {"message_commands": ["coop-send", "coop-broadcast"], "receive_commands": ["coop-recv"]}
KINDS = ("*_traj.json", "result.json", "eval.json", "conversation.json")
ROUNDS = 3


def copied(folder: Path, copies: int) -> Path:
    """Copy the runs `copies` times under different names; return their folder."""
    given = os.environ.get("ETPI_TRAJECTORIES")
    runs = (
        [run for run in (Path(given) / "cooperbench-logs").iterdir() if run.is_dir()]
        if given
        else [write_runs(folder / "made")]
    )
    for run in runs:
        for number in range(copies):
            shutil.copytree(run, folder / "runs" / f"{run.name}_{number:04d}")
    return folder / "runs"


def write_runs(folder: Path) -> Path:
    """Write 24 runs of two agents with some 25 turns each, in the form of adapters for command-line agents."""
    words = random.Random(0)
    for number in range(24):
        run = folder / f"coop/harbor_task/{number}/f1_f2"
        run.mkdir(parents=True)
        agents = {}
        for feature in (1, 2):
            talk = [{"role": "user", "content": "Moor the boat. " * 100}]
            for turn in range(25):
                command = (
                    f"sed -n {turn},{turn + 80}p src/moor_{turn}.py"
                    if turn
                    else f'coop-send agent{3 - feature} "I take it"'
                )
                talk.append({"role": "assistant", "content": f"[tool_use Bash] {json.dumps({'command': command})}"})
                lines = "\n".join(f"{i}\tline {words.random()}" for i in range(words.randrange(20, 100)))
                talk.append({"role": "user", "content": f"[tool_result] {lines}"})
            head = {"repo": "harbor_task", "task_id": number, "feature_id": feature, "agent_id": f"agent{feature}"}
            (run / f"agent{feature}_traj.json").write_text(
                json.dumps({**head, "status": "Submitted", "messages": talk})
            )
            agents[f"agent{feature}"] = {"feature_id": feature, "status": "Submitted", "error": None}
        (run / "result.json").write_text(json.dumps({"repo": "harbor_task", "task_id": number, "agents": agents}))
        (run / "eval.json").write_text(json.dumps({"both_passed": number % 2 == 0}))
        (run / "conversation.json").write_text("[]")
    return folder


def ours(runs: Path, lake: Path) -> dict[str, int]:
    source = ImportSource("cooperbench", str(runs), OPTIONS, "bench", None)
    opened = Lake(lake)
    imported = import_in_bulk(source, opened.scratch("import"), hashes={})
    ref = Ref("raw_rollouts", "rollout_set", "bench")
    rows = opened.publish(ref, imported.tables, input_key="bench", inputs={}, spec_hash="bench").rows
    assert rows["rollouts"] + rows["quarantined"] == imported.total
    return rows


def theirs(runs: Path, out: Path) -> None:
    out.mkdir(exist_ok=True)
    with duckdb.connect() as connection:
        for kind in KINDS:
            name = out / f"{kind.strip('*_')}.parquet"
            scan = f"read_json('{runs}/**/{kind}', union_by_name = true, maximum_object_size = 1000000000)"
            connection.execute(f"COPY (SELECT * FROM {scan}) TO '{name}' (FORMAT parquet)")


def seconds(work: Callable[[], object]) -> tuple[float, float]:
    """Return (wall, CPU) seconds, CPU of this process and of its ended children."""

    def cpu() -> float:
        used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
        return sum(u.ru_utime + u.ru_stime for u in used)

    before, started = cpu(), time.perf_counter()
    work()
    return time.perf_counter() - started, cpu() - before


def best(work: Callable[[Path, Path], object], runs: Path, out: Path) -> tuple[float, float]:
    """Return the shortest (wall, CPU) seconds of ROUNDS runs."""
    return min(seconds(lambda: work(runs, out)) for _ in range(ROUNDS))


def peaks() -> tuple[float, float]:
    """Return the peak resident memory in MB of this process and of its largest ended child."""
    of = (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
    here, there = (resource.getrusage(who).ru_maxrss / 1024 for who in of)
    return here, there


def main() -> None:
    copies = int(sys.argv[1]) if len(sys.argv) > 1 else 64
    with tempfile.TemporaryDirectory() as folder:
        for share in (max(1, copies // 8), copies):  # memory first: DuckDB's would hide ours
            place = Path(folder) / str(share)
            runs = copied(place, share)
            rows = ours(runs, place / "lake")
            print(f"{rows['turns']} turns: peak {peaks()[0]:.0f} MB here, {peaks()[1]:.0f} MB in a reading process")
        files = list(runs.rglob("*.json"))
        size = sum(file.stat().st_size for file in files) / 1e6
        (wall, cpu), (base_wall, base_cpu) = best(ours, runs, place / "lake"), best(theirs, runs, place / "duckdb")
        print(
            f"{len(files)} files, {size:.0f} MB, {rows['rollouts']} rollouts, {os.cpu_count()} cores, best of {ROUNDS}"
        )
        print(f"etpi   {wall:7.2f} s wall {cpu:7.2f} s CPU {size / wall:6.1f} MB/s")
        print(f"DuckDB {base_wall:7.2f} s wall {base_cpu:7.2f} s CPU {size / base_wall:6.1f} MB/s")
        print(f"ratio  {wall / base_wall:7.2f}   wall {cpu / base_cpu:7.2f}   CPU (at most 2 wanted)")


if __name__ == "__main__":
    print(machine(), flush=True)
    main()
