"""Measure the CPU time of a verdict on an honest patch in families that run hidden tests, and shares of blind tests.

Run: `python bench/verdicts.py --tests FOLDER` for the trust that the test functions below a folder can have, without a
reference; or `python bench/verdicts.py [VERDICTS] [CHECKOUT]`, for example with a git worktree of da9e433, the commit
before expected values were kept out of the sandbox; its judge is measured too, between two measurements of this one.

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


def shares(folder: Path) -> None:
    """Print how many test functions below a folder holes make blind, how many others can be reversed."""
    from etpi_assets.tasks.holes import dig

    files = {str(path.relative_to(folder)): path.read_text("utf-8") for path in sorted(folder.rglob("*.py"))}
    dug = dig(files, "k_")
    blind = {name for name in dug.tests if dug.is_blind(name)}
    reversible, count = (dug.reversible & dug.tests.keys()) - blind, len(dug.tests)
    print(f"{count} test functions: {len(blind) / count:.1%} blind, {len(reversible) / count:.1%} reversible")


def main() -> None:
    from machine import machine

    if sys.argv[1:2] == ["--tests"]:
        return shares(Path(sys.argv[2]))
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
