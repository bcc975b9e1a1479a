"""The export `model`: a folder that `from_pretrained` loads, with the published card and its lineage."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path

import pytest

from etpi_assets.exports import export
from etpi_assets.resources import Resources
from etpi_resources.chat.format import load_chat_format
from etpi_resources.lake.check_outcome import CheckOutcome
from etpi_resources.lake.lake import DamagedFile, Lake, LakeError, MissingInput
from tests.support.graph import small_world
from tests.support.models import make_base
from tests.support.small_lake import put


class Trained:
    """A lake with an experiment whose trained checkpoints are the published folders."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.lake = folder, Lake(folder / "lake")
        self.resources = Resources(lake=self.lake, specs_folder=small_world(folder / "specs"))
        self.paths: list[str] = []

    def put(self, role: str, *folders: Path, checks: tuple[CheckOutcome, ...] = ()) -> None:
        """Publish a final and an intermediate checkpoint per seed."""
        rows = []
        for seed, folder in enumerate(folders):
            identity, _ = self.lake.adopt_checkpoint(folder)
            row = {"checkpoint_id": identity, "experiment": "first", "role": role, "seed": seed, "method": "full"}
            row |= {"path": f"checkpoints/{identity}"}
            self.paths.append(row["path"])
            rows += [row | {"step": 5, "final": False}, row | {"step": 10, "final": True}]
        put(self.lake, f"{role}_checkpoint", "first", {"checkpoints": rows}, checks=checks)

    def put_card(self, text: str) -> Path:
        """Publish a model card; return its file."""
        path = self.lake.root / "reports/first/README.md"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        sha256 = hashlib.sha256(text.encode()).hexdigest()
        row = {"experiment": "first", "kind": "model_card", "path": "reports/first/README.md", "sha256": sha256}
        put(self.lake, "model_card", "first", {"reports": [row | {"bytes": len(text)}]})
        return path

    def export(self, format: str) -> Path:
        """Export the experiment to the folder `out`."""
        export("first", format, self.folder / "out", self.resources)
        return self.folder / "out"


CARD = """# first

folder = "{path}"  # relative to the lake's root; a full checkpoint, no PEFT needed
"""


@pytest.fixture
def trained(tmp_path: Path) -> Trained:
    return Trained(tmp_path)


def _saved(folder: Path, name: str) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_text(name)
    return folder


def test_exported_folder_loads_and_its_card_names_it_and_the_data_versions(trained, tmp_path):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    trained.put("sft", make_base(tmp_path / "model", load_chat_format("tiny")))
    trained.put("rl")
    trained.put_card(CARD.format(path=trained.paths[0]))
    folder = trained.export("model")
    stored = trained.lake.root / trained.paths[0]
    model, expected = (AutoModelForCausalLM.from_pretrained(place).state_dict() for place in (folder, stored))
    assert model.keys() == expected.keys() and all((model[name] == expected[name]).all() for name in expected)
    assert AutoTokenizer.from_pretrained(folder).get_vocab() == AutoTokenizer.from_pretrained(stored).get_vocab()
    card = (folder / "README.md").read_text()
    assert card.startswith("# first\n") and 'folder = "."  # this folder' in card and trained.paths[0] not in card
    assert "## Lineage" in card and "| experiment | `first` |" in card
    assert "| `sft_checkpoint/first` |" in card and "SELECT * FROM lineage WHERE experiment = 'first'" in card


def test_structure_of_thoughts_is_exported_as_a_grammar(trained, tmp_path):
    trained.put("sft", _saved(tmp_path / "a", "sft"))
    trained.put("rl")
    trained.put_card("# first\n")
    assert not (trained.export("model") / "grammar.gbnf").exists()
    spec = trained.folder / "specs" / "experiments" / "first.toml"
    spec.write_text(spec.read_text() + '\n[metrics.scoring.structure]\nslots = ["STATE", "ACTION"]\n')
    shutil.rmtree(trained.folder / "out")
    trained.resources = Resources(lake=trained.lake, specs_folder=trained.folder / "specs")
    text = (trained.export("model") / "grammar.gbnf").read_text()
    assert text.startswith('root ::= "<think>\\nSTATE: " line-any "\\nACTION: "') and "rest ::=" in text


def test_last_stage_has_a_folder_for_each_seed(trained, tmp_path):
    trained.put("sft", _saved(tmp_path / "a", "sft"))
    trained.put("rl", _saved(tmp_path / "b", "rl 0"), _saved(tmp_path / "c", "rl 1"))
    trained.put_card("# first\n")
    folder = trained.export("model")
    assert [(folder / f"seed{seed}/model.safetensors").read_text() for seed in (0, 1)] == ["rl 0", "rl 1"]
    note = json.loads((folder / "manifest.json").read_text())["notes"][0]
    assert "subfolder='seed0'" in note


def test_no_checkpoint_a_missing_card_and_a_changed_one_are_refused(trained, tmp_path):
    trained.put("sft")
    trained.put("rl")
    with pytest.raises(MissingInput, match="model_card"):
        trained.export("model")
    path = trained.put_card("# first\n")
    with pytest.raises(LakeError, match=r"train\.method and rl\.method"):
        trained.export("model")
    trained.put("sft", _saved(tmp_path / "a", "sft"))
    path.write_text("# second\n")
    with pytest.raises(DamagedFile, match="README.md"):
        trained.export("model")
    assert not (tmp_path / "out").exists()
