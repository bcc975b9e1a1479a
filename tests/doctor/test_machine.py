"""`etpi doctor` on this machine: a sound one passes, planted faults are named, and nothing stays in the lake."""

from __future__ import annotations

from pathlib import Path

import pytest

from etpi.cli import main
from etpi.doctor import machine
from etpi.doctor.command import doctor, unguarded
from etpi.doctor.machine import Examiner, MachineReport, file_system, unguarded_pages
from etpi_resources.sandboxes import SandboxUnavailable


@pytest.fixture
def lake(tmp_path, monkeypatch):
    monkeypatch.setenv("ETPI_DATA", str(tmp_path / "lake"))
    monkeypatch.delenv("ETPI_CLUSTER", raising=False)
    return tmp_path / "lake"


def test_a_sound_machine_passes_and_the_lake_is_left_as_it_was(lake, capsys):
    assert main(["doctor"]) == 0
    assert "0 faults" in capsys.readouterr().out
    assert list(lake.iterdir()) == []


def test_missing_sandboxes_are_a_fault_with_the_remedy(lake, monkeypatch, capsys):
    def refuse(self):
        raise SandboxUnavailable("bubblewrap is not installed: apt-get install bubblewrap")

    monkeypatch.setattr(machine.BubblewrapFactory, "check", refuse)
    assert doctor() == 1
    printed = capsys.readouterr().out
    assert "FAULT" in printed and "apt-get install bubblewrap" in printed


def test_no_container_engine_is_a_fault_of_an_experiment_that_needs_one(lake, monkeypatch, capsys):
    monkeypatch.setattr("etpi.rehearsal.starts.docker_answers", lambda: False)
    assert doctor(["plan_first_tiny"]) == 0 and "container" not in capsys.readouterr().out
    assert doctor() == 0 and "terminal_bench need one" in capsys.readouterr().out
    assert doctor(["terminal_grpo_0_8b"]) == 1
    printed = capsys.readouterr().out
    assert "FAULT" in printed and "podman" in printed and "DOCKER_HOST" in printed and "params.checkouts" in printed


def test_a_lock_that_excludes_nobody_is_a_fault(lake, monkeypatch, capsys):
    monkeypatch.setattr(Examiner, "hold", lambda self, kind: None)  # as flock does where the file system ignores it
    assert doctor() == 1
    assert ", locks:" in capsys.readouterr().out


def test_a_lake_that_cannot_be_written_is_a_fault(tmp_path, monkeypatch, capsys):
    blocked = tmp_path / "file"
    blocked.write_text("not a folder")
    monkeypatch.setenv("ETPI_DATA", str(blocked))
    report = Examiner(blocked, "here", "token").machine()
    assert report.lake_error and str(blocked) in report.lake_error


def test_the_file_system_of_a_folder_is_named_with_its_options():
    assert file_system(Path("/proc/self")).startswith("proc (")


def test_page_that_bypasses_the_guard_is_noted(tmp_path: Path) -> None:
    lines = {
        "10": "/usr/bin/python3\0-m\0dagster_webserver\0--port\x003000\0",
        "9": "/venv/bin/python\0/venv/bin/dagster-webserver\0",
        "11": "/venv/bin/python\0-m\0etpi\0ui\0",
        "12": "vim\0notes about dagster_webserver\0",
        "13": "",
    }
    for name, line in lines.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "cmdline").write_bytes(line.encode())
    (tmp_path / "14").mkdir()  # ended meanwhile
    pages = unguarded_pages(tmp_path)
    assert [page.rpartition(" ")[2] for page in pages] == ["9)", "10)"]
    (first, _) = unguarded(MachineReport(name="head", unguarded=pages))
    assert not first.fault and first.column == "page" and "etpi ui" in first.remedy
