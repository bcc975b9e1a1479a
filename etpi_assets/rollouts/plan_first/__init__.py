"""Templated plan-first conversations: which files a plan names, the script, and the rollout that plays it."""
