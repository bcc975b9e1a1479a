"""TRL data sets: tokenised rows (`input_ids` with `labels` or a mask), and `prompt` with `completion`.

Preferences are two answers to one prompt, not a trajectory; they are refused.
"""

from __future__ import annotations

from etpi_assets.importers.conversation import ChatEntry, Options, token_ids
from etpi_assets.importers.format import FormatDoc, Row, row_format
from etpi_assets.importers.messages import check_row, prompt_entries, solo, text_entries
from etpi_assets.importers.run_info import run_info
from etpi_assets.importers.source import Unreadable, as_list, text_field
from etpi_assets.importers.token_rows import entries_of, spans_of
from etpi_assets.trajectories.records import RolloutRecord
from etpi_resources.labels import IGNORE_INDEX

_MASKS = ("completion_mask", "assistant_masks", "assistant_mask", "loss_mask")


def claims(row: Row) -> bool:
    tokenised = "input_ids" in row and any(name in row for name in ("labels", *_MASKS))
    return tokenised or ("prompt" in row and ("completion" in row or "chosen" in row))


def record(row: Row, where: str, options: Options) -> RolloutRecord:
    """Read a row. Raises Unreadable: `preference`, `empty`, `bad_token_ids`, `needs_tokenizer`, `unknown_form`."""
    check_row(row, where)
    if "input_ids" in row:
        entries = _tokenised(row, where, options)
    else:
        before = prompt_entries(row.get("prompt"), f"{where}, prompt")
        after = text_entries(row.get("completion"), "assistant", f"{where}, completion")
        shown = [(entry.role, entry.content) for entry in before]
        if [(entry.role, entry.content) for entry in after[: len(shown)]] == shown:  # verifiers repeats it
            after = after[len(shown) :]
        entries = [*before, *after]
    return solo(entries, run_info(row, options), where, options)


def _tokenised(row: Row, where: str, options: Options) -> list[ChatEntry]:
    ids = token_ids(row.get("input_ids"), f"{where}, input_ids")
    if row.get("labels") is not None:
        labels = as_list(row["labels"], f"{where}, labels")
        wrong = next((i for i, (t, w) in enumerate(zip(ids, labels, strict=False)) if w not in (IGNORE_INDEX, t)), None)
    else:
        mask = as_list(next((row[name] for name in _MASKS if row.get(name) is not None), None), f"{where}, mask")
        labels, wrong = [t if m else IGNORE_INDEX for t, m in zip(ids, mask, strict=False)], None
        labels += [IGNORE_INDEX] * (len(mask) - len(labels))
    if len(labels) != len(ids) or wrong is not None:
        what = f"{len(labels)} labels for {len(ids)} ids" if wrong is None else f"label {wrong} is not its own id"
        raise Unreadable("bad_token_ids", f"{where}: {what}; labels stand unshifted, -100 where nothing is learnt")
    spans = spans_of(labels)
    if not spans:
        raise Unreadable("empty", f"{where}: every label is -100, so there is no turn")
    return entries_of(ids, spans, options, where, text_field(row, "capture") or options.capture)


FORMAT = row_format(
    "trl",
    FormatDoc(
        title="TRL: tokenised rows (`input_ids` with `labels`, `completion_mask` or `assistant_masks`), and "
        "`prompt` with `completion`",
        keeps="ids and which of them are trained, one turn per labelled span; with `options.tokenizer`, the "
        "decoded messages; messages of `prompt` as context and of `completion` as turns; tool schemas "
        "(`tools`)",
        loses="text of the template between messages (it stays in the ids), preferences (quarantined)",
    ),
    claims=claims,
    record=record,
)
