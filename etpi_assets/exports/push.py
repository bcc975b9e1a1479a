"""Export an experiment and push it to a Hugging Face Hub: sign in, export, search for keys, one commit."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from etpi_assets.exports import export, export_named
from etpi_assets.exports.format import Export
from etpi_assets.exports.hub_repository import MANIFEST, PushError, Repository, Target
from etpi_assets.exports.lineage import card_top, lineage_section
from etpi_assets.exports.source import ExportSource
from etpi_assets.resources import Resources
from etpi_resources.lake.lake import sha256_of
from etpi_resources.secrets import secrets

CARD = "README.md"
_BLOCK = 1 << 20
_LOGIN = "the hub's token"


@dataclass(frozen=True)
class Pushed:
    """A finished push: the export's manifest, the address of the commit, and whether a finished export was reused."""

    manifest: Mapping[str, Any]
    url: str
    reused: bool


def export_and_push(experiment: str, format: str, to: Path, resources: Resources, target: Target) -> Pushed:
    """Export to a folder and push the folder. If it already has this export of these versions, only push it.

    A format without a card of its own gets one with its lineage in the repository.

    Raises:
        PushError: there is no token, or the hub cannot be reached or refuses; or a file contains the value of a key.
        SpecError, LakeError, NotConverted: as `export`.
    """
    exporter = export_named(format)
    source = ExportSource(experiment, resources, exporter.assets)
    versions = source.versions()  # blocked or missing data is said before anyone signs in
    repository = Repository.sign_in(target, exporter.repo_type)
    finished = _finished(to, experiment, format, versions)
    manifest = finished or export(experiment, format, to, resources)
    extra = {} if (to / CARD).exists() else {CARD: _card(source, exporter).encode()}
    refuse_secrets(to, {**secrets(), _LOGIN: repository.secret})
    version = versions[f"{exporter.assets[-1]}/{experiment}"]
    message = f"etpi export of {experiment} as {format}, {exporter.assets[-1]} {version}"
    return Pushed(manifest, repository.push(to, message, extra), finished is not None)


def refuse_secrets(folder: Path, keys: Mapping[str, str]) -> None:
    """Raise PushError if a file contains the value of a key, in plain bytes or in a text of a parquet file.

    Args:
        keys: name of the variable -> value; the message has the name only.
    """
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        names = _in_parquet(path, keys) if path.suffix == ".parquet" else _in_bytes(path, keys)
        for name in names:
            shown = name if name == _LOGIN else f"the value of ${name}"
            raise PushError(
                f"{path} contains {shown}, so nothing was pushed. Find where it enters (a URL, a prompt, a recorded "
                "file), remove it there, and replace the key, which has been written to disk."
            )


def _finished(to: Path, experiment: str, format: str, versions: Mapping[str, str]) -> dict[str, Any] | None:
    """Return the manifest of a folder that has this export, complete and unchanged; else None."""
    try:
        manifest = json.loads((to / MANIFEST).read_text(encoding="utf-8"))
        same = (manifest["experiment"], manifest["format"], manifest["versions"]) == (experiment, format, versions)
        listed = {file["path"]: file["sha256"] for file in manifest["files"]}
    except (OSError, ValueError, KeyError, TypeError):
        return None
    present = {path.relative_to(to).as_posix() for path in to.rglob("*") if path.is_file()} - {MANIFEST}
    complete = same and present == listed.keys() and all(sha256_of(to / name) == listed[name] for name in listed)
    return manifest if complete else None


def _card(source: ExportSource, exporter: Export) -> str:
    """Return a card for a format that writes none."""
    spec = source.spec
    head = {"license": spec.card.license, "language": [spec.card.language], "tags": ["code", "agents", "etpi"]}
    lines = [
        *card_top(head, spec.title, spec.notes.strip() or f"Exported from the experiment `{source.experiment}`."),
        f"{exporter.title}. Files: {exporter.files}. Read by {exporter.read_by}.",
        "",
        f"Kept: {exporter.keeps}. Not kept: {exporter.loses}.",
        "",
    ]
    return "\n".join([*lines, *lineage_section(source)])


def _in_bytes(path: Path, keys: Mapping[str, str]) -> Iterator[str]:
    longest = max((len(value.encode()) for value in keys.values()), default=0)
    left = dict(keys)
    with path.open("rb") as file:
        tail = b""
        while block := file.read(_BLOCK):
            searched = tail + block
            for name in [name for name, value in left.items() if value.encode() in searched]:
                del left[name]
                yield name
            tail = searched[-longest:]


def _in_parquet(path: Path, keys: Mapping[str, str]) -> Iterator[str]:
    for batch in pq.ParquetFile(path).iter_batches():
        for column in batch.columns:
            for texts in _texts(column):
                for name, value in keys.items():
                    if pc.any(pc.match_substring(texts, value)).as_py():  # pyright: ignore[reportAttributeAccessIssue]
                        yield name


def _texts(array: pa.Array) -> Iterator[pa.Array]:
    """Yield the text arrays in an array, in lists and structs too."""
    kind = array.type
    if pa.types.is_string(kind) or pa.types.is_large_string(kind):
        yield array
    elif pa.types.is_list(kind) or pa.types.is_large_list(kind):
        yield from _texts(array.flatten())
    elif pa.types.is_struct(kind):
        for i in range(kind.num_fields):
            yield from _texts(array.field(i))
    elif pa.types.is_dictionary(kind):
        yield from _texts(array.dictionary)


__all__ = ["PushError", "Pushed", "Target", "export_and_push", "refuse_secrets"]
