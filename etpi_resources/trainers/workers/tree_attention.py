"""Attention over rows of prefix trees: a token attends to its own branch alone, never to another branch or tree.

Instead of masking a row x row matrix, a row is cut into runs: a node, its first child, that one's first child and so
on, which are adjacent in the row. A run attends to itself causally and to the nodes from its tree's root to its parent:
tin[key] <= tin[query] < tout[key] and never a later key. So the work is that of the branches, memory does not grow with
the square of a row, and several trees in a row cost no more than each alone.

On a GPU that can compile, FlexAttention does the same in one kernel: it skips the blocks of queries and keys that have
nothing to do with each other, and applies the mask only in those that are cut by a node's edge.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from itertools import accumulate
from typing import Any

import torch
from torch._dynamo.exc import FailOnRecompileLimitHit, TorchDynamoException
from torch._functorch import config as functorch
from torch.nn.attention.bias import causal_lower_right
from torch.nn.attention.flex_attention import BlockMask, flex_attention
from torch.nn.functional import scaled_dot_product_attention
from torch.utils._triton import has_triton
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import repeat_kv, sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from etpi_resources.prefix_tree import PrefixTree

ATTENTION = "prefix_tree"
QUERIES = 512
"""Most queries of one kernel call that needs a mask in memory, on a CPU; bounds the mask's rows."""
BLOCK = 128
"""Queries and keys of a block of FlexAttention, its default."""
LONG = 4096
"""Fewest tokens of a row that FlexAttention computes. It compiles for 10 to 20 s, and shorter rows gain little."""


@dataclass(frozen=True)
class NodeRun:
    """Nodes [first, last) of a row, each the parent of the next; `context`: the nodes from the root to the first's
    parent."""

    first: int
    last: int
    context: tuple[int, ...]


@dataclass(frozen=True)
class RowLayout:
    """A row of tokens cut into nodes of `sizes` tokens, and its runs in order."""

    sizes: tuple[int, ...]
    runs: tuple[NodeRun, ...]

    @classmethod
    def of(cls, trees: Sequence[PrefixTree], length: int) -> RowLayout:
        """Return the layout of concatenated trees, padded to `length` tokens; the padding is a tree of its own."""
        padding = length - sum(tree.length for tree in trees)
        whole = [*trees, PrefixTree.chain(padding)] if padding else trees
        sizes: list[int] = []
        runs: list[NodeRun] = []
        for tree in whole:
            base = len(sizes)
            sizes += (tree.ends - tree.starts).tolist()
            first = 0
            for node in range(1, len(tree) + 1):
                if node == len(tree) or tree.parents[node] != node - 1:
                    context = tuple(base + n for n in tree.path(first)[:-1])
                    runs.append(NodeRun(base + first, base + node, context))
                    first = node
        return cls(tuple(sizes), tuple(runs))

    def blocks(self, device: torch.device) -> BlockMask:
        """Return the rule for FlexAttention: a query attends to a key that is not later, if the query stands before the
        end of the key's subtree. It takes no memory in the square of the row, but for 8 bytes a block."""
        bounds, of_nodes = [0, *accumulate(self.sizes)], [0] * len(self.sizes)
        for run in self.runs:  # the last run that a node is in, or in the context of, ends its subtree
            for node in (*run.context, *range(run.first, run.last)):
                of_nodes[node] = bounds[run.last]
        ends = torch.tensor(of_nodes, dtype=torch.int32).repeat_interleave(torch.tensor(self.sizes)).to(device)
        length = len(ends)
        of_blocks = torch.nn.functional.pad(ends, (0, -length % BLOCK)).view(-1, BLOCK)
        number = torch.arange(len(of_blocks), dtype=torch.int32, device=device)
        earlier = number[None] < number[:, None]
        seen = earlier & (of_blocks.amax(1)[None] > number[:, None] * BLOCK)
        whole = seen & (of_blocks.amin(1)[None] >= (number[:, None] + 1) * BLOCK)
        cut = (seen & ~whole) | (number[None] == number[:, None])

        def rule(batch: torch.Tensor, head: torch.Tensor, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
            return (query >= key) & (query < ends[key])

        blocks = BlockMask.from_kv_blocks(
            *_in_order(cut), *_in_order(whole), BLOCK_SIZE=BLOCK, mask_mod=rule, seq_lengths=(length, length)
        )
        for part in (ends, *blocks.as_tuple()):
            if isinstance(part, torch.Tensor):  # or the second length compiles again
                torch._dynamo.maybe_mark_dynamic(part, [n for n, size in enumerate(part.shape) if size > 1])
        return blocks


def tree_attention(
    module: torch.nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor,
    attention_mask: torch.Tensor | None, dropout: float = 0.0, scaling: float | None = None,
    layout: RowLayout | None = None, blocks: BlockMask | None = None, **named: Any,
) -> tuple[torch.Tensor, None]:  # fmt: skip
    """Compute attention as transformers calls it.

    Shapes: query (B, heads, L, D), key and value (B, key heads, L, D) -> (B, L, heads, D).

    Without a layout it calls transformers' sdpa; with a layout it ignores the mask (see `tree_arguments`). `blocks` are
    those of the layout, where FlexAttention computes.
    """
    if layout is None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, dropout, scaling, **named)
    if named.get("sliding_window") is not None:
        raise ValueError("one of its layers has a sliding window")
    if torch.is_autocast_enabled(query.device.type):
        # As autocast does for the kernels; the mask below that has a name passes it by.
        query, key, value = (x.to(torch.get_autocast_dtype(query.device.type)) for x in (query, key, value))
    states = query, key, value
    # Of a GPU's kernels only those for 16 bits let query heads share a key head; a CPU's is slower at it.
    shared = _on_gpu(query) and query.dtype in (torch.bfloat16, torch.float16)
    attended = None
    if blocks is not None and shared and not dropout and not _unusable:
        attended = _by_blocks(states, blocks, layout, scaling)
    if attended is None:
        attended = _by_runs(states, layout, dropout, scaling, shared)
    return attended.transpose(1, 2).contiguous(), None


def _by_runs(
    states: tuple[torch.Tensor, ...], layout: RowLayout, dropout: float, scaling: float | None, shared: bool
) -> torch.Tensor:
    """Compute attention run by run; `shared`: the kernel lets query heads share a key head."""
    query, key, value = states
    gpu = _on_gpu(query)
    if not shared:
        groups = query.shape[1] // key.shape[1]
        key, value = repeat_kv(key, groups), repeat_kv(value, groups)
    # Split once: the gradient of a split is one concatenation, the gradient of each slice a whole row of zeros.
    queries, keys, values = (x.split(layout.sizes, dim=2) for x in (query, key, value))
    options: dict[str, Any] = {"dropout_p": dropout, "scale": scaling, "enable_gqa": shared}
    pieces = []
    for run in layout.runs:
        nodes = range(run.first, run.last)
        q = _joined(queries, nodes)
        k, v = (_joined(x, (*run.context, *nodes)) for x in (keys, values))
        if not run.context:
            pieces.append(scaled_dot_product_attention(q, k, v, is_causal=True, **options))
            continue
        if gpu:  # whose kernels know a mask by its name, and refuse one in memory that is a view of a larger one
            pieces.append(scaled_dot_product_attention(q, k, v, causal_lower_right(q.shape[2], k.shape[2]), **options))
            continue
        before = k.shape[2] - q.shape[2]
        for at in range(0, q.shape[2], QUERIES):
            part = q[:, :, at : at + QUERIES]
            seen = before + at + part.shape[2]
            mask = _lower_right(part.shape[2], seen, q.dtype, q.device)
            pieces.append(scaled_dot_product_attention(part, k[:, :, :seen], v[:, :, :seen], attn_mask=mask, **options))
    return torch.cat(pieces, dim=2)


def _by_blocks(
    states: tuple[torch.Tensor, ...], blocks: BlockMask, layout: RowLayout, scaling: float | None
) -> torch.Tensor | None:
    """Compute attention by FlexAttention; None, from then on, if it does not compile here or differs from runs."""
    for each in states:  # one program for all lengths
        torch._dynamo.maybe_mark_dynamic(each, 2)
    try:
        attended = _flex()(*states, block_mask=blocks, scale=scaling, enable_gqa=True)
    except (TorchDynamoException, FailOnRecompileLimitHit) as error:
        _unusable.append(f"it does not compile here: {error}")
    else:
        if _compared:
            return attended
        with torch.no_grad():
            by_runs = _by_runs(states, layout, 0.0, scaling, shared=True)
            difference = float((attended - by_runs).norm() / by_runs.norm())
        if difference < _ROUNDING:
            _compared.append(difference)
            return attended
        _unusable.append(f"its result differs from that of runs by {difference:.2g}")
    warnings.warn(f"trees train slower, without FlexAttention: {_unusable[-1]}", stacklevel=2)
    return None


_unusable: list[str] = []
"""Why FlexAttention is not used in this process, once that is known."""
_compared: list[float] = []
"""Relative difference of FlexAttention's first result in this process from that of runs."""


@cache
def _flex() -> Callable[..., torch.Tensor]:
    # Its gradient compiles with it, where a failure is caught, and not in the first backward pass.
    functorch.force_non_lazy_backward_lowering = True
    return torch.compile(flex_attention, fullgraph=True)


def _on_gpu(tensor: torch.Tensor) -> bool:
    return tensor.is_cuda


def _in_order(chosen: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return, for each row of a matrix of bools, how many are chosen, (1, 1, n), and all columns, those first,
    (1, 1, n, n), both int32."""
    columns = chosen.int().argsort(dim=1, descending=True, stable=True).int()
    return chosen.sum(1, dtype=torch.int32)[None, None], columns[None, None].contiguous()


def _joined(nodes: Sequence[torch.Tensor], which: Sequence[int]) -> torch.Tensor:
    chosen = [nodes[n] for n in which]
    return chosen[0] if len(chosen) == 1 else torch.cat(chosen, dim=2)


def _lower_right(queries: int, keys: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return the additive causal mask (queries, keys) for the last queries, as a view of a larger cached mask."""
    most = -(-keys // 4096) * 4096
    whole = _corner(QUERIES + most, dtype, device)
    # Row i admits the first `most` + i + 1 columns.
    return whole[:queries, most + queries - keys : most + queries]


@lru_cache(maxsize=2)
def _corner(columns: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    hidden = torch.full((QUERIES, columns), float("-inf"), dtype=dtype, device=device)
    return hidden.triu(columns - QUERIES + 1)


AttentionInterface.register(ATTENTION, tree_attention)
AttentionMaskInterface.register(ATTENTION, sdpa_mask)


def tree_arguments(layout: RowLayout, positions: torch.Tensor) -> dict[str, Any]:
    """Return the arguments for a model with this attention, besides its ids; `positions` (1, L)."""
    # transformers keeps a mask of four dimensions; without one, models would create a mask of row x row.
    named = {"layout": layout, "position_ids": positions, "attention_mask": positions.new_zeros((1, 1, 1, 1))}
    forks = any(run.context for run in layout.runs)
    if forks and positions.shape[1] >= LONG and _on_gpu(positions) and has_triton():
        named["blocks"] = layout.blocks(positions.device)
    return named


def refuses_trees(model: PreTrainedModel) -> str | None:
    """Give a model this attention and return None, or return why it cannot be trained on trees.

    Compare its logits on a row of two trees, one of them with branches, with its logits on each branch alone.
    """
    layers = set(getattr(model.config.get_text_config(), "layer_types", None) or ["full_attention"])
    if layers != {"full_attention"}:
        return f"its layers are {', '.join(sorted(layers))}"
    before = model.config._attn_implementation or "sdpa"
    try:
        model.set_attn_implementation(ATTENTION)
        difference = _difference(model)
    except (TypeError, ValueError, RuntimeError) as error:
        reason = f"it does not run on one ({type(error).__name__}: {str(error).splitlines()[0]})"
    else:
        if difference < _ROUNDING:
            return None
        reason = f"on a row of trees its logits differ by {difference:.2g} from those of the branches"
    model.set_attn_implementation(before)
    return reason


_ROUNDING = 0.05
"""Largest relative difference of logits that rounding explains in 16 bits; attending to a wrong token exceeds it."""


@torch.no_grad()
def _difference(model: PreTrainedModel) -> float:
    """Largest relative difference between logits of packed trees and of their branches."""
    import numpy as np

    columns = ([0, 6, 10], [-1, 0, 0], [0, 6, 6])
    fork = PrefixTree(*(np.array(column, dtype=np.int64) for column in columns), length=13)
    trees = [PrefixTree.chain(5), fork]
    text: Any = model.config.get_text_config()
    ids = torch.arange(2, 20, device=model.device) * 7919 % text.vocab_size
    positions = torch.from_numpy(np.concatenate([tree.token_positions() for tree in trees])).to(model.device)[None]
    training = model.training
    model.eval()
    packed = model(ids[None], use_cache=False, **tree_arguments(RowLayout.of(trees, 18), positions)).logits[0].float()
    worst, base = 0.0, 0
    for tree in trees:
        for branch, _ in tree.branches():
            where = torch.from_numpy(branch + base).to(model.device)
            alone = model(ids[where][None], use_cache=False).logits[0].float()
            worst = max(worst, float((packed[where] - alone).abs().max() / alone.abs().max()))
        base += tree.length
    model.train(training)
    return worst
