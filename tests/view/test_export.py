"""`etpi view --export`: an experiment's pages as files."""

from __future__ import annotations

import re
from html import unescape
from pathlib import Path

import pytest

from etpi.cli import main
from etpi.view import serve
from tests.support.viewed_lake import NAMES, STUDY


def test_exported_pages_link_to_each_other_and_to_nothing_else(
    viewed: tuple, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lake, catalog = viewed
    monkeypatch.setenv("ETPI_DATA", str(lake.root))
    monkeypatch.setenv("ETPI_CATALOG", str(catalog))
    folder = tmp_path / "share"
    (tmp_path / ".share.building").mkdir()  # of an export that was stopped
    (tmp_path / ".share.building/left.html").write_text("<a href='gone'>")
    monkeypatch.setattr(serve, "SHOWN_SECONDS", 0.0)
    assert main(["view", "--export", STUDY, str(folder)]) == 0
    pages = {file.name: file.read_text() for file in folder.glob("*.html")}
    shown = capsys.readouterr()
    assert f"{len(pages)} pages" in shown.out and "left.html" not in pages
    counts = [(int(a), int(b)) for a, b in re.findall(r"(\d+) of (\d+) pages$", shown.err, re.MULTILINE)]
    assert {total for _, total in counts} == {len(pages)}, "the total is known before the first rollout"
    assert counts[-1] == (len(pages), len(pages)) and len(counts) > 1
    targets = {unescape(t) for text in pages.values() for t in re.findall(r'(?:href|src)="([^"#]+)', text)}
    assert targets and all((folder / target).is_file() for target in targets)
    assert sum(NAMES["student"] in text for text in pages.values()) > 2
    titles = " ".join(re.findall(r"<h1>(.*?)</h1>", "".join(pages.values()), re.DOTALL))
    assert "Data set" in titles and "Regressions" in titles and "as tokens" not in titles
    assert "<form" not in "".join(pages.values())
    assert main(["view", "--export", STUDY, str(folder)]) == 1, "a folder that exists is left alone"
    assert main(["view", "--export", "none", str(tmp_path / "other")]) == 1 and not (tmp_path / "other").exists()


@pytest.mark.parametrize(
    ("address", "belongs"), [("/dataset/a", True), ("/dataset/a/sequence/s", True), ("/dataset/ab/sequence/s", False)]
)
def test_data_of_an_experiment_whose_name_begins_alike_are_not_exported(address: str, belongs: bool) -> None:
    assert serve._belongs(address, "a") is belongs
