"""Influence on the pages: shaded tokens of a sequence and of a turn, a rollout's held-out tasks, sorted sequences."""

from __future__ import annotations

import re

import pytest

from etpi_resources.links import dataset_page, rollout_page, sequence_page, task_page, tokens_page
from tests.support import viewed_lake
from tests.support.viewed_lake import NAMES, SET, STUDY

TEACHER = NAMES["teacher"]


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    root = tmp_path_factory.mktemp("blamed")
    lake = viewed_lake.make(root / "data")
    viewed_lake.put_blame(lake)
    return viewed_lake.client(lake, viewed_lake.build(lake, root / "etpi.duckdb"))


def shades(text: str) -> list[tuple[int, str]]:
    """Return (id, shade) of each token of the page that has a shade."""
    return [(int(i), s) for s, i in re.findall(r'class="t ([srb]\d)" title="id (\d+)', text)]


def test_sequence_is_shaded_by_influence(pages):
    text = pages.get(sequence_page(STUDY, "seq1")).text
    assert shades(text) == [(20, "b1"), (40, "b4"), (21, "r4"), (41, "s0")]
    assert re.findall(r"influence <b>([-+.\d]+)</b>", text) == ["+2.5", "-2"]
    assert "influence 2" in text, "the figure of a token is on hover"


def test_turn_is_shaded_by_influence_where_the_pair_keeps_its_ids(pages):
    text = pages.get(tokens_page("set", SET, TEACHER, "agent1", 0) + f"&experiment={STUDY}&shade=influence").text
    assert [pair for pair in shades(text) if pair[0] in (10, 20, 40)][-3:] == [(10, "s0"), (20, "b1"), (40, "b4")]


def test_rollout_says_what_it_did_to_which_task(pages):
    text = pages.get(rollout_page("set", SET, TEACHER)).text
    assert "raised solved" in text and "1 of 1 rollouts" in text
    assert f'href="{task_page(STUDY, "t2")}">t2</a> +0.25' in text.replace("&amp;", "&")
    assert re.search(r"worst turn is <a [^>]*turn=1&amp;experiment=study&amp;shade=influence", text)


def test_data_set_is_sorted_by_influence(pages, viewed):
    text = pages.get(f"{dataset_page(STUDY)}?sort=influence").text
    assert re.search(r'aria-current="page">influence</a>', text) and '<td class="figure">+0.5</td>' in text
    plain = viewed_lake.client(*viewed).get(f"{dataset_page(STUDY)}?sort=influence").text
    assert sequence_page(STUDY, "seq1") in plain, "a data set without blame has the page too"


def test_pages_without_blame_shade_nothing(viewed):
    text = viewed_lake.client(*viewed).get(sequence_page(STUDY, "seq1")).text
    assert shades(text) == [] and "legend" not in text
