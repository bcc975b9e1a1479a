"""The agent loop: a rollout in lock-step rounds, token ids in, token ids out.

Belongs here: who acts when, what every prompt is made of, the budgets and the ways to end. Does not belong here: how
actions are read (`actions`), commands run (a sandbox), tokens come about (an engine) or work is judged (the family).

In a round every agent that is to act is asked at once, then each one's commands run, then messages arrive: what is sent
in a round stands at the head of the receiver's observation of that same round. Nothing in a rollout runs concurrently,
so it is deterministic wherever its engine is.

The prompt of turn k+1 is prompt k + output k + observation ids, never a re-rendering. With `history_think = "strip"`
the outputs lose their think block before they become history, so such a prompt departs from the last turn: a fork. So
does one after a compaction (`compact_after`), where a summary stands for the turns so far; the messages of the record
are still all that was said, so the prompts that were read are in the captured ids alone.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Collection, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Literal

from etpi_assets.agent.actions import after_think
from etpi_assets.agent.contract import read_turn
from etpi_assets.agent.interpreter import cell_command, cell_of
from etpi_assets.agent.mailbox import Mailbox
from etpi_assets.agent.observation import format_observation, format_summary
from etpi_assets.agent.patches import unified_diff
from etpi_assets.agent.prompts import render_prompts
from etpi_assets.agent.think import post_think_tokens, strip_think, think_tokens
from etpi_assets.agent.tools import INTERPRETER, tool_schemas
from etpi_assets.specs.rollout_set import AgentSection
from etpi_assets.tasks.family import ANSWER, Family, Needs, Role, Task
from etpi_assets.tasks.grading import grade
from etpi_assets.trajectories.records import AgentRecord, Message, RolloutRecord, Turn
from etpi_resources.engines import Completion, Engine, EngineUnavailable, Request, Sampler
from etpi_resources.sandboxes import (
    CommandResult,
    EnvironmentUnavailable,
    Limits,
    Sandbox,
    SandboxFactory,
    SandboxUnavailable,
)

if TYPE_CHECKING:
    from etpi_resources.chat.format import ChatFormat

SUBMIT = "COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"
"""A command that succeeds with this as its first line of output ends the agent."""

MIN_OUTPUT = 16
"""An agent whose prompt leaves fewer ids than this is not asked again: no command fits in less."""

MAX_FORMAT_ERRORS = 3
"""So many turns in a row without a readable action end the agent."""


PREPARE_SECONDS = 300.0
"""How long an environment may take to prepare: a large repository is committed anew."""


@dataclass(frozen=True)
class Identity:
    """What a rollout is for and who acts: columns of its record.

    Attributes:
        spec_key: hash of everything besides task and sample that its result depends on (agent section, engine, seed).
        the rest: as in the `rollouts` table.
    """

    spec_key: str
    origin: Literal["set", "eval", "rl"]
    engine: str
    teacher: str | None = None
    rollout_set: str | None = None
    experiment: str | None = None
    checkpoint_role: str | None = None
    checkpoint_id: str | None = None
    seed: int | None = None
    decoding: str | None = None


def rollout_id(task: Task, sample: int, spec_key: str) -> str:
    """32 hex digits, the same for the same task content, sample and spec, wherever and whenever it runs."""
    text = json.dumps([task.suite, task.task_id, task.content_hash, sample, spec_key])
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def run_rollout(
    task: Task,
    family: Family,
    engine: Engine,
    sandboxes: SandboxFactory,
    agent: AgentSection,
    chat: ChatFormat,
    *,
    identity: Identity,
    sample: int = 0,
    sample_seed: int = 0,
    limits: Limits | None = None,
    message_commands: Collection[str] = ("send_message",),
    template_kwargs: Mapping[str, Any] | None = None,
) -> RolloutRecord:
    """Roll `task` out once and judge what the agents leave.

    Every rollout gives a record: what an engine, a sandbox or the judge raises ends the agents still at work with exit
    "Error" and stands in `error`. Only SandboxUnavailable and EngineUnavailable are raised, for no rollout would fare
    better. `template_kwargs` are the chat template's arguments.
    """
    started_at, clock = datetime.now(UTC), time.perf_counter()
    sampler = Sampler(agent.temperature, agent.top_p, agent.max_tokens, sample_seed)
    record = RolloutRecord(
        rollout_id=rollout_id(task, sample, identity.spec_key),
        origin=identity.origin,
        suite=task.suite,
        task_id=task.task_id,
        task_hash=task.content_hash,
        repo=task.repo,
        agents=[],
        rollout_set=identity.rollout_set,
        experiment=identity.experiment,
        checkpoint_role=identity.checkpoint_role,
        checkpoint_id=identity.checkpoint_id,
        seed=identity.seed,
        sample_seed=sample_seed,
        decoding=identity.decoding,
        sample=sample,
        engine=identity.engine,
        teacher=identity.teacher,
        sampler=asdict(sampler),
        started_at=started_at,
    )
    loop = _Loop(task, agent, chat, engine, sampler, record, message_commands, template_kwargs or {})
    stage = "start"
    try:
        with ExitStack() as stack:
            needs = family.needs(task)
            for index, role in enumerate(family.roles(task)):
                files = family.workspace(task, role)
                box = stack.enter_context(sandboxes.create(files, limits or needs.limits, needs.environment))
                loop.seat(index, role, box)
                loop.seats[-1].start = files if needs.environment is None else _start_files(box, needs)
            stage = "loop"
            loop.run()
            stage = "read files"
            final = {seat.role.agent_id: loop.left_by(seat) for seat in loop.seats}
            stage = "judge"
            initial = {seat.role.agent_id: seat.start for seat in loop.seats}
            machines = {seat.role.agent_id: seat.sandbox for seat in loop.seats}
            verdict = grade(family, task, initial, final, machines, sandboxes)
        record.outcome = {"reward": verdict.reward, "verdict": verdict.verdict, "details": dict(verdict.details)}
    except (SandboxUnavailable, EngineUnavailable):
        raise
    except Exception as error:  # whatever it is, the rollout is recorded with it rather than lost
        record.error = f"{stage}: {type(error).__name__}: {error}"
        record.outcome = {"reward": None, "verdict": "infrastructure", "details": {"stage": stage}}
    for seat in loop.seats:
        seat.record.exit_status = seat.exit or "Error"
    record.wall_seconds = time.perf_counter() - clock
    return record


def _start_files(box: Sandbox, needs: Needs) -> dict[str, str]:
    """What an agent finds in the environment that its task brings, once that is prepared. Raises EnvironmentUnavailable
    where it cannot be."""
    if needs.prepare is not None:
        prepared = box.run(needs.prepare, timeout=PREPARE_SECONDS)
        if prepared.exit_code:
            raise EnvironmentUnavailable(f"the environment could not be prepared: {prepared.output[-1000:].strip()}")
    return box.read_files()


@dataclass
class _Seat:
    """One agent at work."""

    role: Role
    sandbox: Sandbox
    record: AgentRecord
    messages: list[dict[str, Any]]
    history: list[int]
    start: dict[str, str] = field(default_factory=dict)
    exit: str | None = None
    parked: bool = False
    format_errors: int = 0
    result: CommandResult | None = None
    sent_to: list[str] = field(default_factory=list)
    compacted_at: int = 0
    answer: str | None = None

    @property
    def turn(self) -> Turn:
        return self.record.turns[-1]

    def leave(self) -> dict[str, str]:
        """The files the agent leaves; its patch is set from them."""
        files = self.sandbox.read_files()
        self.record.patch = unified_diff(self.start, files)
        return files


class _Loop:
    """The rounds of one rollout."""

    def __init__(
        self,
        task: Task,
        agent: AgentSection,
        chat: ChatFormat,
        engine: Engine,
        sampler: Sampler,
        record: RolloutRecord,
        message_commands: Collection[str],
        template_kwargs: Mapping[str, Any],
    ) -> None:
        self.task, self.agent, self.chat, self.engine, self.sampler, self.record = (
            task,
            agent,
            chat,
            engine,
            sampler,
            record,
        )
        self.message_commands = message_commands
        self.grammar = agent.grammar.grammar() if agent.grammar else None
        self.template_kwargs = template_kwargs
        self.tools = tool_schemas(agent.tools)
        self.form = self.chat.tool_form if self.tools else None
        self.seats: list[_Seat] = []
        self.mail = Mailbox(())

    def seat(self, index: int, role: Role, sandbox: Sandbox) -> None:
        name = "solo" if role.partner is None else ("proposer", "responder")[index > 0]
        messages = [dict(message) for message in render_prompts(self.agent, self.task, role)]
        record = AgentRecord(role.agent_id, role.feature_id, name, "Error")
        record.messages = [Message(m["role"], m["content"], kind="prompt") for m in messages]
        self.record.agents.append(record)
        self.seats.append(_Seat(role, sandbox, record, messages, self._render(messages)))

    def run(self) -> None:
        self.mail = Mailbox([seat.role.agent_id for seat in self.seats])
        while any(seat.exit is None for seat in self.seats):
            for seat in self.seats:
                self._budget(seat)
            asked = [seat for seat in self.seats if seat.exit is None and not seat.parked]
            if asked:
                completions = self.engine.complete([self._request(seat) for seat in asked])
                if len(completions) != len(asked):
                    raise RuntimeError(f"{self.engine.name}: {len(completions)} completions for {len(asked)} requests")
                for seat, completion in zip(asked, completions, strict=True):
                    self._take(seat, completion)
                for seat in asked:
                    self._act(seat)
            self._observe(asked)

    def left_by(self, seat: _Seat) -> dict[str, str]:
        """The files an agent leaves. Where it is to answer in words, ANSWER holds those and nothing that it wrote there
        itself: an agent that never answers has not answered."""
        files = seat.leave()
        if self.agent.action_format == "tool_or_answer":
            files.pop(ANSWER, None)
            if seat.answer is not None:
                files[ANSWER] = seat.answer
        return files

    def _budget(self, seat: _Seat) -> None:
        if seat.exit is not None or seat.parked:
            return
        if len(seat.record.turns) >= self.agent.max_steps:
            seat.exit = "LimitsExceeded"
        elif len(seat.history) + min(MIN_OUTPUT, self.agent.max_tokens) > self.agent.max_model_len:
            seat.exit = "ContextWindowExceeded"

    def _request(self, seat: _Seat) -> Request:
        session = f"{self.record.rollout_id}/{seat.role.agent_id}"
        room = self.agent.max_model_len - len(seat.history)
        return Request(
            request_id=f"{session}/{len(seat.record.turns)}",
            session=session,
            prompt_ids=tuple(seat.history),
            messages=tuple(seat.messages),
            sampler=replace(self.sampler, max_tokens=min(self.sampler.max_tokens, room)),
            grammar=self.grammar.after(seat.history, self.chat) if self.grammar else None,
            tools=tuple(self.tools or ()),
            privileged={"task": self.task, "role": seat.role, "payload": self.task.payload},
        )

    def _take(self, seat: _Seat, completion: Completion) -> None:
        if completion.finish_reason == "error":
            where = f"{seat.role.agent_id} turn {len(seat.record.turns)}"
            raise RuntimeError(f"{self.engine.name} failed on {where}: {completion.text}")
        prompt = None if completion.prompt_ids is None else list(completion.prompt_ids)
        output = None if completion.output_ids is None else list(completion.output_ids)
        tail = self.chat.tail_form(prompt or seat.history)
        message = dict(completion.message or {"role": "assistant", "content": completion.text})
        # Captured ids hold the calls as the model wrote them; without ids the endpoint's structured ones are all.
        calls = message.get("tool_calls") if output is None else None
        actions, parse_error = read_turn(completion.text, self.agent, self.message_commands, calls, self.form)
        seat.record.turns.append(
            Turn(
                turn=len(seat.record.turns),
                content=completion.text,
                prompt_ids=prompt,
                output_ids=output,
                logprobs=None if completion.logprobs is None else list(completion.logprobs),
                capture="none" if prompt is None or output is None else "native",
                finish_reason=completion.finish_reason,
                reasoning=message.get("reasoning"),
                think_tokens=None if output is None else think_tokens(output, self.chat, tail),
                post_think_tokens=None if output is None else post_think_tokens(output, self.chat, tail),
                actions=actions,
                parse_error=parse_error,
                at=datetime.now(UTC),
            )
        )
        self._say(seat, message, "action")

    def _act(self, seat: _Seat) -> None:
        """Run the turn's commands in order and send its messages."""
        turn, results = seat.turn, []
        seat.sent_to = []
        for action in turn.actions:
            if action.kind == "send_message":
                seat.sent_to += self.mail.send(seat.role.agent_id, action.to, action.message or "")
                seat.parked = seat.parked or action.wait
                continue
            cell = cell_of(action.command) if INTERPRETER in self.agent.tools else None
            result = seat.sandbox.run(action.command if cell is None else cell_command(cell))
            results.append(result)
            turn.exit_code = result.exit_code
            if result.exit_code == 0 and result.output.split("\n", 1)[0].strip() == SUBMIT:
                seat.exit, seat.parked = "Submitted", False
                break
        seat.result = _joined(results)
        seat.format_errors = seat.format_errors + 1 if turn.parse_error else 0
        if not turn.actions and turn.parse_error is None:  # an answer
            seat.answer, seat.exit, seat.parked = after_think(turn.content).strip(), "Submitted", False
        elif seat.format_errors >= min(MAX_FORMAT_ERRORS, self.agent.max_steps):
            seat.exit = "FormatError"
        elif self.agent.max_steps == 1:  # an agent that is asked once submits with what it does
            seat.exit, seat.parked = "Submitted", False

    def _observe(self, asked: Sequence[_Seat]) -> None:
        """Give every agent that acted, or that waited for what has now come, its observation."""
        waiting = [seat for seat in self.seats if seat.exit is None and seat.parked]
        others_end = all(seat.parked for seat in self.seats if seat.exit is None)
        released = [seat for seat in waiting if others_end or self.mail.holds_for(seat.role.agent_id)]
        for seat in self.seats:
            if not (seat in released or (seat in asked and not seat.parked)):
                continue
            seat.parked = False
            turn = seat.turn
            turn.inbox = self.mail.take(seat.role.agent_id) if seat.exit is None else []
            turn.observation = format_observation(
                seat.result, turn.inbox, sent_to=seat.sent_to, parse_error=turn.parse_error
            )
            calls = seat.messages[-1].get("tool_calls") or ()
            role = "tool" if calls or (self.tools and turn.actions) else "user"
            # A chat endpoint wants an answer to each call; the observation of them all is the last one's.
            for call in calls[:-1]:
                seat.messages.append({"role": role, "tool_call_id": call["id"], "content": "See the last result."})
            of = {"tool_call_id": calls[-1]["id"]} if calls else {}
            self._say(seat, {"role": role, "content": turn.observation, **of}, "observation")
            if seat.exit is None:
                self._extend(seat, turn, role)

    def _extend(self, seat: _Seat, turn: Turn, role: str) -> None:
        if self.agent.compact_after and len(seat.record.turns) - seat.compacted_at >= self.agent.compact_after:
            self._compact(seat, turn)
            return
        if turn.output_ids is None or turn.prompt_ids is None:  # there are no ids to extend: a guess, for the budget
            seat.history = self._render(seat.messages)
            return
        output = turn.output_ids
        if self.agent.history_think == "strip":
            output = strip_think(output, self.chat, self.chat.tail_form(turn.prompt_ids))
        # A turn cut at its budget has no end-of-turn id of its own: the next prompt supplies it, as a template would.
        end = [] if output and output[-1] == self.chat.end_id else [self.chat.end_id]
        added = self.chat.observation_ids(turn.observation or "", role, **self.template_kwargs)
        seat.history = [*turn.prompt_ids, *output, *end, *added]

    def _compact(self, seat: _Seat, turn: Turn) -> None:
        seat.compacted_at = len(seat.record.turns)
        prompts = [message for message in seat.record.messages if message.kind == "prompt"]
        commands = [action.command for past in seat.record.turns for action in past.actions]
        summary = format_summary(commands, turn.observation or "")
        seat.messages = [
            *({"role": message.role, "content": message.content} for message in prompts),
            {"role": "user", "content": summary},
        ]
        seat.history = self._render(seat.messages)

    def _render(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        return self.chat.prompt_ids(messages, tools=self.tools, **self.template_kwargs)

    def _say(self, seat: _Seat, message: dict[str, Any], kind: str) -> None:
        seat.messages.append(message)
        told = Message(message["role"], message["content"], turn=seat.turn.turn, kind=kind, at=datetime.now(UTC))
        told.reasoning, told.tool_calls = message.get("reasoning"), message.get("tool_calls")
        seat.record.messages.append(told)


def _joined(results: Sequence[CommandResult]) -> CommandResult | None:
    """Several commands of one turn as one outcome: outputs one after the other, the last exit code."""
    if len(results) < 2:
        return results[0] if results else None
    output = "".join(r.output if r.output.endswith("\n") or not r.output else r.output + "\n" for r in results)
    return replace(
        results[-1],
        output=output,
        seconds=sum(r.seconds for r in results),
        timed_out=any(r.timed_out for r in results),
        truncated=any(r.truncated for r in results),
    )
