"""A lake with an experiment `first` that has trained checkpoints and a model card, for exports of models."""

from __future__ import annotations

import hashlib
from pathlib import Path

from etpi_assets.exports import export
from etpi_assets.resources import Resources
from etpi_resources.lake.check_outcome import CheckOutcome
from etpi_resources.lake.lake import Lake
from tests.support.graph import small_world
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
        put(self.lake, f"{role}_checkpoint", "first", {"checkpoints": rows}, checks)

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
