"""The `[harness]` section: a foreign agent harness that acts instead of etpi's own agent loop (docs/any_agent.md)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field, model_validator

from etpi_assets.specs.section import Section

if TYPE_CHECKING:
    from etpi_assets.specs.rollout_set import AgentSection, RolloutSetSpec

_CODEX = """\
model = "policy"
model_provider = "etpi"
[model_providers.etpi]
name = "etpi"
base_url = "{base_url}/v1"
env_key = "ETPI_KEY"
wire_api = "responses"
"""
_OPENCODE = """\
{"provider": {"etpi": {"npm": "@ai-sdk/openai-compatible", "name": "etpi",
 "options": {"baseURL": "{base_url}/v1", "apiKey": "{key}"}, "models": {"policy": {}}}}}
"""
_USER = """\
require("os").userInfo = () => ({username: "agent", uid: 1000, gid: 1000, homedir: "/tmp", shell: "/bin/bash"});
require("module").syncBuiltinESMExports();
"""
"""Sandboxes have no /etc/passwd, where Node looks the user up."""

PRESETS: Mapping[str, Mapping[str, Any]] = {
    "mini-swe-agent": {
        "version": "2.4.6",
        "package": "pip:mini-swe-agent",
        "command": "{folder}/venv/bin/mini-swe-agent --yolo --exit-immediately --model openai/policy "
        '--task "$(cat {task_file})" --output /tmp/trajectory.json',
        "env": {
            "OPENAI_API_BASE": "{base_url}/v1",
            "OPENAI_API_KEY": "{key}",
            "MSWEA_CONFIGURED": "true",
            "MSWEA_COST_TRACKING": "ignore_errors",
            "MSWEA_SILENT_STARTUP": "1",
            "LITELLM_LOCAL_MODEL_COST_MAP": "True",
        },
        "memory_gib": 1,
        "address_gib": 8,
    },
    "codex": {
        "version": "0.171.0",
        "package": "npm:@openai/codex",
        "command": "{folder}/node_modules/.bin/codex exec --dangerously-bypass-approvals-and-sandbox "
        '--skip-git-repo-check -- "$(cat {task_file})"',
        "env": {"CODEX_HOME": "/tmp/.codex", "ETPI_KEY": "{key}"},
        "files": {"/tmp/.codex/config.toml": _CODEX},
        "memory_gib": 1,
        "address_gib": 8,
    },
    "claude-code": {
        "version": "2.1.197",
        "package": "npm:@anthropic-ai/claude-code",
        "command": "{folder}/node_modules/.bin/claude --permission-mode=bypassPermissions --print -- "
        '"$(cat {task_file})"',
        "env": {
            "CLAUDE_CONFIG_DIR": "/tmp/.claude",
            "IS_SANDBOX": "1",
            "ANTHROPIC_BASE_URL": "{base_url}",
            "ANTHROPIC_API_KEY": "{key}",
            **dict.fromkeys(
                (
                    "ANTHROPIC_MODEL",
                    "ANTHROPIC_DEFAULT_HAIKU_MODEL",
                    "ANTHROPIC_DEFAULT_SONNET_MODEL",
                    "ANTHROPIC_DEFAULT_OPUS_MODEL",
                    "CLAUDE_CODE_SUBAGENT_MODEL",
                ),
                "policy",
            ),
            "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
            "DISABLE_AUTOUPDATER": "1",
        },
        "memory_gib": 2,
        "address_gib": 64,
        "later_system": True,
    },
    "opencode": {
        "version": "1.18.33",
        "package": "npm:opencode-ai",
        "command": "{folder}/node_modules/opencode-linux-x64/bin/opencode --model=etpi/policy run "
        '--dangerously-skip-permissions -- "$(cat {task_file})"',
        "env": {"OPENCODE_DISABLE_MODELS_FETCH": "1", "OPENCODE_DISABLE_AUTOUPDATE": "1"},
        "files": {"/tmp/.config/opencode/opencode.json": _OPENCODE},
        "memory_gib": 2,
        "address_gib": 600,
    },
    "qwen-code": {
        "version": "0.15.10",
        "package": "npm:@qwen-code/qwen-code",
        "command": '{folder}/node_modules/.bin/qwen --yolo --auth-type openai --model policy -p "$(cat {task_file})"',
        "env": {
            "OPENAI_BASE_URL": "{base_url}/v1",
            "OPENAI_API_KEY": "{key}",
            "OPENAI_MODEL": "policy",
            "NODE_OPTIONS": "--require /tmp/user.cjs",
        },
        "files": {"/tmp/user.cjs": _USER},
        "memory_gib": 2,
        "address_gib": 64,
    },
}
"""Name of a harness -> the values of the keys of its section that a spec does not give."""


class HarnessSection(Section):
    """A foreign agent harness, run unmodified in the task's sandbox; every call it makes to its model is recorded.

    `{folder}`, `{base_url}`, `{key}` and `{task_file}` are replaced in `command`, `env` and `files`."""

    name: Literal["mini-swe-agent", "codex", "claude-code", "opencode", "qwen-code", "custom"]
    """The harness. All but `custom` are presets: they give the keys that the spec does not."""
    version: str
    """The version that has to be installed in `folder`."""
    folder: str = Field(examples=["${ETPI_HARNESSES}/codex"])
    """The folder in which the harness is installed; sandboxes see it, read-only, under the same path. `${VARIABLE}` is
    replaced from the environment."""
    package: str = ""
    """The package whose version is checked: `npm:NAME` below `folder`, or `pip:NAME` in the virtual environment
    `folder`/venv; empty: none."""
    command: str
    """The bash command that runs it in the workspace until the task is done. Never write `{key}` in it: other users of
    the machine see the arguments of processes."""
    env: dict[str, str] = Field(default_factory=dict)
    """Its environment variables."""
    files: dict[str, str] = Field(default_factory=dict)
    """Files that are written before it starts, by absolute path in the sandbox."""
    max_calls: int = Field(default=40, ge=1)
    """Most calls of the model in an attempt; the next one ends the attempt, which is graded."""
    max_output_tokens: int | None = Field(default=None, ge=1)
    """Most output tokens of all calls together; "none": no limit."""
    seconds: float = Field(default=900.0, gt=0)
    """Most seconds of an attempt."""
    helpers: Literal["record", "train"] = "record"
    """Calls of helpers and summaries: `record` keeps their messages, `train` makes turns of them."""
    memory_gib: float = Field(default=2, gt=0)
    """Memory of all processes of the harness and its commands together."""
    address_gib: float = Field(default=64, gt=0)
    """Addresses that each process may reserve, which runtimes such as Node do far beyond the memory they use."""
    later_system: bool = False
    """True: it sends system messages within a conversation, which the student's template then has to take."""

    @model_validator(mode="before")
    @classmethod
    def _preset_gives_the_rest(cls, values: Any) -> Any:
        return {**PRESETS.get(values.get("name", ""), {}), **values} if isinstance(values, dict) else values

    @model_validator(mode="after")
    def _hides_the_key(self) -> HarnessSection:
        if "{key}" in self.command:
            raise ValueError("harness.command contains {key}, and other users see it; use harness.env or harness.files")
        return self

    def filled(self, text: str, values: Mapping[str, str]) -> str:
        """Return a text with the values of its placeholders."""
        for name, value in values.items():
            text = text.replace(f"{{{name}}}", value)
        return text


def with_harness(values: Any) -> Any:
    """Return the keys of a set or an evaluation in which `[agent]` carries the `[harness]` beside it."""
    if not isinstance(values, dict) or not values.get("harness") or values["harness"] == "none":
        return values
    agent = values.get("agent") or {}
    agent = agent if isinstance(agent, dict) else agent.model_dump()
    return {**values, "agent": {**agent, "harness": values["harness"]}}


def harness_difference(evaluated: AgentSection, rollout_sets: Iterable[RolloutSetSpec]) -> str:
    """Return how the harness of an evaluation differs from those of the rollouts; "" if it does not. Imported runs are
    left out, because their harness is unknown."""
    trained = {_shown(each.agent) for each in rollout_sets if each.kind != "imported"}
    if not trained - {_shown(evaluated)}:
        return ""
    return (
        f"is evaluated in {_shown(evaluated)} and trained on rollouts of {', '.join(sorted(trained))}: set "
        "[evaluate.harness] to the same name and version"
    )


def _shown(agent: AgentSection) -> str:
    return f"{agent.harness.name} {agent.harness.version}" if agent.harness else "etpi's own loop"
