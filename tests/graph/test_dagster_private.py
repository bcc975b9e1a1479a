"""The private Dagster names in `dagster_private` have the form that etpi relies on."""

from __future__ import annotations

import re
from pathlib import Path

from etpi_assets import dagster_private

ROOT = Path(__file__).parents[2]


def test_private_dagster_names_are_imported_in_only_one_module() -> None:
    private = re.compile(r"^\s*(?:from|import) dagster(?:_\w+)?\._", re.MULTILINE)
    files = [path for top in ("etpi", "etpi_assets", "etpi_resources") for path in (ROOT / top).rglob("*.py")]
    assert {path.name for path in files if private.search(path.read_text())} == {Path(dagster_private.__file__).name}
