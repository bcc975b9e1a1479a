"""Specs: suites, rollout sets and experiments as pydantic models, their TOML files, and the planner."""
