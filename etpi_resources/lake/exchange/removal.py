"""Remove partitions from a bucket's index, and objects that nothing in it needs."""

from __future__ import annotations

import os
from collections.abc import Collection
from datetime import UTC, datetime, timedelta
from pathlib import Path

from etpi_resources.lake.exchange.bucket import Bucket, Index, Mark, object_key, ref_of, units_of
from etpi_resources.lake.exchange.remote import me, now
from etpi_resources.lake.manifest import LakeError

_DEAD = timedelta(minutes=10)
"""A removal from a bucket gives a sign before every request; without one for so long, another may take it over."""


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
    (index, tag), process = bucket.index(), f"{me()}:{os.getpid()}"
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
        sign(index, tag, Mark(by=process, at=now()))
    named = {object_key(path, sha256) for unit in index.units.values() for path, (_, sha256) in unit.files.items()}
    sizes = bucket.sizes(lambda modified: modified < before)
    gone = {
        key: size for key, size in sorted(sizes.items()) if key not in named and not key.startswith(("index.", "."))
    }
    for start in range(0, len(gone), 1000) if yes else ():
        index, tag = bucket.index()
        if not index.removing or index.removing.by != process:
            raise LakeError(f"another process took over after {start} objects; it removes the rest")
        sign(index, tag, Mark(by=process, at=now()))
        bucket.delete(list(gone)[start : start + 1000])
    if yes:
        index, tag = bucket.index()
        index.collected = datetime.now(UTC).isoformat()
        sign(index, tag, None)
    return gone


def _is_dead(mark: Mark) -> bool:
    """Return whether a removal died and left its mark: on this machine by its process, elsewhere by its last sign."""
    by, _, process = mark.by.rpartition(":")
    if by == me() and process.isdigit():
        return int(process) == os.getpid() or not Path(f"/proc/{process}").exists()
    return datetime.now(UTC) - datetime.fromisoformat(mark.at) > _DEAD
