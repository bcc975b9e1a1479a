"""Moved and renamed code: with a row of `versioning.moved`, no code version changes."""

from __future__ import annotations

import ast
import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from etpi_assets.graph import GRAPH
from etpi_assets.planning.versioning import keys as versions
from etpi_assets.planning.versioning.codebase import PACKAGES, ROOT, Codebase
from etpi_assets.planning.versioning.keys import CODE, PartitionCode, code_of
from etpi_assets.planning.versioning.moved import MOVED, Moves
from etpi_assets.specs.load import Specs, load_specs

FILES = {
    "etpi_assets/curation": "etpi_assets/shaping/curation",
    "etpi_assets/agent/bash.py": "etpi_assets/agent/shell.py",
    "etpi_assets/scoring/published.py": "etpi_assets/scoring/reported.py",
}
TEXTS = {
    r"\betpi_assets\.curation\b": "etpi_assets.shaping.curation",
    r"\betpi_assets\.agent\.bash\b": "etpi_assets.agent.shell",
    r"\betpi_assets\.scoring import published\b": "etpi_assets.scoring import reported",
    r"\betpi_assets\.scoring\.published\b": "etpi_assets.scoring.reported",
    r"\bpublished\.(?=COLUMNS|of_rollout)": "reported.",
    r"\bto_tables\b": "as_tables",
    r"\bRolloutRecord\b": "RecordedRollout",
}
ROWS = {
    "etpi_assets.shaping.curation": "etpi_assets.curation",
    "etpi_assets.agent.shell": "etpi_assets.agent.bash",
    "etpi_assets.scoring.reported": "etpi_assets.scoring.published",
    "etpi_assets.trajectories.tables:as_tables": "etpi_assets.trajectories.tables:to_tables",
    "etpi_assets.trajectories.records:RecordedRollout": "etpi_assets.trajectories.records:RolloutRecord",
    "etpi_assets.trajectories.digests:captured_digest": "etpi_assets.trajectories.tables:captured_digest",
}


@pytest.fixture(scope="module")
def moved(tmp_path_factory) -> Path:
    """The packages with a package, two modules, a function and a class under new names, and a function elsewhere."""
    folder = tmp_path_factory.mktemp("moved")
    for name in (*PACKAGES, "sql"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    for old, new in FILES.items():
        (folder / new).parent.mkdir(exist_ok=True)
        (folder / old).rename(folder / new)
    for path in folder.rglob("*.py"):
        text = path.read_text("utf-8")
        for old, new in TEXTS.items():
            text = re.sub(old, new, text)
        path.write_text(text, "utf-8")
    _move_function(folder / "etpi_assets/trajectories", "captured_digest")
    return folder


def _move_function(folder: Path, name: str) -> None:
    """Move a function of tables.py that calls `prompts_digest` there to digests.py."""
    tables = folder / "tables.py"
    text = tables.read_text("utf-8")
    node = next(n for n in ast.parse(text).body if isinstance(n, ast.FunctionDef) and n.name == name)
    source = ast.get_source_segment(text, node)
    assert source is not None
    tables.write_text(text.replace(source, ""), "utf-8")
    (folder / "digests.py").write_text(
        "from etpi_assets.trajectories.records import RecordedRollout\n"
        f"from etpi_assets.trajectories.tables import prompts_digest\n\n\n{source}\n",
        "utf-8",
    )
    for path in folder.parent.rglob("*.py"):
        text = path.read_text("utf-8")
        at = re.search(rf"^from etpi_assets.trajectories.tables import .*\b{name}\b.*$", text, re.MULTILINE)
        if at:
            names = [n for n in at[0].partition(" import ")[2].split(", ") if n != name]
            lines = [f"from etpi_assets.trajectories.digests import {name}"]
            lines += [f"from etpi_assets.trajectories.tables import {', '.join(names)}"] if names else []
            path.write_text(text.replace(at[0], "\n".join(lines)), "utf-8")


@pytest.fixture(scope="module")
def specs() -> Specs:
    return load_specs()


@pytest.fixture(scope="module")
def codes(specs):
    """code -> {asset: the code behind one partition}."""
    (rollout_set,), suite = specs.upstream_keys("experiment", "plan_first_tiny", "rollout_set"), "coop_tiny_shared"
    keys = {"experiment": "plan_first_tiny", "rollout_set": rollout_set, "suite": suite, "all": "all"}

    def codes_of(code: Codebase) -> dict[str, PartitionCode]:
        """The nodes name their functions' modules, as they are in this code."""
        modules = {name: node.module for name, node in GRAPH.items()}
        if code is not CODE:
            old, new = (path.replace("/", ".") for path in next(iter(FILES.items())))
            modules = {name: module.replace(old, new) for name, module in modules.items()}
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(versions, "GRAPH", {n: replace(node, module=modules[n]) for n, node in GRAPH.items()})
            return {name: code_of(node, keys[node.set], specs, code) for name, node in GRAPH.items()}

    return codes_of


def test_moves_and_renames_with_a_row_change_no_version(moved, codes):
    today, later = next(iter(ROWS.items()))[::-1]
    earlier = {name.replace(f"{today}.", f"{later}."): old for name, old in MOVED.items()}
    before, after = codes(CODE), codes(Codebase(moved, moves=Moves({**earlier, **ROWS})))
    for name, code in before.items():
        assert after[name].whole.digest == code.whole.digest, name
        assert after[name].kept is code.kept is None or after[name].kept.digest == code.kept.digest, name
    reached = {f"{m}:{d}" for code in before.values() for m, names in code.whole.definitions.items() for d in names}
    assert [old for old in ROWS.values() if not any(name.startswith(old) for name in reached)] == []


def test_moves_and_renames_without_rows_change_versions(moved, codes):
    before, after = codes(CODE), codes(Codebase(moved, moves=Moves(MOVED)))
    changed = {name for name, code in before.items() if after[name].whole.digest != code.whole.digest}
    assert changed >= {"raw_rollouts", "scored_rollouts", "upweighted_dataset", "eval_rollouts"}


def test_names_and_texts_below_a_row_are_translated():
    moves = Moves({"a.new": "a.old", "a.new.kept": "a.kept", "a.b:New": "a.c:Old", "a/x.md": "a/y.md"})
    originals = {
        "a.new": "a.old",
        "a.new.m": "a.old.m",
        "a.newer": "a.newer",
        "a.new.kept.m:f": "a.kept.m:f",
        "a/new/p.jinja": "a/old/p.jinja",
        "a.b:New.method": "a.c:Old.method",
        "a.b:Other": "a.b:Other",
        "a/x.md": "a/y.md",
    }
    assert {name: moves.original(name) for name in originals} == originals
    assert moves.today("a.old.m") == "a.new.m" and moves.today("a/y.md") == "a/x.md"


def test_rows_lead_from_code_that_exists_to_names_that_are_free():
    assert {new for new in MOVED if not CODE.exists(new if ":" in new or "/" in new else f"{new}:*")} == set()
    assert {old for old in MOVED.values() if CODE.exists(old if ":" in old or "/" in old else f"{old}:*")} == set()
