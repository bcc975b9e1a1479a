"""Sandboxes that try every kind of memory, with a control group and, as an ordinary user, without one."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from etpi_resources.sandboxes.memory_group import MemoryGroup

MIB = 1 << 20
MEMORY, FILES, PROCESSES = 128 * MIB, 16 * MIB, 32
USER = 64300
MARGIN = {"sockets": 512 * 416 * 1024, "pipes": 96 * MIB}
"""Without a control group: as docs/sandboxes.md says."""
SECONDS_OF_WRITING = 200 * MIB
"""What the cores here can write between two looks of the guest."""

HEAD = """
import ctypes, mmap, os, socket, sys, time
MIB, done = 1 << 20, []
def go(what, times=10 ** 6):
    try:
        for _ in range(times):
            done.append(what())
    except (OSError, MemoryError, ValueError, BufferError):
        pass
def fork(count):
    for _ in range(count):
        try:
            if os.fork() == 0:
                return
        except OSError:
            return
"""
KINDS = {
    "anonymous": "fork(8)\ngo(lambda: bytearray(os.urandom(1024) * 1024 * 4), 100)",
    "shared": """
def one():
    m = mmap.mmap(-1, 8 * MIB)
    m.write(b"x" * 8 * MIB)
    m.madvise(mmap.MADV_DONTNEED)
    return m
fork(8)
go(one, 12)
""",
    "/dev/zero": """
fd = os.open("/dev/zero", os.O_RDWR)
def one():
    m = mmap.mmap(fd, 8 * MIB)
    m.write(b"x" * 8 * MIB)
    m.madvise(mmap.MADV_DONTNEED)
    return m
fork(8)
go(one, 12)
""",
    "memfd": "fork(8)\ngo(lambda: os.write(os.memfd_create('x'), b'x' * 8 * MIB))",
    "tmpfs": """
for place in ("/tmp", "/workspace", "/dev/shm", "/run", "/dev", "/proc"):
    go(lambda: open(f"{place}/{len(done)}", "wb").write(b"x" * MIB), 64)
""",
    "sockets": """
def one():
    pair = socket.socketpair()
    for end in pair:
        end.setblocking(False)
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 10 * MIB)
        try:
            while True:
                end.send(b"x" * 65536)
        except OSError:
            pass
    return pair
fork(8)
go(one)
""",
    "pipes": """
def one():
    ends = os.pipe()
    os.set_blocking(ends[1], False)
    try:
        while True:
            os.write(ends[1], b"x" * 4096)
    except OSError:
        pass
    return ends
fork(24)
go(one)
""",
    "keyrings": """
libc = ctypes.CDLL(None)
number = 248 if os.uname().machine == "x86_64" else 217
def one():
    if libc.syscall(number, b"user", str(len(done)).encode(), b"x" * 32767, 32767, -4) < 0:
        raise OSError
go(one, 4000)
""",
    "page tables": """
def one():
    m = mmap.mmap(-1, 64 * MIB, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, prot=mmap.PROT_READ)
    for at in range(0, 64 * MIB, 4096):
        m[at]
    return m
fork(24)
go(one, 4)
""",
}
PROGRAM = f"""
import sys
from etpi_resources.sandboxes import Limits
from etpi_resources.sandboxes.bubblewrap import BubblewrapFactory
limits = Limits(command_seconds=8, memory_bytes={MEMORY}, processes={PROCESSES}, file_bytes={FILES})
with BubblewrapFactory().create({{"program.py": sys.argv[1]}}, limits) as box:
    print("ready", flush=True)
    sys.stdin.readline()
    result = box.run("python program.py; sleep 1")
    print(box._group is not None, result.exit_code, result.output.splitlines()[-1:], flush=True)
"""


def used(group: Path) -> int:
    """Return bytes of memory that no disk holds, the kernel's included."""
    stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
    if (group / "memory.kmem.usage_in_bytes").exists():
        kernel = int((group / "memory.kmem.usage_in_bytes").read_text())
        return int(stat["total_rss"]) + int(stat.get("total_shmem", 0)) + kernel
    return sum(int(stat[name]) for name in ("anon", "shmem", "kernel", "sock") if name in stat)


@pytest.fixture
def group(monkeypatch):
    """A group that only observes."""
    group = MemoryGroup.create(8 << 30)
    if group is None:
        pytest.skip("only root can watch the memory of sandboxes here")
    yield group
    group.close()


@pytest.mark.long
@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("user", ["root", "ordinary"])
def test_no_kind_of_memory_exceeds_the_limit_by_more_than_the_margin(group, name, user):
    if user == "ordinary" and not shutil.which("setpriv"):
        pytest.skip("needs setpriv")
    drop = ["setpriv", f"--reuid={USER}", f"--regid={USER}", "--clear-groups", "--"] if user == "ordinary" else []
    process = subprocess.Popen(
        [*drop, sys.executable, "-c", PROGRAM, f"{HEAD}{KINDS[name]}\nprint(len(done), flush=True)\ntime.sleep(3)"],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[2],
    )  # fmt: skip
    group.add(process.pid)
    assert process.stdin and process.stdout and process.stdout.readline() == "ready\n"
    folder = group.statistics.parent
    idle, most = used(folder), 0
    process.stdin.write("\n")
    process.stdin.flush()
    while process.poll() is None:
        most = max(most, used(folder) - idle)
        time.sleep(0.01)
    grouped, _, _ = (line := process.stdout.read().strip()).partition(" ")
    print(json.dumps({"kind": name, "user": user, "MiB": most >> 20, "result": line}))
    assert process.returncode == 0 and (grouped == "False") == (user == "ordinary")
    if user == "root":
        assert most <= MEMORY + 3 * FILES + 64 * MIB
    else:
        disk = 3 * FILES if name == "tmpfs" else 0
        assert most <= MEMORY + disk + 64 * MIB + SECONDS_OF_WRITING * (name == "anonymous") + MARGIN.get(name, 0)
    if name in ("shared", "/dev/zero", "memfd", "keyrings"):
        assert (" ['0']" in line) == (user == "ordinary" or name in ("memfd", "keyrings"))
