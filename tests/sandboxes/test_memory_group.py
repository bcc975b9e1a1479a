"""Control groups: what they bound, how they are found, and the fall-back where none can be created."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from etpi_resources.sandboxes import Limits, memory_group
from etpi_resources.sandboxes.bubblewrap import BubblewrapFactory
from etpi_resources.sandboxes.memory_group import MemoryGroup

LIMITS = Limits(command_seconds=10, memory_bytes=128 * 1024**2, processes=48, file_bytes=16 * 1024**2)


@pytest.fixture(autouse=True)
def _parent_is_looked_for_again():
    memory_group._parent.cache_clear()
    yield
    memory_group._parent.cache_clear()


@pytest.fixture
def no_group(monkeypatch):
    monkeypatch.setattr(memory_group, "_version_1", list)
    monkeypatch.setattr(memory_group, "_version_2", list)


@pytest.fixture
def group():
    group = MemoryGroup.create(64 * 1024**2)
    if group is None:
        pytest.skip("this user may not create control groups here")
    yield group
    group.close()


def test_group_ends_a_process_that_exceeds_its_limit(group):
    process = subprocess.Popen(
        [sys.executable, "-c", "input(); x = b'x' * 10**9"], stdin=subprocess.PIPE, stderr=subprocess.PIPE
    )
    group.add(process.pid)
    process.communicate(b"\n")
    assert process.returncode == -9 and group.kills() == 1


def test_group_is_removed_with_its_sandbox(group):
    parent, named = group.statistics.parent.parent, f"etpi-{os.getpid()}-*"  # other processes have groups too
    with BubblewrapFactory().create({}, LIMITS) as sandbox:
        during = set(parent.glob(named))
        assert sandbox.run("grep -c . /run/memory.stat").exit_code == 0
    assert group.statistics.parent in during and len(during - set(parent.glob(named))) == 1


def test_group_that_the_user_names_has_to_work(monkeypatch, tmp_path):
    monkeypatch.setenv(memory_group.GROUP_VARIABLE, str(tmp_path))
    with pytest.raises(OSError, match=memory_group.GROUP_VARIABLE):
        MemoryGroup.create(1 << 20)


def test_groups_of_dead_processes_are_removed(group):
    parent = group.statistics.parent.parent
    dead = subprocess.run([sys.executable, "-c", "import os; print(os.getpid())"], capture_output=True, text=True)
    left = parent / f"etpi-{dead.stdout.strip()}-0123456789ab"
    left.mkdir()
    memory_group._parent.cache_clear()
    other = MemoryGroup.create(1 << 24)
    assert other is not None and not left.exists()
    other.close()


def python(sandbox, program):
    sandbox.write_files({"program.py": program})
    return sandbox.run("python program.py")


def test_without_a_group_shared_anonymous_memory_is_refused_and_private_works(no_group):
    with BubblewrapFactory().create({}, LIMITS) as sandbox:
        assert not Path("/run/memory.stat").exists()
        assert "PermissionError" in python(sandbox, "import mmap\nmmap.mmap(-1, 4096)").output
        shared = "import mmap, multiprocessing\nmmap.mmap(-1, 9, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)\n"
        assert python(sandbox, shared + "print(multiprocessing.Value('i', 3).value)").output == "3\n"


def test_without_a_group_sockets_are_counted(no_group):
    program = """
import os, socket, time
for _ in range(20):
    if os.fork() == 0:
        held = [socket.socketpair() for _ in range(100)]
        time.sleep(30)
time.sleep(30)
"""
    with BubblewrapFactory().create({}, LIMITS) as sandbox:
        result = python(sandbox, program)
        assert result.exit_code == 137 and "sockets" in result.output
        assert sandbox.run("echo on").output == "on\n"
