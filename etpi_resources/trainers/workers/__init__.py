"""Programs that train. Each runs in its own interpreter, which may have other packages than the process that starts it.

A worker imports torch, and neither Dagster (only `dagster_pipes`) nor etpi_assets: it reads `config.json` in its folder
and leaves `result.json` there (`trainers.contracts`).
"""
