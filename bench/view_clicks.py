"""Measure the seconds of a click on each page of `etpi view` over a lake of many turns.

Run: `python bench/view_clicks.py [TURNS]` (default 1,000,000). The lake is built in a temporary folder and removed.

The lake has a rollout set of TURNS captured turns: rollouts of two agents with ten turns each, with texts, messages,
token ids and log-probabilities; every fifth rollout is selected, converted to pairs and in a data set; 96 evaluation
rollouts of a base and a student. A click is a GET request to the application, in this process, after one request that
warms up: the median of five, on different rollouts, in wall time and in CPU time of all threads. The baseline is the
query that a page would run without the care that `sql/pages` takes: through the views of the whole catalog.
"""

from __future__ import annotations

import gc
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from machine import machine
from starlette.testclient import TestClient

from etpi.view.app import make_app
from etpi_assets.graph import GRAPH
from etpi_resources.lake import catalog
from etpi_resources.lake.lake import Lake, Ref
from etpi_resources.lake.schemas import empty, from_rows
from etpi_resources.links import (
    dataset_page,
    experiment_page,
    live_page,
    regressions_page,
    rollout_page,
    rollouts_page,
    sequence_page,
    task_page,
    tokens_page,
)

SET, STUDY = "recorded", "study"
AGENTS, TURNS = ("agent1", "agent2"), 10
VOCABULARY = 4096
SUFFIX, OUTPUT = 90, 60
WORDS = (
    "lantern",
    "harbor",
    "tide",
    "fold",
    "return",
    "def",
    "import",
    "test",
    "path",
    "quay",
    "moor",
    "skiff",
    "value",
)
RARE = "needle-in-the-transcripts"
START = datetime(2026, 1, 2, tzinfo=UTC)
BOUND = 1.0
"""Most seconds that a click may take."""


# --- the lake ------------------------------------------------------------------------------------------------------


def rollout_name(number: int) -> str:
    """Return an id as `etpi` makes them: not in the order of the rows."""
    return f"{(number * 2654435761) % 2**32:08x}{number:08x}"


def rows_of(number: int, rng: np.random.Generator, **columns: Any) -> dict[str, list[dict[str, Any]]]:
    """Return one rollout as rows of the four tables."""
    name, at = rollout_name(number), START + timedelta(seconds=number)
    passed = bool(rng.random() < 0.7)
    outcome = {"reward": float(passed), "verdict": "passed" if passed else "failed_tests"}
    row = {
        "rollout_id": name, "origin": "set", "rollout_set": SET, "suite": "s", "task_id": f"task-{number % 997:04d}",
        "task_hash": "h", "repo": f"repo{number % 20}", "sample": number // 997, "engine": "vllm", "teacher": "strong",
        "sampler": "{}", "exit_status": "Submitted" if rng.random() < 0.95 else "LimitsExceeded", "agents": 2,
        "outcome": json.dumps(outcome), "started_at": at, "wall_seconds": 30.0,
    }  # fmt: skip
    tables: dict[str, list[dict[str, Any]]] = {"rollouts": [row | columns], "agents": [], "turns": [], "messages": []}
    for agent in AGENTS:
        key = {"rollout_id": name, "agent_id": agent}
        tables["agents"].append(
            key | {"role": "proposer", "exit_status": "Submitted", "turns": TURNS, "output_tokens": TURNS * OUTPUT}
        )
        messages = [("system", "prompt", None, text_of(rng, 120)), ("user", "prompt", None, text_of(rng, 60))]
        for turn in range(TURNS):
            content, observation = text_of(rng, 40), text_of(rng, 50)
            if number % 20_000 == 19_999 and turn == 5:
                content = f"{content} {RARE}"
            messages += [("assistant", "action", turn, content), ("user", "observation", turn, observation)]
            tables["turns"].append(
                key
                | {
                    "turn": turn, "prefix_turn": turn - 1 if turn else None,
                    "suffix_ids": rng.integers(0, VOCABULARY, SUFFIX if turn else 800, np.int32),
                    "output_ids": rng.integers(0, VOCABULARY, OUTPUT, np.int32),
                    "logprobs": -rng.random(OUTPUT, np.float32), "capture": "native",
                    "prompt_tokens": 800 + turn * (SUFFIX + OUTPUT), "output_tokens": OUTPUT, "finish_reason": "stop",
                    "content": content, "think_tokens": 0, "observation": observation, "exit_code": 0, "inbox": "[]",
                    "actions": json.dumps([{"kind": "bash", "command": f"cat {content[:20]}", "form": "xml"}]),
                    "at": at + timedelta(seconds=turn),
                }
            )  # fmt: skip
        tables["messages"] += [
            key | {"index": index, "turn": turn, "role": role, "content": content, "kind": kind, "at": at}
            for index, (role, kind, turn, content) in enumerate(messages)
        ]
    return tables


def text_of(rng: np.random.Generator, words: int) -> str:
    return " ".join(WORDS[i] for i in rng.integers(0, len(WORDS), words))


class Repeated:
    """A block of rollouts, repeated under other ids: a stream of batches of each table."""

    def __init__(self, block: dict[str, list[dict[str, Any]]], rollouts: int, copies: int) -> None:
        self.tables = {name: from_rows(name, rows) for name, rows in block.items()}
        self.rollouts, self.copies = rollouts, copies

    def stream(self, name: str, every: int = 1) -> Iterator[pa.RecordBatch]:
        """Yield the table's rows; with `every`, only those of each `every`-th copy."""
        table = self.tables[name]
        numbers = np.array([int(x[8:], 16) for x in table["rollout_id"].to_pylist()])
        for copy in range(0, self.copies, every):
            renamed = table
            names = {n: rollout_name(n + copy * self.rollouts) for n in set(numbers.tolist())}
            ids = [names[n] for n in numbers.tolist()]
            renamed = renamed.set_column(table.schema.get_field_index("rollout_id"), "rollout_id", pa.array(ids))
            for column in ("pair_id", "dataset_row_id"):
                if column in table.schema.names:
                    keys = zip(ids, renamed["agent_id"].to_pylist(), renamed["turn"].to_pylist(), strict=True)
                    values = pa.array(["/".join(map(str, key)) for key in keys])
                    renamed = renamed.set_column(table.schema.get_field_index(column), column, values)
            if name == "sequences":
                values = pa.array([f"{i}-{a}" for i, a in zip(ids, renamed["agent_id"].to_pylist(), strict=True)])
                renamed = renamed.set_column(table.schema.get_field_index("sequence_id"), "sequence_id", values)
            yield from renamed.combine_chunks().to_batches()


def derived(block: dict[str, list[dict[str, Any]]]) -> dict[str, list[dict[str, Any]]]:
    """Return scores, pairs, dataset rows and sequences of a block of rollouts."""
    tables: dict[str, list[dict[str, Any]]] = {"scores": [], "pairs": [], "dataset_rows": [], "sequences": []}
    for row in block["rollouts"]:
        outcome = json.loads(row["outcome"])
        kept = {name: row[name] for name in ("rollout_id", "task_id", "repo", "exit_status")}
        tables["scores"].append(
            kept | outcome | {"plan_first": True, "output_tokens": 1200, "turns": 20, "infrastructure_error": False}
        )
    facts = {"task_id": "t", "repo": "r", "teacher": "strong", "split": "train"}
    for turn in block["turns"]:
        pair = {name: turn[name] for name in ("rollout_id", "agent_id", "turn", "prefix_turn", "suffix_ids", "capture")}
        pair |= {"output_ids": turn["output_ids"][10:], "input_tokens": turn["prompt_tokens"], "prompt_edit": "none"}
        tables["pairs"].append(pair | {"pair_id": "", "think_removed": 10, "format_tokens": 0, "metadata": "{}"})
        key = {name: turn[name] for name in ("rollout_id", "agent_id", "turn")}
        tables["dataset_rows"].append(
            key | facts | {"dataset_row_id": "", "pair_id": "", "weight": 1.0, "copies": 1, "output_tokens": 50,
                           "sequence_id": f"{turn['rollout_id']}-{turn['agent_id']}", "span_start": 0, "span_end": 50}
        )  # fmt: skip
    for agent in block["agents"]:
        ids = [i for t in block["turns"] if (t["rollout_id"], t["agent_id"]) == (agent["rollout_id"], agent["agent_id"])
               for i in (*t["suffix_ids"].tolist(), *t["output_ids"].tolist())]  # fmt: skip
        tables["sequences"].append(
            {"sequence_id": "", "split": "train", "rollout_id": agent["rollout_id"], "agent_id": agent["agent_id"],
             "input_ids": ids, "node_starts": [0], "node_parents": [-1], "node_positions": [0],
             "span_starts": [800], "span_ends": [860], "span_weights": [1.0], "rows": TURNS}
        )  # fmt: skip
    return tables


def put(lake: Lake, asset: str, key: str, tables: dict[str, Any]) -> str:
    node = GRAPH[asset]
    filled: dict[str, Any] = {name: empty(name) for name in node.tables} | tables
    return lake.publish(Ref(asset, node.set, key), filled, input_key=asset, inputs={}, spec_hash="bench").version


def spec(noun: str, name: str, **content: Any) -> dict[str, pa.Table]:
    row = {"kind": noun, "name": name, "title": name, "spec": json.dumps(content), "sha256": name}
    return {"specs": from_rows("specs", [row])}


def joined(blocks: Sequence[dict[str, list[dict[str, Any]]]]) -> dict[str, list[dict[str, Any]]]:
    return {name: [row for block in blocks for row in block[name]] for name in blocks[0]}


def make(root: Path, turns: int) -> Path:
    """Build the lake and return the path of its catalog."""
    rng, lake = np.random.default_rng(0), Lake(root / "data")
    in_block = 500
    copies = max(1, round(turns / (in_block * len(AGENTS) * TURNS)))
    block = joined([rows_of(n, rng) for n in range(in_block)])
    # The last rollout of the lake alone has the rare word, so a search for it reads every turn.
    last = joined([rows_of(copies * in_block + 19_999 - (copies * in_block) % 20_000, rng)])
    repeated, more = Repeated(block, in_block, copies), Repeated(derived(block), in_block, copies)
    facts = {"suite": "s", "repo": "r", "split": "train", "instruction": "as recorded", "payload": "{}"}
    put(lake, "tasks", "s", {"tasks": from_rows("tasks", [{"task_id": f"task-{n:04d}"} | facts for n in range(997)])})
    put(lake, "suite_spec", "s", spec("suite", "s", family="made"))
    put(lake, "rollout_set_spec", SET, spec("rollout_set", SET, kind="live", suite="s", agent={"tokenizer": "bench"}))
    content: dict[str, Any] = {"rollout_sets": [SET], "seeds": [0], "base": {"tokenizer": "bench"}, "train": {}}
    put(lake, "experiment_spec", STUDY, spec("experiment", STUDY, **content))
    raw = {name: both(repeated.stream(name), from_rows(name, rows)) for name, rows in last.items()}
    put(lake, "raw_rollouts", SET, raw)
    put(lake, "scored_rollouts", SET, {"scores": more.stream("scores")})
    put(lake, "tito_pairs", STUDY, {"pairs": more.stream("pairs", every=5)})
    rows = {name: more.stream(name, every=5) for name in ("dataset_rows", "sequences")}
    version = put(lake, "upweighted_dataset", STUDY, rows)
    step = {"experiment": STUDY, "step": 0, "final": True, "path": "-", "wall_seconds": 1.0, "hyperparameters": "{}"}
    trained = {"checkpoint_id": "sft", "role": "sft", "method": "full", "seed": 0, "dataset_version": version}
    put(lake, "sft_checkpoint", STUDY, {"checkpoints": from_rows("checkpoints", [step | trained])})
    held = {"origin": "eval", "rollout_set": None, "experiment": STUDY, "decoding": "greedy", "seed": 0}
    seen = joined(
        [
            rows_of(10**8 + 1000 * place + n, rng, **held, checkpoint_role=role, task_id=f"task-{n:04d}")
            for place, role in enumerate(("base", "sft"))
            for n in range(48)
        ]
    )
    put(lake, "eval_rollouts", STUDY, {name: from_rows(name, rows) for name, rows in seen.items()})
    put(lake, "eval_metrics", STUDY, {"scores": from_rows("scores", derived(seen)["scores"])})
    words = [f"{WORDS[i % len(WORDS)]}{i} " for i in range(VOCABULARY)]
    return catalog.build(lake, GRAPH.values(), vocabularies={"bench": words})


def both(stream: Iterator[pa.RecordBatch], table: pa.Table) -> Iterator[pa.RecordBatch]:
    yield from stream
    yield from table.to_batches()


# --- the clicks ----------------------------------------------------------------------------------------------------


def clicks(catalog_path: Path) -> dict[str, list[str]]:
    """Return name -> six addresses of a page, of different rollouts where it shows one."""
    with catalog.connect(catalog_path) as connection:

        def ids(where: str) -> list[str]:
            query = f"SELECT rollout_id FROM rollouts WHERE {where} ORDER BY hash(rollout_id) LIMIT 6"
            return [name for (name,) in connection.execute(query).fetchall()]

        any_set, held = ids("origin = 'set'"), ids("origin = 'eval'")
        query = "SELECT rollout_id, sequence_id FROM sequences ORDER BY hash(sequence_id) LIMIT 6"
        trained = connection.execute(query).fetchall()
    pages = {
        "overview": ["/"] * 6,
        "experiment": [experiment_page(STUDY)] * 6,
        "regressions": [regressions_page(STUDY)] * 6,
        "task": [task_page(STUDY, f"task-{n:04d}") for n in range(6)],
        "list": ["/rollouts"] * 6,
        "list, page 500": [rollouts_page(first=str(25_000 + 50 * n)) for n in range(6)],
        "list, sorted by reward": [rollouts_page(sort="reward")] * 6,
    }
    filters = {
        "made_for": SET, "origin": "set", "experiment": STUDY, "role": "sft", "decoding": "greedy", "seed": "0",
        "task": "task-0007", "repo": "repo7", "verdict": "failed_tests", "exit": "LimitsExceeded", "reason": "x",
        "min_reward": "1",
    }  # fmt: skip
    pages |= {f"list, {name}": [rollouts_page(**{name: value})] * 6 for name, value in filters.items()}
    pages |= {
        "search, a common text": [rollouts_page(text="lantern")] * 6,
        "search, a rare text": [rollouts_page(text=RARE)] * 6,
        "search, with a filter": [rollouts_page(text="lantern", verdict="failed_tests")] * 6,
        "conversation, of the set": [rollout_page("set", SET, name) for name in any_set],
        "conversation, held out": [rollout_page("eval", STUDY, name) for name in held],
        "tokens": [tokens_page("set", SET, name, "agent2", 9) for name, _ in trained],
        "tokens, whole prompt": [f"{tokens_page('set', SET, name, 'agent2', 9)}&whole=1" for name, _ in trained],
        "data set": [dataset_page(STUDY)] * 6,
        "data set, by loss": [f"{dataset_page(STUDY)}?sort=loss"] * 6,
        "sequence": [sequence_page(STUDY, name) for _, name in trained],
        "live": [live_page()] * 6,
    }
    return pages


def seconds_of(client: TestClient, addresses: Sequence[str]) -> tuple[float, float]:
    """Return the median (wall, CPU) seconds of the last five requests; the first warms up."""
    times, cpu = [], []
    for address in addresses:
        start, start_cpu = time.perf_counter(), time.process_time()
        response = client.get(address)
        times.append(time.perf_counter() - start)
        cpu.append(time.process_time() - start_cpu)
        if response.status_code != 200:
            sys.exit(f"{address}: {response.status_code} {response.text[:500]}")
    return statistics.median(times[1:]), statistics.median(cpu[1:])


def baseline(catalog_path: Path) -> dict[str, float]:
    """Return the seconds of the plain queries: whole prompts and a search through the catalog's views."""
    queries = {
        "tokens": "SELECT prompt_ids, output_ids FROM full_turns WHERE turn = 9 AND agent_id = 'agent2' AND rollout_id "
        "= (SELECT rollout_id FROM rollouts WHERE origin = 'set' AND task_id = 'task-0007' LIMIT 1)",
        "search, a rare text": "SELECT DISTINCT rollout_id FROM turns "
        f"WHERE content ILIKE '%{RARE}%' OR observation ILIKE '%{RARE}%'",
    }
    times = {}
    with catalog.connect(catalog_path) as connection:
        for name, query in queries.items():
            start = time.perf_counter()
            connection.execute(query).fetchall()
            times[name] = time.perf_counter() - start
    return times


def main() -> None:
    turns = int(sys.argv[1]) if len(sys.argv) > 1 else 1_000_000
    print(machine(), flush=True)
    with tempfile.TemporaryDirectory(prefix="etpi-view-") as name:
        os.environ["ETPI_CATALOG"] = str(Path(name) / "etpi.duckdb")
        start = time.perf_counter()
        path = make(Path(name), turns)
        size = sum(file.stat().st_size for file in Path(name).rglob("*.parquet"))
        built = time.perf_counter() - start
        print(f"{turns:,} turns, {size / 1e6:,.0f} MB of parquet, built in {built:.0f} s", flush=True)
        gc.collect()
        plain = baseline(path)
        app = make_app(Lake(Path(name) / "data"), path)
        slow = []
        with TestClient(app, base_url="http://localhost") as client:
            for label, addresses in clicks(path).items():
                seconds, cpu = seconds_of(client, addresses)
                against = f", {plain[label] / seconds:6.0f} times as fast as the plain query" if label in plain else ""
                print(f"{label:28} {1000 * seconds:6.0f} ms, {1000 * cpu:5.0f} ms of CPU{against}", flush=True)
                if seconds > BOUND:
                    slow.append(label)
        print("plain queries: " + ", ".join(f"{label} {seconds:.1f} s" for label, seconds in plain.items()))
        print(f"load {os.getloadavg()[0]:.1f}; over {BOUND:.0f} s: {', '.join(slow) or 'none'}")


if __name__ == "__main__":
    main()
