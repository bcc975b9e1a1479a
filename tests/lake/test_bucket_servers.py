"""push and pull over real servers: keys, races, SIGKILL at random moments, reading without pulling."""

from __future__ import annotations

import multiprocessing
import os
import random
import shutil
import signal
import sys
import time
from collections import Counter
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from etpi.exchange import bucket_of
from etpi_resources.lake.audit import audit
from etpi_resources.lake.exchange.bucket import Bucket, Index, Partition
from etpi_resources.lake.exchange.pull import pull
from etpi_resources.lake.exchange.push import push
from etpi_resources.lake.exchange.remote import Diverged, Options, state_of
from etpi_resources.lake.exchange.removal import collect
from etpi_resources.lake.lake import Lake, LakeError, Ref
from tests.support import buckets
from tests.support.small_lake import PAIRS, publish

pytest.importorskip("obstore")
_FORKS = multiprocessing.get_context("forkserver")
_FORKS.set_forkserver_preload(
    [
        "etpi_resources.lake.exchange.pull",
        "etpi_resources.lake.exchange.push",
        "obstore.store",
        "tests.support.publications",
    ]
)


@pytest.fixture(scope="module", params=buckets.KINDS)
def served(request, tmp_path_factory):
    with buckets.server(request.param, tmp_path_factory.mktemp(request.param)) as variables:
        yield variables


@pytest.fixture
def address(served, monkeypatch, request) -> str:
    for name, value in served.items():
        monkeypatch.setenv(name, value)
    return f"s3://lakes/{request.node.name.partition('[')[0]}"


def filled(path: Path) -> Lake:
    lake = Lake(path)
    for number in range(8):
        publish(lake, Ref("tito_pairs", "experiment", f"e{number}"), 5 + number, inputs={})
    publish(lake, PAIRS, 5, inputs={})
    return lake


@pytest.mark.slow
def test_a_lake_travels_and_polars_and_pyarrow_read_it_there(address, tmp_path):
    import polars
    import pyarrow.dataset
    import pyarrow.fs

    lake, bucket = filled(tmp_path / "a"), Bucket(address)
    push(lake, bucket)
    pull(copy := Lake(tmp_path / "b"), bucket)
    assert not audit(copy, deep=True).damages
    path = bucket.index()[0].units
    file = next(p for unit in path.values() for p in unit.files if "plan_first" in p and p.endswith(".parquet"))
    assert polars.read_parquet(f"{address}/{file}").height == 5
    store = pyarrow.fs.S3FileSystem(endpoint_override=os.environ["AWS_ENDPOINT_URL"])
    assert pyarrow.dataset.dataset(f"{address[5:]}/{file}", filesystem=store).count_rows() == 5


@pytest.mark.long
def test_a_lake_travels_over_azure(tmp_path, monkeypatch):
    if not (program := shutil.which("azurite-blob")):
        pytest.skip("needs azurite-blob: npm install --global azurite")
    lake, url = filled(tmp_path / "a"), "az://lakes/team"
    with buckets.azurite(program, tmp_path / "server") as variables:
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        push(lake, Bucket(url))
        publish(lake, PAIRS, 9, "later", inputs={})
        index, tag = Bucket(url).index()
        push(lake, Bucket(url))
        assert not Bucket(url).swap_index(index, tag)  # it moved
        pull(copy := Lake(tmp_path / "b"), Bucket(url))
        assert copy.current(PAIRS) == lake.current(PAIRS) and not audit(copy, deep=True).damages
        assert collect(Bucket(url), timedelta(0), yes=True)  # the version before
        assert not collect(Bucket(url), timedelta(0), yes=False)


@pytest.mark.slow
def test_of_16_that_replace_the_index_at_once_one_does(address, tmp_path):
    for round in range(5):
        tag = Bucket(address).index()[1]

        def swap(number, tag=tag, round=round):
            index = Index(partitions={f"x/suite={round}-{number}": Partition()})
            return Bucket(address).swap_index(index, tag)

        with ThreadPoolExecutor(16) as pool:
            assert sum(pool.map(swap, range(16))) == 1


@pytest.mark.slow
def test_keys_come_from_the_providers_file_and_are_in_no_message(served, tmp_path, monkeypatch):
    secret = served["AWS_SECRET_ACCESS_KEY"]
    (tmp_path / "credentials").write_text(
        f"[team]\naws_access_key_id = {served['AWS_ACCESS_KEY_ID']}\naws_secret_access_key = {secret}\n"
    )
    monkeypatch.setenv("AWS_ENDPOINT_URL", served["AWS_ENDPOINT_URL"])
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
    monkeypatch.setenv("AWS_PROFILE", "team")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name, raising=False)
    push(lake := filled(tmp_path / "a"), Bucket("s3://lakes/profile"))
    index, _ = Bucket("s3://lakes/profile").index()
    assert secret not in index.model_dump_json() + (lake.root / "remote.json").read_text()


@pytest.mark.slow
def test_a_bucket_that_does_not_exist_is_named(address, tmp_path):
    lake, url = filled(tmp_path / "a"), "s3://nothing-here/x"
    with pytest.raises(LakeError, match="nothing-here"), bucket_of(lake, url) as bucket:
        push(lake, bucket)


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_of_8_processes_that_push_one_partition_one_wins_and_the_others_lose_nothing(served, address, tmp_path):
    """20 rounds on each server."""
    lakes = [Lake(tmp_path / str(number)) for number in range(8)]
    push(filled(tmp_path / "first"), Bucket(address))
    for round in range(20):
        for number, lake in enumerate(lakes):
            pull(lake, Bucket(address), (), Options(prefer="theirs"))
            publish(lake, PAIRS, 10 + 8 * round + number, f"{round}-{number}", inputs={})
        running = [_FORKS.Process(target=push_once, args=(lake.root, address, served)) for lake in lakes]
        for process in running:
            process.start()
        for process in running:
            process.join()
        codes = [process.exitcode for process in running]
        assert Counter(codes) == {0: 1, 3: 7}
        winner = lakes[codes.index(0)]
        assert (
            Bucket(address).index()[0].partitions["tito_pairs/experiment=plan_first"].current
            == state_of(winner, PAIRS)[0]
        )
        for number, lake in enumerate(lakes):
            assert lake.current(PAIRS).input_key == f"{round}-{number}" and not audit(lake, deep=True).damages


def push_once(root: Path, url: str, variables: Mapping[str, str]) -> None:
    """Push a lake in a process of its own; exit with 3 if a partition diverged."""
    os.environ |= variables
    try:
        push(Lake(root), Bucket(url))
    except Diverged:
        sys.exit(3)


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_pushes_and_pulls_killed_at_random_moments_leave_no_half(served, address, tmp_path):
    """100 SIGKILLs on each server: 50 of push and 50 of pull."""
    random.seed(7)
    sender, receiver = filled(tmp_path / "a"), Lake(tmp_path / "b")
    start = time.monotonic()
    push(sender, Bucket(address))
    pushed = time.monotonic()
    pull(receiver, Bucket(address))
    spent = {"push": pushed - start, "pull": time.monotonic() - pushed}  # the longest time before a kill
    outcomes, refs = Counter[str](), [Ref("tito_pairs", "experiment", f"e{n}") for n in range(8)]
    for ref in refs:
        publish(sender, ref, 9, "first", inputs={})
    push(sender, Bucket(address)), pull(receiver, Bucket(address))
    for number, kind in enumerate(["push", "pull"] * 50):
        if kind == "push":
            for ref in refs:  # all move together
                publish(sender, ref, random.randrange(10, 300), f"{number}", inputs={})
        root = sender.root if kind == "push" else receiver.root
        begun = _FORKS.Event()
        process = _FORKS.Process(target=exchange_once, args=(kind, root, address, served, begun))
        process.start()
        begun.wait()
        time.sleep(random.random() * spent[kind])
        process.kill()
        process.join()
        assert process.exitcode in (0, -signal.SIGKILL)
        outcomes[f"{kind} {'killed' if process.exitcode == -signal.SIGKILL else 'ended'}"] += 1
        pull(fresh := Lake(tmp_path / "fresh"), Bucket(address))  # all that is visible is there
        opened = Lake(receiver.root)
        for lake in (fresh, opened):
            assert len({lake.current(ref).input_key for ref in refs}) == 1  # of one push, whole
        for lake in (fresh, opened, sender):
            assert not audit(lake, deep=True).damages
    push(sender, Bucket(address)), pull(receiver, Bucket(address))
    assert [receiver.current(ref) for ref in refs] == [sender.current(ref) for ref in refs]
    assert not (receiver.root / "scratch" / "pull").exists()
    print(dict(outcomes))
    assert outcomes["push killed"] + outcomes["pull killed"] > 50


def exchange_once(kind: str, root: Path, url: str, variables: Mapping[str, str], begun: Any) -> None:
    """Push or pull in a process of its own, and say when it begins."""
    os.environ |= variables
    lake, bucket = Lake(root), Bucket(url)
    begun.set()
    (push if kind == "push" else pull)(lake, bucket)
