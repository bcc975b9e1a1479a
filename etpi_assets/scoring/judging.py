"""Judge stored work again: the patches and answers of recorded rollouts, when the number of their judge was raised.

No model runs. Finished verdicts are files of the lake's scratch, by the judge and the work, so a killed run continues
after them, and sets and experiments share them.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import pyarrow as pa

from etpi_assets.agent.actions import after_think
from etpi_assets.agent.loop import start_files
from etpi_assets.asset import AssetRun, Input, resource_lock
from etpi_assets.checks import outcome
from etpi_assets.planning.planner import recorded
from etpi_assets.planning.versions import judge_of, lines_between
from etpi_assets.scoring.rewards.verdict import INFRASTRUCTURE
from etpi_assets.specs.rollout_set import AgentSection
from etpi_assets.tasks.families import load_family
from etpi_assets.tasks.family import ANSWER, CALIBRATIONS, Family, JudgesInPlace, Role, Task, Verdict
from etpi_assets.tasks.grading import BROKEN, grade, is_of_machine
from etpi_assets.tasks.proofs import Prover
from etpi_resources.chat.format import ChatFormat
from etpi_resources.hashes import json_hash
from etpi_resources.lake.check_outcome import CheckOutcome
from etpi_resources.lake.files import write_atomically
from etpi_resources.lake.lake import Ref
from etpi_resources.lake.schemas import from_rows
from etpi_resources.sandboxes import EnvironmentUnavailable, SandboxFactory, SandboxUnavailable

COLUMNS = ("rollout_id", "task_id", "task_hash", "outcome", "error", "final_files")
"""The columns of `rollouts` that `planned` reads."""
RECORDED = "recorded"
"""The judge of a verdict that another program gave."""
_PATCH = ".etpi-in/patch"

Row = dict[str, Any]
"""A row of the table `verdicts`."""


@dataclass(frozen=True)
class Work:
    """The stored work of one rollout: of each agent the patch, and the answer if it answered in words."""

    rollout_id: str
    task_id: str
    patches: Mapping[str, str]
    answers: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Bench:
    """Judge of the work of a suite.

    Attributes:
        judge: its components with their numbers (`versions.judge_of`).
        tasks: task id -> task.
        store: the folder of finished verdicts, which sets and experiments share.
        threads: verdicts at once.
    """

    judge: str
    family: Family
    tasks: Mapping[str, Task]
    sandboxes: SandboxFactory
    store: Path
    threads: int

    def stored(self, work: Work) -> dict[str, Any] | None:
        """Return the finished verdict on work; None if there is none."""
        file = self._file(work)
        return json.loads(file.read_text("utf-8")) if file.is_file() else None

    def seconds(self) -> float | None:
        """Return the median seconds of the newest hundred stored verdicts; None without any."""
        files = sorted(self.store.glob("*/*.json"), key=lambda path: path.stat().st_mtime)[-100:]
        return median(json.loads(file.read_text("utf-8"))["seconds"] for file in files) if files else None

    def judged(self, work: Work) -> dict[str, Any]:
        """Return the verdict {reward, verdict, details, at, seconds} on work, stored; or {refused: reason}."""
        if (known := self.stored(work)) is not None:
            return known
        start = perf_counter()
        try:
            verdict = self._verdict(work)
        except _Refused as error:
            return {"refused": str(error)}
        except (SandboxUnavailable, EnvironmentUnavailable) as error:
            return {"refused": "no_environment", "detail": str(error)}
        except (OSError, RuntimeError) as error:
            if is_of_machine(error):
                raise
            return {"refused": INFRASTRUCTURE, "detail": f"{type(error).__name__}: {error}"}
        row = {"reward": verdict.reward, "verdict": verdict.verdict, "details": dict(verdict.details)}
        row |= {"at": datetime.now(UTC).isoformat(), "seconds": perf_counter() - start}
        write_atomically(self._file(work), json.dumps(row))
        return row

    def _verdict(self, work: Work) -> Verdict:
        task, start, final = self.tasks[work.task_id], dict[str, dict[str, str]](), dict[str, dict[str, str]]()
        for role in self.family.roles(task):
            agent = role.agent_id
            start[agent], final[agent] = self._final_files(task, role, work.patches[agent])
            if agent in work.answers:
                final[agent][ANSWER] = work.answers[agent]
        return grade(self.family, task, start, final, {}, self.sandboxes)

    def _final_files(self, task: Task, role: Role, patch: str) -> tuple[dict[str, str], dict[str, str]]:
        """Return the files of an agent's workspace before and after its patch."""
        needs, files = self.family.needs(task), self.family.workspace(task, role)
        if needs.environment is None and not patch:
            return files, dict(files)
        with self.sandboxes.create(files, needs.limits, needs.environment) as sandbox:
            start = files if needs.environment is None else start_files(sandbox, needs)
            if patch:
                sandbox.write_files({_PATCH: patch})
                if sandbox.run(f"git apply --whitespace=nowarn {_PATCH} && rm -r .etpi-in").exit_code:
                    raise _Refused("patch_does_not_apply")
            return start, sandbox.read_files()

    def _file(self, work: Work) -> Path:
        key = json_hash([self.tasks[work.task_id].content_hash, dict(work.patches), dict(work.answers)])
        return self.store / json_hash(self.judge)[:16] / f"{key[:32]}.json"


class _Refused(Exception):
    """The stored work cannot be judged; the message is the code of the reason."""


@dataclass
class Judged:
    """The verdicts on the rollouts of an asset, and the work that the present judge has yet to judge.

    Attributes:
        recorded: the judge of recorded verdicts that name none.
        later: rollout id -> rows of `verdicts`, without the recorded one.
        work: to be judged.
        refused: reason -> rollouts whose verdict stays, because their work was not stored or the task is another one.
        judged: how many were judged since.
    """

    recorded: str
    later: dict[str, list[Row]] = field(default_factory=dict)
    work: list[Work] = field(default_factory=list)
    refused: Counter[str] = field(default_factory=Counter)
    judged: int = 0

    def add(self, work: Work, judge: str, result: Mapping[str, Any]) -> None:
        """Add a verdict on work (`Bench.judged`) to the later ones, or count why there is none."""
        if refused := result.get("refused"):
            self.refused[refused] += 1
            return
        self.judged += 1
        earlier = self.later.setdefault(work.rollout_id, [])
        before = earlier[-1]["judge"] if earlier else self.recorded
        at, reason = datetime.fromisoformat(result["at"]), lines_between(before, judge)
        earlier.append(_verdict_row(work.rollout_id, work.task_id, judge, result, reason=reason, judged_at=at))

    def of(self, rollouts: pa.Table) -> tuple[pa.Table, pa.Table]:
        """Return `with_verdicts` of these."""
        return with_verdicts(rollouts, self.later, self.recorded)

    def notes(self) -> dict[str, Any]:
        """Return the notes of the manifest: rollouts judged again now, and at any time, and why others were not."""
        counts = {"judged_again": self.judged, "later_verdicts": len(self.later)}
        return {**counts, "not_judged": dict(self.refused)}


def planned(
    rollouts: Iterable[Mapping[str, Any]],
    bench: Bench | None,
    recorded: str,
    later: dict[str, list[Row]],
    answers: Mapping[str, Mapping[str, str]],
) -> Judged:
    """Sort rollouts (rows with COLUMNS) that the present judge has not judged into work and those that cannot be.

    Args:
        bench: the present judge; None: nothing can judge the suite.
        recorded: the judge of verdicts that do not name theirs.
        later: rollout id -> its verdicts after the recorded one.
        answers: rollout id -> agent id -> the final answer in words, of agents that may answer.
    """
    plan = Judged(recorded, later)
    for row in rollouts:
        outcome = json.loads(row["outcome"] or "null")
        if outcome is None and recorded != RECORDED:
            continue  # templated rollouts are not judged
        last = later[row["rollout_id"]][-1]["judge"] if later.get(row["rollout_id"]) else judge_in(outcome, recorded)
        if bench is None or last == bench.judge:
            continue
        if reason := _why_not(row, outcome, bench):
            plan.refused[reason] += 1
            continue
        patches = json.loads(row["final_files"] or "{}")
        plan.work.append(Work(row["rollout_id"], row["task_id"], patches, answers.get(row["rollout_id"], {})))
    return plan


def judge_in(outcome: Mapping[str, Any] | None, recorded: str) -> str:
    """Return the judge that an outcome names; `recorded` if it names none."""
    return (outcome or {}).get("judge") or recorded


def _why_not(row: Mapping[str, Any], outcome: Mapping[str, Any] | None, bench: Bench) -> str | None:
    """Return why a rollout's work cannot be judged."""
    task = bench.tasks.get(row["task_id"])
    verdict = (outcome or {}).get("verdict")
    if row["error"] is not None or verdict == INFRASTRUCTURE:
        return INFRASTRUCTURE
    if verdict == BROKEN:
        return "sandbox_ended"
    if task is None:
        return "task_gone"
    if row["task_hash"] is not None and row["task_hash"] != task.content_hash:
        return "task_changed"
    if isinstance(bench.family, JudgesInPlace):
        return "machine_not_stored"
    patches = json.loads(row["final_files"] or "{}")
    if not patches.keys() >= {role.agent_id for role in bench.family.roles(task)}:
        return "patch_not_stored"
    return None


def _verdict_row(rollout_id: str, task_id: str, judge: str, outcome: Mapping[str, Any], **more: Any) -> Row:
    """Return the row of `verdicts` for an outcome {reward, verdict, details}."""
    details = outcome.get("details") or {}
    return {
        "rollout_id": rollout_id,
        "task_id": task_id,
        "judge": judge,
        "reward": outcome.get("reward"),
        "verdict": outcome.get("verdict"),
        "verdict_trust": details.get("verdict_trust") if isinstance(details, dict) else None,
        "details": json.dumps(details, sort_keys=True, ensure_ascii=False),
        **more,
    }


def with_verdicts(rollouts: pa.Table, later: Mapping[str, Sequence[Row]], recorded: str) -> tuple[pa.Table, pa.Table]:
    """Return (rollouts whose `outcome` is that of their last verdict, with its judge; the table `verdicts`)."""
    rows, outcomes = list[Row](), []
    for rollout_id, task_id, text in zip(
        *(rollouts[name].to_pylist() for name in ("rollout_id", "task_id", "outcome")), strict=True
    ):
        outcome, after = json.loads(text or "null"), later.get(rollout_id, ())
        if isinstance(outcome, dict):
            outcome = {**outcome, "judge": judge_in(outcome, recorded)}
            rows.append(_verdict_row(rollout_id, task_id, outcome["judge"], outcome))
        rows += after
        if after:
            outcome = {name: after[-1][name] for name in ("reward", "verdict", "judge")}
            outcome["details"] = json.loads(after[-1]["details"])
        outcomes.append(None if outcome is None else json.dumps(outcome, sort_keys=True, ensure_ascii=False))
    column = rollouts.schema.get_field_index("outcome")
    replaced = rollouts.set_column(column, rollouts.schema.field(column), pa.array(outcomes, pa.string()))
    return replaced, from_rows("verdicts", rows)


def one_judge(verdicts: pa.Table, judged: Judged) -> CheckOutcome:
    """Check that the last verdicts on all rollouts are of one judge, so that their rewards can be compared."""
    last = dict(zip(verdicts["rollout_id"].to_pylist(), verdicts["judge"].to_pylist(), strict=True))
    judges = Counter(last.values())
    figures = {"judges": dict(judges), "judged_again": judged.judged, **judged.refused}
    counts = "; ".join(f"{count} of {judge}" for judge, count in judges.most_common())
    why = ", ".join(f"{count} {reason}" for reason, count in judged.refused.items()) or "none"
    only = next(iter(judges), "no judge")
    return outcome("one_judge", len(judges) < 2, figures, verdicts=len(last), only=only, counts=counts, why=why)


@dataclass(frozen=True)
class Judging:
    """Source of the rollouts of an asset, and what judges them again.

    Attributes:
        source: the asset that has them.
        suite: whose tasks they are of; None: nothing judges them.
        kind: the kind of sandbox; None: the suite's tasks have no environments.
        agent: the agent's section, and `chat` its format: they decide whether and where it answers in words.
        imported: whether another program gave the recorded verdicts.
    """

    run: AssetRun
    source: Input
    suite: str | None
    kind: str | None
    agent: AgentSection
    chat: Callable[[], ChatFormat]
    imported: bool = False

    def recorded(self) -> str:
        """Return the judge of the recorded verdicts that do not name theirs."""
        if self.imported or self.suite is None:
            return RECORDED
        (ref,) = self.source.refs()
        return judge_of(self._family, recorded(self.run.lake.require(ref)))

    def bench(self, tasks: Iterable[Task]) -> Bench | None:
        """Return the present judge of the suite; None if it has none here."""
        if self.suite is None or self.kind is None:
            return None
        run, family = self.run, load_family(self._family)
        sandboxes = run.resources.sandboxes(self.kind)
        by_id = {task.task_id: task for task in tasks}
        store = run.lake.scratch("verdicts")
        return Bench(judge_of(self._family), family, by_id, sandboxes, store, run.resources.concurrency)

    def plan(self, bench: Bench | None, only: Collection[str] | None = None) -> Judged:
        """Return the later verdicts that exist, and the work that is to be judged, of all tasks or of `only` these."""
        rows = self.source.read("rollouts", columns=COLUMNS).to_pylist()
        chosen = [row for row in rows if only is None or row["task_id"] in only]
        return planned(chosen, bench, self.recorded(), self.known(), self._answers())

    def judged(self, tasks: Iterable[Task]) -> Judged:
        """Judge the rollouts that the present judge has not judged, and return all later verdicts."""
        bench = self.bench(tasks)
        plan = self.plan(bench)
        self.judge(bench, plan)
        return plan

    def judge(self, bench: Bench | None, plan: Judged) -> None:
        """Judge the planned work, and add the verdicts to the plan."""
        run = self.run
        if bench is None or not plan.work:
            return
        try:
            run.resources.sandboxes(self.kind or "").check()
        except SandboxUnavailable as error:
            run.log(f"{run.label}: nothing is judged again on this machine: {error}")
            plan.refused["no_environment"] += len(plan.work)
            plan.work = []
            return
        with resource_lock("sandboxes", run.lake, run.log), run.progress("judged again", len(plan.work)) as progress:
            bench = self._proved(bench, plan)
            with ThreadPoolExecutor(bench.threads, thread_name_prefix="judge") as pool:
                for work, result in zip(plan.work, pool.map(bench.judged, plan.work), strict=True):
                    plan.add(work, bench.judge, result)
                    progress.advance(1)

    def known(self) -> dict[str, list[Row]]:
        """Return the later verdicts of the asset's current version, by rollout, in order."""
        lake, node = self.run.lake, self.run.node
        current = lake.current(Ref(node.name, node.set, self.run.key))
        later: dict[str, list[Row]] = {}
        if current and "verdicts" in current.tables:
            for row in lake.read(current.ref, "verdicts").to_pylist():
                if row["judged_at"] is not None:
                    later.setdefault(row["rollout_id"], []).append(row)
        return later

    def _proved(self, bench: Bench, plan: Judged) -> Bench:
        """Return the bench with the tasks of the plan proved for its judge; work on others is refused."""
        run, suite = self.run, self.suite or ""
        manifest = run.lake.current(Ref("tasks", "suite", suite))
        older = manifest is None or judge_of(self._family, recorded(manifest)) != bench.judge
        prover = Prover.of(run, suite) if older and bench.family.keeps_proofs else None
        if prover is None:
            return bench
        named = [bench.tasks[task_id] for task_id in dict.fromkeys(work.task_id for work in plan.work)]
        unproved = [replace(t, payload={k: v for k, v in t.payload.items() if k != CALIBRATIONS}) for t in named]
        proved = {t.task_id: t for t in prover.outcomes(unproved, len(named), run) if isinstance(t, Task)}
        refused = [work for work in plan.work if work.task_id not in proved]
        plan.refused += Counter({"task_unproved": len(refused)})
        plan.work = [work for work in plan.work if work.task_id in proved]
        return replace(bench, tasks=proved)

    @property
    def _family(self) -> str:
        assert self.suite is not None
        return self.run.specs.suites[self.suite].family

    def _answers(self) -> dict[str, dict[str, str]]:
        """Return the final answers in words: the last turns that have neither action nor fault."""
        if self.agent.action_format != "tool_or_answer":
            return {}
        chat = self.chat()
        names = ["rollout_id", "agent_id", "turn", "content", "actions", "parse_error"]
        turns = self.source.read("turns", columns=names).to_pylist()
        last = {(row["rollout_id"], row["agent_id"]): row for row in turns}
        answers: dict[str, dict[str, str]] = {}
        for (rollout, agent), row in last.items():
            if row["parse_error"] is None and not json.loads(row["actions"] or "[]"):
                answers.setdefault(rollout, {})[agent] = chat.answer(after_think(row["content"])).strip()
        return answers
