"""A bucket with versions of lakes: objects that never change, and one index that says what is current.

    <prefix>/<path in a lake>       files whose names follow from their content: tables, manifests, checkpoints
    <prefix>/objects/<sha256>       every other file: reports, stored trainings, rounds, journals
    <prefix>/index.json.gz          `Index`; the one object that is replaced, and only if it is the one that was read

So everything in the bucket becomes visible, or moves, by one conditional PUT (If-Match, or If-None-Match: * for the
first), after all that it names was stored. Needs the package obstore. Strangers may have written the index.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import re
import zlib
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, Self
from urllib.parse import unquote

from pydantic import AfterValidator, BaseModel, Field, ValidationError, model_validator

from etpi_resources.inside import MOST_BYTES, below, read_file, require_file
from etpi_resources.lake.files import write_atomically
from etpi_resources.lake.manifest import SCHEMA_VERSION, LakeError, NewerFormat, Ref
from etpi_resources.outside import loads, most_values_in

INDEX = "index.json.gz"
SOURCES = ("suite", "rollout_set")
"""Of these sets every partition of a key is exchanged: its resolved spec and scores too, which no version needs."""
_BY_CONTENT = re.compile(r".*/version=[^/]+/.*|checkpoints/[0-9a-f]{16}/.*")
_PART = 8 << 20
_REMEDY = "push it again from a lake that has it, with --again"
_VALUE_BYTES = 16
"""The fewest bytes that an index has for each of its values: a file's path, size and hash have 150."""
_NAME = r"[A-Za-z0-9][A-Za-z0-9_.-]*"
_PARTITION = rf"(?P<asset>{_NAME})/(?P<part>(?:suite|rollout_set|experiment)=(?P<key>{_NAME}))"
_FILE = re.compile(
    rf"""{_PARTITION}/(?P<v>version=[0-9a-f]{{16}})/(?P<manifest>manifest-[0-9a-f]{{12}}\.json)\|
        (?:(?P=asset)/(?P=part)/(?P=v)/(?P=manifest)
        |(?P=asset)/{_NAME}/(?P=part)/(?P=v)/part-\d+\.parquet
        |reports/(?P=key)/.+)
    |(?P<checkpoint>checkpoints/[0-9a-f]{{16}})\|(?P=checkpoint)/.+
    |trained/(?P<training>{_NAME})\|checkpoints/(?:trained/(?P=training)\.json|rounds/(?P=training)/.+)
    |journal/(?P<j>scratch/(?:rollouts/{_NAME}|evaluations)/{_NAME}/journal-[0-9a-f]+\.jsonl)\|(?P=j)""",
    re.VERBOSE,
)
"""UNIT|PATH: the files that a unit may have. No other file of a lake is ever taken from a bucket."""


def _partition(name: str) -> str:
    if not re.fullmatch(_PARTITION, name):
        raise ValueError("no partition of an asset")
    return name


class Pointer(BaseModel, frozen=True):
    """The content of `current` or `blocked`."""

    version: str = Field(pattern="^[0-9a-f]{16}$")
    manifest: str = Field(pattern=r"^version=[0-9a-f]{16}/manifest-[0-9a-f]{12}\.json$")
    publication: int = Field(ge=0, le=1 << 50)

    def text(self) -> str:
        return json.dumps(self.model_dump()) + "\n"


State = tuple[Pointer | None, Pointer | None]
"""`current`, and `blocked` if it is newer."""
NOTHING: State = (None, None)


def units_of(name: str, state: State) -> list[str]:
    """Return the units of the versions that a partition's pointers name."""
    return [f"{name}/{pointer.manifest}" for pointer in state if pointer]


_Who = Annotated[str, Field(pattern=r"^[\w.@:+-]{0,200}$")]


class Mark(BaseModel):
    """Who did something, and when (ISO 8601, UTC). Both are printed, so no other characters are in them."""

    by: _Who = ""
    at: _Who = ""


class Partition(Mark):
    """The pointers of a partition; who pushed them, and when."""

    current: Pointer | None = None
    blocked: Pointer | None = None

    @property
    def state(self) -> State:
        return self.current, self.blocked


class Unit(BaseModel):
    """Files that are exchanged together, {path in the lake: (bytes, sha256)}, and the other units that they need."""

    files: dict[str, tuple[Annotated[int, Field(ge=0, le=1 << 50)], Annotated[str, Field(pattern="^[0-9a-f]{64}$")]]]
    needs: list[str] = []
    at: _Who = ""


class Index(BaseModel):
    """What a bucket has. Fields that this etpi does not know are ignored.

    Attributes:
        partitions: by "<asset>/<set>=<key>".
        units: by "<partition>/version=<v>/<manifest>", "checkpoints/<id>", "trained/<key>", "journal/<path>".
        removing: who removes objects now ("by"), and the time of the last sign ("at"); nobody may push meanwhile.
        collected: when objects were last removed; a push that began before stores its files again.
    """

    format: int = SCHEMA_VERSION
    partitions: dict[Annotated[str, AfterValidator(_partition)], Partition] = {}
    units: dict[str, Unit] = {}
    removing: Mark | None = None
    collected: str = ""

    @model_validator(mode="after")
    def _names_only_files_of_versions(self) -> Self:
        for name, unit in self.units.items():
            if not unit.files or ("/version=" in name and name not in unit.files):
                raise ValueError(f"{name[:200]!r} has no files, or not its manifest")
            for path in unit.files:
                if not _FILE.fullmatch(f"{name}|{path}"):
                    raise ValueError(f"{name[:200]!r} has no file {path[:200]!r}")
                below(path)
        for name, partition in self.partitions.items():
            for unit in units_of(name, partition.state):
                if unit not in self.units:
                    raise ValueError(f"the index describes no {unit}")
        return self

    @classmethod
    def of(cls, data: bytes, place: str) -> Index:
        """Read an index. Raises NewerFormat; LakeError if it is no index, or names files that no version has."""
        try:
            text = (reader := zlib.decompressobj(31)).decompress(data, MOST_BYTES)
            if reader.unconsumed_tail or most_values_in(text) > MOST_BYTES // _VALUE_BYTES:
                raise ValueError(f"it has more than {MOST_BYTES:,} bytes, or too many values")
            if type(number := (value := loads(text))["format"]) is not int or number < 1:
                raise ValueError("it has no format")
            if number > SCHEMA_VERSION:
                raise NewerFormat.of(place, number)
            return cls.model_validate(value)
        except (ValueError, TypeError, KeyError, OSError, zlib.error) as error:
            why = error.errors()[0] if isinstance(error, ValidationError) else {"loc": (), "msg": str(error)}
            where = "/".join(ascii(part)[:200] for part in why["loc"])
            raise LakeError(f"{place}/{INDEX} is refused: {where} {why['msg'][:500]}; nothing was fetched") from None

    def to_bytes(self) -> bytes:
        return (writer := zlib.compressobj(6, wbits=31)).compress(self.model_dump_json().encode()) + writer.flush()

    def reached(self, names: Iterable[str]) -> list[str]:
        """Return the units, and all that they need, of those that the bucket has."""
        waiting = list(reached := dict.fromkeys(name for name in names if name in self.units))
        while waiting:
            for other in self.units[waiting.pop()].needs:
                if other in self.units and other not in reached:
                    reached[other] = None
                    waiting.append(other)
        return list(reached)

    def wanted(self, keys: Collection[str]) -> dict[str, State]:
        """Return the partitions of some keys (none: of all), and those of every version that they need."""
        of_key: dict[str, list[str]] = defaultdict(list)
        for name in self.partitions:
            of_key[ref_of(name).key].append(name)
        if unknown := sorted(set(keys) - of_key.keys()):
            has = ", ".join(sorted(of_key)) or "nothing"
            raise LakeError(f"the bucket has nothing of {', '.join(unknown)}; it has {has}")
        states: dict[str, State] = {}
        waiting = [name for key in keys or of_key for name in of_key[key]]
        while waiting:
            if (name := waiting.pop()) not in states and name in self.partitions:
                states[name] = self.partitions[name].state
                units = self.reached(units_of(name, states[name]))
                needed = {unit.rpartition("/version=")[0] for unit in units if "/version=" in unit}
                sources = {ref.key for ref in map(ref_of, needed) if ref.set in SOURCES}
                waiting += [*needed, *(n for key in sources for n in of_key[key] if ref_of(n).set in SOURCES)]
        return states

    def journals(self, states: Collection[str], reached: Collection[str]) -> list[str]:
        """Return the journals of the rollout sets among partitions, and of the checkpoints among units."""
        sets = {ref.key for ref in map(ref_of, states) if ref.set == "rollout_set"}
        names = [(name, name.split("/")) for name in self.units if name.startswith("journal/")]
        return [n for n, p in names if (p[3] in sets if p[2] == "rollouts" else {*self.units[n].needs} & {*reached})]


def folder_name(ref: Ref) -> str:
    return f"{ref.asset}/{ref.set}={ref.key}"


def ref_of(name: str) -> Ref:
    asset, _, rest = name.partition("/")
    return Ref(asset, *rest.split("=", 1))


def object_key(path: str, sha256: str) -> str:
    """Return where a file of a lake is in the bucket."""
    return path if _BY_CONTENT.fullmatch(path) else f"objects/{sha256}"


class Bucket:
    """The requests of an exchange: store an object, read one, replace the index if it has not moved."""

    def __init__(self, url: str, store: Any = None) -> None:
        """Open `s3://BUCKET/PREFIX` (or gs://, az://), or a folder.

        Keys and endpoint are those of the environment (AWS_...) or of the provider's usual files.

        Raises:
            LakeError: the address contains a key; or the package obstore is not installed.
        """
        scheme, _, rest = url.partition("://")
        if scheme == "file":
            url, rest = unquote(rest), ""
        if rest and ("@" in rest or "?" in rest):
            raise LakeError(
                "an address of a bucket has no keys and no options in it; set AWS_ACCESS_KEY_ID or the like"
            )
        try:
            import obstore
            from obstore.store import LocalStore, from_url
        except ImportError as error:
            raise LakeError("a bucket needs the package obstore: pip install 'etpi[bucket]'") from error
        self._folder = None if rest or store else Path(url).expanduser().resolve()
        self.url, self._api, self.requests = str(self._folder or url), obstore, Counter[str]()
        if store is None and self._folder:
            store = LocalStore(self._folder, mkdir=True)
        elif store is None:
            provider = _profile() if scheme == "s3" and "AWS_ACCESS_KEY_ID" not in os.environ else None
            http = os.environ.get("AWS_ENDPOINT_URL", "").startswith("http://")
            options: Any = {"allow_http": http, "timeout": "10m"}
            store = from_url(url, client_options=options, credential_provider=provider)
        self._store = store

    def index(self) -> tuple[Index, str | None]:
        """Return the index and its tag; an empty one and None if the bucket has none."""
        try:
            got = self._object(INDEX)
        except FileNotFoundError:
            return Index(), None
        if got.meta["size"] > MOST_BYTES:
            raise LakeError(f"{self.url}/{INDEX} has {got.meta['size']:,} bytes; at most {MOST_BYTES:,} are read")
        data = bytes(got.bytes())
        return Index.of(data, self.url), hashlib.sha256(data).hexdigest() if self._folder else got.meta["e_tag"]

    def _object(self, key: str) -> Any:
        """Return an object. Raises FileNotFoundError; PathOutside: in a folder, something else has its name."""
        self.requests["get"] += 1
        if self._folder:
            require_file(self._folder / key)
        return self._api.get(self._store, key)

    def swap_index(self, index: Index, tag: str | None) -> bool:
        """Replace the index if it still has the tag; return whether it had."""
        from obstore.exceptions import AlreadyExistsError, PreconditionError

        self.requests["put"] += 1
        if self._folder:
            return self._swap_file(self._folder / INDEX, index.to_bytes(), tag)
        try:
            with self._existing():
                self._api.put(self._store, INDEX, index.to_bytes(), mode={"e_tag": tag} if tag else "create")
        except (AlreadyExistsError, PreconditionError):
            return False
        return True

    @staticmethod
    def _swap_file(file: Path, data: bytes, tag: str | None) -> bool:
        file.parent.mkdir(parents=True, exist_ok=True)
        with (file.parent / ".index.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if (hashlib.sha256(read_file(file)).hexdigest() if file.exists() else None) != tag:
                return False
            write_atomically(file, data)
        return True

    def put(self, key: str, path: Path) -> None:
        """Store a file; one of the same content is replaced by itself. A large one is visible when all is there."""
        size = path.stat().st_size
        self.requests["put"] += 1 if size <= _PART else -(-size // _PART) + 2
        parts = {"chunk_size": max(_PART, size // 5000), "use_multipart": size > _PART, "max_concurrency": 4}
        with self._existing():
            self._api.put(self._store, key, path, **parts)

    def put_if_absent(self, key: str, data: bytes) -> bytes:
        """Store an object unless there is one; return the content that the bucket now has."""
        from obstore.exceptions import AlreadyExistsError

        self.requests["put"] += 1
        try:
            with self._existing():
                self._api.put(self._store, key, data, mode="create")
        except AlreadyExistsError:
            data = bytes(self._object(key).bytes())
        return data

    @contextmanager
    def _existing(self) -> Iterator[None]:
        """Say of a failed request that the bucket does not exist, which is all that stores say."""
        try:
            yield
        except FileNotFoundError as error:
            raise LakeError(f"{self.url}: there is no such bucket; create it first") from error

    def get(
        self, key: str, path: Path, size: int, sha256: str, advance: Callable[[int], None] = lambda n: None
    ) -> None:
        """Write an object to a file, whole or not at all, and no byte more than it should have.

        Raises:
            LakeError: its content is not what the index says.
        """
        beside, digest, read = path.with_name(f".{path.name}"), hashlib.sha256(), 0
        try:
            with beside.open("wb") as file:
                for chunk in self._object(key).stream(min_chunk_size=_PART):
                    if (read := read + len(chunk)) > size:
                        break
                    file.write(chunk)
                    digest.update(chunk)
                    advance(len(chunk))
            if read != size or digest.hexdigest() != sha256:
                raise LakeError(f"{self.url}: {key} is damaged: its content is not what the index says; {_REMEDY}")
            beside.replace(path)
        except FileNotFoundError as error:
            raise LakeError(f"{self.url}: {key} is missing; {_REMEDY}") from error
        finally:
            beside.unlink(missing_ok=True)

    def sizes(self, counts: Callable[[Any], bool]) -> dict[str, int]:
        """Return every object's key and size, of those modified at times that count."""
        sizes: dict[str, int] = {}
        for page in self._api.list(self._store, chunk_size=1000):
            self.requests["list"] += 1
            sizes |= {meta["path"]: meta["size"] for meta in page if counts(meta["last_modified"])}
        return sizes

    def delete(self, keys: list[str]) -> None:
        """Remove at most 1,000 objects."""
        self.requests["delete"] += 1
        self._api.delete(self._store, keys)


def _profile() -> Any:
    """Return AWS's usual files, sign-in and roles; None, which asks the machine alone, without the package boto3."""
    try:
        from obstore.auth.boto3 import Boto3CredentialProvider

        return Boto3CredentialProvider()
    except (ImportError, ValueError):  # ValueError: it found no keys
        return None
