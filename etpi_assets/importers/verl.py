"""verl data: prompts with a reward model, single-turn supervised rows, and the rollouts its trainer writes down.

Belongs here: those columns. Does not belong here: its multi-turn supervised rows, which are rows of messages.
"""

from __future__ import annotations

from typing import Any

from etpi_assets.importers.conversation import Entry, Options, chat_entries
from etpi_assets.importers.facts import facts
from etpi_assets.importers.format import Row, of_rows
from etpi_assets.importers.messages import solo
from etpi_assets.importers.source import Unreadable, as_list, text_field
from etpi_assets.trajectories.records import RolloutRecord


def claims(row: Row) -> bool:
    prompts = "reward_model" in row and "prompt" in row
    written_down = {"input", "output", "score"} <= set(row)
    supervised = ("prompt" in row and "response" in row) or _answered(row)
    return prompts or written_down or supervised


def _answered(row: Row) -> bool:
    extra = row.get("extra_info")
    return "messages" not in row and isinstance(extra, dict) and {"question", "answer"} <= set(extra)


def record(rows: list[Row], where: str, options: Options) -> RolloutRecord:
    """Raises Unreadable: `no_response` for a prompt that nobody answered, `unknown_form`."""
    (row,) = rows
    found = facts(row, options)
    if "output" in row:
        prompt, answer = row.get("input"), row.get("output")
    elif row.get("response") is not None:
        prompt, answer = row.get("prompt"), row.get("response")
    elif _answered(row) and "reward_model" not in row:
        prompt, answer = row["extra_info"]["question"], row["extra_info"]["answer"]
    else:
        raise Unreadable("no_response", f"{where} is a prompt for training by reward; nobody has answered it")
    return solo([*_prompt(prompt, where), Entry("assistant", _text(answer, where))], found, where, options)


def _prompt(value: Any, where: str) -> list[Entry]:
    if isinstance(value, str):
        return [Entry("user", value)]
    entries = chat_entries(as_list(value, f"{where}, prompt"), f"{where}, prompt")
    for entry in entries:
        entry.learn, entry.kind = False, "prompt"
    return entries


def _text(value: Any, where: str) -> str:
    text = text_field({"text": value}, "text")
    if text is None:
        raise Unreadable("unknown_form", f"{where}: the response is no text")
    return text


FORMAT = of_rows(
    "verl",
    title="verl: the rollouts its trainer dumps (`input`, `output`, `score`), single-turn supervised rows (`prompt` + "
    "`response`, or `extra_info.question` + `answer`); its multi-turn rows are `messages`",
    keeps="prompt, response, score, task and data source where named",
    loses="what decoding lost already (special tokens), other columns; prompts without a response are quarantined",
    claims=claims,
    record=record,
)
