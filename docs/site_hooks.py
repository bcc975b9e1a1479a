"""Hooks of the site that `make docs-site` builds: pages from outside `docs`, and links that lead out of it."""

from __future__ import annotations

import os
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
OUTSIDE = {
    "index.md": "README.md",
    "contributing.md": "CONTRIBUTING.md",
    "changelog.md": "CHANGELOG.md",
    "bench.md": "bench/README.md",
    "lab/index.md": "lab/README.md",
    **{
        f"lab/{path.relative_to(ROOT / 'lab/docs').as_posix()}": path.relative_to(ROOT).as_posix()
        for path in (ROOT / "lab/docs").rglob("*.*")
    },
}
"""Page or picture of the site -> its file in the repository, for files outside `docs`."""
PYTHON_API = """# Python API

The names of `import etpi`. [SQL and Python](../queries.md) has examples.

::: etpi.api
    options:
      members: [open_lake, load, OpenLake, Experiment, Dataset]
"""
_CODE_OR_LINK = re.compile(
    r"(?P<code>^```.*?^```|(`+)[^\n]*?(?<!`)\2(?!`))"
    r"|(?P<image>!?)\[(?P<text>[^\]]*)\]\((?P<link>[^)\s]+)\)"
    r"|(?P<brackets>\] ?\[)",
    re.DOTALL | re.MULTILINE,
)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages from outside `docs`, and the one of the Python API."""
    for page, source in OUTSIDE.items():
        files.append(File.generated(config, page, abs_src_path=str(ROOT / source)))
    files.append(File.generated(config, "reference/python_api.md", content=PYTHON_API))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Point links at the site's pages; a link to a file that is no page keeps its text alone. Blocks of code keep only
    their language of the words in their first line."""
    uri = page.file.src_uri
    folder = (ROOT / OUTSIDE.get(uri, f"docs/{uri}")).parent
    pages = {source: target for target, source in OUTSIDE.items()}

    def site_link(match: re.Match[str]) -> str:
        link, code = match["link"], match["code"]
        if code and "<![" in code:  # Python's parser of HTML, which reads the page first, refuses it
            characters = code.strip("`").replace("\\|", "|")
            return f"<code>{''.join(c if c.isalnum() else f'&#{ord(c)};' for c in characters)}</code>"
        if code and code.startswith("```"):  # tests find a block by the second word; MkDocs takes none
            return re.sub(r"\A(```\w+) \w+", r"\1", code)
        if match["brackets"]:
            return match[0].replace("[", "\\[")  # `[one] [two]` is no reference
        if code or re.match(r"[a-z]+:|#", link):
            return match[0]
        path, _, anchor = link.partition("#")
        target = Path(os.path.normpath(folder / path)).relative_to(ROOT).as_posix()
        if not (ROOT / target).exists():
            raise PluginError(f"{uri}: {link} leads nowhere")
        target = pages.get(target, target.removeprefix("docs/"))
        if target not in files.src_uris:
            return match["text"]
        path = os.path.relpath(target, Path(uri).parent)
        return f"{match['image']}[{match['text']}]({path}{anchor and '#'}{anchor})"

    return _CODE_OR_LINK.sub(site_link, markdown)
