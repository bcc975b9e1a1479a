"""The port of a page: checked before anything is started; the next free one, where the user named none."""

from __future__ import annotations

import errno
import socket
import sys

from etpi_resources.errors import ExpectedError

TRIED = 20
"""Ports after the default one that are tried."""


class PortTaken(ExpectedError, RuntimeError):
    """Nothing can listen on the port; the message names the program that does, where this machine says it."""


def free_port(host: str, port: int, *, named: bool) -> int:
    """Return a port that can be listened on; say on stderr if it is not the default one.

    Args:
        named: whether the user named the port, which then is the only one.

    Raises:
        PortTaken: there is none, or the host is no address of this machine.
    """
    for candidate in [port] if named else range(port, port + TRIED):
        if _is_free(host, candidate):
            if candidate != port:
                print(f"etpi: port {port} is in use{_holder(port)}, so this is port {candidate}", file=sys.stderr)
            return candidate
    if named:
        raise PortTaken(f"port {port} of {host} is in use{_holder(port)}; stop that program, or name another --port")
    raise PortTaken(f"the ports {port} to {port + TRIED - 1} of {host} are in use; name another with --port")


def _is_free(host: str, port: int) -> bool:
    try:
        infos = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        with socket.create_server(infos[0][4][:2], family=infos[0][0]):
            return True
    except socket.gaierror as error:
        raise PortTaken(f"--host {host}: it is no address or name of this machine ({error.strerror})") from error
    except PermissionError as error:
        raise PortTaken(f"port {port}: only root may listen below 1024; name another --port") from error
    except OverflowError as error:
        raise PortTaken(f"--port {port}: ports are between 1 and 65535") from error
    except OSError as error:
        if error.errno == errno.EADDRNOTAVAIL:
            raise PortTaken(f"--host {host}: it is no address of this machine") from error
        return False


def _holder(port: int) -> str:
    """Return " by PROGRAM (process N)" of the program that listens on a port; nothing where that cannot be seen."""
    import psutil

    try:
        for connection in psutil.net_connections("tcp"):
            if connection.status == psutil.CONN_LISTEN and connection.laddr[1:2] == (port,) and connection.pid:
                words = " ".join(psutil.Process(connection.pid).cmdline())
                return f" by process {connection.pid} ({words[:80]})"
    except psutil.Error:
        pass
    return ""
