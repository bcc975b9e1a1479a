"""Several machines that share one lake, through Postgres and Ray: a plugin of etpi (`backend`, `commands`).

The core imports nothing of it; its packages come with `pip install "etpi[cluster]"`. `placement` has Dagster's
executor, launcher and storage, `doctor` examines every node.
"""
