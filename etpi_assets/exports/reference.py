"""docs/formats.md, written from the registries of importers and exports.

Belongs here: that page. Run `python -m etpi_assets.exports.reference` to write it anew; a test fails where it is not
current.
"""

from __future__ import annotations

from pathlib import Path

from etpi_assets.exports import EXPORTS
from etpi_assets.importers import IMPORTERS
from etpi_assets.importers.conversation import ROLES, Options

_HEAD = """# Formats in and out

Written by `python -m etpi_assets.exports.reference` from the registries; change it there.

## In

A rollout set of `kind = "imported"` names a `path` (a folder or a file; `${VARIABLE}` is taken from the environment)
and a `format`, or leaves it at `"auto"`: then the folder is looked at, a program's own files before rows, a program's
own columns before rows that hold nothing but messages; two that claim one folder are an error that names both. Every
input becomes a rollout or a row of `quarantined` with file, row, reason and remedy; found = rollouts + quarantined is
a blocking check. Files are read in parts by a process a core and streamed to the lake, so that memory does not grow
with them.

```toml
title = "Recorded runs"
kind = "imported"
format = "auto"
path = "${RUNS}/of/mine"
[options]
tokenizer = "qwen3"
```
"""
_OUT = """## Out

`make export EXPERIMENT=name FORMAT=format TO=folder`, or `etpi export name --format format --to folder`. The folder
is new; it appears whole or not at all, and the same data give the same bytes. `manifest.json` in it names every data
version behind the export (tasks, rollouts, selection, pairs, data set, checkpoints), the files with rows and sha256,
what was left out and what its reader has to know. What a check blocked is not exported. Rows are split as training
is.

`gguf` runs `convert_hf_to_gguf.py` of an installed llama.cpp: the one on `PATH`, or what `ETPI_GGUF_CONVERTER` names
(the script, or an interpreter and the script). It also stands in the source distribution of llama-cpp-python and runs
in etpi's own environment after `pip install sentencepiece`.
"""
_COMMON = """## What every importer survives

gzip and zstd, whatever the file is called; byte order marks; NaN; NUL characters; lines of 100 MB; times as epoch
seconds, milliseconds, digits, ISO 8601 with or without a zone, or parquet's own (all become UTC); arguments of calls
as text or as objects; structs padded with nulls; content as text or as parts. Refused with the reason, and the rest
goes on: lone surrogates, bytes that are not UTF-8, cut JSON, streams cut or damaged (the rows before the cut are
taken), damaged parquet, images, unknown roles, ids that are no ids, conversations that begin with the assistant.
"""


def page() -> str:
    """The page as markdown."""
    lines = [_HEAD]
    for importer in IMPORTERS.values():
        lines += _section(importer.name, importer.title, Files=importer.files, Kept=importer.keeps, Lost=importer.loses)
    lines += [
        "### Options",
        "",
        *_options(),
        "",
        f"Roles that are known: {', '.join(f'`{role}`' for role in ROLES)}.",
        "",
    ]
    lines += [_COMMON, _OUT]
    for export in EXPORTS.values():
        back = f"the importer `{export.importer}`" if export.importer else "none of the importers"
        facts = {"Files": export.files, "Kept": export.keeps, "Lost": export.loses}
        lines += _section(export.name, export.title, **facts, **{"Read by": f"{export.read_by}; {back}"})
    return "\n".join(lines).rstrip() + "\n"


def _section(name: str, title: str, **facts: str) -> list[str]:
    return [f"### `{name}`", "", f"{title}.", "", *(f"- {label}: {text}." for label, text in facts.items()), ""]


def _options() -> list[str]:
    """The options' names with what their class says of them."""
    told = (Options.__doc__ or "").partition("Attributes:")[2]
    return [
        f"- `{name}`: {text}" for line in told.strip().splitlines() for name, _, text in [line.strip().partition(": ")]
    ]


if __name__ == "__main__":
    Path("docs/formats.md").write_text(page(), encoding="utf-8")
