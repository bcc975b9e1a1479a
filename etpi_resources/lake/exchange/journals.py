"""Journals of a lake and of a bucket, merged by the key of each line: none is lost, none stands twice."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Iterator
from pathlib import Path

from etpi_resources.lake.exchange.bucket import Bucket, Index, Unit, object_key
from etpi_resources.lake.exchange.remote import CheckLine, Remote
from etpi_resources.lake.files import sync
from etpi_resources.lake.lake import Lake, sha256_of
from etpi_resources.lake.manifest import LakeError
from etpi_resources.outside import loads
from etpi_resources.process.locks import lake_locks


def merged(
    journals: Iterable[tuple[str, Path, list[str]]],
    bucket: Bucket,
    index: Index,
    remote: Remote,
    staging: Path,
    check: CheckLine,
) -> dict[str, tuple[Unit, Path, str]]:
    """Return the journals with lines that the bucket lacks: its lines, then those; and their stamps here."""
    result: dict[str, tuple[Unit, Path, str]] = {}
    for name, path, needs in journals:
        size, sha256 = next(iter(index.units[name].files.values())) if name in index.units else (0, "")
        if remote.pushed.get(name) == ((stamp := stamp_of(path)), sha256):
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
            result[name] = unit, target, stamp
        else:
            remote.pushed[name] = stamp, sha256
    return result


def merge(lake: Lake, path: Path, staged: Path, check: CheckLine) -> tuple[tuple[str, str], bool]:
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
        return (stamp_of(path), staged.name), mine == theirs


def _lines(path: Path, check: CheckLine | None = None) -> Iterator[tuple[str, bytes]]:
    """Yield the keys and lines of a journal; not its last one, if a kill cut it."""
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if line.endswith(b"\n"):
                try:
                    value = loads(line)
                    key = str(value["key"])
                    if check:
                        check(line, value["spec_key"])
                except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
                    raise LakeError(
                        f"{path} line {number} is no line of a journal: {error}; nothing was merged"
                    ) from None
                yield key, line


def stamp_of(path: Path) -> str:
    return f"{path.stat().st_size} {path.stat().st_mtime_ns}"


def _keys(path: Path) -> set[str]:
    return {key for key, _ in _lines(path)} if path.exists() else set()
