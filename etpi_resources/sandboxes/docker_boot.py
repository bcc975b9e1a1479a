"""What a container starts with: the filter of system calls, the commands' environment, then the guest.

Belongs here: what has to be done inside a container before the guest runs and what bubblewrap does from outside. Does
not belong here: the guest (`guest`), or anything on the host: never imported, sent as a program's text.

Its stdin begins with three frames (four bytes of length, a body): the environment as `NAME=value` lines separated by
NUL, the filter program, the guest's source. The guest goes on with the same stdin.
"""

import ctypes
import os


def frame():
    return exactly(int.from_bytes(exactly(4), "big"))


def exactly(count):
    parts = []
    while count:
        part = os.read(0, count)
        if not part:
            os._exit(0)
        parts.append(part)
        count -= len(part)
    return b"".join(parts)


class Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("filter", ctypes.c_char_p))


def boot():
    environment, filters, guest = frame(), frame(), frame()
    os.environb.clear()
    for pair in environment.split(b"\0"):
        name, _, value = pair.partition(b"=")
        os.environb[name] = value
    libc = ctypes.CDLL(None, use_errno=True)
    program = Program(len(filters) // 8, filters)
    # PR_SET_SECCOMP, SECCOMP_MODE_FILTER; allowed because the container has no_new_privs.
    if libc.prctl(22, ctypes.c_ulong(2), ctypes.byref(program), ctypes.c_ulong(0), ctypes.c_ulong(0)):
        raise OSError(ctypes.get_errno(), "the system call filter was refused: " + os.strerror(ctypes.get_errno()))
    exec(compile(guest, "guest", "exec", optimize=2), {"__name__": "guest"})


boot()
