"""Liger's kernel gives the losses, hits and gradients of the label head's tiles; without a GPU tiles compute them."""

from __future__ import annotations

import importlib.util
import os

import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from etpi_resources.trainers.workers import sft_worker
from etpi_resources.trainers.workers.device import Compute
from etpi_resources.trainers.workers.label_head import add_label_head
from tests.support.sft import config_of, in_process, worker_in
from tests.support.tiny_training import learnable, make_base, write

INSTALLED = all(importlib.util.find_spec(name) for name in ("triton", "liger_kernel"))
RUNS = INSTALLED and (torch.cuda.is_available() or os.environ.get("TRITON_INTERPRET") == "1")


def net(**more: object) -> Qwen3ForCausalLM:
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=97, hidden_size=32, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1, head_dim=16,
        intermediate_size=48, tie_word_embeddings=True, **more,
    )  # fmt: skip
    return Qwen3ForCausalLM(config)


@pytest.mark.skipif(not RUNS, reason="needs liger-kernel, Triton and a GPU or TRITON_INTERPRET=1")
def test_losses_hits_and_gradients_are_those_of_tiles():
    ids, positions = torch.randint(3, 97, (2, 12)), torch.tensor([1, 4, 5, 9])
    labels, weights = torch.randint(3, 97, (2, 4)), torch.rand(2, 4)
    labels[0, 1] = -100
    results = []
    for liger in (False, True):
        model = net()
        add_label_head(model, liger=liger)
        nll, hits = model(input_ids=ids, label_positions=positions, labels=labels)  # type: ignore[misc]
        (nll * weights).sum().backward()
        results.append((nll.detach(), hits, model.get_input_embeddings().weight.grad))
    for tiles, fused in zip(*results, strict=True):
        torch.testing.assert_close(fused, tiles, rtol=1e-5, atol=1e-6)


def test_model_that_rescales_its_logits_is_refused():
    with pytest.raises(ValueError, match="qwen3 rescales its logits.*train.loss_kernel"):
        add_label_head(net(logit_scale=0.5), liger=True)


def test_cpu_trains_with_tiles_and_says_so(tmp_path, capsys):
    base, files = make_base(tmp_path / "base"), [write(learnable(2), tmp_path / "s.parquet")]
    plain, asked = (in_process(tmp_path / k, config_of(base, files, loss_kernel=k)) for k in ("tiles", "liger"))
    assert [line.loss for line in asked.log] == [line.loss for line in plain.log]
    assert 'train.loss_kernel = "liger" needs a GPU' in capsys.readouterr().out


def test_gpu_without_the_package_is_told_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setattr(sft_worker, "find_spec", lambda name: None)
    config = config_of(tmp_path, [], loss_kernel="liger")
    with pytest.raises(RuntimeError, match=r'pip install "etpi\[gpu\]"'):
        sft_worker.uses_liger(worker_in(tmp_path / "run", config), Compute(gpu=True, dtype="bf16"))
