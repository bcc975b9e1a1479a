"""Where the steps of a run execute on a cluster: what each needs, and Dagster's launcher and executor on Ray.

Without a cluster nothing here is imported. `needs` knows assets and specs; `executor` and `launcher` know Dagster and
Ray.
"""
