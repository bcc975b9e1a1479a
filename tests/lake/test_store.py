"""The contract of the publish step, over a folder and over S3 (moto): nothing is put twice, no swap is lost."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext, suppress
from importlib.util import find_spec
from pathlib import Path
from threading import Barrier

import pyarrow.fs
import pyarrow.parquet as pq
import pytest

from etpi_resources.lake import parquet
from etpi_resources.lake.store import FolderStore, NoHardLinks, PointerMoved, Store
from etpi_resources.process.locks import machine_locks
from tests.support.publications import turns
from tests.support.s3_store import BUCKET, S3Store, s3_server


@pytest.fixture(scope="module")
def s3() -> Iterator[str]:
    if lacking := [name for name in ("moto", "obstore", "boto3", "flask") if find_spec(name) is None]:
        pytest.skip(f"{', '.join(lacking)} is not installed")
    with s3_server() as url:
        yield url


@pytest.fixture(params=["folder", "s3"])
def store(request, tmp_path) -> Store:
    if request.param == "folder":
        return FolderStore(tmp_path / "lake")
    return S3Store(request.getfixturevalue("s3"))


@pytest.fixture
def path(request) -> str:
    """A path of this test's own: all tests share the bucket."""
    return f"{request.node.name.translate(str.maketrans('[]', '--'))}/part-0"


def test_file_is_put_once_and_never_replaced(store, path, tmp_path):
    for source, stored in ((b"first", True), (b"second", False)):
        assert store.put_if_absent(path, source) is stored
    (tmp_path / "file").write_bytes(b"third")
    assert not store.put_if_absent(path, tmp_path / "file")
    assert store.put_if_absent(path + "-other", tmp_path / "file")
    assert [store.pointer(name).content for name in (path, path + "-other")] == [b"first", b"third"]


@pytest.mark.parametrize("number", [errno.EPERM, errno.EOPNOTSUPP])
def test_file_system_without_hard_links_is_refused_by_name(tmp_path, monkeypatch, number):
    def no_link(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "link", no_link)
    with pytest.raises(NoHardLinks, match=f"{tmp_path}.* has no hard links.*nothing was published"):
        FolderStore(tmp_path).put_if_absent("part-0", b"rows")
    assert not list(tmp_path.iterdir())


def test_of_many_who_put_at_once_one_stores(store, path):
    ready = Barrier(6)

    def put(number: int) -> bool:
        ready.wait()
        return store.put_if_absent(path, b"%d" % number)

    with ThreadPoolExecutor(6) as threads:
        stored = list(threads.map(put, range(6)))
    assert sum(stored) == 1 and store.pointer(path).content == b"%d" % stored.index(True)


def test_pointer_is_swapped_only_if_it_is_as_it_was_read(store, path):
    assert store.pointer(path) is None
    store.swap(path, b"1", expected=None)
    first = store.pointer(path)
    with pytest.raises(PointerMoved, match="part-0 was moved by another process"):
        store.swap(path, b"x", expected=None)
    store.swap(path, b"2", expected=first)
    with pytest.raises(PointerMoved):
        store.swap(path, b"x", expected=first)
    assert store.pointer(path).content == b"2"


def test_of_many_swaps_at_once_one_succeeds(store, path, tmp_path):
    """A folder needs the lock that `Lake` holds meanwhile, S3 needs none."""
    rounds, threads = 4, 4
    ready = Barrier(threads)

    def swap(number: int) -> list[int]:
        moved = []
        for _ in range(rounds):
            before = store.pointer(path)
            ready.wait()
            lock = machine_locks().hold(tmp_path / "lock") if isinstance(store, FolderStore) else nullcontext()
            with lock, suppress(PointerMoved):
                store.swap(path, b"%d" % ((int(before.content) if before else 0) + 1), before)
                moved.append(number)
            ready.wait()
        return moved

    with ThreadPoolExecutor(threads) as pool:
        moved = [number for numbers in pool.map(swap, range(threads)) for number in numbers]
    assert len(moved) == rounds and store.pointer(path).content == b"%d" % rounds


def test_version_in_a_bucket_is_read_by_pyarrow_through_its_pointer(s3, tmp_path):
    """Table, manifest, pointer, in this order; a reader starts at the pointer, and a late publisher moves nothing."""
    store, reader = S3Store(s3), S3Store(s3)
    folder = "tito_pairs/experiment=a"

    def publish(rows: int, expected) -> None:
        file = tmp_path / f"{rows}.parquet"
        parquet.write("turns", turns(rows), file)
        table = f"tito_pairs/turns/experiment=a/version={rows}/part-0.parquet"
        store.put_if_absent(table, file)
        store.put_if_absent(f"{folder}/version={rows}/manifest.json", json.dumps({"files": [table]}).encode())
        store.swap(f"{folder}/current", json.dumps({"manifest": f"version={rows}/manifest.json"}).encode(), expected)

    publish(5, None)
    before = reader.pointer(f"{folder}/current")
    publish(7, before)
    with pytest.raises(PointerMoved):
        publish(9, before)
    files = pyarrow.fs.S3FileSystem(
        access_key="test", secret_key="test", endpoint_override=s3, scheme="http", region="us-east-1"
    )
    for pointer, rows in ((before, 5), (reader.pointer(f"{folder}/current"), 7)):
        manifest = reader.pointer(f"{folder}/{json.loads(pointer.content)['manifest']}")
        (table,) = json.loads(manifest.content)["files"]
        read = pq.read_table(f"{BUCKET}/{table}", filesystem=files, page_checksum_verification=True)
        assert read.num_rows == rows and read.select(["content"]).equals(turns(rows).select(["content"]))


def test_folder_store_leaves_no_temporary_file(tmp_path: Path):
    store = FolderStore(tmp_path)
    store.put_if_absent("a/b", b"1")
    assert not store.put_if_absent("a/b", b"2")
    store.swap("a/current", b"1", None)
    with pytest.raises(PointerMoved):
        store.swap("a/current", b"2", None)
    assert sorted(path.name for path in (tmp_path / "a").iterdir()) == ["b", "current"]
