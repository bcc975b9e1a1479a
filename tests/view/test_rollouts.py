"""The list of rollouts: each filter does what it says; sorting, pages and the search of texts."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from etpi.view import text_search
from etpi.view.pages import rollouts
from etpi_resources.links import rollout_page, rollouts_page
from tests.support import viewed_lake
from tests.support.viewed_lake import NAMES, SET, STUDY

ALL = set(NAMES.values())


def listed(client, **filters: str) -> list[str]:
    """Return the ids of the listed rollouts, in order."""
    text = client.get(rollouts_page(**filters)).text
    return re.findall(r'<td class="name"><a href="/rollout/\w+/\w+/(\w+)"', text)


@pytest.mark.parametrize(
    ("filters", "expected"),
    [
        ({}, {"teacher", "dropped", "base", "student", "rl"}),
        ({"made_for": SET}, {"teacher", "dropped"}),
        ({"made_for": STUDY}, {"base", "student", "rl"}),
        ({"origin": "eval"}, {"base", "student"}),
        ({"experiment": STUDY, "origin": "rl"}, {"rl"}),
        ({"role": "base"}, {"base"}),
        ({"decoding": "t1"}, {"base", "student"}),
        ({"seed": "0"}, {"teacher", "student", "rl"}),
        ({"task": "t2"}, {"dropped", "base", "student"}),
        ({"repo": "quay"}, {"dropped"}),
        ({"verdict": "passed"}, {"teacher", "base", "rl"}),
        ({"verdict": "failed_tests"}, {"dropped", "student"}),
        ({"exit": "LimitsExceeded"}, {"dropped"}),
        ({"reason": "BEFORE the first"}, {"dropped", "base"}),
        ({"min_reward": "0.5"}, {"teacher", "base", "rl"}),
        ({"made_for": SET, "verdict": "passed", "task": "t1"}, {"teacher"}),
        ({"verdict": "' OR 1=1 --"}, set()),
    ],
)
def test_filter_leaves_its_rollouts(pages, filters: dict[str, str], expected: set[str]) -> None:
    rows = listed(pages, **filters)
    assert set(rows) == {NAMES[name] for name in expected} and len(rows) == len(expected)
    plural = "" if len(expected) == 1 else "s"
    assert re.search(rf"\b{len(expected)} rollout{plural}\b", pages.get(rollouts_page(**filters)).text)


def test_menus_count_the_values(pages) -> None:
    text = pages.get(rollouts_page(verdict="passed")).text
    assert '<option value="passed" selected>passed (3)</option>' in text
    assert f'<option value="{SET}">{SET} (1)</option>' in text, "of its two rollouts one passed"
    both = pages.get(rollouts_page(verdict="passed", made_for=SET)).text
    assert '<option value="passed" selected>passed (1)</option>' in both
    assert f'<option value="{STUDY}">{STUDY} (2)</option>' in both, "the column's own filter does not count"


def test_order_of_the_list(pages) -> None:
    assert listed(pages)[0] == NAMES["dropped"], "the newest first"
    assert listed(pages, sort="tokens")[0] == NAMES["dropped"]
    by_reward = listed(pages, sort="reward", made_for=STUDY)
    assert by_reward.index(NAMES["base"]) < by_reward.index(NAMES["student"])
    assert set(listed(pages, sort="task")[:2]) == {NAMES["teacher"], NAMES["rl"]}


def test_pages_cover_the_list_once(pages, monkeypatch) -> None:
    monkeypatch.setattr(rollouts, "PAGE_ROWS", 2)
    seen, address = [], rollouts_page()
    while address:
        text = pages.get(address).text
        seen += re.findall(r'<td class="name"><a href="/rollout/\w+/\w+/(\w+)"', text)
        following = re.search(r'href="([^"]+)">Next', text)
        address = following[1].replace("&amp;", "&") if following else None
    assert sorted(seen) == sorted(ALL)


def test_search_shows_the_text_in_its_place(pages) -> None:
    text = pages.get(rollouts_page(text="CONTENT <SCRIPT>")).text
    assert text.count("<mark>content &lt;script&gt;</mark>") == 5
    assert "among 20 of 20 turns" in text
    assert f'/rollout/set/{SET}/{NAMES["teacher"]}#agent1-1"' in text


def test_search_respects_the_filters(pages) -> None:
    assert set(listed(pages, text="answer words")) == ALL
    assert listed(pages, text="answer words", verdict="failed_tests", made_for=SET) == [NAMES["dropped"]]
    assert listed(pages, text="no such words") == []


def test_search_stops_in_time_and_goes_on_where_it_stopped(viewed, monkeypatch) -> None:
    lake, _ = viewed
    monkeypatch.setattr(text_search, "ROLLOUTS", 1)
    seen, resume, clicks = [], None, 0
    while True:
        searched = text_search.search(lake, "answer words", resume)
        seen += [(hit.origin, hit.rollout_id) for hit in searched.hits]
        clicks += 1
        if searched.resume is None:
            break
        assert searched.turns < searched.all_turns
        resume = searched.resume
    assert sorted(rollout for _, rollout in seen) == sorted(ALL) and clicks > 1
    nothing = text_search.search(lake, "answer words", seconds=-1.0)
    assert nothing.hits == [] and nothing.resume == "0.0" and nothing.turns == 0


def test_rollouts_lead_to_those_beside_them(tmp_path: Path) -> None:
    lake = viewed_lake.make(tmp_path / "data")
    client = viewed_lake.client(lake, viewed_lake.build(lake, tmp_path / "etpi.duckdb"))
    first = client.get(rollout_page("set", SET, NAMES["teacher"])).text
    second = client.get(rollout_page("set", SET, NAMES["dropped"])).text
    assert f'rel="next" href="{rollout_page("set", SET, NAMES["dropped"])}"' in first and 'rel="prev"' not in first
    assert f'rel="prev" href="{rollout_page("set", SET, NAMES["teacher"])}"' in second and 'rel="next"' not in second
    alone = client.get(rollout_page("eval", STUDY, NAMES["student"])).text
    assert 'rel="next"' not in alone and 'rel="prev"' not in alone, "the base's rollout is of another checkpoint"


def test_curves_of_experiments_are_overlaid(pages) -> None:
    text = pages.get(f"/curves?experiment={STUDY}&experiment=none").text
    assert text.count("<polyline") == 1 and f"{STUDY} sft 0" in text
    assert pages.get("/curves").text.count("<polyline") >= 1, "it opens with the first experiments"
