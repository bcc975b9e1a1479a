"""What every table of a spec has in common.

Belongs here: how a table reads "none" and refuses what it does not know. Does not belong here: any knob.
"""

from __future__ import annotations

from typing import Any, get_args

from pydantic import BaseModel, ConfigDict, model_validator


class Section(BaseModel):
    """A table of a spec. TOML has no null: the word "none" stands for it wherever a value may be absent, as in
    `evaluate = "none"`, `select.min_reward = "none"` or `tasks = "none"`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    @model_validator(mode="before")
    @classmethod
    def _none_is_null(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        optional = {name for name, field in cls.model_fields.items() if type(None) in get_args(field.annotation)}
        return {key: None if value == "none" and key in optional else value for key, value in values.items()}
