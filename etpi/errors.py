"""One line for each expected error, with its cause, the file and what to do; every command and page uses it.

The message of an ExpectedError is that line. Those of the operating system, of Dagster's storage and
of DuckDB get it here. Any other error is a fault of the program and keeps its stack trace.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator

from etpi_resources.errors import ExpectedError

_REMEDIES = {
    errno.ENOSPC: "free space there (`etpi gc` shows what the lake no longer needs)",
    errno.EDQUOT: "free space there (`etpi gc` shows what the lake no longer needs)",
    errno.EROFS: "name a folder that can be written (ETPI_DATA names the lake's)",
    errno.EACCES: "give your user access to it, or name another folder (ETPI_DATA names the lake's)",
    errno.EPERM: "give your user access to it, or name another folder (ETPI_DATA names the lake's)",
    errno.ENOTDIR: "ETPI_DATA, DAGSTER_HOME and the folders of specs have to name folders",
    errno.EEXIST: "ETPI_DATA, DAGSTER_HOME and the folders of specs have to name folders",
    errno.EMFILE: "raise the limit of open files: ulimit -n 4096",
    errno.EIO: "the disk reports a fault; look at dmesg",
}


def explained(error: BaseException) -> str | None:
    """Return the line for an error, or for the first of its causes that has one; None for a fault of the program."""
    from etpi_assets.specs.paths import as_written

    for cause in _chain(error):
        if isinstance(cause, ExpectedError):
            return as_written(str(cause))
        if isinstance(cause, OSError) and cause.errno in _REMEDIES:
            place = f"{cause.filename}: " if cause.filename else ""
            return f"{place}{cause.strerror}; {_REMEDIES[cause.errno]}"
        if type(cause).__module__.startswith("sqlalchemy."):
            reason = str(getattr(cause, "orig", None) or cause).splitlines()[0]
            home = os.environ.get("DAGSTER_HOME", ".dagster_home")
            return (
                f"{home}: Dagster cannot use its storage there: {reason}. If its disk is full, free space; if a file "
                "is damaged, move the folder away: it has the history of runs, and no data"
            )
    return None


def _chain(error: BaseException) -> Iterator[BaseException]:
    current: BaseException | None = error
    while current is not None:
        yield current
        current = current.__cause__
