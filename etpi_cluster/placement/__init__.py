"""Where the steps of a run execute: what each needs, and Dagster's executor, launcher and storage.

`needs` knows assets and specs; `executor` and `launcher` know Dagster and Ray.
"""
