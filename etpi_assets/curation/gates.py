"""Gates: checks of a data set before training, against the floors and bounds of the spec's `gates` section.

A spec can override a failed check by name with a reason. A gate without a floor or bound, or without data, is not
applicable: it reports what it measured and decides nothing. A gate over a rate reports n and the interval, and whether
n is too small to decide; then the estimate decides. Invariants that no spec can change are in `integrity`.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from statistics import median
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from etpi_assets.checks import measured, outcome
from etpi_assets.scoring.behaviours import AGENT_RATES, PAIR_RATES
from etpi_assets.scoring.intervals import Estimate, decide, rate
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
    counted = [row for row in scores.to_pylist() if not row["infrastructure_error"]]
    names = {row["rollout_id"] for row in counted}
    agents = [row for row in agent_scores.to_pylist() if row["rollout_id"] in names]
    verdicts, passed = [], True
    figures: dict[str, float] = {"excluded": len(scores) - len(counted)}
    for metric, floor in sorted(section.teacher.items()):
        rows = agents if metric in AGENT_RATES else counted
        pairs_of: dict[str, list[tuple[float, str]]] = {}
        for row in rows:
            name = row["rollout_id"]
            if name in runs and (value := _value(row, metric)) is not None:
                cluster = str(runs[name]["task_id"] or name)
                pairs_of.setdefault(str(runs[name]["teacher"]), []).append((value, cluster))
        estimate = _rate([pair for pairs in pairs_of.values() for pair in pairs])
        if estimate is None:
            passed = False
            verdicts.append(f"{metric} was not measured on any rollout: remove it from gates.teacher")
            continue
        passed = passed and estimate.value >= floor
        verdicts.append(f"{metric} {decide(estimate, floor)[1]}")
        figures[metric] = estimate.value
        for teacher, values in sorted(pairs_of.items()) if len(pairs_of) > 1 else ():
            if (of_teacher := _rate(values)) and (decided := decide(of_teacher, floor))[0] is False:
                passed = False
                verdicts.append(f"{metric} of {teacher} {decided[1]}")
    return outcome("teacher_gate", passed if section.teacher else None, figures, verdicts="; ".join(verdicts))


def _rate(pairs: Sequence[tuple[float, str]]) -> Estimate | None:
    """Return the rate of (value, cluster) pairs; None if there are none."""
    return rate([value for value, _ in pairs], [cluster for _, cluster in pairs])


def _value(row: Mapping[str, Any], metric: str) -> float | None:
    if metric == "solved":
        return None if row["reward"] is None else float(row["reward"] == 1.0)
    return None if row[metric] is None else float(row[metric])


def loss_share_outcome(share: Mapping[int, float], section: GatesSection) -> CheckOutcome:
    """Compare turn 0's share of the training loss with its floor; the many rows of later turns can bury turn 0."""
    first = share.get(0, 0.0)
    floor = section.first_turn_loss_share or 0
    return measured(
        "turn_loss_share",
        first,
        section,
        {f"turn_{t}": v for t, v in share.items()},
        hint="none" if first == 0 else "buried",
        first_turns=", ".join(f"turn {turn} {value:.3f}" for turn, value in list(share.items())[:6]),
        factor=(1 - first) * floor / max(1e-9, first * (1 - floor)),
    )


def exposure_figures(rows: pa.Table, pairs: pa.Table) -> dict[str, Any]:
    """Count the training rows, those with a tool call (`exposure`: by weight and copies), and the calls' tokens."""
    training = rows.filter(pc.field("split") == "train")
    tokens = _of_rows(training, pairs, "format_tokens").fill_null(0).to_numpy()
    weights = training["weight"].to_numpy() * training["copies"].to_numpy()
    calling = tokens > 0
    return {
        "exposure": float(weights[calling].sum()),
        "rows_with_call": int(calling.sum()),
        "rows": len(training),
        "format_tokens": int(tokens.sum()),
    }


def _of_rows(rows: pa.Table, pairs: pa.Table, column: str) -> pa.ChunkedArray:
    """Return a column of the pairs for each row; null where there is no such pair."""
    at = pc.index_in(rows["pair_id"], value_set=pairs["pair_id"])  # pyright: ignore[reportAttributeAccessIssue]
    return pairs[column].take(at)


def exposure_outcome(figures: Mapping[str, Any], section: GatesSection) -> CheckOutcome:
    """Compare the tool calls trained on in one epoch, each with its row's weight and copies, with their floor."""
    hint = "few" if figures["rows_with_call"] else "none"
    return measured("format_exposure", figures["exposure"], section, figures, hint=hint)


def role_figures(rows: pa.Table, pairs: pa.Table) -> dict[str, int]:
    """Count the training rows of each role."""
    training = rows.filter(pc.field("split") == "train")
    metadata = _of_rows(training, pairs, "metadata").to_pylist()
    return dict(Counter(str(json.loads(facts).get("role")) if facts else "None" for facts in metadata))


def role_outcome(rows_of: Mapping[str, int], section: GatesSection) -> CheckOutcome:
    """Compare the rarer role's share of the training rows with its floor, if agents work in pairs."""
    pair_roles = {role: rows_of.get(role, 0) for role in ("proposer", "responder")}
    figures = {**pair_roles, **rows_of}
    rows = sum(pair_roles.values()) + rows_of.get("None", 0)  # a row without a role counts for neither
    if not rows:
        return outcome("role_balance", None, figures, case="alone")
    share = min(pair_roles.values()) / rows
    return measured("role_balance", share, section, figures, by_role=listed(figures))


def plan_paths_in_task(
    selected: pa.Table, agent_scores: pa.Table, tasks: pa.Table, section: GatesSection
) -> CheckOutcome:
    """Compare the share of the selected agents' plans whose entities all occur in the task's text with its floor.

    A plan without entities is a miss. Plans of unknown tasks are excluded and counted.
    """
    text = dict(zip(tasks["task_id"].to_pylist(), tasks["instruction"].to_pylist(), strict=True))
    task = dict(zip(selected["rollout_id"].to_pylist(), selected["task_id"].to_pylist(), strict=True))
    hits, clusters, foreign, unknown, plans = [], [], [], 0, 0
    for row in agent_scores.to_pylist():
        if row["rollout_id"] not in task or row["plan_entities"] is None:
            continue
        plans += 1
        instruction = text.get(task[row["rollout_id"]])
        if instruction is None:
            unknown += 1
            continue
        entities = json.loads(row["plan_entities"])
        missing = [entity for entity in entities if entity not in instruction]
        foreign += [f"{entity} ({task[row['rollout_id']]})" for entity in missing]
        hits.append(float(bool(entities) and not missing))
        clusters.append(str(task[row["rollout_id"]]))
    name, floor = "plan_paths_in_task", section.plan_paths_in_task
    figures: dict[str, Any] = {"plans": plans, "unknown_task": unknown, "judged": len(hits)}
    estimate = rate(hits, clusters)
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
    trained, served = (Counter(chat.tail_form(prompt) for prompt in prompts) for prompts in (training, evaluation))
    figures = {"training": dict(trained), "evaluation": dict(served)}
    words = {"none": "no think block", "open": "an open think block", "closed": "an empty think block"}
    rare = [words[form] for form in sorted(served) if trained[form] < _LEAST_ENDING * len(training)]
    passed = not rare if trained and served else None
    ends = listed({words[form]: n for form, n in sorted(trained.items())})
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
    total = sum(inputs.values())
    share = len(lost) / total if total else 1.0
    reasons = Counter(reason.partition(":")[0] for *_, reason in lost)
    bound = section.skip_rate
    over = {key: n for key, n in Counter(key for key, *_ in lost).items() if n > max(1, bound * inputs[key])}
    first = ", ".join(f"{name} ({reason})" for _, name, reason in lost[:10])
    figures = {"found": total, "lost": len(lost), **reasons}
    return outcome(
        "skip_rate",
        share <= bound and not over,
        figures,
        share=share,
        bound=bound,
        of_sets="".join(f", {n} of the {inputs[key]} of {key}" for key, n in over.items() if len(inputs) > 1),
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
    reasons, lost_tokens = Counter(counted["reasons"]), counted["tokens"]
    lost = reasons.total()
    turns, tokens = rows + lost, lost_tokens + kept_tokens
    share = lost / turns if turns else 1.0
    token_share = lost_tokens / max(1, tokens)
    bound = section.turns_lost
    figures = {"turns": turns, "turns_lost": lost, "tokens": tokens, "tokens_lost": lost_tokens, **reasons}
    common = reasons.most_common()
    return outcome(
        "turns_lost",
        max(share, token_share) <= bound,
        figures,
        case="" if turns else "empty",
        hint=common[0][0] if common else "",
        share=share,
        token_share=token_share,
        bound=bound,
        by_reason=listed(dict(common)),
    )
