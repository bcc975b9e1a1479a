"""Find keys and tokens in a rollout by the forms that their issuers document; mask them, or quarantine the rollout.

A mask is never trained: a turn that wrote the key becomes context. Passwords and keys without a form of their own are
not found.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

from etpi_assets.importers.format import ImportResult
from etpi_assets.tasks.family import RejectedInput
from etpi_assets.trajectories.records import AgentRecord, RolloutRecord

_SHORTEST, _SHORT = 10, 400
"""Characters that a secret has at least, and those of a text whose kinds are cached."""
CHOICES = ("keep", "mask", "quarantine")
_PREFIXES = """
    ABSK AGE-SECRET-KEY-1 AKCp CLOJARS_ EAAA EAAM EZAK EZTK FLWSECK GR1348941 HRKU- LTAI NRAK- PMAK- api_org_
    bedrock-api-key- dapi dckr_pat_ doo_v1_ dop_v1_ dor_v1_ dp.pt. dp.st. dt0c01. duffel_live_ duffel_test_ figd_ fio-u-
    fm1a_ fm1r_ fm2_ fo1_ glagent- glc_ glcbt- gldt- glffct- glft- glimt- gloas- glptt- glrt- glsa_ glsoat- gsk_ hvb.
    hvs. ico- lin_api_ ntn_ p8e- pnu_ pplx- pscale_ pul- r8_ rdme_ rubygems_ s-s4t2 sha256~ shippo_ shpat_ shpca_ shppa_
    shpss_ sk-or-v1- sm_aat_ sm_pat_ sm_sat_ sntrys_ sntryu_ sq0atp- sq0csp- tk-us- tskey- tvly- xai- xkeysib-
"""
"""Beginnings of the keys of smaller issuers."""
_PRIVATE = "[A-Z ]*PRIVATE KEY(?: BLOCK)?-----"
_FORMS = {
    "Anthropic key": (("sk-ant-",), r"sk-ant-[a-z]+\d*-[\w-]{20,}"),
    "OpenAI key": (("T3BlbkFJ", "sk-proj-", "sk-svcacct-"), r"sk-(?:[\w-]+T3BlbkFJ[\w-]+|(?:proj|svcacct)-[\w-]{20,})"),
    "GitHub token": (("ghp_", "gho_", "ghu_", "ghs_", "ghr_", "github_pat_"), r"gh[pousr]_\w{36,}|github_pat_\w{22,}"),
    "GitLab token": (("glpat-",), r"glpat-[\w-]{20,}"),
    "AWS key": (("AKIA", "ASIA", "ABIA", "ACCA"), r"\b(?:AKIA|ASIA|ABIA|ACCA)[A-Z0-9]{16}\b"),
    "Google key": (("AIza", "GOCSPX-"), r"\bAIza[\w-]{35}|GOCSPX-[\w-]{28}"),
    "Hugging Face token": (("hf_",), r"\bhf_[A-Za-z]{34}\b"),
    "Slack token": (("xox", "xapp-"), r"xox[abeoprs]-[\w-]{10,}|xapp-\d-[\w-]{10,}"),
    "Slack webhook": (("hooks.slack.com",), r"hooks\.slack\.com/(?:services|workflows)/[\w/+-]{20,}"),
    "Stripe key": (("k_live_", "k_test_"), r"[rs]k_(?:live|test)_\w{20,}"),
    "Telegram token": ((":AA",), r"\b\d{8,10}:AA[\w-]{33}\b"),
    "Twilio key": (("SK",), r"\bSK[0-9a-f]{32}\b"),
    "npm token": (("npm_", "_authToken="), r"\bnpm_\w{36}\b|(?<=_authToken=)[\w-]{20,}"),
    "PyPI token": (("pypi-AgE",), r"pypi-AgE[\w-]{50,}"),
    "SendGrid key": (("SG.",), r"\bSG\.[\w-]{22}\.[\w-]{43}"),
    "JSON web token": (("eyJ",), r"\beyJ[\w-]{10,}\.eyJ[\w-]{10,}\.[\w-]{10,}"),
    "private key": (
        ("PRIVATE KEY",),
        rf"-----BEGIN {_PRIVATE}(?:\s|\\+[nr])*[\w+/]{{4}}.*?(?:-----END {_PRIVATE}|\Z)",
    ),
    "password in a URL": (("://",), r"(?<=://)[^\s/:@'\"]{1,64}:[^\s/:@'\"${}<>*]{3,128}(?=@[\w.-])"),
    "other token": (
        ("",),
        # Seven letters and digits in a row, one a digit, are no words between hyphens.
        rf"(?<![\w.-])(?=[\w.~-]{{20}})(?:{'|'.join(map(re.escape, _PREFIXES.split()))})"
        r"(?=[\w.~+/=-]*?(?=[A-Za-z0-9]{0,6}\d)[A-Za-z0-9]{7})[\w.~+/=-]+",
    ),
}
"""Kind -> (texts of which every secret of the kind holds one, its form)."""
_PATTERNS = {kind: (parts, re.compile(form, re.DOTALL)) for kind, (parts, form) in _FORMS.items()}


def found(record: RolloutRecord) -> Counter[str]:
    """Count the secrets of each kind in a rollout's messages, schemas, patches, error and outcome."""
    counts = Counter[str]()
    for agent in record.agents:
        for message in agent.messages:
            _masked([message.content, message.reasoning, message.tool_calls], counts)
        _masked(agent.patch, counts)
    _masked([record.tools, record.error, record.outcome], counts)
    return counts


def without_secrets(item: ImportResult, choice: str) -> ImportResult:
    """Return the rollout with its secrets masked, or its refusal; that of a reader is masked unless the choice is
    "keep". `choice`: one of CHOICES."""
    if choice == "keep":
        return item
    if isinstance(item, RejectedInput):
        return replace(item, detail=_masked(item.detail, Counter()))
    if not (counts := found(item)):
        return item
    words = ", ".join(f"{number} {kind}" for kind, number in sorted(counts.items()))
    remedy = 'replace them, or take options.secrets = "mask"'
    if choice == "mask":
        # Secrets outside of the conversation can be masked beside token ids too.
        error, outcome = _masked([item.error, item.outcome], Counter())
        item = replace(item, error=error, outcome=outcome)
        if not found(item):
            return item
        ids = any(turn.output_ids is not None for agent in item.agents for turn in agent.turns)
        agents = [_masked_agent(agent) for agent in item.agents]
        if not ids and any(agent.turns for agent in agents):
            return replace(item, agents=agents, tools=_masked(item.tools, Counter()))
        remedy = "token ids cannot be masked" if ids else "every turn wrote one, and a mask is not trained"
    name, _, row = (item.source or "").rpartition("#")
    unit, number = (name, int(row)) if name and row.isdecimal() else (item.source or "", None)
    return RejectedInput(unit, "secrets", f"it holds {words}; {remedy}", number)


def _masked_agent(agent: AgentRecord) -> AgentRecord:
    """Return an agent with masks; its turns that wrote a secret are context."""
    written = [(t.turn, [t.content, t.reasoning, *(a.command for a in t.actions)]) for t in agent.turns]
    written += [(m.turn, m.tool_calls) for m in agent.messages if m.role == "assistant" and m.turn is not None]
    wrote = {turn for turn, texts in written if _masked(texts, Counter()) != texts}
    messages, last = [], None
    for message in agent.messages:
        is_context = message.turn is None or message.turn in wrote
        last = last if is_context else message.turn
        content, reasoning, calls = _masked([message.content, message.reasoning, message.tool_calls], Counter())
        turn = None if is_context and message.role == "assistant" else last
        kind = "other" if turn is None and message.kind == "action" else message.kind
        texts = {"content": content, "reasoning": reasoning, "tool_calls": calls}
        messages.append(replace(message, turn=turn, kind=kind, **texts))
    turns = []
    for turn in (turn for turn in agent.turns if turn.turn not in wrote):
        observation, inbox = _masked([turn.observation, turn.inbox], Counter())
        turns.append(replace(turn, observation=observation, inbox=inbox))
    return replace(agent, messages=messages, turns=turns, patch=_masked(agent.patch, Counter()))


def _masked(value: Any, counts: Counter[str]) -> Any:
    """Return a value with its secrets masked, also within lists and objects; add their numbers to `counts`."""
    if isinstance(value, str):
        # The strings of schemas are the same in every row.
        for kind, pattern in () if len(value) < _SHORTEST else (_cached if len(value) < _SHORT else _candidates)(value):
            value, number = pattern.subn(f"[masked {kind}]", value)
            if number:
                counts[kind] += number
        return value
    if isinstance(value, dict):
        return {_masked(key, counts): _masked(inner, counts) for key, inner in value.items()}
    return [_masked(inner, counts) for inner in value] if isinstance(value, list) else value


@lru_cache(maxsize=1 << 10)
def _cached(text: str) -> Sequence[tuple[str, re.Pattern[str]]]:
    """Return the kinds of which a short text has a secret."""
    return [(kind, pattern) for kind, pattern in _candidates(text) if pattern.search(text)]


def _candidates(text: str) -> Iterator[tuple[str, re.Pattern[str]]]:
    """Yield the kinds of which the text may hold a secret; a search of fixed texts is far faster than of patterns."""
    for kind, (parts, pattern) in _PATTERNS.items():
        if any(part in text for part in parts):
            yield kind, pattern
