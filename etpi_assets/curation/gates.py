"""Gates: checks of a data set before training, against the floors and bounds of the spec's `gates` section.

A spec can override a failed check by name with a reason. A gate without a floor or bound, or without data, is not
applicable: it reports what it measured and decides nothing. A gate over a rate reports n and the interval, and whether
n is too small to decide; then the estimate decides. Invariants that no spec can change are in `integrity`.
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from statistics import median
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from etpi_assets.checks import measured, outcome
from etpi_assets.curation.upweight import pair_values
from etpi_assets.scoring.behaviours import AGENT_RATES, PAIR_RATES
from etpi_assets.scoring.intervals import decide, rate_of
from etpi_assets.specs.experiment import GatesSection
from etpi_resources.chat.format import ChatFormat
from etpi_resources.lake.check_outcome import CheckOutcome, listed
from etpi_resources.lake.stored import Rows, batches

_SHOWN = 3
AGENT_COLUMNS = ["rollout_id", *AGENT_RATES, "plan_entities"]
SCORE_COLUMNS = ["rollout_id", "infrastructure_error", "exit_status", "reward", *PAIR_RATES]
"""The columns that gates read of `agent_scores` and `scores`."""
_NGRAM = 6
_COMMON = 0.9
_LEAST_ENDING = 0.1
"""Share of training prompts that have to end as a prompt of evaluation does; fewer teach too little."""
HELD_OUT = ("heldout_repo", "heldout_task")
_NOT_LOST = (*HELD_OUT, "repeated_turn")


def apply_overrides(outcomes: Iterable[CheckOutcome], section: GatesSection) -> list[CheckOutcome]:
    """Return the outcomes; failed checks that `gates.override` names pass, with the reason in `overridden`."""
    return [
        replace(o, passed=True, blocking=False, overridden={"reason": section.override[o.name], "passed": False})
        if not o.passed and o.name in section.override
        else o
        for o in outcomes
    ]


def teacher_gate(rollouts: pa.Table, scores: pa.Table, agent_scores: pa.Table, section: GatesSection) -> CheckOutcome:
    """Compare the rates over all rollouts with `gates.teacher`, since a student is bounded by them.

    Of several teachers, one that is below for certain fails too, whatever the others raise the mean to.

    Raises:
        ValueError: `gates.teacher` names a metric that is not measured.
    """
    known = (*PAIR_RATES[:2], "solved", *PAIR_RATES[2:], *AGENT_RATES)
    if unknown := sorted(set(section.teacher) - set(known)):
        raise ValueError(f"gates.teacher.{unknown[0]}: no such metric; there are {list(known)}")
    runs = {row["rollout_id"]: row for row in rollouts.select(["rollout_id", "task_id", "teacher"]).to_pylist()}
    counted = [
        row | {"solved": None if row["reward"] is None else row["reward"] == 1.0}
        for row in scores.to_pylist()
        if not row["infrastructure_error"]
    ]
    names = {row["rollout_id"] for row in counted}
    agents = [row for row in agent_scores.to_pylist() if row["rollout_id"] in names]
    verdicts, passed = [], True
    figures: dict[str, float] = {"excluded": len(scores) - len(counted)}
    for metric, floor in sorted(section.teacher.items()):
        of_teacher: defaultdict[str, list[tuple[float, str]]] = defaultdict(list)
        for row in agents if metric in AGENT_RATES else counted:
            run = runs.get(row["rollout_id"])
            if run and row[metric] is not None:
                of_teacher[str(run["teacher"])].append((row[metric], str(run["task_id"] or run["rollout_id"])))
        if (estimate := rate_of(chain(*of_teacher.values()))) is None:
            passed = False
            verdicts.append(f"{metric} was not measured on any rollout: remove it from gates.teacher")
            continue
        passed = passed and estimate.value >= floor
        verdicts.append(f"{metric} {decide(estimate, floor)[1]}")
        figures[metric] = estimate.value
        for teacher, hits in sorted(of_teacher.items()) if len(of_teacher) > 1 else ():
            if (of_one := rate_of(hits)) and (decided := decide(of_one, floor))[0] is False:
                passed = False
                verdicts.append(f"{metric} of {teacher} {decided[1]}")
    return outcome("teacher_gate", passed if section.teacher else None, figures, verdicts="; ".join(verdicts))


def loss_share_outcome(share: Mapping[int, float], section: GatesSection) -> CheckOutcome:
    """Compare turn 0's share of the training loss with its floor; the many rows of later turns can bury turn 0."""
    first, floor = share.get(0, 0.0), section.first_turn_loss_share or 0
    words = {
        "hint": "buried" if first else "none",
        "first_turns": ", ".join(f"turn {turn} {value:.3f}" for turn, value in [*share.items()][:6]),
        "factor": (1 - first) * floor / max(1e-9, first * (1 - floor)),
    }
    return measured("turn_loss_share", first, section, {f"turn_{t}": value for t, value in share.items()}, **words)


def exposure_figures(rows: pa.Table, pairs: pa.Table) -> dict[str, Any]:
    """Count the training rows, those with a tool call (`exposure`: by weight and copies), and the calls' tokens."""
    training = rows.filter(pc.field("split") == "train")
    tokens = pair_values(training, pairs, "format_tokens").fill_null(0).to_numpy()
    weights = training["weight"].to_numpy() * training["copies"].to_numpy()
    calling = tokens > 0
    return {
        "exposure": float(weights[calling].sum()),
        "rows_with_call": int(calling.sum()),
        "rows": len(training),
        "format_tokens": int(tokens.sum()),
    }


def exposure_outcome(figures: Mapping[str, Any], section: GatesSection) -> CheckOutcome:
    """Compare the tool calls trained on in one epoch, each with its row's weight and copies, with their floor."""
    hint = "few" if figures["rows_with_call"] else "none"
    return measured("format_exposure", figures["exposure"], section, figures, hint=hint)


def role_figures(rows: pa.Table, pairs: pa.Table) -> dict[str, int]:
    """Count the training rows of each role."""
    training = rows.filter(pc.field("split") == "train")
    metadata = pair_values(training, pairs, "metadata").to_pylist()
    return dict(Counter(str(json.loads(facts).get("role")) if facts else "None" for facts in metadata))


def role_outcome(rows_of: Mapping[str, int], section: GatesSection) -> CheckOutcome:
    """Compare the rarer role's share of the training rows with its floor, if agents work in pairs."""
    figures = {"proposer": 0, "responder": 0, **rows_of}
    pair = figures["proposer"], figures["responder"]
    rows = sum(pair) + rows_of.get("None", 0)  # a row without a role counts for neither
    if not rows:
        return outcome("role_balance", None, figures, case="alone")
    return measured("role_balance", min(pair) / rows, section, figures, by_role=listed(figures))


def plan_paths_in_task(
    selected: pa.Table, agent_scores: pa.Table, texts: Mapping[str, str], section: GatesSection
) -> CheckOutcome:
    """Compare the share of the selected agents' plans whose entities all occur in their task's text with its floor.

    A plan without entities is a miss. Plans of unknown tasks are excluded and counted.
    """
    task_of = dict(zip(selected["rollout_id"].to_pylist(), selected["task_id"].to_pylist(), strict=True))
    hits, foreign, plans = list[tuple[float, str]](), list[str](), 0
    for row in agent_scores.to_pylist():
        if row["rollout_id"] not in task_of or row["plan_entities"] is None:
            continue
        plans += 1
        task = task_of[row["rollout_id"]]
        if task in texts:
            entities = json.loads(row["plan_entities"])
            missing = [entity for entity in entities if entity not in texts[task]]
            foreign += [f"{entity} ({task})" for entity in missing]
            hits.append((bool(entities) and not missing, task))
    name, floor = "plan_paths_in_task", section.plan_paths_in_task
    figures: dict[str, Any] = {"plans": plans, "unknown_task": plans - len(hits), "judged": len(hits)}
    estimate = rate_of(hits)
    if estimate is None:
        return outcome(name, None, figures, case="unknown" if plans else "none")
    figures["rate"] = estimate.value
    decision = "" if floor is None else decide(estimate, floor)[1]
    return measured(name, estimate.value, section, figures, decision=decision, foreign=foreign[:_SHOWN])


def prompt_length_ratio(training: Sequence[int], evaluation: Sequence[int], section: GatesSection) -> CheckOutcome:
    """Compare the ratio of the median first-turn prompts of training and evaluation, in tokens, with its bound."""
    name = "prompt_length_ratio"
    figures = {"training": len(training), "evaluation": len(evaluation)}
    if not training or not evaluation:
        return outcome(name, None, figures, case="none", side="evaluation" if training else "training")
    medians = median(training), median(evaluation)
    ratio = max(medians) / min(medians)
    return measured(name, ratio, section, {**figures, "ratio": ratio}, medians=medians)


def template_distance(
    training: Sequence[Sequence[int]], evaluation: Sequence[Sequence[int]], section: GatesSection
) -> CheckOutcome:
    """Compare how much of the evaluation prompts' common part the training prompts lack with its bound.

    The common part is the 6-grams of ids in at least 90 % of the evaluation's first-turn prompts. The distance is the
    mean share of them that a training prompt lacks: 0 for the same template, 1 for another.
    """
    name = "template_distance"
    figures: dict[str, Any] = {"training": len(training), "evaluation": len(evaluation)}
    if not training or len(evaluation) < 2:
        return outcome(name, None, figures, case="few")
    occurrences: Counter[tuple[int, ...]] = Counter(ngram for prompt in evaluation for ngram in _ngrams(prompt))
    common = {ngram for ngram, n in occurrences.items() if n >= _COMMON * len(evaluation)}
    if not common:
        return outcome(name, None, figures, case="different")
    distance = float(np.mean([1 - len(common & _ngrams(prompt)) / len(common) for prompt in training]))
    return measured(name, distance, section, {**figures, "distance": distance, "common": len(common)})


def generation_prompt(
    training: Sequence[Sequence[int]], evaluation: Sequence[Sequence[int]], chat: ChatFormat
) -> CheckOutcome:
    """Test that first-turn prompts of evaluation end as at least a tenth of the training prompts do: with no think
    block, an open one or a closed one. An empty block in serving alone is a prompt that no student was trained on."""
    endings = {"none": "no think block", "open": "an open think block", "closed": "an empty think block"}
    trained, served = (Counter(map(chat.tail_form, prompts)) for prompts in (training, evaluation))
    rare = [endings[form] for form in sorted(served) if trained[form] < _LEAST_ENDING * len(training)]
    passed = not rare if trained and served else None
    ends = listed({endings[form]: n for form, n in sorted(trained.items())})
    figures = {"training": dict(trained), "evaluation": dict(served)}
    return outcome("generation_prompt", passed, figures, new=", ".join(rare), ends=ends)


def _ngrams(prompt: Sequence[int]) -> set[tuple[int, ...]]:
    return {tuple(prompt[i : i + _NGRAM]) for i in range(len(prompt) - _NGRAM + 1)}


def lost_runs(quarantined: pa.Table) -> pa.Table:
    """Return the quarantined inputs that are, or may be, runs: without the files that importers find beside runs."""
    return quarantined.filter(pc.field("reason") != "not_a_rollout")


def skip_rate(inputs: Mapping[str, int], lost: Sequence[tuple[str, str, str]], section: GatesSection) -> CheckOutcome:
    """Compare the share of inputs that neither train nor were dropped by selection with its bound; name the inputs.

    The shares are those of all inputs, and of each rollout set that lost more than one.

    Args:
        inputs: rollout set -> the number of its rollouts and quarantined inputs.
        lost: (rollout set, name, reason) of each such input.
    """
    total, bound = sum(inputs.values()), section.skip_rate
    share = len(lost) / total if total else 1.0
    of_set = Counter(key for key, *_ in lost)
    over = [key for key, n in of_set.items() if n > max(1, bound * inputs[key])]
    first = ", ".join(f"{name} ({reason})" for _, name, reason in lost[:10])
    return outcome(
        "skip_rate",
        share <= bound and not over,
        {"found": total, "lost": len(lost), **Counter(reason.partition(":")[0] for *_, reason in lost)},
        share=share,
        bound=bound,
        of_sets="".join(f", {of_set[key]} of the {inputs[key]} of {key}" for key in over if len(inputs) > 1),
        names=f": {first}{', ...' if len(lost) > 10 else ''}." if lost else ".",
    )


def lost_figures(dropped: Rows) -> dict[str, Any]:
    """Count the dropped turns by reason, and their output tokens, without those held out or trained elsewhere."""
    reasons: Counter[str] = Counter()
    tokens = 0
    for batch in batches(dropped, ["reason", "output_tokens"]):
        lost = pa.Table.from_batches([batch]).filter(~pc.field("reason").isin(_NOT_LOST))
        reasons.update(lost["reason"].to_pylist())
        tokens += pc.sum(lost["output_tokens"]).as_py() or 0  # pyright: ignore[reportAttributeAccessIssue]
    return {"reasons": dict(reasons), "tokens": tokens}


def lost_outcome(counted: Mapping[str, Any], rows: int, kept_tokens: int, section: GatesSection) -> CheckOutcome:
    """Compare the share of the selected rollouts' turns, and of their output tokens, that were lost with its bound.

    Held-out turns are not lost. A turn without ids counts as a turn, but has no tokens.
    """
    reasons, tokens_lost = counted["reasons"], counted["tokens"]
    turns_lost = sum(reasons.values())
    turns, tokens = rows + turns_lost, kept_tokens + tokens_lost
    figures = {"turns": turns, "turns_lost": turns_lost, "tokens": tokens, "tokens_lost": tokens_lost, **reasons}
    share, token_share = turns_lost / turns if turns else 1.0, tokens_lost / max(1, tokens)
    common = dict(Counter(reasons).most_common())
    words = {"share": share, "token_share": token_share, "bound": section.turns_lost, "by_reason": listed(common)}
    passed, case = max(share, token_share) <= section.turns_lost, "" if turns else "empty"
    return outcome("turns_lost", passed, figures, case=case, hint=next(iter(common), ""), **words)
