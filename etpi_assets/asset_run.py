"""One materialization of one asset partition, without Dagster: inputs, the skip rule, locks, publishing.

Belongs here: everything an asset has in common besides how Dagster sees it (`materialize`). Does not belong here: what
any asset computes.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Self

import pyarrow as pa

from etpi_assets.graph import GRAPH, Node
from etpi_assets.planner import (
    SPEC_CHANGED,
    Change,
    Consent,
    compare,
    consent_for,
    expected_key,
    inputs_of,
    remedy,
    upstream_refs,
)
from etpi_assets.resources import Resources, accelerators, require_hardware
from etpi_assets.specs.load import AnySpec, Specs
from etpi_assets.versioning.keys import PartitionCode, code_of
from etpi_resources.lake import parquet
from etpi_resources.lake.checks import CheckOutcome
from etpi_resources.lake.lake import Lake, LakeError, Manifest, MissingInput, Ref
from etpi_resources.lake.schemas import empty
from etpi_resources.lake.stored import Spooled, Stored
from etpi_resources.process.progress import WORKER_VARIABLE, Progress

Log = Callable[[str], None]


class CodeChanged(LakeError):
    """An expensive version was made by other code, and nobody has said whether that matters."""


CONSENT_TAG = "etpi/"
"""Begins the run tags that give a consent: etpi/rebuild, etpi/recollect."""


@dataclass
class Produced:
    """What an asset function returns.

    Attributes:
        tables: every table of its node, by name: a table, what was spooled (`AssetRun.spool`), or a stream of record
            batches.
        checks: the outcome of every check the asset declares.
        metadata: shown on the asset's page: plain values, or Dagster's own MetadataValue.
        notes: kept in the manifest (JSON).
        seeds: the seeds behind the result, kept in the manifest.
    """

    tables: Mapping[str, pa.Table | Spooled | Iterable[pa.RecordBatch]]
    checks: Sequence[CheckOutcome] = ()
    metadata: Mapping[str, Any] = field(default_factory=dict)
    notes: Mapping[str, Any] = field(default_factory=dict)
    seeds: Sequence[int] = ()

    @classmethod
    def not_applicable(cls, node_name: str, reason: str) -> Self:
        """An empty version that says why there is nothing; its checks pass for want of data."""
        tables = {name: empty(name) for name in GRAPH[node_name].tables}
        return cls(tables=tables, metadata={"not_applicable": reason}, notes={"not_applicable": reason})


class AssetRun:
    """What an asset function is handed.

    Attributes:
        node: its node of the graph.
        key: its partition ("all" where it has none).
        specs: every spec, as of the start of the run.
        resources: lake, sandboxes, engines.
        log: writes one line to the run's log.
        context: Dagster's execution context, for trainers that speak through Pipes; None without Dagster.
        folder: where tables are spooled until they are published; None where nothing is made.
    """

    def __init__(self, node: Node, key: str, resources: Resources, log: Log = print, context: Any = None) -> None:
        self.node, self.key, self.resources, self.log, self.context = node, key, resources, log, context
        self.folder: Path | None = None
        self.specs: Specs = resources.specs
        self.lake: Lake = resources.lake

    @cached_property
    def spec(self) -> Any:
        """The SuiteSpec, RolloutSetSpec or ExperimentSpec of the key; None for an asset without partitions."""
        return self._spec()

    def _spec(self) -> AnySpec | None:
        return None if self.node.set == "all" else self.specs.get(self.node.set, self.key)

    def refs(self, asset: str) -> list[Ref]:
        """The partitions of an upstream asset that this one reads, in spec order.

        Raises:
            LakeError: the graph does not name the asset as upstream, so its version would not be in the input key.
        """
        if asset not in self.node.upstream:
            raise LakeError(
                f"{self.node.name} reads {asset!r}, which etpi_assets/graph.py does not name upstream of it"
            )
        return upstream_refs(self.node, self.key, self.specs, self.lake, asset)

    def read(self, asset: str, table: str, key: str | None = None, columns: Sequence[str] | None = None) -> pa.Table:
        """A table of an upstream asset, of one of its partitions or of all that this one reads, one after the other.

        Raises as `Lake.read` and `refs` do; a key that this partition does not read is a LakeError.
        """
        return parquet.read(table, self.stored(asset, table, key).paths, columns)

    def stored(self, asset: str, table: str, key: str | None = None) -> Stored:
        """What `read` reads, to be read piece by piece: for tables of a row a turn, which may be longer than memory."""
        refs = self.refs(asset)
        if key is not None:
            if key not in [ref.key for ref in refs]:
                raise LakeError(
                    f"{self.node.name} of {self.key!r} does not read {asset} of {key!r}, only {[r.key for r in refs]}"
                )
            refs = [ref for ref in refs if ref.key == key]
        return Stored(table, [path for ref in refs for path in self.lake.files(ref, table)])

    def spool(self, table: str) -> parquet.Writer:
        """A writer of a table of this asset, piece by piece; use it as a context manager, then `spooled`."""
        return parquet.Writer(table, self._spooled(table))

    def spooled(self, table: str) -> Spooled:
        """What was written there: to be read again by checks, and to be published."""
        return Spooled(table, [self._spooled(table)])

    def _spooled(self, table: str) -> Path:
        assert self.folder is not None, "only a run that publishes has a place to spool in"
        return self.folder / f"{table}.parquet"

    @cached_property
    def code(self) -> PartitionCode:
        """The code behind the partition."""
        return code_of(self.node, self.key, self.specs)

    @cached_property
    def kept_code(self) -> str:
        """The code version under which expensive results of this partition are kept: its own, or the one of before
        where a person has accepted the change since."""
        assert self.code.kept is not None, f"{self.node.name} keeps nothing; its node says what does"
        have = self.lake.current(Ref(self.node.name, self.node.set, self.key))
        recorded = have.code if have else {}
        same = recorded.get("kept") == self.code.kept.digest
        return recorded.get("kept_root", self.code.kept.digest) if same else self.code.kept.digest

    @property
    def keeps_older(self) -> bool:
        """Whether results kept by an older code version, accepted since, may be part of this one."""
        return self.code.kept is not None and self.kept_code != self.code.kept.digest

    @property
    def label(self) -> str:
        """The asset and its partition, for messages."""
        return label(self.node.name, self.key)

    def progress(self, stage: str, total: int) -> Progress:
        """A counter that shows stage, done/total, rate and time left; use it as a context manager."""
        return Progress(self.label, stage, total)


@dataclass(frozen=True)
class Outcome:
    """A materialization: the version in force (or blocked), whether it stood already, what to show, wall seconds."""

    manifest: Manifest
    skipped: bool
    metadata: Mapping[str, Any]
    seconds: float


@dataclass(frozen=True)
class Recipe:
    """An asset before Dagster: its node, the function that computes it, the names of its checks."""

    node: Node
    function: Callable[[AssetRun], Produced]
    checks: tuple[str, ...] = ()

    def execute(
        self,
        key: str,
        resources: Resources,
        log: Log = print,
        context: Any = None,
        consent: Set[Consent] = frozenset(),
    ) -> Outcome:
        """Bring the partition up to date.

        Where the version in force has the same input key, nothing is computed. A version whose blocking check failed
        is published as evidence and returned; the caller looks at `manifest.blocked`.

        Raises:
            CodeChanged: the version in force was expensive, only code has changed since, and `consent` does not cover
                it.
            SpecError: the spec is unknown or invalid.
            LakeError: an input is missing (with the commands that make it), blocked, or moved meanwhile; or the
                function returned other tables or checks than declared.
            HardwareMissing: the experiment wants hardware that is not here.
        """
        start = time.monotonic()
        run = AssetRun(self.node, key, resources, log, context)
        if self.node.lock == "accelerator":
            require_hardware(run.spec, key)
        require_inputs(self.node, key, resources)
        inputs = inputs_of(self.node, key, run.specs, run.lake, run.lake.current)
        wanted = expected_key(self.node, key, run.specs, inputs, run.code)
        ref = Ref(self.node.name, self.node.set, key)
        if manifest := self._unchanged(run.lake, ref, wanted):
            return Outcome(manifest, True, {}, time.monotonic() - start)
        before = run.lake.current(ref)
        change = before and compare(self.node, key, run.specs, inputs, run.code, before, run.lake)
        if before and change:
            self._ask(run, before, change, consent)
        with self._alone(run), run.lake.staging() as run.folder:
            # Another process may have made it while this one waited.
            if manifest := self._unchanged(run.lake, ref, wanted):
                return Outcome(manifest, True, {}, time.monotonic() - start)
            produced = self.function(run)
            self._verify(run, produced, inputs)
            manifest = run.lake.publish(
                ref,
                produced.tables,
                input_key=wanted,
                inputs=inputs,
                spec_hash=run.specs.section_hash(self.node.set, key, self.node.sections),
                spec=run.specs.sections(self.node.set, key, self.node.sections),
                seeds=produced.seeds,
                checks=produced.checks,
                notes=produced.notes,
                code={**run.code.to_json(), **({"kept_root": run.kept_code} if run.keeps_older else {})},
                cause=_cause(change),
                accepted=before.accepted if before and run.keeps_older else (),
                began=start,
            )
            run.lake.keep_code(run.code.whole.digest, run.code.whole.definitions)
        return Outcome(manifest, False, produced.metadata, time.monotonic() - start)

    def _ask(self, run: AssetRun, before: Manifest, change: Change, consent: Set[Consent]) -> None:
        """Raise CodeChanged where an expensive result would be computed again without anybody having asked for it."""
        option = consent_for(self.node.name)
        asks = change.needs_consent(self.node, run.key, run.specs, run.code, before)
        if asks and option not in consent and run.lake.blocked(before.ref) is None:
            cost = f" It took {before.seconds:.0f} s last time." if before.seconds else ""
            raise CodeChanged(
                f"{run.key}: {change.reason}.{cost} Compute it again with --{option} (as a run tag: "
                f'{CONSENT_TAG}{option}: "true"), or, if the change cannot matter, keep the version: '
                f'etpi accept {self.node.name} {run.key} --because "..."'
            )

    def _unchanged(self, lake: Lake, ref: Ref, wanted: str) -> Manifest | None:
        """The version in force, if it is what would be made; else an earlier one that is, put in force again (a knob
        was turned and turned back). The catalog is made anew each time: somebody may have removed the file."""
        if not self.node.tables:
            return None
        current = lake.current(ref)
        if current is not None and current.input_key == wanted and lake.blocked(ref) is None:
            for table in current.tables:
                lake.files_of(current, table)
            return current
        earlier = [m for m in lake.history(ref) if m.input_key == wanted and not m.blocked]
        return lake.reinstate(earlier[-1]) if earlier else None

    @contextmanager
    def _alone(self, run: AssetRun) -> Iterator[None]:
        """Hold what nobody else may use meanwhile: this partition, and what the node's lock stands for."""
        partition = run.lake.lock(f"{self.node.name}-{run.key}", log=run.log, what=run.label, doing="making")
        with partition, ExitStack() as stack:
            if name := self.node.lock:
                stack.enter_context(run.lake.lock(shared_lock(name), log=run.log, what=f"the {name}", doing="using"))
            yield

    def _verify(self, run: AssetRun, produced: Produced, inputs: Mapping[str, str]) -> None:
        if set(produced.tables) != set(self.node.tables):
            raise LakeError(
                f"{self.node.name} made tables {sorted(produced.tables)}, its node says {sorted(self.node.tables)}"
            )
        reported = [check.name for check in produced.checks]
        expected = [] if "not_applicable" in produced.notes else self.checks
        if sorted(reported) != sorted(expected) and not (set(reported) <= set(self.checks) and not expected):
            raise LakeError(f"{self.node.name} reported checks {sorted(reported)}, it declares {sorted(self.checks)}")
        now = inputs_of(self.node, run.key, run.specs, run.lake, run.lake.current)
        if self.node.tables and now != inputs:
            changed = sorted(name for name in {**now, **inputs} if now.get(name) != inputs.get(name))
            raise LakeError(
                f"{self.node.name} of {run.key}: {', '.join(changed)} changed while it was computed; run it again"
            )


def _cause(change: Change | None) -> str:
    """What `Manifest.cause` records."""
    if change is None:
        return "first"
    if change.state == "code" or change.by_code:
        return "code"
    return "spec" if change.reason.startswith(SPEC_CHANGED) else "inputs"


def label(asset: str, key: str) -> str:
    """An asset and its partition, for messages."""
    return asset if key == "all" else f"{asset} of {key}"


def shared_lock(name: str) -> str:
    """The lock on what several runs share, "accelerator" or "sandboxes": the machine's own, or, where nothing but cores
    is shared, the lane's, which has its part of them."""
    lane = os.environ.get(WORKER_VARIABLE)
    return f"{name}-{lane}" if lane and not accelerators() else name


def require_inputs(node: Node, key: str, resources: Resources, but: Collection[str] = ()) -> None:
    """Raise where an input of the partition is missing or blocked, save of the assets named by `but`.

    Raises:
        MissingInput: with the commands that make the whole chain.
        BlockedInput: with the message of the check that failed.
    """
    if node.set == "all":
        return  # it reads whatever there is
    lake, specs = resources.lake, resources.specs
    for ref in upstream_refs(node, key, specs, lake):
        if ref.asset in but:
            continue
        try:
            lake.require(ref)
        except MissingInput as error:
            how = remedy(ref, specs, lake, experiment=key if node.set == "experiment" else None)
            raise MissingInput(f"{node.name} of {key} needs {ref}, which has no data. {how}") from error
