"""Keys that must never be published: read or create them here, and search for them in data before it is published."""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from secrets import token_urlsafe

import pyarrow as pa
import pyarrow.compute as pc

_NAMES = re.compile(r"(^|_)(API_?KEY|ACCESS_?KEY|PRIVATE_?KEY|SECRET(_KEY)?|TOKEN|PASSWORD|PASSWD|CREDENTIALS?)$")
_SHORTEST = 12
"""Characters; a shorter value occurs by chance."""

_read: set[str] = set()


def read_secret(variable: str) -> str | None:
    """Return the value of an environment variable that a spec names as a key; from now on it is a secret."""
    _read.add(variable)
    return os.environ.get(variable) or None


def kept_secret(path: Path) -> str:
    """Return the random secret in a file; create it at the first call, readable by this user alone.

    The file is written beside and linked, so that no kill leaves it empty.
    """
    if not path.exists() or not path.read_text().strip():
        path.unlink(missing_ok=True)
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=path.parent, prefix=".key-") as file:  # only this user can read it
            file.write(token_urlsafe(32))
            file.flush()
            os.fsync(file.fileno())
            with suppress(FileExistsError):  # another process was first
                os.link(file.name, path)
    return path.read_text().strip()


def secrets() -> Mapping[str, str]:
    """Return {variable: value} of the keys read so far, and of variables that are named like keys."""
    named = {name: value for name, value in os.environ.items() if name in _read or _NAMES.search(name)}
    return {name: value for name, value in named.items() if len(value) >= _SHORTEST and value[0] not in "/."}


def secrets_in(text: str) -> list[str]:
    """Return the variables whose value is in the text."""
    return [name for name, value in secrets().items() if value in text]


def secrets_of(table: pa.Table) -> Iterator[tuple[str, str]]:
    """Yield (column, variable) for every text column that contains a key's value."""
    searched = secrets()
    for name in table.column_names if searched else ():
        column = table.column(name)
        if not (pa.types.is_string(column.type) or pa.types.is_large_string(column.type)):
            continue
        for variable, value in searched.items():
            matches = pc.match_substring(column, value)  # pyright: ignore[reportAttributeAccessIssue]
            if pc.any(matches).as_py():  # pyright: ignore[reportAttributeAccessIssue]
                yield name, variable
