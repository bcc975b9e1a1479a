"""A pytest plugin that records each outcome separately from the output, and runs canaries among the tests.

Runs inside a sandbox, loaded by `-p` before any code under test. The host never imports it; `graded_run` reads its
results. plan.json beside it: {key, roots, canaries: [file beside it], mutated: {path: [text, [names]]}}. Mutated tests
have a wrong expected value. They are written here, since a task's runner may clean the tree before it starts pytest,
and removed at the end. At the end of a session it writes a file `results-*`: a line of `hmac json`, see `_finish`.

Canaries run through the same hooks as the tests, but their reports are not logged: they change neither the output, nor
the counts, nor the exit status. It must run on every Python that a repository's environment has (3.6 and later).
"""

import hashlib
import hmac
import json
import os
import random
import sys
import types

import pytest
from _pytest.runner import runtestprotocol

_HERE = os.path.dirname(os.path.abspath(__file__))
_RUNNER = ("_pytest", "pluggy", "pytest", "unittest")


def _runner_functions():
    """Return {where: (function, code)} for all functions of the test runner that are loaded now."""
    functions = {}
    for name, module in list(sys.modules.items()):
        if module is None or name.partition(".")[0] not in _RUNNER:
            continue
        for key, value in list(vars(module).items()):
            if isinstance(value, type) and value.__module__.partition(".")[0] in _RUNNER:
                for inner, method in list(vars(value).items()):
                    functions[(name, key, inner)] = _code(method)
            else:
                functions[(name, key)] = _code(value)
    return {where: pair for where, pair in functions.items() if pair is not None}


def _code(value):
    if isinstance(value, (classmethod, staticmethod)):
        value = value.__func__
    return (value, value.__code__) if isinstance(value, types.FunctionType) else None


def _plugin():
    with open(os.path.join(_HERE, "plan.json"), encoding="utf-8") as file:
        plan = json.load(file)
    key = plan.pop("key").encode()
    canary_files = {os.path.realpath(os.path.join(_HERE, name)): None for name in plan["canaries"]}
    for path, (text, names) in plan["mutated"].items():
        if os.path.isdir(os.path.dirname(path)):
            with open(path, "w", encoding="utf-8") as file:
                file.write(text)
            canary_files[os.path.realpath(path)] = names
    before = _runner_functions()
    canaries, results, collected, canary_outcomes = set(), {}, [], {}

    def is_canary(item):
        return os.path.realpath(str(item.fspath)) in canary_files

    # pytest itself adds these to its classes when it configures a session.
    legacy = {code for where, (_, code) in before.items() if where[0] == "_pytest.legacypath"}

    def tampered():
        now = _runner_functions()
        changed = [where for where, pair in before.items() if now.get(where) != pair]
        return sorted(".".join(where) for where in changed if where not in now or now[where][1] not in legacy)[:20]

    class Recorder:
        @pytest.hookimpl(tryfirst=True)
        def pytest_configure(self, config):
            # pytest is imported by now. Put the tree after the standard library and before installed packages.
            roots = [os.path.abspath(root) for root in plan["roots"]]
            if getattr(sys.flags, "safe_path", False):
                roots.append(os.getcwd())
            at = 1 + max([i for i, path in enumerate(sys.path) if path.endswith("lib-dynload")] or [-1])
            sys.path[at:at] = [root for root in roots if root not in sys.path]
            config.args += sorted(canary_files)

        @pytest.hookimpl(hookwrapper=True, tryfirst=True)
        def pytest_collection_modifyitems(self, session, config, items):
            candidates = [item for item in items if is_canary(item)]
            items[:] = [item for item in items if not is_canary(item)]
            yield
            collected.extend(item.nodeid for item in items)
            files = [str(item.fspath) for item in items]
            # Insert only between two modules, so that no canary makes pytest tear down a module's fixtures.
            gaps = [i for i in range(len(files) + 1) if i in (0, len(files)) or files[i - 1] != files[i]]
            for item in candidates:
                names = canary_files[os.path.realpath(str(item.fspath))]
                if names is None or item.name.partition("[")[0] in names:
                    canaries.add(item)
                    items.insert(random.SystemRandom().choice(gaps) if gaps else 0, item)
                    gaps = [0, len(items)]

        @pytest.hookimpl(tryfirst=True)
        def pytest_runtest_protocol(self, item, nextitem):
            if item not in canaries:
                return None
            reports = runtestprotocol(item, log=False, nextitem=nextitem)
            ran = {report.when: report.outcome for report in reports}
            canary_outcomes[item.name] = "passed" if all(outcome == "passed" for outcome in ran.values()) else "failed"
            return True

        @pytest.hookimpl(tryfirst=True)
        def pytest_runtest_logreport(self, report):
            outcome = "xfailed" if hasattr(report, "wasxfail") and report.outcome == "skipped" else report.outcome
            results.setdefault(report.nodeid, {})[report.when] = outcome

        @pytest.hookimpl(trylast=True)
        def pytest_sessionfinish(self, session, exitstatus):
            _finish(exitstatus)

    def _finish(exitstatus):
        for path in plan["mutated"]:
            if os.path.exists(path):
                os.remove(path)
        passed = [node for node, phases in results.items() if phases and set(phases.values()) == {"passed"}]
        xfailed = [node for node, phases in results.items() if "xfailed" in phases.values()]
        body = json.dumps(
            {
                "collected": collected,
                "ran": sorted(results),
                "passed": sorted(passed),
                "xfailed": sorted(xfailed),
                "canaries": canary_outcomes,
                "tampered": tampered(),
                "exit": int(exitstatus),
            }
        )
        mac = hmac.new(key, body.encode(), hashlib.sha256).hexdigest()
        with open(os.path.join(_HERE, f"results-{os.getpid()}-{random.getrandbits(60)}"), "w") as file:
            file.write(mac + " " + body)

    return Recorder()


_recorder = _plugin()


def pytest_addoption(parser, pluginmanager):
    pluginmanager.register(_recorder)
    globals().pop("_recorder")
