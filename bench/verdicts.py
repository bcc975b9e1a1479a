"""Measure the CPU time of a verdict on an honest patch, in each family that runs hidden tests.

Run: `python bench/verdicts.py [VERDICTS] [CHECKOUT]`, for example with a git worktree of da9e433, the commit before
expected values were kept out of the sandbox; its judge is measured by this script too, before and after this one's.

The tasks are those under attack (tests/attacks/targets.py): a repository with two modules and two hidden tests, one
agent, or two in CooperBench. CPU time is that of this process and of all its children, sandboxes included.
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median

ROOT = Path(__file__).resolve().parent.parent
FAMILIES = ("pypi_bugs", "r2e", "swe_bench", "cooperbench")


def measure(verdicts: int) -> dict[str, tuple[float, str]]:
    """Return the median CPU seconds of a verdict, and its trust, by family."""
    from tests.attacks.targets import Targets
    from tests.support.repositories import solved

    def spent() -> float:
        usage = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
        return sum(each.ru_utime + each.ru_stime for each in usage)

    results = {}
    with tempfile.TemporaryDirectory() as folder:
        targets = Targets(Path(folder))
        for family in FAMILIES:
            patches = [solved("1"), solved("2")] if family == "cooperbench" else [solved("1", "2")]
            outcome, seconds = targets.judge(family, *patches), []  # the first verdict builds the task
            for _ in range(verdicts):
                before = spent()
                outcome = targets.judge(family, *patches)
                seconds.append(spent() - before)
            assert outcome.reward == 1.0, outcome
            results[family] = median(seconds), outcome.trust or ""
    return results


def measured_in(checkout: Path, verdicts: int) -> dict[str, tuple[float, str]]:
    """Return `measure` of the code in a checkout."""
    paths = [str(path) for path in (checkout, checkout / "lab", ROOT / "bench")]  # the lab has a family
    code = f"import sys; sys.path[:0] = {paths}; import json, verdicts; print(json.dumps(verdicts.measure({verdicts})))"
    done = subprocess.run([sys.executable, "-c", code], cwd=checkout, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    from machine import machine

    print(machine())
    verdicts = int(sys.argv[1]) if len(sys.argv) > 1 else 5
    if len(sys.argv) < 3:
        for family, (seconds, trust) in measured_in(ROOT, verdicts).items():
            print(f"{family}: {seconds:.2f} s of CPU, {trust}")
        return
    sides = [measured_in(path, verdicts) for path in (ROOT, Path(sys.argv[2]).resolve(), ROOT)]
    for family in FAMILIES:
        (first, trust), (other, earlier), (second, _) = (side[family] for side in sides)
        mine = (first + second) / 2
        print(f"{family}: {other:.2f} -> {mine:.2f} s of CPU, {other / mine:.1f} times less; {earlier} -> {trust}")


if __name__ == "__main__":
    main()
