"""Children that never outlive whoever started them: trainers, servers, anything that may start processes of its own.

Belongs here: the supervisor, a small program of the standard library alone that stands between the caller and the
child, and `supervised`, which puts it in front of a command. Does not belong here: what the child does, or how its
output is read.

Why two levels: the supervisor forks once, and both halves run the same loop, each a subreaper (orphans of the tree
below come back to it, sessions and daemons included). The outer half watches the caller, the inner half watches the
outer half. Whichever of caller, outer half, inner half or child is killed, even by SIGKILL, another one of them
sees it and takes the rest of the tree down. The caller is watched by polling its pid: a parent-death signal would
also fire when merely the thread that started the child ends.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import fcntl
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_POLL_SECONDS = 0.2
_STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


def supervised(command: Sequence[str], *, grace: float = 10.0, lock: Path | None = None) -> list[str]:
    """The command line that runs `command` under the supervisor, for `subprocess.Popen` of this process.

    The process started is the supervisor: a SIGTERM, SIGINT or SIGHUP to it reaches every process of the tree once,
    and what still stands after the grace is killed; when it has exited, the whole tree is gone. It exits with the
    command's own status, or 128 + N where signal N ended it. The command gets a session of its own, so a Ctrl-C at
    the terminal reaches the caller alone. Standard streams and environment pass through.

    Args:
        command: program and arguments; the program is looked up in PATH.
        grace: seconds between asking the tree to end and killing it.
        lock: a file the supervisor locks (flock) from before the command starts until its tree is gone, so that a
            successor cannot share the machine with what is still dying. It waits for the lock, saying so.
    """
    line = [sys.executable, "-I", "-S", str(Path(__file__).resolve()), "--parent", str(os.getpid())]
    line += ["--grace", str(grace)]
    if lock is not None:
        line += ["--lock", str(lock)]
    return [*line, "--", *command]


def descendants(root: int) -> list[int]:
    """Pids of every living process below `root`, zombies left out, parents before children."""
    children: dict[int, list[int]] = {}
    for entry in os.listdir("/proc"):
        if not entry.isdigit():
            continue
        try:
            with open(f"/proc/{entry}/stat", encoding="utf-8", errors="replace") as file:
                # The command name stands in parentheses and may itself hold spaces and parentheses.
                state, parent = file.read().rpartition(")")[2].split()[:2]
        except (FileNotFoundError, ProcessLookupError):
            continue
        if state not in "ZX":
            children.setdefault(int(parent), []).append(int(entry))
    found: list[int] = []
    frontier = [root]
    while frontier:
        frontier = [child for pid in frontier for child in children.get(pid, ())]
        found += frontier
    return found


def _prctl(option: int, value: int) -> None:
    if ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), f"prctl({option}) failed; the supervisor needs Linux 3.4 or newer")


def _signal(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def _take_lock(path: str) -> None:
    """Hold the lock until the last half of the supervisor has exited (the descriptor is shared over the fork and
    closed on exec, so that a stray child cannot hold it)."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        print(f"waiting for {path}: another supervised process holds it", file=sys.stderr, flush=True)
        fcntl.flock(descriptor, fcntl.LOCK_EX)


class _Keeper:
    """One half of the supervisor: owns the tree below it until nothing of it is left. Runs with its signals blocked
    and takes them one at a time, so that none is lost between two instructions."""

    def __init__(self, parent: int, grace: float, whole_tree: bool) -> None:
        self.parent = parent
        self.grace = grace
        self.whole_tree = whole_tree
        self.status: int | None = None
        self.deadline: float | None = None
        _prctl(_PR_SET_CHILD_SUBREAPER, 1)

    def keep(self, child: int) -> int:
        """Wait until the child and everything it left behind are gone; the status to exit with."""
        while not self._done(child):
            caught = signal.sigtimedwait((*_STOP_SIGNALS, signal.SIGCHLD), _POLL_SECONDS)
            if self.deadline is not None:
                continue
            if caught is not None and caught.si_signo in _STOP_SIGNALS:
                self._ask(child, caught.si_signo)
            elif os.getppid() != self.parent:
                self._ask(child, signal.SIGTERM)
        self._kill_rest(child)
        return 128 + signal.SIGKILL if self.status is None else self.status

    def _done(self, child: int) -> bool:
        """Whether what is left, if anything, may be killed: the child ended by itself, or the grace is over."""
        self._reap(child)
        if self.deadline is None:
            return self.status is not None
        return time.monotonic() > self.deadline or not descendants(os.getpid())

    def _ask(self, child: int, number: int) -> None:
        """Pass the request on, once. The inner half asks the whole tree (a shell would keep it from its child); the
        outer half asks the inner half alone, or the tree would be asked twice, which many programs take for force."""
        self.deadline = time.monotonic() + self.grace
        for pid in descendants(os.getpid()) if self.whole_tree else [child]:
            _signal(pid, number)

    def _reap(self, child: int) -> None:
        """Collect what has exited, adopted orphans included."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            if pid == child:
                code = os.waitstatus_to_exitcode(status)
                self.status = code if code >= 0 else 128 - code

    def _kill_rest(self, child: int) -> None:
        """Kill until nothing is left: a process may fork between being listed and being killed."""
        while left := descendants(os.getpid()):
            for pid in left:
                _signal(pid, signal.SIGKILL)
            time.sleep(0.01)
            self._reap(child)
        self._reap(child)


def _fork(body: Callable[[], int]) -> int:
    """Run `body` in a child process that exits with what it returns; the child's pid."""
    pid = os.fork()
    if pid:
        return pid
    status = 1
    try:
        status = body()
    except OSError as error:
        print(f"supervise: {error}", file=sys.stderr, flush=True)
        status = 127
    finally:
        os._exit(status)


def _run(command: Sequence[str], parent: int, grace: float, lock: str | None) -> int:
    signal.pthread_sigmask(signal.SIG_BLOCK, (*_STOP_SIGNALS, signal.SIGCHLD))
    if os.getppid() != parent:
        return 128 + signal.SIGTERM
    if os.getpid() != os.getsid(0):
        os.setsid()
    if lock is not None:
        _take_lock(lock)
    outer = _Keeper(parent, grace + 2.0, whole_tree=False)
    outer_pid = os.getpid()

    def execute(inner_pid: int) -> int:
        _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != inner_pid:
            return 128 + signal.SIGTERM
        # The interpreter ignores these two for itself; a program expects them as the system sets them.
        for number in (signal.SIGPIPE, signal.SIGXFSZ):
            signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, (*_STOP_SIGNALS, signal.SIGCHLD))
        os.execvp(command[0], list(command))

    def inner() -> int:
        keeper = _Keeper(outer_pid, grace, whole_tree=True)
        inner_pid = os.getpid()
        return keeper.keep(_fork(lambda: execute(inner_pid)))

    return outer.keep(_fork(inner))


def main() -> None:
    parser = argparse.ArgumentParser(description="Run a command that cannot outlive the process that started it.")
    parser.add_argument("--parent", type=int, required=True, help="pid of the caller; when it is gone, all ends")
    parser.add_argument("--grace", type=float, default=10.0, help="seconds between SIGTERM and SIGKILL")
    parser.add_argument("--lock", help="file to hold locked until the whole tree is gone")
    parser.add_argument("command", nargs="+")
    options = parser.parse_args()
    sys.exit(_run(options.command, options.parent, options.grace, options.lock))


if __name__ == "__main__":
    main()
