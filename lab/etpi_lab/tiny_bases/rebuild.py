"""Rebuild the tiny bases of the shipped experiments (`etpi lab tiny-bases`)."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import etpi_tiny_bases
from etpi_assets import tiny_bases as shipped_bases
from etpi_assets.specs.load import load_shipped
from etpi_assets.specs.rollout_set import TinySection
from etpi_assets.specs.section import SpecError
from etpi_lab.tiny_bases import recipe as tiny_base
from etpi_lab.tiny_bases.worker import BaseWorkerResult
from etpi_resources.chat.format import ChatFormat, load_chat_format
from etpi_resources.lake.lake import sha256_of
from etpi_resources.trainers.pipes import run_worker

MODEL_FILES = ("config.json", "generation_config.json", shipped_bases.WEIGHTS)
MAX_BYTES = 4_000_000
"""Upper bound of a base's weights, because every clone contains them."""


def used_by_shipped_specs() -> list[tuple[TinySection, ChatFormat]]:
    """Return each tiny base that a shipped experiment starts from, once, with its chat format."""
    experiments = load_shipped().experiments.values()
    bases = [spec.base for spec in experiments if spec.base.kind == "tiny"]
    distinct = {(b.tiny.model_dump_json(), b.tokenizer, b.chat_template): b for b in bases}
    return [(b.tiny, load_chat_format(b.tokenizer, b.chat_template)) for b in distinct.values()]


def rebuild(section: TinySection, chat: ChatFormat) -> shipped_bases.Recipe:
    """Train a base and replace the shipped one.

    Raises:
        RuntimeError: the new base's loss is too high or its weights are too large; the shipped base is not replaced.
        WorkerFailed: the trainer failed.
    """
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "base"
        result = run_worker(tiny_base.WORKER, tiny_base.prepare(section, chat, folder), folder, BaseWorkerResult)
        return ship(section, chat, result.model_dump(mode="json"), folder / result.folder)


def ship(section: TinySection, chat: ChatFormat, report: Mapping[str, Any], model: Path) -> shipped_bases.Recipe:
    """Write a trained base into the package; `report` is the worker's, `model` the folder of the trained model."""
    if not (outcome := tiny_base.check_trained(report)).passed:
        raise RuntimeError(f"the base of {section.world} is not shipped: {outcome.message}")
    size = (model / shipped_bases.WEIGHTS).stat().st_size
    if size > MAX_BYTES:
        raise RuntimeError(
            f"the base of {section.world} is not shipped: {size:,} bytes of weights, bound {MAX_BYTES:,}"
        )
    vocabulary, template = shipped_bases.format_hashes(chat)
    recipe = shipped_bases.Recipe(
        section=section,
        vocabulary=vocabulary,
        template=template,
        corpus=tiny_base.corpus_of(tiny_base.corpus_rows(section, chat)),
        weights=sha256_of(model / shipped_bases.WEIGHTS),
        **{name: report[name] for name in ("dtype", "parameters", "seconds", "device", "libraries", "log")},
    )
    home = Path(etpi_tiny_bases.__file__).parent
    if before := shipped_bases.find(section, chat):
        home = before.folder.parent
        shutil.rmtree(before.folder)
    folder = home / recipe.name
    folder.mkdir(parents=True, exist_ok=True)
    for name in MODEL_FILES:
        shutil.copyfile(model / name, folder / name)
    (folder / shipped_bases.RECIPE).write_text(recipe.model_dump_json(indent=1) + "\n")
    return recipe


def rebuild_worlds(worlds: Sequence[str]) -> int:
    """Rebuild the shipped bases of these worlds, of all by default; always 0.

    Raises:
        SpecError: there is no such world.
    """
    if unknown := sorted(set(worlds) - set(tiny_base.WORLDS)):
        raise SpecError(f"there is no tiny world {unknown[0]!r}; the worlds are {', '.join(tiny_base.WORLDS)}")
    for section, chat in used_by_shipped_specs():
        if not worlds or section.world in worlds:
            recipe = rebuild(section, chat)
            print(f"{recipe.folder}: loss {recipe.log[-1]['loss']:.3f}, {recipe.seconds:.0f} s on {recipe.device}")
    return 0
