"""`etpi sql`: questions to the catalog, as reports of sql/reports, files or text, and DuckDB's own shell."""

from etpi_resources.lake.manifest import LakeError


class QueryError(LakeError):
    """A query cannot be found or run; the message names it and what to do."""
