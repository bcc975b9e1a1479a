"""The tests' own order: a folder for each package, and no test module imports another.

Five folders have no package of their name: `graph` tests the frame that all assets share (planner, jobs, the Dagster
definitions), `command` the console command, the installation and the generated pages, `cluster` and `lab` the plugins
`etpi_cluster` and `etpi_lab`, and `fixtures` has lakes of releases.
"""

from __future__ import annotations

import ast
from pathlib import Path

TESTS = Path(__file__).parent
WITHOUT_PACKAGE = {"graph", "command", "cluster", "lab", "support", "fixtures", "attacks", "goldens", "__pycache__"}


def test_every_folder_has_the_name_of_a_package() -> None:
    packages = {p.name for top in ("etpi", "etpi_assets", "etpi_resources") for p in (TESTS.parent / top).iterdir()}
    assert {p.name for p in TESTS.iterdir() if p.is_dir()} - WITHOUT_PACKAGE <= packages


def test_no_module_imports_a_test_module() -> None:
    imported = {
        f"{path.relative_to(TESTS)}: {name}"
        for path in TESTS.rglob("*.py")
        for name in _imports(path)
        if name.startswith("tests.") and any(part.startswith("test_") for part in name.split("."))
    }
    assert imported == set(), "move what they share to tests/support"


def _imports(path: Path) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module:
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
    return names
