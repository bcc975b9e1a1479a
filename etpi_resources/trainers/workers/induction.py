"""Copying heads put in place before the first step, so that a tiny model need not spend its training on finding them.

Belongs here: the one initialisation. Does not belong here: training.

A transformer copies an unseen name by induction (Olsson et al. 2022, "In-context Learning and Induction Heads"): a head
of one layer brings each position its previous token; a head of the next layer finds the position whose previous token
is the current one, and copies what stands there. From a random start a model of this size needs over a million tokens
of repeated sequences before such heads form; here both are written into the weights, and training moves them on.

With rotary positions a head can look a fixed distance back if its query and key are constant vectors, the query turned
by that distance: the high frequencies make the match sharp. Matching content far away needs the opposite: the low
frequencies alone, which hardly turn over a context. The constant comes from one coordinate that all embeddings share.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from transformers import Qwen3ForCausalLM

EMBEDDING = 0.1
"""Standard deviation of the token embeddings."""

PREVIOUS = (1, 2, 3)
"""How far back the heads of the first layer look."""

SHARP_FREQUENCIES = 6
"""The highest rotary frequencies, by which a head of the first layer finds its distance."""

LOW_FREQUENCY = 0.003
"""Radians a token below which a rotary frequency counts as standing still over a context of a few hundred tokens."""

GAIN = 2.0
"""Of the query and key norms: how sharply heads attend."""

COPY = 6.0
"""How loudly a copied token speaks over the current one."""


@torch.no_grad()
def put_copying_heads(model: Qwen3ForCausalLM, seed: int) -> None:
    """Write previous-token heads into layer 0 and matching heads into layer 1; everything else stays as it is.

    Raises:
        ValueError: the model has no room for them: it needs two layers, two heads of their own keys, and a head
            dimension with low frequencies.
    """
    config: Any = model.config
    hidden, head = config.hidden_size, config.head_dim
    if (
        config.num_hidden_layers < 2
        or config.num_attention_heads != config.num_key_value_heads
        or config.num_attention_heads < len(PREVIOUS)
    ):
        raise ValueError(f"copying heads need two layers and {len(PREVIOUS)} heads, each with keys of its own")
    generator = torch.Generator().manual_seed(seed)
    half = head // 2
    frequencies = config.rope_parameters["rope_theta"] ** (-torch.arange(0, head, 2) / head)
    still = [i for i in range(half) if frequencies[i] < LOW_FREQUENCY]
    kept = still + [i + half for i in still]
    if len(PREVIOUS) * len(kept) > hidden - 1 or not kept:
        raise ValueError(
            f"head_dim = {head} at hidden = {hidden} leaves {len(kept)} still dimensions; none or too many"
        )
    embedding: Any = model.model.embed_tokens.weight
    embedding.copy_(torch.randn(embedding.shape, generator=generator) * EMBEDDING)
    embedding[:, 0] = EMBEDDING * math.sqrt(hidden)
    layers: Any = model.model.layers
    first, second = layers[0].self_attn, layers[1].self_attn
    for norm in (first.q_norm, first.k_norm, second.q_norm, second.k_norm):
        norm.weight.fill_(GAIN)
    rooms = _orthogonal(hidden - 1, generator)
    what = torch.zeros(len(kept), hidden)
    what[:, 1:] = _orthogonal(hidden - 1, generator)[: len(kept)]
    before = []
    for number, distance in enumerate(PREVIOUS):
        rows = slice(number * head, (number + 1) * head)
        turn = distance * frequencies[:SHARP_FREQUENCIES]
        key, query = torch.zeros(head), torch.zeros(head)
        key[:SHARP_FREQUENCIES] = 1.0
        query[:SHARP_FREQUENCIES], query[half : half + SHARP_FREQUENCIES] = torch.cos(turn), -torch.sin(turn)
        # The rotation turns query and key by their positions; turned back by the distance, they agree that far apart.
        for weight, constant in ((first.q_proj.weight, query), (first.k_proj.weight, key)):
            weight[rows] *= 0.1
            weight[rows, 0] = constant
        where = torch.zeros(hidden, len(kept))
        where[1:] = rooms[number * len(kept) : (number + 1) * len(kept)].T
        first.v_proj.weight[rows] = 0.0
        first.v_proj.weight[rows][: len(kept)] = what
        first.o_proj.weight[:, rows] = 0.0
        first.o_proj.weight[:, rows][:, : len(kept)] = 2 * EMBEDDING * where
        before.append(where.T)
    copied = torch.zeros(2 * head, hidden)
    copied[: hidden - 1, 1:] = _orthogonal(hidden - 1, generator)[: 2 * head]
    # One token alone is ambiguous in a text where words recur, so a head matches the last few: the current token
    # against the previous one, and, each mixed apart, the previous against the one before it, and so on.
    mix, apart = _orthogonal(len(kept), generator), torch.eye(len(kept))
    query, key = torch.zeros_like(what), torch.zeros_like(what)
    for now, then in zip((what, *before), before, strict=False):
        query += apart @ now
        key += apart @ then
        apart = mix @ apart
    for number in range(2):
        rows = slice(number * head, (number + 1) * head)
        second.q_proj.weight[rows] = 0.0
        second.k_proj.weight[rows] = 0.0
        second.q_proj.weight[rows][kept] = query
        second.k_proj.weight[rows][kept] = key
        second.v_proj.weight[rows] = copied[rows]
        second.o_proj.weight[:, rows] = COPY * EMBEDDING * copied[rows].T


def _orthogonal(size: int, generator: torch.Generator) -> torch.Tensor:
    """A random orthogonal matrix, shape (size, size)."""
    return torch.linalg.qr(torch.randn(size, size, generator=generator))[0].T
