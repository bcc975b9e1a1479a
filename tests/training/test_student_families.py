"""Students of families with templates of their own: from a user's runs to a checkpoint that acts when served."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from etpi_assets.agent.actions import after_think, read_actions
from etpi_resources.chat.format import ChatFormat, load_chat_format
from etpi_resources.checkpoints import checkpoint_folder
from etpi_resources.engines import Request, Sampler
from etpi_resources.engines.transformers import TransformersEngine
from etpi_resources.lake.lake import Ref, folder_hash
from tests.support.curation import CURATION, CurationLake
from tests.support.own_runs import ANSWER, recorded_run, write_runs
from tests.support.students import make_student

IN_GATE = ["qwen3", "glm4_5", "gpt_oss"]
"""Families that `make test-all` trains: ChatML, turns that the next one ends, and channels."""
OTHERS = ["qwen3_6", "llama3_1", "mistral_v11", "gemma4"]
SET = 'title = "mine"\nkind = "imported"\npath = "PATH"\n'
EXPERIMENT = """title = "mine"
rollout_sets = ["mine"]
evaluate = "none"
[base]
kind = "path"
path = "MODEL"
sha256 = "HASH"
[train]
method = "full"
epochs = 150.0
learning_rate = 4e-3
batch_tokens = 1024
"""


def room_of(folder: Path, family: str, runs: list[dict[str, Any]]) -> tuple[CurationLake, Path]:
    room, model = CurationLake(folder), make_student(family, folder / "model")
    room.write("rollout_sets", "mine", SET.replace("PATH", str(write_runs(folder, runs))))
    text = EXPERIMENT.replace("MODEL", str(model)).replace("HASH", folder_hash(model))
    room.write("experiments", "mine", text)
    room.make_set("mine")
    return room, model


def pairs_of(room: CurationLake) -> list[dict[str, Any]]:
    rows = room.lake.read(Ref("tito_pairs", "experiment", "mine"), "pairs").to_pylist()
    return sorted(rows, key=lambda row: (row["rollout_id"], row["turn"]))


def rendered_by_transformers(model: Path, messages: list[dict[str, Any]], tools: list[Any]) -> list[int]:
    """Render with the tokenizer of `transformers`, which etpi's own rendering does not use for ids."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    text = tokenizer.apply_chat_template(messages, tools=tools, tokenize=False)
    return tokenizer.encode(text.rstrip("\n"), add_special_tokens=False)


@pytest.mark.parametrize("family", [*IN_GATE, *OTHERS, "mistral_v3"])
def test_labels_of_five_runs_are_the_templates_own_rendering(family: str, tmp_path: Path) -> None:
    runs = [recorded_run(number, turns) for number, turns in enumerate((1, 2, 3, 5, 25))]
    room, model = room_of(tmp_path, family, runs)
    for asset in CURATION[:2]:
        manifest = room.make(asset, "mine").manifest
        assert not manifest.blocked, manifest.failures
    chat = load_chat_format(str(model), str(model))
    pairs = pairs_of(room)
    assert len(pairs) == sum(m["role"] == "assistant" for run in runs for m in run["messages"])
    of_run: dict[str, list[dict[str, Any]]] = {}
    for row in pairs:
        of_run.setdefault(row["rollout_id"], []).append(row)
    for run, rows in zip(sorted(runs, key=lambda r: len(r["messages"])), sorted(of_run.values(), key=len), strict=True):
        messages = as_template_takes(chat, run["messages"])
        spoken = [index for index, m in enumerate(messages) if m["role"] == "assistant"]
        for row, end in list(zip(rows, spoken, strict=True))[:4] + [(rows[-1], spoken[-1])]:
            whole = rendered_by_transformers(model, messages[: end + 1], run["tools"])
            label = row["output_ids"]
            if family == "glm4_5" and end + 1 < len(messages):  # the next message's first token ends the turn
                before, whole = whole, rendered_by_transformers(model, messages[: end + 2], run["tools"])
                whole = whole[: len(before) + 1]
            elif family == "glm4_5":
                whole += [chat.end_id]
            assert whole[-len(label) :] == label, chat.decode(label)


def as_template_takes(chat: ChatFormat, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return a run's messages with arguments as objects, as templates read them, and ids of calls that all accept."""
    taken, answered = [], {}
    for message in messages:
        message = dict(message)
        if calls := message.get("tool_calls"):
            function = calls[0]["function"]
            arguments = json.loads(function["arguments"])
            message["tool_calls"] = [
                {"id": "call00000", "type": "function", "function": {**function, "arguments": arguments}}
            ]
            answered = {"tool_call_id": "call00000", "name": function["name"]}
            if not chat.chatml and chat.template_form.prose in ("moved", "refused"):
                message["content"] = ""
        taken.append({**message, **answered} if message["role"] == "tool" else message)
    return taken


@pytest.mark.slow
@pytest.mark.parametrize("family", [*IN_GATE, *(pytest.param(name, marks=pytest.mark.long) for name in OTHERS)])
def test_trained_checkpoint_acts_as_its_data_when_served(family: str, tmp_path: Path) -> None:
    run = recorded_run(0, 1)
    room, _ = room_of(tmp_path, family, [run])
    for asset in (*CURATION, "base_checkpoint", "sft_checkpoint", "rl_checkpoint", "serving_probe"):
        manifest = room.make(asset, "mine").manifest
        assert not manifest.blocked, manifest.failures
    (checkpoint,) = room.lake.read(Ref("sft_checkpoint", "experiment", "mine"), "checkpoints").to_pylist()
    probes = room.lake.read(Ref("serving_probe", "experiment", "mine"), "probes").to_pylist()
    parsed = {row["role"]: row["value"] for row in probes if row["probe"] == "first_turn_parses"}
    assert (parsed["base"], parsed["sft"]) == (0.0, 1.0), "the base does not call the tool, the trained student does"
    folder = checkpoint_folder(room.lake.root, checkpoint["path"])
    chat = load_chat_format(str(folder), str(folder))
    call, answer = pairs_of(room)
    prompt = [int(i) for i in call["suffix_ids"]]
    before = [] if answer["prefix_turn"] is None else [*prompt, *call["output_ids"]]
    after = [*before, *answer["suffix_ids"]]
    engine = TransformersEngine(folder, "student", chat)
    try:
        sampler = Sampler(max_tokens=400)
        acted, answered = engine.complete(
            [Request(f"r{i}", f"s{i}", ids, (), sampler) for i, ids in enumerate((prompt, after))]
        )
    finally:
        engine.close()
    assert (acted.finish_reason, answered.finish_reason) == ("stop", "stop")
    recorded = json.loads(run["messages"][2]["tool_calls"][0]["function"]["arguments"])["command"]
    (action,), error = read_actions(acted.text, form=chat.tool_form)
    assert (action.command, error) == (recorded, None)
    assert chat.answer(after_think(answered.text)).strip() == ANSWER
