"""Replace the teacher's steering in captured prompts, and search ids for n-grams of it.

Splicing replaces whole messages, at special-token boundaries, with the student's rendering. All other ids are kept as
captured. A template may write several messages between two such tokens, or others of its own; then the text between
them must be the student's but for the steering.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from etpi_assets.curation.strip_think import segments
from etpi_resources.chat.format import NO_TURN, ChatFormat

Messages = Sequence[Mapping[str, str]]


@dataclass(frozen=True)
class FirstPrompt:
    """The prompt of a student's first turn.

    Attributes:
        messages: {"role", "content"} each, without steering.
        ids: their rendering with the student's tools and template arguments, generation prompt included.
    """

    messages: Messages
    ids: Sequence[int] | np.ndarray


NGRAM_IDS = 8
NGRAM_WORDS = 6
"""An n-gram of this many ids or words that only the steering contains is a leak. Shorter n-grams occur by chance."""


def splice(prompt: np.ndarray, captured: Messages, default: FirstPrompt, chat: ChatFormat) -> tuple[np.ndarray, bool]:
    """Replace each first message of the prompt that differs from the default by the default's rendering.

    Args:
        prompt: (n,) int32, as captured; later messages may follow the first ones.
        captured: the first messages ({"role", "content"}) as the teacher read them.
        default: the same messages as a student reads them. One of them contains the tools, so its ids must offer the
            captured tools.

    Returns:
        the prompt, and whether a message was replaced; if not, it is the same array.

    Raises:
        ValueError: the messages do not correspond one to one, or the prompt lacks a message to replace.
    """
    student = default.messages
    if [m["role"] for m in captured] != [m["role"] for m in student]:
        raise ValueError(
            f"steering cannot be spliced: the captured prompt begins with {[m['role'] for m in captured]}, the default "
            f"prompt with {[m['role'] for m in student]}; they must correspond message by message"
        )
    differ = [i for i, (a, b) in enumerate(zip(captured, student, strict=True)) if a["content"] != b["content"]]
    if not differ:
        return prompt, False
    pieces = segments(prompt, chat)
    rendered = segments(np.asarray(default.ids, dtype=prompt.dtype), chat)
    if len(pieces) < len(rendered):
        raise ValueError(
            f"steering cannot be spliced: chat format {chat.name!r} writes the {len(student)} messages of the default "
            f"prompt in {len(rendered)} parts, and the captured prompt has {len(pieces)}; the ids are of another "
            "prompt or chat_template (agent.tokenizer, base.tokenizer, base.chat_template)"
        )
    # One segment before the first message and one for the generation prompt.
    one_each = chat.turn_id != NO_TURN and len(rendered) == len(student) + 2
    left = {i: (captured[i]["content"].strip(), student[i]["content"].strip()) for i in differ}
    for at, wanted in enumerate(rendered[:-1]):
        text = chat.decode(pieces[at].tolist())
        here = [i for i in left if left[i][0] in text and (at == i + 1 or not one_each)]
        for steered, plain in map(left.pop, here):
            text = text.replace(steered, plain, 1)
        if here and not one_each and text.split() != chat.decode(wanted.tolist()).split():
            raise _not_spliced(here[0], text)
        pieces[at] = wanted if here else pieces[at]
    if left:
        index = min(left)
        raise _not_spliced(index, chat.decode(pieces[min(index + 1, len(pieces) - 1)].tolist()))
    return np.concatenate(pieces), True


def _not_spliced(index: int, text: str) -> ValueError:
    return ValueError(
        f"steering cannot be spliced: message {index} of the captured prompt reads {text[:80]!r}, which is not the "
        "content in the messages table; the ids are of another prompt or tokenizer (agent.tokenizer, base.tokenizer)"
    )


@dataclass(frozen=True)
class SteeringNgrams:
    """N-grams of ids and of words that occur in the steering and in no default prompt."""

    ids: frozenset[bytes]
    words: frozenset[tuple[str, ...]]
    chat: ChatFormat

    @classmethod
    def build(cls, steering: Iterable[str], defaults: Iterable[str], chat: ChatFormat) -> SteeringNgrams:
        """Return the n-grams that occur in the steering texts and in no default text.

        Raises:
            ValueError: a steering text is shorter than an n-gram, so its leaks could not be found.
        """
        ids: set[bytes] = set()
        words: set[tuple[str, ...]] = set()
        for text in steering:
            if not _word_ngrams(text):
                raise ValueError(
                    f"the steering text {text!r} has fewer than {NGRAM_WORDS} words; its leaks could not be found"
                )
            ids.update(_id_ngrams(np.asarray(chat.encode(text.strip()), dtype=np.int32)))
            words.update(_word_ngrams(text))
        for text in defaults:
            ids.difference_update(_id_ngrams(np.asarray(chat.encode(text), dtype=np.int32)))
            words.difference_update(_word_ngrams(text))
        return cls(frozenset(ids), frozenset(words), chat)

    def __bool__(self) -> bool:
        return bool(self.ids or self.words)

    def find(self, ids: np.ndarray) -> str | None:
        """Return the text of the first n-gram of steering among the ids, None if there is none.

        Words are compared too, because a model may spell the steering in other ids than the tokenizer would.
        """
        if not self:
            return None
        for ngram in _id_ngrams(ids):
            if ngram in self.ids:
                return self.chat.decode(np.frombuffer(ngram, dtype=np.int32).tolist())
        for ngram in _word_ngrams(self.chat.decode(ids.tolist())):
            if ngram in self.words:
                return " ".join(ngram)
        return None


def _id_ngrams(ids: np.ndarray) -> list[bytes]:
    ids = np.ascontiguousarray(ids, dtype=np.int32)
    if len(ids) < NGRAM_IDS:
        return []
    windows = np.lib.stride_tricks.sliding_window_view(ids, NGRAM_IDS)
    return [window.tobytes() for window in windows]


def _word_ngrams(text: str) -> list[tuple[str, ...]]:
    words = re.findall(r"\w+", text.lower())
    return [tuple(words[i : i + NGRAM_WORDS]) for i in range(len(words) - NGRAM_WORDS + 1)]
