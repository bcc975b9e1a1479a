"""Measure the time and memory of scoring, selecting, pairs, weights and merging by number of turns.

    ETPI_TRAJECTORIES=FOLDER [ETPI_WORKERS=N] python bench/curation_scale.py [TURNS] [native | retokenised]

FOLDER has recorded runs. Copies of them become the rollout sets of two lakes: one of a tenth of TURNS (default 10,000),
one of TURNS; native: varied, with ids as if captured; retokenised: as recorded, without ids. One process per lake
materializes the assets of the stage, with checks and publishing, and says on stderr when one is done. It prints the
CPU seconds (of worker processes too), the wall time and the peak memory of this process after each asset, the ratio of
the CPU times (at most 11 wanted), and from the memory per turn the number of turns that fit into 4 GB.
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

from machine import machine
from recorded import LONGEST, SET, captured, qwen3, recorded_rollouts, varied

from etpi_assets.resources import Resources
from etpi_assets.trajectories.tables import to_tables
from etpi_resources.lake.lake import Lake, Ref
from etpi_resources.process.pool import worker_count

STUDY = "scale"
SPECS = {
    f"rollout_sets/{SET}": f"""
        title = "Copies of recorded runs"
        kind = "imported"
        format = "cooperbench"
        path = "{os.devnull}"
        agent.tokenizer = "qwen3"
        scoring.message_commands = ["coop-send", "coop-broadcast"]
    """,
    f"experiments/{STUDY}": f"""
        extends = "cooperbench_import"
        rollout_sets = ["{SET}"]
        pairs.capture = "CAPTURE"
        dataset.max_length = {LONGEST}
        gates.override = {{ heldout_split = "copies of one repository", skip_rate = "runs that the source lost" }}
    """,
}
CURATED = ("selected_trajectories", "tito_pairs", "upweighted_dataset")


def one(folder: Path) -> None:
    """Materialize every asset over the lake's rollout set in this process."""
    from etpi_assets.asset import asset_definitions

    resources = Resources(lake=Lake(folder / "lake"), specs_folder=folder / "specs")
    qwen3().encode("The vocabulary is read once, whatever the turns.")
    stages = {}
    for asset, key in (("scored_rollouts", SET), *((name, STUDY) for name in CURATED)):
        began, started = cpu_seconds(), time.monotonic()
        outcome = asset_definitions()[asset].execute(key, resources, lambda line: None)
        assert not outcome.manifest.blocked, [c for c in outcome.manifest.checks if not c["passed"]]
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        stages[asset] = (cpu_seconds() - began, peak, time.monotonic() - started)
        print(f"{asset}: {stages[asset][0]:.1f} s of CPU, peak {peak:.0f} MB", file=sys.stderr, flush=True)
    print(json.dumps(stages))


def cpu_seconds() -> float:
    """Return the CPU seconds of this process and of those that it started and that have ended."""
    return sum(os.times()[:4])


def measured(folder: Path, turns: int, capture: str) -> tuple[int, dict[str, tuple[float, float, float]]]:
    """Return (turns, asset -> CPU seconds, peak memory in MB, wall seconds) for a lake of about `turns` turns."""
    tables = captured(qwen3()) if capture == "native" else to_tables(recorded_rollouts())
    copies = max(1, round(turns / len(tables["turns"])))
    streams = {name: varied(table, copies) for name, table in tables.items()}
    streams["quarantined"] = iter(())
    ref = Ref("raw_rollouts", "rollout_set", SET)
    Lake(folder / "lake").publish(ref, streams, input_key="bench", inputs={}, spec_hash="bench")
    for name, text in SPECS.items():
        path = folder / "specs" / f"{name}.toml"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text.replace("CAPTURE", capture))
    command = [sys.executable, __file__, "--one", str(folder)]
    done = subprocess.run(command, env=os.environ, stdout=subprocess.PIPE, text=True, check=True)
    return copies * len(tables["turns"]), json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    if sys.argv[1:2] == ["--one"]:
        one(Path(sys.argv[2]))
        return
    print(machine(), flush=True)
    wanted = int(sys.argv[1]) if len(sys.argv) > 1 else 10_000
    capture = sys.argv[2] if len(sys.argv) > 2 else "native"
    results = []
    for turns in (wanted // 10, wanted):
        with tempfile.TemporaryDirectory() as folder:
            results.append(measured(Path(folder), turns, capture))
    (few, before), (many, after) = results
    if few == many:
        sys.exit(f"{wanted:,} turns are one copy of the recorded runs, of {many:,}; take 10 times as many or more")
    print(f"{few:,} and {many:,} turns, {worker_count()} workers, load {os.getloadavg()[0]:.0f}")
    for asset, (seconds, peak, wall) in after.items():
        least, low, _ = before[asset]
        print(
            f"{asset:22} {least:8.2f} and {seconds:8.2f} s of CPU ({seconds / least:5.1f} times), {wall:8.2f} s of "
            f"wall time, peak {low:6.0f} and {peak:6.0f} MB"
        )
    total = [sum(seconds for seconds, _, _ in stages.values()) for stages in (before, after)]
    top = [max(peak for _, peak, _ in stages.values()) for stages in (before, after)]
    print(f"wall time of all {sum(wall for _, _, wall in after.values()):.1f} s")
    slope, pace = (top[1] - top[0]) / (many - few), (total[1] - total[0]) / (many - few)
    print(
        f"all of it {total[1] / total[0] * few / many * 10:.1f} times the time for 10 times the turns, "
        f"{1e6 * pace / 60:.0f} minutes of CPU a million turns; {1000 * slope:.2f} kB a turn: 4 GB at "
        f"{(4096 - top[0]) / slope + few:,.0f} turns"
    )


if __name__ == "__main__":
    main()
