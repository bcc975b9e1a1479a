"""A suite of SWE-bench's shape whose tasks are copies of one small repository, with rollout sets in a lake."""

from __future__ import annotations

import json
from pathlib import Path

from etpi_assets.resources import Resources
from etpi_resources.lake.lake import Lake
from tests.support.graph import write_spec
from tests.support.repositories import Repository
from tests.support.rows import write_lines

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
    rows = [row | {"instance_id": f"moor__moor-{n}", "problem_statement": f"Issue {n}."} for n in range(tasks)]
    for row in rows[:broken]:
        row["patch"] = _NOTE
    data = write_lines(folder / "rows.jsonl", rows)
    checkouts = repository.checkouts(*(row["instance_id"] for row in rows))
    suite = _SUITE.format(proof=proof, path=json.dumps(str(data)), checkouts=json.dumps(str(checkouts)))
    write_spec(folder / "specs", "suites", "suite", suite)
    for engine in ("reference", "null"):
        text = _SET.format(suite="suite", tasks=used or tasks, engine=engine)
        write_spec(folder / "specs", "rollout_sets", f"set_{engine}", text)
    return Resources(lake=Lake(folder / "lake"), specs_folder=folder / "specs", concurrency=2)
