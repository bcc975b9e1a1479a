"""`working_dir` ships the launching side's code to the run, its steps and the workers of its rollouts."""

from __future__ import annotations

import pytest

from tests.support.checkouts import copy_code
from tests.support.machines import SHARED

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]  # a fixture's time counts too


@pytest.fixture
def shipped(services, shared_lake):
    """Have runs take along code that says something else in the log than that of the nodes."""
    code = services.machines.shared / "code"
    copy_code(code)
    file = code / "etpi_cluster" / "backend.py"
    text = file.read_text()
    file.write_text(text.replace('"rollouts run on {len', '"shipped rollouts run on {len'))
    assert file.read_text() != text
    settings = shared_lake / "cluster.toml"
    before = settings.read_text()
    settings.write_text(f'{before}working_dir = "{SHARED}/code"\n')
    yield
    settings.write_text(before)


def test_code_that_a_run_takes_along_is_what_its_steps_and_rollouts_execute(services, runs, prepared, shipped):
    """Each worker says the hash of its code, and another one than the step's ends the run."""
    run = runs.by_command("collect_rollouts", "many_shipped")
    runs.succeed(run)
    assert any("shipped rollouts run on 2 nodes" in line for line in runs.messages(run))
    examined = services.head.run("etpi", "cluster", "doctor", check=False, **services.environment())
    assert ", code:" not in examined.stdout, examined.stdout + examined.stderr
