"""A pytest plugin that records each test's outcome by its printed name, and what its holes were compared with.

Runs inside a sandbox, loaded by `-p` before any code under test; `graded_run` writes ROOTS above it and reads its
reports. It holds no secret, and no expected value: code in its process can forge what it writes, but has to know the
values for that (`holes`).

At the end of a session it writes a file `report-*` beside itself: {collected: [node id], outcomes: {node id: kind},
exit: status, records: [[node id, key of a hole, values as Python's source, number]]}. Kinds: passed, failed, error,
skipped, xfailed, xpassed. It must run on every Python that a repository's environment has (3.6 and later).
"""

import builtins
import datetime
import decimal
import fractions
import json
import os
import random
import sys

try:
    import pytest
except ImportError:  # programs with `check` have no tests of pytest
    pytest = None

_HERE = os.path.dirname(os.path.abspath(__file__))
_MOST = 100000
"""Characters of one recorded value."""
_MOST_RECORDS = 100000
_DATES = (datetime.datetime, datetime.date, datetime.time)
_KEYS = type({}.keys())
"""A view that is equal to a set."""
_PLAIN = (int, float, str, bytes, bytearray, complex, list, tuple, dict, set, frozenset)


class Cell:
    """Stands in a test for a literal that is an expected value."""

    def __init__(self, key):
        self.key = key


class _Large(Exception):
    pass


def source(value, room, depth=0):
    """Return a value as Python's source; "Opaque(...)" for an object whose meaning is not its content."""
    kind = type(value)
    room[0] -= 8
    if room[0] < 0 or depth > 40:
        raise _Large()
    if kind is Cell:
        return f"Cell({value.key!r})"
    if value is None or kind in (bool, range):
        return repr(value)
    if kind in (decimal.Decimal, fractions.Fraction):
        return f"{kind.__name__}({str(value)!r})"
    if kind is datetime.timedelta:
        return f"timedelta({value.days}, {value.seconds}, {value.microseconds})"
    if kind is _KEYS:
        return source(set(value), room, depth)
    date = next((each for each in _DATES if issubclass(kind, each)), None)
    if date:
        return f"{date.__name__}({date.isoformat(value)!r})"
    base = next((each for each in _PLAIN if issubclass(kind, each)), None)
    if base is None:
        return f"Opaque({kind.__name__!r})"
    if base is int:
        return hex(int.__index__(value))
    if base in (float, complex):
        return f"{base.__name__}({base.__repr__(value)!r})"
    if base in (str, bytes, bytearray):
        room[0] -= base.__len__(value)
        if room[0] < 0:
            raise _Large()
        text = str.__repr__(value) if base is str else bytes.__repr__(bytes(value))
        return f"bytearray({text})" if base is bytearray else text
    if base is dict:
        pairs = [[source(each, room, depth + 1) for each in pair] for pair in dict.items(value)]
        return "{{{}}}".format(", ".join(map(": ".join, pairs)))
    items = base.__iter__(value)  # pyright: ignore[reportAttributeAccessIssue]
    return "{}([{}])".format(base.__name__, ", ".join([source(item, room, depth + 1) for item in items]))


class Raises:
    """`pytest.raises` or `assertRaises` of any exception; its class and text are recorded."""

    def __init__(self, recorder, key, unit):
        self.recorder, self.key = recorder, key
        self.inner = unit(BaseException) if unit else pytest.raises(BaseException)  # pyright: ignore

    def __enter__(self):
        return self.inner.__enter__()

    def __exit__(self, kind, error, trace):
        if error is not None:
            if kind.__module__ == "_pytest.outcomes":
                return False
            self.recorder.record(self.key, [each.__name__ for each in kind.__mro__], str(error))
        return self.inner.__exit__(kind, error, trace)


def _kind(phases):
    """Return the kind of a test from {phase: (outcome, whether an expected failure was declared)}."""
    outcomes = {outcome for outcome, _ in phases.values()}
    expected = any(expected for _, expected in phases.values())
    if "failed" in outcomes:
        alone = [phase for phase, (outcome, _) in phases.items() if outcome == "failed"] == ["call"]
        return "failed" if alone else "error"
    if "skipped" in outcomes:
        return "xfailed" if expected else "skipped"
    if "call" not in phases or outcomes != {"passed"}:
        return "error"
    return "xpassed" if expected else "passed"


def _hook(**options):
    return pytest.hookimpl(**options) if pytest else lambda function: function


class Recorder:
    def __init__(self):
        self.collected, self.phases, self.records, self.node = [], {}, {}, ""
        self.root = self.start = ""
        for name in ("cell", "hole", "raises"):
            setattr(builtins, f"__{name}__", getattr(self, "_" + name))

    def name(self, node):
        """Return a node's id as pytest prints it: relative to the folder in which it was started."""
        path, separator, rest = node.partition("::")
        if self.root == self.start or not path:
            return node
        return os.path.relpath(os.path.join(self.root, path), self.start) + separator + rest

    def record(self, key, *values):
        try:
            texts = tuple(source(value, [_MOST]) for value in values)
        except _Large:
            texts = ("Opaque('large')",)
        place = (self.node, key, texts)
        if place in self.records or len(self.records) < _MOST_RECORDS:
            self.records[place] = self.records.get(place, 0) + 1

    def _cell(self, key):
        return Cell(key)

    def _hole(self, key, got, *leaves):
        self.record(key, got, *leaves)
        return True

    def _raises(self, key, unit):
        return Raises(self, key, unit)

    def report(self, status):
        outcomes = {node: _kind(phases) for node, phases in self.phases.items()}
        report = {"collected": self.collected, "outcomes": outcomes, "exit": int(status)}
        report["records"] = [[*place, number] for place, number in self.records.items()]
        with open(os.path.join(_HERE, f"report-{os.getpid()}-{random.getrandbits(60)}"), "w") as file:
            json.dump(report, file)

    @_hook(tryfirst=True)
    def pytest_configure(self, config):
        self.root, self.start = str(getattr(config, "rootpath", None) or config.rootdir), os.getcwd()
        # pytest is imported by now. Put the tree after the standard library and before installed packages.
        roots = [os.path.abspath(root) for root in ROOTS]  # noqa: F821 # pyright: ignore[reportUndefinedVariable]
        if getattr(sys.flags, "safe_path", False):
            roots.append(os.getcwd())
        at = 1 + max([i for i, path in enumerate(sys.path) if path.endswith("lib-dynload")] or [-1])
        sys.path[at:at] = [root for root in roots if root not in sys.path]

    @_hook(trylast=True)
    def pytest_collection_modifyitems(self, items):
        self.collected.extend(self.name(item.nodeid) for item in items)

    @_hook(tryfirst=True)
    def pytest_collectreport(self, report):
        if report.failed:
            self.phases[self.name(report.nodeid)] = {"collect": ("failed", False)}

    @_hook(tryfirst=True)
    def pytest_runtest_logstart(self, nodeid):
        self.node = self.name(nodeid)

    @_hook(tryfirst=True)
    def pytest_runtest_logreport(self, report):
        phase = (report.outcome, hasattr(report, "wasxfail"))
        self.phases.setdefault(self.name(report.nodeid), {})[report.when] = phase

    @_hook(trylast=True)
    def pytest_sessionfinish(self, session, exitstatus):
        self.report(exitstatus)


def pytest_addoption(parser, pluginmanager):
    pluginmanager.register(Recorder())
