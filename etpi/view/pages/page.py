"""Results and parameters that the pages share."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlencode

from starlette.requests import Request

from etpi_resources.lake.lake import LakeError


class NotFound(LakeError):
    """The catalog has no such thing; the message names it and where to look."""


@dataclass(frozen=True)
class Page:
    """A template with its values."""

    template: str
    values: dict[str, Any] = field(default_factory=dict)


def text(request: Request, name: str) -> str | None:
    """Return a parameter without surrounding blanks; None if it is empty or missing."""
    value = request.query_params.get(name, "").strip()
    return value or None


def number(request: Request, name: str, default: int | None = None, least: int = 0, most: int = 10**9) -> int | None:
    """Return a parameter as a whole number between bounds; the default if it is missing or no number."""
    try:
        return min(max(int(request.query_params.get(name, "")), least), most)
    except ValueError:
        return default


def decimal(request: Request, name: str) -> float | None:
    """Return a parameter as a number; None if it is missing or no number."""
    try:
        return float(request.query_params.get(name, ""))
    except ValueError:
        return None


def with_query(request: Request, **changes: Any) -> str:
    """Return the request's path and query with some parameters changed; None removes one."""
    query = dict(request.query_params) | changes
    kept = {name: value for name, value in query.items() if value not in (None, "")}
    return request.url.path + (f"?{urlencode(kept)}" if kept else "")
