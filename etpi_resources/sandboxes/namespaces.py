"""Reasons why bubblewrap cannot start on a machine, and the commands that fix them.

Sources: man 7 user_namespaces; Ubuntu's release notes of 24.04 for AppArmor's rule. Tried with podman and runc: a
container needs a system call filter that allows `sethostname` and `mount`, and a /proc without masked paths, because
the kernel mounts a new /proc only if an unmasked one is visible (mount_too_revealing in fs/namespace.c).
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

INSTALL = (
    "Install it (Debian, Ubuntu: sudo apt-get install bubblewrap; Fedora: sudo dnf install bubblewrap; "
    "Arch: sudo pacman -S bubblewrap). Without root: ask who runs the machine, or put a `bwrap` program on PATH"
)
ENGINE = (
    'Or run commands in containers: set sandbox = "docker" in the specs (docs/sandboxes.md names the places) '
    "and start Docker or podman"
)
CONTAINER_OPTIONS = (
    "docker run --security-opt seccomp=unconfined --security-opt apparmor=unconfined"
    " --security-opt systempaths=unconfined",
    "podman run --security-opt seccomp=unconfined --security-opt 'unmask=/proc/*'",
)
"""Options that let bubblewrap start in the container of an ordinary user, without any capability."""

_SYSCTLS = {
    "user.max_user_namespaces": ("0", "15000"),
    "kernel.unprivileged_userns_clone": ("0", "1"),
}
"""A kernel setting -> (the value that forbids user namespaces, one that allows them)."""
_APPARMOR = "kernel.apparmor_restrict_unprivileged_userns"
_PROFILE = r"abi <abi/4.0>,\nprofile bwrap /usr/bin/bwrap flags=(unconfined) {\n  userns,\n}\n"
_CONTAINER_MARKS = ("/.dockerenv", "/run/.containerenv", "/var/run/secrets/kubernetes.io")


def not_installed() -> str:
    """Return the message for a machine without a `bwrap` program."""
    return _message("bubblewrap (bwrap) is not installed", [INSTALL])


def refused(stderr: str, root: Path = Path("/"), environment: Mapping[str, str] = os.environ) -> str:
    """Return the message for a bubblewrap that did not start.

    Args:
        stderr: bubblewrap's own message.
        root: the folder with /proc and the files that mark a container; tests set it.
    """
    cause, remedies = _cause(stderr, root, environment)
    return _message(f"bubblewrap could not start a sandbox: {cause}. Its message: {stderr}", remedies)


def _cause(stderr: str, root: Path, environment: Mapping[str, str]) -> tuple[str, list[str]]:
    """Return the cause and the remedies."""
    if stderr.startswith("ulimit"):
        return "the limits of this process are too low", ["Start etpi with higher ones, such as: ulimit -v unlimited"]
    container = "container" in environment or any((root / mark.lstrip("/")).exists() for mark in _CONTAINER_MARKS)
    where = " on the host of this container" if container else ""
    for name, (forbids, allows) in _SYSCTLS.items():
        if _sysctl(root, name) == forbids:
            keep = f"echo {name}={allows} | sudo tee /etc/sysctl.d/90-etpi.conf"
            return (
                f"the kernel's setting {name} = {forbids} forbids user namespaces",
                [f"Allow them{where}: sudo sysctl -w {name}={allows}; to keep it: {keep}"],
            )
    if container:
        if stderr.startswith("setpriv:") or "Unexpected capabilities" in stderr:
            return (
                "this container's user has some of root's rights and lacks others",
                ["Start it as an ordinary user without added capabilities: --user 1000 --cap-drop ALL"],
            )
        return (
            "this container's engine forbids user namespaces, or mounts in them",
            [f"Start the container with: {options}" for options in CONTAINER_OPTIONS],
        )
    if _sysctl(root, _APPARMOR) == "1":
        load = "sudo tee /etc/apparmor.d/bwrap && sudo apparmor_parser -r /etc/apparmor.d/bwrap"
        return (
            f"AppArmor forbids user namespaces to programs without a profile ({_APPARMOR} = 1)",
            [
                f"Give bubblewrap a profile: printf '{_PROFILE}' | {load}",
                f"Or allow them to every program: sudo sysctl -w {_APPARMOR}=0",
            ],
        )
    return (
        "the kernel, or a filter of system calls, refused it",
        ["Check that a user may make namespaces: unshare --user --mount --pid --fork --mount-proc true"],
    )


def _sysctl(root: Path, name: str) -> str | None:
    """Return a kernel setting as text; None if this kernel does not have it."""
    try:
        return (root / "proc/sys" / name.replace(".", "/")).read_text().strip()
    except OSError:
        return None


def _message(problem: str, remedies: list[str]) -> str:
    return "\n".join([f"{problem}.", *(f"  - {remedy}." for remedy in [*remedies, ENGINE])])
