"""An agent's patch: the changes that count, taken before any hidden test enters a sandbox.

Hidden tests run in the same process as the code they test. So a patch may not contain files that decide how tests are
collected and reported: tests, conftest files, the runners' settings, start-up hooks.
"""

from __future__ import annotations

import re
import shlex
import sys
import unicodedata
from collections.abc import Collection, Mapping

from etpi_resources.sandboxes import Sandbox

_COLLECTED = (
    r"(?<![^/])(?:test_[^/]*|[^/]*_tests?)\.[A-Za-z0-9]+$"
    r"|\.(?:test|spec)\.[A-Za-z0-9]+$"
    r"|Tests?\.(?:java|kt|cs|scala)$"
)
"""Files that runners take for tests, whatever folder they are in."""

_NAMED = r"(?<![^/])(?:(?:tests?|testing|__tests__|spec|testdata|r2e_tests)/|tests?\.[A-Za-z0-9]+$)"
"""Folders and files that are tests by convention; packages have sources of these names too."""

TEST_FILE = re.compile(f"{_COLLECTED}|{_NAMED}")

RUNNER_FILE = re.compile(
    r"(^|/)(conftest\.py|pytest\.ini|\.pytest\.ini|tox\.ini|setup\.cfg|pyproject\.toml|\.coveragerc|noxfile\.py"
    r"|\.?pytest\.toml|sitecustomize\.py|usercustomize\.py|[^/]*\.pth|run_tests\.sh|runner\.sh|pytest\.py"
    r"|_pytest/.*|(jest|vitest|babel)\.config\.[^/]*|\.babelrc)$"
    r"|(^|/)(conftest|sitecustomize|usercustomize|\.cargo|__pycache__|\.venv|node_modules)/"
    r"|(^|/)\.git(/|$)|(^|/)\.git(attributes|modules|config)$",
    re.IGNORECASE,
)
"""Files that decide how tests are collected, run and reported, or how git merges, at any depth."""

METADATA_FILE = re.compile(
    r"(^|/)(setup\.py|MANIFEST\.in|package\.json)$|\.(egg-info|dist-info|egg-link)(/|$)|\.(py[cdo]|so)$",
    re.IGNORECASE,
)
"""Packaging metadata (entry points are plugins of the test runner) and compiled modules."""

INSTALL_FILE = re.compile(
    r"(^|/)(uv|poetry|pylock[^/]*|cargo)\.toml$"
    r"|(^|/)(uv|pdm|poetry|pipfile|cargo|yarn|bun)\.lock$|(^|/)(package-lock|npm-shrinkwrap)\.json$|(^|/)pnpm-lock\.ya?ml$"
    r"|(^|/)go\.(mod|sum|work)$|(^|/)(pipfile|environment\.ya?ml|\.python-version)$"
    r"|(^|/)[^/]*(requirements|constraints)[^/]*\.(txt|in)$|(^|/)requirements/[^/]*\.(txt|in)$"
    r"|(^|/)(pip\.(conf|ini)|\.(pypirc|npmrc|yarnrc(\.ya?ml)?|netrc|curlrc|wgetrc))$",
    re.IGNORECASE,
)
"""Files that decide which packages a runner installs, and from where."""

_TOOLS = frozenset(
    """
    _distutils_hack _pytest anyio colorama conftest coverage distutils exceptiongroup execnet hypothesis iniconfig nose
    packaging pip pkg_resources pluggy py pygments pytest pytest_asyncio pytest_cov pytest_mock pytest_timeout
    setuptools sitecustomize tomli usercustomize wheel xdist
    """.split()  # noqa: SIM905 - words read better as text
)
RESERVED = sys.stdlib_module_names | _TOOLS
"""Top-level modules that a patch may not add where they could shadow the real ones."""

Changes = dict[str, str | None]
"""Path -> new text; None if the file is removed."""


def counted_changes(before: Mapping[str, str], after: Mapping[str, str], tests: Collection[str] = ()) -> Changes:
    """Return the changes in files that a patch may contain. Empty if `after` is: that sandbox had ended.

    Args:
        tests: paths of hidden tests (`is_test`). Their folders may be on the path that modules are imported from.
    """
    refused = set(refused_changes(before, after, tests))
    return {path: after.get(path) for path in _changed(before, after) if path not in refused}


def refused_changes(before: Mapping[str, str], after: Mapping[str, str], tests: Collection[str] = ()) -> list[str]:
    """Return the sorted paths of the changes that a patch may not contain (see `counted_changes`)."""
    packages = {path.rpartition("/")[0] for path in before if path.endswith("/__init__.py")}
    known = {name for path in before for name in _module_names(path)}
    folders = {
        "/".join(parts[:end]) for path in [*before, *tests] for parts in [path.split("/")] for end in range(len(parts))
    }
    return [
        path
        for path in _changed(before, after)
        if is_test(path, tests, packages) or _refused(path, known, folders - packages)
    ]


def is_test(path: str, tests: Collection[str], packages: Collection[str]) -> bool:
    """Return whether a file is a test.

    `pkg/testing/a.py` and `pkg/tests.py` are sources of the package `pkg`, unless a test of the task has such a name.

    Args:
        tests: paths of the task's own tests; none: they are unknown, and all files named as tests are.
        packages: folders of the base tree that are packages.
    """
    name = unicodedata.normalize("NFKC", path)
    first = re.search(_NAMED, name)
    if first is None or not tests or re.search(_COLLECTED, name):
        return TEST_FILE.search(name) is not None
    kinds = {named for test in tests for named in re.findall(_NAMED, test)}
    return name[: first.start()].rstrip("/") not in packages or not kinds.isdisjoint(re.findall(_NAMED, name))


def _changed(before: Mapping[str, str], after: Mapping[str, str]) -> list[str]:
    paths = sorted(before.keys() | after.keys()) if after else []
    return [path for path in paths if before.get(path) != after.get(path)]


def _refused(path: str, known: Collection[str], roots: Collection[str]) -> bool:
    """Return whether a patch may not contain the file.

    Args:
        known: module paths of the base tree.
        roots: folders that modules may be imported from: those of the base tree that are no packages.
    """
    name = unicodedata.normalize("NFKC", path)
    if any(pattern.search(name) for pattern in (RUNNER_FILE, METADATA_FILE, INSTALL_FILE)):
        return True
    split = [(module, *module.rpartition("/")[::2]) for module in _module_names(name)]
    return any(last.lower() in RESERVED and above in roots and module not in known for module, above, last in split)


def _module_names(path: str) -> list[str]:
    """Return every importable name on a path: its folders, and its module if the file is one."""
    parts = path.split("/")
    names = ["/".join(parts[:end]) for end in range(1, len(parts))]
    return [*names, path.removesuffix(".py")] if path.endswith(".py") else names


def put_changes(sandbox: Sandbox, changes: Changes) -> None:
    """Apply the changes to a sandbox's workspace, removals first so that a folder can replace a file.

    Raises OSError if the sandbox does not take the files."""
    removed = [path for path, text in changes.items() if text is None]
    for at in range(0, len(removed), 500):
        sandbox.run("rm -f -- " + " ".join(map(shlex.quote, removed[at : at + 500])))
    sandbox.write_files({path: text for path, text in changes.items() if text is not None})


def write_commands(before: Mapping[str, str], after: Mapping[str, str]) -> list[str]:
    """Return bash commands, one for each changed file, that turn `before` into `after` (path -> text)."""
    commands = []
    for path in sorted(before.keys() | after.keys()):
        name = shlex.quote(path)
        text = after.get(path)
        if text is None:
            commands.append(f"rm -f -- {name}")
        elif text != before.get(path):
            folder = f"mkdir -p -- {shlex.quote(path.rpartition('/')[0])} && " if "/" in path else ""
            commands.append(f"{folder}printf %s {shlex.quote(text)} > {name}")
    return commands
