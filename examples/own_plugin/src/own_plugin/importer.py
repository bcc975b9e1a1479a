"""A format of recorded runs: rows of a question, an answer and whether the answer was right."""

from __future__ import annotations

from etpi_assets.importers.conversation import Message, Options
from etpi_assets.importers.format import FormatDoc, Row, row_format
from etpi_assets.importers.generic import solo
from etpi_assets.importers.run_info import run_info
from etpi_assets.importers.source import Unreadable
from etpi_assets.trajectories.records import RolloutRecord


def claims(row: Row) -> bool:
    return {"question", "answer", "right"} <= set(row)


def record(row: Row, where: str, options: Options) -> RolloutRecord:
    """Read a row. Raises Unreadable: `unknown_form` if question or answer is not text."""
    question, answer = row["question"], row["answer"]
    if not isinstance(question, str) or not isinstance(answer, str):
        raise Unreadable("unknown_form", f"{where}: question and answer have to be text")
    entries = [Message("user", question), Message("assistant", answer)]
    return solo(entries, run_info({"reward": float(row["right"])}, options), where, options)


FORMAT = row_format(
    "question_log",
    FormatDoc(title="Questions with answers", keeps="question, answer, whether it was right", loses="other columns"),
    claims=claims,
    record=record,
)
