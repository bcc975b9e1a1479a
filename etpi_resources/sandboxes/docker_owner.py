"""The label that names a container's owner process, and the removal of containers whose owner is dead."""

from __future__ import annotations

import contextlib
import os
import socket
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from docker import APIClient

OWNER = "etpi.owner"
"""The container label with the owner process."""


def owner() -> str:
    """Return the label's value for this process: host, boot id, pid namespace, pid, start time in clock ticks."""
    return f"{_pid_namespace()} {os.getpid()} {_start_time(os.getpid())}"


def reap(client: APIClient) -> list[str]:
    """Remove the containers of dead processes of this machine; return their ids.

    Containers of other machines, and of processes in other pid namespaces, are not touched.
    """
    from docker.errors import APIError

    removed = []
    for container in client.containers(all=True, filters={"label": OWNER}):
        if _dead((container.get("Labels") or {}).get(OWNER, "")):
            with contextlib.suppress(APIError):  # another process removes it
                client.remove_container(container["Id"], force=True, v=True)
                removed.append(container["Id"])
    return removed


def _pid_namespace() -> str:
    """Return host, boot id and pid namespace: a pid is unique among processes with the same value."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{socket.gethostname()} {boot} {os.stat('/proc/self/ns/pid').st_ino}"


def _start_time(pid: int) -> str | None:
    """Return the process's start time in clock ticks; None if there is no such process, or it is a zombie."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else fields[19]


def _dead(label: str) -> bool:
    rest, _, start_time = label.rpartition(" ")
    namespace, _, pid = rest.rpartition(" ")
    here = _pid_namespace()
    if namespace != here:
        # The same host with another boot id has rebooted since, so the process is dead.
        return namespace.split(" ")[:1] == here.split(" ")[:1] and namespace.split(" ")[1:2] != here.split(" ")[1:2]
    return not pid.isdigit() or _start_time(int(pid)) != start_time
