"""Run `etpi cluster doctor`, which examines the nodes by a Ray job, and print its table."""

from __future__ import annotations

import shlex
import sys
import time
from collections.abc import Sequence

from etpi.doctor import command as printed
from etpi.doctor.command import Finding
from etpi_cluster.doctor.node import NodeReport
from etpi_cluster.doctor.survey import MARK, Survey
from etpi_cluster.doctor.verdict import COLUMNS, findings
from etpi_cluster.environment import passed_on
from etpi_cluster.nodes import job_client
from etpi_cluster.session import SANDBOXES
from etpi_cluster.settings import Cluster, cluster
from etpi_resources.backend import BackendError

SURVEY = "etpi_cluster.doctor.survey"
SECONDS = 300.0
"""Time limit of the job of a survey."""


def doctor() -> int:
    """Examine every node, print the table and the remedies, and return 1 if there is a fault."""
    survey = _surveyed(cluster())
    problems = findings(survey)
    print(table(survey, problems))
    return printed.show(problems, f"{len(survey.nodes) + len(survey.failed)} nodes")


def table(survey: Survey, problems: Sequence[Finding]) -> str:
    """Return the table of nodes."""
    facts = {report.name: _facts(report) for report in survey.nodes}
    facts |= {name: dict.fromkeys(COLUMNS, "?") for name in survey.failed}
    return printed.table("node", COLUMNS, facts, problems)


def _facts(report: NodeReport) -> dict[str, str]:
    return {
        "code": report.code[:8],
        "lake": report.lake_kind.split(" ")[0] or "?",
        "sandboxes": f"{report.offers.get(SANDBOXES, 0):g}",
        "accelerators": f"{report.offers.get('GPU', 0):g}",
        "clock": f"{report.clock_offset:+.2f} s",
        "postgres": str(report.postgres.version // 10_000) if report.postgres else "?",
        "ray": report.ray or "?",
    }


def _surveyed(settings: Cluster) -> Survey:
    """Run the survey as a job on the cluster and read its last line."""
    client = job_client(settings)
    # The head's Ray may have been started by path, without this environment on its PATH.
    python = shlex.quote(sys.executable)
    entrypoint = f"if [ -x {python} ]; then exec {python} -m {SURVEY}; fi; exec python -m {SURVEY}"
    job = client.submit_job(entrypoint=entrypoint, runtime_env={"env_vars": passed_on(), **settings.code})
    deadline = time.monotonic() + SECONDS
    while (status := client.get_job_status(job)) in ("PENDING", "RUNNING"):
        if time.monotonic() > deadline:
            client.stop_job(job)
            raise BackendError(f"the examination took more than {SECONDS:.0f} s; its log: ray job logs {job}")
        time.sleep(0.5)
    log = client.get_job_logs(job)
    lines = [line for line in log.splitlines() if line.startswith(MARK)]
    if not lines:
        info = client.get_job_info(job)
        raise BackendError(f"the examination ended with {status} ({info.message}); the end of its log:\n{log[-3000:]}")
    return Survey.model_validate_json(lines[-1].removeprefix(MARK))
