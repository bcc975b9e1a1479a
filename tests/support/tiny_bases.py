"""The shipped tiny bases, in a folder that a test may change."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from etpi_assets import tiny_bases


def copy_shipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Copy the shipped bases, have etpi use the copy, and return its folder."""
    (package,) = tiny_bases.packages()
    folder = tmp_path / "shipped"
    shutil.copytree(package, folder)
    monkeypatch.setattr(tiny_bases, "packages", lambda: [folder])
    return folder
