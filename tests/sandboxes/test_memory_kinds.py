"""Sandboxes that try every kind of memory, with a control group and, as an ordinary user, without one."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from etpi_resources.sandboxes.memory_group import MemoryGroup

MIB = 1 << 20
MEMORY, FILES, PROCESSES = 128 * MIB, 16 * MIB, 32
USER = 64300
MARGIN = {"sockets": 512 * 416 * 1024, "pipes": 96 * MIB}
"""Without a control group: as docs/sandboxes.md says."""
HOST = 2 * MIB
"""Of the process that starts the sandboxes and reads their output, beside them in the group that observes."""
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
import json, sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from etpi_resources.sandboxes import Limits
from etpi_resources.sandboxes.bubblewrap import BubblewrapFactory
limits = Limits(command_seconds=8, memory_bytes={MEMORY}, processes={PROCESSES}, file_bytes={FILES})
all_files = json.loads(sys.argv[1])
def use(box, files):
    return [[result.exit_code, result.output.splitlines()[-1:]]
            for result in (box.run(f"python {{name}}; sleep 1") for name in files)]
with ExitStack() as stack:
    boxes = [stack.enter_context(BubblewrapFactory().create(files, limits)) for files in all_files]
    print("ready", flush=True)
    sys.stdin.readline()
    with ThreadPoolExecutor(len(boxes)) as pool:
        results = list(pool.map(use, boxes, all_files))
    print(json.dumps({{"grouped": [box._group is not None for box in boxes], "results": results}}), flush=True)
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


def measured(group: MemoryGroup, user: str, sandboxes: list[list[str]]) -> tuple[int, list[Any]]:
    """Run the programs of each kind in sandboxes of one process of a user, all sandboxes at once.

    Returns the most bytes beyond those of the idle sandboxes, and [exit code, last line] of each program.
    """
    if user == "ordinary" and not shutil.which("setpriv"):
        pytest.skip("needs setpriv")
    drop = ["setpriv", f"--reuid={USER}", f"--regid={USER}", "--clear-groups", "--"] if user == "ordinary" else []
    ends = "\nprint(len(done), flush=True)\ntime.sleep(3)"
    files = [{re.sub("[ /]", "_", name) + ".py": HEAD + KINDS[name] + ends for name in names} for names in sandboxes]
    process = subprocess.Popen(
        [*drop, sys.executable, "-c", PROGRAM, json.dumps(files)],
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
    report = json.loads(process.stdout.read())
    print(json.dumps({"kinds": sandboxes, "user": user, "MiB": most >> 20, **report}))
    assert process.returncode == 0 and report["grouped"] == [user == "root"] * len(sandboxes)
    return most, report["results"]


@pytest.mark.long
@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("user", ["root", "ordinary"])
def test_no_kind_of_memory_exceeds_the_limit_by_more_than_the_margin(group, name, user):
    most, [[[_, line]]] = measured(group, user, [[name]])
    if user == "root":
        assert most <= MEMORY + 3 * FILES + 64 * MIB + HOST
    else:
        disk = 3 * FILES if name == "tmpfs" else 0
        assert most <= MEMORY + disk + 64 * MIB + SECONDS_OF_WRITING * (name == "anonymous") + MARGIN.get(name, 0)
    if name in ("shared", "/dev/zero", "memfd", "keyrings"):
        assert (line == ["0"]) == (user == "ordinary" or name in ("memfd", "keyrings"))


@pytest.mark.long
@pytest.mark.parametrize("user", ["root", "ordinary"])
def test_eight_sandboxes_that_try_every_kind_of_memory_stay_under_their_limits_and_margins(group, user):
    most, results = measured(group, user, [list(KINDS)] * 8)
    margin = 64 * MIB if user == "root" else 64 * MIB + sum(MARGIN.values())
    assert most <= 8 * (MEMORY + 3 * FILES + margin) + HOST
    assert not [line for programs in results for _, (line,) in programs if "No such file" in line]
