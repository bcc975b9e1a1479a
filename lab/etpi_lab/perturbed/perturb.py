"""Variants of a task: other names for its files and functions, the features perhaps in another order.

A small pool is memorised: its names, and which files belong to which request. A student that has seen a request under
many names has to read the names from its prompt.
"""

from __future__ import annotations

import builtins
import keyword
import random
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from etpi_assets.tasks.family import Task
from etpi_resources.hashes import json_hash

_WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+")
"""A word in prose or in an identifier of any style: `HTTPServer`, `http_server` and `httpServer` have the same two."""
_PATH = re.compile(r"(?:[\w.-]+/)+[\w-]+\.[A-Za-z]{1,5}")
_SHORTEST = 4
"""Shorter words keep their meaning in too many places."""

_KEPT = frozenset(
    {
        *(word.lower() for word in (*keyword.kwlist, *dir(builtins))),
        *("test", "tests", "docs", "init", "main", "setup", "conftest", "readme", "changelog", "pyproject"),
        *("json", "toml", "yaml", "html", "java", "rust", "self", "this", "that", "with", "from", "when", "then"),
        *("each", "into", "only", "also", "must", "will", "after", "before", "which", "should", "have"),
    }
)
"""Words that the language, its tools or the sentences around them need."""

_NAMES = re.findall(
    r"\w+",
    """
    acorn amber anchor anvil apricot arrow aspen badger bamboo barley basalt beacon birch bison bobbin boulder
    bramble brass bridge bronze buckle cactus candle canoe canyon cedar cello chalk cherry chimney cinder citron
    clover cobalt comet copper coral cotton crane crater cricket crystal cypress dahlia delta dolphin drum dune
    eagle ember falcon fern ferry fjord flint forge fossil fountain garnet geyser ginger glacier granite gravel
    grove gull hammer harbor hazel heron hickory hollow iris island ivory jasmine jasper juniper kelp kernel kettle
    lagoon lantern larch lark laurel ledger lemon lichen lilac linen lotus magnet maple marble meadow mint mirror
    moss nectar needle nickel nutmeg oasis olive onyx opal orchard otter oxbow paddle pebble pepper pewter pigeon
    pine plaza plum pollen poppy prairie prism quarry quartz quill raven reef ribbon river robin rocket saddle
    saffron sage salmon sandal sequoia shale silo slate sorrel sparrow spruce stork stove sumac summit tallow tannin
    thicket thistle timber topaz tulip tundra turbine umber valley velvet violet walnut willow yarrow zephyr zinnia
    """,
)


def perturb(task: Task, number: int) -> Task:
    """Return variant `number`, from 1, of a task of two features: a function of the task and the number.

    Args:
        task: its payload has "features", "texts" by feature and "entities"; other values are kept.
    """
    rng = random.Random(f"{task.content_hash}/{number}")
    features, texts = list(task.payload["features"]), task.payload["texts"]
    names = _new_names([*task.payload["entities"], *_PATH.findall("\n".join(texts.values()))], texts.values(), rng)
    if rng.random() < 0.5:
        features.reverse()
    payload: dict[str, Any] = {
        **task.payload,
        "features": features,
        "texts": {feature: rename(text, names) for feature, text in texts.items()},
        "entities": sorted({rename(entity, names) for entity in task.payload["entities"]}),
        "variant_of": task.task_id,
    }
    instruction = rename(task.instruction, names)
    digest = json_hash([payload, instruction])
    return replace(
        task, task_id=f"{task.task_id}~{number}", instruction=instruction, payload=payload, content_hash=digest
    )


def rename(text: str, names: Mapping[str, str]) -> str:
    """Replace every word of `names` (lower case) in a text, in the case that it stands in."""

    def other(match: re.Match[str]) -> str:
        word = match[0]
        new = names.get(word.lower())
        if new is None:
            return word
        return new.upper() if len(word) > 1 and word.isupper() else new.capitalize() if word[0].isupper() else new

    return _WORD.sub(other, text)


def _new_names(identifiers: Iterable[str], texts: Iterable[str], rng: random.Random) -> dict[str, str]:
    """Return a new word, which no text has, for each word of the identifiers that may change; no two share one."""
    words = {word.lower() for identifier in identifiers for word in _WORD.findall(identifier)}
    old = sorted(word for word in words if len(word) >= _SHORTEST and word not in _KEPT)
    present = {word.lower() for text in texts for word in _WORD.findall(text)} | words
    return dict(zip(old, _fresh(present, len(old), rng), strict=True))


def _fresh(present: set[str], count: int, rng: random.Random) -> Sequence[str]:
    new = [name for name in _NAMES if name not in present]
    if len(new) < count:
        new += [a + b for a in _NAMES for b in _NAMES if a != b and a + b not in present]
    return rng.sample(new, count)
