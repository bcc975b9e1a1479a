"""Postgres and Ray on the test machines: who may connect, and that work reaches every node."""

from __future__ import annotations

import json

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]  # a fixture's time counts too

_TASKS = """
import json, socket, time, ray
ray.init("head:6379", log_to_driver=False)
@ray.remote(num_cpus=0, resources={"etpi_sandbox": 4})
def where():
    time.sleep(0.5)
    return socket.gethostname()
@ray.remote(num_cpus=0, resources={"accelerator": 1})
def accelerated():
    return socket.gethostname()
print(json.dumps([ray.get([where.remote() for _ in range(4)]), ray.get([accelerated.remote() for _ in range(2)])]))
"""


def test_tasks_run_on_every_node_and_only_where_their_resource_is(services):
    done = services.head.run("python", "-c", _TASKS, **services.environment())
    spread, accelerated = json.loads(done.stdout.splitlines()[-1])
    assert set(spread) == {"worker1", "worker2"}
    assert set(accelerated) == {"worker2"}


def test_a_job_without_the_token_is_refused(services):
    strict = {**services.environment(), "RAY_AUTH_TOKEN": "0" * 64}
    submit = ("ray", "job", "submit", "--address=http://head:8265", "--", "touch", "/shared/ran")
    refused = services.workers[0].run(*submit, check=False, **strict)
    assert refused.returncode != 0 and "Authentication" in refused.stderr
    refused = services.workers[0].run("python", "-c", _TASKS, check=False, **strict)
    assert refused.returncode != 0
    assert not (services.machines.shared / "ran").exists()


def test_postgres_asks_for_the_password_and_the_role_is_no_superuser(services):
    ask = ("psql", "-h", "head", "-U", "etpi", "etpi", "-Atc")
    query = "SELECT rolsuper OR rolcreaterole OR rolcreatedb FROM pg_roles WHERE rolname = current_user"
    worker = services.workers[0]
    assert worker.run(*ask, query, **services.environment()).stdout.strip() == "f"
    assert worker.run(*ask, query, check=False, PGPASSWORD="wrong").returncode != 0
    for role in ("postgres", "etpi"):
        other = worker.run(
            "psql", "-h", "head", "-U", role, "postgres", "-c", "SELECT 1", check=False, **services.environment()
        )
        assert other.returncode != 0
