"""The three terminal rewards, hardened: form, relevance and conciseness of one command.

Belongs here: what DESIGN section 5 says of them, so that text which merely looks right earns nothing. Does not belong
here: the rewards as their source words them (`unhardened`), or whether a command does what was asked (the verdict).

What they still cannot see: a command that runs the right verb on the wrong thing, or to no effect (`wc --help`), earns
its relevance. Only the outcome tells that apart, so parsed, relevant and solved are reported side by side.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from etpi_assets.agent.bash import command_words
from etpi_assets.agent.contract import Contract, read_contract
from etpi_assets.scoring.rewards.attempt import Attempt, BadReward

KEYWORDS: Mapping[str, Sequence[str]] = {
    "docker": ("docker", "container", "image"),
    "find": ("find", "locate"),
    "grep": ("grep", "search", "matching"),
    "tar": ("tar", "archive", "compress", "pack"),
    "wc": ("count", "how many"),
}
"""Command verb -> words of a request that ask for it: the verbs that the source names, the words our reading."""

_WRAPPERS = frozenset(
    {"sudo", "time", "nohup", "exec", "env", "command", "!", "{", "then", "do", "else", "if", "while"}
)
_ASSIGNMENT = re.compile(r"[A-Za-z_]\w*=")


def form(attempt: Attempt) -> float:
    """1.0 where the turn keeps to the contract and adds nothing to it, else 0.0."""
    return float(isinstance(read_contract(words_of(attempt)), Contract))


def relevance(attempt: Attempt, *, keywords: Mapping[str, Sequence[str]] = KEYWORDS) -> float:
    """How many of the verbs that the request asks for stand in command position, each once; 0.0 out of form.

    Args:
        keywords: command verb -> words or phrases of a request that ask for it (whole words, case folded).
    """
    asked = asked_verbs(request_of(attempt), keywords)
    read = read_contract(words_of(attempt))
    return float(len(asked & set(run_verbs(read.command)))) if isinstance(read, Contract) else 0.0


def conciseness(attempt: Attempt, *, free: int = 300, scale: int = 300) -> float:
    """1.0 up to `free` characters, falling to 0.0 over the next `scale`; 0.0 out of form, so that silence earns
    nothing."""
    text = words_of(attempt)
    return shortness(text, free, scale) if isinstance(read_contract(text), Contract) else 0.0


def shortness(text: str, free: int, scale: int) -> float:
    """max(0, 1 - max(0, chars - free) / scale)."""
    return max(0.0, 1.0 - max(0, len(text) - free) / scale)


def asked_verbs(request: str, keywords: Mapping[str, Sequence[str]]) -> set[str]:
    """The verbs for which one of their keywords stands in the request."""
    folded = request.casefold()
    return {
        verb
        for verb, words in keywords.items()
        if any(re.search(rf"(?<!\w){re.escape(word.casefold())}(?!\w)", folded) for word in words)
    }


def run_verbs(command: str) -> list[str]:
    """The programs that a bash command's top-level simple commands run, in order: not what stands in comments,
    arguments, heredocs or quoted text. A path counts by its last part; `sudo`, assignments and keywords of the shell
    are passed over."""
    verbs = []
    for words in command_words(command):
        for word in words:
            bare = word.lstrip("(")
            if bare and bare not in _WRAPPERS and not _ASSIGNMENT.match(bare):
                verbs.append(bare.rsplit("/", 1)[-1])
                break
    return verbs


def words_of(attempt: Attempt) -> str:
    """The attempt's text; BadReward where it never arrived."""
    if attempt.text is None:
        raise BadReward(f"rollout {attempt.rollout_id} of task {attempt.task_id}: no text was recorded")
    return attempt.text


def request_of(attempt: Attempt) -> str:
    """The attempt's request; BadReward where it never arrived."""
    if not attempt.request:
        raise BadReward(f"rollout {attempt.rollout_id} of task {attempt.task_id}: the task's request never arrived")
    return attempt.request
