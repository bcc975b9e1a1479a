"""Several machines that share one lake, through Postgres and Ray: a plugin of etpi (`backend`, `commands`).

The core imports nothing of it; `pip install etpi-cluster` brings its packages. `placement` has Dagster's
executor, launcher and storage, `doctor` examines every node.
"""
