"""What of an agent's work counts: its changes, frozen before any hidden test is there.

Belongs here: the changes between two trees, the files that no solution may bring, and putting changes into a fresh
sandbox. Does not belong here: tests and verdicts.

Tests run in the same process as the code they test, in a fresh sandbox. So a solution may not bring what decides how
tests are collected and reported: tests, conftest files, the runners' settings, start-up hooks.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping

from etpi_resources.sandboxes import Sandbox

TEST_FILE = re.compile(
    r"(^|/)(tests?|testing|__tests__|spec|testdata|r2e_tests)/"
    r"|(^|/)(test_[^/]*|[^/]*_tests?|tests?)\.[A-Za-z0-9]+$"
    r"|(^|/)[^/]*\.(test|spec)\.[A-Za-z0-9]+$"
    r"|(^|/)[^/]*Tests?\.(java|kt|cs|scala)$"
)
RUNNER_FILE = re.compile(
    r"(^|/)(conftest\.py|pytest\.ini|\.pytest\.ini|tox\.ini|setup\.cfg|pyproject\.toml|\.coveragerc|noxfile\.py"
    r"|sitecustomize\.py|usercustomize\.py|[^/]*\.pth|run_tests\.sh|runner\.sh|pytest\.py|_pytest/.*)$"
    r"|(^|/)\.git(/|$)|^\.git(attributes|modules)$"
)

Changes = dict[str, str | None]
"""Path -> the new text, None where the file is gone."""


def counted_changes(before: Mapping[str, str], after: Mapping[str, str]) -> Changes:
    """What changed in files that a solution may change. Nothing where `after` is empty: that sandbox had ended."""
    if not after:
        return {}
    return {
        path: after.get(path)
        for path in sorted(before.keys() | after.keys())
        if before.get(path) != after.get(path) and not TEST_FILE.search(path) and not RUNNER_FILE.search(path)
    }


def put_changes(sandbox: Sandbox, changes: Changes) -> None:
    """Make the changes in a sandbox's workspace. Raises OSError where it does not take them."""
    sandbox.write_files({path: text for path, text in changes.items() if text is not None})
    if gone := [path for path, text in changes.items() if text is None]:
        for at in range(0, len(gone), 500):
            sandbox.run("rm -f -- " + " ".join(map(shlex.quote, gone[at : at + 500])))
