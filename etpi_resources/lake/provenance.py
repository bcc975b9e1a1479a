"""What made a version: the code's revision and the environment it ran in.

Belongs here: facts about the running program that a manifest records, read once a process. Does not belong here: data.
"""

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
    "pyarrow", "duckdb", "dagster", "vllm",
)  # fmt: skip
"""Packages whose versions a person wants to read; every other one is in the hash."""


@cache
def git_revision() -> str | None:
    """The commit of the running code, with "+modified" where tracked files differ; None outside a checkout of etpi."""
    here = Path(__file__).resolve().parent
    try:
        # An installed copy may lie inside somebody else's checkout, whose commit says nothing about this code.
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
def environment_fingerprint() -> MappingProxyType[str, str]:
    """Interpreter, machine, versions of the packages that matter, and a sha256 over every installed package."""
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
