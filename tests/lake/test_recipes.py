"""The recipes of docs/lake.md, typed as the page has them: backup and restore while runs publish, repair, disk use."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from etpi_assets.graph import GRAPH
from etpi_assets.planning.planner import plan
from etpi_resources.checkpoints import checkpoint_folder
from etpi_resources.lake import catalog
from etpi_resources.lake.audit import audit, set_aside
from etpi_resources.lake.lake import Lake, LakeBusy, Ref
from etpi_resources.lake.references import References
from tests.support import small_lake
from tests.support.docs_pages import blocks

CHECKOUT = Path(__file__).parents[2]
BLOCKS = {block.machine: block.commands for block in blocks(CHECKOUT / "docs" / "lake.md")}
DATASET, TRAINED = Ref("upweighted_dataset", "experiment", "a"), Ref("sft_checkpoint", "experiment", "a")


def shell(commands: str, **variables: object) -> subprocess.CompletedProcess[str]:
    """Run commands in bash with the virtual environment on PATH."""
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    environment = os.environ | {"PATH": path, "PYTHONPATH": str(CHECKOUT)} | {k: str(v) for k, v in variables.items()}
    return subprocess.run(["bash"], input=commands, env=environment, capture_output=True, text=True)


@pytest.fixture(params=["rsync", "restic"])
def tool(request, tmp_path: Path):
    """Back up and restore with a program, by the page's commands; skipped where it is not installed."""
    name = request.param
    if shutil.which(name) is None:
        pytest.skip(f"needs {name} (.ci/run installs it)")
    return Tool(name, tmp_path)


class Tool:
    def __init__(self, name: str, folder: Path) -> None:
        self.name, self.backup = name, folder / "backup"
        self.variables = {"BACKUP": self.backup}
        if name == "restic":
            self.variables = {
                "RESTIC_REPOSITORY": self.backup,
                "RESTIC_PASSWORD": "x",
                "RESTIC_CACHE_DIR": folder / "cache",
            }
            self._run("restic init", folder)

    def back_up(self, lake: Lake) -> None:
        self._run(BLOCKS["backup"] + BLOCKS[self.name], lake.root)

    def restore(self, folder: Path) -> Lake:
        folder.mkdir()
        self._run(f"set -e\n{BLOCKS[f'{self.name}_restore']}{BLOCKS['restored']}", folder)
        return Lake(folder)

    def _run(self, commands: str, data: Path) -> None:
        done = shell(commands, ETPI_DATA=data, **self.variables)
        assert done.returncode == 0, done.stdout + done.stderr


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
    sft["path"] = f"checkpoints/{checkpoint}"
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


# --- backups ---------------------------------------------------------------------------------------------------------


def test_a_restored_lake_is_equal_to_the_one_that_was_copied(tool: Tool, lake: Lake, tmp_path: Path) -> None:
    tool.back_up(lake)
    small_lake.put(lake, "upweighted_dataset", "b", small_lake.dataset("r3"))
    tool.back_up(lake)
    restored = tool.restore(tmp_path / "elsewhere")
    assert audit(restored, deep=True).damages == []
    assert lineage(restored, tmp_path) == lineage(lake, tmp_path) != []
    assert {ref: restored.current(ref) for ref in restored.refs()} == {ref: lake.current(ref) for ref in lake.refs()}
    assert len(restored.history(DATASET)) == 2
    assert (restored.root / "scratch/rollouts/few/code/journal-1.jsonl").read_text() == '{"line": 1}\n'
    assert (restored.root / "reports/a/report.html").read_text() == "<p>report</p>"
    assert not (restored.root / "scratch" / "servers").exists() and not (restored.root / "locks" / "lake.lock").exists()


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
    row["path"] = f"checkpoints/{{checkpoint}}"
    inputs = {{"upweighted_dataset/a": made.version}}
    small_lake.put(lake, "sft_checkpoint", "a", {{"checkpoints": [row]}}, inputs=inputs)
    print(number, flush=True)
"""


@pytest.mark.slow
def test_backups_while_a_process_publishes_restore_to_lakes_that_verify(tool: Tool, lake: Lake, tmp_path: Path) -> None:
    script = PUBLISH.format(checkout=str(CHECKOUT), root=str(lake.root))
    seen = set()
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) as publisher:
        try:
            assert publisher.stdout and publisher.stdout.readline()
            for number in range(4):
                tool.back_up(lake)
                restored = tool.restore(tmp_path / f"restored-{number}")
                assert audit(restored, deep=True).damages == []
                current = restored.require(TRAINED)
                # Pointers of one moment: what the current training read was published before it.
                references = References(restored)
                needs = references.needed_by(references.roots(references.pointed))
                assert current.inputs["upweighted_dataset/a"] in {version.name for version in needs}
                seen.add(current.version)
        finally:
            publisher.kill()
    assert len(seen) > 2, "it published meanwhile"


def test_nothing_is_removed_while_a_backup_is_copied(lake: Lake) -> None:
    waiting = subprocess.Popen(
        ["bash"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"ETPI_DATA": str(lake.root)},
    )
    with waiting:
        assert waiting.stdin and waiting.stdout
        waiting.stdin.write(BLOCKS["backup"] + "echo copying\n")
        waiting.stdin.flush()
        assert waiting.stdout.readline() == "copying\n"
        with pytest.raises(LakeBusy), lake.exclusive_lock():
            pass
        small_lake.put(lake, "upweighted_dataset", "a", small_lake.dataset("r9"))  # publishing goes on
        waiting.stdin.close()
    with lake.exclusive_lock():
        pass


def test_the_planner_computes_again_what_a_copy_without_order_lacks(world, tmp_path: Path) -> None:
    """A plain copy: the files of some versions are missing that its pointers name."""
    world.make_all()
    copy = Lake(shutil.copytree(world.lake.root, tmp_path / "copy"))
    tasks, rollouts = Ref("tasks", "suite", "small"), Ref("raw_rollouts", "rollout_set", "few")
    before = {ref: copy.require(ref).version for ref in copy.refs()}
    copy.files(tasks, "tasks")[0].unlink()
    shutil.rmtree(next(copy.partition_folder(rollouts).glob("version=*")))
    damages = audit(copy).damages
    parts = sorted((damage.kind, *damage.refs) for damage in damages if damage.kind != "version")
    assert parts == [("file", tasks), ("pointer", rollouts)]
    set_aside(copy, damages)
    assert {damage.kind for damage in audit(copy, deep=True).damages} == {"version"}, "inputs of sound versions"
    specs = world.resources().specs
    assert {s.asset for s in plan("first", specs, copy) if s.state == "missing"} == {"tasks", "raw_rollouts"}
    world.lake = copy
    world.make_all()
    assert {step.state for step in plan("first", specs, copy)} == {"ok"}
    assert audit(copy, deep=True).damages == []
    assert {ref: copy.require(ref).version for ref in before} == before


def test_lakes_of_two_machines_become_one(lake: Lake, tmp_path: Path) -> None:
    if shutil.which("rsync") is None:
        pytest.skip("needs rsync (.ci/run installs it)")
    other, tool = Lake(tmp_path / "other"), Tool("rsync", tmp_path)
    small_lake.put(other, "upweighted_dataset", "b", small_lake.dataset("r3"))
    small_lake.put(other, "upweighted_dataset", "a", small_lake.dataset("r4"))
    here = lake.require(DATASET).version
    tool.back_up(other)
    merge = (BLOCKS["rsync_restore"] + BLOCKS["restored"]).replace("rsync -a", "rsync -a --ignore-existing")
    done = shell(merge.replace("tar ", "tar --skip-old-files "), ETPI_DATA=lake.root, BACKUP=tool.backup)
    assert done.returncode == 0, done.stderr
    assert lake.require(DATASET).version == here and lake.keys("upweighted_dataset", "experiment") == ["a", "b"]


# --- repair, disk use, moving ----------------------------------------------------------------------------------------


def damage(path: Path) -> None:
    path.write_bytes(bytes(path.stat().st_size))


def test_repair_takes_from_the_backup_what_it_has_and_sets_the_rest_aside(lake: Lake, tmp_path: Path) -> None:
    if shutil.which("rsync") is None:
        pytest.skip("needs rsync (.ci/run installs it)")
    tool = Tool("rsync", tmp_path)
    tool.back_up(lake)
    later = small_lake.put(lake, "upweighted_dataset", "b", small_lake.dataset("r3"))
    weights = lake.checkpoint_dir(lake.read(TRAINED, "checkpoints")["checkpoint_id"].to_pylist()[0])
    for path in (
        lake.files(DATASET, "dataset_rows")[0],
        weights / "model.safetensors",
        lake.files(later.ref, "dropped")[0],
    ):
        damage(path)
    assert len(audit(lake, deep=True).damages) == 3
    done = shell(BLOCKS["repair"], ETPI_DATA=lake.root, BACKUP=tool.backup)
    assert audit(lake, deep=True).damages == [], done.stderr
    assert lake.current(DATASET) and lake.current(TRAINED) and lake.current(later.ref) is None


def test_disk_use_is_shown_by_asset_and_experiment(lake: Lake, tmp_path: Path) -> None:
    lineage(lake, tmp_path)
    done = shell(BLOCKS["du"], ETPI_DATA=lake.root, NAME="a", ETPI_CATALOG=tmp_path / "data.duckdb")
    assert done.returncode == 0, done.stderr
    for shown in ("./upweighted_dataset", "upweighted_dataset/experiment=a", "checkpoints/trained", "in all"):
        assert shown in done.stdout


def test_a_moved_lake_is_the_same_lake(lake: Lake, tmp_path: Path) -> None:
    before, report = lineage(lake, tmp_path), (lake.root / "reports/a/report.html").read_text()
    (row,) = lake.read(TRAINED, "checkpoints").to_pylist()
    moved = Lake(lake.root.rename(tmp_path / "moved"))
    assert audit(moved, deep=True).damages == [] and lineage(moved, tmp_path) == before
    assert checkpoint_folder(moved.root, row["path"]) == moved.checkpoint_dir(row["checkpoint_id"])
    assert (moved.root / "reports/a/report.html").read_text() == report
    for path in moved.root.rglob("*.json"):
        assert str(tmp_path / "data") not in path.read_text(), path
