"""Whose a container is, and removing what processes that have died left behind.

Belongs here: the labels of everything made on an engine, and the reaper. Does not belong here: making it.
"""

from __future__ import annotations

import contextlib
import os
import socket
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from docker import APIClient

OWNER = "etpi.owner"
"""A container's label that names the process it belongs to."""


def owner() -> str:
    """This process: host, boot, namespace of process ids, id, start in clock ticks."""
    return f"{_place()} {os.getpid()} {_started(os.getpid())}"


def reap(client: APIClient) -> list[str]:
    """Remove the containers of processes of this machine that live no more; the ids of those removed. What belongs to
    another machine, or to processes that cannot be seen from here, is left alone."""
    from docker.errors import APIError

    removed = []
    for container in client.containers(all=True, filters={"label": OWNER}):
        if _dead((container.get("Labels") or {}).get(OWNER, "")):
            with contextlib.suppress(APIError):  # somebody else removes it
                client.remove_container(container["Id"], force=True, v=True)
                removed.append(container["Id"])
    return removed


def _place() -> str:
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{socket.gethostname()} {boot} {os.stat('/proc/self/ns/pid').st_ino}"


def _started(pid: int) -> str | None:
    """Its start time, None where there is no such process or it has ended and nobody has asked how."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else fields[19]


def _dead(label: str) -> bool:
    place, _, process = label.rpartition(" ")
    place, _, pid = place.rpartition(" ")
    here = _place()
    if place != here:
        # The same host before its last boot: nothing of that time lives.
        return place.split(" ")[:1] == here.split(" ")[:1] and place.split(" ")[1:2] != here.split(" ")[1:2]
    return not pid.isdigit() or _started(int(pid)) != process
