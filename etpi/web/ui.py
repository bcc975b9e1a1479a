"""`etpi ui`: Dagster's web page behind the guard, with the daemon and the code server that `dagster dev` starts."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import dagster as dg
import yaml
from dagster._cli.proxy_server_manager import ProxyServerManager
from dagster._core.workspace.context import WorkspaceProcessContext
from dagster._core.workspace.load_target import WorkspaceFileTarget
from dagster._utils.log import configure_loggers
from dagster_webserver import cli, version
from dagster_webserver.app import create_app_from_workspace_process_context
from starlette.applications import Starlette
from starlette.responses import RedirectResponse
from starlette.routing import Route

from etpi.web.serve import serve
from etpi_resources.process.supervise import supervised

WORKSPACE = Path(__file__).parents[1] / "workspace.yaml"
_POLL_MS = 2000
"""The interval at which the page asks for news; as under `dagster dev`."""


def serve_dagster(host: str, port: int, names: Sequence[str], home: Path) -> int:
    """Serve the page until it is stopped; return 1 if the daemon ended before."""
    # Python leaves SIGINT ignored in a process that a shell started with `&`.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.default_int_handler)
    os.environ |= {
        "DAGSTER_IS_DEV_CLI": "1",
        "DAGSTER_verbose": "",
    }  # short errors of definitions, as `dagster dev` shows
    configure_loggers(formatter="colored", log_level="INFO")
    with dg.DagsterInstance.get() as instance, _code_server(instance) as workspace, _daemon(workspace, home) as daemon:
        instance.optimize_for_webserver(
            cli.DEFAULT_DB_STATEMENT_TIMEOUT, cli.DEFAULT_POOL_RECYCLE, cli.DEFAULT_POOL_MAX_OVERFLOW
        )
        target = WorkspaceFileTarget(paths=[str(workspace)])
        with WorkspaceProcessContext(instance, target, version=version.__version__) as context:
            app = opening_on_graph(create_app_from_workspace_process_context(context, "", _POLL_MS))
            with suppress(KeyboardInterrupt):
                serve(app, "etpi ui", host, port, names, home)
        return 0 if daemon.poll() is None else 1


def opening_on_graph(app: Starlette) -> Starlette:
    """Return Dagster's app, whose first page is then the graph of all assets and not its first job."""
    app.router.routes.insert(0, Route("/", lambda request: RedirectResponse("/asset-groups")))
    return app


@contextmanager
def _code_server(instance: dg.DagsterInstance) -> Iterator[Path]:
    """Run the code server that page and daemon share; yield the workspace file that names it."""
    target = WorkspaceFileTarget(paths=[str(WORKSPACE)])
    with (
        ProxyServerManager(instance, target, code_server_log_level="warning") as manager,
        tempfile.TemporaryDirectory(prefix="etpi-") as folder,
    ):
        file = Path(folder) / "workspace.yaml"
        file.write_text(yaml.dump({"load_from": manager.get_code_server_specs()}))
        yield file


@contextmanager
def _daemon(workspace: Path, home: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Run Dagster's daemon; if it ends by itself, this process is interrupted."""
    # In Dagster's home, where no `.env` names another one.
    line = [sys.executable, "-m", "dagster._daemon", "run", "--workspace", str(workspace)]
    daemon = subprocess.Popen(supervised(line), cwd=home)
    stopping = threading.Event()

    def watch() -> None:
        daemon.wait()
        if not stopping.is_set():
            logging.getLogger("etpi").error("Dagster's daemon ended by itself, with status %s", daemon.returncode)
            os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=watch, daemon=True).start()
    try:
        yield daemon
    finally:
        ended = daemon.poll()
        stopping.set()
        if ended is None:
            daemon.terminate()
        daemon.wait()
