"""The command `etpi view`: serve the pages until it is stopped, or write those of an experiment to a folder."""

from __future__ import annotations

import hashlib
import re
import shutil
import time
from collections.abc import Sequence
from html import escape, unescape
from pathlib import Path
from urllib.parse import parse_qs, quote, urljoin, urlsplit

import click
from starlette.applications import Starlette
from starlette.testclient import TestClient

from etpi.dagster_home import dagster_home
from etpi.run.console import say
from etpi.view.app import FILES, make_app
from etpi.web.serve import serve
from etpi_assets.graph import GRAPH
from etpi_resources import links
from etpi_resources.lake.catalog import build, connect, default_path
from etpi_resources.lake.lake import Lake, LakeError


def serve_view(host: str, port: int, names: Sequence[str]) -> int:
    """Serve the pages of the lake in the working folder or $ETPI_DATA. Raises LakeError: there is no lake."""
    app, path = _app()
    serve(app, f"etpi view: {path}", host, port, names, dagster_home())
    return 0


def export_view(experiment: str, folder: Path) -> int:
    """Write an experiment's pages to a new folder.

    Raises LakeError: there is no lake or experiment, or the folder exists.
    """
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


SHOWN_SECONDS = 3.0
_LINK = re.compile(r'\s(href|src)="(?!https?:)([^"#]+)(#[^"]*)?"')
_FORM = re.compile(r"<form .*?</form>", re.DOTALL)


def export(app: Starlette, experiment: str, folder: Path) -> int:
    """Write the pages and return their number: experiment, tasks, report, curves, data set, and rollouts.

    Links to other pages, forms and tokens are left out.

    Raises LakeError: the folder exists, or the catalog has no such experiment.
    """
    if folder.exists():
        raise LakeError(f"{folder} exists; name a folder that does not")
    building = folder.with_name(f".{folder.name}.building")
    shutil.rmtree(building, ignore_errors=True)  # left by an export that was stopped
    with TestClient(app, base_url="http://localhost") as client:
        names = _crawl(client, experiment, building)
        for name in FILES:
            (building / name).write_text(client.get(f"/{name}").text, encoding="utf-8")
    targets = names | {f"/{name}": name for name in FILES}
    for address, name in names.items():
        file = building / name
        file.write_text(_relinked(file.read_text(encoding="utf-8"), address, targets), encoding="utf-8")
    building.rename(folder)
    return len(names)


def _crawl(client: TestClient, experiment: str, folder: Path) -> dict[str, str]:
    """Write the experiment's pages as the server sends them; return {address: file}."""
    start = links.experiment_page(experiment)
    names: dict[str, str] = {}
    lists, rollouts = dict.fromkeys([start]), dict[str, None]()  # all lists first: then the total is known
    gone: set[str] = set()
    shown = time.monotonic()
    while waiting := lists or rollouts:
        address = next(iter(waiting))
        del waiting[address]
        response = client.get(address)
        if address == start and response.status_code != 200:
            raise LakeError(f"the catalog has no experiment {experiment!r}; `etpi status` lists experiments")
        if response.status_code != 200:
            gone.add(address)
            continue
        names[address] = _file_name(address) if address != start else "index.html"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / names[address]).write_text(response.text, encoding="utf-8")
        for _, link, _ in () if waiting is rollouts else _LINK.findall(response.text):  # a rollout's come from lists
            target = urljoin(address, unescape(link))
            if _belongs(target, experiment) and target not in gone and target not in names:
                (rollouts if target.startswith("/rollout/") else lists)[target] = None
        if time.monotonic() - shown > SHOWN_SECONDS:
            shown = time.monotonic()
            total = len(names) + len(lists) + len(rollouts)
            say(f"{len(names):,} of {total:,} pages{' or more' if lists else ''}")
    return names


def _belongs(address: str, experiment: str) -> bool:
    """Return whether an address is one of the experiment's pages that are exported."""
    parts, name = urlsplit(address), quote(experiment, safe="")
    query = parse_qs(parts.query)
    if parts.path in ("/rollouts", "/curves"):
        return query.get("experiment") == [experiment] and query.keys() <= {"experiment", "first"}
    if parts.path.startswith("/rollout/"):
        return not parts.path.endswith("/tokens")
    data = links.dataset_page(experiment)
    if parts.path == data or parts.path.startswith(f"{data}/"):
        return query.keys() <= {"first"}
    return parts.path in {f"/{page}/{name}" for page in ("experiment", "regressions", "report", "task")}


def _file_name(address: str) -> str:
    digest = hashlib.sha256(address.encode()).hexdigest()[:8]
    return f"{re.sub(r'[^A-Za-z0-9.]+', '-', address).strip('-')[:80]}-{digest}.html"


def _relinked(text: str, address: str, names: dict[str, str]) -> str:
    """Return a page whose links lead to the files; a link to another page becomes text."""

    def link(match: re.Match[str]) -> str:
        file = names.get(urljoin(address, unescape(match[2])))
        return f' {match[1]}="{escape(file)}{match[3] or ""}"' if file else ""

    return _LINK.sub(link, _FORM.sub("", text))
