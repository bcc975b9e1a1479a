"""Recorded rollouts: plain records, their Arrow tables, and the checks that every recording must pass."""
