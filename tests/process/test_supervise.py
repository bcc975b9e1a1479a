"""A supervised process tree never outlives its caller, whichever process is killed and however."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
import textwrap
import time
import uuid
from pathlib import Path

import pytest

from etpi_resources.process.supervise import descendants, supervised
from tests.support.waiting import until

ROOT = Path(__file__).resolve().parents[2]

# A command whose tree contains a plain child, a daemon in its own session, and a child that ignores SIGTERM.
TREE = """
sleep {tag} &
setsid sh -c 'sleep {tag}' >/dev/null 2>&1 &
sh -c 'trap "" TERM; sleep {tag}; sleep {tag}' &
echo ready
wait
"""

CALLER = """
import subprocess, sys
from etpi_resources.process.supervise import supervised
process = subprocess.Popen(supervised(["sh", "-c", sys.argv[1]], grace={grace}))
print(process.pid, flush=True)
process.wait()
"""


def running(tag: str) -> list[int]:
    """Return the pids of processes with the tag in their command line; zombies have none."""
    pids = []
    for entry in os.listdir("/proc"):
        if entry.isdigit() and int(entry) != os.getpid():
            try:
                line = Path(f"/proc/{entry}/cmdline").read_bytes()
            except OSError:
                continue
            if tag.encode() in line:
                pids.append(int(entry))
    return pids


def wait_for(condition, seconds: float = 10.0) -> bool:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if condition():
            return True
        time.sleep(0.02)
    return condition()


@pytest.fixture
def tag():
    """A sleep length that no other process has, which marks the test's processes."""
    value = f"3{uuid.uuid4().int % 10**7:07d}.5"
    yield value
    for pid in running(value):
        os.kill(pid, signal.SIGKILL)


@pytest.fixture
def caller(tag):
    """A process that starts the tree under the supervisor; (caller, pid of the outer supervisor)."""
    process = subprocess.Popen(
        [sys.executable, "-c", CALLER.format(grace=0.5), TREE.format(tag=tag)],
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
    )
    assert process.stdout is not None
    supervisor = int(process.stdout.readline())
    assert process.stdout.readline() == "ready\n"
    # Three sleeps, three shells, both supervisor processes, the caller.
    assert wait_for(lambda: len(running(tag)) >= 8)
    yield process, supervisor
    process.kill()
    process.wait()


def test_killing_the_caller_ends_the_tree(caller, tag):
    process, _ = caller
    process.kill()
    process.wait()
    assert wait_for(lambda: not running(tag)), running(tag)


def test_terminating_the_supervisor_ends_the_tree(caller, tag):
    process, supervisor = caller
    os.kill(supervisor, signal.SIGTERM)
    assert process.wait(timeout=10) == 0
    assert not running(tag), "the supervisor exited before its tree was gone"


@pytest.mark.parametrize("half", ["outer", "inner", "command"])
def test_killing_any_process_of_the_chain_ends_the_tree(caller, tag, half):
    process, outer = caller
    inner = descendants(outer)[0]
    os.kill({"outer": outer, "inner": inner, "command": descendants(inner)[0]}[half], signal.SIGKILL)
    assert wait_for(lambda: not [p for p in running(tag) if p != process.pid]), running(tag)


def test_child_that_ignores_sigterm_is_killed_after_the_grace_period(tag):
    script = f"trap '' TERM; echo ready; while :; do sleep {tag}; done"
    process = subprocess.Popen(supervised(["sh", "-c", script], grace=0.3), stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline() == "ready\n"
    started = time.monotonic()
    process.terminate()
    assert process.wait(timeout=10) == 128 + signal.SIGKILL
    assert 0.25 < time.monotonic() - started < 5
    assert not running(tag)


def test_signal_reaches_the_child_once_and_it_may_finish(tmp_path):
    program = textwrap.dedent("""
        import signal, sys, time
        heard = []
        signal.signal(signal.SIGTERM, lambda *_: heard.append(1))
        print("ready", flush=True)
        while not heard:
            time.sleep(0.02)
        time.sleep(0.6)
        open(sys.argv[1], "w").write(str(len(heard)))
        sys.exit(7)
    """)
    out = tmp_path / "heard"
    process = subprocess.Popen(supervised([sys.executable, "-c", program, str(out)]), stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline() == "ready\n"
    process.terminate()
    assert process.wait(timeout=10) == 7
    assert out.read_text() == "1"


def test_signal_reaches_no_process_inside_a_sandbox(tmp_path, tag):
    """A command in a sandbox that died of it would give the sandbox a result that is not the command's own."""
    shell = f"trap 'echo inside >> heard' TERM; echo ready; while :; do sleep {tag} & wait; done"
    sandbox = ["bwrap", "--unshare-pid", "--dev-bind", "/", "/", "sh", "-c", shell]
    outside = f"trap 'echo outside >> heard' TERM; {shlex.join(sandbox)} & while :; do wait; done"
    process = subprocess.Popen(
        supervised(["sh", "-c", outside], grace=0.5), cwd=tmp_path, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None and process.stdout.readline() == "ready\n"
    process.terminate()
    process.wait(timeout=10)
    assert (tmp_path / "heard").read_text() == "outside\n"
    assert wait_for(lambda: not running(tag))


def test_command_of_a_script_in_the_background_ends_by_the_signals_that_its_shell_ignores():
    """Such a shell ignores SIGINT, which an exec inherits, and Dagster gives SIGTERM the handler of SIGINT."""
    program = "import signal; print(*(int(signal.getsignal(n) == signal.SIG_IGN) for n in (2, 15)))"
    command = shlex.join(supervised([sys.executable, "-c", program])).replace(f" {os.getpid()} ", " $$ ")
    done = subprocess.run(["sh", "-c", f"{command} & wait"], capture_output=True, text=True, timeout=10)
    assert done.stdout == "0 0\n", done.stderr


def test_ordinary_end_kills_background_processes(tag):
    finished = subprocess.run(
        supervised(["sh", "-c", f"setsid sleep {tag} >/dev/null 2>&1 & exit 5"]), check=False, timeout=10
    )
    assert finished.returncode == 5
    assert not running(tag)


@pytest.mark.parametrize(("script", "status"), [("exit 0", 0), ("exit 3", 3), ("kill -SEGV $$", 128 + signal.SIGSEGV)])
def test_exit_status_is_the_commands(script, status):
    assert subprocess.run(supervised(["sh", "-c", script]), check=False, timeout=10).returncode == status


def test_missing_command_is_reported_with_status_127():
    finished = subprocess.run(supervised(["no-such-program"]), check=False, capture_output=True, text=True, timeout=10)
    assert finished.returncode == 127
    assert "No such file" in finished.stderr


def test_child_survives_the_end_of_the_thread_that_started_it(tag):
    import threading

    started = []
    thread = threading.Thread(target=lambda: started.append(subprocess.Popen(supervised(["sleep", tag]))))
    thread.start()
    thread.join()
    until(lambda: running(tag), 30)
    # Longer than the supervisor's interval of checking its caller.
    time.sleep(0.6)
    assert started[0].poll() is None
    started[0].terminate()
    started[0].wait(timeout=30)
    assert not running(tag)


def test_lock_is_held_until_the_tree_is_gone_and_the_next_command_waits(tmp_path, tag):
    lock = tmp_path / "accelerator.lock"
    first = subprocess.Popen(
        supervised(["sh", "-c", f"trap '' TERM; echo up; while :; do sleep {tag}; done"], grace=0.8, lock=lock),
        stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert first.stdout is not None and first.stdout.readline() == "up\n"
    first.terminate()
    second = subprocess.Popen(
        supervised(["sh", "-c", "echo through"], lock=lock), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    out, err = second.communicate(timeout=10)
    assert out == "through\n" and "waiting for" in err
    assert not running(tag), "the second command started before the first one's tree was gone"
    first.wait(timeout=10)


def test_killing_both_supervisor_processes_at_once_ends_the_command(tag):
    process = subprocess.Popen(supervised(["sleep", tag]))
    assert wait_for(lambda: len(descendants(process.pid)) == 2)
    inner, command = descendants(process.pid)
    assert wait_for(lambda: Path(f"/proc/{command}/comm").read_text() == "sleep\n")
    os.kill(process.pid, signal.SIGSTOP)
    os.kill(inner, signal.SIGKILL)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    assert wait_for(lambda: not running(tag))
