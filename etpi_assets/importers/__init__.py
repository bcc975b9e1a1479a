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
from etpi_assets.importers.calls import read_tools, tool_name
from etpi_assets.importers.conversation import Options
from etpi_assets.importers.format import DetectionInput, Format, ImportResult, source_of
from etpi_assets.importers.nearest import unknown_row
from etpi_assets.importers.rows import files_below, row_files
from etpi_assets.importers.source import Unreadable, holds_conversation
from etpi_assets.importers.spec import load_user
from etpi_assets.specs.folders import format_files
from etpi_assets.specs.plugins import near, plugin, plugin_names, unknown
from etpi_assets.tasks.family import RejectedInput
from etpi_assets.trajectories.records import RolloutRecord

IMPORTERS: Mapping[str, Format] = data.shipped()


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
    for name, units in chosen.inputs:
        importer = importer_named(name)
        for unit in units:
            for raw in importer.results(unit, path, parsed):
                item = secrets.without_secrets(raw, parsed.secrets)
                if isinstance(item, RolloutRecord):
                    item.tools = item.tools or parsed.tools
                    item.sample = samples[item.task_id]
                    samples[item.task_id] += 1
                yield item
    yield from chosen.unread


def find_units(format: str, path: Path) -> list[Path]:
    """Return the files and folders that `import_runs` reads, by format and sorted. Raises as `import_runs` does."""
    return [unit for _, units in plan(format, path).inputs for unit in units]


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


def detect(path: Path) -> str:
    """Return the format of a folder or file, several as "a+b". Raises ValueError if there is none."""
    return "+".join(plan("auto", path).formats)


def plan(format: str, path: Path) -> Plan:
    """Return which format reads each file or folder below a path.

    With "auto", the format of a file is that of the lowest rank that claims it: a program's own files before rows,
    a program's own columns before plain message rows, and formats of users and plugins last. Files within the run
    folders of a format are no other format's runs: Harbor's trials hold the session files of their agents.

    Raises:
        FileNotFoundError: there is nothing at `path`.
        ValueError: an unknown format, or as `detect`; UnknownFormat if no format claims a file.
    """
    if not path.exists():
        raise FileNotFoundError(f"{path} does not exist; the rollout set's `path` has to name a folder or a file")
    if format != "auto":
        importer = importer_named(format)
        units = importer.units(path)
        return Plan([(importer.name, units)], _unread(path, dict.fromkeys(units, importer), [importer]))
    owners: dict[Path, Format] = _run_folders(path) if path.is_dir() else {}
    importers = [*sorted(IMPORTERS.values(), key=lambda each: each.rank), *map(importer_named, _added())]
    known: dict[str, list[Path]] = {}
    companions: list[Format] = []
    for file in files_below(path):
        if not owners.keys().isdisjoint(file.parents):
            continue
        if (importer := _claimant(file, importers)) is None:
            continue
        if importer.name not in known:
            known[importer.name] = importer.units(path)
            companions.append(importer)
        if file in known[importer.name]:
            owners[file] = importer
    for importer in companions:
        if not any(owner is importer for owner in owners.values()):  # its claim spans several files
            owners |= dict.fromkeys(known[importer.name], importer)
    if not owners:
        source = DetectionInput(path)
        names = ", ".join(importer.name for importer in importers)
        known_names = f". Known: {names}; name one in `format`" if source.rows else ""
        raise UnknownFormat(f"{path} holds no known format: {unknown_row(source)}{known_names}")
    for file in row_files(files_below(path)):  # a damaged file of rows: the reader of the others says what is wrong
        reader = next((each for each in companions if file in known[each.name]), None)
        if reader and file not in owners and owners.keys().isdisjoint(file.parents) and _may_be_run(file):
            owners[file] = reader
    inputs: dict[str, list[Path]] = {}
    for unit in sorted(owners):
        inputs.setdefault(owners[unit].name, []).append(unit)
    return Plan(list(inputs.items()), _unread(path, owners, importers))


def _added() -> list[str]:
    """Return the formats that users and plugins add."""
    return [*format_files(), *plugin_names("format")]


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
    left = [
        file for file in row_files(files_below(path)) if file not in owners and owners.keys().isdisjoint(file.parents)
    ]
    unread: list[RejectedInput] = []
    for file in left if path.is_dir() else ():
        if (claimant := _claimant(file, importers)) is not None and not claimant.of_folders:
            continue  # it belongs to another file's run, as requests belong to their answers
        rows = DetectionInput(file).values if file.stat().st_size else []
        fault = next((row for row in rows if isinstance(row, Unreadable)), None)
        if any(map(holds_conversation, rows)):
            reason, detail = (
                "unknown_form",
                "no format claims its rows; name their columns in a format, or move it away",
            )
        elif fault is not None:
            reason, detail = fault.reason, fault.detail
        else:
            reason, detail = "not_a_rollout", "no format claims it, and it holds no messages"
        unread.append(RejectedInput(source_of(file, path), reason, f"{file.name}: {detail}"))
    return unread


def read_options(options: Mapping[str, Any], account: Account | None = None) -> Options:
    """Validate the `options` of a spec. Raises ValueError for an unknown key or a bad value."""
    known = {f.name for f in fields(Options)} - {"unread"}
    values: dict[str, Any] = {}
    for key, value in options.items():
        if key not in known:
            raise ValueError(f"options.{key}: unknown option.{near(key, known)} Known: {', '.join(sorted(known))}")
        if key == "capture" and value not in ("native", "retokenised"):
            raise ValueError(f"options.capture: {value!r} is neither native nor retokenised")
        if key == "secrets" and value not in secrets.CHOICES:
            raise ValueError(f"options.secrets: {value!r} is none of {', '.join(secrets.CHOICES)}")
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
