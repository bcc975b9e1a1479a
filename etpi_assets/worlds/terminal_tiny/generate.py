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
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count
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
    text: Callable[[RequestContext], str] = lambda context: ""
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


KINDS: tuple[RequestKind, ...] = (
    RequestKind(
        "wc", ("Count the lines of {source} into {out}.",), "wc -l < {source} > {out}", lambda s: f"{len(s.lines)}\n"
    ),
    RequestKind(
        "grep",
        ("Search {source} for {word}, lines into {out}.",),
        "grep {word} {source} > {out}",
        lambda s: _joined([line for line in s.lines if s.word in line]),
    ),
    RequestKind(
        "sort", ("Sort the lines of {source} into {out}.",), "sort {source} > {out}", lambda s: _joined(sorted(s.lines))
    ),
    RequestKind(
        "head",
        ("Put the first {number} lines of {source} into {out}.",),
        "head -n {number} {source} > {out}",
        lambda s: _joined(s.lines[: s.number]),
    ),
    RequestKind(
        "tail",
        ("Put the last {number} lines of {source} into {out}.",),
        "tail -n {number} {source} > {out}",
        lambda s: _joined(s.lines[-s.number :]),
    ),
    RequestKind(
        "find",
        ("Find the files of {folder}, paths into {out}.",),
        "find {folder} -type f > {out}",
        lambda s: _joined(sorted(path for path in s.files if path.startswith(f"{s.folder}/"))),
        unordered=True,
    ),
    RequestKind("cp", ("Copy {source} to {out}.",), "cp {source} {out}", lambda s: s.files[s.source]),
    RequestKind("rm", ("Remove {source}.",), "rm {source}", removes=True),
)


def _also_worded(verb: str, wording: str) -> RequestKind:
    """Return the kind of KINDS for a verb with another wording besides its own."""
    kind = next(kind for kind in KINDS if kind.verb == verb)
    return replace(kind, wordings=(*kind.wordings, wording))


_NO_DAEMON = "no_reference: a sandbox has no docker daemon"

PUBLISHED_KINDS: tuple[RequestKind, ...] = (
    RequestKind("docker", ("List the docker containers into {out}.",), "docker ps -a > {out}", why_unproven=_NO_DAEMON),
    _also_worded("find", "Locate every file of {folder}, paths into {out}."),
    _also_worded("grep", "Put the lines of {source} matching {word} into {out}."),
    RequestKind("tar", ("Unpack the archive {archive}.",), "tar -xf {archive}", packed=True, unpacks=True),
    _also_worded("wc", "How many lines has {source}? Put the number into {out}."),
    RequestKind("docker", ("Start a container of the image {word}.",), "docker run -d {word}", why_unproven=_NO_DAEMON),
    RequestKind(
        "find",
        ("Find the files of {folder} and count them into {out}.",),
        "find {folder} -type f | wc -l > {out}",
        lambda s: f"{len(s.files)}\n",
    ),
    RequestKind(
        "grep",
        ("Search {source} for {word} and count the lines into {out}.",),
        "grep {word} {source} | wc -l > {out}",
        lambda s: f"{sum(s.word in line for line in s.lines)}\n",
    ),
    RequestKind(
        "tar",
        ("List the paths in the archive {archive} into {out}.",),
        "tar -tf {archive} > {out}",
        lambda s: _joined(list(s.files)),
        packed=True,
    ),
    RequestKind("docker", ("Stop the container {word}.",), "docker stop {word}", why_unproven=_NO_DAEMON),
)
"""Requests for the programs that the published relevance reward names, some of them for two at once."""

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
