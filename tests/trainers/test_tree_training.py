"""Packed prefix trees have the gradient of the per-turn rows, and a token attends to its own branch alone."""

from __future__ import annotations

import warnings
from contextlib import nullcontext
from functools import cache, partial
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.backends.debugging import boxed_nop as nop
from torch.nn.attention import flex_attention
from torch.nn.attention.flex_attention import create_block_mask
from transformers import Qwen3ForCausalLM

from etpi_resources.labels import IGNORE_INDEX
from etpi_resources.prefix_tree import PrefixTree
from etpi_resources.trainers.workers import label_head, tree_attention
from etpi_resources.trainers.workers.collate import BadSequences, collate, read_sequences
from etpi_resources.trainers.workers.label_head import add_label_head
from etpi_resources.trainers.workers.plan import MicroBatch, make_pass, pack
from etpi_resources.trainers.workers.tree_attention import RowLayout, refuses_trees, tree_arguments
from etpi_resources.trainers.workers.weighted_trainer import nll_at_labels
from tests.support.models import qwen3
from tests.support.sequences import (
    CHAIN,
    FORK,
    VOCABULARY,
    built,
    conversation,
    conversations,
    gradient,
    one_by_one,
    pairs_of,
    random_model,
)

torch.set_num_threads(1)


def model(**changes) -> Qwen3ForCausalLM:
    net = random_model(VOCABULARY, **changes)
    add_label_head(net)
    return net


NET = model()


def read(sequences, tmp_path, **limits):
    pq.write_table(sequences, tmp_path / "sequences.parquet")
    limits = {"vocabulary": VOCABULARY, "longest": 4096, **limits}
    return read_sequences([tmp_path / "sequences.parquet"], "train", **limits)


def gradient_of(net, read_back, batches, step_weight):
    """The gradient of sum(w * nll) / step_weight over micro-batches, as the trainer computes it."""
    net.zero_grad()
    for batch in batches:
        inputs = collate(batch, read_back, pad_id=0)
        ((nll_at_labels(net, inputs)[0] * inputs["weights"]).sum() / step_weight).backward()
    return torch.cat([p.grad.flatten() for p in net.parameters() if p.grad is not None]).double()


AGENTS = {
    "chains": [conversation(seed, 4, keep=False) for seed in range(4)],
    "forks": [conversation(seed, 4, keep=True) for seed in range(4)],
    "mixed": [FORK, CHAIN, conversation(1, 5, keep=True), conversation(2, 3, keep=False)],
    "long branch": [[([1] * 40, [2, 3]), ([1] * 30 + [4] * 700, [5, 6]), ([1] * 30 + [4] * 620 + [7], [8])]],
}  # fmt: skip


@pytest.mark.parametrize(("form", "row_tokens"), [("weight", 0), ("weight", 64), ("weight", 4096), ("duplicate", 64)])
@pytest.mark.parametrize("agents", AGENTS)
def test_packed_trees_have_the_gradient_of_the_rows_one_by_one(tmp_path, agents, form, row_tokens):
    pairs = pairs_of(*AGENTS[agents])
    rows, sequences, _ = built(pairs, upweight_factor=4.0, upweight_form=form, upweight_turns=(0,))
    stored = read(sequences, tmp_path)
    assert refuses_trees(NET) is None
    batches = make_pass(stored.lengths().tolist(), row_tokens, np.random.default_rng(0), packed=True)
    packed = gradient_of(NET, stored, batches, stored.weights.sum())
    apart = gradient(list(one_by_one(rows, pairs)), NET)
    assert (packed - apart).norm() / apart.norm() <= 1e-5


def test_longest_branches_first_have_the_same_gradient(tmp_path):
    pairs = pairs_of(*AGENTS["mixed"], *AGENTS["forks"])
    stored = read(built(pairs, upweight_factor=4.0, upweight_turns=(0,))[1], tmp_path)
    ordered = stored.longest_first()
    assert all(tree.find_error() is None for tree in ordered.trees)
    assert any((a.starts != b.starts).any() for a, b in zip(stored.trees, ordered.trees, strict=True))
    for tree in ordered.trees:
        below, parents = tree.subtree_ends() - tree.starts, tree.parents.tolist()
        assert all(
            below[a] >= below[b] for a in range(len(tree)) for b in range(a, len(tree)) if parents[a] == parents[b]
        )
    assert refuses_trees(NET) is None
    rows = [make_pass(s.lengths().tolist(), 512, np.random.default_rng(0), packed=True) for s in (stored, ordered)]
    one, other = (gradient_of(NET, s, batches, 1.0) for s, batches in zip((stored, ordered), rows, strict=True))
    assert (one - other).norm() / one.norm() <= 1e-5
    apart = [s.branches() for s in (stored, ordered)]
    assert [len(s.begins) for s in apart] == [len(stored.begins)] * 2
    assert apart[0].rows.sum() == pytest.approx(apart[1].rows.sum())


def test_separate_branches_have_the_gradient_of_the_rows(tmp_path):
    pairs = pairs_of(*AGENTS["mixed"])
    rows, sequences, _ = built(pairs, upweight_factor=4.0)
    stored = read(sequences, tmp_path)
    apart = stored.branches()
    assert not apart.fork and apart.rows.sum() == pytest.approx(stored.rows.sum())
    assert (apart.lengths() - apart.repeated).sum() == stored.lengths().sum()
    assert (apart.labels != IGNORE_INDEX).sum() == (stored.labels != IGNORE_INDEX).sum()
    batches = make_pass(apart.lengths().tolist(), 128, np.random.default_rng(0), packed=False)
    got = gradient_of(NET, apart, batches, apart.weights.sum())
    wanted = gradient(list(one_by_one(rows, pairs)), NET)
    assert (got - wanted).norm() / wanted.norm() <= 1e-5


def by_flex(*states: torch.Tensor, **options: Any) -> torch.Tensor:
    """FlexAttention in plain PyTorch."""
    return tree_attention.flex_attention(*states, **options)


def wrong(*states: torch.Tensor, **options: Any) -> torch.Tensor:
    return by_flex(*states, **options).roll(1, dims=2)


@pytest.mark.parametrize(
    ("dtype", "kernel", "calls"),
    [(torch.float32, None, 0), (torch.bfloat16, None, 0), (torch.bfloat16, by_flex, 2), (torch.bfloat16, wrong, 1)],
)  # fmt: skip
def test_attention_of_a_gpu_has_the_gradient_of_masks_and_copies(tmp_path, monkeypatch, dtype, kernel, calls):
    _, sequences, _ = built(pairs_of(*AGENTS["mixed"], *AGENTS["long branch"]))
    stored = read(sequences, tmp_path)
    batches = make_pass(stored.lengths().tolist(), 1024, np.random.default_rng(0), packed=True)
    assert refuses_trees(NET) is None
    with torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
        of_a_cpu = gradient_of(NET, stored, batches, 1.0)
        for name, value in {
            "_on_gpu": lambda tensor: True, "has_triton": lambda: kernel is not None, "LONG": 256, "_unusable": [],
            "_compared": [], "_flex": lambda: lambda *a, **b: called.append(1) or kernel(*a, **b),
        }.items():  # fmt: skip
            monkeypatch.setattr(tree_attention, name, value)
        called = []
        # Its gradient on a CPU is refused only as slow.
        monkeypatch.setattr(flex_attention, "_validate_device", lambda *tensors: None)
        with pytest.warns(UserWarning, match="FlexAttention") if kernel is wrong else nullcontext():
            of_a_gpu = gradient_of(NET, stored, batches, 1.0)
    assert len(called) == calls
    assert (of_a_cpu - of_a_gpu).norm() / of_a_cpu.norm() <= 50 * torch.finfo(dtype).eps


@pytest.mark.parametrize("fails", ["forward", "backward", "limit"])
def test_attention_that_does_not_compile_is_computed_run_by_run(monkeypatch, fails):
    def refuse(graph, inputs):
        raise OSError("no Python.h")

    backend = aot_autograd(
        fw_compiler=refuse if fails == "forward" else nop,
        bw_compiler=refuse if fails == "backward" else nop,
    )
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=backend))
    monkeypatch.setattr(tree_attention, "_flex", cache(tree_attention._flex.__wrapped__))
    monkeypatch.setattr(tree_attention, "_unusable", [])
    monkeypatch.setattr(tree_attention, "_compared", [])
    monkeypatch.setattr(tree_attention, "_on_gpu", lambda tensor: True)
    monkeypatch.setattr(flex_attention, "_validate_device", lambda *tensors: None)
    layout = RowLayout.of([PrefixTree(*map(np.array, ([0, 90, 150], [-1, 0, 0], [0, 90, 90])), length=200)], 256)
    blocks, gradients = layout.blocks(torch.device("cpu")), []
    with torch._dynamo.config.patch(recompile_limit=1), warnings.catch_warnings(record=True) as caught:
        for given in (blocks, None):
            for heads in (1, 2):
                q, k, v = (torch.ones(1, heads, 256, 16, dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
                attended, _ = tree_attention.tree_attention(NET, q, k, v, None, layout=layout, blocks=given)
                attended.sum().backward()
            gradients.append(v.grad)
    assert len(tree_attention._unusable) == len(caught) == 1
    torch.testing.assert_close(*gradients)


def test_blocks_equal_the_attention_rule_token_by_token():
    """The blocks of FlexAttention, on rows that end within a block, against runs and their contexts."""
    trees = [
        PrefixTree.from_row(row) for row in built(pairs_of(*AGENTS["mixed"], *AGENTS["long branch"]))[1].to_pylist()
    ]
    layout = RowLayout.of(trees, -(-sum(tree.length for tree in trees) // 64) * 64 + 64)
    blocks, length = layout.blocks(torch.device("cpu")), sum(layout.sizes)
    at = torch.arange(length)
    rule = blocks.mask_mod(at, at, at[:, None], at[None])
    assert (rule.numpy() == seen_by(layout)).all()
    wanted = create_block_mask(blocks.mask_mod, None, None, length, length, device="cpu")
    assert (blocks.to_dense() == wanted.to_dense()).all()
    for name in ("kv_num_blocks", "full_kv_num_blocks", "q_num_blocks", "full_q_num_blocks"):
        assert (getattr(blocks, name) == getattr(wanted, name)).all(), name
    assert (blocks.full_kv_num_blocks > 0).any()


def test_tiles_of_logits_change_neither_loss_nor_gradient(tmp_path, monkeypatch):
    _, sequences, _ = built(pairs_of(*AGENTS["mixed"]))
    stored = read(sequences, tmp_path)
    batches = make_pass(stored.lengths().tolist(), 128, np.random.default_rng(0), packed=True)
    assert refuses_trees(NET) is None
    whole = gradient_of(NET, stored, batches, 1.0)
    monkeypatch.setattr(label_head, "TILE", 7 * VOCABULARY)
    tiled = gradient_of(NET, stored, batches, 1.0)
    assert (whole - tiled).norm() / whole.norm() <= 1e-6


def test_model_whose_logits_are_products_never_holds_more_than_a_tile_of_them(monkeypatch):
    monkeypatch.setattr(label_head, "TILE", 4 * VOCABULARY)
    net, ids, tiles = model(), torch.arange(12)[None], []
    net.get_output_embeddings().register_forward_hook(lambda head, hidden, logits: tiles.append(logits.shape[1]))
    net(ids, label_positions=torch.arange(10), labels=ids[:, 1:11])
    assert tiles == [4, 4, 2]


def subtree_ends(tree: PrefixTree) -> np.ndarray:
    """One past the number of each node's last descendant; (nodes,)."""
    ends = np.arange(1, len(tree) + 1)
    for node in range(len(tree) - 1, 0, -1):
        ends[tree.parents[node]] = max(ends[tree.parents[node]], ends[node])
    return ends


def logits(ids: np.ndarray, trees: list[PrefixTree], length: int) -> torch.Tensor:
    positions = np.concatenate([*[tree.token_positions() for tree in trees], np.arange(length - len(ids))])
    padded = torch.zeros(1, length, dtype=torch.int64)
    padded[0, : len(ids)] = torch.from_numpy(ids)
    arguments = tree_arguments(RowLayout.of(trees, length), torch.from_numpy(positions)[None])
    with torch.no_grad():
        return NET(input_ids=padded, use_cache=False, **arguments).logits[0]


@settings(deadline=None, max_examples=20)
@given(st.lists(conversations(), min_size=2, max_size=3), st.data())
def test_only_descendants_attend_to_a_token(agents, data):
    """Change one token: exactly what stands after it in a branch through it may change, bit for bit."""
    assert refuses_trees(NET) is None
    sequences = built(pairs_of(*agents))[1].to_pylist()
    trees = [PrefixTree.from_row(sequence) for sequence in sequences]
    ids = np.concatenate([sequence["input_ids"] for sequence in sequences])
    changed = data.draw(st.integers(0, len(ids) - 1))
    sees = np.zeros(len(ids), dtype=bool)
    base = 0
    for tree in trees:
        nodes = np.repeat(np.arange(len(tree)), tree.ends - tree.starts)
        at = changed - base
        if 0 <= at < tree.length:
            below = (nodes[at] <= nodes) & (nodes < subtree_ends(tree)[nodes[at]])
            sees[base : base + tree.length] = below & (np.arange(tree.length) >= at)
        base += tree.length
    other = ids.copy()
    other[changed] = (ids[changed] + 5) % VOCABULARY
    length = -(-len(ids) // 64) * 64
    before, after = logits(ids, trees, length)[: len(ids)], logits(other, trees, length)[: len(ids)]
    assert ((before != after).any(1).numpy() == sees).all()


def seen_by(layout: RowLayout) -> np.ndarray:
    """Return whether the runs let each query attend to each key, (L, L)."""
    starts = np.concatenate([[0], np.cumsum(layout.sizes)])
    sees = np.zeros((starts[-1], starts[-1]), dtype=bool)
    for run in layout.runs:
        own = range(starts[run.first], starts[run.last])
        for node in run.context:
            sees[own.start : own.stop, starts[node] : starts[node + 1]] = True
        sees[own.start : own.stop, own.start : own.stop] = np.tri(len(own), dtype=bool)
    return sees


def test_layout_equals_the_attention_rule_token_by_token():
    """Runs and their contexts against tin[key] <= tin[query] < tout[key] and no later key, token by token."""
    _, sequences, _ = built(pairs_of(*AGENTS["mixed"]))
    trees = [PrefixTree.from_row(sequence) for sequence in sequences.to_pylist()]
    length = sum(tree.length for tree in trees) + 3
    sees = seen_by(RowLayout.of(trees, length))
    wanted = np.zeros_like(sees)
    base = 0
    for tree in [*trees, PrefixTree.chain(3)]:
        tin = np.repeat(np.arange(len(tree)), tree.ends - tree.starts)
        here = slice(base, base + tree.length)
        below = (tin <= tin[:, None]) & (tin[:, None] < subtree_ends(tree)[tin])
        wanted[here, here] = below & np.tri(tree.length, dtype=bool)
        base += tree.length
    assert (sees == wanted).all()


@settings(deadline=None)
@given(st.lists(st.integers(1, 900), min_size=1, max_size=60), st.integers(64, 4096), st.integers(0, 5))
def test_packing_puts_every_tree_whole_into_one_row_of_few_lengths(lengths, row_tokens, seed):
    rows = pack(lengths, row_tokens, np.random.default_rng(seed))
    assert sorted(i for members, _ in rows for i in members) == list(range(len(lengths)))
    usual = min(row_tokens // 64 * 64, -(-sum(lengths) // 64) * 64)
    for members, length in rows:
        assert sum(lengths[i] for i in members) <= length and length % 64 == 0
        assert length == usual or length - max(lengths[i] for i in members) < length - usual
    assert len({length for _, length in rows}) <= 9


def test_packing_wastes_less_than_a_twentieth_where_rows_hold_several():
    lengths = np.random.default_rng(0).integers(50, 1500, 500).tolist()
    rows = pack(lengths, 4096, np.random.default_rng(0))
    assert sum(lengths) / sum(length for _, length in rows) >= 0.98


def test_a_fork_s_last_shared_token_predicts_every_branch(tmp_path):
    _, sequences, _ = built(pairs_of([([1, 2, 3], [4, 5]), ([1, 2, 3], [6])]))
    stored = read(sequences, tmp_path)
    inputs = collate(MicroBatch((0,), 64, packed=True), stored, pad_id=0)
    result = zip(inputs["positions"].tolist(), inputs["labels"][0].tolist(), strict=True)
    assert [pair for pair in result if pair[1] != IGNORE_INDEX] == [(2, 4), (3, 5), (2, 6)]
    assert int(inputs["tokens"]) == 6 and len(inputs["positions"]) == 256


def test_model_with_recurrent_or_sliding_layers_is_refused():
    sliding = model(layer_types=["sliding_attention", "full_attention"], use_sliding_window=True, sliding_window=8)
    assert "sliding_attention" in (refuses_trees(sliding) or "")
    assert "linear_attention" in (refuses_trees(qwen3(VOCABULARY, hybrid=True)) or "")


def test_model_that_ignores_the_layout_is_refused(monkeypatch):
    net = model()
    honest = net.forward
    monkeypatch.setattr(net, "forward", lambda *a, layout=None, attention_mask=None, **k: honest(*a, **k))
    assert "differ by" in (refuses_trees(net) or "")
    assert net.config._attn_implementation == "sdpa", "what it had is put back"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"node_parents": [-1, 2, 0]}, "node 1 .*parent 2"),
        ({"node_positions": [0, 1, 2]}, "node 1 .*position .*parent 0"),
        ({"node_starts": [0, 2, 2]}, "cover"),
        ({"node_starts": [], "node_parents": [], "node_positions": []}, "empty"),
        ({"node_parents": [0, 0, 0]}, "root"),
    ],
)
def test_a_sequence_that_is_no_tree_is_refused_by_name(tmp_path, change, words):
    from etpi_resources.lake.schemas import from_rows

    _, sequences, _ = built(pairs_of(FORK))
    broken = from_rows("sequences", [sequences.to_pylist()[0] | change])
    with pytest.raises(BadSequences, match=f"sequence [0-9a-f]{{32}} .*: .*{words}.*upweighted_dataset"):
        read(broken, tmp_path)


def test_longest_branch_must_fit_the_model(tmp_path):
    _, sequences, _ = built(pairs_of(FORK))
    assert len(read(sequences, tmp_path, longest=7)) == 1, "11 tokens, 7 the longest branch"
    with pytest.raises(BadSequences, match=" 7 .* 6 .*dataset.max_length"):
        read(sequences, tmp_path, longest=6)
