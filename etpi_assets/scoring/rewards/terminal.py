"""The three terminal rewards, hardened: form, relevance and conciseness of one command (DESIGN section 5).

Text that only looks right earns nothing; `unhardened` holds the rewards as their source states them.

Limits: a command that runs the right verb on the wrong file, or without effect (`wc --help`), still earns relevance.
Only the outcome shows the difference, so the shares parsed, relevant and solved are reported side by side.
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
"""Command verb -> words of a request that ask for it. The verbs are the source's; we chose the words."""

_WRAPPERS = frozenset(
    {"sudo", "time", "nohup", "exec", "env", "command", "!", "{", "then", "do", "else", "if", "while"}
)
_ASSIGNMENT = re.compile(r"[A-Za-z_]\w*=")


def form(attempt: Attempt) -> float:
    """Return 1.0 if the turn follows the contract and adds nothing to it, else 0.0."""
    return float(isinstance(read_contract(text_of(attempt)), Contract))


def relevance(attempt: Attempt, *, keywords: Mapping[str, Sequence[str]] = KEYWORDS) -> float:
    """Count the requested verbs that the command runs, each once; 0.0 if the turn violates the contract.

    Args:
        keywords: command verb -> words or phrases of a request that ask for it (whole words, case folded).
    """
    requested = requested_verbs(request_of(attempt), keywords)
    contract = read_contract(text_of(attempt))
    return float(len(requested & set(run_verbs(contract.command)))) if isinstance(contract, Contract) else 0.0


def conciseness(attempt: Attempt, *, free: int = 300, scale: int = 300) -> float:
    """Return 1.0 up to `free` characters, falling to 0.0 over the next `scale`; 0.0 if the turn violates the contract.

    Silence therefore earns nothing.
    """
    text = text_of(attempt)
    return shortness(text, free, scale) if isinstance(read_contract(text), Contract) else 0.0


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
    """Return the programs that a bash command's top-level simple commands run, in order.

    Names in comments, arguments, heredocs and quoted text do not count. A path counts by its last part; `sudo`,
    assignments and shell keywords are skipped.
    """
    verbs = []
    for words in command_words(command):
        for word in words:
            bare = word.lstrip("(")
            if bare and bare not in _WRAPPERS and not _ASSIGNMENT.match(bare):
                verbs.append(bare.rsplit("/", 1)[-1])
                break
    return verbs


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
