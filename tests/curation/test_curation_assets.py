"""The curation assets in real runs: clean data pass every check, and each injected fault blocks its asset."""

from __future__ import annotations

import pytest

from etpi_assets.curation import captured, pairs, upweight
from etpi_assets.curation.strip_think import Stripped
from etpi_assets.specs.load import SpecError
from etpi_resources.chat.format import load_chat_format
from etpi_resources.lake.lake import BlockedInput, Ref
from tests.support.curation import ASSETS, CURATION, CurationLake
from tests.support.docs_pages import stopped
from tests.support.rows import write_lines


@pytest.fixture(scope="module")
def curation(tmp_path_factory):
    return CurationLake.with_rollouts(tmp_path_factory.mktemp("curation"))


def test_clean_run_passes_every_check_and_keeps_every_pair(curation):
    assert curation.failures("clean") == {}
    loaded = {
        a: {t: curation.lake.read(Ref(a, "experiment", "clean"), t) for t in ASSETS[a].node.tables} for a in CURATION
    }
    selected, pairs, rows = (loaded[a][t] for a, t in zip(CURATION, ("selected", "pairs", "dataset_rows"), strict=True))
    assert len(selected) == 24 and len(rows) == len(pairs) > 150
    assert set(rows["split"].to_pylist()) == {"train", "val"}
    assert sum(loaded["upweighted_dataset"]["sequences"]["rows"].to_pylist()) == len(rows)


def test_same_inputs_give_same_versions(curation):
    curation.experiment("again")
    assert curation.failures("clean") == curation.failures("again") == {}
    for asset in CURATION:
        first, second = (curation.lake.require(Ref(asset, "experiment", key)) for key in ("clean", "again"))
        assert first.version == second.version


def test_teacher_that_does_not_plan_blocks_unless_overridden_with_a_reason(curation):
    curation.rollout_set("planless", "plan_first = 0.2")
    curation.make_set("planless")
    more = "[dataset]\nmax_length = 1500\n"
    curation.experiment("weak", "planless", more=more)
    curation.write("experiments", "weak", _require_nothing(curation, "weak"))
    failed = curation.failures("weak")
    stopped(
        "a teacher that does not show the behaviour to be trained", "upweighted_dataset", failed, "teacher_gate",
        "A student is bounded by its teacher: take a stronger one",
    )  # fmt: skip
    manifest = curation.lake.blocked(Ref("upweighted_dataset", "experiment", "weak"))
    assert manifest and manifest.blocked
    with pytest.raises(BlockedInput, match="teacher_gate"):
        curation.lake.require(Ref("upweighted_dataset", "experiment", "weak"))
    gates = "".join(f'override.{name} = "we study weak teachers"\n' for name in failed)
    curation.experiment("excused", "planless", gates, more)
    curation.write("experiments", "excused", _require_nothing(curation, "excused"))
    assert curation.failures("excused") == {}


def _require_nothing(curation, name):
    text = (curation.folder / "specs" / "experiments" / f"{name}.toml").read_text()
    return text.replace("shortest_correct = false", "shortest_correct = false, require = []")


def test_steering_left_in_the_prompt_blocks(curation, monkeypatch):
    monkeypatch.setattr(captured, "_first_messages", lambda messages: None)
    curation.experiment("steered")
    failed = curation.failures("steered")
    assert set(failed) == {"no_steering_leak", "prompt_is_default_render"}
    stopped("the steering prompt left in training data", "tito_pairs", failed, "no_steering_leak", "contain steering")
    assert "48 of 48" in failed["prompt_is_default_render"]


def test_think_left_in_outputs_blocks(curation, monkeypatch):
    monkeypatch.setattr(pairs, "strip_output", lambda output, tail, chat: Stripped(output))
    curation.experiment("thinking")
    failed = curation.failures("thinking")
    assert set(failed) == {"no_think_in_output"}


def test_published_strip_rule_blocks_if_outputs_do_not_open_their_think_block(curation, monkeypatch):
    opened, turn = load_chat_format("tiny").think_open_id, captured._captured_turn

    def unopened(row, prompt, output, capture):
        return turn(row, prompt, output[1:] if output[0] == opened else output, capture)

    monkeypatch.setattr(captured, "_captured_turn", unopened)
    curation.experiment("as_published", more='[pairs]\nstrip_rule = "opened"\n')
    failed = curation.failures("as_published")
    assert set(failed) == {"no_think_in_output"}
    stopped(
        "</think> without <think> slipped through the strip", "tito_pairs", failed, "no_think_in_output",
        "The strip does not know this tokenizer's form",
    )  # fmt: skip
    curation.experiment("delimited", more='[pairs]\nstrip_rule = "delimited"\n')
    assert curation.failures("delimited") == {}


def test_heldout_tasks_are_dropped_and_block_if_they_are_not(curation, monkeypatch):
    curation.rollout_set("everything", split="all")
    curation.make_set("everything")
    curation.experiment("tested", "everything")
    assert curation.failures("tested") == {}
    dropped = curation.lake.read(Ref("upweighted_dataset", "experiment", "tested"), "dropped")
    assert set(dropped["reason"].to_pylist()) == {"heldout_task"}
    monkeypatch.setattr(upweight.RowRule, "drop", lambda *facts: None)
    curation.experiment("leaked", "everything", more="[dataset]\nmax_length = 2000\n")
    failed = curation.failures("leaked")
    assert set(failed) == {"heldout_split"}
    stopped(
        "held-out repositories in the data set", "upweighted_dataset", failed, "heldout_split",
        "add them to select.exclude_repos or split by repository",
    )  # fmt: skip


def test_short_training_prompts_for_long_evaluation_prompts_block(curation):
    failed = tooled(
        curation, "short", gates="template_distance = 1.0"
    )  # evaluation offers tools, whose descriptions are long
    assert set(failed) == {"prompt_length_ratio"} and "registers" in failed["prompt_length_ratio"]


def test_buried_first_turn_blocks(curation):
    curation.experiment("buried", gates="first_turn_loss_share = 0.9")
    failed = curation.failures("buried")
    assert set(failed) == {"turn_loss_share"}
    stopped(
        "one row per turn, so later turns outweigh the first", "upweighted_dataset", failed, "turn_loss_share",
        "Later turns bury it: raise dataset.upweight_factor",
    )  # fmt: skip


def test_teacher_that_writes_fenced_blocks_blocks_for_lack_of_calls(curation):
    curation.rollout_set("fenced", "plan_first = 1.0, markdown = 1.0")
    curation.make_set("fenced")
    curation.experiment("fenced", "fenced")
    stopped(
        "the call format had too little exposure", "upweighted_dataset", curation.failures("fenced"), "format_exposure",
        "The student would not learn the call format",
    )  # fmt: skip


def test_empty_selection_blocks(curation):
    curation.rollout_set("wrong", "plan_first = 1.0, wrong_edit = 1.0")
    curation.make_set("wrong")
    curation.experiment("solved", "wrong")
    path = curation.folder / "specs" / "experiments" / "solved.toml"
    path.write_text(path.read_text().replace('min_reward = "none"', "min_reward = 1.0"))
    assert "low_reward 24" in curation.failures("solved")["selection_reconciles"]


def test_native_ids_of_another_vocabulary_raise(curation):
    curation.experiment(
        "foreign",
        more='[base]\nkind = "none"\ntokenizer = "qwen3"\nchat_template = "qwen3"\n[pairs]\ncapture = "native"\n',
    )
    with pytest.raises(SpecError, match=r'tiny.*pairs\.capture = "retokenised"'):
        curation.failures("foreign")
    curation.experiment(
        "again_in_qwen3",
        more='[base]\nkind = "none"\ntokenizer = "qwen3"\nchat_template = "qwen3"\n[pairs]\ncapture = "retokenised"\n',
    )
    assert curation.failures("again_in_qwen3") == {}


def test_imported_ids_of_another_vocabulary_raise_if_the_spec_names_it(curation):
    ids = {"token_capture": {"prompt_token_ids": [1, 2], "output_token_ids": [3, 4]}}
    said = [{"role": "user", "content": "Moor?"}, {"role": "assistant", "content": "Moored.", "extra": ids}]
    path = write_lines(curation.folder / "recorded.jsonl", [{"messages": said}])
    text = f'title = "Recorded"\nkind = "imported"\nformat = "messages"\npath = "{path}"\n'
    curation.write("rollout_sets", "recorded", f'{text}[options]\ntokenizer = "tiny"\n')
    curation.make_set("recorded")
    base = '[base]\nkind = "none"\ntokenizer = "qwen3"\nchat_template = "qwen3"\n[pairs]\ncapture = "native"\n'
    top = 'title = "e"\nrollout_sets = ["recorded"]\nselect.min_reward = "none"\n'
    curation.write("experiments", "recorded_native", top + base)
    with pytest.raises(SpecError, match="'tiny'.*'qwen3'"):
        curation.failures("recorded_native")


def test_each_unreadable_row_of_a_file_is_a_lost_input(curation):
    good = [
        [{"role": "user", "content": f"Moor {n}?"}, {"role": "assistant", "content": f"Moored {n}."}] for n in range(2)
    ]
    bad = [[{"role": "user", "content": "Moor?"}, {"role": "harbour", "content": "Moored."}]] * 2
    path = write_lines(curation.folder / "half.jsonl", [{"messages": said} for said in good + bad])
    curation.write("rollout_sets", "half", f'title = "Half"\nkind = "imported"\nformat = "messages"\npath = "{path}"\n')
    curation.make_set("half")
    curation.write(
        "experiments",
        "half",
        'title = "e"\nrollout_sets = ["half"]\nselect.min_reward = "none"\nselect.require = []\n'
        '[base]\nkind = "none"\ntokenizer = "qwen3"\nchat_template = "qwen3"\n[pairs]\ncapture = "retokenised"\n',
    )
    assert "2 of 4 inputs lost" in curation.failures("half")["skip_rate"]


TOOLS = 'tools = ["bash", "send_message"]\n'


def tooled(curation, name, *, captured="", pairs="", served=TOOLS, gates=""):
    """Return the failed checks of an experiment in a template that writes tools after the system text."""
    folder = curation.folder / "tokenizer"
    load_chat_format("tiny", "qwen3").save(folder)
    curation.rollout_set(name, agent=f'tokenizer = "{folder}"\n{captured}')
    curation.make_set(name)
    base = f'[base]\nkind = "none"\ntokenizer = "{folder}"\nchat_template = "qwen3"\n'
    curation.experiment(name, name, gates, f"[pairs]\n{pairs}{base}[evaluate.agent]\n{served}")
    return curation.failures(name)


@pytest.mark.parametrize(
    "given",
    [{"captured": TOOLS}, {"captured": TOOLS, "pairs": f'capture = "retokenised"\n{TOOLS}'}],
    ids=["native", "retokenised"],
)
def test_tools_are_in_the_students_prompts(curation, given, request):
    """Captured tools stay when steering beside them is spliced out; re-tokenising writes those that the spec names."""
    name = f"tools_{request.node.callspec.id}"
    gates = 'override.label_syntax = "the scripted policy writes XML whatever the prompt says"\n'
    assert tooled(curation, name, gates=gates, **given) == {}
    chat, pairs = load_chat_format("tiny", "qwen3"), curation.lake.read(Ref("tito_pairs", "experiment", name), "pairs")
    first = [chat.decode(row["suffix_ids"]) for row in pairs.to_pylist() if row["turn"] == 0]
    assert len(first) == 48 and all(text.count('"name": "send_message"') == 1 for text in first)


def test_labels_in_another_syntax_than_the_prompts_block(curation):
    failed = tooled(curation, "other_syntax", captured=TOOLS)
    assert set(failed) == {"label_syntax"}
    assert all(form in failed["label_syntax"] for form in ("qwen_xml", "hermes"))


def test_tools_in_evaluation_only_block(curation):
    failed = tooled(curation, "serving_alone", gates="template_distance = 0.2\nprompt_length_ratio = 100.0")
    assert set(failed) == {"template_distance"}


def test_override_of_unknown_check_raises(curation):
    curation.experiment("misspelt", gates='override.teacher_gat = "x"')
    with pytest.raises(ValueError, match="'teacher_gate'"):
        curation.failures("misspelt")


def test_history_rebuilt_from_messages_blocks_if_it_was_compacted(curation):
    curation.write("rollout_sets", "compacted", 'extends = "good"\ntasks = 12\n[agent]\ncompact_after = 3\n')
    curation.make_set("compacted")
    curation.experiment("captured", of="compacted")
    curation.write("experiments", "put_together", 'extends = "captured"\npairs = {capture = "retokenised"}\n')
    override = 'gates = {override = {history_as_captured = "to measure its cost"}}\n'
    curation.write("experiments", "excused", f'extends = "put_together"\n{override}')
    assert curation.failures("captured") == curation.failures("excused") == {}
    failed = curation.failures("put_together")
    assert set(failed) == {"history_as_captured"}
    stopped(
        "a compacted history, reassembled from messages", "tito_pairs", failed, "history_as_captured",
        "are not what the model was given",
    )  # fmt: skip
