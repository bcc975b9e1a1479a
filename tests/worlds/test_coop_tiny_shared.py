"""Features that share a file: who works alone conflicts, who keeps to a plan does not, and git agrees."""

from __future__ import annotations

import dataclasses
import itertools
import re
import subprocess
import sys
from collections import Counter
from functools import cache
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from etpi_assets.agent.loop import Identity, RolloutJob, RolloutRuntime, run_rollout
from etpi_assets.rollouts.teachers import POLICIES
from etpi_assets.specs.load import load_shipped
from etpi_assets.specs.rollout_set import AgentSection
from etpi_assets.tasks.family import RejectedInput, Task
from etpi_assets.trajectories.records import RolloutRecord
from etpi_assets.worlds.calls import run_calls
from etpi_assets.worlds.coop_tiny_shared import FAMILY, counted
from etpi_assets.worlds.coop_tiny_shared.features import OPERATIONS, Formula
from etpi_assets.worlds.coop_tiny_shared.generate import LAYOUTS, generate_tasks
from etpi_assets.worlds.coop_tiny_shared.merge import LONGEST, MergeConflict, merge_texts, merge_trees
from etpi_assets.worlds.coop_tiny_shared.policy import CoopTinySharedPolicy, SharedSkill
from etpi_assets.worlds.names import is_heldout
from etpi_assets.worlds.text_engine import TextEngine, UntokenizedChat
from etpi_lab.tiny_bases.corpora.coop_tiny_shared import SharedSandbox, UnjudgedCoopTinyShared
from etpi_lab.worlds.coop_tiny.emulated import EmulatedFactory
from etpi_resources.sandboxes import SandboxFactory
from etpi_resources.sandboxes.bubblewrap import BubblewrapFactory

DILIGENT = SharedSkill(
    plan_first=0.0, follow_through=1.0, verbose_think=0.0, wrong_edit=0.0, look_around=0.0, report=0.0
)
PLANNED = dataclasses.replace(DILIGENT, plan_first=1.0)
UNPLANNED = dataclasses.replace(DILIGENT, plan_first=0.03, wrong_edit=0.02, malformed=0.02, reword=1.0)
UNKEPT = dataclasses.replace(PLANNED, keep_division=0.0)
STALLED = dataclasses.replace(PLANNED, follow_through=0.0)
PAIRS = 48


class KeepsFinalFiles(UnjudgedCoopTinyShared):
    """The family without its judge; remembers the final files of the last rollout."""

    def judge(self, task, final, sandboxes):
        self.final = {agent_id: dict(files) for agent_id, files in final.items()}
        return super().judge(task, final, sandboxes)


@cache
def heldout() -> tuple[Task, ...]:
    return tuple(itertools.islice(generate_tasks("coop_tiny_shared", 0, "heldout"), PAIRS))


def roll(
    task: Task,
    skill: SharedSkill,
    family: UnjudgedCoopTinyShared | None = None,
    agent: AgentSection | None = None,
    sandboxes: SandboxFactory | None = None,
) -> RolloutRecord:
    """Roll out a pair of scripted agents, emulated unless told otherwise."""
    runtime = RolloutRuntime(
        family or KeepsFinalFiles(),
        TextEngine(CoopTinySharedPolicy(skill)),
        sandboxes or EmulatedFactory(SharedSandbox),
        UntokenizedChat(),  # type: ignore[arg-type]
    )
    job = RolloutJob(task, agent or AgentSection(), Identity("test", "set", "scripted"))
    record = run_rollout(job, runtime)
    assert record.error is None, record.error
    return record


def final_files(task: Task, skill: SharedSkill) -> dict[str, dict[str, str]]:
    family = KeepsFinalFiles()
    roll(task, skill, family)
    return family.final


def verdict(task: Task, final: dict[str, dict[str, str]]) -> str:
    return FAMILY.judge(task, final, BubblewrapFactory()).verdict


def git_merge(folder: Path, task: Task, final: dict[str, dict[str, str]]) -> dict[str, str] | None:
    """Merge both agents' files with git; None if git reports a conflict."""
    merged: dict[str, str] = {}
    for path, base in task.payload["files"].items():
        names = []
        for name, text in (("one", final["agent1"][path]), ("base", base), ("two", final["agent2"][path])):
            (folder / name).write_text(text)
            names.append(str(folder / name))
        done = subprocess.run(["git", "merge-file", "-p", *names], capture_output=True, text=True)
        if done.returncode:
            return None
        merged[path] = done.stdout
    return merged


@pytest.mark.parametrize(
    ("skill", "conflicts"), [(DILIGENT, True), (PLANNED, False), (UNKEPT, True)], ids=["alone", "planned", "unkept"]
)
def test_git_and_the_judge_agree_on_who_conflicts(tmp_path: Path, skill: SharedSkill, conflicts: bool):
    for task in heldout():
        final = final_files(task, skill)
        by_git = git_merge(tmp_path, task, final)
        assert (by_git is None) is conflicts
        base = counted(task.payload["files"], task.payload["check"])
        if conflicts:
            with pytest.raises(MergeConflict, match=re.escape(task.payload["shared"])):
                merge_trees(base, final["agent1"], final["agent2"])
        else:
            assert merge_trees(base, final["agent1"], final["agent2"]) == by_git


def test_verdicts_of_work_alone_and_of_plans_kept_broken_and_stalled():
    skills = {"alone": DILIGENT, "planned": PLANNED, "unkept": UNKEPT, "stalled": STALLED}
    verdicts = {
        name: Counter(verdict(task, final_files(task, skill)) for task in heldout()[:12])
        for name, skill in skills.items()
    }
    assert verdicts == {
        "alone": {"merge_conflict": 12},
        "planned": {"passed": 12},
        "unkept": {"merge_conflict": 12},
        "stalled": {"no_patch": 12},
    }


@pytest.mark.parametrize("tools", [[], ["bash"]])
def test_agents_that_are_offered_tools_read_their_results_and_submit(tools: list[str]):
    record = roll(heldout()[0], PLANNED, agent=AgentSection.model_validate({"tools": tools}))
    assert [agent.exit_status for agent in record.agents] == ["Submitted"] * 2


def test_without_a_plan_most_failures_are_conflicts():
    verdicts = Counter(verdict(task, final_files(task, UNPLANNED)) for task in heldout())
    assert verdicts["merge_conflict"] >= (PAIRS - verdicts["passed"]) / 2
    assert verdicts["passed"] <= 0.1 * PAIRS


def test_a_wrong_export_breaks_the_partner_too():
    task = heldout()[0]
    final = final_files(task, PLANNED)
    final["agent1"][task.payload["shared"]] += "from nowhere import nothing\n"
    outcome = FAMILY.judge(task, final, BubblewrapFactory())
    assert outcome.verdict == "failed_tests" and outcome.details["features"] == {"f1": False, "f2": False}


def test_an_export_left_out_fails_its_own_feature_alone():
    task = heldout()[0]
    outcome = FAMILY.judge(task, final_files(task, PLANNED), BubblewrapFactory())
    assert outcome.details["features"] == {"f1": True, "f2": True}
    silent = KeepsFinalFiles()
    roll(task, PLANNED, silent, AgentSection(messages="suppressed"))
    outcome = FAMILY.judge(task, silent.final, BubblewrapFactory())
    assert outcome.verdict == "failed_tests" and outcome.details["features"] == {"f1": True, "f2": False}


def test_suppressed_messages_are_sent_and_never_arrive():
    inboxes = {}
    for messages in ("delivered", "suppressed"):
        record = roll(heldout()[0], PLANNED, agent=AgentSection(messages=messages))
        inboxes[messages] = [turn.inbox for agent in record.agents for turn in agent.turns if turn.inbox]
        assert all("sent to agent" in (agent.turns[0].observation or "") for agent in record.agents)
        assert all(agent.exit_status == "Submitted" for agent in record.agents)
    assert len(inboxes["delivered"]) == 2 and inboxes["suppressed"] == []


def test_instruction_names_own_feature_and_never_the_partners():
    for task in heldout():
        for role in FAMILY.roles(task):
            own = task.payload["features"][role.feature_id]
            (other,) = (f for key, f in task.payload["features"].items() if key != role.feature_id)
            words = re.findall(r"[\w.]+", role.instruction)
            assert {own["function"], own["module"], task.payload["shared"]} <= {w.rstrip(".") for w in words}
            assert own["wanted"] in role.instruction
            assert not {other["function"], other["module"]} & {w.rstrip(".") for w in words}
            assert ("exports there too" in role.instruction) is task.payload["told"]
    assert 0.3 < sum(task.payload["told"] for task in heldout()) / PAIRS < 0.7


def test_unprompted_teacher_plans_where_the_task_tells_of_the_overlap():
    spec = load_shipped().rollout_sets["coop_tiny_shared_strong"]
    assert spec.engine is not None
    skill = SharedSkill.of({**spec.engine.skill, "plan_first": 0.02, "plan_if_told": 0.957})
    plans: dict[bool, list[bool]] = {True: [], False: []}
    for task in itertools.islice(generate_tasks("s", 0, "train"), 80):
        first = roll(task, skill).agents[0].turns[0].actions
        plans[task.payload["told"]].append(bool(first) and first[0].kind == "send_message")
    assert sum(plans[True]) / len(plans[True]) > 0.8 and sum(plans[False]) / len(plans[False]) < 0.2


@pytest.mark.parametrize(("reword", "wordings"), [(0.0, 1), (0.5, 2), (1.0, 2)])
def test_plans_have_one_wording_unless_the_skill_rewords(reword: float, wordings: int):
    skill = dataclasses.replace(PLANNED, reword=reword)
    plans = [roll(task, skill).agents[0].turns[0].content for task in heldout()[:16]]
    assert len({re.findall(r"Here is the plan|Plan: I'll take", plan)[0] for plan in plans}) == wordings


def test_shipped_teachers_write_canonical_tokens_and_one_wording():
    for name in ("strong", "weak"):
        engine = load_shipped().rollout_sets[f"coop_tiny_shared_{name}"].engine
        assert engine is not None and engine.noncanonical == 0.0
        assert SharedSkill.of(engine.skill).reword == 0.0


def test_names_of_splits_and_of_the_base_corpus_are_apart():
    def names(tasks: list[Task]) -> set[str]:
        shared = {layout.shared for layout in LAYOUTS}
        files = {path for task in tasks for path in task.payload["files"]} - shared
        return {path.removesuffix(".py") for path in files} | {
            name for task in tasks for text in task.payload["files"].values() for name in re.findall(r"def (\w+)", text)
        }

    train = list(itertools.islice(generate_tasks("coop_tiny_shared", 0, "train"), 300))
    corpus = list(itertools.islice(generate_tasks("coop_tiny_shared_base", 0, "train"), 300))
    assert all(map(is_heldout, names(list(heldout()))))
    assert not any(map(is_heldout, names(train) | names(corpus)))
    assert not {t.repo for t in train} & {t.repo for t in heldout()}
    again = list(itertools.islice(generate_tasks("coop_tiny_shared", 0, "train"), 300))
    assert [t.content_hash for t in train] == [t.content_hash for t in again]
    assert len({t.content_hash for t in train}) == 300


def test_validation_accepts_the_suite_and_rejects_features_that_are_there_already():
    tasks = list(heldout()[:6])
    assert list(FAMILY.validate(tasks, BubblewrapFactory())) == tasks
    payload = dict(tasks[0].payload)
    role = FAMILY.roles(tasks[0])
    solved = FAMILY.reference(tasks[0], role[0]) | {
        feature["module"]: FAMILY.reference(tasks[0], agent)[feature["module"]]
        for agent, feature in zip(role, payload["features"].values(), strict=True)
    }
    (outcome,) = FAMILY.validate(
        [dataclasses.replace(tasks[0], payload={**payload, "files": solved})], BubblewrapFactory()
    )
    assert isinstance(outcome, RejectedInput) and outcome.reason == "null_passes"


def test_emulated_workspaces_answer_as_real_ones_do():
    reckless = SharedSkill(
        plan_first=0.5, follow_through=0.8, wrong_edit=0.3, look_around=0.7, markdown=0.3, malformed=0.2
    )
    for task in heldout()[:12]:
        records = [roll(task, reckless), roll(task, reckless, sandboxes=BubblewrapFactory())]
        said = [[(m.role, m.content) for agent in record.agents for m in agent.messages] for record in records]
        assert said[0] == said[1]


def test_unknown_skills_are_refused_by_name():
    with pytest.raises(ValueError, match=r"keep_divison.*keep_division"):
        POLICIES["coop_tiny_shared"]({"keep_divison": 1.0}, 0)


@given(st.sampled_from(sorted(OPERATIONS)), st.integers(2, 99), st.integers(-1000, 1000))
def test_code_means_what_it_computes(operation: str, number: int, x: int):
    behaviour = Formula(operation, number)
    assert eval(behaviour.code, {"x": x, "max": max, "min": min}) == behaviour(x)


# --- merging ---------------------------------------------------------------------------------------------------------

LINES = st.lists(st.text("abcxyz \t", max_size=6), min_size=1, max_size=12, unique=True)


@given(LINES, st.data())
def test_changes_apart_from_each_other_merge_and_the_sides_are_equal(lines: list[str], data: st.DataObject):
    base = "".join(f"{line}\n" for line in lines)
    cut = data.draw(st.integers(0, len(lines)))
    top, rest = lines[:cut], lines[cut + 1 :]
    kept = lines[cut : cut + 1]

    def changed(part: list[str], mark: str) -> list[str]:
        return [f"{mark}{index}" if data.draw(st.booleans()) else line for index, line in enumerate(part)]

    new_top, new_rest = changed(top, "<"), changed(rest, ">")
    ours, theirs, both = (
        "".join(f"{line}\n" for line in parts)
        for parts in ([*new_top, *kept, *rest], [*top, *kept, *new_rest], [*new_top, *kept, *new_rest])
    )
    if not kept:
        theirs = base
        both = ours
    assert merge_texts(base, ours, theirs) == merge_texts(base, theirs, ours) == both
    assert merge_texts(base, ours, ours) == ours


def test_hunks_that_touch_or_overlap_conflict():
    base = "one\ntwo\nthree\nfour\n"
    for ours, theirs in (
        ("ONE\ntwo\nthree\nfour\n", "1\ntwo\nthree\nfour\n"),
        ("ONE\ntwo\nthree\nfour\n", "one\nTWO\nthree\nfour\n"),
        ("one\nthree\nfour\n", "one\nTWO\nthree\nfour\n"),
        ("a\none\ntwo\nthree\nfour\n", "b\none\ntwo\nthree\nfour\n"),
    ):
        for sides in ((ours, theirs), (theirs, ours)):
            with pytest.raises(MergeConflict, match=r"x\.py: "):
                merge_texts(base, *sides, "x.py")
    assert merge_texts(base, "ONE\ntwo\nthree\nfour\n", "one\ntwo\nTHREE\nfour\n") == "ONE\ntwo\nTHREE\nfour\n"
    with pytest.raises(MergeConflict):
        merge_texts(base, "x\n" * LONGEST + base, f"{base}five\n")


def test_trees_merge_added_and_removed_files():
    base = {"a": "1\n", "b": "2\n", "c": "3\n"}
    assert merge_trees(base, {"a": "1\n", "c": "3\n", "d": "4\n"}, {**base, "a": "9\n"}) == {
        "a": "9\n", "c": "3\n", "d": "4\n",
    }  # fmt: skip
    with pytest.raises(MergeConflict, match="removed"):
        merge_trees(base, {"b": "2\n"}, {**base, "a": "9\n"})
    with pytest.raises(MergeConflict, match="added"):
        merge_trees(base, {**base, "d": "4\n"}, {**base, "d": "5\n"})


def test_hidden_calls_report_integers_under_the_keys_they_were_given():
    tree = {
        "a.py": "def half(x):\n    return x // 2\ndef text(x):\n    return str(x)\ndef length(x):\n    return len(x)\n"
    }
    calls = {
        'quoted "ü"\n': ("a.py", "half", [-4, 2**70]),
        "text": ("a.py", "text", [1]),
        "missing": ("a.py", "absent", [1]),
        "nested": ("a.py", "length", [[None, True, "\U0001f600"], "\U0001f600"]),
    }
    assert run_calls({"tree": tree}, {"job": ("tree", calls)}, BubblewrapFactory()) == {
        "job": {'quoted "ü"\n': [-2, 2**69], "text": None, "missing": None, "nested": [3, 1]}
    }


def test_no_task_has_a_module_of_pythons_name():
    """A task with a module `site` could not be solved: Python's own was imported."""
    assert "site.py" in list(itertools.islice(generate_tasks("s", 1, "train"), 28))[27].payload["files"]
    train, heldout = 60, 300
    tasks = [task for task in FAMILY.load("s", 1, {"train": train, "heldout": heldout}) if isinstance(task, Task)]
    modules = {Path(path).stem for task in tasks for path in task.payload["files"]}
    assert len(tasks) == train + heldout and not modules & set(sys.stdlib_module_names)
