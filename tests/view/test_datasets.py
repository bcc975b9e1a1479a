"""Training data: a sequence as a tree, its loss by turn, and the difference of versions."""

from __future__ import annotations

import re
from html import unescape
from urllib.parse import urlencode

from etpi_resources.lake.check_outcome import CheckOutcome
from etpi_resources.links import dataset_page, sequence_page, tokens_page
from tests.support import viewed_lake
from tests.support.small_lake import put
from tests.support.viewed_lake import NAMES, SET, STUDY


def nodes(text: str) -> list[tuple[str, list[int]]]:
    """Return (classes, ids) of each node, in the order of the page."""
    parts = re.findall(r'<section class="node ([^"]+)"(.*?)</section>', text, re.DOTALL)
    return [(kind.strip(), [int(i) for i in re.findall(r'title="id (\d+)', body)]) for kind, body in parts]


def test_shared_prefix_is_shown_once_and_branches_are_indented(pages) -> None:
    text = pages.get(sequence_page(STUDY, "seq1")).text
    assert nodes(text) == [("d0", [1, 3, 4]), ("d1 branch", [20, 40]), ("d1 branch", [31, 21, 41])]
    assert "3 nodes, 2 branches" in text and text.count("continues node 0") == 2


def test_spans_show_their_weight_and_lead_to_their_turn(pages) -> None:
    text = pages.get(sequence_page(STUDY, "seq1")).text
    assert re.findall(r"in the loss, weight (\d+), (\d+) tokens", text) == [("12", "2"), ("1", "2")]
    address = tokens_page("set", SET, NAMES["teacher"], "agent1", 0).replace("&", "&amp;")
    assert f'href="{address}' in text
    context = re.findall(r'<div class="tokens context">(.*?)</div>', text, re.DOTALL)
    assert [len(re.findall("title=", part)) for part in context] == [3, 1], "the root, and the id before the last span"


def test_long_context_is_folded() -> None:
    from etpi.view.pages.datasets import EDGE, nodes_of
    from etpi_resources.prefix_tree import CHAIN, PrefixTree

    row = {**CHAIN, "input_ids": list(range(1000)), "span_starts": [990], "span_ends": [1000], "span_weights": [1.0]}
    (node,) = nodes_of(row, [], PrefixTree.from_row(row), {})
    context, span = node.stretches
    assert (len(context.tokens), context.hidden, len(context.tail)) == (EDGE, 990 - 2 * EDGE, EDGE)
    assert [t.id for t in context.tail] == list(range(990 - EDGE, 990))
    assert context.tail[0].position == 990 - EDGE and (len(span.tokens), span.hidden) == (10, 0)


def test_dataset_page_has_versions_loss_and_sequences(pages) -> None:
    text = pages.get(dataset_page(STUDY)).text
    assert text.count("difference from the current one") == 1 and text.count('tag good">current') == 1
    assert re.search(r"turn 0</text>.*?92\.3 %", text, re.DOTALL), "12 of 13 of the loss"
    assert sequence_page(STUDY, "seq1") in text
    assert "reward_below_minimum" in text
    assert "No" not in pages.get(f"{dataset_page(STUDY)}?rollout=none").text.split("Sequences")[1][:20]


def test_sequences_show_their_text_and_are_filtered_by_it(pages) -> None:
    def found(**filters: str) -> bool:
        return sequence_page(STUDY, "seq1") in pages.get(f"{dataset_page(STUDY)}?{urlencode(filters)}").text

    assert "&lt;20&gt;&lt;/script&gt;</a>" in pages.get(dataset_page(STUDY)).text, "the ids 20 and 40 are in the loss"
    assert found(contains="ANSWER words", split="train", task="1") and found(contains="observation of agent1 0")
    assert not found(contains="nobody wrote this") and not found(split="val") and not found(task="t2")


def test_blocked_version_is_marked(tmp_path) -> None:
    lake = viewed_lake.make(tmp_path / "data")
    refused = viewed_lake.dataset(NAMES["teacher"], (3.0, 1.0))
    checks = (CheckOutcome("turns_lost", False, "Too many."),)
    blocked = put(lake, "upweighted_dataset", STUDY, refused, checks=checks).version
    pages = viewed_lake.client(lake, viewed_lake.build(lake, tmp_path / "etpi.duckdb"))
    text = unescape(pages.get(dataset_page(STUDY)).text)
    (mark,) = re.findall(r"<code>(\w+)</code> <span class=\"tag bad\">blocked by a check</span>", text)
    (current,) = re.findall(r"<code>(\w+)</code> <span class=\"tag good\">current</span>", text)
    assert mark == blocked != current and f"diff_datasets experiment={STUDY} old={blocked}" in text
