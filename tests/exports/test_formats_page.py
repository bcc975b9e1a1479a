"""docs/reference/formats.md follows the registries."""

from __future__ import annotations

from pathlib import Path

from docs.generate.formats import page
from etpi_assets.exports import EXPORTS
from etpi_assets.importers import IMPORTERS


def test_page_is_current() -> None:
    written = Path(__file__).parents[2] / "docs/reference/formats.md"
    assert written.read_text() == page(), "run: make docs"


def test_every_format_states_what_it_keeps_and_loses() -> None:
    for doc in (*(importer.doc for importer in IMPORTERS.values()), *EXPORTS.values()):
        for text in (doc.title, doc.files, doc.keeps, doc.loses):
            assert len(text) > 5 and not text.endswith("."), doc.title
