"""The spec of a rollout set: which engine acts on which tasks in which agent loop, and how its behaviour is scored."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

from pydantic import AliasChoices, Field, field_validator, model_validator

from etpi_assets.specs.harness import HarnessSection, with_harness
from etpi_assets.specs.plugins import plugin_names, unknown
from etpi_assets.specs.prompts import fault_of, shipped_prompts, shipped_templates
from etpi_assets.specs.section import Omitted, Section
from etpi_resources.chat.grammars import SLOTS, ThinkGrammar
from etpi_resources.engines.vllm_options import require_allowed


class TinySection(Section):
    """The embedded base model, a Qwen3 architecture trained from scratch: its size, its corpus, its pretraining."""

    world: str = Field(default="coop_tiny", examples=["coop_tiny_shared"])
    """The embedded world whose conversations and exercises the model is pretrained on."""
    hidden: int = 128
    """Hidden size."""
    intermediate: int = 384
    """Width of the MLP."""
    layers: int = 3
    """Number of transformer layers."""
    heads: int = 4
    """Number of attention heads; as many key and value heads."""
    head_dim: int = 64
    """Size of one attention head."""
    positions: int = 4096
    """Longest sequence the model takes, in tokens."""
    conversations: int = Field(default=1400, ge=1)
    """Templated conversations in the corpus, one per agent."""
    exercises: int = Field(default=2800, ge=0)
    """Exercises in the corpus: a task followed at once by its correct edit."""
    epochs: float = Field(default=1.0, gt=0)
    """Passes over the corpus."""
    batch_tokens: int = 8192
    """Tokens of one optimiser step, padding included."""
    muon_lr: float = Field(
        default=0.015, validation_alias=AliasChoices("muon_lr", "matrix_rate"), serialization_alias="matrix_rate"
    )
    """Learning rate of Muon, which trains the weight matrices."""
    adamw_lr: float = Field(default=2e-3, validation_alias=AliasChoices("adamw_lr", "rate"), serialization_alias="rate")
    """Learning rate of AdamW, which trains embeddings and all other parameters."""
    reading_weight: float = Field(default=0.1, gt=0, le=1)
    """Loss weight of tokens that the model reads (prompts, observations); its own turns have weight 1."""
    seed: int = 0
    """Seed of the initial weights, the corpus and the order of the data."""


TINY = "tiny"
"""The value of `engine.model` that names the base built here."""


_READ_BY = {
    "sha256": ("transformers", "vllm"),
    "urls": ("vllm", "openai"),
    "api_key_env": ("vllm", "openai"),
    "request": ("vllm",),
    "template_kwargs": ("vllm", "openai"),
    "options": ("vllm",),
    "tiny": ("transformers",),
}
"""The kinds of engine that read a key of `[engine]`; other kinds refuse the key instead of ignoring it."""


ENGINE_KINDS = ("scripted", "reference", "null", "transformers", "vllm", "openai")
"""The kinds of engine that etpi gives; plugins give others."""


def checked_url(url: str) -> str:
    """Return the URL of a server. Raises ValueError: it is none, or contains a user or a password."""
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.port == 0:  # `port` raises as well
        raise ValueError("a URL has the form http://HOST:PORT or https://HOST/PATH")
    if parts.username is not None or parts.password is not None:
        raise ValueError(
            f"the URL of {parts.hostname} contains a user or password, which every rollout would record; put "
            "the key into an environment variable and name that in engine.api_key_env"
        )
    return url


class EngineSection(Section):
    """The model or policy that acts (docs/engines.md). `skill` and `noncanonical` are read by scripted policies, the
    keys below `teacher` by models."""

    kind: str
    """The acting program: a `scripted` policy of the suite's family, the `reference` solution, a `null` policy that
    submits nothing, a model through `transformers`, `vllm` or an `openai` endpoint, or the name of a plugin
    (docs/own_tasks.md)."""
    teacher: str
    """The name of the model or policy in lineage and reports."""
    model: str | None = Field(default=None, examples=["hub:Qwen/Qwen3-0.6B@<commit>"])
    """The model: `checkpoint:HASH` of this lake, `hub:REPO@COMMIT`, a folder, or `tiny` for the base of
    [engine.tiny]; with `urls`, the name under which the server offers it."""
    tiny: TinySection | None = None
    """The tiny base, for `kind = "transformers"` with `model = "tiny"`."""
    sha256: str | None = None
    """Content hash of the folder that `model` names; a folder with other content is refused."""
    urls: tuple[str, ...] = Field(default=(), examples=[["http://10.0.0.2:8000", "http://10.0.0.3:8000"]])
    """Servers that already run: any number for vllm, exactly one base URL for openai."""
    api_key_env: str | None = Field(default=None, examples=["OPENAI_API_KEY"])
    """NAME of the environment variable that holds the API key; never the key itself."""
    request: Literal["tokens", "chat"] = "tokens"
    """Form of requests to vllm: `tokens` sends and receives token ids; `chat` sends messages to the server's chat
    template and records the ids it reports."""
    template_kwargs: dict[str, Any] = Field(default_factory=dict)
    """Arguments of the server's chat template, for chat requests."""
    options: dict[str, Any] = Field(default_factory=dict, examples=[{"tensor-parallel-size": 2}])
    """Options of `vllm serve`, for a server that etpi starts."""
    allow_code: Annotated[bool, Omitted(False)] = False
    """Take `options` that run code of the model's folder or of other files; also start with `etpi run --allow-code`."""
    timeout: float = Field(default=600.0, gt=0)
    """Seconds that one request may take."""
    skill: dict[str, float] = Field(default_factory=dict)
    """Probabilities of a scripted policy by name, such as how often it plans first; the policy lists its own."""
    noncanonical: float = Field(default=0.1, ge=0, le=1)
    """Scripted policies: the share of splittable tokens that are spelt as two shorter tokens, as models sometimes
    write them."""

    @field_validator("urls")
    @classmethod
    def _urls_hold_no_password(cls, urls: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(map(checked_url, urls))

    def faults(self) -> Iterator[str]:
        if self.api_key_env is not None and not re.fullmatch(r"[A-Z][A-Z0-9_]*", self.api_key_env):
            yield "api_key_env is the NAME of an environment variable (capitals), never the key itself"
        if self.kind in ("transformers", "vllm", "openai") and not self.model:
            yield f'engine.kind = "{self.kind}" needs `model`'
        if self.kind == "openai" and len(self.urls) != 1:
            yield 'engine.kind = "openai" needs one base URL in `urls`, as https://host/v1'
        if self.kind not in ENGINE_KINDS:
            if self.kind not in plugin_names("engine"):
                yield unknown("engine", self.kind, ENGINE_KINDS)
            return  # a plugin reads the keys that it needs
        for name, kinds in _READ_BY.items():
            if self.kind not in kinds and getattr(self, name) != type(self).model_fields[name].get_default(
                call_default_factory=True
            ):
                yield f'engine.{name} means nothing for engine.kind = "{self.kind}", only for {kinds}'
        if (self.tiny is not None) != (self.kind == "transformers" and self.model == TINY):
            yield 'a base built here takes both engine.model = "tiny" and a section [engine.tiny]'
        if self.urls and self.options:
            yield "`options` are of a server that is started here; one in `urls` runs already"
        require_allowed(self.options, self.allow_code)


class ServerSection(Section):
    """The engine that generates from weights that no spec names: served checkpoints, and a policy in training."""

    engine: Literal["transformers", "vllm"] = "transformers"
    """The generating program: `transformers`, in the process with the weights, or a `vllm` server that etpi starts."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Options of `vllm serve`, for `engine = "vllm"` alone; among them the tool and reasoning parsers."""
    allow_code: Annotated[bool, Omitted(False)] = False
    """Take `options` that run code of the model's folder or of other files; also start with `etpi run --allow-code`."""

    def faults(self) -> Iterator[str]:
        if self.options and self.engine == "transformers":
            yield 'options are of `vllm serve`: they need engine = "vllm" or "auto" beside them'
        require_allowed(self.options, self.allow_code)


class GrammarSection(Section):
    """A think block of named slots, one line each (docs/structured_cot.md)."""

    slots: tuple[str, ...] = SLOTS
    """Names of the lines, in order."""
    max_chars: int | dict[str, int] | None = None
    """Most characters of a line: one number for every slot, or a table by slot; "none": no bound."""

    @model_validator(mode="after")
    def _is_a_grammar(self) -> GrammarSection:
        self.grammar()
        return self

    def grammar(self) -> ThinkGrammar:
        """Return the grammar of these slots and bounds."""
        return ThinkGrammar.of(self.slots, self.max_chars)


Tool = Literal["bash", "send_message", "code_interpreter", "code_interpreter_published"]


class AgentSection(Section):
    """The agent loop: prompt, tokenizer, budgets, sampling."""

    prompt: str = "coop"
    """The prompt: one that comes with etpi (`etpi_assets/agent/prompts`), an embedded world's, or a folder
    `prompts/NAME` of your specs folder (docs/own_tasks.md)."""
    templates: Annotated[dict[str, str] | None, Omitted(None)] = None
    """The texts of a prompt of your own: `user`, and where it has them `system` and `steering`. They are read from the
    folder that `prompt` names, and are part of the resolved spec."""
    tokenizer: str = "tiny"
    """Chat format that renders prompts and counts tokens: `tiny`, `qwen3`, a local folder, `hub:<repo>@<commit>` or
    `package:<name>==<version>@<sha256>`."""
    steering: bool = False
    """Append the plan-first protocol to the system prompt."""
    tools: Annotated[tuple[Tool, ...], Omitted(())] = ()
    """Tools whose schemas the chat template gets; none: the prompt's text says how to act. `code_interpreter_published`
    is offered as `code_interpreter` too, and every call is a separate program, as in verl's agents (docs/rl.md)."""
    messages: Annotated[Literal["delivered", "suppressed"], Omitted("delivered")] = "delivered"
    """Delivery of messages between agents; `suppressed`: agents can send messages as
    usual, but none arrives, to measure what messages contribute."""
    history_think: Literal["keep", "strip"] = "keep"
    """Think blocks of earlier turns in later prompts: `keep` leaves the token ids as generated; `strip` removes them,
    so that the prompt forks from the last turn."""
    compact_after: Annotated[int | None, Omitted(None)] = Field(default=None, ge=1)
    """Turns after which a summary of the work replaces the conversation so far, repeatedly; "none": never."""
    action_format: Annotated[Literal["any", "tool_call", "thinking_bash", "tool_or_answer"], Omitted("any")] = "any"
    """Forms of a turn that the loop reads: `any` known form; `tool_call`, calls alone, and no fenced block;
    `thinking_bash`, one thinking block and one bash block; `tool_or_answer`, where a turn without a `<tool_call>` is
    the final answer."""
    max_format_errors: Annotated[int | None, Omitted(3)] = Field(default=3, ge=1)
    """Turns in a row without a readable action that end an agent (FormatError); "none": it is asked again until its
    budget ends."""
    max_steps: int = Field(default=12, ge=1)
    """Most assistant turns of an agent; with 1, the only turn also submits."""
    max_model_len: int = Field(default=2048, ge=64)
    """Most tokens of prompt and output together; [rl] ignores it and uses `max_response_tokens`."""
    max_tokens: int = Field(default=256, ge=8)
    """Most tokens of one turn's output."""
    temperature: float = Field(default=1.0, ge=0)
    """Sampling temperature; 0 is greedy. In [evaluate] each decoding sets its own."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    """Nucleus sampling: the probability mass sampled from. In [evaluate] each decoding sets its own."""
    grammar: Annotated[GrammarSection | None, Omitted(None)] = None
    """Grammar that a model's think block is constrained to while decoding; "none": unconstrained."""
    harness: Annotated[HarnessSection | None, Omitted(None)] = None
    """The foreign harness that acts instead of the agent loop; write it as [harness] of a rollout set, or as
    [evaluate.harness]."""

    @field_validator("templates")
    @classmethod
    def _can_be_filled(cls, templates: dict[str, str] | None) -> dict[str, str] | None:
        if templates is not None and (fault := fault_of(templates)):
            raise ValueError(fault)
        return templates

    def faults(self) -> Iterator[str]:
        shipped = shipped_templates(self.prompt) if self.prompt in shipped_prompts() else {"steering": ""}
        if self.steering and "steering" not in (self.templates or shipped):
            yield f"agent.steering = true, and the prompt {self.prompt!r} has no steering.md; add the file"
        if len(interpreters := [tool for tool in self.tools if tool.startswith("code_interpreter")]) > 1:
            yield f"agent.tools: {' and '.join(interpreters)} have one name in prompts; offer one of them"

    def identity(self) -> dict[str, Any]:
        """Return the part of this section that identifies a rollout: all of it."""
        return self.model_dump(mode="json")


Reading = Literal["hardened", "published"]
"""A reading of plan_first, plan_content and follow_through: ours, or the words of the report that defined them."""


class ScoringSection(Section):
    """Patterns by which behaviours of rollouts are detected, as regular expressions."""

    path_pattern: str = (
        r"(?<![\w/.-])/?(?:[\w.-]+/)*[\w.-]*[\w-]\.(?:py|go|ts|tsx|js|jsx|rs|c|h|cpp|md|toml|cfg|yaml|yml|json|txt)\b"
    )
    """Matches file paths in tasks, messages and commands."""
    function_pattern: str = r"\b[A-Za-z_]\w*_\w+(?=\(|`|\b)"
    """Matches function names in tasks and messages."""
    keywords: tuple[str, ...] = ("plan", "split", "you", "I'll", "first", "step")
    """Words of a plan: plan_content needs two of them in an agent's first message."""
    window: int | None = None
    """Bash turns after the plan that count for follow_through; "none": all."""

    @field_validator("path_pattern", "function_pattern")
    @classmethod
    def _is_a_pattern(cls, pattern: str) -> str:
        try:
            re.compile(pattern)
        except (re.error, RecursionError) as error:
            raise ValueError(f"not a regular expression: {error}") from error
        return pattern

    message_commands: tuple[str, ...] = ("send_message",)
    """Commands that send a message; these words are no function names of a task."""
    structure: GrammarSection | None = None
    """Think-block structure that every turn is compared with, whether or not a grammar enforced it; "none": that of
    agent.grammar, of an evaluation's agent or else of its rollout sets'."""


class TemplatedSection(Section):
    """Plan-first conversations written from text templates for every task (`rollouts.plan_first`)."""

    paths: Literal["fixed", "task"] = "task"
    """The two files that a plan names: `task` takes them from the task's text (from a fixed list where it names
    fewer than two), `fixed` always from that list."""
    roles: Literal["both", "proposer"] = "both"
    """The agents whose conversations the set contains."""
    second: Literal["plan", "acknowledge", "wait"] = "plan"
    """The second agent's opening: its own `plan`; `acknowledge`, a message that accepts the split at once with both
    paths; or `wait`, the same message after the first agent's plan."""
    calls: Literal["inline", "runtime"] = "runtime"
    """Layout of a call: `inline` opens all tags on one line, `runtime` puts each on a separate line, as in the
    prompt."""
    run_tests: Annotated[bool, Omitted(False)] = False
    """If true, an agent runs `pytest` before it submits."""


class RolloutSetSpec(Section):
    """Rollouts of one kind: live, of a foreign agent, imported or templated."""

    title: str
    """One line for people, shown in the catalog."""
    kind: Literal["live", "agent", "imported", "templated"]
    """Source of the rollouts: `live` runs an engine in sandboxes; `agent` runs a foreign harness there, whose model is
    the engine; `imported` reads recorded runs; `templated` writes them from a script, without verdicts."""
    suite: str | None = None
    """The suite whose tasks are rolled out; required unless imported."""
    split: Literal["train", "heldout", "all"] = "train"
    """The split of the suite."""
    tasks: int | None = Field(default=None, ge=1)
    """Only the first N tasks of the split; "none": all."""
    k: int = Field(default=1, ge=1, le=10_000)
    """Rollouts per task."""
    seed: int = 0
    """Seed of sampling, and of a scripted policy's choices."""
    sandbox: Literal["bubblewrap", "docker"] = "bubblewrap"
    """The sandbox of live rollouts (docs/sandboxes.md)."""
    engine: EngineSection | None = None
    """The model or policy that acts; required unless imported."""
    agent: AgentSection = AgentSection()
    """The agent loop; for `kind = "agent"`, only its tokenizer, sampling and budgets of tokens count."""
    harness: Annotated[HarnessSection | None, Omitted(None)] = None
    """The harness of `kind = "agent"`."""
    templated: TemplatedSection | None = None
    """The template of `kind = "templated"`."""
    format: str = Field(default="auto", examples=["swe-agent"])
    """Imported: a format of docs/reference/formats.md, or `auto` to recognise it."""
    path: str | None = Field(default=None, examples=["${ETPI_TRAJECTORIES}/swe-agent"])
    """Imported: the file or folder to read; `${VARIABLE}` is replaced from the environment."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Imported: the importer's options (docs/reference/formats.md)."""
    license: str = ""
    """Imported: the licence of the data, for the model card."""
    scoring: ScoringSection = ScoringSection()
    """Patterns by which behaviours of the rollouts are detected."""
    notes: str = ""
    """Free text for people."""

    @model_validator(mode="before")
    @classmethod
    def _agent_has_the_harness(cls, values: Any) -> Any:
        return with_harness(values)

    def faults(self) -> Iterator[str]:
        if (self.kind == "agent") != (self.agent.harness is not None):
            yield 'kind = "agent" and a section [harness] belong together'
        if self.agent.harness and self.engine and self.engine.kind == "openai":
            yield 'a harness is captured token for token, and engine.kind = "openai" gives no token ids'
        if self.kind != "imported" and (self.suite is None or self.engine is None):
            yield f"a {self.kind} rollout set needs `suite` and an [engine] section"
        if self.templated and self.engine and self.engine.kind != "scripted":
            yield 'a templated rollout set is written by a script: engine.kind = "scripted"'
        if (self.kind == "templated") != (self.templated is not None):
            yield 'kind = "templated" and a section [templated] belong together'
        if self.templated and self.engine and self.engine.skill:
            yield "engine.skill belongs to a scripted policy; a [templated] section has knobs of its own"
        if self.agent.grammar and (self.engine is None or self.engine.kind not in ("transformers", "vllm")):
            yield 'agent.grammar binds a model\'s tokens: it needs engine.kind = "transformers" or "vllm"'
        if self.kind == "imported" and self.path is None:
            yield "an imported rollout set needs `path`"

    @property
    def is_collected(self) -> bool:
        """Return whether a model acts in sandboxes, in the agent loop or in a harness."""
        return self.kind in ("live", "agent")

    @property
    def starts_vllm(self) -> bool:
        """Return whether etpi starts a vLLM server for its rollouts."""
        return self.is_collected and self.engine is not None and self.engine.kind == "vllm" and not self.engine.urls
