"""Run a command in a user namespace in which no further one can be made: `python no_user_namespaces.py COMMAND...`.

User and group ids are the same as outside. Exits with the command's code, or 77 if this machine does not allow the
outer namespace either.
"""

from __future__ import annotations

import ctypes
import os
import sys

CLONE_NEWUSER = 0x10000000
IDS = 70_000
"""The number of ids that sandboxes started by root need."""


def main(command: list[str]) -> int:
    made, may_go = os.pipe(), os.pipe()
    child = os.fork()
    if child == 0:
        if ctypes.CDLL(None, use_errno=True).unshare(CLONE_NEWUSER):
            print(os.strerror(ctypes.get_errno()), file=sys.stderr)
            os._exit(77)
        os.write(made[1], b".")
        os.read(may_go[0], 1)  # wait for the id maps: an exec before that would lose the capabilities in the namespace
        with open("/proc/sys/user/max_user_namespaces", "w") as limit:
            limit.write("0")
        os.execvp(command[0], command)
    os.close(made[1])
    if os.read(made[0], 1):
        root = os.geteuid() == 0
        if not root:
            _write(child, "setgroups", "deny")
        for name, own in (("uid_map", os.geteuid()), ("gid_map", os.getegid())):
            _write(child, name, f"0 0 {IDS}" if root else f"{own} {own} 1")
        os.write(may_go[1], b".")
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def _write(pid: int, name: str, text: str) -> None:
    with open(f"/proc/{pid}/{name}", "w") as file:
        file.write(text)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
