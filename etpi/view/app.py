"""The web application of `etpi view`: routes, templates and protection. Read-only: every route answers GET alone.

Transcripts are text that models and strangers wrote. So the templates escape everything, a Content-Security-Policy
forbids all scripts but `keys.js`, and a loopback server refuses requests under another host name (DNS rebinding).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote

import duckdb
from jinja2 import Environment
from starlette.applications import Starlette
from starlette.convertors import Convertor, register_url_convertor
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import FileResponse, HTMLResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from etpi.view import formats
from etpi.view.catalog_file import CatalogFile, Queries
from etpi.view.pages import curves, datasets, live, overview, rollout, rollouts, tokens
from etpi.view.pages.page import NotFound, Page
from etpi_resources import links
from etpi_resources.hidden import with_hidden
from etpi_resources.inside import is_file_inside, read_inside
from etpi_resources.lake.catalog import default_path
from etpi_resources.lake.lake import Lake, LakeError
from etpi_resources.templates import templates

TEMPLATES = Path(__file__).with_name("templates")
POLICY = (
    "default-src 'none'; style-src 'self'; script-src 'self'; img-src 'self' data:; form-action 'self'; "
    "base-uri 'none'; frame-ancestors 'none'"
)
FILES = {"style.css": "text/css", "keys.js": "text/javascript"}
REPORT_POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:; base-uri 'none'; frame-ancestors 'none'"
"""A report is one file that has its style in itself; it has no script."""

Build = Callable[[Queries, Lake, Request], Page]


@dataclass(frozen=True)
class _View:
    lake: Lake
    catalog: CatalogFile
    templates: Environment


def make_app(lake: Lake | None = None, catalog: Path | None = None) -> Starlette:
    """Return the application over a lake and its catalog (default: those of the working folder and environment)."""
    lake = lake or Lake.open()
    view = _View(lake, CatalogFile(catalog or default_path(lake)), _templates())
    pages: Mapping[str, Build] = {
        "/": overview.overview,
        "/experiment/{experiment}": overview.experiment,
        "/regressions/{experiment}": overview.regressions,
        "/task/{experiment}": overview.task,
        "/rollouts": rollouts.rollouts,
        "/rollout/{origin}/{made_for}/{rollout_id}": rollout.rollout,
        "/rollout/{origin}/{made_for}/{rollout_id}/tokens": tokens.tokens,
        "/dataset/{experiment}": datasets.dataset,
        "/dataset/{experiment}/sequence/{sequence_id}": datasets.sequence,
        "/curves": curves.curves,
        "/live": live.live,
        "/live/rollout": live.journal_rollout,
    }
    register_url_convertor("name", _Name())
    routes = [
        Route(path.replace("}", ":name}"), _endpoint(view, build), methods=["GET"]) for path, build in pages.items()
    ]
    routes += [
        Route("/report/{experiment:name}", _report_endpoint(view), methods=["GET"]),
        *(Route(f"/{name}", _file(name, kind), methods=["GET"]) for name, kind in FILES.items()),
        Route("/favicon.ico", lambda _: Response(status_code=204), methods=["GET"]),
    ]
    errors: Sequence[Any] = (HTTPException, NotFound, LakeError, duckdb.Error)
    app = Starlette(
        routes=routes,
        middleware=[Middleware(_raw_paths)],
        exception_handlers={error: _error_page(view) for error in errors},
    )
    app.state.catalog = view.catalog
    return app


class _Name(Convertor[str]):
    """A part of a path, decoded after the path was split: a name may contain `/`."""

    regex = "[^/]+"

    def convert(self, value: str) -> str:
        return unquote(value)

    def to_string(self, value: str) -> str:
        return quote(value, safe="")


def _raw_paths(app: ASGIApp) -> ASGIApp:
    """Route by the path as it was sent."""

    async def routed(scope: Scope, receive: Receive, send: Send) -> None:
        raw = scope.get("raw_path")
        await app(scope if raw is None else {**scope, "path": raw.decode("latin-1")}, receive, send)

    return routed


def _templates() -> Environment:
    environment = templates(TEMPLATES, **formats.FILTERS, token_spans=tokens.token_spans)
    environment.finalize = formats.visible
    environment.globals["links"] = links
    return environment


def _endpoint(view: _View, build: Build) -> Any:
    def respond(request: Request) -> Response:
        with view.catalog.queries() as queries:
            page = build(queries, view.lake, request)
        return _page(view, page.template, page.values, request)

    return respond


def _page(view: _View, template: str, values: Mapping[str, Any], request: Request, status: int = 200) -> HTMLResponse:
    text = view.templates.get_template(template).render({"path": request.url.path, "refresh": None} | dict(values))
    return HTMLResponse(text, status_code=status, headers=_headers(POLICY))


def _headers(policy: str) -> dict[str, str]:
    return {
        "Content-Security-Policy": policy,
        "Referrer-Policy": "no-referrer",
        "X-Content-Type-Options": "nosniff",
        "Cache-Control": "no-store",
    }


def _report_endpoint(view: _View) -> Any:
    """Return the endpoint of the written reports, whose links are made to lead to this server."""

    def respond(request: Request) -> Response:
        name = request.path_params["experiment"]
        with view.catalog.queries() as queries:
            paths = [row["path"] for row in queries.rows("reports", experiment=name) if row["kind"] == "html"]
        if not paths:
            raise NotFound(f"There is no report of {name!r}; `etpi run {name}` writes it.")
        if not paths[0].endswith(".html") or not is_file_inside(view.lake.root, paths[0]):
            raise NotFound(f"The report of {name!r} is not at {paths[0]} in {view.lake.root}.")
        text = with_hidden(read_inside(view.lake.root, paths[0]).decode("utf-8"))
        return HTMLResponse(text.replace(f'="{links.REPORTED_VIEW}/', '="/'), headers=_headers(REPORT_POLICY))

    return respond


def _file(name: str, kind: str) -> Any:
    return lambda _: FileResponse(TEMPLATES / name, media_type=kind, headers={"X-Content-Type-Options": "nosniff"})


def _error_page(view: _View) -> Any:

    def handle(request: Request, error: Exception) -> Response:
        title, message, status = "The catalog cannot be read", str(error), 503
        if isinstance(error, HTTPException):
            title, message, status = str(error.detail), str(error.detail), error.status_code
            message = "There is no page at this address." if status == 404 else message
        elif isinstance(error, NotFound):
            title, status = "Not in this catalog", 404
        elif isinstance(error, duckdb.Error):
            message = (
                f"{view.catalog.path}: DuckDB cannot answer: {message.splitlines()[0]}. `etpi verify` lists damaged "
                "files of the lake. If there are none, write the catalog again: etpi run catalog"
            )
        return _page(view, "error.html.jinja", {"title": title, "message": message}, request, status)

    return handle
