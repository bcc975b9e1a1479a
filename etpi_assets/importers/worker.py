"""The process that reads parts of a rollout set: a question a line on standard input, its figures a line on output.

Belongs here: that loop. Does not belong here: what reading a part means (`bulk`). It ends when its input does, so that
it never outlives who asks.
"""

from __future__ import annotations

import gc
import json
import os
import sys
from pathlib import Path

from etpi_assets.importers.bulk import Source, read_part


def main() -> None:
    # Whatever else prints goes to the error stream: standard output holds answers alone.
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    gc.disable()  # records hold no cycles, and looking for some takes a fifth of the time
    for line in sys.stdin:
        asked = json.loads(line)
        units = [Path(unit) for unit in asked["units"]]
        figures = read_part(Source(**asked["source"]), units, asked["number"], Path(asked["spill"]))
        answers.write(json.dumps(figures) + "\n")
        answers.flush()


if __name__ == "__main__":
    main()
