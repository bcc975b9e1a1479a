"""Launch runs on the test machines as users do, by `dagster job launch` or the web page, and follow them."""

from __future__ import annotations

import json
import re
import urllib.error
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.support.cluster_services import ClusterServices
from tests.support.graph import write_spec
from tests.support.small_specs import write_small_specs
from tests.support.waiting import until

EXPERIMENT = "trained"
"""A small experiment with a training, on the rollout set `little_strong`."""
CASES = ("worker", "head", "postgres", "readonly", "publish", "twice", "shipped")
"""Cases that have a rollout set `many_CASE` each."""
_MANY = 'extends = "coop_tiny_shared_strong"\nsuite = "little"\ntasks = 24\nk = 4\n'
MANY = 96
"""Rollouts of each of these sets."""
_TRAINED = """
extends = "plan_first_tiny"
rollout_sets = ["little_strong"]
evaluate = "none"
[train]
epochs = 3.0
[gates]
teacher = {}
format_exposure = 0
role_balance = 0.0
plan_paths_in_task = 0.0
"""


def write_specs(folder: Path) -> None:
    """Write the specs of the tests of several machines."""
    write_small_specs(folder)
    write_spec(folder, "experiments", EXPERIMENT, _TRAINED)
    for name in CASES:
        write_spec(folder, "rollout_sets", f"many_{name}", _MANY)


ENDED = ("SUCCESS", "FAILURE", "CANCELED")
_LAUNCH = """
mutation($params: ExecutionParams!) {
  launchRun(executionParams: $params) {
    __typename
    ... on LaunchRunSuccess { run { runId } }
    ... on PythonError { message }
    ... on RunConfigValidationInvalid { errors { message } }
  }
}
"""


@dataclass
class Runs:
    """The runs of one cluster."""

    services: ClusterServices
    _connection: Any = None

    def by_command(self, job: str, partition: str) -> str:
        """Launch a job by `dagster job launch` on the head; return the run's id."""
        tags = json.dumps({"dagster/partition": partition})
        done = self.services.head.run(
            "dagster", "job", "launch", "-m", "etpi_assets.definitions", "-j", job, "--tags", tags,
            **self.services.environment(),
        )  # fmt: skip
        found = re.search(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}", done.stdout + done.stderr)
        return found[0] if found else self.latest()

    def await_web_page(self) -> None:
        until(self._answers, 240, "the web page answers")

    def _answers(self) -> bool:
        try:
            return bool(self._ask("{ version }", {})["version"])
        except OSError:
            return False

    def by_web_page(self, job: str, partition: str, *assets: str) -> str:
        """Launch a job, or some of its assets, as the web page does; return the run's id."""
        selector = {
            "repositoryLocationName": "etpi", "repositoryName": "__repository__", "jobName": job,
            **({"assetSelection": [{"path": [asset]} for asset in assets]} if assets else {}),
        }  # fmt: skip
        tags = [{"key": "dagster/partition", "value": partition}]
        params = {"selector": selector, "runConfigData": {}, "executionMetadata": {"tags": tags}}
        result = self._ask(_LAUNCH, {"params": params})["launchRun"]
        assert result["__typename"] == "LaunchRunSuccess", result
        return result["run"]["runId"]

    def _ask(self, query: str, variables: dict) -> dict:
        body = json.dumps({"query": query, "variables": variables}).encode()
        token = (self.services.machines.shared / "lake" / ".dagster_home" / "page_token").read_text()
        request = urllib.request.Request(
            f"http://{self.services.head.address}:3000/graphql",
            body,
            {"Content-Type": "application/json", "Authorization": f"Bearer {token}"},
        )
        try:
            with urllib.request.urlopen(request, timeout=120) as answer:
                result = json.load(answer)
        except urllib.error.HTTPError as error:
            raise AssertionError(f"the web page answers {error}: {error.read()[:2000]!r}") from None
        assert "errors" not in result, result
        return result["data"]

    def sql(self, query: str) -> list[tuple[Any, ...]]:
        """Ask Dagster's database, waiting while Postgres restarts."""
        import psycopg2

        return until(lambda: (self._rows(query),), every=0.3, ignored=psycopg2.OperationalError)[0]

    def _rows(self, query: str) -> list[tuple[Any, ...]]:
        import psycopg2

        if self._connection is None or self._connection.closed:
            services = self.services
            self._connection = psycopg2.connect(
                host=services.head.address, user="etpi", dbname="etpi", password=services.password, connect_timeout=5
            )
            self._connection.autocommit = True
        with self._connection.cursor() as cursor:
            cursor.execute(query)
            return cursor.fetchall()

    def latest(self) -> str:
        return self.sql("SELECT run_id FROM runs ORDER BY id DESC LIMIT 1")[0][0]

    def status(self, run: str) -> str:
        rows = self.sql(f"SELECT status FROM runs WHERE run_id = '{run}'")
        return rows[0][0] if rows else "NONE"

    def has_ended(self, run: str) -> bool:
        return self.status(run) in ENDED

    def wait(self, run: str, seconds: float = 600) -> str:
        """Wait until a run has ended; return its status."""
        until(lambda: self.has_ended(run), seconds, f"run {run} ends")
        return self.status(run)

    def succeed(self, run: str, seconds: float = 600) -> None:
        assert self.wait(run, seconds) == "SUCCESS", "\n".join([*self.messages(run)[-40:], *self.failures(run)])

    def messages(self, run: str, kinds: str = "%") -> list[str]:
        """Return the messages of a run's events, in order."""
        query = (
            "SELECT coalesce(dagster_event_type, 'LOG') || ' ' || coalesce(step_key, '') || ' ' || "
            "left(replace(coalesce(event::json->>'user_message', '') || ' ' || "
            "coalesce(event::json->'dagster_event'->>'message', ''), chr(10), ' '), 600) FROM event_logs "
            f"WHERE run_id = '{run}' AND coalesce(dagster_event_type, 'LOG') LIKE '{kinds}' ORDER BY id"
        )
        return [row[0] for row in self.sql(query)]

    def failures(self, run: str) -> list[str]:
        """Return the errors of a run's failed steps, whole, with their causes."""
        query = (
            "SELECT step_key, event::json->'dagster_event'->'event_specific_data'->>'error' "
            f"FROM event_logs WHERE run_id = '{run}' AND dagster_event_type = 'STEP_FAILURE' ORDER BY id"
        )
        return [f"{step}: {message}" for step, message in self.sql(query)]

    def nodes_of(self, run: str) -> dict[str, list[str]]:
        """Return the nodes that each step of a run was on, in order."""
        query = (
            "SELECT step_key, event::json->'dagster_event'->>'message' FROM event_logs "
            f"WHERE run_id = '{run}' AND event::json->'dagster_event'->>'message' LIKE 'on node %' ORDER BY id"
        )
        names = {machine.address: name for name, machine in self.services.machines.by_name.items()}
        result: dict[str, list[str]] = {}
        for step, message in self.sql(query):
            result.setdefault(step, []).append(names[message.removeprefix("on node ")])
        return result
