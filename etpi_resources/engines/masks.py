"""Grammars (`etpi_resources.chat.grammars`) as masks over logits, with one state per request.

The library is llguidance: it has no dependencies (xgrammar brings a compiler for GPU kernels), it matches the tags of a
think block as single tokens where the vocabulary has them, and vLLM can use it too.
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

# A line is a run of any characters but a line break and `<`. llguidance computes the tokens that fit into such a run
# once, not at every step. The shorter class is for lines that have almost reached their bound.
_SLICES = [r"[^\r\n<]{1,10}", r"[^\r\n<]{1,30}"]


class GrammarState:
    """The position of one request in its grammar. `finished` after the think block: no more constraints."""

    def __init__(self, matcher: llguidance.LLMatcher) -> None:
        self._matcher = matcher
        self.finished = False

    def consume(self, token: int) -> None:
        """Advance by a sampled token. Raises RuntimeError if the grammar forbids it: the mask was not applied."""
        if self.finished:
            return
        if not self._matcher.consume_token(token):
            raise RuntimeError(f"token {token} was drawn though the grammar forbids it: {self._matcher.get_error()}")
        self.finished = self._matcher.is_accepting()


class GrammarMasks:
    """The compiled grammars of one vocabulary.

    Args:
        chat: the format with the vocabulary.
    """

    def __init__(self, chat: ChatFormat) -> None:
        self._vocabulary = llguidance.LLTokenizer(
            chat.tokenizer.backend_tokenizer.to_str(), n_vocab=chat.vocab_size, eos_token=chat.end_id, slices=_SLICES
        )
        self._size = chat.vocab_size
        self._tokens = chat.think_open_id is not None and chat.think_close_id is not None
        self._executor = llguidance.LLExecutor()
        self._compiled: dict[ThinkGrammar, llguidance.LLMatcher] = {}
        self._lock = threading.Lock()

    def start(self, grammar: ThinkGrammar) -> GrammarState:
        """Return a state at the grammar's beginning. Thread-safe. Raises ValueError if the vocabulary cannot write the
        grammar."""
        with self._lock:
            if grammar not in self._compiled:
                text = llguidance.LLMatcher.grammar_from_lark(grammar.lark(tokens=self._tokens))
                matcher = llguidance.LLMatcher(self._vocabulary, text, log_level=0)
                if matcher.is_error():
                    raise ValueError(f"the vocabulary cannot write the grammar {grammar}: {matcher.get_error()}")
                self._compiled[grammar] = matcher
            return GrammarState(self._compiled[grammar].deep_copy())

    def apply(self, states: Sequence[GrammarState | None], logits: torch.Tensor) -> None:
        """Write minus infinity, in place, where a row's grammar forbids a token. `logits`: (rows, vocabulary). Rows
        without a grammar, or after their think block, do not change."""
        constrained = [(row, state) for row, state in enumerate(states) if state is not None and not state.finished]
        if not constrained:
            return
        bits = allocate_token_bitmask(len(constrained), self._size)
        matchers = [(state._matcher, index) for index, (_, state) in enumerate(constrained)]
        fill_next_token_bitmask_par(self._executor, matchers, bits)
        allowed = np.unpackbits(bits.view(np.uint8), axis=1, bitorder="little", count=self._size)
        forbidden = np.ones((len(constrained), logits.shape[1]), dtype=bool)  # also the ids that pad the vocabulary
        width = min(self._size, logits.shape[1])
        forbidden[:, :width] = allowed[:, :width] == 0
        rows = [row for row, _ in constrained]
        logits[rows] = logits[rows].masked_fill(torch.from_numpy(forbidden).to(logits.device), -torch.inf)
