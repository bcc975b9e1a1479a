"""The Python API: frames show what the catalog shows, read no more files than asked, and never a damaged one."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import polars as pl
import pytest

import etpi
from etpi.api import OpenLake
from etpi.api.scan import StoredTable, UnknownName
from etpi_assets.graph import GRAPH
from etpi_resources.lake import catalog
from etpi_resources.lake.lake import DamagedFile, Lake, LakeError, Ref
from etpi_resources.lake.schemas import TABLES
from tests.support import small_lake

DOCS = Path(__file__).parents[2] / "docs" / "queries.md"


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a lake in `data` and its catalog beside it."""
    folder = tmp_path_factory.mktemp("project")
    small = small_lake.make(folder / "data")
    reward = {"rollout_id": "s-0", "function": "format", "version": "source-1", "value": 1.0, "applied": False}
    small_lake.put(small, "rl_rewards", "reinforced", {"rewards": [reward]})
    catalog.build(small, GRAPH.values(), vocabularies={"tiny": [f"<{number}>" for number in range(50)]})
    return folder


@pytest.fixture
def lake(project: Path) -> OpenLake:
    return etpi.open(project / "data")


def run(code: str, cwd: Path) -> str:
    command = [sys.executable, "-c", code]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=True).stdout.strip()


# --- opening -------------------------------------------------------------------------------------------------------


def test_import_loads_neither_polars_nor_dagster_nor_torch(tmp_path: Path) -> None:
    code = "import etpi, sys; print({'polars', 'duckdb', 'dagster', 'torch', 'etpi_assets'} & set(sys.modules))"
    assert run(code, tmp_path) == "set()"
    assert {"open", "load", "OpenLake"} <= set(dir(etpi))
    with pytest.raises(AttributeError, match="'opn'"):
        etpi.opn  # noqa: B018


def test_open_takes_a_lake_or_a_project_from_any_working_directory(
    project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("ETPI_CATALOG", raising=False)
    monkeypatch.setenv("ETPI_DATA", str(tmp_path / "another"))
    for path in (project, project / "data", str(project / "data")):
        opened = etpi.open(path)
        assert (opened.root, opened.catalog) == (project / "data", project / "etpi.duckdb")
        assert opened.sql("SELECT count(*) AS n FROM rollouts").item() == 9
    with catalog.connect(project) as db:
        assert db.sql("SELECT count(*) AS n FROM rollouts").pl()["n"].to_list() == [9]
    monkeypatch.setenv("ETPI_DATA", str(project / "data"))
    shutil.copy(project / "etpi.duckdb", project / "data" / "etpi.duckdb")  # where etpi writes it with ETPI_DATA
    try:
        assert etpi.open().catalog == project / "data" / "etpi.duckdb"
    finally:
        (project / "data" / "etpi.duckdb").unlink()


def test_open_without_a_lake_names_the_folder_and_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("ETPI_DATA", raising=False)
    with pytest.raises(LakeError, match=f"{tmp_path / 'data'} .ETPI_DATA "):
        etpi.open()
    monkeypatch.setenv("ETPI_DATA", str(tmp_path))
    with pytest.raises(LakeError, match=f"{tmp_path} .* ETPI_DATA.:"):
        etpi.open()
    with pytest.raises(LakeError, match=str(tmp_path / "x")):
        etpi.open(tmp_path / "x")
    with pytest.raises(LakeError, match=str(tmp_path)):
        monkeypatch.delenv("ETPI_DATA")
        monkeypatch.delenv("ETPI_CATALOG", raising=False)
        catalog.connect()


# --- scanning ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("table", TABLES)
def test_scan_has_the_rows_of_the_views(lake: OpenLake, table: str) -> None:
    """A view has the name of its table, apart from those of pairs and specs."""
    frame = lake.scan(table).collect()
    assert frame.schema == StoredTable.of(table).schema == lake.scan(table).collect_schema()
    if table in ("pairs",):
        return
    view = lake.sql(f"FROM {table}")
    common = [name for name in view.columns if name in frame.columns]
    assert len(view) == len(frame) and {*common} >= {*TABLES[table].schema.names} - {"spec"}
    flat = [name for name in common if not isinstance(frame.schema[name], pl.List)]
    assert frame.select(flat).sort(flat).rows() == view.select(flat).sort(flat).rows()


def test_an_empty_lake_is_typed(lake: OpenLake, tmp_path: Path) -> None:
    small_lake.put(Lake(tmp_path / "data"), "suite_spec", "coop", small_lake.spec("suite", "coop", "c"))
    bare = etpi.open(tmp_path)
    for table in TABLES:
        rows = bare.scan(table).collect()
        assert rows.schema == lake.scan(table).collect_schema() and (rows.is_empty() or table == "specs")
    assert bare.scan("turns").collect_schema()["suffix_ids"] == pl.List(pl.Int32)
    assert bare.scan("turns").collect_schema()["at"] == pl.Datetime("us", "UTC")


def test_scan_chooses_partitions_and_origins(lake: OpenLake) -> None:
    def made_for(**chosen) -> set[tuple]:
        return set(lake.scan("turns", columns=["origin", "made_for"], **chosen).collect().rows())

    assert made_for(experiment="reinforced") == {("eval", "reinforced"), ("rl", "reinforced")}
    assert made_for(experiment=["reinforced", "strong"], origin="eval") == {("eval", "reinforced"), ("eval", "strong")}
    assert made_for(rollout_set="weak_set") == {("set", "weak_set")}
    assert made_for(experiment="follow_up") == set(), "known, but never evaluated"
    assert lake.keys("experiment") == ["blocked", "follow_up", "reinforced", "strong"]


def test_files_of_other_partitions_are_not_read(project: Path, tmp_path: Path) -> None:
    shutil.copytree(project / "data", tmp_path / "data")
    lake = etpi.open(tmp_path)
    for file in (tmp_path / "data" / "eval_rollouts" / "rollouts" / "experiment=strong").rglob("*.parquet"):
        file.write_bytes(b"PAR1 not any more")
    kept = lake.scan("rollouts", experiment="reinforced", origin="eval").collect()
    assert kept["rollout_id"].to_list() == ["f-sft", "f-rl"]
    assert len(lake.scan("rollouts", experiment="reinforced").collect()) == 4


def test_a_damaged_file_raises(project: Path, tmp_path: Path) -> None:
    """One changed byte in the data, which polars itself does not notice, is enough; so is a missing file."""
    shutil.copytree(project / "data", tmp_path / "data")
    lake = etpi.open(tmp_path)
    (file,) = (tmp_path / "data" / "eval_metrics" / "metrics" / "experiment=strong").rglob("*.parquet")
    data = bytearray(file.read_bytes())
    data[40] ^= 1
    file.write_bytes(data)
    with pytest.raises(DamagedFile, match="sha256"):
        lake.scan("metrics", experiment="strong")
    file.unlink()
    with pytest.raises(DamagedFile, match="missing"):
        lake.scan("metrics")


def test_a_column_that_an_older_file_lacks_is_null(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = Lake(tmp_path / "data")
    probe = {"x": {"probe": "p", "step": 3}, "y": {"probe": "q", "step": 4}}
    paths = {
        key: store.files_of(small_lake.put(store, "serving_probe", key, {"probes": [row]}), "probes")
        for key, row in probe.items()
    }
    (file,) = paths["x"]
    older = pl.read_parquet(file, hive_partitioning=False).drop("step")
    monkeypatch.setattr(Lake, "verified_files", lambda self, manifest, table: paths[manifest.ref.key])
    older.write_parquet(file)
    read = etpi.open(tmp_path).scan("probes", columns=["probe", "step", "experiment"]).collect()
    assert read.rows() == [("p", None, "x"), ("q", 4, "y")]


def test_a_blocked_version_is_not_shown(lake: OpenLake, tmp_path: Path) -> None:
    assert lake.scan("dataset_rows", experiment="blocked").collect().is_empty()
    store = small_lake.make(tmp_path / "data")
    gate = small_lake.CheckOutcome("teacher_gate", False, "too weak")
    before = etpi.open(tmp_path).scan("dataset_rows", experiment="strong").collect()
    small_lake.put(store, "upweighted_dataset", "strong", small_lake.dataset("r3"), checks=(gate,))
    assert store.blocked(Ref("upweighted_dataset", "experiment", "strong"))
    assert etpi.open(tmp_path).scan("dataset_rows", experiment="strong").collect().equals(before), "the last good one"


def test_a_column_called_version_is_the_tables_own(lake: OpenLake) -> None:
    """The path of a file has `version=<data version>`."""
    assert lake.scan("rewards", experiment="reinforced", columns=["version", "experiment"]).collect().rows() == [
        ("source-1", "reinforced")
    ]
    assert lake.sql("SELECT version, experiment FROM rewards").rows() == [("source-1", "reinforced")]


def test_odd_keys_and_paths_stay_text(tmp_path: Path) -> None:
    for key in ("007", "1e3"):
        small_lake.put(Lake(tmp_path / "a=b"), "selected_trajectories", key, {"selected": [{"rollout_id": "r"}]})
    lake = etpi.open(tmp_path / "a=b")
    assert lake.scan("selected").select("experiment").collect().to_series().to_list() == ["007", "1e3"]
    assert "a" not in lake.scan("selected").collect_schema()


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda lake: lake.scan("turn"), ["'turn' is not a table", "'turns'"]),
        (lambda lake: lake.scan("full_turns"), ["lake.sql('FROM full_turns')"]),
        (lambda lake: lake.scan("turns", experiment="stron"), ["'stron' is not an experiment", "'strong'"]),
        (lambda lake: lake.scan("turns", columns=["turm"]), ["'turm' is not a column of turns", "'turn'"]),
        (lambda lake: lake.scan("turns", origin="evil"), ["'evil' is not an origin", "'eval'"]),
        (lambda lake: lake.scan("metrics", origin="eval"), ["no origin"]),
        (lambda lake: lake.scan("rollouts", suite="coop"), ["by rollout_set or experiment", 'pl.col("suite")']),
        (lambda lake: lake.scan("turns", experiment="strong", rollout_set="weak_set"), ["one partition"]),
        (lambda lake: lake.report("solved_pared"), ["'solved_paired'"]),
        (lambda lake: lake.report("solved_paired", experment="x"), ["a variable of the report", "'experiment'"]),
        (lambda lake: lake.experiment("stong"), ["'strong'"]),
        (lambda lake: lake.experiment("strong").transcript("e-bas"), ["'e-base'"]),
    ],
)
def test_mistyped_names_get_the_nearest(lake: OpenLake, call, words: list[str]) -> None:
    with pytest.raises(LakeError) as caught:
        call(lake)
    assert all(word in str(caught.value) for word in words), caught.value
    assert isinstance(caught.value, UnknownName) or "is not" not in words[0]


# --- SQL -----------------------------------------------------------------------------------------------------------


def test_sql_binds_parameters_is_in_utc_and_read_only(lake: OpenLake) -> None:
    rows = lake.sql("SELECT DISTINCT made_for FROM turns WHERE rollout_id = $rollout", rollout="e-sft'; --")
    assert rows.is_empty() and rows.schema == {"made_for": pl.String}
    assert lake.sql("SELECT DISTINCT turns.at FROM turns").schema["at"] == pl.Datetime("us", "UTC")
    assert lake.sql("SELECT spec FROM experiments WHERE experiment = 'strong'").item().startswith("{")
    with pytest.raises(Exception, match="read-only"):
        lake.sql("CREATE TABLE main.mine AS SELECT 1")


def test_sql_sees_a_catalog_that_was_rebuilt(tmp_path: Path) -> None:
    store = small_lake.make(tmp_path / "data")
    lake = etpi.open(tmp_path)
    with pytest.raises(LakeError, match="etpi run catalog"):
        lake.sql("FROM rollouts")
    catalog.build(store, GRAPH.values())
    before = len(lake.sql("FROM rollouts"))
    small_lake.put(store, "raw_rollouts", "new", {"rollouts": [small_lake.rollout("n", "t", rollout_set="new")]})
    assert len(lake.scan("rollouts").collect()) == before + 1 == len(lake.sql("FROM rollouts")) + 1
    catalog.build(store, GRAPH.values())
    assert len(lake.sql("FROM rollouts")) == before + 1


def test_a_moved_lake_says_to_rebuild_the_catalog(project: Path, tmp_path: Path) -> None:
    store = small_lake.make(tmp_path / "old" / "data")
    catalog.build(store, GRAPH.values())
    (tmp_path / "old").rename(tmp_path / "new")
    lake = etpi.open(tmp_path / "new")
    assert len(lake.scan("turns").collect()) == len(etpi.open(project).scan("turns").collect())
    with pytest.raises(LakeError, match="moved.*etpi run catalog"):
        lake.sql("FROM turns")


def test_reports_are_listed_with_their_variables_and_run(lake: OpenLake) -> None:
    listed = {name: variables for name, question, variables in lake.reports().iter_rows() if "?" in question}
    assert set(listed) == {file.stem for file in (catalog.sql_folder() / "reports").glob("*.sql")}
    assert listed["tokens_of_a_turn"] == ["agent", "rollout", "tokenizer", "turn"], "not `asked`, which it sets itself"
    for name in listed:
        assert len(lake.report(name)), name
    assert lake.report("solved_paired", experiment="strong")["after"].to_list() == ["sft"]


# --- an experiment -------------------------------------------------------------------------------------------------


def test_failures_of_the_evaluation(lake: OpenLake) -> None:
    failures = lake.experiment("reinforced").failures()
    assert failures.select("rollout_id", "checkpoint_role", "verdict").rows() == [("f-sft", "sft", "failed_tests")]
    assert failures["details"].to_list() == ['{"depth":3,"right":2}']


def test_transcript_has_all_agents_in_order(lake: OpenLake) -> None:
    talk = lake.experiment("strong").transcript("r1")  # of the rollout set it was trained on
    spoken = [(0, "agent1"), (0, "agent2"), (1, "agent1"), (1, "agent2"), (2, "agent1"), (2, "agent2")]
    assert talk.select("turn", "agent_id").rows() == spoken
    assert talk["place"].to_list() == list(range(6)) and talk.schema["clock"] == pl.Datetime("us", "UTC")
    assert "send_message" in talk["commands"][0]


def test_tokens_are_those_that_train(lake: OpenLake) -> None:
    dataset = lake.experiment("strong").dataset()
    rows, tokens = dataset.rows().collect(), dataset.tokens().collect()
    assert tokens.schema == {
        "rollout_id": pl.String, "agent_id": pl.String, "turn": pl.Int32, "prefix_turn": pl.Int32, "pair_id": pl.String,
        "dataset_row_id": pl.String, "split": pl.String, "side": pl.String, "place": pl.Int32, "token_id": pl.Int32,
        "text": pl.String, "label": pl.Boolean, "weight": pl.Float64,
    }  # fmt: skip
    assert tokens["label"].sum() == rows["output_tokens"].sum() == 18
    assert tokens["weight"].sum() == (rows["weight"] * rows["output_tokens"]).sum()
    agent = tokens.filter(agent_id="agent1")
    assert agent["place"].to_list() == list(range(16)), "the conversation, without repetition"
    whole = lake.sql("SELECT input_ids || output_ids AS ids FROM tito_pairs WHERE pair_id = 'r1/agent1/2'").item()
    assert agent["token_id"].to_list() == whole.to_list()
    assert "".join(agent.filter(turn=1)["text"]) == "<1><2><21><30><40>"
    unknown = lake.experiment("follow_up").dataset().tokens().collect()
    assert unknown["text"].null_count() == len(unknown) > 0, "its spec names no tokenizer"


# --- the page ------------------------------------------------------------------------------------------------------


def test_examples_of_the_page_run(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ETPI_DATA", str(project / "data"))
    monkeypatch.setenv("ETPI_CATALOG", str(project / "etpi.duckdb"))
    names: dict = {}
    shown: list[str] = []
    names["print"] = lambda *values: shown.append(" ".join(map(str, values)))
    blocks = re.findall(r"^```python\n(.*?)^```", DOCS.read_text(), flags=re.DOTALL | re.MULTILINE)
    for block in blocks:
        exec(block, names)
    assert len(blocks) >= 6 and len(shown) > 12
    assert any("turn 2" in line for line in shown), "the transcript"


def test_lake_and_experiment_have_a_form_for_notebooks(lake: OpenLake) -> None:
    assert 'http://localhost:3001/experiment/strong">strong</a>' in lake._repr_html_()
    shown = lake.experiment("strong")._repr_html_()
    assert "experiment/strong" in shown and "solved" in shown
    assert "not evaluated" in lake.experiment("follow_up")._repr_html_()
