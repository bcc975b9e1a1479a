"""Dagster's persistent home: the folder of runs and events that the web page shows, and its settings."""

from __future__ import annotations

import contextlib
import io
import os
import sys
from importlib.metadata import version
from pathlib import Path

SETTINGS = Path(__file__).with_name("dagster.yaml")


def dagster_home() -> Path:
    """Return $DAGSTER_HOME, else `.dagster_home` in $ETPI_DATA, in the cluster's lake, or in the working folder."""
    from etpi_resources.lake.lake import Lake

    return Path(os.environ.get("DAGSTER_HOME") or (Lake.named_folder() or Path()) / ".dagster_home").resolve()


def prepare_dagster_home() -> Path:
    """Create the folder, its settings and its storage if missing, set DAGSTER_HOME, and return the folder.

    An existing `dagster.yaml` is kept. One process at a time creates or migrates the storage, and others wait: two
    that do it at once leave a storage that never opens again.

    Raises:
        LakeError: the folder cannot be written, or its storage cannot be opened.
        BackendError: on a cluster, `dagster.yaml` belongs to another database, or the database cannot be opened.
    """
    from etpi_resources.backend import backend
    from etpi_resources.lake.lake import Lake, LakeError
    from etpi_resources.process.locks import lake_locks

    home, elsewhere = dagster_home(), backend()
    if not elsewhere and (wrong := [mark for mark in "?%" if mark in str(home)]):
        raise LakeError(
            f"Dagster cannot keep its storage in {home}: {wrong[0]} has a meaning in the addresses of its database. "
            "Name a folder without it: export DAGSTER_HOME=/path/to/folder"
        )
    file = home / SETTINGS.name
    try:
        with lake_locks().hold(home / "storage.lock", what="Dagster's storage", doing="creating"):
            if not file.exists():
                text = elsewhere.instance_yaml() if elsewhere else SETTINGS.read_text(encoding="utf-8")
                file.write_text(text, encoding="utf-8")
            if elsewhere:
                elsewhere.require_instance(file)
            os.environ["DAGSTER_HOME"] = str(home)
            ready, state = home / "storage_ready", f"{version('dagster')}\n{file.read_text(encoding='utf-8')}"
            if not ready.exists() and not elsewhere and Lake.open().refs():
                print(
                    f"etpi: {home} is new, and the lake has results: Dagster's page shows them as never materialized "
                    "until a run. They are kept, and runs use them. Copy .dagster_home too to see their history",
                    file=sys.stderr,
                )
            if not ready.exists() or ready.read_text(encoding="utf-8") != state:
                _prepare_storage(home)
                ready.write_text(state, encoding="utf-8")
    except OSError as error:
        raise LakeError(
            f"Dagster's home {home} cannot be written ({error.strerror}). Name a folder that you can write: "
            f"export {'DAGSTER_HOME' if 'DAGSTER_HOME' in os.environ else 'ETPI_DATA'}=/path/to/folder"
        ) from error
    return home


def _prepare_storage(home: Path) -> None:
    """Create the storage if it is missing; migrate it if a release before this one, or a killed process, left it old.

    Raises:
        LakeError: it cannot be opened.
    """
    import dagster as dg
    from alembic.util.exc import CommandError
    from sqlalchemy.exc import SQLAlchemyError

    from etpi_resources.lake.lake import LakeError

    try:
        with dg.DagsterInstance.get() as instance:
            parts = (instance.run_storage, instance.event_log_storage, instance.schedule_storage)
            versions = [part.alembic_version() for part in parts if part]
            if any(version and version[0] != version[1] for version in versions):
                with contextlib.redirect_stdout(io.StringIO()):  # it prints its progress
                    instance.upgrade()
    except (CommandError, SQLAlchemyError, dg.DagsterError) as error:
        raise LakeError(
            f"Dagster's storage in {home} cannot be opened ({str(error).splitlines()[0]}). It has only the history of "
            f"runs, and every result is in the lake: move it away (mv {home} {home}.old) and run the same command again"
        ) from error
