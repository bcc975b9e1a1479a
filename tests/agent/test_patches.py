"""Patches: git applies each of them, and the result is the tree that it was made from."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from etpi_assets.agent.patches import unified_diff

_BOUNDED = """
import resource
resource.setrlimit(resource.RLIMIT_CPU, (30, 30))
from etpi_assets.agent.patches import unified_diff
big = "".join(f"line {n}\\n" for n in range(1_000_000))
for old, new in ((big, big[5_000_000:] + "x"), ("", big), ("\\n".join("ab" * 40_000), "\\n".join("ba" * 40_000))):
    unified_diff({"f": old}, {"f": new})
# Not ru_maxrss, which exec keeps from the process that started this one.
print(int(open("/proc/self/status").read().partition("VmHWM:")[2].split()[0]) >> 10)
"""

PATHS = ["a", "b.py", "new file", 'd/"q"\t', "d/é.txt", "d/e/f", "-x", "d/.github", "d/ end ", "back\\slash"]
LINES = [
    "a\n",
    "b\n",
    "\n",
    "c\r\n",
    "x\x0cy\n",
    "diff --git a/a b/a\n",
    "-- \n",
    "+++ b/z\n",
    "\\ No newline",
    "é\x00\n",
]
TREES = st.dictionaries(st.sampled_from(PATHS), st.lists(st.sampled_from(LINES), max_size=12).map("".join))


def _applied(before: dict[str, str], patch: str) -> dict[str, str]:
    """The tree that `git apply` leaves."""
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        for path, text in before.items():
            (root / path).parent.mkdir(parents=True, exist_ok=True)
            (root / path).write_bytes(text.encode())
        if patch:
            command = ["git", "apply", "--whitespace=nowarn", "-"]
            environment = {"PATH": os.environ["PATH"], "HOME": folder, "GIT_CEILING_DIRECTORIES": str(root.parent)}
            done = subprocess.run(
                command, input=patch.encode(), cwd=root, env=environment, capture_output=True, check=False
            )
            assert done.returncode == 0, done.stderr.decode()
        return {p.relative_to(root).as_posix(): p.read_bytes().decode() for p in root.rglob("*") if p.is_file()}


@given(TREES, TREES)
@example({}, {"empty": ""})
@example({"empty": ""}, {})
@example({"d": "file\n"}, {"d/e": "folder\n"})
@example({"d/e": "folder\n"}, {"d": "file\n"})
def test_git_applies_a_patch_and_gets_the_second_tree(before: dict[str, str], after: dict[str, str]) -> None:
    assert _applied(before, unified_diff(before, after)) == after


def test_created_and_deleted_files_are_declared_and_equal_trees_have_no_patch() -> None:
    patch = unified_diff({"old.py": "x\n", "same": "s"}, {"new.py": "", "same": "s"})
    assert "new file mode 100644" in patch and "deleted file mode 100644" in patch and "same" not in patch
    assert unified_diff({"same": "s"}, {"same": "s"}) == ""


def test_settings_of_the_user_and_of_the_tree_change_no_patch(monkeypatch, tmp_path: Path) -> None:
    plain = unified_diff({"a": "x\r\n"}, {"a": "y\r\n"})
    (tmp_path / ".gitconfig").write_text("[diff]\n noprefix = true\n mnemonicPrefix = true\n external = false\n")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("GIT_EXTERNAL_DIFF", "false")
    monkeypatch.setenv("GIT_CONFIG_PARAMETERS", "'diff.noprefix=true'")
    attributes = {".gitattributes": "* -diff text eol=crlf\n"}
    assert unified_diff({"a": "x\r\n", **attributes}, {"a": "y\r\n", **attributes}) == plain


def test_files_that_git_never_applies_are_left_out() -> None:
    assert unified_diff({}, dict.fromkeys(["d/.GIT/config", "git~1", ".git ./x", ".git:y/z", "a\\.git"], "x")) == ""


@pytest.mark.slow
def test_patch_of_ten_megabytes_takes_bounded_time_and_memory() -> None:
    done = subprocess.run([sys.executable, "-c", _BOUNDED], capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"signal {-done.returncode}: {done.stderr[-500:]}"
    assert int(done.stdout) < 700, "MiB"
