"""push and pull over real servers: keys, races, SIGKILL at random moments, reading without pulling."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from etpi.exchange import bucket_of
from etpi_resources.lake.audit import audit
from etpi_resources.lake.bucket import Bucket, Index, Partition, ref_of
from etpi_resources.lake.exchange import Diverged, Options, pull, push, state_of
from etpi_resources.lake.lake import Lake, LakeError, Ref
from tests.support import buckets
from tests.support.publications import PAIRS, publish

pytest.importorskip("obstore")
ROOT = Path(__file__).resolve().parents[2]


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
        code = "import sys; from tests.lake.test_bucket_servers import push_once; sys.exit(push_once(*sys.argv[1:]))"
        running = [
            subprocess.Popen(
                [sys.executable, "-c", code, str(lake.root), address], cwd=ROOT, env=buckets.environment(served)
            )
            for lake in lakes
        ]
        codes = [process.wait() for process in running]
        assert Counter(codes) == {0: 1, 3: 7}
        winner = lakes[codes.index(0)]
        assert (
            Bucket(address).index()[0].partitions["tito_pairs/experiment=plan_first"].current
            == state_of(winner, PAIRS)[0]
        )
        for number, lake in enumerate(lakes):
            assert lake.current(PAIRS).input_key == f"{round}-{number}" and not audit(lake, deep=True).damages


def push_once(root: str, url: str) -> int:
    """Push a lake in a process of its own: 0, or 3 if a partition diverged."""
    try:
        push(Lake(Path(root)), Bucket(url))
    except Diverged:
        return 3
    return 0


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_pushes_and_pulls_killed_at_random_moments_leave_no_half(served, address, tmp_path):
    """100 SIGKILLs on each server: 50 of push and 50 of pull."""
    random.seed(7)
    sender, receiver = filled(tmp_path / "a"), Lake(tmp_path / "b")
    code = "import sys; from tests.lake.test_bucket_servers import exchange_once; exchange_once(*sys.argv[1:])"
    outcomes, refs = Counter[str](), [ref_of(name) for name in (f"tito_pairs/experiment=e{n}" for n in range(8))]
    for kind in ["push", "pull"] * 50:
        if kind == "push":
            for ref in refs:  # all move together
                publish(sender, ref, random.randrange(10, 5000), f"{random.random()}", inputs={})
        root = sender.root if kind == "push" else receiver.root
        line = [sys.executable, "-c", code, kind, str(root), address]
        process = subprocess.Popen(
            line, cwd=ROOT, env=buckets.environment(served), stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
        )
        process.stdout.readline()  # it begins
        time.sleep(random.random() * 0.35)
        process.send_signal(signal.SIGKILL)
        outcomes[f"{kind} {'killed' if process.wait() == -signal.SIGKILL else 'ended'}"] += 1
        index, _ = Bucket(address).index()
        there = {name: partition.state for name, partition in index.partitions.items()}
        fresh = Lake(tmp_path / "fresh")
        if there:
            pull(fresh, Bucket(address))  # all that is visible is there
            assert not audit(fresh, deep=True).damages
        known = Lake(receiver.root)
        keys = {known.current(ref).created_at < min_of(sender, refs) for ref in refs if known.current(ref)}
        assert len(keys) <= 1  # of one push, whole
        assert not audit(known, deep=True).damages and not audit(Lake(sender.root), deep=True).damages
    push(sender, Bucket(address)), pull(receiver, Bucket(address))
    assert [receiver.current(ref) for ref in refs] == [sender.current(ref) for ref in refs]
    assert (
        not list((receiver.root / "scratch" / "pull").rglob("*"))
        if (receiver.root / "scratch" / "pull").exists()
        else True
    )
    print(dict(outcomes))
    assert outcomes["push killed"] + outcomes["pull killed"] > 50


def min_of(lake: Lake, refs) -> str:
    return min(lake.current(ref).created_at for ref in refs)


def exchange_once(kind: str, root: str, url: str) -> None:
    """Push or pull in a process of its own; a line says that it begins."""
    lake, bucket = Lake(Path(root)), Bucket(url)
    print("begins", flush=True)
    (push if kind == "push" else pull)(lake, bucket)
