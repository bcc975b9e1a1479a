"""Read a task folder: `task.toml`, `instruction.md`, `environment/`, `tests/`, and `solution/` if any.

The payload of a task (JSON):
    tests, solution: {path below the folder: {data: base64, executable: bool}}
    environment: variables of the tests, from [verifier] env; solution_environment: those of the solution, if any
    seconds, solution_seconds: time limits of the tests, and of one command of the solution
    entities: file paths that the instruction names
    metadata: the table of that name, as written
    place: see `places.place`
"""

from __future__ import annotations

import base64
import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from etpi_assets.tasks import downloads, places
from etpi_assets.tasks.family import Rejected, Task
from etpi_resources.hashes import json_hash
from etpi_resources.inside import read_inside
from etpi_resources.lake.lake import folder_hash
from etpi_resources.outside import read_toml

TASK_FILE = "task.toml"
MIGRATE = "`harbor task migrate` writes it for folders of Terminal-Bench 1, which have a task.yaml"
_INSTRUCTION, _ENVIRONMENT, _TESTS, _SOLUTION = "instruction.md", "environment", "tests", "solution"
_COMPOSE = "docker-compose.yaml"
_WORKDIR = re.compile(r"^\s*WORKDIR\s+(\S+)", re.MULTILINE | re.IGNORECASE)
_PATH = re.compile(r"(?<![\w/.-])/?(?:[\w.-]+/)*[\w-]+\.\w{1,5}\b")
_HOST_VARIABLE = re.compile(r"\$\{[^}:]+(?::-(.*))?\}")
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT]?)I?B?", re.IGNORECASE)
_GIB = {"": 1 / (1 << 30), "K": 1 / (1 << 20), "M": 1 / 1024, "G": 1.0, "T": 1024.0}


def read_folder(suite: str, name: str, root: Path, folder: Path, chosen: Mapping[str, Any]) -> Task:
    """Return the task of a folder below the suite's `root`; `chosen` are its params. Raises Rejected.

    It has the name that Harbor's results have: that of [task], else of the folder.
    """
    config = _config(root, folder / TASK_FILE)
    instruction = _text(root, folder / _INSTRUCTION).strip()
    if not instruction:
        raise Rejected("no_instruction", f"{_INSTRUCTION} is empty")
    tests, solution = _files(root, folder / _TESTS), _files(root, folder / _SOLUTION)
    if "test.sh" not in tests:
        raise Rejected("no_tests", f"there is no {_TESTS}/test.sh, by which a task is graded")
    verifier, agent, machine, reference = (
        _table(config, key) for key in ("verifier", "agent", "environment", "solution")
    )
    if verifier.get("environment_mode") == "separate" or "environment" in verifier:
        raise Rejected("separate_verifier", "[verifier] has a machine of its own: tests here run in the task's")
    if machine.get("env"):
        raise Rejected("machine_variables", "[environment] env is not set here: put it into the Dockerfile")
    payload = {
        "tests": tests,
        "solution": solution,
        "environment": _variables(verifier, "verifier"),
        **({"solution_environment": _variables(reference, "solution")} if reference.get("env") else {}),
        "seconds": _number(verifier, "timeout_sec") or chosen["test_seconds"],
        "solution_seconds": _number(agent, "timeout_sec") or chosen["test_seconds"],
        "entities": sorted(set(_PATH.findall(instruction))),
        "metadata": json.loads(json.dumps(_table(config, "metadata"), default=str)),
    }
    place, world = _place(suite, name, root, folder / _ENVIRONMENT, machine, chosen)
    digest = json_hash([payload, instruction, world])
    # The task's name is also its repository: each task has its own machine.
    named = str(_table(config, "task").get("name") or name)
    split = "heldout" if {name, named} & {*chosen["heldout_tasks"]} else chosen["split"]
    return Task(named, suite, named, split, instruction, {**payload, "place": place}, digest)


def _config(root: Path, file: Path) -> dict[str, Any]:
    try:
        config = read_toml(_text(root, file))
    except ValueError as error:
        raise Rejected("unreadable_config", f"{file.name}: {error}") from error
    if config.get("steps"):
        raise Rejected("several_steps", "the task has several steps, each with an instruction of its own")
    return config


def _table(config: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    table = config.get(key, {})
    if not isinstance(table, dict):
        raise Rejected("unreadable_config", f"[{key}] is no table")
    return table


def _variables(section: Mapping[str, Any], name: str) -> dict[str, str]:
    """Return `env`, with the default of each variable that the host's environment may set (`${KEY:-default}`)."""
    variables = {key: str(value) for key, value in _table(section, "env").items()}
    host = {key: match[1] for key, value in variables.items() if (match := _HOST_VARIABLE.fullmatch(value))}
    if wanted := [key for key, default in host.items() if default is None]:
        raise Rejected(
            "host_variables",
            f"[{name}] env takes {', '.join(wanted)} from the host's environment, which is not shown",
        )
    return {**variables, **host}


def _number(section: Mapping[str, Any], key: str) -> float | None:
    value = section.get(key)
    if value is not None and (isinstance(value, bool) or not isinstance(value, int | float)):
        raise Rejected("unreadable_config", f"{key} = {value!r} is no number")
    return None if value is None else float(value)


def _place(
    suite: str, name: str, root: Path, folder: Path, machine: Mapping[str, Any], chosen: Mapping[str, Any]
) -> tuple[dict, list[Any]]:
    """Return (the place, the parts of it that enter the content hash)."""
    if (folder / _COMPOSE).is_file():
        raise Rejected("several_containers", f"environment/{_COMPOSE}: a task here has one machine")
    dockerfile = folder / "Dockerfile"
    image = machine.get("docker_image")
    workdirs = _WORKDIR.findall(_text(root, dockerfile)) if dockerfile.is_file() else []
    workdir = chosen["workdir"] or machine.get("workdir") or (workdirs[-1].strip("'\"") if workdirs else "/app")
    bounds = {
        "memory_gib": _gib(machine, "memory") or chosen["memory_gib"],
        "disk_gib": _gib(machine, "storage") or chosen["disk_gib"],
    }
    build = None if image or not dockerfile.is_file() else folder
    if image is None and build is None and chosen["checkouts"] is None:
        raise Rejected("no_environment", "there is neither environment/Dockerfile nor environment.docker_image")
    place = places.make_place(suite, {**chosen, **bounds}, key=name, workdir=workdir, image=image, build=build)
    return place, [image, workdir, folder_hash(folder) if folder.is_dir() else None, *downloads.identity(place)]


def _gib(machine: Mapping[str, Any], what: str) -> float | None:
    """Return `memory_mb = 2048` or `memory = "2G"` in GiB; None if neither is stated."""
    if (number := _number(machine, f"{what}_mb")) is not None:
        return number / 1024
    stated = machine.get(what)
    if stated is None:
        return None
    match = _SIZE.fullmatch(str(stated).strip())
    if match is None:
        raise Rejected("unreadable_config", f'[environment] {what} = {stated!r} is no size such as "2G"')
    return float(match[1]) * _GIB[match[2].upper()]


def _files(root: Path, folder: Path) -> dict[str, dict[str, Any]]:
    return {
        file.relative_to(folder).as_posix(): {
            "data": base64.b64encode(_bytes(root, file)).decode(),
            "executable": os.access(file, os.X_OK),
        }
        for file in sorted(folder.rglob("*"))
        if file.is_file()
    }


def _text(root: Path, file: Path) -> str:
    try:
        return _bytes(root, file).decode("utf-8")
    except UnicodeDecodeError as error:
        raise Rejected("unreadable_file", f"{file.name}: {error}") from error


def _bytes(root: Path, file: Path) -> bytes:
    try:
        return read_inside(root, file.relative_to(root).as_posix())
    except OSError as error:
        raise Rejected("unreadable_file", f"{file.name}: {error.strerror or error}") from error
