"""Every check before training: clean data pass, the injected fault is found, and the message says what to do."""

from __future__ import annotations

import json

import numpy as np
import pyarrow as pa
import pytest

from etpi_assets.agent.prompts import steering_text
from etpi_assets.curation import gates, integrity
from etpi_assets.curation.assets import student_prompt
from etpi_assets.curation.pairs import CapturedAgent, CapturedTurn, make_pairs
from etpi_assets.curation.steering import SteeringNgrams
from etpi_assets.scoring.checks import every_rollout_scored
from etpi_assets.specs.check_names import OVERRIDABLE
from etpi_assets.specs.experiment import GatesSection, PairsSection
from etpi_assets.specs.rollout_set import AgentSection
from etpi_assets.worlds.coop_tiny import FAMILY
from etpi_resources.lake.checks import CheckOutcome
from etpi_resources.lake.schemas import TABLES, from_rows
from tests.support.datasets import CHAT, HELDOUT, TASKS, dataset, default

GATES = GatesSection()
SECTION = PairsSection()
STEERING = [steering_text("coop", role) for role in FAMILY.roles(TASKS[0])]
STEERING_NGRAMS = SteeringNgrams.build(STEERING, [], CHAT)


def changed(table, row, **values):
    """The table with one row changed."""
    rows = table.to_pylist()
    rows[row] |= values
    name = next(name for name, known in TABLES.items() if known.schema.names == table.schema.names)
    return from_rows(name, rows)


def without(table, row):
    return pa.concat_tables([table.slice(0, row), table.slice(row + 1)])


def every(table, **values):
    name = next(name for name, known in TABLES.items() if known.schema.names == table.schema.names)
    return from_rows(name, [{**row, **values} for row in table.to_pylist()])


def fails(outcome, *told):
    """The check failed, blocks, and its message says each of these."""
    assert not outcome.passed and outcome.blocking
    for words in told:
        assert words in outcome.message, outcome.message
    json.dumps(outcome.to_json())


def passes(outcome, *told):
    assert outcome.passed, outcome.message
    for words in told:
        assert words in outcome.message, outcome.message
    json.dumps(outcome.to_json())


# --- counts ----------------------------------------------------------------------------------------------------------


def test_every_rollout_scored():
    made = dataset()
    tables = made.tables["rollouts"], made.tables["agents"]
    outcome = every_rollout_scored(*tables, made.scores, made.agent_scores)
    passes(outcome)
    assert (outcome.figures["rollouts"], outcome.figures["agents"]) == (6, 12)
    fails(
        every_rollout_scored(*tables, without(made.scores, 0), made.agent_scores),
        made.selected["rollout_id"][0].as_py(),
    )
    fails(every_rollout_scored(*tables, made.scores, without(made.agent_scores, 3)))


def offered(made):
    keys = [(a.rollout_id, a.agent_id, t.turn) for a in made.agents for t in a.turns]
    return from_rows("turns", [dict(zip(integrity.KEY, key, strict=True)) for key in keys])


def test_pairs_reconcile():
    made = dataset()
    turns = offered(made)
    passes(
        integrity.pairs_reconcile(turns, made.pairs, made.pairs_dropped),
        "69 turns = 64 pairs + 5 dropped (unparseable 5)",
    )
    fails(integrity.pairs_reconcile(turns, without(made.pairs, 5), made.pairs_dropped), "1 are missing or duplicated")
    twice = pa.concat_tables([made.pairs, made.pairs.slice(0, 1)])
    fails(integrity.pairs_reconcile(turns, twice, made.pairs_dropped), "1 are missing or duplicated")


def test_a_capture_that_is_not_there_says_what_to_set():
    made = dataset()
    agents = [
        CapturedAgent(a.rollout_id, a.agent_id, [CapturedTurn(t.turn, None, None, "none") for t in a.turns])
        for a in made.agents
    ]
    nothing = make_pairs(agents, SECTION, CHAT)
    turns = offered(made)
    outcome = integrity.pairs_reconcile(turns, nothing["pairs"], nothing["dropped"])
    fails(outcome, "not_captured 69", 'pairs.capture = "retokenised"')


def test_dataset_reconciles():
    made = dataset()
    passes(integrity.dataset_reconciles(made.pairs, made.rows, made.dropped), "64 pairs = 64 rows + 0 dropped")
    fails(integrity.dataset_reconciles(made.pairs, without(made.rows, 1), made.dropped), "1 are missing or duplicated")
    short = dataset(weights={"max_length": 64})
    fails(integrity.dataset_reconciles(short.pairs, short.rows, short.dropped), "raise dataset.max_length")
    fails(
        integrity.dataset_reconciles(made.pairs, every(made.rows, split="val"), made.dropped),
        "nothing is left to train on",
    )


# --- ids -------------------------------------------------------------------------------------------------------------


def test_capture_not_mixed():
    pairs = dataset().pairs
    passes(integrity.capture_not_mixed(pairs, SECTION), "64 pairs, all native")
    fails(integrity.capture_not_mixed(changed(pairs, 3, capture="retokenised"), SECTION), "an experiment of each")
    fails(integrity.capture_not_mixed(pairs, PairsSection(capture="retokenised")), "asks for retokenised")


def test_no_think_in_output():
    pairs = dataset().pairs
    passes(
        integrity.no_think_in_output(pairs, SECTION, CHAT), "No think id in 64 outputs", "tails of tiny: {'none': 64}"
    )
    ids = pairs["output_ids"].to_pylist()[4]
    for think in (CHAT.think_open_id, CHAT.think_close_id):
        leak = changed(pairs, 4, output_ids=[think, *ids])
        fails(
            integrity.no_think_in_output(leak, SECTION, CHAT),
            "1 outputs",
            pairs["pair_id"].to_pylist()[4],
            "strip_think = false",
        )
    opened = changed(pairs, 4, suffix_ids=[*pairs["suffix_ids"].to_pylist()[4], CHAT.think_open_id])
    fails(integrity.no_think_in_output(opened, SECTION, CHAT), "1 inputs end in an open think block")
    kept = dataset({"strip_think": False, "history_think": "keep"}).pairs
    passes(integrity.no_think_in_output(kept, PairsSection(strip_think=False), CHAT), "kept")
    fails(integrity.no_think_in_output(kept, SECTION, CHAT), "outputs hold a think id")


def test_no_steering_leak():
    pairs = dataset().pairs
    passes(integrity.no_steering_leak(pairs, STEERING_NGRAMS), "No run of steering in 64 pairs")
    for column in ("suffix_ids", "output_ids"):
        ids = pairs[column].to_pylist()[7]
        for part in (STEERING[0].strip(), " ".join(STEERING[0].split()[-7:])):
            leak = changed(pairs, 7, **{column: [*ids, *CHAT.encode(part)]})
            fails(
                integrity.no_steering_leak(leak, STEERING_NGRAMS),
                "1 pairs hold steering",
                pairs["pair_id"].to_pylist()[7],
            )


def test_steering_that_was_never_spliced_is_found():
    made = dataset()
    agents = [CapturedAgent(a.rollout_id, a.agent_id, a.turns, facts=a.facts) for a in made.agents]
    pairs = make_pairs(agents, SECTION, CHAT)["pairs"]
    fails(integrity.no_steering_leak(pairs, STEERING_NGRAMS), "12 pairs hold steering", "a prompt it never gets")
    fails(
        integrity.prompt_is_default_render(pairs, expected(made), SECTION, CHAT),
        "12 of 12 agents' prompts",
        "at position",
    )


def test_steering_across_the_seam_of_two_turns_is_found():
    text = CHAT.encode(" ".join(STEERING[0].split()[:8]))
    head = CHAT.encode("<|im_start|>user\nx<|im_end|>\n<|im_start|>assistant\n", allow_special=True)
    first, second = text[: len(text) // 2], text[len(text) // 2 :]
    turns = [
        CapturedTurn(0, np.array(head, np.int32), np.array(first, np.int32), "native"),
        CapturedTurn(1, np.array([*head, *first, *second], np.int32), np.array(head, np.int32), "native"),
    ]
    pairs = make_pairs([CapturedAgent("r", "a", turns)], SECTION, CHAT)["pairs"]
    assert pairs["prefix_turn"].to_pylist() == [None, 0]
    fails(integrity.no_steering_leak(pairs, STEERING_NGRAMS), "first r/a/1")


def expected(made):
    task = dict(zip(made.selected["rollout_id"].to_pylist(), made.selected["task_id"].to_pylist(), strict=True))
    return {(a.rollout_id, a.agent_id): default(task[a.rollout_id], a.agent_id).ids for a in made.agents}


def test_prompt_is_default_render():
    made = dataset()
    wanted = expected(made)
    passes(
        integrity.prompt_is_default_render(made.pairs, wanted, SECTION, CHAT), "12 of 12 agents' prompts", "all equal"
    )
    passes(integrity.prompt_is_default_render(made.pairs, {}, SECTION, CHAT), "Cannot be decided")
    first = made.pairs["turn"].to_pylist().index(0)
    ids = made.pairs["suffix_ids"].to_pylist()[first]
    for wrong in ([*ids[:20], ids[20] + 1, *ids[21:]], ids[:-1], [*ids, ids[-1]]):
        outcome = integrity.prompt_is_default_render(
            changed(made.pairs, first, suffix_ids=wrong), wanted, SECTION, CHAT
        )
        fails(outcome, "1 of 12 agents' prompts", "base.chat_template")
    # Where turn 0 was dropped, the first pair goes on from the default prompt.
    agents = [
        CapturedAgent(a.rollout_id, a.agent_id, [broken(a.turns[0]), *a.turns[1:]], a.captured, a.default, a.facts)
        for a in made.agents
    ]
    later = make_pairs(agents, SECTION, CHAT)["pairs"]
    assert 0 not in later["turn"].to_pylist()
    passes(integrity.prompt_is_default_render(later, wanted, SECTION, CHAT), "12 of 12")


def broken(turn):
    return CapturedTurn(turn.turn, turn.prompt, turn.output, turn.capture, parse_error="no command found")


def test_label_tokens():
    made = dataset()
    told = integrity.label_tokens(made.rows, made.pairs, made.sequences)
    passes(told, f"{sum(made.rows['output_tokens'].to_pylist())} label tokens in 12 sequences")
    sequence = made.sequences.to_pylist()[0]
    no_mask = changed(made.sequences, 0, span_starts=[], span_ends=[], span_weights=[])
    fails(integrity.label_tokens(made.rows, made.pairs, no_mask), "a healthy loss would hide this")
    shifted = changed(
        made.sequences,
        0,
        span_starts=[s - 1 for s in sequence["span_starts"]],
        span_ends=[s - 1 for s in sequence["span_ends"]],
    )
    fails(integrity.label_tokens(made.rows, made.pairs, shifted), f"{sequence['rows']} rows not where they say")
    other = changed(made.sequences, 0, input_ids=[0, *sequence["input_ids"][1:]])
    fails(integrity.label_tokens(made.rows, made.pairs, other), "rows not where they say")
    light = changed(made.sequences, 0, span_weights=[0.5] * len(sequence["span_weights"]))
    fails(integrity.label_tokens(made.rows, made.pairs, light), "weight")
    nothing = made.rows.slice(0, 0), made.pairs, made.sequences.slice(0, 0)
    fails(integrity.label_tokens(*nothing), "0 label tokens")


def test_heldout_split():
    rows = dataset().rows
    repos = {task.repo for task in HELDOUT}
    passes(integrity.heldout_split(rows, repos, {task.task_id for task in HELDOUT}), "6 repositories, none of the 4")
    leaked = changed(rows, 0, repo=HELDOUT[0].repo, split="val")
    fails(integrity.heldout_split(leaked, repos), HELDOUT[0].repo, "select.exclude_repos")
    fails(integrity.heldout_split(rows, set(), {TASKS[2].task_id}), TASKS[2].task_id, 'split = "train"')
    other = {"train": "val", "val": "train"}[rows["split"].to_pylist()[0]]
    fails(integrity.heldout_split(changed(rows, 0, split=other), repos), TASKS[0].repo, "stand in train and in val")
    fails(integrity.heldout_split(changed(rows, 0, repo=None), repos), "options.repo")


# --- gates -----------------------------------------------------------------------------------------------------------


def measured(n, plan, follow=1.0, **columns):
    """n scored pairs of one task each, the first `plan` of which planned."""
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


def test_teacher_gate():
    section = GatesSection(teacher={"plan_first": 0.7, "follow_through": 0.6})
    passes(gates.teacher_gate(*measured(40, 38), section), "plan_first clears", "n = 40")
    fails(gates.teacher_gate(*measured(40, 10), section), "plan_first below: 0.250", "take a stronger one")
    fails(gates.teacher_gate(*measured(40, 38, follow=0.1), section), "follow_through below", "n = 80 in 40 clusters")
    passes(gates.teacher_gate(*measured(2, 2), section), "undecided at this n (the estimate is above)")
    fails(gates.teacher_gate(*measured(2, 1), section), "undecided at this n (the estimate is below)")
    solo = measured(5, 5, plan_first=None, plan_content=None)
    fails(gates.teacher_gate(*solo, section), "plan_first was not measured", "take it out of gates.teacher")
    passes(gates.teacher_gate(*measured(4, 0), GatesSection(teacher={})), "names no metric")
    with pytest.raises(ValueError, match=r"gates\.teacher\.plan_frist"):
        gates.teacher_gate(*measured(2, 2), GatesSection(teacher={"plan_frist": 0.5}))


def test_infrastructure_errors_do_not_count_against_a_teacher():
    rollouts, scores, agents = measured(10, 8)
    broken_rows = [row | {"infrastructure_error": not row["plan_first"]} for row in scores.to_pylist()]
    outcome = gates.teacher_gate(rollouts, from_rows("scores", broken_rows), agents, GATES)
    passes(outcome, "1.000")
    assert outcome.figures["excluded"] == 2


def weighted(*rows):
    """Training rows from (turn, weight x copies, output tokens)."""
    return from_rows(
        "dataset_rows",
        [
            {"pair_id": f"p{i}", "turn": t, "weight": w, "copies": 1, "output_tokens": n, "split": "train"}
            for i, (t, w, n) in enumerate(rows)
        ],
    )


def test_turn_loss_share():
    buried = [(0, 1.0, 10), *[(t, 1.0, 20) for t in range(1, 60)]]
    section = GatesSection(first_turn_loss_share=0.05)
    outcome = gates.turn_loss_share(weighted(*buried), section)
    fails(outcome, "Turn 0 carries 0.008", "upweight_factor about 6.2 times")
    assert outcome.figures["turn_1"] == pytest.approx(20 / 1190)
    passes(gates.turn_loss_share(weighted((0, 6.3, 10), *buried[1:]), section), "Turn 0 carries 0.051")
    copies = changed(weighted(*buried), 0, copies=7)
    passes(gates.turn_loss_share(copies, section))
    fails(gates.turn_loss_share(weighted(*buried[1:]), section), "No training row has turn 0")
    fails(gates.turn_loss_share(changed(weighted((0, 9.0, 10), (1, 1.0, 1)), 0, split="val"), section), "No training")
    passes(gates.turn_loss_share(dataset().rows, GATES), "turn 1")


def test_format_exposure():
    made = dataset()
    passes(
        gates.format_exposure(made.rows, made.pairs, GatesSection(format_exposure=40)), "training rows hold a tool call"
    )
    fails(gates.format_exposure(made.rows, made.pairs, GATES), "floor 200", "raise dataset.upweight_factor")
    louder = dataset(weights={"upweight_factor": 12})
    passes(gates.format_exposure(louder.rows, louder.pairs, GATES))
    plain = every(made.pairs, format_tokens=0)
    fails(gates.format_exposure(made.rows, plain, GatesSection(format_exposure=1)), "0 of 53", "no <tool_call>")


def test_role_balance():
    made = dataset()
    passes(gates.role_balance(made.rows, made.pairs, GATES), "proposer", "responder", "floor 0.25")
    proposers = [r["pair_id"] for r in made.pairs.to_pylist() if json.loads(r["metadata"])["role"] == "proposer"]
    one_sided = made.rows.filter(pa.compute.is_in(made.rows["pair_id"], pa.array(proposers)))  # pyright: ignore[reportAttributeAccessIssue]
    fails(gates.role_balance(one_sided, made.pairs, GATES), "'responder': 0", "both agents' turns")
    solo = every(made.pairs, metadata='{"role": "solo"}')
    passes(gates.role_balance(made.rows, solo, GATES), "One agent alone")


def test_plan_paths_in_task():
    made = dataset()
    passes(gates.plan_paths_in_task(made.selected, made.agent_scores, made.tasks, GATES), "1.000", "0 of unknown tasks")
    strange = every(made.agent_scores, plan_entities='["src/cli.py"]')
    fails(
        gates.plan_paths_in_task(made.selected, strange, made.tasks, GATES),
        "0.000",
        "src/cli.py (made-",
        "Require plan_content",
    )
    nameless = every(made.agent_scores, plan_entities="[]")
    fails(gates.plan_paths_in_task(made.selected, nameless, made.tasks, GATES), "0.000")
    passes(
        gates.plan_paths_in_task(made.selected, made.agent_scores, made.tasks.slice(0, 0), GATES),
        "Cannot be decided",
        "12 plans",
    )


def first_prompts(tasks, section):
    return [CHAT.prompt_ids(student_prompt(section, task, role)) for task in tasks for role in FAMILY.roles(task)]


OURS, THEIRS = (first_prompts(tasks, AgentSection()) for tasks in (TASKS, HELDOUT))


def test_prompt_length_ratio():
    lengths = [len(p) for p in OURS], [len(p) for p in THEIRS]
    passes(gates.prompt_length_ratio(*lengths, GATES), "n = 12", "n = 8", "bound 4.00")
    long = [10 * n for n in lengths[1]]
    for pair in ((lengths[0], long), (long, lengths[0])):
        fails(gates.prompt_length_ratio(*pair, GATES), "take tasks of the evaluation's registers")
    passes(
        gates.prompt_length_ratio(lengths[0], [], GATES),
        "Cannot be decided: there are no first-turn prompts of evaluation",
    )


def test_template_distance():
    passes(gates.template_distance(OURS, THEIRS, GATES), "lack 0.00 of what 8 evaluation prompts share")
    synthetic = [
        CHAT.prompt_ids([{"role": "user", "content": f"Fix {task.payload['files']}."[:200]}]) for task in TASKS
    ]
    fails(gates.template_distance(synthetic, THEIRS, GATES), "another template than it is given")
    passes(gates.template_distance(OURS, THEIRS[:1], GATES), "Cannot be decided")
    passes(gates.template_distance(OURS, [[1, 2, 3], [4, 5, 6]], GATES), "have nothing in common")


def test_skip_rate():
    passes(gates.skip_rate(24, {"a/b": "quarantined: empty"}, GATES), "1 of 24 inputs lost", "a/b (quarantined: empty)")
    lost = {f"task{i}": "infrastructure: Error" for i in range(12)}
    fails(gates.skip_rate(24, lost, GATES), "12 of 24", "task9 (infrastructure: Error), ...", "Mend what refuses them")
    fails(gates.skip_rate(0, {}, GATES), "0 of 0")


# --- overriding ------------------------------------------------------------------------------------------------------

BAD = CheckOutcome("role_balance", False, "only proposers")
GOOD = CheckOutcome("skip_rate", True, "fine")


def test_a_failed_gate_is_overridden_by_name_with_the_reason():
    section = GatesSection(override={"role_balance": "one role is what we study", "skip_rate": "never mind"})
    bad, good = gates.apply_overrides([BAD, GOOD], section)
    assert bad.passed and not bad.blocking
    assert bad.message == "overridden: one role is what we study (only proposers)"
    assert good is GOOD, "what passes needs no excuse"
    assert gates.apply_overrides([BAD], GATES) == [BAD]


def test_an_override_must_name_a_check_and_give_a_reason():
    with pytest.raises(ValueError, match="the nearest is 'role_balance'"):
        gates.validate_overrides(GatesSection(override={"role_balanse": "x"}), OVERRIDABLE)
    with pytest.raises(ValueError, match="say why"):
        gates.validate_overrides(GatesSection(override={"role_balance": " "}), OVERRIDABLE)
