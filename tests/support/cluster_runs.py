"""Launch runs on the test machines as users do, by `dagster job launch` or the web page, and follow them."""

from __future__ import annotations

import json
import re
import time
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass

from tests.support.cluster_services import ClusterServices, until

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

    def by_command(self, job: str, partition: str) -> str:
        """Launch a job by `dagster job launch` on the head; return the run's id."""
        tags = json.dumps({"dagster/partition": partition})
        done = self.services.head.run(
            "dagster", "job", "launch", "-m", "etpi_assets.definitions", "-j", job, "--tags", tags,
            **self.services.environment(),
        )  # fmt: skip
        found = re.search(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}", done.stdout + done.stderr)
        return found[0] if found else self.latest()

    def start_web_page(self) -> None:
        head = self.services.head
        head.start(
            "dagster-webserver", "--host", head.address, "--port", "3000", "-m", "etpi_assets.definitions",
            log=self.services.log("web"), **self.services.environment(),
        )  # fmt: skip
        until(self._answers, 180, "the web page answers")

    def _answers(self) -> bool:
        try:
            return bool(self._ask("{ version }", {})["version"])
        except OSError:
            return False

    def by_web_page(self, job: str, partition: str) -> str:
        """Launch a job as the web page does; return the run's id."""
        selector = {
            "repositoryLocationName": "etpi_assets.definitions", "repositoryName": "__repository__", "jobName": job,
        }  # fmt: skip
        tags = [{"key": "dagster/partition", "value": partition}]
        params = {"selector": selector, "runConfigData": {}, "executionMetadata": {"tags": tags}}
        result = self._ask(_LAUNCH, {"params": params})["launchRun"]
        assert result["__typename"] == "LaunchRunSuccess", result
        return result["run"]["runId"]

    def _ask(self, query: str, variables: dict) -> dict:
        body = json.dumps({"query": query, "variables": variables}).encode()
        request = urllib.request.Request(
            f"http://{self.services.head.address}:3000/graphql", body, {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=120) as answer:
            result = json.load(answer)
        assert "errors" not in result, result
        return result["data"]

    def sql(self, query: str) -> list[list[str]]:
        """Ask Dagster's database; rows of text."""
        done = self.services.head.run(
            "psql", "-h", "head", "-U", "etpi", "etpi", "-AtF", "\t", "-c", query, **self.services.environment()
        )
        return [line.split("\t") for line in done.stdout.splitlines() if line]

    def latest(self) -> str:
        return self.sql("SELECT run_id FROM runs ORDER BY id DESC LIMIT 1")[0][0]

    def status(self, run: str) -> str:
        rows = self.sql(f"SELECT status FROM runs WHERE run_id = '{run}'")
        return rows[0][0] if rows else "NONE"

    def wait(self, run: str, seconds: float = 600) -> str:
        """Wait until a run has ended; return its status."""
        until(lambda: self.status(run) in ENDED, seconds, f"run {run} ends")
        return self.status(run)

    def succeed(self, run: str, seconds: float = 600) -> None:
        assert self.wait(run, seconds) == "SUCCESS", "\n".join(self.messages(run)[-40:])

    def messages(self, run: str, kinds: str = "%") -> list[str]:
        """Return the messages of a run's events, in order."""
        query = (
            "SELECT coalesce(dagster_event_type, 'LOG') || ' ' || coalesce(step_key, '') || ' ' || "
            "left(replace(coalesce(event::json->>'user_message', '') || ' ' || "
            "coalesce(event::json->'dagster_event'->>'message', ''), chr(10), ' '), 600) FROM event_logs "
            f"WHERE run_id = '{run}' AND coalesce(dagster_event_type, 'LOG') LIKE '{kinds}' ORDER BY id"
        )
        return [row[0] for row in self.sql(query)]

    def until_said(self, run: str, words: str, seconds: float = 240) -> None:
        """Wait until an event of the run contains `words`."""
        until(self._says(run, words), seconds, f"run {run} says {words!r}")

    def _says(self, run: str, words: str) -> Callable[[], bool]:
        def says() -> bool:
            lines = self.messages(run)
            assert not any("RUN_FAILURE" in line for line in lines), lines[-10:]
            return any(words in line for line in lines)

        return says


def seconds_of(call: Callable[[], object]) -> float:
    began = time.monotonic()
    call()
    return time.monotonic() - began
