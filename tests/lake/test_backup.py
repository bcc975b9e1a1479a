"""A backup taken at any moment restores to a lake that verifies; what it has is not copied twice; a lake can move."""

from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from etpi.cli import main
from etpi_assets.graph import GRAPH
from etpi_assets.planning.planner import plan
from etpi_resources.checkpoints import checkpoint_folder
from etpi_resources.lake import catalog
from etpi_resources.lake.audit import audit
from etpi_resources.lake.backup import MARKER, back_up, restore
from etpi_resources.lake.lake import Lake, LakeError, Ref
from etpi_resources.lake.manifest import DamagedFile
from etpi_resources.lake.references import References
from tests.support import small_lake


def quiet(line: str) -> None:
    """Take a log line."""


@pytest.fixture
def lake(tmp_path: Path) -> Lake:
    """A lake with weights, a stored training, a journal, and a past version."""
    lake = Lake(tmp_path / "data")
    staged = lake.scratch("model")
    (staged / "config.json").write_text("{}")
    (staged / "model.safetensors").write_bytes(bytes(range(256)) * 40)
    checkpoint, _ = lake.adopt_checkpoint(staged)
    for rollout in ("r1", "r2"):
        dataset = small_lake.put(lake, "upweighted_dataset", "a", small_lake.dataset(rollout))
    sft = small_lake.checkpoint(checkpoint, "a", "sft", dataset_version=dataset.version, seed=0)
    small_lake.put(lake, "sft_checkpoint", "a", {"checkpoints": [sft]})
    (lake.root / "checkpoints" / "trained").mkdir()
    (lake.root / "checkpoints/trained/key.json").write_text(json.dumps({"checkpoints": [sft]}))
    (lake.scratch("rollouts/few/code") / "journal-1.jsonl").write_text('{"line": 1}\n')
    (lake.scratch("servers") / "vllm.log").write_text("not copied")
    (lake.root / "reports" / "a").mkdir(parents=True)
    (lake.root / "reports" / "a" / "report.html").write_text("<p>report</p>")
    return lake


def lineage(lake: Lake, folder: Path) -> list[tuple]:
    with catalog.connect(catalog.build(lake, GRAPH.values(), folder / f"{lake.root.name}.duckdb")) as connection:
        return connection.sql("SELECT * FROM lineage ORDER BY ALL").fetchall()


def test_a_backup_restores_to_an_equal_lake_elsewhere_and_copies_nothing_twice(lake: Lake, tmp_path: Path) -> None:
    backup = tmp_path / "backup"
    first = back_up(lake, backup, log=quiet)
    assert first.files > 0 and first.present == 0
    second = back_up(lake, backup, log=quiet)
    assert (second.files, second.present) == (0, first.files)
    small_lake.put(lake, "upweighted_dataset", "b", small_lake.dataset("r3"))
    third = back_up(lake, backup, log=quiet)
    assert third.files == 5 and third.present == first.files  # three tables, the manifest and the pointer
    restored = Lake(tmp_path / "elsewhere")
    restore(backup, restored, log=quiet)
    assert audit(restored, deep=True).damages == []
    assert lineage(restored, tmp_path) == lineage(lake, tmp_path) != []
    assert {ref: restored.current(ref) for ref in restored.refs()} == {ref: lake.current(ref) for ref in lake.refs()}
    assert len(restored.history(Ref("upweighted_dataset", "experiment", "a"))) == 2
    assert (restored.root / "scratch/rollouts/few/code/journal-1.jsonl").read_text() == '{"line": 1}\n'
    assert (restored.root / "reports/a/report.html").read_text() == "<p>report</p>"
    assert not (restored.root / "scratch" / "servers").exists()


PUBLISH = """
import sys
from pathlib import Path
sys.path.insert(0, {checkout!r})
from etpi_resources.lake.lake import Lake
from tests.support import small_lake
lake, number = Lake(Path({root!r})), 0
while True:
    number += 1
    made = small_lake.put(lake, "upweighted_dataset", "a", small_lake.dataset(f"r{{number}}"))
    staged = lake.scratch("model")
    (staged / "config.json").write_text(str(number))
    checkpoint, _ = lake.adopt_checkpoint(staged)
    row = small_lake.checkpoint(checkpoint, "a", "sft", dataset_version=made.version, seed=0)
    inputs = {{"upweighted_dataset/a": made.version}}
    small_lake.put(lake, "sft_checkpoint", "a", {{"checkpoints": [row]}}, inputs=inputs)
    print(number, flush=True)
"""


def test_backups_while_a_process_publishes_restore_to_lakes_that_verify(lake: Lake, tmp_path: Path) -> None:
    script = PUBLISH.format(checkout=str(Path(__file__).parents[2]), root=str(lake.root))
    seen = set()
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) as publisher:
        try:
            assert publisher.stdout and publisher.stdout.readline()
            for number in range(6):
                back_up(lake, tmp_path / "backup", log=quiet)
                restored = Lake(tmp_path / f"restored-{number}")
                restore(tmp_path / "backup", restored, log=quiet)
                assert audit(restored, deep=True).damages == []
                current = restored.require(Ref("sft_checkpoint", "experiment", "a"))
                # Pointers of one moment: what the current training read was published before it.
                references = References(restored)
                needs = references.needed_by(references.roots(), references.pointed)
                assert current.inputs["upweighted_dataset/a"] in {version.name for version in needs}
                seen.add(current.version)
        finally:
            publisher.kill()
    assert len(seen) > 2, "it published meanwhile"


@pytest.mark.parametrize("dies_at", ["manifest", "current"])
def test_a_backup_that_is_killed_leaves_the_one_before(lake: Lake, tmp_path: Path, monkeypatch, dies_at: str) -> None:
    backup = tmp_path / "backup"
    back_up(lake, backup, log=quiet)
    before = Lake(backup).require(Ref("upweighted_dataset", "experiment", "a")).version
    small_lake.put(lake, "upweighted_dataset", "a", small_lake.dataset("r9"))

    replace = Path.replace

    def dies(path: Path, to: Path) -> Path:
        if Path(to).name.startswith(dies_at) and Path(to).is_relative_to(backup):
            raise KeyboardInterrupt
        return replace(path, to)

    monkeypatch.setattr(Path, "replace", dies)
    with pytest.raises(KeyboardInterrupt):
        back_up(lake, backup, log=quiet)
    monkeypatch.undo()
    assert audit(Lake(backup), deep=True).damages == []
    assert Lake(backup).require(Ref("upweighted_dataset", "experiment", "a")).version == before
    # As after a power cut: a file that was not flushed has its size and no content.
    empty = max(Lake(backup).root.glob("upweighted_dataset/sequences/*/*/*.parquet"), key=lambda p: p.stat().st_mtime)
    empty.write_bytes(bytes(empty.stat().st_size))
    back_up(lake, backup, log=quiet)
    assert audit(Lake(backup), deep=True).damages == []
    assert Lake(backup).require(Ref("upweighted_dataset", "experiment", "a")).version != before


def test_a_damaged_file_is_not_copied_over_a_good_one(lake: Lake, tmp_path: Path) -> None:
    backup = tmp_path / "backup"
    file = lake.files(Ref("upweighted_dataset", "experiment", "a"), "dataset_rows")[0]
    clean = file.read_bytes()
    file.write_bytes(bytes(len(clean)))
    with pytest.raises(DamagedFile, match="dataset_rows"):
        back_up(lake, backup, log=quiet)
    file.write_bytes(clean)
    back_up(lake, backup, log=quiet)
    file.write_bytes(bytes(len(clean)))
    restore(backup, lake, log=quiet)
    assert file.read_bytes() == clean and audit(lake, deep=True).damages == []


def test_restore_refuses_to_move_pointers_unless_told(lake: Lake, tmp_path: Path) -> None:
    backup, ref = tmp_path / "backup", Ref("upweighted_dataset", "experiment", "a")
    back_up(lake, backup, log=quiet)
    before = lake.require(ref).version
    small_lake.put(lake, "upweighted_dataset", "a", small_lake.dataset("r9"))
    journal = lake.root / "scratch/rollouts/few/code/journal-1.jsonl"
    journal.write_text(journal.read_text() + '{"line": 2}\n')
    with pytest.raises(LakeError, match="--overwrite"):
        restore(backup, lake, log=quiet)
    assert lake.require(ref).version != before
    restore(backup, lake, overwrite=True, log=quiet)
    assert lake.require(ref).version == before
    assert "line" in journal.read_text() and journal.read_text().count("\n") == 2, "a longer journal stays"


def test_a_backup_keeps_what_the_lake_removed_until_told(lake: Lake, tmp_path: Path) -> None:
    backup, name = tmp_path / "backup", "upweighted_dataset"
    small_lake.put(lake, name, "b", small_lake.dataset("r3"))
    back_up(lake, backup, log=quiet)
    for path in [*lake.root.glob(f"{name}/experiment=b"), *lake.root.glob(f"{name}/*/experiment=b")]:
        shutil.rmtree(path)
    kept = back_up(lake, backup, log=quiet)
    assert len(kept.extra) == 5 and not kept.removed and Lake(backup).keys(name, "experiment") == ["a", "b"]
    back_up(lake, backup, delete=True, log=quiet)
    assert Lake(backup).keys(name, "experiment") == ["a"] and audit(Lake(backup), deep=True).damages == []


def test_folders_that_are_no_backup_of_this_lake_are_refused(lake: Lake, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    (other / "photo.jpg").write_bytes(b"1")
    with pytest.raises(LakeError, match="not empty"):
        back_up(lake, other, log=quiet)
    with pytest.raises(LakeError, match="lie in one another"):
        back_up(lake, lake.root / "backup", log=quiet)
    back_up(lake, tmp_path / "backup", log=quiet)
    moved = lake.root.rename(tmp_path / "moved")
    with pytest.raises(LakeError, match="--force"):
        back_up(Lake(moved), tmp_path / "backup", log=quiet)
    assert back_up(Lake(moved), tmp_path / "backup", force=True, log=quiet).files == 0
    (tmp_path / "backup" / MARKER).unlink()
    with pytest.raises(LakeError, match="no backup"):
        restore(tmp_path / "backup", Lake(tmp_path / "new"), log=quiet)


def test_a_moved_lake_is_the_same_lake(lake: Lake, tmp_path: Path) -> None:
    before, report = lineage(lake, tmp_path), (lake.root / "reports/a/report.html").read_text()
    (row,) = lake.read(Ref("sft_checkpoint", "experiment", "a"), "checkpoints").to_pylist()
    moved = Lake(lake.root.rename(tmp_path / "moved"))
    assert audit(moved, deep=True).damages == [] and lineage(moved, tmp_path) == before
    assert checkpoint_folder(moved.root, row["path"]) == moved.checkpoint_dir(row["checkpoint_id"])
    assert (moved.root / "reports/a/report.html").read_text() == report
    for path in moved.root.rglob("*.json"):
        assert str(tmp_path / "data") not in path.read_text(), path


def test_the_planner_says_ok_in_a_restored_lake(world, tmp_path: Path) -> None:
    world.make_all()
    back_up(world.lake, tmp_path / "backup", log=quiet)
    restored = Lake(tmp_path / "restored")
    restore(tmp_path / "backup", restored, log=quiet)
    assert {step.state for step in plan("first", world.resources().specs, restored)} == {"ok"}


def _flip(path: Path) -> None:
    """Change a byte as a fault of a disk does: size and time stay."""
    stat, content = path.stat(), bytearray(path.read_bytes())
    content[2] ^= 1
    path.write_bytes(content)
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))


def test_restore_mends_a_stored_training_that_has_its_size_and_time(lake: Lake, tmp_path: Path) -> None:
    stored, backup = lake.root / "checkpoints/trained/key.json", tmp_path / "backup"
    good = stored.read_bytes()
    back_up(lake, backup, log=quiet)
    _flip(stored)
    lines: list[str] = []
    back_up(lake, backup, deep=True, log=lines.append)
    assert ["checkpoints/trained/key.json" in line for line in lines] == [True]
    assert (backup / "checkpoints/trained/key.json").read_bytes() == good
    restore(backup, lake, log=quiet)
    assert stored.read_bytes() == good and audit(lake, deep=True).damages == []


def test_restore_refuses_a_first_backup_that_wrote_no_pointer(lake: Lake, tmp_path: Path, monkeypatch) -> None:
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(os, "sync", lambda: (_ for _ in ()).throw(KeyboardInterrupt))
        back_up(lake, tmp_path / "backup", log=quiet)
    with pytest.raises(LakeError, match="first backup was interrupted"):
        restore(tmp_path / "backup", Lake(tmp_path / "elsewhere"), log=quiet)
    assert not (tmp_path / "elsewhere").exists()


def test_backup_and_lake_do_not_lie_in_one_another(lake: Lake, tmp_path: Path) -> None:
    backup = tmp_path / "backup"
    back_up(lake, backup, log=quiet)
    for target in (backup, backup / "inside", tmp_path):
        with pytest.raises(LakeError, match="lie in one another"):
            restore(backup, Lake(target), overwrite=True, log=quiet)
    assert audit(Lake(backup), deep=True).damages == [] and not (backup / "inside").exists()


def test_a_damaged_marker_is_named_with_its_remedy(lake: Lake, tmp_path: Path) -> None:
    backup = tmp_path / "backup"
    back_up(lake, backup, log=quiet)
    (backup / MARKER).write_text("{")
    with pytest.raises(LakeError, match="backup.json cannot be read"):
        back_up(lake, backup, log=quiet)
    with pytest.raises(LakeError, match="backup.json cannot be read"):
        restore(backup, Lake(tmp_path / "elsewhere"), log=quiet)


def test_a_full_disk_is_an_error_in_a_line(lake: Lake, tmp_path: Path, monkeypatch, capsys) -> None:
    full = OSError(errno.ENOSPC, "No space left on device")
    monkeypatch.setenv("ETPI_DATA", str(lake.root))
    with monkeypatch.context() as patch:
        patch.setattr("etpi_resources.lake.backup._Copy._file", lambda *_: (_ for _ in ()).throw(full))
        assert main(["backup", str(tmp_path / "backup")]) == 1
    assert capsys.readouterr().err.startswith("etpi: No space left on device. Run the same command again")
    assert main(["backup", str(tmp_path / "backup")]) == 0


def test_a_folder_behind_a_link_is_copied_and_not_deleted_from_the_backup(lake: Lake, tmp_path: Path) -> None:
    backup, journals = tmp_path / "backup", lake.root / "scratch/rollouts/few"
    back_up(lake, backup, log=quiet)
    shutil.move(journals, tmp_path / "other disk")
    journals.symlink_to(tmp_path / "other disk")
    (journals / "code" / "circle").symlink_to(journals)
    (journals / "code" / "journal-2.jsonl").write_text("{}\n")
    assert back_up(lake, backup, delete=True, log=quiet).extra == []
    copied = sorted(path.name for path in (backup / "scratch/rollouts/few").rglob("*"))
    assert copied == ["code", "journal-1.jsonl", "journal-2.jsonl"]
