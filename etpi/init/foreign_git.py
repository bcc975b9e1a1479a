"""Git on repositories of strangers: their objects are read, and nothing that they configure runs on this machine.

A repository's configuration names programs that git runs on the host: for diffs (textconv, external), signatures,
filters, file monitors, hooks, and fetches of objects that a partial clone lacks.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_OFF = ("safe.directory=*", "core.fsmonitor=", "core.hooksPath=/dev/null", "log.showSignature=false")
_SECONDS = 20
"""The time that git has to read a foreign repository's configuration and references."""


def git(folder: Path, *words: str, seconds: float | None = None, **variables: str) -> bytes:
    """Run git in a folder without the configuration of the user and of the machine; return what it prints.

    Raises:
        subprocess.CalledProcessError: it fails, or runs for more than `seconds`.
    """
    environment = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    environment |= {"GIT_CONFIG_NOSYSTEM": "1", "GIT_CONFIG_GLOBAL": "/dev/null", "GIT_NO_LAZY_FETCH": "1", **variables}
    command = ["git", *(word for setting in _OFF for word in ("-c", setting)), "-C", str(folder), *words]
    try:
        return subprocess.run(command, check=True, capture_output=True, env=environment, timeout=seconds).stdout
    except subprocess.TimeoutExpired as error:
        reason = f"git {words[0]} takes longer than {seconds} s; a file of .git may be a pipe"
        raise subprocess.CalledProcessError(124, command, stderr=reason.encode()) from error


@contextmanager
def objects_of(repository: Path) -> Iterator[Path]:
    """Yield a bare repository, with no configuration but git's own, that has a repository's objects and its HEAD.

    Raises:
        subprocess.CalledProcessError: it is no repository, or has no commit.
    """

    def ask(*words: str) -> str:
        line = ("rev-parse", "--path-format=absolute", *words)
        return git(repository, *line, seconds=_SECONDS).decode().rstrip("\n")

    head, kind = ask("--verify", "HEAD^{commit}"), ask("--show-object-format")
    with tempfile.TemporaryDirectory(prefix="etpi-git-") as name:
        folder = Path(name)
        git(folder, "init", "-q", "--bare", "--template=", f"--object-format={kind}")
        (folder / "objects" / "info" / "alternates").write_text(f"{ask('--git-path', 'objects')}\n")
        if (shallow := Path(ask("--git-path", "shallow"))).is_file():
            shutil.copyfile(shallow, folder / "shallow")
        (folder / "HEAD").write_text(f"{head}\n")
        yield folder
