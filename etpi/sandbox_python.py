"""Make the interpreter with pytest that runs hidden tests in bubblewrap sandboxes."""

from __future__ import annotations

import importlib
import importlib.util
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

import click

PYTHON = "/usr/bin/python3"
"""The sandbox's interpreter."""

_PYTEST = ("pytest", "_pytest", "pluggy", "iniconfig", "packaging", "pygments")
_DESCRIBED = ("pytest", "pluggy")
"""Packages that look up their own version, so their metadata is copied too."""


class PytestMissing(click.ClickException):
    """This environment has no pytest to copy."""


def make_tools(folder: Path, packages: Path | None = None, roots: Sequence[str] = ()) -> Path:
    """Create, once, a folder whose `bin/python3` is the sandbox's interpreter with pytest.

    Args:
        packages: a folder of installed packages to copy, pytest among them; None: this environment's pytest alone.
        roots: further folders that modules are imported from, as paths in the sandbox.

    Raises:
        PytestMissing: there is no pytest in this environment.
    """
    if (folder / "bin" / "python3").exists():
        return folder
    if packages is None and importlib.util.find_spec("pytest") is None:
        raise PytestMissing("pytest is not installed here: pip install 'etpi[dev]'")
    beside = folder.with_name(f"{folder.name}.new")
    shutil.rmtree(beside, ignore_errors=True)
    (beside / "bin").mkdir(parents=True)
    if packages is None:
        _copy_pytest(beside / "site")
    else:
        # Links and start-up files would lead to places that the sandbox does not show.
        left_out = shutil.ignore_patterns("__pycache__", "*.pth", "__editable__*")
        shutil.copytree(packages, beside / "site", ignore=left_out)
    compiled = ["-m", "compileall", "-q", "--invalidation-mode", "unchecked-hash", str(beside / "site")]
    subprocess.run([PYTHON, *compiled], check=packages is None, capture_output=True)
    path = ":".join([f"{folder}/site", *roots])
    for name in ("python", "python3"):
        file = beside / "bin" / name
        file.write_text(f'#!/bin/sh\nPYTHONPATH="{path}:$PYTHONPATH" exec {PYTHON} "$@"\n')
        file.chmod(0o755)
    subprocess.run(["chmod", "-R", "a+rX", str(beside)], check=True)
    beside.rename(folder)
    return folder


def _copy_pytest(folder: Path) -> None:
    site = Path(importlib.import_module("pytest").__file__ or "").parents[1]
    for name in _PYTEST:
        shutil.copytree(site / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in _DESCRIBED:
        (described,) = site.glob(f"{name}-*.dist-info")
        shutil.copytree(described, folder / described.name)
    shutil.copy(site / "py.py", folder / "py.py")
