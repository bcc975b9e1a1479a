"""Compute the code version and the input key of an asset partition, which the skip rule and the planner compare."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache

from etpi_assets.graph import GRAPH, Node
from etpi_assets.planning.versioning.choices import (
    CHOICES,
    Selection,
    applies,
    is_infrastructure,
    narrowing,
    options_of,
    selection,
)
from etpi_assets.planning.versioning.codebase import PACKAGES, Codebase, CodeVersion, LaterVersion
from etpi_assets.planning.versioning.definitions import digest_of
from etpi_assets.specs.errors import SpecError
from etpi_assets.specs.load import Specs
from etpi_assets.specs.plugins import GROUPS, Plugin, plugin, plugin_names, plugins_of, usable_plugins
from etpi_resources.lake.schemas import LATER, TABLES
from etpi_resources.process.stored_values import StoredValues, signature_of

CODE = Codebase()
"""The sources of the running code."""


@dataclass(frozen=True)
class PartitionCode:
    """The code behind one asset partition.

    Attributes:
        whole: all code that the partition's content depends on.
        kept: the part whose results are expensive and stored under this version (`Node.kept`): rollouts, trainings;
            None for an asset that is cheap to rebuild.
    """

    whole: CodeVersion
    kept: CodeVersion | None

    def to_json(self) -> dict[str, object]:
        """Return the form that a manifest records."""
        kept = {"kept": self.kept.digest} if self.kept else {}
        return {"version": self.whole.digest, **kept, "modules": self.whole.modules}


def code_of(node: Node, key: str, specs: Specs, code: Codebase | None = None) -> PartitionCode:
    """Return the code behind a partition: all that its asset's function can reach, given what its spec selects.

    Raises:
        SpecError: the spec is unknown or invalid.
    """
    selected = selection(node, key, specs)
    frozen = tuple(sorted((kind, tuple(sorted(names))) for kind, names in selected.items()))
    return _code_of(node.name, frozen, applies(node, key, specs), code or CODE)


def asset_code(node: Node) -> str:
    """Return the code version that Dagster shows for an asset, 16 hex digits, over all code that a spec may select."""
    return _code_of(node.name, (), True, CODE).whole.digest


def definition_version(target: str) -> str:
    """Return the version of a definition ("module:name") with all that it refers to; "" for code of other packages."""
    return CODE.reach([target], narrowing(CODE, {})).digest if CODE.exists(target) else ""


@cache
def plugin_code(point: Plugin) -> CodeVersion:
    """Return the code of its distribution that a plugin reaches.

    Raises:
        SpecError: its module or attribute does not exist.
    """
    try:
        return _codebase_of(point).reach([f"{point.module}:{point.attribute.split('.')[0]}"])
    except KeyError:
        raise SpecError(f"{point.distribution} names {point.module}:{point.attribute}, which does not exist") from None


@cache
def _codebase_of(point: Plugin) -> Codebase:
    return Codebase(point.root, (point.module.split(".")[0],))


def _used_by(point: Plugin) -> set[str]:
    """Return the targets of etpi's own code that the modules of a plugin import."""
    sources = [_codebase_of(point).source(module) for module in plugin_code(point).definitions]
    imports = [i for source in sources if source for names in source.imports.values() for i in names]
    ours = [i for i in imports if i.module.split(".")[0] in PACKAGES and not is_infrastructure(i.module)]
    return {f"{i.module}:{i.attribute or '*'}" for i in ours}


def file_of(module: str) -> str:
    """Return the path from the root of a module or data file that a code version names; tables stay as they are."""
    today = CODE.moves.today(module)
    path = CODE.path(today)
    return path.relative_to(CODE.root).as_posix() if path else today


def input_key(node: Node, spec_hash: str, inputs: Mapping[str, str], code: str) -> str:
    """Return the sha256 of (asset, spec section hash, input versions in order, code version) as hex.

    `inputs` maps "asset/key" to the data version that would be read.
    """
    text = json.dumps([node.name, spec_hash, list(inputs.items()), code])
    return hashlib.sha256(text.encode()).hexdigest()


@cache
def _code_of(
    asset: str, selected: tuple[tuple[str, tuple[str, ...]], ...], computes: bool, code: Codebase
) -> PartitionCode:
    if code is not CODE:
        return _walked(asset, selected, computes, code)
    node, store = GRAPH[asset], _store()
    name = digest_of(json.dumps([asset, node.tables, node.kept, selected, computes, [*map(_columns, node.tables)]]))
    if name not in store.values:
        walked = _walked(asset, selected, computes, code)
        store.values[name] = f"{walked.whole.digest} {walked.kept.digest if walked.kept else ''}"
        store.write()
        return walked
    whole, kept = store.values[name].split(" ")
    walk = cache(lambda: _walked(asset, selected, computes, code))
    later = LaterVersion(kept, lambda: walk().kept or CodeVersion({})) if kept else None
    return PartitionCode(LaterVersion(whole, lambda: walk().whole), later)


@cache
def _store() -> StoredValues:
    """Return the stored digests of the running code, which last until a file of etpi's or of a plugin's changes."""
    plugins = [plugin for kind in GROUPS for plugin in plugins_of(kind)]
    modules = [plugin.root / plugin.module.split(".")[0] for plugin in plugins]
    files = [path for module in modules for path in (module, module.with_suffix(".py"))]
    signature = signature_of([CODE.file("sql"), *(CODE.root / name for name in PACKAGES), *files])
    return StoredValues("partition_codes", digest_of(f"{signature} {plugins}"))


def _walked(
    asset: str, selected: tuple[tuple[str, tuple[str, ...]], ...], computes: bool, code: Codebase
) -> PartitionCode:
    node, root = GRAPH[asset], function_of(asset)
    tables = {f"table {name}": {"columns": _columns(name)} for name in node.tables}
    if not computes:
        module, _, name = code.moves.original(root).partition(":")
        only = CodeVersion({module: {name: code.definition(root).digest}, **tables})
        return PartitionCode(only, None)
    options: Selection = {kind: frozenset(names) for kind, names in selected}
    whole = _reach([root], options, code)
    kept = _reach(node.kept, options, code) if node.kept else None
    return PartitionCode(CodeVersion({**whole.definitions, **tables}), kept)


def _reach(roots: Sequence[str], options: Selection, code: Codebase) -> CodeVersion:
    """Return the code that the roots reach in etpi, and in the selected plugins with the etpi code they import."""
    narrowed = narrowing(code, options)
    version = code.reach(roots, narrowed)
    points = _selected_plugins(version, options)
    if not points:
        return version
    used = sorted(target for target in set().union(*map(_used_by, points)) if code.exists(target))
    definitions = dict(code.reach([*roots, *used], narrowed).definitions)
    for point in points:
        definitions |= plugin_code(point).definitions
    return CodeVersion(definitions)


def _selected_plugins(version: CodeVersion, options: Selection) -> list[Plugin]:
    """Return the plugins that are selected, of the kinds that the code looks up."""
    selected: list[Plugin | None] = []
    for choice in CHOICES:
        places = [CODE.moves.original(at).partition(":") for at in choice.at]
        if choice.kind in GROUPS and any(name in version.definitions.get(module, ()) for module, _, name in places):
            shipped = options_of(choice, CODE)
            if choice.kind in options:
                selected += [plugin(choice.kind, name, shipped) for name in sorted(options[choice.kind])]
            else:
                selected += usable_plugins(choice.kind, shipped)[0]
    return [point for point in selected if point]


def function_of(asset: str) -> str:
    """Return the function that computes an asset, as "module:name"."""
    return f"{GRAPH[asset].module}:{asset}"


def ignored_plugins() -> list[str]:
    """Return a line for each name that is given twice: specs that do not use it work, and others are refused."""
    choices = [choice for choice in CHOICES if choice.kind in GROUPS and plugin_names(choice.kind)]
    return [clash for choice in choices for clash in usable_plugins(choice.kind, options_of(choice, CODE))[1]]


@cache
def _columns(table: str) -> str:
    columns = [(name, str(kind)) for name, kind, _ in TABLES[table].columns if name not in LATER.get(table, ())]
    return digest_of(json.dumps(columns))
