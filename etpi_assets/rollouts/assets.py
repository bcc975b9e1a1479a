"""The rollouts stage as an asset."""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace

import pyarrow as pa

from etpi_assets.agent.loop import Identity, run_rollout
from etpi_assets.asset_run import shared_lock
from etpi_assets.importers import find_units
from etpi_assets.importers.bulk import Source, import_in_bulk
from etpi_assets.materialize import AssetRun, Produced, etpi_asset
from etpi_assets.rollouts.collect import MODEL_CONCURRENCY, collect
from etpi_assets.rollouts.journal import Journal
from etpi_assets.rollouts.models import accelerated
from etpi_assets.rollouts.plan_first import rehearsal
from etpi_assets.rollouts.teachers import SCRIPTED_KINDS, make_engine
from etpi_assets.specs.load import SpecError
from etpi_assets.specs.paths import expand
from etpi_assets.specs.rollout_set import RolloutSetSpec
from etpi_assets.tasks.families import load_family
from etpi_assets.tasks.family import Family, Task
from etpi_assets.tasks.table import read_tasks
from etpi_assets.trajectories.checks import (
    captures_outcome,
    counts_outcome,
    counts_reconcile,
    native_ids_present,
    prompts_outcome,
    prompts_reconstruct,
    tasks_as_asked,
)
from etpi_assets.trajectories.records import RolloutRecord
from etpi_assets.trajectories.tables import captured_digest, to_tables
from etpi_assets.worlds.coop_tiny.conversations import Unjudged
from etpi_assets.worlds.emulated import EmulatedFactory
from etpi_resources.chat.format import ChatFormat, load_chat_format
from etpi_resources.engines import Engine
from etpi_resources.hashes import json_hash
from etpi_resources.lake.schemas import empty
from etpi_resources.sandboxes import SandboxFactory

CHECKS = ("prompts_reconstruct", "native_ids_present", "counts_reconcile", "tasks_as_asked")


@etpi_asset("raw_rollouts", checks=CHECKS)
def raw_rollouts(run: AssetRun) -> Produced:
    return _imported(run) if run.spec.kind == "imported" else _rolled_out(run)


def _rolled_out(run: AssetRun) -> Produced:
    spec: RolloutSetSpec = run.spec
    assert spec.suite and spec.engine  # as the spec's model has made sure
    suite = run.specs.suites[spec.suite]
    chat = load_chat_format(spec.agent.tokenizer)
    tasks = read_tasks(run.read("tasks", "tasks"), spec.split, spec.tasks)
    family, sandboxes = _place(run, spec, suite.family)
    with _actor(run, spec, family, chat) as engine:
        tables, digests = _collected(run, spec, engine, tasks, family, sandboxes, chat)
    tables["quarantined"] = empty("quarantined")
    # An endpoint that gives no ids is not asked for them, and a template has none: their turns are re-tokenised later.
    captured = spec.engine.kind != "openai" and not spec.templated
    produced = _produced(tables, digests, len(tasks), spec, live=captured)
    if spec.templated:
        lacking = rehearsal.fallbacks(tasks, family, spec)
        told = f"{len(lacking)} of {len(tasks)} tasks: {', '.join(lacking[:5]) or 'none'}"
        produced = replace(produced, metadata={**produced.metadata, "fell_back": told}, notes={"fell_back": lacking})
    return produced


def _place(run: AssetRun, spec: RolloutSetSpec, family: str) -> tuple[Family, SandboxFactory]:
    """Who judges the set's rollouts, and where their commands run."""
    if spec.templated:
        return load_family(family), rehearsal.Props()
    if spec.kind == "templated":
        return _emulation(family)
    return load_family(family), run.resources.sandboxes(spec.sandbox)


@contextmanager
def _actor(run: AssetRun, spec: RolloutSetSpec, family: Family, chat: ChatFormat) -> Iterator[Engine]:
    """The set's engine, closed on leaving; what computes on this machine has its accelerator to itself."""
    assert spec.suite and spec.engine
    with ExitStack() as stack:
        if accelerated(spec.engine):
            stack.enter_context(
                run.lake.lock(shared_lock("accelerator"), log=run.log, what="the accelerator", doing="using")
            )
        if spec.templated:
            yield rehearsal.engine(spec, family)
            return
        engine = make_engine(spec.engine, run.specs.suites[spec.suite].family, family, chat, spec.seed, run.lake)
        stack.callback(engine.close)
        yield engine


def _collected(
    run: AssetRun,
    spec: RolloutSetSpec,
    engine: Engine,
    tasks: Sequence[Task],
    family: Family,
    sandboxes: SandboxFactory,
    chat: ChatFormat,
) -> tuple[dict[str, pa.Table], dict[str, str]]:
    """(the tables of every rollout, the digest of each one's prompts as captured)."""
    assert spec.engine
    spec_key, roll_out = _rollout_function(run, spec, engine, family, sandboxes, chat)
    scripted = spec.engine.kind in SCRIPTED_KINDS
    # A rollout that other code made is not this set's: code counts in where the journal is, not in what ids are.
    journals, code = run.lake.scratch(f"rollouts/{run.key}"), run.kept_code
    with (
        Journal(journals / code, spec_key) as journal,
        run.progress("rolled out", len(tasks) * spec.k) as progress,
    ):
        records = collect(
            tasks,
            spec.k,
            roll_out,
            journal,
            concurrency=run.resources.concurrency if scripted else MODEL_CONCURRENCY,
            advance=progress.advance,
        )
        digests: dict[str, str] = {}
        tables = to_tables(_watched(records, digests, run.key), chat.decode)
    for other in journals.iterdir():
        if other.name != code:
            shutil.rmtree(other)
    return tables, digests


def _rollout_function(
    run: AssetRun, spec: RolloutSetSpec, engine: Engine, family: Family, sandboxes: SandboxFactory, chat: ChatFormat
) -> tuple[str, Callable[[Task, int], RolloutRecord]]:
    """(the key that rollouts are kept by, task and sample number -> one rollout)."""
    assert spec.engine
    # What a rollout is: not how many there are, so that more tasks or samples leave the others as they are.
    depends = {
        "rollout_set": run.key,
        "kind": spec.kind,
        "agent": spec.agent.identity(),
        "engine": engine.fingerprint(),
        "seed": spec.seed,
        "sandbox": spec.sandbox,
    }
    spec_key = json_hash(depends)
    identity = Identity(
        spec_key=spec_key,
        origin="set",
        engine=spec.engine.kind,
        teacher=spec.engine.teacher,
        rollout_set=run.key,
        seed=spec.seed,
        decoding=None if spec.engine.kind in SCRIPTED_KINDS else decoding_name(spec.agent.temperature),
    )

    def roll_out(task: Task, sample: int) -> RolloutRecord:
        if spec.templated:
            return rehearsal.rehearse(task, sample, family, engine, sandboxes, spec, identity)
        record = run_rollout(
            task, family, engine, sandboxes, spec.agent, chat, identity=identity, sample=sample, sample_seed=spec.seed
        )
        if spec.kind == "templated":
            record.outcome = None  # nobody judged it
        return record

    return spec_key, roll_out


def _emulation(family: str) -> tuple[Family, SandboxFactory]:
    """The family without its verdicts and workspaces without processes: scripted conversations in bulk."""
    if family != "coop_tiny":
        raise SpecError(f'kind = "templated": the family {family!r} has no emulated workspaces, only coop_tiny has')
    return Unjudged(), EmulatedFactory()


def _imported(run: AssetRun) -> Produced:
    spec: RolloutSetSpec = run.spec
    assert spec.path
    hashes: dict[str, str] = {}
    if spec.suite:
        known = run.read("tasks", "tasks", columns=["task_id", "content_hash"])
        hashes = dict(zip(known["task_id"].to_pylist(), known["content_hash"].to_pylist(), strict=True))
    path = expand(spec.path)
    source = Source(spec.format, str(path), spec.options, run.key, spec.suite)
    with run.progress("read", len(find_units(spec.format, path))) as progress:
        made = import_in_bulk(source, run.lake.scratch(f"import/{run.key}"), hashes=hashes, advance=progress.advance)
    figures = made.figures
    quarantined = sum(figures["reasons"].values())
    return Produced(
        tables=made.tables,
        checks=(
            prompts_outcome(figures["prompts"]),
            captures_outcome(figures["capture"], live=False),
            counts_outcome(figures["counts"], found=made.found, quarantined=quarantined),
            tasks_as_asked(None, made.found, spec.split),
        ),
        metadata={
            "exits": figures["exits"],
            "captures": figures["capture"]["captures"],
            "turns_with_drift": figures["drifted"],
            "quarantined": figures["reasons"],
            "infrastructure_errors": figures["errors"],
            "first_error": (figures["first_error"] or [""])[0],
        },
        seeds=(spec.seed,),
    )


def decoding_name(temperature: float) -> str:
    """ "greedy" at temperature 0, else "t" and the temperature: t1, t0.7."""
    return "greedy" if temperature == 0 else f"t{temperature:g}"


def _watched(records: Iterator[RolloutRecord], digests: dict[str, str], rollout_set: str) -> Iterator[RolloutRecord]:
    """The records on their way into the tables, each under its set's name and its prompts' digest taken."""
    for record in records:
        record.rollout_set = rollout_set
        digests[record.rollout_id] = captured_digest(record)
        yield record


def _produced(
    tables: dict[str, pa.Table], digests: dict[str, str], tasks: int, spec: RolloutSetSpec, *, live: bool
) -> Produced:
    rollouts, turns = tables["rollouts"], tables["turns"]
    quarantined = tables["quarantined"]["reason"].to_pylist()
    errors = [error for error in rollouts["error"].to_pylist() if error is not None]
    return Produced(
        tables=tables,
        checks=(
            prompts_reconstruct(digests, tables),
            native_ids_present(tables, live=live),
            counts_reconcile(tables, found=tasks * spec.k, quarantined=len(quarantined)),
            tasks_as_asked(spec.tasks, tasks, spec.split),
        ),
        metadata={
            "exits": dict(Counter(rollouts["exit_status"].to_pylist())),
            "captures": dict(Counter(turns["capture"].to_pylist())),
            "turns_with_drift": turns.num_rows - turns["drift_at"].null_count,
            "quarantined": dict(Counter(quarantined)),
            "infrastructure_errors": len(errors),
            "first_error": errors[0] if errors else "",
        },
        seeds=(spec.seed,),
    )


ASSETS = [raw_rollouts]
