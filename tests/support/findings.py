"""Rows of the tables that findings and sweeps read."""

from __future__ import annotations

from etpi_assets.scoring.intervals import wilson


def row(experiment: str, hits: int, n: int, seed: int | None = None, **more) -> dict:
    low, high = wilson(hits, n)
    figure = {"value": hits / n, "n": n, "ci_low": low, "ci_high": high, "interval": "wilson", "unit": "pair"}
    of = {"experiment": experiment, "checkpoint_role": "sft", "decoding": "greedy", "metric": "plan_first"}
    return {**of, **figure, "seed": seed, "excluded": 0, **more}


def probe(step: int | None, seed: int, value: float, **more) -> dict:
    of = {"role": "sft", "probe": "first_turn_message", "prompt_set": "heldout", "checkpoint_id": f"c{step}"}
    return {**of, "step": step, "seed": seed, "value": value, "n": 20, "passed": True, "detail": "{}", **more}
