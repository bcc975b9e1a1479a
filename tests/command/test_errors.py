"""Expected errors are one line with a remedy; faults of the program keep their stack trace. Ports fall back."""

from __future__ import annotations

import errno
import os
import re
import socket
from collections.abc import Iterator

import pytest
import sqlalchemy
from sqlalchemy.exc import SQLAlchemyError

from etpi.cli import main
from etpi.errors import explained
from etpi.web.ports import PortTaken, free_port
from etpi_assets.graph import GRAPH
from etpi_assets.specs.load import SpecError, load_specs
from etpi_resources.lake import catalog
from etpi_resources.lake.lake import Lake, LakeError
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


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ('title = "x\n', "not TOML: a quote is not closed at line 1"),
        ('title = "x', "not TOML: a quote is not closed"),
        ("title = 'x", "not TOML: a quote is not closed"),
        ("title = 1\ntitle = 2\n", "not TOML: a key is written twice at line 2"),
        ('title = "t"\ntrain = 3\n', "train: has to be a table; it is 3"),
        ('title = "t"\nseeds = []\n', "seeds: has to have at least 1 item; it is a list"),
        ('title = "t"\n', "rollout_sets is missing"),
        ('title = "t"\ntrain.epochs = "x"\n', "train.epochs: has to be a number; it is 'x'"),
    ],
)
def test_faults_of_a_spec_are_named_in_words_of_toml(tmp_path, text: str, reason: str) -> None:
    write_spec(tmp_path, "experiments", "a", text)
    with pytest.raises(SpecError, match=rf"a\.toml: {re.escape(reason)}"):
        load_specs(tmp_path).get("experiment", "a")


def test_catalog_replaces_and_opens_no_other_file(tmp_path, monkeypatch, capsys) -> None:
    (tmp_path / "mine.jsonl").write_text('{"a": 1}\n')
    monkeypatch.setenv("ETPI_CATALOG", str(tmp_path / "mine.jsonl"))
    with pytest.raises(LakeError, match=r"mine\.jsonl.*ETPI_CATALOG"):
        catalog.build(Lake(tmp_path / "data"), GRAPH.values())
    assert (tmp_path / "mine.jsonl").read_text() == '{"a": 1}\n'
    for words in (["sql", "solved_paired"], ["run", "catalog"]):
        assert main(words) == 1 and capsys.readouterr().err.count("\n") == 1, words


def test_folder_that_is_no_lake_gets_no_catalog(tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.setenv("ETPI_DATA", str(tmp_path))
    assert main(["view"]) == 1 and "etpi run catalog" in capsys.readouterr().err
    assert not list(tmp_path.glob("*.duckdb"))


@pytest.fixture
def taken() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


def test_taken_port_falls_back_unless_it_was_named(taken, capsys) -> None:
    other = free_port("127.0.0.1", taken, named=False)
    assert other > taken and f"port {taken} is in use by process {os.getpid()}" in capsys.readouterr().err
    with pytest.raises(PortTaken, match=f"{taken} of 127.0.0.1 .* {os.getpid()} .*--port"):
        free_port("127.0.0.1", taken, named=True)
    assert free_port("127.0.0.1", other, named=True) == other
    with pytest.raises(PortTaken, match="--host 192.0.2.1"):
        free_port("192.0.2.1", other, named=True)
    with pytest.raises(PortTaken, match="--host no such host"):
        free_port("no such host", other, named=True)
