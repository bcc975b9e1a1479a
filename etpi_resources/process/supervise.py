"""The supervisor: it runs a command whose process tree never outlives the process that started it.

The supervisor is a program between the caller and the command, written with the standard library only, because it is
started by path. `supervised` puts it in front of a command line.

It forks once. Both processes, outer and inner, run the same loop as subreapers, so orphans of the tree below become
their children, daemons and new sessions included. The outer process watches the caller, the inner one watches the
outer. Whichever of caller, outer, inner or command is killed, even by SIGKILL, another of them notices and kills the
rest of the tree. The caller is watched by polling its pid, because a parent-death signal would also fire when only the
thread that started the command ends.
"""

from __future__ import annotations

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
    """Return the command line that runs `command` under the supervisor, for `subprocess.Popen` in this process.

    The supervisor passes a SIGTERM, SIGINT or SIGHUP once to every process of the tree, except those inside sandboxes,
    and kills processes that remain after the grace period. When it has exited, the whole tree is gone. It exits with
    the command's status, or 128 + N if signal N ended the command. The command runs in a new session, so a Ctrl-C at
    the terminal reaches only the caller. Standard streams and environment pass through.

    Args:
        command: program and arguments; the program is looked up in PATH.
        grace: seconds between the signal and killing the tree.
        lock: a file that the supervisor locks (flock) before the command starts and until its tree is gone, so that the
            next command cannot start while the tree ends. If the lock is held, it says so on stderr and waits.
    """
    program = [sys.executable, "-I", "-S", str(Path(__file__).resolve())]
    return [*program, str(os.getpid()), str(grace), str(lock or ""), *command]


def descendants(root: int) -> list[int]:
    """Return the pids of all processes below `root`, without zombies, parents before children."""
    children: dict[int, list[int]] = {}
    for entry in os.listdir("/proc"):
        if not entry.isdigit():
            continue
        try:
            with open(f"/proc/{entry}/stat", encoding="utf-8", errors="replace") as file:
                # The command name is in parentheses and may itself contain spaces and parentheses.
                state, parent = file.read().rpartition(")")[2].split()[:2]
        except (FileNotFoundError, ProcessLookupError):
            continue
        if state not in "ZX":
            children.setdefault(int(parent), []).append(int(entry))
    pids: list[int] = []
    generation = [root]
    while generation:
        generation = [child for pid in generation for child in children.get(pid, ())]
        pids += generation
    return pids


def _in_a_sandbox(pid: int) -> bool:
    """Return whether a process is in a PID namespace below this process's own. Its sandbox ends it; if it were
    signalled, a sandbox that lives a moment longer would report its death as the command's own result."""
    try:
        with open(f"/proc/{pid}/status", encoding="utf-8", errors="replace") as file:
            return any(line.startswith("NSpid:") and len(line.split()) > 2 for line in file)
    except (FileNotFoundError, ProcessLookupError):
        return False


def _prctl(option: int, value: int) -> None:
    if ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), f"prctl({option}) failed; the supervisor needs Linux 3.4 or newer")


def _signal(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def _take_lock(path: str) -> None:
    """Take the lock until both supervisor processes have exited: they share the descriptor over the fork, and it is
    closed on exec, so that no process of the command can hold it."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        print(f"waiting for {path}: another supervised process holds it", file=sys.stderr, flush=True)
        fcntl.flock(descriptor, fcntl.LOCK_EX)


class _SupervisorProcess:
    """One of the two supervisor processes, which waits for the tree below it. Its signals are blocked and it takes them
    one at a time, so that none arrives between two instructions.

    Args:
        parent: the process it watches.
        grace: seconds between the signal and killing the tree.
        whole_tree: pass signals to every process of the tree; false: only to the child.
    """

    def __init__(self, parent: int, grace: float, whole_tree: bool) -> None:
        self.parent = parent
        self.grace = grace
        self.whole_tree = whole_tree
        self.status: int | None = None
        self.deadline: float | None = None
        _prctl(_PR_SET_CHILD_SUBREAPER, 1)

    def wait(self, child: int) -> int:
        """Wait until the child and all processes below it are gone; return the exit status."""
        while not self._may_kill(child):
            caught = signal.sigtimedwait((*_STOP_SIGNALS, signal.SIGCHLD), _POLL_SECONDS)
            if self.deadline is not None:
                continue
            if caught is not None and caught.si_signo in _STOP_SIGNALS:
                self._pass_on(child, caught.si_signo)
            elif os.getppid() != self.parent:
                self._pass_on(child, signal.SIGTERM)
        self._kill_rest(child)
        return 128 + signal.SIGKILL if self.status is None else self.status

    def _may_kill(self, child: int) -> bool:
        """Return whether remaining processes may be killed: the child ended by itself, or the grace period is over."""
        self._reap(child)
        if self.deadline is None:
            return self.status is not None
        return time.monotonic() > self.deadline or not descendants(os.getpid())

    def _pass_on(self, child: int, number: int) -> None:
        """Pass a signal on, once.

        The inner process signals the whole tree, because a shell does not forward signals to its child. The outer one
        signals only the inner one: many programs quit without cleaning up when a signal comes twice.
        """
        self.deadline = time.monotonic() + self.grace
        for pid in descendants(os.getpid()) if self.whole_tree else [child]:
            if not _in_a_sandbox(pid):
                _signal(pid, number)

    def _reap(self, child: int) -> None:
        """Reap children that have exited, adopted orphans included."""
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
        """Kill until no process is left: one may fork between being listed and being killed."""
        while left := descendants(os.getpid()):
            for pid in left:
                _signal(pid, signal.SIGKILL)
            time.sleep(0.01)
            self._reap(child)
        self._reap(child)


def _fork(body: Callable[[], int]) -> int:
    """Run `body` in a child process that exits with the status it returns; return the child's pid."""
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


def _run(command: Sequence[str], parent: int, grace: float, lock: str) -> int:
    signal.pthread_sigmask(signal.SIG_BLOCK, (*_STOP_SIGNALS, signal.SIGCHLD))
    if os.getppid() != parent:
        return 128 + signal.SIGTERM
    if os.getpid() != os.getsid(0):
        os.setsid()
    if lock:
        _take_lock(lock)
    outer = _SupervisorProcess(parent, grace + 2.0, whole_tree=False)
    outer_pid = os.getpid()

    def execute(inner_pid: int) -> int:
        _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != inner_pid:
            return 128 + signal.SIGTERM
        # An exec inherits what is ignored: the first two by Python, the others by a command in a shell's background.
        for number in (signal.SIGPIPE, signal.SIGXFSZ, signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, (*_STOP_SIGNALS, signal.SIGCHLD))
        os.execvp(command[0], list(command))

    def inner() -> int:
        process = _SupervisorProcess(outer_pid, grace, whole_tree=True)
        inner_pid = os.getpid()
        return process.wait(_fork(lambda: execute(inner_pid)))

    return outer.wait(_fork(inner))


if __name__ == "__main__":
    _, caller, seconds, lock_file, *words = sys.argv
    sys.exit(_run(words, int(caller), float(seconds), lock_file))
