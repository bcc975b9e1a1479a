"""Serve a guarded application: the addresses it answers to, and its token."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from ipaddress import ip_address
from pathlib import Path

from starlette.types import ASGIApp

from etpi.web.guard import Guard, is_loopback
from etpi_resources.backend import backend
from etpi_resources.secrets import kept_secret

TOKEN_FILE = "page_token"


def serve(app: ASGIApp, command: str, host: str, port: int, names: Sequence[str], home: Path) -> None:
    """Serve an application behind the guard until it is stopped; say on stderr where.

    A page that other users can reach, on a cluster or on another address than a loopback one, needs a token. It is in
    `<home>/page_token`, which only this user can read.

    Args:
        command: its name, for the message.
        names: host names that it answers to, beside loopback ones and `host`.
        home: Dagster's home.
    """
    import uvicorn

    token = kept_secret(home / TOKEN_FILE) if backend() or not is_loopback(host) else None
    own_names = [*names, *([] if _is_unspecified(host) else [host])]
    shown = own_names[0] if own_names else "localhost"
    address = f"http://{f'[{shown}]' if ':' in shown else shown}:{port}"
    how = f"; it needs the token of {home / TOKEN_FILE}: open {address}/?token=TOKEN once" if token else ""
    print(f"{command} on {address}{how}; stop it with Ctrl-C", file=sys.stderr)
    uvicorn.run(Guard(app, own_names, token), host=host, port=port, log_level="warning")


def _is_unspecified(host: str) -> bool:
    try:
        return ip_address(host).is_unspecified
    except ValueError:
        return False
