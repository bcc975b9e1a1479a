"""Write the goldens of new and changed cases (`make goldens`); refuse changed results without a number and a line."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Collection
from contextlib import redirect_stderr, redirect_stdout

from etpi_assets.planning.versions import COMPONENTS
from tests.goldens.folders import new_folder
from tests.goldens.golden import load_cases, read_goldens, rewritten, values_of, write_goldens


def main(components: Collection[str] = ()) -> int:
    """Compute the cases of these components, or all; return 1 if one is refused, and write nothing then."""
    for name in ("ETPI_SPECS", "DAGSTER_HOME", "ETPI_CLUSTER"):
        os.environ.pop(name, None)
    os.environ["ETPI_DATA"] = str(new_folder())
    goldens, cases = read_goldens(), load_cases()
    chosen = components or {component for component, _ in {**goldens, **cases}}
    before = {key: golden for key, golden in goldens.items() if key[0] in chosen}
    printed = io.StringIO()
    with redirect_stdout(printed), redirect_stderr(printed):  # the trainers' progress
        results = {key: values_of(case.compute()) for key, case in cases.items() if key[0] in chosen}
    after, refusals = rewritten(before, results, COMPONENTS)
    if refusals:
        print("\n".join(refusals), "\nnothing was written", sep="\n", file=sys.stderr)
        return 1
    write_goldens({key: golden for key, golden in goldens.items() if key not in before} | after)
    for key in sorted({*before, *after}):
        if before.get(key) != after.get(key):
            word = "gone" if key not in after else "new" if key not in before else "changed"
            print(f"{word}: {' '.join(key)}")
    print(f"{len(after)} goldens of {len({component for component, _ in after})} components")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
