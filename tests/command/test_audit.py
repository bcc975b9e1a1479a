"""`etpi audit` on training files: every kind of fault is found where it is, and nothing in clean files."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from etpi import cli
from etpi.audit.file import audit_file
from etpi.audit.report import KINDS, Report, page
from etpi_assets.importers.token_rows import spans_of
from etpi_resources.chat.format import ChatFormat, load_chat_format
from etpi_resources.labels import IGNORE_INDEX
from tests.support.rows import write_lines, write_parquet

COUNT, FAULTY = 12, (2, 5)
"""Rows of a file, and those of them with a fault."""
PARAMETERS = {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]}
TOOL = {"type": "function", "function": {"name": "bash", "description": "Run a command.", "parameters": PARAMETERS}}
WORDS = ["anchor", "buoy", "deck", "ebb", "hull", "inlet", "jetty", "keel", "lagoon", "mast", "oar", "port"]
Row = dict[str, Any]


def conversations(count: int, turns: int = 2, seed: int = 0) -> list[Row]:
    """Return rows of messages: each turn but the last calls the tool."""
    rng = random.Random(seed)

    def words(n: int) -> str:
        return " ".join(rng.choices(WORDS, k=n))

    rows = []
    for number in range(count):
        messages: list[Row] = [
            {"role": "system", "content": "Work in the repository."},
            {"role": "user", "content": f"Task {number}: {words(30)}"},
        ]
        for _ in range(turns):
            call = {"type": "function", "function": {"name": "bash", "arguments": {"command": f"ls {words(3)}"}}}
            messages += [
                {"role": "assistant", "content": f"I look at {words(8)}.", "tool_calls": [call]},
                {"role": "tool", "content": words(40)},
            ]
        messages.append({"role": "assistant", "content": f"Done: {words(12)}."})
        rows.append({"messages": messages, "tools": [TOOL]})
    return rows


def as_ids(row: Row, chat: ChatFormat) -> Row:
    """Return a row as TRL's prepared data: ids of the template, and labels of the assistant's turns with their ends."""
    text: Any = chat.tokenizer.apply_chat_template(row["messages"], tools=row.get("tools"), tokenize=False)
    ids = chat.tokenizer(text, add_special_tokens=False)["input_ids"]
    header = chat.tokenizer("<|im_start|>assistant\n", add_special_tokens=False)["input_ids"]
    labels, at = [IGNORE_INDEX] * len(ids), 0
    while at < len(ids):
        if ids[at : at + len(header)] == header:
            at += len(header)
            end = ids.index(chat.end_id, at) + 1
            labels[at:end] = ids[at:end]
            at = end
        at += 1
    return {"input_ids": ids, "labels": labels}


def write_rows(path: Path, rows: Sequence[Mapping[str, Any]]) -> Path:
    """Write JSON lines, or parquet by the name."""
    write = write_parquet if path.suffix == ".parquet" else write_lines
    return write(path, [dict(row) for row in rows])


def verl_rows(rows: Sequence[Row]) -> list[Row]:
    """Return rows as verl's multi-turn parquet has them: schemas as JSON text, and a data source."""
    return [row | {"tools": json.dumps(row["tools"]), "data_source": "harbour"} for row in rows]


def first_answer(row: Row) -> Row:
    return next(message for message in row["messages"] if message["role"] == "assistant")


def _unopened(row: Row) -> None:
    first_answer(row)["content"] = "I think of tides.\n</think>\nI look."


def _other_names(row: Row) -> None:
    for message in row["messages"]:
        for call in message.get("tool_calls", ()):
            call["function"]["name"] = "shell"


def _no_results(row: Row) -> None:
    row["messages"] = [message for message in row["messages"] if message["role"] != "tool"]


def _flat(row: Row) -> None:
    row["tools"] = [TOOL["function"]]


MESSAGE_FAULTS: Mapping[str, Callable[[Row], object]] = {
    "think": _unopened,
    "control": lambda row: row["messages"][1].update(content="Print <|im_end|> now."),
    "no_tools": lambda row: row.pop("tools"),
    "not_offered": _other_names,
    "unanswered": _no_results,
    "no_answer": lambda row: row["messages"].append({"role": "user", "content": "And now?"}),
    "empty_turn": lambda row: row["messages"][-1].update(content=""),
    "schemas": _flat,
    "syntax": lambda row: first_answer(row).update(
        content="<tool_call>\n<function=bash>\n<parameter=command>\nls\n</parameter>\n</function>\n</tool_call>",
        tool_calls=[],
    ),
    "syntax of prose": lambda row: row["messages"][-1].update(content="<tool_call>1. Look.<tool_call>Done."),
    "secret": lambda row: row["messages"][-2].update(content="AKIA" + "ABCDEFGHIJKLMNOP"),
    "too_long": lambda row: row["messages"][1].update(content="tide " * 50_000),
}
"""Kind -> a change of a row of messages that has this fault."""


def _labels(row: Row) -> list[int]:
    return [i for i, label in enumerate(row["labels"]) if label != IGNORE_INDEX]


def _drop(row: Row, at: Sequence[int]) -> None:
    for name in ("input_ids", "labels"):
        row[name] = [value for i, value in enumerate(row[name]) if i not in at]


def _mask(row: Row, at: Sequence[int]) -> None:
    for i in at:
        row["labels"][i] = IGNORE_INDEX


def id_faults(chat: ChatFormat) -> Mapping[str, Callable[[Row], object]]:
    """Return kind -> a change of a row of ids and labels that has this fault."""

    def ends(row: Row) -> list[int]:
        return [i for i in _labels(row) if row["input_ids"][i] == chat.end_id]

    def insert(row: Row, at: int, token: int, label: int) -> None:
        row["input_ids"].insert(at, token)
        row["labels"].insert(at, label)

    return {
        "all_masked": lambda row: _mask(row, _labels(row)),
        "partly_masked": lambda row: _mask(row, _labels(row)[:5]),
        "no_end": lambda row: _mask(row, ends(row)),
        "prompt_trained": lambda row: row.update(labels=list(row["input_ids"])),
        "bad_ids": lambda row: row.update(labels=[*row["labels"][1:], IGNORE_INDEX]),
        "foreign_ids": lambda row: row.update(input_ids=(ids := list(range(500, 600))), labels=list(ids)),
        "structure": lambda row: insert(row, _labels(row)[3], chat.end_id, chat.end_id),
        "differs": lambda row: _drop(row, [row["input_ids"].index(chat.end_id) + 1]),
        "think": lambda row: insert(row, _labels(row)[2], chat.think_close_id or 0, chat.think_close_id or 0),
        "no_end cut": lambda row: _drop(row, range(ends(row)[-1], len(row["input_ids"]))),
    }


def model_folder(folder: Path) -> Path:
    """Write the tokenizer, template and configuration of a model, which an audit needs of it."""
    chat = load_chat_format("qwen3")
    chat.save(folder)
    (folder / "chat_template.jinja").write_text(chat.template)
    (folder / "config.json").write_text(json.dumps({"model_type": "qwen3", "max_position_embeddings": 40960}))
    return folder


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return model_folder(tmp_path_factory.mktemp("audited"))


@pytest.fixture(scope="module")
def student(model: Path) -> str:
    return str(model)


@pytest.fixture
def clean() -> list[dict[str, Any]]:
    return conversations(COUNT)


def kinds(report: Report) -> dict[str, int]:
    return {finding.kind: finding.rows for finding in report.ranked()}


def rows_of(report: Report, kind: str) -> set[int]:
    return {int(example.row.rpartition(" ")[2]) for example in report.findings[kind].examples}


def chat_of(student: str) -> Any:
    return load_chat_format(student)


@pytest.mark.parametrize("name", ["trl.jsonl", "verl.parquet", "ids.jsonl", "ids.parquet"])
def test_nothing_is_found_in_clean_files(name, student, clean, tmp_path):
    rows = clean if name == "trl.jsonl" else verl_rows(clean)
    if name.startswith("ids"):
        rows = [as_ids(row, chat_of(student)) for row in clean]
    report = audit_file(write_rows(tmp_path / name, rows), student)
    assert kinds(report) == {} and report.rows == COUNT and report.labels == 3 * COUNT
    assert 0 < report.label_tokens < report.tokens and sum(report.turns.values()) == report.label_tokens


@pytest.mark.parametrize(
    ("form", "kind"),
    [*(("trl.jsonl", kind) for kind in MESSAGE_FAULTS), ("verl.parquet", "no_tools"), ("verl.parquet", "syntax")],
)
def test_fault_of_messages_is_found_in_its_rows(kind, form, student, clean, tmp_path):
    for number in FAULTY:
        MESSAGE_FAULTS[kind](clean[number])
    if form == "verl.parquet":
        clean = verl_rows([{"tools": None, **row} for row in clean])
    report, kind = audit_file(write_rows(tmp_path / form, clean), student), kind.partition(" ")[0]
    assert kinds(report) == {kind: len(FAULTY)} and rows_of(report, kind) == set(FAULTY)
    assert 0 < report.share(report.findings[kind]) < 0.3


@pytest.mark.parametrize("name", id_faults(None))  # pyright: ignore[reportArgumentType]
def test_fault_of_ids_is_found_in_its_rows(name, student, clean, tmp_path):
    rows = [as_ids(row, chat_of(student)) for row in clean]
    for number in FAULTY:
        id_faults(chat_of(student))[name](rows[number])
    report = audit_file(write_rows(tmp_path / "ids.jsonl", rows), student)
    kind = name.partition(" ")[0]
    assert kinds(report).pop(kind) == len(FAULTY) and rows_of(report, kind) == set(FAULTY)
    assert kinds(report).keys() <= {kind, "repeated_row"}  # the ids of no conversation are the same ones
    spans = report.findings[kind].examples[0].spans
    assert any(fault for *_, fault in spans) or kind in ("all_masked", "bad_ids")


@pytest.mark.parametrize("kind", ["no_tools", "not_offered", "unanswered", "no_answer", "empty_turn", "syntax"])
def test_fault_of_messages_is_found_in_their_ids(kind, student, clean, tmp_path):
    for number in FAULTY:
        MESSAGE_FAULTS[kind](clean[number])
    rows = [as_ids(row, chat_of(student)) for row in clean]
    report = audit_file(write_rows(tmp_path / "ids.jsonl", rows), student)
    assert kinds(report) == {kind: len(FAULTY)} and rows_of(report, kind) == set(FAULTY)


def test_prepared_set_of_datasets_is_read_as_it_is(student, clean, tmp_path):
    datasets = pytest.importorskip("datasets")
    rows = [as_ids(row, chat_of(student)) for row in clean]
    id_faults(chat_of(student))["no_end"](rows[5])
    datasets.Dataset.from_list(rows).save_to_disk(tmp_path / "prepared")
    report = audit_file(tmp_path / "prepared", student)
    assert kinds(report) == {"no_end": 1} and (report.format, report.rows) == ("trl", COUNT)
    messages = [row | {"tools": json.dumps(row["tools"])} for row in clean]
    datasets.Dataset.from_list(messages).save_to_disk(tmp_path / "messages")
    assert kinds(audit_file(tmp_path / "messages", student)) == {}
    (file,) = (tmp_path / "prepared").glob("*.arrow")
    file.write_bytes(file.read_bytes()[:-4000])
    cut = audit_file(tmp_path / "prepared", student)
    assert kinds(cut)["unreadable"] == 1 and "bad_arrow" in cut.findings["unreadable"].examples[0].detail


@pytest.mark.parametrize("by", ["row", "rollout"])
def test_ids_of_pairs_are_read_with_the_models_tokenizer(by, student, clean, tmp_path):
    rows = [as_ids(row, chat_of(student)) for row in clean]
    pairs = [
        {"input_ids": row["input_ids"][:start], "output_ids": row["input_ids"][start:end], "metadata": metadata}
        for number, row in enumerate(rows)
        for turn, (start, end) in enumerate(spans_of(row["labels"]))
        for metadata in [
            {"rollout_id": f"r{number}", "turn": turn} if by == "rollout" else {"task_id": f"{number}/{turn}"}
        ]
    ]
    report = audit_file(write_rows(tmp_path / "pairs.jsonl", pairs), student)
    assert report.format == "tito" and "unreadable" not in report.findings
    assert (report.rows, report.labels) == (COUNT if by == "rollout" else len(pairs), 3 * COUNT)


def test_missing_end_is_marked_behind_the_last_id(student, clean, tmp_path):
    rows = [as_ids(clean[0], chat_of(student))]
    id_faults(chat_of(student))["no_end cut"](rows[0])
    report = audit_file(write_rows(tmp_path / "ids.jsonl", rows), student)
    text, _, fault = report.findings["no_end"].examples[0].spans[-1]
    assert fault and "missing" in text


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("masked", [True, False])
def test_padding_is_no_fault(side, masked, student, clean, tmp_path):
    rows = []
    for row in (as_ids(row, chat_of(student)) for row in clean):
        pad = 40
        seen = [1] * len(row["input_ids"])
        for name, values, filler in (
            ("input_ids", row["input_ids"], chat_of(student).pad_id), ("labels", row["labels"], -100),
            ("attention_mask", seen, 0),
        ):  # fmt: skip
            row[name] = [*values, *[filler] * pad] if side == "right" else [*[filler] * pad, *values]
        rows.append(row if masked else {k: v for k, v in row.items() if k != "attention_mask"})
    assert kinds(audit_file(write_rows(tmp_path / "ids.jsonl", rows), student)) == {}


@pytest.mark.parametrize("as_given_ids", [False, True])
def test_one_row_per_request_and_copies_are_repeats(as_given_ids, student, clean, tmp_path):
    requests = [
        {**row, "messages": row["messages"][: at + 1]}
        for row in clean
        for at, message in enumerate(row["messages"])
        if message["role"] == "assistant"
    ]
    rows = [as_ids(row, chat_of(student)) for row in requests] if as_given_ids else requests
    report = audit_file(write_rows(tmp_path / "rows.jsonl", rows), student)
    assert kinds(report) == {"repeated_turn": 2 * COUNT} and report.share(report.findings["repeated_turn"]) > 0.4
    copies = audit_file(write_rows(tmp_path / "copies.jsonl", [*clean, *clean[:3]]), student)
    assert kinds(copies) == {"repeated_row": 3} and rows_of(copies, "repeated_row") == {COUNT, COUNT + 1, COUNT + 2}


def test_held_out_tasks_repositories_and_lengths_are_found(student, clean, tmp_path):
    tasks = [{"prompt": f"Solve the issue. {clean[n]['messages'][1]['content']}", "repo": "o/other"} for n in (1, 4)]
    held = write_rows(tmp_path / "held.jsonl", [*tasks, {"prompt": "Sail. " * 20, "repo": "o/secret"}])
    clean[7]["repo"] = "o/secret"
    report = audit_file(write_rows(tmp_path / "rows.jsonl", clean), student, held)
    assert kinds(report) == {"leak": 3} and rows_of(report, "leak") == {1, 4, 7}
    far = write_rows(tmp_path / "far.jsonl", [{"prompt": f"Navigate {n}. " * 900} for n in range(3)])
    assert kinds(audit_file(tmp_path / "rows.jsonl", student, far)) == {"prompt_length": COUNT}


def test_too_few_calls_are_found_over_all_rows(student, tmp_path):
    rows = conversations(60, turns=0) + conversations(60, turns=0, seed=1)
    assert kinds(audit_file(write_rows(tmp_path / "rows.jsonl", rows), student)) == {"few_calls": 120}


def test_rows_that_no_format_reads_are_findings(student, clean, tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join([json.dumps(clean[0]), '{"half":', json.dumps({"x": 1}), json.dumps(clean[1])]))
    report = audit_file(path, student)
    assert kinds(report) == {"unreadable": 2} and rows_of(report, "unreadable") == {1, 2}
    other = audit_file(write_rows(tmp_path / "other.jsonl", [{"text": "no chat"}] * 3), student)
    assert kinds(other) == {"unreadable": 3} and other.label_tokens == 0


@pytest.mark.parametrize(("name", "content"), [("e.jsonl", ""), ("e.json", "[]"), ("e.ndjson", "\n\n"), ("e.json", "")])
def test_an_empty_file_is_no_row(name, content, model, student, clean, tmp_path):
    (empty := tmp_path / name).write_text(content)
    assert cli.main(["audit", str(empty), "--model", str(model)]) == 2, "there is nothing to audit"
    write_rows(tmp_path / "rows.jsonl", clean)
    report = audit_file(tmp_path, student)
    assert kinds(report) == {} and report.rows == COUNT and any(name in note for note in report.notes)


def test_workers_find_the_same_as_one_process(student, tmp_path, monkeypatch):
    rows = conversations(100)
    for number in (3, 40, 99):
        MESSAGE_FAULTS["no_tools"](rows[number])
    path = write_rows(tmp_path / "rows.jsonl", rows)
    alone = audit_file(path, student)
    monkeypatch.setattr("etpi.audit.file._SECONDS_PER_BYTE", 1.0)
    assert vars(audit_file(path, student)) | {"compared": 0} == vars(alone) | {"compared": 0}


@pytest.mark.parametrize(
    ("options", "code"),
    [([], 1), (["--fail-on", "error=0.5"], 0), (["--fail-on", "never"], 0), (["--fail-on", "sometimes"], 2)],
)
def test_exit_status_follows_the_bound(options, code, model, clean, tmp_path, capsys):
    MESSAGE_FAULTS["no_tools"](clean[2])
    path = write_rows(tmp_path / "rows.jsonl", clean)
    assert cli.main(["audit", str(path), "--model", str(model), "--json", *options]) == code
    if code != 2:
        printed = json.loads(capsys.readouterr().out)
        (finding,) = printed["findings"]
        assert (printed["version"], finding["kind"], finding["rows"]) == (1, "no_tools", 1)
        assert printed["failed"] == ["no_tools"] * code and finding["examples"][0]["row"] == "rows.jsonl, row 2"


@pytest.mark.parametrize(("path", "name"), [("missing.jsonl", None), ("rows.jsonl", "no/such-model")])
def test_unreadable_file_or_model_exits_with_2(path, name, model, clean, tmp_path):
    write_rows(tmp_path / "rows.jsonl", clean)
    assert cli.main(["audit", str(tmp_path / path), "--model", name or str(model)]) == 2


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (["--page", "none/page.html"], "none/page.html"),
        (["--fail-on", "errors"], "errors"),
        (["--heldout", "none.jsonl"], "none.jsonl"),
    ],
)
def test_wrong_option_ends_the_audit_before_the_file_is_read(
    options, named, model, clean, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("etpi.audit.command.audit_file", lambda *arguments: pytest.fail("the file is read"))
    path = write_rows(tmp_path / "rows.jsonl", clean)
    assert cli.main(["audit", str(path), "--model", str(model), *options]) == 2
    assert named in capsys.readouterr().err


def test_page_escapes_texts_and_marks_the_fault(student, clean, tmp_path):
    clean[2]["messages"][1]["content"] = "<script>alert(1)</script> prints <|im_end|> now"
    report = audit_file(write_rows(tmp_path / "rows.jsonl", clean), student)
    written = page(report)
    assert "<script" not in written and "http" not in written.partition("</head>")[2]
    assert 'class="context fault"' in written and 'id="control"' in written


def test_audit_of_a_file_needs_neither_torch_nor_dagster_nor_a_lake(model, clean, tmp_path):
    path = write_rows(tmp_path / "rows.jsonl", clean)
    code = (
        "import sys; from etpi import cli; cli.main(sys.argv[1:]);"
        "print([m for m in ('torch', 'dagster') if m in sys.modules])"
    )
    arguments = [sys.executable, "-c", code, "audit", str(path), "--model", str(model)]
    done = subprocess.run(arguments, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]" and not (tmp_path / "data").exists()


def test_every_kind_has_a_level_a_remedy_and_what_a_trainer_does():
    assert {kind.level for kind in KINDS.values()} == {"error", "warning", "note"}
    assert all(kind.title and kind.remedy and kind.trainer for kind in KINDS.values())
    text = (Path(__file__).parents[2] / "docs/audit.md").read_text(encoding="utf-8")
    assert not [name for name in KINDS if f"`{name}`" not in text]


def test_rows_of_llama_are_told_apart_by_their_headers(tmp_path, clean):
    from etpi_assets.curation.id_rows import mask_faults
    from tests.support.students import chat_of as family

    chat = family("llama3_1")
    messages = [m for m in clean[0]["messages"] if m["role"] in ("user", "system")] + [
        {"role": "assistant", "content": "Done."}
    ]
    ids = [*chat.prompt_ids(messages[:-1]), *chat.encode("Done."), chat.end_id]
    labels = [-100] * (len(ids) - 6) + ids[-6:]
    assert not [fault for fault in mask_faults(ids, labels, chat) if fault.kind not in ("partly_masked",)]
    assert {fault.kind for fault in mask_faults(ids, list(ids), chat)} == {"prompt_trained"}
    assert {fault.kind for fault in mask_faults([ids[0], *ids], [-100, *labels], chat)} >= {"bos"}
    header = chat.encode("user")
    at = next(i for i in range(len(ids)) if ids[i : i + len(header)] == header)
    other = [*ids[:at], *chat.encode("wizard"), *ids[at + len(header) :]]
    (fault,) = (f for f in mask_faults(other, [-100] * (len(other) - 6) + other[-6:], chat) if f.kind == "structure")
    assert "wizard" in fault.detail


def test_page_shows_the_missing_end_in_a_browser(chromium, student, clean, tmp_path):
    rows = [as_ids(clean[0], chat_of(student))]
    id_faults(chat_of(student))["no_end cut"](rows[0])
    file = tmp_path / "page.html"
    file.write_text(page(audit_file(write_rows(tmp_path / "ids.jsonl", rows), student)))
    options = ["--headless", "--no-sandbox", f"--user-data-dir={tmp_path / 'profile'}", "--dump-dom", file.as_uri()]
    shown = subprocess.run([chromium, *options], capture_output=True, text=True, check=True, timeout=120).stdout
    assert 'class="cut fault"' in shown and "the end of the turn is missing" in shown


def test_columns_that_nothing_reads_and_bad_ratings_are_found(student, clean, tmp_path):
    rows = [{**row, "keep_it": number % 2 == 0, "label": number != 5} for number, row in enumerate(clean)]
    report = audit_file(write_rows(tmp_path / "rows.jsonl", rows), student)
    assert kinds(report) == {"unread": COUNT, "failed": 1} and rows_of(report, "failed") == {5}
    assert "keep_it" in report.findings["unread"].examples[0].detail


def test_columns_of_no_known_format_are_named_or_a_remedy_is_given(student, clean, tmp_path):
    answers = [{"task": row["messages"][1]["content"], "reply": row["messages"][-1]["content"]} for row in clean]
    path = write_rows(tmp_path / "rows.jsonl", answers)
    unknown = audit_file(path, student)
    assert kinds(unknown) == {"unreadable": COUNT} and unknown.format == "unknown" and "task" in unknown.notes[0]
    named = audit_file(path, student, columns="prompt=task,answer=reply")
    assert kinds(named) == {} and named.labels == COUNT


def test_weights_of_the_model_are_not_read(student, clean, tmp_path, monkeypatch):
    monkeypatch.setattr("etpi.init.student.folder_hash", lambda folder: pytest.fail("the weights are read"))
    assert kinds(audit_file(write_rows(tmp_path / "rows.jsonl", clean), student)) == {}


@pytest.mark.parametrize("calls", ["", "{{ (m.tool_calls or [''])[0] | string | replace('name', 'run') }}"])
def test_calls_that_the_template_cannot_write_are_findings(calls, tmp_path):
    folder = model_folder(tmp_path)
    turns = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content or '' }}CALLS<|im_end|>\n{% endfor %}"
    template = turns.replace("CALLS", calls) + "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    (folder / "chat_template.jinja").write_text(template)
    called = {"role": "assistant", "tool_calls": [{"id": "c", "function": {"name": "bash", "arguments": "{}"}}]}
    words = [{"role": "user", "content": "Hi."}, {"role": "assistant", "content": "Hello."}]
    rows = [{"messages": [words[0], called]}, {"messages": words}]
    report = audit_file(write_rows(tmp_path / "rows.jsonl", rows), str(folder))
    assert kinds(report) == {"differs": 1} and rows_of(report, "differs") == {0} and report.labels == 1


@pytest.mark.parametrize("tags", [("<thinking>", "</thinking>"), ("<thought>", "</thought>"), ("[THINK]", "[/THINK]")])
@pytest.mark.parametrize("as_given_ids", [False, True])
def test_thoughts_in_tags_of_another_model_are_found(as_given_ids, tags, student, clean, tmp_path):
    for number in FAULTY:
        message = clean[number]["messages"][-1]
        message["content"] = f"{tags[0]}\nI think of tides.\n{tags[1]}\n\n{message['content']}"
    rows = [as_ids(row, chat_of(student)) for row in clean] if as_given_ids else clean
    report = audit_file(write_rows(tmp_path / "rows.jsonl", rows), student)
    assert kinds(report) == {"think": len(FAULTY)} and rows_of(report, "think") == set(FAULTY)


def _wider(row: dict[str, Any], before: int, after: int) -> dict[str, Any]:
    """Return a row whose labels begin some ids before their turn, and go on after its end."""
    spans = [(start - before, min(end + after, len(row["labels"]))) for start, end in spans_of(row["labels"])]
    inside = {i for start, end in spans for i in range(start, end)}
    return row | {"labels": [token if i in inside else -100 for i, token in enumerate(row["input_ids"])]}


@pytest.mark.parametrize(("before", "after"), [(0, 1), (3, 0), (2, 1)])
def test_masks_that_have_headers_and_line_breaks_of_turns_are_no_fault(before, after, student, clean, tmp_path):
    rows = [_wider(as_ids(row, chat_of(student)), before, after) for row in clean]
    report = audit_file(write_rows(tmp_path / "ids.jsonl", rows), student)
    assert kinds(report) == {} and report.labels == 3 * COUNT


@pytest.mark.parametrize("marks", ["seq_lengths", "position_ids", "attention_mask", "padded"])
def test_packed_rows_are_audited_one_conversation_at_a_time(marks, student, clean, tmp_path):
    rows, packed = [as_ids(row, chat_of(student)) for row in clean], list[dict[str, Any]]()
    id_faults(chat_of(student))["no_end"](rows[5])
    for first, second in zip(rows[::2], rows[1::2], strict=True):
        lengths = [len(row["input_ids"]) for row in (first, second)]
        pad = 7 if marks == "padded" else 0
        columns = {
            "seq_lengths": lengths,
            "position_ids": [*range(lengths[0]), *range(lengths[1]), *[0] * pad],
            "attention_mask": [1] * lengths[0] + [2] * lengths[1],
        }
        filler = {"input_ids": [chat_of(student).pad_id] * pad, "labels": [-100] * pad}
        row = {name: first[name] + second[name] + filler[name] for name in filler}
        name = marks if marks in columns else "position_ids"
        packed.append(row | {name: columns[name]})
    report = audit_file(write_rows(tmp_path / "ids.jsonl", packed), student)
    assert kinds(report) == {"no_end": 1} and rows_of(report, "no_end") == {2}
    assert (report.rows, report.labels) == (COUNT, 3 * COUNT)


@pytest.mark.parametrize(
    ("column", "value", "finding"),
    [
        ("attention_mask", "111", "unreadable"),
        ("attention_mask", [1, None, 2], "bad_ids"),
        ("attention_mask", {"a": 2}, "unreadable"),
        ("seq_lengths", 3, None),
        ("seq_lengths", ["a", "b"], None),
        ("position_ids", 7, None),
        ("position_ids", [0, "1", 0], None),
    ],
)
def test_columns_of_another_form_pack_nothing_and_end_no_audit(column, value, finding, student, clean, tmp_path):
    rows = [as_ids(row, chat_of(student)) for row in clean]
    rows[3][column] = value
    report = audit_file(write_rows(tmp_path / "ids.jsonl", rows), student)
    assert report.rows == COUNT and kinds(report) == ({finding: 1} if finding else {})


def test_rows_that_were_cut_at_a_length_are_truncated_and_not_of_another_template(student, clean, tmp_path):
    rows = [as_ids(row, chat_of(student)) for row in clean]
    for number, ids in zip(FAULTY, (1, 25), strict=True):
        length = spans_of(rows[number]["labels"])[-1][0] - ids  # within a header, and the results of the last call
        rows[number] = {name: values[:length] for name, values in rows[number].items()}
    report = audit_file(write_rows(tmp_path / "ids.jsonl", rows), student)
    assert kinds(report)["truncated"] == 2 and rows_of(report, "truncated") == {2, 5}
    assert kinds(report).keys() <= {"truncated", "no_answer"}


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "a", "chosen": "b", "rejected": "c"},
        {"prompt": [{"role": "user", "content": "a"}], "reward_model": {"ground_truth": "b"}},
        {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}], "images": ["c.png"]},
    ],
)
def test_rows_of_another_training_are_named_as_such(row, student, tmp_path):
    report = audit_file(write_rows(tmp_path / "rows.jsonl", [row] * 2), student)
    assert kinds(report) == {"other_training": 2}
