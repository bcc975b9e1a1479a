"""The tiny bases that come with etpi: those that shipped specs start from, of the recipe as it is, proven by hash."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from etpi_assets import tiny_bases as shipped_bases
from etpi_assets.specs.load import load_shipped
from etpi_assets.specs.rollout_set import TinySection
from etpi_resources.chat.format import load_chat_format
from etpi_resources.lake.lake import Lake, LakeError, folder_hash, sha256_of
from tests.support.tiny_bases import copy_shipped

pytestmark = pytest.mark.slow
BASES = [spec.base for spec in load_shipped().experiments.values() if spec.base.kind == "tiny"]
USED = [
    (base.tiny, load_chat_format(base.tokenizer, base.chat_template))
    for base in {(b.tiny.model_dump_json(), b.tokenizer, b.chat_template): b for b in BASES}.values()
]
WORLDS = [section.world for section, _ in USED]
SMALLEST = USED[WORLDS.index("arithmetic_tiny")]


@pytest.fixture
def copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    return copy_shipped(tmp_path, monkeypatch)


def test_every_tiny_base_of_a_shipped_spec_is_shipped_and_nothing_else():
    result = [shipped_bases.find(section, chat) for section, chat in USED]
    (package,) = shipped_bases.packages()
    folders = {path.parent.name for path in package.glob("*/model.safetensors")}
    assert {recipe.folder.name for recipe in result if recipe is not None} == folders and len(folders) == len(USED)
    chat = load_chat_format("tiny")
    for name, rollouts in load_shipped().rollout_sets.items():
        if rollouts.engine and rollouts.engine.tiny:
            assert shipped_bases.find(rollouts.engine.tiny, chat) is not None, name


@pytest.mark.parametrize(("section", "chat"), USED, ids=WORLDS)
def test_shipped_weights_are_those_of_the_recipe(section: TinySection, chat):
    recipe = shipped_bases.find(section, chat)
    assert recipe is not None and recipe.dtype == "fp32"
    assert recipe.weights == sha256_of(recipe.folder / shipped_bases.WEIGHTS)
    assert (recipe.folder / shipped_bases.WEIGHTS).stat().st_size < 4_000_000


@pytest.mark.parametrize(("section", "chat"), USED, ids=WORLDS)
def test_shipped_base_is_published_without_training(tmp_path: Path, section: TinySection, chat):
    lake, recipe = Lake(tmp_path / "data"), shipped_bases.require(section, chat)
    checkpoint = shipped_bases.adopt(recipe, lake, chat)
    folder = lake.checkpoint_dir(checkpoint)
    assert folder_hash(folder) == checkpoint and recipe.dtype == "fp32"
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert sum(p.numel() for p in model.parameters()) == recipe.parameters
    stored = load_file(folder / "model.safetensors")
    assert {tensor.dtype for tensor in stored.values()} == {torch.float32}
    assert "lm_head.weight" not in stored, "tied embeddings are stored once"
    assert AutoTokenizer.from_pretrained(folder).convert_tokens_to_ids("<|im_end|>") == chat.end_id
    assert shipped_bases.adopt(recipe, lake, chat) == checkpoint


def test_another_section_or_template_has_no_shipped_base():
    section, chat = SMALLEST
    assert shipped_bases.find(section.model_copy(update={"seed": 1}), chat) is None
    with pytest.raises(LakeError, match="arithmetic_tiny.*etpi lab tiny-bases"):
        shipped_bases.require(section, load_chat_format("tiny", "terminal"))


def test_bases_come_from_installed_packages(monkeypatch: pytest.MonkeyPatch, copied: Path, tmp_path: Path):
    section, chat = SMALLEST
    recipe, other = shipped_bases.require(section, chat), tmp_path / "other"
    other.mkdir()
    recipe.folder.rename(other / recipe.name)
    with pytest.raises(LakeError, match="coop_tiny, coop_tiny_shared, repo_fix_tiny"):
        shipped_bases.require(section, chat)
    monkeypatch.setattr(shipped_bases, "packages", lambda: [copied, other])
    assert shipped_bases.require(section, chat).folder == other / recipe.name
    monkeypatch.setattr(shipped_bases, "packages", list)
    with pytest.raises(LakeError, match="pip install etpi-tiny-bases"):
        shipped_bases.require(section, chat)


def test_damaged_weights_are_refused_by_name(tmp_path: Path, copied: Path):
    section, chat = SMALLEST
    recipe = shipped_bases.find(section, chat)
    assert recipe is not None and recipe.folder.parent == copied
    weights = recipe.folder / shipped_bases.WEIGHTS
    weights.write_bytes(weights.read_bytes()[:-1] + b"\x00")
    with pytest.raises(LakeError, match=r"model\.safetensors .*etpi lab tiny-bases"):
        shipped_bases.adopt(recipe, Lake(tmp_path / "data"), chat)
