"""A second checkout of etpi, for tests in which two codes meet."""

from __future__ import annotations

import shutil
from pathlib import Path

from etpi_cluster.code import PACKAGES

ROOT = Path(__file__).resolve().parents[2]


def copy_code(folder: Path) -> None:
    """Copy the packages and sql/ into a folder."""
    for name in (*PACKAGES, "sql"):
        source = ROOT / "cluster" / name if name == "etpi_cluster" else ROOT / name
        shutil.copytree(source, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
