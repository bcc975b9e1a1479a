"""Dagster's persistent home: the folder of runs and events that the web page shows, and its settings."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

SETTINGS = Path(__file__).with_name("dagster.yaml")


def prepare_dagster_home() -> Path:
    """Create the folder and its settings if missing, set this process's DAGSTER_HOME, and return the folder.

    It is $DAGSTER_HOME, or `.dagster_home` in $ETPI_DATA, or in the working folder. An existing `dagster.yaml` is kept.

    Raises:
        LakeError: the folder cannot be written.
    """
    from etpi_resources.lake.lake import LakeError

    named = os.environ.get("DAGSTER_HOME")
    home = Path(named or Path(os.environ.get("ETPI_DATA") or ".") / ".dagster_home").resolve()
    try:
        home.mkdir(parents=True, exist_ok=True)
        if not (home / SETTINGS.name).exists():
            shutil.copyfile(SETTINGS, home / SETTINGS.name)
    except OSError as error:
        raise LakeError(
            f"Dagster's home {home} cannot be written ({error.strerror}). "
            "Name a folder that you can write: export ETPI_DATA=/path/to/folder"
        ) from error
    os.environ["DAGSTER_HOME"] = str(home)
    return home
