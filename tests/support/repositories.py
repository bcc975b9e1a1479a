"""A small repository with tests, in the forms that CooperBench, R2E-Gym and SWE-bench keep theirs.

The same repository is made into an image and into a checkout with a prepared interpreter, so that both kinds of sandbox
run the same tasks.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from etpi.sandbox_python import make_tools

FILES = {
    "moor.py": "def rope(n):\n    return n\n\n\n# 1\n# 2\n# 3\n# 4\n# 5\n# 6\n\n\ndef knot(n):\n    return n\n",
    "tests/test_moor.py": "import moor\n\n\ndef test_there():\n    assert moor.rope and moor.knot\n",
    "README.md": "moor\n",
}
SOLVED = {"1": ("def rope(n):\n    return n\n", "def rope(n):\n    return n * 2\n")}
SOLVED["2"] = ("def knot(n):\n    return n\n", "def knot(n):\n    return n + 3\n")
SAYS = '"""The words pytest.skip and pytest.xfail in a text allow nothing."""\n'
HIDDEN = {
    "1": f"{SAYS}import moor\n\n\ndef test_rope():\n    assert moor.rope(4) == 8\n",
    "2": f"{SAYS}import moor\n\n\nclass TestKnot:\n    def test_knot(self):\n        assert moor.knot(4) == 7\n",
}
RUNNER = """#!/bin/bash
cd /workspace/repo
[ -z "$2" ] || git apply "/patches/$2" || exit 1
git apply "/patches/$1" || exit 1
python3 -m pytest -q -p no:cacheprovider tests
"""
PATCH = """diff --git a/src/moor.py b/src/moor.py
index 1..2 100644
--- a/src/moor.py
+++ b/src/moor.py
@@ -1,3 +1,6 @@ class Boat:
     def within(self):
-        pass
+        return None
+    def tie_{n}(self, rope):
+        return rope
"""
"""A patch in the form of CooperBench's features."""
ISSUE = "`rope` should double and `knot` should add three."
GIT = {"GIT_AUTHOR_NAME": "a", "GIT_AUTHOR_EMAIL": "a@b", "GIT_COMMITTER_NAME": "a", "GIT_COMMITTER_EMAIL": "a@b"}


def solved(*features: str) -> dict[str, str]:
    """The repository with these features done."""
    files = dict(FILES)
    for feature in features:
        files["moor.py"] = files["moor.py"].replace(*SOLVED[feature])
    return files


def write_tree(root: Path, files: Mapping[str, str | None]) -> None:
    """Write the texts of files by path; None: the file is not there."""
    for path, text in files.items():
        if text is not None:
            (root / path).parent.mkdir(parents=True, exist_ok=True)
            (root / path).write_text(text)


OFFLINE = {"grading": {"network": "none"}}
"""Params of a suite whose family's grading may download, which needs mitmproxy."""


class Repository:
    """A folder that everybody can enter, with the repository, its interpreter and the data sets about it."""

    def __init__(
        self, folder: Path, more: Mapping[str, str] | None = None, tools: Callable[[Path], object] = make_tools
    ) -> None:
        folder.chmod(0o755)
        self.folder, self.repo, self.tools = folder, folder / "repo", folder / "tools"
        write_tree(self.repo, {**FILES, **(more or {})})
        self._git("init", "-q")
        self._git("add", "-A")
        self._git("commit", "-q", "-m", "base")
        self.commit = self._git("rev-parse", "HEAD").strip()
        tools(self.tools)

    def patch(self, before: dict[str, str], after: dict[str, str]) -> str:
        """The diff between two states, as git writes it."""
        write_tree(self.repo, before)
        self._git("add", "-A")
        base = self._git("stash", "create").strip() or "HEAD"
        write_tree(self.repo, after)
        self._git("add", "-A")
        text = self._git("diff", "--cached", base)
        self._git("reset", "-q", "--hard", self.commit)
        self._git("clean", "-fdq")
        return text

    def checkouts(self, *keys: str) -> Path:
        """The folder that `params.checkouts` names; the solution stands in a later commit of each."""
        root = self.folder / "checkouts"
        for key in keys:
            if not (root / key).exists():
                shutil.copytree(self.repo, root / key / "repo")
                write_tree(root / key / "repo", solved("1", "2"))
                self._git("checkout", "-q", "-b", "future", at=root / key / "repo")
                self._git("commit", "-q", "-a", "-m", "solved", at=root / key / "repo")
                self._git("checkout", "-q", self.commit, at=root / key / "repo")
        if not (root / "tools").exists():
            (root / "tools").symlink_to(self.tools)
        return root

    def context(self, base: str, workdir: str, **more: str) -> Path:
        """A folder to build an image of the repository from, at `workdir`."""
        folder = self.folder / f"context{workdir.replace('/', '-')}"
        if not folder.exists():
            shutil.copytree(self.repo, folder / "repo")
            shutil.copytree(self.tools, folder / "tools")
            for name, text in more.items():
                (folder / name).write_text(text)
            lines = [f"FROM {base}", f"COPY repo {workdir}", f"COPY tools {self.tools}"]
            lines += [f"COPY {name} /usr/local/bin/{name.replace('_', '.')}" for name in more]
            lines += [f"ENV PATH={self.tools}/bin:/usr/bin:/bin", f"WORKDIR {workdir}", ""]
            (folder / "Dockerfile").write_text("\n".join(lines))
        return folder

    def cooperbench(self, *, conflict: bool = False, runner: bool = True) -> Path:
        """A folder of one CooperBench task, `moor_task/task7` with features 1 and 2."""
        root = self.folder / ("bench_conflict" if conflict else "bench")
        task = root / "moor_task" / "task7"
        for number in ("1", "2"):
            feature = task / f"feature{number}"
            feature.mkdir(parents=True)
            after = solved(number)
            if conflict and number == "2":
                after["moor.py"] = after["moor.py"].replace(SOLVED["1"][0], "def rope(n):\n    return 2 * n\n")
            (feature / "feature.md").write_text(f"Change `moor.py`: {ISSUE}\n")
            (feature / "feature.patch").write_text(self.patch(FILES, after))
            hidden = {**FILES, f"tests/test_feature{number}.py": HIDDEN[number]}
            (feature / "tests.patch").write_text(self.patch(FILES, hidden))
        if conflict:
            (task / "combined.patch").write_text(self.patch(FILES, solved("1", "2")))
        if runner:
            (task / "runner.sh").write_text(RUNNER)
        return root

    def r2e_row(self, image: str = "absent/moor:1", **changes: Any) -> dict[str, Any]:
        """A row of R2E-Gym's schema."""
        after = solved("1", "2")["moor.py"]
        changed = {"moor.py": after, "tests/test_moor.py": "raise SystemExit\n"}
        head = {"old_file_content": ""}
        diffs = [head | {"header": {"file": {"path": path}}, "new_file_content": changed[path]} for path in changed]
        tests = {"test_file_names": ["test_1.py", "test_2.py"], "test_file_codes": [HIDDEN["1"], HIDDEN["2"]]}
        passed = {"test_rope": "PASSED", "\x1b[1mTestKnot.test_knot\x1b[0m": "PASSED"}
        return {
            "repo_name": "moor", "docker_image": image, "commit_hash": self.commit,
            "parsed_commit_content": json.dumps({"file_diffs": diffs}),
            "execution_result_content": json.dumps(tests), "expected_output_json": json.dumps(passed),
            "problem_statement": f"x [ISSUE] {ISSUE} [/ISSUE]", **changes,
        }  # fmt: skip

    def swe_row(self, **changes: Any) -> dict[str, Any]:
        """A row of SWE-bench's schema."""
        test = f"\n\ndef test_rope():\n    {SAYS}    assert moor.rope(4) == 8\n"
        hidden = FILES | {"tests/test_moor.py": FILES["tests/test_moor.py"] + test}
        return {
            "instance_id": "moor__moor-7", "repo": "moor/moor", "base_commit": self.commit, "problem_statement": ISSUE,
            "patch": self.patch(FILES, solved("1")), "test_patch": self.patch(FILES, hidden),
            "FAIL_TO_PASS": json.dumps(["tests/test_moor.py::test_rope"]),
            "PASS_TO_PASS": json.dumps(["tests/test_moor.py::test_there"]), **changes,
        }  # fmt: skip

    def _git(self, *arguments: str, at: Path | None = None) -> str:
        environment = {"PATH": os.environ["PATH"], "HOME": str(self.folder), **GIT}
        done = subprocess.run(["git", *arguments], cwd=at or self.repo, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, (arguments, done.stderr)
        return done.stdout
