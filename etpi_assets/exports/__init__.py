"""Exports an experiment in the formats of other programs, with a manifest that keeps its lineage.

EXPORTS is the registry: exports.toml describes each format, a module writes it; other distributions give formats as
plugins.
"""

from __future__ import annotations

import json
import shutil
import tomllib
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from etpi_assets.exports import atif, conversations, hub, model, token_ids
from etpi_assets.exports.experiment_data import ExportSource
from etpi_assets.exports.format import Export, Written
from etpi_assets.resources import Resources
from etpi_assets.specs.load import SpecError
from etpi_assets.specs.plugins import plugin, unknown
from etpi_resources.lake.lake import sha256_of

_WRITERS: Mapping[str, Callable[[ExportSource, Path], Written]] = {
    "trl": token_ids.write_trl,
    "trl_messages": conversations.write_trl,
    "verl_sft": conversations.write_verl,
    "verl_rl": conversations.write_verl_rl,
    "atif": atif.write,
    "hub": hub.write,
    "tito": token_ids.write_tito,
    "model": model.write,
}
_TEXTS = tomllib.loads(Path(__file__).with_name("exports.toml").read_text(encoding="utf-8"))

EXPORTS: Mapping[str, Export] = {name: Export(name, **_TEXTS[name], write=write) for name, write in _WRITERS.items()}
MANIFEST = "manifest.json"


def export(experiment: str, format: str, to: Path, resources: Resources) -> dict[str, Any]:
    """Export an experiment to a folder and return the manifest.

    The folder appears only when it is complete. Equal data give equal bytes.

    Args:
        to: a folder that does not exist or is empty.

    Raises:
        SpecError: the experiment or format is unknown, or `to` is not empty or inside the lake.
        LakeError: an exported asset is not built, or one of its checks failed.
    """
    exporter = export_named(format)
    if to.exists() and (not to.is_dir() or any(to.iterdir())):
        raise SpecError(f"{to} is not empty; an export needs a folder of its own: name another, or remove this one")
    if to.resolve().is_relative_to(resources.lake.root):
        raise SpecError(f"{to} is inside the lake {resources.lake.root}, where versions are kept; name another")
    source = ExportSource(experiment, resources, exporter.assets)
    versions = source.versions()
    staging = to.with_name(f".{to.name}.{uuid.uuid4().hex[:8]}")
    staging.mkdir(parents=True)
    try:
        written = exporter.write(source, staging)
        if set(files := _files(staging)) != set(written.rows):
            raise AssertionError(f"the {format} export wrote {files}, but reported {sorted(written.rows)}")
        manifest = _manifest(source, format, versions, written, staging)
        (staging / MANIFEST).write_text(json.dumps(manifest, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
        to.parent.mkdir(parents=True, exist_ok=True)
        if to.exists():
            to.rmdir()
        staging.rename(to)
    finally:
        shutil.rmtree(staging, ignore_errors=True)
    return manifest


def export_named(format: str) -> Export:
    """Return the export of that name. Raises SpecError if there is none, or a plugin cannot be used."""
    if named := plugin("export", format, EXPORTS):
        return named.load()
    if format not in EXPORTS:
        raise SpecError(unknown("export", format, EXPORTS))
    return EXPORTS[format]


def _manifest(source: ExportSource, format: str, versions: Mapping[str, str], written: Written, folder: Path) -> dict:
    """Describe an export: the data versions behind it, its files, omissions, and notes for its reader."""
    return {
        "etpi_export": 1,
        "experiment": source.experiment,
        "format": format,
        "versions": versions,
        "spec_hash": source.manifest().spec_hash,
        "tokenizer": source.spec.base.tokenizer,
        "chat_template": source.spec.base.chat_template,
        "files": [
            {
                "path": name,
                "rows": written.rows[name],
                "bytes": (folder / name).stat().st_size,
                "sha256": sha256_of(folder / name),
            }
            for name in _files(folder)
        ],
        "left_out": written.left_out,
        "notes": list(written.notes),
    }


def _files(folder: Path) -> list[str]:
    """Return the paths of all files below a folder, relative to it, in order."""
    return [path.relative_to(folder).as_posix() for path in sorted(folder.rglob("*")) if path.is_file()]
