"""The hand-written pages: their links lead somewhere, and the picture of the graph is that of the graph."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = sorted(
    [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "bench").glob("*.md"), *(ROOT / "lab").rglob("*.md")]
)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_relative_links_resolve(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    prose = re.sub(r"^```.*?^```|`[^`\n]*`", "", text, flags=re.DOTALL | re.MULTILINE)
    broken = []
    for link in re.findall(r"\]\(([^)\s]+)\)", prose):
        if re.match(r"[a-z]+:", link):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        if not target.exists() or (anchor and target.suffix == ".md" and anchor not in _anchors(target)):
            broken.append(link)
    assert not broken, f"{page.relative_to(ROOT)}: {broken}"


def test_picture_of_the_graph_is_up_to_date() -> None:
    command = "docs/images/draw_asset_graph.py"
    drawn = subprocess.run([sys.executable, command], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    picture = (ROOT / "docs/images/asset_graph.svg").read_text(encoding="utf-8")
    assert drawn == picture, f"python {command} > docs/images/asset_graph.svg"


def _anchors(page: Path) -> set[str]:
    """Return the anchors of a page's headings, as GitHub spells them."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
