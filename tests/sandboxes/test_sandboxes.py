"""Both kinds of sandbox: honest commands work, and hostile ones neither leave the sandbox nor break it."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import pytest

from etpi_resources.sandboxes import REPLY, Environment, Limits, Sandbox
from etpi_resources.sandboxes.docker import _ContainerChannel
from etpi_resources.sandboxes.guest_connection import GuestUnreachable, frame
from tests.support.waiting import until

LIMITS = Limits(
    command_seconds=10, memory_bytes=256 * 1024**2, processes=48, file_bytes=16 * 1024**2, output_bytes=16 * 1024
)


@pytest.fixture(scope="module")
def box(factory):
    with factory.create({"src/a.py": "print('hello')\n", "notes.txt": "no newline"}, LIMITS) as sandbox:
        yield sandbox


@pytest.fixture
def fresh(factory):
    with factory.create({"a.txt": "a\n"}, LIMITS) as sandbox:
        yield sandbox


def python(sandbox, program, **kwargs):
    sandbox.write_files({"program.py": textwrap.dedent(program)})
    return sandbox.run("python program.py", **kwargs)


def test_container_that_never_pauses_on_stderr_does_not_detain_the_host():
    ours, theirs = socket.socketpair()

    def flood() -> None:
        piece = bytes([2, 0, 0, 0]) + (1 << 16).to_bytes(4, "big") + b"x" * (1 << 16)
        with contextlib.suppress(OSError):
            while True:
                theirs.sendall(piece)

    writer = threading.Thread(target=flood, daemon=True)
    writer.start()
    channel = _ContainerChannel(ours)
    try:
        with pytest.raises(GuestUnreachable):
            channel.take(4, time.monotonic() + 0.2)
        assert channel.stderr() == "x" * 1000
    finally:
        channel.close()
    writer.join()


def alive(sandbox):
    result = sandbox.run("cat a.txt")
    assert (result.output, result.exit_code) == ("a\n", 0)
    assert sandbox.read_files()["a.txt"] == "a\n"


# --- honest work ---------------------------------------------------------------------------------------------------


def test_sandbox_implements_the_protocol(factory):
    assert isinstance(factory.create({}), Sandbox)
    assert factory.name in ("bubblewrap", "docker")


def test_commands_run_in_the_workspace_each_in_a_new_shell(box):
    assert box.run("pwd; cat notes.txt").output == "/workspace\nno newline"
    box.run("cd src; export X=1")
    assert box.run("pwd; echo $X; python src/a.py").output == "/workspace\n\nhello\n"


def test_output_is_interleaved_and_exit_code_is_the_commands(box):
    result = box.run("echo one; echo two >&2; echo three; exit 7")
    assert (result.output, result.exit_code) == ("one\ntwo\nthree\n", 7)
    assert not result.timed_out and not result.truncated
    assert box.run("no_such_command").exit_code == 127


def test_files_are_written_and_read(fresh):
    fresh.write_files({"deep/er/b.txt": "b ≥ é", "empty": ""})
    fresh.run("rm a.txt; printf '\\377\\376' > binary; echo new > c; ln -s c link; mkfifo pipe; mkdir none")
    assert fresh.read_files() == {"deep/er/b.txt": "b ≥ é", "empty": "", "c": "new\n"}


@pytest.mark.parametrize("path", ["/etc/passwd", "../up", "a/../../up", "", "nul\0"])
def test_path_outside_the_workspace_is_refused(factory, path):
    with pytest.raises(ValueError, match="relative"):
        factory.create({path: "x"})


def test_long_command_runs_unseen_and_command_with_nul_fails(fresh):
    assert fresh.run("true " + "x" * 300_000 + "; echo done").output == "done\n"
    assert fresh.run("find /tmp /dev/shm . -type f -size +99k").output == ""
    assert fresh.run("echo a\0b").exit_code == 126
    alive(fresh)


# --- the host ------------------------------------------------------------------------------------------------------


def test_command_has_no_network(box):
    server = socket.create_server(("127.0.0.1", 0))
    port = server.getsockname()[1]
    result = python(
        box,
        f"""
        import socket
        for address in (("127.0.0.1", {port}), ("1.1.1.1", 53), ("8.8.8.8", 443)):
            try: print("REACHED", socket.create_connection(address, 1))
            except OSError as error: print(error)
        """,
    )
    server.close()
    assert result.exit_code == 0 and "REACHED" not in result.output
    assert [line.split(":")[0].strip() for line in box.run("tail -n +3 /proc/net/dev").output.splitlines()] == ["lo"]


def test_command_sees_no_host_files(box, tmp_path):
    secret = tmp_path / f"planted-{os.getpid()}"
    secret.write_text("planted")
    for path in (secret, tmp_path, Path.cwd(), __file__, f"/proc/{os.getpid()}", "/dev/sda", "/dev/mem"):
        assert box.run(f"cat {path} || ls {path}").exit_code != 0, path
    assert box.run(f"find / -name {secret.name} -not -path '/proc/*' 2>/dev/null").output == ""
    assert box.run("ls -A /root /home 2>/dev/null | grep -v :").output.split() == []


def test_command_sees_no_host_environment(factory, monkeypatch):
    monkeypatch.setenv("PLANTED_KEY", "planted-value")
    with factory.create({}, LIMITS) as sandbox:
        assert "planted" not in sandbox.run("env; cat /proc/*/environ; cat /proc/*/cmdline").output.lower()
        names = {line.split("=")[0] for line in sandbox.run("env").output.splitlines()}
    assert names <= {
        "IN_IMAGE",
        "PATH",
        "HOME",
        "USER",
        "LANG",
        "LC_CTYPE",
        "TERM",
        "PYTHONDONTWRITEBYTECODE",
        "PWD",
        "OLDPWD",
        "SHLVL",
        "_",
    }


def test_only_bounded_places_are_writable(box):
    bounded = ("/workspace", "/tmp", "/dev/shm", "/var/tmp", "/dev/mqueue")  # the last two of a few KiB
    writable = box.run("find / -type d -writable -not -path '/proc/*' 2>/dev/null").output.split()
    assert {"/workspace", "/tmp", "/dev/shm"} <= set(writable)
    write_all = "; ".join(f"(echo x > {place}/x) 2>/dev/null && echo WROTE {place}" for place in writable)
    written = {line.split()[1] for line in box.run(write_all).output.splitlines()}
    assert {place for place in written if not place.startswith(bounded)} == set()
    fill = "head -c 10000000 /dev/zero > /var/tmp/x; du -k /var/tmp | cut -f1; rm /var/tmp/x"
    assert int(box.run(f"test -d /var/tmp || exec echo 0; ({fill}) 2>/dev/null").output) <= 64
    files = "/usr/bin/env /etc/ld.so.cache /proc/sys/kernel/hostname"
    assert "WROTE" not in box.run(f"for f in {files}; do echo x > $f && echo WROTE; done").output
    box.run("rm -f /tmp/x /dev/shm/x x src/x")


def test_links_out_of_the_workspace_are_not_followed(fresh, tmp_path):
    secret = tmp_path / "secret"
    secret.write_text("planted")
    fresh.run(f"ln -s {secret} file; ln -s {tmp_path} folder; ln -s / root; ln -s /etc/ld.so.cache cache; ln -s . loop")
    assert fresh.read_files() == {"a.txt": "a\n"}
    fresh.run(f"rm a.txt; ln -s {secret} a.txt")
    with pytest.raises(OSError, match="a.txt"):
        fresh.write_files({"a.txt": "through the link"})
    assert secret.read_text() == "planted"


def test_command_has_no_privileges(box):
    lines = box.run("cat /proc/self/status").output.splitlines()
    status = dict(line.split(":\t", 1) for line in lines if ":\t" in line)
    assert status["NoNewPrivs"] == "1" and status["Seccomp"] == "2"
    assert int(status["CapEff"], 16) == int(status["CapPrm"], 16) == int(status["CapBnd"], 16) == 0
    tries = ("su -c id", "sudo -n id", "mount -t tmpfs none /tmp", "unshare -Ur id", "chroot / id", "umount /proc")
    for command in tries:
        result = box.run(f"{command} </dev/null")
        assert result.exit_code != 0 and "uid=0" not in result.output, command
    result = box.run("cp /usr/bin/id ./mine; chmod 4755 mine; ./mine -u; chown 0 mine 2>&1")
    assert int(result.output.splitlines()[0]) >= 1000 and result.exit_code != 0


def test_denied_system_calls_fail_with_eperm(box):
    result = python(
        box,
        """
        import ctypes, errno, os
        libc = ctypes.CDLL(None, use_errno=True)
        tries = {
            "ptrace": lambda: libc.ptrace(16, 1, 0, 0),
            "memfd": lambda: libc.memfd_create(b"x", 0),
            "shm": lambda: libc.shmget(0, 4096, 0o1600),
            "userns": lambda: libc.unshare(0x10000000),
            "setns": lambda: libc.setns(0, 0),
            "mount": lambda: libc.mount(b"none", b"/tmp", b"tmpfs", 0, None),
            "clock": lambda: libc.clock_settime(0, ctypes.byref((ctypes.c_long * 2)(0, 0))),
        }
        for name, call in tries.items():
            ctypes.set_errno(0)
            print(name, call(), errno.errorcode.get(ctypes.get_errno()))
        """,
    )
    assert [line.split(" ", 1)[1] for line in result.output.splitlines()] == ["-1 EPERM"] * 7
    before = time.time()
    assert box.run("date -s 2001-01-01 >/dev/null").exit_code != 0
    assert abs(float(box.run("date +%s.%N").output) - before) < 60


@pytest.mark.parametrize(
    "command",
    [
        "echo b > /proc/sysrq-trigger",
        "echo '|/bin/x' > /proc/sys/kernel/core_pattern",
        "cat /proc/1/environ",
        "echo x > /proc/1/fd/1",
        "echo x > /proc/1/mem",
        "ls /proc/1/root/",
        "head -c 1 /proc/kcore",
        "cat /proc/1/mem",
        "dmesg",
        "echo -17 > /proc/1/oom_score_adj",
    ],
)
def test_attack_through_proc_fails(box, command):
    assert box.run(f"({command})").exit_code != 0
    assert box.run("echo on").output == "on\n"


# --- resources -----------------------------------------------------------------------------------------------------


def test_fork_bomb_is_ended(fresh):
    result = fresh.run("bomb() { bomb | bomb & }; bomb; sleep 30", timeout=1.5)
    assert result.exit_code != 0
    assert fresh.run("ls /proc | grep -c '^[0-9]*$'").output.strip() in ("3", "4", "5")
    alive(fresh)


def test_memory_bomb_of_one_process_is_ended(fresh):
    result = python(fresh, "x = b'x' * 10**9")
    assert result.exit_code != 0 and ("MemoryError" in result.output or "256 MiB of memory" in result.output)
    alive(fresh)


def test_memory_bomb_of_many_processes_is_ended(fresh):
    program = """
        import os, time
        for _ in range(20):
            if os.fork() == 0:
                x = bytearray(os.urandom(1)) * (100 * 2**20)
                time.sleep(60)
        time.sleep(60)
        """
    started = time.monotonic()
    result = python(fresh, program)
    assert "256 MiB of memory" in result.output and result.exit_code == 137
    assert time.monotonic() - started < 45
    alive(fresh)


@pytest.mark.parametrize("place", ["/workspace", "/tmp", "/dev/shm"])
def test_disk_use_is_bounded(fresh, place):
    fill = f"for i in $(seq 100); do head -c 10000000 /dev/zero > {place}/fill$i || break; done"
    result = fresh.run(f"{fill}; du -sm {place}")
    assert "No space left" in result.output
    assert int(result.output.splitlines()[-1].split()[0]) <= 17
    fresh.run(f"rm -f {place}/fill*")
    alive(fresh)


def test_number_of_files_is_bounded(fresh):
    program = """
        import os
        for i in range(10**7):
            os.close(os.open(f"/tmp/{i}", os.O_CREAT))
        """
    result = python(fresh, program)
    assert "too many files" in result.output or result.timed_out
    assert int(fresh.run("ls -U /tmp | wc -l").output.split()[0]) < 400_000


def test_sparse_files_do_not_fill_the_host(fresh):
    fresh.run("for i in $(seq 200); do truncate -s 15M sparse$i; done")
    files = fresh.read_files()
    assert sum(map(len, files.values())) <= LIMITS.file_bytes
    alive(fresh)


def test_endless_output_is_truncated_at_the_time_limit(fresh):
    result = fresh.run("yes", timeout=1)
    assert result.timed_out and result.truncated and result.exit_code == 124
    assert result.output.startswith("y\ny\n") and "more bytes left out" in result.output
    assert len(result.output) < LIMITS.output_bytes + 100
    alive(fresh)


def test_output_limit_is_exact(fresh):
    assert not fresh.run(f"head -c {LIMITS.output_bytes} /dev/zero | tr '\\0' x").truncated
    result = fresh.run(f"head -c {LIMITS.output_bytes + 1} /dev/zero | tr '\\0' x")
    assert result.truncated and result.output.endswith("x\n[1 more bytes left out]")


@pytest.mark.parametrize(
    "command",
    [
        "sleep 60",
        "trap '' TERM INT HUP; sleep 60; sleep 60",
        "kill -STOP $$",
        "exec >&- 2>&-; sleep 60",
        "while :; do :; done",
    ],
)
def test_command_is_ended_at_its_time_limit(fresh, command):
    started = time.monotonic()
    result = fresh.run(command, timeout=0.7)
    assert (result.timed_out, result.exit_code) == (True, 124)
    assert time.monotonic() - started < 45
    alive(fresh)


def test_stdin_is_empty(fresh):
    result = fresh.run("cat; read x; echo \"got:$x\"; python -c 'input()'")
    assert "got:" in result.output and "EOFError" in result.output and not result.timed_out


# --- processes -----------------------------------------------------------------------------------------------------


def test_daemon_does_not_outlive_its_command(fresh):
    started = time.monotonic()
    daemon = "(setsid nohup sh -c 'sleep 1; touch survived; sleep 60' >/dev/null 2>&1 &)"
    result = fresh.run(f"{daemon}; sleep 60 & echo started")
    assert result.output == "started\n" and time.monotonic() - started < 45
    time.sleep(1.2)
    assert fresh.run("ls; ps ax -o args | grep '[s]leep'").output == "a.txt\n"


@pytest.mark.parametrize("kill", ["-9 1", "-9 -1", "-9 $PPID", "-INT 1", "-9 0", "-STOP 1"])
def test_guest_survives_signals_from_commands(fresh, kill):
    fresh.run(f"kill {kill}")
    alive(fresh)


def test_ended_sandbox_returns_exit_code_137_and_no_files(fresh):
    end(fresh)
    result = fresh.run("echo x")
    assert (result.exit_code, result.output) == (137, "[the sandbox has ended]")
    assert fresh.read_files() == {}
    with pytest.raises(OSError, match="ended"):
        fresh.write_files({"x": "x"})


def test_sandbox_works_after_a_command_removes_everything(fresh):
    fresh.run("rm -rf / --no-preserve-root; rm -rf /workspace/* /workspace/.*", timeout=3)
    assert fresh.read_files() == {}
    fresh.write_files({"a.txt": "a\n"})
    alive(fresh)


def end(sandbox):
    """Have the guest fail, as no command can."""
    sandbox._channel.put(frame(b"R?\n"), time.monotonic() + 5)
    time.sleep(0.2)


@pytest.mark.parametrize("how", ["leave", "kill -9"])
def test_no_process_survives_the_host_process(factory, how, tmp_path):
    mark = f"31{os.getpid()}.{time.time_ns() % 10**6}"
    program = f"""
import os, signal
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
from {type(factory).__module__} import {type(factory).__name__} as Factory
sandbox = Factory().create({{}})
sandbox.__enter__()
print("ready", flush=True)
sandbox.run("(setsid sleep {mark} &) ; sleep {mark}", timeout=60)
"""
    host = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    assert host.stdout and host.stdout.readline() == "ready\n"
    until(lambda: processes(mark), 10)
    host.send_signal(signal.SIGKILL if how == "kill -9" else signal.SIGINT)
    host.wait()
    host.stdout.close()
    until(lambda: not processes(mark), 20)


def processes(mark):
    """Return the pids of other processes with `mark` in their command line."""
    pids = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if mark.encode() in path.read_bytes() and int(path.parent.name) != os.getpid():
                pids.append(path.parent.name)
        except OSError:
            continue
    return pids


# --- strange data --------------------------------------------------------------------------------------------------


def test_files_with_long_and_strange_names_are_read(fresh):
    result = python(
        fresh,
        """
        import os
        for name in (b"x" * 255, b"new\\nline", b"\\xff\\xfe", b" ", b"-rf", "é".encode()):
            open(name, "w").write("in")
        for _ in range(60):
            os.mkdir("d" * 255); os.chdir("d" * 255)
        open("deep", "w").write("deep")
        """,
    )
    assert result.exit_code == 0, result.output
    files = fresh.read_files()
    assert {"x" * 255, "new\nline", " ", "-rf", "é"} <= files.keys()
    alive(fresh)


def test_binary_output_is_decoded_with_replacement(fresh):
    result = fresh.run("head -c 5000 /dev/urandom; printf '\\0\\1\\033[31m'; printf end")
    assert result.exit_code == 0 and result.output.endswith("\0\1\x1b[31mend")
    assert fresh.run("printf '%s' x").output == "x"


def test_sandboxes_in_threads_are_isolated_from_each_other(factory):
    results: dict[int, list[str]] = {}

    def work(number: int) -> None:
        with factory.create({"n": str(number)}, LIMITS) as sandbox:
            results[number] = [sandbox.run(f"cat n; echo {number} >> log; sort -u log").output for _ in range(5)]

    threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == {i: [f"{i}{i}\n"] * 5 for i in range(8)}


# --- what no process is charged for --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("semget", "libc.semget(0, 100, 0o1600)"),
        ("process_madvise", "libc.syscall(440, 3, 0, 0, 20, 0)"),
        ("prlimit of process 1", "libc.prlimit(1, 7, ctypes.byref((ctypes.c_ulong * 2)(1, 1)), None)"),
        ("prlimit of another", "libc.prlimit(os.getppid(), 7, ctypes.byref((ctypes.c_ulong * 2)(9, 9)), None)"),
        ("sched_setaffinity of another", "libc.sched_setaffinity(1, 8, ctypes.byref(ctypes.c_ulong(1)))"),
        ("quotactl_fd", "libc.syscall(443, 0, 0, 0, 0)"),
        ("fsconfig", "libc.syscall(431, 0, 0, 0, 0, 0)"),
    ],
)
def test_call_that_escapes_a_limit_or_reaches_another_process_is_denied(box, name, call):
    program = f"import ctypes, os\nlibc = ctypes.CDLL(None, use_errno=True)\nprint({call}, ctypes.get_errno())"
    assert python(box, program).output == "-1 1\n", name


@pytest.mark.parametrize("family", [16, 17, 38, 40, 44])  # netlink, packet, alg, vsock, xdp
def test_socket_of_another_family_is_refused(box, family):
    program = f"import socket\ntry: socket.socket({family}, 2)\nexcept OSError as error: print(error.errno)"
    assert python(box, program).output == "97\n"


@pytest.mark.parametrize("protocol", [132, 33, 136, 262])  # sctp, dccp, udplite, mptcp
def test_socket_of_another_protocol_is_refused(box, protocol):
    program = f"import socket\ntry: socket.socket(2, 1, {protocol})\nexcept OSError as error: print(error.errno)"
    assert python(box, program).output == "93\n"


def test_sockets_of_honest_programs_work(box):
    program = """
        import asyncio, os, resource, socket
        async def main():
            server = await asyncio.start_server(lambda r, w: w.close(), "127.0.0.1", 0)
            port = server.sockets[0].getsockname()[1]
            reader, _ = await asyncio.open_connection("127.0.0.1", port)
            return await reader.read()
        print(asyncio.run(main()), socket.getaddrinfo("127.0.0.1", 80)[0][4][0])
        resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
        print(resource.getrlimit(resource.RLIMIT_NOFILE), os.nice(3) > 2)
        """
    assert python(box, program).output == "b'' 127.0.0.1\n(64, 64) True\n"


def works_or_has_ended(sandbox):
    """Where the kernel's memory runs out, the kernel may end the guest too; the rollout then counts as the agent's."""
    assert sandbox.run("echo on").output in ("on\n", "[the sandbox has ended]")


def test_buffers_of_sockets_are_bounded(fresh):
    program = """
        import os, socket, time
        held = []
        for _ in range(40):
            if os.fork() == 0:
                while True:
                    try:
                        ends = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
                        held.append(ends)
                        for end in ends:
                            end.setblocking(False)
                            end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 22)
                            try:
                                while True: end.send(bytes(1 << 16))
                            except BlockingIOError: pass
                    except OSError: time.sleep(60)
        time.sleep(6)
        """
    result = python(fresh, program, timeout=8)
    assert result.exit_code == 137 or "memory" in result.output or "sockets" in result.output
    works_or_has_ended(fresh)


@pytest.mark.parametrize("kind", ["SOCK_STREAM", "SOCK_DGRAM"])
def test_buffers_of_connections_are_bounded(fresh, kind):
    program = f"""
        import socket, time
        stream = socket.{kind} == socket.SOCK_STREAM
        held = []
        server = socket.create_server(("127.0.0.1", 0))
        for _ in range(500):
            receiver = None if stream else socket.socket(type=socket.SOCK_DGRAM)
            if not stream:
                receiver.bind(("127.0.0.1", 0))
                receiver.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 22)
            sender = socket.socket(type=socket.{kind})
            sender.connect((server if stream else receiver).getsockname())
            held += [sender, receiver or server.accept()[0]]
            sender.setblocking(False)
            try:
                for _ in range(200): sender.send(bytes(60000))
            except BlockingIOError: pass
        time.sleep(1)
        print("held")
        """
    results = []
    thread = threading.Thread(target=lambda: results.append(python(fresh, program, timeout=30)))
    before = most = _socket_bytes()
    thread.start()
    while thread.is_alive():
        most = max(most, _socket_bytes())
        time.sleep(0.01)
    assert results[0].exit_code == 137 and "memory" in results[0].output
    assert most - before < 4 * LIMITS.memory_bytes  # 7 without the guard, which looks late on a loaded machine
    works_or_has_ended(fresh)


def _socket_bytes() -> int:
    """Memory of the TCP and UDP sockets of the whole machine."""
    return 4096 * sum(map(int, re.findall(r"mem (\d+)", Path("/proc/net/sockstat").read_text())))


def test_more_connections_than_any_program_needs_end_it(fresh):
    program = """
        import os, socket, time
        for _ in range(3):
            if os.fork() == 0:
                held = [socket.create_server(("127.0.0.1", 0)) for _ in range(600)]
                time.sleep(5)
        time.sleep(5)
        """
    result = python(fresh, program, timeout=8)
    assert result.exit_code == 137 and "sockets" in result.output


def test_host_replies_once_a_command_and_no_program_sees_it(factory):
    environment = Environment(replies=("3", "end"))
    with factory.create({"next": f"echo '{REPLY}'\n"}, environment=environment) as sandbox:
        seen = [sandbox.run(command).output for command in ("sh next", "x=$(sh next); echo $x; sh next", "sh next")]
        assert seen == ["3\n", f"{REPLY}\nend\n", ""]
        assert sandbox.run(f"echo '{REPLY}'; echo more").output == f"{REPLY}\nmore\n"


def test_shared_memory_that_is_unmapped_is_bounded(fresh):
    program = """
        import mmap, os, time
        held = []
        for _ in range(30):
            if os.fork() == 0:
                for _ in range(20):
                    area = mmap.mmap(-1, 20 * 2**20)
                    area.write(bytes(20 * 2**20))
                    area.madvise(mmap.MADV_DONTNEED)
                    held.append(area)
                time.sleep(60)
        time.sleep(6)
        """
    result = python(fresh, program, timeout=8)
    assert "256 MiB of memory" in result.output or "PermissionError" in result.output
    works_or_has_ended(fresh)


def test_entries_of_proc_that_describe_the_host_are_hidden(box):
    for name in ("cmdline", "config.gz", "keys", "kcore", "sched_debug"):
        assert box.run(f"head -c 1 /proc/{name} 2> /dev/null | wc -c").output.strip() == "0", name
    assert box.run("touch /proc/sys/kernel/domainname || echo 9 > /proc/sys/vm/swappiness").exit_code != 0


def test_limits_by_user_are_not_shared_between_sandboxes(factory):
    watch = "import ctypes\nlibc = ctypes.CDLL(None)\nprint(sum(libc.inotify_init() >= 0 for _ in range(1000)))"
    program = watch + "\nimport time; time.sleep(3)"
    counts = []

    def use_all():
        with factory.create({}, LIMITS) as sandbox:
            counts.append(int(python(sandbox, program).output))

    threads = [threading.Thread(target=use_all) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert min(counts) == max(counts) > 50
