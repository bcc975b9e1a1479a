"""Variables and parameters of the sources have names that say what they hold."""

from __future__ import annotations

import ast
from pathlib import Path

ROOT = Path(__file__).parents[1]
VAGUE = frozenset({"found", "told", "asked", "made", "some", "own", "others", "said", "given"})


def test_variables_and_parameters_name_their_content() -> None:
    vague = []
    for package in ("etpi", "etpi_assets", "cluster/etpi_cluster", "etpi_resources", "lab/etpi_lab"):
        for path in sorted((ROOT / package).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                    name = node.id
                elif isinstance(node, ast.arg):
                    name = node.arg
                else:
                    continue
                if name in VAGUE:
                    vague.append(f"{path.relative_to(ROOT)}:{node.lineno} {name}")
    assert not vague, "\n".join(vague)
