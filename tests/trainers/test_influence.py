"""Influence of training tokens: agreement with exact gradients, of trees, branches, rows and adapters."""

from __future__ import annotations

import sys

import numpy as np
import pytest
import torch
from peft import LoraConfig, get_peft_model

from etpi_resources.trainers.workers import influence
from etpi_resources.trainers.workers.checkpointing import load_model
from etpi_resources.trainers.workers.collate import read_sequences
from etpi_resources.trainers.workers.influence import Rows, gradient, influences
from etpi_resources.trainers.workers.label_head import add_label_head
from etpi_resources.trainers.workers.tree_attention import refuses_trees
from tests.support.tiny_training import learnable, make_base, naive_sums, sequence, write

FORKS = {"node_starts": [0, 20, 25], "node_parents": [-1, 0, 0], "node_positions": [0, 20, 20]}


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return make_base(tmp_path_factory.mktemp("base"))


def made_model(base, lora: bool = False):
    model = load_model(base, torch.float32)
    assert refuses_trees(model) is None
    add_label_head(model)
    if lora:
        model = get_peft_model(model, LoraConfig(r=2, target_modules="all-linear", task_type="CAUSAL_LM"))
        torch.manual_seed(1)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "lora_B" in name:  # a trained adapter has no zeros
                    parameter.normal_(std=0.1)
    return model.eval()


def stored(path, rows):
    return read_sequences([write(rows, path)], "train", vocabulary=64, longest=512)


def training(path):
    tree = sequence("tree", [*range(3, 34)], [(22, 25, 1.0), (27, 31, 2.0)]) | FORKS
    return stored(path, [*learnable(5, seed=1), tree])


def heldout(path, trees=True):
    return Rows.of(stored(path, learnable(3, seed=9)), 512, 1, trees=trees)


@pytest.mark.parametrize("lora", [False, True])
@pytest.mark.parametrize("trees", [True, False])
def test_influence_is_the_product_with_the_exact_gradient(tmp_path, base, lora, trees):
    model, sequences = made_model(base, lora), training(tmp_path / "train.parquet")
    rows = Rows.of(sequences, 512, 1, trees=trees)
    direction = gradient(model, [(1.0, heldout(tmp_path / "heldout.parquet", trees))])
    assert len(direction) == len([p for p in model.parameters() if p.requires_grad])
    exact = [influence.along(gradient(model, [(1.0, rows.only([i]))]), direction) for i in range(len(sequences))]
    by_token = influences(model, rows, direction)
    assert sequences.totals(by_token) == pytest.approx(exact, rel=5e-3, abs=1e-3 * max(map(abs, exact)))
    assert not by_token[sequences.labels < 0].any()


def test_packed_trees_and_branches_have_equal_influences_by_token(tmp_path, base):
    model, sequences = made_model(base), training(tmp_path / "train.parquet")
    direction = gradient(model, [(1.0, heldout(tmp_path / "heldout.parquet"))])
    packed, rows = (influences(model, Rows.of(sequences, 512, 1, trees=t), direction) for t in (True, False))
    assert np.corrcoef(packed, rows)[0, 1] > 0.9999
    assert packed == pytest.approx(rows, abs=2e-3 * np.abs(rows).max())


def test_the_gradient_is_that_of_the_weighted_rows(tmp_path, base):
    plain = load_model(base, torch.float32)
    rows = learnable(3, seed=9)
    loss, _ = naive_sums(plain, rows)
    loss.backward()
    wanted = {name: p.grad for name, p in plain.named_parameters()}
    model = made_model(base)
    names = {id(p): name for name, p in model.named_parameters()}
    both = [(1.0, heldout(tmp_path / "a.parquet")), (-0.5, heldout(tmp_path / "b.parquet"))]
    for parameter, value in gradient(model, both):
        assert torch.allclose(value, 0.5 * wanted[names[id(parameter)]], atol=1e-4), names[id(parameter)]


def test_weights_come_back_and_a_long_step_is_not_linear(tmp_path, base):
    model, sequences = made_model(base), training(tmp_path / "train.parquet")
    before = [p.detach().clone() for p in model.parameters()]
    rows = Rows.of(sequences, 512, 1, trees=True)
    direction = gradient(model, [(1.0, heldout(tmp_path / "heldout.parquet"))])
    short, long = (influences(model, rows, direction, step) for step in (1e-5, 0.3))
    for parameter, old in zip(model.parameters(), before, strict=True):
        assert torch.allclose(parameter, old, atol=1e-6)
    assert np.corrcoef(short, long)[0, 1] < 0.999


def padless(sequences):
    """Return each sequence as a batch of one, for programs that read rows."""
    columns = {"ids": sequences.ids, "labels": sequences.labels, "weights": sequences.weights}
    bounds = zip(sequences.offsets[:-1], sequences.offsets[1:], strict=True)
    return [{name: torch.from_numpy(x[a:b].copy()) for name, x in columns.items()} for a, b in bounds]


def weighted_nll(model, batch):
    logits, labels = model(input_ids=batch["ids"].long()).logits[:, :-1], batch["labels"][:, 1:].long()
    nll = torch.nn.functional.cross_entropy(logits.transpose(1, 2), labels, ignore_index=-100, reduction="none")
    return (nll * batch["weights"][:, 1:]).sum()


def test_cosines_of_an_adapter_are_those_of_dattris_less(tmp_path, base, consumers, monkeypatch):
    monkeypatch.setattr(sys, "path", [*sys.path, str(consumers)])
    less = pytest.importorskip("dattri_llm.attribution.algorithm.less", reason="`make consumers` installs dattri-llm")
    from dattri_llm.attribution.arguments import AttributionArguments
    from dattri_llm.task import AttributionTask

    model, sequences = made_model(base, lora=True), stored(tmp_path / "train.parquet", learnable(5, seed=1))
    held = stored(tmp_path / "heldout.parquet", learnable(3, seed=9))
    rows, queries = (Rows.of(each, 512, 1, trees=True) for each in (sequences, held))
    lengths = [influence.norm(v for _, v in gradient(model, [(1.0, rows.only([i]))])) for i in range(len(sequences))]
    cosines = []
    for query in range(len(held)):
        direction = gradient(model, [(1.0, queries.only([query]))])
        moved = sequences.totals(influences(model, rows, direction, 1e-4))
        cosines.append(moved / np.array(lengths) / influence.norm(v for _, v in direction))
    plain = get_peft_model(load_model(base, torch.float32), model.peft_config["default"])
    plain.load_state_dict(model.state_dict(), strict=False)
    sgd = torch.optim.SGD([p for p in plain.parameters() if p.requires_grad], lr=1.0)
    arguments = AttributionArguments(str(tmp_path), per_device_train_batch_size=1, per_device_eval_batch_size=1)
    oracle = less.LESSAttributor(arguments, task=AttributionTask(weighted_nll, plain.eval()), optimizers=[sgd])
    scores = oracle.attribute(padless(sequences), padless(held)).scores.numpy()
    assert scores == pytest.approx(np.array(cosines).T, abs=2e-3)
