"""NeMo-Gym's results: rows of a request (`responses_create_params`), a `response` of items, and a reward."""

from __future__ import annotations

from etpi_assets.importers.conversation import ChatEntry, Options
from etpi_assets.importers.format import FOLDERS, FormatDoc, Row, row_format
from etpi_assets.importers.messages import solo
from etpi_assets.importers.responses import function_schemas, instructed, response_entries
from etpi_assets.importers.run_info import run_info, sampler_of
from etpi_assets.importers.source import as_list, as_mapping, text_field
from etpi_assets.trajectories.records import RolloutRecord


def record(row: Row, where: str, options: Options) -> RolloutRecord:
    """Read a row. Raises Unreadable: `empty`, `no_prompt`, `bad_reward`, or as `response_entries`."""
    request = as_mapping(row.get("responses_create_params"), f"{where}, responses_create_params")
    response = as_mapping(row.get("response"), f"{where}, response")
    prompt = request.get("input")
    context = (
        [ChatEntry("user", prompt)]
        if isinstance(prompt, str)
        else response_entries(as_list(prompt, f"{where}, input"), f"{where}, input", is_context=True)
    )
    output = response_entries(as_list(response.get("output"), f"{where}, output"), f"{where}, output")
    ended = text_field(response, "incomplete_details", "reason")
    facts = {"model": response.get("model"), "finish_reason": ended, **row}
    facts["tools"] = function_schemas(request.get("tools") or response.get("tools"))
    entries = [*instructed(request.get("instructions"), context), *output]
    rollout = solo(entries, run_info(facts, options), where, options, "all")
    rollout.sampler = sampler_of({**request, **response}, response.get("usage"))
    return rollout


FORMAT = row_format(
    "nemo_gym",
    FormatDoc(
        title="NeMo-Gym's rollouts: `responses_create_params` with a `response` of items, and a reward",
        keeps="instructions, the input as context, messages, calls, results, reasoning, token ids and "
        "log-probabilities of generations, tool schemas (as the Chat Completions API has them), reward, model, "
        "sampler, usage, the output limit, task",
        loses="not in the rows: the limits of responses without token ids (text and calls in a row are one turn). "
        "Other columns; rows with images are quarantined",
    ),
    claims=lambda row: "responses_create_params" in row and "response" in row,
    record=record,
    rank=FOLDERS,
)
