"""The execution environment of tasks of real repositories: a container image, or a checkout with an interpreter.

Params that these suites share, their form in a task's payload (`place`), and the sandbox's environment and limits.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from etpi_assets.specs.paths import expand
from etpi_assets.tasks import downloads
from etpi_assets.tasks.family import SandboxNeeds
from etpi_resources.sandboxes import Environment, Limits, Sandbox, SandboxFactory

GIB = 1 << 30

PARAMS: Mapping[str, Any] = {
    "sandbox": None,
    "checkouts": None,
    "command_seconds": 60,
    "test_seconds": 1800,
    "memory_gib": 4,
    "disk_gib": 2,
    "grading": {"network": "none"},
    "keep_unproven": False,
}
"""Params and their defaults.

sandbox: docker or bubblewrap, which validates the suite's tasks. checkouts: a folder of checkouts, for bubblewrap:
`<checkouts>/<key>/repo`, and `<checkouts>/<key>/tools` or `<checkouts>/tools` with the interpreter in its `bin`; the
family defines the key. grading: what grading may download (`downloads`). The others: limits of one command, of a run of
the tests, and of a sandbox. keep_unproven: whether tasks whose verifier does not work are kept, to be run without a
verdict, for metrics that need none; else they are quarantined.
"""

FORGET_HISTORY = (
    "{ find . -name .venv -prune -o \\( -name __pycache__ -o -name .pytest_cache \\) -prune -exec rm -rf {} +; "
    "true; } && "
    "ignored=$(git ls-files -ci --exclude-standard -z | base64) && "
    "tag=$(git describe --tags --abbrev=0 2>/dev/null || true) && "
    "rm -rf .git && git init -q && mkdir -p .git/info && echo .venv >> .git/info/exclude && git add -A && "
    'printf %s "$ignored" | base64 -d | git update-index --add --remove -z --stdin && '
    "git -c user.name=etpi -c user.email=etpi@localhost commit -q --no-verify -m base && "
    '{ [ -z "$tag" ] || git tag "$tag"; }'
)
"""Replaces the repository's history by one commit: later commits would contain the solution, and the hidden tests. So
would caches of earlier runs.

Tracked files that .gitignore excludes stay tracked, and the last tag before the commit names the new one: builds
compute their version from it.
"""


def make_place(
    suite: str, params: Mapping[str, Any], *, key: str, workdir: str, image: str | None, build: Path | None = None
) -> dict:
    """Return the environment of a task as JSON, the input of `needs` and `test_sandbox`."""
    checkout = None if params["checkouts"] is None else expand(str(params["checkouts"])) / key
    return {
        "workdir": workdir,
        "image": image,
        "build": None if build is None else str(build.resolve()),
        "checkout": None if checkout is None else str(checkout.resolve() / "repo"),
        "tools": [] if checkout is None else [str(p) for p in _tools(checkout, expand(str(params["checkouts"])))],
        "grading": downloads.policy(suite, params["grading"]),
        **{name: params[name] for name in ("command_seconds", "test_seconds", "memory_gib", "disk_gib")},
    }


def needs(place: Mapping[str, Any], prepare: str | None, places: tuple[str, ...] = ()) -> SandboxNeeds:
    """Return the requirements of an agent's sandbox. `places`: further writable folders."""
    return SandboxNeeds(_environment(place, places), _limits(place, place["command_seconds"]), prepare)


@contextmanager
def test_sandbox(
    place: Mapping[str, Any],
    sandboxes: SandboxFactory,
    files: Mapping[str, str],
    places: tuple[str, ...] = (),
    *,
    record: bool = False,
    prepare: str | None = None,
) -> Iterator[Sandbox]:
    """Yield a sandbox that runs tests.

    Args:
        record: whether its downloads may be fetched and recorded: only for the suite's own code.
        prepare: a command that hides the solution and the hidden tests from the code under test.

    Raises:
        OSError: `prepare` failed, or the proxy of its downloads ended meanwhile. As `SandboxFactory.create` does.
    """
    with (
        downloads.with_downloads(place, _environment(place, places), record=record) as environment,
        sandboxes.create(files, test_limits(place), environment) as sandbox,
    ):
        if prepare is not None and (done := sandbox.run(f"if [ -e .git ]; then {prepare}; fi")).exit_code:
            raise OSError(f"the repository's history could not be removed before tests ran: {done.output[-500:]}")
        yield sandbox


def test_limits(place: Mapping[str, Any]) -> Limits:
    return _limits(place, place["test_seconds"], output=4 << 20)


def _tools(checkout: Path, root: Path) -> list[Path]:
    return [folder.resolve() for folder in (checkout / "tools", root / "tools") if folder.is_dir()][:1]


def _environment(place: Mapping[str, Any], places: tuple[str, ...]) -> Environment:
    return Environment(
        workdir=place["workdir"],
        image=place["image"],
        build=None if place["build"] is None else Path(place["build"]),
        checkout=None if place["checkout"] is None else Path(place["checkout"]),
        tools=tuple(Path(folder) for folder in place["tools"]),
        places=places,
    )


def _limits(place: Mapping[str, Any], seconds: float, output: int = 16 * 1024) -> Limits:
    return Limits(
        command_seconds=float(seconds),
        memory_bytes=int(place["memory_gib"] * GIB),
        processes=512,
        file_bytes=int(place["disk_gib"] * GIB),
        output_bytes=output,
    )
