"""`etpi cluster doctor` on three machines: none of its findings on sound ones, and every planted fault."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.checkouts import copy_code
from tests.support.machines import HOME, SHARED

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]  # a fixture's time counts too


def _doctor(services):
    return services.head.run("etpi", "cluster", "doctor", check=False, **services.environment())


def _found(printed: str, label: str) -> set[tuple[str, str]]:
    """Return (machine, column) of each finding that is printed with `label`."""
    lines = [line.removeprefix(label).strip() for line in printed.splitlines() if line.startswith(label)]
    return {(line.split()[0].rstrip(","), line.split(": ")[0].split(", ")[-1]) for line in lines}


def test_sound_machines_have_no_faults(services):
    done = _doctor(services)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "3 nodes: 0 faults, 1 notes" in done.stdout
    assert _found(done.stdout, "note") == {("all", "ray")}, "Ray listens on all interfaces"
    assert "gcs_server 6379" in done.stdout and "firewall" in done.stdout
    assert not (services.machines.shared / "lake" / ".doctor").exists()


def test_flock_that_is_each_nodes_own_is_found(services):
    worker = services.workers[0]
    with worker.own_flock(SHARED / "lake"):
        done = _doctor(services)
    assert done.returncode == 0, "the locks of a cluster are Postgres'"
    assert _found(done.stdout, "note") == {
        ("all", "ray"), ("head", "locks"), ("worker1", "locks"), ("worker2", "locks"),
    }  # fmt: skip
    assert "overlay" in done.stdout


@pytest.fixture
def planted(services, tmp_path):
    """Restart Ray on worker2 with other code, no bubblewrap, a GPU that does not exist, a wrong password, and its view
    of the shared folder read-only; afterwards start it again as it was."""
    worker = services.workers[1]
    home = services.machines.folder / "homes" / worker.name
    copy_code(home / "code")
    with (home / "code" / "etpi_resources" / "hashes.py").open("a") as file:
        file.write("# another line\n")
    (home / "programs").mkdir()
    for program in Path("/usr/bin").iterdir():
        if program.name != "bwrap":
            (home / "programs" / program.name).symlink_to(program)
    worker.kill_everything()
    path = services.machines.environment()["PATH"].split(":")[0]
    services.start_ray(
        worker, offers=["--num-gpus=1"],
        PATH=f"{path}:{HOME}/programs", PYTHONPATH=f"{HOME}/code", PGPASSWORD="wrong",
    )  # fmt: skip
    worker.shared_is_writable(False)
    yield
    worker.shared_is_writable(True)
    worker.kill_everything()
    services.start_ray(worker)


def test_planted_faults_are_found_on_their_node_with_a_remedy(services, planted):
    done = _doctor(services)
    assert done.returncode == 1
    columns = ("code", "lake", "sandboxes", "accelerators", "postgres")
    assert _found(done.stdout, "FAULT") >= {("worker2", column) for column in columns}, done.stdout
    assert {node for node, _ in _found(done.stdout, "FAULT")} == {"worker2"}
    for remedy in (
        "install the same etpi",
        "mount the shared folder",
        "apt-get install bubblewrap",
        "--num-gpus",
        "PGPASSFILE",
    ):
        assert remedy in done.stdout, remedy


def test_a_stopped_postgres_is_found_on_every_node(services):
    services.stop_postgres()
    try:
        done = _doctor(services)
    finally:
        services.start_postgres()
    assert done.returncode == 1
    assert {(name, "postgres") for name in ("head", "worker1", "worker2")} <= _found(done.stdout, "FAULT")
    assert services.password not in done.stdout


def test_no_ray_is_one_clear_message(services):
    done = services.head.run("etpi", "cluster", "doctor", check=False, **{
        **services.environment(), "RAY_AUTH_TOKEN": "0" * 64,
    })  # fmt: skip
    assert done.returncode == 1 and "RAY_AUTH_TOKEN" in done.stderr and "Traceback" not in done.stderr
