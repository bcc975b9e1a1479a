"""Search outputs and observations of agents for a text, bounded so that it answers in time on any lake.

The files of the turns are read a row group at a time, in the order of the lake, until a page of rollouts is full or
the time limit of a click is reached. The result says how much was searched and where the next search continues.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from etpi_resources.lake.lake import Lake

ORIGINS = {"eval_rollouts": "eval", "raw_rollouts": "set", "rl_checkpoint": "rl"}
"""The assets that have turns, in the order of the search, and the origin of their rollouts."""
COLUMNS = ("content", "observation")
SECONDS = 0.45
ROLLOUTS = 50
AROUND = 60
"""Characters of a snippet before and after the text."""


@dataclass(frozen=True)
class Hit:
    """The first turn of a rollout that has the text, which is between `before` and `after`."""

    origin: str
    made_for: str
    rollout_id: str
    agent_id: str
    turn: int
    before: str
    text: str
    after: str


@dataclass(frozen=True)
class Searched:
    """Hits, a rollout each; `resume` names the place to go on from, None at the end of the lake.

    Attributes:
        turns: turns searched so far, those of the clicks before included.
        all_turns: turns of the files that the filters leave.
    """

    hits: list[Hit]
    resume: str | None
    turns: int
    all_turns: int


_File = tuple[str, str, Path]
"""Origin, rollout set or experiment, and path of a file of turns."""


def search(
    lake: Lake,
    text: str,
    after: str | None = None,
    *,
    origin: str | None = None,
    made_for: str | None = None,
    experiment: str | None = None,
    allowed: frozenset[str] | None = None,
    seconds: float = SECONDS,
) -> Searched:
    """Search the current turns for a text, without regard to upper and lower case.

    Args:
        after: `resume` of the search before.
        origin, made_for, experiment: search these rollouts only.
        allowed: ids of the rollouts that other filters leave; None: all.
    """
    files = [
        (of, key, path)
        for of, key, path in _files(lake)
        if origin in (None, of)
        and made_for in (None, key)
        and (experiment is None or (of != "set" and key == experiment))
    ]
    end = time.monotonic() + seconds
    start, group = _place(after)
    hits: dict[tuple[str, str, str], Hit] = {}
    sizes = [pq.read_metadata(path).num_rows for _, _, path in files]
    for number in range(start, len(files)):
        with pq.ParquetFile(files[number][2]) as opened:
            for place in range(group if number == start else 0, opened.num_row_groups):
                if time.monotonic() > end or len(hits) >= ROLLOUTS:
                    before = sum(opened.metadata.row_group(g).num_rows for g in range(place))
                    return Searched(list(hits.values()), f"{number}.{place}", sum(sizes[:number]) + before, sum(sizes))
                for hit in _hits(opened, place, files[number], text, allowed):
                    hits.setdefault((hit.origin, hit.made_for, hit.rollout_id), hit)
    return Searched(list(hits.values()), None, sum(sizes), sum(sizes))


def _files(lake: Lake) -> list[_File]:
    return [
        (origin, ref.key, path)
        for asset, origin in ORIGINS.items()
        for ref in lake.refs(asset)
        if (manifest := lake.current(ref)) and "turns" in manifest.tables
        for path in lake.files_of(manifest, "turns")
    ]


def _place(after: str | None) -> tuple[int, int]:
    if after and (match := re.fullmatch(r"(\d{1,6})\.(\d{1,9})", after)):
        return int(match[1]), int(match[2])
    return 0, 0


def _hits(opened: pq.ParquetFile, group: int, file: _File, text: str, allowed: frozenset[str] | None) -> Iterator[Hit]:
    texts = opened.read_row_group(group, columns=list(COLUMNS))
    masks = [pc.match_substring(texts[name], text, ignore_case=True).fill_null(False) for name in COLUMNS]  # pyright: ignore[reportAttributeAccessIssue]
    mask = pc.or_(*masks)  # pyright: ignore[reportAttributeAccessIssue]
    if not pc.any(mask).as_py():  # pyright: ignore[reportAttributeAccessIssue]
        return
    keys = opened.read_row_group(group, columns=["rollout_id", "agent_id", "turn"])
    places = pa.array(range(len(texts))).filter(mask.combine_chunks())
    for place in places.to_pylist():
        if allowed is not None and keys["rollout_id"][place].as_py() not in allowed:
            continue
        content, observation = (texts[name][place].as_py() or "" for name in COLUMNS)
        rollout_id, agent_id, turn = (keys[name][place].as_py() for name in ("rollout_id", "agent_id", "turn"))
        before, shown, after = _snippet(content, observation, text)
        yield Hit(*file[:2], rollout_id, agent_id, turn, before, shown, after)


def _snippet(content: str, observation: str, text: str) -> tuple[str, str, str]:
    for candidate in (content, observation):
        place = candidate.lower().find(text.lower())
        if place >= 0:
            end = place + len(text)
            return candidate[max(0, place - AROUND) : place], candidate[place:end], candidate[end : end + AROUND]
    return "", text, ""
