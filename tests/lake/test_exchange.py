"""Pushing versions to a bucket and pulling them: nothing half-visible, no pointer lost, nothing foreign written."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import zlib
from datetime import UTC, datetime, timedelta

import pytest

from etpi.exchange import remote
from etpi_resources.lake import store
from etpi_resources.lake.audit import audit
from etpi_resources.lake.check_outcome import CheckOutcome
from etpi_resources.lake.exchange.bucket import INDEX, NOTHING, Bucket, Index, Mark, Pointer, object_key
from etpi_resources.lake.exchange.pull import pull
from etpi_resources.lake.exchange.push import push
from etpi_resources.lake.exchange.remote import Diverged, Options, Remote, compare, standing
from etpi_resources.lake.exchange.removal import collect, remove
from etpi_resources.lake.lake import Lake, LakeError, Ref
from etpi_resources.lake.schemas import from_rows
from tests.support.small_lake import PAIRS, publish

obstore = pytest.importorskip("obstore")
RAW, OTHER = Ref("raw_rollouts", "rollout_set", "s"), Ref("tito_pairs", "experiment", "other")
TRAINED = Ref("sft_checkpoint", "experiment", "plan_first")


@pytest.fixture
def bucket():
    from obstore.store import MemoryStore

    return Bucket("s3://b/p", MemoryStore())


def filled(path) -> Lake:
    lake = Lake(path)
    raw = publish(lake, RAW, 3, "raw", inputs={})
    publish(lake, PAIRS, 5, inputs={"raw_rollouts/s": raw.version})
    publish(lake, OTHER, 6, inputs={"raw_rollouts/s": raw.version})
    return lake


def with_weights(lake: Lake) -> str:
    """Publish a checkpoint with a stored training and an evaluation's journal; return its id."""
    folder = lake.scratch("made") / "weights"
    folder.mkdir()
    (folder / "model.safetensors").write_bytes(b"w" * 1000)
    name, path = lake.adopt_checkpoint(folder)
    row = {"role": "sft", "checkpoint_id": name, "path": str(path.relative_to(lake.root)), "seed": 0, "final": True}
    lake.publish(
        TRAINED, {"checkpoints": from_rows("checkpoints", [row])}, input_key="k", inputs={}, spec_hash="h"
    )  # fmt: skip
    report = lake.root / "checkpoints" / "trained" / "key.json"
    report.parent.mkdir()
    report.write_text(json.dumps({"checkpoints": [{"checkpoint_id": name}]}))
    (rounds := lake.root / "checkpoints" / "rounds" / "key").mkdir(parents=True)
    (rounds / "0.jsonl").write_text("{}\n")
    write_journal(lake.scratch("evaluations/c0de") / "journal-e1.jsonl", "x", checkpoint=name)
    return name


def write_journal(path, *keys: str, checkpoint: str | None = None) -> None:
    lines = [{"key": k, "spec_key": "1", "rows": {"rollouts": [{"checkpoint_id": checkpoint}]}} for k in keys]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def keys_of(path) -> list[str]:
    return [json.loads(line)["key"] for line in path.read_text().splitlines()]


def test_pull_into_an_empty_folder_has_versions_and_inputs_and_verifies(tmp_path, bucket):
    lake = filled(tmp_path / "a")
    push(lake, bucket)
    copy = Lake(tmp_path / "b")
    assert len(pull(copy, bucket, ["plan_first"]).moved) == 2  # the pairs, and the rollouts they were computed from
    assert copy.current(PAIRS) == lake.current(PAIRS)
    assert copy.current(OTHER) is None
    assert not audit(copy, deep=True).damages
    bucket.requests.clear()
    assert push(copy, bucket).files == pull(copy, bucket, ["plan_first"]).files == 0
    assert bucket.requests == {"get": 2}


def test_a_dry_run_moves_nothing_and_states_the_size(tmp_path, bucket):
    lake, copy = filled(tmp_path / "a"), Lake(tmp_path / "b")
    planned = push(lake, bucket, (), Options(dry_run=True))
    assert planned.bytes > 0 and bucket.index()[0] == Index()
    assert push(lake, bucket).bytes == planned.bytes
    assert pull(copy, bucket, (), Options(dry_run=True)).bytes == planned.bytes
    assert copy.current(PAIRS) is None and Remote.of(copy) == Remote()


@pytest.mark.parametrize("key", ["plan_first", "s", "other"])
def test_remote_states_the_size_that_a_pull_of_the_key_fetches(tmp_path, monkeypatch, capsys, key):
    lake, url = filled(tmp_path / "a"), str(tmp_path / "bucket")
    with_weights(lake)
    write_journal(lake.scratch("rollouts/s/c0de") / "journal-1.jsonl", "1")
    push(lake, Bucket(url))
    monkeypatch.setenv("ETPI_DATA", str(tmp_path / "b"))
    remote(url, as_json=True)
    sizes = {row["key"]: row["bytes"] for row in json.loads(capsys.readouterr().out)["keys"]}
    assert sizes[key] == pull(Lake(tmp_path / "b"), Bucket(url), [key], Options(dry_run=True)).bytes


@pytest.mark.parametrize(("prefer", "winner"), [("ours", 0), ("theirs", 1)])
def test_the_second_of_two_pushes_at_once_is_refused_and_neither_version_is_lost(
    tmp_path, bucket, monkeypatch, prefer, winner
):
    push(filled(tmp_path / "a"), bucket)
    a, b = Lake(tmp_path / "a"), Lake(tmp_path / "b")
    pull(b, bucket)
    versions = [publish(a, PAIRS, 7, "ka").version, publish(b, PAIRS, 8, "kb").version]
    first(monkeypatch, bucket, b)
    with pytest.raises(Diverged, match="plan_first"):
        push(a, bucket)
    pull(fresh := Lake(tmp_path / "c"), bucket)
    assert fresh.current(PAIRS).version == versions[1]
    with pytest.raises(Diverged):
        pull(a, bucket)
    assert a.current(PAIRS).version == versions[0]
    (push if prefer == "ours" else pull)(a, bucket, (), Options(prefer=prefer))
    assert a.current(PAIRS).version == versions[winner]
    pull(fresh, bucket)
    assert fresh.current(PAIRS).version == versions[winner]
    assert len(a.history(PAIRS)) == 2 + winner


def test_pushes_of_other_partitions_at_once_both_arrive(tmp_path, bucket, monkeypatch):
    push(filled(tmp_path / "a"), bucket)
    a, b = Lake(tmp_path / "a"), Lake(tmp_path / "b")
    pull(b, bucket)
    mine, theirs = publish(a, PAIRS, 7, "ka"), publish(b, OTHER, 8, "kb")
    first(monkeypatch, bucket, b)
    assert push(a, bucket).other == {"tito_pairs/experiment=other": "behind"}
    pull(fresh := Lake(tmp_path / "c"), bucket)
    assert (fresh.current(PAIRS).version, fresh.current(OTHER).version) == (mine.version, theirs.version)


def first(monkeypatch, bucket: Bucket, lake: Lake) -> None:
    """Have a lake push right before the next swap of the index."""
    swap, waiting = bucket.swap_index, [True]

    def after(index, tag):
        if waiting and waiting.pop():
            push(lake, bucket)
        return swap(index, tag)

    monkeypatch.setattr(bucket, "swap_index", after)


@pytest.mark.parametrize("after", range(1, 9))
def test_a_push_that_dies_leaves_the_bucket_as_it_was_and_sends_nothing_twice(tmp_path, bucket, monkeypatch, after):
    lake = filled(tmp_path / "a")
    push(lake, bucket)
    version = lake.current(PAIRS).version
    for ref, rows in ((PAIRS, 9), (OTHER, 10), (RAW, 4)):
        publish(lake, ref, rows, "later", inputs={})
    stored, left = [], [after]

    def dying(name):
        call = getattr(bucket, name)

        def do(key, *arguments):
            left[0] -= 1
            if left[0] <= 0:
                raise KeyboardInterrupt
            stored.append(key)
            return call(key, *arguments)

        monkeypatch.setattr(bucket, name, do)

    for name in ("put", "put_if_absent", "swap_index"):
        dying(name)
    if dies := after <= 7:
        with pytest.raises(KeyboardInterrupt):
            push(lake, bucket)
    pull(copy := Lake(tmp_path / "b"), bucket)
    assert copy.current(PAIRS).version == version
    assert not audit(copy, deep=True).damages
    left[0] = 100
    push(lake, bucket)
    assert dies and len(stored) == len({*map(str, stored)}) == 7 or after == 8
    pull(copy, bucket)
    assert copy.current(PAIRS) == lake.current(PAIRS)


def test_a_damaged_object_is_named_and_nothing_becomes_current(tmp_path, bucket):
    lake = filled(tmp_path / "a")
    push(lake, bucket)
    path = lake.current(PAIRS).tables["turns"]["files"][0]["path"]
    whole = bytes(obstore.get(bucket._store, path).bytes())
    for lie in (b"x" * 10, whole + b"x" * (1 << 20), whole[:-1] + b"x"):
        obstore.put(bucket._store, path, lie)
        with pytest.raises(LakeError, match=str(path)):
            pull(copy := Lake(tmp_path / "b"), bucket)
        assert copy.current(PAIRS) is None
        sizes = [file.stat().st_size for file in (copy.root / "scratch").rglob("*") if file.is_file()]
        assert max(sizes) < 10_000
    push(lake, bucket, (), Options(again=True))
    pull(copy, bucket)
    assert not audit(copy, deep=True).damages


def test_a_pull_that_fails_begins_nothing_more_and_keeps_what_is_whole(tmp_path, bucket, monkeypatch):
    lake, asked, whole, get = filled(tmp_path / "a"), list[str](), iter(range(4)), Bucket.get
    for number in range(20):
        publish(lake, Ref("tito_pairs", "experiment", f"e{number}"), 1 + number, inputs={})
    push(lake, bucket)

    def dying(self, key, *arguments):
        asked.append(key)
        if next(whole, None) is None:
            raise LakeError("no more")
        get(self, key, *arguments)

    monkeypatch.setattr(Bucket, "get", dying)
    with pytest.raises(LakeError, match="no more"):
        pull(copy := Lake(tmp_path / "b"), bucket)
    files = {sha256 for unit in bucket.index()[0].units.values() for _, sha256 in unit.files.values()}
    assert len(asked) < len(files) and copy.current(PAIRS) is None
    monkeypatch.setattr(Bucket, "get", get)
    assert pull(copy, bucket).files == len(files) - 4 and copy.current(PAIRS) == lake.current(PAIRS)


def test_a_file_that_is_damaged_here_is_not_pushed(tmp_path, bucket):
    lake = filled(tmp_path / "a")
    path = lake.root / lake.current(PAIRS).tables["turns"]["files"][0]["path"]
    path.write_bytes(b"x" * path.stat().st_size)
    with pytest.raises(LakeError, match=path.name):
        push(lake, bucket)
    assert bucket.index()[0] == Index()


def test_a_local_publication_is_newer_than_the_bucket_until_it_is_pushed(tmp_path, bucket):
    lake = filled(tmp_path / "a")
    push(lake, bucket)
    new = publish(lake, PAIRS, 7, "new")
    assert standing(lake, Remote.of(lake))["tito_pairs/experiment=plan_first"] == "ahead"
    assert pull(lake, bucket).other == {"tito_pairs/experiment=plan_first": "ahead"}
    assert lake.current(PAIRS).version == new.version
    assert push(lake, bucket).moved == ["tito_pairs/experiment=plan_first"]


def test_the_same_result_of_two_machines_is_no_conflict(tmp_path, bucket):
    push(filled(tmp_path / "a"), bucket)
    assert push(filled(tmp_path / "b"), bucket).moved == []


def test_a_blocked_version_and_its_release_travel(tmp_path, bucket):
    lake, copy = filled(tmp_path / "a"), Lake(tmp_path / "b")
    push(lake, bucket), pull(copy, bucket)
    publish(lake, PAIRS, 9, "bad", checks=[CheckOutcome("gate", passed=False, blocking=True, message="no")])
    push(lake, bucket), pull(copy, bucket)
    assert copy.blocked(PAIRS) == lake.blocked(PAIRS) and copy.current(PAIRS) == lake.current(PAIRS)
    publish(lake, PAIRS, 9, "good")
    push(lake, bucket), pull(copy, bucket)
    assert copy.blocked(PAIRS) is None and copy.current(PAIRS) == lake.current(PAIRS)


def test_another_manifest_of_the_same_version_travels(tmp_path, bucket):
    """A version that was published with other inputs, or whose change of code was accepted."""
    lake, copy = filled(tmp_path / "a"), Lake(tmp_path / "b")
    push(lake, bucket), pull(copy, bucket)
    version = publish(lake, PAIRS, 5, "other key", inputs={}).version
    assert version == copy.current(PAIRS).version
    push(lake, bucket), pull(copy, bucket)
    assert copy.current(PAIRS) == lake.current(PAIRS)


def test_weights_stay_in_the_bucket_and_the_lake_verifies_and_pushes(tmp_path, bucket):
    lake = filled(tmp_path / "a")
    name = with_weights(lake)
    push(lake, bucket)
    copy = Lake(tmp_path / "b")
    assert pull(copy, bucket, (), Options(weights=False)).left == [name]
    assert not (copy.root / "checkpoints").exists() and not (copy.root / "scratch" / "evaluations").exists()
    result = audit(copy, deep=True)
    assert not result.damages and result.counts["remote checkpoint"] == 1 and not result.counts["checkpoint"]
    new = publish(copy, PAIRS, 9, "new", inputs={})
    push(copy, bucket)
    pull(lake, bucket)
    assert lake.current(PAIRS).version == new.version
    pull(copy, bucket)
    assert not Remote.of(copy).left and copy.checkpoint_dir(name).is_dir()
    for path in ("checkpoints/trained/key.json", "checkpoints/rounds/key/0.jsonl"):
        assert (copy.root / path).read_bytes() == (lake.root / path).read_bytes()
    assert keys_of(copy.root / "scratch/evaluations/c0de/journal-e1.jsonl") == ["x"]
    shutil.rmtree(copy.checkpoint_dir(name))
    assert [damage.kind for damage in audit(copy).damages] == ["checkpoint"]


def test_versions_whose_weights_nobody_has_are_refused(tmp_path, bucket):
    lake = filled(tmp_path / "a")
    shutil.rmtree(lake.checkpoint_dir(with_weights(lake)))
    with pytest.raises(LakeError, match="checkpoints/[0-9a-f]{16},"):
        push(lake, bucket)
    assert push(lake, bucket, (), Options(weights=False)).moved


def test_two_halves_of_a_collection_are_merged_by_key_on_both_sides(tmp_path, bucket):
    a, b = Lake(tmp_path / "a"), Lake(tmp_path / "b")
    spec = Ref("rollout_set_spec", "rollout_set", "s")  # a set whose collection has not ended
    for lake, keys in ((a, ("1", "2")), (b, ("2", "3"))):
        publish(lake, spec, inputs={})
        write_journal(lake.scratch("rollouts/s/c0de") / "journal-1.jsonl", *keys)
    path = "scratch/rollouts/s/c0de/journal-1.jsonl"
    with (b.root / path).open("a") as file:
        file.write('{"key": "cut')
    push(a, bucket), push(b, bucket)
    pull(a, bucket), pull(b, bucket)
    assert keys_of(a.root / path) == ["1", "2", "3"]
    assert keys_of(b.root / path) == ["2", "3", "1"]
    ((size, sha256),) = bucket.index()[0].units[f"journal/{path}"].files.values()
    bucket.get(object_key(path, sha256), tmp_path / "stored", size, sha256)
    pull(c := Lake(tmp_path / "c"), bucket, ["s"])
    assert keys_of(c.root / path) == keys_of(tmp_path / "stored") == ["1", "2", "3"]
    push(a, bucket), pull(a, bucket)
    bucket.requests.clear()
    for lake in (a, b):
        push(lake, bucket), pull(lake, bucket)
    assert bucket.requests == {"get": 4}


def test_rollouts_that_were_set_aside_do_not_come_back(tmp_path, bucket):
    lake = Lake(tmp_path / "a")
    publish(lake, Ref("rollout_set_spec", "rollout_set", "s"), inputs={})
    write_journal(path := lake.scratch("rollouts/s/c0de") / "journal-1.jsonl", "1", "2")
    push(lake, bucket)
    write_journal(path.with_suffix(".aside.jsonl"), "2")
    write_journal(path, "1")
    pull(lake, bucket)
    assert keys_of(path) == ["1"]
    write_journal(path, "1", "3")
    push(lake, bucket), pull(copy := Lake(tmp_path / "b"), bucket)
    assert keys_of(copy.root / path.relative_to(lake.root)) == ["1", "3"]


def test_lines_that_are_none_of_the_journal_are_not_merged(tmp_path, bucket):
    lake, copy = Lake(tmp_path / "a"), Lake(tmp_path / "b")
    publish(lake, Ref("rollout_set_spec", "rollout_set", "s"), inputs={})
    write_journal(lake.scratch("rollouts/s/c0de") / "journal-1.jsonl", "1", "2")
    push(lake, bucket)

    def refuse(line, key):
        raise ValueError("another spec")

    with pytest.raises(LakeError, match=" line 1 "):
        pull(copy, bucket, (), Options(check_line=refuse))
    assert not list(copy.root.glob("scratch/rollouts/*/*/journal-1.jsonl"))


def test_a_journal_that_a_run_writes_is_left_alone(tmp_path, bucket):
    lake, copy = Lake(tmp_path / "a"), Lake(tmp_path / "b")
    publish(lake, Ref("rollout_set_spec", "rollout_set", "s"), inputs={})
    write_journal(lake.scratch("rollouts/s/c0de") / "journal-1.jsonl", "1")
    push(lake, bucket)
    from etpi_resources.process.locks import lake_locks

    path = copy.root / "scratch/rollouts/s/c0de/journal-1.jsonl"
    with lake_locks(copy.root).hold(path.with_name(".journal-1.lock")):
        assert pull(copy, bucket).busy == ["scratch/rollouts/s/c0de/journal-1.jsonl"]
    pull(copy, bucket)
    assert keys_of(path) == ["1"]


def test_what_was_removed_on_one_side_returns_only_when_it_is_named(tmp_path, bucket):
    lake = filled(tmp_path / "a")
    push(lake, bucket)
    shutil.rmtree(lake.root / "tito_pairs" / "experiment=other")
    name = "tito_pairs/experiment=other"
    assert pull(lake, bucket).other == {name: "removed"}
    assert pull(lake, bucket, ["other"]).moved == [name]
    assert remove(bucket, [("experiment", "other")], yes=True) == [name]
    assert push(lake, bucket).other == {name: "removed"}
    assert push(lake, bucket, ["other"]).moved == [name]


def test_removing_what_others_in_the_bucket_need_is_refused(tmp_path, bucket):
    push(filled(tmp_path / "a"), bucket)
    for key, remedy in (("s", "raw_rollouts/rollout_set=s/"), ("nothing", " nothing$")):
        with pytest.raises(LakeError, match=remedy):
            remove(bucket, [("rollout_set", key)], yes=True)
    remove(bucket, [("rollout_set", "s"), ("experiment", "plan_first"), ("experiment", "other")], yes=True)
    assert not bucket.index()[0].partitions


def test_collect_removes_what_no_partition_needs_and_a_push_that_began_before_stores_it_again(
    tmp_path, bucket, monkeypatch
):
    lake = filled(tmp_path / "a")
    with_weights(lake)
    push(lake, bucket)
    publish(lake, PAIRS, 7, "new", inputs={})
    old = bucket.index()
    push(lake, bucket)
    assert len(collect(bucket, timedelta(0), yes=False)) == 2  # the table and the manifest of the version before
    publish(lake, PAIRS, 5, inputs={"raw_rollouts/s": lake.current(RAW).version})  # that version again
    swap, waiting = bucket.swap_index, [True]

    def collected_first(index, tag):
        if waiting and waiting.pop():
            assert len(collect(bucket, timedelta(0), yes=True)) >= 1
        return swap(index, tag)

    monkeypatch.setattr(bucket, "swap_index", collected_first)
    push(lake, bucket)
    assert not bucket.swap_index(*old)
    pull(copy := Lake(tmp_path / "b"), bucket)
    assert not audit(copy, deep=True).damages and copy.current(PAIRS) == lake.current(PAIRS)
    assert keys_of(copy.root / "scratch/evaluations/c0de/journal-e1.jsonl") == ["x"]


def test_a_removal_stops_pushes_and_a_dead_one_is_taken_over(tmp_path, bucket):
    lake = filled(tmp_path / "a")
    push(lake, bucket)
    index, tag = bucket.index()
    now = datetime.now(UTC)
    index.removing = Mark(by="ann@elsewhere:7", at=now.isoformat())
    puts = bucket.requests["put"]
    assert bucket.swap_index(index, tag) and bucket.requests["put"] == puts + 1
    for call in (lambda: push(lake, bucket), lambda: collect(bucket, timedelta(0), yes=True)):
        with pytest.raises(LakeError, match="ann@elsewhere:7 "):
            call()
    index, tag = bucket.index()
    index.removing = Mark(by="ann@elsewhere:7", at=(now - timedelta(minutes=11)).isoformat())
    assert bucket.swap_index(index, tag)
    collect(bucket, timedelta(0), yes=True)
    assert bucket.index()[0].removing is None
    push(lake, bucket)


def test_states_compare():
    a, b, c, again = [
        (Pointer(version=v * 16, manifest=f"version={v * 16}/manifest-{v * 12}.json", publication=n), None)
        for v, n in (("a", 1), ("b", 2), ("c", 2), ("b", 3))
    ]
    cases = [
        (a, a, a, "same"), (b, a, a, "ahead"), (a, b, a, "behind"), (b, c, a, "diverged"), (b, again, a, "same"),
        (b, c, NOTHING, "diverged"), (b, NOTHING, NOTHING, "ahead"), (NOTHING, b, NOTHING, "behind"),
        (NOTHING, b, b, "removed"), (b, NOTHING, b, "removed"), (b, NOTHING, a, "ahead"), (NOTHING, c, b, "behind"),
    ]  # fmt: skip
    for here, there, base, word in cases:
        assert compare(here, there, base) == word


# --- a hostile bucket ------------------------------------------------------------------------------------------------

VERSION = "tito_pairs/experiment=plan_first/version="


def _file(path, size=1):
    def change(index):
        unit = next(unit for name, unit in index["units"].items() if name.startswith(VERSION))
        unit["files"][path] = [size, "0" * 64]

    return change


def _unit(name, path=None):
    def change(index):
        index["units"][name] = {"files": {path or name: [1, "0" * 64]}, "needs": []}

    return change


def _pointer(**fields):
    return lambda index: index["partitions"]["tito_pairs/experiment=plan_first"]["current"].update(fields)


def _partition(name):
    def change(index):
        index["partitions"][name] = index["partitions"]["tito_pairs/experiment=plan_first"]

    return change


def _set(**fields):
    return lambda index: index.update(fields)


HOSTILE = {
    "cluster settings": _file("cluster.toml"),
    "code": _file("code/abc.json"),
    "lake.json": _file("lake.json"),
    "remote.json": _file("remote.json"),
    "locks": _file("locks/lake.lock"),
    "parent": _file("../x/version=1/part-0.parquet"),
    "parent in a report": _file("reports/plan_first/../../../x"),
    "absolute": _file("/etc/version=1/x"),
    "staging": _file(".staging/version=1/x"),
    "pointer": _file("tito_pairs/experiment=plan_first/current"),
    "a report of another experiment": _file("reports/other/report.html"),
    "a table of another experiment": _file("tito_pairs/turns/experiment=other/version=" + "0" * 16 + "/part-0.parquet"),
    "nul": _file("reports/plan_first/a\0b"),
    "half a surrogate pair": _file("reports/plan_first/a\udc00b"),
    "negative size": _file("reports/plan_first/x", -1),
    "a size without end": _file("reports/plan_first/x", 1 << 70),
    "a size of text": _file("reports/plan_first/x", "many"),
    "a file of no unit": _unit("specs/x.toml"),
    "a training elsewhere": _unit("trained/key", "checkpoints/trained/other.json"),
    "a journal elsewhere": _unit("journal/scratch/rollouts/s/c/journal-1.jsonl", "scratch/rollouts/s/c/x.jsonl"),
    "a checkpoint elsewhere": _unit("checkpoints/" + "0" * 16, "checkpoints/" + "1" * 16 + "/config.json"),
    "pickles": _unit("checkpoints/" + "0" * 16, "checkpoints/../x/model.pkl"),
    "a manifest elsewhere": _pointer(manifest="../../x/manifest-000000000000.json"),
    "no such manifest": _pointer(manifest="version=" + "0" * 16 + "/manifest-000000000000.json"),
    "no version": _pointer(version="../x"),
    "a partition elsewhere": _partition("../experiment=x"),
    "a partition of all": _partition("catalog/all=all"),
    "who with escapes": lambda i: i["partitions"]["tito_pairs/experiment=plan_first"].update(by="\x1b[2Jann"),
    "units of text": _set(units="none"),
    "no format": _set(format="x"),
    "a newer format": _set(format=99),
    "a format below one": _set(format=0),
}


@pytest.mark.parametrize("lie", HOSTILE)
def test_a_hostile_index_is_refused_and_nothing_is_written(tmp_path, bucket, lie):
    push(filled(tmp_path / "a"), bucket)
    value = json.loads(zlib.decompress(bytes(obstore.get(bucket._store, INDEX).bytes()), 31))
    HOSTILE[lie](value)
    put_index(bucket, json.dumps(value).encode())
    (copy := Lake(tmp_path / "b")).root.mkdir()
    before = {path for path in tmp_path.rglob("*") if not path.is_relative_to(tmp_path / "a")}
    with pytest.raises(LakeError):
        pull(copy, bucket)
    written = {path for path in tmp_path.rglob("*") if not path.is_relative_to(tmp_path / "a")} - before
    assert {path.relative_to(copy.root).parts[0] for path in written} <= {"locks"}


def put_index(bucket: Bucket, text: bytes) -> None:
    obstore.put(bucket._store, INDEX, (writer := zlib.compressobj(9, wbits=31)).compress(text) + writer.flush())


@pytest.mark.parametrize("data", [b"", b"{}", b"no index", zlib.compress(b"{}")])
def test_an_index_that_is_none_is_refused(tmp_path, bucket, data):
    obstore.put(bucket._store, INDEX, data)
    with pytest.raises(LakeError, match=r"p/index\.json\.gz "):
        pull(Lake(tmp_path / "b"), bucket)


def test_an_index_that_grows_without_end_is_refused(tmp_path, bucket, monkeypatch):
    monkeypatch.setattr("etpi_resources.lake.exchange.bucket.MOST_BYTES", 1 << 20)
    put_index(bucket, b'{"format": 1, "x": "' + b" " * (2 << 20) + b'"}')
    with pytest.raises(LakeError, match=r"p/index\.json\.gz "):
        pull(Lake(tmp_path / "b"), bucket)


def test_fields_and_objects_that_this_etpi_does_not_know_are_ignored(tmp_path, bucket):
    lake = filled(tmp_path / "a")
    push(lake, bucket)
    value = json.loads(zlib.decompress(bytes(obstore.get(bucket._store, INDEX).bytes()), 31))
    value["specs"] = {"cluster.toml": "evil"}
    for unit in value["units"].values():
        unit["later"] = 1
    put_index(bucket, json.dumps(value).encode())
    obstore.put(bucket._store, "cluster.toml", b"evil")
    pull(copy := Lake(tmp_path / "b"), bucket)
    assert copy.current(PAIRS) == lake.current(PAIRS)
    assert not list(copy.root.rglob("cluster.toml"))


@pytest.mark.parametrize("change", [{"ref": {"asset": "tasks", "set": "suite", "key": "x"}}, {"version": "0" * 16}])
def test_a_manifest_that_is_not_of_its_name_is_refused(tmp_path, bucket, change):
    import hashlib

    push(lake := filled(tmp_path / "a"), bucket)
    index, tag = bucket.index()
    name = next(name for name in index.units if name.startswith(VERSION))
    data = json.dumps(json.loads((lake.root / name).read_bytes()) | change).encode()
    obstore.put(bucket._store, name, data)
    index.units[name].files[name] = (len(data), hashlib.sha256(data).hexdigest())
    bucket.swap_index(index, tag)
    with pytest.raises(LakeError, match=r"/manifest-[0-9a-f]{12}\.json "):
        pull(copy := Lake(tmp_path / "b"), bucket)
    assert copy.current(PAIRS) is None


@pytest.mark.parametrize("url", ["s3://key:secret@b/p", "s3://b/p?sig=secret"])
def test_an_address_with_a_key_is_refused(url):
    with pytest.raises(LakeError, match="AWS_ACCESS_KEY_ID"):
        Bucket(url)


# --- pointers move as one --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("after", range(3))
def test_a_pull_that_dies_between_pointers_is_finished_by_whoever_opens_the_lake(tmp_path, bucket, monkeypatch, after):
    lake, copy = filled(tmp_path / "a"), Lake(tmp_path / "b")
    push(lake, bucket), pull(copy, bucket)
    for ref, rows in ((PAIRS, 9), (OTHER, 10), (RAW, 4)):
        publish(lake, ref, rows, "later", inputs={})
    push(lake, bucket)
    swap, left = store.swap, [after]

    def dying(*arguments, **named):
        if not left[0]:
            raise KeyboardInterrupt
        left[0] -= 1
        swap(*arguments, **named)

    monkeypatch.setattr(store, "swap", dying)
    with pytest.raises(KeyboardInterrupt):
        pull(copy, bucket)
    monkeypatch.undo()
    opened = Lake(copy.root)
    assert [opened.current(ref) for ref in (PAIRS, OTHER, RAW)] == [lake.current(ref) for ref in (PAIRS, OTHER, RAW)]
    assert not (copy.root / store.PENDING).exists()
    assert pull(opened, bucket).moved == []


def test_a_run_that_publishes_during_a_pull_is_not_overwritten(tmp_path, bucket, monkeypatch):
    lake, copy = filled(tmp_path / "a"), Lake(tmp_path / "b")
    push(lake, bucket), pull(copy, bucket)
    publish(lake, PAIRS, 9, "later"), publish(lake, OTHER, 9, "later")
    push(lake, bucket)
    get, published = bucket.get, []

    def publishing(*arguments):
        if not published:
            published.append(publish(copy, PAIRS, 11, "mine").version)
        return get(*arguments)

    monkeypatch.setattr(bucket, "get", publishing)
    before = copy.current(OTHER)
    with pytest.raises(LakeError, match=re.escape(str(PAIRS))):
        pull(copy, bucket)
    assert copy.current(PAIRS).version == published[0] and copy.current(OTHER) == before


def test_a_folder_is_a_bucket_too(tmp_path):
    lake, folder = filled(tmp_path / "a"), str(tmp_path / "shared")
    push(lake, Bucket(folder))
    pull(copy := Lake(tmp_path / "b"), Bucket(folder))
    index, tag = Bucket(folder).index()
    new = publish(copy, PAIRS, 9, "new", inputs={})
    push(copy, Bucket(folder))
    assert not Bucket(folder).swap_index(index, tag)
    pull(lake, Bucket(folder))
    assert lake.current(PAIRS).version == new.version and Remote.of(lake).url == folder
    collect(Bucket(folder), timedelta(0), yes=True)
    pull(fresh := Lake(tmp_path / "c"), Bucket(folder))
    assert not audit(fresh, deep=True).damages


@pytest.mark.parametrize("name", ["shared", "a b", "100%", "ö"])
def test_address_of_a_folder_is_that_folder(tmp_path, name):
    push(filled(tmp_path / "a"), Bucket(str(tmp_path / name)))
    bucket = Bucket((tmp_path / name).as_uri())
    assert bucket.url == str(tmp_path / name) and bucket.index()[0].partitions


def test_a_mount_of_a_bucket_that_answers_link_with_eio_is_named(tmp_path, monkeypatch):
    def refuse(*arguments, **named):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "link", refuse)
    with pytest.raises(LakeError, match="/tito_pairs/turns/experiment=plan_first/version="):
        publish(Lake(tmp_path / "a"))


def test_a_push_that_dies_right_after_the_index_moved_is_no_divergence(tmp_path, bucket, monkeypatch):
    lake = filled(tmp_path / "a")
    push(lake, bucket)
    publish(lake, PAIRS, 9, "later")
    swap = bucket.swap_index

    def dying(*arguments):
        swap(*arguments)
        raise KeyboardInterrupt

    monkeypatch.setattr(bucket, "swap_index", dying)
    with pytest.raises(KeyboardInterrupt):
        push(lake, bucket)
    monkeypatch.undo()
    publish(lake, PAIRS, 10, "even later")
    assert push(lake, bucket).moved == ["tito_pairs/experiment=plan_first"]


def test_a_pull_that_dies_right_after_its_moves_is_no_divergence(tmp_path, bucket, monkeypatch):
    lake, copy = filled(tmp_path / "a"), Lake(tmp_path / "b")
    push(lake, bucket), pull(copy, bucket)
    publish(lake, PAIRS, 9, "later")
    push(lake, bucket)

    def die(*arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr(shutil, "rmtree", die)
    with pytest.raises(KeyboardInterrupt):
        pull(copy, bucket)
    monkeypatch.undo()
    publish(lake, PAIRS, 10, "even later")
    push(lake, bucket)
    assert pull(copy, bucket).moved == ["tito_pairs/experiment=plan_first"]
