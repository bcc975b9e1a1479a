"""The planner, code versions and their explanations: which partitions are missing, stale or of changed code."""
