"""What must hold of pairs and datasets, whatever the experiment: ids, counts, labels, leaks.

Belongs here: checks that a correct build always passes, each naming what to do. Does not belong here: floors and bounds
that a spec sets (`gates`).
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence

import numpy as np
import pyarrow as pa

from etpi_assets.curation.merge import IGNORED, expand
from etpi_assets.curation.steering import RUN_IDS, Traces
from etpi_assets.curation.strip_think import close_tail, has_think, without_tail
from etpi_assets.rollouts.tables import iter_prompts
from etpi_assets.specs.experiment import PairsSection
from etpi_resources.chat_format import ChatFormat
from etpi_resources.checks import CheckOutcome
from etpi_resources.prefix_tree import Tree

_SHOWN = 3
_TEXT = 60
"""Characters shown of a prompt where it departs."""

TurnKey = tuple[str, str, int]


def pairs_reconcile(turns: Iterable[TurnKey], pairs: pa.Table, dropped: pa.Table) -> CheckOutcome:
    """Pairs + dropped are the turns of the selected rollouts, each once, and there are pairs."""
    offered = Counter(turns)
    told = f"{offered.total()} turns = {len(pairs)} pairs + {len(dropped)} dropped"
    return _reconcile("pairs_reconcile", offered, _keys(pairs) + _keys(dropped), pairs, dropped, told)


def dataset_reconciles(pairs: pa.Table, rows: pa.Table, dropped: pa.Table) -> CheckOutcome:
    """Rows + dropped are the pairs, each once, and there are rows to train on."""
    told = f"{len(pairs)} pairs = {len(rows)} rows + {len(dropped)} dropped"
    training = rows.filter(pa.compute.equal(rows["split"], "train"))  # pyright: ignore[reportAttributeAccessIssue]
    return _reconcile("dataset_reconciles", _keys(pairs), _keys(rows) + _keys(dropped), training, dropped, told)


def _reconcile(
    name: str, offered: Counter[TurnKey], found: Counter[TurnKey], kept: pa.Table, dropped: pa.Table, told: str
) -> CheckOutcome:
    reasons = Counter(dropped["reason"].to_pylist())
    told += f" ({', '.join(f'{reason} {n}' for reason, n in reasons.most_common()) or 'none'})"
    figures = {"offered": offered.total(), "kept": len(kept), "dropped": len(dropped), "reasons": dict(reasons)}
    if found != offered:
        wrong = sorted((found - offered) + (offered - found))
        told += f": {len(wrong)} are lost or doubled, first {wrong[:_SHOWN]}; do not use this version"
        return CheckOutcome(name, False, told, figures=figures)
    if not len(kept):
        remedy = {
            "not_captured": 'the rollouts have no such ids: set pairs.capture = "retokenised", or collect native ones',
            "over_max_length": "raise dataset.max_length",
        }
        commonest = next(iter(dict(reasons.most_common())), "")
        told += f": nothing is left to train on; {remedy.get(commonest, 'see the table `dropped` for the reasons')}"
        return CheckOutcome(name, False, told, figures=figures)
    return CheckOutcome(name, True, told, figures=figures)


def capture_not_mixed(pairs: pa.Table, section: PairsSection) -> CheckOutcome:
    """Every pair is of the capture that the spec asks for."""
    found = Counter(pairs["capture"].to_pylist())
    passed = set(found) <= {section.capture}
    message = f"{found[section.capture]} pairs, all {section.capture}."
    if not passed:
        message = (
            f"Pairs of capture {dict(found)}, the spec asks for {section.capture}: native and re-tokenised ids in one "
            "dataset teach two spellings. Make an experiment of each, or set pairs.capture."
        )
    return CheckOutcome("capture_not_mixed", passed, message, figures=dict(found))


def history_as_captured(pairs: pa.Table, captured: pa.Table, chat: ChatFormat) -> CheckOutcome:
    """Every prompt put together again from messages reads as the one the model was given, both edited alike.

    Args:
        captured: the pairs that the captured ids give, of any of the same turns; without rows, nothing is decided.
    """
    read = dict(iter_prompts(captured))
    made = [(key, ids) for key, ids in iter_prompts(pairs) if key in read]
    figures: dict[str, object] = {"compared": len(made), "pairs": len(pairs)}
    if not made:
        message = f"Cannot be decided: for none of {len(pairs)} pairs are there captured ids to compare with."
        return CheckOutcome("history_as_captured", True, message, figures=figures)
    texts = [(key, chat.decode(read[key].tolist()), chat.decode(ids.tolist())) for key, ids in made]
    wrong = [(key, theirs, ours) for key, theirs, ours in texts if theirs != ours]
    figures["departing"] = len(wrong)
    message = f"{len(made)} of {len(pairs)} prompts compared with what was captured, all read the same."
    if wrong:
        (rollout_id, agent_id, turn), theirs, ours = wrong[0]
        at = len(os.path.commonprefix([theirs, ours]))
        message = (
            f"{len(wrong)} of {len(made)} prompts are not what the model was given, first "
            f"{rollout_id}/{agent_id}/{turn}: it read {theirs[at : at + _TEXT]!r} where the dataset has "
            f"{ours[at : at + _TEXT]!r}. A history that was compacted or edited on the way is in the captured ids "
            'alone: set pairs.capture = "native".'
        )
    return CheckOutcome("history_as_captured", not wrong, message, figures=figures)


def no_think_in_output(pairs: pa.Table, section: PairsSection, chat: ChatFormat) -> CheckOutcome:
    """No think id in any output, and no input that leaves a think block open, where think is stripped."""
    tails = Counter(json.loads(text)["tail"] for text in pairs["metadata"].to_pylist())
    figures: dict[str, object] = {"tokenizer": chat.name, "prompt_tails": dict(tails)}
    if not section.strip_think:
        return CheckOutcome(
            "no_think_in_output", True, "Think blocks are kept (pairs.strip_think = false).", figures=figures
        )
    names, outputs = pairs["pair_id"].to_pylist(), [_array(ids) for ids in pairs["output_ids"]]
    left = [name for name, ids in zip(names, outputs, strict=True) if has_think(ids, chat)]
    tails_left = [chat.tail_form(_array(ids).tolist()) for ids in pairs["suffix_ids"]]
    opened = [name for name, tail in zip(names, tails_left, strict=True) if tail == "open"]
    figures |= {"outputs_with_think": len(left), "open_prompts": len(opened)}
    if not left and not opened:
        message = f"No think id in {len(names)} outputs; prompt tails of {chat.name}: {dict(tails)}."
        return CheckOutcome("no_think_in_output", True, message, figures=figures)
    message = (
        f"{len(left)} outputs hold a think id and {len(opened)} inputs end in an open think block, first "
        f"{(left + opened)[:_SHOWN]}; prompt tails of {chat.name}: {dict(tails)}. The strip does not know this "
        "tokenizer's form: look at one such turn token by token, mend curation/strip_think.py, or set "
        "pairs.strip_think = false."
    )
    return CheckOutcome("no_think_in_output", False, message, figures=figures)


def no_steering_leak(pairs: pa.Table, traces: Traces) -> CheckOutcome:
    """No run of steering, as ids or as words, in any input or output."""
    found: list[tuple[str, str]] = []
    before: dict[TurnKey, np.ndarray] = {}
    columns = ("pair_id", "rollout_id", "agent_id", "turn", "prefix_turn", "suffix_ids", "output_ids")
    for name, rollout_id, agent_id, turn, prefix, suffix, output in zip(*(pairs[c] for c in columns), strict=True):
        key = rollout_id.as_py(), agent_id.as_py()
        # What stands before the suffix was searched with the pair it belongs to; its end is read again for runs that
        # cross the seam.
        seam = before.get((*key, prefix.as_py()), np.empty(0, dtype=np.int32))
        ids = np.concatenate([seam, _array(suffix), _array(output)])
        run = traces.find(ids)
        # A leak is one pair's, not also the next one's.
        before[(*key, turn.as_py())] = ids[-4 * RUN_IDS :] if run is None else ids[:0]
        if run is not None:
            found.append((name.as_py(), run))
    figures = {"pairs": len(pairs), "leaks": len(found)}
    if not found:
        return CheckOutcome("no_steering_leak", True, f"No run of steering in {len(pairs)} pairs.", figures=figures)
    message = (
        f"{len(found)} pairs hold steering, first {found[0][0]}: {found[0][1]!r}. The student would learn to obey a "
        "prompt it never gets. If it stands in inputs, the rollout set's messages and its agent section disagree; if "
        "in outputs, the teacher quotes it: drop those rollouts, or change the steering text."
    )
    return CheckOutcome("no_steering_leak", False, message, figures=figures)


def prompt_is_default_render(
    pairs: pa.Table, expected: Mapping[tuple[str, str], Sequence[int]], section: PairsSection, chat: ChatFormat
) -> CheckOutcome:
    """Every agent's first input is the prompt that serving renders, id for id; where turn 0 was dropped, it begins so.

    Args:
        expected: (rollout_id, agent_id) -> ids of the default prompt, generation prompt included. Agents without an
            entry are not compared.
    """
    compared, wrong, agents = 0, [], set()
    for (rollout_id, agent_id, turn), prompt in iter_prompts(pairs):
        agent = rollout_id, agent_id
        if agent in agents:
            continue
        agents.add(agent)
        if agent not in expected:
            continue
        compared += 1
        wanted = np.asarray(expected[agent], dtype=np.int32)
        if turn == 0:
            wanted = close_tail(wanted, chat) if section.strip_think else wanted
        else:  # what follows the generation prompt's tail is the turns before
            wanted = without_tail(wanted, chat)
        same = min(len(wanted), len(prompt))
        differ = np.flatnonzero(wanted[:same] != prompt[:same])
        if len(differ) or len(prompt) < len(wanted) or (turn == 0 and len(prompt) > len(wanted)):
            wrong.append(f"{rollout_id}/{agent_id}/{turn} at position {int(differ[0]) if len(differ) else same}")
    figures = {"agents": len(agents), "compared": compared, "differ": len(wrong)}
    if wrong:
        message = (
            f"{len(wrong)} of {compared} agents' prompts are not the default render, first {wrong[:_SHOWN]}: the "
            "student would be trained on a prompt that serving never gives. Compare agent.prompt, agent.tools, "
            "base.tokenizer and base.chat_template with what the rollouts were made with."
        )
        return CheckOutcome("prompt_is_default_render", False, message, figures=figures)
    message = f"{compared} of {len(agents)} agents' prompts compared with the default render, all equal."
    if not compared:
        message = (
            f"Cannot be decided: for none of {len(agents)} agents is the default prompt known (imported rollouts)."
        )
    return CheckOutcome("prompt_is_default_render", True, message, figures=figures)


def label_tokens(rows: pa.Table, pairs: pa.Table, sequences: pa.Table) -> CheckOutcome:
    """Labels of the sequences are exactly the outputs of the rows, each on a branch behind its own input, and there are
    some."""
    wanted = sum(rows["output_tokens"].to_pylist())
    stored = {row["sequence_id"]: row for row in sequences.to_pylist()}
    labelled, weighted = 0, 0.0
    for sequence in stored.values():
        _, labels, weights = expand(sequence)
        labelled += int((labels != IGNORED).sum())
        weighted += float(weights.sum())
    expected_weight = sum(row["weight"] * row["copies"] * row["output_tokens"] for row in rows.to_pylist())
    places = {row["pair_id"]: row for row in rows.to_pylist()}
    outputs = dict(zip(pairs["pair_id"].to_pylist(), pairs["output_ids"], strict=True))
    wrong = []
    for (rollout_id, agent_id, turn), prompt in iter_prompts(pairs):
        name = f"{rollout_id}/{agent_id}/{turn}"
        if name in places and not _in_place(places[name], stored, prompt, _array(outputs[name])):
            wrong.append(name)
    figures = {"label_tokens": labelled, "row_tokens": wanted, "weighted_tokens": weighted, "sequences": len(stored)}
    passed = not wrong and labelled == wanted > 0 and np.isclose(weighted, expected_weight, rtol=1e-5)
    message = f"{labelled} label tokens in {len(stored)} sequences, exactly the outputs of {len(rows)} rows."
    if not passed:
        message = (
            f"{labelled} label tokens (weight {weighted:.0f}) in the sequences, {wanted} (weight "
            f"{expected_weight:.0f}) in the rows, {len(wrong)} rows not where they say, first {wrong[:_SHOWN]}: a "
            "healthy loss would hide this. Materialize upweighted_dataset again; if it stays, the merge is broken."
        )
    return CheckOutcome("label_tokens", bool(passed), message, figures=figures)


def _in_place(row: Mapping, stored: Mapping[str, Mapping], prompt: np.ndarray, output: np.ndarray) -> bool:
    sequence = stored.get(row["sequence_id"])
    if sequence is None or row["span_end"] - row["span_start"] != len(output):
        return False
    if (row["span_start"], row["span_end"]) not in zip(sequence["span_starts"], sequence["span_ends"], strict=True):
        return False
    tree = Tree.stored(sequence)
    if tree.fault() or not 0 < row["span_end"] <= tree.length:
        return False
    branch = tree.until(row["span_end"] - 1)
    ids = np.asarray(sequence["input_ids"], dtype=np.int32)[branch]
    in_one_piece = np.array_equal(branch[-len(output) :], np.arange(row["span_start"], row["span_end"]))
    return len(prompt) > 0 and in_one_piece and np.array_equal(ids, np.concatenate([prompt, output]))


def heldout_split(rows: pa.Table, heldout_repos: Collection[str], heldout_tasks: Collection[str] = ()) -> CheckOutcome:
    """No held-out repository or task in the data set, no repository on both sides of train and val, none unknown.

    Args:
        heldout_repos, heldout_tasks: what evaluation is done on, and what the spec holds out besides.
    """
    sides: dict[str | None, set[str]] = {}
    tasks = set(rows["task_id"].to_pylist())
    for repo, split in zip(rows["repo"].to_pylist(), rows["split"].to_pylist(), strict=True):
        sides.setdefault(repo, set()).add(split)
    problems = []
    if leaked := sorted(repo for repo in sides if repo in set(heldout_repos)):
        problems.append(
            f"held-out repositories {leaked} are in it: add them to select.exclude_repos or split by repository"
        )
    if seen := sorted(str(task) for task in tasks & set(heldout_tasks)):
        problems.append(f'held-out tasks are in it, first {seen[:_SHOWN]}: set the rollout set\'s split = "train"')
    if both := sorted(str(repo) for repo, splits in sides.items() if len(splits) > 1):
        problems.append(f"{both} stand in train and in val: materialize upweighted_dataset again")
    if None in sides:
        problems.append("rows without a repository cannot be held out: name it in the rollout set's options.repo")
    figures = {
        "repos": {str(repo): "+".join(sorted(splits)) for repo, splits in sides.items()},
        "heldout_repos": sorted(heldout_repos),
    }
    message = "; ".join(problems) or f"{len(sides)} repositories, none of the {len(set(heldout_repos))} held-out ones."
    return CheckOutcome("heldout_split", not problems, message, figures=figures)


def _keys(table: pa.Table) -> Counter[TurnKey]:
    return Counter(zip(*(table[name].to_pylist() for name in ("rollout_id", "agent_id", "turn")), strict=True))


def _array(scalar: pa.ListScalar) -> np.ndarray:
    return scalar.values.to_numpy()
