"""Files outside the lake that a spec names: resolve their paths, notice that they changed."""

from __future__ import annotations

import hashlib
import os
import re
from pathlib import Path

from etpi_assets.specs.rollout_set import RolloutSetSpec
from etpi_assets.specs.suite import SuiteSpec
from etpi_resources.errors import ExpectedError


class PathError(ExpectedError, ValueError):
    """A spec's path cannot be resolved; the message says what to set."""


_expanded: dict[str, str] = {}
"""Values of variables that this process put into paths -> names."""


def expand(path: str) -> Path:
    """Return a spec's path with `${VARIABLE}` and `~` replaced; a relative path starts at the working folder.

    Raises PathError: a variable is not set.
    """

    def value(match: re.Match[str]) -> str:
        if (folder := os.environ.get(match[1])) is None:
            raise PathError(
                f"the path {path!r} needs the environment variable {match[1]}; export {match[1]}=<folder> and run again"
            )
        _expanded[folder] = match[0]
        return folder

    return Path(re.sub(r"\$\{(\w+)\}", value, path)).expanduser()


def as_written(text: str) -> str:
    """Return a message or a log line with the paths of specs as they are written: a variable may be a secret."""
    for value in sorted(filter(None, _expanded), key=len, reverse=True):
        text = text.replace(value, _expanded[value])
    return text


def external_path(spec: object) -> str | None:
    """Return the path that a suite (`params.path`) or an imported rollout set (`path`) reads, as written, or None."""
    if isinstance(spec, SuiteSpec):
        path = spec.params.get("path")
        return path if isinstance(path, str) else None
    return spec.path if isinstance(spec, RolloutSetSpec) else None


def fingerprint(path: str) -> str:
    """Return 16 hex digits that change when a file below the path is added, removed, resized or written.

    Without a file: "absent".

    Contents are not read: an input of many gigabytes must not slow down `make status`. A touched file costs one more
    import, whose result has the same data version.
    """
    try:
        root = expand(path)
    except PathError:
        return "absent"
    files = sorted(p for p in root.rglob("*") if p.is_file()) if root.is_dir() else [root] if root.is_file() else []
    if not files:
        return "absent"
    digest = hashlib.sha256()
    for file in files:
        stat = file.stat()
        digest.update(f"{file.relative_to(root).as_posix()}\0{stat.st_size}\0{stat.st_mtime_ns}\n".encode())
    return digest.hexdigest()[:16]
