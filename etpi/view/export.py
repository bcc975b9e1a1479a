"""The pages of one experiment as a folder of files that link to each other, to share without a server."""

from __future__ import annotations

import hashlib
import re
from collections import deque
from html import escape, unescape
from pathlib import Path
from urllib.parse import parse_qs, quote, urljoin, urlsplit

from starlette.applications import Starlette
from starlette.testclient import TestClient

from etpi.view.app import FILES
from etpi_resources import links
from etpi_resources.lake.lake import LakeError

MOST_PAGES = 2_000
_LINK = re.compile(r'\s(href|src)="(?!https?:)([^"#]+)(#[^"]*)?"')
_FORM = re.compile(r"<form .*?</form>", re.DOTALL)


def export(app: Starlette, experiment: str, folder: Path) -> int:
    """Write the pages and return their number: experiment, tasks, report, curves, data set, and rollouts.

    Links to other pages, forms and tokens are left out.

    Raises:
        LakeError: the folder exists, or the catalog has no such experiment.
    """
    if folder.exists():
        raise LakeError(f"{folder} exists; name a folder that does not")
    with TestClient(app, base_url="http://localhost") as client:
        pages = _crawl(client, experiment)
        folder.mkdir(parents=True)
        names = {address: _file_name(address) for address in pages} | {f"/{name}": name for name in FILES}
        names[links.experiment_page(experiment)] = "index.html"
        for address, text in pages.items():
            (folder / names[address]).write_text(_relinked(text, address, names), encoding="utf-8")
        for name in FILES:
            (folder / name).write_text(client.get(f"/{name}").text, encoding="utf-8")
    return len(pages)


def _crawl(client: TestClient, experiment: str) -> dict[str, str]:
    """Return {address: HTML} of the experiment's pages."""
    start = links.experiment_page(experiment)
    pages: dict[str, str] = {}
    waiting = deque([start])
    while waiting and len(pages) < MOST_PAGES:
        address = waiting.popleft()
        if address in pages:
            continue
        response = client.get(address)
        if address == start and response.status_code != 200:
            raise LakeError(f"the catalog has no experiment {experiment!r}; `etpi status` lists experiments")
        if response.status_code != 200:
            continue
        pages[address] = response.text
        if not address.startswith("/rollout/"):  # those beside it come from the lists
            targets = (urljoin(address, unescape(target)) for _, target, _ in _LINK.findall(response.text))
            waiting += [target for target in targets if _belongs(target, experiment)]
    return pages


def _belongs(address: str, experiment: str) -> bool:
    """Return whether an address is one of the experiment's pages that are exported."""
    parts, name = urlsplit(address), quote(experiment)
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
