"""Every attack earns reward 0 and is counted as a failure."""

from __future__ import annotations

import errno
import json
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from etpi_assets.specs.plugins import plugin_names
from etpi_assets.tasks.families import known_families, load_family
from etpi_assets.tasks.grading import grade
from etpi_resources.sandboxes import CommandResult, Sandbox
from etpi_resources.sandboxes.guest_connection import GuestConnection
from tests.attacks.attacks import Attack, attacks
from tests.attacks.targets import Targets
from tests.attacks.write_page import HEAD, PAGE, table
from tests.support.repositories import solved

FOLDER = tempfile.TemporaryDirectory()
TARGETS = Targets(Path(FOLDER.name))
ATTACKS = attacks(TARGETS)


FIRST = {attack.family: attack for attack in reversed(ATTACKS) if attack.overlays != [{}]}
"""The attack on each family that `make test` tries."""


KINDS = {attack.name: attack for attack in reversed(ATTACKS)}
"""Of the attacks of one kind on several families, the one that `make test-all` tries; `make test-long` tries all."""


def _parameter(attack: Attack):
    marks = [pytest.mark.attack if attack is KINDS[attack.name] else pytest.mark.long]
    return pytest.param(attack, id=attack.key, marks=[] if attack is FIRST[attack.family] else marks)


@pytest.mark.parametrize("attack", map(_parameter, ATTACKS))
def test_attack_earns_nothing(attack: Attack) -> None:
    outcome = attack.run(TARGETS)
    if file := os.environ.get("ETPI_ATTACK_LOG"):
        with Path(file).open("a") as log:
            log.write(json.dumps([attack.key, outcome.reward, outcome.verdict]) + "\n")
    assert outcome.reward == 0.0, outcome


@pytest.mark.parametrize("family", ["pypi_bugs", "r2e", "swe_bench", "cooperbench"])
def test_honest_solution_is_rewarded(family: str) -> None:
    outcome = TARGETS.judge(family, solved("1", "2"))
    assert (outcome.reward, outcome.trust) == (1.0, "blind")


def test_honest_files_that_git_ignores_are_rewarded() -> None:
    solution = solved("1", "2")["moor.py"]
    library = {"lib/__init__.py": "", "lib/ropes.py": solution, ".gitignore": "lib/\n"}
    assert TARGETS.judge("cooperbench", {**library, "moor.py": "from lib.ropes import knot, rope\n"}).reward == 1.0


def test_hidden_values_enter_no_sandbox_in_which_work_is_tested(monkeypatch) -> None:
    entered: list[str] = []
    write, run = GuestConnection.write_files, GuestConnection.run

    def writes(self: GuestConnection, files: Mapping[str, str]) -> None:
        entered.extend(files.values())
        write(self, files)

    def runs(self: GuestConnection, command: str, **more: Any) -> CommandResult:
        entered.append(command)
        return run(self, command, **more)

    assert TARGETS.judge("swe_bench", solved("1")).reward == 1.0  # calibrated, and the tests are read
    monkeypatch.setattr(GuestConnection, "write_files", writes)
    monkeypatch.setattr(GuestConnection, "run", runs)
    assert TARGETS.judge("swe_bench", solved("1")).reward == 1.0
    assert any("__hole__" in text for text in entered) and not any("rope(4) == 8" in text for text in entered)


def test_harbor_solution_is_rewarded() -> None:
    assert TARGETS.roll("harbor", "printf 'wanted\\n' > out.txt").reward == 1.0


def test_every_family_has_attacks() -> None:
    attacked = {attack.family for attack in ATTACKS}
    families = set(known_families()) - (set(plugin_names("family")) - attacked)
    assert attacked == families, "write attacks on the family in tests/attacks/attacks.py"
    assert len({attack.key for attack in ATTACKS}) == len(ATTACKS) >= 40


def test_page_counts_the_attacks() -> None:
    assert PAGE.read_text().partition(HEAD)[2] == table(), "run python -m tests.attacks.write_page"


@pytest.mark.parametrize("fault", [RecursionError("too deep"), OSError(errno.EMFILE, "too many open files")])
def test_fault_on_the_agents_work_alone_is_the_agents_unless_it_is_the_machines(
    monkeypatch: pytest.MonkeyPatch, fault: Exception
) -> None:
    task = TARGETS.task("repo_fix_tiny")
    family, files = load_family("repo_fix_tiny"), TARGETS.start("repo_fix_tiny")
    judge = type(family).judge

    def stumbling(self, task, final, sandboxes):
        if "# deep" in final["agent1"].values():
            raise fault
        return judge(self, task, final, sandboxes)

    monkeypatch.setattr(type(family), "judge", stumbling)
    deep = {"agent1": {**files, "x.py": "# deep"}}
    if isinstance(fault, OSError):
        with pytest.raises(OSError, match="too many"):
            grade(family, task, {"agent1": files}, deep, {}, TARGETS.factory)
        return
    verdict = grade(family, task, {"agent1": files}, deep, {}, TARGETS.factory)
    assert (verdict.reward, verdict.verdict) == (0.0, "broken_by_agent")


class _NoSandboxes:
    """A factory of a machine where no sandbox starts."""

    name = "none"

    def create(self, *arguments: object, **more: object) -> Sandbox:
        raise OSError("no sandbox starts here")


def test_fault_without_the_agents_work_stays_infrastructure() -> None:
    task, family = TARGETS.task("repo_fix_tiny"), load_family("repo_fix_tiny")
    start = TARGETS.start("repo_fix_tiny")
    changed = {path: text + "\n# changed\n" for path, text in start.items()}
    with pytest.raises(OSError, match="no sandbox starts"):
        grade(family, task, {"agent1": start}, {"agent1": changed}, {}, _NoSandboxes())
