"""The command `etpi view`: serve the pages until it is stopped, or write those of an experiment to a folder."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import click

from etpi.dagster_home import dagster_home
from etpi.view.app import make_app
from etpi.web.serve import serve
from etpi_resources.lake.catalog import connect, default_path
from etpi_resources.lake.lake import Lake


def serve_view(host: str, port: int, names: Sequence[str]) -> int:
    """Serve the pages of the lake in the working folder or $ETPI_DATA.

    Raises:
        LakeError: there is no catalog.
    """
    lake = Lake.open()
    path = default_path(lake)
    connect(path).close()
    serve(make_app(lake, path), f"etpi view: {path}", host, port, names, dagster_home())
    return 0


def export_view(experiment: str, folder: Path) -> int:
    """Write an experiment's pages to a new folder.

    Raises:
        LakeError: there is no catalog or experiment, or the folder exists.
    """
    from etpi.view.export import export

    lake = Lake.open()
    path = default_path(lake)
    connect(path).close()
    count = export(make_app(lake, path), experiment, folder)
    click.echo(f"{count} pages: open {folder / 'index.html'}")
    return 0
