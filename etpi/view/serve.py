"""The command `etpi view`: serve the pages until it is stopped, or write those of an experiment to a folder."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import click
from starlette.applications import Starlette

from etpi.dagster_home import dagster_home
from etpi.view.app import make_app
from etpi.web.serve import serve
from etpi_assets.graph import GRAPH
from etpi_resources.lake.catalog import build, connect, default_path
from etpi_resources.lake.lake import Lake


def serve_view(host: str, port: int, names: Sequence[str]) -> int:
    """Serve the pages of the lake in the working folder or $ETPI_DATA.

    Raises:
        LakeError: there is no lake.
    """
    app, path = _app()
    serve(app, f"etpi view: {path}", host, port, names, dagster_home())
    return 0


def export_view(experiment: str, folder: Path) -> int:
    """Write an experiment's pages to a new folder.

    Raises:
        LakeError: there is no lake or experiment, or the folder exists.
    """
    from etpi.view.export import export

    count = export(_app()[0], experiment, folder)
    click.echo(f"{count} pages: open {folder / 'index.html'}")
    return 0


def _app() -> tuple[Starlette, Path]:
    """Return the pages and the path of the catalog, which is written if a first run has not published it yet."""
    lake = Lake.open()
    path = default_path(lake)
    if lake.refs() and not path.exists():
        build(lake, GRAPH.values(), path)
    connect().close()  # its error says why this place
    return make_app(lake, path), path
