"""Task folders in Harbor's format."""

from __future__ import annotations

from pathlib import Path

from tests.support.container_engine import IMAGE
from tests.support.repositories import write_tree

CONFIG = """
version = "1.0"
[metadata]
category = "files"
[verifier]
timeout_sec = 20.0
env = { WANTED = "three lines" }
[agent]
timeout_sec = 20.0
[environment]
memory = "512M"
storage_mb = 64
"""


TEST = """#!/bin/bash
# What is no text, and lies outside of the workspace, counts as well; so do the modes of helpers.
if [ "$(/tests/count.sh)" = "$WANTED" ] && [ "$(head -c 2 /app/blob | od -An -tx1 | tr -d ' ')" = ff00 ]; then
  echo 1 > /logs/verifier/reward.txt
else
  echo "found $(/tests/count.sh)"; echo 0.25 > /logs/verifier/reward.txt
fi
"""


COUNT = '#!/bin/bash\n[ "$(wc -l < /app/out.txt 2>/dev/null)" = 3 ] && echo three lines || echo other\n'


SOLVE = "#!/bin/bash\ncp /solution/out.txt /app/out.txt\nprintf '\\xff\\x00' > blob\n"


def make_folder(root: Path, name: str = "lines", **changes: str | None) -> Path:
    """A task folder; `changes` are other texts of its files by path, None: the file is not there."""
    files = {
        "task.toml": CONFIG, "instruction.md": "Write three lines to /app/out.txt, and the bytes ff 00 to blob.\n",
        "environment/Dockerfile": f"FROM {IMAGE}\nCOPY start.txt /app/start.txt\nWORKDIR /app\n",
        "environment/start.txt": "start\n", "tests/test.sh": TEST, "tests/count.sh": COUNT, "solution/solve.sh": SOLVE,
        "solution/out.txt": "1\n2\n3\n", **changes,
    }  # fmt: skip
    write_tree(root / name, files)
    if (root / name / "tests/count.sh").exists():
        (root / name / "tests/count.sh").chmod(0o755)
    return root / name
