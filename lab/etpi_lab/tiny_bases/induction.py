"""Initialises a tiny model with copying heads, so that it need not spend its training on forming them.

A transformer copies an unseen name by induction (Olsson et al. 2022, "In-context Learning and Induction Heads"): a head
of one layer gives each position its previous token; a head of the next layer attends to the position whose previous
token is the current one, and copies the token there. From random weights a model of this size needs over a million
tokens of repeated sequences before such heads form. Here both are written into the weights, and training continues from
there.

With rotary positions a head attends a fixed distance back if its query and key are constant vectors and the query is
rotated by that distance: the high frequencies make the match sharp. Matching content far away needs the opposite: only
the low frequencies, which hardly rotate over a context. The constant comes from one coordinate that all embeddings
share.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from transformers import Qwen3ForCausalLM

EMBEDDING = 0.1
"""Standard deviation of the token embeddings."""

PREVIOUS = (1, 2, 3)
"""Distance at which the heads of the first layer attend."""

SHARP_FREQUENCIES = 6
"""Number of the highest rotary frequencies that a head of the first layer uses for its distance."""

LOW_FREQUENCY = 0.003
"""Radians per token below which a rotary frequency hardly rotates over a context of a few hundred tokens."""

GAIN = 2.0
"""Weight of the query and key norms: a larger one makes attention sharper."""

COPY = 6.0
"""Scale of a copied token's contribution against the current token's."""


@torch.no_grad()
def put_copying_heads(model: Qwen3ForCausalLM, seed: int) -> None:
    """Write previous-token heads into layer 0 and matching heads into layer 1; other weights stay as they are.

    Raises:
        ValueError: the model is too small: it needs two layers, three heads with keys of their own, and a head
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
    frequencies = config.rope_parameters["rope_theta"] ** (-torch.arange(0, head, 2) / head)
    low = [i for i in range(head // 2) if frequencies[i] < LOW_FREQUENCY]
    content = low + [i + head // 2 for i in low]  # the dimensions of a head by which it matches content
    if len(PREVIOUS) * len(content) > hidden - 1 or not content:
        raise ValueError(
            f"head_dim = {head} at hidden = {hidden} has {len(content)} dimensions of low frequency; none or too many"
        )
    generator = torch.Generator().manual_seed(seed)
    _put_embeddings(model, generator)
    layers: Any = model.model.layers
    first, second = layers[0].self_attn, layers[1].self_attn
    for norm in (first.q_norm, first.k_norm, second.q_norm, second.k_norm):
        norm.weight.fill_(GAIN)
    subspaces = _orthogonal(hidden - 1, generator)  # one for each head of the first layer to write into
    current = torch.zeros(len(content), hidden)  # reads the content of the current token
    current[:, 1:] = _orthogonal(hidden - 1, generator)[: len(content)]
    previous = _put_previous_token_heads(first, frequencies, current, subspaces)
    _put_matching_heads(second, content, current, previous, generator)


def _put_embeddings(model: Any, generator: torch.Generator) -> None:
    """Random embeddings, with one coordinate that all of them share."""
    embedding = model.model.embed_tokens.weight
    embedding.copy_(torch.randn(embedding.shape, generator=generator) * EMBEDDING)
    embedding[:, 0] = EMBEDDING * math.sqrt(embedding.shape[1])


def _put_previous_token_heads(
    attention: Any, frequencies: torch.Tensor, current: torch.Tensor, subspaces: torch.Tensor
) -> list[torch.Tensor]:
    """Write a head for each distance of PREVIOUS, which copies the content of the token that far back into a subspace.

    Args:
        current: (content, hidden), reads the content of the current token.
    Returns:
        For each distance, (content, hidden): reads the content that the head has copied.
    """
    size, hidden = current.shape
    half = len(frequencies)
    head = 2 * half
    previous = []
    for number, distance in enumerate(PREVIOUS):
        rows = slice(number * head, (number + 1) * head)
        angle = distance * frequencies[:SHARP_FREQUENCIES]
        key, query = torch.zeros(head), torch.zeros(head)
        key[:SHARP_FREQUENCIES] = 1.0
        query[:SHARP_FREQUENCIES], query[half : half + SHARP_FREQUENCIES] = torch.cos(angle), -torch.sin(angle)
        # Rotary embedding rotates query and key by their positions. Rotated back by the distance, they match that far
        # apart.
        for weight, constant in ((attention.q_proj.weight, query), (attention.k_proj.weight, key)):
            weight[rows] *= 0.1
            weight[rows, 0] = constant
        subspace = torch.zeros(hidden, size)
        subspace[1:] = subspaces[number * size : (number + 1) * size].T
        attention.v_proj.weight[rows] = 0.0
        attention.v_proj.weight[rows][:size] = current
        attention.o_proj.weight[:, rows] = 0.0
        attention.o_proj.weight[:, rows][:, :size] = 2 * EMBEDDING * subspace
        previous.append(subspace.T)
    return previous


def _put_matching_heads(
    attention: Any,
    content: list[int],
    current: torch.Tensor,
    previous: list[torch.Tensor],
    generator: torch.Generator,
) -> None:
    """Write two heads that attend to the position whose previous tokens are the current ones, and copy its token."""
    size, hidden = current.shape
    head = attention.head_dim
    copied = torch.zeros(2 * head, hidden)
    copied[: hidden - 1, 1:] = _orthogonal(hidden - 1, generator)[: 2 * head]
    # A single token is ambiguous in a text where words recur, so a head matches the last few: the current token against
    # a key's previous one, the previous against the one before it, and so on, each pair in a rotation of its own.
    mix, rotation = _orthogonal(size, generator), torch.eye(size)
    query, key = torch.zeros_like(current), torch.zeros_like(current)
    for of_query, of_key in zip((current, *previous), previous, strict=False):
        query += rotation @ of_query
        key += rotation @ of_key
        rotation = mix @ rotation
    for number in range(2):
        rows = slice(number * head, (number + 1) * head)
        attention.q_proj.weight[rows] = 0.0
        attention.k_proj.weight[rows] = 0.0
        attention.q_proj.weight[rows][content] = query
        attention.k_proj.weight[rows][content] = key
        attention.v_proj.weight[rows] = copied[rows]
        attention.o_proj.weight[:, rows] = COPY * EMBEDDING * copied[rows].T


def _orthogonal(size: int, generator: torch.Generator) -> torch.Tensor:
    """Return a random orthogonal matrix, shape (size, size)."""
    return torch.linalg.qr(torch.randn(size, size, generator=generator))[0].T
