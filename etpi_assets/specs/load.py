"""Find, merge, validate and hash the TOML files of specs.

A spec is `<folder>/{suites,rollout_sets,experiments}/<name>.toml`; its name is its partition key. Those of installed
plugins and of the user (`specs.folders`) add to the shipped specs; a name occurs once in all of them. An invalid file
keeps its name and its error, so that the others load and a run of it can report what is wrong.
"""

from __future__ import annotations

import difflib
import re
import tomllib
import typing
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from etpi_assets.specs.experiment import ExperimentSpec, preset_values
from etpi_assets.specs.folders import FOLDERS, SpecFolder, checked, plugin_folders, user_folders, where_read
from etpi_assets.specs.plugins import near
from etpi_assets.specs.prompts import with_own_prompts
from etpi_assets.specs.rollout_set import RolloutSetSpec
from etpi_assets.specs.section import SpecError
from etpi_assets.specs.suite import SuiteSpec
from etpi_resources.hashes import json_hash
from etpi_resources.inside import read_file
from etpi_resources.outside import read_toml

SHIPPED = Path(__file__).resolve().parent
MODELS: dict[str, type[BaseModel]] = {"suite": SuiteSpec, "rollout_set": RolloutSetSpec, "experiment": ExperimentSpec}

AnySpec = SuiteSpec | RolloutSetSpec | ExperimentSpec
_Spec = typing.TypeVar("_Spec", SuiteSpec, RolloutSetSpec, ExperimentSpec)


@dataclass(frozen=True)
class Entry:
    """One spec file: the spec, or the error that makes it invalid."""

    set: str
    name: str
    file: Path
    spec: AnySpec | None
    error: SpecError | None = None


class Specs:
    """Every spec of the three sets, as read once from the folders.

    Attributes:
        folders: the folders of the user's specs, in order; the shipped specs are in none of them.
    """

    def __init__(self, entries: Iterable[Entry], folders: Sequence[SpecFolder] = ()) -> None:
        self._entries = {(entry.set, entry.name): entry for entry in entries}
        self.folders = tuple(folders)

    @property
    def suites(self) -> dict[str, SuiteSpec]:
        """Return the valid suites by name, sorted."""
        return self._valid("suite", SuiteSpec)

    @property
    def rollout_sets(self) -> dict[str, RolloutSetSpec]:
        """Return the valid rollout sets by name, sorted."""
        return self._valid("rollout_set", RolloutSetSpec)

    @property
    def experiments(self) -> dict[str, ExperimentSpec]:
        """Return the valid experiments by name, sorted."""
        return self._valid("experiment", ExperimentSpec)

    def _valid(self, set: str, model: type[_Spec]) -> dict[str, _Spec]:
        return {key: spec for key in self.keys(set) if isinstance(spec := self._entries[set, key].spec, model)}

    def entries(self) -> list[Entry]:
        """Return every spec file, invalid ones included."""
        return list(self._entries.values())

    def keys(self, set: str) -> list[str]:
        """Return the names of a set, invalid ones included, sorted."""
        return sorted(name for kind, name in self._entries if kind == set)

    def entry(self, set: str, key: str) -> Entry:
        """Return the spec file. Raises SpecError with the nearest names if there is no such spec."""
        if (entry := self._entries.get((set, key))) is None:
            raise SpecError(unknown_name(set, key, self.keys(set), self.folders))
        return entry

    @typing.overload
    def get(self, set: typing.Literal["suite"], key: str) -> SuiteSpec: ...
    @typing.overload
    def get(self, set: typing.Literal["rollout_set"], key: str) -> RolloutSetSpec: ...
    @typing.overload
    def get(self, set: typing.Literal["experiment"], key: str) -> ExperimentSpec: ...
    @typing.overload
    def get(self, set: str, key: str) -> AnySpec: ...
    def get(self, set: str, key: str) -> AnySpec:
        """Return the spec. Raises SpecError if it is unknown or invalid."""
        entry = self.entry(set, key)
        if entry.spec is None:
            raise entry.error or SpecError(f"{entry.file}: not a valid spec")
        return entry.spec

    def sections(self, set: str, key: str, names: Sequence[str], *, written: bool = False) -> dict[str, Any]:
        """Return the named keys of the resolved spec ("train", "evaluate.suite"), all of it for "*".

        With `written`, only those that the spec or its presets state: no defaults.

        For an asset without partitions: those keys of every valid experiment. A key below a null section is null, and
        so is an omitted key (`Omitted`). "rollout_sets.KEY" is that key of each rollout set that an experiment names.
        """
        if set == "all":
            experiments = self.experiments if names else {}
            dumped = {n: spec.model_dump(mode="json", exclude_unset=written) for n, spec in experiments.items()}
            return {name: {section: part(spec, section) for section in names} for name, spec in dumped.items()}
        spec = self.get(set, key).model_dump(mode="json", exclude_unset=written) if names else {}
        named = {name: self._part(spec, name, written) for name in names if name != "*"}
        return {**spec, **named} if "*" in names else named

    def _part(self, spec: Mapping[str, Any], name: str, written: bool) -> Any:
        if not name.startswith("rollout_sets."):
            return part(spec, name)
        named = {each: self._entries["rollout_set", each].spec for each in spec["rollout_sets"]}
        key = name.partition(".")[2]
        dumped = {n: s and s.model_dump(mode="json", exclude_unset=written) for n, s in named.items()}
        return {each: section and part(section, key) for each, section in dumped.items()}

    def section_hash(self, set: str, key: str, names: Sequence[str]) -> str:
        """Return the sha256 (hex) of `sections`."""
        return json_hash(self.sections(set, key, names))

    def upstream_keys(self, set: str, key: str, upstream: str) -> list[str]:
        """Return the keys of another set that a spec uses, in the order it names them; empty for an invalid spec."""
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
    """Return the value of a dotted key of a resolved spec; None below a null section and for an omitted key."""
    value: Any = spec
    for key in name.split("."):
        value = None if value is None else value.get(key)
    return value


def load_specs(user_folder: Path | None = None) -> Specs:
    """Read the installed specs and the user's: those of `user_folder`, by default of every folder of `user_folders`.

    Raises SpecError: a folder of a plugin or of the user's does not exist, or has files that would not be read. The
    error of a single spec stays with its entry.
    """
    return _load(user_folders() if user_folder is None else [checked(user_folder, "given")], installed_folders())


def load_installed() -> Specs:
    """Read the specs of etpi and of installed plugins, and none of the user's."""
    return _load([], installed_folders())


def load_shipped() -> Specs:
    """Read the specs that come with etpi, and no others."""
    return _load([], (SHIPPED,))


def installed_folders() -> tuple[Path, ...]:
    """Return etpi's own folder of specs and those of installed plugins. Raises SpecError if one cannot be read."""
    _refuse_problems(plugin_folders())
    return (*(folder.path for folder in plugin_folders()), SHIPPED)


def _refuse_problems(folders: Sequence[SpecFolder]) -> None:
    if problems := [problem for folder in folders for problem in folder.problems]:
        raise SpecError("\n".join(problems))


def _load(folders: Sequence[SpecFolder], installed: tuple[Path, ...]) -> Specs:
    _refuse_problems(folders)
    paths = [folder.path for folder in folders]
    entries = {(e.set, e.name): e for set_name in FOLDERS for e in _read_set(set_name, paths, installed)}
    return Specs((_with_known_references(entry, entries, folders) for entry in entries.values()), folders)


def unknown_name(set: str, key: str, valid: Sequence[str], folders: Sequence[SpecFolder] = ()) -> str:
    """Return the message for an unknown name: names that resemble it, if any, and the folders that were read."""
    return f"there is no {set.replace('_', ' ')} {key!r}.{_lab_hint(key) or near(key, valid)} {where_read(folders)}"


@cache
def _names_in_lab() -> frozenset[str]:
    return frozenset((SHIPPED / "in_lab.txt").read_text(encoding="utf-8").split())


def _lab_hint(name: str) -> str:
    """Return where a spec is that came with etpi and is now in the lab; empty for any other name."""
    return " Its spec is in the lab: pip install ./lab in a checkout of etpi." if name in _names_in_lab() else ""


def nearest(key: str, valid: Sequence[str]) -> str:
    """Return the most similar of the valid names."""
    return difflib.get_close_matches(key, valid, n=1, cutoff=0.0)[0]


# --- reading one set -------------------------------------------------------------------------------------------------


def _read_set(set_name: str, folders: Sequence[Path], installed: tuple[Path, ...]) -> Iterator[Entry]:
    """Read one set of specs. Subfolders group files; a spec's name is its file's, once in all folders."""
    files = _files(set_name, [*folders, *installed])
    for name in sorted(files):
        is_installed = any(files[name][0].is_relative_to(folder) for folder in installed)
        yield _installed(set_name, installed)[name] if is_installed else _read(set_name, name, files, folders)


@cache
def _installed(set_name: str, folders: tuple[Path, ...]) -> dict[str, Entry]:
    """Return the installed specs of a set; no file of the user's changes them, so a process reads them once."""
    files = _files(set_name, folders)
    return {name: _read(set_name, name, files, folders) for name in files}


def _files(set_name: str, folders: Sequence[Path]) -> dict[str, list[Path]]:
    files: dict[str, list[Path]] = {}
    for folder in folders:
        for path in sorted((folder / FOLDERS[set_name]).rglob("*.toml")):
            files.setdefault(path.stem, []).append(path)
    return files


def _read(set_name: str, name: str, files: Mapping[str, Sequence[Path]], folders: Sequence[Path]) -> Entry:
    file = files[name][0]
    try:
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_.-]{,99}", name):
            raise SpecError(
                f"{file}: a spec's name has letters, digits, '_', '-' and '.' only, at most 100; rename the file"
            )
        model = MODELS[set_name]
        document = _resolve(name, files, model, ())
        if model is ExperimentSpec:
            document = _over_preset(document, file)
        document = with_own_prompts(set_name, document, folders, file)
        return Entry(set_name, name, file, _validate(set_name, document, file))
    except SpecError as error:
        return Entry(set_name, name, file, None, error)


def _resolve(
    name: str, files: Mapping[str, Sequence[Path]], model: type[BaseModel], seen: tuple[Path, ...]
) -> dict[str, Any]:
    """Return the document of `name` merged over the one it extends."""
    file, *more = files[name]
    if more:
        raise SpecError(_twice(name, file, more[0]))
    if len(seen) > _MOST_PARENTS:
        raise SpecError(f"{seen[0]}: extends: more than {_MOST_PARENTS} specs extend one another")
    if file in seen:
        raise SpecError(f"{seen[0]}: extends: goes in a circle: {' -> '.join(p.stem for p in (*seen, file))}")
    document = _read_document(file)
    parent = document.pop("extends", None)
    if parent is None:
        return document
    if parent not in files:
        hint = _lab_hint(str(parent)) or near(str(parent), files.keys() - {name})
        raise SpecError(f"{file}: extends: there is no {parent!r} to extend.{hint}")
    under = _resolve(parent, files, model, (*seen, file))
    under.pop("published", None)  # figures of one run are not those of its variations
    return _merge(under, document, model)


_MOST_BYTES, _MOST_NESTED, _MOST_PARENTS = 1 << 20, 20, 20
"""Bounds of a spec file: its size, tables within tables, and specs that extend one another."""
_MOST_PROBLEMS = 50
"""Problems of a file that an error names; each costs a search for the nearest key."""
_NEEDED = {
    "model_type": "a table", "model_attributes_type": "a table", "dict_type": "a table", "tuple_type": "a list",
    "list_type": "a list", "string_type": "text", "bool_type": "true or false", "bool_parsing": "true or false",
    "float_type": "a number", "float_parsing": "a number", "int_type": "a whole number",
    "int_parsing": "a whole number", "int_from_float": "a whole number",
}  # fmt: skip
"""A kind of error of pydantic -> the kind of value that the key takes."""
_PYDANTIC, _SHOWN = re.compile(r"^\w+ should (?=be |have )"), {list: "a list", dict: "a table", type(None): "nothing"}
_NOT_TOML = {
    "Illegal character '\\n'": "a quote is not closed",
    "Unterminated string": "a quote is not closed",
    'Expected "\'"': "a quote is not closed",
    "Cannot overwrite a value": "a key is written twice",
    "Cannot declare": "a table is written twice",
    "Expected '=' after a key": "a key without `=`",
}
"""The beginning of an error of tomllib -> its cause in words of TOML."""


def _read_document(file: Path) -> dict[str, Any]:
    """Parse a spec file. Raises SpecError if it cannot be read, is no TOML, or exceeds a bound."""
    try:
        document = read_toml(read_file(file, _MOST_BYTES).decode("utf-8"))
    except OSError as error:
        raise SpecError(f"{file}: cannot be read: {error.strerror or error}") from error
    except ValueError as error:  # also not UTF-8
        reason, _, place = str(error).rpartition(" (at ") if " (at " in str(error) else (str(error), "", "")
        reason = next((fault for begin, fault in _NOT_TOML.items() if reason.startswith(begin)), reason)
        raise SpecError(f"{file}: not TOML: {reason}{place and f' at {place[:-1]}'}") from error
    if _depth(document) > _MOST_NESTED:
        raise SpecError(f"{file}: its tables or lists are nested more than {_MOST_NESTED} deep")
    return document


def _depth(value: Any) -> int:
    """Return how deep dicts and lists are nested, without recursion."""
    level, depth = [value], 0
    while level:
        tables = (item.values() if isinstance(item, dict) else item for item in level if isinstance(item, dict | list))
        level = [inner for table in tables for inner in table]
        depth += 1
    return depth


def _twice(name: str, file: Path, other: Path) -> str:
    if any(other.is_relative_to(folder) for folder in installed_folders()):
        of = "etpi comes with" if other.is_relative_to(SHIPPED) else "a plugin has"
        return (
            f"{file}: {of} a spec named {name!r} ({other}), and a spec does not replace another; rename the file. "
            f'extends = "{name}" takes over its values'
        )
    return f"{file}: the name {name!r} occurs twice, also in {other}; rename one file"


def _over_preset(document: Mapping[str, Any], file: Path) -> dict[str, Any]:
    """Return the document merged over the preset that it names; with `extends`, the nearest `preset` counts."""
    name = document.get("preset", "none")
    if name == "none":
        return dict(document)
    try:
        return _merge(preset_values(name), document, ExperimentSpec)
    except ValueError as error:
        raise SpecError(f"{file}: preset: {error}") from error


def _merge(under: Mapping[str, Any], over: Mapping[str, Any], model: type[BaseModel] | None) -> dict[str, Any]:
    """Return one document merged over another: tables key by key, other values whole.

    An empty table replaces the other where the keys are free, as in `gates.teacher = {}`, but not where it is a section
    of the model, such as an empty `[gates]`.
    """
    merged = dict(under)
    for key, value in over.items():
        field = model.model_fields.get(key) if model else None
        inner = inner_section(field.annotation) if field else None
        empties = value == {} and field is not None and inner is None
        both = isinstance(value, dict) and isinstance(merged.get(key), dict) and not empties
        merged[key] = _merge(merged[key], value, inner) if both else value
    return merged


# --- validating ------------------------------------------------------------------------------------------------------

_BRANCH = re.compile(r"literal\[.*\]|\w+Section")
"""A part of a place that is no key, but the branch of a key that takes a word or a table."""


def _validate(set_name: str, document: Mapping[str, Any], file: Path) -> AnySpec:
    try:
        return typing.cast(AnySpec, MODELS[set_name].model_validate(document, context=file))
    except ValidationError as error:
        problems = error.errors()
        lines = [
            _problem(MODELS[set_name], problem["loc"], problem["type"], problem["msg"], problem["input"])
            for problem in problems[:_MOST_PROBLEMS]
        ]
        if more := len(problems) - len(lines):
            lines.append(f"and {more} more problems")
        raise SpecError(f"{file}: " + f"\n{file}: ".join(lines)) from error


def _problem(model: type[BaseModel], loc: Sequence[str | int], kind: str, message: str, value: Any) -> str:
    loc = [part for part in loc if not _BRANCH.fullmatch(str(part))]
    key = ".".join(str(part) for part in loc)
    if kind == "value_error":  # our own messages, which say what a person needs; a value might be a password
        return f"{key or 'the spec'}: {message.removeprefix('Value error, ')}"
    if kind == "missing":
        return f"{key} is missing"
    if kind != "extra_forbidden":
        other = _SHOWN.get(type(value), type(value).__name__)
        shown = repr(value) if isinstance(value, str | int | float | bool) else other
        needed = f"has to be {_NEEDED[kind]}" if kind in _NEEDED else _PYDANTIC.sub("has to ", message)
        return f"{key or 'the spec'}: {needed.partition(' after validation')[0]}; it is {shown[:60]}"
    level = _section(model, loc[:-1])
    prefix = ".".join(str(part) for part in loc[:-1])
    valid = list(level.model_fields)
    close = difflib.get_close_matches(str(loc[-1]), valid, n=1, cutoff=0.6)
    if known := _aliases().get(str(loc[-1])):
        close, loc = [key for key in known if key in valid], [*loc[:-1], known[0]]
    if not close:  # right name, wrong section
        paths = dict(_paths(model))
        close = sorted((path for path, leaf in paths.items() if leaf == loc[-1]), key=lambda path: path.count("."))
        prefix = "" if close else prefix
    suggestion = (close or [nearest(str(loc[-1]), valid)])[0]
    full = f"{prefix}.{suggestion}" if prefix else suggestion
    return f"{key}: unknown key; the nearest valid one is {full!r}{_meaning(model, full)}"


@cache
def _aliases() -> Mapping[str, list[str]]:
    """Return another tool's name of a key -> the key; where sections differ, their keys."""
    tables = tomllib.loads(Path(__file__).with_name("aliases.toml").read_text(encoding="utf-8"))
    names = dict.fromkeys(name for of_key in tables.values() for name in of_key)
    return {name: [key for key, of_key in tables.items() if name in of_key] for name in names}


def _meaning(model: type[BaseModel], path: str) -> str:
    *parents, name = [part for part in path.split(".") if not part.isdigit()]
    description = " ".join((_section(model, parents).model_fields[name].description or "").split())
    sentence = re.split(r"(?<=\.)\s", description)[0].rstrip(".")
    return f" ({sentence})" if sentence else ""


def _section(model: type[BaseModel], loc: Sequence[str | int]) -> type[BaseModel]:
    for part in loc:
        if isinstance(part, str):
            model = inner_section(model.model_fields[part].annotation) or model
    return model


def inner_section(annotation: Any) -> type[BaseModel] | None:
    """Return the section within `Section`, `Section | None` or `tuple[Section, ...]`."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next((inner for arg in typing.get_args(annotation) if (inner := inner_section(arg))), None)


def spec_keys(set: str) -> frozenset[str]:
    """Return the dotted keys that `Specs.sections` takes; "options.*" stands for every key below a dictionary."""
    keys = {path for path, _ in _paths(MODELS[set])}
    fields = {path: _section(MODELS[set], path.split(".")[:-1]).model_fields[path.split(".")[-1]] for path in keys}
    free = {f"{path}.*" for path, field in fields.items() if typing.get_origin(field.annotation) is dict}
    of_sets = {f"rollout_sets.{key}" for key in spec_keys("rollout_set")} if set == "experiment" else frozenset()
    return frozenset(keys | free | of_sets | {"*"})


def _paths(model: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, str]]:
    for name, field in model.model_fields.items():
        yield f"{prefix}{name}", name
        if inner := inner_section(field.annotation):
            yield from _paths(inner, f"{prefix}{name}.")


def _with_known_references(
    entry: Entry, entries: Mapping[tuple[str, str], Entry], folders: Sequence[SpecFolder]
) -> Entry:
    """Return the entry, with an error if it names a suite or a rollout set that does not exist."""
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
            error = SpecError(f"{entry.file}: {key}: {unknown_name(set_name, name, valid, folders)}")
            return Entry(entry.set, entry.name, entry.file, None, error)
    return entry
