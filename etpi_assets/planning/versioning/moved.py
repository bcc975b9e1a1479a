"""The earlier names of code that was moved or renamed, so that a move makes nothing stale.

Code versions contain names: of modules, of definitions and of what these import. They use the right side of `MOVED`, so
a version that was recorded before a move stays equal to the one computed after it.

To move or rename something, add a row with today's name on the left and the name until now on the right:

- a module or a package: `"etpi_assets.asset": "etpi_assets.asset_run"`. The row covers everything below the name:
  modules, definitions, data files, and text that names one, such as "etpi_resources.trainers.workers.sft_worker";
- a function, class or variable: `"etpi_assets.new:name": "etpi_assets.old:name"`;
- a data file: `"etpi_assets/agent/new.md": "etpi_assets/agent/old.md"`.

A second move changes the left side of the row; nothing ever changes its right side. A longer name overrides a shorter
one, so a module may leave a package that moves. To rename a method or a field is to edit the code that uses it: the
table has no rows for them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

MOVED: Mapping[str, str] = {
    "etpi_assets.planning.planner": "etpi_assets.planner",
    "etpi_assets.planning.versioning": "etpi_assets.versioning",
    "etpi_assets.planning.versioning.definitions": "etpi_assets.versioning.source",
    "etpi_resources.charts:frame": "etpi_resources.charts:_frame",
    "etpi_resources.charts:line_between": "etpi_resources.charts:_line",
    "etpi_resources.charts:text_at": "etpi_resources.charts:_text",
    "etpi_resources.frames": "etpi_assets.frames.convert",
    "etpi_resources.sandboxes.downloads": "etpi_resources.downloads",
    "etpi_assets.agent.loop:AgentLoop": "etpi_assets.agent.loop:_AgentLoop",
    "etpi_assets.agent.loop:AgentState": "etpi_assets.agent.loop:_AgentState",
    "etpi_assets.agent.loop:start_files": "etpi_assets.agent.loop:_start_files",
    "etpi_assets.asset": "etpi_assets.asset_run",
    "etpi_assets.asset:AssetRun": "etpi_assets.materialize:AssetRun",
    "etpi_assets.asset:Produced": "etpi_assets.materialize:Produced",
    "etpi_assets.asset:asset": "etpi_assets.materialize:etpi_asset",
    "etpi_assets.curation.dataset_blocks:DatasetFactory": "etpi_assets.curation.dataset_blocks:DatasetRecipe",
    "etpi_assets.curation.leaks:_LeakFactory": "etpi_assets.curation.leaks:_LeakRecipe",
    "etpi_assets.curation.pair_blocks:PairFactory": "etpi_assets.curation.pair_blocks:PairRecipe",
    "etpi_assets.resolved_specs.assets": "etpi_assets.specs.assets",
    "etpi_assets.scoring.score_checks": "etpi_assets.scoring.checks",
    "etpi_assets.tasks.task_checks": "etpi_assets.tasks.checks",
    "etpi_assets.trajectories.rollout_checks": "etpi_assets.trajectories.checks",
    "etpi_assets.worlds.coop_tiny_shared.features": "etpi_assets.worlds.coop_tiny.features",
    "etpi_assets.worlds.coop_tiny_shared.judge": "etpi_assets.worlds.coop_tiny.judge",
    "etpi_assets.worlds.coop_tiny_shared.merge": "etpi_assets.worlds.coop_tiny.merge",
    "etpi_resources.backend:backend": "etpi_resources.cluster.settings:cluster",
    "etpi_resources.lake.check_outcome": "etpi_resources.lake.checks",
    "etpi_resources.trainers.precision": "etpi_resources.trainers.workers.precision",
}
"""Today's name -> the name in code versions."""


@dataclass(frozen=True)
class Import:
    """The target of an imported name: a module, or `attribute` of the module."""

    module: str
    attribute: str | None = None

    def __str__(self) -> str:
        return f"{self.module}.{self.attribute}" if self.attribute else self.module


@dataclass(frozen=True)
class Moves:
    """Translate names by a table like `MOVED`."""

    rows: Mapping[str, str] = field(default_factory=lambda: MOVED)

    @cached_property
    def _below(self) -> dict[str, str]:
        """The rows of modules and packages, longest first, as dotted names and as paths."""
        names = sorted((name for name in self.rows if ":" not in name and "/" not in name), key=len, reverse=True)
        paths = {name.replace(".", "/"): self.rows[name].replace(".", "/") for name in names}
        return {name: self.rows[name] for name in names} | paths

    @cached_property
    def _starts(self) -> tuple[str, ...]:
        return tuple({name.partition(":")[0] for name in self.rows} | self._below.keys())

    def original(self, name: str) -> str:
        """Return the name in code versions of a module, a file or a "module:definition"; another text is unchanged."""
        if not name.startswith(self._starts):
            return name
        if name in self.rows:
            return self.rows[name]
        if ":" in name:
            module, _, definition = name.partition(":")
            head, dot, method = definition.partition(".")
            moved = self.rows.get(f"{module}:{head}")
            return moved + dot + method if moved else f"{self.original(module)}:{definition}"
        for start, old in self._below.items():
            if name == start or name.startswith((f"{start}.", f"{start}/")):
                return old + name[len(start) :]
        return name

    def original_import(self, target: Import) -> str:
        """Return the dotted name, in code versions, of an import's target."""
        moved = self.rows.get(f"{target.module}:{target.attribute}")
        return moved.replace(":", ".") if moved else self.original(str(target))

    def today(self, name: str) -> str:
        """Return today's name of a module or file that code versions name, for people to read."""
        back = {old: new for new, old in self.rows.items() if ":" not in new}
        return Moves(back).original(name)


@dataclass(frozen=True)
class Scope:
    """The names of one file.

    Attributes:
        defined: the names of its definitions.
        imports: imported name -> its targets.
    """

    module: str
    defined: frozenset[str]
    imports: Mapping[str, set[Import]]
    moves: Moves

    def original(self, name: str) -> tuple[str, str]:
        """Return a definition's (module, name) in code versions."""
        module, _, definition = self.moves.original(f"{self.module}:{name}").partition(":")
        return module, definition

    def without(self, imported: str) -> Scope:
        """Return the scope without an imported name."""
        return replace(self, imports={name: targets for name, targets in self.imports.items() if name != imported})

    def bound(self, names: Iterable[str], home: str) -> set[str]:
        """Return "name=target" for the names that a definition of the module `home` gets from other modules."""
        bound = set()
        for name in names:
            for target in self.imports.get(name, ()):
                text = self.moves.original_import(target)
                if target.module == self.module or text.rpartition(".")[0] != home:  # else its module was this one
                    bound.add(f"{self.renamed(name)}={text}")
            if self.moves.rows and name in self.defined and (original := self.original(name))[0] != home:
                bound.add(f"{original[1]}={'.'.join(original)}")
        return bound

    def renamed(self, name: str) -> str:
        """Return the earlier form of a name; an alias keeps its form."""
        if not self.moves.rows:
            return name
        for target in self.imports.get(name, ()):
            if str(target).rpartition(".")[2] == name:
                return self.moves.original_import(target).rpartition(".")[2]
        return self.original(name)[1] if name in self.defined else name
