"""What only Postgres locks have: sessions that end, restarts, keys, passwords; and the lake on them."""

from __future__ import annotations

import os
import socket
import threading
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from etpi.storage import collect_garbage, remove
from etpi_assets.rollouts.journal import Journal, JournalError
from etpi_cluster import postgres_locks
from etpi_cluster.postgres_locks import KEEPALIVE_SECONDS, PostgresLocks, PostgresUnavailable
from etpi_cluster.settings import cluster
from etpi_resources.backend import BackendError
from etpi_resources.lake import lake as lake_module
from etpi_resources.lake.audit import audit
from etpi_resources.lake.lake import Lake, LakeBusy, Ref
from etpi_resources.lake.removal import carry_out, plan_garbage
from etpi_resources.process.locks import LockHeld, LockLost
from tests.support.finished import TASKS, made
from tests.support.postgres import PASSWORD
from tests.support.small_lake import PAIRS, publish

KEEP_NOTHING = timedelta(0)
LATER = datetime.now(UTC) + timedelta(hours=1)


def damaged(lake: Lake) -> list[str]:
    """Return the damages of a lake, but not that inputs are missing: these lakes have some assets alone."""
    return [damage.kind for damage in audit(lake, deep=True).damages if damage.kind != "version"]


@pytest.fixture
def lake(cluster_settings, tmp_path) -> Lake:
    return Lake(tmp_path / "lake")


@pytest.fixture
def locks(postgres_server, tmp_path, monkeypatch) -> PostgresLocks:
    monkeypatch.setenv("PGPASSWORD", PASSWORD)
    return PostgresLocks(postgres_server.new_database(), tmp_path)


def another(locks: PostgresLocks) -> PostgresLocks:
    """A session as another node has it, with the same lake."""
    return PostgresLocks(locks._url, locks._lake)


def lake_of_another_node(lake: Lake) -> PostgresLocks:
    settings = cluster()
    assert settings and settings.lake == lake.root
    return PostgresLocks(settings.postgres, settings.lake)


# --- sessions --------------------------------------------------------------------------------------------------------


def test_session_names_its_process_and_is_ended_when_its_host_is_silent(locks, postgres_server, tmp_path):
    with locks.hold(tmp_path / "a.lock"):
        sql = "SELECT application_name FROM pg_stat_activity WHERE datname = %(of)s"
        ((name,),) = postgres_server.ask(sql, values={"of": locks._url.rpartition("/")[2]})
        assert name == f"etpi {socket.gethostname()}:{os.getpid()}"
        session = locks._session
        assert session is not None
        with session._connection.cursor() as cursor:
            settings = {}
            for setting in ("idle", "interval", "count"):
                cursor.execute(f"SHOW tcp_keepalives_{setting}")
                settings[setting] = int(cursor.fetchone()[0])
            cursor.execute("SHOW tcp_user_timeout")
            assert cursor.fetchone() == ("25000",)
        assert settings["idle"] + settings["interval"] * settings["count"] == KEEPALIVE_SECONDS


def test_restart_loses_every_lock_and_the_next_one_is_taken(locks, postgres_server, tmp_path):
    with locks.hold(tmp_path / "a.lock") as a, locks.hold(tmp_path / "b.lock", shared=True) as b:
        postgres_server.stop()
        assert not a.still_held()
        starter = threading.Timer(0.5, postgres_server.start)
        starter.start()
        with locks.hold(tmp_path / "c.lock") as c:  # waits until Postgres answers
            assert c.still_held() and not a.still_held() and not b.still_held()
            with another(locks).hold(tmp_path / "a.lock", wait=False):
                pass
        starter.join()


def test_waiting_process_survives_the_end_of_its_session(locks, postgres_server, tmp_path):
    other, waited = another(locks), threading.Event()
    with other.hold(tmp_path / "a.lock"):

        def wait() -> None:
            with locks.hold(tmp_path / "a.lock"):
                waited.set()

        thread = threading.Thread(target=wait)
        thread.start()
        time.sleep(0.3)
        postgres_server.end_sessions()  # of both: the lock is free
        thread.join(timeout=20)
    assert waited.is_set()


def test_key_is_the_same_behind_a_link_and_another_in_another_lake(tmp_path):
    (tmp_path / "lake" / "locks").mkdir(parents=True)
    (tmp_path / "link").symlink_to(tmp_path / "lake")
    here, there = PostgresLocks("", Path(tmp_path / "lake")), PostgresLocks("", Path("/elsewhere"))
    path = tmp_path / "lake" / "locks" / "publish.lock"
    assert here.key_of(path) == here.key_of(tmp_path / "link" / "locks" / "publish.lock") != there.key_of(path)
    assert here.key_of(path) != here.key_of(path.with_name("catalog.lock"))
    fixed = PostgresLocks("", Path("/shared/lake")).key_of(Path("/shared/lake/locks/publish.lock"))
    assert fixed == 1805391819951016332, "nodes of another version must agree on the key"


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda url: url.replace("etpi@", "etpi:wr0ng-pw@"), "authentication failed"),
        (lambda url: url.replace("postgresql://etpi@", "postgres etpi:wr0ng-pw@"), "not a URL"),
        (lambda url: url + "_missing", "does not exist"),
    ],
)
def test_refused_session_fails_at_once_and_shows_no_password(locks, tmp_path, change, says):
    started = time.monotonic()
    with pytest.raises(PostgresUnavailable, match=says) as failure:
        PostgresLocks(change(locks._url), tmp_path).is_held(tmp_path / "a.lock")
    assert isinstance(failure.value, BackendError) and time.monotonic() - started < 30
    assert "wr0ng-pw" not in str(failure.value) and PASSWORD not in str(failure.value)
    assert failure.value.__cause__ is None and failure.value.__suppress_context__


def test_silent_postgres_is_given_up_with_its_address(tmp_path, monkeypatch):
    monkeypatch.setattr(postgres_locks, "START_SECONDS", 0.1)
    with pytest.raises(PostgresUnavailable, match=r"127\.0\.0\.1.*port 1 failed"):
        PostgresLocks("postgresql+psycopg2://etpi@127.0.0.1:1/etpi", tmp_path).is_held(tmp_path / "a.lock")


# --- the lake --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["ended session", "restart"])
def test_holder_that_lost_its_lock_moves_no_pointer(lake, postgres_server, how):
    good = publish(lake, rows=4)
    with lake.lock("tito_pairs-few"):
        if how == "restart":
            postgres_server.stop()
            postgres_server.start()
        else:
            assert postgres_server.end_sessions() == 1
        with pytest.raises(LockLost, match="tito_pairs-few"):
            publish(lake, rows=5)
        with pytest.raises(LockLost), lake.shared_lock():
            lake.reinstate(good)
    assert lake.require(PAIRS) == good and not damaged(lake)
    assert publish(lake, rows=5).rows == {"turns": 5}, "the next holder publishes"


def test_lock_lost_between_the_manifest_and_the_pointer_moves_no_pointer(lake, postgres_server, monkeypatch):
    good, put = publish(lake, rows=4), lake_module.put_if_absent

    def end_sessions_after_the_manifest(path, source):
        stored = put(path, source)
        if "manifest-" in path.name:
            postgres_server.end_sessions()
        return stored

    monkeypatch.setattr(lake_module, "put_if_absent", end_sessions_after_the_manifest)
    with pytest.raises(LockLost):
        publish(lake, rows=5)
    assert lake.require(PAIRS) == good and not list((lake.root / ".staging").iterdir())


def test_staging_of_a_living_process_is_not_swept_and_that_of_a_dead_one_is(lake, postgres_server):
    with lake_of_another_node(lake).hold(lake.root / ".staging" / "theirs.lock"):
        (lake.root / ".staging" / "theirs").mkdir()
        publish(lake, rows=3)
        assert (lake.root / ".staging" / "theirs").is_dir()
    publish(lake, rows=4)
    assert not list((lake.root / ".staging").iterdir())


def test_removal_waits_for_no_run_of_another_node_and_names_it(lake):
    publish(lake, rows=3)
    publish(lake, rows=4)
    (lake.root / "tito_pairs/turns/experiment=plan_first/version=none").mkdir()
    with (
        lake_of_another_node(lake).hold(lake.root / "locks" / "lake.lock", shared=True),
        pytest.raises(LakeBusy, match=socket.gethostname()),
        lake.exclusive_lock(),
    ):
        pass
    with lake.exclusive_lock():
        assert not plan_garbage(lake, KEEP_NOTHING), "another node may not see the newest pointers yet"
        plan = plan_garbage(lake, KEEP_NOTHING, LATER)
        carry_out(lake, plan)
    assert {part.reason for part in plan} >= {"past version", "files of no version"}
    assert lake.require(PAIRS).rows == {"turns": 4} and not damaged(lake)


def test_removal_that_lost_the_lake_removes_nothing(lake, postgres_server):
    publish(lake, rows=3)
    publish(lake, rows=4)
    with lake.exclusive_lock():
        plan = plan_garbage(lake, KEEP_NOTHING, LATER)
        assert plan
        postgres_server.end_sessions()
        with pytest.raises(LockLost, match=" the lake "):
            carry_out(lake, plan)
    assert all(part.path.exists() for part in plan)


def test_machine_locks_of_two_nodes_do_not_wait_for_each_other(lake, tmp_path, cluster_settings, monkeypatch):
    with lake.machine_lock("accelerator"):
        assert not lake.machine_lock_file("accelerator").is_relative_to(lake.root)
        other = tmp_path / "other" / "cluster.toml"
        other.parent.mkdir()
        other.write_text(cluster_settings.read_text().replace('/cluster"', '/other"'))
        monkeypatch.setenv("ETPI_CLUSTER", str(other))
        with lake.machine_lock("accelerator"):  # as on another node
            pass
        with lake.lock("partition"):
            monkeypatch.setenv("ETPI_CLUSTER", str(cluster_settings))
            with pytest.raises(LockHeld), lake.lock("partition", wait=False):
                pass


def test_commands_that_remove_work_on_a_cluster(lake, monkeypatch, capsys):
    monkeypatch.setenv("ETPI_DATA", str(lake.root))
    publish(lake, rows=3)
    publish(lake, Ref("tito_pairs", "experiment", "other"), rows=4)
    with (
        lake_of_another_node(lake).hold(lake.root / "locks" / "lake.lock", shared=True),
        pytest.raises(LakeBusy, match=f"{os.getpid()} .*{socket.gethostname()}"),
    ):
        remove([("experiment", "other")], yes=True)
    assert remove([("experiment", "other")], yes=True) == 0
    assert collect_garbage(older_than=0, yes=True) == 0
    assert lake.refs("tito_pairs") == [PAIRS] and "in all" in capsys.readouterr().out


def test_journal_whose_lock_was_lost_takes_no_rollout(lake, postgres_server):
    folder = lake.scratch("rollouts/set/code")
    with Journal(folder, "spec") as journal:
        journal.append(made(TASKS[0], 0))
        with pytest.raises(JournalError, match=f"{os.getpid()} .*{socket.gethostname()}"), Journal(folder, "spec"):
            pass
        postgres_server.end_sessions()
        with Journal(folder, "spec") as next_holder:
            with pytest.raises(LockLost, match="journal"):
                journal.append(made(TASKS[1], 0))
            next_holder.append(made(TASKS[2], 0))
    with Journal(folder, "spec") as journal:
        assert len(journal) == 2 and journal.has(TASKS[2], 0) and not journal.has(TASKS[1], 0)
