"""`etpi run`: preflight, the client of the Dagster instance, progress, and tables for a terminal."""

from etpi_resources.errors import ExpectedError


class CodeServerError(ExpectedError, RuntimeError):
    """Dagster's code server did not start, or cannot launch a run; the message has its last line."""


CATALOG = "catalog"
"""The name under which `etpi run` rebuilds the tables across experiments and the catalog alone."""
