"""The console command: fast answers, exit codes, and where it writes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from etpi import cli, commands, errors
from etpi.dagster_home import SETTINGS, prepare_dagster_home
from etpi_assets.exports import EXPORTS
from etpi_resources.lake.lake import Lake, LakeError, Ref
from tests.support.waiting import until
from tests.support.web_server import free_port

HEAVY = ("dagster", "torch", "pyarrow", "duckdb", "transformers")


def _imported(*words: str) -> tuple[int, set[str]]:
    """(the exit code of `etpi WORDS`, which heavy packages it imported)."""
    program = (
        "import sys; from etpi.cli import main; code = main(sys.argv[1:]); "
        f"print(code, *set({HEAVY!r}) & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", program, *words], capture_output=True, text=True, check=True)
    code, *result = done.stdout.splitlines()[-1].split()
    return int(code), set(result)


@pytest.mark.parametrize("words", [("--help",), ("run", "--help"), ("demmo",), ("ui", "--prot", "1")])
def test_help_and_a_mistyped_command_import_nothing_heavy(words):
    code, imported = _imported(*words)
    assert code == (0 if "--help" in words else 2)
    assert imported == set()


def test_help_has_every_command_once_in_its_group(capsys):
    assert cli.main(["--help"]) == 0
    text = capsys.readouterr().out
    assert [line for line in text.splitlines() if line in ("Start:", "Run:", "Look:", "Use and share:", "Operate:")]
    for name, command in cli.etpi.commands.items():
        assert command.hidden or sum(line.startswith(f"  {name} ") for line in text.splitlines()) == 1, name


def test_formats_of_export_are_listed_in_its_help(capsys):
    cli.main(["export", "--help"])
    text = " ".join(capsys.readouterr().out.split())
    assert all(f"{name}," in text or f"{name} or" in text or f"or {name}" in text for name in EXPORTS)


def test_folder_that_etpi_data_mistypes_is_named(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ETPI_DATA", str(tmp_path / "dtaa"))
    assert cli.main(["status"]) == 0 and "dtaa" in capsys.readouterr().err
    assert cli.main(["view"]) == 1 and f"ETPI_DATA={tmp_path / 'dtaa'}" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["run", "status"])
def test_mistyped_experiment_is_refused_without_importing_dagster_or_torch(command):
    code, imported = _imported(command, "plan_first_tinny")
    assert code == 1
    assert not imported & {"dagster", "torch", "transformers"}


def test_mistyped_command_names_the_nearest(capsys):
    assert cli.main(["statsu"]) == 2
    assert "status" in capsys.readouterr().err


def test_expected_error_is_one_message(capsys):
    assert cli.main(["run", "plan_first_tinny"]) == 1
    said = capsys.readouterr().err
    assert said.startswith("etpi: there is no experiment 'plan_first_tinny'. Did you mean 'plan_first_tiny'")
    assert "Traceback" not in said


def test_unexpected_error_keeps_its_traceback(monkeypatch):
    monkeypatch.setattr(errors, "ExpectedError", LookupError)
    with pytest.raises(Exception, match="'plan_first_tinny'"):
        cli.main(["run", "plan_first_tinny"])


def test_stopped_command_exits_with_130(monkeypatch, capsys):
    from etpi import commands

    def stopped(*names, **options):
        raise KeyboardInterrupt

    monkeypatch.setattr(commands, "show_status", stopped)
    assert cli.main(["status"]) == 130
    assert "the same command continues" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("variables", "home"),
    [
        ({"ETPI_DATA": ""}, ".dagster_home"),
        ({"ETPI_DATA": "données"}, "données/.dagster_home"),
        ({"ETPI_DATA": "données", "DAGSTER_HOME": "elsewhere"}, "elsewhere"),
    ],
)
def test_dagster_home_follows_the_variables(tmp_path: Path, monkeypatch, variables, home):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("DAGSTER_HOME", "")
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert prepare_dagster_home() == tmp_path / home
    assert os.environ["DAGSTER_HOME"] == str(tmp_path / home)
    assert (tmp_path / home / "dagster.yaml").read_text() == SETTINGS.read_text()


def test_settings_of_an_existing_home_are_kept(tmp_path: Path, monkeypatch):
    monkeypatch.setenv("DAGSTER_HOME", str(tmp_path))
    (tmp_path / "dagster.yaml").write_text("telemetry: {enabled: false}\n")
    prepare_dagster_home()
    assert (tmp_path / "dagster.yaml").read_text() == "telemetry: {enabled: false}\n"


def test_unwritable_home_names_the_remedy(tmp_path: Path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("DAGSTER_HOME", str(tmp_path / "file" / "home"))
    with pytest.raises(LakeError, match="file/home .*export DAGSTER_HOME="):
        prepare_dagster_home()


@pytest.mark.parametrize("mark", ["?", "%20"])
def test_home_that_an_address_of_a_database_cannot_hold_is_refused(tmp_path: Path, monkeypatch, mark):
    monkeypatch.setenv("DAGSTER_HOME", str(tmp_path / f"a{mark}b"))
    with pytest.raises(LakeError, match="DAGSTER_HOME="):
        prepare_dagster_home()
    assert not list(tmp_path.iterdir())


def test_new_home_beside_a_lake_with_results_says_that_its_history_is_missing(tmp_path: Path, monkeypatch, capsys):
    monkeypatch.setenv("ETPI_DATA", str(tmp_path / "lake"))
    monkeypatch.setenv("DAGSTER_HOME", "")
    Lake.open().publish(Ref("experiment_spec", "experiment", "e"), {}, input_key="k", inputs={}, spec_hash="s")
    for notices in (1, 0):
        prepare_dagster_home()
        assert capsys.readouterr().err.count("never materialized") == notices


@pytest.mark.slow
def test_ui_serves_the_graph_from_an_empty_folder_and_ends_when_stopped(tmp_path: Path):
    port = free_port()
    environment = {**os.environ, "ETPI_DATA": "", "PYTHONPATH": str(Path(__file__).parents[2])}
    log = (tmp_path / "log").open("w")
    words = [sys.executable, "-m", "etpi", "ui", "--port", str(port)]

    def hear_interrupts() -> None:  # a shell makes background jobs and their children ignore SIGINT
        signal.signal(signal.SIGINT, signal.default_int_handler)

    with subprocess.Popen(
        words, cwd=tmp_path, env=environment, stdout=log, stderr=log, preexec_fn=hear_interrupts
    ) as server:
        try:
            errors = (urllib.error.URLError, ConnectionError, TimeoutError)
            locations = until(lambda: _locations(port), 120, (tmp_path / "log").read_text, 0.5, errors)
            assert locations == ["etpi"]
        finally:
            server.send_signal(signal.SIGINT)
            server.wait(60)
    assert (tmp_path / ".dagster_home/dagster.yaml").is_file()


def _locations(port: int) -> list[str]:
    """The names of the page's code locations, [] until it has loaded them."""
    query = "{ repositoriesOrError { ... on RepositoryConnection { nodes { location { name } } } } }"
    address, body = f"http://127.0.0.1:{port}/graphql", json.dumps({"query": query}).encode()
    request = urllib.request.Request(address, body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=20) as answer:
        nodes = json.load(answer)["data"]["repositoriesOrError"].get("nodes", [])
    return [node["location"]["name"] for node in nodes]


def test_page_of_another_home_is_refused_because_dagster_reads_the_env_file_first(tmp_path, monkeypatch):
    from etpi.web import ui

    started: list[Path] = []
    monkeypatch.setattr(ui, "serve_dagster", lambda host, port, names, home: started.append(home))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("DAGSTER_HOME", str(tmp_path / "mine"))
    monkeypatch.setenv("ETPI_SHIPPED", "demo")
    (tmp_path / ".env").write_text(f'DAGSTER_HOME="{tmp_path / "theirs"}"\n')
    with pytest.raises(LakeError, match=r"\.env .*DAGSTER_HOME=.*theirs.*mine"):
        commands.serve_page("127.0.0.1", 1, [])
    assert not started
    (tmp_path / ".env").write_text(f'DAGSTER_HOME="{tmp_path / "mine"}"\n')
    commands.serve_page("127.0.0.1", 1, [])
    assert started == [tmp_path / "mine"]
