"""Liger's kernels give what the label head's tiles and PyTorch's layers give; a CPU uses neither."""

from __future__ import annotations

import importlib.util
import os
import sys
from contextlib import nullcontext
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, Qwen3ForCausalLM
from transformers.activations import ACT2FN
from transformers.integrations import liger as integration
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

from etpi_resources import cuda
from etpi_resources.trainers.workers import device, proof, sft_worker
from etpi_resources.trainers.workers.device import Compute
from etpi_resources.trainers.workers.label_head import add_label_head
from etpi_resources.trainers.workers.layer_kernels import fused_layers
from etpi_resources.trainers.workers.weighted_trainer import WeightedSFTTrainer
from tests.support.models import qwen3
from tests.support.sft import config_of, in_process, worker_in
from tests.support.tiny_training import learnable, make_base, write

INSTALLED = all(importlib.util.find_spec(name) for name in ("triton", "liger_kernel"))
GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if GPU else "cpu")


def net(**more: object) -> Qwen3ForCausalLM:
    return qwen3(97, num_hidden_layers=1, num_key_value_heads=1, intermediate_size=48, **more).to(DEVICE)


@pytest.mark.skipif(
    not (INSTALLED and (GPU or os.environ.get("TRITON_INTERPRET") == "1")),
    reason="needs liger-kernel, Triton and a GPU or TRITON_INTERPRET=1",
)
def test_losses_hits_and_gradients_are_those_of_tiles():
    ids, positions = torch.randint(3, 97, (2, 12), device=DEVICE), torch.tensor([1, 4, 5, 9], device=DEVICE)
    labels, weights = torch.randint(3, 97, (2, 4), device=DEVICE), torch.rand(2, 4, device=DEVICE)
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


@pytest.mark.parametrize(
    ("kind", "more"),
    [("modernbert-decoder", {}), ("recurrent_gemma", {"logits_soft_cap": 0.7}), ("granite", {"logits_scaling": 3.0})],
)
def test_model_with_more_than_a_matrix_behind_its_hidden_states_has_its_own_losses(kind, more):
    torch.manual_seed(0)
    shape: dict[str, Any] = {
        "vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "head_dim": 16,
        "num_key_value_heads": 1, "intermediate_size": 48, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    }  # fmt: skip
    model = AutoModelForCausalLM.from_config(CONFIG_MAPPING[kind](**shape, **more)).eval()
    ids, labels, positions = torch.randint(3, 64, (2, 9)), torch.randint(3, 64, (2, 3)), torch.tensor([1, 4, 7])
    logits = model(input_ids=ids, use_cache=False).logits[:, positions]
    wanted = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none")
    with pytest.raises(ValueError, match="train.loss_kernel"):
        add_label_head(model, liger=True)
    add_label_head(model)
    nll, _ = model(input_ids=ids, label_positions=positions, labels=labels, use_cache=False)
    torch.testing.assert_close(nll.flatten(), wanted)


@pytest.mark.skipif(not (INSTALLED and GPU), reason="needs liger-kernel and a GPU; Triton's interpreter is not enough")
def test_fused_layers_give_the_logits_and_gradients_of_pytorch():
    ids, results = torch.randint(3, 97, (2, 12), device=DEVICE), []
    plain = net()
    for model in (plain, fused := net()):
        with fused_layers(model, required=True) if model is fused else nullcontext():
            logits = model(input_ids=ids).logits
            logits.square().sum().backward()
            unfused = type(model.model.norm).forward is model.model.norm.forward.__func__
            assert unfused == (model is not fused), "the norms are not Liger's"
        results.append((logits.detach(), *(weights.grad for weights in model.parameters())))
    for of_torch, of_liger in zip(*results, strict=True):
        torch.testing.assert_close(of_liger, of_torch, rtol=1e-4, atol=1e-5)


QWEN3 = sys.modules[Qwen3ForCausalLM.__module__]


@pytest.fixture
def kinds(monkeypatch) -> dict[str, None]:
    """The kinds of model for which a Liger that replaces one class has kernels."""
    patch: Any = ModuleType("liger_kernel.transformers.monkey_patch")
    patch.MODEL_TYPE_TO_APPLY_LIGER_FN = {"qwen3": None}
    monkeypatch.setitem(sys.modules, patch.__name__, patch)

    def fuse(model: Any, kernels: Any) -> None:
        monkeypatch.setattr(QWEN3, "Qwen3RMSNorm", None)
        model.base_model.norm.forward = lambda states: states
        model.base_model.layers[0].mlp.act_fn = torch.nn.Identity()  # as Nemotron's
        ACT2FN["silu"] = torch.nn.Identity

    monkeypatch.setattr(integration, "apply_liger_kernel", fuse)
    return patch.MODEL_TYPE_TO_APPLY_LIGER_FN


@pytest.mark.usefixtures("kinds")
def test_transformers_and_the_model_are_their_own_again_after_fused_layers():
    model, before = net(), QWEN3.Qwen3RMSNorm
    model.__class__ = type("FSDPQwen3", (Qwen3ForCausalLM,), {})  # as sharding does
    norm, states = model.base_model.norm, torch.full((1, 1, model.config.hidden_size), 3.0)
    with pytest.raises(RuntimeError, match="training broke"), fused_layers(model, required=False):
        assert QWEN3.Qwen3RMSNorm is None and (norm(states) == states).all()
        raise RuntimeError("training broke")
    assert QWEN3.Qwen3RMSNorm is before and (norm(states) != states).all()
    assert type(model.base_model.layers[0].mlp.act_fn) is type(ACT2FN["silu"]) is not torch.nn.Identity


@pytest.mark.parametrize("act", ["silu", "relu"])
def test_model_without_kernels_is_refused(kinds, act):
    if act == "silu":
        kinds.clear()
    with pytest.raises(ValueError, match=rf"qwen3 .*{act}; .*train\.layer_kernels"):
        fused_layers(net(hidden_act=act), required=True).__enter__()
    with fused_layers(net(hidden_act=act), required=False) as fused:
        assert not fused


@pytest.mark.usefixtures("kinds")
def test_layers_are_fused_while_a_worker_trains_and_not_when_it_reads_back(tmp_path, monkeypatch):
    base, files, norms = make_base(tmp_path / "base"), [write(learnable(2), tmp_path / "s.parquet")], {}

    def note_norms(owner: Any, name: str) -> None:
        unnoted = getattr(owner, name)

        def noting(*arguments: Any, **named: Any) -> Any:
            norms[name] = QWEN3.Qwen3RMSNorm
            return unnoted(*arguments, **named)

        monkeypatch.setattr(owner, name, noting)

    note_norms(WeightedSFTTrainer, "train")
    note_norms(proof, "finish")
    monkeypatch.setattr(sft_worker, "uses_liger", lambda worker, compute, option: option == "layer_kernels")
    monkeypatch.setattr(device, "version", lambda name: f"of {name}")
    trained = in_process(tmp_path / "run", config_of(base, files))
    assert trained.libraries["liger_kernel"] == "of liger_kernel"
    assert norms == {"train": None, "finish": Qwen3RMSNorm}


def test_cpu_trains_without_liger_and_says_so(tmp_path, capsys):
    base, files = make_base(tmp_path / "base"), [write(learnable(2), tmp_path / "s.parquet")]
    options = {"loss_kernel": "liger", "layer_kernels": "liger"}
    plain, asked = (in_process(tmp_path / str(len(k)), config_of(base, files, **k)) for k in ({}, options))
    assert [line.loss for line in asked.log] == [line.loss for line in plain.log]
    said = capsys.readouterr().out
    assert all(f'train.{option} = "liger" needs a GPU' in said for option in options)


@pytest.mark.parametrize("option", ["loss_kernel", "layer_kernels"])
def test_gpu_without_the_package_is_told_what_to_install(tmp_path, monkeypatch, option):
    monkeypatch.setattr(sft_worker, "find_spec", lambda name: None)
    config = config_of(tmp_path, [], **{option: "liger"})
    with pytest.raises(RuntimeError, match=rf'train.{option} .*pip install "etpi\[gpu\]"'):
        sft_worker.uses_liger(worker_in(tmp_path / "run", config), Compute(gpu=True, dtype="bf16"), option)


def test_auto_uses_no_liger_where_triton_cannot_build_its_driver(tmp_path, monkeypatch):
    monkeypatch.setattr(sft_worker, "find_spec", lambda name: name)
    worker, compute = worker_in(tmp_path / "run", config_of(tmp_path, [])), Compute(gpu=True, dtype="bf16")
    runtime: Any = ModuleType("triton.runtime")
    monkeypatch.setitem(sys.modules, "triton", ModuleType("triton"))
    monkeypatch.setitem(sys.modules, runtime.__name__, runtime)
    monkeypatch.delitem(sys.modules, "triton.runtime.driver", raising=False)
    monkeypatch.setattr(cuda, "has_triton", lambda: True)
    cuda.triton_runs.cache_clear()
    with pytest.warns(UserWarning, match="'driver'"):  # as without a compiler: its driver cannot be had
        assert not sft_worker.uses_liger(worker, compute, "layer_kernels")
    runtime.driver = SimpleNamespace(active=None)
    cuda.triton_runs.cache_clear()
    assert sft_worker.uses_liger(worker, compute, "layer_kernels")
    cuda.triton_runs.cache_clear()
