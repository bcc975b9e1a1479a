"""The engine that generates from weights that no spec names: served checkpoints, and a policy in training.

Engines whose model a spec names are in `rollout_set.EngineSection`.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from etpi_assets.specs.section import Omitted, Section
from etpi_resources.engines.vllm_options import require_allowed


class ServerSection(Section):
    """The engine, and the options it starts with."""

    engine: Literal["transformers", "vllm"] = "transformers"
    """The generating program: `transformers`, in the process with the weights, or a `vllm` server that etpi starts."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Options of `vllm serve`, for `engine = "vllm"` alone; among them the tool and reasoning parsers."""
    allow_code: Annotated[bool, Omitted(False)] = False
    """Take `options` that run code of the model's folder or of other files; also start with `etpi run --allow-code`."""

    @model_validator(mode="after")
    def _options_are_read(self) -> ServerSection:
        if self.options and self.engine == "transformers":
            raise ValueError('options are of `vllm serve`: they need engine = "vllm" or "auto" beside them')
        require_allowed(self.options, self.allow_code)
        return self
