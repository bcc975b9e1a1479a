"""Compare a lake with its bucket, partition by partition, by what it knows of it.

Like branches of git, a partition's pointers have three states: here, in the bucket, and where both last agreed
(`remote.json`). Only one side moved: the other follows. Both moved: nothing is exchanged, and both are named.
"""

from __future__ import annotations

import getpass
import socket
import threading
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, Literal

from pydantic import BaseModel

from etpi_resources.lake.exchange.bucket import NOTHING, Bucket, Index, Pointer, State, folder_name, ref_of
from etpi_resources.lake.files import write_atomically
from etpi_resources.lake.lake import Lake
from etpi_resources.lake.manifest import LakeError, Ref
from etpi_resources.lake.store import read_pointer

REMOTE = "remote.json"
THREADS = 16
Side = Literal["ours", "theirs"]
CheckLine = Callable[[bytes, str], Any]
States = Mapping[str, State]
"""Partition -> its state."""


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
        self.there = {name: partition.state for name, partition in index.partitions.items()}
        agreed = {*agreed, *(name for name, state in self.pushing.items() if self.there.get(name) == state)}
        self.pushing = {}
        self.base |= {name: self.there.get(name, NOTHING) for name in agreed}
        self.left = [name for name in self.left if not lake.checkpoint_dir(name).is_dir()]
        self.looked = now()
        return self.model_dump_json()


@dataclass
class Exchanged:
    """Counts and names of an exchange, done or planned.

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


DEFAULTS = Options()


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


def split(
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
        head = "moved here and in the bucket, so nothing was exchanged; --ours or --theirs says which becomes current:"
        raise Diverged("\n".join([head, *diverged]))
    return result


def look(lake: Lake, bucket: Bucket) -> tuple[Remote, Index]:
    """Read the bucket's index, and store what it says."""
    index, _ = bucket.index()
    with lake.lock("exchange", what="the exchange with a bucket"):
        remote = Remote.of(lake, bucket.url)
        write_atomically(lake.root / REMOTE, remote.text(lake, index))
    return remote, index


def call_all(pool: ThreadPoolExecutor, calls: Iterable[tuple[Any, ...]]) -> None:
    """Make calls (function, arguments), and shut the pool down: once one has failed, no other is begun."""
    failed = threading.Event()

    def make(call: tuple[Any, ...]) -> None:
        if not failed.is_set():
            try:
                call[0](*call[1:])
            except BaseException:
                failed.set()  # here, since the thread that waits for results may see it after the last call
                raise

    try:
        for future in [pool.submit(make, call) for call in calls]:
            future.result()
    finally:
        pool.shutdown(cancel_futures=True)


def now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def me() -> str:
    return f"{getpass.getuser()}@{socket.gethostname()}"
