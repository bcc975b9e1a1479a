"""Data in the forms of the real suites and recorded runs, made where the real ones are not here.

Four small git repositories with two features each serve CooperBench's folder, R2E-Gym's rows and SWE-bench's rows; the
last one is held out. Task folders of Harbor and rows of questions and of chat messages are as small.
"""

from __future__ import annotations

import json
import os
import shutil
import stat
import subprocess
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from etpi.sandbox_python import make_tools
from etpi_assets.specs.load import SpecError

TRAIN, HELD_OUT = ("rehearsal_a", "rehearsal_b", "rehearsal_c"), "rehearsal_d"
REPOSITORIES = (*TRAIN, HELD_OUT)

_GIT = {
    "GIT_AUTHOR_NAME": "etpi", "GIT_AUTHOR_EMAIL": "etpi@localhost", "GIT_AUTHOR_DATE": "2026-01-01T00:00:00Z",
    "GIT_COMMITTER_NAME": "etpi", "GIT_COMMITTER_EMAIL": "etpi@localhost",
    "GIT_COMMITTER_DATE": "2026-01-01T00:00:00Z", "GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_SYSTEM": os.devnull,
}  # fmt: skip
_RUNNER = """#!/bin/bash
set -e
cd /workspace/repo
[ -z "$2" ] || git apply "/patches/$2"
git apply "/patches/$1"
python3 -m pytest -q -p no:cacheprovider tests
"""

Params = dict[str, Any]


def visible_folder(folder: Path) -> Path:
    """Return the folder for stand-ins of a rehearsal: below it, or below the system's folder of temporary files.

    Commands run as another user, who must be able to enter every folder above (a home often cannot be entered).
    """
    below, note = folder / "stand_ins", folder / "stand_ins.path"
    folder.mkdir(parents=True, exist_ok=True)
    if all(path.stat().st_mode & stat.S_IXOTH for path in (folder, *folder.parents)):
        return below
    if not note.exists() or not Path(note.read_text(encoding="utf-8")).is_dir():
        public = Path(tempfile.mkdtemp(prefix="etpi-rehearsal-"))
        public.chmod(0o755)
        note.write_text(str(public), encoding="utf-8")
    return Path(note.read_text(encoding="utf-8"))


def replace_suite(family: str, folder: Path, params: Mapping[str, Any]) -> Params:
    """Create tasks in the form of a family below the folder; return the suite's params for them.

    Raises:
        SpecError: no stand-ins of this family are known.
    """
    if family not in _SUITES:
        raise SpecError(f"tasks of the family {family!r} are not here, and etpi creates no stand-ins for them")
    folder.mkdir(parents=True, exist_ok=True)
    return _SUITES[family](folder.resolve(), params)


def replace_runs(form: str, folder: Path) -> Path | None:
    """Create recorded runs in a format below the folder; return their path, or None if none are known."""
    if form != "messages":
        return None
    folder.mkdir(parents=True, exist_ok=True)
    file = folder.resolve() / "runs.jsonl"
    file.write_text("".join(json.dumps(_conversation(number)) + "\n" for number in range(8)), encoding="utf-8")
    return file


# --- repositories ----------------------------------------------------------------------------------------------------


def _files(repository: str) -> dict[str, str]:
    number = REPOSITORIES.index(repository)
    filler = "".join(f"# line {line}\n" for line in range(8))
    return {
        "cargo/__init__.py": "",
        "cargo/hold.py": f"def load_weight(n):\n    return n\n\n\n{filler}\n\ndef crew():\n    return {number}\n",
        "cargo/deck.py": f"def deck_height(n):\n    return n\n\n\n{filler}",
        "tests/test_there.py": "from cargo import deck, hold\n\n\ndef test_there():\n    assert deck and hold\n",
        "README.md": f"{repository}\n",
    }


def _solved(repository: str, *features: int) -> dict[str, str]:
    number = REPOSITORIES.index(repository)
    files = _files(repository)
    if 1 in features:
        files["cargo/hold.py"] = files["cargo/hold.py"].replace("return n\n", f"return n * {number + 2}\n", 1)
    if 2 in features:
        files["cargo/deck.py"] = files["cargo/deck.py"].replace("return n\n", f"return n + {number + 3}\n", 1)
    return files


def _texts(repository: str) -> dict[int, str]:
    number = REPOSITORIES.index(repository)
    return {
        1: f"In the repository {repository}, `load_weight` in `cargo/hold.py` has to return its argument times "
        f"{number + 2}. `cargo/deck.py` stays as it is.\n",
        2: f"In the repository {repository}, `deck_height` in `cargo/deck.py` has to return its argument plus "
        f"{number + 3}. `cargo/hold.py` stays as it is.\n",
    }


def _tests(repository: str) -> dict[int, str]:
    number = REPOSITORIES.index(repository)
    return {
        1: f"from cargo import hold\n\n\ndef test_weight():\n    assert hold.load_weight(5) == {5 * (number + 2)}\n",
        2: f"from cargo import deck\n\n\ndef test_height():\n    assert deck.deck_height(5) == {5 + number + 3}\n",
    }


class _Repository:
    """A git repository of one commit."""

    def __init__(self, folder: Path, name: str) -> None:
        self.folder, self.name = folder, name
        shutil.rmtree(folder, ignore_errors=True)
        _write(folder, _files(name))
        self.git("init", "-q")
        self.git("add", "-A")
        self.git("commit", "-q", "-m", "base")
        self.commit = self.git("rev-parse", "HEAD").strip()

    def patch(self, after: Mapping[str, str]) -> str:
        """Return the diff from the base commit to these files."""
        _write(self.folder, after)
        self.git("add", "-A")
        text = self.git("diff", "--cached")
        self.git("reset", "-q", "--hard")
        return text

    def git(self, *arguments: str) -> str:
        environment = {"PATH": os.environ["PATH"], "HOME": str(self.folder), **_GIT}
        return subprocess.run(
            ["git", *arguments], cwd=self.folder, env=environment, check=True, capture_output=True, text=True
        ).stdout


def _checkouts(root: Path, keys: Mapping[str, str]) -> tuple[Path, dict[str, _Repository]]:
    """Make the checkout of each repository under its key, and their interpreter; return the folder and them by name."""
    folder = root / "checkouts"
    repositories = {name: _Repository(folder / key / "repo", name) for name, key in keys.items()}
    make_tools(folder / "tools")
    _readable(root)
    return folder, repositories


def _cooperbench(root: Path, params: Mapping[str, Any]) -> Params:
    keys = {name: f"{name}_task/task1" for name in REPOSITORIES}
    checkouts, repositories = _checkouts(root, keys)
    for name, repository in repositories.items():
        files: dict[str, str] = {"runner.sh": _RUNNER}
        for feature in (1, 2):
            tests = {**_files(name), f"tests/test_feature{feature}.py": _tests(name)[feature]}
            files[f"feature{feature}/feature.md"] = _texts(name)[feature]
            files[f"feature{feature}/feature.patch"] = repository.patch(_solved(name, feature))
            files[f"feature{feature}/tests.patch"] = repository.patch(tests)
        _write(root / "tasks" / keys[name], files)
    _readable(root)
    kept = {key: value for key, value in params.items() if key not in ("pairs", "subset", "repos", "images")}
    live = {"sandbox": "bubblewrap", "checkouts": str(checkouts)} if params.get("sandbox") else {}
    held_out = {"heldout_repos": [f"{HELD_OUT}_task"]}
    return {**kept, **live, **held_out, "path": str(root / "tasks"), "grading": {"network": "none"}}


def _r2e(root: Path, params: Mapping[str, Any]) -> Params:
    repositories = {name: _Repository(root / "scratch" / name, name) for name in REPOSITORIES}
    keys = {name: f"{name}/{repository.commit}" for name, repository in repositories.items()}
    shutil.rmtree(root / "scratch")
    checkouts, repositories = _checkouts(root, keys)
    rows = []
    for name, repository in repositories.items():
        after = _solved(name, 1, 2)
        diffs = [
            {"header": {"file": {"path": path}}, "old_file_content": "", "new_file_content": after[path]}
            for path in ("cargo/hold.py", "cargo/deck.py")
        ]
        tests = {"test_file_names": ["test_1.py", "test_2.py"], "test_file_codes": list(_tests(name).values())}
        row = {
            "repo_name": name, "docker_image": "absent", "commit_hash": repository.commit,
            "parsed_commit_content": json.dumps({"file_diffs": diffs}),
            "execution_result_content": json.dumps(tests),
            "expected_output_json": json.dumps({"test_weight": "PASSED", "test_height": "PASSED"}),
            "problem_statement": f"[ISSUE] {''.join(_texts(name).values())} [/ISSUE]",
        }  # fmt: skip
        rows.append(row)
    return _rows(root, rows, checkouts, params, [HELD_OUT])


def _swe_bench(root: Path, params: Mapping[str, Any]) -> Params:
    keys = {name: f"{name}__{name}-1" for name in REPOSITORIES}
    checkouts, repositories = _checkouts(root, keys)
    rows = []
    for name, repository in repositories.items():
        tests = {**_files(name), "tests/test_there.py": f"{_files(name)['tests/test_there.py']}\n\n{_tests(name)[1]}"}
        row = {
            "instance_id": keys[name], "repo": f"{name}/{name}", "base_commit": repository.commit,
            "problem_statement": _texts(name)[1], "patch": repository.patch(_solved(name, 1)),
            "test_patch": repository.patch(tests), "FAIL_TO_PASS": json.dumps(["tests/test_there.py::test_weight"]),
            "PASS_TO_PASS": json.dumps(["tests/test_there.py::test_there"]),
        }  # fmt: skip
        rows.append(row)
    return _rows(root, rows, checkouts, params, [f"{name}/{name}" for name in REPOSITORIES])


def _rows(
    root: Path, rows: Sequence[Mapping[str, Any]], checkouts: Path, params: Mapping[str, Any], held_out: Sequence[str]
) -> Params:
    _readable(root)
    kept = {key: value for key, value in params.items() if key not in ("exclude_repos", "heldout_tasks", "tasks")}
    live = {"sandbox": "bubblewrap", "checkouts": str(checkouts)}
    return {**kept, **live, "path": str(_jsonl(root, rows)), "heldout_repos": list(held_out)}


# --- questions, machines, conversations ------------------------------------------------------------------------------


def _harbor(root: Path, params: Mapping[str, Any]) -> Params:
    test = '#!/bin/bash\n[ "$(cat /app/out.txt)" = {wanted} ] && echo 1 > /logs/verifier/reward.txt || '
    for number in range(3):
        name = f"count_{number}"
        files = {
            "task.toml": 'version = "1.0"\n[verifier]\ntimeout_sec = 60.0\n[agent]\ntimeout_sec = 60.0\n',
            "instruction.md": f"Write the number of lines of /app/lines.txt to /app/out.txt (task {number}).\n",
            "environment/Dockerfile": "FROM scratch\nCOPY lines.txt /app/lines.txt\nWORKDIR /app\n",
            "tests/test.sh": test.format(wanted=number + 2) + "echo 0 > /logs/verifier/reward.txt\n",
            "solution/solve.sh": "#!/bin/bash\nwc -l < /app/lines.txt | tr -d ' ' > /app/out.txt\n",
        }
        _write(root / "tasks" / name, files)
        _write(root / "checkouts" / name / "repo", {"lines.txt": "line\n" * (number + 2)})
    make_tools(root / "checkouts" / "tools")
    _readable(root)
    live = {"sandbox": "bubblewrap", "checkouts": str(root / "checkouts")}
    kept = {key: value for key, value in params.items() if key != "tasks"}
    return {**kept, **live, "path": str(root / "tasks"), "grading": {"network": "none"}}


def _answers(root: Path, params: Mapping[str, Any]) -> Params:
    sources = list(params.get("sources") or ["rehearsal_maths", "rehearsal_code"])
    rows = [_question(source, number) for source in sources for number in range(2)]
    licenses = {**dict.fromkeys(sources, "cc0-1.0"), **params.get("licenses", {})}
    per_source = 2 if params.get("per_source") else None
    kept = {key: value for key, value in params.items() if value is not None}
    sampled = {} if per_source is None else {"per_source": per_source}
    return {**kept, "path": str(_jsonl(root, rows)), "licenses": licenses, **sampled}


def _question(source: str, number: int) -> dict[str, Any]:
    if "code" in source:
        tests = {"inputs": [f"{number} 2\n", "5 6\n"], "outputs": [f"{number + 2}\n", "11\n"]}
        text = f"Read two integers of one line and print their sum ({source}, program {number})."
        solution = "print(sum(map(int, input().split())))"
        truth: Any = {"ground_truth": json.dumps(tests)}
        return {"data_source": source, "prompt": text, "reward_model": truth, "solution": solution}
    text = f"What is {number + 3} times 17? Give the result in \\boxed{{}} ({source})."
    return {"data_source": source, "prompt": text, "reward_model": {"ground_truth": str((number + 3) * 17)}}


def _conversation(number: int) -> dict[str, Any]:
    """Return a row of chat messages with two calls of code_interpreter and an answer."""
    messages: list[dict[str, str]] = [{"role": "user", "content": f"What is {number + 3} times 17, plus {number}?"}]
    value = (number + 3) * 17
    for code, printed in ((f"print({number + 3} * 17)", value), (f"print({value} + {number})", value + number)):
        call = json.dumps({"name": "code_interpreter", "arguments": {"code": code}})
        messages.append({"role": "assistant", "content": f"I compute it.\n<tool_call>\n{call}\n</tool_call>"})
        messages.append({"role": "tool", "content": f"{printed}\n"})
    messages.append({"role": "assistant", "content": f"The result is \\boxed{{{value + number}}}."})
    return {"messages": messages}


_SUITES: Mapping[str, Callable[[Path, Mapping[str, Any]], Params]] = {
    "cooperbench": _cooperbench,
    "r2e": _r2e,
    "swe_bench": _swe_bench,
    "harbor": _harbor,
    "answers": _answers,
}


def _jsonl(root: Path, rows: Sequence[Mapping[str, Any]]) -> Path:
    file = root / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return file


def _write(root: Path, files: Mapping[str, str]) -> None:
    for path, text in files.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(text, encoding="utf-8")


def _readable(root: Path) -> None:
    """Let every user read the folder: commands run as another one."""
    subprocess.run(["chmod", "-R", "a+rX", str(root)], check=True)
