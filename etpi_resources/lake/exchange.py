"""`push` and `pull`: exchange versions, checkpoints and journals between a lake and a bucket.

Like branches of git, a partition's pointers have three states: here, in the bucket, and where both last agreed
(`remote.json`). Only one side moved: the other follows. Both moved: nothing is exchanged, and both are named.
"""

from __future__ import annotations

import getpass
import hashlib
import json
import os
import re
import shutil
import socket
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel

from etpi_resources.lake import formats, moves, parquet
from etpi_resources.lake.bucket import (
    NOTHING,
    SOURCES,
    Bucket,
    Index,
    Mark,
    Partition,
    Pointer,
    State,
    Unit,
    folder_name,
    object_key,
    ref_of,
    units_of,
)
from etpi_resources.lake.contents import Publication, Version
from etpi_resources.lake.files import put_if_absent, read_pointer, sync, write_atomically
from etpi_resources.lake.lake import Lake, manifest_name, sha256_of
from etpi_resources.lake.manifest import LakeError, Manifest, Ref
from etpi_resources.lake.references import References
from etpi_resources.process.locks import LockHeld, lake_locks

REMOTE = "remote.json"
THREADS = 16
_DEAD = timedelta(minutes=10)
"""A removal from a bucket gives a sign before every request; without one for so long, another may take it over."""
_CHECKPOINT = re.compile("checkpoints/[0-9a-f]{16}")
_NAME_FILES = {"reports", "checkpoints"}
"""Tables with paths of files."""
_WEIGHTS = ("checkpoints", "trained", "journal")
Side = Literal["ours", "theirs"]
CheckLine = Callable[[bytes, str], Any]
Files = dict[str, tuple[int, str]]


class Diverged(LakeError):
    """A partition moved here and in the bucket."""


class Remote(BaseModel):
    """`remote.json`: the bucket that a lake is exchanged with.

    Attributes:
        looked: when its index was last read.
        base: partition -> its state when both sides last agreed.
        there: partition -> its state in the bucket, when last read.
        pushing: partition -> its state that a push, maybe killed, was about to make current in the bucket.
        pushed: journal -> (size and time here, sha256 in the bucket) when the bucket had all lines of here.
        pulled: journal -> (size and time here, sha256 in the bucket) when all lines of the bucket were here.
        left: checkpoints that versions here name, and that a pull left in the bucket.
    """

    url: str = ""
    looked: str = ""
    base: dict[str, State] = {}
    there: dict[str, State] = {}
    pushing: dict[str, State] = {}
    pushed: dict[str, tuple[str, str]] = {}
    pulled: dict[str, tuple[str, str]] = {}
    left: list[str] = []

    @classmethod
    def of(cls, lake: Lake, url: str | None = None) -> Remote:
        """Read the file; of another bucket than `url` nothing is known yet."""
        path = lake.root / REMOTE
        remote = cls.model_validate_json(path.read_bytes()) if path.exists() else cls()
        return remote if url in (None, remote.url) else cls(url=url, left=remote.left)

    def compared(self, name: str, here: State, there: State) -> str:
        """Return `compare` of a partition; a push that died after it replaced the index counts as agreed."""
        agreed = there if there == self.pushing.get(name) else self.base.get(name, NOTHING)
        return compare(here, there, agreed)

    def text(self, lake: Lake, index: Index, agreed: Iterable[str] = ()) -> str:
        """Take over what the index says, and that both sides agree on some partitions; return the file's content."""
        agreed = {
            *agreed,
            *(
                name
                for name, state in self.pushing.items()
                if name in index.partitions and state == index.partitions[name].state
            ),
        }
        self.pushing = {}
        self.there = {name: partition.state for name, partition in index.partitions.items()}
        self.base |= {name: self.there.get(name, NOTHING) for name in agreed}
        self.left = [name for name in self.left if not lake.checkpoint_dir(name).is_dir()]
        self.looked = _now()
        return self.model_dump_json()


@dataclass
class Exchanged:
    """What was exchanged, or would be.

    Attributes:
        moved: partitions whose pointers moved.
        other: partitions that are left alone, each with its word of `compare`.
        left: checkpoints that the bucket does not have, or that were not asked for.
        busy: journals that a run is writing, and trainings under way.
    """

    moved: list[str] = field(default_factory=list)
    other: dict[str, str] = field(default_factory=dict)
    units: int = 0
    files: int = 0
    bytes: int = 0
    left: list[str] = field(default_factory=list)
    busy: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Options:
    """Options of an exchange.

    Attributes:
        prefer: the side whose versions become current where both moved.
        weights: exchange checkpoints, stored trainings and journals too.
        again: store files again that the bucket should have.
        started: called with the number of bytes before they are sent or fetched.
        advance: called with the bytes of each file or part.
        check_line: (line of a journal, key of its spec): raises ValueError or the like if it is none.
    """

    prefer: Side | None = None
    weights: bool = True
    dry_run: bool = False
    again: bool = False
    started: Callable[[int], None] = lambda n: None
    advance: Callable[[int], None] = lambda n: None
    check_line: CheckLine = lambda line, key: None


def state_of(lake: Lake, ref: Ref) -> State:
    """Return a partition's pointers; a `blocked` older than `current` counts as none, as in `Lake.blocked`."""
    texts = (read_pointer(lake.partition_folder(ref) / name) for name in ("current", "blocked"))
    current, blocked = (Pointer.model_validate_json(text) if text else None for text in texts)
    return current, None if current and blocked and current.publication > blocked.publication else blocked


def compare(here: State, there: State, base: State) -> str:
    """Return same, ahead, behind, removed (on one side, while the other did not move) or diverged: of this lake."""
    if here == there:
        return "same"
    if base != NOTHING and (here, there) in ((base, NOTHING), (NOTHING, base)):
        return "removed"
    if there in (base, NOTHING):
        return "ahead"
    if here in (base, NOTHING):
        return "behind"
    return "same" if [p and p.version for p in here] == [p and p.version for p in there] else "diverged"


def standing(lake: Lake, remote: Remote) -> dict[str, str]:
    """Return each partition's word of `compare`, by what is known of the bucket without asking it."""
    here = {folder_name(ref): state_of(lake, ref) for ref in lake.refs() if ref.set != "all"}
    return {
        name: remote.compared(name, here.get(name, NOTHING), remote.there.get(name, NOTHING))
        for name in sorted({*here, *remote.there})
    }


def _split(
    here: Mapping[str, State],
    there: Mapping[str, State],
    remote: Remote,
    forward: str,
    prefer: Side | None,
    named: bool,
) -> Exchanged:
    """Say which partitions move, and which stay; raise Diverged if both sides moved and none is preferred."""
    result, diverged = Exchanged(), list[str]()
    for name in sorted(here.keys() | there.keys()):
        mine, theirs = here.get(name, NOTHING), there.get(name, NOTHING)
        word, sender = remote.compared(name, mine, theirs), mine if forward == "ahead" else theirs
        if word == "removed" and named and sender != NOTHING:
            word = forward
        if word == "diverged" and prefer is None:
            versions = (", ".join(p.version for p in state if p) or "nothing" for state in (mine, theirs))
            diverged.append("{}: here {}, in the bucket {}".format(ref_of(name), *versions))
        elif word == forward or (word == "diverged" and prefer == ("ours" if forward == "ahead" else "theirs")):
            result.moved.append(name)
        elif word != "same":
            result.other[name] = word
    if diverged:
        remedy = (
            "moved here and in the bucket, so nothing was exchanged; --ours or --theirs says which becomes current:"
        )
        raise Diverged("\n".join([remedy, *diverged]))
    return result


# --- push ------------------------------------------------------------------------------------------------------------


class _Described:
    """The units of a lake's versions."""

    def __init__(self, lake: Lake, keys: Collection[str]) -> None:
        """Take the experiments, rollout sets and suites to describe; none: every partition."""
        self.lake, self.references, self.left = lake, References(lake), set(Remote.of(lake).left)
        partitions = {ref for ref in self.references.pointed if ref.set != "all"}
        if unknown := sorted(set(keys) - {ref.key for ref in partitions}):
            raise LakeError(f"the lake has nothing of {', '.join(unknown)}")
        closure, self.states = set[Version](), dict[str, State]()
        refs = {ref for ref in partitions if not keys or ref.key in keys}
        while refs:  # the partitions of versions that are needed, and what their pointers name
            self.states |= {folder_name(ref): state_of(lake, ref) for ref in refs}
            closure |= self.references.needed_by(self.references.roots(refs)).keys()
            sources = {(ref.set, ref.key) for ref in (v.ref for v in closure) if ref.set in SOURCES}
            needed = {version.ref for version in closure}
            refs = {ref for ref in partitions if (ref.set, ref.key) in sources or ref in needed}
            refs = {ref for ref in refs if folder_name(ref) not in self.states}
        self.weights = self.references.checkpoints(closure) & self.references.folders
        self.publications = {self._name(p): p for version in closure for p in self._publications(version)}
        trained = sorted((lake.root / "checkpoints" / "trained").glob("*.json"))
        named = {p: {row["checkpoint_id"] for row in json.loads(p.read_bytes())["checkpoints"]} for p in trained}
        self.trainings = {path: ids for path, ids in named.items() if ids & self.weights}

    def _publications(self, version: Version) -> list[Publication]:
        every = self.references.publications[version]
        return [p for p in self.references.pointed[version.ref] if p in every] or every[-1:]

    def _name(self, publication: Publication) -> str:
        return str(publication.path.relative_to(self.lake.root))

    def units(self, index: Index, weights: bool) -> Iterator[tuple[str, Callable[[], Unit]]]:
        """Yield the names of all units but journals, and functions that describe them (and read checkpoints' files)."""
        for name, publication in self.publications.items():
            yield name, lambda p=publication: self._version(p, index if weights else None)
        for name in self.weights if weights else ():
            folder = self.lake.checkpoint_dir(name)
            yield f"checkpoints/{name}", lambda folder=folder: self._unit(folder.rglob("*"))
        for path, ids in self.trainings.items() if weights else ():
            files, needs = (
                [path, *(path.parents[1] / "rounds" / path.stem).rglob("*")],
                [f"checkpoints/{i}" for i in ids],
            )
            yield f"trained/{path.stem}", lambda files=files, needs=needs: self._unit(files, needs)

    def _unit(self, paths: Iterable[Path], needs: Iterable[str] = ()) -> Unit:
        files = sorted(path for path in paths if path.is_file())
        described = {str(p.relative_to(self.lake.root)): (p.stat().st_size, sha256_of(p)) for p in files}
        return Unit(files=described, needs=sorted(needs))

    def _version(self, publication: Publication, index: Index | None) -> Unit:
        manifest, version, references = publication.manifest, publication.version, self.references
        rows = {
            n: parquet.read(n, self.lake.files_of(manifest, n)).to_pylist() for n in _NAME_FILES & {*manifest.tables}
        }
        reports = [
            self.lake.root / row["path"] for row in rows.get("reports", ())
        ]  # each may be newer than its version
        unit = self._unit([publication.path, *reports])
        for table in manifest.tables.values():
            unit.files |= {f["path"]: (f["bytes"], f["sha256"]) for f in table["files"]}
        for path in (row["path"] for row in rows.get("checkpoints", ())):
            absent = path.startswith("checkpoints/") and not (self.lake.root / path).is_dir()
            if absent and index is not None and path not in index.units:
                raise LakeError(f"{manifest.ref} needs {path}, which is neither here nor in the bucket")
        mine = references.checkpoints([version])
        needs = {self._name(p) for v in references.needs(version, ()) for p in self._publications(v)}
        needs |= {f"checkpoints/{name}" for name in mine & (references.folders | self.left)}
        needs |= {f"trained/{path.stem}" for path, ids in self.trainings.items() if ids & mine}
        return Unit(files=unit.files, needs=sorted(needs))

    def journals(self) -> Iterator[tuple[str, Path, list[str]]]:
        """Yield the unit, the file and the needs of journals of rollout sets and of checkpoints' evaluations."""
        scratch, sets = self.lake.root / "scratch", {r.key for r in map(ref_of, self.states) if r.set == "rollout_set"}
        for path in sorted(
            [*scratch.glob("rollouts/*/*/journal-*.jsonl"), *scratch.glob("evaluations/*/journal-*.jsonl")]
        ):
            name, needs = f"journal/{path.relative_to(self.lake.root)}", list[str]()
            if path.name.endswith(".aside.jsonl") or (path.parts[-4] == "rollouts" and path.parts[-3] not in sets):
                continue
            if path.parts[-3] == "evaluations":
                with path.open("rb") as file:
                    line = file.readline()
                rows = json.loads(line)["rows"]["rollouts"] if line.endswith(b"\n") else []
                needs = [f"checkpoints/{row['checkpoint_id']}" for row in rows if row["checkpoint_id"] in self.weights]
                if not needs:
                    continue
            yield name, path, needs


def push(lake: Lake, bucket: Bucket, keys: Collection[str] = (), options: Options = Options()) -> Exchanged:
    """Store what the current versions of some keys need, then make them current in the bucket.

    Raises:
        Diverged: a partition moved here and in the bucket; nothing became current.
        LakeError: a file is damaged or missing, or objects are being removed from the bucket.
    """
    with lake.lock("exchange", what="the exchange with a bucket"), lake.shared_lock(), lake.staging() as staging:
        pushing = _Push(lake, bucket, keys, options, staging)
        while True:
            index, tag = bucket.index()
            if mark := index.removing:
                raise LakeError(
                    f"{mark.by} removes objects from {bucket.url}, last sign {mark.at}; push later. "
                    "If it has died, `etpi gc --remote --yes` takes over after ten minutes"
                )
            if (result := pushing.attempt(index, tag)) is not None:
                return result
            # Another push was first: read its index, and decide again. What was stored stays.


class _Push:
    """A push: units that were described and objects that were sent stay so over several attempts, and over a kill."""

    def __init__(self, lake: Lake, bucket: Bucket, keys: Collection[str], options: Options, staging: Path) -> None:
        self.lake, self.bucket, self.named, self.options, self.staging = lake, bucket, bool(keys), options, staging
        self.described, self.remote = _Described(lake, keys), Remote.of(lake, bucket.url)
        self.units: dict[str, Unit] = {}
        self.sent = lake.scratch("push") / hashlib.sha256(bucket.url.encode()).hexdigest()[:16]
        """A line for each object that was sent: key, bytes, sha256; cleared when the index was replaced."""

    def attempt(self, index: Index, tag: str | None) -> Exchanged | None:
        """Store what an index lacks, and replace it; None if it was replaced meanwhile."""
        options, described = self.options, self.described
        known = {name: index.partitions[name].state for name in described.states if name in index.partitions}
        result = _split(described.states, known, self.remote, "ahead", options.prefer, self.named)
        units = described.units(index, options.weights)
        makers = {name: make for name, make in units if options.again or name not in index.units}
        with ThreadPoolExecutor(THREADS) as pool:
            making = {name: pool.submit(make) for name, make in makers.items() if name not in self.units}
            self.units |= {name: future.result() for name, future in making.items()}
            new, journals = {name: self.units[name] for name in makers}, dict[str, tuple[Unit, Path, str]]()
            if options.weights:
                journals = _merged_journals(
                    described, self.bucket, index, self.remote, self.staging, options.check_line
                )
            new |= {name: unit for name, (unit, _, _) in journals.items()}
            result.units, result.files = len(new), sum(len(unit.files) for unit in new.values())
            result.bytes = sum(size for unit in new.values() for size, _ in unit.files.values())
            if options.dry_run:
                return result
            self._store(new, {name: path for name, (_, path, _) in journals.items()}, index.collected, pool)
        now = _now()
        index.units |= {name: unit.model_copy(update={"at": now}) for name, unit in new.items()}
        for name in result.moved:
            current, blocked = described.states[name]
            index.partitions[name] = Partition(current=current, blocked=blocked, by=_me(), at=now)
        if new or result.moved:
            # A kill right after the index was replaced must not look as if another had moved these partitions.
            self.remote.pushing |= {name: described.states[name] for name in result.moved}
            write_atomically(self.lake.root / REMOTE, self.remote.model_dump_json())
            if not self.bucket.swap_index(index, tag):
                return None
        self.remote.pushed |= {name: (stamp, unit.files[name[8:]][1]) for name, (unit, _, stamp) in journals.items()}
        agreed = described.states.keys() - result.other.keys()
        write_atomically(self.lake.root / REMOTE, self.remote.text(self.lake, index, agreed))
        self.sent.unlink(missing_ok=True)
        return result

    def _store(
        self, units: Mapping[str, Unit], journals: Mapping[str, Path], collected: str, pool: ThreadPoolExecutor
    ) -> None:
        """Store the objects of units: files of the lake, and merged journals from elsewhere. Shuts the pool down."""
        first, *lines = self.sent.read_text().splitlines() if self.sent.exists() else ("",)
        if first != f"collected {collected}" or self.options.again:  # else some may have been removed
            self.sent.write_text(f"collected {collected}\n")
            lines = []
        sent, todo = (
            {key: (int(size), sha256) for key, size, sha256 in (line.split("\t") for line in lines)},
            dict[str, Any](),
        )
        for name, unit in units.items():
            for path, (_, sha256) in unit.files.items():
                if (key := object_key(path, sha256)) in sent:
                    unit.files[path] = sent[key]
                else:
                    todo.setdefault(key, (unit, path, journals.get(name, self.lake.root / path)))
        self.options.started(sum(unit.files[path][0] for unit, path, _ in todo.values()))
        with self.sent.open("a", buffering=1) as log:

            def send(key: str, unit: Unit, path: str, source: Path) -> None:
                self._send(key, unit, path, source)
                log.write("{}\t{}\t{}\n".format(key, *unit.files[path]))
                self.options.advance(unit.files[path][0])

            # The log stays open for those under way, so that what they stored is not sent again.
            _call_all(pool, [(send, key, *value) for key, value in todo.items()])

    def _send(self, key: str, unit: Unit, path: str, source: Path) -> None:
        if "/manifest-" in path:  # its name leaves times out, so the bucket may have it with other times
            data = self.bucket.put_if_absent(key, source.read_bytes())
            unit.files[path] = (len(data), hashlib.sha256(data).hexdigest())
            return
        sha256 = unit.files[path][1]
        if key != path:  # a run may append to the file, or replace it
            source = Path(shutil.copyfile(source, self.staging / sha256))
        if not key.startswith("checkpoints/") and sha256_of(source) != sha256:
            raise LakeError(
                f"{self.lake.root / path} is damaged, or was replaced while it was pushed; nothing became current in "
                "the bucket. Push again, or see `etpi verify --deep`"
            )
        self.bucket.put(key, source)


def _call_all(pool: ThreadPoolExecutor, calls: Iterable[tuple[Any, ...]]) -> None:
    """Make calls (function, arguments), and shut the pool down: if one fails, those that wait are not begun."""
    try:
        for future in [pool.submit(*call) for call in calls]:
            future.result()
    finally:
        pool.shutdown(cancel_futures=True)


def _merged_journals(
    described: _Described, bucket: Bucket, index: Index, remote: Remote, staging: Path, check: CheckLine
) -> dict[str, tuple[Unit, Path, str]]:
    """Return the journals with lines that the bucket lacks: its lines, then those; and their stamps here."""
    merged: dict[str, tuple[Unit, Path, str]] = {}
    for name, path, needs in described.journals():
        size, sha256 = next(iter(index.units[name].files.values())) if name in index.units else (0, "")
        if remote.pushed.get(name) == ((stamp := _stamp(path)), sha256):
            continue
        target, theirs = staging / hashlib.sha256(name.encode()).hexdigest(), staging / sha256
        if sha256 and not theirs.exists():
            bucket.get(object_key(name[8:], sha256), theirs, size, sha256)
        aside, have, added = _keys(path.with_suffix(".aside.jsonl")), set[str](), False
        with target.open("wb") as file:
            for key, line in _lines(theirs, check) if sha256 else ():
                if key not in aside:
                    have.add(key)
                    file.write(line)
            for key, line in _lines(path):
                if key not in have:
                    added = True
                    file.write(line)
        if added:
            unit = Unit(files={name[8:]: (target.stat().st_size, sha256_of(target))}, needs=needs)
            merged[name] = unit, target, stamp
        else:
            remote.pushed[name] = stamp, sha256
    return merged


def _lines(path: Path, check: CheckLine | None = None) -> Iterator[tuple[str, bytes]]:
    """Yield the keys and lines of a journal; not its last one, if a kill cut it."""
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if line.endswith(b"\n"):
                try:
                    value = json.loads(line)
                    key = str(value["key"])
                    if check:
                        check(line, value["spec_key"])
                except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
                    raise LakeError(
                        f"{path} line {number} is no line of a journal: {error}; nothing was merged"
                    ) from None
                yield key, line


def _stamp(path: Path) -> str:
    return f"{path.stat().st_size} {path.stat().st_mtime_ns}"


def _keys(path: Path) -> set[str]:
    return {key for key, _ in _lines(path)} if path.exists() else set()


# --- pull ------------------------------------------------------------------------------------------------------------


def pull(lake: Lake, bucket: Bucket, keys: Collection[str] = (), options: Options = Options()) -> Exchanged:
    """Fetch what the bucket's current versions of some keys need, then make them current here.

    Raises:
        Diverged: a partition moved here and in the bucket; nothing became current.
        LakeError: the index is no index, an object is missing or damaged, or the disk is too small.
    """
    with lake.lock("exchange", what="the exchange with a bucket"), lake.shared_lock():
        index, _ = bucket.index()
        remote, there = Remote.of(lake, bucket.url), index.wanted(keys)
        here = {name: state_of(lake, ref_of(name)) for name in there}
        result = _split(here, there, remote, "behind", options.prefer, bool(keys))
        reached = index.reached(unit for name, state in there.items() for unit in units_of(name, state))
        journals = [name for name in index.journals(there, reached) if _is_behind(lake, index, remote, name)]
        wanted = [*reached, *journals] if options.weights else [n for n in reached if n.split("/")[0] not in _WEIGHTS]
        missing = {name: files for name in wanted if (files := _missing(lake, name, index.units[name], result.moved))}
        area = lake.scratch("pull")  # kept if this is killed, so that the next pull continues after the finished files
        fetched = {
            sha256: (object_key(path, sha256), size) for fs in missing.values() for path, (size, sha256) in fs.items()
        }
        fetched = {sha256: value for sha256, value in fetched.items() if not (area / sha256).exists()}
        result.units, result.files = len(missing), len(fetched)
        result.bytes = sum(size for _, size in fetched.values())
        if options.dry_run:
            return result
        if result.bytes > (free := shutil.disk_usage(area).free):
            raise LakeError(f"{result.bytes:,} bytes are to be fetched, and the disk of {lake.root} has {free:,} left")
        options.started(result.bytes)
        with ThreadPoolExecutor(THREADS) as pool:
            get = [(bucket.get, key, area / sha, size, sha, options.advance) for sha, (key, size) in fetched.items()]
            _call_all(pool, get)
        replaced = _place(lake, bucket, missing, area, options.check_line, remote, result)
        needs = {n[12:] for name in reached for n in index.units[name].needs if _CHECKPOINT.fullmatch(n)}
        result.left = sorted(name for name in needs if not lake.checkpoint_dir(name).is_dir())
        remote.left = sorted({*remote.left, *result.left})
        (area / REMOTE).write_text(remote.text(lake, index, there.keys() - result.other.keys()))
        replaced[REMOTE] = str((area / REMOTE).relative_to(lake.root))  # moves with the pointers, also over a kill
        with lake.lock("publish"):
            formats.mark(lake.root)
            if moved := [name for name in result.moved if state_of(lake, ref_of(name)) != here[name]]:
                raise LakeError(
                    f"{ref_of(moved[0])} was published while it was pulled; nothing was replaced. Pull again"
                )
            pointers = [
                (f"{name}/{kind}", new)
                for name in result.moved
                for kind, new in zip(_POINTERS, there[name], strict=True)
            ]
            texts = {path: (read_pointer(lake.root / path), new and new.text().encode()) for path, new in pointers}
            moves.move(lake.root, texts, replaced)
        shutil.rmtree(area)
        return result


_POINTERS = ("current", "blocked")


def _is_behind(lake: Lake, index: Index, remote: Remote, name: str) -> bool:
    path, ((_, sha256),) = lake.root / name[8:], index.units[name].files.values()
    return not path.exists() or remote.pulled.get(name) != (_stamp(path), sha256)


def _missing(lake: Lake, name: str, unit: Unit, moved: Collection[str]) -> Files:
    """Return the files of a unit that the lake lacks; reports, which change, if their partition moves."""
    if name.startswith(("checkpoints/", "trained/")):
        path = name if name.startswith("checkpoints/") else f"checkpoints/{name}.json"
        return {} if (lake.root / path).exists() else unit.files
    if name.startswith("journal/"):
        return unit.files

    def lacks(path: str, size: int) -> bool:
        if path.startswith("reports/") and name.rpartition("/version=")[0] in moved:
            return True
        file = lake.root / path
        return not file.exists() or ("/part-" in path and file.stat().st_size != size)

    return {path: (size, sha256) for path, (size, sha256) in unit.files.items() if lacks(path, size)}


def _place(
    lake: Lake, bucket: Bucket, missing: Mapping[str, Files], area: Path, check: CheckLine,
    remote: Remote, result: Exchanged,
) -> dict[str, str]:  # fmt: skip
    """Put fetched files in their places, each manifest after its tables; return the reports, which pointers precede."""
    for name, files in missing.items():  # before anything is placed
        if "/manifest-" in name and name in files:
            _require_manifest(bucket, name, area / files[name][1], files, lake)
    replaced: dict[str, str] = {}
    for name, files in sorted(missing.items(), key=lambda item: "/version=" in item[0]):
        if name.startswith("checkpoints/"):
            for path, (_, sha256) in files.items():
                (area / path).parent.mkdir(parents=True, exist_ok=True)
                (area / path).unlink(missing_ok=True)
                os.link(area / sha256, area / path)
            content, _ = lake.adopt_checkpoint(area / name)
            if f"checkpoints/{content}" != name:
                raise LakeError(f"{bucket.url}: {name} has the content of {content}")
        elif name.startswith("journal/"):
            ((path, (_, sha256)),) = files.items()
            try:
                remote.pulled[name], same = _merge_journal(lake, lake.root / path, area / sha256, check)
                remote.pushed |= {name: remote.pulled[name]} if same else {}
            except LockHeld:
                result.busy.append(path)
        elif name.startswith("trained/"):
            try:
                _place_training(lake, name.split("/")[1], files, area)
            except LockHeld:
                result.busy.append(name)
        else:
            for path in sorted(files, key=lambda path: "/manifest-" in path):
                staged = area / files[path][1]
                if path.startswith("reports/"):
                    replaced[path] = str(
                        shutil.copyfile(staged, area / f"{len(replaced)}.report").relative_to(lake.root)
                    )
                    # fmt: skip
                elif not put_if_absent(lake.root / path, staged) and "/part-" in path:
                    shutil.copyfile(staged, area / "damaged")
                    (area / "damaged").replace(lake.root / path)
    return replaced


def _require_manifest(bucket: Bucket, name: str, staged: Path, files: Files, lake: Lake) -> None:
    """Raise LakeError unless a manifest is the one of its name and describes the files of its unit."""
    try:
        text = json.loads(staged.read_bytes())
        manifest = Manifest.from_json(text)
        described = [(f["path"], f["bytes"], f["sha256"]) for t in manifest.tables.values() for f in t["files"]]
        fits = name.split("/")[-1] == manifest_name(text) and name.startswith(f"{folder_name(manifest.ref)}/")
        fits &= f"/version={manifest.version}/" in name
        for path, size, sha256 in described:
            fits &= files.get(path, (size, sha256)) == (size, sha256)
            fits &= path in files or (lake.root / path).exists()
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise LakeError(f"{bucket.url}: {name} is no manifest: {error}") from None
    if not fits:
        raise LakeError(f"{bucket.url}: {name} does not describe the files of its version; nothing became current")


def _merge_journal(lake: Lake, path: Path, staged: Path, check: CheckLine) -> tuple[tuple[str, str], bool]:
    """Append the lines that a journal lacks; return its entry of `Remote.pulled`, and whether both are equal."""
    lock = path.with_name(f".{path.stem}.lock")
    with lake_locks(lake.root).hold(lock, wait=False, what=f"the journal {path.name}", doing="writing"):
        if path.exists() and (whole := sum(len(line) for _, line in _lines(path))) < path.stat().st_size:
            os.truncate(path, whole)  # a kill cut its last line
        mine, aside = _keys(path), _keys(path.with_suffix(".aside.jsonl"))
        theirs = {key for key, _ in _lines(staged, check)}  # all of it is read before a line is merged
        with path.open("ab") as file:
            for key, line in _lines(staged):
                if key not in mine and key not in aside:
                    mine.add(key)
                    file.write(line)
        sync(path)
        return (_stamp(path), staged.name), mine == theirs


def _place_training(lake: Lake, key: str, files: Files, area: Path) -> None:
    """Put a stored training in its place: its rounds, and then its report, in place of rounds of an unfinished one."""
    folder = lake.root / "checkpoints"
    with lake.lock(f"training-{key}", wait=False):
        if (folder / "trained" / f"{key}.json").exists():
            return
        if (folder / "rounds" / key).exists():
            with lake.staging() as staging:
                (folder / "rounds" / key).rename(staging / key)
        for path in sorted(files, key=lambda path: path.startswith("checkpoints/trained/")):
            put_if_absent(lake.root / path, area / files[path][1])


# --- looking and removing --------------------------------------------------------------------------------------------


def look(lake: Lake, bucket: Bucket) -> tuple[Remote, Index]:
    """Read the bucket's index, and store what it says."""
    index, _ = bucket.index()
    with lake.lock("exchange", what="the exchange with a bucket"):
        remote = Remote.of(lake, bucket.url)
        write_atomically(lake.root / REMOTE, remote.text(lake, index))
    return remote, index


def remove(bucket: Bucket, keys: Collection[tuple[str, str]], *, yes: bool) -> list[str]:
    """Remove the partitions of (set, key) pairs from a bucket's index; `collect` then frees their objects.

    Raises:
        LakeError: the bucket has none of a key, or a partition that stays needs one of them.
    """
    while True:
        index, tag = bucket.index()
        gone = [name for name in index.partitions if (ref := ref_of(name)) and (ref.set, ref.key) in keys]
        if unknown := set(keys) - {(ref.set, ref.key) for ref in map(ref_of, gone)}:
            raise LakeError(f"the bucket has nothing of {', '.join(key for _, key in sorted(unknown))}")
        removed = {unit for name in gone for unit in units_of(name, index.partitions[name].state)}
        for name in index.partitions.keys() - gone:
            for unit in removed.intersection(index.reached(units_of(name, index.partitions[name].state))):
                raise LakeError(f"nothing was removed: {ref_of(name)} needs {unit}. Remove both, or keep both")
        index.partitions = {name: partition for name, partition in index.partitions.items() if name not in gone}
        if not yes or bucket.swap_index(index, tag):
            return sorted(gone)


def collect(bucket: Bucket, older_than: timedelta, *, yes: bool) -> dict[str, int]:
    """Remove units that no partition of the bucket needs, and objects of no unit, that are older; return their sizes.

    The index says meanwhile who removes objects: a push that began before cannot replace it, and none begins.

    Raises:
        LakeError: another process removes objects, or has taken this removal over.
    """
    (index, tag), me = bucket.index(), f"{_me()}:{os.getpid()}"
    before = datetime.now(UTC) - older_than
    kept = set(index.reached(u for name, part in index.partitions.items() for u in units_of(name, part.state)))
    kept |= {*index.journals(index.partitions, kept)}
    kept |= {name for name, unit in index.units.items() if unit.at and datetime.fromisoformat(unit.at) > before}
    kept = set(index.reached(kept))
    if yes and (mark := index.removing) and not _is_dead(mark):
        raise LakeError(f"{mark.by} removes objects from {bucket.url}, last sign {mark.at}; nothing was removed")
    index.units = {name: unit for name, unit in index.units.items() if name in kept}

    def sign(index: Index, tag: str | None, mark: Mark | None) -> None:
        index.removing = mark
        if not bucket.swap_index(index, tag):
            raise LakeError("another process pushed or removed objects meanwhile. Run the same command again")

    if yes:
        sign(index, tag, Mark(by=me, at=_now()))
    named = {object_key(path, sha256) for unit in index.units.values() for path, (_, sha256) in unit.files.items()}
    sizes = bucket.sizes(lambda modified: modified < before)
    gone = {
        key: size for key, size in sorted(sizes.items()) if key not in named and not key.startswith(("index.", "."))
    }
    for start in range(0, len(gone), 1000) if yes else ():
        index, tag = bucket.index()
        if not index.removing or index.removing.by != me:
            raise LakeError(f"another process took over after {start} objects; it removes the rest")
        sign(index, tag, Mark(by=me, at=_now()))
        bucket.delete(list(gone)[start : start + 1000])
    if yes:
        index, tag = bucket.index()
        index.collected = datetime.now(UTC).isoformat()
        sign(index, tag, None)
    return gone


def _is_dead(mark: Mark) -> bool:
    """Return whether a removal died and left its mark: on this machine by its process, elsewhere by its last sign."""
    by, _, process = mark.by.rpartition(":")
    if by == _me() and process.isdigit():
        return int(process) == os.getpid() or not Path(f"/proc/{process}").exists()
    return datetime.now(UTC) - datetime.fromisoformat(mark.at) > _DEAD


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def _me() -> str:
    return f"{getpass.getuser()}@{socket.gethostname()}"
