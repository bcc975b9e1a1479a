"""Models that act in a rollout set: from an `[engine]` section to an engine that serves one.

Belongs here: which files or servers a section means, and what must be closed after. Does not belong here: scripted
actors (`teachers`), the engines (`etpi_resources.engines`), or checkpoints of an experiment (`evaluation`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from etpi_assets.specs.paths import expand
from etpi_assets.specs.rollout_set import TINY, EngineSection
from etpi_assets.tiny_bases import recipe as tiny_base
from etpi_assets.versioning.keys import tiny_base_code
from etpi_resources.checkpoints import HUB, LAKE, pinned_folder
from etpi_resources.engines import Engine
from etpi_resources.lake.lake import Lake, LakeError

if TYPE_CHECKING:
    from etpi_resources.chat.format import ChatFormat

MODEL_KINDS = ("transformers", "vllm", "openai")


def accelerated(section: EngineSection) -> bool:
    """Whether the engine computes on this machine, which then is not free for another."""
    return section.kind == "transformers" or (section.kind == "vllm" and not section.urls)


def model_engine(section: EngineSection, chat: ChatFormat, lake: Lake) -> Engine:
    """The engine of a section of a kind in MODEL_KINDS; closing it ends what was started for it.

    Raises:
        LakeError: the model's files are not there, or are others than the spec's; or the tiny base learnt nothing.
        PathError: the model's path names a variable that is not set.
        EngineUnavailable: no server answers or can be started, or a key is not set.
    """
    assert section.model
    if section.kind == "openai":
        from etpi_resources.engines.openai import OpenAIEngine

        return OpenAIEngine(
            section.model,
            url=section.urls[0],
            key_env=section.api_key_env,
            timeout=section.timeout,
            template_kwargs=section.template_kwargs,
        )
    if section.urls:
        return _remote_vllm(section, chat)
    model = _built(section, chat, lake) if section.model == TINY else section.model
    folder, identity = pinned_folder(
        lake, model if model.startswith((HUB, LAKE)) else str(expand(model)), section.sha256
    )
    name = f"{section.teacher}-{identity[:12]}"
    if section.kind == "transformers":
        from etpi_resources.engines.transformers import TransformersEngine

        return TransformersEngine(folder, name, chat)
    from etpi_resources.engines.endpoints import Endpoints
    from etpi_resources.engines.vllm import VllmEngine
    from etpi_resources.engines.vllm_server import VllmServer

    log, lock = lake.scratch("servers") / f"{name}.log", lake.lock_file("server")
    server = VllmServer(folder, name, log=log, options=section.options, lock=lock)
    try:
        endpoints = Endpoints([server.url], timeout=section.timeout, exit_reason=server.exit_reason)

        def release() -> None:
            endpoints.close()
            server.close()

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
        server.close()
        raise


def _built(section: EngineSection, chat: ChatFormat, lake: Lake) -> str:
    """The name of the tiny base of the section, built where no experiment has built it yet."""
    assert section.tiny
    report = tiny_base.build(lake, section.tiny, chat, tiny_base_code(section.tiny, chat.name))
    if not (learnt := tiny_base.learnt(report)).passed:
        raise LakeError(f"the tiny base that is to roll out has not learnt its world: {learnt.message}")
    return f"{LAKE}{report['checkpoint_id']}"


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
