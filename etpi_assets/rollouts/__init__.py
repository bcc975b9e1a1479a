"""Rollouts: the agent loop, and the importers and generators that yield the same records."""
