"""A small world for tests of the glue: specs in a folder, and definitions whose results follow from what they read.

Every table of a made version has one row, whose first text column is a digest of the sections and the input rows: equal
inputs give equal versions, as real transforms do, and nothing takes time.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory

import dagster as dg
import pyarrow as pa

from etpi_assets.asset import AssetDefinition, AssetRun, Input, Produced, asset_definitions
from etpi_assets.graph import GRAPH
from etpi_assets.orchestration.experiment_inputs import experiment_inputs
from etpi_assets.orchestration.jobs import build_jobs
from etpi_assets.orchestration.materialize import build_asset
from etpi_assets.resources import Resources
from etpi_resources.lake.check_outcome import CheckOutcome
from etpi_resources.lake.lake import Lake
from etpi_resources.lake.schemas import TABLES, empty, from_rows

SUITE = 'title = "s"\nfamily = "coop_tiny_shared"\n'
ROLLOUT_SET = 'title = "r"\nkind = "live"\nsuite = "small"\nengine = {kind = "scripted", teacher = "t"}\n'
EXPERIMENT = 'title = "e"\nrollout_sets = ["few"]\nevaluate = {suite = "small"}\nbase = {kind = "tiny"}\n'
_MADE = TemporaryDirectory(prefix="etpi-made-")
"""Lakes that worlds begin with."""


def write_spec(folder: Path, kind: str, name: str, text: str) -> Path:
    """Write `<folder>/<kind>/<name>.toml`."""
    path = folder / kind / f"{name}.toml"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def small_world(folder: Path) -> Path:
    """One suite, one rollout set, two experiments on it."""
    write_spec(folder, "suites", "small", SUITE)
    write_spec(folder, "rollout_sets", "few", ROLLOUT_SET)
    write_spec(folder, "experiments", "first", EXPERIMENT)
    write_spec(folder, "experiments", "second", EXPERIMENT)
    return folder


class World:
    """A lake, a folder of specs, and a definition for every asset.

    Attributes:
        made: (asset, key) of everything computed, in order.
        code: the code versions of the fixture of that name.
        failing: assets whose check "sound" fails.
    """

    def __init__(self, folder: Path, code: Mapping[str, str] | None = None) -> None:
        self.code = code
        self.specs_folder = small_world(folder / "specs")
        self.lake = Lake(folder / "data")
        self.made: list[tuple[str, str]] = []
        self.failing: set[str] = set()
        self.changed: set[str] = set()
        real = {name: asset for name, asset in asset_definitions().items() if GRAPH[name].group == "specs"}
        self.assets: dict[str, AssetDefinition] = {name: real.get(name) or self._definition(name) for name in GRAPH}

    def resources(self) -> Resources:
        """As a new run would have them: the specs are read anew."""
        return Resources(lake=self.lake, specs_folder=self.specs_folder)

    def definitions(self) -> dg.Definitions:
        specs = self.resources().specs
        return dg.Definitions(
            assets=[
                experiment_inputs(self.assets.values(), specs),
                *(build_asset(definition, specs) for definition in self.assets.values()),
            ],
            jobs=build_jobs(specs),
            resources={"etpi": self.resources()},
            executor=dg.in_process_executor,
        )

    def make(self, name: str, key: str, rebuild: Collection[str] = ()):
        """Materialize one partition without Dagster."""
        return self.assets[name].execute(key, self.resources(), log=lambda line: None, rebuild=frozenset(rebuild))

    def change_result(self, name: str) -> None:
        """Have an asset give other rows from now on, as changed code does."""
        self.changed.add(name)

    def make_all(self, experiment: str = "first") -> list[tuple[str, str]]:
        """Materialize everything an experiment rests on and it; what was computed."""
        if not (self.made or self.failing or self.changed or self.lake.refs()):
            return self._make_all_once(experiment)
        return self._make_all(experiment)

    def _make_all_once(self, experiment: str) -> list[tuple[str, str]]:
        """Copy the lake of an earlier world with the same specs and code, because many tests begin with it."""
        specs = {path.relative_to(self.specs_folder): path.read_text() for path in self.specs_folder.rglob("*.toml")}
        stored = Path(_MADE.name, hashlib.sha256(repr((experiment, specs, self.code)).encode()).hexdigest())
        made = stored / "made.json"
        if not made.exists():
            self._make_all(experiment)
            shutil.copytree(self.lake.root, stored / "data")
            made.write_text(json.dumps(self.made))
        else:
            shutil.copytree(stored / "data", self.lake.root, dirs_exist_ok=True)
            self.made += map(tuple, json.loads(made.read_text()))
        return [pair for pair in self.made if not pair[0].endswith("_spec")]

    def _make_all(self, experiment: str) -> list[tuple[str, str]]:
        before = len(self.made)
        keys = {"suite": "small", "rollout_set": "few", "experiment": experiment, "all": "all"}
        for name, node in GRAPH.items():
            self.make(name, keys[node.set])
        return [pair for pair in self.made[before:] if not pair[0].endswith("_spec")]

    def _definition(self, name: str) -> AssetDefinition:
        def function(run: AssetRun, **inputs: Input) -> Produced:
            self.made.append((name, run.key))
            return Produced(
                tables={
                    t: _one_row(t, _digest(run, name, inputs) + "x" * (name in self.changed)) for t in run.node.tables
                },
                checks=[CheckOutcome("sound", name not in self.failing, "row 3 is unsound; mend it", True, {"row": 3})],
                metadata={"plot": "a plot"},
            )

        return AssetDefinition(GRAPH[name], function, ("sound",))


def _digest(run: AssetRun, name: str, inputs: Mapping[str, Input]) -> str:
    sections = run.specs.sections(run.node.set, run.key, run.node.sections) if run.spec else {}
    read = [each.read(table).to_pylist() for asset, each in inputs.items() for table in GRAPH[asset].tables]
    return hashlib.sha256(json.dumps([name, sections, read], default=str).encode()).hexdigest()[:12]


def _one_row(table: str, digest: str) -> pa.Table:
    column = next((n for n, t, _ in TABLES[table].columns if t == pa.string()), None)
    return from_rows(table, [{column: digest}]) if column else empty(table)


def failures(result: dg.ExecuteInProcessResult) -> list[str]:
    """What the failed steps said."""
    said: Iterable[str | None] = (
        event.step_failure_data.user_failure_data.description
        for event in result.all_events
        if event.is_step_failure and event.step_failure_data.user_failure_data
    )
    return [text for text in said if text]


Run = Callable[..., dg.ExecuteInProcessResult]
