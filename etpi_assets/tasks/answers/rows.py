"""Read rows of questions as tasks, each with its source and licence, and sample equally from the sources.

Fields, the first that is present: `data_source` or `source` (else the name of params.path); `prompt` (text, or chat
messages without the system's), `question` or `problem`; `ground_truth` of `reward_model` (verl) or `reward_spec`
(SkyRL), `answer`, `expected_answer` (NeMo Gym), `final_answer` (DeepMath) or `tests`; `license`; `solution` (a
program's text), also in `extra_info`. A ground truth that is an object (or its JSON) holds tests of a program, see
`programs`; else it is a mathematical answer: the text after `####` where there is one (GSM8K), or the only item of a
list (Skywork-OR1).

The payload of a task (JSON): kind ("answer" or "program"), answer or tests, reference (an answer's text, or null),
unproven, source, license, row (where it came from), limits.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Iterator, Mapping, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any

from etpi_assets.tasks.answers import maths, programs
from etpi_assets.tasks.family import RejectedInput, Task
from etpi_assets.tasks.rows import tasks_of


def read_questions(suite: str, path: Path, chosen: Mapping[str, Any]) -> Iterator[Task | RejectedInput]:
    """Return a task or a rejection for each row, in order; skip rows of sources that params.sources leaves out.

    Raises FileNotFoundError and ValueError as `read_rows`."""

    def read(place: str, row: Mapping[str, Any]) -> Task | RejectedInput | None:
        source = str(row.get("data_source") or row.get("source") or path.stem)
        if chosen["sources"] and source not in chosen["sources"]:
            return None
        task = _task(suite, source, place, row, chosen)
        if task.payload["license"]:
            return task
        remedy = f'state it in the row, or in params.licenses."{source}"'
        return RejectedInput(place, "no_licence", f"the licence of {source} is not stated; {remedy}")

    return tasks_of(path, read)


_NO_NUMBERS = ("nan", "none", "null", "<na>")
"""Texts of a missing value: a column of a table had none here."""

REJECTED_SHARE = 0.05
"""Largest share of `per_source` that a source may lack: published tables have exactly that many rows, and a few of them
are unreadable."""


def balanced(tasks: Sequence[Task], per_source: int | None, seed: int) -> Iterator[Task]:
    """Yield `per_source` tasks of each source (None: all), sampled and shuffled with the seed, sources alternating.

    A source that lacks at most REJECTED_SHARE of them gives all it has.

    Raises ValueError if a source has fewer."""
    by_source: dict[str, list[Task]] = {}
    for task in tasks:
        by_source.setdefault(task.repo, []).append(task)
    samples = []
    for source in sorted(by_source):
        candidates = by_source[source]
        if per_source is not None and len(candidates) < (1 - REJECTED_SHARE) * per_source:
            raise ValueError(
                f"{len(candidates)} usable rows of {source}, and params.per_source = {per_source}; lower it, or leave "
                "the source out of params.sources"
            )
        # One generator a source: rows added to one source do not change the samples of the others.
        samples.append(
            random.Random(f"{seed}/{source}").sample(candidates, k=min(len(candidates), per_source or len(candidates)))
        )
    for turn in zip_longest(*samples):
        yield from (task for task in turn if task is not None)


def _task(suite: str, source: str, place: str, row: Mapping[str, Any], chosen: Mapping[str, Any]) -> Task:
    question = _question(_first(row, "prompt", "question", "problem"))
    if unseen := sorted(name for name in _PARTS if not all(text in question for text in _texts(row.get(name)))):
        raise ValueError(f"{', '.join(unseen)}: a part of the question that its text lacks; write it into the text")
    extra = row.get("extra_info")
    extra = extra if isinstance(extra, Mapping) else {}
    truth = _truth(row)
    payload: dict[str, Any] = {
        "source": source,
        "license": str(row.get("license") or chosen["licenses"].get(source) or ""),
        "row": place,
        "unproven": bool(chosen["unproven"]),
        "limits": {key: chosen[key] for key in ("command_seconds", "memory_gib")},
    }
    if isinstance(truth, Mapping):
        solution = row.get("solution") or extra.get("solution")
        reference = programs.as_answer(str(solution)) if solution else None
        payload |= {"kind": "program", "tests": programs.read_tests(truth), "reference": reference}
    else:
        answer = "" if truth is None else str(truth).strip()
        if not answer or answer.lower() in _NO_NUMBERS:
            raise ValueError(f"the answer is empty, or no number: {answer!r}")
        payload |= {"kind": "answer", "answer": answer, "reference": maths.as_answer(answer)}
        if chosen["grader"] != "hardened":
            payload["grader"] = chosen["grader"]
    name = hashlib.sha256(question.encode()).hexdigest()[:12]
    return Task.hashed(f"{source}/{name}", suite, source, chosen["split"], question, payload)


def _first(row: Mapping[str, Any], *names: str) -> Any:
    for name in names:
        if row.get(name) is not None:
            return row[name]
    raise KeyError(" or ".join(names))


_PARTS = ("choices", "options", "body", "context", "passage", "images", "image")
"""Columns that data sets have beside the question's text, without which it cannot be answered."""


def _texts(value: Any) -> Iterator[str]:
    """Yield the texts of a column: of a text, of choices (a list, or a mapping from labels), or of images."""
    if isinstance(value, Mapping | list):
        for part in value.values() if isinstance(value, Mapping) else value:
            yield from _texts(part)
    elif value is not None:
        yield str(value)


def _question(value: Any) -> str:
    if isinstance(value, str):
        text = value
    else:
        messages = [(m["role"], _text(m["content"])) for m in value if m["role"] != "system"]
        alone = all(role == "user" for role, _ in messages)
        text = "\n\n".join(part if alone else f"{role}: {part}" for role, part in messages)
        if not messages or messages[-1][0] != "user":
            raise ValueError("the question's last message is not the user's")
    if not text.strip():
        raise ValueError("the question is empty")
    return text.strip()


def _text(content: Any) -> str:
    return content if isinstance(content, str) else "".join(part["text"] for part in content)


def _truth(row: Mapping[str, Any]) -> Any:
    model = row.get("reward_model") or row.get("reward_spec")
    if isinstance(model, Mapping):
        truth = model["ground_truth"]
    else:
        truth = _first(row, "answer", "expected_answer", "final_answer", "tests")
    if isinstance(truth, str) and truth.lstrip().startswith(("{", '["')):
        try:
            truth = json.loads(truth)
        except ValueError:
            return truth  # a mathematical set such as {1, 2}
    if isinstance(truth, list):
        if len(truth) != 1:
            raise ValueError(f"{len(truth)} expected answers, where one is needed: {truth!r:.80}")
        truth = truth[0]
    return truth.rpartition("####")[2] if isinstance(truth, str) else truth
