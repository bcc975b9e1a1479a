"""The in-process engine: a `transformers` checkpoint on a CPU or one GPU.

Belongs here: joining concurrent requests into batches, and drawing tokens. Does not belong here: where keys and values
lie (`slots`), what a grammar forbids (`masks`), the agent loop, or training.

One thread runs the model. Requests join the running batch as they arrive and leave it as they finish, so a rollout
never waits for another's longer turn. A draw depends on the request alone: its generator is seeded by (seed, request
id), not by what else is in the batch.
"""

from __future__ import annotations

import hashlib
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
from etpi_resources.engines import Completion, FinishReason, Request
from etpi_resources.engines.slots import ATTENTION, RECURRENT, Slots, SlotView, layer_kinds

if TYPE_CHECKING:
    from etpi_resources.engines.masks import GrammarMasks, GrammarState

SLOTS = 64
"""Conversations kept at once."""

PREFILL_TOKENS = 8192
"""The most new prompt tokens of one forward pass, padding included: it bounds the memory of attention masks."""

GATHER_SECONDS = 0.003
"""How long an idle engine waits for company after a first request."""


@dataclass
class _Row:
    """A request under way."""

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
        name: the name in lineage; embeds the checkpoint's hash.
        chat: decodes outputs and names the id that ends a turn.
        dtype: of weights and cache; float32, so that greedy output does not hang on rounding.
    Raises:
        OSError: the folder holds no checkpoint that can be loaded.
        ValueError: it has layers whose memory is not kept here (`slots.layer_kinds`).
    """

    def __init__(self, folder: Path, name: str, chat: ChatFormat, dtype: torch.dtype = torch.float32) -> None:
        transformers_logging.disable_progress_bar()
        model = AutoModelForCausalLM.from_pretrained(
            folder, dtype=dtype, use_safetensors=True, attn_implementation="sdpa"
        ).eval()
        model.to("cuda" if torch.cuda.is_available() else "cpu")  # pyright: ignore[reportArgumentType]
        model.set_attn_implementation(ATTENTION)
        self._start(model, name, chat)

    def _start(self, model: Any, name: str, chat: ChatFormat) -> None:
        """Serve a model from where its weights are."""
        self.name, self._chat, self._model = name, chat, model
        self._dtype, self._device = model.dtype, model.device
        dtype, config = self._dtype, model.config.get_text_config()
        self._kinds = layer_kinds(config)
        heads = config.num_key_value_heads
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        self._slots = Slots(SLOTS, self._kinds, heads, head_dim, dtype, self._device)
        self._longest = config.max_position_embeddings
        self._waiting: list[_Row] = []
        self._arrived = threading.Condition()
        self._closed = False
        self._thread = threading.Thread(target=self._serve, name=f"engine {name}", daemon=True)
        self._thread.start()

    def complete(self, requests: Sequence[Request]) -> list[Completion]:
        """One completion a request, in order. Raises ValueError for a prompt that is empty or leaves no room, and for a
        grammar that the vocabulary cannot write."""
        rows = [_Row(request, self._generator(request), self._state(request)) for request in requests]
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

    # --- the serving thread ----------------------------------------------------------------------------------------

    @torch.inference_mode()
    def _serve(self) -> None:
        running: list[_Row] = []
        while self._admit(running):
            fresh = [row for row in running if row.slot < 0]
            try:
                for row in fresh:
                    row.slot = self._slots.take(row.request.session)
                for batch in self._prefill_batches(fresh):
                    self._step(batch)
                if settled := [row for row in running if row not in fresh and row.finish is None]:
                    self._step(settled)
            except BaseException as error:  # whoever waits must hear of it
                for row in running:
                    row.error, row.finish = error, "error"
            for row in [row for row in running if row.finish is not None]:
                if row.slot >= 0:
                    self._slots.give(row.slot)
                running.remove(row)
                row.done.set()

    def _admit(self, running: list[_Row]) -> bool:
        """Move waiting requests into the batch; wait where there is nothing to do. False: closed and finished."""
        with self._arrived:
            if not running:
                while not self._waiting and not self._closed:
                    self._arrived.wait()
                if self._closed and not self._waiting:
                    return False
                self._arrived.wait_for(lambda: len(self._waiting) >= self._slots.room, GATHER_SECONDS)
            busy = {row.request.session for row in running}
            for row in list(self._waiting):
                if len(running) == SLOTS:
                    break
                if row.request.session not in busy:
                    busy.add(row.request.session)
                    self._waiting.remove(row)
                    running.append(row)
        return True

    def _prefill_batches(self, rows: Sequence[_Row]) -> list[list[_Row]]:
        """Rows of like numbers of new ids together, at most PREFILL_TOKENS a batch; of the same number where a layer's
        state would take the padding in."""
        new = {
            id(row): len(row.request.prompt_ids) - self._slots.reuse(row.slot, row.request.prompt_ids) for row in rows
        }
        batches: list[list[_Row]] = []
        for row in sorted(rows, key=lambda r: new[id(r)]):
            alike = not self._slots.recurrent or (batches and new[id(row)] == new[id(batches[-1][0])])
            if batches and alike and new[id(row)] * (len(batches[-1]) + 1) <= PREFILL_TOKENS:
                batches[-1].append(row)
            else:
                batches.append([row])
        return batches

    def _step(self, rows: list[_Row]) -> None:
        """Read what each row's slot lacks, and draw its next token."""
        held = [self._slots.held[row.slot] for row in rows]
        pending = [
            row.output[-1:] if row.output else list(row.request.prompt_ids[len(h) :])
            for row, h in zip(rows, held, strict=True)
        ]
        width = max(map(len, pending))
        apart = width == 1 and self._apart
        lanes = self._lanes(rows, neighbours=width == 1 and not apart)
        starts = torch.tensor([len(self._slots.held[lane]) for lane in lanes], device=self._device)
        positions = starts[:, None] + torch.arange(width, device=self._device)
        upto = int(positions.max()) + 1
        self._slots.reserve(upto)
        own = torch.tensor([lanes.index(row.slot) for row in rows], device=self._device)
        ids = torch.full((len(lanes), width), self._chat.pad_id, device=self._device)
        ids[own] = torch.tensor([p + [self._chat.pad_id] * (width - len(p)) for p in pending], device=self._device)
        view = SlotView(self._slots, lanes, positions, upto, apart=apart)
        seen = None if apart else torch.arange(upto, device=self._device) <= positions[:, None, :, None]
        hidden = self._model.model(
            input_ids=ids,
            attention_mask={kind: None if kind == RECURRENT else seen for kind in self._kinds},
            position_ids=positions,
            past_key_values=cast(Cache, view),
            use_cache=False,
        ).last_hidden_state
        last = torch.tensor([len(p) - 1 for p in pending], device=self._device)
        logits = self._model.lm_head(hidden[own, last]).float()
        for h, p in zip(held, pending, strict=True):
            h.extend(p)
        self._draw(rows, logits)

    @property
    def _apart(self) -> bool:
        """Whether the rows of a step of one token each are attended to one by one: on a CPU a call a row costs less
        than reading all rows to the length of the longest; on a GPU it is not so."""
        return self._device.type == "cpu" and self._model.config._attn_implementation == ATTENTION

    def _lanes(self, rows: Sequence[_Row], *, neighbours: bool) -> list[int]:
        """The slots a forward pass runs over. A step of one token each that reads its rows together takes idle slots
        between them along where they are few, for `neighbours` need no copying; an idle slot's token goes to the place
        after what it holds, which is written again before anything reads it. A layer's state has no such place."""
        slots = [row.slot for row in rows]
        if not neighbours or self._slots.recurrent:
            return slots
        whole = list(range(min(slots), max(slots) + 1))
        return whole if len(whole) <= 2 * len(slots) else slots

    def _draw(self, rows: list[_Row], logits: torch.Tensor) -> None:
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
            if token == self._chat.end_id:
                row.finish = "stop"
            elif (
                len(row.output) >= row.request.sampler.max_tokens
                or len(row.request.prompt_ids) + len(row.output) >= self._longest
            ):
                row.finish = "length"

    def _logprobs(self, rows: Sequence[_Row], logits: torch.Tensor) -> torch.Tensor:
        """What is reported of each id, (rows, vocabulary): log-probabilities at temperature 1."""
        return torch.log_softmax(logits, -1)

    def _completion(self, row: _Row) -> Completion:
        spoken = row.output[:-1] if row.finish == "stop" else row.output
        return Completion(
            prompt_ids=list(row.request.prompt_ids),
            output_ids=row.output,
            logprobs=row.logprobs,
            text=self._chat.decode(spoken),
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
        digest = hashlib.sha256(f"{request.sampler.seed}/{request.request_id}".encode()).digest()
        return torch.Generator().manual_seed(int.from_bytes(digest[:8], "big") >> 1)


def _sample(rows: Sequence[_Row], logits: torch.Tensor) -> torch.Tensor:
    """A draw a row, by inverting its cumulative distribution after temperature and nucleus; (rows,), int64."""
    temperature = torch.tensor([row.request.sampler.temperature for row in rows], device=logits.device)
    top_p = torch.tensor([row.request.sampler.top_p for row in rows], device=logits.device)
    probabilities, order = torch.softmax(logits / temperature[:, None], -1).sort(-1, descending=True)
    before = probabilities.cumsum(-1) - probabilities
    probabilities = probabilities.masked_fill(before >= top_p[:, None], 0.0)
    cumulative = probabilities.cumsum(-1)
    uniform = torch.stack([torch.rand(1, generator=row.generator) for row in rows]).to(logits.device)
    place = torch.searchsorted(cumulative, uniform * cumulative[:, -1:], right=True)
    # Rounding may take the highest uniform to the whole mass: never past the last id that has some.
    last = (probabilities > 0).sum(-1, keepdim=True) - 1
    return order.gather(1, torch.minimum(place, last))[:, 0]
