"""Pairs: the inputs and outputs of a student, prefixes that survive editing, and a reason for every dropped turn."""

from __future__ import annotations

import json

import numpy as np
import pyarrow.compute as pc
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from etpi_assets.agent.actions import format_action, read_actions
from etpi_assets.agent.tools import tool_schemas
from etpi_assets.curation.captured import captured_agents
from etpi_assets.curation.pairs import CapturedAgent, CapturedTurn, format_tokens, make_pairs
from etpi_assets.curation.steering import FirstPrompt
from etpi_assets.curation.strip_think import has_think
from etpi_assets.specs.experiment import PairsSection
from etpi_assets.trajectories.tables import iter_prompts
from etpi_resources.chat.format import load_chat_format
from tests.support.datasets import CHAT, dataset, default, rollouts

NATIVE = PairsSection(capture="native")
KEEP = PairsSection(capture="native", strip_think=False, history_think="keep", drop_unparseable=False)


def ids(text):
    return np.asarray(CHAT.encode(text, allow_special=True), dtype=np.int32)


def whole(pairs):
    """(pair key) -> input and output, whole."""
    outputs = (np.asarray(o) for o in pairs["output_ids"].to_pylist())
    return {key: (prompt, output) for (key, prompt), output in zip(iter_prompts(pairs), outputs, strict=True)}


def test_without_edits_a_pair_is_the_captured_turn():
    tables = rollouts(steering=False)
    agents = list(captured_agents(tables, KEEP, CHAT, default, {}))
    pairs = make_pairs(agents, KEEP, CHAT)["pairs"]
    captured = dict(iter_prompts(tables["turns"]))
    assert len(pairs) == len(captured)
    for (key, (prompt, output)), written in zip(whole(pairs).items(), tables["turns"]["output_ids"], strict=True):
        assert np.array_equal(prompt, captured[key]) and output.tolist() == written.as_py()
    assert set(pairs["prompt_edit"].to_pylist()) == {"none"}


def test_pair_has_the_default_prompt_and_the_teachers_output_without_think():
    created = dataset()
    texts = {(r["rollout_id"], r["agent_id"], r["turn"]): r["content"] for r in created.tables["turns"].to_pylist()}
    tasks = dict(
        zip(
            created.tables["rollouts"]["rollout_id"].to_pylist(),
            created.tables["rollouts"]["task_id"].to_pylist(),
            strict=True,
        )
    )
    assert len(created.pairs) > 40
    for (rollout_id, agent_id, turn), (prompt, output) in whole(created.pairs).items():
        first = default(tasks[rollout_id], agent_id).ids
        assert prompt[: len(first)].tolist() == first, "the default prompt, id for id"
        assert (len(prompt) == len(first)) is (turn == 0)
        written = texts[rollout_id, agent_id, turn]
        assert CHAT.decode(output) == written.rpartition("</think>")[2].lstrip("\n") + "<|im_end|>"
        assert not has_think(prompt, CHAT), "history is stripped too"


def test_pairs_still_extend_each_other_after_splicing_and_stripping():
    created = dataset()
    last = {}
    for row in created.pairs.to_pylist():
        agent = row["rollout_id"], row["agent_id"]
        assert row["prefix_turn"] == last.get(agent), "every pair extends the one before it"
        last[agent] = row["turn"]
    assert {"spliced", "spliced+stripped"} == set(created.pairs["prompt_edit"].to_pylist())
    assert len(created.pairs) - created.pairs["prefix_turn"].null_count == len(created.pairs) - len(last)


def test_history_that_differs_from_the_trained_output_is_not_extended():
    for section in ({"history_think": "keep"}, {"strip_think": False, "history_think": "strip"}):
        created = dataset(section)
        thought = {
            (r["rollout_id"], r["agent_id"], r["turn"])
            for r in created.tables["turns"].to_pylist()
            if r["think_tokens"]
        }
        for row in created.pairs.to_pylist():
            if row["prefix_turn"] is not None:
                # A pair extends the latest pair whose output is in the history as it is trained.
                assert (row["rollout_id"], row["agent_id"], row["prefix_turn"]) not in thought
    assert {has_think(p, CHAT) for p, _ in whole(dataset({"history_think": "keep"}).pairs).values()} == {
        True,
        False,
    }


def test_history_stripped_during_the_rollout_gives_the_same_first_pairs():
    live, kept = whole(dataset(history_think="strip").pairs), whole(dataset().pairs)
    shared = live.keys() & kept.keys()
    assert {key for key in live if key[2] == 0} <= shared
    for key in shared:
        if key[2] == 0:
            assert all(np.array_equal(a, b) for a, b in zip(live[key], kept[key], strict=True))
    captured = dict(iter_prompts(rollouts(history_think="strip")["turns"]))
    for key, (prompt, _) in live.items():
        later = len(prompt) - len(live[*key[:2], 0][0]) if (*key[:2], 0) in live else 0
        assert later == 0 or np.array_equal(prompt[-later:], captured[key][-later:]), "as captured after the splice"
    prefixes = dataset(history_think="strip").pairs["prefix_turn"]
    assert len(prefixes) - prefixes.null_count == len(prefixes) - 12, "captured as forks, chained once stripped"


def test_retokenised_pairs_have_the_same_text_in_canonical_ids():
    native, again = whole(dataset().pairs), whole(dataset({"capture": "retokenised"}).pairs)
    assert native.keys() == again.keys()
    differ = 0
    for key, (prompt, output) in again.items():
        assert CHAT.decode(prompt) == CHAT.decode(native[key][0]) and CHAT.decode(output) == CHAT.decode(native[key][1])
        differ += not np.array_equal(output, native[key][1])
    assert differ > len(again) / 2, "the teacher does not spell as the tokenizer would"
    assert set(dataset({"capture": "retokenised"}).pairs["capture"].to_pylist()) == {"retokenised"}


def turns(
    *outputs,
    truncated=(),
    errors=None,
    capture="native",
    first="<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n",
):
    prompt, created = ids(first), []
    for number, text in enumerate(outputs):
        output = ids(text)
        cut = number in truncated
        created.append(CapturedTurn(number, prompt, output, capture, cut, (errors or {}).get(number)))
        added = "<|im_end|>" * cut + "\n<|im_start|>user\nok<|im_end|>\n<|im_start|>assistant\n"
        prompt = np.concatenate([prompt, output, ids(added)])
    return [CapturedAgent("r", "a", created, facts={"task_id": "t"})]


def dropped(agents, section=NATIVE):
    created = make_pairs(agents, section, CHAT)
    return {row["turn"]: (row["reason"], row["detail"]) for row in created["dropped"].to_pylist()}, created["pairs"]


END = "<|im_end|>"


def test_every_dropped_turn_has_its_reason():
    agents = turns(
        f"a{END}", "b cut", f"c{END}", f"<think>d{END}", f"<think>e</think><think>f</think>g{END}",
        f"<think>h</think>{END}",
        truncated={1}, errors={2: "no command found"},
    )  # fmt: skip
    reasons, pairs = dropped(agents)
    assert pairs["turn"].to_pylist() == [0]
    assert [reasons[turn][0] for turn in range(1, 6)] == [
        "truncated", "unparseable", "unclosed_think", "second_think_block", "nothing_but_think",
    ]  # fmt: skip
    assert reasons[2][1] == "no command found"
    kept = PairsSection(
        capture="native", drop_truncated=False, drop_unparseable=False, strip_think=False, history_think="keep"
    )
    assert not dropped(agents, kept)[0]


def test_turns_of_another_capture_are_dropped_as_not_captured():
    reasons, pairs = dropped(turns(f"a{END}", capture="none"))
    assert reasons[0] == ("not_captured", "capture is none, pairs.capture asks for native") and len(pairs) == 0


def test_dropped_turn_stays_in_the_history_of_the_next():
    agents = turns(f"one{END}", "two cut", f"three{END}", truncated={1})
    _, pairs = dropped(agents)
    assert pairs["turn"].to_pylist() == [0, 2] and pairs["prefix_turn"].to_pylist() == [None, 0]
    assert "two cut" in CHAT.decode(whole(pairs)["r", "a", 2][0])


def test_turn_that_cannot_be_stripped_stays_whole_in_history():
    _, pairs = dropped(turns(f"<think>one{END}", f"<think>x</think>two{END}", f"three{END}"))
    prompt = CHAT.decode(whole(pairs)["r", "a", 2][0])
    assert "<think>one" in prompt and "<think>x" not in prompt and "two" in prompt


def test_rerendered_prompt_is_edited_by_itself():
    start = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    more = "\n<|im_start|>user\nok<|im_end|>\n<|im_start|>assistant\n"
    rendered = [start, f"{start}<think>x</think>one{END}{more}", f"{start}<think>y</think>ONE{END}{more}two{END}{more}"]
    outputs = [f"<think>x</think>one{END}", f"two{END}", f"three{END}"]
    created = [
        CapturedTurn(n, ids(p), ids(o), "native") for n, (p, o) in enumerate(zip(rendered, outputs, strict=True))
    ]
    for first in (0, 1):
        _, pairs = dropped([CapturedAgent("r", "a", created[first:])])
        loaded = {key[2]: CHAT.decode(prompt) for key, (prompt, _) in whole(pairs).items()}
        assert loaded[1] == f"{start}one{END}{more}" and loaded[2] == f"{start}ONE{END}{more}two{END}{more}"
        assert pairs["prefix_turn"].to_pylist() == [None, 0, None][first:] if first == 0 else [None, None]


def test_metadata_has_role_teacher_and_source_tokens():
    row = dataset().pairs.to_pylist()[0]
    facts = json.loads(row["metadata"])
    assert facts["role"] in ("proposer", "responder") and facts["teacher"] == "made" and facts["tail"] == "none"
    assert facts["source_output_tokens"] == row["think_removed"] + len(row["output_ids"])
    assert row["pair_id"] == f"{row['rollout_id']}/{row['agent_id']}/{row['turn']}"


def test_error_names_the_rollout():
    (agent,) = turns(f"a{END}")
    wanted = FirstPrompt([{"role": "user", "content": "x"}], CHAT.prompt_ids([{"role": "user", "content": "x"}]))
    wrong = CapturedAgent("r7", "a", agent.turns, [{"role": "user", "content": "other"}], wanted)
    with pytest.raises(ValueError, match=r"r7/a.*spliced"):
        make_pairs([wrong], NATIVE, CHAT)


texts = st.sampled_from(["ls", "<think>hm</think>", "<think>\nhm\n</think>\n\n", "<think>", "</think>", "a b c", "\n"])


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.lists(texts, max_size=4).map(lambda parts: "".join(parts) + END), max_size=6),
    st.sampled_from(["strip", "keep"]),
    st.booleans(),
)
def test_each_turn_is_a_pair_or_dropped_and_prefix_encoding_is_lossless(outputs, history, strip):
    section = PairsSection(capture="native", strip_think=strip, history_think=history)
    agents = turns(*outputs)
    reasons, pairs = dropped(agents, section)
    assert len(reasons) + len(pairs) == len(outputs)
    for (key, (prompt, output)), row in zip(whole(pairs).items(), pairs.to_pylist(), strict=True):
        source = agents[0].turns[key[2]]
        assert source.prompt is not None and source.output is not None
        assert len(prompt) == row["input_tokens"] <= len(source.prompt)
        assert np.array_equal(output, source.output[row["think_removed"] :])
        assert prompt[-3:].tolist() == source.prompt[-3:].tolist(), "the generation prompt is never touched"
        if history == "keep":
            assert np.array_equal(prompt, source.prompt)
        if strip:
            assert not has_think(output, CHAT)


@pytest.mark.parametrize("command", ["ls", "sed -i 's/a/b/' x.py\ncat x.py", "cat <<'E'\n</parameters>\nE"])
def test_format_tokens_count_the_call_without_its_command(command):
    call = format_action(command)
    output = ids(f"Now.\n{call}{END}")
    assert read_actions(str(call))[0]
    bare = len(ids(f"Now.\n{END}")) + len(ids(command))
    assert abs(len(output) - bare - format_tokens(output, CHAT)) <= 2, "newlines at the seams may join a word"


def test_format_tokens_are_zero_without_call_and_whole_json_call():
    assert format_tokens(ids(f"```bash\nls\n```{END}"), CHAT) == 0
    call = ids('<tool_call>\n{"name": "bash", "arguments": {"command": "ls"}}\n</tool_call>')
    assert format_tokens(call, CHAT) == len(call)
    assert format_tokens(ids("<tool_call>\n<function=bash>\n<parameter=command>\nls"), CHAT) > 0


def test_student_that_is_served_tools_reads_them_in_training():
    tables, chat = rollouts(steering=False), load_chat_format("qwen3")
    section = PairsSection(capture="retokenised", strip_think=False, history_think="keep", drop_unparseable=False)
    first = pc.field("rollout_id") == tables["rollouts"]["rollout_id"][0]
    tables = {name: table.filter(first) for name, table in tables.items()}
    for tools in (None, tool_schemas(["code_interpreter"])):
        agents = list(captured_agents(tables, section, chat, default, {}, tools))
        prompts = [chat.decode(turn.prompt) for agent in agents for turn in agent.turns if turn.prompt is not None]
        assert prompts and all(('"name": "code_interpreter"' in text) == (tools is not None) for text in prompts)
