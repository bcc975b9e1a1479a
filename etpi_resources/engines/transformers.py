"""The in-process engine: a `transformers` checkpoint on a CPU or one GPU, with continuous batching.

One thread runs the model. Requests join the running batch as they arrive and leave it as they finish, so a rollout
never waits for another's longer turn. A sample depends only on its request: its generator is seeded by (seed, request
id), whatever else is in the batch. The key-value cache is in `slots`, or in `model_caches` for models that `slots`
cannot hold; grammars are in `masks`.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from transformers import AutoModelForCausalLM, Cache
from transformers.utils import logging as transformers_logging

from etpi_resources.chat.format import ChatFormat
from etpi_resources.cuda import avoid_cudnn_attention, cumulative_sums
from etpi_resources.engines import Completion, FinishReason, Request, Sampler
from etpi_resources.engines.decode_steps import DecodeSteps
from etpi_resources.engines.slots import ATTENTION, RECURRENT, ModelCaches, Slots, SlotView, layer_kinds

if TYPE_CHECKING:
    from etpi_resources.engines.masks import GrammarMasks, GrammarState

_LOG = logging.getLogger(__name__)

SLOTS = 64
"""The number of conversations in the cache, and the most requests in a batch."""

PREFILL_TOKENS = 8192
"""The most new prompt tokens of one forward pass, padding included: it bounds the memory of attention masks."""

PROBE_IDS = 8
"""The length of the sequence whose logits decide whether `slots` can hold a model."""

ROUNDING = 0.05
"""The largest relative difference of logits that rounding in 16 bits explains; a wrong token attended to exceeds it."""

GATHER_SECONDS = 0.003
"""Time that an idle engine waits for more requests after the first."""


@dataclass
class _BatchRow:
    """A request in the batch."""

    request: Request
    generator: torch.Generator
    state: GrammarState | None = None
    slot: int = -1
    output: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    finish: FinishReason | None = None
    error: BaseException | None = None
    done: threading.Event = field(default_factory=threading.Event)


class TransformersEngine:
    """Serves the checkpoint in `folder` under `name`.

    Args:
        folder: a checkpoint as `save_pretrained` writes it; safetensors only.
        name: the name in lineage; contains the checkpoint's hash.
        chat: decodes outputs and defines the end-of-turn id.
        dtype: of weights and cache; float32, so that rounding does not change greedy output.

    Raises:
        OSError: the folder has no checkpoint that can be loaded.
    """

    def __init__(self, folder: Path, name: str, chat: ChatFormat, dtype: torch.dtype = torch.float32) -> None:
        transformers_logging.disable_progress_bar()
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, use_safetensors=True).eval()
        model.to("cuda" if torch.cuda.is_available() else "cpu")  # pyright: ignore[reportArgumentType]
        self._start(model, name, chat)
        model.set_attn_implementation(self._attention)

    def _start(self, model: Any, name: str, chat: ChatFormat) -> None:
        """Start the serving thread for a model, on the model's device."""
        avoid_cudnn_attention()
        self.name, self._chat, self._model = name, chat, model
        self._dtype, self._device = model.dtype, model.device
        config = model.config.get_text_config()
        self._longest = config.max_position_embeddings
        self._attention = model.config._attn_implementation
        self._slots: Slots | ModelCaches = ModelCaches(SLOTS, config)
        if (slots := self._fitting_slots(config)) is not None:
            self._slots, self._attention = slots, ATTENTION
        else:
            _LOG.warning("%s: its layers do not fit one cache for all conversations, so each gets a forward pass", name)
        self._decode_steps: DecodeSteps | None = None
        if isinstance(self._slots, Slots) and not self._slots.recurrent and self._device.type == "cuda":
            self._decode_steps = DecodeSteps(self._slots, self._decode, self._device, capture=True)
        self._waiting: list[_BatchRow] = []
        self._arrived = threading.Condition()
        self._closed = False
        self._thread = threading.Thread(target=self._serve, name=f"engine {name}", daemon=True)
        self._thread.start()

    def complete(self, requests: Sequence[Request]) -> list[Completion]:
        """Return one completion per request, in order.

        Raises:
            ValueError: a prompt is empty or fills the model's length, or the vocabulary cannot write a grammar.
            RuntimeError: the engine is closed, or the model failed.
        """
        rows = [_BatchRow(request, self._generator(request), self._state(request)) for request in requests]
        for row in rows:
            if not 0 < len(row.request.prompt_ids) < self._longest:
                raise ValueError(
                    f"{row.request.request_id}: a prompt of {len(row.request.prompt_ids)} ids; the model takes 1 to "
                    f"{self._longest - 1}. Lower agent.max_model_len"
                )
        with self._arrived:
            if self._closed:
                raise RuntimeError(f"engine {self.name} is closed")
            self._waiting += rows
            self._arrived.notify()
        for row in rows:
            row.done.wait()
            if row.error is not None:
                raise RuntimeError(f"{row.request.request_id}: the model failed: {row.error}") from row.error
        return [self._completion(row) for row in rows]

    def fingerprint(self) -> Mapping[str, Any]:
        return {"engine": "transformers", "model": self.name, "dtype": str(self._dtype).removeprefix("torch.")}

    def close(self) -> None:
        with self._arrived:
            self._closed = True
            self._arrived.notify()
        self._thread.join()

    def _fitting_slots(self, config: Any) -> Slots | None:
        """Return slots for the model, or None if they cannot hold its layers or give it other logits."""
        try:
            self._kinds = layer_kinds(config)
            head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
            slots = Slots(SLOTS, self._kinds, config.num_key_value_heads, head_dim, self._dtype, self._device)
        except (ValueError, AttributeError):
            return None
        self._takes_kinds = getattr(config, "layer_types", None) is not None
        return slots if self._same_logits(slots) else None

    @torch.inference_mode()
    def _same_logits(self, slots: Slots) -> bool:
        """Compare the logits after a few ids, and after one more, with the model's own."""
        ids = [(i * 7919 + 2) % self._chat.vocab_size for i in range(PROBE_IDS)]
        training = self._model.training
        self._model.eval()
        # The class's own forward: a trainer's wrapper of 16 bits would compute otherwise than the slots do.
        plain = type(self._model).forward
        direct = [
            plain(self._model, torch.tensor([ids[:n]], device=self._device)).logits[0, -1].float()
            for n in (-1, PROBE_IDS)
        ]
        row = _BatchRow(Request("probe", "probe", ids, (), Sampler(max_tokens=1)), torch.Generator(), slot=0)
        try:
            self._model.set_attn_implementation(ATTENTION)
            cached: list[torch.Tensor] = []
            for pending in (ids[:-1], ids[-1:]):
                cached.append(self._slot_logits(slots, [row], [pending])[0])
                slots.cached_ids[0] += pending
        except (TypeError, ValueError, RuntimeError, AttributeError, KeyError):
            return False  # the model does not call its attention or its cache as `slots` expects
        finally:
            self._model.set_attn_implementation(self._attention)
            self._model.train(training)
            slots.reset(0)
            slots.cached_ids[0] = []
        return all(float((a - b).abs().max() / a.abs().max()) < ROUNDING for a, b in zip(direct, cached, strict=True))

    # --- the serving thread ----------------------------------------------------------------------------------------

    @torch.inference_mode()
    def _serve(self) -> None:
        running: list[_BatchRow] = []
        while self._admit(running):
            new = [row for row in running if row.slot < 0]
            try:
                for row in new:
                    row.slot = self._slots.acquire(row.request.session)
                for batch in self._prefill_batches(new):
                    self._step(batch)
                if decoding := [row for row in running if row not in new and row.finish is None]:
                    self._step(decoding)
            except BaseException as error:  # `complete` raises it in the waiting threads
                for row in running:
                    row.error, row.finish = error, "error"
            for row in [row for row in running if row.finish is not None]:
                if row.slot >= 0:
                    self._slots.release(row.slot)
                running.remove(row)
                row.done.set()

    def _admit(self, running: list[_BatchRow]) -> bool:
        """Move waiting requests into the batch; wait if there are none. Return False once closed and finished."""
        with self._arrived:
            if not running:
                while not self._waiting and not self._closed:
                    self._arrived.wait()
                if self._closed and not self._waiting:
                    return False
                self._arrived.wait_for(lambda: len(self._waiting) >= self._slots.free_count, GATHER_SECONDS)
            busy = {row.request.session for row in running}
            for row in list(self._waiting):
                if len(running) == SLOTS:
                    break
                if row.request.session not in busy:
                    busy.add(row.request.session)
                    self._waiting.remove(row)
                    running.append(row)
        return True

    def _prefill_batches(self, rows: Sequence[_BatchRow]) -> list[list[_BatchRow]]:
        """Group rows with similar numbers of new ids, at most PREFILL_TOKENS a batch.

        With caches that cannot be cut all rows of a batch have the same number of new ids, since padding would enter a
        recurrent state.
        """
        new_ids = {
            id(row): len(row.request.prompt_ids) - self._slots.match_prefix(row.slot, row.request.prompt_ids)
            for row in rows
        }
        batches: list[list[_BatchRow]] = []
        for row in sorted(rows, key=lambda r: new_ids[id(r)]):
            fits = self._slots.can_cut or (batches and new_ids[id(row)] == new_ids[id(batches[-1][0])])
            if batches and fits and new_ids[id(row)] * (len(batches[-1]) + 1) <= PREFILL_TOKENS:
                batches[-1].append(row)
            else:
                batches.append([row])
        return batches

    def _step(self, rows: list[_BatchRow]) -> None:
        """Run one forward pass over the ids that each row's slot lacks, and sample each row's next token."""
        cached = [self._slots.cached_ids[row.slot] for row in rows]
        pending = [
            row.output[-1:] if row.output else list(row.request.prompt_ids[len(c) :])
            for row, c in zip(rows, cached, strict=True)
        ]
        logits = self._forward(rows, pending)
        for c, p in zip(cached, pending, strict=True):
            c.extend(p)
        self._sample_next(rows, logits)

    def _forward(self, rows: Sequence[_BatchRow], pending: Sequence[Sequence[int]]) -> torch.Tensor:
        """Store the keys, values and states of the pending ids; return each row's last logits, (rows, vocabulary),
        float32."""
        if self._decode_steps is not None and all(len(ids) == 1 for ids in pending):
            return self._decode_steps.logits({row.slot: ids[0] for row, ids in zip(rows, pending, strict=True)})
        if isinstance(self._slots, Slots):
            return self._slot_logits(self._slots, rows, pending)
        caches = self._slots
        return torch.cat(
            [caches.last_logits(self._model, row.slot, ids) for row, ids in zip(rows, pending, strict=True)]
        )

    def _slot_logits(self, store: Slots, rows: Sequence[_BatchRow], pending: Sequence[Sequence[int]]) -> torch.Tensor:
        width = max(map(len, pending))
        by_row = width == 1 and self._attends_by_row
        slots = self._slots_to_run(store, rows, fill_gaps=width == 1 and not by_row)
        starts = torch.tensor([len(store.cached_ids[slot]) for slot in slots], device=self._device)
        positions = starts[:, None] + torch.arange(width, device=self._device)
        upto = int(positions.max()) + 1
        store.reserve(upto)
        index = torch.tensor([slots.index(row.slot) for row in rows], device=self._device)
        ids = torch.full((len(slots), width), self._chat.pad_id, device=self._device)
        ids[index] = torch.tensor([[*p, *[self._chat.pad_id] * (width - len(p))] for p in pending], device=self._device)
        view = SlotView(store, slots, positions, upto, by_row=by_row)
        mask = None if by_row else torch.arange(upto, device=self._device) <= positions[:, None, :, None]
        hidden = self._hidden(ids, positions, view, mask)
        last = torch.tensor([len(p) - 1 for p in pending], device=self._device)
        return self._model.lm_head(hidden[index, last]).float()

    def _hidden(
        self, ids: torch.Tensor, positions: torch.Tensor, view: SlotView, mask: torch.Tensor | None
    ) -> torch.Tensor:
        """Return the last hidden states of new ids, (rows, ids, hidden), whose keys and values the view stores."""
        return self._model.model(
            input_ids=ids,
            attention_mask=self._attention_mask(mask),
            position_ids=positions,
            past_key_values=cast(Cache, view),
            use_cache=False,
        ).last_hidden_state

    def _decode(self, ids: torch.Tensor, positions: torch.Tensor, view: SlotView, mask: torch.Tensor) -> torch.Tensor:
        """Return the logits after one new id per row, (rows, vocabulary), float32; see `decode_steps.Forward`."""
        hidden = self._hidden(ids, positions, view, mask)
        return self._model.lm_head(hidden[:, 0]).float()

    def _attention_mask(self, mask: torch.Tensor | None) -> Any:
        """Return the mask as the model takes it: by kind of layer if its configuration names kinds."""
        if self._takes_kinds:
            return {kind: None if kind == RECURRENT else mask for kind in self._kinds}
        # Without a mask such a model would create one; `slot_attention` reads none where it attends row by row.
        return torch.ones((1, 1, 1, 1), dtype=torch.bool, device=self._device) if mask is None else mask

    @property
    def _attends_by_row(self) -> bool:
        """Return whether a step of one token per row computes attention row by row.

        On a CPU one call per row costs less than reading all rows up to the longest; on a GPU it costs more.
        """
        return self._device.type == "cpu" and self._model.config._attn_implementation == ATTENTION

    @staticmethod
    def _slots_to_run(store: Slots, rows: Sequence[_BatchRow], *, fill_gaps: bool) -> list[int]:
        """Return the slots of a forward pass.

        Adjacent slots are read without a copy, so with `fill_gaps` the pass also runs over the idle slots between the
        busy ones if they are few. An idle slot's token is written after its cached ids and overwritten before anything
        reads it. A recurrent state has no such position, so its gaps are never filled.
        """
        slots = [row.slot for row in rows]
        if not fill_gaps or store.recurrent:
            return slots
        span = list(range(min(slots), max(slots) + 1))
        return span if len(span) <= 2 * len(slots) else slots

    def _sample_next(self, rows: list[_BatchRow], logits: torch.Tensor) -> None:
        logprobs = self._logprobs(rows, logits)
        if any(row.state for row in rows):
            self._masks.apply([row.state for row in rows], logits)
        chosen = logits.argmax(-1)
        sampled = [i for i, row in enumerate(rows) if row.request.sampler.temperature > 0]
        if sampled:
            chosen[sampled] = _sample([rows[i] for i in sampled], logits[sampled])
        picked = logprobs.gather(1, chosen[:, None])[:, 0].tolist()
        for row, token, logprob in zip(rows, chosen.tolist(), picked, strict=True):
            row.output.append(token)
            row.logprobs.append(logprob)
            if row.state:
                row.state.consume(token)
            if token in self._chat.end_ids:
                row.finish = "stop"
            elif (
                len(row.output) >= row.request.sampler.max_tokens
                or len(row.request.prompt_ids) + len(row.output) >= self._longest
            ):
                row.finish = "length"

    def _logprobs(self, rows: Sequence[_BatchRow], logits: torch.Tensor) -> torch.Tensor:
        """Return the log-probabilities to report, (rows, vocabulary): those at temperature 1."""
        return torch.log_softmax(logits, -1)

    def _completion(self, row: _BatchRow) -> Completion:
        text_ids = row.output[:-1] if row.finish == "stop" else row.output
        return Completion(
            prompt_ids=list(row.request.prompt_ids),
            output_ids=row.output,
            logprobs=row.logprobs,
            text=self._chat.decode(text_ids),
            finish_reason=row.finish or "error",
            model=self.name,
        )

    @cached_property
    def _masks(self) -> GrammarMasks:
        from etpi_resources.engines.masks import GrammarMasks

        return GrammarMasks(self._chat)

    def _state(self, request: Request) -> GrammarState | None:
        return self._masks.start(request.grammar) if request.grammar else None

    @staticmethod
    def _generator(request: Request) -> torch.Generator:
        return torch.Generator().manual_seed(request.seed(bits=63))


def _sample(rows: Sequence[_BatchRow], logits: torch.Tensor) -> torch.Tensor:
    """Sample one token per row from the cumulative distribution after temperature and nucleus; (rows,), int64."""
    temperature = torch.tensor([row.request.sampler.temperature for row in rows], device=logits.device)
    top_p = torch.tensor([row.request.sampler.top_p for row in rows], device=logits.device)
    probabilities, order = torch.softmax(logits / temperature[:, None], -1).sort(-1, descending=True)
    cumulative = cumulative_sums(probabilities)
    in_nucleus = (probabilities > 0) & (cumulative - probabilities < top_p[:, None])
    last = in_nucleus.sum(-1, keepdim=True) - 1
    uniform = torch.stack([torch.rand(1, generator=row.generator) for row in rows]).to(logits.device)
    rank = torch.searchsorted(cumulative, uniform * cumulative.gather(1, last), right=True)
    # Rounding may turn the largest uniform into the whole mass of the nucleus, whose rank is past its last id.
    return order.gather(1, torch.minimum(rank, last))[:, 0]
