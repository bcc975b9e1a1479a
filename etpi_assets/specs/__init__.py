"""Specs: suites, rollout sets and experiments as pydantic models, and their TOML files."""
