"""Measure re-tokenising of recorded runs against `apply_chat_template` on every prefix.

Run: `python bench/retokenise.py [EVERY]`.

`ETPI_TRAJECTORIES` names the folder of recorded runs. Both ways run in this process, on one core, over the same
conversations (all, or every EVERY-th), in CPU seconds. The ids must be equal, except in messages with a control token
as text, which the baseline reads as structure.
"""

from __future__ import annotations

import os
import sys
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

from machine import machine

TEMPLATES = ("qwen3", "qwen3_5_think", "qwen3_instruct_2507")
MESSAGE_COMMANDS = {"message_commands": ["coop-send", "coop-broadcast"], "receive_commands": ["coop-recv"]}


def conversations(root: Path) -> list[list[dict[str, Any]]]:
    """Return the messages of every agent with at least one turn, of every run."""
    from etpi_assets.importers import import_runs
    from etpi_assets.trajectories.records import RolloutRecord
    from etpi_assets.trajectories.tables import to_tables

    imported = import_runs("auto", root / "cooperbench-logs", MESSAGE_COMMANDS)
    records = [item for item in imported if isinstance(item, RolloutRecord)]
    by_agent: defaultdict[tuple[str, str], list[dict[str, Any]]] = defaultdict(list)
    for row in to_tables(records)["messages"].to_pylist():
        by_agent[row["rollout_id"], row["agent_id"]].append(row)
    return [messages for messages in by_agent.values() if any(m["kind"] == "action" for m in messages)]


def main() -> int:
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # ours would encode on all cores, the baseline does not
    from etpi_assets.curation.retokenise import conversation, retokenise
    from etpi_assets.curation.student_form import StudentForm
    from etpi_resources.chat.format import load_chat_format

    root = os.environ.get("ETPI_TRAJECTORIES")
    if not root:
        print("ETPI_TRAJECTORIES names no folder of recorded runs", file=sys.stderr)
        return 2
    runs = conversations(Path(root))[:: int(sys.argv[1]) if len(sys.argv) > 1 else 1]
    for name in TEMPLATES:
        chat = load_chat_format("qwen3", name)
        chat.prompt_ids([{"role": "user", "content": "warm"}])
        start = time.process_time()
        ours = [retokenise(messages, chat, bare=False) for messages in runs]  # the baseline has one form, too
        took = time.process_time() - start
        baseline, prompts = 0.0, []
        for messages in runs:
            history, turns = conversation(messages, StudentForm(chat))
            start = time.process_time()
            prompts += [
                chat.tokenizer.apply_chat_template(history[:at], add_generation_prompt=True, return_dict=False)
                for _, at in turns
            ]
            baseline += time.process_time() - start
        mine = [turn.prompt_ids for turns in ours for turn in turns]
        equal = sum(a == b for a, b in zip(mine, prompts, strict=True))
        controls = [chat.decode([number]) for number in chat.control_ids]
        smuggled = sum(
            any(control in message["content"] for message in history[:at] for control in controls)
            for messages in runs
            for history, turns in [conversation(messages, StudentForm(chat))]
            for _, at in turns
        )
        rerendered = sum(not turns[0].appended for turns in ours)
        print(
            f"{name}: {len(runs)} conversations ({rerendered} rendered per prompt), {len(mine)} prompts, "
            f"{sum(map(len, mine)) / 1e6:.1f} M prompt tokens; {equal} prompts equal, "
            f"{smuggled} contain control tokens; {took:.2f} s against {baseline:.1f} s, {baseline / took:.1f} times",
            flush=True,
        )
    return 0


if __name__ == "__main__":
    print(machine(), flush=True)
    raise SystemExit(main())
