"""A table of hostile tries, each run in both kinds of sandbox: none may succeed, and the sandbox works afterwards."""

from __future__ import annotations

import platform

import pytest

from etpi_resources.sandboxes import Limits
from etpi_resources.sandboxes.guest_connection import GuestConnection, GuestUnreachable, frame
from etpi_resources.sandboxes.seccomp import _ARCHITECTURES, _DENIED

LIMITS = Limits(command_seconds=10, memory_bytes=256 * 1024**2, processes=48, file_bytes=16 * 1024**2)
COLUMN = list(_ARCHITECTURES).index(platform.machine())

COMMANDS = {
    # files of the host
    "shadow passwords": "cat /etc/shadow",
    "host's users' files": "ls /home/*",
    "root's files": "ls -A /root/. | grep .",
    "boot files": "ls /boot/* /efi/*",
    "disks": "head -c 1 /dev/sda || head -c 1 /dev/vda || head -c 1 /dev/nvme0n1",
    "a device made by hand": "mknod disk b 254 0 && head -c 1 disk",
    "the machine's memory": "head -c 1 /dev/mem || head -c 1 /dev/kmem || head -c 1 /dev/port",
    "kernel messages": "head -c 1 /dev/kmsg || dmesg",
    "the container engine": "ls /var/run/docker.sock /run/podman/podman.sock /run/containerd/containerd.sock",
    "the system bus": "ls /run/dbus/system_bus_socket",
    "the host through /proc/1/root": "ls /proc/1/root/",
    "the host through /proc/1/cwd": "ls /proc/1/cwd/",
    "writing system programs": "echo x > /usr/bin/evil",
    "replacing the shell": "cp /bin/true /bin/bash",
    "writing libraries": "echo x > /usr/lib/evil.so",
    "the loader's settings": "echo /tmp/evil.so > /etc/ld.so.preload",
    "remounting writable": "mount -o remount,rw /",
    "binding over a program": "mount --bind /tmp /usr",
    "writing a module's parameter": "echo 1 > /sys/module/kvm/parameters/nx_huge_pages",
    "writing control groups": "cd /sys/fs/cgroup && { echo 0 > cgroup.procs || echo 1 > memory/tasks; }",
    "the release agent": "cd /sys/fs/cgroup && { echo /tmp/x > release_agent || echo /tmp/x > memory/release_agent; }",
    # the kernel's settings
    "core pattern": "echo '|/tmp/x' > /proc/sys/kernel/core_pattern",
    "module loader": "echo /tmp/x > /proc/sys/kernel/modprobe",
    "hot plug": "echo /tmp/x > /sys/kernel/uevent_helper || echo /tmp/x > /proc/sys/kernel/hotplug",
    "sysrq": "echo b > /proc/sysrq-trigger",
    "overcommit": "echo 1 > /proc/sys/vm/overcommit_memory",
    "address randomisation": "echo 0 > /proc/sys/kernel/randomize_va_space",
    "host name": "hostname evil",
    "binary formats": "echo ':x:M::x::/tmp/x:' > /proc/sys/fs/binfmt_misc/register",
    # other processes and the guest
    "the guest's environment": "cat /proc/1/environ",
    "the guest's memory": "head -c 1 /proc/1/mem",
    "the guest's maps": "head -c 1 /proc/1/maps",
    "the guest's output": "echo x > /proc/1/fd/1",
    "the guest's input": "head -c 1 /proc/1/fd/0",
    "the guest's OOM score": "echo -1000 > /proc/1/oom_score_adj",
    "the guest's limits": "prlimit --pid 1 --nofile=1",
    "the guest's limit of CPU time": "prlimit --pid 1 --cpu=1",
    "tracing": "strace -p 1 || gdb -p 1 -batch",
    "the guest's priority": "renice -n 19 -p 1",
    "the priority of all processes": "renice -n 19 -u $(id -u)",
    "the guest's scheduling": "chrt --idle -p 0 1",
    "the guest's disk priority": "ionice -c 3 -p 1",
    # privileges
    "becoming root": "su -c id || sudo -n id",
    "a set-uid copy": "cp /usr/bin/id i; chmod 4755 i; chown 0 i; ./i -u | grep -x 0",
    "file capabilities": "cp /bin/true t; setcap cap_sys_admin+ep t",
    "a new user namespace": "unshare -Ur id",
    "a new network namespace": "unshare -n true",
    "entering a namespace": "nsenter -t 1 -n true",
    "chroot": "chroot / true",
    "the clock": "date -s 2001-01-01",
    "a new root": "pivot_root . .",
    # the network
    "the cloud's metadata": "exec 3<> /dev/tcp/169.254.169.254/80",
    "an address outside": "exec 3<> /dev/tcp/1.1.1.1/53",
    "the host's loopback": "exec 3<> /dev/tcp/127.0.0.1/22",
    "an interface": "ip link add evil type dummy",
    "ping": "ping -c 1 -W 1 1.1.1.1",
}


@pytest.fixture(scope="module")
def box(factory):
    with factory.create({}, LIMITS) as sandbox:
        yield sandbox


@pytest.mark.parametrize("name", COMMANDS)
def test_hostile_command_fails_and_the_sandbox_goes_on(box, name):
    assert box.run(f"( {COMMANDS[name]} ) < /dev/null", timeout=5).exit_code != 0
    assert box.run("echo on").output == "on\n"


def test_every_denied_system_call_fails_with_eperm(box):
    numbers = {name: numbers[COLUMN] for name, numbers in _DENIED.items()}
    program = f"""
import ctypes
libc = ctypes.CDLL(None, use_errno=True)
for name, number in {numbers!r}.items():
    ctypes.set_errno(0)
    print(name, libc.syscall(number, 0, 0, 0, 0, 0, 0), ctypes.get_errno())
"""
    box.write_files({"program.py": program})
    answers = dict(line.split(" ", 1) for line in box.run("python program.py").output.splitlines())
    assert len(answers) >= 50 and answers == dict.fromkeys(numbers, "-1 1")


@pytest.mark.skipif(platform.machine() != "x86_64", reason="x86 has further ways to make a system call")
def test_system_calls_of_another_convention_fail(box):
    """x32 numbers reach the same calls; 32-bit calls have other numbers."""
    program = """
import ctypes
libc = ctypes.CDLL(None, use_errno=True)
print(libc.syscall(0x40000000 + 319, b"x", 0), ctypes.get_errno())
"""
    box.write_files({"program.py": program})
    assert box.run("python program.py").output == "-1 1\n"


class Subverted:
    """The host's end of a guest that answers as it likes."""

    def __init__(self, answer: bytes) -> None:
        self.answer = answer

    def put(self, data: bytes, deadline: float) -> None: ...

    def take(self, count: int, deadline: float) -> bytes:
        if len(self.answer) < count:
            raise GuestUnreachable
        taken, self.answer = self.answer[:count], self.answer[count:]
        return taken

    def is_closed(self) -> bool:
        return False


HONEST = b"3 - 0.250000 0\nout"
ANSWERS = {
    "no head": b"",
    "words": b"a b c d\n",
    "too few": b"1 2\n",
    "an exit code that no column takes": b"9" * 30 + b" - 0.1 0\n",
    "a negative exit code": b"-1 - 0.1 0\n",
    "a time that is no number": b"0 - nan 0\n",
    "a time without end": b"0 - inf 0\n",
    "a negative time": b"0 - -1 0\n",
    "an exit code of many digits": b"9" * 5000 + b" - 0.1 0\n",
    "more left out than fits": b"0 - 0.1 " + b"9" * 30 + b"\n",
    "more output than the limit": b"0 - 0.1 0\n" + b"x" * 100_000,
}


def _connected(answer: bytes) -> GuestConnection:
    connection = GuestConnection({}, LIMITS, None)
    connection._channel = Subverted(answer)
    return connection


@pytest.mark.parametrize("name", ANSWERS)
def test_answer_of_a_subverted_guest_is_the_end_of_the_sandbox(name):
    result = _connected(frame(HONEST)).run("x")
    assert (result.output, result.exit_code, result.seconds) == ("out", 3, 0.25)
    result = _connected(frame(ANSWERS[name])).run("x")
    assert (result.output, result.exit_code) == ("[the sandbox has ended]", 137)


@pytest.mark.parametrize("path", [b"../up", b"/etc/passwd", b"a/../../b", b"", b"nul\0"])
def test_subverted_guest_names_no_file_outside_the_workspace(path):
    assert _connected(frame(frame(b"own") + frame(b"x"))).read_files() == {"own": "x"}
    for answer in (frame(path) + frame(b"x"), frame(b"own") + b"\0\0\0\x09x", b"\xff" * 3):
        assert _connected(frame(answer)).read_files() == {}
    assert _connected(b"\xff\xff\xff\xff").read_files() == {}, "a length that no answer has"
