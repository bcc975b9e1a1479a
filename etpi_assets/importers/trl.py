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
    masks = {name: as_list(row[name], f"{where}, {name}") for name in _MASKS if row.get(name) is not None}
    labels = as_list(ids if masks and row.get("labels") is None else row.get("labels"), f"{where}, labels")
    wrong = [name for name, column in {"labels": labels, **masks}.items() if len(column) != len(ids)]
    wrong += [f"labels[{i}]" for i, (t, w) in enumerate(zip(ids, labels, strict=False)) if w not in (IGNORE_INDEX, t)]
    wrong += [name for name, mask in masks.items() if not all(m in (0, 1) for m in mask)]
    if wrong:
        raise Unreadable(
            "bad_token_ids",
            f"{where}: {wrong[0]} does not fit the {len(ids)} ids; labels are unshifted, an id or -100 each, and masks "
            "are 0 and 1",
        )
    # As in TRL, an id is trained only if no mask leaves it out.
    labels = [t if all(of_id) else IGNORE_INDEX for t, *of_id in zip(labels, *masks.values(), strict=True)]
    spans = spans_of(labels)
    if not spans:
        raise Unreadable("empty", f"{where}: every label is -100, so there is no turn")
    return entries_of(ids, spans, options, where, text_field(row, "capture") or options.capture)


FORMAT = row_format(
    "trl",
    FormatDoc(
        title="TRL: tokenised rows (`input_ids` with `labels`, `completion_mask` or `assistant_masks`), and "
        "`prompt` with `completion`",
        keeps="ids and which of them are trained (by `labels` and every mask), one turn per labelled span; with "
        "`options.tokenizer`, the decoded messages; messages of `prompt` as context and of `completion` as turns; tool "
        "schemas (`tools`)",
        loses="text of the template between messages (it stays in the ids), preferences (quarantined)",
    ),
    claims=claims,
    record=record,
)
