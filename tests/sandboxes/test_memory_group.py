"""Control groups: what they bound, how they are found, and the fall-back where none can be created."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
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


@pytest.fixture
def version_2(monkeypatch):
    """The place of groups of version 2, wherever it is mounted; they may lack the memory controller here."""
    mounts = [line.split() for line in Path("/proc/mounts").read_text().splitlines()]
    place = next((Path(mount[1]) for mount in mounts if mount[2] == "cgroup2"), None)
    if place is None or not os.access(place, os.W_OK) or os.geteuid() != 0:
        pytest.skip("no groups of version 2 can be created here")
    return place


def test_group_of_version_2_is_created_entered_and_removed(version_2, monkeypatch):
    place = version_2 / f"etpi-test-{os.getpid()}"
    place.mkdir()
    monkeypatch.setattr(memory_group, "_LIMITS", ("memory.max", "cgroup.max.descendants"))
    monkeypatch.setenv(memory_group.GROUP_VARIABLE, str(place))
    process = subprocess.Popen(["sleep", "60"])
    try:
        group = MemoryGroup.create(1 << 20)
        assert group is not None
        folder = group.statistics.parent
        limit = "memory.max" if (folder / "memory.max").exists() else "cgroup.max.descendants"
        assert (folder / limit).read_text() == f"{1 << 20}\n"
        group.add(process.pid)
        assert (folder / "cgroup.procs").read_text() == f"{process.pid}\n"
        threading.Timer(0.2, process.kill).start()
        group.close()
        assert not folder.exists() and group.kills() == 0
    finally:
        process.kill()
        process.wait()
        place.rmdir()


@pytest.mark.parametrize("below", ["", "/container"])
def test_group_of_a_container_is_the_one_with_the_limit(version_2, monkeypatch, tmp_path, below):
    scope = version_2 / f"etpi-test-{os.getpid()}" / "libpod-0123abcd.scope"
    (inner := Path(f"{scope}{below}")).mkdir(parents=True)
    process = subprocess.Popen(["sleep", "60"])
    try:
        (inner / "cgroup.procs").write_text(str(process.pid))
        monkeypatch.setattr(memory_group, "_ROOT", tmp_path)
        assert MemoryGroup.of_container("0123abcd", process.pid) is None
        at = Path(f"/proc/{process.pid}/cgroup").read_text().partition("0::/")[2].partition("libpod-")[0]
        write(tmp_path / at / scope.name, {"memory.stat": "anon 4096\n", "memory.events": "oom 2\noom_kill 2\n"})
        write(tmp_path / at / f"{scope.name}/container", {"memory.stat": "", "memory.events": "oom 0\noom_kill 2\n"})
        group = MemoryGroup.of_container("0123abcd", process.pid)
        assert group is not None and (group.statistics.read_text(), group.kills()) == ("anon 4096\n", 2)
        assert MemoryGroup.of_container("another", process.pid) is None
    finally:
        process.kill()
        process.wait()
        for folder in dict.fromkeys((inner, scope, scope.parent)):
            folder.rmdir()


def write(folder: Path, files: dict[str, str]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name).write_text(text)
    return folder


EVENTS = "low 0\nhigh 0\nmax {max}\noom {oom}\noom_kill {kill}\noom_group_kill 7\n"


@pytest.mark.parametrize(
    ("files", "kills"),
    [
        ({"memory.events": EVENTS.format(max=9, oom=0, kill=0)}, 0),
        ({"memory.events": EVENTS.format(max=9, oom=3, kill=3)}, 3),
        ({"memory.events": EVENTS.format(max=0, oom=0, kill=1)}, 0),  # for want of memory on the machine
        ({"memory.events": EVENTS.format(max=9, oom=1, kill=2)}, 1),
        ({"memory.events": EVENTS.format(max=9, oom=5, kill=0)}, 0),
        ({"memory.oom_control": "oom_kill_disable 0\nunder_oom 0\noom_kill 2\n", "memory.limit_in_bytes": "9000000\n",
          "memory.max_usage_in_bytes": "8999000\n"}, 2),
        ({"memory.oom_control": "oom_kill_disable 0\nunder_oom 0\noom_kill 2\n", "memory.limit_in_bytes": "9000000\n",
          "memory.max_usage_in_bytes": "4000000\n"}, 0),
        ({}, 0),
    ],
)  # fmt: skip
def test_kills_are_those_at_the_groups_own_limit(tmp_path, files, kills):
    assert MemoryGroup(write(tmp_path, files)).kills() == kills


@pytest.mark.parametrize(
    ("controllers", "user", "is_found"),
    [("cpu io memory pids\n", 0, True), ("cpu io pids\n", 0, False), ("cpu memory\n", 1000, False), (None, 0, False)],
)
def test_version_2_is_used_by_root_where_groups_can_have_a_limit(tmp_path, monkeypatch, controllers, user, is_found):
    if controllers is not None:
        write(tmp_path, {"cgroup.subtree_control": controllers})
    monkeypatch.setattr(memory_group, "_ROOT", tmp_path)
    monkeypatch.setattr(os, "geteuid", lambda: user)
    assert memory_group._version_2() == ([tmp_path / "etpi"] if is_found else [])
    delegated = tmp_path / "etpi/cgroup.subtree_control"
    assert (delegated.exists() and delegated.read_text() == "+memory") == is_found


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
