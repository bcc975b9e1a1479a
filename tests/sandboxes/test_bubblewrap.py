"""Tests of the bubblewrap sandbox only; tests of both kinds of sandbox are in `test_sandboxes`."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from etpi_resources.sandboxes import (
    Environment,
    EnvironmentUnavailable,
    Limits,
    SandboxStopped,
    SandboxUnavailable,
    guest_connection,
)
from etpi_resources.sandboxes.bubblewrap import BubblewrapFactory

FACTORY = BubblewrapFactory()


@pytest.fixture
def readable_folder():
    """A folder that every user can enter, unlike pytest's `tmp_path`."""
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o755)
        yield Path(folder)


def test_missing_bubblewrap_is_reported_with_the_remedy(monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(SandboxUnavailable, match="apt-get install bubblewrap"), BubblewrapFactory().create({}):
        pass


def test_bubblewrap_that_does_not_start_is_reported_with_its_message(tmp_path, monkeypatch):
    fake = tmp_path / "bwrap"
    fake.write_text("#!/bin/sh\necho 'bwrap: No permissions to create a new namespace' >&2\nexit 1\n")
    fake.chmod(0o755)
    tmp_path.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr("shutil.which", lambda name: str(fake) if name == "bwrap" else f"/usr/bin/{name}")
    with pytest.raises(SandboxUnavailable, match="(?s)bubblewrap.*(No permissions|Permission denied)"):
        BubblewrapFactory().create({}).__enter__()


@pytest.mark.parametrize(
    ("limit", "answer"),
    [
        ("-t 100", "42"), ("-v 6000000", "42"),  # enough
        *((limit, "SandboxUnavailable") for limit in ("-t 15", "-v 400000", "-n 512", "-f 1000")),
    ],
)  # fmt: skip
def test_limits_that_this_process_inherited_are_no_end_of_a_command(limit, answer):
    program = (
        "from etpi_resources.sandboxes.bubblewrap import BubblewrapFactory\n"
        "try:\n"
        "    with BubblewrapFactory().create({}) as sandbox: print(sandbox.run('echo $((6 * 7))').output)\n"
        "except Exception as error: print(type(error).__name__, str(error))"
    )
    shell = ["bash", "-c", f'ulimit {limit} && exec "$@"', "-", sys.executable, "-c", program]
    printed = subprocess.run(shell, capture_output=True, text=True, check=True).stdout
    assert printed.split()[0] == answer
    assert answer == "42" or f"ulimit {limit[:2]}" in printed


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_sandbox_works_without_root():
    program = (
        "from etpi_resources.sandboxes.bubblewrap import BubblewrapFactory\n"
        "with BubblewrapFactory().create({'a': 'x'}) as s: print(s.run('cat a').output, s.read_files())"
    )
    root = str(Path(__file__).parents[2])
    command = ["setpriv", "--reuid=64200", "--regid=64200", "--clear-groups", "--", "/usr/bin/python3", "-c", program]
    done = subprocess.run(command, env={"PYTHONPATH": root, "PATH": os.environ["PATH"]}, capture_output=True, text=True)
    if "ModuleNotFoundError" in done.stderr:
        pytest.skip("another user cannot read this checkout")
    assert done.stdout == "x {'a': 'x'}\n", done.stderr


def test_only_programs_of_the_host_are_visible():
    with FACTORY.create({}) as box:
        for path in ("/etc/shadow", "/etc/passwd", "/root", "/home", "/var", "/sys"):
            assert box.run(f"cat {path} || ls {path}").exit_code != 0, path
        known = {"bin", "dev", "etc", "lib", "lib32", "lib64", "proc", "run", "sbin", "tmp", "usr", "workspace"}
        assert set(box.run("ls /").output.split()) <= known
        assert sorted(box.run("ls -A /etc").output.split()) in (["alternatives", "ld.so.cache"], ["ld.so.cache"])


def test_checkout_is_copied_into_the_workspace_and_not_changed(readable_folder):
    checkout, tools = readable_folder / "checkout", readable_folder / "tools"
    (checkout / ".git").mkdir(parents=True)
    (checkout / ".git" / "HEAD").write_text("ref: refs/heads/main\n")
    (checkout / "a.py").write_text("a = 1\n")
    (tools / "bin").mkdir(parents=True)
    (tools / "bin" / "check").write_text("#!/bin/sh\necho checked\n")
    (tools / "bin" / "check").chmod(0o755)
    environment = Environment("/srv/repo", checkout=checkout, tools=(tools,), places=("/patches",))
    with FACTORY.create({"b.py": "b = 2\n"}, environment=environment) as box:
        assert box.run("pwd; check; cat .git/HEAD").output == "/srv/repo\nchecked\nref: refs/heads/main\n"
        assert box.run("echo x > /patches/x; echo a = 3 > a.py; echo y > /run/checkout/y").exit_code == 1
        assert box.run(f"echo z >> {tools}/bin/check").exit_code == 1
        assert box.read_files() == {"a.py": "a = 3\n", "b.py": "b = 2\n"}
    assert (checkout / "a.py").read_text() == "a = 1\n" and sorted(p.name for p in checkout.iterdir()) == [
        ".git",
        "a.py",
    ]


def test_unavailable_environment_is_reported_with_the_remedy(readable_folder):
    def start(environment: Environment, limits: Limits = Limits()) -> None:  # noqa: B008
        with FACTORY.create({}, limits, environment):
            pass

    with pytest.raises(EnvironmentUnavailable, match='(?s)image repo:1.*sandbox = "docker"'):
        start(Environment(image="repo:1"))
    with pytest.raises(EnvironmentUnavailable, match="nowhere"):
        start(Environment(checkout=readable_folder / "nowhere"))
    for name in "abcd":
        (readable_folder / name).write_bytes(b"x" * 600_000)
    with pytest.raises(EnvironmentUnavailable, match="(?s)No space left.* 1 MiB"):
        start(Environment(checkout=readable_folder), Limits(file_bytes=1 << 20))
    (readable_folder / "a").chmod(0)
    with pytest.raises(EnvironmentUnavailable, match="(?s)Permission denied.*chmod"):
        start(Environment(checkout=readable_folder))


def test_commands_are_ended_by_signals_that_this_process_ignores():
    """As in the background of a script, and under nohup."""
    handlers = {number: signal.signal(number, signal.SIG_IGN) for number in (signal.SIGHUP, signal.SIGTERM)}
    try:
        with FACTORY.create({}) as box:
            for number in (signal.SIGHUP, signal.SIGTERM):  # bash itself has jobs ignore the others
                assert box.run(f"sleep 30 & kill -{number:d} $!; wait $!").exit_code == 128 + number
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


USES = {"run": ("echo on",), "read_files": (), "write_files": ({"b.txt": "b"},)}


@pytest.mark.parametrize("number", ["SIGTERM", "SIGKILL"])
@pytest.mark.parametrize("use", USES)
def test_sandbox_that_is_stopped_from_outside_gives_no_result(use, number):
    """As when a run ends: its supervisor signals every process of it, and the run must not record what follows."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # Dagster ignores it where a shell's background ignores SIGINT
    with FACTORY.create({"a.txt": "a\n"}) as sandbox:
        os.kill(sandbox._process.pid, getattr(signal, number))
        os.waitid(os.P_PID, sandbox._process.pid, os.WEXITED | os.WNOWAIT)
        for _ in range(2):
            with pytest.raises(SandboxUnavailable, match=number) as caught:
                getattr(sandbox, use)(*USES[use])
            assert isinstance(caught.value, SandboxStopped) == (number == "SIGKILL")


@pytest.mark.parametrize("part", ["bubblewrap", "guest"])
def test_sandbox_that_is_killed_with_its_command_raises_when_it_is_left(part):
    """As a service manager ends a run: by a signal to every process. The command may end first, and give a result."""
    with pytest.raises(SandboxUnavailable, match="SIGKILL"), FACTORY.create({}) as sandbox:
        assert sandbox.run("kill -TERM $$").exit_code == 143
        children = Path(f"/proc/{sandbox._process.pid}/task/{sandbox._process.pid}/children")
        os.kill(sandbox._process.pid if part == "bubblewrap" else int(children.read_text()), signal.SIGKILL)


def test_command_that_the_kernel_kills_for_want_of_memory_on_the_machine_has_no_result(monkeypatch):
    kills = [0]
    monkeypatch.setattr(guest_connection, "_machine_kills", lambda: kills[0])
    with FACTORY.create({}) as sandbox:
        kills[0] += 1
        assert sandbox.run("kill -TERM $$").exit_code == 143
        assert sandbox.run("kill -KILL $$").exit_code == 137  # by itself: nothing was killed meanwhile
        kills[0] += 1
        with pytest.raises(SandboxStopped, match="ran out of memory"):
            sandbox.run("kill -KILL $$")
