"""The tiny bases that come with etpi: those that shipped specs start from, of the recipe as it is, proven by hash."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from etpi_assets.specs.load import load_shipped
from etpi_assets.specs.rollout_set import TinySection
from etpi_assets.tiny_bases import recipe as tiny_base
from etpi_assets.tiny_bases import shipped as shipped_bases
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
def no_training(monkeypatch: pytest.MonkeyPatch):
    def refuse(*arguments, **named):
        raise AssertionError("a shipped base was trained again")

    monkeypatch.setattr(tiny_base, "run_worker", refuse)


@pytest.fixture
def copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    return copy_shipped(tmp_path, monkeypatch)


def test_every_tiny_base_of_a_shipped_spec_is_shipped_and_nothing_else():
    assert sorted(WORLDS) == sorted(tiny_base.WORLDS)
    result = [shipped_bases.find(section, chat) for section, chat in USED]
    folders = {path.parent.name for path in shipped_bases.FOLDER.glob("*/model.safetensors")}
    assert {recipe.folder.name for recipe in result if recipe is not None} == folders and len(folders) == len(USED)
    chat = load_chat_format("tiny")
    for name, rollouts in load_shipped().rollout_sets.items():
        if rollouts.engine and rollouts.engine.tiny:
            assert shipped_bases.find(rollouts.engine.tiny, chat) is not None, name


@pytest.mark.parametrize(("section", "chat"), USED, ids=WORLDS)
def test_shipped_weights_match_the_current_recipe(section: TinySection, chat):
    """Where this fails after a change of the corpus or of the code that trains on it: run `etpi lab tiny-bases`."""
    recipe = shipped_bases.find(section, chat)
    assert recipe is not None and recipe.dtype == "fp32"
    assert recipe.corpus == shipped_bases.corpus_of(tiny_base.corpus_rows(section, chat))
    assert recipe.code.training == shipped_bases.recipe_code(section).training
    assert recipe.weights == sha256_of(recipe.folder / shipped_bases.WEIGHTS)
    assert (recipe.folder / shipped_bases.WEIGHTS).stat().st_size < 4_000_000


@pytest.mark.usefixtures("no_training")
@pytest.mark.parametrize(("section", "chat"), USED, ids=WORLDS)
def test_shipped_base_is_published_without_training(tmp_path: Path, section: TinySection, chat):
    lake, said = Lake(tmp_path / "data"), []
    report = tiny_base.build(lake, section, chat, "code", echo=said.append)
    assert "shipped with etpi" in said[0] and tiny_base.check_trained(report).passed and report["dtype"] == "fp32"
    folder = lake.checkpoint_dir(report["checkpoint_id"])
    assert folder_hash(folder) == report["checkpoint_id"]
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert sum(p.numel() for p in model.parameters()) == report["parameters"]
    stored = load_file(folder / "model.safetensors")
    assert {tensor.dtype for tensor in stored.values()} == {torch.float32}
    assert "lm_head.weight" not in stored, "tied embeddings are stored once"
    assert AutoTokenizer.from_pretrained(folder).convert_tokens_to_ids("<|im_end|>") == chat.end_id
    again = tiny_base.build(lake, section, chat, "other code", echo=said.append)
    assert again["checkpoint_id"] == report["checkpoint_id"]


def test_another_section_or_template_has_no_shipped_base():
    section, chat = SMALLEST
    assert shipped_bases.find(section.model_copy(update={"seed": 1}), chat) is None
    assert shipped_bases.find(section, load_chat_format("tiny", "terminal")) is None


@pytest.mark.usefixtures("no_training")
def test_damaged_weights_are_refused_by_name(tmp_path: Path, copied: Path):
    section, chat = SMALLEST
    recipe = shipped_bases.find(section, chat)
    assert recipe is not None and recipe.folder.parent == copied
    weights = recipe.folder / shipped_bases.WEIGHTS
    weights.write_bytes(weights.read_bytes()[:-1] + b"\x00")
    with pytest.raises(LakeError, match=r"model\.safetensors is damaged.*etpi lab tiny-bases"):
        tiny_base.build(Lake(tmp_path / "data"), section, chat, "code", echo=lambda line: None)


def test_a_change_of_the_recipe_warns_and_names_the_command(monkeypatch: pytest.MonkeyPatch):
    section, chat = SMALLEST
    assert tiny_base.recipe_unchanged(section, chat).passed
    now = shipped_bases.recipe_code(section)

    def outcome(**changes: str):
        monkeypatch.setattr(shipped_bases, "recipe_code", lambda section: now.model_copy(update=changes))
        return tiny_base.recipe_unchanged(section, chat)

    assert outcome(corpus="other").passed, "other code that writes the same corpus"
    stale = outcome(training="other")
    assert not stale.passed and not stale.blocking and "`etpi lab tiny-bases`" in stale.message
    rows = list(tiny_base.corpus_rows(section, chat))
    monkeypatch.setattr(tiny_base, "corpus_rows", lambda section, chat: rows[:-1])
    stale = outcome(corpus="other")
    assert not stale.passed and "before its corpus changed" in stale.message
