"""verl data: prompts with a reward model, single-turn supervised rows, and rollouts dumped by its trainer."""

from __future__ import annotations

from etpi_assets.importers.conversation import ChatEntry, Options
from etpi_assets.importers.format import FormatDoc, Row, row_format
from etpi_assets.importers.messages import check_row, prompt_entries, solo
from etpi_assets.importers.run_info import run_info
from etpi_assets.importers.source import Unreadable, text_field
from etpi_assets.trajectories.records import RolloutRecord


def claims(row: Row) -> bool:
    prompts = "reward_model" in row and "prompt" in row
    dumped = {"input", "output", "score"} <= set(row)
    supervised = ("prompt" in row and "response" in row) or _answered(row)
    return prompts or dumped or supervised


def _answered(row: Row) -> bool:
    extra = row.get("extra_info")
    return "messages" not in row and isinstance(extra, dict) and {"question", "answer"} <= set(extra)


def record(row: Row, where: str, options: Options) -> RolloutRecord:
    """Read a row. Raises Unreadable: `no_response` for a prompt without a response, `unknown_form`."""
    check_row(row, where)
    info = run_info(row, options)
    if "output" in row:
        prompt, answer = row.get("input"), row.get("output")
    elif row.get("response") is not None:
        prompt, answer = row.get("prompt"), row.get("response")
    elif _answered(row) and "reward_model" not in row:
        prompt, answer = row["extra_info"]["question"], row["extra_info"]["answer"]
    else:
        raise Unreadable("no_response", f"{where} is a prompt for training by reward; nobody has answered it")
    text = text_field({"text": answer}, "text")
    if text is None:
        raise Unreadable("unknown_form", f"{where}: the response is no text")
    return solo([*prompt_entries(prompt, f"{where}, prompt"), ChatEntry("assistant", text)], info, where, options)


FORMAT = row_format(
    "verl",
    FormatDoc(
        title="verl: rollouts dumped by its trainer (`input`, `output`, `score`), single-turn supervised rows "
        "(`prompt` with `response`, or `extra_info.question` with `answer`); its multi-turn rows are "
        "`messages`",
        keeps="prompt, response, score, task and data source",
        loses="special tokens (decoding removed them already), other columns; prompts without a response are "
        "quarantined",
    ),
    claims=claims,
    record=record,
)
