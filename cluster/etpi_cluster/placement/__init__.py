"""Placement of a run's steps: the needs of each, and Dagster's executor, launcher and storage.

`needs` knows assets and specs; `executor` and `launcher` know Dagster and Ray.
"""
