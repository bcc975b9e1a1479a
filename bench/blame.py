"""Measure blame on a lake in which rollouts were corrupted, and in one in which nothing is wrong.

    python bench/blame.py plant      # in a copy of a lake with coop_tiny_shared_strong ($ETPI_DATA); or: label, plans
    etpi run EXPERIMENT              # a spec with [blame], about 200 rollouts of that set
    etpi blame EXPERIMENT --retrain --share 0.2
    etpi run EXPERIMENT_without_worst_20 EXPERIMENT_without_random_20
    python bench/blame.py measure EXPERIMENT ...

`plant` publishes the rollout set with 20 % of the rollouts corrupted (the turn that writes a function writes it to the
partner's file; verdicts stay, so that selection keeps them) and 20 % reworded without harm; the column `teacher` says
which, so `etpi blame EXPERIMENT --by teacher` shows it. `label` changes that column alone: nothing is wrong. `plans` is
for students that cannot solve the tasks: first turns alone, a quarter of them each; the corrupted ones read a file
instead of sending a plan; blame the metric plan_first then. `measure` writes to blame.json the AUC and the precision at
the true share of rollouts ordered by harm and by influence, how often the worst turn is a corrupted one and its worst
token is in the path or the command, p that labels differ by chance, and the changes by the retrainings on unseen tasks;
of several experiments (seeds), these are of their rollouts together, by task.
"""

from __future__ import annotations

import json
import re
import sys
from collections import Counter, defaultdict
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from machine import machine

from etpi_assets.scoring.intervals import paired_difference, permutation_p
from etpi_resources.chat.format import load_chat_format
from etpi_resources.lake.catalog import connect
from etpi_resources.lake.lake import Lake, Ref
from etpi_resources.lake.questions import reports
from etpi_resources.lake.schemas import from_rows

RESULT = Path(__file__).with_suffix(".json")
SET = Ref("raw_rollouts", "rollout_set", "coop_tiny_shared_strong")
CORRUPTED, REWORDED, CLEAN = "corrupted", "reworded", "clean"
WRITES = re.compile(r">> ([a-z]+\.py)")
PLAN = re.compile(r"send_message \w+ <<'MSG'\nPlan: .*?\nMSG", re.DOTALL)
READS = "cat core.py"
COMMAND = "command>\n"
_WORDS = """
SELECT v.id, v.text FROM vocabulary AS v INNER JOIN experiment_spec.specs AS s
ON v.tokenizer = json_extract_string(s.spec, '$.base.tokenizer') WHERE s.name = $name"""


def changed(kind: str, contents: Sequence[str], *, plans: bool) -> dict[int, tuple[str, str]]:
    """Return number of a turn -> the text to replace in it, and its replacement, for one agent's turns."""
    if kind == CLEAN:
        return {}
    if kind == CORRUPTED and plans:
        return {i: (plan[0], READS) for i, text in enumerate(contents) if (plan := PLAN.search(text))}
    if kind == REWORDED:
        return {i: ("I'll take", "I will take") for i, text in enumerate(contents) if "I'll take" in text}
    known = dict.fromkeys(re.findall(r"\b[a-z]+\.py", " ".join(contents)))
    known |= dict.fromkeys(f"{name}.py" for name in re.findall(r"from ([a-z]+) import", " ".join(contents)))
    result = {}
    for i, text in enumerate(contents):
        command = WRITES.search(text)
        others = [name for name in known if command and name != command[1]]
        if "def " in text and command and others:
            result[i] = (command[0], f">> {others[-1]}")
    return result


def first_turns(rows: dict[str, list[dict]]) -> dict[str, list[dict]]:
    """Return the first turns of the rollouts in which each agent sends a plan."""
    turns = [row for row in rows["turns"] if row["turn"] == 0]
    gone = {row["rollout_id"] for row in turns if not PLAN.search(row["content"] or "")}
    kept = {name: [row for row in each if row["rollout_id"] not in gone] for name, each in rows.items()}
    kept["turns"] = [row for row in turns if row["rollout_id"] not in gone]
    kept["messages"] = [
        row for row in kept["messages"] if row["turn"] is None or (row["turn"], row["role"]) == (0, "assistant")
    ]
    kept["agents"] = [row | {"turns": 1} for row in kept["agents"]]
    return kept


def plant(*, text: bool, plans: bool = False) -> None:
    """Publish the rollout set with rollouts labelled corrupted and reworded; `text`: which they then are; `plans`: with
    first turns alone."""
    lake, rng = Lake.open(), np.random.default_rng(0)
    manifest = lake.require(SET)
    tables = {name: lake.read(SET, name) for name in manifest.tables}
    rows = {name: tables[name].to_pylist() for name in ("rollouts", "turns", "messages")}
    if plans:
        rows = first_turns({**rows, "agents": tables["agents"].to_pylist()})
    chat = load_chat_format("tiny", "tiny")
    share = 0.25 if plans else 0.2
    drawn = rng.choice([CORRUPTED, REWORDED, CLEAN], len(rows["rollouts"]), p=[share, share, 1 - 2 * share]).tolist()
    kinds = {row["rollout_id"]: kind for row, kind in zip(rows["rollouts"], drawn, strict=True)}
    agents: dict[tuple[str, str], list[dict]] = defaultdict(list)
    for turn in rows["turns"]:
        agents[turn["rollout_id"], turn["agent_id"]].append(turn)
    touched: dict[tuple[str, str, int], str] = {}
    for (rollout, agent), own in agents.items():
        edits = changed(kinds[rollout], [turn["content"] or "" for turn in own], plans=plans) if text else {}
        for i, (old, new) in edits.items():
            content, before = own[i]["content"].replace(old, new), own[i]["output_ids"]
            known = chat.encode(own[i]["content"])
            if before[: len(known)] != known:
                continue
            ids = [*chat.encode(content), *before[len(known) :]]
            grown = len(ids) - len(before)
            actions = own[i]["actions"].replace(json.dumps(old)[1:-1], json.dumps(new)[1:-1])
            own[i].update(content=content, actions=actions, output_ids=ids, logprobs=None)
            own[i]["output_tokens"] += grown
            own[i]["post_think_tokens"] += grown
            touched[rollout, agent, own[i]["turn"]] = content
            for later in own[i + 1 :]:
                later["prompt_tokens"] += grown
    for message in rows["messages"]:
        key = message["rollout_id"], message["agent_id"], message["turn"]
        if message["role"] == "assistant" and key in touched:
            message["content"] = touched[key]
    of_kind = {rollout for rollout, _, _ in touched}
    for row in rows["rollouts"]:
        row["teacher"] = kinds[row["rollout_id"]] if row["rollout_id"] in of_kind or not text else CLEAN
    new = {**tables, **{name: from_rows(name, changed_rows) for name, changed_rows in rows.items()}}
    lake.publish(
        SET, new, input_key=manifest.input_key, inputs=manifest.inputs, spec_hash=manifest.spec_hash,
        spec=manifest.spec, code=manifest.code, notes={"planted": len(of_kind)},
    )  # fmt: skip
    print(Counter(row["teacher"] for row in rows["rollouts"]))


def auc(scores: np.ndarray, bad: np.ndarray) -> float:
    """Return the probability that a bad rollout has a lower score than another one."""
    ranks = np.argsort(np.argsort(-scores)) + 1
    return float((ranks[bad].sum() - bad.sum() * (bad.sum() + 1) / 2) / (bad.sum() * (~bad).sum()))


def measure(experiment: str) -> list[dict]:
    """Return how well influence finds the corrupted rollouts: by the mean over checkpoints, and by each of several."""
    with connect() as catalog:
        words = dict(catalog.execute(_WORDS, {"name": experiment}).fetchall())
        rows = catalog.execute(
            "SELECT b.seed, b.step, b.rollout_id, b.teacher, b.task_id, b.agent_id, b.turn, p.output_ids, b.influences "
            "FROM blame AS b INNER JOIN tito_pairs AS p USING (experiment, rollout_id, agent_id, turn) "
            "WHERE b.experiment = $name",
            {"name": experiment},
        ).fetchall()
    checkpoints = sorted({row[:2] for row in rows})
    by_each = [checkpoints, *([each] for each in checkpoints if len(checkpoints) > 1)]
    return [{"experiment": experiment, "checkpoints": by} | found(rows, by, words) for by in by_each]


def found(rows: Sequence[tuple], checkpoints: Sequence[tuple], words: dict[int, str]) -> dict:
    """Return the figures of the mean influences over checkpoints, (seed, step) each."""
    labels, tasks, texts = {}, {}, {}
    turns: dict[str, dict[tuple, np.ndarray]] = defaultdict(dict)
    for seed, step, rollout, label, task, agent, turn, ids, influences in rows:
        if (seed, step) in checkpoints:
            labels[rollout], tasks[rollout], texts[rollout, agent, turn] = label, task, [words[i] for i in ids]
            mine, values = turns[rollout], np.array(influences) / len(checkpoints)
            mine[rollout, agent, turn] = mine.get((rollout, agent, turn), 0.0) + values
    names = sorted(turns)
    bad, odd = (np.array([labels[name] == kind for name in names]) for kind in (CORRUPTED, REWORDED))
    totals = {
        "harm": np.array([sum(x.clip(max=0).sum() for x in turns[name].values()) for name in names]),
        "influence": np.array([sum(x.sum() for x in turns[name].values()) for name in names]),
    }
    places = np.argsort(np.argsort(totals["harm"])).tolist()
    p = permutation_p(places, [labels[name] for name in names], [tasks[name] for name in names])
    figures = {"rollouts": len(names), "corrupted": int(bad.sum()), "permutation_p": p}
    for name, scores in totals.items():
        figures[f"auc_{name}"] = round(auc(scores, bad), 3)
        figures[f"precision_{name}"] = round(float(bad[np.argsort(scores)[: bad.sum()]].mean()), 2)
        figures[f"auc_{name}_of_reworded"] = round(auc(scores[~bad], odd[~bad]), 3)
    worst = [min(turns[name].items(), key=lambda item: item[1].sum()) for name in np.array(names)[bad]]
    starts = [("".join(texts[key]), "".join(texts[key][: int(x.argmin())])) for key, x in worst]
    wrote = [re.search(r">> [a-z]{0,6}$", start) for text, start in starts if "def " in text and WRITES.search(text)]
    wrote += [_reads(start) for text, start in starts if READS in text and not WRITES.search(text)]
    return figures | {"worst_turn_writes": len(wrote), "worst_token_in_path": sum(map(bool, wrote))}


def _reads(start: str) -> bool:
    """Return whether the token after this text is one of the command that stands for a plan."""
    _, command, begun = start.partition(COMMAND)
    return bool(command) and begun != READS and READS.startswith(begun)


def retrained(experiments: Sequence[str]) -> list[dict]:
    """Return the changes of `solved` on unseen tasks, paired by task, over all experiments together."""
    totals: dict[str, dict[str, np.ndarray]] = defaultdict(lambda: defaultdict(lambda: np.zeros(2)))
    with connect() as catalog:
        for name in experiments:
            catalog.execute("SET VARIABLE experiment = $name", {"name": name})
            for row in catalog.sql(reports()["blame_retrained"].text).to_arrow_table().to_pylist():
                arm = row["experiment"].removeprefix(name).removeprefix("_without_") or "whole"
                if row["unseen"]:
                    totals[arm][row["task_id"]] += row["total"], row["size"]
    sums = {arm: np.sum([*by_task.values()], axis=0) for arm, by_task in totals.items()}
    shares = {arm: round(float(solved / size), 3) for arm, (solved, size) in sums.items()}
    pairs = [(arm, other) for arm in totals for other in ("whole", arm.replace("worst", "random")) if arm != other]
    changes = []
    for arm, other in ((arm, other) for arm, other in pairs if other in totals):
        tasks = sorted(totals[arm].keys() & totals[other].keys())
        after, before = ([tuple(totals[name][task]) for task in tasks] for name in (arm, other))
        change = paired_difference(after, before)
        changes.append({
            "without": arm, "against": other, "tasks": len(tasks), "rollouts": int(sum(size for _, size in after)),
            "solved": shares[arm], "solved_against": shares[other],
            "change": [round(x, 3) for x in (change.value, change.ci_low, change.ci_high)],
        })  # fmt: skip
    return changes


def main(mode: str, experiments: Sequence[str]) -> None:
    if mode != "measure":
        return plant(text=mode != "label", plans=mode == "plans")
    rows = {
        "machine": machine(),
        "found": [row for name in experiments for row in measure(name)],
        "retrained": retrained(experiments),
    }
    known = json.loads(RESULT.read_text()) if RESULT.exists() else {}
    RESULT.write_text(json.dumps(known | {" ".join(experiments): rows}, indent=1) + "\n")
    print(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
