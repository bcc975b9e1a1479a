"""The three terminal rewards, hardened: form, relevance and conciseness of one command.

Text that only looks right earns nothing. So does a turn that would be the same for every request: one that runs
nothing with an argument of the request, or mostly verbs that the request does not ask for. The functions
`*_unhardened` are the rewards as their source states them. They can be hacked: train on them only to show that.

Limits: a command that runs the right verb on a wrong file of the request, or without effect (`wc --help a.txt`), still
earns relevance; so does one behind a command that fails on this machine (`ls nosuch &&`, `< nosuch`) or that waits.
One that names the file by a variable or a pattern alone, or works with another program than the requested verb (`awk`
to count), earns nothing. Only the outcome shows the difference, so the shares parsed, relevant and solved are reported
side by side.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from etpi_assets.agent.contract import Contract, read_contract
from etpi_assets.scoring.rewards.attempt import Attempt
from etpi_assets.scoring.rewards.shell import Pipeline, sure_pipelines

KEYWORDS: Mapping[str, Sequence[str]] = {
    "docker": ("docker", "container", "image"),
    "find": ("find", "locate"),
    "grep": ("grep", "search", "matching"),
    "tar": ("tar", "archive", "compress", "pack"),
    "wc": ("count", "how many"),
}
"""Command verb -> words of a request that ask for it. The verbs are the source's; we chose the words."""

_COMMON = frozenset(
    """
    a all also an and are as at be by containers copy count delete directory do each every file files find first folder
    for from has have how in into is it its last line lines list locate many me move name names number of on one only
    or out path paths please print put remove run search show sort start stop that the their them then there these this
    those to two unpack use what where which with word words you your
    """.split()  # noqa: SIM905 - words read better as text
)
"""Words of a request that name no argument: a turn that is the same for every request could hold them."""


def form(attempt: Attempt, *, keywords: Mapping[str, Sequence[str]] = KEYWORDS) -> float:
    """Return 1.0 if the turn follows the contract, adds nothing to it and serves the request, else 0.0.

    It serves the request if it runs something with an argument of it, and if at least half of its verbs are requested:
    `find src | wc -l` may count files.
    """
    return float(_service(attempt, keywords).share >= 0.5)


def relevance(attempt: Attempt, *, keywords: Mapping[str, Sequence[str]] = KEYWORDS) -> float:
    """Count the requested verbs that run with an argument of the request, times their share of all verbs that run.

    0.0 if the turn violates the contract.

    Args:
        keywords: command verb -> words or phrases of a request that ask for it (whole words, case folded).
    """
    service = _service(attempt, keywords)
    return service.verbs * service.share


def conciseness(
    attempt: Attempt, *, free: int = 300, scale: int = 300, keywords: Mapping[str, Sequence[str]] = KEYWORDS
) -> float:
    """Return 1.0 up to `free` characters, falling to 0.0 over the next `scale`; 0.0 where `form` is 0.0.

    Silence therefore earns nothing.
    """
    return shortness(attempt.known("text"), free, scale) if form(attempt, keywords=keywords) else 0.0


def shortness(text: str, free: int, scale: int) -> float:
    """Return max(0, 1 - max(0, chars - free) / scale)."""
    return max(0.0, 1.0 - max(0, len(text) - free) / scale)


def requested_verbs(request: str, keywords: Mapping[str, Sequence[str]]) -> set[str]:
    folded = request.casefold()
    return {
        verb
        for verb, words in keywords.items()
        if any(re.search(rf"(?<!\w){re.escape(word.casefold())}(?!\w)", folded) for word in words)
    }


def run_verbs(command: str) -> list[str]:
    """Return the programs that a bash command surely runs by its top-level simple commands, in order.

    Names in comments, arguments, heredocs and quoted text do not count; `sudo`, assignments and keywords are skipped.
    """
    return [program for pipeline in sure_pipelines(command) for program in pipeline.programs if program]


@dataclass(frozen=True)
class _Service:
    """The verbs of a turn that serve its request.

    Attributes:
        verbs: number of requested verbs that surely run with an argument of the request.
        share: their share of all verbs that surely run. If no verb is requested: 1.0 if anything runs with an argument.
    """

    verbs: int
    share: float


def _service(attempt: Attempt, keywords: Mapping[str, Sequence[str]]) -> _Service:
    """Return how a turn serves its request; nothing if the turn violates the contract.

    An argument is a word of the request, or a part of a path in it, that neither asks for a verb nor is a number or a
    common word. If the request has none, every pipeline that surely runs serves it.
    """
    contract = read_contract(attempt.known("text"))
    if not isinstance(contract, Contract):
        return _Service(0, 0.0)
    asking = _parts(" ".join([*keywords, *(word for words in keywords.values() for word in words)]))
    arguments = {part for part in _parts(attempt.known("request")) - asking - _COMMON if not part.isdigit()}
    pipelines = list(sure_pipelines(contract.command))
    serving = [pipe for pipe in pipelines if not arguments or arguments & _parts(pipe.text)]
    if not (requested := requested_verbs(attempt.known("request"), keywords)):
        return _Service(0, float(bool(serving)))
    verbs = requested & _programs(serving)
    return _Service(len(verbs), len(verbs) / max(1, len(_programs(pipelines) & keywords.keys())))


def _programs(pipelines: Iterable[Pipeline]) -> set[str]:
    return {program for pipeline in pipelines for program in pipeline.programs}


def _parts(text: str) -> set[str]:
    """Return the words of a text, and those of its paths, in lower case."""
    return {part for word in re.findall(r"[\w.-]+", text) if (part := word.strip(".-").casefold())}


_MIDDLE = re.compile(r"</thinking>\s*```bash\n")


def form_unhardened(attempt: Attempt) -> float:
    r"""Return 1.0 if `^<thinking>\s*[\s\S]+?\s*</thinking>\s*```bash\n[\s\S]+?\n```$` matches, else 0.0.

    Blank thinking, repeated tags and a trailing newline pass. The parts are sought one by one, since the pattern itself
    takes time that grows with the cube of blanks.
    """
    text = attempt.known("text").removesuffix("\n")
    middle = _MIDDLE.search(text, len("<thinking>") + 1)
    closed = middle is not None and text.endswith("\n```") and len(text) - len("\n```") > middle.end()
    return float(closed and text.startswith("<thinking>"))


def relevance_unhardened(attempt: Attempt, *, keywords: Mapping[str, Sequence[str]] = KEYWORDS) -> float:
    """Count the requested verbs that occur anywhere in the answer, comments and echo included."""
    text, verbs = attempt.known("text"), requested_verbs(attempt.known("request"), keywords)
    return float(sum(re.search(rf"\b{re.escape(verb)}\b", text) is not None for verb in verbs))


def conciseness_unhardened(attempt: Attempt, *, free: int = 300, scale: int = 300) -> float:
    """Score as the hardened function does, without the contract: an empty answer earns 1.0."""
    return shortness(attempt.known("text"), free, scale)
