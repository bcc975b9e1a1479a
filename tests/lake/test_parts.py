"""Parts of a version that a killed run finished are found again, and only those."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pyarrow as pa
import pytest

from etpi_resources.lake.stored import Parts

PART = {"pairs": pa.table({"turn": [1, 2]}), "dropped": pa.table({"reason": pa.array([], pa.string())})}


def never() -> Mapping[str, pa.Table]:
    raise AssertionError("a finished part was computed again")


def test_finished_part_is_read_and_not_computed(tmp_path: Path) -> None:
    assert Parts(tmp_path, "key").get("a", lambda: PART) == PART
    assert Parts(tmp_path, "key").get("a", never) == PART


def test_part_that_was_cut_off_is_computed_again(tmp_path: Path) -> None:
    def killed() -> Mapping[str, pa.Table]:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Parts(tmp_path, "key").get("a", killed)
    assert Parts(tmp_path, "key").get("a", lambda: PART) == PART


@pytest.mark.parametrize("damage", [b"", b"PAR1 but no more"])
def test_damaged_part_is_computed_again(tmp_path: Path, damage: bytes) -> None:
    Parts(tmp_path, "key").get("a", lambda: PART)
    (file,) = tmp_path.glob("*/a/pairs.parquet")
    file.write_bytes(damage)
    assert Parts(tmp_path, "key").get("a", lambda: PART) == PART
    assert Parts(tmp_path, "key").get("a", never) == PART


def test_flipped_bit_in_a_part_is_noticed(tmp_path: Path) -> None:
    rows = pa.table({"turn": list(range(1000))})
    Parts(tmp_path, "key").get("a", lambda: {"pairs": rows})
    (file,) = tmp_path.glob("*/a/pairs.parquet")
    data = bytearray(file.read_bytes())
    for place in range(100, 1000, 90):
        flipped = data.copy()
        flipped[place] ^= 4
        file.write_bytes(flipped)
        assert Parts(tmp_path, "key").get("a", lambda: {"pairs": rows})["pairs"] == rows


def test_parts_of_another_key_are_removed(tmp_path: Path) -> None:
    Parts(tmp_path, "key").get("a", lambda: PART)
    other = Parts(tmp_path, "other")
    assert other.get("a", lambda: {"pairs": PART["dropped"]}) == {"pairs": PART["dropped"]}
    for _ in range(2):
        other.remove()
        assert not tmp_path.exists()


def test_part_that_another_process_finished_meanwhile_is_kept(tmp_path: Path) -> None:
    def slow() -> Mapping[str, pa.Table]:
        Parts(tmp_path, "key").get("a", lambda: PART)
        return PART

    assert Parts(tmp_path, "key").get("a", slow) == PART
    assert [path.name for path in (tmp_path / "key").iterdir()] == ["a"]
