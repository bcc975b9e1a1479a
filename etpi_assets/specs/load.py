"""From TOML files to specs: the shipped folder, the user's, `extends`, and errors a person can act on.

Belongs here: finding, merging, validating and hashing specs, and which spec names which. Does not belong here: what a
spec may say (`models`), or what follows from it.

A spec is `<folder>/{suites,rollout_sets,experiments}/<name>.toml`; its name is its partition key. The folder named by
`ETPI_SPECS` adds to the shipped ones and overrides them by name. An invalid file keeps its name and its error, so that
the others load and a run of it can say what is wrong.
"""

from __future__ import annotations

import difflib
import os
import re
import tomllib
import typing
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from etpi_assets.specs.experiment import ExperimentSpec
from etpi_assets.specs.rollout_set import RolloutSetSpec
from etpi_assets.specs.suite import SuiteSpec
from etpi_resources.hashes import json_hash

SHIPPED = Path(__file__).resolve().parent
FOLDERS = {"suite": "suites", "rollout_set": "rollout_sets", "experiment": "experiments"}
MODELS: dict[str, type[BaseModel]] = {"suite": SuiteSpec, "rollout_set": RolloutSetSpec, "experiment": ExperimentSpec}

AnySpec = SuiteSpec | RolloutSetSpec | ExperimentSpec


class SpecError(ValueError):
    """A spec cannot be used; the message names the file, the key and the remedy."""


@dataclass(frozen=True)
class Entry:
    """One spec file: the spec, or why it is none."""

    set: str
    name: str
    file: Path
    spec: AnySpec | None
    error: SpecError | None = None


class Specs:
    """Every spec of the three sets, as of one reading of the folders."""

    def __init__(self, entries: Iterable[Entry]) -> None:
        self._entries = {(entry.set, entry.name): entry for entry in entries}

    @property
    def suites(self) -> dict[str, SuiteSpec]:
        """The valid suites by name, sorted."""
        return {k: spec for k in self.keys("suite") if isinstance(spec := self._entries["suite", k].spec, SuiteSpec)}

    @property
    def rollout_sets(self) -> dict[str, RolloutSetSpec]:
        """The valid rollout sets by name, sorted."""
        return {
            k: spec
            for k in self.keys("rollout_set")
            if isinstance(spec := self._entries["rollout_set", k].spec, RolloutSetSpec)
        }

    @property
    def experiments(self) -> dict[str, ExperimentSpec]:
        """The valid experiments by name, sorted."""
        return {
            k: spec
            for k in self.keys("experiment")
            if isinstance(spec := self._entries["experiment", k].spec, ExperimentSpec)
        }

    def keys(self, set: str) -> list[str]:
        """The names of a set, invalid ones included, sorted."""
        return sorted(name for kind, name in self._entries if kind == set)

    def entry(self, set: str, key: str) -> Entry:
        """Raises SpecError with the valid names where there is no such spec."""
        if (found := self._entries.get((set, key))) is None:
            raise SpecError(unknown_name(set, key, self.keys(set)))
        return found

    def get(self, set: str, key: str) -> AnySpec:
        """The spec. Raises SpecError where it is unknown or invalid."""
        entry = self.entry(set, key)
        if entry.spec is None:
            raise entry.error or SpecError(f"{entry.file}: not a valid spec")
        return entry.spec

    def sections(self, set: str, key: str, names: Sequence[str]) -> dict[str, Any]:
        """The named keys of the resolved spec ("train", "evaluate.suite"), all of it for "*"; for an asset without
        partitions, those keys of every valid experiment. A key below a section that is null is null, and so is one that
        is omitted (`Omitted`)."""
        if set == "all":
            found = self.experiments if names else {}
            dumped = {name: spec.model_dump(mode="json") for name, spec in found.items()}
            return {name: {section: part(spec, section) for section in names} for name, spec in dumped.items()}
        spec = self.get(set, key).model_dump(mode="json") if names else {}
        return spec if tuple(names) == ("*",) else {name: part(spec, name) for name in names}

    def section_hash(self, set: str, key: str, names: Sequence[str]) -> str:
        """sha256 (hex) over `sections`."""
        return json_hash(self.sections(set, key, names))

    def upstream_keys(self, set: str, key: str, upstream: str) -> list[str]:
        """The keys of another set that a spec draws on, in the order it names them; empty for an invalid spec."""
        if set == upstream:
            return [key]
        spec = self._entries[(set, key)].spec if (set, key) in self._entries else None
        if isinstance(spec, RolloutSetSpec) and upstream == "suite":
            return [spec.suite] if spec.suite else []
        if isinstance(spec, ExperimentSpec) and upstream == "rollout_set":
            return list(dict.fromkeys(spec.rollout_sets))
        if isinstance(spec, ExperimentSpec) and upstream == "suite":
            suites = [s for name in spec.rollout_sets for s in self.upstream_keys("rollout_set", name, "suite")]
            named = [spec.rl.suite, spec.evaluate.suite if spec.evaluate else None]
            return list(dict.fromkeys([*suites, *(name for name in named if name)]))
        return []


def part(spec: Mapping[str, Any], name: str) -> Any:
    """The value of a dotted key of a resolved spec; None below a section that is None, and for an omitted one."""
    value: Any = spec
    for key in name.split("."):
        value = None if value is None else value.get(key)
    return value


def load_specs(user_folder: Path | None = None) -> Specs:
    """Read the shipped specs and those of `user_folder` (default: `$ETPI_SPECS`, where set).

    Raises:
        SpecError: the user's folder does not exist. What is wrong with a single file stays with that file.
    """
    if user_folder is None and (named := os.environ.get("ETPI_SPECS")):
        user_folder = Path(named)
    if user_folder is not None and not user_folder.is_dir():
        raise SpecError(f"the specs folder {user_folder} (ETPI_SPECS) does not exist; make it, or unset ETPI_SPECS")
    folders = [user_folder, SHIPPED] if user_folder else [SHIPPED]
    entries = {(e.set, e.name): e for set_name in FOLDERS for e in _read_set(set_name, folders)}
    return Specs(_with_known_references(entry, entries) for entry in entries.values())


def unknown_name(set: str, key: str, valid: Sequence[str]) -> str:
    """The sentence for a name that is no spec of the set: the nearest name, and all of them."""
    noun = set.replace("_", " ")
    near = f" Did you mean {nearest(key, valid)!r}?" if valid else ""
    return f"there is no {noun} {key!r}.{near} Valid names: {', '.join(sorted(valid)) or '(none)'}"


def nearest(key: str, valid: Sequence[str]) -> str:
    """The most similar of the valid names."""
    return difflib.get_close_matches(key, valid, n=1, cutoff=0.0)[0]


# --- reading one set -------------------------------------------------------------------------------------------------


def _read_set(set_name: str, folders: Sequence[Path]) -> Iterator[Entry]:
    """`folders` in order of precedence. A file may extend another of its set, or the shipped one it overrides.

    Subfolders group files; a spec's name is its file's, so it may occur once in a folder's tree.
    """
    paths = [sorted((folder / FOLDERS[set_name]).rglob("*.toml")) for folder in folders]
    found = [{path.stem: path for path in below} for below in paths]
    for name in sorted({name for files in found for name in files}):
        candidates = [files[name] for files in found if name in files]
        try:
            for below in paths:
                same = [path for path in below if path.stem == name]
                if len(same) > 1:
                    raise SpecError(f"{same[0]}: the name {name!r} occurs twice, also in {same[1]}; rename one file")
            if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_.-]*", name):
                raise SpecError(
                    f"{candidates[0]}: a spec's name has letters, digits, '_', '-' and '.' only; rename the file"
                )
            document = _resolve(name, 0, found, ())
            yield Entry(set_name, name, candidates[0], _validate(set_name, document, candidates[0]))
        except SpecError as error:
            yield Entry(set_name, name, candidates[0], None, error)


def _resolve(name: str, level: int, found: Sequence[Mapping[str, Path]], seen: tuple[Path, ...]) -> dict[str, Any]:
    """The document of `name` with what it extends merged under it; tables merge key by key, all else replaces."""
    level = next(i for i in range(level, len(found)) if name in found[i])
    file = found[level][name]
    if file in seen:
        raise SpecError(f"{seen[0]}: extends: goes in a circle: {' -> '.join(p.stem for p in (*seen, file))}")
    try:
        document = tomllib.loads(file.read_text())
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise SpecError(f"{file}: not TOML: {error}") from error
    parent = document.pop("extends", None)
    if parent is None:
        return document
    # A file that overrides a shipped one may extend the one it overrides.
    below = level + 1 if parent == name else 0
    names = sorted({n for files in found[below:] for n in files if n != name or below})
    if parent not in names:
        hint = f"; the nearest valid name is {nearest(str(parent), names)!r}" if names else ""
        raise SpecError(f"{file}: extends: there is no {parent!r} to extend{hint}")
    under = _resolve(parent, below, found, (*seen, file))
    if parent != name:
        under.pop("published", None)  # figures of one run are not those of its variations
    return _merge(under, document)


def _merge(under: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(under)
    for key, value in over.items():
        both = isinstance(value, dict) and isinstance(merged.get(key), dict)
        merged[key] = _merge(merged[key], value) if both else value
    return merged


# --- validating ------------------------------------------------------------------------------------------------------


def _validate(set_name: str, document: Mapping[str, Any], file: Path) -> AnySpec:
    try:
        return typing.cast(AnySpec, MODELS[set_name].model_validate(document))
    except ValidationError as error:
        lines = [
            _problem(MODELS[set_name], problem["loc"], problem["type"], problem["msg"]) for problem in error.errors()
        ]
        raise SpecError(f"{file}: " + f"\n{file}: ".join(lines)) from error


def _problem(model: type[BaseModel], loc: Sequence[str | int], kind: str, message: str) -> str:
    key = ".".join(str(part) for part in loc)
    if kind != "extra_forbidden":
        return f"{key or 'the spec'}: {message}"
    level = _section(model, loc[:-1])
    prefix = ".".join(str(part) for part in loc[:-1])
    valid = list(level.model_fields)
    close = difflib.get_close_matches(str(loc[-1]), valid, n=1, cutoff=0.6)
    if not close:  # right name, wrong section
        paths = dict(_paths(model))
        close = [path for path, leaf in paths.items() if leaf == loc[-1]]
        prefix = "" if close else prefix
    suggestion = (close or [nearest(str(loc[-1]), valid)])[0]
    full = f"{prefix}.{suggestion}" if prefix else suggestion
    return f"{key}: unknown key; the nearest valid one is {full!r}"


def _section(model: type[BaseModel], loc: Sequence[str | int]) -> type[BaseModel]:
    """The model that a location within another leads to."""
    for part in loc:
        if isinstance(part, str):
            model = _inner(model.model_fields[part].annotation) or model
    return model


def _inner(annotation: Any) -> type[BaseModel] | None:
    """The section within `Section`, `Section | None` or `tuple[Section, ...]`."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next((found for arg in typing.get_args(annotation) if (found := _inner(arg))), None)


def _paths(model: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, str]]:
    for name, field in model.model_fields.items():
        yield f"{prefix}{name}", name
        if inner := _inner(field.annotation):
            yield from _paths(inner, f"{prefix}{name}.")


def _with_known_references(entry: Entry, entries: Mapping[tuple[str, str], Entry]) -> Entry:
    """The entry, or the same with an error where it names a suite or a rollout set that does not exist."""
    spec = entry.spec
    named: list[tuple[str, str, str]] = []
    if isinstance(spec, RolloutSetSpec) and spec.suite:
        named = [("suite", "suite", spec.suite)]
    if isinstance(spec, ExperimentSpec):
        named = [("rollout_sets", "rollout_set", name) for name in spec.rollout_sets]
        named += [("evaluate.suite", "suite", spec.evaluate.suite)] if spec.evaluate else []
        named += [("rl.suite", "suite", spec.rl.suite)] if spec.rl.suite else []
    for key, set_name, name in named:
        if (set_name, name) not in entries:
            valid = [n for s, n in entries if s == set_name]
            error = SpecError(f"{entry.file}: {key}: {unknown_name(set_name, name, valid)}")
            return Entry(entry.set, entry.name, entry.file, None, error)
    return entry
