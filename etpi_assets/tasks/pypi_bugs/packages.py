"""The suite's packages: pins, download of source distributions through pip, their files, the interpreter for tests."""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import shutil
import subprocess
import sys
import tarfile
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from etpi_assets.tasks.frozen import RUNNER_FILE

PINS = Path(__file__).with_name("packages.toml")
PYTHON = "/usr/bin/python3"
"""The sandbox's interpreter."""

_PYTEST = ("pytest", "_pytest", "pluggy", "iniconfig", "packaging", "pygments")
_DESCRIBED = ("pytest", "pluggy")
"""Packages that look up their own version, so their metadata is copied too."""

MAX_BYTES = 300_000
"""A larger file of a distribution is left out."""


class SuiteBuildError(RuntimeError):
    """The suite cannot be built; the message says what is missing and what to do."""


@dataclass(frozen=True)
class PinnedPackage:
    """One pinned distribution; see `packages.toml`."""

    name: str
    version: str
    sha256: str
    roots: tuple[str, ...]
    tests: tuple[str, ...]
    modules: tuple[str, ...]


@dataclass(frozen=True)
class PackageFiles:
    """A package's files, path -> text: `code`, which the agent sees, and the hidden `tests` with their data."""

    code: Mapping[str, str]
    tests: Mapping[str, str]


def pinned(path: Path = PINS) -> list[PinnedPackage]:
    """Return the packages of a file of pins."""
    rows: list[dict[str, Any]] = tomllib.loads(path.read_text(encoding="utf-8"))["package"]
    lists = ("roots", "tests", "modules")
    return [PinnedPackage(**{**row, **{name: tuple(row[name]) for name in lists}}) for row in rows]


def fetch(packages: Sequence[PinnedPackage], folder: Path) -> dict[str, Path]:
    """Download missing distributions into `folder` with pip, which checks their hashes. Returns name -> file.

    Raises:
        SuiteBuildError: pip could not fetch one; the message has the end of its output.
    """
    folder.mkdir(parents=True, exist_ok=True)
    distributions = _present(packages, folder)
    if missing := [package for package in packages if package.name not in distributions]:
        wanted = folder / "wanted.txt"
        wanted.write_text("".join(f"{p.name}=={p.version} --hash=sha256:{p.sha256}\n" for p in missing))
        flags = ["--quiet", "--no-deps", "--no-binary", ":all:", "--require-hashes"]
        command = [sys.executable, "-m", "pip", "download", *flags, "-r", str(wanted), "-d", str(folder)]
        done = subprocess.run(command, capture_output=True, text=True)
        wanted.unlink()
        distributions = _present(packages, folder)
        if lacking := [package.name for package in packages if package.name not in distributions]:
            raise SuiteBuildError(
                f"pip could not fetch the source distributions of {', '.join(lacking)}: {done.stderr[-800:].strip()}. "
                f"Run it where a package index can be reached, or put them into {folder} by hand"
            )
    return distributions


def read(package: PinnedPackage, distribution: Path) -> PackageFiles:
    """Return the package's text files. Raises SuiteBuildError if it has no modules or no tests."""
    files = dict(_texts(distribution))
    tests = {path: text for path, text in files.items() if _below(path, package.tests)}
    code = {path: text for path, text in files.items() if path.endswith(".py") and _below(path, package.modules)}
    code = {path: text for path, text in code.items() if path not in tests and not RUNNER_FILE.search(path)}
    if not code or not tests:
        raise SuiteBuildError(
            f"{distribution.name} holds {len(code)} modules and {len(tests)} tests; look at {PINS.name}"
        )
    return PackageFiles(code, tests)


def make_tools(folder: Path, packages: Path | None = None, roots: Sequence[str] = ()) -> Path:
    """Create, once, a folder whose `bin/python3` is the sandbox's interpreter with pytest.

    Args:
        packages: a folder of installed packages to copy, pytest among them; None: this environment's pytest alone.
        roots: further folders that modules are imported from, as paths in the sandbox.

    Raises:
        SuiteBuildError: there is no pytest in this environment.
    """
    if (folder / "bin" / "python3").exists():
        return folder
    if packages is None and importlib.util.find_spec("pytest") is None:
        raise SuiteBuildError("pytest is not installed here: pip install 'etpi[dev]'")
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
    """Copy this environment's pytest and what it imports."""
    site = Path(importlib.import_module("pytest").__file__ or "").parents[1]
    for name in _PYTEST:
        shutil.copytree(site / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in _DESCRIBED:
        (described,) = site.glob(f"{name}-*.dist-info")
        shutil.copytree(described, folder / described.name)
    shutil.copy(site / "py.py", folder / "py.py")


def _present(packages: Sequence[PinnedPackage], folder: Path) -> dict[str, Path]:
    """Return the distributions in the folder, recognised by their hashes."""
    by_hash = {hashlib.sha256(p.read_bytes()).hexdigest(): p for p in sorted(folder.iterdir()) if p.is_file()}
    return {package.name: by_hash[package.sha256] for package in packages if package.sha256 in by_hash}


def _texts(distribution: Path) -> Iterator[tuple[str, str]]:
    """Yield (path below the distribution's top folder, text) of its UTF-8 files. Writes nothing to disk."""
    with tarfile.open(distribution) as archive:
        for member in archive:
            path = PurePosixPath(member.name)
            if not member.isfile() or member.size > MAX_BYTES or ".." in path.parts:
                continue
            content = archive.extractfile(member)
            assert content is not None  # as it is a file
            try:
                yield str(PurePosixPath(*path.parts[1:])), content.read().decode("utf-8")
            except UnicodeDecodeError:
                continue


def _below(path: str, places: Sequence[str]) -> bool:
    return any(path == place or path.startswith(f"{place}/") for place in places)
