"""Write the picture of an experiment's page that README.md shows, from the lake in which `make demo` ran.

python docs/images/draw_screenshot.py [EXPERIMENT]: it needs chromium, and serves the page on a loopback port.
"""

from __future__ import annotations

import shutil
import socket
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import uvicorn

from etpi.view.app import make_app
from etpi_resources.lake.catalog import default_path
from etpi_resources.lake.lake import Lake
from etpi_resources.links import experiment_page

PICTURE = Path(__file__).with_name("experiment.png")
SIZE = (1180, 900)


def draw(experiment: str) -> None:
    """Serve the page of an experiment, and photograph it."""
    program = shutil.which("chromium") or shutil.which("google-chrome")
    if program is None:
        raise SystemExit("chromium is missing: install it (apt-get install chromium), and run this again")
    lake = Lake.open()
    listening = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(make_app(lake, default_path(lake)), log_level="warning"))
    threading.Thread(target=server.run, kwargs={"sockets": [listening]}, daemon=True).start()
    address = f"http://127.0.0.1:{listening.getsockname()[1]}{experiment_page(experiment)}"
    with tempfile.TemporaryDirectory() as profile:
        options = ["--headless", "--no-sandbox", "--hide-scrollbars", "--timeout=60000", f"--user-data-dir={profile}"]
        size = f"--window-size={SIZE[0]},{SIZE[1]}"
        subprocess.run([program, *options, size, f"--screenshot={PICTURE}", address], check=True, timeout=300)
    server.should_exit = True


if __name__ == "__main__":
    draw(sys.argv[1] if len(sys.argv) > 1 else "plan_first_tiny")
