"""Turn a node of the graph and a plain function into a Dagster asset: partitions, dependencies, checks, metadata.

The skip rule and publishing are in `asset`.
"""

from __future__ import annotations

import json
import traceback
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import dagster as dg

from etpi_assets.asset import (
    AssetDefinition,
    Markdown,
    Outcome,
    label,
)
from etpi_assets.checks import CHECKS, is_blocking
from etpi_assets.graph import GRAPH, Node
from etpi_assets.orchestration.partitions import PARTITION_TAG, mapping, partition_sets, refuse_whole_set
from etpi_assets.orchestration.webpage import of_version
from etpi_assets.planning.planner import ALL, REBUILD_TAG
from etpi_assets.planning.versions import asset_version
from etpi_assets.specs.load import SpecError, Specs
from etpi_assets.specs.paths import as_written
from etpi_resources.backend import backend
from etpi_resources.errors import ExpectedError
from etpi_resources.lake.check_outcome import shown
from etpi_resources.lake.files import disk_errors
from etpi_resources.lake.schemas import TABLES
from etpi_resources.process.progress import acting_for

OWNER = "team:etpi"
RESOURCE = "etpi"
EXPERIMENT_INPUTS = "experiment_inputs"
"""The asset that comes before an experiment's spec (`experiment_inputs`)."""
CONSOLE_SECONDS = 5.0
"""The log has a line for an asset that took at least this long, and an event for each."""


# With partitions, a check result is shown beside the partition it checked. Dagster warns that this is a preview.
warnings.filterwarnings("ignore", message="Specifying a partitions_def on an AssetCheckSpec")


def build_asset(definition: AssetDefinition, specs: Specs) -> dg.AssetsDefinition:
    """Build the Dagster asset of a definition; its partitions and mappings come from the specs."""
    node = definition.node

    @dg.asset(
        name=node.name,
        group_name=node.group,
        description=_description(node),
        owners=[OWNER],
        kinds=set(node.kinds),
        tags={"etpi/set": node.set},
        code_version=asset_version(node),
        partitions_def=partition_sets(specs).get(node.set),
        deps=_deps(node, specs),
        metadata=_columns(node),
        check_specs=[
            dg.AssetCheckSpec(
                check,
                asset=node.name,
                description=info.description if (info := CHECKS.get(node.name, {}).get(check)) else None,
                blocking=is_blocking(node.name, check),
                partitions_def=partition_sets(specs).get(node.set),
            )
            for check in definition.checks
        ],
        required_resource_keys={RESOURCE},
    )
    def materialize(context):
        resources = getattr(context.resources, RESOURCE)
        with expected_failures(node.name):
            key = partition_of(context, node.set, resources.specs)
        outcome, metadata = compute(definition, key, context)
        yield dg.MaterializeResult(
            data_version=dg.DataVersion(outcome.manifest.version),
            metadata=metadata,
            check_results=check_results(definition, key, outcome),
        )
        refuse_blocked(outcome)

    return materialize


@contextmanager
def expected_failures(asset: str) -> Iterator[None]:
    """Have an error whose message is complete fail the step with that message, without a retry.

    Dagster stores what is raised, so paths are as the spec writes them: their variables may be secrets.
    """
    try:
        yield
    except ExpectedError as error:
        raise dg.Failure(as_written(f"{asset}: {error}"), allow_retries=False) from None
    except Exception:
        if (text := traceback.format_exc()) == as_written(text):
            raise
        raise dg.Failure(f"{asset}: {as_written(text)}") from None


def compute(definition: AssetDefinition, key: str, context: dg.AssetExecutionContext) -> tuple[Outcome, dict[str, Any]]:
    """Bring a partition up to date; return its outcome and the metadata of its materialization.

    Raises:
        dg.Failure: it cannot be computed, for an ExpectedError.
    """
    node, resources = definition.node, getattr(context.resources, RESOURCE)
    with expected_failures(node.name), disk_errors(), acting_for(key):
        outcome = definition.execute(
            key, resources, lambda line: context.log.info(as_written(line)), context, rebuild_of(context.run)
        )
    _log_outcome(context, node, key, outcome)
    return outcome, {
        **(_carried_over(context, node, outcome) if outcome.skipped else {}),
        **of_version(node, outcome.manifest, resources.lake),
        **{name: _shown(value) for name, value in outcome.metadata.items()},
        "skipped": outcome.skipped,
    }


def refuse_blocked(outcome: Outcome) -> None:
    """Fail the step if the version is blocked; Dagster itself would name the checks only."""
    manifest = outcome.manifest
    if manifest.blocked:
        lines = [f"  {check['name']}: {check['message']}" for check in manifest.failures]
        what = label(manifest.ref.asset, manifest.ref.key)
        heading = f"{what}: blocked by failed checks; nothing downstream will read it."
        raise dg.Failure(as_written("\n".join([heading, *lines])), allow_retries=False)


# --- the partition ---------------------------------------------------------------------------------------------------


def partition_of(context: dg.AssetExecutionContext, set_name: str, specs: Specs) -> str:
    """Return the partition key of a run. `dagster job launch` does not validate it, so it may be missing or unknown.

    Raises:
        SpecError: it is missing or unknown; the message lists the valid ones.
        ClusterError: this node has other code than the process that walks the run.
        dg.Failure: the run belongs to a backfill over every partition of the set.
    """
    if elsewhere := backend():
        elsewhere.require_same_code()
    if set_name == "all":
        return "all"
    key = context.run.tags.get(PARTITION_TAG)
    if key is None:
        names = ", ".join(specs.keys(set_name))
        raise SpecError(
            f"this run names no {set_name.replace('_', ' ')}: start it with --partition NAME (dg launch) or "
            f'--tags \'{{"{PARTITION_TAG}": "NAME"}}\' (dagster job launch). Valid names: {names}'
        )
    specs.get(set_name, key)
    if on_page := context.assets_def.partitions_def:
        refuse_whole_set(context.instance, context.run.tags, set_name, on_page.get_partition_keys())
    return key


def rebuild_of(run: dg.DagsterRun) -> frozenset[str]:
    """Return the assets that a run's tag says to rebuild; "true" is all."""
    names = {name.strip() for name in run.tags.get(REBUILD_TAG, "").split(",")} - {"", "false"}
    return frozenset(ALL if name.lower() == "true" else name for name in names)


def dependencies(node: Node) -> list[str]:
    """Return the names of the assets upstream of a node in Dagster: its inputs and its spec; for the catalog, all."""
    names = list(node.upstream) if node.tables else [name for name in GRAPH if name != node.name]
    return names if node.set == "all" or node.group == "specs" else [*names, f"{node.set}_spec"]


def _deps(node: Node, specs: Specs) -> list[dg.AssetDep]:
    deps = [dg.AssetDep(name, partition_mapping=mapping(node, GRAPH[name], specs)) for name in dependencies(node)]
    return [*deps, dg.AssetDep(EXPERIMENT_INPUTS)] if node.name == "experiment_spec" else deps


# --- what the web page shows -----------------------------------------------------------------------------------------


def _description(node: Node) -> str:
    tables = "".join(f"\n- `{name}`: {TABLES[name].row}" for name in node.tables)
    return f"{node.summary}\n\nTables:{tables}" if tables else node.summary


def _columns(node: Node) -> dict[str, Any]:
    """Column schemas: of the first table under the name that Dagster shows, of the others under `columns/TABLE`."""

    def schema(name: str) -> dg.TableSchema:
        columns = [dg.TableColumn(n, str(t), description=d) for n, t, d in TABLES[name].columns]
        return dg.TableSchema(columns)

    first, *rest = node.tables or (None,)
    named = {f"columns/{name}": schema(name) for name in rest if name}
    return {"dagster/column_schema": schema(first), **named} if first else {}


def _carried_over(context: dg.AssetExecutionContext, node: Node, outcome: Outcome) -> Mapping[str, Any]:
    """Metadata of the last event of the same version, so that a skipped run does not empty the asset's page."""
    result = context.instance.fetch_materializations(
        dg.AssetRecordsFilter(
            asset_key=dg.AssetKey(node.name),
            asset_partitions=None if node.set == "all" else [outcome.manifest.ref.key],
        ),
        limit=1,
    )
    for record in result.records:
        event = record.asset_materialization
        if event and (event.tags or {}).get("dagster/data_version") == outcome.manifest.version:
            return event.metadata
    return {}


def check_results(definition: AssetDefinition, key: str, outcome: Outcome) -> list[dg.AssetCheckResult]:
    """Return a result for every declared check; a check that does not apply passes, with a note.

    A figure's label names the partition, because the page draws one plot for each label.
    """
    reported = {check["name"]: check for check in outcome.manifest.checks}
    results = []
    for name in definition.checks:
        check = reported.get(name)
        results.append(
            dg.AssetCheckResult(
                check_name=name,
                passed=check is None or check["passed"],
                severity=dg.AssetCheckSeverity.ERROR if check and check["blocking"] else dg.AssetCheckSeverity.WARN,
                description=as_written(shown(check)) if check else "does not apply here",
                metadata={label(k, key): _plain(v) for k, v in (check["figures"] if check else {}).items()},
            )
        )
    return results


def _plain(value: Any) -> Any:
    return value if isinstance(value, (str, int, float, bool, dict, list)) else json.dumps(value)


def _shown(value: Any) -> Any:
    if isinstance(value, Markdown):
        return dg.MetadataValue.md(as_written(value))
    return as_written(value) if isinstance(value, str) else value


def _log_outcome(context: dg.AssetExecutionContext, node: Node, key: str, outcome: Outcome) -> None:
    """Log a slow computation and the checks that warn; the events of the materialization have the rest."""
    name, manifest = label(node.name, key), outcome.manifest
    if not outcome.skipped and outcome.seconds >= CONSOLE_SECONDS:
        rows = ", ".join(f"{n} {table}" for table, n in manifest.rows.items() if n)
        row_counts = f"; {rows or 'no rows'}" if node.tables else ""
        context.log.info(f"{name} computed in {outcome.seconds:.1f} s{row_counts}")
    for check in manifest.checks:
        if not check["passed"] and not check["blocking"]:
            context.log.warning(as_written(f"{name}: {check['name']}: {check['message']}"))
