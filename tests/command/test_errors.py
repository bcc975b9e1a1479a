"""Expected errors are one line with a remedy; faults of the program keep their stack trace. Ports fall back."""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Iterator

import pytest
import sqlalchemy
from sqlalchemy.exc import SQLAlchemyError

from etpi.cli import main
from etpi.errors import explained
from etpi.web.ports import PortTaken, free_port
from etpi_assets.specs.load import SpecError, load_specs
from tests.support.graph import write_spec


def test_errors_of_the_system_name_place_and_remedy() -> None:
    full = OSError(errno.ENOSPC, "No space left on device", "/lake/x")
    assert explained(full) == "/lake/x: No space left on device; " + str(explained(full)).partition("; ")[2]
    assert "etpi gc" in str(explained(full))
    assert explained(OSError(errno.ENOENT, "No such file", "x")) is None and explained(KeyError("x")) is None
    try:
        raise RuntimeError("a run failed") from full
    except RuntimeError as error:
        assert explained(error) == explained(full)


def test_storage_of_dagster_that_cannot_be_used_is_one_line(tmp_path, monkeypatch) -> None:
    (tmp_path / "runs.db").write_text("no database" * 100)
    monkeypatch.setenv("DAGSTER_HOME", str(tmp_path))
    engine = sqlalchemy.create_engine(f"sqlite:///{tmp_path / 'runs.db'}")
    with pytest.raises(SQLAlchemyError) as error, engine.connect() as connection:
        connection.execute(sqlalchemy.text("SELECT 1 FROM runs"))
    line = str(explained(error.value))
    assert "\n" not in line and str(tmp_path) in line and "move the folder away" in line


def test_a_lake_that_is_a_file_is_one_line(tmp_path, monkeypatch, capsys) -> None:
    (tmp_path / "data").write_text("")
    monkeypatch.setenv("ETPI_DATA", str(tmp_path / "data"))
    assert main(["status", "plan_first_tiny"]) == 1
    shown = capsys.readouterr().err
    assert len(shown.splitlines()) == 1 and "ETPI_DATA" in shown


def test_quote_that_is_not_closed_is_named(tmp_path) -> None:
    write_spec(tmp_path, "experiments", "a", 'title = "x\n')
    with pytest.raises(SpecError, match=r"a\.toml: not TOML: a quote is not closed at line 1"):
        load_specs(tmp_path).get("experiment", "a")


@pytest.fixture
def taken() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


def test_taken_port_falls_back_unless_it_was_named(taken, capsys) -> None:
    other = free_port("127.0.0.1", taken, named=False)
    assert other > taken and f"port {taken} is in use by process {os.getpid()}" in capsys.readouterr().err
    with pytest.raises(PortTaken, match=f"port {taken} of 127.0.0.1 is in use by process {os.getpid()}"):
        free_port("127.0.0.1", taken, named=True)
    assert free_port("127.0.0.1", other, named=True) == other
    with pytest.raises(PortTaken, match="no address"):
        free_port("192.0.2.1", other, named=True)
    with pytest.raises(PortTaken, match="no address or name"):
        free_port("no such host", other, named=True)
