"""Tasks whose own runners install packages: graded from an index once, and ever after from what was recorded."""

from __future__ import annotations

import shutil
import socket
import tempfile
from pathlib import Path

import pytest

from etpi_assets.tasks import calibration, cooperbench, downloads, harbor, proof
from etpi_assets.tasks.family import RejectedInput, Task
from etpi_resources.sandboxes import Environment, Limits, SandboxUnavailable
from etpi_resources.sandboxes.bubblewrap import BubblewrapFactory
from etpi_resources.sandboxes.downloads.proxy import INDEX_HOSTS, DownloadProxy, through_proxy
from tests.support.container_engine import IMAGE
from tests.support.repositories import FILES, solved
from tests.tasks.installing_tasks import BACKENDS, PIP, UV, installing, project

SMALL = {"memory_gib": 2, "disk_gib": 0.5, "test_seconds": 240}


@pytest.fixture(scope="module", autouse=True)
def _index(mitmproxy) -> None:
    try:
        socket.getaddrinfo("pypi.org", 443)
    except OSError as error:
        pytest.skip(f"the package index is not to be had: {error}")


@pytest.fixture(autouse=True)
def _one_run(monkeypatch):
    monkeypatch.setattr(proof, "REFERENCE_RUNS", 1)
    monkeypatch.setattr(calibration, "REFERENCE_RUNS", 1)


@pytest.fixture(scope="module")
def repository():
    with tempfile.TemporaryDirectory() as folder:
        yield installing(Path(folder), "flit", PIP)


def load(repository, factory, **grading) -> Task:
    moor, root = repository
    context = moor.context(IMAGE, "/workspace/repo")
    shutil.copytree(context, root / "moor_task" / "task7", symlinks=True, dirs_exist_ok=True)
    params = {"path": str(root), "sandbox": factory.name, "checkouts": str(moor.checkouts("moor_task/task7"))}
    (task,) = cooperbench.FAMILY.load("pairs", 0, {**SMALL, **params, "images": "build", "grading": grading})
    assert isinstance(task, Task), task
    return task


def outcome(task: Task, factory) -> Task | RejectedInput:
    (result,) = cooperbench.FAMILY.validate([task], factory)
    return result


@pytest.fixture(scope="module")
def recorded(tmp_path_factory) -> Path:
    """The folder of the recording that the first test makes."""
    return tmp_path_factory.mktemp("recorded") / "bubblewrap"


@pytest.mark.parametrize("factory", ["bubblewrap", pytest.param("docker", marks=pytest.mark.long)], indirect=True)
def test_runner_that_installs_is_proven_online_once_and_offline_after(repository, factory, recorded):
    recording = str(recorded.with_name(factory.name))
    without = load(repository, factory, network="none", recording=recording)
    refused = outcome(without, factory)
    assert isinstance(refused, RejectedInput) and refused.reason == "reference_fails", refused

    online = load(repository, factory, network="index", recording=recording)
    assert isinstance(outcome(online, factory), Task)
    files = sorted(path.name for path in Path(recording).rglob("*"))
    assert len(files) > 5

    offline = load(repository, factory, network="none", recording=recording)
    moor = solved("1")
    verdict = cooperbench.FAMILY.judge(offline, {"agent1": _left(moor), "agent2": _left(solved("2"))}, factory)
    assert (verdict.reward, verdict.verdict) == (1.0, "passed"), verdict
    verdict = cooperbench.FAMILY.judge(offline, {"agent1": _left(moor), "agent2": _left(FILES)}, factory)
    assert (verdict.reward, verdict.verdict) == (0.0, "failed_tests"), verdict
    assert sorted(path.name for path in Path(recording).rglob("*")) == files


def _left(files: dict[str, str]) -> dict[str, str]:
    return {**files, "pyproject.toml": project("flit")}


def test_agents_sandbox_has_no_way_out_under_any_policy(repository, factory, tmp_path):
    for network in ("none", "index", "open"):
        task = load(repository, factory, network=network, recording=str(tmp_path))
        needs = cooperbench.FAMILY.needs(task)
        assert needs.environment is not None and needs.environment.downloads is None
        with factory.create({}, needs.limits, needs.environment) as box:
            assert box.run("ls /run/downloads").exit_code != 0
            assert box.run("pip download iniconfig --retries 0").exit_code != 0


def test_code_of_a_patch_finds_the_recording_alone(repository, recorded):
    """Code of a patch that runs while it is graded, under the policy that lets the suite's own code download."""
    factory = BubblewrapFactory()
    task = load(repository, factory, network="index", recording=str(recorded))
    if not recorded.exists():  # this test runs alone
        assert isinstance(outcome(task, factory), Task)
    before = sorted(recorded.rglob("*"))
    fetch = (
        "import subprocess, sys\n"
        "done = subprocess.run([sys.executable, '-m', 'pip', 'download', 'pycowsay', '--retries', '0'])\n"
        "if done.returncode == 0:\n"
        "    def rope(n):\n        return n * 2\n"
    )
    patched = {**solved("1"), "moor.py": solved("2")["moor.py"] + fetch}
    verdict = cooperbench.FAMILY.judge(task, {"agent1": _left(patched), "agent2": _left(patched)}, factory)
    assert verdict.reward == 0.0 and verdict.verdict == "failed_tests", verdict
    assert sorted(recorded.rglob("*")) == before


@pytest.mark.parametrize(
    ("backend", "tool"),
    [
        ("setuptools", "pip"),
        ("flit", "uv"),
        *(pytest.param(name, "pip", marks=pytest.mark.long) for name in BACKENDS if name != "setuptools"),
    ],
)
def test_every_build_backend_installs_from_the_recording(repository, tmp_path, backend, tool):
    moor, _ = repository
    runner = (PIP if tool == "pip" else UV).replace("python -m pytest -v tests", "python -c 'import moor, pytest'")
    for record in (True, False):
        proxy = DownloadProxy(tmp_path, record=record, hosts=INDEX_HOSTS)
        environment = Environment(
            "/workspace/repo", tools=(moor.tools,), installs=True, downloads=proxy.folder, places=("/patches",)
        )
        limits = Limits(command_seconds=120, memory_bytes=2 << 30, processes=256, file_bytes=1 << 29)
        files = {**FILES, "pyproject.toml": project(backend), "runner.sh": runner, "none.patch": ""}
        with BubblewrapFactory().create(files, limits, environment) as box:
            box.run("git init -q && git add -A && git -c user.name=a -c user.email=a@b commit -qm base")
            box.run(
                "mv none.patch runner.sh /patches; sed -i 's/git apply/git apply --allow-empty/' /patches/runner.sh"
            )
            done = box.run(through_proxy("bash /patches/runner.sh none.patch"))
            assert done.exit_code == 0, done.output
        proxy.close()


@pytest.mark.parametrize(
    ("grading", "words"),
    [
        ("index", "found 'index'"),
        ({"net": "index"}, "found {'net'"),
        ({"network": "all"}, r"\.network .*'all'"),
        ({"network": "index", "hosts": "pypi.org"}, r"\.hosts .*'pypi.org'"),
        ({"network": "index", "most_gib": 0}, r"\.most_gib .* 0$"),
    ],
)
def test_wrong_policy_is_named(grading, words):
    with pytest.raises(ValueError, match=words):
        downloads.policy("pairs", grading)


def test_missing_proxy_stops_what_needs_it(repository, monkeypatch, tmp_path):
    monkeypatch.setenv("ETPI_MITMDUMP", str(tmp_path / "absent"))
    task = load(repository, BubblewrapFactory(), network="index", recording=str(tmp_path / "recording"))
    with pytest.raises(SandboxUnavailable, match=r"make mitmproxy.*params\.grading\.network"):
        outcome(task, BubblewrapFactory())


def test_families_have_the_policy_that_their_tests_need():
    assert cooperbench.PARAMS["grading"] == harbor.PARAMS["grading"] == {"network": "index"}
