"""Open the engine of a rollout set's `[engine]` section: a scripted policy of its family, a model, or a plugin."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from etpi_assets import tiny_bases
from etpi_assets.agent.actions import next_turn
from etpi_assets.specs.load import SpecError
from etpi_assets.specs.paths import expand
from etpi_assets.specs.plugins import plugin
from etpi_assets.specs.rollout_set import ENGINE_KINDS, TINY, EngineSection
from etpi_assets.tasks.family import Family
from etpi_assets.worlds.arithmetic_tiny import ArithmeticSkill, ArithmeticTinyPolicy
from etpi_assets.worlds.coop_tiny_shared.policy import CoopTinySharedPolicy, SharedSkill
from etpi_assets.worlds.repo_fix_tiny.policy import RepoFixPolicy, RepoFixSkill
from etpi_assets.worlds.terminal_tiny.policy import TerminalSkill, TerminalTinyPolicy
from etpi_resources.backend import backend
from etpi_resources.checkpoints import HUB, LAKE, PACKAGE, pinned_folder
from etpi_resources.engines import Engine, Request
from etpi_resources.engines.scripted import Policy, ScriptedEngine
from etpi_resources.errors import require_torch
from etpi_resources.lake.lake import Lake

if TYPE_CHECKING:
    from etpi_resources.chat.format import ChatFormat


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


SCRIPTED_KINDS = ("scripted", "reference", "null")

POLICIES: Mapping[str, Callable[[Mapping[str, float], int], Policy]] = {
    "coop_tiny_shared": lambda skill, seed: CoopTinySharedPolicy(SharedSkill.of(skill), seed),
    "repo_fix_tiny": lambda skill, seed: RepoFixPolicy(RepoFixSkill.of(skill), seed),
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
        LakeError, PathError, EngineUnavailable: as `model_engine`.
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


def accelerated(section: EngineSection) -> bool:
    """Return whether the engine computes on this machine and so needs its accelerator alone.

    The vLLM servers of a cluster hold the accelerators of their own nodes.
    """
    return section.kind == "transformers" or (section.kind == "vllm" and not section.urls and backend() is None)


def model_engine(section: EngineSection, chat: ChatFormat, lake: Lake, context: int | None = None) -> Engine:
    """Open the engine of a model ("transformers", "vllm", "openai"); closing it stops the server started for it.

    Raises:
        LakeError: the model's files are missing or differ from the spec's; or etpi has no such tiny base.
        PathError: the model's path names a variable that is not set.
        PackageMissing: the engine runs in this process, and PyTorch is not installed.
        EngineUnavailable: no server answers or starts, or the API key is not set.
    """
    assert section.model
    if section.kind == "openai":
        return _chat_endpoint(section)
    if section.urls:
        return _remote_vllm(section, chat)
    model = _built(section, chat, lake) if section.model == TINY else section.model
    folder, identity = pinned_folder(
        lake, model if model.startswith((HUB, LAKE, PACKAGE)) else str(expand(model)), section.sha256
    )
    name = f"{section.teacher}-{identity[:12]}"
    if section.kind == "transformers":
        require_torch("engine.kind transformers")
        from etpi_resources.engines.transformers import TransformersEngine

        return TransformersEngine(folder, name, chat)
    return _local_vllm(section, chat, lake, folder, name, context)


def _chat_endpoint(section: EngineSection) -> Engine:
    from etpi_resources.engines.openai import OpenAIEngine

    assert section.model
    return OpenAIEngine(
        section.model,
        url=section.urls[0],
        key_env=section.api_key_env,
        timeout=section.timeout,
        template_kwargs=section.template_kwargs,
    )


def _local_vllm(
    section: EngineSection, chat: ChatFormat, lake: Lake, folder: Path, name: str, context: int | None
) -> Engine:
    from etpi_resources.engines.endpoints import Endpoints
    from etpi_resources.engines.vllm import VllmEngine
    from etpi_resources.engines.vllm_server import start_servers, with_context

    log, lock = lake.scratch("servers") / f"{name}.log", lake.machine_lock_file("server")
    servers = start_servers(folder, name, log=log, options=with_context(section.options, context), lock=lock)
    try:
        endpoints = Endpoints(
            servers.urls, key_env=servers.key_env, timeout=section.timeout, exit_reason=servers.exit_reason
        )

        def release() -> None:
            endpoints.close()
            servers.close()

        return VllmEngine(
            endpoints,
            name,
            chat,
            request=section.request,
            template_kwargs=section.template_kwargs,
            settings={"options": dict(section.options)},
            release=release,
        )
    except BaseException:
        servers.close()
        raise


def _built(section: EngineSection, chat: ChatFormat, lake: Lake) -> str:
    """Copy the section's tiny base to the lake, and return its name there."""
    assert section.tiny
    return f"{LAKE}{tiny_bases.adopt(tiny_bases.require(section.tiny, chat), lake, chat)}"


def _remote_vllm(section: EngineSection, chat: ChatFormat) -> Engine:
    from etpi_resources.engines.endpoints import Endpoints
    from etpi_resources.engines.vllm import VllmEngine

    assert section.model
    endpoints = Endpoints(section.urls, key_env=section.api_key_env, timeout=section.timeout)
    return VllmEngine(
        endpoints,
        section.model,
        chat,
        request=section.request,
        template_kwargs=section.template_kwargs,
        release=endpoints.close,
    )
