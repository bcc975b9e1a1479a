"""Experiments in other programs' formats: one module a format or two, one registry, a manifest beside every export.

Belongs here: which formats there are, and the manifest, so that lineage does not end at the door. Does not belong here:
any format. A format is an `Export`; adding one is adding it to EXPORTS.
"""

from __future__ import annotations

import difflib
import json
import shutil
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from etpi_assets.exports import atif, conversations, gguf, hub, swe_bench, token_ids, verl_prompts
from etpi_assets.exports.format import Export
from etpi_assets.exports.source import ExportSource
from etpi_assets.resources import Resources
from etpi_assets.specs.load import SpecError
from etpi_resources.lake.lake import sha256_of

_ALL = (
    token_ids.TRL, conversations.TRL, conversations.VERL, verl_prompts.EXPORT, atif.EXPORT, hub.EXPORT, token_ids.TITO,
    swe_bench.EXPORT, gguf.EXPORT,
)  # fmt: skip

EXPORTS: Mapping[str, Export] = {export.name: export for export in _ALL}
MANIFEST = "manifest.json"


def export(experiment: str, format: str, to: Path, resources: Resources) -> dict[str, Any]:
    """Write an experiment in a format; return the manifest, which is written beside it last.

    Nothing stands at `to` where it fails. The same data gives the same bytes.

    Args:
        to: a folder that is not there yet, or is empty.

    Raises:
        SpecError: no such experiment or format, or something stands at `to`.
        LakeError: what is exported is not built, or a check of it failed.
        NotConverted: GGUF cannot be made of the checkpoints.
    """
    if format not in EXPORTS:
        near = difflib.get_close_matches(format, EXPORTS, n=1, cutoff=0.0)[0]
        raise SpecError(f"export format {format!r} is unknown, the nearest is {near!r}; known: {', '.join(EXPORTS)}")
    if to.exists() and (not to.is_dir() or any(to.iterdir())):
        raise SpecError(f"{to} is not empty: an export is a folder of its own; name another, or remove it")
    source = ExportSource(experiment, resources, EXPORTS[format].assets)
    versions = source.versions()
    beside = to.with_name(f".{to.name}.{uuid.uuid4().hex[:8]}")
    beside.mkdir(parents=True)
    try:
        written = EXPORTS[format].write(source, beside)
        files = sorted(path for path in beside.rglob("*") if path.is_file())
        names = [path.relative_to(beside).as_posix() for path in files]
        if set(names) != set(written.rows):
            raise AssertionError(f"{format} wrote {names}, and says {sorted(written.rows)}")
        manifest = {
            "etpi_export": 1,
            "experiment": experiment,
            "format": format,
            "versions": versions,
            "spec_hash": source.manifest().spec_hash,
            "tokenizer": source.spec.base.tokenizer,
            "chat_template": source.spec.base.chat_template,
            "files": [
                {"path": name, "rows": written.rows[name], "bytes": path.stat().st_size, "sha256": sha256_of(path)}
                for name, path in zip(names, files, strict=True)
            ],
            "left_out": written.left_out,
            "notes": list(written.notes),
        }
        (beside / MANIFEST).write_text(json.dumps(manifest, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
        to.parent.mkdir(parents=True, exist_ok=True)
        if to.exists():
            to.rmdir()
        beside.rename(to)
    finally:
        shutil.rmtree(beside, ignore_errors=True)
    return manifest
