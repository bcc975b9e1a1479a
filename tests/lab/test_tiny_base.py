"""The tiny base: copying heads from the first step, a corpus in the loop's own form, one build by content."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer, Qwen3Config, Qwen3ForCausalLM

from etpi_assets.specs.rollout_set import TinySection
from etpi_lab.tiny_bases import recipe as base
from etpi_lab.tiny_bases.induction import put_copying_heads
from etpi_lab.tiny_bases.muon import Muon, orthogonal
from etpi_lab.tiny_bases.worker import BaseWorkerResult, backward
from etpi_resources.chat.format import load_chat_format
from etpi_resources.lake.lake import Lake
from etpi_resources.trainers.pipes import run_worker
from etpi_resources.trainers.workers.replicas import ThreadReplicas

SMALL = TinySection(conversations=16, exercises=8, batch_tokens=4096, layers=2)


def _model(**size) -> Qwen3ForCausalLM:
    torch.manual_seed(0)
    size = {"num_attention_heads": 3, "num_key_value_heads": 3, "num_hidden_layers": 3, **size}
    return Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=851,
            hidden_size=128,
            intermediate_size=384,
            head_dim=64,
            tie_word_embeddings=True,
            rope_parameters={"rope_type": "default", "rope_theta": 1e6},
            **size,
        )
    )


@torch.no_grad()
def _copied(model: Qwen3ForCausalLM, length: int, distinct: int = 851) -> float:
    """Share of tokens told right in the second pass over a random sequence."""
    once = torch.randint(0, distinct, (8, length), generator=torch.Generator().manual_seed(1))
    twice = torch.cat([once, once], 1)
    told = model(input_ids=twice).logits.argmax(-1)
    return (told[:, length + 1 : -1] == twice[:, length + 2 :]).float().mean().item()


def test_heads_copy_before_any_training():
    model = _model()
    assert _copied(model, 30) < 0.05
    put_copying_heads(model, seed=0)
    assert _copied(model, 30) > 0.8
    assert _copied(model, 200) > 0.7
    # Where tokens recur, one or two do not say what comes next, and three do.
    assert _copied(model, 200, distinct=60) > 0.75
    assert _copied(model, 200, distinct=20) > 0.6


@pytest.mark.parametrize("size", [{"num_hidden_layers": 1}, {"num_key_value_heads": 1}])
def test_model_too_small_for_copying_heads_is_refused(size):
    with pytest.raises(ValueError, match=" 3 heads"):
        put_copying_heads(_model(**size), seed=0)


def _part(seed: int, length: int) -> dict[str, torch.Tensor]:
    draw = torch.Generator().manual_seed(seed)
    return {
        "input_ids": torch.randint(0, 851, (2, length), generator=draw),
        "positions": torch.arange(length - 1),
        "labels": torch.randint(0, 851, (2, length - 1), generator=draw),
        "weights": torch.rand((2, length - 1), generator=draw),
    }


@torch.no_grad()
def _step(model: Qwen3ForCausalLM) -> None:
    for parameter in model.parameters():
        parameter -= parameter.grad
        parameter.grad = None


@pytest.mark.usefixtures("own_threads")
def test_replicas_train_as_the_whole_batch_would():
    model, plain = _model(), _model()
    replicas = ThreadReplicas(model)
    for seed in (1, 3):  # the second sees the weights after a step
        parts = [_part(seed, 40), _part(seed + 1, 64)]
        whole = float(sum(part["weights"].sum() for part in parts))
        value = sum(replicas.backward(parts, partial(backward, step_weight=whole)))
        losses = []
        for part in parts:
            logits = plain(input_ids=part["input_ids"]).logits[:, :-1]
            nll = torch.nn.functional.cross_entropy(logits.flatten(0, 1), part["labels"].flatten(), reduction="none")
            losses.append((nll * part["weights"].flatten()).sum() / whole)
        sum(losses).backward()
        assert value == pytest.approx(sum(losses).item(), rel=1e-5)
        for (name, mine), theirs in zip(model.named_parameters(), plain.parameters(), strict=True):
            apart = (mine.grad - theirs.grad).norm() / theirs.grad.norm()
            assert apart < 1e-4, name  # float32 in another order
        _step(model)
        _step(plain)


@pytest.mark.parametrize("world", base.WORLDS)
def test_the_corpus_has_the_form_of_the_loop(world: str):
    chat = load_chat_format("tiny")
    section = TinySection.model_validate({**SMALL.model_dump(), "world": world})
    rows = list(base.corpus_rows(section, chat))
    assert len(rows) == SMALL.conversations + SMALL.exercises
    for row in rows:
        spans = list(zip(row["span_starts"], row["span_ends"], row["span_weights"], strict=True))
        assert spans[0][0] == 1 and spans[-1][1] == len(row["input_ids"])
        assert all(a[1] == b[0] for a, b in zip(spans, spans[1:], strict=False))
        own = [row["input_ids"][start:end] for start, end, weight in spans if weight == 1.0]
        assert own and all(ids[-1] == chat.end_id and chat.turn_id not in ids for ids in own)
    assert rows == list(base.corpus_rows(section, chat))


def test_same_section_gives_the_same_checkpoint(tmp_path: Path):
    chat, lake = load_chat_format("tiny"), Lake(tmp_path / "data")
    folders = [tmp_path / name for name in ("first", "again")]
    results = [
        run_worker(base.WORKER, base.prepare(SMALL, chat, folder), folder, BaseWorkerResult, echo=None)
        for folder in folders
    ]
    first, again = (lake.adopt_checkpoint(f / r.folder)[0] for f, r in zip(folders, results, strict=True))
    assert first == again
    folder, log = lake.checkpoint_dir(first), results[0].log
    assert {p.name for p in folder.iterdir()} >= {"model.safetensors", "config.json", "tokenizer.json"}
    assert AutoTokenizer.from_pretrained(folder).convert_tokens_to_ids("<|im_end|>") == chat.end_id
    assert log[-1].loss < log[0].loss and results[0].dtype == "fp32"
    # So few steps give no competent base.
    outcome = base.check_trained(results[0].model_dump(mode="json"))
    assert not outcome.passed and "base.tiny.conversations" in outcome.message


def test_muon_in_float32_takes_the_same_steps_as_torchs():
    """PyTorch's orthogonalises in bfloat16, so the two agree as far as that rounds."""
    torch.manual_seed(0)
    shapes = [(24, 8), (8, 24), (16, 16)]
    ours = [torch.nn.Parameter(torch.randn(shape)) for shape in shapes]
    theirs = [torch.nn.Parameter(p.detach().clone()) for p in ours]
    before = [p.detach().clone() for p in ours]
    optimizers = (
        Muon(ours, lr=0.1, momentum=0.95),
        torch.optim.Muon(theirs, lr=0.1, momentum=0.95, weight_decay=0.0),
    )
    for _ in range(5):
        for mine, other in zip(ours, theirs, strict=True):
            mine.grad = torch.randn_like(mine)
            other.grad = mine.grad.clone()
        for optimizer in optimizers:
            optimizer.step()
    for mine, other, start in zip(ours, theirs, before, strict=True):
        assert (mine - other).norm() < 0.02 * (mine - start).norm()
    spectrum = torch.linalg.svdvals(orthogonal(torch.randn(24, 8)))
    assert spectrum.min() > 0.5 and spectrum.max() < 1.5
