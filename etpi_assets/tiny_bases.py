"""Tiny bases of installed packages: find them, verify their bytes, and copy them to the lake.

A base is a folder, named after its world and the hash of its weights, in a package that an entry point of the group
`etpi.tiny_bases` names. etpi's own are those of the distribution etpi-tiny-bases; the lab trains them.
"""

from __future__ import annotations

import hashlib
import shutil
import tempfile
from importlib.metadata import entry_points
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import BaseModel, ConfigDict

from etpi_assets.specs.rollout_set import TinySection
from etpi_resources.lake.lake import Lake, LakeError, sha256_of
from etpi_resources.trainers.precision import Dtype

if TYPE_CHECKING:
    from etpi_resources.chat.format import ChatFormat

PACKAGES = "etpi.tiny_bases"
"""The group of entry points that name packages of tiny bases."""
RECIPE = "recipe.json"
WEIGHTS = "model.safetensors"
REBUILD = "etpi lab tiny-bases"
"""The command that rebuilds them in a checkout."""
INSTALL = "pip install etpi-tiny-bases"


class Corpus(BaseModel):
    """Identity of a training corpus: sha256 of its rows (see the lab's `corpus_of`), numbers of rows and tokens."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    sha256: str
    rows: int
    tokens: int


class Recipe(BaseModel):
    """`recipe.json`: the inputs of a base, the libraries that trained it, and its training log.

    Attributes:
        section, vocabulary, template: identify the base; the last two are sha256.
        weights: sha256 of `model.safetensors`.
        seconds: wall time of the training.
        log: lines of the training log, see the worker in the lab.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    section: TinySection
    vocabulary: str
    template: str
    corpus: Corpus
    dtype: Dtype
    weights: str
    parameters: int
    seconds: float
    device: str
    libraries: dict[str, str]
    log: list[dict[str, float]]

    @property
    def name(self) -> str:
        """The name of the base's folder."""
        return f"{self.section.world}-{self.weights[:12]}"

    @property
    def folder(self) -> Path:
        """The base's folder in the package that has it. Raises StopIteration: no installed package has it."""
        return next(folder for folder in packages() if (folder / self.name).is_dir()) / self.name


def find(section: TinySection, chat: ChatFormat) -> Recipe | None:
    """Return the recipe of the shipped base with this section, vocabulary and template; None if there is none."""
    wanted = (section, *format_hashes(chat))
    return next((r for r in shipped() if (r.section, r.vocabulary, r.template) == wanted), None)


def require(section: TinySection, chat: ChatFormat) -> Recipe:
    """Return the recipe of the shipped base.

    Raises:
        LakeError: there is none.
    """
    if (recipe := find(section, chat)) is not None:
        return recipe
    worlds = sorted({base.section.world for base in shipped()})
    if not worlds:
        raise LakeError(f"no tiny base is installed, and this spec starts from that of {section.world}: {INSTALL}")
    raise LakeError(
        f"no tiny base has this [base.tiny] of {section.world}, this tokenizer and this template; there are bases of "
        f"{', '.join(worlds)}. Remove the keys that differ from a shipped experiment's, or train the base with the lab "
        f"(`{REBUILD}`)"
    )


def shipped() -> list[Recipe]:
    """Return the recipes of all installed bases, in the order of packages and of their folders' names."""
    files = (path for folder in packages() for path in sorted(folder.glob(f"*/{RECIPE}")))
    return [Recipe.model_validate_json(path.read_bytes()) for path in files]


def packages() -> list[Path]:
    """Return the folders of the packages with tiny bases, in the order of their names; none is imported."""
    specs = (find_spec(name) for name in sorted({point.module for point in entry_points(group=PACKAGES)}))
    return [Path(place) for spec in specs if spec for place in spec.submodule_search_locations or ()]


def adopt(recipe: Recipe, lake: Lake, chat: ChatFormat) -> str:
    """Copy the base into the lake and return its checkpoint id, which depends only on its content.

    Raises:
        LakeError: the weights differ from the recipe's.
    """
    source = recipe.folder
    actual = sha256_of(source / WEIGHTS)
    if actual != recipe.weights:
        raise LakeError(
            f"{source / WEIGHTS} is damaged: its sha256 is {actual}, but {RECIPE} there has {recipe.weights}. "
            f"Restore the file (git checkout, or install its package again), or rebuild the base: {REBUILD}"
        )
    folder = Path(tempfile.mkdtemp(prefix="shipped-", dir=lake.scratch("base")))
    for path in source.iterdir():
        if path.name != RECIPE:
            shutil.copyfile(path, folder / path.name)
    chat.save(folder)
    return lake.adopt_checkpoint(folder)[0]


def format_hashes(chat: ChatFormat) -> tuple[str, str]:
    """Return the sha256 of the serialised tokenizer and of the chat template."""
    vocabulary = chat.tokenizer.backend_tokenizer.to_str()
    return hashlib.sha256(vocabulary.encode()).hexdigest(), hashlib.sha256(chat.template.encode()).hexdigest()
