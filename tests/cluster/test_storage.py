"""Dagster's storage on a cluster while Postgres restarts, is down, or refuses."""

from __future__ import annotations

import threading
from pathlib import Path

import click
import pytest
import yaml

pytest.importorskip("dagster_postgres", reason="dagster-postgres is not installed: pip install etpi-cluster")

import dagster as dg
import sqlalchemy

from etpi_cluster import instance
from etpi_cluster.placement import storage as storage_module
from etpi_cluster.postgres_locks import PostgresUnavailable
from etpi_cluster.settings import read
from tests.support.postgres import PASSWORD, PostgresServer, write_settings


@pytest.fixture
def home(postgres_server: PostgresServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with Dagster's settings of a cluster, of which only the storage is used."""
    monkeypatch.setenv("PGPASSWORD", PASSWORD)
    monkeypatch.setattr(storage_module, "USER_SECONDS", 1.0)
    settings = read(write_settings(tmp_path, postgres_server.new_database(), tmp_path / "lake"))
    text = {"storage": yaml.safe_load(instance.instance_yaml(settings))["storage"], "telemetry": {"enabled": False}}
    (tmp_path / "dagster.yaml").write_text(yaml.safe_dump(text))
    return tmp_path


def opened(home: Path) -> dg.DagsterInstance:
    return dg.DagsterInstance.from_config(str(home))


def test_web_page_goes_on_after_a_restart_of_postgres(home: Path, postgres_server: PostgresServer) -> None:
    with opened(home) as page:
        page.optimize_for_webserver(statement_timeout=5000, pool_recycle=3600, max_overflow=20)
        run = page.create_run_for_job(dg.GraphDefinition(name="nothing").to_job())  # all three keep connections now
        page.report_engine_event("before", run)
        page.all_instigator_state()
        postgres_server.stop()
        postgres_server.start()
        page.all_instigator_state()
        page.report_engine_event("after", run)
        assert [entry.message for entry in page.all_logs(run.run_id)][-2:] == ["before", "after"]
        assert page.get_run_by_id(run.run_id)


def test_run_waits_while_postgres_restarts(home: Path, postgres_server: PostgresServer) -> None:
    with opened(home) as walking:
        postgres_server.stop()
        back = threading.Timer(1.5, postgres_server.start)
        back.start()
        try:
            assert walking.get_runs() == []
        finally:
            back.join()


def test_command_says_in_one_message_that_postgres_is_down(home: Path, postgres_server: PostgresServer) -> None:
    postgres_server.stop()
    try:
        with pytest.raises(click.ClickException) as caught:  # of which a command prints the message alone
            opened(home)
    finally:
        postgres_server.start()
    assert "Postgres" in caught.value.message and "cluster.toml" in caught.value.message
    assert "\n" not in caught.value.message and PASSWORD not in caught.value.message


def test_a_wrong_password_is_not_waited_for(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storage_module, "USER_SECONDS", 600.0)
    monkeypatch.setenv("PGPASSWORD", "of somebody else")
    with pytest.raises(PostgresUnavailable, match="password authentication failed"):
        opened(home)


def test_end_of_postgres_in_mid_statement_is_one_message(home: Path) -> None:
    with opened(home) as walking:
        storage = walking.run_storage
        with pytest.raises(PostgresUnavailable, match="middle of a statement"), storage.connect() as connection:
            connection.execute(sqlalchemy.text("SELECT pg_terminate_backend(pg_backend_pid())"))
        assert walking.get_runs() == []
