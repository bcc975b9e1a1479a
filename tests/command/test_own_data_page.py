"""The commands of docs/own_data.md, run from an empty folder: from recorded runs to an exported data set."""

from __future__ import annotations

import json
import re
import shlex
from itertools import pairwise
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from etpi import cli
from etpi.init.student import read_student
from etpi.init.trajectories import facts, survey
from etpi_assets.exports import export
from etpi_assets.resources import Resources
from etpi_assets.specs.load import load_shipped
from etpi_assets.trajectories.tables import iter_turns
from etpi_resources.chat.format import load_chat_format
from etpi_resources.lake.lake import Lake, Ref
from tests.support.models import make_base
from tests.support.own_runs import ANSWER, TOOLS, as_text, recorded_run, write_runs

pytestmark = pytest.mark.slow
PAGE = (Path(__file__).parents[2] / "docs/own_data.md").read_text(encoding="utf-8")
COMMIT = "0123456789" * 4
STUDENT = "student"
SMOLLM2 = load_shipped().experiments["plan_first_smol"].base.tokenizer
RUNS = [recorded_run(number, turns) for number, turns in enumerate((2, 3, 4, 3, 60))]
"""Five runs; the last is longer than the 2,048 tokens that small defaults would allow."""


def commands(word: str = "") -> list[list[str]]:
    """Return the words of the commands in the page's first block that has `word`."""
    block = next(block for block in re.findall(r"```sh\n(.*?)```", PAGE, re.DOTALL) if word in block)
    return [shlex.split(line)[1:] for line in block.splitlines()]


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Run the page's commands in a folder that has only the runs and the student."""
    folder = tmp_path_factory.mktemp("empty")
    write_runs(folder, RUNS)
    make_base(folder / STUDENT, load_chat_format("tiny", "qwen3"), positions=32768)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.delenv("ETPI_DATA", raising=False)
        patch.setenv("DAGSTER_HOME", str(folder / "home"))
        for words in commands():
            assert cli.main([STUDENT if "$COMMIT" in word else word for word in words]) == 0, words
    return folder


def test_preview_is_what_the_run_trains(exported: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(exported)
    student = read_student(STUDENT)
    seen = survey("runs.jsonl", "auto", student)
    assert seen.first is not None
    parts = facts(seen, student, None)["first"]["parts"]
    lake = Lake(exported / "data")
    chosen = lake.read(Ref("selected_trajectories", "experiment", "runs"), "selected")["rollout_id"].to_pylist()
    pairs = lake.read(Ref("tito_pairs", "experiment", "runs"), "pairs")
    trained = [(turn, prompt, output) for (name, _, turn), prompt, output in iter_turns(pairs) if name == chosen[0]]
    assert seen.first.rollout_id == chosen[0] and len(trained) == sum(part["trained"] for part in parts) > 1
    chat = load_chat_format(str(exported / STUDENT))
    before = {label["turn"]: part["text"] for part, label in pairwise(parts) if label["trained"]}
    labels = {part["turn"]: part["text"] for part in parts if part["trained"]}
    for turn, prompt, output in trained:
        assert prompt is not None and output is not None
        assert labels[turn] == chat.decode(output) and chat.decode(prompt).endswith(before[turn])


def test_every_turn_of_every_run_is_in_the_data_set(exported: Path) -> None:
    lake = Lake(exported / "data")
    turns = sum(message["role"] == "assistant" for run in RUNS for message in run["messages"])
    assert len(lake.read(Ref("selected_trajectories", "experiment", "runs"), "selected")) == len(RUNS)
    rows = lake.read(Ref("upweighted_dataset", "experiment", "runs"), "dataset_rows")
    assert len(rows) == turns
    pairs = lake.read(Ref("tito_pairs", "experiment", "runs"), "pairs")
    assert max(len(prompt) for _, prompt, _ in iter_turns(pairs) if prompt is not None) > 2048
    for asset in ("tito_pairs", "upweighted_dataset"):
        assert lake.require(Ref(asset, "experiment", "runs")).rows["dropped"] == 0


def test_labels_are_the_templates_own_text(exported: Path) -> None:
    lake, chat = Lake(exported / "data"), load_chat_format(str(exported / STUDENT))
    pairs = lake.read(Ref("tito_pairs", "experiment", "runs"), "pairs")
    texts = [chat.decode(output) for _, _, output in iter_turns(pairs) if output is not None]
    assert texts.count(f"{ANSWER}<|im_end|>") == len(RUNS)
    call = {"name": "execute_bash", "arguments": {"timeout": 10, "command": 'grep -n "tot\\n0" a0.py | head'}}
    assert f"Step 0.\n<tool_call>\n{json.dumps(call)}\n</tool_call><|im_end|>" in texts
    assert not any("<function=" in text for text in texts)
    prompts = [chat.decode(prompt) for _, prompt, _ in iter_turns(pairs) if prompt is not None]
    assert all(json.dumps(TOOLS[0]) in prompt for prompt in prompts)


def test_export_has_the_trained_ids_and_another_one_the_tools(exported: Path, tmp_path: Path) -> None:
    lake = Lake(exported / "data")
    rows = pq.read_table(exported / "out" / "data" / "train.parquet").to_pylist()
    labels = sum(label != -100 for row in rows for label in row["labels"])
    pairs = lake.read(Ref("tito_pairs", "experiment", "runs"), "pairs")
    assert labels == sum(len(output) for _, _, output in iter_turns(pairs) if output is not None)
    export("runs", "trl_messages", tmp_path / "out", Resources(lake=lake, specs_folder=exported / "specs"))
    messages = pq.read_table(tmp_path / "out" / "data" / "train.parquet").to_pylist()
    assert [json.loads(row["tools"]) for row in messages] == [TOOLS] * len(RUNS)
    assert max(len(json.loads(row["messages"])) for row in messages) == max(len(run["messages"]) for run in RUNS)


def test_page_shows_what_init_prints(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    pytest.importorskip("dashscope", reason="the qwen3 vocabulary comes with etpi[import]")
    write_runs(tmp_path, RUNS)
    monkeypatch.chdir(tmp_path)
    (words, *_) = commands()
    assert cli.main([word.replace("$COMMIT", COMMIT) for word in words]) == 0
    output = capsys.readouterr().out
    assert output in PAGE, f"docs/own_data.md shows other output than etpi init:\n{output}"


@pytest.mark.parametrize("model", ["tiny", pytest.param(SMOLLM2, marks=pytest.mark.long, id="smollm2")])
def test_commands_with_train_end_in_a_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model: str) -> None:
    runs = [recorded_run(number, 1 + number % 3) for number in range(40)]
    write_runs(tmp_path, [as_text(run) for run in runs] if model == SMOLLM2 else runs)  # its template writes no calls
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("ETPI_DATA", raising=False)
    monkeypatch.setenv("DAGSTER_HOME", str(tmp_path / "home"))
    for words in commands("--train"):
        assert cli.main([model if word == "tiny" else word for word in words]) == 0, words
        if model == SMOLLM2 and words[0] == "init":  # as the page says of small models
            spec = tmp_path / "specs/experiments/runs.toml"
            spec.write_text(spec.read_text().replace("learning_rate = 2e-4", "learning_rate = 2e-3"))
    assert list((tmp_path / "student").glob("*.safetensors"))
    card = (tmp_path / "data/reports/runs/README.md").read_text(encoding="utf-8")
    assert "A checkpoint trained by etpi" in card and "Not evaluated." in card
