"""The plugin for several machines is found only where `ETPI_CLUSTER` asks for it."""

from __future__ import annotations

from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

from etpi.cli import main
from etpi_resources import backend as module
from etpi_resources.backend import BackendError, backend


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch):
    """Take these entry points as the only ones of the group."""
    module._open.cache_clear()

    def install(*points: EntryPoint) -> None:
        monkeypatch.setattr(module, "entry_points", lambda group: points if group == "etpi.backends" else ())

    yield install
    module._open.cache_clear()


def test_one_machine_looks_for_no_plugin(installed, monkeypatch: pytest.MonkeyPatch) -> None:
    installed(EntryPoint("broken", "no_such_module:open", "etpi.backends"))
    monkeypatch.delenv("ETPI_CLUSTER", raising=False)
    assert backend() is None
    monkeypatch.setenv("ETPI_CLUSTER", "")
    assert backend() is None


def test_plugin_gets_the_settings_of_the_environment(installed, monkeypatch: pytest.MonkeyPatch) -> None:
    installed(EntryPoint("echo", "pathlib:PurePath", "etpi.backends"))
    for name in ("/one/cluster.toml", "/two/cluster.toml"):
        monkeypatch.setenv("ETPI_CLUSTER", name)
        assert backend() == Path(name)


def test_settings_without_a_plugin_are_one_error_with_the_remedy(
    installed, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    installed()
    monkeypatch.setenv("ETPI_CLUSTER", "/shared/lake/cluster.toml")
    with pytest.raises(BackendError, match=r"pip install etpi-cluster"):
        backend()
    assert main(["status", "plan_first_tiny"]) == 1
    printed = capsys.readouterr().err
    assert "ETPI_CLUSTER is set" in printed and "Traceback" not in printed and printed.count("\n") == 1
