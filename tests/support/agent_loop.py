"""Rollouts of the agent loop: a family of one task, scripted policies, and the loop over them in a real sandbox."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from etpi_assets.agent.actions import format_action
from etpi_assets.agent.loop import SUBMIT, Identity, RolloutJob, RolloutRuntime, run_rollout
from etpi_assets.specs.rollout_set import AgentSection
from etpi_assets.tasks.family import Family, Role, SandboxNeeds, Task, Verdict
from etpi_resources.chat.format import load_chat_format
from etpi_resources.engines import Request
from etpi_resources.engines.scripted import ScriptedEngine
from etpi_resources.sandboxes.bubblewrap import BubblewrapFactory

CHAT = load_chat_format("tiny")
BOX = BubblewrapFactory()
IDENTITY = Identity(spec_key="spec", origin="set", engine="scripted", teacher="t")
SUBMITS = str(format_action(f"echo {SUBMIT}"))


@dataclass
class Pair(Family):
    """A family of one task: agents share nothing but messages, and whoever leaves `done` in a.txt passes."""

    invents_names: bool = True
    agents: tuple[str, ...] = ("agent1", "agent2")
    judged: list[Mapping[str, Mapping[str, str]]] = field(default_factory=list)

    def roles(self, task):
        partners = [self.agents[1 - i] if len(self.agents) == 2 else None for i in range(len(self.agents))]
        return [Role(a, f"f{i}", f"do {a}", partners[i]) for i, a in enumerate(self.agents)]

    def needs(self, task):
        return SandboxNeeds()

    def workspace(self, task, role):
        return {"a.txt": "start\n", "dir/b.txt": "kept\n"}

    def judge(self, task, final, sandboxes):
        self.judged.append(final)
        return Verdict(float(all("done" in files.get("a.txt", "") for files in final.values())), "passed", {})


TASK = Task("t1", "suite", "repo", "train", "do it", {}, "hash")


def bash(command: str) -> str:
    return str(format_action(command))


def script(**turns: list[str] | Callable[[Request], str]):
    """A policy that reads out each agent's lines, the last one over and over."""

    def policy(request: Request) -> str:
        lines = turns[request.privileged["role"].agent_id]
        turn = sum(m["role"] == "assistant" for m in request.messages)
        return lines(request) if callable(lines) else lines[min(turn, len(lines) - 1)]

    return policy


def roll(policy, family=None, noncanonical=0.3, **agent):
    engine = ScriptedEngine(policy, CHAT, "t", noncanonical=noncanonical)
    section = AgentSection(**{"max_tokens": 128, **agent})
    runtime = RolloutRuntime(family or Pair(), engine, BOX, CHAT)  # pyright: ignore[reportArgumentType]
    return run_rollout(RolloutJob(TASK, section, IDENTITY), runtime)
