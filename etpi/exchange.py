"""The work of `etpi push`, `pull` and `remote`, as functions that return an exit code. docs/sharing.md shows them."""

from __future__ import annotations

import json
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

from etpi.run import console
from etpi.storage import rebuild
from etpi_assets.rollouts.journal import from_line
from etpi_resources.lake.exchange import pull as pulling
from etpi_resources.lake.exchange import push as pushing
from etpi_resources.lake.exchange import removal
from etpi_resources.lake.exchange.bucket import Bucket, ref_of, units_of
from etpi_resources.lake.exchange.remote import Exchanged, Options, Remote, look, standing
from etpi_resources.lake.files import disk_errors
from etpi_resources.lake.lake import Lake, LakeError
from etpi_resources.process.progress import clock
from etpi_resources.secrets import secrets

_OTHER = {
    "ahead": "newer here: `etpi status` says which are stale, `etpi push` sends them",
    "behind": "newer in the bucket: `etpi pull`",
    "removed": "removed on one side; name them to exchange them again",
}


@contextmanager
def bucket_of(lake: Lake, url: str | None) -> Iterator[Bucket]:
    """Open a bucket, by default that of the last exchange; raise what it refuses as LakeError, without keys."""
    if not (url := url or Remote.of(lake).url):
        raise LakeError("this lake has no bucket yet; name one: s3://BUCKET/PREFIX, gs://..., az://..., or a folder")
    try:
        with disk_errors():
            yield Bucket(url)
    except Exception as error:
        if not type(error).__module__.startswith(("obstore", "botocore")):
            raise
        reason = next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)[:500]
        for variable, value in secrets().items():
            reason = reason.replace(value, f"${variable}")
        raise LakeError(f"{url}: {reason}. Nothing moved; run the same command again") from None


def push(names: Sequence[str], url: str | None, options: Options) -> int:
    """Push and print what moved."""
    lake = Lake.open()
    return _exchange(lake, url, "pushed", lambda bucket, watched: pushing.push(lake, bucket, names, watched), options)


def pull(names: Sequence[str], url: str | None, options: Options) -> int:
    """Pull and print what moved; then build the tables across experiments and the catalog."""
    lake = Lake.open()
    return _exchange(lake, url, "pulled", lambda bucket, watched: pulling.pull(lake, bucket, names, watched), options)


def _exchange(
    lake: Lake, url: str | None, did: str, run: Callable[[Bucket, Options], Exchanged], options: Options
) -> int:
    progress, start = _Progress(did), time.monotonic()
    with bucket_of(lake, url) as bucket:
        watched = replace(options, started=progress.start, advance=progress.advance, check_line=from_line)
        result = run(bucket, watched)
    for name in result.moved:
        print(ref_of(name))
    lines = [f"{count} partitions are {_OTHER[word]}" for word, count in Counter(result.other.values()).items()]
    lines += [f"{len(result.left)} checkpoints are not here (the bucket lacks them, or --no-weights)"] * bool(
        result.left
    )
    lines += [f"{path}: a run is at work on it; run the same command again when it has ended" for path in result.busy]
    did = f"would be {did}" if options.dry_run else did
    lines += [
        f"{bucket.url}: {len(result.moved)} partitions {did}: {result.files} files of {result.units} units, "
        f"{result.bytes / 1e6:,.3f} MB; {bucket.requests.total()} requests, {time.monotonic() - start:.1f} s"
    ]
    print("\n".join(lines), file=sys.stderr)
    return rebuild(lake, everything=True) if did == "pulled" and (result.moved or result.files) else 0


class _Progress:
    """Prints bytes and the time left, at most once a second, at ever longer pauses where no terminal shows it."""

    def __init__(self, did: str) -> None:
        self.did, self.total, self.done, self.began, self.next = did, 0, 0, 0.0, 1.0

    def start(self, total: int) -> None:
        self.total, self.done, self.began = total, 0, time.monotonic()

    def advance(self, n: int) -> None:
        self.done += n
        seconds = time.monotonic() - self.began
        if seconds > self.next and 0 < self.done < self.total and not console.quiet:
            self.next = seconds + (1 if sys.stderr.isatty() else seconds)
            left = clock(seconds / self.done * (self.total - self.done))
            print(f"{self.did} {self.done / 1e6:,.1f} of {self.total / 1e6:,.1f} MB, {left} left", file=sys.stderr)


def remote(url: str | None, as_json: bool) -> int:
    """Print what a bucket has of each key, who pushed it when, and how the lake stands to it; always 0."""
    lake = Lake.open()
    with bucket_of(lake, url) as bucket:
        remote, index = look(lake, bucket)
    rows = defaultdict[tuple[str, str], list[str]](list)
    words = standing(lake, remote)
    for name in words:
        rows[ref_of(name).set, ref_of(name).key].append(name)
    rows_of_keys = []
    for (set_name, key), names in sorted(rows.items()):
        pushed = max(
            (index.partitions[name] for name in names if name in index.partitions), key=lambda p: p.at, default=None
        )
        there = index.wanted([key]) if pushed else {}
        reached = index.reached(unit for name, state in there.items() for unit in units_of(name, state))
        units = [*reached, *index.journals(there, reached)]
        size = sum(size for unit in units for size, _ in index.units[unit].files.values())
        row = {"set": set_name, "key": key, "states": dict(Counter(words[name] for name in names)), "bytes": size}
        rows_of_keys.append(row | {"pushed_by": pushed and pushed.by, "pushed_at": pushed and pushed.at})
    if as_json:
        print(json.dumps({"url": remote.url, "keys": rows_of_keys}, indent=1))
        return 0
    for row in rows_of_keys:
        states = ", ".join(f"{count} {word}" for word, count in row["states"].items())
        who = f"{row['bytes'] / 1e6:,.3f} MB with all it needs; pushed by {row['pushed_by']} at {row['pushed_at']}"
        print(f"{row['set']:12}  {row['key']:32}  {states:28}  {who if row['pushed_by'] else 'not in the bucket'}")
    print(f"{remote.url}: {len(index.partitions)} partitions; `etpi push` and `etpi pull` use it", file=sys.stderr)
    return 0


def remove(pairs: Sequence[tuple[str, str]], *, yes: bool) -> int:
    """Show the partitions that would be removed from the bucket, and with `yes` remove them; always 0."""
    with bucket_of(Lake.open(), None) as bucket:
        for name in removal.remove(bucket, pairs, yes=yes):
            print(ref_of(name))
    print("Objects stay until `etpi gc --remote --yes`." if yes else "Nothing was removed. Add --yes to remove it.")
    return 0


def collect_garbage(*, older_than: int, yes: bool) -> int:
    """Show the objects of the bucket that nothing needs, and with `yes` remove them; always 0."""
    from datetime import timedelta

    with bucket_of(Lake.open(), None) as bucket:
        gone = removal.collect(bucket, timedelta(days=older_than), yes=yes)
    for key, size in gone.items():
        print(f"{size / 1e6:>12,.3f} MB  {key}")
    print(
        f"{len(gone)} objects, {sum(gone.values()) / 1e6:,.3f} MB; {'removed' if yes else 'add --yes to remove them'}"
    )
    return 0
