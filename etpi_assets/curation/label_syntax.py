"""The check `label_syntax`: labels call tools in the syntax that the prompt requests and that serving parses.

A chat template that receives tools tells the model how to call them. Labels in another syntax train a student whose
calls no parser reads, with a healthy loss. So each label is parsed with the parser that serving uses, and compared with
what the template writes for the same calls; its tools are those of its prompt, and the parser that the serving's
options name is one for the form.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import pyarrow as pa

from etpi_assets.agent.actions import after_think
from etpi_assets.curation.pairs import CapturedAgent, CapturedTurn
from etpi_assets.curation.student_form import tool_name
from etpi_assets.specs.experiment import GatesSection
from etpi_resources.chat.format import ChatFormat
from etpi_resources.chat.tool_forms import FORMS, Call
from etpi_resources.chat.tool_forms.template import UnknownToolForm
from etpi_resources.lake.checks import CheckOutcome

_SHOWN = 3
_TEXT = 120
"""Characters shown of a label."""
_RENDERED = 400
"""Labels compared with the template's own rendering; a template that differs, differs in all of them."""

_NAME = "label_syntax"


class LabelSyntax:
    """The check, over the agents and pairs of a few rollouts at a time."""

    def __init__(self, chat: ChatFormat, section: GatesSection, parser: str | None = None) -> None:
        """Take the student's format, the bounds, and the parser of calls that the serving's options name, if any."""
        self._chat, self._turns_lost, self._parser = chat, section.turns_lost, parser
        self._agents: list[CapturedAgent] = []
        self._unknown: str | None = None
        try:
            self._form = chat.tool_form
        except UnknownToolForm as error:
            self._form, self._unknown = None, str(error)
        self._prompt_shows_tools: dict[str, bool] = {}
        self._figures: Counter[str] = Counter()
        self._faults: dict[str, list[str]] = {}
        self._lost_endings: Counter[str] = Counter()
        self._not_offered: Counter[str] = Counter()
        self._rendered = 0

    def collect(self, agents: Iterable[CapturedAgent]) -> Iterator[CapturedAgent]:
        """Yield the agents and remember them until `add` gets the pairs built from them."""
        for agent in agents:
            self._agents.append(agent)
            yield agent

    def add(self, pairs: pa.Table, dropped: pa.Table) -> None:
        """Check the pairs and dropped turns of the agents collected since the last call."""
        labels = {
            (row["rollout_id"], row["agent_id"], row["turn"]): row
            for row in pairs.select(["rollout_id", "agent_id", "turn", "pair_id", "output_ids", "capture"]).to_pylist()
        }
        reasons = {
            (row["rollout_id"], row["agent_id"], row["turn"]): row["reason"]
            for row in dropped.select(["rollout_id", "agent_id", "turn", "reason"]).to_pylist()
        }
        for agent in self._agents:
            shows_tools = self._shows_tools(agent.tools)
            for turn in agent.turns:
                row = labels.get((agent.rollout_id, agent.agent_id, turn.turn))
                if row is not None:
                    self._check_label(row, turn, shows_tools, agent.tools, last=turn is agent.turns[-1])
            if agent.finished and agent.turns:
                last = (agent.rollout_id, agent.agent_id, agent.turns[-1].turn)
                self._figures["finished"] += 1
                if last not in labels:
                    self._lost_endings[reasons.get(last, "not in the table")] += 1
        self._agents = []

    def outcome(self) -> CheckOutcome:
        """Return the verdict over all that was added."""
        form = self._form.name if self._form else None
        lost = sum(self._lost_endings.values())
        finished = self._figures["finished"]
        figures: dict[str, object] = {"form": form, **self._figures, "endings_lost": lost}
        figures |= {kind: len(names) for kind, names in self._faults.items()}
        problems = [f"{len(names)} labels {kind}, first {names[:_SHOWN]}" for kind, names in self._faults.items()]
        if finished and lost / finished > self._turns_lost:
            reasons = ", ".join(f"{reason} {n}" for reason, n in self._lost_endings.most_common())
            problems.append(
                f"the last turn of {lost} of {finished} finished conversations is dropped ({reasons}; bound "
                f"{self._turns_lost:.2f}, gates.turns_lost): the student would not learn to stop"
            )
        calling, strangers = self._figures["with_calls"], self._figures["not_offered"]
        if strangers and strangers > self._turns_lost * calling:
            problems.append(
                f"{strangers} of {calling} labels with calls call tools that their prompts do not offer "
                f"({', '.join(f'{name} {n}' for name, n in self._not_offered.most_common(_SHOWN))}; bound "
                f"{self._turns_lost:.2f}, gates.turns_lost): name the tools as the prompt does"
            )
        if self._parser and self._form and self._parser not in self._form.servers and self._figures["in_form"]:
            readers = " or ".join(map(repr, self._form.servers)) or "none of vLLM's"
            problems.insert(
                0,
                f"serving.options has tool-call-parser = {self._parser!r}, which does not read {form}; {readers} does",
            )
        if self._unknown and (self._figures["with_calls"] or any(self._prompt_shows_tools.values())):
            problems.insert(0, self._unknown)
        if problems:
            message = (
                f"{'; '.join(problems)}. The prompts ask for {form or 'an unknown syntax'}, which serving parses. "
                "Import structured calls (`tool_calls`) so that the template writes them, or use the "
                "base.chat_template whose syntax the rollouts have."
            )
            return CheckOutcome(_NAME, False, message, figures=figures)
        labels, calls, bare = (self._figures[name] for name in ("labels", "with_calls", "calls_without_tools"))
        message = f"{labels} labels end their turn; {calls} contain calls, and {form} parses all of them."
        if self._rendered:
            message += f" {self._rendered} are equal to the template's own rendering."
        if bare:
            message += f" {bare} contain calls although their prompts offer no tools: see pairs.tools."
        if unshown := self._figures["calls_unshown"]:
            message += f" {unshown} call tools that the template does not write into the prompt."
        if strangers:
            message += f" {strangers} call tools that their prompts do not offer."
        if lost_prose := self._figures["prose_lost"]:
            message += (
                f" {lost_prose} lack the text beside their calls, which the template does not write before a call."
            )
        return CheckOutcome(_NAME, True, message, figures=figures)

    def _check_label(
        self, row: dict[str, Any], turn: CapturedTurn, shows_tools: bool, tools: Sequence[Any] | None, *, last: bool
    ) -> None:
        self._figures["labels"] += 1
        self._figures["prose_lost"] += turn.prose_lost
        ids: list[int] = row["output_ids"]
        ended = bool(ids) and ids[-1] in self._chat.end_ids
        if not ended and not turn.truncated:
            self._fault("lack the end-of-turn token", row["pair_id"], "")
        text = self._chat.decode(ids[:-1] if ended else ids)
        body = after_think(text)
        if self._form is None:
            self._figures["with_calls"] += bool(turn.calls)
            return
        parsed = self._form.parse(body)
        self._figures["with_calls"] += bool(parsed)
        self._figures["in_form"] += bool(turn.calls) or (shows_tools and bool(parsed))
        offered = {tool_name(tool) for tool in tools or ()}
        strange = [call.name for call in parsed if isinstance(call, Call) and call.name not in offered]
        if offered and None not in offered and strange and not self._chat.calls_in_content:
            self._figures["not_offered"] += 1
            self._not_offered.update(strange)
        if turn.calls:
            self._figures["calls_without_tools"] += not tools
            self._figures["calls_unshown"] += bool(tools) and not shows_tools and not self._chat.calls_in_content
            if not self._form.same(parsed, turn.calls):
                self._fault(f"are not read back as the captured calls by the {self._form.name} parser", row["pair_id"],
                            body)  # fmt: skip
            else:
                self._compare_with_template(row, turn.calls, tools, text)
        elif shows_tools and (problem := self._wrong_syntax(body, parsed, acts=not last)):
            self._fault(problem, row["pair_id"], body)

    def _compare_with_template(
        self, row: dict[str, Any], calls: Sequence[Call], tools: Sequence[Any] | None, text: str
    ) -> None:
        if self._rendered >= _RENDERED:
            return
        self._rendered += 1
        written = self._chat.decode(self._chat.without_end(self._chat.turn_ids("", calls, tools=tools))).strip()
        if not text.rstrip().endswith(written):
            self._fault("are not what the template itself writes for the same calls", row["pair_id"], text)

    def _wrong_syntax(self, body: str, parsed: Sequence[Call | str], *, acts: bool) -> str | None:
        """Return what is wrong with a label whose prompt asks for calls in the template's form, None if nothing is.

        Args:
            acts: whether the conversation goes on, so that a fenced command was run; an answer may show one.
        """
        assert self._form is not None
        if any(isinstance(call, Call) for call in parsed):
            return None
        for form in FORMS.values():
            marked = form.marker in body if form.marker else acts and form is FORMS["markdown"]
            if form is self._form or not marked:
                continue
            if any(isinstance(call, Call) for call in form.parse(body)):
                return f"call tools as {form.name} where the prompt asks for {self._form.name}"
        return f"hold a call that the {self._form.name} parser cannot read" if parsed else None

    def _shows_tools(self, tools: Sequence[Any] | None) -> bool:
        """Return whether the template shows the tools, and so tells the model how to call them."""
        if not tools or self._chat.calls_in_content:
            return False
        key = repr(tools)
        if key not in self._prompt_shows_tools:
            user = [{"role": "user", "content": "x"}]
            self._prompt_shows_tools[key] = self._chat.prompt_ids(user, tools=tools) != self._chat.prompt_ids(user)
        return self._prompt_shows_tools[key]

    def _fault(self, kind: str, pair_id: str, text: str) -> None:
        self._faults.setdefault(kind, []).append(f"{pair_id}: {text[-_TEXT:]!r}" if text else pair_id)
