"""Steering is spliced out at message boundaries, other ids stay, and remaining steering is found."""

from __future__ import annotations

from itertools import islice

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from etpi_assets.agent.prompts import render_prompts, steering_text
from etpi_assets.curation.default_prompt import DefaultPrompts
from etpi_assets.curation.steering import FirstPrompt, SteeringNgrams, splice
from etpi_assets.curation.strip_think import segments
from etpi_assets.specs.load import load_specs
from etpi_assets.specs.rollout_set import AgentSection
from etpi_assets.worlds import coop_tiny_shared
from etpi_assets.worlds.coop_tiny_shared.generate import generate_tasks as generate_shared
from etpi_lab.worlds.coop_tiny import FAMILY
from etpi_lab.worlds.coop_tiny.generate import generate_tasks
from etpi_resources.chat.format import load_chat_format
from tests.support.students import FAMILIES, chat_of

CHAT = load_chat_format("tiny")
TASK = next(islice(generate_tasks("steer", 0, "train"), 1))
ROLE = FAMILY.roles(TASK)[0]
STEERED = render_prompts(AgentSection(steering=True), TASK, ROLE)
DEFAULT = render_prompts(AgentSection(steering=False), TASK, ROLE)
TEXT = steering_text(AgentSection(), ROLE)
STEERING_NGRAMS = SteeringNgrams.build([TEXT], [m["content"] for m in DEFAULT], CHAT)


def array(ids):
    return np.asarray(ids, dtype=np.int32)


STEERED_IDS, DEFAULT_IDS = array(CHAT.prompt_ids(STEERED)), array(CHAT.prompt_ids(DEFAULT))
WANTED = FirstPrompt(DEFAULT, DEFAULT_IDS)


def noncanonical(ids, seed=0):
    """Return the same text in other ids: about half of the tokens spelled by characters."""
    rng = np.random.default_rng(seed)
    spelled = []
    for token in ids.tolist():
        if token in CHAT.special_ids or rng.random() < 0.5:
            spelled.append(token)
        else:
            spelled += [i for c in CHAT.decode([token]) for i in CHAT.encode(c)]
    return array(spelled)


def test_spliced_prompt_is_the_students_prompt():
    result, spliced = splice(STEERED_IDS, STEERED, WANTED, CHAT)
    assert spliced and result.tolist() == DEFAULT_IDS.tolist()
    same, spliced = splice(DEFAULT_IDS, DEFAULT, WANTED, CHAT)
    assert not spliced and same is DEFAULT_IDS


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 10**6), st.lists(st.integers(0, CHAT.vocab_size - 1), max_size=30))
def test_splicing_keeps_all_other_ids_as_captured(seed, later):
    head, system, *rest = segments(STEERED_IDS, CHAT)
    rest = [noncanonical(piece, seed) for piece in rest]
    captured = np.concatenate([head, system, *rest, array(later)])
    result, spliced = splice(captured, STEERED, WANTED, CHAT)
    assert spliced
    assert np.array_equal(result[-len(np.concatenate([*rest, array(later)])) :], np.concatenate([*rest, array(later)]))
    assert np.array_equal(segments(result, CHAT)[1], segments(DEFAULT_IDS, CHAT)[1])


@pytest.mark.parametrize("name", FAMILIES)
def test_steering_is_spliced_out_under_a_template_of_any_family(name):
    chat = chat_of(name)
    plain = array(chat.prompt_ids(DEFAULT))
    default = FirstPrompt(DEFAULT, plain)
    steered, later = array(chat.prompt_ids(STEERED)), array(chat.ended(chat.encode("Done.")))
    result, spliced = splice(np.concatenate([steered, later]), STEERED, default, chat)
    assert spliced and result.tolist() == [*plain.tolist(), *later.tolist()]
    other = [{**STEERED[0], "content": STEERED[0]["content"] + " More."}, *STEERED[1:]]
    for captured, prompt in ((STEERED, plain), (other, steered)):
        with pytest.raises(ValueError, match=r"base\.tokenizer"):
            splice(prompt, captured, default, chat)


@pytest.mark.parametrize("name", ["mistral_v3", "mistral_v11", "gemma3", "gpt_oss"])
def test_part_with_other_text_than_the_students_beside_the_steering_is_refused(name):
    chat = chat_of(name)
    default = FirstPrompt(DEFAULT, array(chat.prompt_ids(DEFAULT)))
    other = [{**STEERED[0], "content": STEERED[0]["content"] + " More."}, *STEERED[1:]]
    with pytest.raises(ValueError, match=r"base\.tokenizer"):
        splice(array(chat.prompt_ids(other)), STEERED, default, chat)


def test_prompt_without_the_captured_message_raises():
    with pytest.raises(ValueError, match="base.tokenizer"):
        splice(DEFAULT_IDS, STEERED, WANTED, CHAT)
    with pytest.raises(ValueError, match=r"\['system', 'user'\].*\['user'\]"):
        splice(STEERED_IDS, STEERED, FirstPrompt(DEFAULT[1:], DEFAULT_IDS), CHAT)
    with pytest.raises(ValueError, match="chat_template"):
        splice(array(CHAT.prompt_ids(STEERED[:1])), STEERED, WANTED, CHAT)


def test_steering_is_found_by_ids_and_by_words():
    assert STEERING_NGRAMS.find(STEERED_IDS) is not None
    assert STEERING_NGRAMS.find(DEFAULT_IDS) is None
    respelled = noncanonical(STEERED_IDS)
    assert not any(ngram in STEERING_NGRAMS.ids for ngram in ids_only(respelled)), (
        "the respelling leaves no canonical n-gram"
    )
    assert "plan" in (STEERING_NGRAMS.find(respelled) or "")


def ids_only(ids):
    return [window.tobytes() for window in np.lib.stride_tricks.sliding_window_view(ids, 8)]


def test_part_of_the_steering_is_found_and_short_echoes_are_not():
    words = TEXT.split()
    for start in (0, 8, len(words) - 7):
        assert STEERING_NGRAMS.find(array(CHAT.encode("so: " + " ".join(words[start : start + 7])))) is not None
    assert STEERING_NGRAMS.find(array(CHAT.encode("Plan: I'll take a.py, then do your part."))) is None


def test_id_ngrams_are_found_if_there_are_too_few_words():
    ngrams = SteeringNgrams.build(["Steps: (1) -> [2]; {3} => <4>, !5! ~6~"], [], CHAT)
    few = array(CHAT.encode("[2]; {3} => <4>"))
    assert len(few) >= 8 and ngrams.find(few) is not None
    assert ngrams.find(array(CHAT.encode("[2]; {4} => <3>"))) is None


def test_default_prompt_of_a_steered_set_has_no_steering():
    specs, task = load_specs(), next(generate_shared("coop_tiny_shared", 0, "train"))
    rollout_set = specs.rollout_sets["coop_tiny_shared_strong"]
    prompts = DefaultPrompts(specs, specs.experiments["plan_first_tiny"], rollout_set, {task.task_id: task}, None)
    role = coop_tiny_shared.FAMILY.roles(task)[0]
    unsteered = rollout_set.agent.model_copy(update={"steering": False})
    prompt = prompts(task.task_id, role.agent_id)
    assert prompt and prompt.messages == render_prompts(unsteered, task, role)
    assert prompts("unknown", role.agent_id) is None


def test_text_of_the_default_prompt_is_no_leak():
    assert SteeringNgrams.build([TEXT], [TEXT], CHAT).find(STEERED_IDS) is None


def test_steering_text_shorter_than_an_ngram_raises():
    with pytest.raises(ValueError, match="Plan first"):
        SteeringNgrams.build(["Plan first!"], [], CHAT)
