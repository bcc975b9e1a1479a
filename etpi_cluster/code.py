"""The hash of the code that a process runs, so that a node with other code is refused.

The numbers of `etpi_assets/planning/versions.toml` say which results differ; this hash covers every file of the
packages.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from functools import cache
from importlib.metadata import entry_points
from importlib.util import find_spec
from pathlib import Path

PACKAGES = ("etpi", "etpi_assets", "etpi_cluster", "etpi_resources")
"""Packages that every node must have alike."""

PLUGIN_GROUPS = "etpi."
"""The beginning of the names of all groups of entry points that plugins use (`specs.plugins`)."""

_SQL_IN_WHEEL = "etpi_resources/sql/"
_NO_CODE = (".pyc", ".pyi", ".swp", ".orig")


@cache
def code_hash(*plugins: str) -> str:
    """Return 16 hex digits over names and content of all files of etpi's packages, its SQL, and these packages.

    A checkout and a wheel of the same sources have the same hash. It is computed once in a process.

    Raises:
        ModuleNotFoundError: a package is not installed here.
    """
    digest = hashlib.sha256()
    for name, path in sorted(_files((*PACKAGES, *plugins))):
        content = hashlib.sha256(path.read_bytes()).hexdigest()
        digest.update(f"{name}\0{content}\n".encode())
    return digest.hexdigest()[:16]


def plugin_packages() -> list[str]:
    """Return the top-level packages of the installed plugins, whose code must be the same on every node."""
    entries = entry_points()
    groups = [group for group in entries.groups if group.startswith(PLUGIN_GROUPS)]
    points = [point for group in groups for point in entries.select(group=group)]
    return sorted(
        name for name in {point.module.split(".")[0] for point in points}.difference(PACKAGES) if find_spec(name)
    )


def _files(packages: Sequence[str]) -> Iterator[tuple[str, Path]]:
    """Yield (name from the root, path) of every file that counts."""
    for package in packages:
        spec = find_spec(package)
        if spec is None:
            raise ModuleNotFoundError(f"the package {package} is not installed on this node", name=package)
        folders = [Path(place) for place in spec.submodule_search_locations or ()]
        if not folders and spec.origin:
            yield package, Path(spec.origin)
        for folder in folders:
            yield from (entry for entry in _below(folder, package) if not entry[0].startswith(_SQL_IN_WHEEL))
            if package == "etpi_resources":  # a wheel has the SQL inside, a checkout beside the packages
                inside = folder / "sql"
                yield from _below(inside.resolve() if inside.is_dir() else folder.parent / "sql", "sql")


def _below(folder: Path, name: str) -> Iterator[tuple[str, Path]]:
    for path in folder.rglob("*"):
        if path.is_file() and path.suffix not in _NO_CODE and not path.name.startswith("."):
            yield f"{name}/{path.relative_to(folder).as_posix()}", path
