"""A real Docker API for tests: podman's service on its own socket, and an image of this machine's programs.

All its files are in one folder, and it ends with the process that starts it. Nothing is pulled: the image is a copy of
this machine's programs, libraries and Python.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

from tests.support.waiting import until

IMAGE = "localhost/etpi-test:base"

_PROGRAMS = """
    awk base64 basename bash cat chmod chown chroot cp cut date dd df diff dirname dmesg du echo env expr false find git
    grep gzip head id kill ln ls md5sum mkdir mkfifo mknod mount mv nice nohup od patch printf ps pwd readlink realpath
    rm rmdir sed seq setsid sh sha256sum sleep sort stat su sync tail tar tee test timeout touch tr true truncate umount
    uname uniq unshare wc xargs yes
"""
_LEFT_OUT = """
    EXTERNALLY-MANAGED __pycache__ config-* dist-packages ensurepip idlelib lib2to3 pydoc_data test tkinter
"""
_SETTINGS = """
[containers]
default_ulimits = ["nofile=1024:1024", "nproc=4096:4096"]
http_proxy = false
"""
"""podman's defaults set higher limits than a machine that is itself a container may allow."""


def missing() -> str | None:
    """Return why no engine can start on this machine; None if one can."""
    if os.geteuid() != 0:
        return "podman as root serves the Docker API; these tests are not run as root"
    if absent := [name for name in ("podman", "runc") if shutil.which(name) is None]:
        return f"no {' and no '.join(absent)} here (apt-get install podman runc)"
    if not os.access("/usr/bin/python3", os.X_OK):
        return "no /usr/bin/python3 to make an image of"
    return None


class PodmanService:
    """podman's service; `address` is the value for DOCKER_HOST."""

    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="etpi-engine-"))
        self.socket = self.folder / "socket"
        self.address = f"unix://{self.socket}"
        settings = self.folder / "containers.conf"
        settings.write_text(_SETTINGS)
        self.environment = {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "CONTAINERS_CONF": str(settings), "HOME": "/root"}
        self._service: subprocess.Popen[bytes] | None = None

    def podman(self, *arguments: str, **options: object) -> subprocess.CompletedProcess[str]:
        done = subprocess.run(
            [*self.command(), *arguments], capture_output=True, text=True, env=self.environment, **options
        )  # type: ignore[call-overload]
        assert done.returncode == 0, (arguments, done.stderr)
        return done

    def start(self) -> None:
        log = (self.folder / "log").open("ab")
        self._service = subprocess.Popen(
            [*self.command(), "system", "service", "--time", "0", self.address],
            cwd=self.folder,  # conmon leaves a file there when a container runs out of memory
            env=self.environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log, preexec_fn=die_with_parent,
        )  # fmt: skip
        until(self.socket.exists, 20, (self.folder / "log").read_text)

    def stop(self) -> None:
        """End the service but no containers."""
        if self._service is not None:
            self._service.kill()
            self._service.wait()
            self._service = None
        self.socket.unlink(missing_ok=True)

    def close(self) -> None:
        self.stop()
        for last in (False, False, True):  # a busy machine takes longer than podman waits
            try:
                self.podman("rm", "--all", "--force", "--time", "0")
                break
            except AssertionError:
                if last:
                    raise
        subprocess.run(["umount", "--recursive", "--lazy", str(self.folder / "root" / "overlay")], capture_output=True)
        shutil.rmtree(self.folder, ignore_errors=True)

    def make_image(
        self,
        name: str = IMAGE,
        extra: Path | None = None,
        changes: Sequence[str] = (),
        files: Sequence[str | Path] = (),
    ) -> None:
        """Create an image of this machine's programs, with the tree `extra` copied over it.

        Args:
            changes: settings for podman's `--change`.
            files: further programs and libraries of this machine; the libraries that they load are added.
        """
        tree = self.folder / "tree"
        if not tree.exists():
            _make_tree(tree)
        for path in [*files, *linked(*files)]:
            _copy(Path(path), tree)
        if extra is not None:
            # A link in the tree may point to this machine's own files (/lib64/ld-linux-x86-64.so.2 does), so replace
            # links instead of writing through them.
            subprocess.run(["cp", "-a", "--remove-destination", *extra.iterdir(), tree], check=True)
        packed = subprocess.Popen(["tar", "-C", str(tree), "-c", "."], stdout=subprocess.PIPE)
        settings = [word for change in ("ENV IN_IMAGE=yes", *changes) for word in ("--change", change)]
        self.podman("import", *settings, "-", name, stdin=packed.stdout)
        assert packed.wait() == 0

    def containers(self) -> list[str]:
        return self.podman("ps", "--all", "--quiet").stdout.split()

    def command(self) -> list[str]:
        places = [f"--root={self.folder}/root", f"--runroot={self.folder}/run", f"--tmpdir={self.folder}/tmp"]
        return ["podman", *places, "--runtime=runc", "--cgroup-manager=cgroupfs", "--events-backend=file"]


def _make_tree(root: Path) -> None:
    for folder in ("bin", "sbin", "lib", "lib64"):
        (root / "usr" / folder).mkdir(parents=True)
        (root / folder).symlink_to(f"usr/{folder}")
    for folder in ("dev", "etc", "home", "proc", "root", "run", "sys", "tmp", "var/tmp"):
        (root / folder).mkdir(parents=True)
    (root / "tmp").chmod(0o1777)
    (root / "etc" / "passwd").write_text("root:x:0:0:root:/root:/bin/bash\n")
    (root / "etc" / "group").write_text("root:x:0:\n")
    python = Path("/usr/bin/python3").resolve()
    library = Path(f"/usr/lib/{python.name}")
    shutil.copytree(
        library, root / "usr/lib" / python.name, ignore=shutil.ignore_patterns(*_LEFT_OUT.split()), symlinks=True
    )
    if (git := Path("/usr/lib/git-core")).is_dir():  # most of its programs are links to git itself
        shutil.copytree(git, root / "usr/lib/git-core", ignore=lambda _, names: [n for n in names if n != "git"])
    paths = [shutil.which(name, path="/usr/bin:/bin:/usr/sbin:/sbin") for name in _PROGRAMS.split()]
    programs = [Path(path) for path in paths if path]
    files = [python, *programs, *(library / "lib-dynload").glob("*.so")]
    for path in [*files, *map(Path, linked(*files))]:
        _copy(path, root)
    for name in ("python", "python3"):
        (root / "usr/bin" / name).unlink(missing_ok=True)
        (root / "usr/bin" / name).symlink_to(python.name)


def linked(*files: str | Path) -> list[str]:
    """Return the absolute paths of the shared libraries that programs or libraries load."""
    if not files:
        return []
    words = subprocess.run(["ldd", *files], capture_output=True, text=True).stdout.split()
    return [word for word in words if word.startswith("/") and not word.endswith(":")]


def _copy(path: Path, root: Path) -> None:
    """Copy a file; of a link, copy the link and its target."""
    source = path.parent.resolve() / path.name
    target = root / str(source).lstrip("/")
    if target.exists() or target.is_symlink():
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    if source.is_symlink():
        target.symlink_to(os.readlink(source))
        _copy(source.parent / os.readlink(source), root)
    else:
        shutil.copy2(source, target)


def die_with_parent() -> None:
    """For `preexec_fn`: have the kernel kill the process when the thread that starts it ends."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)
