"""Ablations, with the rollout sets and suites that only they use."""
