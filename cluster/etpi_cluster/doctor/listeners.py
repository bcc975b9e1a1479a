"""Programs of this machine that listen on all of its interfaces, read from /proc."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

_LISTENS = "0A"
_ANY = ("00000000", "00000000000000000000000000000000")


def on_all_interfaces(postgres_port: int | None = None, root: Path = Path("/proc")) -> dict[str, list[int]]:
    """Return the ports that are open on all interfaces, by the program that listens.

    Those of this user's processes; and Postgres' port, whoever runs it.

    Args:
        root: of the files of processes, for tests.
    """
    programs: dict[str, str] | None = None
    ports: dict[str, set[int]] = {}
    for port, user, socket in _open_ports(root):
        if user == os.geteuid():
            programs = _programs(root) if programs is None else programs
            name = programs.get(socket, "another process")
        elif port == postgres_port:
            name = "postgres"
        else:
            continue
        ports.setdefault(name, set()).add(port)
    return {name: sorted(numbers) for name, numbers in sorted(ports.items())}


def _open_ports(root: Path) -> Iterator[tuple[int, int, str]]:
    """Yield (port, user, inode of the socket) of each TCP socket that listens on any address."""
    for table in ("tcp", "tcp6"):
        try:
            lines = (root / "net" / table).read_text().splitlines()[1:]
        except OSError:
            continue
        for line in lines:
            fields = line.split()
            address, _, port = fields[1].rpartition(":")
            if fields[3] == _LISTENS and address in _ANY:
                yield int(port, 16), int(fields[7]), fields[9]


def _programs(root: Path) -> dict[str, str]:
    """Return the name of the program that has each socket open, by the socket's inode; of this user's processes."""
    result: dict[str, str] = {}
    for process in root.iterdir():
        if not process.name.isdigit():
            continue
        try:
            name = _name(process)
            for descriptor in (process / "fd").iterdir():
                target = os.readlink(descriptor)
                if target.startswith("socket:["):
                    result.setdefault(target[8:-1], name)
        except OSError:  # it ended, or belongs to another user
            continue
    return result


def _name(process: Path) -> str:
    """Return the program's usual name: "raylet" or "dashboard/agent.py", and not "python"."""
    words = (process / "cmdline").read_bytes().decode(errors="replace").split("\0")
    program = Path(words[0].split(" ")[0]).name
    if program.startswith("python"):
        scripts = [word for word in words[1:] if word and not word.startswith("-")]
        program = "/".join(Path(scripts[0]).parts[-2:]) if scripts else program
    return program or process.name
