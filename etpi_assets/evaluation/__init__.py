"""Evaluation: probes of the served checkpoints, held-out rollouts, and metrics with intervals."""
