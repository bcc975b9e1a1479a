"""Taking the teacher's steering out of captured prompts, and finding what is left of it.

Belongs here: replacing whole messages of a captured prompt at special-token boundaries, and the search for runs of
steering text in ids. Does not belong here: the text of the steering (`rollouts.prompts`), or the gates that judge.

Ids outside the replaced messages stay exactly as captured; a replaced message is the student's own rendering of it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from etpi_resources.chat.format import ChatFormat

Messages = Sequence[Mapping[str, str]]


@dataclass(frozen=True)
class FirstPrompt:
    """What a student reads before its first turn.

    Attributes:
        messages: ({"role", "content"}), without steering.
        ids: their rendering, with the tools and template arguments that a student gets; generation prompt included.
    """

    messages: Messages
    ids: Sequence[int] | np.ndarray


RUN_IDS = 8
RUN_WORDS = 6
"""A run of so many ids, or words, that only the steering has, is a leak. Shorter runs occur in anybody's prose."""


def segments(prompt: np.ndarray, chat: ChatFormat) -> list[np.ndarray]:
    """The prompt cut before every start-of-message id; the first piece stands before the first (often empty)."""
    return np.split(prompt, np.flatnonzero(prompt == chat.turn_id))


def splice(prompt: np.ndarray, captured: Messages, default: FirstPrompt, chat: ChatFormat) -> tuple[np.ndarray, bool]:
    """The prompt with each of its first messages that differs from the default replaced by the default's rendering.

    Args:
        prompt: (n,) int32, as captured; later messages may follow the first ones.
        captured: the first messages ({"role", "content"}) as the teacher read them.
        default: the same messages as a student reads them. Tools stand in one of them, so its ids must offer those that
            were captured.

    Returns:
        the prompt, and whether anything was replaced (otherwise it is the same array).

    Raises:
        ValueError: the messages do not correspond one to one, or the prompt does not hold what is to be replaced.
    """
    wanted = default.messages
    if [m["role"] for m in captured] != [m["role"] for m in wanted]:
        raise ValueError(
            f"steering cannot be spliced: the captured prompt begins with {[m['role'] for m in captured]}, the default "
            f"one with {[m['role'] for m in wanted]}; they must correspond message by message"
        )
    differ = [i for i, (a, b) in enumerate(zip(captured, wanted, strict=True)) if a["content"] != b["content"]]
    if not differ:
        return prompt, False
    pieces = segments(prompt, chat)
    rendered = segments(np.asarray(default.ids, dtype=prompt.dtype), chat)
    # One piece before the first message and one for the generation prompt.
    if len(rendered) != len(wanted) + 2 or len(pieces) < len(rendered):
        raise ValueError(
            f"steering cannot be spliced: chat format {chat.name!r} writes {len(rendered) - 2} messages for the "
            f"{len(wanted)} of the default prompt, and the captured prompt has {len(pieces) - 2}; "
            "take a chat_template that writes one message for each"
        )
    for index in differ:
        found = chat.decode(pieces[index + 1].tolist())
        if captured[index]["content"].strip() not in found:
            raise ValueError(
                f"steering cannot be spliced: message {index} of the captured prompt reads {found[:80]!r}, not what "
                "the messages table says; the ids are of another prompt or tokenizer (agent.tokenizer, base.tokenizer)"
            )
        pieces[index + 1] = rendered[index + 1]
    return np.concatenate(pieces), True


@dataclass(frozen=True)
class Traces:
    """Runs of ids and of words that only the steering has."""

    ids: frozenset[bytes]
    words: frozenset[tuple[str, ...]]
    chat: ChatFormat

    @classmethod
    def of(cls, steering: Iterable[str], defaults: Iterable[str], chat: ChatFormat) -> Traces:
        """The runs of the steering texts that no default text has.

        Raises:
            ValueError: a steering text is shorter than a run, so that it could not be told from other prose.
        """
        ids: set[bytes] = set()
        words: set[tuple[str, ...]] = set()
        for text in steering:
            if not _word_runs(text):
                raise ValueError(
                    f"the steering text {text!r} has fewer than {RUN_WORDS} words; its leaks could not be found"
                )
            ids.update(_id_runs(np.asarray(chat.encode(text.strip()), dtype=np.int32)))
            words.update(_word_runs(text))
        for text in defaults:
            ids.difference_update(_id_runs(np.asarray(chat.encode(text), dtype=np.int32)))
            words.difference_update(_word_runs(text))
        return cls(frozenset(ids), frozenset(words), chat)

    def find(self, ids: np.ndarray) -> str | None:
        """The first run of steering among the ids, as text; None where there is none. Matched as ids, and as words of
        the decoded text, for steering may be spelled in other ids than the canonical ones."""
        if not self.ids and not self.words:
            return None
        for run in _id_runs(ids):
            if run in self.ids:
                return self.chat.decode(np.frombuffer(run, dtype=np.int32).tolist())
        for run in _word_runs(self.chat.decode(ids.tolist())):
            if run in self.words:
                return " ".join(run)
        return None


def _id_runs(ids: np.ndarray) -> list[bytes]:
    ids = np.ascontiguousarray(ids, dtype=np.int32)
    if len(ids) < RUN_IDS:
        return []
    windows = np.lib.stride_tricks.sliding_window_view(ids, RUN_IDS)
    return [window.tobytes() for window in windows]


def _word_runs(text: str) -> list[tuple[str, ...]]:
    words = re.findall(r"\w+", text.lower())
    return [tuple(words[i : i + RUN_WORDS]) for i in range(len(words) - RUN_WORDS + 1)]
