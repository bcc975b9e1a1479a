"""Several machines on this one, for tests: podman containers with their own network, mounts and processes, a shared
folder, and a share of the CPU each.

Nothing is pulled or built: a machine's system is this machine's /usr, and its Python, packages and the checkout are
this machine's, read-only and at the same paths. The user inside is unprivileged and has no capabilities, as
docs/install.md says. Everything is in one folder and on one bridge; `close` removes both.
"""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import site
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from tests.support import container_engine

ROOT = Path(__file__).resolve().parents[2]
SHARED = Path("/shared")
"""The shared folder, at this path on every machine."""
HOME = Path("/work")
"""The user's home on a machine; only that machine sees it."""
SHARES = 2730
"""Of a machine, in units of which a session has 1024."""
PORTS = {"postgres": 5432, "ray": 6379, "jobs": 8265, "web": 3000}

_OPTIONS = (
    *("--cap-drop", "ALL", "--security-opt", "no-new-privileges"),
    *("--security-opt", "seccomp=unconfined", "--security-opt", "unmask=/proc/*"),
)
"""The documented options of a container that runs sandboxes (Containerfile)."""
_FIRST_PROCESS = "trap : TERM; while :; do sleep 86400 & wait; done"
"""Process 1 of a machine; the shell also collects orphans that end."""


def missing() -> str | None:
    """Return why no machines can start here; None if they can."""
    if reason := container_engine.missing():
        return reason
    if absent := [name for name in ("ip", "bwrap", "nsenter") if shutil.which(name) is None]:
        return f"no {' and no '.join(absent)} here"
    probe = f"etpi{os.getpid() % 100000}"
    if subprocess.run(["ip", "link", "add", probe, "type", "bridge"], capture_output=True).returncode != 0:
        return "this machine cannot create a network bridge"
    subprocess.run(["ip", "link", "del", probe], check=True)
    return None


@dataclass(frozen=True)
class Machine:
    """One machine. Commands run as its ordinary user, in its home, with the environment of `Machines.environment`."""

    name: str
    address: str
    network: str
    container: str
    engine: container_engine.PodmanService

    def run(self, *command: str | Path, check: bool = True, timeout: float = 300, **environment: str):
        """Run a command to its end and return it with its output as text."""
        done = subprocess.run(
            self._command(command, environment),
            capture_output=True, text=True, env=self.engine.environment, timeout=timeout,
        )  # fmt: skip
        if check and done.returncode != 0:
            raise AssertionError(f"{self.name}: {shlex.join(map(str, command))} returned {done.returncode}\n"
                                 f"{done.stdout[-6000:]}\n{done.stderr[-6000:]}")  # fmt: skip
        return done

    def start(self, *command: str | Path, log: Path, **environment: str) -> subprocess.Popen[bytes]:
        """Start a command that keeps running; its output goes to `log`, a file of the testing machine."""
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("ab") as output:
            return subprocess.Popen(
                self._command(command, environment),
                stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=self.engine.environment,
            )  # fmt: skip

    def _command(self, command: Sequence[str | Path], environment: dict[str, str]) -> list[str]:
        settings = [word for name, value in environment.items() for word in ("--env", f"{name}={value}")]
        return [*self.engine.command(), "exec", *settings, self.container, *map(str, command)]

    def processes(self) -> dict[int, str]:
        """Return the machine's processes but for its first and that one's `sleep`: process id on the testing machine
        to command line. Zombies are left out."""
        first = self._first()
        space = os.readlink(f"/proc/{first}/ns/pid")
        result: dict[int, str] = {}
        for entry in Path("/proc").iterdir():
            if not entry.name.isdigit() or int(entry.name) == first:
                continue
            try:
                nested = _namespaces_above(entry)
                if space not in nested:
                    continue
                words = (entry / "cmdline").read_bytes().split(b"\0")
            except OSError:
                continue
            if line := b" ".join(words).decode(errors="replace").strip():
                result[int(entry.name)] = line
        return {pid: line for pid, line in result.items() if line != "sleep 86400"}

    def kill(self, pattern: str) -> list[str]:
        """Send SIGKILL to every process whose command line contains `pattern`; return their command lines."""
        chosen = {pid: line for pid, line in self.processes().items() if pattern in line}
        for pid in chosen:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return list(chosen.values())

    def kill_everything(self) -> None:
        """SIGKILL every process at once, as when power fails: the machine's first process stays and nothing else."""
        while self.kill(""):
            time.sleep(0.05)

    def shared_is_writable(self, writable: bool) -> None:
        """Cover this machine's shared folder with a read-only view of it, or take that away again.

        Linux makes no mount read-only while a file on it is open for writing, so files that are open stay writable.
        """
        if writable:
            self._as_root("umount", "--lazy", SHARED)
        else:
            self._as_root("mount", "--bind", SHARED, SHARED)
            self._as_root("mount", "-o", "remount,bind,ro", SHARED)

    @contextmanager
    def own_flock(self, folder: Path) -> Iterator[None]:
        """Mount `folder`, which is shared, so that its files are still shared and flock is this machine's alone, as on
        NFS with local_lock and on Lustre with localflock: an overlay whose upper layer is the folder itself."""
        lower, work = Path("/tmp/lower"), folder.parent / f".overlay-{self.name}"
        options = f"lowerdir={lower},upperdir={folder},workdir={work}"
        self._as_root("mkdir", "-p", lower, work)
        self._as_root("mount", "-t", "overlay", "overlay", "-o", options, folder)
        try:
            yield
        finally:
            self._as_root("umount", "--lazy", folder)
            self._as_root("rm", "-rf", work)

    def connected(self, connected: bool) -> None:
        """Plug the machine's network cable in or out."""
        subprocess.run(["ip", "link", "set", self.network, "up" if connected else "down"], check=True)

    def count_as(self, shares: int) -> None:
        """Have the kernel give the machine so many shares of a busy CPU, and the folder of all machines as many for
        each; otherwise all machines together get what one session of the testing machine gets."""
        lines = Path(f"/proc/{self._first()}/cgroup").read_text().splitlines()
        for line in lines:
            _, controllers, path = line.split(":", 2)
            if "cpu" in controllers.split(","):
                for folder, number in ((path, shares), (os.path.dirname(path), 3 * shares)):
                    file = Path(f"/sys/fs/cgroup/cpu{folder}/cpu.shares")
                    if folder.strip("/") and file.exists():
                        file.write_text(str(number))

    def _as_root(self, *words: str | Path) -> None:
        """Run a command as root among this machine's mounts."""
        command = ["nsenter", "--mount", "--pid", f"--target={self._first()}", *map(str, words)]
        subprocess.run(command, check=True, capture_output=True)

    def _first(self) -> int:
        done = self.engine.podman("inspect", "--format", "{{.State.Pid}}", self.container)
        return int(done.stdout)


class Machines:
    """The machines of one test session, on a network of their own; the testing machine is its first address.

    Args:
        shares: name of each machine to the number of cores it may use.
    """

    def __init__(self, shares: dict[str, float]) -> None:
        self.engine = container_engine.PodmanService()
        self.folder = self.engine.folder
        self.shared = self.folder / "shared"
        self.shared.mkdir()
        self.shared.chmod(0o777)
        self._number, self.bridge = _new_bridge()
        self._namespaces: list[str] = []
        self.by_name: dict[str, Machine] = {}
        self._guard = self._guarded(list(shares))
        try:
            _ip("addr", "add", f"{self._address(1)}/24", "dev", self.bridge)
            _ip("link", "set", self.bridge, "up")
            for place, (name, cores) in enumerate(shares.items(), start=2):
                self.by_name[name] = self._machine(name, place, cores, list(shares))
        except BaseException:
            self.close()
            raise

    def __getitem__(self, name: str) -> Machine:
        return self.by_name[name]

    def close(self) -> None:
        """End every machine and remove network and files."""
        assert self._guard.stdin is not None
        self._guard.stdin.write(b"closed\n")
        self._guard.stdin.close()
        self.engine.close()
        while os.path.ismount(overlay := self.folder / "root" / "overlay"):  # each podman may have mounted it again
            subprocess.run(["umount", "--lazy", overlay], capture_output=True)
        shutil.rmtree(self.folder, ignore_errors=True)
        for namespace in self._namespaces:
            subprocess.run(["ip", "netns", "del", namespace], capture_output=True)
        subprocess.run(["ip", "link", "del", self.bridge], capture_output=True)

    def _guarded(self, names: list[str]) -> subprocess.Popen[bytes]:
        """Start a process that removes everything if this one dies before `close`; containers would stay."""
        podman = shlex.join([*self.engine.command(), "rm", "--all", "--force", "--time", "0"])
        networks = "".join(f"ip netns del {self.bridge}-{name}; " for name in names)
        unmount = f"while umount --recursive --lazy {self.folder}/root/overlay; do :; done"
        clean = f"{podman}; {networks} ip link del {self.bridge}; {unmount}; rm -rf {self.folder}"
        return subprocess.Popen(
            ["bash", "-c", f'read -r word; [ "$word" = closed ] || {{ {clean}; }}'],
            stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True,
            env=self.engine.environment,
        )  # fmt: skip

    def environment(self) -> dict[str, str]:
        """Return the environment of commands on every machine."""
        return {
            "HOME": str(HOME),
            "PATH": f"{Path(sys.prefix) / 'bin'}:/usr/lib/postgresql/15/bin:/usr/bin:/bin:/usr/sbin:/sbin",
            "LANG": "C.UTF-8",
            "OMP_WAIT_POLICY": "PASSIVE",
            "TOKENIZERS_PARALLELISM": "false",
            "RAY_USAGE_STATS_ENABLED": "0",
        }

    def _address(self, place: int) -> str:
        return f"10.213.{self._number}.{place}"

    def _machine(self, name: str, place: int, cores: float, names: list[str]) -> Machine:
        network = self._plug_in(name, place)
        system = self._system(name, names)
        mounts = [word for path in _programs() for word in ("--volume", f"{path}:{path}:ro")]
        settings = [word for item in self.environment().items() for word in ("--env", "=".join(item))]
        container = f"{self.bridge}-{name}"
        self.engine.podman(
            "run", "--detach", "--name", container, "--hostname", name, "--no-hosts",
            f"--network=ns:/run/netns/{container}", f"--cpus={cores}", "--shm-size=512m", "--user", "1000:1000",
            "--workdir", str(HOME), "--volume", f"{self.shared}:{SHARED}", "--volume", f"{self._home(name)}:{HOME}",
            *mounts, *settings, *_OPTIONS,
            "--rootfs", str(system), "/bin/bash", "-c", _FIRST_PROCESS,
        )  # fmt: skip
        machine = Machine(name, self._address(place), network, container, self.engine)
        machine.count_as(SHARES)
        return machine

    def _plug_in(self, name: str, place: int) -> str:
        """Create the machine's network namespace and its cable to the bridge; return the cable's end at the bridge."""
        namespace = f"{self.bridge}-{name}"
        outside, inside = f"etpi{self._number}v{place}", f"etpi{self._number}w{place}"
        _ip("netns", "add", namespace)
        self._namespaces.append(namespace)
        _ip("link", "add", outside, "type", "veth", "peer", "name", inside)
        _ip("link", "set", outside, "master", self.bridge, "up")
        _ip("link", "set", inside, "netns", namespace, "name", "eth0")
        for words in (
            ("link", "set", "lo", "up"),
            ("link", "set", "eth0", "up"),
            ("addr", "add", f"{self._address(place)}/24", "dev", "eth0"),
        ):
            _ip("-n", namespace, *words)
        return outside

    def _home(self, name: str) -> Path:
        home = self.folder / "homes" / name
        home.mkdir(parents=True)
        os.chown(home, 1000, 1000)
        return home

    def _system(self, name: str, names: list[str]) -> Path:
        """Create the root folder of a machine: links into /usr, and an /etc of its own."""
        system = self.folder / "systems" / name
        for folder in ("etc", "usr", "proc", "sys", "dev", "run", "var/tmp", "tmp"):
            (system / folder).mkdir(parents=True)
        for folder in ("bin", "sbin", "lib", "lib64"):
            (system / folder).symlink_to(f"usr/{folder}")
        for folder in ("tmp", "var/tmp", "run"):
            (system / folder).chmod(0o1777)
        etc = system / "etc"
        etc.joinpath("passwd").write_text(f"root:x:0:0::/root:/bin/bash\netpi:x:1000:1000::{HOME}:/bin/bash\n")
        etc.joinpath("group").write_text("root:x:0:\netpi:x:1000:\n")
        known = [f"{self._address(place)} {other}\n" for place, other in enumerate(names, start=2)]
        etc.joinpath("hosts").write_text("127.0.0.1 localhost\n" + "".join(known))
        etc.joinpath("nsswitch.conf").write_text("hosts: files\n")
        for path in ("/etc/alternatives", "/etc/ld.so.cache", "/etc/ld.so.conf", "/etc/ld.so.conf.d"):
            subprocess.run(["cp", "-a", path, etc], check=True)
        return system


def _new_bridge() -> tuple[int, str]:
    """Create a bridge under a name that no other machines have, of this process or another; return number and name."""
    for number in range(20, 255):
        bridge = f"etpi{number}br"
        creation = subprocess.run(["ip", "link", "add", bridge, "type", "bridge"], capture_output=True, text=True)
        if creation.returncode == 0:
            return number, bridge
        assert "File exists" in creation.stderr, creation.stderr
    raise AssertionError("no number is left for a bridge: ip link show type bridge")


def _programs() -> list[Path]:
    """Return the folders that a machine needs of this one: /usr, the interpreter, its packages and the checkout."""
    wanted = [Path("/usr"), Path(sys.base_prefix), Path(sys.prefix), ROOT]
    packages = [path for path in (*sys.path, *site.getsitepackages()) if path.endswith("-packages")]
    wanted += [Path(path) for path in packages if Path(path).is_dir()]
    chosen: list[Path] = []
    for path in sorted({path.resolve() for path in wanted}, key=lambda path: len(path.parts)):
        if not any(path.is_relative_to(other) for other in chosen):
            chosen.append(path)
    return chosen


def _namespaces_above(process: Path) -> set[str]:
    """Return the process space of a process and those of its parents: a sandbox has one of its own."""
    result, pid = set(), process.name
    while pid not in ("0", "1"):
        result.add(os.readlink(f"/proc/{pid}/ns/pid"))
        pid = next(line.split()[1] for line in Path(f"/proc/{pid}/status").read_text().splitlines() if "PPid" in line)
    return result


def _ip(*words: str) -> None:
    done = subprocess.run(["ip", *words], capture_output=True, text=True)
    assert done.returncode == 0, (words, done.stderr)
