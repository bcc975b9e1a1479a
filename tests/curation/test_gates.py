"""The checks before training: clean data pass, and each injected fault fails the check that names it."""

from __future__ import annotations

import json

import numpy as np
import pyarrow as pa
import pytest

from etpi_assets.agent.prompts import steering_text
from etpi_assets.curation import gates, integrity
from etpi_assets.curation.assets import _lost_inputs
from etpi_assets.curation.default_prompt import student_prompt
from etpi_assets.curation.pairs import CapturedAgent, CapturedTurn, make_pairs
from etpi_assets.curation.steering import SteeringNgrams
from etpi_assets.scoring.behaviours import every_rollout_scored
from etpi_assets.specs.experiment import DatasetSection, GatesSection, PairsSection, preset_values
from etpi_assets.specs.rollout_set import AgentSection
from etpi_lab.worlds.coop_tiny import FAMILY
from etpi_resources.lake.check_outcome import CheckOutcome, shown
from etpi_resources.lake.schemas import TABLES, empty, from_rows
from tests.support import whole_checks as whole
from tests.support.datasets import CHAT, HELDOUT, TASKS, dataset, default

GATES = GatesSection(**preset_values("plan_first")["gates"])
SECTION = PairsSection(capture="native")
STEERING = [steering_text(AgentSection(), role) for role in FAMILY.roles(TASKS[0])]
STEERING_NGRAMS = SteeringNgrams.build(STEERING, [], CHAT)


def changed(table, row, **values):
    """Return the table with one row changed."""
    rows = table.to_pylist()
    rows[row] |= values
    name = next(name for name, known in TABLES.items() if known.schema.names == table.schema.names)
    return from_rows(name, rows)


def without(table, row):
    return pa.concat_tables([table.slice(0, row), table.slice(row + 1)])


def every(table, **values):
    name = next(name for name, known in TABLES.items() if known.schema.names == table.schema.names)
    return from_rows(name, [{**row, **values} for row in table.to_pylist()])


def fails(outcome, *terms, **figures):
    """Assert that the check failed, blocks, names these terms, and has these figures."""
    assert not outcome.passed and outcome.blocking
    _has(outcome, terms, figures)


def passes(outcome, *terms, **figures):
    assert outcome.passed, outcome.message
    _has(outcome, terms, figures)


def _has(outcome, terms, figures):
    assert [term for term in terms if term not in outcome.message] == [], outcome.message
    assert {name: outcome.figures[name] for name in figures} == figures
    json.dumps(outcome.to_json())


# --- counts ----------------------------------------------------------------------------------------------------------


def test_every_rollout_scored_fails_without_a_score():
    created = dataset()
    tables = created.tables["rollouts"], created.tables["agents"]
    passes(every_rollout_scored(*tables, created.scores, created.agent_scores), rollouts=6, agents=12)
    missing = every_rollout_scored(*tables, without(created.scores, 0), created.agent_scores)
    fails(missing, created.selected["rollout_id"][0].as_py())
    fails(every_rollout_scored(*tables, created.scores, without(created.agent_scores, 3)))
    for twice in ("scores", "agent_scores"):
        scored = {"scores": created.scores, "agent_scores": created.agent_scores}
        scored[twice] = pa.concat_tables([scored[twice], scored[twice].slice(0, 1)])
        fails(every_rollout_scored(*tables, **scored))


def offered(created):
    keys = [(a.rollout_id, a.agent_id, t.turn) for a in created.agents for t in a.turns]
    return from_rows("turns", [dict(zip(integrity.KEY, key, strict=True)) for key in keys])


def test_pairs_reconcile_fails_on_a_missing_and_on_a_duplicate_pair():
    created = dataset()
    turns = offered(created)
    outcome = whole.pairs_reconcile(turns, created.pairs, created.pairs_dropped)
    passes(outcome, offered=69, kept=64, dropped=5, reasons={"unparseable": 5})
    missing = whole.pairs_reconcile(turns, without(created.pairs, 5), created.pairs_dropped)
    fails(missing, created.pairs["rollout_id"][5].as_py())
    twice = pa.concat_tables([created.pairs, created.pairs.slice(0, 1)])
    fails(whole.pairs_reconcile(turns, twice, created.pairs_dropped), created.pairs["rollout_id"][0].as_py())
    fails(whole.pairs_reconcile(turns, without(twice, 5), created.pairs_dropped), "2 are missing or duplicated")


def test_blocks_that_were_never_read_fail_although_the_others_balance():
    created = dataset()
    figures = integrity.reconcile_figures(created.pairs, created.rows, created.dropped)
    assert integrity.reconcile_outcome("dataset_reconciles", figures, len(created.pairs), 60).passed
    fails(integrity.reconcile_outcome("dataset_reconciles", figures, 70, 60), "6 are missing")
    fails(integrity.reconcile_outcome("pairs_reconcile", figures, 70), "6 are missing")


def test_rollouts_without_the_capture_fail_and_name_the_option():
    created = dataset()
    agents = [
        CapturedAgent(a.rollout_id, a.agent_id, [CapturedTurn(t.turn, None, None, "none") for t in a.turns])
        for a in created.agents
    ]
    tables = make_pairs(agents, SECTION, CHAT)
    outcome = whole.pairs_reconcile(offered(created), tables["pairs"], tables["dropped"])
    fails(outcome, 'pairs.capture = "retokenised"', reasons={"not_captured": 69})


@pytest.mark.parametrize(
    ("fraction", "rows", "passed"), [(0.1, {"train": 9}, False), (0.0, {"train": 9}, True), (0.1, {"val": 1}, True)]
)
def test_share_for_validation_that_is_no_row_warns(fraction: float, rows: dict[str, int], passed: bool):
    outcome = integrity.validation_outcome(rows, DatasetSection(val_fraction=fraction))
    assert (outcome.passed, outcome.blocking) == (passed, False)


def test_dataset_reconciles_fails_on_a_missing_row_and_without_training_rows():
    created = dataset()
    outcome = whole.dataset_reconciles(created.pairs, created.rows, created.dropped)
    passes(outcome, offered=64, kept=64, dropped=0)
    fails(whole.dataset_reconciles(created.pairs, without(created.rows, 1), created.dropped))
    short = dataset(weights={"max_length": 64})
    fails(whole.dataset_reconciles(short.pairs, short.rows, short.dropped), "dataset.max_length")
    fails(whole.dataset_reconciles(created.pairs, every(created.rows, split="val"), created.dropped), training=0)


# --- ids -------------------------------------------------------------------------------------------------------------


def test_capture_not_mixed_fails_on_two_captures():
    pairs = dataset().pairs
    passes(whole.capture_not_mixed(pairs, SECTION), native=64)
    mixed = whole.capture_not_mixed(changed(pairs, 3, capture="retokenised"), SECTION)
    fails(mixed, native=63, retokenised=1)
    fails(whole.capture_not_mixed(pairs, PairsSection(capture="retokenised")), native=64)


def test_no_think_in_output_fails_on_think_ids_and_open_prompts():
    pairs = dataset().pairs
    clean = {"outputs_with_think": 0, "open_prompts": 0, "prompt_tails": {"none": 64}}
    passes(whole.no_think_in_output(pairs, SECTION, CHAT), **clean)
    ids, name = pairs["output_ids"].to_pylist()[4], pairs["pair_id"].to_pylist()[4]
    for think in (CHAT.think_open_id, CHAT.think_close_id):
        leak = changed(pairs, 4, output_ids=[think, *ids])
        fails(whole.no_think_in_output(leak, SECTION, CHAT), name, "strip_think = false", outputs_with_think=1)
    opened = changed(pairs, 4, suffix_ids=[*pairs["suffix_ids"].to_pylist()[4], CHAT.think_open_id])
    fails(whole.no_think_in_output(opened, SECTION, CHAT), name, open_prompts=1)
    kept = dataset({"strip_think": False, "history_think": "keep"}).pairs
    passes(whole.no_think_in_output(kept, PairsSection(strip_think=False), CHAT))
    fails(whole.no_think_in_output(kept, SECTION, CHAT))


def test_no_steering_leak_finds_steering_in_inputs_and_outputs():
    pairs = dataset().pairs
    passes(whole.no_steering_leak(pairs, STEERING_NGRAMS), pairs=64, leaks=0)
    name = pairs["pair_id"].to_pylist()[7]
    for column in ("suffix_ids", "output_ids"):
        ids = pairs[column].to_pylist()[7]
        for part in (STEERING[0].strip(), " ".join(STEERING[0].split()[-7:])):
            leak = changed(pairs, 7, **{column: [*ids, *CHAT.encode(part)]})
            fails(whole.no_steering_leak(leak, STEERING_NGRAMS), name, leaks=1)


def test_steering_that_was_not_spliced_fails_two_checks():
    created = dataset()
    agents = [CapturedAgent(a.rollout_id, a.agent_id, a.turns, facts=a.facts) for a in created.agents]
    pairs = make_pairs(agents, SECTION, CHAT)["pairs"]
    fails(whole.no_steering_leak(pairs, STEERING_NGRAMS), leaks=12)
    fails(whole.prompt_is_default_render(pairs, expected(created), SECTION, CHAT), compared=12, differ=12)


def test_no_steering_leak_finds_steering_across_two_turns():
    text = CHAT.encode(" ".join(STEERING[0].split()[:8]))
    head = CHAT.encode("<|im_start|>user\nx<|im_end|>\n<|im_start|>assistant\n", allow_special=True)
    first, second = text[: len(text) // 2], text[len(text) // 2 :]
    turns = [
        CapturedTurn(0, np.array(head, np.int32), np.array(first, np.int32), "native"),
        CapturedTurn(1, np.array([*head, *first, *second], np.int32), np.array(head, np.int32), "native"),
    ]
    pairs = make_pairs([CapturedAgent("r", "a", turns)], SECTION, CHAT)["pairs"]
    assert pairs["prefix_turn"].to_pylist() == [None, 0]
    fails(whole.no_steering_leak(pairs, STEERING_NGRAMS), "r/a/1", leaks=1)


def expected(created):
    task = dict(zip(created.selected["rollout_id"].to_pylist(), created.selected["task_id"].to_pylist(), strict=True))
    return {(a.rollout_id, a.agent_id): default(task[a.rollout_id], a.agent_id).ids for a in created.agents}


def test_prompt_is_default_render_fails_on_one_differing_id():
    created = dataset()
    prompts = expected(created)
    passes(whole.prompt_is_default_render(created.pairs, prompts, SECTION, CHAT), agents=12, compared=12, differ=0)
    passes(whole.prompt_is_default_render(created.pairs, {}, SECTION, CHAT), compared=0)
    first = created.pairs["turn"].to_pylist().index(0)
    ids = created.pairs["suffix_ids"].to_pylist()[first]
    places = (20, len(ids) - 1, len(ids))
    for wrong, place in zip(([*ids[:20], ids[20] + 1, *ids[21:]], ids[:-1], [*ids, ids[-1]]), places, strict=True):
        pairs = changed(created.pairs, first, suffix_ids=wrong)
        outcome = whole.prompt_is_default_render(pairs, prompts, SECTION, CHAT)
        fails(outcome, f"position {place}", "base.chat_template", differ=1)
    # If turn 0 was dropped, the first pair continues the default prompt.
    agents = [
        CapturedAgent(a.rollout_id, a.agent_id, [broken(a.turns[0]), *a.turns[1:]], a.captured, a.default, a.facts)
        for a in created.agents
    ]
    later = make_pairs(agents, SECTION, CHAT)["pairs"]
    assert 0 not in later["turn"].to_pylist()
    passes(whole.prompt_is_default_render(later, prompts, SECTION, CHAT), compared=12, differ=0)


def broken(turn):
    return CapturedTurn(turn.turn, turn.prompt, turn.output, turn.capture, parse_error="no command found")


def test_label_tokens_fails_unless_each_span_is_its_rows_output():
    created = dataset()
    labels = sum(created.rows["output_tokens"].to_pylist())
    outcome = whole.label_tokens(created.rows, created.pairs, created.sequences)
    passes(outcome, label_tokens=labels, row_tokens=labels, sequences=12)
    sequence = created.sequences.to_pylist()[0]
    no_mask = changed(created.sequences, 0, span_starts=[], span_ends=[], span_weights=[])
    fails(whole.label_tokens(created.rows, created.pairs, no_mask), row_tokens=labels)
    shifted = changed(
        created.sequences,
        0,
        span_starts=[s - 1 for s in sequence["span_starts"]],
        span_ends=[s - 1 for s in sequence["span_ends"]],
    )
    fails(whole.label_tokens(created.rows, created.pairs, shifted), f"{sequence['rows']} rows", label_tokens=labels)
    other = changed(created.sequences, 0, input_ids=[0, *sequence["input_ids"][1:]])
    fails(whole.label_tokens(created.rows, created.pairs, other), label_tokens=labels)
    also = {"span_starts": 1, "span_ends": sequence["span_starts"][0], "span_weights": 0.0}
    more = changed(created.sequences, 0, **{name: [value, *sequence[name]] for name, value in also.items()})
    fails(whole.label_tokens(created.rows, created.pairs, more))
    fails(whole.label_tokens(created.rows, created.pairs, with_last_id(created.sequences, 0)), label_tokens=labels)
    light = changed(created.sequences, 0, span_weights=[0.5] * len(sequence["span_weights"]))
    fails(whole.label_tokens(created.rows, created.pairs, light), label_tokens=labels)
    other = {"train": "val", "val": "train"}[sequence["split"]]
    fails(whole.label_tokens(created.rows, created.pairs, changed(created.sequences, 0, split=other)), "split")
    nothing = created.rows.slice(0, 0), created.pairs, created.sequences.slice(0, 0)
    fails(whole.label_tokens(*nothing), label_tokens=0)


def with_last_id(sequences: pa.Table, token: int) -> pa.Table:
    return changed(sequences, 0, input_ids=[*sequences["input_ids"][0].as_py()[:-1], token])


def test_label_tokens_counts_copies():
    created = dataset(weights={"upweight_factor": 4, "upweight_form": "duplicate"})
    passes(whole.label_tokens(created.rows, created.pairs, created.sequences))


def test_label_tokens_fails_if_turns_of_a_sequence_share_their_weight_evenly():
    created = dataset(weights={"upweight_factor": 4})
    sequence = created.sequences.to_pylist()[0]
    lengths = np.subtract(sequence["span_ends"], sequence["span_starts"])
    even = [np.dot(lengths, sequence["span_weights"]) / lengths.sum()] * len(lengths)
    passes(whole.label_tokens(created.rows, created.pairs, created.sequences))
    evened = changed(created.sequences, 0, span_weights=even)
    outcome = whole.label_tokens(created.rows, created.pairs, evened)
    fails(outcome, f"{sequence['rows']} rows")
    assert outcome.figures["weighted_tokens"] == pytest.approx(
        whole.label_tokens(created.rows, created.pairs, created.sequences).figures["weighted_tokens"]
    )


def test_heldout_split_fails_on_leaks_shared_and_unknown_repositories():
    rows = dataset().rows
    repos = {task.repo for task in HELDOUT}
    clean = whole.heldout_split(rows, repos, {task.task_id for task in HELDOUT})
    passes(clean, heldout_repos=sorted(repos))
    assert len(clean.figures["repos"]) == 6
    leaked = changed(rows, 0, repo=HELDOUT[0].repo, split="val")
    fails(whole.heldout_split(leaked, repos), HELDOUT[0].repo, "select.exclude_repos")
    fails(whole.heldout_split(rows, set(), {TASKS[2].task_id}), TASKS[2].task_id, 'split = "train"')
    other = {"train": "val", "val": "train"}[rows["split"].to_pylist()[0]]
    fails(whole.heldout_split(changed(rows, 0, split=other), repos), TASKS[0].repo)
    fails(whole.heldout_split(changed(rows, 0, repo=None), repos), "options.repo")


def test_repository_that_one_suite_holds_out_may_be_trained_in_no_other():
    rows = [("train_a", "left", "train"), ("a", "left", "heldout"), ("by_time", "both", "train")]
    rows += [("by_time", "both", "heldout"), ("a", "right", "heldout")]
    tasks = pa.table(dict(zip(("suite", "repo", "split"), zip(*rows, strict=True), strict=True)))
    assert integrity.repositories_held_out(tasks, {"train_a", "a", "by_time"}) == {"left", "right"}
    assert integrity.repositories_held_out(tasks, {"by_time"}) == {"right"}, "a source of questions"


# --- gates -----------------------------------------------------------------------------------------------------------


def measured(n, plan, follow=1.0, **columns):
    """Return n scored rollouts of one task each, of which the first `plan` planned."""
    rollouts = from_rows("rollouts", [{"rollout_id": f"r{i}", "task_id": f"t{i}"} for i in range(n)])
    score = {"infrastructure_error": False, "reward": 1.0}
    scores = [
        {"rollout_id": f"r{i}", "plan_first": i < plan, "plan_content": i < plan, **score, **columns} for i in range(n)
    ]
    agents = [
        {"rollout_id": f"r{i}", "agent_id": f"agent{a}", "follow_through": i < follow * n}
        for i in range(n)
        for a in (1, 2)
    ]
    return rollouts, from_rows("scores", scores), from_rows("agent_scores", agents)


def test_teacher_gate_compares_each_rate_with_its_floor():
    section = GatesSection(teacher={"plan_first": 0.7, "follow_through": 0.6})
    passes(gates.teacher_gate(*measured(40, 38), section), "n = 40", plan_first=0.95, follow_through=1.0)
    fails(gates.teacher_gate(*measured(40, 10), section), plan_first=0.25)
    fails(gates.teacher_gate(*measured(40, 38, follow=0.1), section), "n = 80", "40 clusters", follow_through=0.1)
    passes(gates.teacher_gate(*measured(2, 2), section), "undecided at this n (the estimate is above)")
    fails(gates.teacher_gate(*measured(2, 1), section), "undecided at this n (the estimate is below)")
    solo = measured(5, 5, plan_first=None, plan_content=None)
    fails(gates.teacher_gate(*solo, section), "plan_first", "gates.teacher")
    passes(gates.teacher_gate(*measured(4, 0), GatesSection(teacher={})))
    with pytest.raises(ValueError, match=r"gates\.teacher\.plan_frist"):
        gates.teacher_gate(*measured(2, 2), GatesSection(teacher={"plan_frist": 0.5}))


@pytest.mark.parametrize(("weak", "passed"), [(10, False), (1, True)])
def test_weak_teacher_is_not_hidden_by_a_strong_one(weak: int, passed: bool):
    rollouts, scores, agents = measured(50, 50 - weak)
    names = [{**row, "teacher": "strong" if n < 50 - weak else "weak"} for n, row in enumerate(rollouts.to_pylist())]
    outcome = gates.teacher_gate(
        from_rows("rollouts", names), scores, agents, GatesSection(teacher={"plan_first": 0.7})
    )
    assert outcome.passed == passed and ("of weak" in outcome.message) == (not passed)


def test_teacher_gate_excludes_infrastructure_errors():
    rollouts, scores, agents = measured(10, 8, follow=0.8)
    broken_rows = [row | {"infrastructure_error": not row["plan_first"]} for row in scores.to_pylist()]
    section = GatesSection(teacher={"plan_first": 1.0, "follow_through": 1.0})
    outcome = gates.teacher_gate(rollouts, from_rows("scores", broken_rows), agents, section)
    passes(outcome, plan_first=1.0, follow_through=1.0, excluded=2)


def weighted(*rows):
    """Return training rows from (turn, weight x copies, output tokens)."""
    return from_rows(
        "dataset_rows",
        [
            {"pair_id": f"p{i}", "turn": t, "weight": w, "copies": 1, "output_tokens": n, "split": "train"}
            for i, (t, w, n) in enumerate(rows)
        ],
    )


def test_turn_loss_share_fails_if_later_turns_bury_turn_0():
    buried = [(0, 1.0, 10), *[(t, 1.0, 20) for t in range(1, 60)]]
    section = GatesSection(first_turn_loss_share=0.05)
    outcome = whole.turn_loss_share(weighted(*buried), section)
    fails(outcome, "upweight_factor about 6.2 times")
    assert outcome.figures["turn_0"] == pytest.approx(10 / 1190)
    assert outcome.figures["turn_1"] == pytest.approx(20 / 1190)
    passes(whole.turn_loss_share(weighted((0, 6.3, 10), *buried[1:]), section), "0.051")
    copies = changed(weighted(*buried), 0, copies=7)
    passes(whole.turn_loss_share(copies, section))
    fails(whole.turn_loss_share(weighted(*buried[1:]), section), "`dropped`")
    fails(whole.turn_loss_share(changed(weighted((0, 9.0, 10), (1, 1.0, 1)), 0, split="val"), section), "`dropped`")
    passes(whole.turn_loss_share(dataset().rows, GATES))


def test_format_exposure_counts_calls_by_weight():
    created = dataset()
    passes(whole.format_exposure(created.rows, created.pairs, GatesSection(format_exposure=40)), rows=53)
    fails(whole.format_exposure(created.rows, created.pairs, GATES), "floor 200", "dataset.upweight_factor")
    louder = dataset(weights={"upweight_factor": 12})
    passes(whole.format_exposure(louder.rows, louder.pairs, GATES))
    passes(whole.format_exposure(every(created.rows, copies=12), created.pairs, GATES))
    assert gates.exposure_figures(created.rows, every(created.pairs, format_tokens=1))["rows_with_call"] == 53
    for without in (every(created.pairs, format_tokens=0), created.pairs.slice(0, 0)):
        fails(whole.format_exposure(created.rows, without, GatesSection(format_exposure=1)), rows_with_call=0, rows=53)


def test_role_balance_fails_on_rows_of_one_role():
    created = dataset()
    passes(whole.role_balance(created.rows, created.pairs, GATES), "proposer", "responder", "floor 0.25")
    proposers = [r["pair_id"] for r in created.pairs.to_pylist() if json.loads(r["metadata"])["role"] == "proposer"]
    one_sided = created.rows.filter(pa.compute.is_in(created.rows["pair_id"], pa.array(proposers)))  # pyright: ignore[reportAttributeAccessIssue]
    fails(whole.role_balance(one_sided, created.pairs, GATES), "responder 0")
    solo = every(created.pairs, metadata='{"role": "solo"}')
    passes(whole.role_balance(created.rows, solo, GATES), solo=53)


@pytest.mark.parametrize(
    ("rows_of", "passed"),
    [
        ({"proposer": 1, "responder": 1, "None": 98}, False),
        ({"None": 9}, False),
        ({"proposer": 5, "responder": 5, "solo": 90}, True),
        ({"solo": 90, "subagent": 10}, True),
        ({"responder": 5, "solo": 5}, False),
        ({"responder": 3}, False),
        ({}, True),
    ],
)
def test_role_balance_counts_rows_without_a_role_and_leaves_out_agents_alone(rows_of: dict[str, int], passed: bool):
    assert gates.role_outcome(rows_of, GATES).passed == passed


def texts(created) -> dict[str, str]:
    return dict(zip(created.tasks["task_id"].to_pylist(), created.tasks["instruction"].to_pylist(), strict=True))


def test_plan_paths_in_task_fails_on_entities_that_the_task_lacks():
    created = dataset()
    passes(
        gates.plan_paths_in_task(created.selected, created.agent_scores, texts(created), GATES),
        rate=1.0,
        unknown_task=0,
    )
    strange = every(created.agent_scores, plan_entities='["src/cli.py"]')
    fails(
        gates.plan_paths_in_task(created.selected, strange, texts(created), GATES),
        "src/cli.py (made-",
        "plan_content",
        rate=0.0,
    )
    known = json.loads(created.agent_scores["plan_entities"][0].as_py())[0]
    partly = changed(created.agent_scores, 0, plan_entities=json.dumps([known, "src/cli.py"]))
    passes(gates.plan_paths_in_task(created.selected, partly, texts(created), GATES), rate=11 / 12)
    nameless = every(created.agent_scores, plan_entities="[]")
    fails(gates.plan_paths_in_task(created.selected, nameless, texts(created), GATES), rate=0.0)
    passes(
        gates.plan_paths_in_task(created.selected, created.agent_scores, {}, GATES),
        plans=12,
        unknown_task=12,
    )


def first_prompts(tasks, section):
    return [CHAT.prompt_ids(student_prompt(section, task, role)) for task in tasks for role in FAMILY.roles(task)]


TRAINING, EVALUATION = (first_prompts(tasks, AgentSection()) for tasks in (TASKS, HELDOUT))


def test_prompt_length_ratio_fails_either_way():
    lengths = [len(p) for p in TRAINING], [len(p) for p in EVALUATION]
    passes(gates.prompt_length_ratio(*lengths, GATES), "bound 4.00", training=12, evaluation=8)
    long = [10 * n for n in lengths[1]]
    for pair in ((lengths[0], long), (long, lengths[0])):
        fails(gates.prompt_length_ratio(*pair, GATES), "registers")
    passes(gates.prompt_length_ratio(lengths[0], [], GATES), training=12, evaluation=0)


def test_template_distance_fails_on_another_template():
    passes(gates.template_distance(TRAINING, EVALUATION, GATES), distance=0.0, evaluation=8)
    synthetic = [
        CHAT.prompt_ids([{"role": "user", "content": f"Fix {task.payload['files']}."[:200]}]) for task in TASKS
    ]
    fails(gates.template_distance(synthetic, EVALUATION, GATES), "template")
    fails(gates.template_distance([TRAINING[0], *synthetic], EVALUATION, GATES), "template")
    passes(gates.template_distance(TRAINING, EVALUATION[:1], GATES), evaluation=1)
    passes(gates.template_distance(TRAINING, [[1, 2, 3], [4, 5, 6]], GATES), evaluation=2)


def test_empty_think_block_of_serving_alone_fails():
    passes(gates.generation_prompt(TRAINING, EVALUATION, CHAT), "no think block")
    block = CHAT.encode("<think>\n\n</think>\n\n", allow_special=True)
    served = [[*prompt, *block] for prompt in EVALUATION]
    fails(gates.generation_prompt(TRAINING, served, CHAT), "an empty think block")
    fails(gates.generation_prompt(served, EVALUATION, CHAT), "serving.template_kwargs")
    passes(gates.generation_prompt([*TRAINING, *served], served, CHAT), "no think block")
    passes(gates.generation_prompt([*TRAINING[:9], served[0]], served, CHAT), "an empty think block")
    fails(gates.generation_prompt([*TRAINING[:10], served[0]], served, CHAT), "an empty think block")
    for prompts in ((TRAINING, []), ([], EVALUATION)):
        assert not gates.generation_prompt(*prompts, CHAT).applicable


def lost(turns: int, tokens: int) -> dict:
    return {"reasons": {"over_max_length": turns}, "tokens": tokens}


LIMITS = GatesSection(
    teacher={"plan_first": 0.8}, first_turn_loss_share=0.5, format_exposure=10, role_balance=0.25,
    prompt_length_ratio=2.0, template_distance=0.0, skip_rate=0.2, turns_lost=0.2,
)  # fmt: skip
CALLS = {"rows_with_call": 9, "rows": 10, "format_tokens": 90}


@pytest.mark.parametrize(
    ("gate", "at", "beyond"),
    [
        (gates.teacher_gate, measured(10, 8), measured(10, 7)),
        (gates.loss_share_outcome, [{0: 0.5, 1: 0.5}], [{0: 0.49, 1: 0.51}]),
        (gates.exposure_outcome, [CALLS | {"exposure": 10.0}], [CALLS | {"exposure": 9.9}]),
        (gates.role_outcome, [{"proposer": 1, "responder": 3}], [{"proposer": 1, "responder": 4}]),
        (gates.prompt_length_ratio, [[10], [20]], [[10], [21]]),
        (
            gates.template_distance,
            [[[*range(9)]], [[*range(9)]] * 9 + [[7] * 9]],
            [[[9] * 9], [[*range(9)]] * 9 + [[7] * 9]],
        ),
        (gates.skip_rate, [{"s": 5}, [("s", "a", "x")]], [{"s": 4}, [("s", "a", "x")]]),
        (gates.lost_outcome, [lost(2, 20), 8, 80], [lost(3, 20), 8, 80]),
        (gates.lost_outcome, [lost(2, 20), 8, 80], [lost(2, 21), 8, 80]),
    ],
)
def test_gate_passes_at_its_limit_and_fails_just_beyond(gate, at, beyond):
    assert gate(*at, LIMITS).passed
    assert not gate(*beyond, LIMITS).passed


def test_plans_of_rollouts_that_are_not_selected_do_not_count():
    created = dataset()
    strange = every(created.agent_scores, rollout_id="other", plan_entities='["src/cli.py"]')
    scores = pa.concat_tables([created.agent_scores, strange])
    passes(gates.plan_paths_in_task(created.selected, scores, texts(created), GATES), rate=1.0, plans=12)
    half = pa.concat_tables(
        [created.agent_scores.slice(0, 6), every(created.agent_scores.slice(6), plan_entities="[]")]
    )
    fails(gates.plan_paths_in_task(created.selected, half, texts(created), GATES), rate=0.5)


def test_file_beside_runs_is_not_lost():
    rows = [{"source": name, "reason": reason} for name, reason in [("a", "not_a_rollout"), ("b", "unknown_form")]]
    assert gates.lost_runs(from_rows("quarantined", rows))["source"].to_pylist() == ["b"]


def test_input_is_lost_once_whatever_lost_it():
    quarantined = from_rows("quarantined", [{"source": "x", "row": row, "reason": "empty"} for row in (None, 3)])
    rows = [{"rollout_id": name, "rollout_set": "s", "source": f"of {name}"} for name in "abcde"]
    scores = [{"rollout_id": name, "infrastructure_error": name in "bc", "exit_status": "Error"} for name in "abcde"]
    selected = from_rows("selected", [{"rollout_id": name} for name in "acd"])
    by_set = {"q": quarantined, "s": quarantined.slice(2)}
    dropped = from_rows(
        "dropped",
        [
            {"rollout_id": "e", "reason": "refused_by_template", "detail": "no"},
            {"rollout_id": "a", "reason": "low_reward", "detail": "x"},
        ],
    )
    recorded, scored = from_rows("rollouts", rows), from_rows("scores", scores)
    lost_inputs = _lost_inputs(by_set, recorded, scored, selected, dropped, ["a"])
    assert lost_inputs == [
        ("q", "x", "quarantined: empty"), ("q", "x#3", "quarantined: empty"), ("s", "of b", "infrastructure: Error"),
        ("s", "of c", "infrastructure: Error"), ("s", "of d", "no turn is left"),
        ("s", "of e", "refused_by_template: no"),
    ]  # fmt: skip


def test_skip_rate_names_lost_inputs():
    one = [("few", "a/b", "quarantined: empty")]
    passes(gates.skip_rate({"few": 24}, one, GATES), "a/b (quarantined: empty)", found=24, lost=1)
    lost = [("few", f"task{i}", "infrastructure: Error") for i in range(12)]
    outcome = gates.skip_rate({"few": 24}, lost, GATES)
    fails(outcome, "task9 (infrastructure: Error), ...", found=24, lost=12, infrastructure=12)
    fails(gates.skip_rate({}, [], GATES), found=0)


def test_small_rollout_set_is_not_lost_among_many_inputs():
    lost = [("few", f"a#{i}", "quarantined: unknown_role") for i in range(2)]
    fails(gates.skip_rate({"many": 200, "few": 2}, lost, GATES), "2 of the 2 of few", found=202, lost=2)
    passes(gates.skip_rate({"many": 200, "few": 10}, lost, GATES))
    passes(gates.skip_rate({"many": 200, "few": 1}, lost[:1], GATES), found=201)


# --- overriding ------------------------------------------------------------------------------------------------------

BAD = CheckOutcome("role_balance", False, "only proposers")
GOOD = CheckOutcome("skip_rate", True, "fine")


def test_override_passes_a_failed_check_and_keeps_its_message():
    section = GatesSection(override={"role_balance": "one role is what we study", "skip_rate": "never mind"})
    bad, good = gates.apply_overrides([BAD, GOOD], section)
    assert bad.passed and not bad.blocking
    assert (bad.message, bad.overridden) == (BAD.message, {"reason": "one role is what we study", "passed": False})
    assert json.loads(json.dumps(bad.to_json()))["overridden"]["reason"] in shown(bad.to_json())
    assert good is GOOD
    assert gates.apply_overrides([BAD], GATES) == [BAD]


@pytest.mark.parametrize(
    ("name", "reason", "remedy"), [("role_balanse", "x", "'role_balance'"), ("role_balance", " ", "reason")]
)
def test_override_of_unknown_check_or_without_reason_is_refused_before_anything_runs(name, reason, remedy):
    with pytest.raises(ValueError, match=remedy):
        GatesSection(override={name: reason})


def test_held_out_turns_are_not_lost():
    reasons = [*gates.HELD_OUT, "truncated"]
    dropped = from_rows("dropped", [{"reason": reason, "output_tokens": 5} for reason in reasons])
    assert gates.lost_figures(dropped) == {"reasons": {"truncated": 1}, "tokens": 5}


def test_data_set_without_any_turn_is_a_message():
    rows, dropped = empty("dataset_rows"), empty("dropped")
    outcome = whole.turns_lost(rows, dropped, dropped, GatesSection())
    assert not outcome.passed and "nothing is left to train on" in outcome.message
