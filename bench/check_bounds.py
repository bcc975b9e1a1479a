"""Measure the figures that checks bound, on random models of Qwen3's shapes: `python bench/check_bounds.py [SHAPE …]`.

Figures of a shape, and the checks that bound them:

- reload: largest difference of logits between a model and its files read back, both in bf16 (`reload_equals_saved`);
- gap: mean absolute difference of the log-probabilities of sampled ids, in nats a token: decoded from bf16 weights with
  cached keys, and computed at once under bf16 autocast from the same weights in float32 (`logprobs_agree`);
- cold: the same for a fault, sampling at temperature 0.7 in place of 1;
- batch: the same for ids decoded alone and beside another row (the noise that `differs_from_base` allows for).

Weights are normal with a deviation of 0.02, as models are initialised. The head is scaled until its probabilities have
an entropy of half a nat, as trained models have: nearly equal probabilities would hide rounding.
"""

from __future__ import annotations

import sys
import tempfile

import torch
from machine import machine
from transformers import Qwen3Config, Qwen3ForCausalLM

from etpi_assets.evaluation.probes import LEAST_GAP
from etpi_assets.training.sft_checks import SAME_IN_HALF
from etpi_resources.trainers.policy_link import largest_gap
from etpi_resources.trainers.workers import checkpointing as cp

SHAPES = {
    "0.6B": (1024, 28, 16, 3072),
    "1.7B": (2048, 28, 16, 6144),
    "4B": (2560, 36, 32, 9728),
    "8B": (4096, 36, 32, 12288),
}
"""Name -> width, layers, heads, width of the feed-forward part."""
LAYERS = 8
"""The most layers that a model of 4B or 8B is given: in float32 on a CPU no more fit."""
VOCABULARY, PROMPT, SAMPLED = 151_936, 32, 32
ENTROPY = 0.5
"""Nats a token."""


def model_of(shape: str) -> Qwen3ForCausalLM:
    """Return a random model in bf16 whose probabilities have at most an entropy of `ENTROPY`."""
    width, layers, heads, inner = SHAPES[shape]
    config = Qwen3Config(
        vocab_size=VOCABULARY, hidden_size=width, num_hidden_layers=layers if width < 2500 else LAYERS,
        num_attention_heads=heads, num_key_value_heads=8, head_dim=128, intermediate_size=inner,
        tie_word_embeddings=False, dtype="bfloat16",
    )  # fmt: skip
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    try:
        model = Qwen3ForCausalLM(config).eval()
    finally:
        torch.set_default_dtype(torch.float32)
    ids = torch.randint(VOCABULARY, (1, PROMPT))
    with torch.no_grad():
        for _ in range(12):
            logits = model(ids).logits.float()
            if torch.special.entr(logits.softmax(-1)).sum(-1).mean() < ENTROPY:
                break
            model.lm_head.weight.mul_(1.25)
    return model


def decode(
    model: Qwen3ForCausalLM, prompt: torch.Tensor, forced: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Sample `SAMPLED` ids of each row of a prompt, or take `forced`, one at a time; return ids and log-probs."""
    ids, logprobs, cache, step = [], [], None, prompt
    for position in range(SAMPLED):
        output = model(step, past_key_values=cache, use_cache=True, logits_to_keep=1)
        cache, scores = output.past_key_values, output.logits[:, -1].float().log_softmax(-1)
        chosen = torch.multinomial(scores.exp(), 1) if forced is None else forced[:, position : position + 1]
        ids.append(chosen)
        logprobs.append(scores.gather(1, chosen))
        step = chosen
    return torch.cat(ids, 1), torch.cat(logprobs, 1)


@torch.no_grad()
def measure(shape: str) -> dict[str, float]:
    model = model_of(shape)
    prompt = torch.randint(VOCABULARY, (2, PROMPT))
    ids, together = decode(model, prompt)
    _, alone = decode(model, prompt[:1], ids[:1])
    figures = {"logprob": float(together.mean()), "batch": float((together[:1] - alone).abs().mean())}
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        read = cp.load_model(folder, torch.bfloat16)
        assert not cp.differing_tensors(model, read, torch.bfloat16)
        figures["reload"] = cp.largest_difference(cp.logits_of(read, prompt[:1]), cp.logits_of(model, prompt[:1]))
        del read
        trained = model.float()
        with torch.autocast("cpu", torch.bfloat16):
            logits = trained(torch.cat([prompt, ids], 1)).logits[:, PROMPT - 1 : -1].float()
    scores, cold = (logits.div(t).log_softmax(-1).gather(2, ids[:, :, None])[:, :, 0] for t in (1.0, 0.7))
    return figures | {"gap": float((scores - together).abs().mean()), "cold": float((cold - together).abs().mean())}


def main(shapes: list[str]) -> None:
    print(machine())
    print(f"bounds: reload {SAME_IN_HALF}, gap {largest_gap('bf16')}, batch: twice the base's, at least {LEAST_GAP}")
    for shape in shapes or SHAPES:
        print(shape, {name: round(value, 5) for name, value in measure(shape).items()}, flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
