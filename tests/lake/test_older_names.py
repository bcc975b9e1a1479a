"""Journals and trainings of etpi 0.2, whose names were digests of code, are found again and finished."""

from __future__ import annotations

import json
import os

import pytest

from etpi_resources.lake.lake import Lake
from etpi_resources.lake.older_names import adopt, adopt_training, older_folders

OLD, OLDER = "0123456789abcdef", "fedcba9876543210"


def _folder(path, age, **files):
    path.mkdir(parents=True)
    for name, text in files.items():
        (path / name).write_text(text)
    os.utime(path, (age, age))


def test_newest_folder_with_an_older_name_is_taken_over_once(tmp_path):
    _folder(tmp_path / OLDER, 1, journal="a")
    _folder(tmp_path / OLD, 2, journal="b")
    _folder(tmp_path / "v123", 3, journal="of another number")
    adopt(tmp_path / "vnew")
    assert (tmp_path / "vnew" / "journal").read_text() == "b"
    adopt(tmp_path / "vnew")
    assert sorted(p.name for p in tmp_path.iterdir()) == [OLDER, "v123", "vnew"]


def test_a_journal_is_taken_from_the_folder_that_has_it(tmp_path):
    _folder(tmp_path / OLD, 1, one="1")
    _folder(tmp_path / OLDER, 1, two="2")
    for name in ("one", "two", "three"):
        adopt(tmp_path / "vnew" / name, older_folders(tmp_path))
    assert {p.name: p.read_text() for p in (tmp_path / "vnew").iterdir()} == {"one": "1", "two": "2"}


@pytest.fixture
def lake(tmp_path):
    return Lake(tmp_path / "lake")


def _adopt(lake, *, older=(), config=None, same=True):
    adopt_training(lake, "key", "train", older, {"seed": 1, "new": 2} if config is None else config, lambda path: same)


def test_a_stored_training_is_found_under_an_older_key(lake):
    trained = lake.root / "checkpoints" / "trained"
    _folder(trained, 1, **{f"{OLD}.json": "{}"})
    _adopt(lake, older=[OLDER])
    assert not (trained / "key.json").exists()
    _adopt(lake, older=[OLDER, OLD])
    assert (trained / "key.json").read_text() == "{}" and (trained / f"{OLD}.json").exists(), "others may name it"


@pytest.mark.parametrize(
    ("older", "config", "same", "is_found"),
    [((), {"seed": 1, "new": 2}, True, True), ((), {"seed": 2}, True, False), ((), {"seed": 1}, False, False),
     ((OLD,), {"seed": 2}, False, True), ((OLDER,), {"seed": 2}, True, False)],
)  # fmt: skip
def test_an_interrupted_training_is_found_by_its_key_or_its_configuration(lake, older, config, same, is_found):
    work, rounds = lake.root / "scratch" / "train", lake.root / "checkpoints" / "rounds"
    _folder(work / OLD, 1, **{"config.json": json.dumps({"seed": 1, "gone": 3}), "state": "s"})
    _folder(rounds / OLD, 1, round="r")
    _adopt(lake, older=older, config=config, same=same)
    assert (work / "key" / "state").exists() == (rounds / "key" / "round").exists() == is_found
    assert (work / OLD).exists() == (not is_found)
