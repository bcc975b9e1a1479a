"""Run `etpi doctor` and print its table: for one machine here, for a cluster by a Ray job."""

from __future__ import annotations

import shlex
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Sequence
from pathlib import Path

from etpi.doctor.node import Examiner, NodeReport
from etpi.doctor.survey import MARK, Survey
from etpi.doctor.verdict import COLUMNS, Finding, findings, one_machine
from etpi_assets.runs.columns import aligned
from etpi_resources.cluster.environment import passed_on
from etpi_resources.cluster.nodes import job_client
from etpi_resources.cluster.settings import CLUSTER_VARIABLE, Cluster, ClusterError, cluster
from etpi_resources.lake.lake import Lake

SECONDS = 300.0
"""How long the job of a survey may take."""
ONE_MACHINE = ("lake", "locks", "sandboxes", "accelerators")
_TAKES = """
import sys
from pathlib import Path
from etpi.doctor.node import Examiner
print(Examiner(None, Path(sys.argv[1]), "other", {}, sys.argv[2]).can_take("flock"))
"""


def doctor_of_cluster() -> int:
    """Examine every node, print the table and the remedies, and return 1 if there is a fault."""
    settings = cluster()
    if settings is None:
        raise ClusterError(f"{CLUSTER_VARIABLE} names no cluster.toml; `etpi init --cluster` writes one")
    result = _surveyed(settings)
    problems = findings(result)
    print(table(result, problems))
    return _told(problems, f"{len(result.nodes) + len(result.failed)} nodes")


def doctor_of_machine() -> int:
    """Examine this machine, print a table and the remedies, and return 1 if there is a fault."""
    lake = Lake.open().root
    token = uuid.uuid4().hex[:12]
    examiner = Examiner(None, lake, socket.gethostname(), {}, token)
    report = NodeReport.model_validate(examiner.report())
    problems = list(one_machine(report))
    if report.lake_error:
        problems.append(
            Finding(report.name, "lake", report.lake_error, "name a folder that can be written in ETPI_DATA")
        )
    else:
        problems += _own_lock(examiner, lake, token, report)
        examiner.tidy()
    cells = [_cell(report, column, problems) for column in ONE_MACHINE]
    print(aligned([["machine", *ONE_MACHINE], [report.name, *cells]]))
    return _told(problems, "this machine")


def table(survey: Survey, problems: Sequence[Finding]) -> str:
    """Return the table of nodes."""
    rows = [["node", *COLUMNS]]
    rows += [[report.name, *(_cell(report, column, problems) for column in COLUMNS)] for report in survey.nodes]
    rows += [[name, "FAULT", *["?"] * (len(COLUMNS) - 1)] for name in survey.failed]
    return aligned(rows)


def _told(problems: Sequence[Finding], examined: str) -> int:
    """Print findings with their remedies; return the exit status."""
    faults = [finding for finding in problems if finding.fault]
    for finding in problems:
        label = "FAULT" if finding.fault else "note"
        print(f"\n{label}  {finding.node}, {finding.column}: {finding.what}\n       {_indented(finding.remedy)}")
    print(f"\n{examined}: {len(faults)} faults, {len(problems) - len(faults)} notes")
    return 1 if faults else 0


def _indented(text: str) -> str:
    return text.replace("\n", "\n       ")


def _cell(report: NodeReport, column: str, problems: Sequence[Finding]) -> str:
    of_cell = [finding for finding in problems if finding.node == report.name and finding.column == column]
    if any(finding.fault for finding in of_cell):
        return "FAULT"
    facts = {
        "code": report.code[:8],
        "lake": report.lake_kind.split(" ")[0] or "?",
        "sandboxes": f"{report.offers.get('etpi_sandbox', 0):g}" if report.offers else "ok",
        "accelerators": f"{report.offers.get('GPU', 0):g}" if report.offers else str(len(report.accelerators)),
        "clock": f"{report.clock_offset:+.2f} s",
        "postgres": str(report.postgres.version // 10_000) if report.postgres else "?",
        "ray": report.ray or "?",
    }
    return facts.get(column, "ok") + (" (note)" if of_cell else "")


def _surveyed(settings: Cluster) -> Survey:
    """Run the survey as a job on the cluster and read its last line."""
    client = job_client(settings)
    # The head's Ray may have been started by path, without this environment on its PATH.
    python = shlex.quote(sys.executable)
    entrypoint = f"if [ -x {python} ]; then exec {python} -m etpi.doctor.survey; fi; exec python -m etpi.doctor.survey"
    job = client.submit_job(entrypoint=entrypoint, runtime_env={"env_vars": passed_on(), **settings.code})
    deadline = time.monotonic() + SECONDS
    while (status := client.get_job_status(job)) in ("PENDING", "RUNNING"):
        if time.monotonic() > deadline:
            client.stop_job(job)
            raise ClusterError(f"the examination took more than {SECONDS:.0f} s; its log: ray job logs {job}")
        time.sleep(0.5)
    log = client.get_job_logs(job)
    lines = [line for line in log.splitlines() if line.startswith(MARK)]
    if not lines:
        info = client.get_job_info(job)
        raise ClusterError(f"the examination ended with {status} ({info.message}); the end of its log:\n{log[-3000:]}")
    return Survey.model_validate_json(lines[-1].removeprefix(MARK))


def _own_lock(examiner: Examiner, lake: Path, token: str, report: NodeReport) -> list[Finding]:
    """Check that a lock of this process excludes another process."""
    remedy = "the lake's file system ignores flock; name a folder on another one in ETPI_DATA"
    if error := examiner.hold("flock"):
        return [Finding(report.name, "locks", error, remedy)]
    try:
        answer = subprocess.run([sys.executable, "-c", _TAKES, lake, token], capture_output=True, text=True, timeout=60)
    finally:
        examiner.release()
    if answer.stdout.strip() == "False":
        return []
    what = f"a lock on {report.lake_kind} does not keep another process out {answer.stderr[-300:]}".strip()
    return [Finding(report.name, "locks", what, remedy)]
