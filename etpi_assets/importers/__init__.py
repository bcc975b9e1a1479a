"""Importers of rollouts that other programs recorded, one module per format; the registry and format detection.

A format is a module with a `FORMAT`. To add one here, add its module to `_MODULES`; other distributions give formats as
plugins.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from etpi_assets.importers import (
    atif,
    capture,
    claude_code,
    codex,
    cooperbench,
    gemini_cli,
    harbor,
    inspect_ai,
    mapped,
    messages,
    mini_swe_agent,
    nemo_gym,
    openai_batch,
    openhands,
    qwen_code,
    r2e_gym,
    secrets,
    sharegpt,
    swe_agent,
    tau2,
    tito,
    trl,
    verifiers,
    verl,
)
from etpi_assets.importers.conversation import Options
from etpi_assets.importers.format import DetectionInput, Format, ImportResult
from etpi_assets.importers.nearest import unknown_row
from etpi_assets.importers.source import Unreadable, field, tool_schemas_of
from etpi_assets.specs.plugins import near, plugin, plugin_names, unknown
from etpi_assets.trajectories.records import RolloutRecord

_MODULES = (
    capture,
    cooperbench,
    mini_swe_agent,
    swe_agent,
    harbor,
    atif,
    r2e_gym,
    openhands,
    claude_code,
    codex,
    gemini_cli,
    qwen_code,
    verifiers,
    nemo_gym,
    inspect_ai,
    tau2,
    openai_batch,
    tito,
    trl,
    verl,
    sharegpt,
    messages,
    mapped,
)

IMPORTERS: Mapping[str, Format] = {module.FORMAT.name: module.FORMAT for module in _MODULES}


def import_runs(format: str, path: Path, options: Mapping[str, Any] | None = None) -> Iterator[ImportResult]:
    """Yield every rollout below `path`, or the reason why an input holds none, in the order of units and rows.

    The number of results is `count_found`: imported + refused = found. `sample` numbers the rollouts of a task.

    Args:
        format: a name of IMPORTERS or of a plugin, or "auto".
        options: fields of `Options`; `options` of the rollout set.

    Raises:
        FileNotFoundError: there is nothing at `path`.
        ValueError: the format or an option is unknown, or "auto" detects no format or several.
    """
    parsed, importer = read_options(options or {}), importer_of(format, path)
    samples: Counter[str | None] = Counter()
    for unit in importer.units(path):
        for raw in importer.results(unit, path, parsed):
            item = secrets.without_secrets(raw, parsed.secrets)
            if isinstance(item, RolloutRecord):
                item.tools = item.tools or parsed.tools
                item.sample = samples[item.task_id]
                samples[item.task_id] += 1
            yield item


def find_units(format: str, path: Path) -> list[Path]:
    """Return the files and folders that `import_runs` reads, sorted. Raises as `import_runs` does."""
    return importer_of(format, path).units(path)


def count_found(format: str, path: Path) -> int:
    """Count the results of `import_runs` without parsing them. Raises as `import_runs` does."""
    importer = importer_of(format, path)
    return sum(importer.found(unit, path) for unit in importer.units(path))


def importer_of(format: str, path: Path) -> Format:
    """Return the importer of that name; for "auto" the one that claims the path. Raises as `import_runs` does."""
    if not path.exists():
        raise FileNotFoundError(f"{path} does not exist; the rollout set's `path` has to name a folder or a file")
    return importer_named(detect(path) if format == "auto" else format)


def importer_named(format: str) -> Format:
    """Return the importer of that name. Raises ValueError if there is none."""
    if named := plugin("format", format, IMPORTERS):
        return named.load()
    if format not in IMPORTERS:
        raise ValueError(f"{unknown('format', format, IMPORTERS)}, auto")
    return IMPORTERS[format]


def detect(path: Path) -> str:
    """Detect the format of a folder or file. Raises ValueError if there is none or more than one.

    The lowest rank wins: a program's own folders before rows, a program's own columns before plain message rows, and
    formats of plugins last. Files within the run folders of one format are no other format's runs: Harbor's trials and
    CooperBench's runs hold the session files of their agents.
    """
    source = DetectionInput(path)
    for rank in sorted({importer.rank for importer in IMPORTERS.values()}):
        names = [name for name, importer in IMPORTERS.items() if importer.rank == rank and importer.claims(source)]
        if names:
            return _only(_outermost(names, path), path)
    if names := [name for name in plugin_names("format") if importer_named(name).claims(source)]:
        return _only(names, path)
    known = f". Known: {', '.join([*IMPORTERS, *plugin_names('format')])}; name one in `format`"
    raise ValueError(f"{path} holds no known format: {unknown_row(source)}{known if source.row is not None else ''}")


def _outermost(names: list[str], path: Path) -> list[str]:
    """Return the formats that have an input outside the run folders of the others."""
    units = {name: IMPORTERS[name].units(path) for name in names} if len(names) > 1 else {}
    folders = {name: {unit for unit in units[name] if unit.is_dir()} for name in units}
    inner = {
        name
        for name in units
        for other in units
        if folders[other] and all(not folders[other].isdisjoint(unit.parents) for unit in units[name])
    }
    return [name for name in names if name not in inner]


def _only(names: list[str], path: Path) -> str:
    """Return the only name. Raises ValueError if there are more."""
    if len(names) > 1:
        raise ValueError(
            f"{path} holds {' and '.join(names)}; name one in `format`, or make one rollout set of each folder"
        )
    return names[0]


def read_options(options: Mapping[str, Any]) -> Options:
    """Validate the `options` of a spec. Raises ValueError for an unknown key or a bad value."""
    known = {f.name for f in fields(Options)}
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
        elif not key.endswith("_commands"):
            values[key] = str(value)
        elif isinstance(value, list | tuple) and all(isinstance(name, str) for name in value):
            values[key] = tuple(value)
        else:
            raise ValueError(f"options.{key}: {value!r} is not a list of command names")
    return Options(**values)


def read_map(value: Any) -> dict[str, str]:
    """Return the map of a spec, a table of paths, or of a command line: `KEY=PATH,...`. Raises ValueError."""
    if isinstance(value, str):
        pairs = [pair.strip().partition("=") for pair in value.split(",")]
        value = {key: path for key, _, path in pairs}
    if not isinstance(value, Mapping) or not all(isinstance(path, str) and path for path in value.values()):
        raise ValueError(f"map: {value!r} is not KEY=PATH, such as messages=conv.turns,role=from,text=value")
    if wrong := [key for key in value if key not in mapped.KEYS]:
        raise ValueError(f"map: unknown key {wrong[0]!r}.{near(wrong[0], mapped.KEYS)} Known: {', '.join(mapped.KEYS)}")
    mapped.check_map(value)
    return dict(value)


def _schemas(value: Any) -> list[dict[str, Any]] | None:
    """Validate `options.tools`."""
    try:
        schemas = tool_schemas_of(value, "options.tools")
    except Unreadable as error:
        raise ValueError(f"{error.detail}; write a list of schemas") from error
    if not all(field(schema, "function", "name") or field(schema, "name") for schema in schemas or ()):
        raise ValueError('options.tools: each schema is {"type": "function", "function": {"name": ..., ...}}')
    return schemas
