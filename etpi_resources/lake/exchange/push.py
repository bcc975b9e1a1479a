"""`push`: store what a lake's versions need in a bucket, then make them current there."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from etpi_resources.lake import parquet
from etpi_resources.lake.contents import Publication, Version
from etpi_resources.lake.exchange import journals
from etpi_resources.lake.exchange.bucket import (
    SOURCES,
    Bucket,
    Index,
    Partition,
    State,
    Unit,
    folder_name,
    object_key,
    ref_of,
)
from etpi_resources.lake.exchange.remote import (
    DEFAULTS,
    REMOTE,
    THREADS,
    Exchanged,
    Options,
    Remote,
    call_all,
    me,
    now,
    split,
    state_of,
)
from etpi_resources.lake.files import write_atomically
from etpi_resources.lake.lake import Lake, sha256_of
from etpi_resources.lake.manifest import LakeError
from etpi_resources.lake.references import References

_NAME_FILES = {"reports", "checkpoints"}
"""Tables with paths of files."""


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
            files = [path, *(path.parents[1] / "rounds" / path.stem).rglob("*")]
            needs = [f"checkpoints/{checkpoint}" for checkpoint in ids]
            yield f"trained/{path.stem}", lambda files=files, needs=needs: self._unit(files, needs)

    def _unit(self, paths: Iterable[Path], needs: Iterable[str] = ()) -> Unit:
        files = sorted(path for path in paths if path.is_file())
        described = {str(p.relative_to(self.lake.root)): (p.stat().st_size, sha256_of(p)) for p in files}
        return Unit(files=described, needs=sorted(needs))

    def _version(self, publication: Publication, index: Index | None) -> Unit:
        manifest, version, references = publication.manifest, publication.version, self.references
        named = _NAME_FILES & {*manifest.tables}
        rows = {name: parquet.read(name, self.lake.files_of(manifest, name)).to_pylist() for name in named}
        # A report may be newer than its version.
        reports = [self.lake.root / row["path"] for row in rows.get("reports", ())]
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
        files = [*scratch.glob("rollouts/*/*/journal-*.jsonl"), *scratch.glob("evaluations/*/journal-*.jsonl")]
        for path in sorted(files):
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


def push(lake: Lake, bucket: Bucket, keys: Collection[str] = (), options: Options = DEFAULTS) -> Exchanged:
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
        result = split(described.states, known, self.remote, "ahead", options.prefer, self.named)
        units = described.units(index, options.weights)
        makers = {name: make for name, make in units if options.again or name not in index.units}
        with ThreadPoolExecutor(THREADS) as pool:
            making = {name: pool.submit(make) for name, make in makers.items() if name not in self.units}
            self.units |= {name: future.result() for name, future in making.items()}
            new, merged = {name: self.units[name] for name in makers}, dict[str, tuple[Unit, Path, str]]()
            if options.weights:
                merged = journals.merged(
                    described.journals(), self.bucket, index, self.remote, self.staging, options.check_line
                )
            new |= {name: unit for name, (unit, _, _) in merged.items()}
            result.units, result.files = len(new), sum(len(unit.files) for unit in new.values())
            result.bytes = sum(size for unit in new.values() for size, _ in unit.files.values())
            if options.dry_run:
                return result
            self._store(new, {name: path for name, (_, path, _) in merged.items()}, index.collected, pool)
        at = now()
        index.units |= {name: unit.model_copy(update={"at": at}) for name, unit in new.items()}
        for name in result.moved:
            current, blocked = described.states[name]
            index.partitions[name] = Partition(current=current, blocked=blocked, by=me(), at=at)
        if new or result.moved:
            # A kill right after the index was replaced must not look as if another had moved these partitions.
            self.remote.pushing |= {name: described.states[name] for name in result.moved}
            write_atomically(self.lake.root / REMOTE, self.remote.model_dump_json())
            if not self.bucket.swap_index(index, tag):
                return None
        self.remote.pushed |= {name: (stamp, unit.files[name[8:]][1]) for name, (unit, _, stamp) in merged.items()}
        agreed = described.states.keys() - result.other.keys()
        write_atomically(self.lake.root / REMOTE, self.remote.text(self.lake, index, agreed))
        self.sent.unlink(missing_ok=True)
        return result

    def _store(
        self, units: Mapping[str, Unit], merged: Mapping[str, Path], collected: str, pool: ThreadPoolExecutor
    ) -> None:
        """Store the objects of units: files of the lake, and merged journals from elsewhere. Shuts the pool down."""
        first, *lines = self.sent.read_text().splitlines() if self.sent.exists() else ("",)
        if first != f"collected {collected}" or self.options.again:  # else some may have been removed
            self.sent.write_text(f"collected {collected}\n")
            lines = []
        sent = {key: (int(size), sha256) for key, size, sha256 in (line.split("\t") for line in lines)}
        todo: dict[str, Any] = {}
        for name, unit in units.items():
            for path, (_, sha256) in unit.files.items():
                if (key := object_key(path, sha256)) in sent:
                    unit.files[path] = sent[key]
                else:
                    todo.setdefault(key, (unit, path, merged.get(name, self.lake.root / path)))
        self.options.started(sum(unit.files[path][0] for unit, path, _ in todo.values()))
        with self.sent.open("a", buffering=1) as log:

            def send(key: str, unit: Unit, path: str, source: Path) -> None:
                self._send(key, unit, path, source)
                log.write("{}\t{}\t{}\n".format(key, *unit.files[path]))
                self.options.advance(unit.files[path][0])

            # The log stays open for those under way, so that what they stored is not sent again.
            call_all(pool, [(send, key, *value) for key, value in todo.items()])

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
