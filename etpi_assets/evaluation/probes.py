"""Probes of a served checkpoint, run before its evaluation rollouts.

They test that the server serves the trained weights, and that the checkpoint acts on held-out prompts. Each probe tests
one checkpoint on one set of first-turn prompts; `verdicts` turns the results into checks.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from etpi_assets.agent.actions import read_actions
from etpi_assets.agent.contract import read_turn
from etpi_assets.checks import CHECKS, outcome
from etpi_assets.specs.rollout_set import AgentSection
from etpi_resources.chat.tool_forms import ToolForm
from etpi_resources.engines import Completion, Engine, Request, Sampler, ServedModel, ServerEngine
from etpi_resources.lake.check_outcome import CheckOutcome
from etpi_resources.lake.lake import folder_hash

DEFAULT = AgentSection()

LEAST_GAP = 3e-3
"""Mean difference of log-probabilities, in nats a token, below which two turns are never different."""


@dataclass(frozen=True)
class ProbePrompt:
    """A first-turn prompt.

    Attributes:
        source: "task_id/agent_id".
        ids: the prompt ids, as the agent loop renders them.
        messages: the chat messages.
        tools: the schemas of the tools it offers.
    """

    source: str
    ids: Sequence[int]
    messages: Sequence[Mapping[str, Any]]
    tools: Sequence[Mapping[str, Any]] = ()


@dataclass(frozen=True)
class BaseTurns:
    """The base's greedy first turns, sampled twice; in 16 bits a server need not repeat them."""

    turns: Sequence[Completion]
    again: Sequence[Completion]

    @property
    def noise(self) -> float:
        """Return the largest mean difference of log-probabilities between the two, in nats a token."""
        return max(map(_mean_gap, self.turns, self.again), default=0.0)


@dataclass(frozen=True)
class ProbeResult:
    """One probe's result for one checkpoint on one prompt set: the share that passed, with details."""

    probe: str
    prompt_set: str
    n: int
    value: float
    passed: bool
    detail: Mapping[str, Any] = field(default_factory=dict)

    def row(self, checkpoint_id: str, role: str, seed: int | None, step: int | None = None) -> dict[str, Any]:
        """Return the row of the `probes` table; `step` is None for a final checkpoint."""
        checkpoint = {"checkpoint_id": checkpoint_id, "role": role, "seed": seed, "step": step}
        return {**vars(self), **checkpoint, "detail": json.dumps(self.detail, sort_keys=True)}


def first_turns(engine: Engine, prompts: Sequence[ProbePrompt], max_tokens: int) -> list[Completion]:
    """Sample the greedy first turn for each prompt."""
    return engine.complete(_requests(prompts, max_tokens))


def first_chat_turns(engine: ServerEngine, prompts: Sequence[ProbePrompt], max_tokens: int) -> list[Completion]:
    """Sample the greedy first turns through the server's own chat template and parsers."""
    return engine.chat(_requests(prompts, max_tokens))


def _requests(prompts: Sequence[ProbePrompt], max_tokens: int) -> list[Request]:
    sampler = Sampler(temperature=0.0, max_tokens=max_tokens)
    return [
        Request(f"probe/{p.source}/0", f"probe/{p.source}", p.ids, p.messages, sampler, tools=p.tools) for p in prompts
    ]


def served_name(engine: Engine, content_hash: str) -> ProbeResult:
    """Test that the served name contains the hash of the checkpoint or adapter.

    A server that still serves another checkpoint then has another name.
    """
    passed = content_hash[:12] in engine.name
    return ProbeResult(
        "served_name", "none", 1, float(passed), passed, {"served": engine.name, "expected": content_hash[:12]}
    )


def served_root(listing: Sequence[ServedModel], name: str, folder: Path, content_hash: str | None) -> ProbeResult:
    """Test that every server lists the name with the trained folder, and that the folder still has its content.

    A name that is reused for another adapter fails.

    Args:
        content_hash: the folder's hash after training; None if the checkpoint has no such folder.
    """
    roots = [card.root for card in listing if card.name == name]
    current_hash = None if content_hash is None else folder_hash(folder)
    passed = bool(roots) and set(roots) == {str(folder)} and content_hash == current_hash
    detail = {"served": roots, "expected": str(folder), "hash": current_hash, "trained": content_hash}
    return ProbeResult("served_root", "none", max(1, len(roots)), float(passed), passed, detail)


def ids_returned(prompt_set: str, prompts: Sequence[ProbePrompt], completions: Sequence[Completion]) -> ProbeResult:
    """Test that every call returns token ids, and reports the prompt ids it was sent."""
    wrong = [
        p.source
        for p, c in zip(prompts, completions, strict=True)
        if not c.output_ids or c.prompt_ids is None or list(c.prompt_ids) != list(p.ids)
    ]
    return _share("ids_returned", prompt_set, len(prompts), wrong, 1.0)


def prompt_parity(rendered: Mapping[str, Sequence[int]], trained: Mapping[str, Sequence[int]]) -> ProbeResult:
    """Test that serving renders a training task's messages to the prompt ids of the training data."""
    wrong = {
        source: _first_mismatch(rendered[source], ids)
        for source, ids in trained.items()
        if list(rendered[source]) != list(ids)
    }
    first = next(iter(wrong.items()), None)
    return _share("prompt_parity", "train", len(trained), list(wrong), 1.0, first_departure=first)


def content_visible(prompt_set: str, prompts: Sequence[ProbePrompt], completions: Sequence[Completion]) -> ProbeResult:
    """Test that no chat turn has reasoning, but neither content nor a tool call.

    A reasoning parser that takes the whole output leaves the agent nothing to act on.
    """
    swallowed = [
        p.source
        for p, c in zip(prompts, completions, strict=True)
        if (m := c.message or {}).get("reasoning") and not str(m.get("content", "")).strip() and not m.get("tool_calls")
    ]
    return _share("content_visible", prompt_set, len(prompts), swallowed, 1.0)


def calls_round_trip(
    prompt_set: str,
    prompts: Sequence[ProbePrompt],
    completions: Sequence[Completion],
    form: ToolForm | None = None,
) -> ProbeResult:
    """Test that the server's parsers return the actions that the generated text contains."""

    def actions_of(content: str, calls: Sequence[Any] | None = None) -> list[tuple[Any, ...]]:
        return [
            (a.kind, a.command if a.kind == "bash" else "", a.to, a.message)
            for a in read_actions(content, calls, form=form)[0]
        ]

    wrong = {}
    for prompt, completion in zip(prompts, completions, strict=True):
        message = completion.message or {}
        generated = actions_of(completion.text)
        parsed = actions_of(message.get("content", ""), message.get("tool_calls"))
        if generated != parsed:
            wrong[prompt.source] = {"generated": generated, "parsed": parsed}
    first = next(iter(wrong.items()), None)
    return _share("calls_round_trip", prompt_set, len(prompts), list(wrong), 1.0, first_difference=first)


def differs_from_base(trained: Sequence[Completion], base: BaseTurns, floor: float) -> ProbeResult:
    """Test that greedy turns on training prompts differ from the base's in their ids or in their probabilities.

    They differ in neither if an adapter never loaded. A policy may end with the base's own answers, at higher
    probability. Probabilities differ if their difference exceeds twice that of two samples of the base; ids are
    compared only where the base repeats its own. In 16 bits it may repeat none (SmolLM2 by vLLM on an H200), so the
    probabilities of the first ids that differ are compared too: they are near each other if rounding chose the id.
    """
    bound = max(LEAST_GAP, 2 * base.noise)
    same = [
        str(i)
        for i, (a, b, again) in enumerate(zip(trained, base.turns, base.again, strict=True))
        if (a.output_ids == b.output_ids or b.output_ids != again.output_ids) and _mean_gap(a, b) <= bound
    ]
    result = _share("differs_from_base", "train", len(trained), same, floor)
    measured: dict[str, Any] = {"gap_bound": bound}
    if not result.passed:
        largest = max((_mean_gap(a, b) for a, b in zip(trained, base.turns, strict=True)), default=0.0)
        measured |= {"largest_gap": largest, "base_noise": base.noise}
    return replace(result, detail={**result.detail, **measured})


def _mean_gap(one: Completion, other: Completion) -> float:
    """Return the mean difference of two turns' log-probabilities, in nats a token, up to the first ids that differ; 0
    if the engine returned none. Of those ids it is the least change that makes the one the likelier, then the other:
    each has at most the probability that the other leaves."""
    gaps = []
    for i, j, a, b in zip(
        one.output_ids or (), other.output_ids or (), one.logprobs or (), other.logprobs or (), strict=False
    ):
        if i != j:
            left = {x: min(x, math.log(max(1e-9, 1 - math.exp(x)))) for x in (a, b)}
            gaps.append(max(a - left[b], b - left[a]))
            break
        gaps.append(abs(a - b))
    return sum(gaps) / max(1, len(gaps))


def parses(
    prompt_set: str,
    prompts: Sequence[ProbePrompt],
    completions: Sequence[Completion],
    floor: float,
    agent: AgentSection = DEFAULT,
    form: ToolForm | None = None,
) -> ProbeResult:
    """Test that the first turn has visible text and an action that the agent loop can parse."""
    unread = [
        p.source
        for p, c in zip(prompts, completions, strict=True)
        if read_turn(c.text, agent, form=form)[1] is not None or not c.text.strip()
    ]
    sample = next((c.text for p, c in zip(prompts, completions, strict=True) if p.source in unread), None)
    return _share("first_turn_parses", prompt_set, len(prompts), unread, floor, first_unread=sample)


def messages_first(
    prompt_set: str, completions: Sequence[Completion], agent: AgentSection = DEFAULT, form: ToolForm | None = None
) -> ProbeResult:
    """Measure the share of first turns that only send a message: the trained behaviour, recorded but never gated."""
    hits = 0
    for completion in completions:
        actions, _ = read_turn(completion.text, agent, form=form)
        hits += bool(actions) and all(a.kind == "send_message" and a.pure for a in actions)
    return ProbeResult("first_turn_message", prompt_set, len(completions), hits / max(1, len(completions)), True)


def verdicts(rows: Sequence[Mapping[str, Any]]) -> list[CheckOutcome]:
    """Return one blocking check per probe, over the `probes` rows of final trained checkpoints.

    `first_turn_parses` judges only the last role, because reinforcement may start from a checkpoint that seldom acts.
    """
    last = "rl" if any(r["role"] == "rl" for r in rows) else "sft"
    outcomes = []
    for probe in CHECKS["serving_probe"]:
        roles = (last,) if probe == "first_turn_parses" else ("sft", "rl")
        of_probe = [r for r in rows if r["probe"] == probe and r["role"] in roles and r["step"] is None and r["n"]]
        failed = [r for r in of_probe if not r["passed"]]
        failures = "; ".join(
            f"{r['role']} seed {r['seed']} on {r['prompt_set']} prompts: {r['value']:.2f} of {r['n']}, {r['detail']}"
            for r in failed
        )
        figures = {f"{r['role']}/{r['seed']}/{r['prompt_set']}": r["value"] for r in of_probe}
        why = _why_equal(failed[0]) if failed and probe == "differs_from_base" else {}
        passed = not failed if of_probe else None
        outcomes.append(outcome(probe, passed, figures, probes=len(of_probe), failures=failures, **why))
    return outcomes


def _why_equal(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return why a trained checkpoint answers as its base: the differences say whether its weights were served."""
    detail = json.loads(row["detail"])
    gap, noise = detail.get("largest_gap", 0.0), detail.get("base_noise", 0.0)
    hint = "other_weights" if row["value"] == 0 and gap <= noise else "too_little"
    return {"hint": hint, "gap": gap, "noise": noise, "gap_bound": detail.get("gap_bound", 0.0)}


def _share(probe: str, prompt_set: str, n: int, failed: Sequence[str], floor: float, **more: Any) -> ProbeResult:
    value = 1 - len(failed) / n if n else 0.0
    detail = {"floor": floor, "failed": list(failed)[:5], **more}
    return ProbeResult(probe, prompt_set, n, value, not n or value >= floor, detail)


def _first_mismatch(left: Sequence[int], right: Sequence[int]) -> dict[str, Any]:
    at = next((i for i, (a, b) in enumerate(zip(left, right, strict=False)) if a != b), min(len(left), len(right)))
    return {"at": at, "served": list(left[at : at + 8]), "trained": list(right[at : at + 8])}
