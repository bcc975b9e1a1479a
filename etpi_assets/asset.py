"""Declare assets (`@asset`), and materialize one partition of them without Dagster.

`AssetDefinition.execute` checks its inputs, skips it if it is up to date, locks, computes and publishes. `materialize`
turns definitions into Dagster assets.
"""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Self

import pyarrow as pa

from etpi_assets.checks import CHECKS, undeclared
from etpi_assets.graph import GRAPH, GraphError, Node, Set, nearest
from etpi_assets.planning.planner import (
    Step,
    Wanted,
    chain,
    compare,
    difference,
    differing,
    inputs_of,
    require,
    upstream_refs,
    wanted,
)
from etpi_assets.planning.versions import PartitionVersions, require_components, versions_of
from etpi_assets.resources import Resources, require_hardware, side_by_side, visible_devices
from etpi_assets.specs.load import Specs, spec_keys
from etpi_resources.lake import older_names, parquet
from etpi_resources.lake.check_outcome import CheckOutcome
from etpi_resources.lake.lake import Lake, LakeError, Manifest, MissingInput, Ref
from etpi_resources.lake.schemas import TABLES, empty
from etpi_resources.lake.stored import Parts, Spooled, Stored
from etpi_resources.process.locks import Held
from etpi_resources.process.pool import ordered_map, workers_for
from etpi_resources.process.progress import Progress

Log = Callable[[str], None]
Tables = Mapping[str, pa.Table]
BlockFunction = Callable[[Any], Tables]


MACHINE_RESOURCES = ("accelerator", "sandboxes")
"""The locks of nodes that exclude processes of the same machine only."""


class Markdown(str):
    """A text of `Produced.metadata` that the asset's page renders as markdown."""


@dataclass
class Produced:
    """The result of an asset function.

    Attributes:
        tables: every table of the node, by name: a table, a spooled table (`AssetRun.spool`), or a stream of record
            batches.
        checks: the outcome of every check that the asset declares.
        metadata: shown on the asset's page: plain values, `Markdown` and paths.
        notes: recorded in the manifest (JSON).
        seeds: the seeds behind the result, recorded in the manifest.
    """

    tables: Mapping[str, pa.Table | Spooled | Iterable[pa.RecordBatch]]
    checks: Sequence[CheckOutcome] = ()
    metadata: Mapping[str, Any] = field(default_factory=dict)
    notes: Mapping[str, Any] = field(default_factory=dict)
    seeds: Sequence[int] = ()

    @classmethod
    def not_applicable(cls, node_name: str, reason: str) -> Self:
        """Return an empty version with the reason why the asset does not apply; it reports no checks."""
        tables = {name: empty(name) for name in GRAPH[node_name].tables}
        return cls(tables=tables, metadata={"not_applicable": reason}, notes={"not_applicable": reason})


class AssetRun:
    """The argument of an asset function: its partition, specs, inputs and resources.

    Attributes:
        node: the asset's node in the graph.
        key: the partition key; "all" for an asset without partitions.
        specs: every spec, as loaded at the start of the run.
        resources: lake, sandboxes, engines.
        log: writes one line to the run's log.
        context: Dagster's execution context, which trainers need for Pipes; None without Dagster.
        folder: tables are spooled here until they are published; None where nothing is computed.
        parts: the parts that are finished; None where nothing is computed.
    """

    def __init__(self, node: Node, key: str, resources: Resources, log: Log = print, context: Any = None) -> None:
        self.node, self.key, self.resources, self.log, self.context = node, key, resources, log, context
        self.folder: Path | None = None
        self.parts: Parts | None = None
        self.specs: Specs = resources.specs
        self.lake: Lake = resources.lake

    @cached_property
    def spec(self) -> Any:
        """The SuiteSpec, RolloutSetSpec or ExperimentSpec of the key; None for an asset without partitions."""
        return None if self.node.set == "all" else self.specs.get(self.node.set, self.key)

    def refs(self, asset: str) -> list[Ref]:
        """Return the partitions of an upstream asset that this partition reads, in spec order.

        Raises:
            LakeError: the graph does not name the asset as upstream, so its version would not be in the input key.
        """
        if asset not in self.node.upstream:
            raise LakeError(f"{self.node.name} reads {asset!r}, which is no parameter of its function")
        return upstream_refs(self.node, self.key, self.specs, self.lake, asset)

    def read(self, asset: str, table: str, key: str | None = None, columns: Sequence[str] | None = None) -> pa.Table:
        """Read a table of an upstream asset: of the partition `key`, or of all that this partition reads, concatenated.

        Raises:
            LakeError: as `refs` and `Lake.read`, the asset has no such table, or this partition does not read `key`.
        """
        return parquet.read(table, self.stored(asset, table, key).paths, columns)

    def stored(self, asset: str, table: str, key: str | None = None) -> Stored:
        """Return the table of `read` for reading in pieces, because tables with a row per turn may exceed memory."""
        refs = self.refs(asset)
        if table not in (known := GRAPH[asset].tables):
            raise LakeError(f"{self.node.name} reads {table!r}, which is no table of {asset}{nearest(table, known)}")
        if key is not None:
            if key not in [ref.key for ref in refs]:
                raise LakeError(
                    f"{self.node.name} of {self.key!r} does not read {asset} of {key!r}, only {[r.key for r in refs]}"
                )
            refs = [ref for ref in refs if ref.key == key]
        return Stored(table, [path for ref in refs for path in self.lake.files(ref, table)])

    def spool(self, table: str) -> parquet.Writer:
        """Return a context manager that writes a table of this asset in pieces; `spooled` returns the table."""
        return parquet.Writer(table, self._spooled(table))

    def spool_parts(self, parts: Iterable[Tables]) -> Iterator[Tables]:
        """Write all tables of this asset, given in parts, and yield each part for its figures."""
        with ExitStack() as stack:
            spools = {name: stack.enter_context(self.spool(name)) for name in self.node.tables}
            for part in parts:
                for name, spool in spools.items():
                    spool.add(part[name])
                yield part

    def spooled(self, table: str) -> Spooled:
        """Return the table that `spool` wrote, for checks to read and for `Produced.tables`."""
        return Spooled(table, [self._spooled(table)])

    def _spooled(self, table: str) -> Path:
        assert self.folder is not None, "only a run that computes has a folder to spool into"
        return self.folder / f"{table}.parquet"

    def parts_of(
        self, blocks: Iterable[tuple[str, Any]], factory: Callable[[], BlockFunction], seconds: float
    ) -> Iterator[Tables]:
        """Yield the tables of each (name, block), in order, from all cores. A rerun reuses finished parts.

        Args:
            blocks: a name is unique in this asset.
            factory: returns the function from a block to its tables, which depend on nothing but the block and what the
                input key covers. Worker processes get a pickled copy of it.
            seconds: estimated single-core seconds; little work is done in this process.
        """
        assert self.parts is not None, "only a run that computes has parts"
        named = ((name, (name, block)) for name, block in blocks)
        kept = _KeptParts(self.parts, factory)
        return ordered_map(kept, named, workers=workers_for(seconds), reads=[self.parts.folder], log=self.log)

    @cached_property
    def code(self) -> PartitionVersions:
        """The versions of the code of this partition."""
        return versions_of(self.node, self.key, self.specs)

    @property
    def stored_name(self) -> str:
        """The name under which this partition's expensive results (journals, trainings) are stored."""
        return self.code.stored_name

    @cached_property
    def reuses_older(self) -> bool:
        """Whether such results of etpi 0.2 are reused: no number was raised since. Those of 0.1 are not."""
        current = self.lake.current(Ref(self.node.name, self.node.set, self.key))
        return self.code.as_in_0_2 and (current is None or bool(current.code))

    @cached_property
    def older_codes(self) -> tuple[str, ...] | None:
        """The digests that name such results of etpi 0.2 in manifests; None if they are not reused."""
        return older_names.older_codes(self.lake, self.node.name) if self.reuses_older else None

    @property
    def label(self) -> str:
        """The asset and its partition, for messages."""
        return label(self.node.name, self.key)

    def progress(self, stage: str, total: int) -> AbstractContextManager[Progress]:
        """Return a counter that logs stage, done/total, rate and time left now and then."""
        return nullcontext(Progress(self.label, stage, total, self.log))


@dataclass(frozen=True)
class Input:
    """An upstream asset of a run: the value of the parameter that has the asset's name."""

    run: AssetRun
    asset: str

    def read(self, table: str, key: str | None = None, columns: Sequence[str] | None = None) -> pa.Table:
        """Read a table of the asset, as `AssetRun.read` does."""
        return self.run.read(self.asset, table, key, columns)

    def stored(self, table: str, key: str | None = None) -> Stored:
        """Return a table of the asset for reading in pieces, as `AssetRun.stored` does."""
        return self.run.stored(self.asset, table, key)

    def refs(self) -> list[Ref]:
        """Return the partitions of the asset that this partition reads, in spec order."""
        return self.run.refs(self.asset)


@dataclass(frozen=True)
class Outcome:
    """The result of `AssetDefinition.execute`.

    Attributes:
        manifest: the current version, or the blocked one that was just published.
        skipped: whether it existed already.
        metadata: as `Produced.metadata`; empty where skipped.
        seconds: wall time.
    """

    manifest: Manifest
    skipped: bool
    metadata: Mapping[str, Any]
    seconds: float


@dataclass(frozen=True)
class AssetDefinition:
    """An asset without Dagster: its node, the function that computes it, and the names of its checks."""

    node: Node
    function: Callable[..., Produced]
    """Its parameters are the run and, by name, its inputs."""
    checks: tuple[str, ...] = ()

    def execute(
        self,
        key: str,
        resources: Resources,
        log: Log = print,
        context: Any = None,
        rebuild: AbstractSet[str] = frozenset(),
        again: bool = False,
    ) -> Outcome:
        """Bring the partition up to date.

        Nothing is computed if the current version is what a new one would be, nor if only versions of code were raised,
        the result is expensive, and `rebuild` names neither the asset nor `planner.ALL`. A version with a failed
        blocking check is published as evidence but does not become current; it is returned with `manifest.blocked`.
        With `again` it is computed in any case.

        Raises:
            SpecError: the spec is unknown or invalid.
            LakeError: an input is missing (the message has the commands that compute it), is blocked, or changed during
                the run; or the function returned other tables or checks than the asset declares; or it would be
                computed from a kept checkpoint and new data.
            HardwareMissing: the experiment requires hardware that this machine lacks.
        """
        run = AssetRun(self.node, key, resources, log, context)
        with run.lake.shared_lock(run.log):  # nothing is removed from the lake meanwhile
            return self._execute(run, key, resources, rebuild, again)

    def _execute(
        self, run: AssetRun, key: str, resources: Resources, rebuild: AbstractSet[str], again: bool
    ) -> Outcome:
        start = time.monotonic()
        if self.node.lock == "accelerator":
            require_hardware(run.spec, key)
        require_inputs(self.node, key, resources)
        new, ref = wanted(self.node, key, run.specs, run.lake), Ref(self.node.name, self.node.set, key)
        if not again and (manifest := self._unchanged(run.lake, ref, new)):
            return Outcome(manifest, True, {}, time.monotonic() - start)
        before = run.lake.current(ref)
        change = before and compare(before, new, run.lake)
        if not again and (before is None or change) and (kept := self._kept(run, rebuild)):
            if before is None:
                raise LakeError(f"{run.label}: {kept.reason}")
            run.log(f"{run.label}: kept, although outdated: {kept.reason}; again with --rebuild {ref.asset}")
            return Outcome(before, True, {}, time.monotonic() - start)
        with self._locks(run), run.lake.staging() as run.folder:
            # Another process may have published it while this one waited for the lock.
            if not again and (manifest := self._unchanged(run.lake, ref, new)):
                return Outcome(manifest, True, {}, time.monotonic() - start)
            run.parts = Parts(run.lake.scratch(f"parts/{self.node.name}-{key}"), new.input_key)
            produced = self.function(run, **{name: Input(run, name) for name in self.node.upstream})
            self._verify(run, produced, new)
            manifest = run.lake.publish(
                ref,
                produced.tables,
                input_key=new.input_key,
                inputs=new.inputs,
                spec_hash=new.spec_hash,
                seeds=produced.seeds,
                checks=produced.checks,
                notes=produced.notes,
                spec=new.spec,
                code={"versions": run.code.whole, **({"kept": run.code.stored_name} if run.code.kept else {})},
                cause=change.cause if change else "first",
                began=start,
            )
            run.parts.remove()
        return Outcome(manifest, False, produced.metadata, time.monotonic() - start)

    def _unchanged(self, lake: Lake, ref: Ref, new: Wanted) -> Manifest | None:
        """Return the version that would be computed, or None; an earlier version becomes current again."""
        if not self.node.tables:
            return None  # the catalog is rebuilt every time: its file lies outside the lake and may be gone
        current = lake.current(ref)
        if current is not None and difference(current, new) is None and lake.blocked(ref) is None:
            for table in current.tables:
                lake.files_of(current, table)
            return current
        earlier = [m for m in lake.history(ref) if not m.blocked and difference(m, new) is None and lake.has_files(m)]
        return lake.reinstate(earlier[-1]) if earlier else None

    def _kept(self, run: AssetRun, rebuild: AbstractSet[str]) -> Step | None:
        """Return the planned step if it is kept as it is."""
        if self.node.set == "all":
            return None
        steps = chain(self.node.set, run.key, run.specs, run.lake, rebuild)
        return next((step for step in steps if (step.asset, step.key) == (self.node.name, run.key) and step.kept), None)

    @contextmanager
    def _locks(self, run: AssetRun) -> Iterator[None]:
        """Hold the locks on this partition and on the resource that the node names."""
        partition = run.lake.lock(f"{self.node.name}-{run.key}", log=run.log, what=run.label, doing="making")
        with partition, ExitStack() as stack:
            if name := self.node.lock:
                stack.enter_context(resource_lock(name, run.lake, run.log))
            yield

    def _verify(self, run: AssetRun, produced: Produced, new: Wanted) -> None:
        if set(produced.tables) != set(self.node.tables):
            raise LakeError(
                f"{self.node.name} returned tables {sorted(produced.tables)}; declared are {sorted(self.node.tables)}"
            )
        reported = [check.name for check in produced.checks]
        expected = [] if "not_applicable" in produced.notes else self.checks
        if sorted(reported) != sorted(expected) and not (set(reported) <= set(self.checks) and not expected):
            raise LakeError(f"{self.node.name} reported checks {sorted(reported)}, it declares {sorted(self.checks)}")
        if wrong := undeclared(self.node.name, produced.checks):
            raise LakeError(
                f"{self.node.name}: {', '.join(wrong)} does not block as checks.toml declares; say so in both places"
            )
        now = inputs_of(self.node, run.key, run.specs, run.lake, run.lake.current)
        if self.node.tables and now != new.inputs:
            changed = ", ".join(sorted(differing(new.inputs, now)))
            raise LakeError(f"{self.node.name} of {run.key}: {changed} changed while it was computed; run it again")


@dataclass(frozen=True)
class _KeptParts:
    """The factory of `parts_of`: computes a part unless it is finished, and keeps it."""

    parts: Parts
    factory: Callable[[], BlockFunction]

    def __call__(self) -> Callable[[tuple[str, Any]], Tables]:
        function = self.factory()
        return lambda named: self.parts.get(named[0], lambda: function(named[1]))


def asset(
    *,
    set: Set,
    group: str,
    summary: str,
    tables: tuple[str, ...] = (),
    sections: tuple[str, ...] = (),
    versions: tuple[str, ...] = (),
    kept: tuple[str, ...] = (),
    expensive: Callable[[Any], bool] = lambda spec: True,
    lock: str | None = None,
    reads_path: bool = False,
    kinds: tuple[str, ...] = ("parquet",),
    across_seams: bool = False,
) -> Callable[[Callable[..., Produced]], AssetDefinition]:
    """Declare the asset that a function computes: it has the function's name and reads the function's parameters.

    The first parameter is the run, every other one is an `Input` named after an asset; their order is that of the input
    key. `Node` describes the arguments. The asset's checks are those of its name in checks.toml.

    Raises:
        GraphError: a table, section or component is unknown, or the asset is declared already. The graph checks the
            inputs.
    """

    def declare(function: Callable[..., Produced]) -> AssetDefinition:
        name, upstream = function.__name__, tuple(inspect.signature(function).parameters)[1:]
        keys = spec_keys("experiment" if set == "all" else set)
        unknown = [section for section in sections if keys.isdisjoint({section, f"{section.rpartition('.')[0]}.*"})]
        _require_known(name, "table", tables, TABLES)
        _require_known(name, f"key of a spec ({set})", unknown, keys)
        node = Node(
            name, set, group, tables, summary, function.__module__, upstream, sections, versions, kept, expensive, lock,
            reads_path, kinds, across_seams,
        )  # fmt: skip
        require_components(node)
        GRAPH.declare(node)
        _DEFINITIONS[name] = AssetDefinition(node, function, tuple(CHECKS.get(name, {})))
        return _DEFINITIONS[name]

    return declare


_DEFINITIONS: dict[str, AssetDefinition] = {}


def asset_definitions() -> dict[str, AssetDefinition]:
    """Return the definition of every asset by name, in topological order.

    Raises:
        GraphError: checks.toml has checks of an unknown asset, or a declaration is wrong.
    """
    _require_known("checks.toml", "asset", CHECKS, nodes := GRAPH.load())
    return {name: _DEFINITIONS[name] for name in nodes}


def _require_known(asset: str, what: str, names: Iterable[str], known: Collection[str]) -> None:
    for name in names:
        if name not in known:
            raise GraphError(f"{asset} names the {what} {name!r}, which does not exist{nearest(name, known)}")


def label(asset: str, key: str) -> str:
    """Return the name of an asset partition in messages."""
    return asset if key == "all" else f"{asset} of {key}"


def resource_lock(name: str, lake: Lake, log: Log) -> AbstractContextManager[Held | None]:
    """Hold the lock of a node: a place at the machine's "accelerator" or "sandboxes", or the lake's "reports"."""
    if name == "accelerator" and (devices := visible_devices()):
        return _devices_lock(devices, lake, log)
    if name in MACHINE_RESOURCES:
        return lake.machine_lock(name, side_by_side(), log=log, what=f"the {name}")
    return lake.lock(name, log=log, what=f"the {name}", doing="using")


@contextmanager
def _devices_lock(devices: Sequence[str], lake: Lake, log: Log) -> Iterator[None]:
    """Lock some accelerators of the machine against runs on the same ones and runs on all of them."""
    with ExitStack() as stack:
        stack.enter_context(lake.machine_lock("accelerator", log=log, what="the accelerator", shared=True))
        for device in sorted(devices):  # in one order, so that no two runs wait for each other
            stack.enter_context(lake.machine_lock(f"accelerator-{device}", log=log, what=f"accelerator {device}"))
        yield


def require_inputs(node: Node, key: str, resources: Resources) -> None:
    """Raise an error if an input of the partition is missing or blocked.

    Raises:
        MissingInput: the message has the commands that compute the whole chain.
        BlockedInput: the message contains the failed check's.
    """
    if node.set == "all":
        return  # it reads the experiments that have results
    lake, specs = resources.lake, resources.specs
    for ref in upstream_refs(node, key, specs, lake):
        try:
            require(ref, specs, lake)
        except MissingInput as error:
            command = f"etpi run {key}" if node.set == "experiment" else ref.command
            raise MissingInput(f"{node.name} of {key} needs {ref}, which has no data. Run `{command}`") from error
