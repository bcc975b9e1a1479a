"""Exports of a real experiment: their readers load them, importers read them back, and bad requests are refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from etpi_assets.curation.merge import expand
from etpi_assets.exports import EXPORTS, export
from etpi_assets.exports.atif import document
from etpi_assets.exports.experiment_data import DATASET, ExportSource
from etpi_assets.importers import IMPORTERS, count_found, import_runs
from etpi_assets.resources import Resources
from etpi_assets.specs.load import SpecError
from etpi_assets.trajectories.records import RolloutRecord
from etpi_resources.chat.format import load_chat_format
from etpi_resources.lake.lake import BlockedInput, MissingInput, Ref
from tests.support.curation import CurationLake
from tests.support.models import qwen3
from tests.support.own_runs import TOOLS, recorded_run
from tests.support.recorded_runs import windowed_history
from tests.support.rows import ROWS, atif_document, write_lines

OF_DATA = [name for name, kind in EXPORTS.items() if kind.assets == DATASET]


@pytest.fixture(scope="module")
def curation(tmp_path_factory: pytest.TempPathFactory) -> CurationLake:
    curation = CurationLake.with_rollouts(tmp_path_factory.mktemp("curation"), more="[dataset]\nupweight_factor = 4\n")
    assert curation.failures("clean") == {}
    return curation


@pytest.fixture(scope="module")
def resources(curation: CurationLake) -> Resources:
    return Resources(lake=curation.lake, specs_folder=curation.folder / "specs")


@pytest.fixture(scope="module")
def exported(
    curation: CurationLake, resources: Resources, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], Path]:
    folder = tmp_path_factory.mktemp("exports")

    def of(name: str) -> Path:
        if not (folder / name).exists():
            export("clean", name, folder / name, resources)
        return folder / name

    return of


def table(curation: CurationLake, asset: str, name: str) -> list[dict[str, Any]]:
    return curation.lake.read(Ref(asset, "experiment", "clean"), name).to_pylist()


def read_back(path: Path, format: str, **options: Any) -> list[RolloutRecord]:
    result = list(import_runs(format, path, options))
    assert len(result) == count_found(format, path)
    records = [item for item in result if isinstance(item, RolloutRecord)]
    assert len(records) == len(result), result
    return records


@pytest.mark.parametrize("name", OF_DATA)
def test_manifest_names_the_versions_behind_an_export(exported, curation: CurationLake, name: str) -> None:
    folder = exported(name)
    manifest = json.loads((folder / "manifest.json").read_text())
    assert (manifest["experiment"], manifest["format"]) == ("clean", name)
    for asset, set_name, key in (
        ("upweighted_dataset", "experiment", "clean"),
        ("raw_rollouts", "rollout_set", "good"),
        ("tasks", "suite", "small"),
    ):
        assert manifest["versions"][f"{asset}/{key}"] == curation.lake.require(Ref(asset, set_name, key)).version
    listed = {file["path"] for file in manifest["files"]}
    assert listed == {p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file()} - {"manifest.json"}
    assert all((folder / file["path"]).stat().st_size == file["bytes"] for file in manifest["files"])


def test_equal_data_give_equal_bytes(exported, resources: Resources, tmp_path: Path) -> None:
    for name in OF_DATA:
        export("clean", name, tmp_path / name, resources)
        for file in sorted(exported(name).rglob("*")):
            if file.is_file():
                assert (tmp_path / name / file.relative_to(exported(name))).read_bytes() == file.read_bytes(), file


# --- TRL ------------------------------------------------------------------------------------------------------------


def test_trl_ids_are_the_sequences_and_round_trip(exported, curation: CurationLake) -> None:
    folder = exported("trl")
    rows = [row for split in ("train", "val") for row in pq.read_table(folder / f"data/{split}.parquet").to_pylist()]
    sequences = {row["sequence_id"]: row for row in table(curation, "upweighted_dataset", "sequences")}
    assert len(rows) == len(sequences) > 20
    for row in rows:
        ids, labels, _ = expand(sequences[row["sequence_id"]])
        assert (row["input_ids"], row["labels"]) == (ids.tolist(), labels.tolist())
    records = read_back(folder / "data", "trl", tokenizer="tiny")
    for record, row in zip(records, rows, strict=True):
        turns = record.agents[0].turns
        last = (turns[-1].prompt_ids or []) + (turns[-1].output_ids or [])
        labels = [-100] * len(last)
        for turn in turns:
            start = len(turn.prompt_ids or [])
            labels[start : start + len(turn.output_ids or [])] = turn.output_ids or []
        assert (last, labels) == (row["input_ids"], row["labels"])
        assert {turn.capture for turn in turns} == {"native"}
    assert "rows weigh 1, 4" in json.loads((folder / "manifest.json").read_text())["notes"][0]


@pytest.mark.slow
def test_trl_trains_on_both_forms(exported, tmp_path: Path) -> None:
    """The real trainer reads the rows, and counts as many label tokens as the data set has."""
    from datasets import load_dataset
    from trl.trainer.sft_config import SFTConfig
    from trl.trainer.sft_trainer import SFTTrainer

    chat = load_chat_format("tiny")

    def trainer(name: str) -> SFTTrainer:
        file, cache = str(exported(name) / "data/train.parquet"), str(tmp_path / "cache")
        data = load_dataset("parquet", data_files=file, split="train[:4]", cache_dir=cache)
        arguments = SFTConfig(
            str(tmp_path / name),
            max_length=4096,
            max_steps=1,
            per_device_train_batch_size=2,
            report_to=[],
            use_cpu=True,
            bf16=False,
        )
        model = qwen3(chat.vocab_size, max_position_embeddings=4096)
        return SFTTrainer(model, arguments, train_dataset=data, processing_class=chat.tokenizer)

    ids = trainer("trl")
    rows = pq.read_table(exported("trl") / "data/train.parquet").slice(0, 4).to_pylist()
    counted = sum(int((batch["labels"] != -100).sum()) for batch in ids.get_train_dataloader())
    assert counted == sum(label != -100 for row in rows for label in row["labels"])
    ids.train()
    assert ids.state.global_step == 1
    messages = trainer("trl_messages")
    messages.train()
    assert messages.state.global_step == 1


@pytest.mark.parametrize("name", ["trl_messages", "verl_sft"])
def test_conversations_round_trip(exported, resources: Resources, name: str) -> None:
    conversations = sorted(
        ExportSource("clean", resources).conversations(), key=lambda c: ("train", "val").index(c.split)
    )
    records = read_back(exported(name) / "data", "messages")
    assert len(records) == len(conversations) == 48
    for record, conversation in zip(records, conversations, strict=True):
        agent = record.agents[0]
        assert [(m.role, m.content) for m in agent.messages] == [
            (m["role"], m["content"]) for m in conversation.messages
        ]
        assert [t.actions for t in agent.turns] == [
            t.actions for t in conversation.agent.turns if t.actions or not t.parse_error
        ]
        if name == "trl_messages":
            assert (record.task_id, record.repo, record.teacher) == (
                conversation.record.task_id,
                conversation.record.repo,
                "made",
            )


def test_exported_conversations_have_no_steering(exported, resources: Resources) -> None:
    captured = next(iter(ExportSource("clean", resources).records())).agents[0].messages[0].content
    assert "Plan-First" in captured
    for name in ("trl_messages", "verl_sft", "verl_rl", "hub"):
        for file in exported(name).rglob("*.parquet"):
            columns = pq.read_table(file).to_pylist()
            messages = [row.get("messages") or row.get("prompt") for row in columns]
            assert columns and "Plan-First" not in json.dumps(messages)


# --- verl -----------------------------------------------------------------------------------------------------------


def test_verl_rows_have_the_columns_that_its_data_sets_read(exported) -> None:
    """MultiTurnSFTDataset reads `messages`; RLHFDataset reads `prompt`, `data_source`, `reward_model` and
    `extra_info.index`. What they make of them: tests/test_consumers.py."""
    sft = pq.read_table(exported("verl_sft") / "data/train.parquet").to_pylist()
    assert all({m["role"] for m in row["messages"]} <= {"system", "user", "assistant", "tool"} for row in sft)
    assert all(isinstance(m["content"], str) for row in sft for m in row["messages"])
    for name in ("verl_sft", "verl_rl"):
        for file in ("train", "val"):
            extra = pq.read_table(exported(name) / f"data/{file}.parquet")["extra_info"].to_pylist()
            assert [row["index"] for row in extra] == list(range(len(extra)))
    rl = pq.read_table(exported("verl_rl") / "data/train.parquet").to_pylist()
    for index, row in enumerate(rl):
        assert [m["role"] for m in row["prompt"]] == ["system", "user"]
        assert row["reward_model"] == {"style": "rule", "ground_truth": row["extra_info"]["task_id"]}
        assert (row["extra_info"]["index"], row["ability"], row["data_source"]) == (index, "code", "small")
    assert len({(row["extra_info"]["task_id"], row["extra_info"]["agent_id"]) for row in rl}) == len(rl)


# --- ATIF -----------------------------------------------------------------------------------------------------------


def kept_by_atif(record: RolloutRecord) -> Any:
    """Return the parts of a rollout that ATIF keeps."""
    agents = [
        (
            agent.agent_id,
            agent.feature_id,
            agent.role,
            agent.exit_status,
            agent.patch,
            [
                replace(turn, think_tokens=None, post_think_tokens=None, exit_code=None, parse_error=None)
                for turn in agent.turns
            ],
            [(m.role, m.content, m.turn, m.kind) for m in agent.messages],
        )
        for agent in sorted(record.agents, key=lambda agent: agent.agent_id)
    ]
    return record.task_id, record.repo, record.teacher, record.tools, agents


def test_atif_round_trips_and_is_valid(exported, resources: Resources) -> None:
    import atif

    records = {record.rollout_id: record for record in ExportSource("clean", resources).records()}
    files = sorted((exported("atif") / "trajectories").iterdir())
    assert len(files) == len(records) == 24
    for file in files:
        rows_read = atif.Trajectory.model_validate_json(file.read_text())
        assert [step.step_id for step in rows_read.steps] == list(range(1, len(rows_read.steps) + 1))
    back = read_back(exported("atif") / "trajectories", "auto")
    assert [kept_by_atif(record) for record in back] == [kept_by_atif(records[file.stem]) for file in files]


def test_atif_round_trips_the_records_of_every_importer(tmp_path: Path) -> None:
    import atif

    (tmp_path / "in").mkdir()
    (tmp_path / "in/t.json").write_text(json.dumps(atif_document()))
    (tmp_path / "x.traj").write_text(json.dumps(windowed_history("fenced")))
    samples = {"atif": tmp_path / "in", "swe_agent": tmp_path / "x.traj"}
    for name, row in ROWS.items():
        samples[name] = write_lines(tmp_path / f"{name}.jsonl", [row])
    for name, path in samples.items():
        (record,) = read_back(path, name)
        exported_document = document(record)
        atif.Trajectory.model_validate(exported_document)
        (tmp_path / "out").mkdir(exist_ok=True)
        (tmp_path / "out/t.json").write_text(json.dumps(exported_document))
        (back,) = read_back(tmp_path / "out", "atif")
        assert kept_by_atif(back) == kept_by_atif(record), name


def test_atif_keeps_tools_and_calls_of_context(tmp_path: Path) -> None:
    """A demonstration's calls stay calls, with their results; a question after a context answer stays a message."""
    import atif

    run = recorded_run(0, 2)
    run["messages"][2] |= {"weight": 0, "reasoning_content": "Let me see."}
    run["messages"][6:] = [
        {**run["messages"][6], "weight": 0},
        {"role": "user", "content": "And?"},
        *run["messages"][6:],
    ]
    (record,) = read_back(write_lines(tmp_path / "runs.jsonl", [run]), "messages")
    (tmp_path / "out").mkdir()
    (tmp_path / "out/t.json").write_text(json.dumps(document(record)))
    atif.Trajectory.model_validate(document(record))
    (back,) = read_back(tmp_path / "out", "auto")
    assert kept_by_atif(back) == kept_by_atif(record) and back.tools == TOOLS
    calls = [[m.tool_calls for m in r.agents[0].messages] for r in (record, back)]
    assert calls[0] == calls[1] and calls[0][2] and len(record.agents[0].turns) == 2


# --- the others -----------------------------------------------------------------------------------------------------


def test_hub_folder_loads_and_its_card_names_the_versions(exported, curation: CurationLake, tmp_path: Path) -> None:
    from datasets import load_dataset
    from huggingface_hub import DatasetCard

    folder = exported("hub")
    card = DatasetCard.load(folder / "README.md")
    assert card.data.license == "apache-2.0" and [c["config_name"] for c in card.data.configs] == ["messages", "tokens"]
    assert curation.lake.require(Ref("upweighted_dataset", "experiment", "clean")).version in card.content
    loaded = load_dataset(str(folder), "messages", cache_dir=str(tmp_path))
    assert set(loaded) == {"train", "validation"} and len(loaded["train"]) + len(loaded["validation"]) == 48
    tokens = load_dataset(str(folder), "tokens", split="train", cache_dir=str(tmp_path))
    assert {"input_ids", "labels"} <= set(tokens.column_names)
    rows = table(curation, "upweighted_dataset", "dataset_rows")
    records = read_back(folder / "messages", "messages")
    assert sum(len(record.agents[0].turns) for record in records) == len(rows), "only messages with loss become turns"


def test_pairs_round_trip(exported, curation: CurationLake, resources: Resources) -> None:
    records = read_back(exported("tito") / "data", "auto", tokenizer="tiny")
    pairs = {
        (row["rollout_id"], row["agent_id"], row["turn"]): (prompt.tolist(), list(pair["output_ids"]), pair["capture"])
        for row, prompt, pair in ExportSource("clean", resources).pairs()
    }
    rollouts = [
        row["rollout_id"]
        for row in sorted(table(curation, "upweighted_dataset", "dataset_rows"), key=lambda r: r["split"])
    ]
    names = list(dict.fromkeys(rollouts))
    back = {
        (name, agent.agent_id, turn.turn): (turn.prompt_ids, turn.output_ids, turn.capture)
        for name, record in zip(names, records, strict=True)
        for agent in record.agents
        for turn in agent.turns
    }
    assert back == pairs


def test_unknown_formats_full_folders_and_missing_inputs_are_refused(
    curation: CurationLake, resources: Resources, tmp_path: Path
) -> None:
    with pytest.raises(SpecError, match="verl_sft"):
        export("clean", "verlsft", tmp_path / "a", resources)
    (tmp_path / "b").mkdir()
    (tmp_path / "b/x").touch()
    with pytest.raises(SpecError, match=str(resources.lake.root)):
        export("clean", "trl", resources.lake.root / "exports", resources)
    with pytest.raises(SpecError, match=str(tmp_path / "b")):
        export("clean", "trl", tmp_path / "b", resources)
    curation.experiment("unbuilt")
    fresh = Resources(lake=curation.lake, specs_folder=curation.folder / "specs")
    with pytest.raises(MissingInput, match="upweighted_dataset"):
        export("unbuilt", "trl", tmp_path / "c", fresh)
    assert [path.name for path in tmp_path.iterdir()] == ["b"], "no staging folder remains"


def test_blocked_data_set_is_not_exported(curation: CurationLake, tmp_path: Path) -> None:
    text = (curation.folder / "specs/experiments/clean.toml").read_text()
    curation.write("experiments", "thin", text.replace("format_exposure = 50", "format_exposure = 10000000"))
    assert "format_exposure" in curation.failures("thin")
    fresh = Resources(lake=curation.lake, specs_folder=curation.folder / "specs")
    with pytest.raises(BlockedInput, match="format_exposure"):
        export("thin", "trl", tmp_path / "a", fresh)


def test_every_named_importer_exists() -> None:
    assert {export.importer for export in EXPORTS.values() if export.importer} <= set(IMPORTERS)
