"""Turn a node of the graph and a plain function into a Dagster asset: partitions, dependencies, checks, metadata.

The skip rule and publishing are in `asset`.
"""

from __future__ import annotations

import json
import resource
import warnings
from collections.abc import Mapping
from typing import Any

import dagster as dg

from etpi_assets.asset import (
    CONSENT_TAG,
    AssetRecipe,
    Markdown,
    Outcome,
    label,
    require_inputs,
)
from etpi_assets.backfills import refuse_whole_set
from etpi_assets.checks import check_info
from etpi_assets.dagster_private import ExpectedFailure
from etpi_assets.graph import GRAPH, JOBS, Node
from etpi_assets.partitions import PARTITION_TAG, mapping, partition_sets
from etpi_assets.planner import CONSENTS, Consent
from etpi_assets.resources import EngineUnavailable, HardwareMissing, Resources, require_hardware
from etpi_assets.specs.load import SpecError, Specs
from etpi_assets.specs.paths import PathError
from etpi_assets.versioning.keys import asset_code
from etpi_assets.webpage.metadata import of_version
from etpi_resources.chat.format import TokenizerUnavailable
from etpi_resources.cluster.environment import require_code_of_run
from etpi_resources.cluster.settings import ClusterError
from etpi_resources.lake.checks import BadData
from etpi_resources.lake.files import disk_errors
from etpi_resources.lake.lake import LakeError
from etpi_resources.lake.schemas import TABLES
from etpi_resources.process.locks import LockLost
from etpi_resources.process.progress import NOT_ON_CONSOLE, Activity, acting_for, display
from etpi_resources.sandboxes import SandboxUnavailable
from etpi_resources.trainers.pipes import WorkerFailed

OWNER = "team:etpi"
RESOURCE = "etpi"
CONSOLE_SECONDS = 5.0
"""The console has a line for an asset that took at least this long; the web page has one for each."""
EXPECTED_FAILURES = (
    LakeError,
    LockLost,
    ClusterError,
    SpecError,
    PathError,
    HardwareMissing,
    EngineUnavailable,
    SandboxUnavailable,
    WorkerFailed,
    BadData,
    TokenizerUnavailable,
)
"""Errors whose message is complete; Dagster shows them without a traceback."""


# With partitions, a check result is shown beside the partition it checked. Dagster warns that this is a preview.
warnings.filterwarnings("ignore", message="Specifying a partitions_def on an AssetCheckSpec")


def build_asset(recipe: AssetRecipe, specs: Specs) -> dg.AssetsDefinition:
    """Build the Dagster asset of a recipe; its partitions and mappings come from the specs."""
    node = recipe.node

    @dg.asset(
        name=node.name,
        group_name=node.group,
        description=_description(node),
        owners=[OWNER],
        kinds=set(node.kinds),
        tags={"etpi/set": node.set},
        code_version=asset_code(node),
        partitions_def=partition_sets(specs).get(node.set),
        deps=_deps(node, specs),
        metadata=_columns(node),
        check_specs=[
            dg.AssetCheckSpec(
                check,
                asset=node.name,
                description=info.description if (info := check_info(node.name, check)) else None,
                blocking=True,
                partitions_def=partition_sets(specs).get(node.set),
            )
            for check in recipe.checks
        ],
        required_resource_keys={RESOURCE},
    )
    def materialize(context):
        resources = getattr(context.resources, RESOURCE)
        before = _cpu_seconds()
        try:
            require_code_of_run()
            key = _key(context, node, resources.specs)
            if node.set != "all":
                known = context.assets_def.partitions_def.get_partition_keys()
                refuse_whole_set(context.instance, context.run.tags, node.set, known)
            if node.group == "specs":
                _require_inputs_of_run(recipe.node, key, _selected_assets(context), resources)
            display().show(Activity(label(node.name, key)))
            with disk_errors(), acting_for(key):
                outcome = recipe.execute(key, resources, context.log.info, context, _consent(context))
        except EXPECTED_FAILURES as error:
            raise ExpectedFailure(f"{node.name}: {error}") from None
        _log_outcome(context, node, key, outcome)
        yield dg.MaterializeResult(
            data_version=dg.DataVersion(outcome.manifest.version),
            metadata={
                **(_carried_over(context, node, outcome) if outcome.skipped else {}),
                **of_version(node, outcome.manifest, resources.lake),
                **{name: _shown(value) for name, value in outcome.metadata.items()},
                "skipped": outcome.skipped,
                **({} if outcome.skipped else {"cpu_seconds": round(_cpu_seconds() - before, 3)}),
            },
            check_results=_check_results(recipe, key, outcome),
        )
        if outcome.manifest.blocked:
            # Dagster itself would fail the step with nothing but the check's name.
            raise ExpectedFailure(_failure_message(node, key, outcome))

    return materialize


# --- the partition ---------------------------------------------------------------------------------------------------


def _key(context: dg.AssetExecutionContext, node: Node, specs: Specs) -> str:
    """Return the partition key. `dagster job launch` does not validate it, so it may be missing or unknown.

    Raises:
        SpecError: it is missing or unknown; the message lists the valid ones.
    """
    if node.set == "all":
        return "all"
    key = context.run.tags.get(PARTITION_TAG)
    if key is None:
        names = ", ".join(specs.keys(node.set))
        raise SpecError(
            f"this run names no {node.set.replace('_', ' ')}: start it with --partition NAME (dg launch) or "
            f'--tags \'{{"{PARTITION_TAG}": "NAME"}}\' (dagster job launch). Valid names: {names}'
        )
    specs.get(node.set, key)
    return key


def _consent(context: dg.AssetExecutionContext) -> frozenset[Consent]:
    """Return the consent that the run's tags give."""
    return frozenset(o for o in CONSENTS if context.run.tags.get(f"{CONSENT_TAG}{o}", "").lower() == "true")


def _selected_assets(context: dg.AssetExecutionContext) -> set[str]:
    """Return the names of the assets in this run."""
    selection = context.run.asset_selection
    return {key.path[-1] for key in selection} if selection else set(JOBS[context.run.job_name][1])


def _require_inputs_of_run(node: Node, key: str, selected: set[str], resources: Resources) -> None:
    """Fail in the first step, the spec asset, where a later step of the run would miss an input or hardware."""
    nodes = [GRAPH[name] for name in GRAPH if name in selected and GRAPH[name].set == node.set]
    if any(later.lock == "accelerator" for later in nodes):
        require_hardware(resources.specs.get(node.set, key), key)
    for later in nodes:
        require_inputs(later, key, resources, but=selected)


def _deps(node: Node, specs: Specs) -> list[dg.AssetDep]:
    """Return the node's upstream assets and its spec asset; for the catalog, all other assets."""
    names = list(node.upstream) if node.tables else [name for name in GRAPH if name != node.name]
    if node.set != "all" and node.group != "specs":
        names.append(f"{node.set}_spec")
    return [dg.AssetDep(name, partition_mapping=mapping(node, GRAPH[name], specs)) for name in names]


def _cpu_seconds() -> float:
    """CPU seconds of this process and of its ended children: workers and sandboxes."""
    uses = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(use.ru_utime + use.ru_stime for use in uses)


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


def _check_results(recipe: AssetRecipe, key: str, outcome: Outcome) -> list[dg.AssetCheckResult]:
    """Return a result for every declared check; a check that does not apply passes, with a note.

    A figure's label names the partition, because the page draws one plot for each label.
    """
    reported = {check["name"]: check for check in outcome.manifest.checks}
    results = []
    for name in recipe.checks:
        check = reported.get(name)
        results.append(
            dg.AssetCheckResult(
                check_name=name,
                passed=check is None or check["passed"],
                severity=dg.AssetCheckSeverity.ERROR if check and check["blocking"] else dg.AssetCheckSeverity.WARN,
                description=check["message"] if check else "does not apply here",
                metadata={label(k, key): _plain(v) for k, v in (check["figures"] if check else {}).items()},
            )
        )
    return results


def _plain(value: Any) -> Any:
    return value if isinstance(value, (str, int, float, bool, dict, list)) else json.dumps(value)


def _shown(value: Any) -> Any:
    return dg.MetadataValue.md(value) if isinstance(value, Markdown) else value


def _log_outcome(context: dg.AssetExecutionContext, node: Node, key: str, outcome: Outcome) -> None:
    name, manifest = label(node.name, key), outcome.manifest
    rows = ", ".join(f"{n} {table}" for table, n in manifest.rows.items() if n)
    quiet = {NOT_ON_CONSOLE: True}  # the line that ends the job counts it
    if outcome.skipped:
        context.log.info(f"{name} unchanged: version {manifest.version}", extra=quiet)
    elif reason := manifest.notes.get("not_applicable"):
        context.log.info(f"{name} not applicable: {reason}", extra=quiet)
    else:
        of = f"; {rows or 'no rows'}" if node.tables else ""
        extra = quiet if outcome.seconds < CONSOLE_SECONDS else None
        context.log.info(f"{name} made in {outcome.seconds:.1f} s{of}", extra=extra)
    for check in manifest.checks:
        if not check["passed"] and not check["blocking"]:
            context.log.warning(f"{name}: {check['name']}: {check['message']}")
    if without := [check["name"] for check in manifest.checks if not check.get("applicable", True)]:
        context.log.info(
            f"{name}: not applicable: {', '.join(without)} (see the view checks for the reasons)", extra=quiet
        )


def _failure_message(node: Node, key: str, outcome: Outcome) -> str:
    lines = [f"  {check['name']}: {check['message']}" for check in outcome.manifest.failures]
    of = "" if key == "all" else f" of {key}"
    return f"{node.name}{of}: blocked by failed checks; nothing downstream will read it.\n" + "\n".join(lines)
