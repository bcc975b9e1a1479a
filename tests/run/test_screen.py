"""What real runs show: in a log file through a pipe, on a terminal through a pseudo-terminal."""

from __future__ import annotations

import os
import pty
import re
import signal
import subprocess
import sys
import termios
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.graph import write_spec
from tests.support.small_specs import DATA_ALONE, ROLLOUT_SET, SUITE

pytestmark = pytest.mark.slow
ROOT = Path(__file__).resolve().parents[2]
BLOCKED = DATA_ALONE.replace("role_balance = 0.0", "role_balance = 0.9")
"""A floor that two roles cannot reach."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Where specs, lake and Dagster's home are; nothing is made yet."""
    created = tmp_path_factory.mktemp("screen")
    write_spec(created / "specs", "suites", "little", SUITE)
    write_spec(created / "specs", "rollout_sets", "little_strong", ROLLOUT_SET)
    for name in ("data_one", "data_two"):
        write_spec(created / "specs", "experiments", name, DATA_ALONE)
    for name in ("blocked_one", "blocked_two"):
        write_spec(created / "specs", "experiments", name, BLOCKED)
    return created


def _command(*names: str) -> list[str]:
    return [sys.executable, "-m", "etpi", "run", *names]


def _environment(folder: Path) -> dict[str, str]:
    places = {"DAGSTER_HOME": "", "ETPI_DATA": "data", "ETPI_CATALOG": "etpi.duckdb", "ETPI_SPECS": "specs"}
    return {**os.environ, "TERM": "xterm", **{name: str(folder / place) for name, place in places.items()}}


def _on_a_terminal(
    folder: Path, *names: str, act: Callable[[str], bytes | None] = lambda shown: None
) -> tuple[int, str]:
    """Run experiments on a pseudo-terminal: exit status, and everything it was sent.

    Args:
        act: what was sent so far -> keys to press; asked until it gives some.
    """
    process, terminal = pty.fork()
    if process == 0:
        os.chdir(ROOT)
        # A shell has its background jobs ignore interrupts, and their children inherit that.
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.execve(sys.executable, _command(*names), _environment(folder))
    termios.tcsetwinsize(terminal, (40, 100))
    shown, pressed = b"", False
    while True:
        try:
            piece = os.read(terminal, 65536)
        except OSError:  # the other end is closed
            break
        if not piece:
            break
        shown += piece
        if not pressed and (keys := act(shown.decode(errors="replace"))):
            os.write(terminal, keys)
            pressed = True
    os.close(terminal)
    return os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]), shown.decode()


def test_a_run_on_a_terminal_ends_with_table_and_links(folder):
    code, shown = _on_a_terminal(folder, "data_one", "data_two")
    assert code == 0, shown
    assert "\x1b" not in shown
    ending = shown[shown.rindex(" done in ") :].partition("\n")[2]
    lines = ending.replace("\r", "").strip("\n").split("\n")
    assert lines[0].split() == ["n", "teacher"] and lines[1] == "data_one"
    assert [line.split()[0] for line in lines[2:5]] == ["plan_first", "follow_through", "solved"], ending
    assert "/experiment/data_one" in ending and "Results:" in lines and max(map(len, lines)) <= 100 + len(str(folder))

    code, again = _on_a_terminal(folder, "data_one", "data_two")
    assert code == 0 and again.count("nothing is missing or stale") == 1
    assert " computed in " not in again and "-- " not in again, "no job is started for nothing"


def test_ctrl_c_on_a_terminal_ends_the_runs(folder):
    write_spec(folder / "specs", "rollout_sets", "slow", ROLLOUT_SET.replace("k = 1", "k = 40"))
    for name in ("stopped_one", "stopped_two"):
        write_spec(folder / "specs", "experiments", name, DATA_ALONE.replace("little_strong", "slow"))
    code, shown = _on_a_terminal(
        folder,
        "stopped_one",
        "stopped_two",
        act=lambda shown: b"\x03" if " waits for " in shown else None,
    )
    assert code == 130, shown
    assert "etpi: stopped." in shown and "Traceback" not in shown
    assert "raw_rollouts of slow computed in" not in shown, "it stopped in the middle of the work"


def test_log_is_sparse_and_reports_failures_once(folder):
    run = subprocess.run(
        _command("blocked_one", "blocked_two"), cwd=ROOT, env=_environment(folder), capture_output=True, text=True
    )
    said = run.stderr
    assert run.returncode == 1, said
    assert not re.search(r"[0-9a-f]{64}", said) and "\x1b" not in said
    assert "pipes" not in said.lower()
    ending = said[said.index("etpi: failed: ") :]
    for name in ("blocked_one", "blocked_two"):
        assert f"  {name}: upweighted_dataset of {name}: blocked by failed checks" in ending
    assert "etpi status blocked_one" in ending
