"""What an asset's result depends on, as hashes: its code and its input key.

Belongs here: the two hashes that the skip rule and the planner compare. Does not belong here: reading lake or specs.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path

from etpi_assets.graph import Node

ROOT = Path(__file__).resolve().parent.parent
_SOURCE_SUFFIXES = {".py", ".sql", ".toml", ".json", ".jinja", ".md", ".txt"}


@cache
def code_version(node: Node) -> str:
    """The first 16 hex digits of a sha256 over the sources that make the asset.

    A package counts with every source file below it (prompt templates and word lists included), a module with its
    file, a path (it has a slash) with the file or with every source file below it.

    Raises:
        FileNotFoundError: `graph` names code that does not exist.
    """
    digest = hashlib.sha256()
    for name in node.code:
        for path in _sources(name):
            digest.update(path.relative_to(ROOT).as_posix().encode() + b"\0")
            digest.update(path.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


def input_key(node: Node, spec_hash: str, inputs: Mapping[str, str], code: str) -> str:
    """sha256 over (asset, spec section hash, input versions in order, code version), as hex.

    `inputs` maps "asset/key" to the data version that would be read.
    """
    text = json.dumps([node.name, spec_hash, list(inputs.items()), code])
    return hashlib.sha256(text.encode()).hexdigest()


@cache
def _sources(name: str) -> tuple[Path, ...]:
    if "/" in name:
        path = ROOT / name
    else:
        spec = importlib.util.find_spec(name)
        if spec is None or spec.origin is None:
            raise FileNotFoundError(f"etpi_assets/graph.py names the code {name!r}, which does not exist")
        path = Path(spec.origin)
        if path.name == "__init__.py":
            path = path.parent
    if path.is_dir():
        found = (p for p in path.rglob("*") if p.suffix in _SOURCE_SUFFIXES and p.is_file())
        return tuple(sorted(found))
    if not path.is_file():
        raise FileNotFoundError(f"etpi_assets/graph.py names the code {name!r}, which does not exist at {path}")
    return (path,)
