"""The first program in a container: it sets the environment, installs the system call filter and runs the guest.

bubblewrap does this from outside. The host sends this file as a program's text and never imports it.

Its stdin starts with three frames (four bytes of length, a body): the environment as `NAME=value` pairs separated by
NUL, the filter program, the guest's source. The guest then reads the same stdin.
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
