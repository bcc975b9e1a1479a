"""The written HTML report of an experiment, with links that lead to this server."""

from __future__ import annotations

from etpi.view.catalog_file import Queries
from etpi.view.pages.page import NotFound
from etpi_resources.hidden import with_hidden
from etpi_resources.inside import is_file_inside, read_inside
from etpi_resources.lake.lake import Lake
from etpi_resources.links import REPORTED_VIEW


def report(queries: Queries, lake: Lake, experiment: str) -> str:
    """Return the page, its links made relative to this server.

    Raises:
        NotFound: no report was written, or its path leads out of the lake.
    """
    row = next((row for row in queries.rows("reports", experiment=experiment) if row["kind"] == "html"), None)
    if row is None:
        raise NotFound(f"There is no report of {experiment!r}; `etpi run {experiment}` writes it.")
    if not row["path"].endswith(".html") or not is_file_inside(lake.root, row["path"]):
        raise NotFound(f"The report of {experiment!r} is not at {row['path']} in {lake.root}.")
    text = with_hidden(read_inside(lake.root, row["path"]).decode("utf-8"))
    return text.replace(f'="{REPORTED_VIEW}/', '="/')
