"""A migration rewrites a lake whole or not at all, and a lake of a newer etpi is refused.

etpi has no migration yet, so these tests bring their own: one that renames a note, and one that changes a column.
"""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow as pa
import pytest

from etpi_resources.lake import formats, manifest, migrations
from etpi_resources.lake.audit import audit
from etpi_resources.lake.lake import Lake, LakeError, Ref
from etpi_resources.lake.manifest import NewerFormat
from etpi_resources.lake.migrations import Migration, migrate, pending, preview
from tests.support import small_lake

SPEC = Ref("experiment_spec", "experiment", "strong")


def renamed_note(old: dict) -> dict:
    return old | {"notes": {"renamed": old["notes"]}}


def upper(rows: pa.Table) -> pa.Table:
    column = rows.schema.get_field_index("title")
    titles = pa.array([title.upper() for title in rows["title"].to_pylist()])
    return rows.set_column(column, "title", titles)


STEPS = (
    Migration(2, "notes are below `renamed`", manifest=renamed_note),
    Migration(3, "titles are in capitals", tables={"specs": upper}),
)


def sound(lake: Lake) -> bool:
    """Whether everything is as recorded; the small lake has no weights."""
    return {damage.kind for damage in audit(lake, deep=True).damages} <= {"checkpoint"}


@pytest.fixture
def lake(tmp_path: Path) -> Lake:
    return small_lake.make(tmp_path / "data")


@pytest.fixture
def format_3(monkeypatch):
    """This etpi as one that writes format 3."""

    def begin() -> None:
        for module in (manifest, formats, migrations):
            monkeypatch.setattr(module, "SCHEMA_VERSION", 3)

    return begin


def test_the_first_publication_marks_the_lake(tmp_path: Path) -> None:
    lake = Lake(tmp_path / "data")
    assert not (lake.root / formats.MARKER).exists()
    small_lake.put(lake, "tasks", "coop", {})
    assert json.loads((lake.root / formats.MARKER).read_text())["format"] == manifest.SCHEMA_VERSION


def test_this_etpi_has_a_migration_to_every_format_up_to_its_own(lake: Lake) -> None:
    assert [step.to for step in migrations.MIGRATIONS] == list(range(2, manifest.SCHEMA_VERSION + 1))
    assert pending(lake.root) == [] and migrate(lake.root).manifests == 0


def test_a_migration_keeps_data_versions_and_rewrites_manifests_and_tables(lake: Lake, format_3) -> None:
    versions = {ref: lake.require(ref).version for ref in lake.refs() if not lake.blocked(ref)}
    (lake.root / formats.MARKER).unlink()  # as a lake of etpi 0.1 before it wrote the file
    format_3()
    with pytest.raises(LakeError, match="format 1.*etpi migrate"):
        Lake(lake.root)
    shown = preview(lake.root, STEPS, 3)
    done = migrate(lake.root, STEPS, 3)
    assert (shown.manifests, shown.files) == (done.manifests, done.files) and done.files["specs"] > 0
    lake = Lake(lake.root)
    assert {ref: lake.require(ref).version for ref in versions} == versions
    assert lake.read(SPEC, "specs")["title"].to_pylist() == ["STRONG TEACHER"]
    assert all(m.schema_version == 3 and "renamed" in m.notes for ref in lake.refs() for m in lake.history(ref))
    assert sound(lake)
    assert not list(lake.root.glob("experiment_spec/specs/*/*/part-0.parquet")), "rewritten files are gone"
    assert migrate(lake.root, STEPS, 3).manifests == 0


@pytest.mark.parametrize("dies_in", ["_rewrite", "_move_pointers", "_remove_unnamed_files"])
def test_a_migration_that_is_killed_is_finished_by_the_next(lake: Lake, monkeypatch, format_3, dies_in: str) -> None:
    before = {ref: lake.current(ref) for ref in lake.refs()}
    format_3()
    function, calls = getattr(migrations, dies_in), 0

    def dies(*arguments: object) -> object:
        nonlocal calls
        calls += 1
        if calls > 3 or dies_in == "_remove_unnamed_files":
            raise KeyboardInterrupt
        return function(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(migrations, dies_in, dies)
        with pytest.raises(KeyboardInterrupt):
            migrate(lake.root, STEPS, 3)
    with pytest.raises(LakeError, match="interrupted"):
        Lake(lake.root)
    half = Lake(lake.root, any_format=True)
    assert {ref for ref, version in before.items() if version} == {ref for ref in half.refs() if half.current(ref)}
    migrate(lake.root, STEPS, 3)
    lake = Lake(lake.root)
    assert lake.read(SPEC, "specs")["title"].to_pylist() == ["STRONG TEACHER"]
    assert sound(lake)
    assert {m.schema_version for ref in lake.refs() for m in lake.history(ref)} == {3}


def test_a_damaged_file_stops_a_migration_before_any_pointer_moves(lake: Lake, format_3) -> None:
    file = lake.files(SPEC, "specs")[0]
    file.write_bytes(bytes(file.stat().st_size))
    pointers = {path: path.read_bytes() for path in lake.root.glob("*/*/current")}
    format_3()
    with pytest.raises(LakeError, match="damaged"):
        migrate(lake.root, STEPS, 3)
    assert {path: path.read_bytes() for path in pointers} == pointers
    assert formats.read(lake.root).migrating is None and formats.read(lake.root).format == 1


def test_a_lake_of_a_newer_etpi_is_refused_with_both_versions(lake: Lake) -> None:
    formats.write(lake.root, formats.Format(7, "3.1.0"))
    for attempt in (lambda: Lake(lake.root), lambda: migrate(lake.root)):
        with pytest.raises(NewerFormat, match=r"etpi 3\.1\.0 in format 7; this is etpi .*Install etpi 3\.1\.0"):
            attempt()


def test_a_manifest_of_a_newer_format_is_refused_and_a_new_field_is_not(lake: Lake) -> None:
    stored = lake.require(SPEC).to_json()
    assert manifest.Manifest.from_json(stored | {"later": 1}) == lake.require(SPEC)
    with pytest.raises(NewerFormat, match="format 9"):
        manifest.Manifest.from_json(stored | {"schema_version": 9})


def test_a_damaged_marker_names_the_remedy(lake: Lake) -> None:
    (lake.root / formats.MARKER).write_text("{")
    with pytest.raises(LakeError, match=r"lake\.json cannot be read"):
        Lake(lake.root)
