"""Damage in a lake is never read as data: reading raises, the audit names it, and publishing the content mends it."""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import subprocess
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from etpi.cli import main
from etpi_resources.lake.audit import audit, set_aside
from etpi_resources.lake.lake import DamagedFile, Lake, LakeError, Ref, manifest_name
from etpi_resources.lake.schemas import empty, from_rows
from tests.support import small_lake

TURNS = Ref("raw_rollouts", "rollout_set", "few")
TRAINED = Ref("sft_checkpoint", "experiment", "first")
ROWS = from_rows(
    "turns",
    [
        {
            "rollout_id": f"r{i % 9}",
            "agent_id": "a",
            "turn": i,
            "output_ids": [i, i * 7 % 91],
            "content": f"turn {i % 17}",
        }
        for i in range(3000)
    ],
)
NOBODY = 65534
FLIPS = 300


def flip(path: Path, bit: int) -> None:
    """Change one bit of a file and keep its size and times."""
    content = bytearray(path.read_bytes())
    content[bit // 8] ^= 1 << bit % 8
    path.write_bytes(content)


@pytest.fixture
def lake(tmp_path: Path) -> Lake:
    """A lake with a table of turns and a checkpoint."""
    lake = Lake(tmp_path / "data")
    lake.publish(TURNS, {"turns": ROWS}, input_key="k", inputs={}, spec_hash="s")
    staged = lake.scratch("model")
    (staged / "config.json").write_text("{}")
    (staged / "model.safetensors").write_bytes(bytes(range(256)) * 8)
    name, folder = lake.adopt_checkpoint(staged)
    row = {"checkpoint_id": name, "role": "sft", "path": str(folder.relative_to(lake.root))}
    tables = {"checkpoints": from_rows("checkpoints", [row]), "training_log": empty("training_log")}
    lake.publish(TRAINED, tables, input_key="k", inputs={}, spec_hash="s")
    trained = lake.root / "checkpoints" / "trained"
    trained.mkdir()
    (trained / "key.json").write_text(json.dumps({"checkpoints": [row]}))
    return lake


def test_no_flipped_bit_is_read_as_another_row(lake: Lake) -> None:
    path, rng = lake.files(TURNS, "turns")[0], random.Random(0)
    clean, refused = path.read_bytes(), 0
    for _ in range(FLIPS):
        flip(path, rng.randrange(len(clean) * 8))
        try:
            assert lake.read(TURNS, "turns").equals(ROWS)
        except DamagedFile as error:
            assert str(path) in str(error)
            refused += 1
        path.write_bytes(clean)
    assert refused > FLIPS * 0.9


def test_a_query_refuses_a_damaged_file_although_duckdb_would_read_it(lake: Lake) -> None:
    path, rng = lake.files(TURNS, "turns")[0], random.Random(1)
    clean = path.read_bytes()
    assert lake.query("SELECT count(*) AS n FROM t", t=(TURNS, "turns")).to_pylist() == [{"n": 3000}]
    for _ in range(20):
        flip(path, rng.randrange(len(clean) * 8))
        with pytest.raises(DamagedFile):
            lake.query("SELECT count(*) AS n FROM t", t=(TURNS, "turns"))
        path.write_bytes(clean)


def test_publishing_the_same_content_repairs_a_damaged_file_of_the_same_size(lake: Lake) -> None:
    path = lake.files(TURNS, "turns")[0]
    clean = path.read_bytes()
    flip(path, len(clean) * 4)
    lake.publish(TURNS, {"turns": ROWS}, input_key="k", inputs={}, spec_hash="s")
    assert path.read_bytes() == clean


def test_audit_of_a_sound_lake_reports_nothing(lake: Lake) -> None:
    result = audit(lake, deep=True)
    assert result.damages == []
    assert result.counts == {"pointer": 2, "manifest": 2, "file": 3, "checkpoint": 1, "training": 1}


def the_file(lake: Lake) -> Path:
    return lake.files(TURNS, "turns")[0]


def the_pointer(lake: Lake) -> Path:
    return lake.root / "raw_rollouts/rollout_set=few/current"


def the_manifest(lake: Lake) -> Path:
    return next(the_pointer(lake).parent.glob("version=*/manifest-*.json"))


def the_weights(lake: Lake) -> Path:
    return next((lake.root / "checkpoints").glob("*/model.safetensors"))


def the_training(lake: Lake) -> Path:
    return lake.root / "checkpoints/trained/key.json"


def overwrite(path: Path) -> None:
    path.write_bytes(b"\0" * path.stat().st_size)


def edit(path: Path) -> None:
    path.write_text(path.read_text().replace('"input_key": "k"', '"input_key": "m"'))


@pytest.mark.parametrize(
    ("part", "harm", "deep_only", "kind", "refs"),
    [
        (the_file, Path.unlink, False, "file", (TURNS,)),
        (the_file, overwrite, True, "file", (TURNS,)),
        (the_pointer, overwrite, False, "pointer", (TURNS,)),
        (the_manifest, overwrite, False, "manifest", (TURNS,)),
        (the_manifest, edit, False, "manifest", (TURNS,)),
        (the_manifest, Path.unlink, False, "pointer", (TURNS,)),
        (the_weights, overwrite, True, "checkpoint", (TRAINED,)),
        (the_training, overwrite, False, "training", ()),
    ],
)
def test_audit_names_damaged_files(lake, part, harm, deep_only, kind, refs) -> None:
    harm(part(lake))
    assert bool(audit(lake).damages) is not deep_only
    (damage,) = audit(lake, deep=True).damages
    assert (damage.kind, tuple(damage.refs)) == (kind, refs)
    assert damage.path.is_relative_to(lake.root)


def test_a_manifest_of_an_earlier_etpi_without_newer_fields_is_sound(lake: Lake) -> None:
    path = the_manifest(lake)
    stored = {name: value for name, value in json.loads(path.read_text()).items() if name not in ("cause", "accepted")}
    older = path.with_name(manifest_name(stored))
    older.write_text(json.dumps(stored))
    pointer = json.loads(the_pointer(lake).read_text()) | {"manifest": f"{path.parent.name}/{older.name}"}
    the_pointer(lake).write_text(json.dumps(pointer))
    assert audit(lake, deep=True).damages == []


@pytest.mark.parametrize("name", ["../secret", "raw_rollouts/../../secret", None])
def test_manifest_that_names_a_file_outside_the_lake_moves_and_reads_nothing(lake: Lake, name) -> None:
    secret = lake.root.parent / "secret"
    secret.write_text("hunter2")
    path = the_manifest(lake)
    stored = json.loads(path.read_text())
    stored["tables"]["turns"]["files"][0]["path"] = name or str(secret)
    hostile = path.with_name(manifest_name(stored))
    hostile.write_text(json.dumps(stored))
    pointer = json.loads(the_pointer(lake).read_text()) | {"manifest": f"{path.parent.name}/{hostile.name}"}
    the_pointer(lake).write_text(json.dumps(pointer))
    (damage,) = audit(lake, deep=True).damages
    assert damage.path == hostile
    set_aside(lake, [damage])
    assert secret.read_text() == "hunter2" and lake.current(TURNS) is None
    hostile.write_text(json.dumps(stored))
    the_pointer(lake).write_text(json.dumps(pointer))
    with pytest.raises(LakeError, match=re.escape(str(TURNS))):
        Lake(lake.root).read(TURNS, "turns")


def test_audit_since_a_time_reads_only_later_publications(lake: Lake) -> None:
    later = datetime.now(UTC) + timedelta(days=1)
    result = audit(lake, deep=True, since=later)
    assert (result.counts["file"], result.counts["checkpoint"]) == (0, 0)


@pytest.mark.parametrize("part", [the_file, the_pointer, the_manifest, the_weights, the_training])
def test_what_is_set_aside_leaves_a_lake_that_verifies_and_can_be_published_to(lake: Lake, part) -> None:
    overwrite(part(lake))
    (damage,) = audit(lake, deep=True).damages
    moved = set_aside(lake, [damage])
    assert (moved / damage.path.relative_to(lake.root)).exists() and not damage.path.exists()
    assert audit(lake, deep=True).damages == []
    for ref in damage.refs:
        assert lake.current(ref) is None
    lake.publish(TURNS, {"turns": ROWS}, input_key="k", inputs={}, spec_hash="s")
    assert lake.read(TURNS, "turns").equals(ROWS) and audit(lake, deep=True).damages == []


def test_verify_prints_each_damaged_path_on_stdout_and_sets_it_aside(lake: Lake, monkeypatch, capsys) -> None:
    monkeypatch.setenv("ETPI_DATA", str(lake.root))
    path = the_file(lake)
    assert main(["verify", "--deep"]) == 0 and capsys.readouterr().out == ""
    overwrite(path)
    assert main(["verify"]) == 0 and main(["verify", "--deep", "--set-aside"]) == 1
    (line,) = capsys.readouterr().out.splitlines()
    assert line.split(":")[0] == path.relative_to(lake.root).as_posix() and str(TURNS) in line
    assert main(["verify", "--deep"]) == 0


def test_nothing_is_set_aside_while_a_run_uses_the_lake(lake: Lake, monkeypatch, capsys) -> None:
    monkeypatch.setenv("ETPI_DATA", str(lake.root))
    the_file(lake).unlink()
    with lake.shared_lock():
        assert main(["verify", "--set-aside"]) == 1
    assert "is in use" in capsys.readouterr().err and lake.current(TURNS)


def test_locks_and_folders_of_dead_processes_are_swept(lake: Lake) -> None:
    area = lake.root / ".staging"
    (area / "0123.lock").write_text("")
    (area / "4567").mkdir()
    with lake.staging() as staging:
        assert {path.name for path in area.iterdir()} == {staging.name, f"{staging.name}.lock"}
    assert not list(area.iterdir())


def test_deleted_folder_of_an_asset_is_a_damage(tmp_path: Path) -> None:
    lake = Lake(tmp_path / "data")
    rows = {"rollouts": [small_lake.rollout("r", "t")]}
    raw = small_lake.put(lake, "raw_rollouts", "few", rows)
    used = small_lake.put(lake, "scored_rollouts", "few", {}, inputs={"raw_rollouts/few": raw.version, "path/x": "1"})
    assert audit(lake).damages == []
    shutil.rmtree(lake.root / "raw_rollouts")
    (damage,) = audit(lake).damages
    assert (damage.kind, damage.refs) == ("version", [used.ref]) and raw.version in damage.fault
    set_aside(lake, [damage])
    assert lake.current(used.ref) == used, "it is sound; what it was computed from is gone"


READ_ONLY = """
import os, sys
from pathlib import Path
sys.path.insert(0, {checkout!r})
from etpi_resources.lake.lake import Lake, Ref
lake = Lake(Path({root!r}))
lake.query("SELECT 1 AS n")
os.setgid({nobody}); os.setuid({nobody})
print(lake.query("SELECT count(*) AS n FROM t", t=(Ref("raw_rollouts", "rollout_set", "few"), "turns")).to_pylist())
"""


def test_a_lake_that_cannot_be_written_can_be_queried(lake: Lake) -> None:
    if os.getuid() != 0:
        pytest.skip("needs root, to become a user who may not write")
    for folder in [lake.root, *lake.root.parents]:
        if folder.is_relative_to(Path("/tmp")) and folder != Path("/tmp"):
            folder.chmod(folder.stat().st_mode | 0o055)
    script = READ_ONLY.format(checkout=str(Path(__file__).parents[2]), nobody=NOBODY, root=str(lake.root))
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd="/")
    assert done.stdout.strip() == "[{'n': 3000}]", done.stderr
