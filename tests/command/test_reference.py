"""docs/reference: every page is current, and leaves nothing out."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from pydantic import BaseModel

from docs.generate import published, specs
from docs.generate.__main__ import PAGES
from etpi_assets.checks import CHECKS
from etpi_assets.specs.load import MODELS, inner_section, load_shipped

SHIPPED = load_shipped()
ROOT = Path(__file__).parents[2]
PACKAGES = ("etpi", "etpi_assets", "cluster/etpi_cluster", "etpi_resources")
READ = re.compile(r"environ(?:b)?(?:\.get|\.setdefault|\.pop)?[\[(]\s*([\"']?)(\w+)\1")
TESTED = re.compile(r"([\"']?)\b([A-Z_]+|container)\1 (?:not )?in (?:os\.)?environ(?:ment)?\b")
DYNAMIC = {"variable", "match", "name"}
"""Variables that a spec or a list names; the page says so."""


@pytest.mark.parametrize("name", [name for name in PAGES if name.startswith("reference/")])
def test_page_is_current(name):
    written = (ROOT / "docs" / name).read_text(encoding="utf-8")
    assert written == PAGES[name](), f"docs/{name} is not current: run `make docs`"


def test_every_blocking_check_says_what_it_does_with_a_real_model():
    infos = [(asset, name, info) for asset, checks in CHECKS.items() for name, info in checks.items()]
    assert [(asset, name) for asset, name, info in infos if bool(info.real) != info.blocking] == []


@pytest.mark.parametrize("file", sorted({document["file"] for document in published.documents()}))
def test_numbers_of_a_document_are_all_on_the_page_and_no_others(file):
    folder = os.environ.get("ETPI_DOCUMENTS")
    if not folder:
        pytest.skip("ETPI_DOCUMENTS names no folder of the documents")
    assert published.unaccounted(file, (Path(folder) / file).read_text(encoding="utf-8")) == (set(), set())


def test_number_that_a_document_adds_or_loses_is_noticed():
    added, lost = published.unaccounted("grpo-tcr-agent-model-card.txt", "Epochs: 10, clip 0.28, and 12,345 others")
    assert added == {"12345"} and {"32768", "10480"} <= lost and "10" not in lost


@pytest.mark.parametrize(("printed", "where"), published.keys(), ids=lambda text: text)
def test_published_number_is_in_its_spec(printed, where):
    assert published.value(where, SHIPPED) == pytest.approx(published.number(printed), rel=1e-9)


def test_every_spec_key_has_a_description():
    lacking = [f"{model.__name__}.{name}" for model, name, field in _fields() if not field.description]
    assert lacking == []
    vague = [f"{model.__name__}.{name}" for model, name, field in _fields() if not field.description.endswith(".")]
    assert vague == [], "a description is a sentence"


def test_every_spec_key_is_on_the_page():
    page = specs.page()
    assert [name for _, name, _ in _fields() if f"| `{name}` |" not in page] == []
    assert page.count("\n| `") == len(list(_fields())) > 200


def _fields() -> Iterator[tuple[type[BaseModel], str, object]]:
    """Every key of every section, each section once."""
    seen: set[type[BaseModel]] = set()

    def walk(model):
        if model in seen:
            return
        seen.add(model)
        for name, field in model.model_fields.items():
            yield model, name, field
            if inner := inner_section(field.annotation):
                yield from walk(inner)

    for model in MODELS.values():
        yield from walk(model)


def test_every_environment_variable_is_documented():
    page = (ROOT / "docs" / "reference" / "environment.md").read_text("utf-8")
    known = set(re.findall(r"^\| `(\w+)` \|", page, re.MULTILINE))
    constants = {
        match[1]: match[2]
        for path in _sources()
        for match in re.finditer(r"^([A-Z_]+)(?:: \w+)? = \"(\w+)\"$", path.read_text("utf-8"), re.MULTILINE)
    }
    used = set()
    for path in _sources():
        text = path.read_text("utf-8")
        for quote, name in (*READ.findall(text), *TESTED.findall(text)):
            used.add(name if quote else constants.get(name, name))
    for path in (ROOT / "etpi_assets" / "specs").rglob("*.toml"):
        used |= set(re.findall(r"\$\{(\w+)\}", path.read_text("utf-8")))
    assert used - known - DYNAMIC == set(), "describe it in docs/reference/environment.md"
    unread = {name for name in known if name.startswith("ETPI_")} - used
    assert unread == set(), "no code reads it any more"


def test_view_columns_have_meanings():
    assert [line for line in PAGES["reference/tables.md"]().splitlines() if line.endswith("|  |")] == []


def test_make_docs_writes_the_pages():
    assert re.search(r"^docs:.*\n\t@\$\(BIN\)/python -m docs\.generate$", (ROOT / "Makefile").read_text(), re.MULTILINE)


def _sources() -> list[Path]:
    return [path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))]
