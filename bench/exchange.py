"""Measure `etpi push` and `etpi pull`: requests, bytes, seconds and memory, against a server on this machine.

    python bench/exchange.py --lake DATA [--versions 2000] [--checkpoint-mb 1200]

--lake is a lake of `etpi demo`. It is copied, never changed. The server is moto, or SeaweedFS with --server seaweedfs.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from machine import machine

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from etpi_resources.lake.audit import audit
from etpi_resources.lake.exchange.bucket import INDEX, Bucket
from etpi_resources.lake.exchange.pull import pull
from etpi_resources.lake.exchange.push import push
from etpi_resources.lake.exchange.remote import Exchanged, Options
from etpi_resources.lake.lake import Lake, Ref
from etpi_resources.lake.schemas import from_rows
from tests.support import buckets
from tests.support.small_lake import publish


def measured(what: str, bucket: Bucket, run: Callable[[], Exchanged]) -> dict[str, Any]:
    bucket.requests.clear()
    start = time.monotonic()
    result = run()
    row = {
        "what": what, "requests": bucket.requests.total(), "mb": round(result.bytes / 1e6, 3),
        "seconds": round(time.monotonic() - start, 2),
    }  # fmt: skip
    print(json.dumps(row), flush=True)
    return row


def demo(lake: Path, folder: Path) -> list[dict[str, Any]]:
    shutil.copytree(lake, folder / "a", ignore=shutil.ignore_patterns("remote.json", "push", "pull"))
    source, copy, light = Lake(folder / "a"), Lake(folder / "b"), Lake(folder / "c")
    bucket, name = Bucket("s3://lakes/demo"), "plan_first_tiny"
    rows = [
        measured("the demo's lake, pushed", bucket, lambda: push(source, bucket)),
        measured("nothing new, pushed", bucket, lambda: push(source, bucket)),
        measured("one experiment, pulled", bucket, lambda: pull(copy, bucket, [name])),
        measured("nothing new, pulled", bucket, lambda: pull(copy, bucket, [name])),
        measured(
            "the same without weights, pulled", bucket, lambda: pull(light, bucket, [name], Options(weights=False))
        ),
    ]
    assert not audit(copy, deep=True).damages and not audit(light, deep=True).damages
    return rows


def many(count: int, folder: Path) -> list[dict[str, Any]]:
    source, copy, bucket = Lake(folder / "many"), Lake(folder / "many_copy"), Bucket("s3://lakes/many")
    for number in range(count):
        publish(source, Ref("tito_pairs", "experiment", f"e{number}"), 1 + number % 50, f"{number}", inputs={})
    rows = [
        measured(f"{count:,} versions, pushed", bucket, lambda: push(source, bucket)),
        measured(f"{count:,} versions, nothing new", bucket, lambda: push(source, bucket)),
        measured(f"{count:,} versions, pulled", bucket, lambda: pull(copy, bucket)),
    ]
    rows[0]["index_bytes"] = bucket.sizes(lambda modified: True)[INDEX]
    return rows


def checkpoint(megabytes: int, folder: Path) -> list[dict[str, Any]]:
    lake, bucket = Lake(folder / "weights"), Bucket("s3://lakes/weights")
    (made := lake.scratch("made") / "weights").mkdir()
    with (made / "model.safetensors").open("wb") as file:
        for _ in range(megabytes):
            file.write(os.urandom(1_000_000))
    name, path = lake.adopt_checkpoint(made)
    row = {"role": "sft", "checkpoint_id": name, "path": str(path.relative_to(lake.root)), "seed": 0, "final": True}
    tables = {"checkpoints": from_rows("checkpoints", [row])}
    lake.publish(Ref("sft_checkpoint", "experiment", "e"), tables, input_key="k", inputs={}, spec_hash="h")
    rows = [measured(f"a checkpoint of {megabytes:,} MB, pushed", bucket, lambda: push(lake, bucket))]
    rows[0]["peak_mb"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1000
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lake", type=Path, required=True)
    parser.add_argument("--versions", type=int, default=2000)
    parser.add_argument("--checkpoint-mb", type=int, default=1200)
    parser.add_argument("--server", choices=buckets.KINDS, default="moto")
    options = parser.parse_args()
    with (
        tempfile.TemporaryDirectory(prefix="etpi-exchange-") as name,
        buckets.server(options.server, Path(name) / "server") as variables,
    ):
        os.environ |= variables
        rows = [*demo(options.lake, Path(name)), *many(options.versions, Path(name))]
        if options.checkpoint_mb:
            rows += checkpoint(options.checkpoint_mb, Path(name))
    result = {"machine": machine(), "server": options.server, "rows": rows}
    Path(__file__).with_suffix(".json").write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
