"""`etpi rm` and `etpi gc` remove what nothing needs, and nothing else: lineage, pointers and views stay the same."""

from __future__ import annotations

import json
import random
import shutil
import subprocess
import sys
import tempfile
from datetime import datetime, timedelta
from pathlib import Path

import pytest

from etpi.cli import main
from etpi_assets.graph import GRAPH
from etpi_assets.planning.planner import plan
from etpi_resources.lake import catalog, removal
from etpi_resources.lake.audit import audit
from etpi_resources.lake.lake import Lake, LakeBusy, LakeError, Ref
from etpi_resources.lake.references import References
from etpi_resources.lake.removal import carry_out, plan_garbage, plan_partitions
from tests.support import small_lake

NOW, FORTNIGHT = timedelta(0), timedelta(days=14)
STAGING = ".staging"


def staged(lake: Lake) -> list[Path]:
    return list((lake.root / STAGING).glob("*"))


def used(lake: Lake) -> int:
    """The bytes of all files."""
    return sum(path.stat().st_size for path in lake.root.rglob("*") if path.is_file())


def rows(lake: Lake, sql: str) -> list[tuple]:
    """Build the catalog, read every view of it, and return the rows of a query."""
    path = catalog.build(lake, GRAPH.values(), lake.root.parent / "test.duckdb")
    with catalog.connect(path) as connection:
        names = connection.sql("SELECT view_name FROM duckdb_views() WHERE NOT internal AND schema_name = 'main'")
        for (view,) in names.fetchall():
            connection.sql(f"SELECT * FROM {view}").fetchall()
        return connection.sql(sql).fetchall()


def lineage(lake: Lake, but: str = "") -> list[tuple]:
    return rows(lake, f"SELECT * FROM lineage WHERE experiment != '{but}' ORDER BY ALL")


def store_checkpoint(lake: Lake, content: str) -> str:
    staged = lake.scratch("model")
    (staged / "config.json").write_text("{}")
    (staged / "model.safetensors").write_text(content)
    return lake.adopt_checkpoint(staged)[0]


def store_training(lake: Lake, key: str, *checkpoints: str) -> Path:
    path = lake.root / "checkpoints" / "trained" / f"{key}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"checkpoints": [{"checkpoint_id": name} for name in checkpoints]}))
    return path


def trained(lake: Lake, experiment: str, checkpoint: str, dataset: str, base: str, recorded: bool = True) -> None:
    """Publish a base and a training; `recorded`: the manifest names the data set, not the row alone."""
    base_row = small_lake.checkpoint(base, experiment, "base", path=f"checkpoints/{base}")
    small_lake.put(lake, "base_checkpoint", experiment, {"checkpoints": [base_row]})
    sft = small_lake.checkpoint(checkpoint, experiment, "sft", parent_id=base, dataset_version=dataset, seed=0)
    inputs = {f"upweighted_dataset/{experiment}": dataset} if recorded else {}
    small_lake.put(lake, "sft_checkpoint", experiment, {"checkpoints": [sft]}, inputs=inputs)


@pytest.fixture
def family(tmp_path: Path) -> tuple[Lake, dict[str, str]]:
    """Experiments `a` and `b` from one base, and `c` from the checkpoint of `a`; each with stored weights."""
    lake = Lake(tmp_path / "data")
    ids = {name: store_checkpoint(lake, name) for name in ("base", "a", "b", "c")}
    for name, base in (("a", "base"), ("b", "base"), ("c", "a")):
        dataset = small_lake.put(lake, "upweighted_dataset", name, small_lake.dataset(f"r-{name}"))
        trained(lake, name, ids[name], dataset.version, ids[base])
        store_training(lake, f"key-{name}", ids[name])
        (lake.root / "reports" / name).mkdir(parents=True)
        (lake.root / "reports" / name / "report.html").write_text(name)
    return lake, ids


def test_rm_removes_an_experiment_and_leaves_the_lineage_of_the_others(family) -> None:
    lake, ids = family
    before = lineage(lake, but="b")
    assert before and lineage(lake) != before
    carry_out(lake, plan_partitions(lake, [("experiment", "b")]))
    assert lineage(lake) == before
    assert not [ref for ref in lake.refs() if ref.key == "b"] and not (lake.root / "reports" / "b").exists()
    assert audit(lake, deep=True).damages == [] and not staged(lake)
    assert lake.checkpoint_dir(ids["b"]).is_dir(), "gc frees the weights"
    carry_out(lake, plan_garbage(lake, NOW))
    assert lineage(lake) == before and audit(lake, deep=True).damages == []
    assert not lake.checkpoint_dir(ids["b"]).exists() and lake.checkpoint_dir(ids["base"]).is_dir()
    assert not (lake.root / "checkpoints/trained/key-b.json").exists()


def test_rm_refuses_an_experiment_whose_checkpoint_another_starts_from(family) -> None:
    lake, _ = family
    with pytest.raises(LakeError, match="experiment c. version .*experiment a. version"):
        plan_partitions(lake, [("experiment", "a")])
    assert lake.current(Ref("sft_checkpoint", "experiment", "a"))
    carry_out(lake, plan_partitions(lake, [("experiment", "a"), ("experiment", "c")]))
    assert {ref.key for ref in lake.refs()} == {"b"} and audit(lake, deep=True).damages == []


def test_rm_refuses_an_experiment_whose_checkpoint_a_rollout_set_names(family) -> None:
    lake, ids = family
    from etpi_resources.lake.schemas import empty

    ref = Ref("raw_rollouts", "rollout_set", "few")
    tables = {name: empty(name) for name in GRAPH["raw_rollouts"].tables}
    spec = {"engine": {"kind": "transformers", "model": f"checkpoint:{ids['b']}"}}
    lake.publish(ref, tables, input_key="k", inputs={}, spec_hash="s", spec=spec)
    with pytest.raises(LakeError, match="rollout_set few. version .*experiment b. version"):
        plan_partitions(lake, [("experiment", "b")])


def test_rm_names_the_keys_that_exist(family) -> None:
    lake, _ = family
    with pytest.raises(LakeError, match="experiment d; .* a, b, c$"):
        plan_partitions(lake, [("experiment", "d")])


@pytest.mark.parametrize("pattern", ["*", "?", "[ab]", ""])
def test_rm_takes_no_pattern_for_a_name(family, pattern: str) -> None:
    """A pattern's folders would go without a question to what needs them."""
    with pytest.raises(LakeError, match=" a, b, c$"):
        plan_partitions(family[0], [("experiment", pattern)])


def test_gc_after_rm_keeps_a_checkpoint_that_two_experiments_trained(family) -> None:
    lake, ids = family
    dataset = small_lake.put(lake, "upweighted_dataset", "same", small_lake.dataset("r-b"))
    trained(lake, "same", ids["b"], dataset.version, ids["base"])
    before = lineage(lake, but="b")
    carry_out(lake, plan_partitions(lake, [("experiment", "b")]))
    carry_out(lake, plan_garbage(lake, NOW))
    assert lake.checkpoint_dir(ids["b"]).is_dir() and (lake.root / "checkpoints/trained/key-b.json").exists()
    assert lineage(lake) == before


def test_rm_of_a_rollout_set_removes_its_journals_and_keeps_those_of_others(family) -> None:
    lake, _ = family
    small_lake.put(lake, "raw_rollouts", "few", {"rollouts": [small_lake.rollout("r", "strong")]})
    for name in ("few", "more"):
        (lake.scratch(f"rollouts/{name}/0123456789abcdef") / "journal-1.jsonl").write_text("{}\n")
    carry_out(lake, plan_partitions(lake, [("rollout_set", "few")]))
    assert [path.name for path in lake.root.glob("scratch/rollouts/*")] == ["more"]


@pytest.mark.parametrize("moves", range(0, 14, 2))
def test_rm_killed_at_any_move_leaves_a_sound_lake_and_can_be_finished(family, monkeypatch, moves: int) -> None:
    lake, ids = family
    doomed, done = plan_partitions(lake, [("experiment", "b")]), 0
    replace = Path.replace

    def dies(path: Path, target: Path) -> Path:
        nonlocal done
        if STAGING in Path(target).parts:
            done += 1
            if done > moves:
                raise KeyboardInterrupt
        return replace(path, target)

    monkeypatch.setattr(Path, "replace", dies)
    if moves < len(doomed):
        with pytest.raises(KeyboardInterrupt):
            carry_out(lake, doomed)
    monkeypatch.undo()
    assert audit(lake, deep=True).damages == []
    if [ref for ref in lake.refs() if ref.key == "b"]:
        carry_out(lake, plan_partitions(lake, [("experiment", "b")]))
    carry_out(lake, plan_garbage(lake, NOW))
    assert not lake.checkpoint_dir(ids["b"]).exists() and not list(lake.root.glob("*/*/experiment=b"))
    assert not staged(lake) and audit(lake, deep=True).damages == []


HOLD = """
import sys, time
from pathlib import Path
sys.path.insert(0, {checkout!r})
from etpi_resources.lake.lake import Lake
lake = Lake(Path({root!r}))
with lake.shared_lock(), lake.lock("sft_checkpoint-a"):
    print("held", flush=True)
    time.sleep(60)
"""


@pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="needs a second filesystem")
def test_gc_refuses_weights_behind_a_link_to_another_filesystem_before_it_removes_anything(family) -> None:
    lake, _ = family
    with tempfile.TemporaryDirectory(dir="/dev/shm") as other:
        if Path(other).stat().st_dev == lake.root.stat().st_dev:
            pytest.skip("/dev/shm is the filesystem of the temporary folder")
        shutil.move(lake.root / "checkpoints", Path(other) / "checkpoints")
        (lake.root / "checkpoints").symlink_to(Path(other) / "checkpoints")
        carry_out(lake, plan_partitions(lake, [("experiment", "b")]))
        doomed = plan_garbage(lake, NOW)
        with pytest.raises(LakeError, match=r"key-b\.json "):
            carry_out(lake, doomed)
        assert all(part.path.exists() for part in doomed) and not staged(lake)


def test_removal_refuses_while_a_run_uses_the_lake_and_names_it(family) -> None:
    lake, _ = family
    script = HOLD.format(checkout=str(Path(__file__).parents[2]), root=str(lake.root))
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) as run:
        assert run.stdout and run.stdout.readline() == "held\n"
        with pytest.raises(LakeBusy, match=f"sft_checkpoint-a .*{run.pid}"), lake.exclusive_lock():
            pass
        run.kill()
    with lake.exclusive_lock():
        pass


# --- gc --------------------------------------------------------------------------------------------------------------


def evolve(lake: Lake, rng: random.Random) -> None:
    """Publish random versions of three experiments: data sets, trainings from any stored checkpoint, scratch."""
    stored = [store_checkpoint(lake, "base")]
    versions: dict[str, list[str]] = {}
    for number in range(rng.randrange(9, 14)):
        name = rng.choice("abc")
        if name not in versions or rng.random() < 0.5:
            rollout = f"r{rng.randrange(6)}"
            raw = {"rollouts": [small_lake.rollout(rollout, "strong")], **small_lake.conversation(rollout)}
            made = small_lake.put(lake, "raw_rollouts", "few", raw)
            dataset = small_lake.put(
                lake, "upweighted_dataset", name, small_lake.dataset(rollout), inputs={"raw_rollouts/few": made.version}
            )
            versions.setdefault(name, []).append(dataset.version)
        if rng.random() < 0.8:
            checkpoint = store_checkpoint(lake, f"weights {number % 7}")
            store_training(lake, f"key-{number % 7}", checkpoint)
            base = rng.choice([c for c in stored if c != checkpoint])
            trained(lake, name, checkpoint, rng.choice(versions[name]), base, recorded=rng.random() < 0.5)
            stored.append(checkpoint)
    journal = lake.scratch("rollouts/few/0123456789abcdef") / "journal-1.jsonl"
    journal.write_text("{}\n")


@pytest.mark.parametrize("seed", range(5))
def test_gc_of_a_randomly_evolved_lake_changes_no_lineage(tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    lake = Lake(tmp_path / "data")
    evolve(lake, rng)
    before, pointers = lineage(lake), {ref: lake.current(ref) for ref in lake.refs()}
    size, doomed = used(lake), plan_garbage(lake, NOW)
    carry_out(lake, doomed)
    assert lineage(lake) == before
    assert {ref: lake.current(ref) for ref in lake.refs()} == pointers
    assert audit(lake, deep=True).damages == []
    assert used(lake) < size or not doomed
    # The inputs of every version that is left are left too, where they were published.
    left = References(lake)
    for publications in left.pointed.values():
        for publication in publications:
            for name, version in publication.manifest.inputs.items():
                assert any(v.name == version and f"{v.ref.asset}/{v.ref.key}" == name for v in left.publications)
    assert plan_garbage(lake, NOW) == []


def test_gc_removes_what_the_evolution_left_behind(tmp_path: Path) -> None:
    removed: set[str] = set()
    for seed in range(2):
        lake = Lake(tmp_path / str(seed))
        evolve(lake, random.Random(seed))
        removed |= {part.reason for part in plan_garbage(lake, NOW)}
        assert plan_garbage(lake, FORTNIGHT) == [], "nothing is older than 14 days"
    assert removed >= {"past version", "stored training", "checkpoint", "scratch"}


def test_gc_keeps_young_past_versions_and_what_they_need(tmp_path: Path) -> None:
    lake = Lake(tmp_path / "data")
    raw = small_lake.put(lake, "raw_rollouts", "few", {"rollouts": [small_lake.rollout("r0", "strong")]})
    small_lake.put(lake, "raw_rollouts", "few", {"rollouts": [small_lake.rollout("r1", "strong")]})
    inputs = {"raw_rollouts/few": raw.version}
    made = [
        small_lake.put(lake, "upweighted_dataset", "a", small_lake.dataset(f"r{n}"), inputs=inputs if n == 1 else {})
        for n in range(3)
    ]
    born = datetime.fromisoformat(made[1].created_at)
    carry_out(lake, plan_garbage(lake, timedelta(days=1), born + timedelta(days=1) - timedelta(microseconds=1)))
    assert {m.version for m in lake.history(made[0].ref)} == {made[1].version, made[2].version}
    assert lake.has_files(raw), "a version that stays needs it"
    lake.reinstate(made[1])
    with pytest.raises(LakeError):
        lake.reinstate(made[0])


@pytest.mark.parametrize(("minutes", "stay"), [(9, 2), (11, 1)])
def test_gc_on_a_cluster_keeps_ten_minutes(tmp_path: Path, monkeypatch, minutes: int, stay: int) -> None:
    monkeypatch.setattr(removal, "backend", lambda: object())
    lake = Lake(tmp_path / "data")
    two = [small_lake.put(lake, "upweighted_dataset", "a", small_lake.dataset(f"r{n}"), inputs={}) for n in range(2)]
    now = datetime.fromisoformat(two[0].created_at) + timedelta(minutes=minutes)
    carry_out(lake, plan_garbage(lake, timedelta(0), now))
    assert len(lake.history(two[0].ref)) == stay


def test_gc_removes_files_that_no_manifest_names_but_not_those_of_a_publication_under_way(tmp_path: Path) -> None:
    lake = Lake(tmp_path / "data")
    made = small_lake.put(lake, "upweighted_dataset", "a", small_lake.dataset("r"))
    orphan = lake.root / "upweighted_dataset/dropped/experiment=a/version=0000000000000000"
    orphan.mkdir()
    (orphan / "part-0.parquet").write_bytes(b"left")
    with lake.staging():
        doomed = plan_garbage(lake, NOW)
    assert [part.path for part in doomed] == [orphan]
    carry_out(lake, doomed)
    assert not orphan.exists() and lake.has_files(made)


@pytest.mark.parametrize("days", ["nan", "1e300"])
def test_gc_refuses_an_age_that_is_no_number_of_days(tmp_path: Path, monkeypatch, capsys, days: str) -> None:
    monkeypatch.setenv("ETPI_DATA", str(tmp_path / "data"))
    assert main(["gc", "--older-than", days]) == 2
    assert "--older-than" in capsys.readouterr().err


def test_a_damaged_manifest_stops_removal(tmp_path: Path) -> None:
    lake = Lake(tmp_path / "data")
    small_lake.put(lake, "upweighted_dataset", "a", small_lake.dataset("r"))
    next(lake.root.glob("*/*=*/version=*/manifest-*.json")).write_text("{")
    with pytest.raises(LakeError, match="etpi verify"):
        plan_garbage(lake, NOW)


def test_after_gc_a_spec_that_returns_is_computed_again_and_nothing_else_is(world) -> None:
    suite = world.specs_folder / "suites" / "small.toml"
    original = suite.read_text()
    world.make_all()
    suite.write_text(original + "params = {train = 50}\n")
    world.make_all()
    specs = world.resources().specs
    states = [(step.asset, step.key, step.state) for step in plan("first", specs, world.lake)]
    doomed = plan_garbage(world.lake, NOW)
    assert {part.reason for part in doomed} == {"past version"}
    carry_out(world.lake, doomed)
    assert [(step.asset, step.key, step.state) for step in plan("first", specs, world.lake)] == states
    assert audit(world.lake, deep=True).damages == []
    assert world.make_all() == [("catalog", "all")]
    suite.write_text(original)
    specs = world.resources().specs
    assert {step.state for step in plan("first", specs, world.lake)} == {"ok", "stale", "waiting"}
    made = world.make_all()
    assert ("tasks", "small") in made and ("raw_rollouts", "few") in made
    assert {step.state for step in plan("first", world.resources().specs, world.lake)} == {"ok"}


def test_the_catalog_of_a_lake_after_rm_has_every_view(tmp_path: Path) -> None:
    lake = small_lake.make(tmp_path / "data")
    with pytest.raises(LakeError, match="experiment follow_up. version .*experiment strong. version"):
        plan_partitions(lake, [("experiment", "strong")])
    before = lineage(lake, but="follow_up")
    carry_out(lake, plan_partitions(lake, [("experiment", "follow_up")]))
    assert lineage(lake) == before
