"""`etpi push`, `pull`, `remote`, `rm --remote` and `gc --remote` with a folder as the bucket."""

from __future__ import annotations

import json

import pytest

from etpi.cli import main
from etpi_resources.lake.lake import Lake
from tests.support.small_lake import PAIRS, publish

pytest.importorskip("obstore")


@pytest.fixture
def lake(tmp_path, monkeypatch) -> Lake:
    monkeypatch.setenv("ETPI_DATA", str(tmp_path / "data"))
    monkeypatch.setenv("ETPI_SPECS", str(tmp_path / "specs"))
    (tmp_path / "specs" / "experiments").mkdir(parents=True)
    lake = Lake(tmp_path / "data")
    publish(lake, PAIRS, 5, inputs={})
    return lake


def states(capsys) -> dict[str, dict[str, int]]:
    capsys.readouterr()
    assert main(["remote", "--json"]) == 0
    return {row["key"]: row["states"] for row in json.loads(capsys.readouterr().out)["keys"]}


def test_commands_show_how_the_lake_stands_to_its_bucket(lake, tmp_path, capsys):
    bucket = str(tmp_path / "shared")
    assert main(["push"]) == 1 and "no bucket yet" in capsys.readouterr().err
    assert main(["push", "--to", bucket, "--dry-run"]) == 0 and "would be pushed" in capsys.readouterr().err
    assert main(["push", "--to", bucket]) == 0
    assert states(capsys) == {"plan_first": {"same": 1}}
    publish(lake, PAIRS, 6, inputs={})
    assert states(capsys) == {"plan_first": {"ahead": 1}}
    assert main(["status"]) == 0
    assert "1 ahead" in capsys.readouterr().out
    assert main(["push"]) == 0
    assert main(["rm", "plan_first", "--remote"]) == 0 and states(capsys) == {"plan_first": {"same": 1}}
    assert main(["rm", "plan_first", "--remote", "--yes"]) == 0 and states(capsys) == {"plan_first": {"removed": 1}}
    assert main(["gc", "--remote", "--older-than", "0", "--yes"]) == 0
    assert {path.name for path in (tmp_path / "shared").rglob("*") if path.is_file()} == {
        ".index.lock",
        "index.json.gz",
    }
    assert lake.current(PAIRS) is not None
    assert main(["push", "plan_first"]) == 0 and states(capsys) == {"plan_first": {"same": 1}}


def test_status_names_data_whose_spec_is_not_here(lake, capsys):
    from etpi_resources.lake.lake import Ref

    publish(lake, Ref("experiment_spec", "experiment", "of_a_colleague"), 3, inputs={})
    main(["status"])
    assert "no spec here of experiment of_a_colleague" in capsys.readouterr().out
