"""Measure every query of `sql/reports` on many turns, warm, against `read_json`.

Run: `python bench/report_queries.py [TURNS]`.

`ETPI_TRAJECTORIES` names the folder of recorded runs. Varied copies of them, TURNS turns in all (default 100,000), form
a lake: a rollout set that is scored, selected, curated and trained on; every tenth copy is also a rollout of a base, a
fine-tuned and a reinforced checkpoint. The table that no report reads (sequences) is empty. Each report runs
over the catalog with its default variables: once to warm up, then three times; the fastest counts. The
baseline is DuckDB's `read_json` over as many copies of the run files, with a query of how agents end
(`exits_by_rollout_set` answers it and more).
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa
from machine import machine
from recorded import SET, captured, curate, qwen3, renamed, runs_folder, varied

from etpi_assets.curation.select import select
from etpi_assets.graph import GRAPH
from etpi_assets.specs.experiment import SelectSection
from etpi_resources.lake import catalog
from etpi_resources.lake.lake import Lake, Manifest, Ref
from etpi_resources.lake.schemas import empty, from_rows

STUDY = "study"
NAMED = ("rollout_id", "task_id", "pair_id", "dataset_row_id")
BOUND = 0.5
"""Most seconds that a report may take."""
Stream = pa.Table | Iterable[pa.RecordBatch]


def put(lake: Lake, asset: str, key: str, tables: Mapping[str, Stream], copies: int = 1) -> Manifest:
    """Publish the tables, repeated, as a version of an asset; its other tables are empty."""
    node = GRAPH[asset]
    filled: dict[str, Stream] = {name: empty(name) for name in node.tables}
    filled |= {
        name: varied(table, copies, NAMED) if isinstance(table, pa.Table) and copies > 1 else table
        for name, table in tables.items()
    }
    return lake.publish(Ref(asset, node.set, key), filled, input_key=asset, inputs={}, spec_hash="bench")


def spec(noun: str, name: str, /, **content: Any) -> dict[str, pa.Table]:
    row = {"kind": noun, "name": name, "title": name, "spec": json.dumps(content), "sha256": name}
    return {"specs": from_rows("specs", [row])}


def by_checkpoint(table: pa.Table, role: str, origin: str = "eval") -> pa.Table:
    """Return the set's rollouts, relabelled as those of a checkpoint of the study."""
    rows = len(table)
    relabelled: dict[str, Any] = {"origin": origin, "experiment": STUDY, "checkpoint_role": role, "decoding": "t1"}
    relabelled |= {"rollout_set": None, "seed": 0, "sample_seed": 0}
    for place, field in enumerate(table.schema):
        if field.name in relabelled:
            table = table.set_column(place, field, pa.array([relabelled[field.name]] * rows, field.type))
        elif field.name == "rollout_id":
            table = table.set_column(place, field, renamed(table["rollout_id"], role))
    return table


def make(root: Path, raw: Mapping[str, pa.Table], copies: int) -> Lake:
    """Return the lake of the study."""
    lake = Lake(root)
    curated = dict(curate(raw, qwen3()))
    scored = curated["score"] | {
        "turn_scores": from_rows(
            "turn_scores",
            [row | {"adheres": True} for row in raw["turns"].select(["rollout_id", "agent_id", "turn"]).to_pylist()],
        )
    }
    rolled_out = {name: raw[name] for name in ("rollouts", "agents", "turns", "messages")}
    names = sorted({row for row in raw["rollouts"]["task_id"].to_pylist() if row})
    facts = {"suite": "recorded", "repo": "made", "split": "train", "instruction": "as recorded"}
    put(lake, "tasks", "recorded", {"tasks": from_rows("tasks", [{"task_id": n} | facts for n in names])}, copies)
    put(lake, "rollout_set_spec", SET, spec("rollout_set", SET, kind="imported", agent={"tokenizer": "qwen3"}))
    put(lake, "experiment_spec", STUDY, spec("experiment", STUDY, rollout_sets=[SET], seeds=[0], base={}, train={}))
    put(lake, "raw_rollouts", SET, rolled_out, copies)
    put(lake, "scored_rollouts", SET, scored, copies)
    put(lake, "selected_trajectories", STUDY, curated["select"], copies)
    strict = SelectSection(min_reward=1, require=(), shortest_correct=False)
    put(lake, "selected_trajectories", "strict", select(raw["rollouts"], scored["scores"], strict), copies)
    put(lake, "tito_pairs", STUDY, curated["pairs"], copies)
    rows = {"dataset_rows": curated["merged"]["dataset_rows"], "dropped": curated["weights"]["dropped"]}
    version = put(lake, "upweighted_dataset", STUDY, rows, copies).version
    few = max(1, copies // 10)
    held = {role: {n: by_checkpoint(t, role) for n, t in rolled_out.items()} for role in ("base", "sft", "rl")}
    seen = {name: pa.concat_tables([part[name] for part in held.values()]) for name in rolled_out}
    put(lake, "eval_rollouts", STUDY, seen, few)
    judged = {name: pa.concat_tables([by_checkpoint(table, role) for role in held]) for name, table in scored.items()}
    put(lake, "eval_metrics", STUDY, judged, few)
    reinforced = {name: by_checkpoint(table, "rl", "rl") for name, table in rolled_out.items()}
    samples = [
        {"rollout_id": row["rollout_id"], "task_id": row["task_id"], "seed": 0, "step": step, "place": step,
         "parsed": True, "solved": bool(step % 2), "called": True, "reward": 0.0, "advantage": 0.5}
        for step, row in enumerate(reinforced["rollouts"].to_pylist())
    ]  # fmt: skip
    base = {"experiment": STUDY, "step": 0, "final": True, "path": "-", "wall_seconds": 1.0, "hyperparameters": "{}"}
    sft = base | {"checkpoint_id": "sft", "role": "sft", "method": "full", "seed": 0, "parent_id": "base"}
    rl = base | {"checkpoint_id": "rl", "role": "rl", "method": "full", "seed": 0, "parent_id": "sft", "step": 1000}
    checkpoints = from_rows("checkpoints", [sft | {"dataset_version": version}])
    put(lake, "sft_checkpoint", STUDY, {"checkpoints": checkpoints})
    reinforced |= {"rl_samples": from_rows("rl_samples", samples), "checkpoints": from_rows("checkpoints", [rl])}
    put(lake, "rl_checkpoint", STUDY, reinforced)
    return lake


def fastest(ask: Callable[[], object], times: int = 3) -> tuple[float, float]:
    """Return the shortest (wall, CPU) seconds of several runs, after a warm-up run."""
    ask()
    timings = []
    for _ in range(times):
        wall, cpu = time.perf_counter(), time.process_time()
        ask()
        timings.append((time.perf_counter() - wall, time.process_time() - cpu))
    return min(wall for wall, _ in timings), min(cpu for _, cpu in timings)


def read_json(runs: Path) -> tuple[float, float]:
    """Return the (wall, CPU) seconds of a query of the run files for agents' exit statuses."""
    query = f"""
        SELECT status, count(*), sum(len(messages))
        FROM read_json('{runs}/**/agent*_traj.json', union_by_name = true, maximum_object_size = 1000000000)
        GROUP BY status
    """
    with duckdb.connect() as connection:
        return fastest(lambda: connection.execute(query).fetchall(), 1)


def main() -> None:
    turns = int(sys.argv[1]) if len(sys.argv) > 1 else 100_000
    raw = captured(qwen3())
    copies = max(2, round(turns / len(raw["turns"])))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for run in [path for path in runs_folder().iterdir() if path.is_dir()]:
            for number in range(copies):
                shutil.copytree(run, folder / "runs" / f"{run.name}_{number:04d}")
        files = sum(file.stat().st_size for file in folder.rglob("*_traj.json"))
        base_wall, base_cpu = read_json(folder / "runs")
        shutil.rmtree(folder / "runs")
        lake = make(folder / "data", raw, copies)
        size = sum(file.stat().st_size for file in (folder / "data").rglob("*.parquet"))
        path = catalog.build(lake, GRAPH.values())
        print(
            f"{copies * len(raw['turns']):,} turns, {size / 1e6:.0f} MB of parquet; read_json of {files / 1e6:.0f} MB: "
            f"{base_wall:.2f} s, {base_cpu:.2f} s of CPU; load {os.getloadavg()[0]:.0f}",
            flush=True,
        )
        with catalog.connect(path) as connection:
            trained_on = connection.execute("SELECT count(*) FROM lineage WHERE origin = 'set'").fetchone()
            assert trained_on and trained_on[0], "no turn of the set is behind a checkpoint"
            for report in sorted((catalog.sql_folder() / "reports").glob("*.sql")):
                text = report.read_text()
                rows = len(connection.execute(text).fetchall())
                wall, cpu = fastest(lambda text=text: connection.execute(text).fetchall())
                print(
                    f"{report.stem:30} {rows:8,} rows {wall:7.3f} s {cpu:7.3f} s of CPU, read_json "
                    f"{base_cpu / cpu:6.1f} times{'' if wall < BOUND else f': over {BOUND} s'}",
                    flush=True,
                )


if __name__ == "__main__":
    print(machine(), flush=True)
    main()
