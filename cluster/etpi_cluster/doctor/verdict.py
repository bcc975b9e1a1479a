"""Judge what machines report: each fault with its remedy, and notes, which stop nothing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping

from etpi.doctor.command import Finding, little_space
from etpi_cluster.doctor.node import NodeReport
from etpi_cluster.doctor.survey import PairLock, Survey
from etpi_cluster.session import SANDBOXES

CLOCK_SECONDS = 2.0
"""Versions, journals and progress carry the times of the node that wrote them; a larger difference misleads."""
POSTGRES_OLDEST, POSTGRES_TESTED = 12, 15
COLUMNS = ("code", "lake", "locks", "sandboxes", "accelerators", "clock", "postgres", "ray")
_LOCAL_FLOCK = ("local_lock=flock", "local_lock=all", "nolock", "localflock")
_SERVERS = {
    "Postgres": ("postgres",),
    "the web page": ("dagster-webserver", "dagster_webserver", "bin/etpi"),
    "Ray": ("raylet", "gcs_server", "ray::", "dashboard/", "runtime_env", "_private/"),
}
"""Owners of programs that listen on all interfaces, by parts of the program's name."""
_LISTENING = {
    "Postgres": "start it with listen_addresses set to its address in the private network",
    "the web page": "serve it by `etpi ui --host ADDRESS`, which asks for a token; dagster-webserver asks for none",
    "Ray": (
        "Ray has no option for these ports. Keep a network of its own for the nodes, or have a firewall admit only "
        "them; a token (RAY_AUTH_MODE=token) keeps strangers from running code"
    ),
}


def findings(survey: Survey) -> list[Finding]:
    """Return the faults and notes of a cluster, in order of nodes and columns."""
    result: list[Finding] = []
    for name, reason in survey.failed.items():
        remedy = "install the same code there, as on the others, and start its Ray again"
        result.append(Finding(name, "code", f"gave no report ({reason})", remedy))
    names = [report.name for report in survey.nodes]
    writers = [report.name for report in survey.nodes if report.lake_error is None]
    most = _most(report.code for report in survey.nodes)
    expected = survey.code if any(report.code == survey.code for report in survey.nodes) else most
    versions = {field: _most(getattr(report, field) or "" for report in survey.nodes) for field in ("ray", "python")}
    servers = _most(report.postgres.server for report in survey.nodes if report.postgres)
    for report in survey.nodes:
        result += _code(report, expected)
        result += _lake(report, writers)
        result += _offers(report)
        result += little_space(report)
        result += _clock(report)
        result += _postgres(report, servers)
        result += _ray(report, versions)
    result += _locks(survey)
    if not any(report.offers.get(SANDBOXES) for report in survey.nodes):
        remedy = f"""start Ray on a node with --resources='{{"{SANDBOXES}": 8}}' (docs/cluster.md says how many)"""
        result.append(Finding("all", "sandboxes", f"no node offers {SANDBOXES}, so no rollout can run", remedy))
    if not survey.token:
        remedy = "RAY_AUTH_MODE=token and one token wherever Ray is started (docs/cluster.md, Security)"
        what = "Ray asks for no token: whoever reaches its ports runs any code as its user"
        result.append(Finding("all", "ray", what, remedy, fault=False))
    result += _listeners(survey)
    order = {name: place for place, name in enumerate([*names, *survey.failed, "all"])}
    return sorted(result, key=lambda finding: (order.get(finding.node, 0), COLUMNS.index(finding.column)))


def _offers(report: NodeReport) -> Iterator[Finding]:
    """Yield nodes that offer resources they lack, or have resources they do not offer."""
    offered = report.offers
    if report.sandbox_error and offered.get(SANDBOXES):
        what = f"it offers {offered[SANDBOXES]:g} {SANDBOXES}, and none starts"
        yield Finding(report.name, "sandboxes", what, report.sandbox_error)
    elif report.sandbox_error:
        yield Finding(report.name, "sandboxes", "none starts; it offers none", report.sandbox_error, fault=False)
    gpus = offered.get("GPU", 0.0)
    if gpus > len(report.accelerators):
        what = f"it offers GPU {gpus:g} and has {len(report.accelerators)} (/dev/nvidia*, /dev/kfd)"
        remedy = "start its Ray with --num-gpus equal to what it has, or give the container its devices"
        yield Finding(report.name, "accelerators", what, remedy)
    elif report.accelerators and gpus < len(report.accelerators):
        what = f"it has {len(report.accelerators)} accelerators and offers GPU {gpus:g}"
        yield Finding(report.name, "accelerators", what, "start its Ray with --num-gpus", fault=False)
    if report.local_error:
        what = f"the folder for the node's own files cannot be written: {report.local_error}"
        yield Finding(report.name, "lake", what, "name another with `local` in cluster.toml")


def _code(report: NodeReport, expected: str) -> Iterator[Finding]:
    if report.code != expected:
        what = f"its code is {report.code}, the others' is {expected}"
        remedy = "install the same etpi there (one image, or one checkout), then start its Ray again"
        yield Finding(report.name, "code", what, remedy)


def _lake(report: NodeReport, writers: list[str]) -> Iterator[Finding]:
    if report.lake_error:
        remedy = "mount the shared folder there, writable for Ray's user, at the path that `lake` in cluster.toml names"
        yield Finding(report.name, "lake", report.lake_error, remedy)
        return
    if report.name not in report.sees:
        yield Finding(report.name, "lake", "a file that it wrote is not there", "see the file system's log")
    for other in writers:
        if other not in report.sees and other != report.name:
            what = f"it does not see the file that {other} wrote: it is another folder, or its cache is stale"
            yield Finding(report.name, "lake", what, "mount one folder on both nodes, with close-to-open consistency")


def _clock(report: NodeReport) -> Iterator[Finding]:
    if abs(report.clock_offset) - report.clock_within > CLOCK_SECONDS:
        what = f"its clock is {report.clock_offset:+.1f} s from the head's"
        yield Finding(report.name, "clock", what, "synchronise clocks: timedatectl set-ntp true, or chrony")


def _postgres(report: NodeReport, server: str) -> Iterator[Finding]:
    if report.postgres_error:
        remedy = (
            "`postgres` in cluster.toml must name a server that this node reaches; its Ray needs PGPASSWORD or "
            "PGPASSFILE in the environment, and pg_hba.conf a line for this node's address"
        )
        yield Finding(report.name, "postgres", report.postgres_error, remedy)
    elif report.postgres:
        major = report.postgres.version // 10_000
        if major < POSTGRES_OLDEST:
            what = f"Postgres {major}; etpi is tested with {POSTGRES_TESTED}"
            yield Finding(report.name, "postgres", what, f"use Postgres {POSTGRES_OLDEST} or newer")
        if report.postgres.server != server:
            what = "it reaches another Postgres, or another database, than the other nodes"
            yield Finding(
                report.name, "postgres", what, "let one name lead to one server on every node (/etc/hosts, DNS)"
            )
        if report.postgres.superuser:
            remedy = "CREATE ROLE etpi LOGIN; CREATE DATABASE etpi OWNER etpi; and name that role in cluster.toml"
            yield Finding(report.name, "postgres", "its role is a superuser", remedy, fault=False)


def _ray(report: NodeReport, versions: Mapping[str, str]) -> Iterator[Finding]:
    for field, expected in versions.items():
        installed = getattr(report, field) or "none"
        if installed != expected:
            what = f"{field.title()} {installed}, the others {expected}"
            yield Finding(report.name, "ray", what, "install the same versions on every node (constraints.txt)")


def _listeners(survey: Survey) -> Iterator[Finding]:
    """Yield a note for each kind of server that is open on all interfaces of a node."""
    where: dict[str, dict[str, list[str]]] = {}
    for report in survey.nodes:
        for program, ports in report.listens.items():
            known = next((kind for kind, words in _SERVERS.items() if any(word in program for word in words)), "")
            if known:
                where.setdefault(known, {}).setdefault(report.name, []).append(
                    f"{program} {', '.join(map(str, ports))}"
                )
    for server, programs_of in where.items():
        places = "; ".join(f"{name}: {', '.join(programs)}" for name, programs in programs_of.items())
        column = "postgres" if server == "Postgres" else "ray"
        yield Finding("all", column, f"{server} listens on all interfaces ({places})", _LISTENING[server], fault=False)


def _locks(survey: Survey) -> Iterator[Finding]:
    kinds = {report.name: report.lake_kind for report in survey.nodes}
    for pair in survey.locks:
        if pair.kind == "lake":
            yield from _lake_lock(pair)
    silent = [pair for pair in survey.locks if pair.kind == "flock" and pair.excluded is not True]
    for holder in dict.fromkeys(pair.holder for pair in silent):
        neighbours = ", ".join(pair.other for pair in silent if pair.holder == holder)
        what = f"flock on the lake's folder ({kinds[holder]}) does not keep {neighbours} out, without an error"
        remedy = "the locks of a cluster are Postgres', so this stops nothing; run no etpi without ETPI_CLUSTER there"
        yield Finding(holder, "locks", what, remedy, fault=False)
    for report in survey.nodes:
        if report.name not in {pair.holder for pair in silent} and any(o in report.lake_kind for o in _LOCAL_FLOCK):
            what = f"the lake is mounted {report.lake_kind}: flock is this node's alone"
            yield Finding(report.name, "locks", what, "run no etpi without ETPI_CLUSTER there", fault=False)


def _lake_lock(pair: PairLock) -> Iterator[Finding]:
    if pair.excluded is False:
        what = f"a lock that it holds does not keep {pair.other} out: both could publish the same partition"
        remedy = "ETPI_CLUSTER must name one cluster.toml on both nodes, and that one Postgres without a pooler"
        yield Finding(pair.holder, "locks", what, remedy)
    elif isinstance(pair.excluded, str):
        yield Finding(pair.holder, "locks", f"no lock: {pair.excluded}", "see postgres")
    elif pair.freed is not True:
        what = f"{pair.other} cannot take a lock that this node has released ({pair.freed})"
        yield Finding(pair.holder, "locks", what, "see postgres")


def _most(values) -> str:
    """Return the most frequent value."""
    counted = Counter(values).most_common(1)
    return counted[0][0] if counted else ""
