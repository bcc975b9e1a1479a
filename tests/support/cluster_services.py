"""The services of a cluster on test machines: Postgres and Ray's head on `head`, a Ray node on each worker.

Ray asks for a token, Postgres for a password.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import yaml

from tests.support.machines import HOME, PORTS, ROOT, SHARED, Machine, Machines
from tests.support.waiting import until

CORES = {"head": 2.0, "worker1": 1.0, "worker2": 1.0}
"""Cores that each machine may use."""
CPUS = {"head": 0, "worker1": 1, "worker2": 1}
"""CPUs that each offers to Ray: steps run on the workers, runs on the head."""
RESOURCES: dict[str, dict[str, float]] = {
    "head": {},
    "worker1": {"etpi_sandbox": 4},
    "worker2": {"etpi_sandbox": 4, "accelerator": 1},
}
"""What each machine offers to Ray besides a CPU; `accelerator` stands in for a GPU."""
STORE = 100_000_000
"""Bytes of Ray's object store on a machine."""
DATABASE, PASSWORD_FILE = HOME / "postgres", HOME / "password"
LAKE = SHARED / "lake"
_OF_RUNS = ("execute_step", "api execute_run", "api resume_run", "bwrap", "trainers", "ray::")
"""Words in the command lines of a run's processes."""
_RAYS = ("ray::IDLE", "ray::DashboardAgent", "ray::RuntimeEnvAgent")
"""Ray's own."""


@dataclass
class ClusterServices:
    """Start and stop what runs on the machines of a cluster."""

    machines: Machines
    password: str = field(default_factory=lambda: secrets.token_hex(16))
    token: str = field(default_factory=lambda: secrets.token_hex(32))

    @property
    def head(self) -> Machine:
        return self.machines["head"]

    @property
    def workers(self) -> list[Machine]:
        return [machine for name, machine in self.machines.by_name.items() if name != "head"]

    def environment(self) -> dict[str, str]:
        """Return the environment of a user's commands and of Ray's nodes."""
        return {
            "ETPI_CLUSTER": str(LAKE / "cluster.toml"),
            "DAGSTER_HOME": str(LAKE / ".dagster_home"),
            "ETPI_SPECS": str(SHARED / "specs"),
            "PGPASSWORD": self.password,
            "RAY_AUTH_MODE": "token",
            "RAY_raylet_start_wait_time_s": "240",  # a busy machine
            "RAY_health_check_period_ms": "1000",  # a dead node is noticed after 5 s instead of 15
            "ETPI_STATE_SECONDS": "0",  # a killed training continues from its last step
            "RAY_AUTH_TOKEN": self.token,
        }

    def create_database(self) -> None:
        """Create the database cluster, with the role `etpi`, which owns the database `etpi` and nothing else."""
        head = self.head
        head.run("bash", "-c", f"umask 077; echo {self.password} > {PASSWORD_FILE}")
        options = ("-U", "postgres", "--auth=scram-sha-256", f"--pwfile={PASSWORD_FILE}", "-E", "UTF8")
        head.run("initdb", "-D", DATABASE, *options)
        network = f"{head.address.rsplit('.', 1)[0]}.0/24"
        head.run("bash", "-c", f"echo host etpi etpi {network} scram-sha-256 >> {DATABASE}/pg_hba.conf")
        self.start_postgres()
        for line in (f"CREATE ROLE etpi LOGIN PASSWORD '{self.password}'", "CREATE DATABASE etpi OWNER etpi"):
            head.run("psql", "-h", "/tmp", "-U", "postgres", "-qc", line, PGPASSWORD=self.password)

    def start_postgres(self) -> None:
        head = self.head
        head.start(
            "postgres", "-D", DATABASE, "-c", f"listen_addresses={head.address}", "-c", "unix_socket_directories=/tmp",
            log=self.log("postgres"),
        )  # fmt: skip
        until(lambda: head.run("pg_isready", "-h", head.address, check=False).returncode == 0, 60, "Postgres is ready")

    def stop_postgres(self) -> None:
        """End Postgres without a word to its clients, as a crash does."""
        self.head.kill(f"postgres -D {DATABASE}")
        until(lambda: not self.running(self.head, "postgres: "), 20, "Postgres has ended")

    def start_ray(self, *machines: Machine, offers: Sequence[str] = (), **environment: str) -> None:
        """Start Ray on the machines, by default on all, the head first, and wait until each has joined.

        Args:
            offers: further arguments of `ray start`.
            environment: variables of its environment beside those of `environment()`.
        """
        chosen = machines or tuple(self.machines.by_name.values())
        for group in ([m for m in chosen if m.name == "head"], [m for m in chosen if m.name != "head"]):
            logs = {machine.name: self._start_node(machine, offers, environment) for machine in group}
            for name, log in logs.items():
                until(lambda log=log: b"Ray runtime started" in log.read_bytes(), 300, f"Ray runs on {name}: {log}")

    def _start_node(self, machine: Machine, offers: Sequence[str], environment: dict[str, str]) -> Path:
        command = compose_command("head" if machine.name == "head" else "worker")
        log = self.log(machine.name)
        log.unlink(missing_ok=True)
        own = [
            f"--resources='{json.dumps(RESOURCES.get(machine.name, {}))}'",
            f"--object-store-memory={STORE}",
            *offers,
        ]
        variables = {**self.environment(), "CPUS": str(CPUS[machine.name]), **environment}
        machine.start("bash", "-c", " ".join([command, *own]), log=log, **variables)
        return log

    def start(self) -> None:
        """Start Postgres and Ray."""
        self.create_database()
        self.write_settings()
        self.start_ray()

    def start_pages(self) -> None:
        """Start Dagster's web page with its daemon, which resumes runs; they are not waited for."""
        line = ("etpi", "ui", "--host", self.head.address, "--port", str(PORTS["web"]))
        self.head.start(*line, log=self.log("web"), **self.environment())

    def await_no_orphans(self) -> None:
        """Wait until nothing of a run is left on any machine; AssertionError if something is after a minute."""
        until(lambda: not self._left(), 60, self._left, every=0.3)

    def _left(self) -> list[str]:
        return [
            f"{machine.name}: {line}"
            for machine in self.machines.by_name.values()
            for line in machine.processes().values()
            if any(word in line for word in _OF_RUNS) and not any(word in line for word in _RAYS)
        ]

    def log(self, name: str) -> Path:
        return self.machines.folder / "logs" / name

    def write_settings(self) -> None:
        """Write cluster.toml and Dagster's settings as a user does. Ray need not run yet."""
        self.head.run(
            "etpi", "cluster", "init", "--lake", LAKE, "--postgres", "postgresql://etpi@head:5432/etpi",
            "--ray", "head:6379", check=False, **self.environment(),
        )  # fmt: skip
        assert (self.machines.shared / "lake" / "cluster.toml").exists()

    @staticmethod
    def running(machine: Machine, pattern: str) -> list[str]:
        return [line for line in machine.processes().values() if pattern in line]


def compose_command(service: str) -> str:
    """Return the command of a service in deploy/compose.yaml, as its shell gets it."""
    services = yaml.safe_load((ROOT / "deploy" / "compose.yaml").read_text())["services"]
    return services[service]["command"][0].replace("$$", "$")
