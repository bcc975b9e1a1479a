"""A CooperBench task whose runner installs its repository and its tools while grading, as most of CooperBench's do."""

from __future__ import annotations

import subprocess
from pathlib import Path

from tests.support.repositories import Repository

BACKENDS = {
    "flit": ("flit_core>=3.4", "flit_core.buildapi"),
    "hatchling": ("hatchling", "hatchling.build"),
    "setuptools": ("setuptools>=61", "setuptools.build_meta"),
    "poetry": ("poetry-core>=2", "poetry.core.masonry.api"),
}
"""Build backend -> (what it requires, its module)."""

_HEAD = """#!/bin/bash
set -e
cleanup() {
    git reset --hard HEAD 2>/dev/null || true
    git clean -fdx 2>/dev/null || true
}
trap cleanup EXIT INT TERM
cd /workspace/repo
export PIP_RETRIES=0
git reset --hard HEAD
git clean -fdx
[[ -z "$2" ]] || git apply --ignore-whitespace "/patches/$2"
git apply --ignore-whitespace "/patches/$1"
"""
PIP = (
    _HEAD
    + """pip install -e ".[test]" || pip install -e .
pip install pytest pytest-mock
python -m pytest -v tests
"""
)
UV = (
    _HEAD
    + """uv venv
source .venv/bin/activate
uv pip install -e ".[test]"
uv pip install pytest pytest-mock
python -m pytest -v tests
"""
)


def project(backend: str) -> str:
    """Return a pyproject.toml of the repository, with a dependency and an extra that no interpreter here has."""
    requires, module = BACKENDS[backend]
    lines = [
        f'[build-system]\nrequires = ["{requires}"]\nbuild-backend = "{module}"\n',
        '[project]\nname = "moor"\nversion = "1.0"\ndescription = "ropes"\ndependencies = ["iniconfig"]\n',
        '[project.optional-dependencies]\ntest = ["pytest"]\n',
    ]
    more = {"hatchling": '[tool.hatch.build.targets.wheel]\ninclude = ["moor.py"]\n'}
    more["setuptools"] = '[tool.setuptools]\npy-modules = ["moor"]\n'
    more["poetry"] = '[tool.poetry]\npackages = [{include = "moor.py"}]\n'
    return "\n".join([*lines, more.get(backend, "")])


def installing(folder: Path, backend: str, runner: str) -> tuple[Repository, Path]:
    """Return the repository under a backend, with an interpreter that has pip and uv alone, and CooperBench's folder of
    its one task."""
    repository = Repository(folder, {"pyproject.toml": project(backend)}, _bare_tools)
    root = repository.cooperbench()
    (root / "moor_task" / "task7" / "runner.sh").write_text(runner)
    return repository, root


def _bare_tools(folder: Path) -> None:
    subprocess.run(["/usr/bin/python3", "-m", "venv", str(folder)], check=True)
    pip = [str(folder / "bin/python"), "-m", "pip", "install", "--quiet", "uv"]
    subprocess.run(pip, check=True, stderr=subprocess.DEVNULL)
    subprocess.run(["chmod", "-R", "a+rX", str(folder)], check=True)
