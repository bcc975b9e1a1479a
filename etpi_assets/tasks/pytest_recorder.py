"""A pytest plugin that records the outcome of each test by its node id and kind, apart from the printed output.

Runs inside a sandbox, loaded by `-p` before any code under test; `graded_run` writes ROOTS above it and reads its
reports. It holds no secret: code in its process can forge what it writes, which `challenge` finds by another run.

At the end of a session it writes a file `report-*` beside itself: {collected: [node id], outcomes: {node id: kind},
exit: status}. Kinds: passed, failed, error, skipped, xfailed, xpassed. It must run on every Python that a repository's
environment has (3.6 and later).
"""

import json
import os
import random
import sys

import pytest

_HERE = os.path.dirname(os.path.abspath(__file__))


def _kind(phases):
    """Return the kind of a test from {phase: (outcome, whether an expected failure was declared)}."""
    outcomes = {outcome for outcome, _ in phases.values()}
    expected = any(expected for _, expected in phases.values())
    if phases.get("call", ("", False))[0] == "failed":
        return "failed"
    if "failed" in outcomes:
        return "error"
    if "skipped" in outcomes:
        return "xfailed" if expected else "skipped"
    if "call" not in phases or outcomes != {"passed"}:
        return "error"
    return "xpassed" if expected else "passed"


class Recorder:
    def __init__(self):
        self.collected, self.phases = [], {}

    @pytest.hookimpl(tryfirst=True)
    def pytest_configure(self, config):
        # pytest is imported by now. Put the tree after the standard library and before installed packages.
        roots = [os.path.abspath(root) for root in ROOTS]  # noqa: F821 # pyright: ignore[reportUndefinedVariable]
        if getattr(sys.flags, "safe_path", False):
            roots.append(os.getcwd())
        at = 1 + max([i for i, path in enumerate(sys.path) if path.endswith("lib-dynload")] or [-1])
        sys.path[at:at] = [root for root in roots if root not in sys.path]

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items):
        self.collected.extend(item.nodeid for item in items)

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_logreport(self, report):
        phase = (report.outcome, hasattr(report, "wasxfail"))
        self.phases.setdefault(report.nodeid, {})[report.when] = phase

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session, exitstatus):
        outcomes = {node: _kind(phases) for node, phases in self.phases.items()}
        report = {"collected": self.collected, "outcomes": outcomes, "exit": int(exitstatus)}
        with open(os.path.join(_HERE, f"report-{os.getpid()}-{random.getrandbits(60)}"), "w") as file:
            json.dump(report, file)


def pytest_addoption(parser, pluginmanager):
    pluginmanager.register(Recorder())
