"""Facts of published models, from `models.toml`: vocabularies, templates, sizes, and settings of small models."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from typing import Any

_FACTS = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
ARCHITECTURES = tuple(name for name, facts in _FACTS["architecture"].items() if "like" not in facts)
"""The values of `model_type` that can be rehearsed."""


def family(repository: str) -> Mapping[str, str] | None:
    """Return `vocabulary` and `template` of a repository, None if they are not known."""
    return next((facts for facts in _FACTS["family"] if fnmatchcase(repository, facts["repository"])), None)


def rehearsed_as(kind: str) -> str:
    """Return the architecture that is rehearsed in place of one."""
    return _FACTS["architecture"].get(kind, {}).get("like", kind)


@cache
def small_settings(kind: str, vocabulary: int) -> Mapping[str, Any]:
    """Return the settings of a small model of an architecture, beside the sizes that all have.

    Args:
        vocabulary: the number of its ids.
    """
    facts = _FACTS["architecture"][kind]
    settings = {**(_FACTS["architecture"][facts["base"]]["small"] if "base" in facts else {}), **facts["small"]}
    named = {facts["vocabulary_size"]: vocabulary} if "vocabulary_size" in facts else {}
    return {key: None if value == "none" else value for key, value in settings.items()} | named


def published_facts(repository: str) -> Mapping[str, Any]:
    """Return sizes, gigabytes and licence of a published model; nothing if it is not known."""
    return _FACTS["size"].get(repository, {})


def published_config(repository: str) -> Mapping[str, Any] | None:
    """Return the configuration of a published model as its config.json has it; None if its sizes are not known."""
    if not (size := published_facts(repository)):
        return None
    return {
        "model_type": size["kind"],
        "hidden_size": size["hidden"],
        "num_hidden_layers": size["layers"],
        "num_attention_heads": size["heads"],
        "num_key_value_heads": size["keys"],
        "intermediate_size": size["inner"],
        "tie_word_embeddings": size["hidden"] < 4096,
        **({"linear_num_value_heads": size["linear"]} if "linear" in size else {}),
        **_FACTS["architecture"][size["kind"]]["published"],
    }
