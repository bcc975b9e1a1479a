"""The settings of a cluster: `cluster.toml`, the same file on every node, named by `ETPI_CLUSTER`.

lake = "/shared/lake"                            # the lake's folder, at the same path on every node
postgres = "postgresql://etpi@head:5432/etpi"    # no password: libpq reads PGPASSWORD or PGPASSFILE
ray = "head:6379"                                # where Ray's nodes meet
jobs = "http://head:8265"                        # where Ray takes jobs
accelerator = "GPU"                              # Ray's resource that every rank of a training takes one of; a custom
                                                 # resource can stand in for it on nodes without GPUs
working_dir = "/home/me/etpi"                    # optional: code that every run takes along to the nodes
local = "/var/tmp"                               # a folder on each node's own disk (this is the default)
servers = 4                                      # optional: how many vLLM servers one step may start
"""

from __future__ import annotations

import hashlib
import os
import tomllib
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

from pydantic import BaseModel, ConfigDict, PositiveInt, ValidationError, field_validator

from etpi_resources.backend import CLUSTER_VARIABLE, SETTINGS_FILE, BackendError

PACKAGES = ("dagster_postgres", "dagster_ray", "psycopg2", "ray")
"""Packages of the extra `cluster`."""


class Cluster(BaseModel):
    """The settings of a cluster. They change no results, so no hash contains them."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    lake: Path
    postgres: str
    ray: str
    jobs: str
    accelerator: str = "GPU"
    working_dir: Path | None = None
    local: Path = Path("/var/tmp")
    servers: PositiveInt | None = None

    @field_validator("lake", "working_dir", "local")
    @classmethod
    def _is_absolute(cls, folder: Path | None) -> Path | None:
        if folder is not None and not folder.is_absolute():
            raise ValueError("it must be an absolute path; the lake has the same on every node")
        return folder

    @field_validator("postgres")
    @classmethod
    def _holds_no_password(cls, url: str) -> str:
        parts = urlsplit(url)
        if parts.scheme not in ("postgresql", "postgres", "postgresql+psycopg2") or not parts.path.strip("/"):
            raise ValueError("write it as postgresql://USER@HOST:PORT/DATABASE")
        if parts.password is not None or "password" in parse_qs(parts.query):
            raise ValueError(
                "no password: the URL stands in Dagster's settings and in Ray's list of jobs. Name a file with the "
                "password in PGPASSFILE, or set PGPASSWORD, on every node"
            )
        return "postgresql://" + url.partition("://")[2]  # without SQLAlchemy's driver, which libpq does not know

    @field_validator("jobs")
    @classmethod
    def _is_http(cls, url: str) -> str:
        if urlsplit(url).scheme not in ("http", "https"):
            raise ValueError("it is the address of Ray's dashboard, as http://HOST:8265")
        return url.rstrip("/")

    @property
    def code(self) -> dict[str, str]:
        """Ray's option `working_dir` for a job that takes code along; empty where the nodes have it."""
        return {"working_dir": str(self.working_dir)} if self.working_dir else {}

    @property
    def storage_url(self) -> str:
        """The database's URL for SQLAlchemy, which takes another driver than psycopg2 for `postgresql://`."""
        return "postgresql+psycopg2://" + self.postgres.partition("://")[2]


def cluster() -> Cluster:
    """Return the settings in the file that `ETPI_CLUSTER` names.

    Raises:
        BackendError: it names none, a package is missing, or as `read`.
    """
    path = os.environ.get(CLUSTER_VARIABLE)
    if not path:
        raise BackendError(
            f"a command or the Dagster home of a cluster is used, and {CLUSTER_VARIABLE} is not set: export "
            f"{CLUSTER_VARIABLE}=/path/to/{SETTINGS_FILE} (`etpi cluster init` writes one), or name another folder in "
            "DAGSTER_HOME"
        )
    require_packages()
    return read(Path(path))


@cache
def require_packages() -> None:
    """Raise BackendError if a package of etpi-cluster is not installed."""
    if missing := [name for name in PACKAGES if find_spec(name) is None]:
        raise BackendError(f"a cluster needs the packages {', '.join(missing)}: pip install etpi-cluster")


def read(path: Path) -> Cluster:
    """Return the settings in a file.

    Raises:
        BackendError: the file is missing or wrong; the message names file and key.
    """
    try:
        return Cluster.model_validate(tomllib.loads(path.read_text(encoding="utf-8")))
    except FileNotFoundError:
        raise BackendError(
            f"{CLUSTER_VARIABLE} names {path}, which does not exist; `etpi cluster init` writes it"
        ) from None
    except (tomllib.TOMLDecodeError, OSError) as error:
        raise BackendError(f"{path}: {error}") from error
    except ValidationError as error:
        reasons = "; ".join(f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors())
        raise BackendError(f"{path}: {reasons}") from error


def local_folder(settings: Cluster, lake: Path) -> Path:
    """Return this user's folder for a lake on this node's own disk, created so that only the user can write to it.

    Raises:
        BackendError: another user made the folder, or it is a link.
    """
    users = settings.local / f"etpi-{os.geteuid()}"
    users.mkdir(mode=0o700, parents=True, exist_ok=True)
    if users.is_symlink() or users.stat().st_uid != os.geteuid():
        raise BackendError(
            f"{users} belongs to another user or is a link, so it may lead anywhere; remove it, or name another folder "
            "as `local` in the cluster's settings"
        )
    folder = users / hashlib.sha256(str(lake).encode()).hexdigest()[:12]
    folder.mkdir(exist_ok=True)
    return folder
