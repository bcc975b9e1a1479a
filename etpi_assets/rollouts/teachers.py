"""Open the engine of a rollout set's `[engine]` section: a scripted policy of its family, a model, or a plugin."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from etpi_assets.agent.actions import next_turn
from etpi_assets.rollouts.models import model_engine
from etpi_assets.specs.load import SpecError
from etpi_assets.specs.plugins import plugin
from etpi_assets.specs.rollout_set import ENGINE_KINDS, EngineSection
from etpi_assets.tasks.family import Family
from etpi_assets.worlds.arithmetic_tiny.policy import ArithmeticSkill, ArithmeticTinyPolicy
from etpi_assets.worlds.coop_tiny_shared.policy import CoopTinySharedPolicy, SharedSkill
from etpi_assets.worlds.repo_fix_tiny.policy import RepoFixPolicy, RepoFixSkill
from etpi_assets.worlds.running_sum.policy import RunningSumPolicy
from etpi_assets.worlds.terminal_tiny.policy import TerminalSkill, TerminalTinyPolicy
from etpi_resources.engines import Engine, Request
from etpi_resources.engines.scripted import Policy, ScriptedEngine
from etpi_resources.lake.lake import Lake


def reference_policy(family: Family) -> Policy:
    """Return a policy that runs the commands of the task's solution, one per turn, then submits (`next_turn`).

    The solution is in the text of the turns, so `max_tokens` and `max_model_len` must have room for it.
    """

    def policy(request: Request) -> str:
        return next_turn(request, family.solve(request.privileged["task"], request.privileged["role"]))

    return policy


def null_policy(request: Request) -> str:
    """Submit at once."""
    return next_turn(request, [])


if TYPE_CHECKING:
    from etpi_resources.chat.format import ChatFormat

SCRIPTED_KINDS = ("scripted", "reference", "null")

POLICIES: Mapping[str, Callable[[Mapping[str, float], int], Policy]] = {
    "coop_tiny_shared": lambda skill, seed: CoopTinySharedPolicy(SharedSkill.of(skill), seed),
    "repo_fix_tiny": lambda skill, seed: RepoFixPolicy(RepoFixSkill.of(skill), seed),
    "running_sum": lambda skill, seed: RunningSumPolicy(skill),
    "arithmetic_tiny": lambda skill, seed: ArithmeticTinyPolicy(ArithmeticSkill.of(skill), seed),
    "terminal_tiny": lambda skill, seed: TerminalTinyPolicy(TerminalSkill.of(skill), seed),
}
"""Suite family -> (skill, seed) -> scripted policy. A plugin's family has a method `scripted_policy` instead."""


def make_engine(
    section: EngineSection,
    family_name: str,
    family: Family,
    chat: ChatFormat,
    seed: int,
    lake: Lake,
    context: int | None = None,
) -> Engine:
    """Open the engine of a rollout set whose suite has that family; the caller closes it.

    Args:
        context: most tokens of a request's prompt and output together, for a server that is started.

    Raises:
        SpecError: the family has no scripted policy, or the skill has an unknown key.
        LakeError, PathError, EngineUnavailable: as `models.model_engine`.
    """
    if section.kind == "reference":
        return ScriptedEngine(reference_policy(family), chat, section.teacher, settings={"policy": "reference"})
    if section.kind == "null":
        return ScriptedEngine(null_policy, chat, section.teacher, settings={"policy": "null"})
    if named := plugin("engine", section.kind, ENGINE_KINDS):
        return named.load()(section, chat)
    if section.kind == "scripted":
        policy_of = POLICIES.get(family_name) or getattr(family, "scripted_policy", None)
        if policy_of is None:
            raise SpecError(
                f'engine.kind = "scripted": the family {family_name!r} has no policy, only {sorted(POLICIES)} have; '
                'use engine.kind = "reference", or a model'
            )
        try:
            policy = policy_of(section.skill, seed)
        except ValueError as error:
            raise SpecError(str(error)) from None
        settings = {"policy": family_name, "skill": dict(section.skill), "seed": seed}
        return ScriptedEngine(policy, chat, section.teacher, settings=settings, noncanonical=section.noncanonical)
    return model_engine(section, chat, lake, context)
