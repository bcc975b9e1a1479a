"""One turn as tokens: prompts as captured, shades by value, and the pair that was trained on."""

from __future__ import annotations

import math
import re
from html import unescape

import pytest
from hypothesis import given
from hypothesis import strategies as st

from etpi.view.pages.tokens import CELLS, diff, ratios, shade_class
from etpi_resources.lake import catalog
from etpi_resources.links import tokens_page
from tests.support.viewed_lake import NAMES, SET, STUDY, WORDS

TOKEN = re.compile(r'<span class="t ?(\w*)" title="id (\d+), position (\d+)([^"]*)">')


def boxes(text: str, kind: str) -> list[list[tuple[str, int, int, str]]]:
    """Return the tokens (shade, id, position, figures) of each box of a kind."""
    parts = re.findall(rf'<div class="tokens {kind}"[^>]*>(.*?)</div>', text, re.DOTALL)
    return [[(c, int(i), int(p), f) for c, i, p, f in TOKEN.findall(part)] for part in parts]


def page(pages, name: str, agent: str = "agent1", turn: int = 1, **more: str) -> str:
    origin, made_for = {"teacher": ("set", SET), "rl": ("rl", STUDY), "base": ("eval", STUDY)}[name]
    address = tokens_page(origin, made_for, NAMES[name], agent, turn)
    return pages.get(address + "".join(f"&{key}={value}" for key, value in more.items())).text


def test_prompt_is_what_the_view_rebuilds(pages, viewed) -> None:
    _, path = viewed
    with catalog.connect(path) as connection:
        (expected,) = connection.execute(
            "SELECT prompt_ids FROM full_turns WHERE rollout_id = ? AND agent_id = 'agent1' AND turn = 1",
            [NAMES["teacher"]],
        ).fetchone() or ([],)
    whole = boxes(page(pages, "teacher", whole="1"), "prompt")[0]
    assert [token[1] for token in whole] == expected == [1, 2, 3, 4, 10, 20, 40, 31]
    assert [token[2] for token in whole] == list(range(8))
    suffix = boxes(page(pages, "teacher"), "prompt")[0]
    assert [(token[1], token[2]) for token in suffix] == [(31, 7)], "only what the turn adds, at its position"


def test_text_of_a_token_is_shown_with_its_whitespace_and_escaped(pages) -> None:
    text = page(pages, "teacher")
    assert "&lt;/script&gt;</span>" in text and WORDS[40] == "</script>"
    sequence = pages.get(f"/dataset/{STUDY}/sequence/seq1").text
    assert "⏎\n</span>" in sequence


def test_output_is_shaded_by_log_probability(pages) -> None:
    tokens = boxes(page(pages, "teacher", shade="logprob"), "output")[0]
    assert [(t[0], t[1], t[2]) for t in tokens] == [("s0", 11, 8), ("s2", 20, 9), ("s8", 40, 10)]
    assert "logprob -1.2" in tokens[1][3]


def test_output_is_shaded_by_weight_and_label(pages) -> None:
    light = boxes(page(pages, "teacher", shade="weight"), "output")[0]
    dark = boxes(page(pages, "teacher", turn=0, shade="weight"), "output")[0]
    assert [t[0] for t in dark] == ["s0", "s8", "s8"], "the stripped id has no weight, the others the highest"
    assert [t[0] for t in light] == ["s0", "s1", "s1"], "weight 1 beside 12"
    label = boxes(page(pages, "teacher", shade="label"), "output")[0]
    assert [t[0] for t in label] == ["s0", "s5", "s5"]
    assert "weight 12" in dark[1][3] and "weight 0" in dark[0][3]


def test_what_was_not_recorded_is_said(pages) -> None:
    for shade in ("entropy", "ratio"):
        text = page(pages, "teacher", shade=shade)
        assert f"{shade}: not recorded" in text
        assert {t[0] for t in boxes(text, "output")[0]} == {""}
    assert "weight: not recorded" in page(pages, "base", shade="weight")
    assert "Held-out rollouts are not trained on" in page(pages, "base")


def test_pair_shows_what_was_removed_and_why(pages) -> None:
    text = page(pages, "teacher")
    prompt, output = re.findall(r'<div class="tokens diff">(.*?)</div>', text, re.DOTALL)

    def ids(part: str, kind: str) -> list[int]:
        runs = re.findall(rf'<span class="{kind}">((?:<span class="t.*?</span>)+)</span>', part, re.DOTALL)
        return [int(i) for run in runs for i in re.findall(r"title=\"id (\d+)", run)]

    assert ids(prompt, "removed") == [2, 10] and ids(prompt, "added") == []
    assert ids(prompt, "kept") == [1, 3, 4, 20, 40, 31]
    assert ids(output, "removed") == [11] and ids(output, "kept") == [20, 40]
    for word in ("Spliced", "Stripped", "think block was removed: 1 ids", "with weight 1 (train)"):
        assert word in text
    assert "/sequence/seq1" in text


def test_trainers_statistics_give_entropy_and_ratio() -> None:
    assert ratios([-1.0, -2.0], [-1.0, -1.0]) == [1.0, math.e]
    assert ratios([-1.0], None) is None and ratios([-1.0], [-1.0, -2.0]) is None
    assert [shade_class("ratio", value, 0) for value in (1.0, 1.05, 1.25, 9.0, 0.8, 0.1)] == [
        "s0", "s0", "r2", "r4", "b2", "b4",
    ]  # fmt: skip
    assert [shade_class("entropy", value, 0) for value in (0.0, 0.5, 9.0)] == ["s0", "s1", "s8"]


@pytest.mark.parametrize("shade", ["weight", "label", "logprob", "entropy", "ratio"])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_figure_that_is_not_finite_has_a_shade(shade: str, value: float) -> None:
    """An engine writes -inf for a token that it excluded."""
    assert re.fullmatch(r"[srb]\d", shade_class(shade, value, 1.0))


def test_statistics_of_reinforcement_are_those_of_the_turn(pages) -> None:
    ratio = boxes(page(pages, "rl", shade="ratio"), "output")[0]
    assert [t[0] for t in ratio] == ["s0", "s0", "r4"] and "ratio 2.718" in ratio[2][3]
    entropy = boxes(page(pages, "rl", shade="entropy"), "output")[0]
    assert [t[0] for t in entropy] == ["s0", "s2", "s5"]


def rebuilt(runs, kinds: tuple[str, ...]) -> list[int]:
    return [number for run in runs if run.kind in kinds for number in run.ids]


ids = st.lists(st.integers(0, 5), max_size=30)


@given(ids, ids)
def test_diff_rebuilds_both_lists(old: list[int], new: list[int]) -> None:
    runs = diff(old, new)
    assert rebuilt(runs, ("kept", "removed")) == old and rebuilt(runs, ("kept", "added")) == new
    for run in runs:
        source = new if run.kind == "added" else old
        assert source[run.start : run.start + len(run.ids)] == list(run.ids)


@pytest.mark.parametrize("breaks", [frozenset(), frozenset({0})])
def test_diff_of_long_lists_is_exact(breaks: frozenset[int]) -> None:
    old = [n % 7 for n in range(4000)]
    new = [*old[:1000], *old[1050:2000], 9, 9, *old[2000:]]
    changed = [*new[:10], 8, *new[10:-10], 8, *new[-10:]]
    assert (len(old) - 20) * (len(changed) - 20) > CELLS
    runs = diff(old, changed, breaks)
    assert rebuilt(runs, ("kept", "removed")) == old and rebuilt(runs, ("kept", "added")) == changed


def test_unescaped_figures_have_no_markup(pages) -> None:
    assert "<" not in unescape("".join(t[3] for t in boxes(page(pages, "teacher"), "output")[0]))
