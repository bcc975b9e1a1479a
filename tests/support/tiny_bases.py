"""The shipped tiny bases, in a folder that a test may change."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from etpi_assets.tiny_bases import shipped


def copy_shipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Copy the shipped bases, have etpi use the copy, and return its folder."""
    folder = tmp_path / "shipped"
    shutil.copytree(shipped.FOLDER, folder)
    monkeypatch.setattr(shipped, "FOLDER", folder)
    return folder
