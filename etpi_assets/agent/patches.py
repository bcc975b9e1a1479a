"""Patches between two sets of text files, written by git so that `git apply` gives the second set."""

from __future__ import annotations

import os
import re
import subprocess
import tempfile
from collections.abc import Mapping

_NO_SETTINGS = {"GIT_CONFIG_NOSYSTEM": "1", "GIT_CONFIG_GLOBAL": os.devnull, "GIT_ATTR_NOSYSTEM": "1", "LC_ALL": "C"}
_DIFF = "diff --no-ext-diff --no-textconv --no-color --no-renames --text --src-prefix=a/ --dst-prefix=b/ before after"
_REFUSED = re.compile(r"(^|[/\\])(\.git|git~1)[ .]*(:[^/\\]*)?($|[/\\])", re.IGNORECASE)
"""Parts of a path that some file system takes for the folder .git."""
_ESCAPES = str.maketrans({"\\": "\\\\", '"': '\\"', "\n": "\\n"})


def unified_diff(before: Mapping[str, str], after: Mapping[str, str]) -> str:
    """Return the changes from `before` to `after` (path -> text) as `git diff` writes them; "" if equal.

    The user's and the machine's settings of git have no effect. Created and deleted files have mode 100644. Paths with
    a part `.git`, which `git apply` refuses, are left out.

    Raises:
        RuntimeError: git is not there, or refuses a path.
    """
    changed = [path for path in sorted(before.keys() | after.keys()) if before.get(path) != after.get(path)]
    changed = [path for path in changed if not _REFUSED.search(path)]
    if not changed:
        return ""
    with tempfile.TemporaryDirectory() as folder:
        _git(folder, "init --quiet --bare --template= .")
        stream = b"".join(_commit(name, files, changed) for name, files in (("before", before), ("after", after)))
        _git(folder, "fast-import --quiet --force", stream)
        return _git(folder, _DIFF).decode("utf-8", "surrogateescape")


def _commit(name: str, files: Mapping[str, str], paths: list[str]) -> bytes:
    """Return git's fast-import commands for a commit, on a branch of this name, that holds the files at `paths`."""
    parts = [f"commit refs/heads/{name}\ncommitter etpi <etpi@localhost> 0 +0000\ndata 0\n".encode()]
    for path in paths:
        if (text := files.get(path)) is not None:
            data = text.encode("utf-8", "surrogateescape")
            quoted = path.translate(_ESCAPES).encode("utf-8", "surrogateescape")
            parts.append(b'M 100644 inline "%b"\ndata %d\n%b\n' % (quoted, len(data), data))
    return b"".join(parts) + b"\n"


def _git(folder: str, command: str, data: bytes = b"") -> bytes:
    environment = {"PATH": os.environ.get("PATH", os.defpath), "HOME": folder, "GIT_DIR": folder, **_NO_SETTINGS}
    try:
        done = subprocess.run(
            ["git", "-c", "core.protectNTFS=false", *command.split()],
            input=data,
            cwd=folder,
            env=environment,
            capture_output=True,
            check=False,
        )
    except FileNotFoundError as error:
        raise RuntimeError("a patch needs git: install it on this machine") from error
    if done.returncode:
        raise RuntimeError(f"git {command.split()[0]} failed: {done.stderr.decode(errors='replace')[-500:]}")
    return done.stdout
