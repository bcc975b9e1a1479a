"""A model's size, and the time and memory of training it: formulas alone, so that a GPU machine needs nothing else.

`costs` applies them to specs; `bench/gpu_check.py` compares them with what a GPU took.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

PEAK_FLOPS = 989e12
"""Dense bfloat16 multiplications and additions of an H100 or H200 in a second (NVIDIA's data sheet)."""
UTILISATION = 0.35
"""Share of the peak that training reaches."""

HYBRID = re.compile(r"qwen3\.[56]", re.IGNORECASE)
"""Names of models that attend in one layer of four (`full_attention_interval` of Qwen3.5's configuration)."""
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*B(?![a-z])", re.IGNORECASE)


@dataclass(frozen=True)
class Shape:
    """A decoder's sizes and where they are from.

    Attributes:
        attention: layers that keep keys and values of every token; linear attention keeps none.
        keys: numbers in all keys of a token and layer.
        linear: inputs and outputs of a layer's linear modules, added up: parameters that LoRA trains per rank.
    """

    parameters: float
    layers: int
    attention: int
    hidden: int
    keys: int
    linear: float
    vocabulary: int
    source: str


def shape_of(model: str, config: Mapping[str, Any] | None) -> Shape | None:
    """Return a model's sizes from its configuration, else estimated from the number in its name, else None."""
    if config is not None and "hidden_size" in config:
        hidden, layers, vocabulary = config["hidden_size"], config["num_hidden_layers"], config["vocab_size"]
        heads = config["num_attention_heads"]
        size = config.get("head_dim") or hidden // heads
        keys = (config.get("num_key_value_heads") or heads) * size
        queries, inner = heads * size, config["intermediate_size"]
        block = 2 * hidden * (queries + keys) + 3 * hidden * inner + 2 * hidden
        linear = 2 * (hidden + queries) + 2 * (hidden + keys) + 3 * (hidden + inner)
        embeddings = vocabulary * hidden * (1 if config.get("tie_word_embeddings") else 2)
        kinds: list[str] = config.get("layer_types") or []
        attention = layers - kinds.count("linear_attention")
        parameters = embeddings + layers * block
        return Shape(parameters, layers, attention, hidden, keys, linear, vocabulary, "its configuration")
    if match := _SIZE.search(model):
        parameters = float(match[1]) * 1e9
        hidden = round((parameters * 80 / 12) ** (1 / 3))
        layers = round(hidden / 80)
        hybrid = bool(HYBRID.search(model))
        source = f"the {match[0]} of its name: 12 layers hidden² parameters, 80 of width a layer, 4 heads a key" + (
            ", attention in one layer of four" if hybrid else ""
        )
        attention = math.ceil(layers / 4) if hybrid else layers
        return Shape(parameters, layers, attention, hidden, hidden // 4, 20 * hidden, 151_936, source)
    return None


@dataclass(frozen=True)
class Training:
    """Inputs of the estimates for a training, supervised or by reinforcement.

    Attributes:
        full: whether all parameters are trained; else LoRA's of this rank, on all linear modules.
        recomputed: whether activations are computed again in the backward pass.
        small_states: whether the optimiser keeps a byte a moment.
        shards: GPUs that share weights, gradients and moments (of LoRA the frozen weights).
        tile: the most logits held at a time; None: those of all tokens.
        reference: whether the weights before training stay in memory.
        length: tokens of a row.
    """

    full: bool
    rank: int
    recomputed: bool
    small_states: bool
    shards: int
    tile: int | None
    reference: bool
    length: int

    @property
    def operations(self) -> int:
        """Operations a parameter and token: 2 forward, 4 backward (2 for frozen weights), 2 if recomputed."""
        return (6 if self.full else 4) + 2 * self.recomputed

    def trained(self, shape: Shape) -> float:
        """Return the number of trained parameters."""
        return shape.parameters if self.full else self.rank * shape.linear * shape.layers

    def seconds(self, shape: Shape, tokens: float) -> float:
        """Return the seconds of training on that number of tokens."""
        return self.operations * shape.parameters * tokens / (PEAK_FLOPS * UTILISATION)

    @property
    def state_bytes(self) -> int:
        """Bytes of the optimiser's states a trained parameter."""
        return 2 if self.small_states else 8

    def memory(self, shape: Shape) -> dict[str, float]:
        """Return the bytes on each GPU by part.

        Activations: Korthikanti et al. 2022, 34 bytes a token, width and layer without the attention matrix; with
        gradient checkpointing 2 bytes, and 34 of one layer. Copies: autocast keeps float32 weights in bfloat16 for the
        length of a pass; processes that share weights hold those of a layer at a time.
        """
        number, shards = self.trained(shape), self.shards
        # An adapter is whole on every GPU; frozen weights are divided.
        weights = 4 * number / shards if self.full else 2 * shape.parameters / shards + 4 * number
        each = number / shards if self.full else number
        layers = shape.layers * 2 + 34 if self.recomputed else shape.layers * 34
        return {
            "weights": weights,
            "copies": 2 * number if self.full and shards == 1 else 0.0,
            "gradients": 4 * each,
            "optimiser": self.state_bytes * each,
            "activations": layers * self.length * shape.hidden,
            "logits": 10 * min(self.length * shape.vocabulary, self.tile or math.inf),
            "reference": 2 * shape.parameters if self.reference else 0.0,
        }
