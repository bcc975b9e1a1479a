"""Probes of a served checkpoint, before any rollout is spent on it.

Belongs here: the questions that prove that what is served is what was trained, and that it acts on prompts it has not
seen. Does not belong here: whole rollouts, or metrics with thresholds.

Each probe answers for one checkpoint over one set of first-turn prompts; `verdicts` turns the answers into checks.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from etpi_assets.agent.actions import read_actions
from etpi_assets.agent.contract import read_turn
from etpi_assets.specs.rollout_set import AgentSection
from etpi_resources.engines import Completion, Engine, Request, Sampler, ServedModel, ServerEngine
from etpi_resources.lake.checks import CheckOutcome
from etpi_resources.lake.lake import folder_hash

SERVER_PROBES = ("served_root", "content_visible", "calls_round_trip")
"""What is asked of an engine behind a server alone."""

DEFAULT = AgentSection()


@dataclass(frozen=True)
class Prompt:
    """A first-turn prompt: where it is from, its ids as our loop makes them, its messages, the tools it offers."""

    source: str
    ids: Sequence[int]
    messages: Sequence[Mapping[str, Any]]
    tools: Sequence[Mapping[str, Any]] = ()


@dataclass(frozen=True)
class Answer:
    """One probe's result for one checkpoint over one prompt set: the share that passed and what to show."""

    probe: str
    prompt_set: str
    n: int
    value: float
    passed: bool
    detail: Mapping[str, Any] = field(default_factory=dict)

    def row(self, checkpoint_id: str, role: str, seed: int | None, step: int | None = None) -> dict[str, Any]:
        """The answer as a row of the `probes` table; `step` of a checkpoint from the middle of training."""
        return {
            "checkpoint_id": checkpoint_id,
            "role": role,
            "seed": seed,
            "step": step,
            "probe": self.probe,
            "prompt_set": self.prompt_set,
            "n": self.n,
            "value": self.value,
            "passed": self.passed,
            "detail": json.dumps(self.detail, sort_keys=True),
        }


def first_turns(engine: Engine, prompts: Sequence[Prompt], max_tokens: int) -> list[Completion]:
    """The engine's greedy first turn for each prompt."""
    return engine.complete(_requests(prompts, max_tokens))


def first_chat_turns(engine: ServerEngine, prompts: Sequence[Prompt], max_tokens: int) -> list[Completion]:
    """The same through the server's own template and parsers."""
    return engine.chat(_requests(prompts, max_tokens))


def _requests(prompts: Sequence[Prompt], max_tokens: int) -> list[Request]:
    sampler = Sampler(temperature=0.0, max_tokens=max_tokens)
    return [
        Request(f"probe/{p.source}/0", f"probe/{p.source}", p.ids, p.messages, sampler, tools=p.tools) for p in prompts
    ]


def served_name(engine: Engine, content_hash: str) -> Answer:
    """The name the engine serves under embeds the hash of what it serves (a checkpoint, or an adapter), so that a
    reload cannot pass for another."""
    passed = content_hash[:12] in engine.name
    return Answer(
        "served_name", "none", 1, float(passed), passed, {"served": engine.name, "expected": content_hash[:12]}
    )


def served_root(listing: Sequence[ServedModel], name: str, folder: Path, content_hash: str | None) -> Answer:
    """Every server lists the name, with the folder of the trained files behind it; and these are still the trained
    ones (`content_hash`; None where it is not that of a folder). A name used again for another adapter fails."""
    roots = [card.root for card in listing if card.name == name]
    found = None if content_hash is None else folder_hash(folder)
    passed = bool(roots) and set(roots) == {str(folder)} and content_hash == found
    detail = {"served": roots, "expected": str(folder), "hash": found, "trained": content_hash}
    return Answer("served_root", "none", max(1, len(roots)), float(passed), passed, detail)


def ids_returned(prompt_set: str, prompts: Sequence[Prompt], completions: Sequence[Completion]) -> Answer:
    """Every call returns token ids, and the prompt ids it reports are those it was sent."""
    wrong = [
        p.source
        for p, c in zip(prompts, completions, strict=True)
        if not c.output_ids or c.prompt_ids is None or list(c.prompt_ids) != list(p.ids)
    ]
    return _share("ids_returned", prompt_set, len(prompts), wrong, 1.0)


def prompt_parity(rendered: Mapping[str, Sequence[int]], trained: Mapping[str, Sequence[int]]) -> Answer:
    """The ids serving makes of a training task's messages are the ids the training data holds, position by position."""
    wrong = {
        source: _departure(rendered[source], ids)
        for source, ids in trained.items()
        if list(rendered[source]) != list(ids)
    }
    first = next(iter(wrong.items()), None)
    answer = _share("prompt_parity", "train", len(trained), list(wrong), 1.0)
    return replace(answer, detail={**answer.detail, "first_departure": first})


def content_visible(prompt_set: str, prompts: Sequence[Prompt], completions: Sequence[Completion]) -> Answer:
    """No chat turn comes back with neither content nor a call while its reasoning is full: a reasoning parser of the
    server that takes all of the output leaves nothing to act on."""
    swallowed = [
        p.source
        for p, c in zip(prompts, completions, strict=True)
        if (m := c.message or {}).get("reasoning") and not str(m.get("content", "")).strip() and not m.get("tool_calls")
    ]
    return _share("content_visible", prompt_set, len(prompts), swallowed, 1.0)


def calls_round_trip(prompt_set: str, prompts: Sequence[Prompt], completions: Sequence[Completion]) -> Answer:
    """What the server's parsers made of each chat turn does what the ids that were generated say."""

    def does(content: str, calls: Sequence[Any] | None = None) -> list[tuple[Any, ...]]:
        return [
            (a.kind, a.command if a.kind == "bash" else "", a.to, a.message) for a in read_actions(content, calls)[0]
        ]

    wrong = {}
    for prompt, completion in zip(prompts, completions, strict=True):
        message = completion.message or {}
        said, parsed = does(completion.text), does(message.get("content", ""), message.get("tool_calls"))
        if said != parsed:
            wrong[prompt.source] = {"generated": said, "parsed": parsed}
    answer = _share("calls_round_trip", prompt_set, len(prompts), list(wrong), 1.0)
    return replace(answer, detail={**answer.detail, "first_difference": next(iter(wrong.items()), None)})


def differs_from_base(mine: Sequence[Completion], base: Sequence[Completion], floor: float) -> Answer:
    """Greedy output differs from the base's on training prompts: an adapter that never loaded does not."""
    same = [str(i) for i, (a, b) in enumerate(zip(mine, base, strict=True)) if a.output_ids == b.output_ids]
    return _share("differs_from_base", "train", len(mine), same, floor)


def parses(
    prompt_set: str,
    prompts: Sequence[Prompt],
    completions: Sequence[Completion],
    floor: float,
    agent: AgentSection = DEFAULT,
) -> Answer:
    """The first turn holds an action that the agent loop can read, and text the reader sees (no output swallowed by a
    reasoning field)."""
    unread = [
        p.source
        for p, c in zip(prompts, completions, strict=True)
        if read_turn(c.text, agent)[1] is not None or not c.text.strip()
    ]
    sample = next((c.text for p, c in zip(prompts, completions, strict=True) if p.source in unread), None)
    answer = _share("first_turn_parses", prompt_set, len(prompts), unread, floor)
    return replace(answer, detail={**answer.detail, "first_unread": sample})


def messages_first(prompt_set: str, completions: Sequence[Completion], agent: AgentSection = DEFAULT) -> Answer:
    """Share of first turns that are a pure message: the behaviour itself, recorded for both sets, never gated."""
    hits = 0
    for completion in completions:
        actions, _ = read_turn(completion.text, agent)
        hits += bool(actions) and all(a.kind == "send_message" and a.pure for a in actions)
    return Answer("first_turn_message", prompt_set, len(completions), hits / max(1, len(completions)), True)


def verdicts(rows: Sequence[Mapping[str, Any]]) -> list[CheckOutcome]:
    """One blocking check a probe, over the rows of the `probes` table that are of final trained checkpoints."""
    remedies = {
        "served_name": "serve the checkpoint under a name that embeds its hash, and unload the old one",
        "served_root": "another model stands behind the name: unload it, and load the trained files under a new name",
        "ids_returned": "ask the server for token ids; a capture of none is a failure, not an empty set",
        "prompt_parity": "give serving and training the same messages, tools, template and template arguments",
        "content_visible": "start the server without a reasoning parser, or with the one of the trained template",
        "calls_round_trip": "start the server with the tool parser of the trained call form, or without one",
        "differs_from_base": "other weights were served, or training moved nothing: look at sft_checkpoint's checks",
        "first_turn_parses": "compare a failing turn with a training row token by token; look at format_exposure",
    }
    outcomes = []
    for probe, remedy in remedies.items():
        mine = [r for r in rows if r["probe"] == probe and r["role"] != "base" and r["step"] is None]
        failed = [r for r in mine if not r["passed"]]
        words = "; ".join(
            f"{r['role']} seed {r['seed']} on {r['prompt_set']} prompts: {r['value']:.2f} of {r['n']}, {r['detail']}"
            for r in failed
        )
        outcomes.append(
            CheckOutcome(
                name=probe,
                passed=not failed,
                message=f"{words}. Remedy: {remedy}" if failed else _passed(probe, len(mine)),
                figures={f"{r['role']}/{r['seed']}/{r['prompt_set']}": r["value"] for r in mine},
            )
        )
    return outcomes


def _passed(probe: str, n: int) -> str:
    if probe in SERVER_PROBES and not n:
        return "not applicable: the engine is in this process, without a template and parsers of its own"
    return f"{n} probes passed"


def _share(probe: str, prompt_set: str, n: int, failed: Sequence[str], floor: float) -> Answer:
    value = 1 - len(failed) / n if n else 0.0
    return Answer(probe, prompt_set, n, value, n > 0 and value >= floor, {"floor": floor, "failed": list(failed)[:5]})


def _departure(left: Sequence[int], right: Sequence[int]) -> dict[str, Any]:
    at = next((i for i, (a, b) in enumerate(zip(left, right, strict=False)) if a != b), min(len(left), len(right)))
    return {"at": at, "served": list(left[at : at + 8]), "trained": list(right[at : at + 8])}
