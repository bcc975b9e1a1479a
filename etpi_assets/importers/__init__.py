"""Importers of rollouts that other programs recorded; the registry, and which format reads each file.

A format is a TOML file in `formats`; one that needs a loop or a tree names its module there (`reader`). A user's own
formats are TOML files in `formats` of the folder of specs; other distributions give plugins.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from etpi_assets.importers import data, secrets
from etpi_assets.importers.account import Account
from etpi_assets.importers.calls import read_tools
from etpi_assets.importers.conversation import Options
from etpi_assets.importers.format import DetectionInput, Format, ImportResult, source_of
from etpi_assets.importers.nearest import unknown_row
from etpi_assets.importers.source import holds_conversation
from etpi_assets.importers.spec import SHIPPED, load, load_user
from etpi_assets.specs.folders import format_files
from etpi_assets.specs.plugins import near, plugin, plugin_names, unknown
from etpi_assets.tasks.family import RejectedInput
from etpi_assets.trajectories.records import RolloutRecord
from etpi_resources.chat.tool_forms.call import tool_name
from etpi_resources.rows import files_below, row_files
from etpi_resources.rows.bounded import Unreadable

IMPORTERS: Mapping[str, Format] = {name: data.data_format(name, load(name)) for name in SHIPPED}


class UnknownFormat(ValueError):
    """No format claims a file below a path; the message says what its first row holds."""


@dataclass(frozen=True)
class Plan:
    """Which format reads each file or folder below a path.

    Attributes:
        inputs: (format, its units), in the order of their first units.
        unread: files that could hold rows and that no format reads, each with its reason.
    """

    inputs: Sequence[tuple[str, Sequence[Path]]]
    unread: Sequence[RejectedInput] = ()

    @property
    def formats(self) -> list[str]:
        """Return the names of the formats."""
        return [name for name, _ in self.inputs]


def import_runs(
    format: str, path: Path, options: Mapping[str, Any] | None = None, account: Account | None = None
) -> Iterator[ImportResult]:
    """Yield every rollout below `path`, or the reason why an input holds none, in the order of units and rows.

    The number of results is `count_found`: imported + quarantined + unread = found. `sample` numbers the rollouts of a
    task.

    Args:
        format: a name of IMPORTERS, of a user's format or of a plugin, or "auto".
        options: fields of `Options`; `options` of the rollout set.
        account: counts the columns and keys that no path reads.

    Raises:
        FileNotFoundError: there is nothing at `path`.
        ValueError: the format or an option is unknown, or "auto" detects no format, or several for one file.
    """
    parsed, chosen = read_options(options or {}, account), plan(format, path)
    samples: Counter[str | None] = Counter()
    for importer, unit in ((importer_named(name), unit) for name, units in chosen.inputs for unit in units):
        for item in results(importer, unit, path, parsed):
            if isinstance(item, RolloutRecord):
                item.sample = samples[item.task_id]
                samples[item.task_id] += 1
            yield item
    yield from chosen.unread


def results(importer: Format, unit: Path, root: Path, options: Options) -> Iterator[ImportResult]:
    """Yield the results of a unit with the options' tools, and without secrets as the options want it."""
    for raw in importer.results(unit, root, options):
        item = secrets.without_secrets(raw, options.secrets)
        if isinstance(item, RolloutRecord):
            item.tools = item.tools or options.tools
        yield item


def count_found(format: str, path: Path) -> int:
    """Count the results of `import_runs` without parsing them. Raises as `import_runs` does."""
    chosen = plan(format, path)
    counts = (importer_named(name).found(unit, path) for name, units in chosen.inputs for unit in units)
    return sum(counts) + len(chosen.unread)


def importer_named(format: str) -> Format:
    """Return the importer of that name. Raises ValueError if there is none, or a user's format is invalid."""
    if named := plugin("format", format, IMPORTERS):
        return named.load()
    if format in IMPORTERS:
        return IMPORTERS[format]
    if (file := format_files().get(format)) is not None:
        return data.data_format(format, load_user(file))
    raise ValueError(f"{unknown('format', format, [*IMPORTERS, *format_files()])}, auto")


def plan(format: str, path: Path) -> Plan:
    """Return which format reads each file or folder below a path.

    With "auto", the format of a file is that of the lowest rank that claims it: a program's own files before rows,
    a program's own columns before plain message rows, and formats of users and plugins last. Files within the run
    folders of a format are no other format's runs: Harbor's trials hold the session files of their agents.

    Raises:
        FileNotFoundError: there is nothing at `path`.
        ValueError: an unknown format, or several that claim one file; UnknownFormat if none claims a file.
    """
    if not path.exists():
        raise FileNotFoundError(f"{path} does not exist; the rollout set's `path` has to name a folder or a file")
    if format != "auto":
        importer = importer_named(format)
        units = importer.units(path)
        return Plan([(importer.name, units)], _unread(path, dict.fromkeys(units, importer), [importer]))
    owners: dict[Path, Format] = _run_folders(path) if path.is_dir() else {}
    added = map(importer_named, (*format_files(), *plugin_names("format")))
    importers = [*sorted(IMPORTERS.values(), key=lambda each: each.rank), *added]
    known: dict[str, tuple[Format, list[Path]]] = {}
    for file in _outside(path, owners):
        if (importer := _claimant(file, importers)) is not None:
            _, units = known.setdefault(importer.name, (importer, importer.units(path)))
            if file in units:
                owners[file] = importer
    for importer, units in known.values():
        if not any(owner is importer for owner in owners.values()):  # its claim spans several files
            owners |= dict.fromkeys(units, importer)
    if not owners:
        source = DetectionInput(path)
        names = ", ".join(importer.name for importer in importers)
        known_names = f". Known: {names}; name one in `format`" if source.rows else ""
        raise UnknownFormat(f"{path} holds no known format: {unknown_row(source)}{known_names}")
    for file in row_files(_outside(path, owners)):  # a damaged one: the reader of the others says what is wrong
        reader = next((importer for importer, units in known.values() if file in units), None)
        if reader and _may_be_run(file):
            owners[file] = reader
    inputs: dict[str, list[Path]] = {}
    for unit in sorted(owners):
        inputs.setdefault(owners[unit].name, []).append(unit)
    return Plan(list(inputs.items()), _unread(path, owners, importers))


def _outside(path: Path, owners: Mapping[Path, Format]) -> list[Path]:
    """Return the files below a path that have no owner, nor stand in a folder that has one."""
    return [f for f in files_below(path) if f not in owners and owners.keys().isdisjoint(f.parents)]


def _run_folders(path: Path) -> dict[Path, Format]:
    """Return the folders below a path that are runs of a format; not those within the run folders of another."""
    owners: dict[Path, Format] = {}
    source = DetectionInput(path)
    for importer in IMPORTERS.values():
        if importer.of_folders and importer.claims(source):
            owners |= {unit: importer for unit in importer.units(path) if unit.is_dir()}
    return {unit: owner for unit, owner in owners.items() if owners.keys().isdisjoint(unit.parents)}


def _claimant(file: Path, importers: Sequence[Format]) -> Format | None:
    """Return the format of a file. Raises ValueError if several of one rank claim it."""
    if named := next((each for each in importers if each.names and file.name.endswith(each.names)), None):
        return named
    source, claimed = DetectionInput(file), list[Format]()
    for importer in importers:
        if claimed and (importer.rank != claimed[0].rank or importer.name not in IMPORTERS):
            break
        if not importer.of_folders and importer.claims(source):
            claimed.append(importer)
    if len(claimed) > 1:
        names = " and ".join(importer.name for importer in claimed)
        raise ValueError(f"{file} holds {names}; name one in `format`, or make one rollout set of each folder")
    return claimed[0] if claimed else None


def _may_be_run(file: Path) -> bool:
    """Return whether the first rows of a file cannot be read, or hold messages."""
    return any(isinstance(row, Unreadable) or holds_conversation(row) for row in DetectionInput(file).values)


def _unread(path: Path, owners: Mapping[Path, Format], importers: Sequence[Format]) -> list[RejectedInput]:
    """Return the files that could hold rows and have no owner, each with the reason."""
    unread: list[RejectedInput] = []
    for file in row_files(_outside(path, owners)) if path.is_dir() else ():
        if (claimant := _claimant(file, importers)) is not None and not claimant.of_folders:
            continue  # it belongs to another file's run, as requests belong to their answers
        rows = DetectionInput(file).values if file.stat().st_size else []
        why = next((row for row in rows if isinstance(row, Unreadable)), None)
        if any(map(holds_conversation, rows)):
            remedy = "no format claims its rows; name their columns in a format, or move it away"
            why = Unreadable("unknown_form", remedy)
        why = why or Unreadable("not_a_rollout", "no format claims it, and it holds no messages")
        unread.append(RejectedInput(source_of(file, path), why.reason, f"{file.name}: {why.detail}"))
    return unread


def read_options(options: Mapping[str, Any], account: Account | None = None) -> Options:
    """Validate the `options` of a spec. Raises ValueError for an unknown key or a bad value."""
    known = {f.name for f in fields(Options)} - {"unread"}
    choices = {"capture": ("native", "retokenised"), "secrets": secrets.CHOICES}
    values: dict[str, Any] = {}
    for key, value in options.items():
        if key not in known:
            raise ValueError(f"options.{key}: unknown option.{near(key, known)} Known: {', '.join(sorted(known))}")
        if value not in choices.get(key, (value,)):
            raise ValueError(f"options.{key}: {value!r} is none of {', '.join(choices[key])}")
        if key == "tools":
            values[key] = _schemas(value)
        elif key == "map":
            values[key] = read_map(value)
        elif not key.endswith("_commands") and key != "ignore":
            values[key] = str(value)
        elif isinstance(value, list | tuple) and all(isinstance(name, str) for name in value):
            values[key] = tuple(value)
        else:
            raise ValueError(f"options.{key}: {value!r} is not a list of names")
    parsed = Options(**values)
    return replace(parsed, unread=account.counting(parsed.ignore)) if account is not None else parsed


def read_map(value: Any) -> dict[str, str]:
    """Return the map of a spec, a table of paths, or of a command line: `KEY=PATH,...`. Raises ValueError."""
    if isinstance(value, str):
        pairs = [pair.strip().partition("=") for pair in value.split(",")]
        value = {key: path for key, _, path in pairs}
    if not isinstance(value, Mapping) or not all(isinstance(path, str) and path for path in value.values()):
        raise ValueError(f"map: {value!r} is not KEY=PATH, such as messages=conv.turns,role=from,text=value")
    known = (*data.MAP_KEYS, *data.MAP_ROLES)
    if wrong := [key for key in value if key not in known]:
        raise ValueError(f"map: unknown key {wrong[0]!r}.{near(wrong[0], known)} Known: {', '.join(known)}")
    data.map_tables(value)
    return dict(value)


def _schemas(value: Any) -> list[dict[str, Any]] | None:
    """Validate `options.tools`."""
    try:
        schemas = read_tools(value, "options.tools")
    except Unreadable as error:
        raise ValueError(f"{error.detail}; write a list of schemas") from error
    if value and not (schemas and all(map(tool_name, schemas))):
        raise ValueError('options.tools: each schema is {"type": "function", "function": {"name": ..., ...}}')
    return schemas
