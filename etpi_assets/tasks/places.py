"""Where a task of a real repository runs: its image, or a checkout with a prepared interpreter.

Belongs here: the params that suites of repositories share, and what becomes of them in a task's payload and in a
sandbox. Does not belong here: reading data sets, running tests.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from etpi_assets.specs.paths import expand
from etpi_assets.tasks.family import SandboxNeeds
from etpi_resources.sandboxes import Environment, Limits

GIB = 1 << 30

PARAMS: Mapping[str, Any] = {
    "sandbox": None,
    "checkouts": None,
    "command_seconds": 60,
    "test_seconds": 1800,
    "memory_gib": 4,
    "disk_gib": 2,
}
"""Params and their defaults.

sandbox: docker or bubblewrap, where the suite's tasks are proven. checkouts: a folder of checkouts, for bubblewrap:
`<checkouts>/<key>/repo`, and `<checkouts>/<key>/tools` or `<checkouts>/tools` with the interpreter in its `bin`; the
key is the family's. The others: what one command, a run of tests and a sandbox may use.
"""

FORGET_HISTORY = (
    "rm -rf .git && git init -q && mkdir -p .git/info && echo .venv >> .git/info/exclude && git add -A && "
    "git -c user.name=etpi -c user.email=etpi@localhost commit -q --no-verify -m base"
)
"""Leaves the repository with one commit: later ones would hold the solution."""


def make_place(
    params: Mapping[str, Any], *, key: str, workdir: str, image: str | None, build: Path | None = None
) -> dict:
    """A task's place as JSON: what `needs` and `test_needs` read."""
    checkout = None if params["checkouts"] is None else expand(str(params["checkouts"])) / key
    return {
        "workdir": workdir,
        "image": image,
        "build": None if build is None else str(build.resolve()),
        "checkout": None if checkout is None else str(checkout.resolve() / "repo"),
        "tools": [] if checkout is None else [str(p) for p in _tools(checkout, expand(str(params["checkouts"])))],
        **{name: params[name] for name in ("command_seconds", "test_seconds", "memory_gib", "disk_gib")},
    }


def needs(found: Mapping[str, Any], prepare: str | None, places: tuple[str, ...] = ()) -> SandboxNeeds:
    """What an agent's sandbox needs."""
    return SandboxNeeds(_environment(found, places), _limits(found, found["command_seconds"]), prepare)


def test_needs(found: Mapping[str, Any], places: tuple[str, ...] = ()) -> tuple[Limits, Environment]:
    """The limits and the environment of a sandbox that tests run in."""
    return _limits(found, found["test_seconds"], output=4 << 20), _environment(found, places)


def _tools(checkout: Path, root: Path) -> list[Path]:
    return [folder.resolve() for folder in (checkout / "tools", root / "tools") if folder.is_dir()][:1]


def _environment(found: Mapping[str, Any], places: tuple[str, ...]) -> Environment:
    return Environment(
        workdir=found["workdir"],
        image=found["image"],
        build=None if found["build"] is None else Path(found["build"]),
        checkout=None if found["checkout"] is None else Path(found["checkout"]),
        tools=tuple(Path(folder) for folder in found["tools"]),
        places=places,
    )


def _limits(found: Mapping[str, Any], seconds: float, output: int = 16 * 1024) -> Limits:
    return Limits(
        command_seconds=float(seconds),
        memory_bytes=int(found["memory_gib"] * GIB),
        processes=512,
        file_bytes=int(found["disk_gib"] * GIB),
        output_bytes=output,
    )
