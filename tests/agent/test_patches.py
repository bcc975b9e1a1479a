"""Patches of large files: right, and in time and memory that grow with the file alone."""

from __future__ import annotations

import random
import subprocess
import sys
from pathlib import Path

import pytest

from etpi_assets.agent import patches
from etpi_assets.agent.patches import unified_diff

LINES = ["a\n", "b\n", "\n", "c\r\n", "x\x0cy\n"]
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


@pytest.mark.parametrize("seed", range(12))
def test_patch_of_a_file_that_is_replaced_as_a_whole_applies(seed: int, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(patches, "_MOST_CHARACTERS", 0)
    choose = random.Random(seed)
    old = "".join(choose.choices(LINES, k=choose.randint(1, 12))) + choose.choice(["", "z"])
    at = choose.randint(0, len(old))
    new = old[:at] + choose.choice(["q\n", "w", "qa\n"]) + old[at + choose.randint(0, 3) :]
    (tmp_path / "f").write_bytes(old.encode())
    subprocess.run(["git", "init", "-q", str(tmp_path)], check=True)
    text = unified_diff({"f": old}, {"f": new})
    subprocess.run(["git", "-C", str(tmp_path), "apply", "-"], input=text.encode(), check=True, capture_output=True)
    assert (tmp_path / "f").read_bytes().decode() == new


@pytest.mark.slow
def test_patch_of_ten_megabytes_takes_bounded_time_and_memory() -> None:
    done = subprocess.run([sys.executable, "-c", _BOUNDED], capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"signal {-done.returncode}: {done.stderr[-500:]}"
    assert int(done.stdout) < 700, "MiB"
