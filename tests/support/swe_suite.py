"""A suite of SWE-bench's shape whose tasks are copies of one small repository, with rollout sets in a lake."""

from __future__ import annotations

import json
from pathlib import Path

from etpi_assets.resources import Resources
from etpi_resources.lake.lake import Lake
from tests.support.repositories import Repository

_SUITE = """\
title = "x"
family = "swe_bench"
proof = "{proof}"
[params]
path = {path}
checkouts = {checkouts}
sandbox = "bubblewrap"
grading = {{ network = "none" }}
memory_gib = 0.5
disk_gib = 0.0625
test_seconds = 60
"""
_NOTE = "--- /dev/null\n+++ b/note.txt\n@@ -0,0 +1 @@\n+nothing\n"
_SET = """\
title = "x"
kind = "live"
suite = "{suite}"
sandbox = "bubblewrap"
tasks = {tasks}
[engine]
kind = "{engine}"
teacher = "{engine}"
[agent]
prompt = "solo"
max_steps = 4
max_tokens = 4000
max_model_len = 16000
"""


def make(
    folder: Path, repository: Repository, tasks: int, proof: str = "ahead", used: int | None = None, broken: int = 0
) -> Resources:
    """Write the specs `suite`, `set_reference` and `set_null` of `used` tasks, and return resources with their lake.

    The first `broken` tasks have a reference solution that solves nothing.
    """
    row = repository.swe_row()
    rows = [
        {
            **row,
            "instance_id": f"moor__moor-{n}",
            "problem_statement": f"Issue {n}.",
            **({"patch": _NOTE} if n < broken else {}),
        }
        for n in range(tasks)
    ]
    data = folder / "rows.jsonl"
    folder.mkdir(parents=True, exist_ok=True)
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    checkouts = repository.checkouts(*(row["instance_id"] for row in rows))
    texts = {
        "suites/suite": _SUITE.format(proof=proof, path=json.dumps(str(data)), checkouts=json.dumps(str(checkouts)))
    }
    for engine in ("reference", "null"):
        texts[f"rollout_sets/set_{engine}"] = _SET.format(suite="suite", tasks=used or tasks, engine=engine)
    for name, text in texts.items():
        file = folder / "specs" / f"{name}.toml"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return Resources(lake=Lake(folder / "lake"), specs_folder=folder / "specs", concurrency=2)
