"""Programs that train. Each runs in an interpreter of its own, which may have other packages than the caller's.

Belongs here: what imports torch to train. Does not belong here: Dagster (workers speak to it through `dagster_pipes`
alone), the lake, or specs: a worker reads `config.json` in its folder and leaves its result there.
"""
