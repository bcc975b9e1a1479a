"""Generate terminal tasks: a few text files, a request, the command that solves it, and the resulting files.

The payload of a task (JSON):
    files: {path: text}, the agent's start files
    verb, command: the program that the request needs, and a command that solves it
    left: {path: text, or null if the file must be removed}: the changed files after the command
    unordered: whether lines may be in any order
    names: paths and words of the request
    why_unproven: of requests that no sandbox can run, why they have no verdict
"""

from __future__ import annotations

import io
import random
import tarfile
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

from etpi_assets.tasks.family import WHY_UNPROVEN, Task
from etpi_assets.worlds.names import NameGenerator

REPOS: Mapping[str, tuple[str, ...]] = {
    "train": ("alder", "birch", "cedar", "ebony", "hazel", "larch", "maple", "olive"),
    "heldout": ("rowan", "sumac", "walnut"),
}
"""Split -> machines, used as repositories."""


@dataclass(frozen=True)
class RequestContext:
    """Parameters of a request: a folder, a source file in it, an output file, a word of the source, a small number."""

    folder: str
    source: str
    out: str
    word: str
    number: int
    files: Mapping[str, str]

    @property
    def lines(self) -> list[str]:
        return self.files[self.source].splitlines()


@dataclass(frozen=True)
class RequestKind:
    """One kind of request: verb, wordings, command, and `text`, which returns the expected content of `out`.

    Attributes:
        removes: the command removes the source and writes nothing.
        packed: the files are in an archive, `{archive}`, at the start.
        unpacks: the command puts the files of the archive beside it, and writes nothing else.
        why_unproven: why the command cannot be judged by its files; it then writes nothing.
    """

    verb: str
    wordings: tuple[str, ...]
    command: str
    text: Callable[[RequestContext], str]
    unordered: bool = False
    removes: bool = False
    packed: bool = False
    unpacks: bool = False
    why_unproven: str | None = None

    def start(self, context: RequestContext) -> dict[str, str]:
        """Return the agent's start files."""
        return {_archive(context): _packed(context.files)} if self.packed else dict(context.files)

    def left(self, context: RequestContext) -> dict[str, str | None]:
        """Return the changed files; None for one that must be removed."""
        if self.why_unproven:
            return {}
        if self.unpacks:
            return dict(context.files)
        return {context.source: None} if self.removes else {context.out: self.text(context)}


def _archive(context: RequestContext) -> str:
    return f"{context.out}.tar"


def _packed(files: Mapping[str, str]) -> str:
    """Return a tar archive of ASCII texts, itself ASCII."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.USTAR_FORMAT) as archive:
        for path, text in files.items():
            entry = tarfile.TarInfo(path)
            entry.size = len(text)
            archive.addfile(entry, io.BytesIO(text.encode("ascii")))
        size = archive.offset + 2 * tarfile.BLOCKSIZE  # two empty blocks end an archive; more only fill a tape's record
    return buffer.getvalue()[:size].decode("ascii")


def _joined(lines: list[str]) -> str:
    return "".join(f"{line}\n" for line in lines)


_TEXTS: Mapping[str, Callable[[RequestContext], str]] = {
    "nothing": lambda s: "",
    "line_count": lambda s: f"{len(s.lines)}\n",
    "matches": lambda s: _joined([line for line in s.lines if s.word in line]),
    "match_count": lambda s: f"{sum(s.word in line for line in s.lines)}\n",
    "sorted": lambda s: _joined(sorted(s.lines)),
    "head": lambda s: _joined(s.lines[: s.number]),
    "tail": lambda s: _joined(s.lines[-s.number :]),
    "paths": lambda s: _joined(sorted(path for path in s.files if path.startswith(f"{s.folder}/"))),
    "path_count": lambda s: f"{len(s.files)}\n",
    "members": lambda s: _joined(list(s.files)),
    "copy": lambda s: s.files[s.source],
}
"""Name -> the content of `out` after the command."""


def _kind(row: Mapping[str, Any]) -> RequestKind:
    return RequestKind(**{**row, "wordings": tuple(row["wordings"]), "text": _TEXTS[row.get("text", "nothing")]})


_ROWS = tomllib.loads(Path(__file__).with_name("kinds.toml").read_text("utf-8"))
KINDS, PUBLISHED_KINDS = (tuple(map(_kind, _ROWS[name])) for name in ("files", "published"))
"""The requests of a suite's params `requests`."""

KEYWORDS: Mapping[str, tuple[str, ...]] = {
    "wc": ("count",), "grep": ("search",), "sort": ("sort",), "head": ("first",), "tail": ("last",),
    "find": ("find",), "cp": ("copy",), "rm": ("remove",),
}  # fmt: skip
"""Verb -> its keyword in a request; a spec gives the relevance reward the same map."""


def generate_tasks(suite: str, seed: int, split: str, kinds: Sequence[RequestKind] = KINDS) -> Iterator[Task]:
    """Yield tasks of a split ("train" or "heldout") without end, deterministic in (suite, seed, split, index).

    Kinds and machines alternate, and each split has its own pool of names.
    """
    repos = REPOS[split]
    for index in count():
        rng = random.Random(f"{suite}/{seed}/{split}/{index}")
        kind = kinds[index % len(kinds)]
        payload, instruction = _payload(kind, _context(rng, heldout=split == "heldout"), rng)
        repo = repos[index // len(kinds) % len(repos)]
        yield Task.hashed(f"{suite}-{split}-{index:05d}", suite, repo, split, instruction, payload)


def command_of(kind: RequestKind, payload: Mapping[str, Any]) -> str:
    """Return the command of a kind of request for the files of a task."""
    return kind.command.format(**payload["slots"])


def _context(rng: random.Random, *, heldout: bool) -> RequestContext:
    names = NameGenerator(rng, heldout=heldout)
    folder, source, neighbour, out = (names.directory() for _ in range(4))
    words = [names.directory() for _ in range(4)]
    files = {}
    for path in (f"{folder}/{source}", f"{folder}/{neighbour}"):
        lines = [" ".join(rng.sample(words, k=2)) for _ in range(rng.randint(5, 8))]
        # Sorted lines would make `sort` a plain copy.
        while lines == sorted(lines):
            rng.shuffle(lines)
        files[path] = _joined(lines)
    path = f"{folder}/{source}"
    word = rng.choice(sorted(set(files[path].split())))
    return RequestContext(folder, path, out, word, rng.randint(2, 4), files)


def _payload(kind: RequestKind, context: RequestContext, rng: random.Random) -> tuple[dict[str, Any], str]:
    slots = {
        "folder": context.folder,
        "source": context.source,
        "out": context.out,
        "word": context.word,
        "number": context.number,
    }
    if kind.packed:
        slots["archive"] = _archive(context)
    instruction = rng.choice(kind.wordings).format(**slots)
    payload = {
        "files": kind.start(context),
        "verb": kind.verb,
        "command": kind.command.format(**slots),
        "left": kind.left(context),
        "unordered": kind.unordered,
        "slots": slots,
        "names": [str(value) for key, value in slots.items() if key != "number" and str(value) in instruction],
    }
    if kind.why_unproven:
        payload[WHY_UNPROVEN] = kind.why_unproven
    return payload, instruction
