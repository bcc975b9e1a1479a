"""The asset `raw_rollouts`."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa

from etpi_assets.agent.harness import run_harness
from etpi_assets.agent.loop import Identity, RolloutJob, RolloutRuntime, run_rollout
from etpi_assets.asset import AssetRun, Input, Produced, asset, resource_lock
from etpi_assets.importers.bulk import ImportSource, import_in_bulk
from etpi_assets.planning.versions import judge_of
from etpi_assets.rollouts import plan_first
from etpi_assets.rollouts.collect import MODEL_CONCURRENCY, collect, rollout_executor
from etpi_assets.rollouts.journal import Journal
from etpi_assets.rollouts.served_weights import same_weights
from etpi_assets.rollouts.teachers import SCRIPTED_KINDS, accelerated, make_engine
from etpi_assets.specs.paths import expand
from etpi_assets.specs.rollout_set import RolloutSetSpec
from etpi_assets.tasks.families import load_family
from etpi_assets.tasks.family import Family, Task
from etpi_assets.tasks.proofs import Proving
from etpi_assets.tasks.table import read_tasks, rejected_table
from etpi_assets.trajectories.records import RolloutRecord
from etpi_assets.trajectories.rollout_checks import set_figures, set_metadata, set_outcomes, tasks_as_asked
from etpi_assets.trajectories.tables import captured_digest, to_tables
from etpi_resources.chat.format import ChatFormat, load_chat_format
from etpi_resources.engines import Engine
from etpi_resources.hashes import json_hash
from etpi_resources.lake.check_outcome import CheckOutcome
from etpi_resources.lake.older_names import adopt


@asset(
    set="rollout_set",
    group="rollouts",
    tables=("rollouts", "agents", "turns", "messages", "quarantined"),
    sections=(
        "kind",
        "suite",
        "split",
        "tasks",
        "k",
        "seed",
        "sandbox",
        "engine",
        "agent",
        "templated",
        "format",
        "path",
        "options",
    ),
    lock="sandboxes",
    reads_path=True,
    versions=("rollouts",),
    expensive=lambda spec: spec.is_collected,
    kept=(
        *("{steps}", "{world}", "engine.{engine}", "sandbox.{sandbox}", "family.{family}"),
        "importer.{format}",
    ),
    summary="Rollouts exactly as captured: prompts and outputs as token ids, every message, and quarantined rollouts.",
)
def raw_rollouts(run: AssetRun, tasks: Input) -> Produced:
    return _import_set(run) if run.spec.kind == "imported" else _roll_out_set(run)


def _roll_out_set(run: AssetRun) -> Produced:
    spec: RolloutSetSpec = run.spec
    assert spec.suite and spec.engine  # the spec's model requires both for this kind
    suite = run.specs.suites[spec.suite]
    chat = load_chat_format(spec.agent.tokenizer)
    proving = Proving(run, spec.suite, read_tasks(run.read("tasks", "tasks"), spec.split), spec.tasks)
    family = load_family(suite.family)
    sandboxes = plan_first.ScriptSandboxes() if spec.templated else run.resources.sandboxes(spec.sandbox)
    with _open_engine(run, spec, family, chat) as engine:
        tables, digests = _collect_tables(
            run, spec, RolloutRuntime(family, engine, sandboxes, chat, judge=judge_of(suite.family)), proving
        )
    tasks = proving.tasks
    tables["quarantined"] = rejected_table(proving.rejected, run.node.name)
    # Chat endpoints and templates give no token ids: curation tokenises their turns again.
    captured = spec.engine.kind != "openai" and not spec.templated
    figures = set_figures(tables, digests, live=captured)
    count_check = tasks_as_asked(spec.tasks, len(tasks), spec.split)
    total = len(tasks) * spec.k + len(proving.rejected)
    result = _result(tables, figures, total, spec, count_check, live=captured)
    if spec.templated:
        lacking = plan_first.tasks_with_fixed_files(tasks, family, spec)
        text = f"{len(lacking)} of {len(tasks)} tasks: {', '.join(lacking[:5]) or 'none'}"
        result = replace(result, metadata={**result.metadata, "fell_back": text}, notes={"fell_back": lacking})
    return result


@contextmanager
def _open_engine(run: AssetRun, spec: RolloutSetSpec, family: Family, chat: ChatFormat) -> Iterator[Engine]:
    """Open the set's engine and close it on exit; an engine that computes on this machine locks its accelerator."""
    assert spec.suite and spec.engine
    with ExitStack() as stack:
        if accelerated(spec.engine):
            stack.enter_context(resource_lock("accelerator", run.lake, run.log))
        if spec.templated:
            yield plan_first.plan_first_engine(spec, family)
            return
        name, context = run.specs.suites[spec.suite].family, spec.agent.max_model_len
        engine = make_engine(spec.engine, name, family, chat, spec.seed, run.lake, context)
        stack.callback(engine.close)
        yield engine


def _collect_tables(
    run: AssetRun, spec: RolloutSetSpec, runtime: RolloutRuntime, tasks: Proving
) -> tuple[dict[str, pa.Table], dict[str, str]]:
    """Return the tables of every rollout, and rollout_id -> digest of its prompts as captured."""
    assert spec.engine
    # Rollouts of other versions of code must not be reused. They are in the name of the journal's folder, not in ids.
    journals, code = run.lake.scratch(f"rollouts/{run.key}"), run.stored_name
    if run.reuses_older:
        adopt(journals / code)
    spec_key, roll_out = _rollout_function(run, spec, runtime)
    scripted = spec.engine.kind in SCRIPTED_KINDS
    with (
        Journal(journals / code, spec_key) as journal,
        run.progress("rolled out", tasks.expected * spec.k) as progress,
    ):
        threads = run.resources.concurrency if scripted else MODEL_CONCURRENCY
        with (
            same_weights(runtime.engine, runtime.chat, journal, run.log) as compare_if_due,
            rollout_executor(runtime, threads, run.log) as executor,
        ):
            records = collect(
                tasks,
                spec.k,
                [(roll_out, journal)],
                executor=executor,
                check=compare_if_due,
                advance=progress.advance,
            )
        digests: dict[str, str] = {}
        tables = to_tables(_labelled(records, digests, run.key), runtime.chat.decode)
    for folder in journals.iterdir():
        if folder.name != code:
            shutil.rmtree(folder)
    return tables, digests


def _rollout_function(
    run: AssetRun, spec: RolloutSetSpec, runtime: RolloutRuntime
) -> tuple[str, Callable[[Task, int], RolloutRecord]]:
    """Return the journal's key, and the function (task, sample) -> rollout, which can be pickled."""
    assert spec.engine
    # `tasks` and `k` are left out, so that more tasks or samples keep the rollouts that exist.
    depends = {
        "rollout_set": run.key,
        "kind": spec.kind,
        "agent": spec.agent.identity(),
        "engine": runtime.engine.fingerprint(),
        "seed": spec.seed,
        "sandbox": spec.sandbox,
    }
    spec_key, temperature = json_hash(depends), spec.agent.temperature
    decoding = "greedy" if temperature == 0 else f"t{temperature:g}"
    identity = Identity(
        spec_key=spec_key,
        origin="set",
        engine=spec.engine.kind,
        teacher=spec.engine.teacher,
        rollout_set=run.key,
        seed=spec.seed,
        decoding=None if spec.engine.kind in SCRIPTED_KINDS else decoding,
    )
    calls = run.lake.scratch(f"rollouts/{run.key}") / run.stored_name / "calls"
    return spec_key, partial(_roll_out, spec, identity, runtime, calls)


def _roll_out(
    spec: RolloutSetSpec, identity: Identity, runtime: RolloutRuntime, calls: Path, task: Task, sample: int
) -> RolloutRecord:
    job = RolloutJob(task, spec.agent, identity, sample, spec.seed)
    if spec.kind == "agent":
        return run_harness(job, runtime, calls)
    return plan_first.run_plan_first(job, runtime, spec.templated) if spec.templated else run_rollout(job, runtime)


def _import_set(run: AssetRun) -> Produced:
    spec: RolloutSetSpec = run.spec
    assert spec.path
    hashes: dict[str, str] = {}
    if spec.suite:
        tasks = run.read("tasks", "tasks", columns=["task_id", "content_hash"])
        hashes = dict(zip(tasks["task_id"].to_pylist(), tasks["content_hash"].to_pylist(), strict=True))
    source = ImportSource(spec.format, str(expand(spec.path)), spec.options, run.key, spec.suite)
    imported = import_in_bulk(
        source, run.lake.scratch(f"import/{run.key}"), hashes=hashes, label=run.label, log=run.log
    )
    count_check = tasks_as_asked(None, imported.total, spec.split)
    return _result(imported.tables, imported.figures, imported.total, spec, count_check, live=False)


def _labelled(records: Iterator[RolloutRecord], digests: dict[str, str], rollout_set: str) -> Iterator[RolloutRecord]:
    """Yield the records with their set's name, and put the digest of each one's prompts into `digests`."""
    for record in records:
        record.rollout_set = rollout_set
        digests[record.rollout_id] = captured_digest(record)
        yield record


def _result(
    tables: Mapping[str, Any],
    figures: Mapping[str, Any],
    total: int,
    spec: RolloutSetSpec,
    count_check: CheckOutcome,
    *,
    live: bool,
) -> Produced:
    checks = (*set_outcomes(figures, total=total, live=live), count_check)
    return Produced(tables=tables, checks=checks, metadata=set_metadata(figures), seeds=(spec.seed,))
