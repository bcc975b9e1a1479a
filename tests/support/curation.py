"""A small lake whose assets, from tasks to served checkpoints, are made by the real code, one at a time."""

from __future__ import annotations

from pathlib import Path
from typing import Self

from etpi_assets.asset import Outcome, asset_definitions
from etpi_assets.resources import Resources
from etpi_resources.lake.lake import Lake
from tests.support.graph import write_spec

ASSETS = asset_definitions()

CURATION = ("selected_trajectories", "tito_pairs", "upweighted_dataset")

STEPS = (
    ("scored_rollouts", "good"),
    *((asset, experiment) for experiment in ("clean", "written_again") for asset in CURATION),
)
"""The assets, with their partitions, in which workers share the work."""


SUITE = 'title = "s"\nfamily = "coop_tiny_shared"\n[params]\ntrain = 24\nheldout = 24\n'


SET = """title = "t"
kind = "live"
suite = "SUITE"
split = "SPLIT"
[engine]
kind = "scripted"
teacher = "made"
skill = {SKILL}
[agent]
steering = true
AGENT
"""


EXPERIMENT = """title = "e"
rollout_sets = ["SET"]
preset = "plan_first"
select = {min_reward = "none", shortest_correct = false, exit = "any"}
[evaluate]
suite = "SUITE"
[gates]
format_exposure = 50
GATES
"""


class CurationLake:
    """A lake and a folder of specs."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.lake = folder, Lake(folder / "lake")

    @classmethod
    def with_rollouts(cls, folder: Path, more: str = "") -> Self:
        """Return one with the set `good` rolled out and scored, and the experiment `clean` on it."""
        world = cls(folder)
        world.write("suites", "small", SUITE)
        world.rollout_set("good")
        world.experiment("clean", more=more)
        world.make("tasks", "small")
        world.make_set("good")
        return world

    def write(self, kind: str, name: str, text: str) -> None:
        write_spec(self.folder / "specs", kind, name, text)

    def rollout_set(self, name: str, skill: str = "plan_first = 1.0, verbose_think = 0.5", **words: str) -> None:
        text = SET
        for word, value in {"suite": "small", "split": "train", "agent": "", **words, "skill": skill}.items():
            text = text.replace(word.upper(), value)
        self.write("rollout_sets", name, text)

    def experiment(self, name: str, of: str = "good", gates: str = "", more: str = "", suite: str = "small") -> None:
        text = EXPERIMENT.replace("SET", of).replace("SUITE", suite).replace("GATES", gates)
        base = "" if "[base]" in more else '[base]\nkind = "tiny"\n'
        self.write("experiments", name, text + base + more)

    def make(self, asset: str, key: str) -> Outcome:
        resources = Resources(lake=self.lake, specs_folder=self.folder / "specs")
        return ASSETS[asset].execute(key, resources, lambda line: None)

    def make_set(self, name: str) -> None:
        for asset in ("raw_rollouts", "scored_rollouts"):
            assert not self.make(asset, name).manifest.blocked

    def failures(self, experiment: str) -> dict[str, str]:
        """Build the data set up to the first blocked version; return its failed checks as name -> message."""
        for asset in CURATION:
            manifest = self.make(asset, experiment).manifest
            if manifest.failures:
                return {check["name"]: check["message"] for check in manifest.failures}
        return {}
