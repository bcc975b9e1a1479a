"""`cluster.toml`, what `etpi cluster init` writes, and that nothing of a cluster is touched without one."""

from __future__ import annotations

import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from etpi.cli import main
from etpi_cluster import instance
from etpi_cluster.code import code_hash
from etpi_cluster.environment import CODE_VARIABLE, passed_on, require_code_of_run
from etpi_cluster.settings import read
from etpi_resources.backend import BackendError
from etpi_resources.lake.lake import Lake, LakeError

SETTINGS = {
    "lake": "/shared/lake",
    "postgres": "postgresql://etpi@head:5432/etpi",
    "ray": "head:6379",
    "jobs": "http://head:8265",
}


def written(folder: Path, **changed: str) -> Path:
    path = folder / "cluster.toml"
    path.write_text("".join(f'{name} = "{value}"\n' for name, value in {**SETTINGS, **changed}.items()))
    return path


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("postgres", "postgresql://etpi:hunter2@head/etpi"),
        ("postgres", "postgresql://etpi@head/etpi?password=hunter2"),
        ("postgres", "head:5432"),
        ("lake", "shared/lake"),
        ("jobs", "head:8265"),
        ("gpus", "8"),
    ],
)
def test_wrong_value_is_refused_with_file_and_key(tmp_path: Path, key: str, value: str) -> None:
    path = written(tmp_path, **{key: value})
    with pytest.raises(BackendError) as caught:
        read(path)
    assert str(path) in str(caught.value) and key in str(caught.value)
    assert "hunter2" not in str(caught.value)


def test_storage_names_the_driver_and_no_password(tmp_path: Path) -> None:
    settings = read(written(tmp_path))
    text = yaml.safe_load(instance.instance_yaml(settings))
    assert text["storage"]["custom"]["config"]["postgres_url"] == "postgresql+psycopg2://etpi@head:5432/etpi"
    assert text["run_coordinator"]["class"] == "DefaultRunCoordinator"  # another would queue runs without a daemon
    assert text["compute_logs"]["config"]["base_dir"].startswith("/shared/lake/")


def test_url_with_a_driver_is_read_as_libpq_reads_it(tmp_path: Path) -> None:
    assert (
        read(written(tmp_path, postgres="postgresql+psycopg2://etpi@head/etpi")).postgres
        == "postgresql://etpi@head/etpi"
    )
    refused = read(written(tmp_path, postgres="postgresql+psycopg2://etpi@127.0.0.1:1/etpi"))
    with pytest.raises(BackendError, match="127.0.0.1:1"):
        instance.require_postgres(refused)


def test_lake_of_the_cluster_is_opened_and_another_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ETPI_DATA", raising=False)
    monkeypatch.setenv("ETPI_CLUSTER", str(written(tmp_path, lake=str(tmp_path / "lake"))))
    assert Lake.folder() == tmp_path / "lake"
    monkeypatch.setenv("ETPI_DATA", str(tmp_path / "other"))
    with pytest.raises(LakeError, match="ETPI_DATA"):
        Lake.folder()


def test_lake_of_a_cluster_is_not_changed_without_its_settings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Such a process would take locks that no other node sees."""
    lake = tmp_path / "lake"
    lake.mkdir()
    monkeypatch.delenv("ETPI_CLUSTER", raising=False)
    monkeypatch.setenv("ETPI_DATA", str(lake))
    with Lake.open().lock("free"):
        pass
    written(lake, lake=str(lake))
    for change in (
        lambda: Lake.open().lock("partition"),
        Lake.open().shared_lock().__enter__,
        Lake.open().exclusive_lock().__enter__,
    ):
        with pytest.raises(BackendError) as caught:
            change()
        assert f"export ETPI_CLUSTER={lake}/cluster.toml" in str(caught.value)
    left = lake / ".staging" / "of_a_living_node"
    left.mkdir(parents=True)
    assert main(["gc", "--yes"]) == 1
    told = capsys.readouterr().err
    assert "ETPI_CLUSTER" in told and "Traceback" not in told
    assert left.exists()


def test_jobs_get_no_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray's list of jobs shows every variable that a job is given."""
    for name in ("PGPASSWORD", "RAY_AUTH_TOKEN", "OPENAI_API_KEY"):
        monkeypatch.setenv(name, "hunter2")
    monkeypatch.setenv("PGPASSFILE", "/root/.pgpass")
    assert passed_on()["PGPASSFILE"] == "/root/.pgpass"
    assert "hunter2" not in passed_on().values()


def test_step_on_a_node_with_other_code_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    require_code_of_run()  # on one machine nobody names a code
    monkeypatch.setenv(CODE_VARIABLE, code_hash())
    require_code_of_run()
    monkeypatch.setenv(CODE_VARIABLE, "0" * 16)
    with pytest.raises(BackendError, match="0{16}"):
        require_code_of_run()


def test_init_writes_both_files_and_says_what_does_not_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("ray")
    pytest.importorskip("dagster_postgres")
    monkeypatch.delenv("ETPI_CLUSTER", raising=False)
    line = ["cluster", "init", "--lake", str(tmp_path), "--postgres", "postgresql://etpi@127.0.0.1:1/etpi"]
    line += ["--ray", "127.0.0.1:2", "--jobs", "http://127.0.0.1:3"]
    assert main(line) == 1
    told = capsys.readouterr()
    assert "Postgres at" in told.err and "http://127.0.0.1:3" in told.err and "ray start" in told.err
    settings = read(tmp_path / "cluster.toml")
    assert settings.lake == tmp_path and settings.jobs == "http://127.0.0.1:3"
    assert (tmp_path / ".dagster_home" / "dagster.yaml").read_text() == instance.instance_yaml(settings)
    assert main(line) == 1
    assert "--force" in capsys.readouterr().err


def test_instance_of_another_database_or_an_older_etpi_is_refused(tmp_path: Path) -> None:
    settings = read(written(tmp_path))
    other = read(written(tmp_path, postgres="postgresql://etpi@other/etpi"))
    file = tmp_path / "dagster.yaml"
    file.write_text(instance.instance_yaml(settings))
    instance.require_current(settings, file)
    older = instance.instance_yaml(settings).replace("etpi_cluster.placement", "etpi_assets.placement")
    for text in (instance.instance_yaml(other), older):
        file.write_text(text)
        with pytest.raises(BackendError, match="--force"):
            instance.require_current(settings, file)


def test_one_machine_imports_nothing_of_a_cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Definitions, commands and a lake work where the packages of etpi-cluster cannot be imported."""
    monkeypatch.delenv("ETPI_CLUSTER", raising=False)
    program = """
import sys
class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("ray", "dagster_ray", "dagster_postgres", "psycopg2"):
            raise ImportError(f"{name} must not be imported without a cluster")
sys.meta_path.insert(0, Blocker())
from etpi_assets.definitions import defs, executor
from etpi.commands import show_status
from etpi.dagster_home import prepare_dagster_home
prepare_dagster_home()
import dagster as dg
assert executor() is dg.in_process_executor
assert show_status(["plan_first_tiny"]) == 0
result = defs.resolve_job_def("prepare_suite").execute_in_process(
    instance=dg.DagsterInstance.get(), partition_key="repo_fix_tiny", asset_selection=[dg.AssetKey("suite_spec")])
assert result.success
assert not [name for name in sys.modules if name.partition(".")[0] == "etpi_cluster"]
"""
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, check=False,
        env={"PATH": "/usr/bin:/bin", "ETPI_DATA": str(tmp_path / "data"), "HOME": str(tmp_path)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]


def test_command_of_a_run_survives_the_shell_whatever_its_settings_quote() -> None:
    pytest.importorskip("dagster_ray")
    from etpi_cluster.placement.launcher import _quoted

    settings = '{"config_yaml": "postgres_url: \'postgresql://head\'", "name": "it\'s"}'
    by_dagster_ray = f"dagster api execute_run '{settings}'"
    assert shlex.split(_quoted(by_dagster_ray)) == ["dagster", "api", "execute_run", settings]
    assert _quoted("dagster api execute_run") == "dagster api execute_run"
