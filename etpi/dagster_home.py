"""Dagster's persistent home: the folder of runs and events that the web page shows, and its settings."""

from __future__ import annotations

import os
from pathlib import Path

SETTINGS = Path(__file__).with_name("dagster.yaml")


def prepare_dagster_home() -> Path:
    """Create the folder and its settings if missing, set this process's DAGSTER_HOME, and return the folder.

    It is $DAGSTER_HOME, or `.dagster_home` in $ETPI_DATA, in the cluster's lake, or in the working folder. An existing
    `dagster.yaml` is kept.

    Raises:
        LakeError: the folder cannot be written.
        BackendError: on a cluster, `dagster.yaml` belongs to another database, or the database cannot be opened.
    """
    from etpi_resources.backend import backend
    from etpi_resources.lake.lake import Lake, LakeError

    named, elsewhere = os.environ.get("DAGSTER_HOME"), backend()
    home = Path(named or (Lake.named_folder() or Path()) / ".dagster_home").resolve()
    file = home / SETTINGS.name
    try:
        home.mkdir(parents=True, exist_ok=True)
        if not file.exists():
            text = elsewhere.instance_yaml() if elsewhere else SETTINGS.read_text(encoding="utf-8")
            file.write_text(text, encoding="utf-8")
        if elsewhere:
            elsewhere.require_instance(file)
    except OSError as error:
        raise LakeError(
            f"Dagster's home {home} cannot be written ({error.strerror}). "
            "Name a folder that you can write: export ETPI_DATA=/path/to/folder"
        ) from error
    os.environ["DAGSTER_HOME"] = str(home)
    return home
