"""The program that runs commands inside a sandbox, as its process 1.

It enforces limits, collects output, keeps the clock, ends processes that commands leave running, and moves files. The
sandbox is isolated before this program starts. The guest runs under the same isolation and limits as the commands; a
command that subverts it can only falsify its own workspace, and the host trusts its answers no further than that.

The host never imports it. Its stdin and stdout are pipes to the host; its arguments are `LIMIT=N`, 0 for a limit that
the sandbox sets by other means, and folders. It imports only modules that load fast, since every rollout starts it.

A frame is four bytes of length, most significant first, and a body. The first byte of a request is its kind:
    R timeout newline command         run it; answer: exit code, flag, seconds, output bytes left out, newline, output
    W (length path length data)...    write files; answer: empty, or the error
    F (name /)...                     read files outside folders of these names; answer: (length path length data)...
    K                                 end the running command with flag d; no answer of its own
Flags name the limit that ended the command: t time, m memory, n number of files, s sockets, d disk; - none. k: the
machine ran out of memory, and the kernel ended a process here.
When it is ready, the guest sends a frame with the seconds of CPU that the machine gives each process here, empty if
there is no limit; it exits at the end of its stdin.
"""

# The public modules signal and ctypes take longer to import than everything else here together.
import _ctypes  # pyright: ignore[reportMissingImports]
import _signal  # pyright: ignore[reportMissingImports]
import os
import resource
import select
import sys
import time

WATCH = 0.05
"""Seconds between checks of what all processes together use."""

MOST_FILES = 50_000
"""The most files, folders and links in the writable places: each uses kernel memory that no limit counts."""

MOST_CONNECTIONS = 1024
"""The most TCP and UDP sockets: many small messages fill more of the kernel's memory than they count."""

FEW_CONNECTIONS = 8
"""So many are not looked at: the kernel reads a table of all the machine's sockets for each look."""

MOST_SOCKETS = 512
"""The most unix sockets where no control group counts their buffers: each holds up to 416 KiB."""

PR_SET_DUMPABLE = 4

LIMITS = {key: int(value) for key, value in (pair.split("=") for pair in sys.argv[1:] if pair[:1] != "/")}
WRITABLE = [place.encode() for place in sys.argv[1:] if place[:1] == "/"]
"""Places of bounded size whose files are counted: arguments that are paths."""

STATISTICS = next(
    (
        path
        for path in (b"/run/memory.stat", b"/sys/fs/cgroup/memory.stat", b"/sys/fs/cgroup/memory/memory.stat")
        if os.access(path, os.R_OK)
    ),
    None,
)
"""The file in which the sandbox's control group counts memory by kind, if it has one."""
CHARGED_AT_ONCE = 1 << 20
"""Bytes by which a group without room can be below its limit."""
LONGEST_ARGUMENT = 100_000
"""Bytes; the kernel accepts at most 128 KiB in one argument, so a longer command goes through a file."""


def main():
    _signal.signal(_signal.SIGINT, _signal.SIG_DFL)  # process 1 receives only signals that it handles: none
    score = os.open(b"/proc/self/oom_score_adj", os.O_RDWR)  # cannot be opened after the next call
    prctl = _ctypes.dlsym(_ctypes.dlopen(None, 0), "prctl")  # pyright: ignore[reportArgumentType]
    _ctypes.call_function(prctl, (PR_SET_DUMPABLE, 0, 0, 0, 0))  # commands cannot read this process in /proc
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    for kind, option, limit in (
        (resource.RLIMIT_AS, "v", LIMITS["address"]),
        (resource.RLIMIT_NPROC, "u", LIMITS["processes"]),
        (resource.RLIMIT_FSIZE, "f", LIMITS["file"]),
        (resource.RLIMIT_NOFILE, "n", LIMITS["open_files"]),
    ):
        try:
            resource.setrlimit(kind, (limit, limit) if limit else resource.getrlimit(kind))
        except ValueError:
            sys.exit(f"ulimit -{option} is lower than the {limit} of a sandbox")
    most = resource.getrlimit(resource.RLIMIT_CPU)[1]
    send(b"" if most == resource.RLIM_INFINITY else b"%d" % most)
    while True:
        body = receive()
        kind, rest = body[:1], body[1:]
        if kind == b"R":
            timeout, _, command = rest.partition(b"\n")
            send(run(command, float(timeout), score))
        elif kind == b"W":
            send(write(rest))
        elif kind == b"F":
            send(read(rest.split(b"/")))


def receive():
    length = int.from_bytes(exactly(4), "big")
    return exactly(length)


def exactly(count):
    parts = []
    while count:
        part = os.read(0, min(count, 1 << 20))
        if not part:
            os._exit(0)  # the host is gone; the end of process 1 ends every process here
        parts.append(part)
        count -= len(part)
    return b"".join(parts)


def send(body):
    view = memoryview(len(body).to_bytes(4, "big") + body)
    while view:
        view = view[os.write(1, view) :]


def run(command, timeout, score):
    started, before = time.monotonic(), kernel_kills()
    argument = [b"-c", command]
    if len(command) > LONGEST_ARGUMENT:
        # It removes its file, since later commands must not find the tests that a judge's command wrote.
        put(b"/tmp/.command", b"rm -f /tmp/.command; " + command)
        argument = [b"/tmp/.command"]
    out, into = os.pipe()
    # The command inherits the limit and the score: to set a limit later takes a call that commands could use on each
    # other, and the score of a process that has just started cannot be opened.
    most = resource.getrlimit(resource.RLIMIT_CPU)[1]
    resource.setrlimit(resource.RLIMIT_CPU, (int(timeout) + 1, most))
    own_score = os.pread(score, 16, 0)
    os.pwrite(score, b"1000", 0)  # where memory runs out, commands go before this process
    try:
        pid = os.posix_spawn(
            b"/bin/bash",
            [b"bash", *argument],
            os.environb,
            file_actions=[
                (os.POSIX_SPAWN_OPEN, 0, b"/dev/null", os.O_RDONLY, 0),
                (os.POSIX_SPAWN_DUP2, into, 1),
                (os.POSIX_SPAWN_DUP2, into, 2),
            ],
            setsid=True,
            setsigdef=_signal.valid_signals(),  # `nohup etpi run &` ignores some, and then so would every command
        )
    except (OSError, ValueError) as error:
        os.close(out)
        return answer(126, "", started, 0, str(error).encode())
    finally:
        os.close(into)
        os.pwrite(score, own_score, 0)
        resource.setrlimit(resource.RLIMIT_CPU, (most, most))
    output = Output(out)
    flag = watch(pid, output, started + timeout)
    status = end_all(pid)
    output.drain()
    os.close(out)
    code = os.waitstatus_to_exitcode(status)
    kills, own_kills = kernel_kills()
    if not flag and kills > before[0]:
        flag = "m" if own_kills > before[1] else "k"
    return answer(
        124 if flag == "t" else code if code >= 0 else 128 - code, flag, started, output.left_out, output.kept
    )


def answer(code, flag, started, left_out, output):
    return b"%d %s %.6f %d\n" % (code, (flag or "-").encode(), time.monotonic() - started, left_out) + output


class Output:
    """A command's output: keeps the first bytes, and reads and counts the rest so that the writer does not block."""

    def __init__(self, fd):
        self.fd, self.kept, self.left_out = fd, b"", 0

    def read(self):
        data = os.read(self.fd, 1 << 16)
        room = LIMITS["output"] - len(self.kept)
        self.kept += data[:room]
        self.left_out += max(0, len(data) - room)
        return bool(data)

    def drain(self):
        while self.read():
            pass


def watch(pid, output, deadline):
    """Read output until the command's shell ends; return the flag of a limit that was exceeded before that, or ""."""
    poll = select.poll()
    exit_fd = os.pidfd_open(pid)
    poll.register(exit_fd, select.POLLIN)
    poll.register(output.fd, select.POLLIN)
    poll.register(0, select.POLLIN)
    next_check = time.monotonic() + WATCH
    most_files = max(MOST_FILES, files_used())  # a command may remove files when there are already too many
    try:
        while True:
            now = time.monotonic()
            if now >= deadline:
                return "t"
            if now >= next_check:
                connections = connections_open()
                if memory_used() + waiting_bytes(connections) > LIMITS["memory"]:
                    return "m"
                if connections > MOST_CONNECTIONS or (not STATISTICS and sockets_open() > MOST_SOCKETS):
                    return "s"
                if files_used() > most_files:
                    return "n"
                next_check = now + WATCH
            ready = dict(poll.poll(max(1, 1000 * (min(next_check, deadline) - now))))
            if 0 in ready:
                receive()  # the only request that can come now is K; at the end of stdin the guest exits
                return "d"
            if output.fd in ready and not output.read():
                poll.unregister(output.fd)  # the command closed its outputs; it may still run
            if exit_fd in ready:
                return ""
    finally:
        os.close(exit_fd)


def memory_used():
    """Return the bytes of anonymous and shared memory, without pages of files: as the control group counts them, else
    the sum over all other processes."""
    if STATISTICS:
        return group_memory()
    total = 0
    for name in os.listdir(b"/proc"):
        if not name.isdigit() or name == b"1":
            continue
        try:
            text = whole(b"/proc/%s/status" % name)
        except OSError:
            continue  # it has ended
        for field in (b"RssAnon:", b"RssShmem:"):
            _, label, rest = text.partition(field)
            if label:
                total += int(rest.split(None, 1)[0]) * 1024
    return total


def group_memory():
    counts = {}
    for line in whole(STATISTICS).splitlines():
        name, _, number = line.partition(b" ")
        counts[name] = int(number)
    anonymous = counts.get(b"anon", counts.get(b"total_rss", 0))  # versions 2 and 1
    shared = counts.get(b"shmem", counts.get(b"total_shmem", 0))
    in_files = 0
    for place in WRITABLE:
        state = os.statvfs(place)
        in_files += (state.f_blocks - state.f_bfree) * state.f_frsize
    return anonymous + max(0, shared - in_files)


def sockets_open():
    return whole(b"/proc/net/unix").count(b"\n")


def connections_open():
    """Return the number of TCP and UDP sockets of this network namespace, with those that no process has any more."""
    lines = whole(b"/proc/net/sockstat").splitlines() + whole(b"/proc/net/sockstat6").splitlines()
    return sum(int(line.split()[2]) for line in lines if line[:3] in (b"TCP", b"UDP"))


def waiting_bytes(connections):
    """Return the bytes that wait in the buffers of TCP and UDP sockets, which no process is charged for."""
    if connections <= FEW_CONNECTIONS:
        return 0
    total = 0
    for kind in (b"tcp", b"tcp6", b"udp", b"udp6"):
        for line in whole(b"/proc/net/" + kind).splitlines()[1:]:
            sending, _, receiving = line.split(None, 5)[4].partition(b":")
            total += int(sending, 16) + int(receiving, 16)
    return total


def whole(path):
    try:
        fd = os.open(path, os.O_RDONLY)
    except FileNotFoundError:  # a machine without IPv6
        return b""
    parts = []
    try:
        while part := os.read(fd, 1 << 16):
            parts.append(part)
    finally:
        os.close(fd)
    return b"".join(parts)


def kernel_kills():
    """Return how many processes of its control group the kernel has ended for want of memory, and how many of them at
    the group's own limit. `MemoryGroup.kills` does the same from outside."""
    if events := whole(b"/sys/fs/cgroup/memory.events"):  # version 2
        kills = number(events, b"oom_kill ")
        return kills, min(kills, number(events, b"oom "))
    folder = b"/sys/fs/cgroup/memory/memory."
    kills = number(whole(folder + b"oom_control"), b"oom_kill ")
    peak = int(whole(folder + b"memsw.max_usage_in_bytes") or whole(folder + b"max_usage_in_bytes") or 0)
    return kills, kills if peak + CHARGED_AT_ONCE >= int(whole(folder + b"limit_in_bytes") or 0) else 0


def number(text, name):
    return int((text.partition(name)[2].split() or [0])[0])


def files_used():
    used = 0
    for place in WRITABLE:
        state = os.statvfs(place)
        used += state.f_files - state.f_ffree
    return used


def end_all(pid):
    """Kill every process but this one and return the status of `pid`. Orphans become children of process 1, so when no
    children are left, no processes are left."""
    try:  # noqa: SIM105 - contextlib is one more import
        os.kill(-1, _signal.SIGKILL)
    except ProcessLookupError:
        pass
    status = 0
    while True:
        try:
            ended, code = os.waitpid(-1, 0)
        except ChildProcessError:
            return status
        if ended == pid:
            status = code


def entries(body):
    at = 0
    while at < len(body):
        pair = []
        for _ in range(2):
            length = int.from_bytes(body[at : at + 4], "big")
            pair.append(body[at + 4 : at + 4 + length])
            at += 4 + length
        yield pair


def write(body):
    for path, data in entries(body):
        try:
            folder = os.path.dirname(path)
            if folder:
                os.makedirs(folder, exist_ok=True)
            put(path, data)
        except OSError as error:
            return path + b": " + (error.strerror or "error").encode()
    return b""


def put(path, data):
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o644)
    try:
        view = memoryview(data)
        while view:
            view = view[os.write(fd, view) :]
    finally:
        os.close(fd)


def read(unread):
    """Read regular files in name order, without following links, up to the limit of one file in total: a few sparse
    files can claim more bytes than any disk has."""
    parts, room, folders = [], LIMITS["file"], [b""]
    while folders:
        folder = folders.pop()
        try:
            with os.scandir(folder or b".") as scan:
                entries_by_name = sorted((entry.name, entry) for entry in scan)
        except OSError:
            continue
        for name, entry in entries_by_name:
            path = folder + b"/" + name if folder else name
            if entry.is_dir(follow_symlinks=False):
                if name not in unread:
                    folders.append(path)
            elif entry.is_file(follow_symlinks=False):
                data = get(path, room)
                if data is not None:
                    room -= len(path) + len(data)
                    parts += [len(path).to_bytes(4, "big"), path, len(data).to_bytes(4, "big"), data]
    return b"".join(parts)


def get(path, room):
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return None
    try:
        size = os.fstat(fd).st_size
        data = []
        while size <= room and (part := os.read(fd, 1 << 20)):
            data.append(part)
        return b"".join(data) if size <= room else None
    except OSError:
        return None
    finally:
        os.close(fd)


main()
