"""docs/faults.md: every line is one that a test holds."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support import docs_pages


def test_every_line_of_the_page_has_a_test():
    sources = "\n".join(path.read_text() for path in Path(__file__).parents[1].rglob("test_*.py"))
    named = [line.split(" | ")[0].removeprefix("| ").replace("&lt;", "<") for line in docs_pages.lines()]
    assert len(set(named)) == len(named) > 10
    assert [fault for fault in named if f'"{fault}"' not in sources] == []
    assert sources.count("stopped(\n") + sources.count('stopped("') >= 10


def test_stopped_fails_without_failed_check_or_without_line_on_page(tmp_path, monkeypatch):
    page = tmp_path / "faults.md"
    page.write_text(f"{docs_pages.HEAD}\n|---|---|---|---|\n")
    monkeypatch.setattr(docs_pages, "PAGE", page)
    failed = {"gate": "it is 3 of 4, too few"}
    with pytest.raises(AssertionError, match="^other "):
        docs_pages.stopped("a <fault>", "asset", failed, "other", "too few")
    with pytest.raises(AssertionError, match="lacks the line"):
        docs_pages.stopped("a <fault>", "asset", failed, "gate", "too few")
    monkeypatch.setenv("ETPI_WRITE_FAULTS", "1")
    for says in ("3 of 4", "too few"):
        docs_pages.stopped("a <fault>", "asset", failed, "gate", says)
    assert docs_pages.lines() == ["| a &lt;fault> | `asset` | `gate` | too few |"]
