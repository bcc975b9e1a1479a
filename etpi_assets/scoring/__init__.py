"""Scoring: rewards and behaviours, read from recorded rollouts."""
