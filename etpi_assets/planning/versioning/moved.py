"""The earlier names of code that was moved or renamed, and the earlier digests of code that was rewritten and returns
the same, so that neither makes anything stale.

Code versions contain names: of modules, of definitions and of what these import. They use the right side of `[moved]`
in `rewritten.toml`, so a version that was recorded before a move stays equal to the one computed after it.

To move or rename something, add a row with today's name on the left and the name until now on the right:

- a module or a package: `"etpi_assets.asset" = "etpi_assets.asset_run"`. The row covers everything below the name:
  modules, definitions, data files, and text that names one, such as "etpi_resources.trainers.workers.sft_worker";
- a function, class or variable: `"etpi_assets.new:name" = "etpi_assets.old:name"`;
- a data file: `"etpi_assets/agent/new.md" = "etpi_assets/agent/old.md"`.

A second move changes the left side of the row; nothing ever changes its right side. A longer name overrides a shorter
one, so a module may leave a package that moves. To rename a method or a field is to edit the code that uses it: the
table has no rows for them.

A row of `[rewritten]` or `[replaces]` is valid for one text of a definition: after a later edit its digest is new.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path

_ROWS = tomllib.loads(Path(__file__).with_name("rewritten.toml").read_text("utf-8"))

MOVED: Mapping[str, str] = _ROWS["moved"]
"""Today's name -> the name in code versions."""

REWRITTEN: Mapping[tuple[str, str], Mapping[str, str]] = {
    **{(name, today): dict(zip([name], before, strict=False)) for name, (today, *before) in _ROWS["rewritten"].items()},
    **{(name, row.pop("today")): row for name, row in _ROWS["replaces"].items()},
}
"""(definition, its digest today) -> {definition: digest} that code versions contain in its place."""


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
