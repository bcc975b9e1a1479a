"""Imported rollouts of each format, as tables; what is refused; keys that are masked; formats that are detected."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable, Mapping
from functools import cache, partial
from pathlib import Path
from typing import Any

from etpi_assets.importers import IMPORTERS, count_found, import_runs
from etpi_assets.tasks.family import RejectedInput
from etpi_assets.trajectories.records import RolloutRecord
from etpi_assets.trajectories.tables import to_tables
from etpi_resources.capture.store import CallLog
from etpi_resources.chat.format import load_chat_format
from tests.goldens.folders import new_folder
from tests.goldens.golden import case
from tests.support import recorded_runs, rows, sessions
from tests.support.rows import OTHERS, ROWS, called, detect, write_lines

JUNK: list[Any] = [{"unknown": 1}, [1], "text", {"messages": []}, {"messages": [{"role": "user", "content": "Hi."}]}]
"""Rows that no format reads."""
OPTIONS: Mapping[str, dict[str, Any]] = {
    "trl": {"tokenizer": "tiny"},
    "tito": {"tokenizer": "tiny"},
    "capture": {"tokenizer": "tiny"},
    "cooperbench": recorded_runs.PAIR_OPTIONS,
    "mapped": {"map": {"messages": "a.talk", "role": "who", "text": "said[0]", "reward": "won"}},
}


@cache
def conversation_ids() -> tuple[list[int], list[tuple[int, int]]]:
    """Return a conversation in the tiny vocabulary and the places of its two outputs."""
    chat = load_chat_format("tiny")
    ids = chat.prompt_ids([{"role": "system", "content": "You have a shell."}, {"role": "user", "content": "Moor."}])
    spans = []
    for text, seen in (("<tool_call>\nls\n</tool_call>", "moor.py"), ("Moored.", None)):
        output = [*chat.encode(text), chat.end_id]
        spans.append((len(ids), len(ids) + len(output)))
        ids = [*ids, *output, *(chat.observation_ids(seen) if seen else [])]
    return ids, spans


def token_rows() -> list[Any]:
    ids, spans = conversation_ids()
    return [
        {"input_ids": ids[:start], "output_ids": ids[start:end], "metadata": {"rollout_id": "r", "turn": turn}}
        for turn, (start, end) in enumerate(spans)
    ]


def capture_log(folder: Path) -> Path:
    """Write the log of two calls, the second of which extends the first."""
    chat = load_chat_format("tiny")
    ids, ((start, end), (later, last)) = conversation_ids()
    log = CallLog(folder / "run.jsonl")
    log.append({"attempt": "run", "tokenizer": "tiny", "vocabulary": chat.vocabulary_hash})
    texts = [chat.decode(ids[a : b - 1]) for a, b in ((start, end), (later, last))]
    parts = [("Moor.", ids[:start], ids[start:end]), ("moor.py", ids[end:later], ids[later:last])]
    for call, (text, (seen, prompt, output)) in enumerate(zip(texts, parts, strict=True)):
        row = {
            "call": call, "parent": call - 1 if call else None, "link": "exact" if call else "root",
            "at": 1000.0 + call, "seconds": 0.5, "model": "helmsman-2", "messages": [{"role": "user", "content": seen}],
            "message": {"role": "assistant", "content": text}, "prompt_ids": prompt, "kept_ids": output,
            "output_ids": output, "logprobs": None, "text": text, "finish": "stop", "headers": {},
        }  # fmt: skip
        log.append(row, [])
    log.close()
    return folder


def written(folder: Path, format: str) -> Path:
    """Write the sample of a format."""
    mapped = {"a": {"talk": [{"who": "user", "said": ["Moor."]}, {"who": "ai", "said": ["Moored."]}]}, "won": "1"}
    samples: dict[str, list[Any]] = {
        "autogen": [rows.autogen_state()],
        "goose": rows.goose_lines(),
        "mistral_vibe": rows.vibe_rows(),
        **{name: [row, *OTHERS.get(name, [])] for name, row in ROWS.items()},
        "trl": [rows.trl_row(*conversation_ids()), ROWS["trl"], *OTHERS["trl"]],
        "tito": token_rows(),
        "mapped": [mapped],
    }
    if format in sessions.FILES:
        for name, lines in sessions.FILES[format]:
            write_lines(folder / name, lines)
    elif format == "atif":
        document = rows.atif_document(subagent_trajectories=[rows.atif_document(trajectory_id="s")])
        (folder / "t.json").write_text(json.dumps(document))
    elif format == "harbor":
        rows.trial(folder, verifier_result={"rewards": {"reward": 1}})
    elif format == "cooperbench":
        talk = [recorded_runs.native_messages(), recorded_runs.flattened_messages("agent2", "agent1")]
        recorded_runs.pair_run(folder, messages=talk, verdict=recorded_runs.verdict(passed=(True, False)))
    elif format == "swe_agent":
        for form in ("fenced", "xml", "tool_calls"):
            recorded_runs.write(folder / form / f"{form}.traj", recorded_runs.windowed_history(form))
    elif format == "mini_swe_agent":
        recorded_runs.write(folder / "a" / "a.traj.json", recorded_runs.bare_list())
    elif format == "capture":
        return capture_log(folder)
    else:
        write_lines(folder / "rows.jsonl", samples[format])
    return folder


def imported(write: Callable[[Path], Path], format: str, **options: Any) -> dict[str, Any]:
    """Import what `write` writes: tables of the rollouts, and the refusals."""
    path = write(new_folder())
    items = list(import_runs(format, path, {**OPTIONS.get(format, {}), **options}))
    records = [item for item in items if isinstance(item, RolloutRecord)]
    refused = [(item.source, item.row, item.reason) for item in items if isinstance(item, RejectedInput)]
    return {"found": count_found(format, path), **to_tables(records), "refused": refused or None}


def junk_after(folder: Path, format: str) -> Path:
    """Write the sample with rows that cannot be read after it."""
    written(folder, format)
    with (folder / "rows.jsonl").open("a") as file:
        file.writelines(json.dumps(row) + "\n" for row in JUNK)
        file.write("no json\n")
    return folder


ROW_FORMATS = ("mapped", "messages", "openhands", "r2e_gym", "sharegpt", "tito", "trl", "verl")

for name in IMPORTERS:
    case(f"importer.{name}", "tables")(partial(imported, partial(written, format=name), name))
    if name != "mapped":
        case("importers", f"detection {name}")(lambda name=name: detect(written(new_folder(), name)))
for name in ROW_FORMATS:
    case(f"importer.{name}", "refused")(partial(imported, partial(junk_after, format=name), name))


@case("importer.openhands", "lost calls")
def lost_calls() -> dict[str, Any]:
    """Errors of calls that the file does not have, with and without ids of responses."""

    def write(folder: Path) -> Path:
        rows_ = [rows.openhands_row(), rows.openhands_row()]
        for row in rows_:
            row["history"].insert(7, {"source": "agent", "observation": "error", "content": "Missing argument"})
        del rows_[1]["history"][3]["tool_call_metadata"]["model_response"]["id"]
        return write_lines(folder / "rows.jsonl", rows_)

    return imported(write, "openhands")


@case("importers", "keys")
def keys() -> dict[str, Any]:
    key = "ghp_" + "a1B2" * 9
    row = {
        "messages": [*rows.chat()[:3], {"role": "tool", "content": f"KEY={key}", "tool_call_id": "c1"}, rows.chat()[4]]
    }
    row["messages"][2] = {**row["messages"][2], "tool_calls": [called(command=f"export KEY={key}")]}

    def write(folder: Path) -> Path:
        return write_lines(folder / "rows.jsonl", [row])

    return {choice: imported(write, "messages", secrets=choice) for choice in ("mask", "quarantine", "keep")}


@case("importers", "files")
def files() -> dict[str, Any]:
    def write(folder: Path) -> Path:
        lines = "".join(json.dumps(row) + "\n" for row in [ROWS["messages"]] * 2)
        (folder / "data").mkdir()
        (folder / "data" / "a.jsonl.gz").write_bytes(gzip.compress(lines.encode()))
        rows.write_parquet(folder / "b.parquet", [rows.messages_row()])
        (folder / "c.json").write_text(json.dumps([rows.messages_row()]))
        (folder / "empty.jsonl").write_text("")
        return folder

    return imported(write, "messages")
