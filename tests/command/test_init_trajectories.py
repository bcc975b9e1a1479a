"""`etpi init runs`, and its old option: a look at recorded runs, the specs for them, and a run of those specs."""

from __future__ import annotations

import io
import json
import re
from pathlib import Path
from typing import Any

import pytest

from etpi import cli
from etpi_assets.importers import importer_named
from etpi_assets.importers.format import DetectionInput
from etpi_assets.specs.experiment import preset_values
from etpi_assets.specs.load import load_specs
from etpi_resources.chat.format import load_chat_format
from etpi_resources.process import progress
from tests.support.models import make_base
from tests.support.own_runs import TOOLS, as_text, recorded_run, write_runs

COMMIT = "0123456789" * 4
QWEN = f"Qwen/Qwen3-4B@{COMMIT}"
CALL = "<tool_call>\n<function=bash>\n<parameter=command>\nls\n</parameter>\n</function>\n</tool_call>"
PLAIN = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""A chat template that writes no calls."""


@pytest.fixture
def cwd(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_runs(tmp_path, [recorded_run(number, turns) for number, turns in enumerate((2, 3, 12))])
    return tmp_path


def init(*words: str) -> int:
    return cli.main(["init", "--from", "runs.jsonl", "--yes", *words])


def test_specs_name_the_data_and_the_student(cwd):
    assert init("--model", QWEN, "--name", "mine") == 0
    specs = load_specs()
    rollouts, experiment = specs.rollout_sets["mine"], specs.experiments["mine"]
    assert (rollouts.format, rollouts.path) == ("messages", str(cwd / "runs.jsonl"))
    assert (experiment.base.kind, experiment.base.repo, experiment.base.revision) == ("hub", "Qwen/Qwen3-4B", COMMIT)
    assert (experiment.base.tokenizer, experiment.base.chat_template) == ("qwen3", "qwen3")
    assert experiment.pairs.capture == "retokenised"
    assert experiment.serving.template_kwargs == {"enable_thinking": False}


def test_reading_that_takes_long_says_how_far_it_is(cwd, capsys, monkeypatch):
    monkeypatch.setattr(progress, "FIRST_LOG_SECONDS", 0.0)
    assert init("--model", QWEN) == 0
    assert re.search(r"jsonl: runs read 1/\d+ ", capsys.readouterr().err)


def test_first_conversation_is_shown_with_its_labels_before_anything_is_written(cwd, capsys):
    rows: list[Any] = [recorded_run(0, 2)]
    rows[0]["messages"][3]["content"] = "KEY=AKIA" + "ABCD" * 4
    write_runs(cwd, rows)
    assert init("--model", "tiny", "--json") == 0
    seen = json.loads(capsys.readouterr().out)
    assert not (cwd / "specs").exists() and seen["secrets"] == {"AWS key": 1}
    labels = [part["text"] for part in seen["first"]["parts"] if part["trained"]]
    context = [part["text"] for part in seen["first"]["parts"] if not part["trained"]]
    assert len(labels) == 3 and labels[-1].endswith("<|im_end|>") and "Mend case 0." in context[0]
    assert any("[masked AWS key]" in text for text in context) and "ABCDABCD" not in json.dumps(seen)
    assert init("--model", "tiny") == 0
    text = capsys.readouterr().out
    assert text.index("▌ Step 0.") < text.index("wrote specs") and "▌ You fix bugs." not in text
    assert "1 in 1 rollouts (masked" in text
    assert 'secrets = "mask"' in Path("specs/rollout_sets/runs.toml").read_text()
    assert init("--model", "tiny", "--force", "--secrets", "keep") == 0
    assert load_specs().rollout_sets["runs"].options["secrets"] == "keep"


def test_selected_row_is_shown_and_hidden_turns_are_marked(cwd, capsys):
    rows: list[Any] = [recorded_run(0, 2) | {"reward": 0}, recorded_run(1, 9) | {"reward": 1}]
    write_runs(cwd, rows)
    assert cli.main(["init", "runs", "runs.jsonl", "--yes", "--student", "tiny", "--name", "mine"]) == 0
    text = capsys.readouterr().out
    assert "runs.jsonl, row 1 as it will be trained" in text and "Mend case 1." in text and "Mend case 0." not in text
    assert text.count("hidden") == 1 and "… turns 3 to 8 hidden" in text and "Step 4." not in text


def test_calls_without_results_are_counted_before_a_run(cwd, capsys):
    row: Any = recorded_run(0, 3)
    row["messages"] = [m for m in row["messages"] if m["role"] != "tool" and not str(m["content"]).startswith("<tool")]
    write_runs(cwd, [row, recorded_run(1, 2)])
    assert init("--model", "tiny") == 0
    assert "1 conversations have calls without results, first runs.jsonl#0: turn 0" in capsys.readouterr().out


def test_commands_of_init_write_what_the_old_options_do(cwd):
    assert init("--model", "tiny", "--name", "old", "--train", "--teacher", "opus") == 0
    options = ["--model", "tiny", "--train", "--teacher", "opus", "--yes"]
    assert cli.main(["init", "runs", "runs.jsonl", "--name", "new", *options]) == 0
    for kind in ("rollout_sets", "experiments"):
        old, new = (Path(f"specs/{kind}/{name}.toml").read_text() for name in ("old", "new"))
        assert old.replace('"old"', '"new"').replace("of old", "of new") == new


def test_existing_name_is_refused_before_the_runs_are_read(cwd, capsys, monkeypatch):
    assert init("--model", "tiny") == 0
    monkeypatch.setattr("etpi.init.trajectories.survey", lambda *a: pytest.fail("it looks at the runs"))
    assert init("--model", "tiny") == 1 and "--force" in capsys.readouterr().err


@pytest.mark.parametrize("words", [[], ["--from", "a", "--tasks", "b"], ["tasks", "x", "--harness", "codex"]])
def test_no_beginning_or_two_are_usage_errors(cwd, words):
    assert cli.main(["init", *words]) == 2


def test_path_without_a_command_is_answered_with_the_commands(cwd, capsys):
    assert cli.main(["init", "runs.jsonl", "--model", "tiny"]) == 2
    assert "init runs PATH" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "thoughts"), [("<thinking>\nTide.\n</thinking>\n\nA.", 1), ("The tag `</think>`.", 0)]
)
def test_thoughts_are_counted_as_training_reads_them(cwd, capsys, text, thoughts):
    row = {"messages": [{"role": "user", "content": "Q?"}, {"role": "assistant", "content": text}]}
    (cwd / "runs.jsonl").write_text(json.dumps(row) + "\n")
    assert init("--model", "tiny") == 0
    output = capsys.readouterr().out
    assert f"think blocks: {thoughts} turns" in output
    assert ("pairs.strip_think = false" in output) == bool(thoughts)


def test_thoughts_that_a_preset_trains_are_not_said_to_be_left_out(cwd, capsys):
    text = "<think>\nTide.\n</think>\n\nA."
    row = {"messages": [{"role": "user", "content": "Q?"}, {"role": "assistant", "content": text}]}
    (cwd / "runs.jsonl").write_text(json.dumps(row) + "\n")
    assert init("--model", "tiny", "--preset", "structured_cot") == 0
    output = capsys.readouterr().out
    assert "think blocks: 1 turns" in output and "pairs.strip_think" not in output


def test_map_is_written_into_the_spec(cwd, capsys):
    row = {"conv": [{"who": "user", "said": "Moor."}, {"who": "bot", "said": "Moored."}]}
    (cwd / "runs.jsonl").write_text(json.dumps(row) + "\n")
    assert init("--model", "tiny", "--map", "messages=conv,role=who,text=said,assistant=bot") == 0
    assert "columns: messages from conv" in capsys.readouterr().out
    spec = load_specs().rollout_sets["runs"]
    assert spec.format == "runs" and "map" not in spec.options
    written = importer_named("runs")
    assert written.claims(DetectionInput(cwd / "runs.jsonl"))
    assert init("--model", "tiny", "--format", "runs", "--force") == 0 and "1 rollouts" in capsys.readouterr().out
    assert init("--model", "tiny", "--map", "mesages=conv", "--name", "other") == 1
    assert "Did you mean 'messages'" in capsys.readouterr().err


def test_option_for_schemas_is_named_where_calls_have_none(cwd, capsys):
    for tools in (True, False):
        rows = [recorded_run(0, 2)]
        rows = rows if tools else [{key: value for key, value in row.items() if key != "tools"} for row in rows]
        write_runs(cwd, rows)
        assert init("--model", QWEN, "--force") == 0
        named = "options.tools" in capsys.readouterr().out
        assert named is not tools
        assert ("# tools = " in Path("specs/rollout_sets/runs.toml").read_text()) is not tools
    load_specs()


def test_files_that_exist_are_replaced_only_with_force(cwd, capsys):
    assert init("--model", QWEN) == 0
    file = Path("specs/experiments/runs.toml")
    file.write_text(before := file.read_text() + "# edited\n")
    assert init("--model", QWEN) == 1
    assert "--force" in capsys.readouterr().err
    assert file.read_text() == before
    assert init("--model", QWEN, "--force") == 0
    assert "# edited" not in file.read_text()


def test_name_of_a_shipped_spec_is_refused_and_nothing_is_written(cwd, capsys):
    assert init("--model", QWEN, "--name", "plan_first_tiny") == 1
    assert "etpi comes with a spec named" in capsys.readouterr().err
    assert not list(cwd.glob("specs/**/*.toml"))


@pytest.mark.parametrize("model", ["Qwen/Qwen3-4B", "Qwen/Qwen3-4B@main"])
def test_model_without_a_commit_is_refused_with_the_way_to_find_it(cwd, capsys, model):
    assert init("--model", model) == 1
    text = capsys.readouterr().err
    assert "git ls-remote https://huggingface.co/Qwen/Qwen3-4B" in text
    assert not (cwd / "specs").exists()


def test_missing_model_is_a_usage_error(cwd, capsys):
    assert init() == 2
    assert "--model" in capsys.readouterr().err


def test_rows_that_cannot_be_read_are_counted_by_reason(cwd, capsys):
    with Path("runs.jsonl").open("a") as file:
        file.write('{"messages": [{"role": "wizard", "content": "x"}]}\n{"messages": [\n')
    assert init("--model", QWEN) == 0
    text = capsys.readouterr().out
    assert re.search(r"5 inputs .*messages: 3 rollouts, 2 ", text)
    assert "unknown_role" in text and "truncated_json" in text


def test_damaged_rows_name_their_place_once_and_the_remedy(cwd, capsys):
    with Path("runs.jsonl").open("ab") as file:
        file.write(b'{"messages": []},\n{"messages": "\x93"}\n{\n')
    assert init("--model", QWEN) == 0
    text = capsys.readouterr().out
    assert "1 bad_json, first runs.jsonl, row 3: column 17: " in text
    assert re.search(r"1 not_utf8, first runs\.jsonl, row 4: byte 14 .* UTF-8; save", text)
    assert re.search(r"1 truncated_json, first runs\.jsonl, row 5: column 2: .* array of a \.json file", text)


@pytest.mark.parametrize(("damaged", "stops"), [(0, False), (1, False), (2, True), (5, True)])
def test_share_of_unreadable_inputs_that_stops_a_run_is_said(cwd, capsys, damaged, stops):
    write_runs(cwd, [*(recorded_run(n, 2) for n in range(4)), *[{"messages": None}] * damaged])
    Path("config.json").write_text("{}")
    assert init("--model", QWEN) == 0
    line = f"skip_rate will stop the run: {damaged} of {4 + damaged} inputs"
    assert (line in capsys.readouterr().out) is stops


def test_path_with_a_variable_is_written_as_given(cwd, monkeypatch):
    monkeypatch.setenv("RUNS", str(cwd))
    assert cli.main(["init", "--from", "${RUNS}/runs.jsonl", "--yes", "--model", QWEN]) == 0
    assert load_specs().rollout_sets["runs"].path == "${RUNS}/runs.jsonl"


def test_summary_counts_tools_lengths_and_rewards(cwd, capsys):
    runs = [recorded_run(number, 2) for number in range(3)]
    del runs[0]["reward"], runs[1]["tools"]
    write_runs(cwd, [{**run, "license": "mit"} for run in runs])
    assert init("--model", QWEN) == 0
    text = capsys.readouterr().out
    name = TOOLS[0]["function"]["name"]
    assert f"tools: {name} 2 (schemas in 2 rollouts); called: {name} 6" in text
    assert "rewards: 2 of 3 rollouts" in text and "licences: mit 3" in text
    assert "3 of 3 conversations" in text
    assert json.dumps("mit") in Path("specs/rollout_sets/runs.toml").read_text()


def test_summary_names_what_will_be_dropped_and_the_keys_that_keep_it(cwd, capsys):
    runs = [recorded_run(number, 2) for number in range(3)]
    runs[1]["reward"] = "0.0"
    runs[2]["messages"][2]["tool_calls"][0]["function"]["arguments"] = '{"command": '
    runs[2]["messages"][-1]["finish_reason"] = "length"
    crashed = {**recorded_run(7, 2), "exit_status": "APIConnectionError"}
    begun = {**runs[0], "messages": runs[0]["messages"][:-1]}
    write_runs(cwd, [*runs, runs[0], {**runs[0], "instance_id": "own__repo-7"}, crashed, begun])
    assert init("--model", QWEN) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if "will be dropped" in line]
    expected = [
        ("1 of 7 rollouts", "select.min_reward"),
        ("1 of 7 rollouts, which an error or a limit ended", 'select.exit = "any"'),
        ("2 rollouts, each the row of an earlier one", 'select.duplicates = "keep"'),
        ("1 rollouts, of whose turns others have all", 'select.duplicates = "keep"'),
        ("3 of 20 turns", "pairs.drop_unparseable = false"),
        ("1 of 20 turns", "pairs.drop_truncated = false"),
    ]
    for line, (count, key) in zip(lines, expected, strict=True):
        assert count in line and key in line


def test_refused_rows_are_shown_with_file_row_and_reason(cwd, capsys):
    write_runs(cwd, [*(recorded_run(n, 2) for n in range(3)), {"messages": [], "chosen": "a", "rejected": "b"}])
    assert init("--model", QWEN) == 0
    assert re.search(r"1 preference, first runs\.jsonl, row 3: .*chosen, rejected", capsys.readouterr().out)


def test_unknown_format_is_refused_with_its_keys(cwd, capsys):
    Path("runs.jsonl").write_text(json.dumps({"dialog": [{"role": "user", "content": "hi"}]}) + "\n")
    assert init("--model", QWEN) == 1
    text = capsys.readouterr().err
    assert "its first row has dialog" in text and "call it `messages`" in text and text.count("runs.jsonl") == 1


@pytest.mark.parametrize(("text", "floor"), [("Hello.", 0), ("```bash\nls\n```", 0), (CALL, 1)])
def test_conversations_without_calls_are_not_held_to_a_number_of_calls(cwd, text, floor):
    row = {"conversations": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": text}]}
    Path("runs.jsonl").write_text(json.dumps(row) + "\n")
    assert init("--model", QWEN) == 0
    assert load_specs().experiments["runs"].gates.format_exposure == floor


class Terminal(io.StringIO):
    """Typed lines."""

    def isatty(self) -> bool:
        return True


def test_terminal_prompts_for_values_that_options_and_data_lack(cwd, monkeypatch):
    monkeypatch.setattr("sys.stdin", Terminal(f"{QWEN}\nasked\nopus\nmit\n"))
    assert cli.main(["init", "--from", "runs.jsonl"]) == 0
    specs = load_specs()
    rollouts = specs.rollout_sets["asked"]
    assert (rollouts.options, rollouts.license) == ({"teacher": "opus"}, "mit")
    assert specs.experiments["asked"].base.repo == "Qwen/Qwen3-4B"


def test_preset_keeps_its_own_settings(cwd):
    assert init("--model", QWEN, "--preset", "structured_cot") == 0
    experiment, preset = load_specs().experiments["runs"], preset_values("structured_cot")
    assert experiment.select.shortest_correct == preset["select"]["shortest_correct"]
    assert experiment.gates.format_exposure == preset["gates"]["format_exposure"]
    assert experiment.pairs.strip_think is False and experiment.serving.template_kwargs == {}
    assert experiment.pairs.capture == "retokenised" and experiment.train.method == "none"


def test_unknown_preset_is_refused_and_nothing_is_written(cwd, capsys):
    assert init("--model", QWEN, "--preset", "structured_cott") == 1
    assert "'structured_cot'" in capsys.readouterr().err
    assert not (cwd / "specs").exists()


@pytest.mark.parametrize("model", ["nowhere", "empty"])
def test_model_that_is_no_model_is_refused(cwd, capsys, model):
    (cwd / "empty").mkdir()
    assert init("--model", model) == 1
    assert f"model {cwd / model if model == 'empty' else model}" in capsys.readouterr().err


def test_calls_that_the_students_template_cannot_write_are_refused_before_anything_is_written(cwd, capsys):
    make_base(cwd / "plain", load_chat_format("tiny", "qwen3"))
    (cwd / "plain/chat_template.jinja").write_text(PLAIN)
    assert init("--model", "plain") == 1
    assert "17 structured calls" in capsys.readouterr().err
    assert not (cwd / "specs").exists()
    write_runs(cwd, [as_text(recorded_run(number, 2)) for number in range(3)])
    assert init("--model", "plain") == 0


def test_student_of_an_unknown_family_is_written_with_a_warning(cwd, capsys):
    assert init("--model", f"someone/model-7B@{COMMIT}") == 0
    assert "not measured" in (text := capsys.readouterr().out) and "characters: median" in text
    base = load_specs().experiments["runs"].base
    assert base.tokenizer == base.chat_template == f"hub:someone/model-7B@{COMMIT}"


@pytest.mark.parametrize(("shift", "capture"), [(0, "native"), (1, "retokenised")])
def test_recorded_ids_are_used_only_if_they_are_the_students(cwd, shift, capture):
    chat = load_chat_format("tiny")
    run = recorded_run(0, 0)
    for message in run["messages"][2:]:
        ids = [number + shift for number in chat.encode(message["content"])]
        message["extra"] = {"token_capture": {"prompt_token_ids": [1, 2], "output_token_ids": ids}}
    write_runs(cwd, [run])
    assert init("--model", "tiny") == 0
    specs, named = load_specs(), "tiny" if capture == "native" else None
    options = specs.rollout_sets["runs"].options
    assert (specs.experiments["runs"].pairs.capture, options.get("tokenizer")) == (capture, named)


def test_rows_of_token_ids_are_read_with_the_students_tokenizer(cwd, capsys):
    chat = load_chat_format("tiny")
    prompt = chat.prompt_ids([{"role": "user", "content": "Mend it."}])
    row = {"input_ids": prompt, "output_ids": chat.encode("Done."), "metadata": {"rollout_id": "r", "turn": 0}}
    Path("runs.jsonl").write_text(json.dumps(row) + "\n")
    assert init("--model", "tiny") == 0
    assert re.search(r"1 inputs .*tito: 1 rollouts, 0 ", capsys.readouterr().out)
    assert load_specs().rollout_sets["runs"].options["tokenizer"] == "tiny"
