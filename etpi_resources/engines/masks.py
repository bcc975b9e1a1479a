"""Grammars as masks over logits, a state for each request under way.

Belongs here: compiling a grammar for a vocabulary, following what a request writes, and ruling out what it may not
write next. Does not belong here: what a grammar is (`etpi_resources.chat.grammars`), drawing tokens (`transformers`).

llguidance is the library: it needs nothing besides itself (xgrammar brings a compiler for GPU kernels), matches the
tags of a think block as the vocabulary's own tokens, and is what vLLM can be told to use as well.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

import llguidance
import numpy as np
import torch
from llguidance.numpy import allocate_token_bitmask, fill_next_token_bitmask_par

from etpi_resources.chat.format import ChatFormat
from etpi_resources.chat.grammars import ThinkGrammar

# Lines are runs of anything but a line break and `<`: the tokens that fit within such a run are found once, not at
# every step. The shorter class serves lines that are nearly at their bound.
_SLICES = [r"[^\r\n<]{1,10}", r"[^\r\n<]{1,30}"]


class GrammarState:
    """What one request may write next, by its grammar; free from the end of the think block on."""

    def __init__(self, matcher: llguidance.LLMatcher) -> None:
        self._matcher = matcher
        self.free = False

    def consume(self, token: int) -> None:
        """The token that was drawn. Raises RuntimeError where the grammar forbids it: the mask was not applied."""
        if self.free:
            return
        if not self._matcher.consume_token(token):
            raise RuntimeError(f"token {token} was drawn though the grammar forbids it: {self._matcher.get_error()}")
        self.free = self._matcher.is_accepting()


class GrammarMasks:
    """The compiled grammars of one vocabulary.

    Args:
        chat: whose vocabulary it is.
    """

    def __init__(self, chat: ChatFormat) -> None:
        self._vocabulary = llguidance.LLTokenizer(
            chat.tokenizer.backend_tokenizer.to_str(), n_vocab=chat.vocab_size, eos_token=chat.end_id, slices=_SLICES
        )
        self._size = chat.vocab_size
        self._executor = llguidance.LLExecutor()
        self._compiled: dict[ThinkGrammar, llguidance.LLMatcher] = {}
        self._lock = threading.Lock()

    def start(self, grammar: ThinkGrammar) -> GrammarState:
        """A state at the grammar's beginning; any thread may ask. Raises ValueError where the vocabulary cannot write
        it."""
        with self._lock:
            if grammar not in self._compiled:
                text = llguidance.LLMatcher.grammar_from_lark(grammar.lark())
                matcher = llguidance.LLMatcher(self._vocabulary, text, log_level=0)
                if matcher.is_error():
                    raise ValueError(f"the vocabulary cannot write the grammar {grammar}: {matcher.get_error()}")
                self._compiled[grammar] = matcher
            return GrammarState(self._compiled[grammar].deep_copy())

    def apply(self, states: Sequence[GrammarState | None], logits: torch.Tensor) -> None:
        """Write minus infinity, in place, where a row's grammar forbids a token. `logits`: (rows, vocabulary). Rows
        without a grammar, or past their think block, stay as they are."""
        bound = [(row, state) for row, state in enumerate(states) if state is not None and not state.free]
        if not bound:
            return
        bits = allocate_token_bitmask(len(bound), self._size)
        matchers = [(state._matcher, place) for place, (_, state) in enumerate(bound)]
        fill_next_token_bitmask_par(self._executor, matchers, bits)
        allowed = np.unpackbits(bits.view(np.uint8), axis=1, bitorder="little", count=self._size)
        forbidden = np.ones((len(bound), logits.shape[1]), dtype=bool)  # the model's padding ids stay forbidden
        width = min(self._size, logits.shape[1])
        forbidden[:, :width] = allowed[:, :width] == 0
        rows = [row for row, _ in bound]
        logits[rows] = logits[rows].masked_fill(torch.from_numpy(forbidden).to(logits.device), -torch.inf)
