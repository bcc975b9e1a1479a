"""Train the tiny vocabulary, `tiny/tokenizer.json`: byte-level BPE on a world's texts, with Qwen's special tokens.

A model of half a million parameters copies names far better if a name always splits into the same pieces. So merges of
the world's syllables come before all trained merges, a blank merges only with a whole frequent word, digits and line
breaks are tokens of their own, and a tag such as `</parameter>` is one word.
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

_BLANK = "Ġ"  # the blank in byte-level vocabularies

# Merges stay inside one of these: a tag, a line break, a digit, a word with the blank before it, punctuation, blanks.
_WORDS = r"</?[a-z]+(?:=[a-z]+)?>|\.py\b|\n|\p{N}| ?\p{L}+| ?[^\s\p{L}\p{N}_/`]+|[_/`]| +|\s"


def train(texts: Iterable[str], size: int, first: Sequence[str] = (), spread: float = 0.02) -> Tokenizer:
    """Train a tokenizer of at most `size` ids: 256 bytes, merges, then the special tokens, in that order.

    Args:
        texts: one per task, so that the names of a task occur in only one text.
        first: ASCII syllables of two letters, merged before the trained merges.
        spread: train only on words that occur in at least this share of the texts, which excludes names.

    The result is deterministic: of equally frequent pairs, the alphabetically first is merged. The algorithm is
    byte-pair encoding (Sennrich et al., 2016) on counts of distinct words.
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
    merges = _train_merges(common, list(first), size - len(alphabet) - len(CONTROL) - len(INLINE))
    vocab = {piece: number for number, piece in enumerate([*alphabet, *(a + b for a, b in merges)])}
    core = Tokenizer(models.BPE(vocab=vocab, merges=merges, fuse_unk=False, byte_fallback=False))
    core.pre_tokenizer = split
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in CONTROL])
    core.add_tokens([AddedToken(text, special=False, normalized=False) for text in INLINE])
    return core


def _train_merges(counts: Mapping[str, int], first: Sequence[str], size: int) -> list[tuple[str, str]]:
    """Return at most `size` merges: `first`, then repeatedly the most frequent pair."""
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
                # A blank merges only with a whole word, never with the first syllable of a name.
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
