"""Dagster's persistent home: runs and events that the web page shows.

Belongs here: which folder it is, and its settings. Does not belong here: the lake (`etpi_resources.lake.lake`) or the
catalog (`etpi_resources.lake.catalog`), whose folders follow the same rule.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

SETTINGS = Path(__file__).with_name("dagster.yaml")


def prepare_dagster_home() -> Path:
    """The folder, made where missing, with settings, and named in this process's DAGSTER_HOME.

    $DAGSTER_HOME, or `.dagster_home` in $ETPI_DATA, or in the working folder. A `dagster.yaml` that is there is kept.

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
