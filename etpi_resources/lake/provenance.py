"""The revision of the code and the environment of the process, which a manifest records."""

from __future__ import annotations

import hashlib
import platform
import subprocess
from functools import cache
from importlib import metadata
from pathlib import Path
from types import MappingProxyType

NAMED_PACKAGES = (
    "torch", "transformers", "tokenizers", "trl", "peft", "accelerate", "datasets", "safetensors", "numpy",
    "pyarrow", "duckdb", "dagster", "vllm", "llguidance",
)  # fmt: skip
"""Packages whose versions are listed; the hash covers every installed package."""


@cache
def git_revision() -> str | None:
    """Return the commit of the running code, with "+modified" if tracked files differ; None if it is unknown.

    An installed wheel has that of its checkout in a file, which `setup.py` writes.
    """
    here = Path(__file__).resolve().parent
    if (file := here / "git_revision.txt").exists():
        return file.read_text(encoding="utf-8")
    try:
        # An installed copy may be inside the checkout of another project.
        _git(here, "ls-files", "--error-unmatch", "schemas.py")
        commit = _git(here, "rev-parse", "HEAD")
        modified = _git(here, "status", "--porcelain", "--untracked-files=no")
    except (OSError, subprocess.CalledProcessError, subprocess.TimeoutExpired):
        return None
    return f"{commit}+modified" if modified else commit


def _git(folder: Path, *arguments: str) -> str:
    done = subprocess.run(["git", *arguments], cwd=folder, check=True, capture_output=True, text=True, timeout=20)
    return done.stdout.strip()


@cache
def etpi_version() -> str:
    """Return the version of etpi; "unknown" in a checkout that is not installed."""
    return installed("etpi") or "unknown"


@cache
def installed(package: str) -> str | None:
    """Return the installed version of a package; None without it."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


@cache
def environment_fingerprint() -> MappingProxyType[str, str]:
    """Return interpreter, machine, versions of NAMED_PACKAGES, and a sha256 over every installed package."""
    versions: dict[str, str] = {}
    for distribution in metadata.distributions():
        name = distribution.metadata["Name"]
        if name:
            versions.setdefault(name.lower().replace("_", "-"), distribution.version)
    listing = "\n".join(f"{name}=={version}" for name, version in sorted(versions.items()))
    return MappingProxyType(
        {
            "python": platform.python_version(),
            "platform": platform.platform(),
            "machine": platform.machine(),
            **{name: versions[name] for name in NAMED_PACKAGES if name in versions},
            "packages_sha256": hashlib.sha256(listing.encode()).hexdigest(),
        }
    )
