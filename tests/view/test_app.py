"""Check that every page escapes texts, forbids scripts but its own, and reads nothing else."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

from etpi.cli import main
from etpi.view import formats
from etpi.view.catalog_file import Queries
from etpi.view.pages import overview
from etpi_resources import links
from etpi_resources.lake import catalog
from tests.support import viewed_lake
from tests.support.small_lake import put
from tests.support.viewed_lake import NAMES, SET, STUDY

PAGES = {
    "overview": "/",
    "experiment": links.experiment_page(STUDY),
    "regressions": links.regressions_page(STUDY) + "?all=1",
    "task": links.task_page(STUDY, "t2"),
    "list": links.rollouts_page(),
    "search": links.rollouts_page(text="<script>"),
    "rollout of a set": links.rollout_page("set", SET, NAMES["teacher"]),
    "held-out rollout": links.rollout_page("eval", STUDY, NAMES["student"]),
    "rollout of reinforcement": links.rollout_page("rl", STUDY, NAMES["rl"]),
    "tokens": links.tokens_page("set", SET, NAMES["teacher"], "agent1", 1),
    "data set": links.dataset_page(STUDY),
    "sequence": links.sequence_page(STUDY, "seq1"),
    "live": links.live_page(),
    "curves": links.curves_page(STUDY),
}


def without_keys(text: str) -> str:
    """Return a page without the one script that it may have."""
    script = '<script src="/keys.js" defer></script>'
    assert text.count(script) == 1
    return text.replace(script, "")


@pytest.mark.parametrize("name", PAGES)
def test_page_escapes_hostile_text_and_forbids_scripts(pages, name: str) -> None:
    response = pages.get(PAGES[name])
    assert response.status_code == 200
    assert without_keys(response.text).count("<script") == 0 and "onerror=" not in response.text
    assert not re.search(r"\sstyle=", response.text), "the policy forbids style attributes"
    policy = response.headers["content-security-policy"]
    assert policy.startswith("default-src 'none'; style-src 'self'; script-src 'self'; img-src 'self' data:; form-act")
    assert "unsafe" not in policy
    assert response.headers["x-content-type-options"] == "nosniff"


def test_hostile_text_is_shown_as_text(pages) -> None:
    text = pages.get(PAGES["rollout of a set"]).text
    assert text.count("&lt;script&gt;alert(&#39;x&#39;)&lt;/script&gt;") >= 6
    assert "<script" not in without_keys(text) and not set(text) & set("\u202e\x1b"), (
        "hidden characters are shown as their numbers"
    )


def test_a_text_of_megabytes_is_cut_and_its_rest_counted() -> None:
    shown = str(formats.visible("x" * (formats.LONGEST + 1234)))
    assert "[1,234 more characters" in shown and len(shown) < formats.LONGEST + 100
    assert formats.visible("x" * formats.LONGEST) == "x" * formats.LONGEST
    lines = formats.diff_lines("+y\n" * (formats.LONGEST_DIFF + 7))
    assert len(lines) == formats.LONGEST_DIFF + 1 and "[7 more lines" in lines[-1][1]


def test_every_link_of_a_page_leads_to_a_page(pages) -> None:
    seen, waiting = set(), ["/"]
    while waiting:
        address = waiting.pop()
        if address in seen or len(seen) > 50:
            continue
        seen.add(address)
        response = pages.get(address)
        assert response.status_code == 200 or address.startswith("/report/"), address
        for target in re.findall(r'href="([^"#]+)', response.text):
            target = target.replace("&amp;", "&")
            target = address.split("?")[0] + target if target.startswith("?") else target
            waiting.append(target)
    assert len(seen) > 30


def test_pages_write_nothing(viewed, pages) -> None:
    _, built = viewed
    before = {path: path.stat().st_mtime_ns for path in built.parent.rglob("*")}
    assert len(before) > 50
    for path in PAGES.values():
        pages.get(path)
    assert {path: path.stat().st_mtime_ns for path in built.parent.rglob("*")} == before


def test_nothing_but_reading_is_answered(pages) -> None:
    for path in ("/", "/rollouts", "/live"):
        assert pages.post(path).status_code == 405
        assert pages.delete(path).status_code == 405


@pytest.mark.parametrize(
    "path",
    [
        "/experiment/none", "/regressions/none", "/dataset/none", "/report/study", "/report/..%2f..%2fetc%2fpasswd",
        f"/task/{STUDY}?task=none", f"/task/{STUDY}", "/rollout/set/teacher_set/none", "/rollout/odd/teacher_set/x",
        f"/rollout/set/{SET}/{NAMES['teacher']}/tokens?agent=agent1&turn=9", f"/dataset/{STUDY}/sequence/none",
        "/nowhere", "/style.css/../app.py",
        "/live/rollout?journal=../../../etc/passwd", "/live/rollout?journal=/etc/passwd&offset=0",
    ],
)  # fmt: skip
def test_unknown_address_says_what_is_missing(pages, path: str) -> None:
    response = pages.get(path)
    assert response.status_code == 404
    assert "<h1>" in response.text and "root:" not in response.text


def test_report_is_served_with_links_to_this_server(tmp_path: Path) -> None:
    lake = viewed_lake.make(tmp_path / "data")
    folder = lake.root / "reports" / STUDY
    folder.mkdir(parents=True)
    address = links.REPORTED_VIEW + links.regressions_page(STUDY)
    (folder / "report.html").write_text(f'<style>p {{}}</style><a href="{address}">lost</a>\x1b\u202e')
    (tmp_path / "secret.html").write_text("secret")
    report = {"experiment": STUDY, "kind": "html", "path": f"reports/{STUDY}/report.html"}
    put(lake, "experiment_report", STUDY, {"reports": [report]})
    path = viewed_lake.build(lake, tmp_path / "etpi.duckdb")
    response = viewed_lake.client(lake, path).get(links.report_page(STUDY))
    assert f'<a href="/regressions/{STUDY}">lost</a>⟨U+001B⟩⟨U+202E⟩' in response.text
    assert "script-src" not in response.headers["content-security-policy"]
    assert response.headers["content-security-policy"].startswith("default-src 'none'; style-src 'unsafe-inline'")
    for outside in ("../secret.html", str(tmp_path / "secret.html"), f"reports/{STUDY}/../../../secret.html"):
        put(lake, "experiment_report", STUDY, {"reports": [report | {"path": outside}]})
        path = viewed_lake.build(lake, tmp_path / "other.duckdb")
        assert viewed_lake.client(lake, path).get(links.report_page(STUDY)).status_code == 404


def test_rebuilt_catalog_is_noticed_without_restart(tmp_path: Path) -> None:
    lake = viewed_lake.make(tmp_path / "data")
    path = viewed_lake.build(lake, tmp_path / "etpi.duckdb")
    client = viewed_lake.client(lake, path)
    before = client.get(f"/rollouts?made_for={SET}").text
    assert "2 rollouts" in before and "added1" not in before
    rows = viewed_lake.conversation("added1", rollout_set=SET, task_id="added_task")
    put(lake, "raw_rollouts", SET, rows)
    put(lake, "scored_rollouts", SET, {})
    assert client.get(f"/rollouts?made_for={SET}").text == before, "the file was not replaced yet"
    viewed_lake.build(lake, path)
    after = client.get(f"/rollouts?made_for={SET}").text
    assert "1 rollout." in after and "added_task" in after
    assert "teacher_set (1)" in after, "values of the filters are of the new file"


def test_without_catalog_the_command_says_what_to_do(tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.setenv("ETPI_DATA", str(tmp_path / "data"))
    assert main(["view", "--port", "1"]) == 1
    assert "etpi run catalog" in capsys.readouterr().err


def test_every_query_runs_on_an_empty_catalog_and_uses_no_hidden_variable(tmp_path: Path) -> None:
    from etpi.view.catalog_file import CatalogFile
    from etpi_assets.graph import GRAPH
    from etpi_resources.lake.lake import Lake

    path = catalog.build(Lake(tmp_path / "data"), GRAPH.values(), tmp_path / "etpi.duckdb")
    names = sorted(file.stem for file in (catalog.sql_folder() / "pages").glob("*.sql"))
    assert len(names) > 20
    with CatalogFile(path).queries() as queries:
        for name in names:
            rows = queries.rows(name)
            assert rows == [] or name == "tokenizer", name
        with pytest.raises(KeyError, match=r"suites\.sql .*\['experiment'\]"):
            queries.rows("suites", experiment="x")


def test_settings_of_an_experiment_without_training_leave_out_those_of_training() -> None:
    spec = {"train": {"method": "none", "epochs": 2.0}, "select": {"shortest_correct": False, "require": ["a", "b"]}}
    assert overview.settings(spec) == [
        ("train.method", "none"), ("select.require", "a, b"), ("select.shortest_correct", "false"),
    ]  # fmt: skip
    assert ("train.epochs", "2.0") in overview.settings({"train": {"method": "full", "epochs": 2.0}})


def test_first_run_can_be_looked_at_before_it_publishes_a_catalog(tmp_path: Path, monkeypatch) -> None:
    from etpi.view import serve

    monkeypatch.setenv("ETPI_DATA", str(viewed_lake.make(tmp_path / "data").root))
    served: list[Any] = []
    monkeypatch.setattr(serve, "serve", lambda app, *_: served.append(app))
    assert serve.serve_view("127.0.0.1", 1, ()) == 0
    assert links.experiment_page(STUDY) in TestClient(served[0], base_url="http://localhost").get("/").text


def test_a_task_page_shows_the_task_of_the_experiments_own_suite(tmp_path: Path) -> None:
    lake = viewed_lake.make(tmp_path / "data")
    task = {"task_id": "t2", "suite": "another", "repo": "r", "split": "train", "instruction": "elsewhere"}
    put(lake, "tasks", "another", {"tasks": [task]})
    client = viewed_lake.client(lake, viewed_lake.build(lake, tmp_path / "etpi.duckdb"))
    text = client.get(links.task_page(STUDY, "t2")).text
    assert "Instruction" in text and "elsewhere" not in text


ODD = ["a/b", "a b", "what?", "100%", "a%2Fb", "#1", "é", "-x", "'\"", "a\nb", "x" * 200]


@pytest.mark.parametrize("name", ODD)
def test_page_of_an_odd_name_is_asked_for_that_name(pages, monkeypatch, name: str) -> None:
    asked = []
    real = Queries.rows

    def rows(self: Queries, query: str, **more: Any) -> Any:
        asked.append(more)
        return real(self, query, **more)

    monkeypatch.setattr(Queries, "rows", rows)
    for path in (
        links.experiment_page(name),
        links.rollout_page("set", SET, name),
        links.rollout_page("set", name, NAMES["teacher"]),
        links.sequence_page(STUDY, name),
        links.report_page(name),
    ):
        asked.clear()
        pages.get(path)
        assert any(name in more.values() for more in asked), path
