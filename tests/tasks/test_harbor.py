"""Harbor's task folders: read, proven, rolled out and graded in the machine, in both kinds of sandbox."""

from __future__ import annotations

import errno
import json
import tempfile
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from etpi_assets.agent.loop import SUBMIT, Identity, RolloutJob, RolloutRuntime, run_rollout
from etpi_assets.importers import importer_named, read_options
from etpi_assets.resources import Resources
from etpi_assets.rollouts.teachers import null_policy, reference_policy
from etpi_assets.specs.load import load_specs
from etpi_assets.specs.rollout_set import AgentSection
from etpi_assets.tasks.assets import tasks
from etpi_assets.tasks.families import load_family
from etpi_assets.tasks.family import RejectedInput, Task
from etpi_assets.tasks.harbor import snapshot
from etpi_assets.tasks.table import read_tasks
from etpi_assets.trajectories.records import RolloutRecord
from etpi_resources.chat.format import load_chat_format
from etpi_resources.engines.scripted import ScriptedEngine
from etpi_resources.lake.lake import Lake, Ref
from etpi_resources.sandboxes import SandboxFactory
from etpi_resources.sandboxes.bubblewrap import BubblewrapFactory
from tests.support.harbor import CONFIG, make_folder
from tests.support.repositories import OFFLINE
from tests.support.rows import trial

FAMILY = load_family("harbor")


@pytest.fixture
def root():
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        yield Path(folder)


def load(root: Path, factory: SandboxFactory | None = None, **params: Any) -> list[Task | RejectedInput]:
    """The tasks below a folder, with a checkout of each machine's workspace beside it."""
    checkouts = root / "checkouts"
    for file in root.glob("tasks/*/environment/start.txt"):
        repo = checkouts / file.parents[1].name / "repo"
        repo.mkdir(parents=True, exist_ok=True)
        (repo / "start.txt").write_text(file.read_text())
    kind = factory.name if factory else "bubblewrap"
    params = {"path": str(root / "tasks"), "sandbox": kind, "checkouts": str(checkouts), **OFFLINE, **params}
    return list(FAMILY.load("bench", 0, params))


def roll(task: Task, factory: SandboxFactory, policy: Any) -> dict[str, Any]:
    chat = load_chat_format("tiny")
    agent = AgentSection(prompt="solo", max_steps=6, max_model_len=4096, max_tokens=2000)
    engine = ScriptedEngine(policy, chat, "t")
    identity = Identity("k", "set", "scripted", "t")
    record = run_rollout(RolloutJob(task, agent, identity), RolloutRuntime(FAMILY, engine, factory, chat))
    assert record.error is None and record.outcome, record.error
    return record.outcome


def typed(*commands: str) -> Any:
    """A policy that types these commands, one a turn, and submits."""

    def policy(request: Any) -> str:
        turn = sum(message["role"] == "assistant" for message in request.messages)
        return f"```bash\n{[*commands, f'echo {SUBMIT}'][min(turn, len(commands))]}\n```"

    return policy


def test_harbor_folder_is_a_task_proven_and_graded_in_its_machine(root, factory):
    make_folder(root / "tasks")
    [task] = load(root, factory)
    assert isinstance(task, Task) and task.split == "heldout" and task.payload["metadata"] == {"category": "files"}
    assert FAMILY.needs(task).limits.memory_bytes == 512 << 20 and FAMILY.entities(task) == ["/app/out.txt"]
    (proved,) = FAMILY.validate([task], factory)
    assert isinstance(proved, Task) and proved.content_hash == task.content_hash

    assert roll(task, factory, reference_policy(FAMILY)) == {
        "reward": 1.0, "verdict": "passed", "details": {
            "trust": {"blind": 0, "reversed": 0, "unchallenged": 1}, "verdict_trust": "unchallenged"
        }
    }  # fmt: skip
    idle = roll(task, factory, null_policy)
    assert (idle["reward"], idle["verdict"]) == (0.25, "failed_tests") and "found other" in idle["details"]["output"]
    # The workspace's text alone, in a fresh machine: the file that is no text is missing there.
    assert FAMILY.judge(task, {"agent1": {"out.txt": "1\n2\n3\n"}}, factory).reward == 0.25


@pytest.mark.parametrize("table", ["", '[task]\nname = "pier/lines"\n'])
def test_task_has_the_name_that_trials_of_it_have(table, root, tmp_path):
    folder = make_folder(root / "tasks", **{"task.toml": CONFIG + table})
    named = "pier/lines" if table else "lines"
    for held in ("lines", named):
        [task] = load(root, split="train", heldout_tasks=[held])
        assert isinstance(task, Task) and (task.task_id, task.split) == (named, "heldout")
    unit = trial(tmp_path, task_name=named if table else None)
    (unit / "config.json").write_text(json.dumps({"task": {"path": str(folder)}}))
    (record,) = importer_named("harbor").read(unit, tmp_path, read_options({"tokenizer": "qwen3"}))
    assert isinstance(record, RolloutRecord) and record.task_id == task.task_id
    make_folder(root / "tasks", "second", **{"task.toml": CONFIG + table})
    assert [item.reason for item in load(root) if isinstance(item, RejectedInput)] == ["repeated_task"] * bool(table)


def test_judge_ignores_files_planted_in_test_folders(root, factory):
    make_folder(root / "tasks")
    [task] = load(root, factory)
    assert isinstance(task, Task)
    forged = "mkdir -p /logs/verifier; cd /logs/verifier; echo 1 > reward.txt; echo '{\"reward\": 1}' > reward.json"
    helper = "printf '#!/bin/bash\\necho three lines\\n' > /tests/count.sh; chmod +x /tests/count.sh"
    late = "(sleep 2; echo 1 > /logs/verifier/reward.txt) & disown"
    assert roll(task, factory, typed(forged, helper, late))["reward"] == 0.25


def test_copied_directory_keeps_no_way_out_and_no_module_of_the_runner():
    inside = [
        "ln -s x.txt one",
        "ln -s ../../x a/b/two",
        "ln -s /workspace/a three",
        "ln -s a/b four",
        "ln -s .. a/five",
    ]
    outside = ["../x", "../../workspace/x", "/etc/passwd", "/proc/self/cwd/x", "/dev/fd/3", "a/../../x", "a/b/..", ".."]
    links = [*inside, *(f"ln -s {target} out{number}" for number, target in enumerate(outside))]
    modules = "mkdir pytest json; touch pytest/__init__.py pytest.pyc json.txt argparse.py queue.py kept.py"
    with BubblewrapFactory().create({"a/b/x": ""}) as machine, BubblewrapFactory().create({"kept.py": ""}) as fresh:
        assert machine.run(f"{'; '.join(links)}; {modules}").exit_code == 0
        answer = snapshot.take(machine)
        assert answer and snapshot.put(fresh, answer, {"pytest", "json", "argparse", "kept"}) is None
        assert fresh.run("find . -type l | sort").output.split() == [
            "./a/b/two",
            "./a/five",
            "./four",
            "./one",
            "./three",
        ]
        assert fresh.run("ls").output.split() == [
            "a",
            "four",
            "json",
            "json.txt",
            "kept.py",
            "one",
            "queue.py",
            "three",
        ]


FORGED = """
import base64, io, tarfile
file = io.BytesIO()
with tarfile.open(fileobj=file, mode="w:gz") as archive:
    for name, target, mode in [("d", "", {mode}), ("d/one", "/etc/passwd", 0o777), ("two", "d/one", 0o777)]:
        entry = tarfile.TarInfo(name)
        entry.type, entry.linkname, entry.mode = tarfile.SYMTYPE if target else tarfile.DIRTYPE, target, mode
        archive.addfile(entry)
open("answer.tar.gz.b64", "wb").write(base64.b64encode(file.getvalue()))
"""


@pytest.mark.parametrize("mode", ["0o111", "0o555"])
def test_archive_that_cannot_be_cleaned_is_refused(mode):
    with BubblewrapFactory().create({"forge.py": FORGED.format(mode=mode)}) as machine:
        assert machine.run("python3 forge.py; touch unreadable; chmod 000 unreadable").exit_code == 0
        answer = machine.read_files()["answer.tar.gz.b64"]
        assert snapshot.take(machine) is None, "tar fails, and the archive is the agent's own"
    with BubblewrapFactory().create({}) as fresh:
        assert snapshot.put(fresh, answer) is not None


@pytest.mark.parametrize("name", ["yaml", "yaml.egg-info"])
def test_what_cannot_be_removed_is_refused(name):
    with BubblewrapFactory().create({f"{name}/__init__.py": "", "zz": ""}) as machine:
        assert machine.run(f"chmod 555 {name}").exit_code == 0
        answer = snapshot.take(machine)
    with BubblewrapFactory().create({}) as fresh:
        assert answer and snapshot.put(fresh, answer, {"yaml"}) is not None


@pytest.mark.parametrize(
    ("test", "reward", "verdict"),
    [
        (
            'echo \'{"reward": 0.5, "more": 2}\' > /logs/verifier/reward.json; echo 1 > /logs/verifier/reward.txt',
            0.5,
            "failed_tests",
        ),
        ("echo '{\"more\": 2}' > /logs/verifier/reward.json; echo 1 > /logs/verifier/reward.txt", 1.0, "passed"),
        ("true", 0.0, "no_reward"),
        ("echo much > /logs/verifier/reward.txt", 0.0, "no_reward"),
        ("echo 7 > /logs/verifier/reward.txt", 0.0, "no_reward"),
        ("sleep 30; echo 1 > /logs/verifier/reward.txt", 0.0, "no_reward"),
    ],
)
def test_reward_is_read_from_the_reward_file(root, test, reward, verdict):
    make_folder(root / "tasks", **{"tests/test.sh": f"#!/bin/bash\n{test}\n"})
    [task] = load(root)
    assert isinstance(task, Task)
    task.payload["seconds"] = 1.0  # type: ignore[index]
    result = FAMILY.judge(task, {"agent1": {}}, BubblewrapFactory())
    assert (result.reward, result.verdict) == (reward, verdict), result


def test_unreadable_folders_are_rejected_with_the_reason(root):
    tasks = root / "tasks"
    make_folder(tasks, "a_good")
    make_folder(tasks, "b_wrong", **{"solution/out.txt": "1\n"})
    make_folder(tasks, "c_given", **{"tests/test.sh": "#!/bin/bash\necho 1 > /logs/verifier/reward.txt\n"})
    make_folder(tasks, "d_unproven", **{"solution/solve.sh": None})
    make_folder(tasks, "e_untested", **{"tests/test.sh": None})
    make_folder(tasks, "f_unsaid", **{"instruction.md": " \n"})
    make_folder(tasks, "g_several", **{"environment/docker-compose.yaml": "services: {}\n"})
    make_folder(tasks, "h_broken", **{"task.toml": "version = \n"})
    make_folder(tasks, "i_keyed", **{"task.toml": '[verifier]\nenv = { KEY = "${OPENAI_API_KEY}" }\n'})
    make_folder(tasks, "j_apart", **{"task.toml": '[verifier]\nenvironment_mode = "separate"\n'})
    make_folder(tasks, "k_apart", **{"task.toml": '[verifier.environment]\ndocker_image = "x"\n'})
    make_folder(tasks, "l_set", **{"task.toml": '[environment]\nenv = { KEY = "x" }\n'})
    make_folder(tasks, "m_slow", **{"task.toml": '[agent]\ntimeout_sec = "10m"\n'})
    make_folder(tasks, "n_large", **{"task.toml": '[environment]\nmemory_mb = "2G"\n'})
    make_folder(tasks, "o_listed", **{"task.toml": "[verifier]\nenv = []\n"})
    result = load(root, tasks=[*sorted(p.name for p in tasks.iterdir()), "z_gone"])
    assert {f.source: f.reason for f in result if isinstance(f, RejectedInput)} == {
        "z_gone": "no_such_task", "e_untested": "no_tests", "f_unsaid": "no_instruction",
        "g_several": "several_containers", "h_broken": "unreadable_config", "i_keyed": "host_variables",
        "j_apart": "separate_verifier", "k_apart": "separate_verifier", "l_set": "machine_variables",
        "m_slow": "unreadable_config", "n_large": "unreadable_config", "o_listed": "unreadable_config",
    }  # fmt: skip
    loaded = [f for f in result if isinstance(f, Task)]
    outcomes = list(FAMILY.validate(loaded, BubblewrapFactory()))
    assert [o.reason if isinstance(o, RejectedInput) else o.task_id for o in outcomes] == [
        "a_good", "reference_fails", "null_passes", "no_reference",
    ]  # fmt: skip


def test_folder_says_its_variables_and_where_the_agent_works(root):
    config = (
        '[verifier.env]\nKEY = "${KEY:-}"\nTIMES = "${TIMES:-2}"\nMIXED = "a ${b}"\n[solution.env]\nWANTED = "three"\n'
        '[environment]\nworkdir = "/srv"\n'
    )
    # Harbor reads docker-compose.yaml alone: a file of another name is one that the agent is asked about.
    files = {"task.toml": config, "environment/docker-compose.yml": "services: {}\n"}
    files["solution/solve.sh"] = 'echo "$WANTED" > out.txt\n'
    make_folder(root / "tasks", **files)
    (task,) = load(root)
    assert isinstance(task, Task) and task.payload["place"]["workdir"] == "/srv"
    assert task.payload["environment"] == {"KEY": "", "TIMES": "2", "MIXED": "a ${b}"}
    (elsewhere,) = load(root, workdir="/app")
    with BubblewrapFactory().create({}, environment=FAMILY.needs(elsewhere).environment) as sandbox:
        for command in FAMILY.solve(elsewhere, FAMILY.roles(elsewhere)[0]):
            assert sandbox.run(command).exit_code == 0
        assert sandbox.read_files()["out.txt"] == "three\n"


@pytest.mark.parametrize("stated", ["memory_mb = 3072", 'memory = "3G"', 'memory = "3072M"'])
def test_machine_has_the_memory_that_its_folder_states(root, stated):
    make_folder(root / "tasks", **{"task.toml": f"[environment]\n{stated}\n"})
    (task,) = load(root)
    limits = FAMILY.needs(task).limits
    assert (limits.memory_bytes, limits.processes) == (3 << 30, 512)


def test_content_hash_is_independent_of_the_folder_location(root):
    hashes = []
    for index, changes in enumerate([{}, {}, {"tests/count.sh": "x"}, {"environment/start.txt": "other\n"}]):
        make_folder(root / str(index) / "tasks", **changes)
        [task] = load(root / str(index))
        assert isinstance(task, Task)
        hashes.append(task.content_hash)
    assert hashes[0] == hashes[1] and len(set(hashes)) == 3


def test_the_suite_names_its_folder_in_its_spec(root):
    suite = load_specs().suites["terminal_bench"]
    assert suite.params["path"] == "${ETPI_TERMINAL_BENCH}" and suite.family == "harbor"
    with pytest.raises(FileNotFoundError, match="task.toml"):
        list(FAMILY.load("bench", 0, {**suite.params, "path": str(root)}))
    with pytest.raises(ValueError, match=r"\['pth'\]"):
        list(FAMILY.load("bench", 0, {**suite.params, "pth": "x"}))


def test_full_disk_or_too_many_files_of_the_machine_quarantine_no_task(root, monkeypatch):
    make_folder(root / "tasks")
    [task] = load(root, BubblewrapFactory())
    for code in (errno.ENOSPC, errno.EMFILE):
        monkeypatch.setattr(BubblewrapFactory, "create", Mock(side_effect=OSError(code, "this machine")))
        with pytest.raises(OSError, match="this machine"):
            list(FAMILY.validate([task], BubblewrapFactory()))


def test_task_that_cannot_be_proven_is_quarantined_or_run_without_a_verdict(root, tmp_path):
    make_folder(root / "tasks", **{"solution/out.txt": "one line\n"})
    [task] = load(root, BubblewrapFactory())
    assert isinstance(task, Task)
    params = {"path": str(root / "tasks"), "checkouts": str(root / "checkouts"), "sandbox": "bubblewrap"}
    for keep, rows in ((False, {"tasks": 0, "quarantined": 1}), (True, {"tasks": 1, "quarantined": 0})):
        specs, lake = tmp_path / str(keep), Lake(tmp_path / f"lake{keep}")
        (specs / "suites").mkdir(parents=True)
        lines = [f"{name} = {json.dumps(value)}" for name, value in {**params, "keep_unproven": keep}.items()]
        lines.append('grading = {network = "none"}')
        (specs / "suites" / "own.toml").write_text('title = "x"\nfamily = "harbor"\n[params]\n' + "\n".join(lines))
        manifest = tasks.execute("own", Resources(lake=lake, specs_folder=specs)).manifest
        assert manifest.rows == rows and manifest.blocked is not keep
    [kept] = read_tasks(lake.read(Ref("tasks", "suite", "own"), "tasks"))
    assert "reference_fails" in kept.payload["why_unproven"] and kept.content_hash != task.content_hash
    outcome = roll(kept, BubblewrapFactory(), typed("seq 3 > out.txt"))
    assert (outcome["reward"], outcome["verdict"]) == (None, "unproven")
