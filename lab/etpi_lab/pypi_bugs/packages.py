"""The suite's packages: pins, download of source distributions through pip, their files."""

from __future__ import annotations

import hashlib
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
