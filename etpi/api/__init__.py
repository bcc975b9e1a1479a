"""The Python API: the lake's tables as polars frames, the catalog's views and reports, one experiment's data.

`import etpi` offers it: `etpi.open()`, `etpi.load("experiment")`. docs/queries.md has examples.
"""

from __future__ import annotations

from etpi.api.open_lake import Dataset, Experiment, OpenLake, load, open_lake

__all__ = ["Dataset", "Experiment", "OpenLake", "load", "open_lake"]
