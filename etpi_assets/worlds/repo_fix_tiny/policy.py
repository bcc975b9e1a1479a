"""The scripted policy of `repo_fix_tiny`: it reads the notes, writes down both hops, fixes the module and submits.

Long thoughts always have the same sentences in the same order, with several wordings: a model of this size cannot count
its sentences, and would not end thoughts without a fixed order.
"""

from __future__ import annotations

import random
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from etpi_assets.agent.actions import format_action
from etpi_assets.worlds.skill import PolicySkill
from etpi_resources.chat.marks import think_block
from etpi_resources.engines import Request


@dataclass(frozen=True)
class RepoFixSkill(PolicySkill):
    """Probabilities, sampled once a rollout and independently.

    Attributes:
        compact: thoughts are slots of one line instead of free text.
        wrong_look_up: a hop ends in another row of its table.
    """

    compact: float = 0.0
    wrong_look_up: float = 0.0


class RepoFixPolicy:
    """Scripted policy: `policy(request)` returns the next turn for the task in `request.privileged`."""

    def __init__(self, skill: RepoFixSkill, seed: int = 0) -> None:
        self.skill, self.seed = skill, seed

    def __call__(self, request: Request) -> str:
        rng = random.Random(f"{self.seed}/{request.session}")
        compact, wrong = rng.random() < self.skill.compact, rng.random() < self.skill.wrong_look_up
        words = _looked_up(request.privileged["payload"], wrong, rng)
        turn = sum(message["role"] == "assistant" for message in request.messages)
        rng = random.Random(f"{self.seed}/{request.session}/{turn}")
        scripted = _TURNS[min(turn, len(_TURNS) - 1)]
        lines = scripted["slots"] if compact else [" ".join(rng.choice(ways) for ways in scripted["sentences"])]
        thought, command = "\n".join(lines).format(**words), scripted["command"].format(**words)
        return f"{think_block(thought)}{format_action(command)}"


def _looked_up(payload: Mapping[str, Any], wrong: bool, rng: random.Random) -> dict[str, Any]:
    """Return the result of both hops, which may be wrong."""
    module, value = payload["module"], payload["value"]
    if wrong and rng.random() < 0.5:
        module = rng.choice([name for name in payload["values"] if name != module])
        value = payload["values"][module]
    elif wrong:
        value = rng.choice([number for number in payload["values"].values() if number != value])
    return {"symptom": payload["symptom"], "module": module, "value": value}


_TURNS: Sequence[Mapping[str, Any]] = tomllib.loads(Path(__file__).with_name("script.toml").read_text("utf-8"))["turns"]
HOPS: Sequence[str] = _TURNS[1]["slots"]
"""Slots of the turn with the edit, which contain both hops."""
