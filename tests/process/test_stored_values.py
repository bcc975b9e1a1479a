"""Values that are stored between processes are computed again as soon as a file changes."""

from __future__ import annotations

from pathlib import Path

import pytest

from etpi_resources.process.stored_values import StoredValues, signature_of


@pytest.fixture
def computed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "a.py").write_text("a = 1\n")
    return []


def value(tmp_path: Path, computed: list[int]) -> str:
    store = StoredValues("test", signature_of([tmp_path / "code", tmp_path / "single.py"]))
    if "x" not in store.values:
        computed.append(1)
        store.values["x"] = (tmp_path / "code" / "a.py").read_text()
        store.write()
    return store.values["x"]


def test_values_are_computed_once_until_a_file_changes(tmp_path: Path, computed: list[int]) -> None:
    assert [value(tmp_path, computed) for _ in range(3)] == ["a = 1\n"] * 3
    assert len(computed) == 1
    (tmp_path / "code" / "a.py").write_text("a = 2\n")
    assert value(tmp_path, computed) == "a = 2\n"
    (tmp_path / "code" / "b.py").write_text("")
    value(tmp_path, computed)
    assert len(computed) == 3
    (tmp_path / "single.py").write_text("")
    value(tmp_path, computed)
    assert len(computed) == 4


def test_damaged_store_is_replaced(tmp_path: Path, computed: list[int]) -> None:
    value(tmp_path, computed)
    (file,) = (tmp_path / "cache" / "etpi").iterdir()
    for text in ("{", "[]", '{"values": 3}'):
        file.write_text(text)
        assert value(tmp_path, computed) == "a = 1\n"
    assert len(computed) == 4


def test_folder_that_cannot_be_written_is_no_error(
    tmp_path: Path, computed: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert [value(tmp_path, computed) for _ in range(2)] == ["a = 1\n"] * 2
    assert len(computed) == 2
