"""Tiny bases that are trained again replace those that etpi ships."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from etpi_assets import tiny_bases as shipped_bases
from etpi_assets.specs.rollout_set import TinySection
from etpi_assets.specs.section import SpecError
from etpi_lab.tiny_bases import rebuild as rebuild_bases
from etpi_lab.tiny_bases import recipe as tiny_base
from etpi_resources.chat.format import ChatFormat
from etpi_resources.lake.lake import sha256_of
from tests.support.tiny_bases import copy_shipped

USED = rebuild_bases.used_by_shipped_specs()
WORLDS = [section.world for section, _ in USED]
SMALL_CORPORA = {
    "arithmetic_tiny": "d304d91c2fddb7e8",
    "coop_tiny": "d33334c0e8d69329",
    "coop_tiny_shared": "1820436e9c469fce",
    "repo_fix_tiny": "538c7e8c426b9074",
}
"""World -> the beginning of the hash of its corpus of 120 conversations and 40 exercises."""
SMALLEST = next((section, chat) for section, chat in USED if section.world == "arithmetic_tiny")


@pytest.fixture
def copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    return copy_shipped(tmp_path, monkeypatch)


def test_every_world_with_a_corpus_has_a_base_and_another_is_refused():
    assert sorted(section.world for section, _ in USED) == sorted(tiny_base.WORLDS)
    with pytest.raises(SpecError, match="'moon'.*arithmetic_tiny"):
        rebuild_bases.rebuild_worlds(["moon"])


def test_rebuilding_replaces_the_shipped_base(copied: Path, tmp_path: Path):
    """Without training: the files of another run stand in for it."""
    section, chat = SMALLEST
    before = shipped_bases.find(section, chat)
    assert before is not None
    model = tmp_path / "model"
    replaced = before.folder
    shutil.copytree(replaced, model)
    weights = load_file(model / shipped_bases.WEIGHTS)
    next(iter(weights.values())).view(-1)[0] += 1
    save_file(weights, model / shipped_bases.WEIGHTS, metadata={"format": "pt"})
    report = before.model_dump(mode="json")
    after = rebuild_bases.ship(section, chat, report, model)
    assert not replaced.exists() and shipped_bases.find(section, chat) == after
    assert after.folder.parent == copied and after.weights == sha256_of(after.folder / shipped_bases.WEIGHTS)
    bad = report | {"log": [line | {"loss": 5.0} for line in report["log"]]}
    with pytest.raises(RuntimeError, match=section.world):
        rebuild_bases.ship(section, chat, bad, model)
    assert shipped_bases.find(section, chat) == after


@pytest.mark.parametrize(("section", "chat"), USED, ids=WORLDS)
def test_small_corpora_are_unchanged(section: TinySection, chat: ChatFormat):
    """If this fails, the whole corpora changed too: run `etpi lab tiny-bases`, and write the new hashes here."""
    small = section.model_copy(update={"conversations": 120, "exercises": 40})
    assert tiny_base.corpus_of(tiny_base.corpus_rows(small, chat)).sha256[:16] == SMALL_CORPORA[section.world]


@pytest.mark.long
@pytest.mark.parametrize(("section", "chat"), USED, ids=WORLDS)
def test_shipped_bases_were_trained_on_the_current_corpus(section: TinySection, chat: ChatFormat):
    """If this fails after a change of the corpus, run `etpi lab tiny-bases`."""
    recipe = shipped_bases.find(section, chat)
    assert recipe is not None and recipe.corpus == tiny_base.corpus_of(tiny_base.corpus_rows(section, chat))
