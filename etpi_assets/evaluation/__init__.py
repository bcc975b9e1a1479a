"""Evaluation: probes before rollouts are spent, held-out rollouts, metrics with intervals."""
