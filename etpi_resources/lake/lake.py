"""The lake: immutable versions of every asset's tables, the pointers to the current ones, locks and folders.

`schemas` declares the tables, `parquet` writes and reads their files.

    <root>/<asset>/<table>/<set>=<key>/version=<v>/part-0.parquet
    <root>/<asset>/<set>=<key>/version=<v>/manifest-<id>.json
    <root>/<asset>/<set>=<key>/current        names the current version
    <root>/<asset>/<set>=<key>/blocked        names a newer version whose blocking check failed
    <root>/checkpoints/<content hash>/  <root>/locks/  <root>/scratch/
    <root>/lake.json                          the format, and the etpi that wrote it; format 1 if the file is missing

A version is a content hash, so equal results are one version. It can be published under several manifests, for example
with other inputs that led to the same rows, or with other check outcomes. A pointer names version and manifest.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import shutil
import tempfile
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa

from etpi_resources.backend import CLUSTER_VARIABLE, backend
from etpi_resources.hashes import json_hash
from etpi_resources.inside import files_in, read_file
from etpi_resources.lake import formats, parquet
from etpi_resources.lake.check_outcome import CheckOutcome
from etpi_resources.lake.files import sync
from etpi_resources.lake.manifest import (
    NAME,
    BlockedInput,
    DamagedFile,
    LakeError,
    Manifest,
    MissingInput,
    Ref,
)
from etpi_resources.lake.parquet import SchemaMismatch
from etpi_resources.lake.store import finish_moves, put_if_absent, read_pointer, swap
from etpi_resources.lake.stored import Spooled
from etpi_resources.process.locks import Held, LockHeld, lake_locks, machine_locks
from etpi_resources.secrets import secrets, secrets_in, secrets_of

__all__ = [
    "BlockedInput", "DamagedFile", "Lake", "LakeError", "LockHeld", "Manifest", "MissingInput", "Ref", "SchemaMismatch",
]  # fmt: skip

CHECKPOINT_SUFFIXES = (".safetensors", ".json", ".txt", ".jinja")


class Lake:
    """A folder of versions. Several processes may call any method at once."""

    def __init__(self, root: Path) -> None:
        """Open the folder, which need not exist.

        Raises:
            NewerFormat: a newer etpi wrote it.
            LakeError: its `lake.json` cannot be read.
        """
        self.root = Path(root).resolve()
        formats.require_known(self.root)
        finish_moves(self.root)

    @classmethod
    def open(cls) -> Lake:
        """Return the lake in `folder`; raises as the constructor."""
        return cls(cls.folder())

    @staticmethod
    def folder() -> Path:
        """Return the named folder, or ./data of the working directory."""
        return Lake.named_folder() or Path("data")

    @staticmethod
    def named_folder() -> Path | None:
        """Return $ETPI_DATA, or the cluster's folder; None if neither is set.

        Raises:
            LakeError: both are set, and they differ.
        """
        named = os.environ.get("ETPI_DATA")
        if (elsewhere := backend()) is None:
            return Path(named) if named else None
        if named and Path(named).resolve() != elsewhere.lake.resolve():
            raise LakeError(
                f"ETPI_DATA names {named}, and {os.environ[CLUSTER_VARIABLE]} the lake {elsewhere.lake}: unset one of "
                f"them. Without {CLUSTER_VARIABLE}, everything runs on this machine"
            )
        return elsewhere.lake

    # --- publishing ------------------------------------------------------------------------------------------------

    def publish(
        self,
        ref: Ref,
        tables: Mapping[str, pa.Table | Spooled | Iterable[pa.RecordBatch]],
        *,
        input_key: str,
        inputs: Mapping[str, str],
        spec_hash: str,
        seeds: Sequence[int] = (),
        checks: Sequence[CheckOutcome] = (),
        notes: Mapping[str, Any] | None = None,
        spec: Mapping[str, Any] | None = None,
        code: Mapping[str, Any] | None = None,
        cause: str = "",
        began: float | None = None,
    ) -> Manifest:
        """Write a version and make it current.

        If a blocking check failed, the version is kept as evidence, `current` does not move, and `require` raises until
        a version without a failure is published.

        A stream of record batches is written in constant memory; the file of a spooled table is moved. The version
        depends on the order of the rows.

        Args:
            began: when the run began, a time of `time.monotonic`; the others are as in `Manifest`.

        Raises:
            SchemaMismatch: a table does not fit its schema; nothing is published.
            LakeError: checks, notes, inputs or seeds are not JSON.
            SecretFound: a table or the manifest contains the value of a key; nothing is published.
        """
        with self.shared_lock():  # else its files would belong to no version for a moment
            with self.staging() as staging:
                described: dict[str, Any] = {}
                for name in sorted(tables):
                    part = staging / name / "part-0.parquet"
                    part.parent.mkdir(parents=True)
                    rows = _write_table(name, tables[name], part)
                    _refuse_secrets(ref, name, part)
                    described[name] = {"rows": rows, "sha256": sha256_of(part), "bytes": part.stat().st_size}
                # The version of an asset without tables is the hash of its inputs.
                version = json_hash(described or dict(inputs))[:16]
                for name, table in described.items():
                    path = f"{ref.asset}/{name}/{ref.set}={ref.key}/version={version}/part-0.parquet"
                    entry = {"path": path, "sha256": table["sha256"], "bytes": table["bytes"]}
                    described[name] = {"rows": table["rows"], "files": [entry]}
                manifest = Manifest(
                    ref=ref, version=version, tables=described, spec_hash=spec_hash, input_key=input_key,
                    inputs=dict(inputs), seeds=list(seeds), checks=[c.to_json() for c in checks],
                    notes=dict(notes or {}), spec=dict(spec or {}), code=dict(code or {}), cause=cause,
                    seconds=None if began is None else round(time.monotonic() - began, 3),
                )  # fmt: skip
                try:
                    text = json.dumps(manifest.to_json(), indent=1, ensure_ascii=False, allow_nan=False)
                except (TypeError, ValueError) as error:
                    raise LakeError(f"{ref}: checks' figures, notes, inputs and seeds must be JSON: {error}") from error
                if variables := secrets_in(text):
                    raise SecretFound(ref, "the manifest", variables[0])
                for name in described:
                    _put(staging / name / "part-0.parquet", self.root / described[name]["files"][0]["path"])
            return self._set_pointer(Manifest.from_json(json.loads(text)))

    def reinstate(self, manifest: Manifest) -> Manifest:
        """Make an earlier publication current again, after its inputs have returned to their earlier values.

        Raises:
            LakeError: it was blocked, or one of its files is missing.
        """
        if manifest.blocked:
            raise LakeError(f"{manifest.ref}: {manifest.version} failed a blocking check, so it cannot become current")
        with self.shared_lock():
            for name in manifest.tables:
                self.files_of(manifest, name)
            return self._set_pointer(manifest)

    def _set_pointer(self, manifest: Manifest) -> Manifest:
        """Write the manifest and the pointer that names it: `current`, or `blocked` if a blocking check failed.

        Raises:
            LockLost: this thread has lost a lock, of its partition for example; the pointers are as before.
        """
        folder = self.partition_folder(manifest.ref)
        relative = f"version={manifest.version}/{manifest_name(manifest.to_json())}"
        with self.lock("publish"):
            formats.mark(self.root)
            text = json.dumps(manifest.to_json(), indent=1, ensure_ascii=False) + "\n"
            if not put_if_absent(folder / relative, text.encode()):
                manifest = _load(folder / relative)
            pointers = {name: read_pointer(folder / name) for name in ("current", "blocked")}
            number = 1 + max((json.loads(p)["publication"] for p in pointers.values() if p), default=0)
            pointer = {"version": manifest.version, "manifest": relative, "publication": number}
            name = "blocked" if manifest.blocked else "current"
            swap(folder / name, (json.dumps(pointer) + "\n").encode(), expected=pointers[name])
            if not manifest.blocked:
                (folder / "blocked").unlink(missing_ok=True)
        return manifest

    @contextmanager
    def staging(self) -> Iterator[Path]:
        """Yield a temporary folder on the lake's filesystem; remove those that dead processes left."""
        area, locks = self.root / ".staging", lake_locks(self.root)
        # A folder without a lock, or a lock without a folder, is left if a process dies between making the two.
        for name in {path.name.removesuffix(".lock") for path in area.glob("*")}:
            try:
                with locks.hold(area / f"{name}.lock", wait=False):
                    shutil.rmtree(area / name, ignore_errors=True)
                    (area / f"{name}.lock").unlink(missing_ok=True)
            except LockHeld:
                continue
        folder = area / uuid.uuid4().hex
        # Lock before the folder exists: another process would remove a folder without a locked file.
        with locks.hold(area / f"{folder.name}.lock"):
            folder.mkdir()
            try:
                yield folder
            finally:
                shutil.rmtree(folder, ignore_errors=True)
                (area / f"{folder.name}.lock").unlink(missing_ok=True)

    # --- versions --------------------------------------------------------------------------------------------------

    def partition_folder(self, ref: Ref) -> Path:
        """Return the folder of a partition's pointers and manifests."""
        return self.root / ref.asset / f"{ref.set}={ref.key}"

    def _pointer(self, ref: Ref, name: str) -> dict[str, Any] | None:
        pointer = read_pointer(self.partition_folder(ref) / name)
        return json.loads(pointer) if pointer else None

    def current(self, ref: Ref) -> Manifest | None:
        """Return the current version, also if a newer one is blocked; None if no version was ever good."""
        pointer = self._pointer(ref, "current")
        return _load(self.partition_folder(ref) / pointer["manifest"]) if pointer else None

    def blocked(self, ref: Ref) -> Manifest | None:
        """Return the newest published version if one of its blocking checks failed, else None."""
        blocked, current = self._pointer(ref, "blocked"), self._pointer(ref, "current")
        if blocked is None or (current is not None and current["publication"] > blocked["publication"]):
            return None
        return _load(self.partition_folder(ref) / blocked["manifest"])

    def require(self, ref: Ref) -> Manifest:
        """Return the current version, to be used as an input.

        Raises:
            BlockedInput: the newest version failed a blocking check; an older good one is not used in its place.
            MissingInput: there is no version.
        """
        if blocked := self.blocked(ref):
            reasons = "\n".join(f"  - {check['name']}: {check['message']}" for check in blocked.failures)
            raise BlockedInput(
                f"{ref} is blocked: its newest version {blocked.version} failed\n{reasons}\n"
                f"Fix the cause, then run `{ref.command}`."
            )
        current = self.current(ref)
        if current is None:
            raise MissingInput(
                f"{ref} has no data in {self.root}; run `{ref.command}` (`etpi status` shows what else is missing)."
            )
        return current

    def refs(self, asset: str | None = None) -> list[Ref]:
        """Return every partition that was ever published, sorted."""
        refs = [
            Ref(folder.parent.name, *folder.name.split("=", 1))
            for folder in self.root.glob(f"{asset or '*'}/*=*/")
            if NAME.fullmatch(folder.parent.name)
        ]
        return sorted(refs, key=lambda ref: (ref.asset, ref.set, ref.key))

    def keys(self, asset: str, set: str) -> list[str]:
        """Return the keys of an asset that have a current version, sorted."""
        return [ref.key for ref in self.refs(asset) if ref.set == set and self._pointer(ref, "current")]

    def history(self, ref: Ref) -> list[Manifest]:
        """Return every publication of a partition, oldest first."""
        manifests = [_load(path) for path in self.partition_folder(ref).glob("version=*/manifest-*.json")]
        return sorted(manifests, key=lambda manifest: (manifest.created_at, manifest.version))

    # --- reading ---------------------------------------------------------------------------------------------------

    def files_of(self, manifest: Manifest, table: str) -> list[Path]:
        """Return the files of one table of one version.

        Raises:
            LakeError: the version has no such table.
            DamagedFile: a file is missing or has another size than recorded.
        """
        if table not in manifest.tables:
            raise LakeError(f"{manifest.ref} has no table {table!r}; it has {sorted(manifest.tables)}")
        paths = []
        for entry in manifest.tables[table]["files"]:
            path = self.root / entry["path"]
            if not path.exists() or path.stat().st_size != entry["bytes"]:
                raise DamagedFile.of(path, f"it is missing or does not have its recorded {entry['bytes']} bytes")
            paths.append(path)
        return paths

    def verified_files(self, manifest: Manifest, table: str) -> list[Path]:
        """Return `files_of`, each compared with its recorded sha256 once per process.

        For readers that ignore page checksums, as DuckDB and polars do.

        Raises:
            DamagedFile: a file does not have its recorded sha256; and as `files_of`.
        """
        paths = self.files_of(manifest, table)
        for path, entry in zip(paths, manifest.tables[table]["files"], strict=True):
            if _digest(path, path.stat().st_mtime_ns) != entry["sha256"]:
                raise DamagedFile.of(path, "it does not have its recorded sha256")
        return paths

    def has_files(self, manifest: Manifest) -> bool:
        """Return whether every file of a version exists with its recorded size."""
        try:
            return all(self.files_of(manifest, table) for table in manifest.tables)
        except DamagedFile:
            return False

    def files(self, ref: Ref, table: str) -> list[Path]:
        """Return the parquet files of a table of the current version; raises as `require` and `files_of` do."""
        return self.files_of(self.require(ref), table)

    def read(self, ref: Ref, table: str, columns: Sequence[str] | None = None) -> pa.Table:
        """Read a table of the current version, in published row order and the types of `schemas`; raises as `files`."""
        return parquet.read(table, self.files(ref, table), columns)

    def query(self, sql: str, **relations: pa.Table | Sequence[Path] | tuple[Ref, str]) -> pa.Table:
        """Run one SELECT in an in-memory DuckDB over named relations: tables, parquet files, or (ref, table).

        SQL whose result is published needs an ORDER BY: a join has no guaranteed order.

        Raises:
            DamagedFile: a file of a (ref, table) does not have its recorded sha256.
        """
        with self._spill_folder() as spill, duckdb.connect(config={"temp_directory": str(spill)}) as connection:
            connection.execute("SET TimeZone = 'UTC'")
            for name, relation in relations.items():
                if isinstance(relation, pa.Table):
                    connection.register(name, relation)
                else:
                    match relation:
                        case (Ref() as ref, str() as table):
                            relation = self.verified_files(self.require(ref), table)
                    paths = [str(path) for path in relation]
                    files = connection.read_parquet(paths, union_by_name=True, hive_partitioning=False)
                    files.create_view(name)
            return connection.sql(sql).to_arrow_table()

    # --- locks, checkpoints, scratch -------------------------------------------------------------------------------

    def lock(
        self,
        name: str,
        *,
        wait: bool = True,
        log: Callable[[str], None] | None = None,
        what: str | None = None,
        doing: str = "holding",
    ) -> AbstractContextManager[Held]:
        """Hold a lock of the lake in a `with`; it excludes every process that works in the lake, on every machine.

        The options are those of `Locks.hold`.
        """
        return lake_locks(self.root).hold(self._lock_file(name), wait=wait, log=log, what=what, doing=doing)

    def machine_lock(
        self,
        name: str,
        places: int = 1,
        *,
        log: Callable[[str], None] | None = None,
        what: str | None = None,
        shared: bool = False,
    ) -> AbstractContextManager[Held]:
        """Hold the lock on something that this machine has: its accelerator, its sandboxes.

        Args:
            places: maximum concurrent holders.
        """
        paths = [self.machine_lock_file(f"{name}-{place}" if place else name) for place in range(places)]
        return machine_locks().hold(*paths, log=log, what=what, doing="using", shared=shared)

    def machine_lock_file(self, name: str) -> Path:
        """Return the file of a machine lock, for a child process that takes it itself.

        On a cluster it is on the machine's own disk: a shared folder may pass flock on to other machines.
        """
        if elsewhere := backend():
            return elsewhere.local_folder(self.root) / "locks" / f"{name}.lock"
        return self._lock_file(name)

    @contextmanager
    def shared_lock(self, log: Callable[[str], None] | None = None) -> Iterator[None]:
        """Exclude `exclusive_lock` while versions are published or copied; many processes may hold it at once."""
        locks = lake_locks(self.root)
        with locks.hold(self._lock_file(_WHOLE), shared=True, log=log, what="the lake", doing="changing"):
            yield

    @contextmanager
    def exclusive_lock(self) -> Iterator[None]:
        """Exclude every run, and backups that take the lock, while files are removed.

        Raises:
            LakeBusy: a run or a backup is under way; the message names it.
        """
        whole, locks = self._lock_file(_WHOLE), lake_locks(self.root)
        with ExitStack() as stack:
            try:
                stack.enter_context(locks.hold(whole, wait=False, what="the lake"))
                held = self.held_locks()  # by an earlier etpi, which takes no shared lock
            except LockHeld:
                held = self.held_locks() or [locks.holder_of(whole)]
            if held:
                remedy = "Nothing was changed. Wait until that has ended, or stop it."
                raise LakeBusy(f"{self.root} is in use: {'; '.join(held)}. {remedy}")
            yield

    def held_locks(self) -> list[str]:
        """Return the locks that processes hold now, each with its holder, besides the shared and the exclusive lock."""
        locks = lake_locks(self.root)
        paths = [path for path in sorted((self.root / "locks").glob("*.lock")) if path.stem != _WHOLE]
        return [f"{path.stem} is held by {locks.holder_of(path)}" for path in paths if locks.is_held(path)]

    def _lock_file(self, name: str) -> Path:
        return self.root / "locks" / f"{name}.lock"

    def checkpoint_dir(self, content_hash: str) -> Path:
        return self.root / "checkpoints" / content_hash

    def adopt_checkpoint(self, staging: Path) -> tuple[str, Path]:
        """Move a folder of model files to `checkpoints/<hash>` and return (hash, folder).

        The hash is `folder_hash`, so the same files give the same folder.

        Raises:
            LakeError: the folder is empty, contains a link or a file of another kind (loading a pickled file runs
                code), or is on another filesystem.
        """
        files = sorted(path for path in staging.rglob("*") if path.is_symlink() or not path.is_dir())
        for path in files:
            if path.is_symlink() or path.suffix not in CHECKPOINT_SUFFIXES:
                raise LakeError(
                    f"{path} does not belong in a checkpoint: only {', '.join(CHECKPOINT_SUFFIXES)} files do, and no "
                    "links. Save weights with safetensors (save_pretrained does) and leave optimiser states out."
                )
        if not files:
            raise LakeError(f"{staging} contains no files; nothing was saved there")
        content_hash = folder_hash(staging)
        target = self.checkpoint_dir(content_hash)
        target.parent.mkdir(parents=True, exist_ok=True)
        if not target.exists():
            for path in files:
                sync(path)
            try:
                staging.rename(target)
            except OSError as error:
                if not target.exists():
                    remedy = "save it under Lake.scratch, which is on the lake's filesystem"
                    raise LakeError(f"{staging} cannot be moved to {target}: {error}; {remedy}") from error
        shutil.rmtree(staging, ignore_errors=True)
        sync(target.parent)
        return content_hash, target

    def scratch(self, name: str) -> Path:
        """Return `scratch/<name>`, created if missing: for journals, a trainer's output, queries that spill to disk."""
        folder = self.root / "scratch" / name
        folder.mkdir(parents=True, exist_ok=True)
        return folder

    @contextmanager
    def _spill_folder(self) -> Iterator[Path]:
        """Yield a folder into which DuckDB can spill; outside a lake that cannot be written."""
        if os.access(self.root, os.W_OK):
            yield self.scratch("duckdb")
        else:
            with tempfile.TemporaryDirectory(prefix="etpi-duckdb-") as folder:
                yield Path(folder)


_WHOLE = "lake"
"""The lock of `shared_lock` (shared) and `exclusive_lock`."""


class LakeBusy(LakeError):
    """A run or a backup is using the lake, so nothing may be removed from it now."""


class SecretFound(LakeError):
    """The value of a key was about to be published. The message names the variable, not the value."""

    def __init__(self, ref: Ref, place: str, variable: str) -> None:
        super().__init__(
            f"{ref}: {place} contains the value of ${variable}, so nothing was published. Find where it enters (a URL, "
            "a prompt, a recorded file), remove it there, and replace the key, which has been written to disk."
        )


def _refuse_secrets(ref: Ref, table: str, part: Path) -> None:
    """Raise SecretFound if a text column of a staged file contains the value of a key."""
    if secrets():
        for piece in parquet.stream(table, [part]):
            for column, variable in secrets_of(piece):
                raise SecretFound(ref, f"column {column!r} of table {table!r}", variable)


def _write_table(name: str, data: pa.Table | Spooled | Iterable[pa.RecordBatch], part: Path) -> int:
    if not isinstance(data, Spooled):
        return parquet.write(name, data, part)
    (written,) = data.paths
    rows = len(data)
    written.rename(part)
    return rows


def _put(staged: Path, path: Path) -> None:
    """Put a staged file in its place; of an existing version, replace a file that is damaged."""
    if not put_if_absent(path, staged) and sha256_of(path) != sha256_of(staged):
        staged.replace(path)


def manifest_name(manifest: Mapping[str, Any]) -> str:
    """Return the file name of a manifest: a hash of its JSON without times, so that publishing again adds nothing."""
    identity = {name: value for name, value in manifest.items() if name not in ("created_at", "seconds")}
    return f"manifest-{json_hash(identity)[:12]}.json"


def folder_hash(folder: Path) -> str:
    """Return a checkpoint's id: 16 hex digits of a sha256 over the relative path and bytes of every file."""
    return json_hash({path.relative_to(folder).as_posix(): sha256_of(path) for path in files_in(folder)})[:16]


def sha256_of(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@functools.lru_cache(maxsize=4096)
def _digest(path: Path, modified_ns: int) -> str:
    return sha256_of(path)


def _load(path: Path) -> Manifest:
    return Manifest.from_json(json.loads(read_file(path)))
