"""Which engine generates from weights that the spec does not name: checkpoints that are served, a policy in training.

Belongs here: the choice and the options of a server that is started for it. Does not belong here: engines whose model a
spec names (`rollout_set.EngineSection`), or starting one.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, model_validator

from etpi_assets.specs.section import Section


class ServerSection(Section):
    """What generates, and how it is started."""

    engine: Literal["transformers", "vllm"] = Field(
        default="transformers", description="in the process that holds the weights, or by a vLLM started here"
    )
    options: dict[str, Any] = Field(
        default_factory=dict, description="vllm: options of `vllm serve`, its parsers among them"
    )

    @model_validator(mode="after")
    def _options_are_read(self) -> ServerSection:
        if self.options and self.engine != "vllm":
            raise ValueError('options are of `vllm serve`: they need engine = "vllm" beside them')
        return self
