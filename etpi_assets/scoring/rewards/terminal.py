"""The three terminal rewards, hardened: form, relevance and conciseness of one command (DESIGN section 5).

Text that only looks right earns nothing, and neither does a turn that runs nothing with an argument of the request: the
same turn for every request would. `unhardened` holds the rewards as their source states them.

Limits: a command that runs the right verb on a wrong file of the request, or without effect (`wc --help a.txt`), still
earns relevance; one that names the file by a variable or a pattern alone earns nothing. Only the outcome shows the
difference, so the shares parsed, relevant and solved are reported side by side.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from etpi_assets.agent.contract import Contract, read_contract
from etpi_assets.scoring.rewards.attempt import Attempt, BadReward
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


def form(attempt: Attempt) -> float:
    """Return 1.0 if the turn follows the contract, adds nothing to it and runs something for the request, else 0.0."""
    return float(bool(_served(attempt)))


def relevance(attempt: Attempt, *, keywords: Mapping[str, Sequence[str]] = KEYWORDS) -> float:
    """Count the requested verbs that the command runs with an argument of the request, each once.

    0.0 if the turn violates the contract.

    Args:
        keywords: command verb -> words or phrases of a request that ask for it (whole words, case folded).
    """
    requested = requested_verbs(request_of(attempt), keywords)
    return float(len(requested & {program for pipeline in _served(attempt, keywords) for program in pipeline.programs}))


def conciseness(attempt: Attempt, *, free: int = 300, scale: int = 300) -> float:
    """Return 1.0 up to `free` characters, falling to 0.0 over the next `scale`; 0.0 where `form` is 0.0.

    Silence therefore earns nothing.
    """
    return shortness(text_of(attempt), free, scale) if _served(attempt) else 0.0


def shortness(text: str, free: int, scale: int) -> float:
    """Return max(0, 1 - max(0, chars - free) / scale)."""
    return max(0.0, 1.0 - max(0, len(text) - free) / scale)


def requested_verbs(request: str, keywords: Mapping[str, Sequence[str]]) -> set[str]:
    """Return the verbs with a keyword in the request."""
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


def _served(attempt: Attempt, keywords: Mapping[str, Sequence[str]] = KEYWORDS) -> list[Pipeline]:
    """Return the pipelines that surely run and have an argument of the request; none if the turn violates the contract.

    An argument is a word of the request, or a part of a path in it, that neither asks for a verb nor is a number or a
    common word. If the request has none, every pipeline that surely runs is returned.
    """
    contract = read_contract(text_of(attempt))
    if not isinstance(contract, Contract):
        return []
    asking = _parts(" ".join([*keywords, *(word for words in keywords.values() for word in words)]))
    arguments = {part for part in _parts(request_of(attempt)) - asking - _COMMON if not part.isdigit()}
    return [pipe for pipe in sure_pipelines(contract.command) if not arguments or arguments & _parts(pipe.text)]


def _parts(text: str) -> set[str]:
    """Return the words of a text, and those of its paths, in lower case."""
    return {part for word in re.findall(r"[\w.-]+", text) if (part := word.strip(".-").casefold())}


def text_of(attempt: Attempt) -> str:
    """Return the attempt's text; raises BadReward if none was recorded."""
    if attempt.text is None:
        raise BadReward(f"rollout {attempt.rollout_id} of task {attempt.task_id}: no text was recorded")
    return attempt.text


def request_of(attempt: Attempt) -> str:
    """Return the attempt's request; raises BadReward if none was recorded."""
    if not attempt.request:
        raise BadReward(f"rollout {attempt.rollout_id} of task {attempt.task_id}: the task's request is missing")
    return attempt.request
