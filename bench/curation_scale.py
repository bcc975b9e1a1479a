"""Measure CPU time and memory of scoring, selecting, pairs, weights and merging by number of turns.

    ETPI_TRAJECTORIES=FOLDER python bench/curation_scale.py [TURNS]

FOLDER has recorded runs. Varied copies of them, with ids as if captured, become the rollout sets of two lakes: one of a
tenth of TURNS (default 10,000), one of TURNS. One process per lake materializes the assets of the stage, with checks
and publishing. It prints the CPU seconds and peak memory after each asset, the ratio of the times (at most 11 wanted),
and from the memory per turn the number of turns that fit into 4 GB.
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
from recorded import LONGEST, SET, captured, qwen3, varied

from etpi_assets.resources import Resources
from etpi_resources.lake.lake import Lake, Ref

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
        pairs.capture = "native"
        dataset.max_length = {LONGEST}
        gates.override = {{ heldout_split = "copies of one repository", skip_rate = "runs that the source lost" }}
    """,
}
CURATED = ("selected_trajectories", "tito_pairs", "upweighted_dataset")


def one(folder: Path) -> None:
    """Materialize every asset over the lake's rollout set in this process."""
    from etpi_assets.curation.assets import ASSETS as CURATION
    from etpi_assets.scoring.assets import ASSETS as SCORING

    recipes = {recipe.node.name: recipe for recipe in (*SCORING, *CURATION)}
    resources = Resources(lake=Lake(folder / "lake"), specs_folder=folder / "specs")
    qwen3().encode("The vocabulary is read once, whatever the turns.")
    stages = {}
    for asset, key in (("scored_rollouts", SET), *((name, STUDY) for name in CURATED)):
        began = time.process_time()
        outcome = recipes[asset].execute(key, resources, lambda line: None)
        assert not outcome.manifest.blocked, [c for c in outcome.manifest.checks if not c["passed"]]
        stages[asset] = (time.process_time() - began, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)
    print(json.dumps(stages))


def measured(folder: Path, turns: int) -> tuple[int, dict[str, tuple[float, float]]]:
    """Return (turns, asset -> CPU seconds and peak memory in MB) for a lake of about the given number of turns."""
    tables = captured(qwen3())
    copies = max(1, round(turns / len(tables["turns"])))
    streams = {name: varied(table, copies) for name, table in tables.items()}
    streams["quarantined"] = iter(())
    ref = Ref("raw_rollouts", "rollout_set", SET)
    Lake(folder / "lake").publish(ref, streams, input_key="bench", inputs={}, spec_hash="bench")
    for name, text in SPECS.items():
        path = folder / "specs" / f"{name}.toml"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    command = [sys.executable, __file__, "--one", str(folder)]
    done = subprocess.run(command, env=os.environ, stdout=subprocess.PIPE, text=True, check=True)
    return copies * len(tables["turns"]), json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    if sys.argv[1:2] == ["--one"]:
        one(Path(sys.argv[2]))
        return
    print(machine(), flush=True)
    wanted = int(sys.argv[1]) if len(sys.argv) > 1 else 10_000
    results = []
    for turns in (wanted // 10, wanted):
        with tempfile.TemporaryDirectory() as folder:
            results.append(measured(Path(folder), turns))
    (few, before), (many, after) = results
    print(f"{few:,} and {many:,} turns, load {os.getloadavg()[0]:.0f}")
    for asset, (seconds, peak) in after.items():
        least, low = before[asset]
        print(
            f"{asset:22} {least:8.2f} and {seconds:8.2f} s of CPU ({seconds / least:5.1f} times), peak {low:6.0f} and "
            f"{peak:6.0f} MB"
        )
    total = [sum(seconds for seconds, _ in stages.values()) for stages in (before, after)]
    top = [max(peak for _, peak in stages.values()) for stages in (before, after)]
    slope, pace = (top[1] - top[0]) / (many - few), (total[1] - total[0]) / (many - few)
    print(
        f"all of it {total[1] / total[0] * few / many * 10:.1f} times the time for 10 times the turns, "
        f"{1e6 * pace / 60:.0f} minutes of CPU a million turns; {1000 * slope:.2f} kB a turn: 4 GB at "
        f"{(4096 - top[0]) / slope + few:,.0f} turns"
    )


if __name__ == "__main__":
    main()
