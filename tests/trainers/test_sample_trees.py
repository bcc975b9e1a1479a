"""A group packed as a tree has the log-probs and the gradient of its rows."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from transformers import Qwen3ForCausalLM
from trl.trainer.utils import add_fused_lm_head

from etpi_resources.trainers.policy_link import Sample
from etpi_resources.trainers.workers.sample_trees import pack_samples
from etpi_resources.trainers.workers.tree_attention import refuses_trees
from tests.support.sequences import VOCABULARY, random_model

torch.set_num_threads(1)
Group = list[tuple[list[int], list[int]]]
"""(prompt, sample) of every row."""


@pytest.fixture(scope="module")
def net() -> Qwen3ForCausalLM:
    created = random_model(VOCABULARY)
    add_fused_lm_head(created, outputs=("log_probs", "entropy"))
    assert refuses_trees(created) is None
    return created


def drawn(seed: int, prompts: list[int], samples: int) -> Group:
    """So many samples of unlike length of prompts of these lengths, mixed."""
    rng = np.random.default_rng(seed)
    texts = [rng.integers(1, VOCABULARY, n).tolist() for n in prompts]
    group = [(text, rng.integers(1, VOCABULARY, rng.integers(1, 9)).tolist()) for text in texts for _ in range(samples)]
    return [group[i] for i in rng.permutation(len(group))]


def samples_of(group: Group) -> list[Sample]:
    return [Sample(prompt, sample, [1] * len(sample), [0.0] * len(sample), 0.0, 0.0) for prompt, sample in group]


def gradient(net: Qwen3ForCausalLM, loss: torch.Tensor) -> torch.Tensor:
    net.zero_grad()
    loss.backward()
    return torch.cat([p.grad.flatten() for p in net.parameters() if p.grad is not None]).double()


@pytest.mark.parametrize(
    "group",
    [
        drawn(0, [40], 8),
        drawn(1, [5, 17, 60], 3),
        drawn(2, [1], 4),
        drawn(3, [9, 9, 9, 9], 1),
        [([3, 4, 5], [6, 7])] * 2 + [([3, 4], [5, 6, 7])],
    ],
    ids=["one prompt", "several prompts", "a prompt of one token", "nothing shared", "samples alike"],
)
def test_a_packed_group_has_the_gradient_of_its_rows(net: Qwen3ForCausalLM, group: Group) -> None:
    width = max(len(s) for _, s in group)
    packed = pack_samples(samples_of(group), width, torch.device("cpu"))
    result = packed.unpack(net(**packed.arguments, fused_lm_head=True).log_probs)
    weights = torch.linspace(-1, 1.5, result.numel()).view_as(result)  # an advantage a token: an error of place shows
    apart = torch.zeros_like(result)
    for row, (prompt, sample) in enumerate(group):
        scores = net(input_ids=torch.tensor([prompt + sample]), use_cache=False).logits[0].log_softmax(-1)
        for at, token in enumerate(sample):
            apart[row, at] = scores[len(prompt) + at - 1, token]
    assert torch.allclose(result, apart, atol=1e-5)
    ours, theirs = gradient(net, (result * weights).sum()), gradient(net, (apart * weights).sum())
    assert (ours - theirs).norm() / theirs.norm() <= 1e-5


def test_prompt_is_stored_once_for_all_its_samples() -> None:
    group = drawn(4, [500, 300], 8)
    packed = pack_samples(samples_of(group), max(len(s) for _, s in group), torch.device("cpu"))
    real = 500 + 300 + int(packed.real.sum()) + 16  # a branch repeats the prompt's last token
    assert real - 2 <= packed.arguments["input_ids"].shape[1] < real + 128
