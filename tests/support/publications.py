"""Small publications of turns, for tests of the lake."""

from __future__ import annotations

import pyarrow as pa

from etpi_resources.lake.lake import Lake, Ref
from etpi_resources.lake.schemas import from_rows

PAIRS = Ref("tito_pairs", "experiment", "plan_first")


def turns(count: int, start: int = 0) -> pa.Table:
    return from_rows(
        "turns",
        [
            {
                "rollout_id": f"r{i // 4}", "agent_id": "agent1", "turn": i % 4, "output_ids": [i, i + 1],
                "capture": "native", "suffix_ids": [7, i] if i % 3 else None, "logprobs": [-0.5, -1.25],
                "content": f"turn {i}",
            }
            for i in range(start, start + count)
        ],
    )  # fmt: skip


def publish(lake: Lake, ref: Ref = PAIRS, rows: int = 5, input_key: str = "k", **options):
    options = {"inputs": {"raw_rollouts/s": "v1"}, "spec_hash": "h", **options}
    return lake.publish(ref, {"turns": turns(rows)}, input_key=input_key, **options)
