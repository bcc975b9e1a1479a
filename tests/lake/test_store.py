"""The contract of the publish step: nothing is put twice, no swap is lost."""

from __future__ import annotations

import errno
import os
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from threading import Barrier

import pytest

from etpi_resources.inside import read_file
from etpi_resources.lake import store
from etpi_resources.lake.manifest import LakeError
from etpi_resources.lake.store import put_if_absent, read_pointer, swap
from etpi_resources.process.locks import machine_locks


@pytest.fixture
def path(tmp_path) -> Path:
    return tmp_path / "lake" / "a" / "part-0"


def test_file_is_put_once_and_never_replaced(path, tmp_path):
    for source, stored in ((b"first", True), (b"second", False)):
        assert put_if_absent(path, source) is stored
    (tmp_path / "file").write_bytes(b"third")
    assert not put_if_absent(path, tmp_path / "file")
    assert put_if_absent(path.with_name("other"), tmp_path / "file")
    assert [read_pointer(each) for each in (path, path.with_name("other"))] == [b"first", b"third"]


def test_content_is_on_disk_before_it_has_its_name_and_the_folder_after(path, flushed, monkeypatch):
    link, replace = os.link, Path.replace
    monkeypatch.setattr(os, "link", lambda *paths: (flushed.append("named"), link(*paths)))
    monkeypatch.setattr(Path, "replace", lambda *paths: (flushed.append("named"), replace(*paths)))
    put_if_absent(path, b"1")
    swap(path, b"2", expected=b"1")
    for staged, named, folder in (flushed[:3], flushed[3:]):
        assert staged.name.startswith(".part-0.") and (named, folder) == ("named", path.parent)


def test_pointer_replaced_between_opening_and_reading_is_read_again(path, monkeypatch):
    assert put_if_absent(path, b"new")
    failures = [errno.ESTALE, errno.ESTALE]

    def stale(path: Path) -> bytes:
        if failures:
            raise OSError(failures.pop(), "stale file handle")
        return read_file(path)

    monkeypatch.setattr(store, "read_file", stale)
    assert read_pointer(path) == b"new" and not failures
    failures.append(errno.EIO)
    with pytest.raises(OSError, match="stale"):
        read_pointer(path)


@pytest.mark.parametrize("number", [errno.EPERM, errno.EOPNOTSUPP])
def test_file_system_without_hard_links_is_refused_by_name(tmp_path, monkeypatch, number):
    def no_link(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "link", no_link)
    with pytest.raises(LakeError, match=str(tmp_path)):
        put_if_absent(tmp_path / "part-0", b"rows")
    assert not list(tmp_path.iterdir())


def test_of_many_who_put_at_once_one_stores(path):
    ready = Barrier(6)

    def put(number: int) -> bool:
        ready.wait()
        return put_if_absent(path, b"%d" % number)

    with ThreadPoolExecutor(6) as threads:
        stored = list(threads.map(put, range(6)))
    assert sum(stored) == 1 and read_pointer(path) == b"%d" % stored.index(True)


def test_pointer_is_swapped_only_if_it_is_as_it_was_read(path):
    assert read_pointer(path) is None
    swap(path, b"1", expected=None)
    first = read_pointer(path)
    with pytest.raises(LakeError, match="part-0 "):
        swap(path, b"x", expected=None)
    swap(path, b"2", expected=first)
    with pytest.raises(LakeError):
        swap(path, b"x", expected=first)
    assert read_pointer(path) == b"2"


def test_of_many_swaps_at_once_one_succeeds(path, tmp_path):
    """Under the lock that `Lake` holds meanwhile."""
    rounds, threads = 4, 4
    ready = Barrier(threads)

    def try_swaps(number: int) -> list[int]:
        moved = []
        for _ in range(rounds):
            before = read_pointer(path)
            ready.wait()
            with machine_locks().hold(tmp_path / "lock"), suppress(LakeError):
                swap(path, b"%d" % ((int(before) if before else 0) + 1), before)
                moved.append(number)
            ready.wait()
        return moved

    with ThreadPoolExecutor(threads) as pool:
        moved = [number for numbers in pool.map(try_swaps, range(threads)) for number in numbers]
    assert len(moved) == rounds and read_pointer(path) == b"%d" % rounds


def test_no_temporary_file_stays(tmp_path):
    put_if_absent(tmp_path / "b", b"1")
    assert not put_if_absent(tmp_path / "b", b"2")
    swap(tmp_path / "current", b"1", None)
    with pytest.raises(LakeError):
        swap(tmp_path / "current", b"2", None)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["b", "current"]
