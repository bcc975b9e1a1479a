"""The command `etpi cluster`, found by the entry point `cluster` of the group `etpi.commands`."""

from __future__ import annotations

import click


@click.group()
def cluster() -> None:
    """Set several machines up that share one lake, and examine them (docs/cluster.md)."""


@cluster.command()
@click.option("--lake", metavar="FOLDER", help="the lake's folder, at the same path on every node")
@click.option("--postgres", metavar="URL", help="postgresql://USER@HOST:PORT/DATABASE, without a password")
@click.option("--ray", metavar="HOST:PORT", help="where Ray's nodes meet")
@click.option("--jobs", metavar="URL", help="Ray's dashboard (default: http://HOST:8265 of --ray)")
@click.option("--force", is_flag=True, help="replace files that exist")
def init(lake: str | None, postgres: str | None, ray: str | None, jobs: str | None, force: bool) -> int:
    """Write the settings of several machines, cluster.toml and Dagster's, into the lake's folder."""
    from etpi_cluster.init import write_cluster

    return write_cluster(lake, postgres, ray, jobs, force=force)


@cluster.command()
def doctor() -> int:
    """Prove, before anything is run, that every node and each pair of nodes has what steps need.

    The same code, the same lake, locks that exclude other nodes, sandboxes, accelerators, clocks, Postgres, Ray. Prints
    a remedy for each fault; exit status 1 if there is one.
    """
    from etpi_cluster.doctor import command

    return command.doctor()
