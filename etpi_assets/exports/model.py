"""A trained checkpoint as a folder for `from_pretrained` and the Hugging Face Hub, with its model card."""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from etpi_assets.exports.experiment_data import ExportSource
from etpi_assets.exports.format import Written
from etpi_assets.exports.lineage import lineage_section
from etpi_assets.scoring.structure import structure_of
from etpi_resources.checkpoints import checkpoint_folder
from etpi_resources.lake.lake import DamagedFile, LakeError

CARD = "README.md"
GRAMMAR = "grammar.gbnf"
_FOLDER_COMMENT = "  # relative to the lake's root; a full checkpoint, no PEFT needed"


def write(source: ExportSource, folder: Path) -> Written:
    finals = last_checkpoints(source)
    written, places = {}, {}
    for row in finals:
        below = f"seed{row['seed']}/" if len(finals) > 1 else ""
        places[row["path"]] = below.rstrip("/") or "."
        checkpoint = checkpoint_folder(source.lake.root, row["path"])
        for file in sorted(path for path in checkpoint.rglob("*") if path.is_file()):
            name = f"{below}{file.relative_to(checkpoint).as_posix()}"
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(file, folder / name)
            os.chmod(folder / name, 0o644)  # the lake's files are immutable; a reader may change its own
            written[name] = 1
    (folder / CARD).write_text(_card(source, places), encoding="utf-8")
    if structure := structure_of(source.spec.metrics.scoring, source.agent_sections()):
        prompt = source.chat.prompt_ids([{"role": "user", "content": ""}], **source.spec.serving.template_kwargs)
        if source.chat.tail_form(prompt) != "closed":  # else nothing is left to constrain
            (folder / GRAMMAR).write_text(structure.after(prompt, source.chat).gbnf(), encoding="utf-8")
            written[GRAMMAR] = 1
    subfolder = next(iter(places.values()))
    notes = () if len(places) == 1 else (f"one folder for each seed: from_pretrained(REPO, subfolder={subfolder!r})",)
    return Written({**written, CARD: 1}, notes=notes)


def last_checkpoints(source: ExportSource) -> list[dict[str, Any]]:
    """Return the final checkpoint of every seed of the last trained stage.

    Raises LakeError: the experiment trains nothing.
    """
    finals = [row for row in source.checkpoints() if row["final"]]
    if not finals:
        raise LakeError(
            f'{source.experiment} trains nothing (train.method and rl.method are "none"), so it has no checkpoint'
        )
    return [row for row in finals if row["role"] == finals[-1]["role"]]


def _card(source: ExportSource, places: Mapping[str, str]) -> str:
    """Return the experiment's model card, with the exported folder in its example, and the lineage.

    Raises DamagedFile: the card is missing or is not the one that was published.
    """
    (row,) = [row for row in source.table("model_card", "reports").to_pylist() if row["kind"] == "model_card"]
    path = source.lake.root / row["path"]
    data = path.read_bytes() if path.is_file() else b""
    if hashlib.sha256(data).hexdigest() != row["sha256"]:
        raise DamagedFile.of(path, "it is not the card that was published")
    text = data.decode()
    for stored, place in places.items():
        text = text.replace(f'"{stored}"{_FOLDER_COMMENT}', f'"{place}"  # this folder; or the name of its repository')
    return f"{text.rstrip()}\n\n" + lineage_section(source)
