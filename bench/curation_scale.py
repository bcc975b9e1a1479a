"""Time and memory of score, select, pairs, weights and merging, by turns: `python bench/curation_scale.py [TURNS]`.

`ETPI_TRAJECTORIES` names the folder of recorded runs. Copies of them, varied, with ids as if captured, are put in a
lake as a rollout set: a tenth of TURNS (default 10,000), and TURNS. A process each reads the lake and runs the stages
as the assets do, without their checks: CPU seconds and the peak memory after each, and the time at TURNS over the time
at a tenth (11 is wanted at most). The memory of a turn between the two says where 4 GB, and where a machine, ends.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from recorded import SET, captured, curate, qwen3, varied

from etpi_resources.lake import Lake, Ref

RAW = Ref("raw_rollouts", "rollout_set", SET)


def one(root: Path) -> None:
    """Every stage over the lake's rollout set, in this process."""
    lake, chat = Lake(root), qwen3()
    chat.encode("The vocabulary is read once, whatever the turns.")
    began = time.process_time()
    tables = {name: lake.read(RAW, name) for name in ("rollouts", "agents", "turns", "messages")}
    stages = {}

    def mark(name: str) -> None:
        nonlocal began
        now = time.process_time()
        stages[name] = (now - began, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)
        began = now

    mark("read")
    for name, _ in curate(tables, chat):
        mark(name)
    print(json.dumps({"turns": len(tables["turns"]), "stages": stages}))


def main() -> None:
    if sys.argv[1:2] == ["--one"]:
        one(Path(sys.argv[2]))
        return
    wanted = int(sys.argv[1]) if len(sys.argv) > 1 else 10_000
    tables = captured(qwen3())
    found = []
    for turns in (wanted // 10, wanted):
        copies = max(1, round(turns / len(tables["turns"])))
        with tempfile.TemporaryDirectory() as folder:
            streams = {name: varied(table, copies) for name, table in tables.items()}
            streams["quarantined"] = iter(())
            Lake(Path(folder)).publish(RAW, streams, input_key="bench", inputs={}, spec_hash="bench")
            command = [sys.executable, __file__, "--one", folder]
            done = subprocess.run(command, env=os.environ, stdout=subprocess.PIPE, text=True, check=True)
            found.append(json.loads(done.stdout.splitlines()[-1]))
    few, many = found
    print(f"{few['turns']:,} and {many['turns']:,} turns, load {os.getloadavg()[0]:.0f}")
    for name, (seconds, peak) in many["stages"].items():
        before, peak_before = few["stages"][name]
        print(
            f"{name:8} {before:8.2f} and {seconds:8.2f} s of CPU ({seconds / max(before, 1e-9):5.1f} times), peak "
            f"{peak_before:6.0f} and {peak:6.0f} MB"
        )
    total = [sum(seconds for seconds, _ in f["stages"].values()) for f in found]
    top = [max(peak for _, peak in f["stages"].values()) for f in found]
    more = many["turns"] - few["turns"]
    slope, pace = (top[1] - top[0]) / more, (total[1] - total[0]) / more
    print(
        f"all of it {total[1] / total[0] * few['turns'] / many['turns'] * 10:.1f} times the time for 10 times the "
        f"turns, {1e6 * pace / 60:.0f} minutes of CPU a million turns; {1000 * slope:.0f} kB "
        f"a turn: 4 GB at {(4096 - top[0]) / slope + few['turns']:,.0f} turns"
    )


if __name__ == "__main__":
    main()
