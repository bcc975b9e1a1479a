"""A seccomp filter that denies system calls no command in a sandbox needs.

It closes what namespaces and limits leave open: memory that no process is charged for, access to other processes, and
rarely used parts of the kernel.
"""

from __future__ import annotations

import struct

_EPERM, _ENOSYS, _EPROTONOSUPPORT, _EAFNOSUPPORT = 1, 38, 93, 97
_ALLOW, _ERRNO = 0x7FFF0000, 0x00050000

_NAMESPACES = 0x7E020000
"""CLONE_NEW* flags of clone(2): user, pid, net, ipc, uts, cgroup, mount."""

_ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}

# name: (x86_64, aarch64)
_DENIED = {
    # memory that outlives or escapes the process that is charged for it
    "memfd_create": (319, 279),
    "memfd_secret": (447, 447),
    "shmget": (29, 194),
    "msgget": (68, 186),
    "semget": (64, 190),
    "mq_open": (240, 180),
    # other processes
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "pidfd_getfd": (438, 438),
    "kcmp": (312, 272),
    "process_madvise": (440, 440),
    "process_mrelease": (448, 448),
    # mounts and namespaces
    "mount": (165, 40),
    "umount2": (166, 39),
    "pivot_root": (155, 41),
    "chroot": (161, 51),
    "unshare": (272, 97),
    "setns": (308, 268),
    "open_tree": (428, 428),
    "move_mount": (429, 429),
    "fsopen": (430, 430),
    "fsmount": (432, 432),
    "fsconfig": (431, 431),
    "fspick": (433, 433),
    "mount_setattr": (442, 442),
    "open_by_handle_at": (304, 265),
    "name_to_handle_at": (303, 264),
    # large or privileged parts of the kernel
    "bpf": (321, 280),
    "perf_event_open": (298, 241),
    "userfaultfd": (323, 282),
    "io_uring_setup": (425, 425),
    "add_key": (248, 217),
    "request_key": (249, 218),
    "keyctl": (250, 219),
    "init_module": (175, 105),
    "finit_module": (313, 273),
    "delete_module": (176, 106),
    "kexec_load": (246, 104),
    "kexec_file_load": (320, 294),
    "fanotify_init": (300, 262),
    "quotactl": (179, 60),
    "quotactl_fd": (443, 443),
    "acct": (163, 89),
    "swapon": (167, 224),
    "swapoff": (168, 225),
    "reboot": (169, 142),
    "syslog": (103, 116),
    "move_pages": (279, 239),
    # the clock
    "settimeofday": (164, 170),
    "clock_settime": (227, 112),
    "adjtimex": (159, 171),
    "clock_adjtime": (305, 266),
}
_OWN_PROCESS = {
    "prlimit64": ((302, 261), {0: 0}),
    "setpriority": ((141, 140), {0: 0, 1: 0}),
    "sched_setparam": ((142, 118), {0: 0}),
    "sched_setscheduler": ((144, 119), {0: 0}),
    "sched_setattr": ((314, 274), {0: 0}),
    "sched_setaffinity": ((203, 122), {0: 0}),
    "ioprio_set": ((251, 30), {0: 1, 1: 0}),
}
"""Calls that are allowed for the calling process alone: name, numbers, and the arguments that say so."""
_SOCKETS = ((41, 198), (53, 199))
"""socket and socketpair, allowed for the families below."""
_UNIX, _INET, _INET6 = 1, 2, 10
"""Families: the last two reach the loopback of an empty network namespace."""
_PROTOCOLS = (0, 6, 17)
"""The default of a type, TCP, UDP: the guest counts the memory of no others."""
_MMAP = (9, 222)
_SHARED_ANONYMOUS = 0x21
"""MAP_SHARED | MAP_ANONYMOUS: memory that no process is charged for once it has been unmapped by MADV_DONTNEED."""
_SETSOCKOPT, _SOL_SOCKET, _SO_SNDBUF = (54, 208), 1, 7
_CLONE = (56, 220)
_CLONE3 = 435
"""A filter cannot see the flags of clone3; ENOSYS makes the C library fall back to clone."""


def filter_program(machine: str, *, shared_memory: bool = True) -> bytes:
    """Compile the filter for a `platform.machine()`, as the kernel reads it (an array of sock_filter).

    Denied calls, and calls of another architecture, fail with EPERM; sockets of other families with EAFNOSUPPORT, of
    other protocols with EPROTONOSUPPORT.

    Args:
        shared_memory: whether anonymous memory may be shared between processes, and sockets may get larger buffers;
            only a control group can bound both. Without one, setting a buffer's size succeeds and does nothing.

    Raises:
        KeyError: the call numbers of the machine are not listed.
    """
    column = list(_ARCHITECTURES).index(machine) if machine in _ARCHITECTURES else None
    if column is None:
        raise KeyError(f"no system call numbers for {machine!r}; known: {sorted(_ARCHITECTURES)}")
    deny, allow = _statement(0x06, _ERRNO | _EPERM), _statement(0x06, _ALLOW)
    number, architecture = 0, 4
    program = [
        _statement(0x20, architecture),
        _jump(0x15, _ARCHITECTURES[machine], 1, 0),
        deny,
        _statement(0x20, number),
    ]
    if machine == "x86_64":  # the x32 numbers are another way to the same calls
        program += [_jump(0x35, 0x40000000, 0, 1), deny]
    for numbers in _DENIED.values():
        program += [_jump(0x15, numbers[column], 0, 1), deny]
    program += [_jump(0x15, _CLONE3, 0, 1), _statement(0x06, _ERRNO | _ENOSYS)]
    protocols = [
        _load_argument(2),
        *(_jump(0x15, protocol, len(_PROTOCOLS) - i, 0) for i, protocol in enumerate(_PROTOCOLS)),
        _statement(0x06, _ERRNO | _EPROTONOSUPPORT),
    ]
    families = [
        _load_argument(0),
        _jump(0x15, _UNIX, 3 + len(protocols), 0),
        _jump(0x15, _INET, 2, 0),
        _jump(0x15, _INET6, 1, 0),
        _statement(0x06, _ERRNO | _EAFNOSUPPORT),
    ]
    for numbers in _SOCKETS:
        program += _only_for(numbers[column], [*families, *protocols, allow])
    for numbers, arguments in _OWN_PROCESS.values():
        tests = [word for i, value in arguments.items() for word in (_load_argument(i), _jump(0x15, value, 1, 0), deny)]
        program += _only_for(numbers[column], [*tests, allow])
    if not shared_memory:
        flags = [_load_argument(3), _statement(0x54, _SHARED_ANONYMOUS), _jump(0x15, _SHARED_ANONYMOUS, 0, 1)]
        program += _only_for(_MMAP[column], [*flags, deny, allow])
        option = [(1, _SOL_SOCKET, 3), (2, _SO_SNDBUF, 1)]
        tests = [word for index, value, skip in option for word in (_load_argument(index), _jump(0x15, value, 0, skip))]
        program += _only_for(_SETSOCKOPT[column], [*tests, _statement(0x06, _ERRNO), allow])
    program += _only_for(_CLONE[column], [_load_argument(0), _jump(0x45, _NAMESPACES, 0, 1), deny, allow])
    return b"".join([*program, allow])


def _only_for(number: int, then: list[bytes]) -> list[bytes]:
    """Return instructions that run `then` for one call and skip it for others; `then` ends in a decision."""
    return [_jump(0x15, number, 0, len(then)), *then]


def _load_argument(index: int) -> bytes:
    """Load the low 32 bits of a call's argument."""
    return _statement(0x20, 16 + 8 * index)


def _statement(code: int, value: int) -> bytes:
    return struct.pack("HBBI", code, 0, 0, value)


def _jump(code: int, value: int, if_true: int, if_false: int) -> bytes:
    return struct.pack("HBBI", code, if_true, if_false, value)
