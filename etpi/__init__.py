"""The Python API (`etpi.open`, `etpi.load`) and the console command. Their work is done in the packages below.

    lake = etpi.open()                            # or etpi.open("/path/to/data")
    lake.scan("turns", experiment="name")         # a polars LazyFrame over the current versions
    lake.sql("FROM rollouts WHERE task_id = $task", task="t1")
    etpi.load("name").failures()

Names load on first use, so that `import etpi` and `etpi --help` import neither polars nor Dagster nor torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from etpi.api import Dataset, Experiment, OpenLake, load
    from etpi.api import open_lake as open

__all__ = ["Dataset", "Experiment", "OpenLake", "load", "open"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'etpi' has no attribute {name!r}")
    from etpi import api as frames

    return getattr(frames, "open_lake" if name == "open" else name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
