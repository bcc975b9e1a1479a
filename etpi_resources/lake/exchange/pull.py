"""`pull`: fetch what a bucket's versions need, then make them current in the lake."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from etpi_resources.lake import formats, store
from etpi_resources.lake.exchange import journals
from etpi_resources.lake.exchange.bucket import Bucket, Index, Unit, folder_name, object_key, ref_of, units_of
from etpi_resources.lake.exchange.remote import (
    DEFAULTS,
    REMOTE,
    THREADS,
    CheckLine,
    Exchanged,
    Options,
    Remote,
    call_all,
    split,
    state_of,
)
from etpi_resources.lake.lake import Lake, manifest_name
from etpi_resources.lake.manifest import LakeError, Manifest
from etpi_resources.lake.store import put_if_absent, read_pointer
from etpi_resources.process.locks import LockHeld

_POINTERS = ("current", "blocked")
_CHECKPOINT = re.compile("checkpoints/[0-9a-f]{16}")
_WEIGHTS = ("checkpoints", "trained", "journal")
Files = dict[str, tuple[int, str]]


def pull(lake: Lake, bucket: Bucket, keys: Collection[str] = (), options: Options = DEFAULTS) -> Exchanged:
    """Fetch what the bucket's current versions of some keys need, then make them current here.

    Raises:
        Diverged: a partition moved here and in the bucket; nothing became current.
        LakeError: the index is no index, an object is missing or damaged, or the disk is too small.
    """
    with lake.lock("exchange", what="the exchange with a bucket"), lake.shared_lock():
        index, _ = bucket.index()
        remote, there = Remote.of(lake, bucket.url), index.wanted(keys)
        here = {name: state_of(lake, ref_of(name)) for name in there}
        result = split(here, there, remote, "behind", options.prefer, bool(keys))
        reached = index.reached(unit for name, state in there.items() for unit in units_of(name, state))
        behind = [name for name in index.journals(there, reached) if _is_behind(lake, index, remote, name)]
        wanted = [*reached, *behind] if options.weights else [n for n in reached if n.split("/")[0] not in _WEIGHTS]
        missing = {name: files for name in wanted if (files := _missing(lake, name, index.units[name], result.moved))}
        area = lake.scratch("pull")  # kept if this is killed, so that the next pull continues after the finished files
        files = [(path, *described) for of_unit in missing.values() for path, described in of_unit.items()]
        fetched = {sha: (object_key(path, sha), size) for path, size, sha in files if not (area / sha).exists()}
        result.units, result.files = len(missing), len(fetched)
        result.bytes = sum(size for _, size in fetched.values())
        if options.dry_run:
            return result
        if result.bytes > (free := shutil.disk_usage(area).free):
            raise LakeError(f"{result.bytes:,} bytes are to be fetched, and the disk of {lake.root} has {free:,} left")
        options.started(result.bytes)
        with ThreadPoolExecutor(THREADS) as pool:
            get = [(bucket.get, key, area / sha, size, sha, options.advance) for sha, (key, size) in fetched.items()]
            call_all(pool, get)
        replaced = _place(lake, bucket, missing, area, options.check_line, remote, result)
        needs = {n[12:] for name in reached for n in index.units[name].needs if _CHECKPOINT.fullmatch(n)}
        result.left = sorted(name for name in needs if not lake.checkpoint_dir(name).is_dir())
        remote.left = sorted({*remote.left, *result.left})
        (area / REMOTE).write_text(remote.text(lake, index, there.keys() - result.other.keys()))
        replaced[REMOTE] = str((area / REMOTE).relative_to(lake.root))  # moves with the pointers, also over a kill
        with lake.lock("publish"):
            formats.mark(lake.root)
            if moved := [ref for ref in map(ref_of, result.moved) if state_of(lake, ref) != here[folder_name(ref)]]:
                raise LakeError(f"{moved[0]} was published while it was pulled; nothing was replaced. Pull again")
            named = [(name, *each) for name in result.moved for each in zip(_POINTERS, there[name], strict=True)]
            pointers = {f"{name}/{kind}": new and new.text().encode() for name, kind, new in named}
            texts = {path: (read_pointer(lake.root / path), new) for path, new in pointers.items()}
            store.move(lake.root, texts, replaced)
        shutil.rmtree(area)
        return result


def _is_behind(lake: Lake, index: Index, remote: Remote, name: str) -> bool:
    path, ((_, sha256),) = lake.root / name[8:], index.units[name].files.values()
    return not path.exists() or remote.pulled.get(name) != (journals.stamp_of(path), sha256)


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
                remote.pulled[name], same = journals.merge(lake, lake.root / path, area / sha256, check)
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
                    copy = shutil.copyfile(staged, area / f"{len(replaced)}.report")
                    replaced[path] = str(copy.relative_to(lake.root))
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
