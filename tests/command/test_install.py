"""Installing: `make` in awkward checkouts, the wheel outside one, without the packages of training, and users without
root.

Nothing is fetched: a fresh virtual environment sees this one's packages through a `.pth` file, so pip finds every
requirement satisfied and installs etpi alone.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.own_runs import recorded_run, write_runs
from tests.support.small_specs import write_small_specs
from tests.support.web_server import Handler, WebServer

ROOT = Path(__file__).resolve().parents[2]
PARTS = ("Makefile", "pyproject.toml", "constraints.txt", "README.md", "LICENSE", "setup.py") + (
    "etpi", "etpi_assets", "etpi_resources", "bases", "cluster", "lab", "sql",
)  # fmt: skip
AWKWARD = "mes données d'été"
STRANGER = 64_200
"""An unprivileged user and group that owns nothing."""

OF_TRAINING = ("torch", "functorch", "trl", "peft", "accelerate", "datasets", "pandas", "gguf", "llguidance")
"""Modules that only the extra `train` installs, directly or not."""
WITHOUT = f"""import sys
sys.modules.update(dict.fromkeys({OF_TRAINING}))  # an import of a module that is None fails
del sys.modules["pandas"]  # pyarrow would use None
from etpi.cli import main
print([main(words.split()) for words in sys.argv[1:]])
"""

as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user or mount")


@pytest.fixture
def place() -> Iterator[Path]:
    """A folder that every user can enter, which pytest's own is not."""
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o755)
        yield Path(folder)


def _checkout(folder: Path) -> Path:
    """A copy of what is installed of this checkout."""
    folder.mkdir(parents=True)
    for name in PARTS:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, folder / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy2(source, folder / name)
    return folder


def _environment(folder: Path, python: str = sys.executable, without: tuple[str, ...] = ()) -> Path:
    """A virtual environment without etpi that sees this one's packages, but not those whose names begin `without`."""
    subprocess.run([python, "-m", "venv", "--without-pip", str(folder)], check=True)
    site = folder / "lib" / f"python{sys.version_info[0]}.{sys.version_info[1]}" / "site-packages"
    (site / "ours").mkdir()
    for entry in Path(sysconfig.get_path("purelib")).iterdir():
        hidden = ("etpi", "__editable__", *without)  # the first two show this checkout
        if entry.suffix != ".pth" and not entry.name.startswith(hidden):
            (site / "ours" / entry.name).symlink_to(entry)
    (site / "ours.pth").write_text(str(site / "ours") + "\n", encoding="utf-8")
    return folder


def _variables(**more: str) -> dict[str, str]:
    """This environment without etpi's variables; pip builds without fetching what it builds with."""
    kept = {
        k: v for k, v in os.environ.items() if not k.startswith(("ETPI_", "DAGSTER_", "MAKE", "PYTHONPATH", "MFLAGS"))
    }
    return {**kept, "PIP_NO_BUILD_ISOLATION": "0", "PIP_NO_INDEX": "1", "PIP_DISABLE_PIP_VERSION_CHECK": "1", **more}


def _run(words: list[str], cwd: Path, **more: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(words, cwd=cwd, env=_variables(**more), capture_output=True, text=True)


@pytest.mark.slow
@pytest.mark.parametrize(
    "words", [["status", "EXPERIMENT=first"], pytest.param(["run", "EXPERIMENT=first"], marks=pytest.mark.long)]
)
def test_make_works_in_a_checkout_that_cannot_be_written(tmp_path: Path, words: list[str]):
    checkout = _checkout(tmp_path / "checkout")
    specs = write_small_specs(tmp_path / "specs")
    places = [f"VENV={_environment(tmp_path / 'venv')}", f"ETPI_DATA={tmp_path}/data"]
    before = sorted(checkout.rglob("*"))
    refused = _run([*_read_only(checkout), "make", "status"], checkout)
    assert refused.returncode == 2, refused.stdout + refused.stderr
    assert "VENV=" in refused.stdout
    done = _run([*_read_only(checkout), "make", *words, *places], checkout, ETPI_SPECS=str(specs))
    assert done.returncode == 0, done.stdout + done.stderr
    if words[0] == "run":
        assert (tmp_path / "data/etpi.duckdb").is_file() and (tmp_path / "data/.dagster_home").is_dir()
    assert sorted(checkout.rglob("*")) == before


def _read_only(folder: Path) -> list[str]:
    """What to put before a command that is to see the folder so; root is shown a read-only mount."""
    if os.geteuid() == 0:
        script = 'mount --bind "$0" "$0" && mount -o remount,ro,bind "$0" && cd "$0" && exec "$@"'
        return ["unshare", "--mount", "sh", "-c", script, str(folder)]
    for inner, _, _ in os.walk(folder, topdown=False):
        os.chmod(inner, 0o555)
    return []


@pytest.mark.long
@as_root
def test_make_works_for_a_user_without_root_in_a_path_with_spaces_and_letters_beyond_ascii(place: Path):
    python = "/usr/bin/python3"
    if Path(os.path.realpath(python)).name != f"python{sys.version_info[0]}.{sys.version_info[1]}":
        pytest.skip(f"{python} is not of the version that this environment's packages are for")
    checkout = _checkout(place / AWKWARD / "étpi checkout")
    _environment(checkout / ".venv", python)
    write_small_specs(checkout / "my specs")
    subprocess.run(["chown", "-R", f"{STRANGER}:{STRANGER}", str(checkout)], check=True)
    probe = [*_become(), str(checkout / ".venv/bin/python"), "-c", "import dagster"]
    if subprocess.run(probe, cwd="/", capture_output=True).returncode:
        pytest.skip("another user cannot read this environment's packages")
    settings = {"HOME": str(checkout), "ETPI_SPECS": "my specs"}
    done = _run([*_become(), "make", "run", "EXPERIMENT=first"], checkout, **settings)
    assert done.returncode == 0, done.stdout + done.stderr
    assert (checkout / "etpi.duckdb").stat().st_uid == STRANGER and (checkout / ".dagster_home/dagster.yaml").is_file()
    # The home that `.env` names is the one the run used, for `dagster` and `dg` typed by hand.
    listed = _run(
        [*_become(), ".venv/bin/python", "-m", "dagster", "run", "list", "--limit", "1"], checkout, **settings
    )
    assert "run_experiment" in listed.stdout, listed.stdout + listed.stderr
    status = _run([*_become(), ".venv/bin/etpi", "status", "first"], checkout, **settings)
    assert status.stdout.startswith("first: "), status.stdout + status.stderr


def _become() -> list[str]:
    return ["setpriv", f"--reuid={STRANGER}", f"--regid={STRANGER}", "--clear-groups", "--"]


@pytest.mark.slow
def test_a_wheel_runs_an_experiment_in_an_empty_folder(tmp_path: Path):
    environment = _environment(tmp_path / "venv")
    pip = [str(environment / "bin/python"), "-m", "pip"]
    source = _checkout(tmp_path / "source")
    for words in (["init", "-q"], ["add", "."], ["-c", "user.name=a", "-c", "user.email=a@b", "commit", "-qm", "all"]):
        assert _run(["git", *words], source).returncode == 0
    revision = _run(["git", "rev-parse", "HEAD"], source).stdout.strip()
    built = _run([*pip, "wheel", "--no-deps", "--wheel-dir", str(tmp_path), "."], source)
    assert built.returncode == 0, built.stderr
    (wheel,) = tmp_path.glob("etpi-*.whl")
    installed = _run([*pip, "install", "--no-deps", str(wheel)], tmp_path)
    assert installed.returncode == 0, installed.stderr
    shutil.rmtree(source)
    work = tmp_path / "empty"
    work.mkdir()
    specs = write_small_specs(tmp_path / "specs")
    done = _run([str(environment / "bin/etpi"), "run", "first"], work, ETPI_SPECS=str(specs))
    assert done.returncode == 0, done.stderr
    assert {path.name for path in work.iterdir()} == {"data", "etpi.duckdb", ".dagster_home"}
    manifests = [json.loads(path.read_text()) for path in work.rglob("manifest-*.json")]
    assert {manifest["git_revision"] for manifest in manifests} == {revision}
    # Every file that the packages hold beside their modules is in the wheel.
    site = environment / "lib" / f"python{sys.version_info[0]}.{sys.version_info[1]}" / "site-packages"
    for package in ("etpi", "etpi_assets", "etpi_resources"):
        for file in (ROOT / package).rglob("*"):
            if "__pycache__" not in file.parts and file.is_file():
                assert (site / package / file.relative_to(ROOT / package)).is_file(), file
    for file in (ROOT / "sql").rglob("*.sql"):
        assert (site / "etpi_resources" / file.relative_to(ROOT)).is_file(), file


@pytest.mark.slow
def test_a_wheel_without_training_imports_audits_exports_and_shows(tmp_path: Path):
    environment = _environment(tmp_path / "venv", without=OF_TRAINING)
    pip, etpi = [str(environment / "bin/python"), "-m", "pip"], str(environment / "bin/etpi")
    source, work = _checkout(tmp_path / "source"), tmp_path / "empty"
    built = _run([*pip, "wheel", "--no-deps", "--wheel-dir", str(tmp_path), ".", "./bases"], source)
    assert built.returncode == 0, built.stderr
    assert next(tmp_path.glob("etpi-*.whl")).stat().st_size < 4_000_000
    # Without --no-deps: pip finds every requirement of etpi itself satisfied.
    installed = _run([*pip, "install", *map(str, tmp_path.glob("etpi*.whl"))], tmp_path)
    assert installed.returncode == 0, installed.stderr
    work.mkdir()
    write_runs(work, [recorded_run(number, turns) for number, turns in enumerate((2, 3, 4))])
    for words in (
        "init runs runs.jsonl --model tiny --yes --name mine", "run mine", "status mine", "verify",
        "audit runs.jsonl --model tiny", "view --export mine pages", "sql -c SELECT(1)",
        *(f"export mine --format {name} --to {name}" for name in ("trl", "trl_messages", "verl_sft", "tito", "hub")),
    ):  # fmt: skip
        done = _run([etpi, *words.split()], work)
        assert done.returncode == 0, words + done.stdout + done.stderr
    assert (work / "pages/index.html").is_file() and (work / "trl/data/train.parquet").is_file()


def test_audit_needs_no_package_of_training_and_a_training_names_the_extra(tmp_path: Path):
    write_runs(tmp_path, [recorded_run(0, 2)])
    words = ["audit runs.jsonl --model tiny", "run plan_first_tiny"]
    done = _run([sys.executable, "-c", WITHOUT, *words], tmp_path, PYTHONPATH=str(ROOT))
    assert done.stdout.endswith("[0, 1]\n"), done.stderr
    assert "sft_checkpoint of plan_first_tiny" in done.stderr and "pip install 'etpi[train]'" in done.stderr
    assert "Traceback" not in done.stderr and "PyTorch was not found" not in done.stderr


@pytest.mark.slow
def test_make_asks_the_package_index_that_the_environment_names(tmp_path: Path):
    checkout = _checkout(tmp_path / "checkout")
    requested: list[str] = []

    def refuse(handler: Handler) -> None:
        requested.append(handler.path)
        handler.reply(404)

    with WebServer(refuse) as server:
        mirror = f"{server.url}/mirror/simple"
        settings = {"PIP_INDEX_URL": mirror, "PIP_NO_INDEX": "0", "PIP_CONFIG_FILE": os.devnull, "PIP_FIND_LINKS": ""}
        done = _run(["make", "environment"], checkout, PIP_NO_BUILD_ISOLATION="1", **settings)
    assert done.returncode != 0 and not (checkout / ".venv/ready").exists()
    assert "/mirror/simple/setuptools/" in requested, done.stderr


def _on_path(folder: Path, *names: str, broken: str | None = None) -> str:
    """A PATH of these programs alone; `broken` is a shim that refuses, as pyenv's of a version that is not chosen."""
    folder.mkdir()
    for name in names:
        result = shutil.which(name)
        assert result, name
        (folder / name).symlink_to(os.path.realpath(result))
    if broken:
        (folder / broken).write_text("#!/bin/sh\necho 'pyenv: command not found' >&2\nexit 127\n")
        (folder / broken).chmod(0o755)
    return str(folder)


TOOLS = ("bash", "sh", "make", "id", "test", "echo", "find", "awk", "mkdir", "cp", "touch", "rm", "env", "chmod")


def test_make_takes_the_interpreter_that_runs(tmp_path: Path):
    checkout = _checkout(tmp_path / "checkout")
    path = _on_path(tmp_path / "bin", *TOOLS, broken="python3.11")
    (tmp_path / "bin/python3.12").symlink_to(sys.executable)  # of a version that will do
    asked = _run(["make", "--eval", "which:\n\t@echo $(PYTHON)", "which"], checkout, PATH=path)
    assert asked.stdout.strip() == f"{path}/python3.12", asked.stderr


def test_make_without_a_suitable_python_names_the_versions(tmp_path: Path):
    checkout = _checkout(tmp_path / "checkout")
    done = _run(["make", "environment"], checkout, PATH=_on_path(tmp_path / "bin", *TOOLS, broken="python3.11"))
    assert done.returncode == 2 and not (checkout / ".venv").exists()
    assert "3.11 to 3.14" in done.stdout and "venv" in done.stdout


@as_root
def test_missing_bubblewrap_is_reported_before_installing(place: Path):
    checkout = _checkout(place / "checkout")
    path = _on_path(place / "bin", *TOOLS, broken="python3.11")
    subprocess.run(["chown", "-R", f"{STRANGER}:{STRANGER}", str(checkout)], check=True)
    words = [shutil.which("setpriv") or "setpriv", *_become()[1:], f"{path}/make", "demo"]
    done = _run(words, checkout, PATH=path)
    assert done.returncode == 2
    assert "bubblewrap" in done.stdout and "docs/install.md" in done.stdout
    assert not (checkout / ".venv").exists()
