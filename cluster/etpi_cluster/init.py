"""`etpi cluster init`: writes `cluster.toml` and, derived from it, Dagster's settings, into the lake's folder."""

from __future__ import annotations

import os
from pathlib import Path

import click

from etpi_cluster.instance import dagster_home, instance_yaml, require_postgres
from etpi_cluster.nodes import alive_nodes, described, job_client
from etpi_cluster.session import SANDBOXES
from etpi_cluster.settings import Cluster, read, require_packages
from etpi_resources.backend import CLUSTER_VARIABLE, SETTINGS_FILE, BackendError


def write_cluster(
    lake: str | None, postgres: str | None, ray: str | None, jobs: str | None, *, force: bool = False
) -> int:
    """Write both files and say what to do next; 0, or 1 if Postgres or Ray cannot be used yet.

    With `force` and without the other options, Dagster's settings are written again from the present `cluster.toml`.

    Raises:
        BackendError: a value is wrong, or files exist and `force` is not given; nothing was written.
    """
    require_packages()
    named = os.environ.get(CLUSTER_VARIABLE)
    again = bool(force and named and not (lake or postgres or ray or jobs))
    if again and named:
        file, settings = Path(named), read(Path(named))
    else:
        if not (lake and postgres and ray):
            raise click.UsageError(
                "it needs --lake FOLDER, --postgres postgresql://USER@HOST:PORT/DATABASE and --ray HOST:PORT"
            )
        file = Path(lake) / SETTINGS_FILE
        settings = _checked(_text(lake, postgres, ray, jobs or f"http://{ray.rpartition(':')[0]}:8265"), file)
    home = dagster_home(settings)
    if not force and (taken := [path for path in (file, home / "dagster.yaml") if path.exists()]):
        raise BackendError(f"{' and '.join(map(str, taken))} exist; --force replaces them. Nothing was written")
    home.mkdir(parents=True, exist_ok=True)
    if not again:  # ETPI_CLUSTER may name the file that is to be written
        file.write_text(_text(str(settings.lake), settings.postgres, settings.ray, settings.jobs), encoding="utf-8")
    (home / "dagster.yaml").write_text(instance_yaml(settings), encoding="utf-8")
    click.echo(f"{file}\n{home / 'dagster.yaml'}\n")
    click.echo(_next_steps(file, settings, home))
    return _answers(settings)


def _checked(text: str, file: Path) -> Cluster:
    """Return the settings in the text, checked as those of a file are."""
    file.parent.mkdir(parents=True, exist_ok=True)
    written = file.with_name(f".{SETTINGS_FILE}.new")
    written.write_text(text, encoding="utf-8")
    try:
        return read(written)
    finally:
        written.unlink()


def _text(lake: str, postgres: str, ray: str, jobs: str) -> str:
    return f"""\
# Written by `etpi cluster init`; docs/cluster.md describes it.
# After a change: etpi cluster init --force
lake = "{lake}"   # at the same path on every node
postgres = "{postgres}"   # no password here: PGPASSFILE or PGPASSWORD
ray = "{ray}"   # where Ray's nodes meet
jobs = "{jobs}"   # where Ray takes jobs
# accelerator = "GPU"   # Ray's resource that a step on an accelerator takes
# working_dir = "/path/to/code"   # code that every run takes along, where the nodes do not share an image
"""


def _next_steps(file: Path, settings: Cluster, home: Path) -> str:
    host, _, port = settings.ray.rpartition(":")
    return f"""\
Whoever reaches Ray's ports runs code as its user: have it ask for a token, in a file that only its user reads.
  ray get-auth-token --generate   # once; then copy ~/.ray/auth_token to every node
On every node, before its Ray starts:
  export {CLUSTER_VARIABLE}={file} PGPASSFILE=/path/to/.pgpass RAY_AUTH_MODE=token
  head:    ray start --head --port={port} --node-ip-address={host} --dashboard-host={host} --num-cpus=2
  others:  ray start --address={settings.ray} --resources='{{"{SANDBOXES}": 16}}'   # sandboxes at once
Where you launch runs, and for the web page:
  export {CLUSTER_VARIABLE}={file} PGPASSFILE=/path/to/.pgpass RAY_AUTH_MODE=token DAGSTER_HOME={home}
  etpi cluster doctor   # proves every node before anything is run
  etpi run EXPERIMENT, or for one job:
  dagster job launch -m etpi_assets.definitions -j JOB --tags '{{"dagster/partition": "NAME"}}'
"""


def _answers(settings: Cluster) -> int:
    """Print whether Postgres and Ray answer; return 1 if one does not."""
    failed = 0
    try:
        require_postgres(settings)
        click.echo(f"Postgres answers at {settings.postgres}")
    except BackendError as error:
        failed = 1
        click.echo(str(error), err=True)
    try:
        click.echo(f"Ray answers at {settings.jobs}; alive: {described(alive_nodes(job_client(settings)))}")
    except BackendError as error:
        failed = 1
        click.echo(str(error), err=True)
    return failed
