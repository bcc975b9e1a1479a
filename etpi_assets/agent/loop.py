"""The agent loop: a rollout in lock-step rounds, token ids in, token ids out.

In a round the engine answers the requests of all active agents at once, then each agent's commands run, then messages
are delivered: a message sent in a round is at the head of the receiver's observation of that same round. Nothing in a
rollout runs concurrently, so a rollout is deterministic if its engine is.

The prompt of turn k+1 is prompt k + output k + observation ids, never a re-rendering. There are two exceptions, where
the prompt branches off the last turn: `history_think = "strip"` removes think blocks from the outputs before they
become history, and a compaction (`compact_after`) replaces the turns so far by a summary. The record keeps every
message, so after a compaction only the captured ids show the prompt that the model read.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Literal

from etpi_assets.agent.actions import SUBMIT, after_think
from etpi_assets.agent.contract import read_turn
from etpi_assets.agent.interpreter import cell_command, cell_of, published_command
from etpi_assets.agent.observation import Mailbox, format_observation, format_summary
from etpi_assets.agent.patches import unified_diff
from etpi_assets.agent.prompts import render_prompts
from etpi_assets.agent.think import post_think_tokens, strip_think, think_tokens
from etpi_assets.agent.tools import INTERPRETER, PUBLISHED_INTERPRETER, tool_schemas
from etpi_assets.specs.rollout_set import AgentSection
from etpi_assets.tasks.family import ANSWER, Family, Role, SandboxNeeds, Task, Verdict
from etpi_assets.tasks.grading import grade
from etpi_assets.trajectories.records import AgentRecord, Message, RolloutRecord, Turn
from etpi_resources.chat.tool_forms import Call
from etpi_resources.engines import Completion, Engine, EngineUnavailable, Request, Sampler
from etpi_resources.hashes import json_hash
from etpi_resources.sandboxes import (
    CommandResult,
    EnvironmentUnavailable,
    Sandbox,
    SandboxFactory,
    SandboxStopped,
    SandboxUnavailable,
)

if TYPE_CHECKING:
    from etpi_resources.chat.format import ChatFormat

MIN_OUTPUT = 16
"""An agent ends when its prompt leaves fewer ids than this for an output: no command fits in less."""

PREPARE_SECONDS = 300.0
"""Time limit for preparing an environment: a large repository takes minutes to commit."""


@dataclass(frozen=True)
class Identity:
    """The purpose of a rollout and the engine that acts in it: columns of its record.

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


@dataclass(frozen=True)
class RolloutJob:
    """One attempt at a task.

    Attributes:
        sample: number of the attempt among those of the same task.
        sample_seed: seed of the engine's sampler.
    """

    task: Task
    agent: AgentSection
    identity: Identity
    sample: int = 0
    sample_seed: int = 0

    @property
    def sampler(self) -> Sampler:
        return Sampler(self.agent.temperature, self.agent.top_p, self.agent.max_tokens, self.sample_seed)


@dataclass(frozen=True)
class RolloutRuntime:
    """Resources that many rollouts share.

    Attributes:
        family: sets up the workspaces and grades the result.
        template_kwargs: arguments of the chat template.
        judge: the family's judge (`versions.judge_of`), which outcomes name; "": they name none.
    """

    family: Family
    engine: Engine
    sandboxes: SandboxFactory
    chat: ChatFormat
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    judge: str = ""


def rollout_id(task: Task, sample: int, spec_key: str) -> str:
    """Return 32 hex digits that depend on the task content, the sample and the spec alone."""
    return json_hash([task.suite, task.task_id, task.content_hash, sample, spec_key])[:32]


def run_rollout(
    job: RolloutJob, runtime: RolloutRuntime, new_loop: Callable[..., AgentLoop] | None = None
) -> RolloutRecord:
    """Roll the job's task out once and grade the agents' workspaces.

    Args:
        new_loop: (job, runtime, record) -> the loop; None: AgentLoop.

    Every rollout gives a record: an exception of the engine, a sandbox or the judge ends the unfinished agents with
    exit "Error" and is recorded in `error`, also the end of a sandbox that was killed from outside (SandboxStopped).

    Raises:
        SandboxUnavailable, EngineUnavailable: every other rollout would fail in the same way.
    """
    clock = time.perf_counter()
    record = _new_record(job)
    loop = (new_loop or AgentLoop)(job, runtime, record)
    problem: Exception | None = None
    try:
        with ExitStack() as stack:
            loop.start(stack)
            loop.run()
            verdict = loop.grade()
        record.outcome = {"reward": verdict.reward, "verdict": verdict.verdict, "details": dict(verdict.details)}
        record.outcome |= {"judge": runtime.judge} if runtime.judge else {}
    except SandboxStopped as error:
        problem = error
    except (SandboxUnavailable, EngineUnavailable):
        raise
    except Exception as error:
        problem = error
    if problem is not None:
        record.error = f"{loop.stage}: {type(problem).__name__}: {problem}"
        record.outcome = {"reward": None, "verdict": "infrastructure", "details": {"stage": loop.stage}}
    for agent in loop.agents:
        agent.record.exit_status = agent.exit or "Error"
    record.wall_seconds = time.perf_counter() - clock
    return record


def _new_record(job: RolloutJob) -> RolloutRecord:
    task, columns = job.task, asdict(job.identity)
    return RolloutRecord(
        rollout_id=rollout_id(task, job.sample, columns.pop("spec_key")),
        suite=task.suite,
        task_id=task.task_id,
        task_hash=task.content_hash,
        repo=task.repo,
        agents=[],
        sample_seed=job.sample_seed,
        sample=job.sample,
        sampler=asdict(job.sampler),
        started_at=datetime.now(UTC),
        **columns,
    )


def start_files(sandbox: Sandbox, needs: SandboxNeeds) -> dict[str, str]:
    """Prepare the environment of a task and return its files. Raises EnvironmentUnavailable if preparing fails."""
    if needs.prepare is not None:
        prepared = sandbox.run(needs.prepare, timeout=PREPARE_SECONDS)
        if prepared.exit_code:
            raise EnvironmentUnavailable(f"the environment could not be prepared: {prepared.output[-1000:].strip()}")
    return sandbox.read_files()


@dataclass(eq=False)
class AgentState:
    """One agent while its rollout runs.

    Attributes:
        messages: the conversation as chat messages, for engines that take text.
        history: ids of the next prompt.
        start: the workspace's files (path -> text) before the first turn.
        exit: why the agent ended; None while it runs.
        waiting: it waits for a message and takes no turns.
        result, sent_to: outcome of the last turn's commands, and recipients of its messages.
        compacted_at: number of turns at the last compaction.
        answer: its final answer in words, where the agent answers instead of calling a tool.
    """

    role: Role
    sandbox: Sandbox
    record: AgentRecord
    messages: list[dict[str, Any]]
    history: list[int]
    start: dict[str, str]
    exit: str | None = None
    waiting: bool = False
    format_errors: int = 0
    result: CommandResult | None = None
    sent_to: list[str] = field(default_factory=list)
    compacted_at: int = 0
    answer: str | None = None

    @property
    def agent_id(self) -> str:
        return self.role.agent_id

    @property
    def active(self) -> bool:
        return self.exit is None and not self.waiting

    @property
    def turn(self) -> Turn:
        return self.record.turns[-1]

    def submit(self) -> None:
        self.exit, self.waiting = "Submitted", False


_INTERPRETERS = {INTERPRETER: cell_command, PUBLISHED_INTERPRETER: published_command}
"""The command that a tool's call runs, by the tool."""


class AgentLoop:
    """The rounds of one rollout. `stage` names the current phase for the record of a failed rollout."""

    def __init__(self, job: RolloutJob, runtime: RolloutRuntime, record: RolloutRecord) -> None:
        self.task, self.section, self.sampler = job.task, job.agent, job.sampler
        self.runtime, self.engine, self.chat = runtime, runtime.engine, runtime.chat
        self.record = record
        self.grammar = job.agent.grammar.grammar() if job.agent.grammar else None
        self.tools = tool_schemas(job.agent.tools)
        self.form = self.chat.tool_form if self.tools else None
        self.interpret = next((_INTERPRETERS[name] for name in job.agent.tools if name in _INTERPRETERS), None)
        # Only the published tool answers with the bare output.
        self.show_status = PUBLISHED_INTERPRETER not in job.agent.tools
        self.agents: list[AgentState] = []
        self.mail = Mailbox(())
        self.stage = "start"

    def start(self, stack: ExitStack) -> None:
        """Open every agent's sandbox on `stack` and write its first prompt."""
        family = self.runtime.family
        needs = family.needs(self.task)
        for index, role in enumerate(family.roles(self.task)):
            files = family.workspace(self.task, role)
            sandbox = stack.enter_context(self.runtime.sandboxes.create(files, needs.limits, needs.environment))
            agent = self._add_agent(index, role, sandbox)
            agent.start = files if needs.environment is None else start_files(sandbox, needs)
        agent_ids = [agent.agent_id for agent in self.agents]
        self.mail = Mailbox(agent_ids, delivers=self.section.messages == "delivered")

    def run(self) -> None:
        """Play rounds until every agent has ended."""
        self.stage = "loop"
        while any(agent.exit is None for agent in self.agents):
            for agent in self.agents:
                self._check_budget(agent)
            active = [agent for agent in self.agents if agent.active]
            if active:
                completions = self.engine.complete([self._request(agent) for agent in active])
                if len(completions) != len(active):
                    raise RuntimeError(f"{self.engine.name}: {len(completions)} completions for {len(active)} requests")
                for agent, completion in zip(active, completions, strict=True):
                    self._record_turn(agent, completion)
                for agent in active:
                    self._run_actions(agent)
            self._observe(active)

    def grade(self) -> Verdict:
        """Grade the agents' files; each agent's patch is set from them."""
        self.stage = "read files"
        final = {agent.agent_id: self._final_files(agent) for agent in self.agents}
        self.stage = "judge"
        initial = {agent.agent_id: agent.start for agent in self.agents}
        machines = {agent.agent_id: agent.sandbox for agent in self.agents}
        return grade(self.runtime.family, self.task, initial, final, machines, self.runtime.sandboxes)

    def _add_agent(self, index: int, role: Role, sandbox: Sandbox) -> AgentState:
        name = "solo" if role.partner is None else ("proposer", "responder")[index > 0]
        messages = [dict(message) for message in render_prompts(self.section, self.task, role)]
        record = AgentRecord(role.agent_id, role.feature_id, name, "Error")
        record.messages = [Message(m["role"], m["content"], kind="prompt") for m in messages]
        self.record.agents.append(record)
        agent = AgentState(role, sandbox, record, messages, self._render(messages), {})
        self.agents.append(agent)
        return agent

    def _check_budget(self, agent: AgentState) -> None:
        if not agent.active:
            return
        if len(agent.record.turns) >= self.section.max_steps:
            agent.exit = "LimitsExceeded"
        elif len(agent.history) + min(MIN_OUTPUT, self.section.max_tokens) > self.section.max_model_len:
            agent.exit = "ContextWindowExceeded"

    def _request(self, agent: AgentState) -> Request:
        session = f"{self.record.rollout_id}/{agent.agent_id}"
        room = self.section.max_model_len - len(agent.history)
        return Request(
            request_id=f"{session}/{len(agent.record.turns)}",
            session=session,
            prompt_ids=tuple(agent.history),
            messages=tuple(agent.messages),
            sampler=replace(self.sampler, max_tokens=min(self.sampler.max_tokens, room)),
            grammar=self.grammar.after(agent.history, self.chat) if self.grammar else None,
            tools=tuple(self.tools or ()),
            privileged={"task": self.task, "role": agent.role, "payload": self.task.payload},
        )

    def _record_turn(self, agent: AgentState, completion: Completion) -> None:
        if completion.finish_reason == "error":
            where = f"{agent.agent_id} turn {len(agent.record.turns)}"
            raise RuntimeError(f"{self.engine.name} failed on {where}: {completion.text}")
        prompt = None if completion.prompt_ids is None else list(completion.prompt_ids)
        output = None if completion.output_ids is None else list(completion.output_ids)
        tail = self.chat.tail_form(prompt or agent.history)
        message = dict(completion.message or {"role": "assistant", "content": completion.text})
        # Captured ids hold the calls as the model wrote them, so structured calls are read only of turns without ids.
        calls = message.get("tool_calls") if output is None else None
        actions, parse_error = read_turn(completion.text, self.section, calls, self.form)
        agent.record.turns.append(
            Turn(
                turn=len(agent.record.turns),
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
        self._append_message(agent, message, "action")

    def _run_actions(self, agent: AgentState) -> None:
        """Run the turn's commands in order and send its messages."""
        turn, results = agent.turn, []
        agent.sent_to = []
        for action in turn.actions:
            if action.kind == "send_message":
                agent.sent_to += self.mail.send(agent.agent_id, action.to, action.message or "")
                agent.waiting = agent.waiting or action.wait
                continue
            code = cell_of(action.command) if self.interpret else None
            result = agent.sandbox.run(self.interpret(code) if self.interpret and code is not None else action.command)
            results.append(result)
            turn.exit_code = result.exit_code
            if result.exit_code == 0 and result.output.split("\n", 1)[0].strip() == SUBMIT:
                agent.submit()
                break
        agent.result = _joined(results)
        agent.format_errors = agent.format_errors + 1 if turn.parse_error else 0
        if not turn.actions and turn.parse_error is None:
            agent.answer = self.chat.answer(after_think(turn.content)).strip()
            agent.submit()
        elif (most := self.section.max_format_errors) and agent.format_errors >= min(most, self.section.max_steps):
            agent.exit = "FormatError"
        elif self.section.max_steps == 1:  # the only turn is the submission
            agent.submit()

    def _observe(self, active: Sequence[AgentState]) -> None:
        """Append an observation to every agent that acted, and to those whose wait is over."""
        all_wait = all(agent.waiting for agent in self.agents if agent.exit is None)
        released = [
            agent
            for agent in self.agents
            if agent.exit is None and agent.waiting and (all_wait or self.mail.has_messages(agent.agent_id))
        ]
        for agent in self.agents:
            if not (agent in released or (agent in active and not agent.waiting)):
                continue
            agent.waiting = False
            turn = agent.turn
            turn.inbox = self.mail.take(agent.agent_id) if agent.exit is None else []
            turn.observation = format_observation(
                agent.result,
                turn.inbox,
                sent_to=agent.sent_to,
                parse_error=turn.parse_error,
                show_status=self.show_status,
            )
            calls = agent.messages[-1].get("tool_calls") or ()
            role = "tool" if calls or (self.tools and turn.actions) else "user"
            # Chat endpoints require a result per call. The turn has one observation, which answers its last call.
            for call in calls[:-1]:
                agent.messages.append({"role": role, "tool_call_id": call["id"], "content": "See the last result."})
            answered = {"tool_call_id": calls[-1]["id"]} if calls else {}
            self._append_message(agent, {"role": role, "content": turn.observation, **answered}, "observation")
            if agent.exit is None:
                self._extend_history(agent, turn, role)

    def _extend_history(self, agent: AgentState, turn: Turn, role: str) -> None:
        if self.section.compact_after and len(agent.record.turns) - agent.compacted_at >= self.section.compact_after:
            self._compact(agent, turn)
            return
        if turn.output_ids is None or turn.prompt_ids is None:  # no captured ids: an estimate for the budget
            agent.history = self._render(agent.messages)
            return
        output = turn.output_ids
        if self.section.history_think == "strip":
            output = strip_think(output, self.chat, self.chat.tail_form(turn.prompt_ids))
        # A turn cut at its budget lacks the end-of-turn id. The next prompt adds it, as a template would.
        added = self.chat.observation_ids(
            turn.observation or "", role, tool=self._called(turn), **self.runtime.template_kwargs
        )
        agent.history = [*turn.prompt_ids, *self.chat.as_history(output), *added]

    def _called(self, turn: Turn) -> str:
        """Return the tool that the turn called last; some templates name it in the result."""
        parsed = self.form.parse(after_think(turn.content)) if self.form else ()
        return next((call.name for call in reversed(parsed) if isinstance(call, Call)), "bash")

    def _compact(self, agent: AgentState, turn: Turn) -> None:
        """Replace the conversation by its first prompt and a summary of the turns so far."""
        agent.compacted_at = len(agent.record.turns)
        prompts = [message for message in agent.record.messages if message.kind == "prompt"]
        commands = [action.command for past in agent.record.turns for action in past.actions]
        summary = format_summary(commands, turn.observation or "")
        agent.messages = [
            *({"role": message.role, "content": message.content} for message in prompts),
            {"role": "user", "content": summary},
        ]
        agent.history = self._render(agent.messages)

    def _final_files(self, agent: AgentState) -> dict[str, str]:
        """Read the agent's files and set its patch.

        Where the agent answers in words, the file ANSWER holds that answer alone: a file of that name that the agent
        wrote itself is no answer.
        """
        files = agent.sandbox.read_files()
        agent.record.patch = unified_diff(agent.start, files)
        if self.section.action_format == "tool_or_answer":
            files.pop(ANSWER, None)
            if agent.answer is not None:
                files[ANSWER] = agent.answer
        return files

    def _render(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        return self.chat.prompt_ids(messages, tools=self.tools, **self.runtime.template_kwargs)

    def _append_message(self, agent: AgentState, message: dict[str, Any], kind: str) -> None:
        agent.messages.append(message)
        recorded = Message(message["role"], message["content"], turn=agent.turn.turn, kind=kind, at=datetime.now(UTC))
        recorded.reasoning, recorded.tool_calls = message.get("reasoning"), message.get("tool_calls")
        agent.record.messages.append(recorded)


def _joined(results: Sequence[CommandResult]) -> CommandResult | None:
    """Combine the commands of one turn: all outputs in order, the last exit code."""
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
