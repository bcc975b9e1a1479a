"""The error that commands report in one line: a spec, or a name in it, is wrong."""

from __future__ import annotations

from etpi_resources.errors import ExpectedError


class SpecError(ExpectedError, ValueError):
    """A spec is invalid or does not exist; the message names the file, the key and the remedy."""
