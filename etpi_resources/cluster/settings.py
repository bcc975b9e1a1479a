"""What a user writes of a cluster: `cluster.toml`, the same file on every node, named by `ETPI_CLUSTER`.

lake = "/shared/lake"                            # the lake's folder, at the same path on every node
postgres = "postgresql://etpi@head:5432/etpi"    # no password: libpq reads PGPASSWORD or PGPASSFILE
ray = "head:6379"                                # where Ray's nodes meet
jobs = "http://head:8265"                        # where Ray takes jobs
servers = 4                                      # optional: how many vLLM servers one step may start
"""

from __future__ import annotations

import os
import tomllib
from pathlib import Path

from pydantic import BaseModel, ConfigDict, PositiveInt, ValidationError, field_validator

CLUSTER_VARIABLE = "ETPI_CLUSTER"
"""Environment variable that names `cluster.toml`; unset: one machine, without Ray and Postgres."""


class ClusterError(RuntimeError):
    """The cluster cannot be used; the message says what is wrong and what to do."""


class Cluster(BaseModel):
    """The settings of a cluster. They change no results, so no hash contains them."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    lake: Path
    postgres: str
    ray: str
    jobs: str
    accelerator: str = "GPU"
    servers: PositiveInt | None = None

    @field_validator("lake")
    @classmethod
    def _is_absolute(cls, lake: Path) -> Path:
        if not lake.is_absolute():
            raise ValueError("the lake's folder must be an absolute path, the same on every node")
        return lake


def cluster() -> Cluster | None:
    """Return the settings in the file that `ETPI_CLUSTER` names; None if it names none.

    Raises:
        ClusterError: the file is missing or wrong; the message names file and key.
    """
    path = os.environ.get(CLUSTER_VARIABLE)
    if not path:
        return None
    try:
        return Cluster.model_validate(tomllib.loads(Path(path).read_text()))
    except FileNotFoundError:
        raise ClusterError(
            f"{CLUSTER_VARIABLE} names {path}, which does not exist; `etpi init --cluster` writes it"
        ) from None
    except tomllib.TOMLDecodeError as error:
        raise ClusterError(f"{path}: {error}") from error
    except ValidationError as error:
        reasons = "; ".join(f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors())
        raise ClusterError(f"{path}: {reasons}") from error
