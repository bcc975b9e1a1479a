"""The tiny vocabulary: byte-level BPE learnt from the embedded world's texts, with Qwen's special tokens.

Belongs here: how `tiny/tokenizer.json` is made from texts. Does not belong here: the texts, or rendering.

A model of half a million parameters copies names far better when a name is always spelt in the same pieces. So the
merges given first (the world's syllables) outrank all that are learnt, letters never merge with the blank before them
unless the word is a frequent one, digits and line breaks stand alone, and a tag such as `</parameter>` is one word.
"""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tokenizers import Tokenizer

CONTROL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
INLINE = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")

_BLANK = "Ġ"  # how byte-level vocabularies spell the blank

# What a merge may not cross: a tag, a line break, a digit, a word with the blank before it, a run of marks, blanks.
_WORDS = r"</?[a-z]+(?:=[a-z]+)?>|\.py\b|\n|\p{N}| ?\p{L}+| ?[^\s\p{L}\p{N}_/`]+|[_/`]| +|\s"


def train(texts: Iterable[str], size: int, first: Sequence[str] = (), spread: float = 0.02) -> Tokenizer:
    """A tokenizer of at most `size` ids: 256 bytes, merges, then the special tokens, in that order.

    Args:
        texts: one a task, so that the names of a task occur in one text.
        first: ASCII syllables of two letters, merged before anything learnt.
        spread: merges are learnt from words that occur in at least this share of the texts: names are not among them.

    Deterministic: of equally frequent pairs the alphabetically first is merged. The algorithm is byte-pair encoding
    (Sennrich et al., 2016) on counts of distinct words.
    """
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

    split = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_WORDS), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    specials = re.compile("|".join(map(re.escape, (*CONTROL, *INLINE))))
    counts: Counter[str] = Counter()
    texts_with: Counter[str] = Counter()
    number = 0
    for text in texts:
        number += 1
        words = [word for piece in specials.split(text) for word, _ in split.pre_tokenize_str(piece)]
        counts.update(words)
        texts_with.update(set(words))
    common = {word: count for word, count in counts.items() if texts_with[word] >= spread * number}
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = _learn(common, list(first), size - len(alphabet) - len(CONTROL) - len(INLINE))
    vocab = {piece: number for number, piece in enumerate([*alphabet, *(a + b for a, b in merges)])}
    core = Tokenizer(models.BPE(vocab=vocab, merges=merges, fuse_unk=False, byte_fallback=False))
    core.pre_tokenizer = split
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in CONTROL])
    core.add_tokens([AddedToken(text, special=False, normalized=False) for text in INLINE])
    return core


def _learn(counts: Mapping[str, int], first: Sequence[str], size: int) -> list[tuple[str, str]]:
    """The merges, at most `size`: `first`, then the most frequent pair again and again."""
    merges = [(syllable[0], syllable[1]) for syllable in first]
    words = [(list(word), count) for word, count in sorted(counts.items())]
    for pair in merges:
        for pieces, _ in words:
            _merge(pieces, pair)
    while len(merges) < size:
        known = {a + b for a, b in merges}
        pairs: Counter[tuple[str, str]] = Counter()
        for pieces, count in words:
            for at, pair in enumerate(itertools.pairwise(pieces)):
                # A blank merges with a whole word alone, never with the first syllable of a name.
                whole = at == len(pieces) - 2 and pair[1] not in first
                if pair[0] + pair[1] not in known and (pair[0] != _BLANK or whole):
                    pairs[pair] += count
        if not pairs:
            break
        best = min(pairs, key=lambda p: (-pairs[p], p))
        merges.append(best)
        for pieces, _ in words:
            _merge(pieces, best)
    return merges


def _merge(pieces: list[str], pair: tuple[str, str]) -> None:
    at = 0
    while at < len(pieces) - 1:
        if (pieces[at], pieces[at + 1]) == pair:
            pieces[at : at + 2] = [pair[0] + pair[1]]
        at += 1
