"""A model's size, and the time and memory of training it.

`costs` applies them to specs; `bench/gpu_check.py` compares them with measurements on a GPU.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

PEAK_FLOPS = 989e12
"""Dense bfloat16 multiplications and additions of an H100 or H200 in a second (NVIDIA's data sheet)."""
UTILISATION = 0.35
"""Share of the peak that training reaches."""


@dataclass(frozen=True)
class Shape:
    """A decoder's sizes.

    Attributes:
        attention: layers that keep keys and values of every token; linear attention keeps none.
        keys: numbers in all keys of a token and layer.
        only_full: whether all layers are full attention, so that samples of a prompt can be trained as a tree.
        linear: inputs and outputs of all linear modules but the last, added up: parameters that LoRA trains per rank.
    """

    parameters: int
    layers: int
    attention: int
    only_full: bool
    hidden: int
    keys: int
    linear: int
    vocabulary: int


def shape_of(config: Mapping[str, Any]) -> Shape:
    """Return the sizes of the model that transformers builds from a configuration, without memory for its weights."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    settings = dict(config)
    built = AutoConfig.for_model(settings.pop("model_type"), **settings)
    with torch.device("meta"):
        model: Any = AutoModelForCausalLM.from_config(built)
    head = model.get_output_embeddings()
    modules = [m for m in model.modules() if isinstance(m, torch.nn.Linear) and m is not head]
    layers, heads = built.num_hidden_layers, built.num_attention_heads
    kinds = getattr(built, "layer_types", None) or []
    size = getattr(built, "head_dim", None) or built.hidden_size // heads
    return Shape(
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        layers=layers,
        attention=layers - kinds.count("linear_attention"),
        only_full=set(kinds) <= {"full_attention"},
        hidden=built.hidden_size,
        keys=(getattr(built, "num_key_value_heads", None) or heads) * size,
        linear=sum(module.in_features + module.out_features for module in modules),
        vocabulary=built.vocab_size,
    )


@dataclass(frozen=True)
class Training:
    """Inputs of the estimates for a training, supervised or by reinforcement.

    Attributes:
        full: whether all parameters are trained; else LoRA's of this rank, on all linear modules.
        recomputed: whether activations are computed again in the backward pass.
        small_states: whether the optimiser keeps a byte a moment.
        shards: GPUs that share weights, gradients and moments (of LoRA the frozen weights).
        tile: the most logits held at a time; None: those of all scored tokens.
        length: tokens of a forward pass.
        scored: those of them whose logits are computed.
        reference: whether the weights before training stay in memory.
        copied: whether the policy generates from a copy of the trained weights.
    """

    full: bool
    rank: int
    recomputed: bool
    small_states: bool
    shards: int
    tile: int | None
    length: int
    scored: int
    reference: bool = False
    copied: bool = False

    @property
    def operations(self) -> int:
        """Operations a parameter and token: 2 forward, 4 backward (2 for frozen weights), 2 if recomputed."""
        return (6 if self.full else 4) + 2 * self.recomputed

    def trained(self, shape: Shape) -> float:
        """Return the number of trained parameters."""
        return shape.parameters if self.full else self.rank * shape.linear

    def seconds(self, shape: Shape, tokens: float) -> float:
        """Return the seconds of training on that number of tokens."""
        return self.operations * shape.parameters * tokens / (PEAK_FLOPS * UTILISATION)

    @property
    def state_bytes(self) -> int:
        """Bytes of the optimiser's states a trained parameter."""
        return 2 if self.small_states else 8

    def memory(self, shape: Shape) -> dict[str, float]:
        """Return the bytes on each GPU by part.

        Activations: 2 bytes of each input and output of the linear modules (35.2 GiB for 9,152 tokens of Qwen3-4B's
        shape, 35.4 measured on an H200); with gradient checkpointing those of one layer, and 2 bytes a token, width
        and layer. Copies: autocast keeps float32 weights in bfloat16 for the
        length of a pass; processes that share weights hold those of a layer at a time.
        """
        number, shards = self.trained(shape), self.shards
        # An adapter is whole on every GPU; frozen weights are divided.
        weights = 4 * number / shards if self.full else 2 * shape.parameters / shards + 4 * number
        each = number / shards if self.full else number
        linear = 2 * shape.linear
        kept = linear / shape.layers + 2 * shape.hidden * shape.layers if self.recomputed else linear
        return {
            "weights": weights,
            "copies": (2 * number if self.full and shards == 1 else 0.0) + 4 * number * self.copied,
            "gradients": 4 * each,
            "optimiser": self.state_bytes * each,
            "logits": 10 * min(self.scored * shape.vocabulary, self.tile or math.inf),
            "reference": 2 * shape.parameters if self.reference else 0.0,
            "activations": float(kept * self.length),
        }
