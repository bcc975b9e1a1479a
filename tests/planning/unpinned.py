"""Digests of the code whose results no golden table can pin: sampling from models, and real sandboxes.

`.venv/bin/python -m tests.planning.unpinned` writes them, after the number is raised, or where results are equal.
"""

from __future__ import annotations

import json
from pathlib import Path

from etpi_assets.planning.versions import digest
from etpi_resources.hashes import json_hash

FILE = Path(__file__).with_name("unpinned.json")
_RESOURCES = Path(__file__).parents[2] / "etpi_resources"
MODULES = {
    "engine.transformers": ["engines/transformers", "engines/slots", "engines/decode_steps",
                            "engines/masks"],
    "engine.vllm": ["engines/vllm"],
    "sandbox.bubblewrap": ["sandboxes/bubblewrap", "sandboxes/namespaces", "sandboxes/seccomp", "sandboxes/guest",
                           "sandboxes/memory_group"],
    "sandbox.docker": ["sandboxes/docker", "sandboxes/docker_boot", "sandboxes/guest"],
}  # fmt: skip
"""Component -> its modules below `etpi_resources`."""


def digests() -> dict[str, str]:
    """Return component -> a digest of the syntax trees of its modules."""
    return {
        component: json_hash([digest(_RESOURCES / f"{module}.py") for module in modules])[:16]
        for component, modules in MODULES.items()
    }


if __name__ == "__main__":
    FILE.write_text(json.dumps(digests(), indent=1) + "\n")
