"""The embedded world: tasks that differ, texts that say enough, verdicts that cannot be talked into passing."""

from __future__ import annotations

import itertools
import re
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import cache
from pathlib import PurePosixPath

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from etpi_assets.agent.prompts import render_prompts, steering_text
from etpi_assets.checks import CHECKS
from etpi_assets.specs.load import SpecError
from etpi_assets.specs.rollout_set import AgentSection
from etpi_assets.tasks.families import known_families, load_family
from etpi_assets.tasks.family import RejectedInput, Task, Verdict
from etpi_assets.tasks.table import read_tasks, rejected_table, task_table
from etpi_assets.tasks.task_checks import check_tasks
from etpi_assets.worlds.coop_tiny_shared.features import OPERATIONS, Formula
from etpi_assets.worlds.names import is_heldout
from etpi_lab.worlds.coop_tiny import FAMILY
from etpi_lab.worlds.coop_tiny.formulas import parse_formula
from etpi_lab.worlds.coop_tiny.generate import generate_tasks
from etpi_lab.worlds.coop_tiny.repositories import LAYOUTS, check_text, read_check
from etpi_lab.worlds.coop_tiny.texts import REGISTERS
from etpi_resources.chat.format import load_chat_format
from etpi_resources.sandboxes import Environment, Limits, Sandbox
from etpi_resources.sandboxes.bubblewrap import BubblewrapFactory

SANDBOXES = BubblewrapFactory()


@cache
def suite() -> tuple[Task, ...]:
    return tuple(task for task in FAMILY.load("coop_tiny", 0, {}) if isinstance(task, Task))


def of_split(split: str) -> list[Task]:
    return [task for task in suite() if task.split == split]


def identifiers(task: Task) -> set[str]:
    """Every drawn name of a task: functions, and the parts of paths that a layout does not fix."""
    fixed = {part for layout in LAYOUTS for part in re.split(r"[/.]", "/".join((*layout.modules, layout.check)))}
    names = {name for text in task.payload["files"].values() for name in re.findall(r"def (\w+)", text)}
    for path in task.payload["files"]:
        names |= {PurePosixPath(part).stem for part in path.split("/")} - fixed
    return names


def reference(task: Task) -> dict[str, dict[str, str]]:
    return {role.agent_id: FAMILY.reference(task, role) for role in FAMILY.roles(task)}


def judge(task: Task, final: dict[str, dict[str, str]]) -> Verdict:
    return FAMILY.judge(task, final, SANDBOXES)


def task_where(same_module: bool) -> Task:
    for task in suite():
        first, second = (feature["path"] for feature in task.payload["features"].values())
        if (first == second) is same_module:
            return task
    raise AssertionError("no such task")


# --- tasks -----------------------------------------------------------------------------------------------------------


def test_suite_is_deterministic_in_its_seed():
    again = list(FAMILY.load("coop_tiny", 0, {}))
    assert [task.content_hash for task in suite()] == [task.content_hash for task in again]  # type: ignore[union-attr]
    other = list(FAMILY.load("coop_tiny", 1, {"train": 20, "heldout": 5}))
    assert len(other) == 25
    assert not {t.content_hash for t in suite()} & {t.content_hash for t in other}  # type: ignore[union-attr]


def test_there_are_a_thousand_training_surfaces_and_held_out_names_are_new():
    train, heldout = of_split("train"), of_split("heldout")
    assert len(train) >= 1000 and len(heldout) >= 100
    assert len({frozenset(identifiers(task)) for task in train}) == len(train)
    assert len({task.payload["roles"][0]["instruction"] for task in train}) == len(train)
    seen = set().union(*map(identifiers, train))
    new = set().union(*map(identifiers, heldout))
    assert len(new) > 800 and not new & seen
    assert all(map(is_heldout, new)) and not any(map(is_heldout, seen))


def test_base_corpus_shares_no_name_with_heldout_tasks():
    base = list(itertools.islice(generate_tasks("coop_tiny_base", 7, "train"), 500))
    names = set().union(*map(identifiers, base))
    assert not any(map(is_heldout, names))
    assert not {t.content_hash for t in base} & {t.content_hash for t in suite()}


def test_splits_have_different_repositories_and_layouts():
    splits = {split: {task.repo for task in of_split(split)} for split in ("train", "heldout")}
    assert len(splits["train"]) == 12 and len(splits["heldout"]) == 4
    assert not splits["train"] & splits["heldout"]
    assert len({layout.modules for layout in LAYOUTS}) == len(LAYOUTS)


def test_names_of_a_task_share_no_syllable():
    for task in suite():
        syllables = [s for name in identifiers(task) for s in re.findall("..", name.replace("_", ""))]
        assert len(syllables) == len(set(syllables)), task.task_id


def test_some_tasks_have_both_features_in_one_module():
    share = sum(len({f["path"] for f in task.payload["features"].values()}) == 1 for task in suite()) / len(suite())
    assert 0.25 < share < 0.45


def test_instruction_names_function_path_and_partner():
    for task in suite():
        for role in FAMILY.roles(task):
            own = task.payload["features"][role.feature_id]
            (other,) = (f for key, f in task.payload["features"].items() if key != role.feature_id)
            for words in (own["function"], own["path"], other["function"], other["path"], str(own["number"])):
                # a space before, so that the name is spelt as a command will spell it
                assert f" {words}" in role.instruction or f"\n{words}" in role.instruction, (task.task_id, words)
            assert f"python3 {task.payload['check']} {own['function']}" in role.instruction
            assert all(path in role.instruction for path in task.payload["files"])
            assert role.partner and role.partner in role.instruction or "Partner: " in role.instruction
            assert "$" not in role.instruction
    assert {task.payload["register"] for task in suite()} == set(REGISTERS)


def test_texts_fit_the_small_model():
    chat = load_chat_format("tiny")
    lengths: dict[str, list[int]] = {register: [] for register in REGISTERS}
    for task in suite()[::3] + suite()[-20:]:
        lengths[task.payload["register"]] += [len(chat.encode(r.instruction)) for r in FAMILY.roles(task)]
    assert max(lengths["terse"]) <= 150 and max(lengths["pull_request"]) <= 400
    assert min(lengths["pull_request"]) > max(lengths["terse"])
    task = suite()[0]
    role = FAMILY.roles(task)[0]
    plain, steered = (render_prompts(AgentSection(steering=on), task, role) for on in (False, True))
    assert steered[0]["content"] == plain[0]["content"] + steering_text(AgentSection(), role)
    assert steered[1] == plain[1]
    assert len(chat.encode(plain[0]["content"])) <= 80


def test_unknown_params_and_families_are_named():
    with pytest.raises(ValueError, match=r"trian.*heldout"):
        list(FAMILY.load("mine", 0, {"trian": 3}))
    with pytest.raises(ValueError, match=r"shouting.*terse"):
        list(FAMILY.load("mine", 0, {"registers": ["shouting"]}))
    with pytest.raises(SpecError, match="coop_tiny"):
        load_family("coop_tony")
    assert "coop_tiny" in known_families() and "family" not in known_families()
    assert load_family("coop_tiny") is FAMILY


def test_tasks_survive_their_table():
    tasks = [*suite()[:3], suite()[-1]]
    assert read_tasks(task_table(tasks)) == tasks
    assert read_tasks(task_table(tasks), "heldout") == tasks[-1:]
    assert rejected_table([RejectedInput("a", "b", "c")]).to_pylist()[0]["reason"] == "b"


def test_read_check_accepts_only_visible_checks():
    cases = {"ka_lo": ("a/b.py", 3, 21), "mi_ra": ("c.py", -2, 5)}
    assert read_check(check_text(cases)) == cases
    with pytest.raises(ValueError, match="visible check"):
        read_check(check_text(cases) + "print(1)\n")


# --- verdicts --------------------------------------------------------------------------------------------------------


def test_references_pass_and_no_work_fails():
    chosen = [task_where(True), task_where(False), *of_split("heldout")[:4]]
    assert list(FAMILY.validate(chosen, SANDBOXES)) == chosen
    for task in chosen[:3]:
        verdict = judge(task, reference(task))
        assert (verdict.reward, verdict.verdict) == (1.0, "passed")
        nothing = {role.agent_id: FAMILY.workspace(task, role) for role in FAMILY.roles(task)}
        assert judge(task, nothing).verdict == "no_patch"
        half = {**nothing, "agent1": reference(task)["agent1"]}
        verdict = judge(task, half)
        assert (verdict.reward, verdict.verdict) == (0.0, "failed_tests")
        assert verdict.details["features"] == {"f1": True, "f2": False}


def with_feature(task: Task, **changes: object) -> Task:
    features = {**task.payload["features"], "f1": {**task.payload["features"]["f1"], **changes}}
    return replace(task, payload={**task.payload, "features": features})


def test_validate_rejects_tasks_with_the_reason():
    good, other = suite()[:2]
    feature = good.payload["features"]["f1"]
    current = parse_formula(feature["current"])
    broken = {
        "reference_fails": with_feature(good, hidden=[[x, y + 1] for x, y in feature["hidden"]]),
        "null_passes": with_feature(good, wanted=current.code, hidden=[[x, current(x)] for x, _ in feature["hidden"]]),
        "no_reference": with_feature(good, function="not_there"),
    }  # fmt: skip
    outcomes = list(FAMILY.validate([other, *broken.values(), good], SANDBOXES))
    assert outcomes[0] == other and outcomes[-1] == good
    assert [o.reason for o in outcomes[1:-1] if isinstance(o, RejectedInput)] == list(broken)
    refusals = [o for o in outcomes if isinstance(o, RejectedInput)]
    checks = {c.name: c for c in check_tasks(5, [other, good], refusals, FAMILY)}
    assert set(checks) == set(CHECKS["tasks"])
    assert not checks["tasks_valid"].passed and good.task_id in checks["tasks_valid"].message
    assert checks["tasks_accounted"].passed


def test_checks_of_a_suite_find_repositories_and_names_in_both_splits():
    train, heldout = of_split("train")[:24], of_split("heldout")[:8]
    assert all(c.passed for c in check_tasks(32, [*train, *heldout], [], FAMILY))
    torn = [*train, *(replace(task, split="heldout") for task in train[:8])]
    failed = {c.name for c in check_tasks(32, torn, [], FAMILY) if not c.passed}
    assert failed == {"tasks_accounted", "split_by_repo", "heldout_names_unseen"}  # ids repeat too
    assert not check_tasks(0, [], [], FAMILY)[0].passed


def edits(task: Task, agent_id: str, **texts: str) -> dict[str, dict[str, str]]:
    """Nobody works, and one agent leaves these files besides."""
    final = {role.agent_id: FAMILY.workspace(task, role) for role in FAMILY.roles(task)}
    final[agent_id] |= texts
    return final


def test_judge_reports_merge_conflict_for_different_edits_of_one_line():
    task = task_where(True)
    path = task.payload["features"]["f1"]["path"]
    final = reference(task)
    final["agent2"][path] = re.sub(r"return .*", "return 1", final["agent2"][path])
    verdict = judge(task, final)
    assert (verdict.reward, verdict.verdict) == (0.0, "merge_conflict")
    assert path in verdict.details["conflict"]


def test_judge_ignores_edited_tests_and_start_up_files():
    task = task_where(False)
    lie = "import builtins, os, sys\nclass T(int):\n    def __eq__(self, other): return True\nos._exit(0)\n"
    files = dict.fromkeys(("conftest.py", "sitecustomize.py", "usercustomize.py", "tests/test_a.py"), lie)
    verdict = judge(task, edits(task, "agent1", **files, **{task.payload["check"]: "print('ok')\n", "run.sh": "x"}))
    assert verdict.verdict == "no_patch"
    # beside right work they neither help nor hurt
    final = reference(task)
    final["agent1"] |= files
    assert judge(task, final).verdict == "passed"


def hostile(body: str) -> str:
    return f"import json, os, sys, time\n{body}\n"


@pytest.mark.parametrize(
    "body",
    [
        # whatever is printed or left in files, the values decide
        "def NAME(x):\n    print('passed')\n    os._exit(0)",
        "class Equal(int):\n    def __eq__(self, other): return True\n    __hash__ = int.__hash__\n"
        "def NAME(x):\n    return Equal(0)",
        "def NAME(x):\n    return True",
        "def NAME(x):\n    return float(x)",
        "def NAME(x):\n    raise SystemExit(0)",
        "def NAME(x):\n    return",
        # forged report lines, by the parent's output and by the child's own pipe
        "line = open(f'/proc/{os.getppid()}/cmdline').read().split('\\0')\nnonce = line[-3]\n"
        "for fd in (1, 2):\n    try:\n        with open(f'/proc/{os.getppid()}/fd/{fd}', 'w') as out:\n"
        "            out.write(nonce + ' f1 ' + json.dumps({'f1': [1] * 7}) + chr(10))\n"
        "    except OSError:\n        pass\n"
        "def NAME(x):\n    return 0",
        "for fd in range(3, 20):\n    try:\n        os.write(fd, b'{\"f1\": true, \"f2\": true}')\n"
        "    except OSError:\n        pass\n"
        "os._exit(0)",
        "os.kill(os.getppid(), 9)\ndef NAME(x):\n    return 0",
        "def NAME(:",
    ],
)  # fmt: skip
def test_hostile_code_fails(body: str):
    task = task_where(False)
    feature = task.payload["features"]["f1"]
    final = reference(task)
    final["agent1"][feature["path"]] = hostile(body.replace("NAME", feature["function"]))
    verdict = judge(task, final)
    assert (verdict.reward, verdict.verdict) == (0.0, "failed_tests")
    assert verdict.details["features"]["f1"] is False


def test_code_that_hangs_fails_within_its_time():
    task = task_where(False)
    feature = task.payload["features"]["f1"]
    final = reference(task)
    final["agent1"][feature["path"]] = hostile("while True:\n    time.sleep(1)")
    start = time.monotonic()
    verdict = judge(task, final)
    assert time.monotonic() - start < 15
    assert verdict.details["features"] == {"f1": False, "f2": True}


def test_hidden_values_never_enter_the_sandbox():
    class Spy:
        name = "spy"
        seen: list[str] = []

        def create(
            self,
            files: Mapping[str, str],
            limits: Limits = Limits(),  # noqa: B008
            environment: Environment | None = None,
        ) -> Sandbox:
            self.seen += files.values()
            return SANDBOXES.create(files, limits)

    task = task_where(False)
    hidden = [[x, y + 1_000_003] for x, y in task.payload["features"]["f1"]["hidden"]]
    FAMILY.judge(with_feature(task, hidden=hidden), reference(task), Spy())
    assert Spy.seen and not any(str(y) in text for _, y in hidden for text in Spy.seen)


@settings(max_examples=20)
@given(st.integers(0, 1099))
def test_entities_occur_in_the_task(index: int):
    task = suite()[index]
    assert all(entity in task.instruction for entity in FAMILY.entities(task))
    assert len(FAMILY.entities(task)) >= 4


@pytest.fixture(autouse=True, scope="module")
def _sandbox_works() -> Iterator[None]:
    with SANDBOXES.create({}) as sandbox:
        assert sandbox.run("true").exit_code == 0
    yield


@pytest.mark.parametrize("operation", sorted(OPERATIONS))
def test_code_of_a_formula_is_read_back(operation: str):
    formula = Formula(operation, 7)
    assert parse_formula(formula.code) == formula


def test_parse_formula_rejects_unknown_code():
    with pytest.raises(ValueError, match="x \\*\\* 2"):
        parse_formula("x ** 2")
