"""No expected value enters a sandbox, where the code under test could read it, if the host compares values."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest

from etpi_assets.tasks.answers import programs
from etpi_assets.tasks.families import load_family
from etpi_assets.tasks.family import Task
from etpi_resources.sandboxes import CommandResult, Limits, Sandbox
from etpi_resources.sandboxes.bubblewrap import BubblewrapFactory

EXPECTED = 918_273_645


class Spy:
    """A factory of sandboxes that keeps all that enters them."""

    name = "bubblewrap"

    def __init__(self) -> None:
        self.entered: list[str] = []

    @contextmanager
    def create(self, files: Mapping[str, str], *arguments: Any, **more: Any) -> Iterator[Sandbox]:
        self.entered += [*files, *files.values(), repr((arguments, more))]
        with BubblewrapFactory().create(files, *arguments, **more) as sandbox:
            write, run = sandbox.write_files, sandbox.run

            def write_files(files: Mapping[str, str]) -> None:
                self.entered += [*files, *files.values()]
                write(files)

            def run_command(command: str, *arguments: Any, **more: Any) -> CommandResult:
                self.entered.append(command)
                return run(command, *arguments, **more)

            sandbox.write_files, sandbox.run = write_files, run_command  # type: ignore[method-assign]
            yield sandbox


@pytest.mark.parametrize("name", ["coop_tiny_shared", "repo_fix_tiny"])
def test_values_of_calls_stay_outside(name: str) -> None:
    family: Any = load_family(name)
    spy: Any = Spy()
    task = next(t for t in family.load("s", 0, {"train": 2, "heldout": 2}) if isinstance(t, Task))
    payload = json.loads(json.dumps(task.payload))
    for feature in payload.get("features", {}).values():
        feature["hidden"] = [[argument, EXPECTED] for argument, _ in feature["hidden"]]
    for test, (*call, values) in payload.get("tests", {}).items():
        payload["tests"][test] = [*call, [EXPECTED] * len(values)]
    files = {path: f"{text}\n# changed\n" for path, text in payload["files"].items()}
    final = {role.agent_id: files for role in family.roles(task)}
    assert family.judge(replace(task, payload=payload), final, spy).verdict == "failed_tests"
    assert spy.entered and str(EXPECTED) not in "\n".join(spy.entered)


@pytest.mark.parametrize("name", [None, "f"])
def test_outputs_of_programs_stay_outside(name: str | None) -> None:
    text = programs.as_answer("def f(n):\n    return n\nprint(7)")
    tests = {"cases": [["7" if name is None else [7], "7" if name is None else 7]] * 2, "fn_name": name}
    spy: Any = Spy()
    assert programs.judge(tests, text, Limits(), spy).reward == 1.0
    tests["cases"][-1] = ["7", str(EXPECTED)] if name is None else [[7], EXPECTED]
    assert programs.judge(tests, text, Limits(), spy).reward == 0.0
    assert spy.entered and str(EXPECTED) not in "\n".join(spy.entered)
