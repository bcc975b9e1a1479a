"""Write the picture of an experiment's page that README.md shows, from the lake in which `make demo` ran.

python docs/images/draw_screenshot.py [EXPERIMENT]; it needs chromium, and network for nothing.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from etpi.view.serve import export_view

PICTURE = Path(__file__).with_name("experiment.png")
SIZE = (1180, 900)


def draw(experiment: str) -> None:
    """Export the pages of an experiment to a folder, and photograph the first one."""
    program = shutil.which("chromium") or shutil.which("google-chrome")
    if program is None:
        raise SystemExit("chromium is missing: install it (apt-get install chromium), and run this again")
    with tempfile.TemporaryDirectory() as temporary:
        pages = Path(temporary) / "pages"
        export_view(experiment, pages)
        options = ["--headless", "--no-sandbox", "--hide-scrollbars", f"--user-data-dir={temporary}/profile"]
        size = f"--window-size={SIZE[0]},{SIZE[1]}"
        page = (pages / "index.html").as_uri()
        subprocess.run([program, *options, size, f"--screenshot={PICTURE}", page], check=True, timeout=300)


if __name__ == "__main__":
    draw(sys.argv[1] if len(sys.argv) > 1 else "plan_first_tiny")
