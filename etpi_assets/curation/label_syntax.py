"""The check `label_syntax`: labels call tools in the syntax that the prompt requests and that serving parses.

A chat template that receives tools tells the model how to call them. Labels in another syntax train a student whose
calls no parser reads, with a healthy loss. So each label is parsed with the parser that serving uses, and compared with
the template's text for the same calls. Its tools must be those of its prompt, and the parser that the serving options
name must read the form.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import pyarrow as pa

from etpi_assets.agent.actions import after_think
from etpi_assets.checks import OnHit, ignore, part
from etpi_assets.curation.lost import listed_with_keys
from etpi_assets.curation.pairs import CapturedAgent, CapturedTurn, label_text
from etpi_assets.specs.experiment import GatesSection
from etpi_assets.trajectories.tables import turn_keys
from etpi_resources.chat.format import ChatFormat
from etpi_resources.chat.marks import split_thought, without_code
from etpi_resources.chat.tool_forms import FORMS, Call
from etpi_resources.chat.tool_forms.call import tool_name
from etpi_resources.chat.tool_forms.template import UnknownToolForm
from etpi_resources.lake.check_outcome import CheckOutcome, listed
from etpi_resources.token_ids import arrays

_SHOWN = 3
_TEXT = 120
"""Characters shown of a label."""
_RENDERED = 50
"""Labels of a block that are compared with the template's own rendering; a template that differs, differs in all."""

_NAME = "label_syntax"
_REFUSED = "refused_by_template"
_ALSO = ("rendered", "calls_without_tools", "calls_unshown", "not_offered", "prose_lost")
"""The counts of `Findings` that a message names where they are not 0."""


@dataclass
class Findings:
    """Findings on the labels of some rollouts.

    Attributes:
        counted: labels, labels with calls, finished conversations, ... by name.
        faults: kind of fault -> number of labels; `examples` has the first of each kind.
        lost_endings: why the last turn of a finished conversation was dropped -> conversations.
        not_offered: tools that prompts do not offer -> calls.
        tools_shown: whether the template shows the tools of any conversation.
    """

    counted: Counter[str] = field(default_factory=Counter)
    faults: Counter[str] = field(default_factory=Counter)
    examples: dict[str, list[str]] = field(default_factory=dict)
    lost_endings: Counter[str] = field(default_factory=Counter)
    not_offered: Counter[str] = field(default_factory=Counter)
    tools_shown: bool = False


class LabelSyntax:
    """The check, over the agents and pairs of a few rollouts at a time."""

    def __init__(self, chat: ChatFormat, section: GatesSection, parser: str | None = None) -> None:
        """Take the student's format, the bounds, and the parser of calls that the serving's options name, if any."""
        self._chat, self._turns_lost, self._parser = chat, section.turns_lost, parser
        self._unknown: str | None = None
        try:
            self._form = chat.tool_form
        except UnknownToolForm as error:
            self._form, self._unknown = None, str(error)
        self.most_rendered = _RENDERED
        self._prompt_shows_tools: dict[str, bool] = {}
        self._findings, self._hit = Findings(), ignore

    def figures(
        self, agents: Sequence[CapturedAgent], pairs: pa.Table, dropped: pa.Table, hit: OnHit = ignore
    ) -> dict[str, Any]:
        """Return the `Findings` on agents and the pairs and dropped turns made of them, as values of JSON."""
        self._findings, self._hit = Findings(), hit
        outputs = (ids for chunk in pairs["output_ids"].chunks for ids in arrays(chunk))
        labels = dict(zip(turn_keys(pairs), outputs, strict=True))
        details = zip(dropped["reason"].to_pylist(), dropped["detail"].to_pylist(), strict=True)
        reasons = dict(zip(turn_keys(dropped), details, strict=True))
        for agent in agents:
            shows_tools = self._shows_tools(agent.tools)
            self._findings.tools_shown |= shows_tools
            for turn in agent.turns:
                ids = labels.get(key := (agent.rollout_id, agent.agent_id, turn.turn))
                if ids is not None:
                    pair_id = "/".join(map(str, key))
                    self._check_label(pair_id, ids, turn, shows_tools, agent.tools, last=turn is agent.turns[-1])
            if agent.finished and agent.turns and len(agent.turns) - 1 not in agent.repeated:
                last = (agent.rollout_id, agent.agent_id, agent.turns[-1].turn)
                self._findings.counted["finished"] += 1
                if last not in labels:
                    reason, detail = reasons.get(last, ("not in the table", ""))
                    self._findings.lost_endings[reason] += 1
                    if reason == _REFUSED:
                        self._findings.examples[_REFUSED] = [*self._findings.examples.get(_REFUSED, ()), detail][:1]
        return vars(self._findings)

    def outcome(self, findings: Mapping[str, Any]) -> CheckOutcome:
        """Return the verdict over the figures of all rollouts, summed by `merged` of `trajectories.rollout_checks`."""
        form = self._form.name if self._form else None
        counted, faults, examples = Counter(findings["counted"]), findings["faults"], findings["examples"]
        lost, finished, strange = sum(findings["lost_endings"].values()), counted["finished"], counted["not_offered"]
        figures: dict[str, object] = {"form": form, **counted, "endings_lost": lost, **faults}
        shown = {**dict.fromkeys(_ALSO, 0), "labels": 0, "with_calls": 0, **counted}
        say = partial(part, _NAME, form=form, bound=self._turns_lost, **shown)
        problems = [say("fault", n=n, kind=kind, first=examples[kind][:_SHOWN]) for kind, n in faults.items()]
        endings = []
        if finished and lost / finished > self._turns_lost:
            endings = [say("endings", lost=lost, reasons=listed_with_keys(findings["lost_endings"]))]
            endings += [say("refused", first=first) for first in examples.get(_REFUSED, ())[:1]]
        if strange and strange > self._turns_lost * counted["with_calls"]:
            named = listed(dict(Counter(findings["not_offered"]).most_common(_SHOWN)))
            problems.append(say("strange", named=named))
        if self._parser and self._form and self._parser not in self._form.servers and counted["in_form"]:
            readers = " or ".join(map(repr, self._form.servers)) or "none of vLLM's"
            problems.insert(0, say("parser", parser=self._parser, readers=readers))
        if self._unknown and (counted["with_calls"] or findings["tools_shown"]):
            problems.insert(0, self._unknown)
        if problems or endings:
            syntax = say("syntax", problems="; ".join(problems), syntax=form or "an unknown syntax")
            message = " ".join([*([syntax] if problems else []), *endings])
        else:
            message = " ".join([say("read"), *(say(name) for name in _ALSO if counted[name])])
        return CheckOutcome(_NAME, not (problems or endings), message, figures=figures)

    def _check_label(
        self,
        pair_id: str,
        ids: np.ndarray,
        turn: CapturedTurn,
        shows_tools: bool,
        tools: Sequence[Any] | None,
        *,
        last: bool,
    ) -> None:
        self._findings.counted["labels"] += 1
        self._findings.counted["prose_lost"] += turn.prose_lost
        ended = len(ids) > 0 and int(ids[-1]) in self._chat.end_ids
        if not ended and not turn.truncated:
            self._fault("lack the end-of-turn token", pair_id, "")
        text = label_text(ids, self._chat)
        body = split_thought(text).rest if turn.capture == "retokenised" else after_think(text)
        if self._form is None:
            self._findings.counted["with_calls"] += bool(turn.calls)
            return
        quotes = turn.capture == "retokenised" and not turn.calls  # a call in code is then quoted, not made
        plain = without_code(body) if quotes and self._form is not FORMS["markdown"] else body
        parsed = self._form.parse(plain)
        self._findings.counted["with_calls"] += bool(parsed)
        self._findings.counted["in_form"] += bool(turn.calls) or (shows_tools and bool(parsed))
        offered = {tool_name(tool) for tool in tools or ()}
        strange = [call.name for call in parsed if isinstance(call, Call) and call.name not in offered]
        if offered and None not in offered and strange and not self._chat.calls_in_content:
            self._findings.counted["not_offered"] += 1
            self._findings.not_offered.update(strange)
            self._hit(pair_id, "not_offered", f"calls {strange[0]}, which its prompt does not offer", strange[0])
        if turn.calls:
            self._findings.counted["calls_without_tools"] += not tools
            self._findings.counted["calls_unshown"] += (
                bool(tools) and not shows_tools and not self._chat.calls_in_content
            )
            if not self._form.same(parsed, turn.calls):
                self._fault(f"are not read back as the captured calls by the {self._form.name} parser", pair_id, body)
            else:
                self._compare_with_template(pair_id, turn.calls, tools, text)
        elif shows_tools and (problem := self._wrong_syntax(body, parsed, acts=not last, quotes=quotes)):
            self._fault(problem, pair_id, body)

    def _compare_with_template(
        self, pair_id: str, calls: Sequence[Call], tools: Sequence[Any] | None, text: str
    ) -> None:
        if self._findings.counted["rendered"] >= self.most_rendered:
            return
        self._findings.counted["rendered"] += 1
        written = self._chat.decode(self._chat.without_end(self._chat.turn_ids("", calls, tools=tools))).strip()
        if not text.rstrip().endswith(written):
            self._fault("are not what the template itself writes for the same calls", pair_id, text)

    def _wrong_syntax(self, body: str, parsed: Sequence[Call | str], *, acts: bool, quotes: bool) -> str | None:
        """Return what is wrong with a label whose prompt asks for calls in the template's form, None if nothing is.

        Args:
            acts: whether the conversation goes on, so that a fenced command was run; an answer may show one.
            quotes: whether calls of other forms in code are quoted.
        """
        assert self._form is not None
        if any(isinstance(call, Call) for call in parsed):
            return None
        for form in FORMS.values():
            fenced = form is FORMS["markdown"]
            text = without_code(body) if quotes and not fenced else body
            marked = form.marker in text if form.marker else acts and fenced
            if form is self._form or not marked:
                continue
            if any(isinstance(call, Call) for call in form.parse(text)):
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
        self._findings.faults[kind] += 1
        self._hit(pair_id, "syntax" if text else "no_end", f"{kind}: {text[-_TEXT:]!r}" if text else kind)
        if self._findings.faults[kind] <= _SHOWN:
            shown = f"{pair_id}: {text[-_TEXT:]!r}" if text else pair_id
            self._findings.examples.setdefault(kind, []).append(shown)
