"""Tiny bases in the package: find them, verify their bytes, copy them to the lake, and detect changed recipes.

A base is a folder of `etpi_assets/tiny_bases`, named after its world and the hash of its weights; the lab trains them.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ConfigDict

from etpi_assets.planning.versioning.keys import tiny_base_parts
from etpi_assets.specs.rollout_set import TinySection
from etpi_resources.lake.lake import Lake, LakeError, sha256_of
from etpi_resources.trainers.precision import Dtype

if TYPE_CHECKING:
    from etpi_resources.chat.format import ChatFormat

FOLDER = Path(__file__).parent
RECIPE = "recipe.json"
WEIGHTS = "model.safetensors"
REBUILD = "etpi lab tiny-bases"
"""The command that rebuilds them in a checkout."""


class Corpus(BaseModel):
    """Identity of a training corpus: sha256 of its rows (see `corpus_of`), numbers of rows and tokens."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    sha256: str
    rows: int
    tokens: int


class Code(BaseModel):
    """Versions of the code that wrote the corpus and of the code that trained on it."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    corpus: str
    training: str


class Recipe(BaseModel):
    """`recipe.json`: the inputs of a base, the code and libraries that trained it, and its training log.

    Attributes:
        section, vocabulary, template: identify the base; the last two are sha256.
        weights: sha256 of `model.safetensors`.
        seconds: wall time of the training.
        log: lines of the training log, see `base_worker.run`.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    section: TinySection
    vocabulary: str
    template: str
    corpus: Corpus
    code: Code
    dtype: Dtype
    weights: str
    parameters: int
    seconds: float
    device: str
    libraries: dict[str, str]
    log: list[dict[str, float]]

    @property
    def folder(self) -> Path:
        return FOLDER / f"{self.section.world}-{self.weights[:12]}"


def find(section: TinySection, chat: ChatFormat) -> Recipe | None:
    """Return the recipe of the shipped base with this section, vocabulary and template; None if there is none."""
    wanted = (section, *format_hashes(chat))
    return next((r for r in shipped() if (r.section, r.vocabulary, r.template) == wanted), None)


def shipped() -> list[Recipe]:
    """Return the recipes of all shipped bases, in the order of their folders' names."""
    return [Recipe.model_validate_json(path.read_bytes()) for path in sorted(FOLDER.glob(f"*/{RECIPE}"))]


def adopt(recipe: Recipe, lake: Lake, chat: ChatFormat) -> str:
    """Copy the base into the lake and return its checkpoint id, which depends only on its content.

    Raises:
        LakeError: the weights differ from the recipe's.
    """
    actual = sha256_of(recipe.folder / WEIGHTS)
    if actual != recipe.weights:
        raise LakeError(
            f"{recipe.folder / WEIGHTS} is damaged: its sha256 is {actual}, but {RECIPE} there has {recipe.weights}. "
            f"Restore the file (git checkout, or reinstall etpi), or rebuild the base: {REBUILD}"
        )
    folder = Path(tempfile.mkdtemp(prefix="shipped-", dir=lake.scratch("base")))
    for path in recipe.folder.iterdir():
        if path.name != RECIPE:
            shutil.copyfile(path, folder / path.name)
    chat.save(folder)
    return lake.adopt_checkpoint(folder)[0]


def changed(recipe: Recipe, rows: Iterable[Mapping[str, Any]]) -> str | None:
    """Name the part of the recipe that changed since the base was trained; None if no change affects its weights.

    Args:
        rows: the current corpus; iterated only if the code that writes it changed.
    """
    now = recipe_code(recipe.section)
    if recipe.code.training != now.training:
        return "the code that trains it"
    if recipe.code.corpus != now.corpus and recipe.corpus != corpus_of(rows):
        return "its corpus"
    return None


def recipe_code(section: TinySection) -> Code:
    """Return the current code versions of a base with the tokenizer and template "tiny"."""
    corpus, training = tiny_base_parts(section, "tiny")
    return Code(corpus=corpus.digest, training=training.digest)


def corpus_of(rows: Iterable[Mapping[str, Any]]) -> Corpus:
    """Hash the columns of a corpus that the loss depends on, in row order."""
    digest, count, tokens = hashlib.sha256(), 0, 0
    for row in rows:
        columns = [row[name] for name in ("input_ids", "span_starts", "span_ends", "span_weights")]
        digest.update(json.dumps(columns).encode() + b"\n")
        count, tokens = count + 1, tokens + len(row["input_ids"])
    return Corpus(sha256=digest.hexdigest(), rows=count, tokens=tokens)


def format_hashes(chat: ChatFormat) -> tuple[str, str]:
    """Return the sha256 of the serialised tokenizer and of the chat template."""
    vocabulary = chat.tokenizer.backend_tokenizer.to_str()
    return hashlib.sha256(vocabulary.encode()).hexdigest(), hashlib.sha256(chat.template.encode()).hexdigest()
