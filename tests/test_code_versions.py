"""Code versions: which asset partitions an edit of the project's own code changes, and which it must leave alone.

Each edit of `mutations.EDITS` is made in a copy of the packages. An edit is missed where the code version of a partition
stays whose result it can change; it is over-reported where the version changes although the result cannot.
"""

from __future__ import annotations

import ast
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from mutations import EDITS, EXPERIMENTS, SUITES

from etpi_assets import versions
from etpi_assets.code.choices import CHOICES, INFRASTRUCTURE, narrowing
from etpi_assets.code.codebase import CALLED_ELSEWHERE, PACKAGES, ROOT, Codebase
from etpi_assets.graph import GRAPH
from etpi_assets.specs.load import Specs, load_specs
from etpi_assets.versions import PartitionCode

Partition = tuple[str, str]
MOST_OVER_REPORTED = 0.10


@pytest.fixture(scope="module")
def specs() -> Specs:
    return load_specs()


@pytest.fixture(scope="module")
def copy(tmp_path_factory) -> Path:
    """The packages and sql/ in a folder of their own."""
    folder = tmp_path_factory.mktemp("copy")
    for name in (*PACKAGES, "sql"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    return folder


@pytest.fixture(scope="module")
def unchanged(copy) -> Codebase:
    return Codebase(copy)


@pytest.fixture(scope="module")
def before(specs, unchanged) -> dict[Partition, PartitionCode]:
    """The code of every asset partition that the table's experiments and suites rest on."""
    keys: dict[str, set[str]] = {"experiment": set(EXPERIMENTS), "rollout_set": set(), "suite": set(SUITES)}
    for experiment in EXPERIMENTS:
        for kind in ("rollout_set", "suite"):
            keys[kind] |= set(specs.upstream_keys("experiment", experiment, kind))
    return {
        (node.name, key): versions.code_of(node, key, specs, unchanged)
        for node in GRAPH.values()
        if node.set != "all"
        for key in sorted(keys[node.set])
    }


Changed = Callable[[str, Callable[[str], str]], set[Partition]]


@pytest.fixture
def changed(copy, unchanged, specs, before) -> Changed:
    """(file, edit of its text) -> the partitions whose code version the edit changes."""

    def partitions(file: str, edit: Callable[[str], str]) -> set[Partition]:
        path, module = copy / file, file.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
        text = path.read_text("utf-8")
        path.write_text(edit(text), "utf-8")
        try:
            code = unchanged.with_changed(file)
            # A walk that reached nothing of the file has read nothing that the edit changes.
            read = [p for p, was in before.items() if was.whole.definitions.keys() & {file, module}]
            now = {p: versions.code_of(GRAPH[p[0]], p[1], specs, code) for p in read}
        finally:
            path.write_text(text, "utf-8")
        return {p for p, code in now.items() if code.whole.digest != before[p].whole.digest}

    return partitions


def test_no_edit_leaves_the_version_of_a_result_that_it_changes(changed, specs, before, capsys):
    missed, over, reported, right = [], [], 0, 0
    for edit in EDITS:
        assert (copies := (ROOT / edit.file).read_text("utf-8").count(edit.old)) == 1, (
            f"{edit.file} holds {edit.old!r} {copies} times; update tests/mutations.py"
        )
        found = changed(edit.file, lambda text, edit=edit: text.replace(edit.old, edit.new))
        ought = edit.partitions(specs, before)
        assert ought, f"{edit.what}: no partition of the table runs that code; add an experiment, or drop the edit"
        missed += [(edit.what, *p) for p in sorted(ought - found)]
        over += [(edit.what, *p) for p in sorted(found - ought)]
        reported += len(found)
        right += found == ought
    share = len(over) / reported
    with capsys.disabled():
        print(
            f"\n{len(EDITS)} edits: {right} exactly right; {len(missed)} partitions missed, "
            f"{len(over)} of {reported} over-reported ({share:.1%})"
        )
    assert len(EDITS) >= 65
    assert not missed
    assert share < MOST_OVER_REPORTED, "\n".join(map(str, over))
