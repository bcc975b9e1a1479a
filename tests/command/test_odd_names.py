"""Names from outside through commands, stores and pages: task ids of a file, folders of a lake, words of a command."""

from __future__ import annotations

import html
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from urllib.parse import urljoin, urlsplit

import pytest
from starlette.testclient import TestClient

from etpi import cli
from etpi.view.app import make_app
from etpi_resources.chat.format import load_chat_format
from etpi_resources.lake.lake import Lake
from tests.support.models import make_base
from tests.support.own_runs import recorded_run, write_runs

NAMES = {
    "quotes": 'it\'s "quoted"',
    "query": "50%?x=1&y#part",
    "folders": "a/b/../../c",
    "escaped": "%2e%2e%2f",
    "newline": "two\nlines",
    "option": "--help",
    "unicode": "ünï→🙂\u202e",
    "long": "x" * 200,
    "markup": "<b>&amp;{{ 7 * 7 }}",
    "shell": "$HOME`id`;|*",
    "dots": "..",
}


@pytest.fixture(scope="module")
def worked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a data set of one run for each name, made by commands."""
    folder = tmp_path_factory.mktemp("odd")
    runs = [
        recorded_run(number, 2) | {"instance_id": name, "repo": name, "model": name}
        for number, name in enumerate(NAMES.values())
    ]
    write_runs(folder, runs)
    make_base(folder / "student", load_chat_format("tiny", "qwen3"), positions=32768)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.delenv("ETPI_DATA", raising=False)
        patch.setenv("DAGSTER_HOME", str(folder / "home"))
        assert cli.main(["init", "--from", "runs.jsonl", "--model", "student", "--name", "odd", "--yes"]) == 0
        assert cli.main(["run", "odd"]) == 0
    return folder


@pytest.fixture
def cwd(worked: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(worked)
    monkeypatch.delenv("ETPI_DATA", raising=False)
    monkeypatch.setenv("DAGSTER_HOME", str(worked / "home"))
    return worked


@pytest.mark.slow
def test_task_keeps_its_name_in_the_catalog(cwd, capsys) -> None:
    capsys.readouterr()
    for view in ("rollouts", "upweighted_dataset.dataset_rows"):
        for column in ("task_id", "repo", "teacher"):
            assert cli.main(["sql", "--json", "-c", f"SELECT DISTINCT {column} AS name FROM {view}"]) == 0
            assert {row["name"] for row in json.loads(capsys.readouterr().out)} == set(NAMES.values()), column
    for name in NAMES.values():
        literal = name.replace("'", "''")
        assert cli.main(["sql", "--json", "-c", f"SELECT 1 AS one FROM rollouts WHERE task_id = '{literal}'"]) == 0
        assert json.loads(capsys.readouterr().out) == [{"one": 1}], name


@pytest.mark.slow
def test_every_page_that_a_page_links_opens(cwd) -> None:
    pages = TestClient(make_app(Lake(cwd / "data"), cwd / "etpi.duckdb"), base_url="http://localhost")
    todo, seen = ["/"], set()
    while todo:
        path = todo.pop()
        if path in seen:
            continue
        seen.add(path)
        response = pages.get(path)
        assert response.status_code == 200, path
        for link in re.findall(r'href="([^"]+)"', response.text):
            target = urlsplit(urljoin(f"http://localhost{path}", html.unescape(link)))
            if target.netloc == "localhost" and "/tokens" not in target.path:
                todo.append(target._replace(scheme="", netloc="", fragment="").geturl())
    rollouts = {path.split("?")[0] for path in seen if path.startswith("/rollout/")}
    assert len(rollouts) == len(NAMES)


@pytest.mark.slow
def test_export_push_and_pull_keep_every_name(cwd, tmp_path, capsys) -> None:
    assert cli.main(["export", "odd", "--format", "trl", "--to", str(tmp_path / "rows")]) == 0
    assert cli.main(["push", "odd", "--to", str(tmp_path / "bucket")]) == 0
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ETPI_DATA", str(tmp_path / "other"))
        assert cli.main(["pull", "odd", "--from", str(tmp_path / "bucket")]) == 0
        assert cli.main(["verify", "--deep"]) == 0
        capsys.readouterr()
        assert cli.main(["sql", "--json", "-c", "SELECT DISTINCT task_id FROM rollouts"]) == 0
    assert {row["task_id"] for row in json.loads(capsys.readouterr().out)} == set(NAMES.values())


COMMANDS = {
    "run": ("run", "--"), "dry run": ("run", "--dry-run", "--"), "status": ("status", "--"), "fetch": ("fetch", "--"),
    "explain": ("explain", "--", "sft_checkpoint"), "export": ("export", "--format", "trl", "--to", "{to}", "--"),
    "remove": ("rm", "--"), "push": ("push", "--to", "{to}", "--"), "pull": ("pull", "--from", "{to}", "--"),
    "rehearse": ("rehearse", "--"), "model": ("model", "--"), "report": ("sql", "--"),
    "model of a student": ("init", "--from", "runs.jsonl", "--name", "n", "--yes", "--model"),
    "runs": ("init", "--model", "tiny", "--name", "n", "--yes", "--from"),
    "tasks": ("init", "--name", "n", "--yes", "--tasks"), "audit": ("audit", "--"), "rejudge": ("rejudge", "--"),
    "taint": ("taint", "--from"), "blame": ("blame", "--"), "schema": ("schema", "--"), "doctor": ("doctor", "--"),
    "endpoint": ("init", "endpoint", "--name", "n", "--yes", "--"),
    "capture": ("capture", "--url", "http://127.0.0.1:1", "--model", "m", "--to", "{to}", "--tokenizer"),
}  # fmt: skip


@pytest.mark.parametrize("command", COMMANDS)
def test_a_word_that_names_nothing_is_refused_in_a_sentence(tmp_path, monkeypatch, capsys, command: str) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ETPI_DATA", str(tmp_path / "lake"))
    write_runs(tmp_path, [recorded_run(0, 2)])
    for name in NAMES.values():
        if name == NAMES["dots"] and command in ("runs", "tasks"):
            continue  # a folder that exists
        words = [word.format(to=tmp_path / "to") for word in COMMANDS[command]]
        try:
            code = cli.main([*words, name])
        except Exception as error:
            raise AssertionError(f"{name!r} ends in a trace") from error
        shown = capsys.readouterr()
        assert code in (1, 2) and (shown.err or shown.out), name
        assert "Traceback" not in shown.err, name
    assert not (tmp_path / "specs").exists()


@pytest.mark.parametrize("name", NAMES)
def test_a_name_of_a_spec_is_held_to_the_folders_of_a_lake(tmp_path, monkeypatch, capsys, name: str) -> None:
    monkeypatch.chdir(tmp_path)
    write_runs(tmp_path, [recorded_run(0, 2)])
    assert cli.main(["init", "--from", "runs.jsonl", "--model", "tiny", "--yes", f"--name={NAMES[name]}"]) in (1, 2)
    assert capsys.readouterr().err and not list(tmp_path.glob("specs/*/*.toml"))


@pytest.mark.parametrize("name", [name for name in NAMES if name not in ("folders", "dots")])
def test_a_lake_works_in_a_folder_of_any_name_or_refuses_it(tmp_path, monkeypatch, capsys, name: str) -> None:
    root = tmp_path / NAMES[name]
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ETPI_DATA", str(root))
    code = cli.main(["status"])
    error = capsys.readouterr().err
    if code:
        assert code == 1 and "move" in error and "Traceback" not in error
    else:
        assert cli.main(["sql", "-c", "SELECT 1"]) in (0, 1)


@pytest.mark.parametrize("words", [("status", "--all"), ("--help",), ("sql", "--list"), ("schema", "experiment")])
def test_a_reader_that_leaves_early_ends_a_command_without_a_trace(tmp_path, words: tuple[str, ...]) -> None:
    read, write = os.pipe()
    os.close(read)
    environment = {**os.environ, "ETPI_DATA": str(tmp_path / "lake")}
    command = [sys.executable, "-m", "etpi", *words]
    done = subprocess.run(command, stdout=write, stderr=subprocess.PIPE, text=True, env=environment, cwd=tmp_path)
    os.close(write)
    assert done.returncode in (1, 141) and "Traceback" not in done.stderr and "Exception" not in done.stderr


def test_a_command_without_stdout_ends_without_a_trace(tmp_path) -> None:
    environment = {**os.environ, "ETPI_DATA": str(tmp_path / "lake")}
    line = f"{sys.executable} -m etpi status >&-"
    done = subprocess.run(["sh", "-c", line], stderr=subprocess.PIPE, text=True, env=environment, cwd=tmp_path)
    assert done.returncode in (0, 1, 141) and "Traceback" not in done.stderr
