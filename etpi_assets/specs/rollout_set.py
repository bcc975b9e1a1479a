"""What a rollout set's spec may say: who rolls out which tasks in which loop, and what is read out of it.

Belongs here: every knob, its default, bounds and meaning. Does not belong here: reading files (`specs.load`) or acting
on a knob.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from etpi_assets.specs.section import Omitted, Section
from etpi_resources.chat.grammars import SLOTS, ThinkGrammar


class TinySection(Section):
    """The embedded base model: its size, its corpus, its pretraining. A Qwen3-architecture model from scratch."""

    world: Literal["arithmetic_tiny", "coop_tiny", "repo_fix_tiny"] = Field(
        default="coop_tiny", description="whose templated conversations and exercises it grows up on"
    )
    hidden: int = 128
    intermediate: int = 384
    layers: int = 3
    heads: int = 4
    head_dim: int = 64
    positions: int = 4096
    conversations: int = Field(default=1400, ge=1, description="of the templated corpus, one an agent")
    exercises: int = Field(default=2800, ge=0, description="a task and its right edit, nothing between")
    epochs: float = Field(default=1.0, gt=0)
    batch_tokens: int = Field(default=8192, description="tokens of one step, padding included")
    matrix_rate: float = Field(default=0.015, description="Muon's, for the matrices")
    rate: float = Field(default=2e-3, description="AdamW's, for everything else")
    reading_weight: float = Field(default=0.1, gt=0, le=1, description="loss weight of what others wrote")
    seed: int = 0


TINY = "tiny"
"""The engine model that is built here."""


_MEANS = {
    "sha256": ("transformers", "vllm"),
    "urls": ("vllm", "openai"),
    "api_key_env": ("vllm", "openai"),
    "request": ("vllm",),
    "template_kwargs": ("vllm", "openai"),
    "options": ("vllm",),
    "tiny": ("transformers",),
}
"""Which kinds of engine a key of `[engine]` is read for; elsewhere it would be ignored in silence."""


class EngineSection(Section):
    """Which model or policy acts (docs/engines.md). `skill` belongs to scripted policies; the rest to models."""

    kind: Literal["scripted", "reference", "null", "transformers", "vllm", "openai"]
    teacher: str = Field(description="the name it goes by in lineage")
    model: str | None = Field(
        default=None,
        description="checkpoint:HASH of this lake, hub:REPO@COMMIT, a folder, or tiny: the base built here from "
        "[engine.tiny]; with `urls`: the name it is served by",
    )
    tiny: TinySection | None = Field(default=None, description='transformers with model = "tiny": which base')
    sha256: str | None = Field(default=None, description="content hash of a folder that `model` names")
    urls: tuple[str, ...] = Field(default=(), description="vllm: servers that run already; openai: the one base URL")
    api_key_env: str | None = Field(default=None, description="NAME of the environment variable that holds the key")
    request: Literal["tokens", "chat"] = Field(
        default="tokens", description="vllm: ids in and out, or messages behind the server's template, ids captured"
    )
    template_kwargs: dict[str, Any] = Field(default_factory=dict, description="chat requests: the template's arguments")
    options: dict[str, Any] = Field(default_factory=dict, description="vllm started here: options of `vllm serve`")
    timeout: float = Field(default=600.0, gt=0, description="seconds a request may take")
    skill: dict[str, float] = Field(default_factory=dict)
    noncanonical: float = Field(
        default=0.1,
        ge=0,
        le=1,
        description="scripted: share of splittable tokens spelt otherwise than the tokenizer would",
    )

    @model_validator(mode="after")
    def _kind_has_what_it_needs(self) -> EngineSection:
        if self.api_key_env is not None and not re.fullmatch(r"[A-Z][A-Z0-9_]*", self.api_key_env):
            raise ValueError("api_key_env is the NAME of an environment variable (capitals), never the key itself")
        if self.kind in ("transformers", "vllm", "openai") and not self.model:
            raise ValueError(f'engine.kind = "{self.kind}" needs `model`')
        if self.kind == "openai" and len(self.urls) != 1:
            raise ValueError('engine.kind = "openai" needs one base URL in `urls`, as https://host/v1')
        for name, kinds in _MEANS.items():
            if self.kind not in kinds and getattr(self, name) != type(self).model_fields[name].get_default(
                call_default_factory=True
            ):
                raise ValueError(f'engine.{name} means nothing for engine.kind = "{self.kind}", only for {kinds}')
        if (self.tiny is not None) != (self.kind == "transformers" and self.model == TINY):
            raise ValueError('a base built here takes both engine.model = "tiny" and a section [engine.tiny]')
        if self.urls and self.options:
            raise ValueError("`options` are of a server that is started here; one in `urls` runs already")
        return self


class GrammarSection(Section):
    """A think block of named slots, one line each (`etpi_resources.chat.grammars`)."""

    slots: tuple[str, ...] = SLOTS
    max_chars: int | dict[str, int] | None = Field(
        default=None, description='the most characters of a line: of each, or by slot; "none": no bound'
    )

    @model_validator(mode="after")
    def _is_one(self) -> GrammarSection:
        self.grammar()
        return self

    def grammar(self) -> ThinkGrammar:
        return ThinkGrammar.of(self.slots, self.max_chars)


Tool = Literal["bash", "send_message", "code_interpreter"]


class AgentSection(Section):
    """The agent loop: prompt, tokenizer, budgets, sampling."""

    prompt: str = Field(default="coop", description="a folder of prompt templates under etpi_assets/agent/prompts")
    tokenizer: str = "tiny"
    steering: bool = Field(default=False, description="whether the plan-first protocol stands in the system prompt")
    tools: Annotated[tuple[Tool, ...], Omitted(())] = Field(
        default=(), description="tools whose schemas the chat template gets (`etpi_assets/agent/tools.py`)"
    )
    history_think: Literal["keep", "strip"] = Field(
        default="keep", description="token-in/token-out keeps the ids; strip forks"
    )
    compact_after: Annotated[int | None, Omitted(None)] = Field(
        default=None,
        ge=1,
        description="turns after which a summary of what was done takes the place of the conversation so far, again "
        'and again; "none": never',
    )
    action_format: Annotated[Literal["any", "thinking_bash", "tool_or_answer"], Omitted("any")] = Field(
        default="any",
        description="what a turn may be written in; thinking_bash: the terminal prompt contract alone; tool_or_answer: "
        "a turn without a <tool_call> is the agent's answer, and its last",
    )
    max_steps: int = Field(default=12, ge=1, description="assistant turns; where there is one only, it submits")
    max_model_len: int = Field(default=2048, ge=64)
    max_tokens: int = Field(default=256, ge=8)
    temperature: float = Field(default=1.0, ge=0)
    top_p: float = Field(default=1.0, gt=0, le=1)
    grammar: Annotated[GrammarSection | None, Omitted(None)] = Field(
        default=None, description='what a model\'s think block must look like; "none": free'
    )

    def identity(self) -> dict[str, Any]:
        """What of this section identifies a rollout: all of it."""
        return self.model_dump(mode="json")


class ScoringSection(Section):
    """How behaviours are read (DESIGN section 5). Patterns are regular expressions."""

    path_pattern: str = (
        r"(?<![\w/.-])/?(?:[\w.-]+/)*[\w.-]*[\w-]\.(?:py|go|ts|tsx|js|jsx|rs|c|h|cpp|md|toml|cfg|yaml|yml|json|txt)\b"
    )
    function_pattern: str = r"\b[A-Za-z_]\w*_\w+(?=\(|`|\b)"
    keywords: tuple[str, ...] = ("plan", "split", "you", "I'll", "first", "step")
    window: int | None = Field(
        default=None, description='bash turns after the plan that count for follow_through; "none": all'
    )
    message_commands: tuple[str, ...] = ("send_message",)
    structure: GrammarSection | None = Field(
        default=None,
        description='what think blocks are held against, grammar or not; "none": the agent section\'s grammar, if any',
    )


class TemplatedSection(Section):
    """Plan-first conversations written out for every task, as text (`rollouts.templated.plan_first`)."""

    paths: Literal["fixed", "task"] = Field(
        default="task", description="the two files a plan names: of one fixed list, or of the task's own texts"
    )
    roles: Literal["both", "proposer"] = Field(default="both", description="whose conversations the set holds")
    second: Literal["plan", "wait"] = Field(
        default="plan",
        description="what the second agent opens with: a plan of its own, or a wait for the first one's, which it then "
        "acknowledges with both paths",
    )
    calls: Literal["inline", "runtime"] = Field(
        default="runtime", description="a call's tags on one line, or on lines of their own as the prompt shows them"
    )


class RolloutSetSpec(Section):
    """Rollouts of one kind: live (suite + engine + agent + K), imported (format + path), or templated (as live with a
    scripted engine, in emulated workspaces and without verdicts; with a [templated] section, written from a template
    for tasks of any suite)."""

    title: str
    kind: Literal["live", "imported", "templated"]
    suite: str | None = None
    split: Literal["train", "heldout", "all"] = "train"
    tasks: int | None = Field(default=None, ge=1, description='the first N tasks of the split; "none": all')
    k: int = Field(default=1, ge=1, description="rollouts a task")
    seed: int = 0
    sandbox: Literal["bubblewrap", "docker"] = "bubblewrap"
    engine: EngineSection | None = None
    agent: AgentSection = AgentSection()
    templated: TemplatedSection | None = Field(
        default=None, description='templated: which template; "none": what the suite\'s scripted policy says'
    )
    format: str = Field(default="auto", description="imported: a format of docs/formats.md, or auto")
    path: str | None = Field(default=None, description="imported: folder; ${VARIABLE} is taken from the environment")
    options: dict[str, Any] = Field(default_factory=dict, description="the importer's or generator's own knobs")
    license: str = Field(default="", description="imported: the data's licence, for the model card")
    scoring: ScoringSection = ScoringSection()
    notes: str = ""

    @model_validator(mode="after")
    def _kind_has_what_it_needs(self) -> RolloutSetSpec:
        if self.kind != "imported" and (self.suite is None or self.engine is None):
            raise ValueError(f"a {self.kind} rollout set needs `suite` and an [engine] section")
        if self.kind == "templated" and self.engine and self.engine.kind != "scripted":
            raise ValueError('a templated rollout set is written by a script: engine.kind = "scripted"')
        if self.templated and self.kind != "templated":
            raise ValueError('a [templated] section needs kind = "templated"')
        if self.templated and self.engine and self.engine.skill:
            raise ValueError("engine.skill belongs to a scripted policy; a [templated] section has knobs of its own")
        if self.agent.grammar and (self.engine is None or self.engine.kind not in ("transformers", "vllm")):
            raise ValueError('agent.grammar binds a model\'s tokens: it needs engine.kind = "transformers" or "vllm"')
        if self.kind == "imported" and self.path is None:
            raise ValueError("an imported rollout set needs `path`")
        return self
