"""Rewards and behaviours of recorded rollouts."""
