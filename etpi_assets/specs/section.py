"""Behaviour that all sections of a spec share: the word "none", unknown keys, keys left out of hashes, faults."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Self, get_args

from pydantic import (
    AfterValidator,
    AliasChoices,
    BaseModel,
    ConfigDict,
    SerializationInfo,
    SerializerFunctionWrapHandler,
    ValidationInfo,
    model_serializer,
    model_validator,
)

from etpi_resources.errors import ExpectedError


class SpecError(ExpectedError, ValueError):
    """A spec is invalid or does not exist; the message names the file, the key and the remedy."""


@dataclass(frozen=True)
class Omitted:
    """Marks a key that was added to a section after versions existed: `Annotated[int, Omitted(1)]`. Where its
    value is `at`, the resolved spec leaves the key out, so that specs that do not use it keep their hashes.

    Where `at` is not the default, a spec that is parsed from such a dump has another value. A dump that is parsed
    again, as that of a rehearsal, keeps these keys: `model_dump(context=PARSED_AGAIN)`.
    """

    at: Any


PARSED_AGAIN = {"parsed_again": True}


@dataclass(frozen=True)
class Operational:
    """Marks a key that changes no result, such as where progress is reported: `Annotated[bool, Operational()]`. The
    resolved spec never has it, so it is part of no hash, and setting it makes nothing stale."""


def _require_distinct(items: tuple[Any, ...]) -> tuple[Any, ...]:
    names = [getattr(item, "name", item) for item in items]
    if repeated := sorted({name for name in names if names.count(name) > 1}):
        raise ValueError(f"{', '.join(map(repr, repeated))} occurs twice; write each once")
    return items


DISTINCT = AfterValidator(_require_distinct)
"""Refuses a list that has a value, or a table's `name`, twice: the rollouts of both would be counted as one's."""


class Section(BaseModel):
    """A table of a spec. TOML has no null: the word "none" stands for it wherever a value may be absent, as in
    `evaluate = "none"`, `select.min_reward = "none"` or `tasks = "none"`.

    The docstring below a key is its description; docs/reference/specs.md and errors for unknown keys show it.

    A renamed key has its earlier name as second validation alias, which specs may still use, with a warning, and as
    serialization alias, so that the resolved spec and its hash stay.
    """

    model_config = ConfigDict(
        extra="forbid", frozen=True, use_attribute_docstrings=True, allow_inf_nan=False, serialize_by_alias=True
    )

    @model_validator(mode="before")
    @classmethod
    def _none_is_null(cls, values: Any, info: ValidationInfo) -> Any:
        if not isinstance(values, dict):
            return values
        for name, field in cls.model_fields.items() if info.context else ():
            earlier = isinstance(field.validation_alias, AliasChoices) and field.validation_alias.choices[1]
            if earlier in values:
                warnings.warn(f"{info.context}: {earlier} is now {name}", FutureWarning, stacklevel=2)
        optional = {name for name, field in cls.model_fields.items() if type(None) in get_args(field.annotation)}
        return {key: None if value == "none" and key in optional else value for key, value in values.items()}

    def faults(self) -> Iterator[str]:
        """Yield what is wrong with values that fit their keys, but not each other; the first is the section's error."""
        yield from ()

    @model_validator(mode="after")
    def _values_fit(self) -> Self:
        for fault in self.faults():
            raise ValueError(fault)
        return self

    @model_serializer(mode="wrap")
    def _without_omitted(self, handler: SerializerFunctionWrapHandler, info: SerializationInfo) -> dict[str, Any]:
        dumped = handler(self)
        for name, field in type(self).model_fields.items():
            value = getattr(self, name)
            needed = info.context == PARSED_AGAIN and value != field.get_default(call_default_factory=True)
            if any(
                isinstance(mark, Operational) or (isinstance(mark, Omitted) and value == mark.at and not needed)
                for mark in field.metadata
            ):
                dumped.pop(name, None)
        return dumped
