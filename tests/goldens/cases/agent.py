"""Turns as actions, observations, prompts, patches, scripted rollouts in bubblewrap, and a harness's calls."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import numpy as np
import pyarrow as pa

from etpi_assets.agent.actions import format_action, read_actions
from etpi_assets.agent.bash import split_command
from etpi_assets.agent.contract import read_turn
from etpi_assets.agent.loop import SUBMIT, Identity, RolloutJob, RolloutRuntime, run_rollout
from etpi_assets.agent.observation import format_observation, format_summary
from etpi_assets.agent.patches import unified_diff
from etpi_assets.agent.prompts import render_prompts
from etpi_assets.agent.tools import TOOLS
from etpi_assets.rollouts.plan_first import ScriptSandboxes, plan_first_engine, run_plan_first
from etpi_assets.rollouts.teachers import POLICIES
from etpi_assets.specs.rollout_set import AgentSection, EngineSection, RolloutSetSpec, TemplatedSection
from etpi_assets.tasks.families import load_family
from etpi_assets.tasks.family import Family, Role, Task, Verdict
from etpi_assets.trajectories.assemble import assemble
from etpi_assets.trajectories.records import Action, AgentRecord, RolloutRecord
from etpi_assets.trajectories.tables import captured_digest, from_tables, iter_prompts, to_tables
from etpi_resources.capture.conversation import output_message
from etpi_resources.capture.dialects import DIALECTS
from etpi_resources.chat.format import load_chat_format
from etpi_resources.chat.tool_forms import Call
from etpi_resources.engines import Request, Sampler
from etpi_resources.engines.scripted import ScriptedEngine
from etpi_resources.sandboxes import CommandResult, Limits
from etpi_resources.sandboxes.bubblewrap import BubblewrapFactory
from tests.goldens.cases.tasks import world
from tests.goldens.golden import case
from tests.support.rollouts import agent, format_message, planning_pair, rollout, run
from tests.support.students import chat_of

TIMES = ("started_at", "wall_seconds", "at")
"""Columns of live rollouts that differ between two runs."""
OWN = {"ids": ("suffix_ids", "output_ids", "prefix_turn", "prompt_tokens", "drift_at", "drift")}


def tables(*records: RolloutRecord) -> dict[str, pa.Table]:
    """Return the tables of live rollouts without times."""
    assert not any(record.error for record in records), [record.error for record in records]
    return {
        name: table.drop_columns([column for column in TIMES if column in table.column_names])
        for name, table in to_tables(records).items()
    }


# --- parsing, observations, prompts -----------------------------------------------------------------------------------

FORMS = ("tool_calls", "xml", "hermes", "fenced", "bracket")
TEXTS = [
    "I look.\n<tool_call>\n<function=bash>\n<parameter=command>\nls -a\n</parameter>\n</function>\n</tool_call>",
    '<tool_call>\n{"name": "bash", "arguments": {"command": "ls"}}\n</tool_call>',
    '<tool_call>\n{"name": "bash", "arguments": {"command": "ls"}\n</tool_call>',
    "<think>\nA plan.\n</think>\n```bash\nls\n```",
    "<think>\nNo end. ```bash\nls\n```",
    "```bash\nls\n```\nand\n```sh\npwd\n```",
    "```python\nprint(1)\n```",
    "Only words.",
    "",
    "<thinking>I count.</thinking>\n```bash\nwc -l a\n```",
    "<thinking>I count.</thinking>\n```bash\nwc -l a\n```\nDone.",
    "send_message agent2 'hi'",
]


def as_row(actions: list[Action], error: str | None) -> dict[str, Any]:
    return {"actions": actions, "error": error}


@case("parsing", "turns")
def turns() -> dict[str, Any]:
    """Actions of each text, and what each form becomes that etpi writes itself."""
    commands = ("ls", "cat > a.py <<'EOF'\nprint(\"x\")\nEOF\npython a.py", "echo 'é ≥'", f"echo {SUBMIT}")
    written = {}
    for form in FORMS:
        for number, command in enumerate(commands):
            text: Any = format_action(command, form)  # type: ignore[arg-type]
            read = read_actions("", text) if isinstance(text, list) else read_actions(text)
            written[f"{form}_{number}"] = {"text": text, "actions": read[0], "error": read[1]}
    formats: Any = ("thinking_bash", "tool_or_answer")
    return {
        "read": [as_row(*read_actions(text)) for text in TEXTS],
        **{
            name: [as_row(*read_turn(text, AgentSection(action_format=name))) for text in TEXTS] for name in formats
        },
        "written": written,
    }  # fmt: skip


@case("parsing", "messages")
def messages() -> list[Any]:
    """Sent messages in each quoting, beside other commands, and commands that only resemble one."""
    text = 'Plan: I\'ll do `src/a.py`, you "b.py" for $5'
    quotings: Any = ("heredoc", "single", "double")
    commands = [format_message("agent2", text, quoting, wait=wait) for quoting in quotings for wait in (None, "after")]
    commands += [
        f"ls && {commands[2]}",
        f"{commands[2]}; ls",
        "echo send_message agent2 x",
        "send_message",
        "send_message a <<X\n",
    ]
    return [
        vars(split_command(command)) if hasattr(split_command(command), "__dict__") else split_command(command)
        for command in commands
    ]


@case("agent", "observations")
def observations() -> list[str]:
    inbox = [{"from": "agent2", "message": "I take a.py"}]
    results = [
        CommandResult("a\nb\n\n", 0, 0.1),
        CommandResult("", 1, 0.1),
        CommandResult("x", 124, 9.0, timed_out=True),
    ]
    return [
        *(format_observation(result) for result in results),
        *(format_observation(result, show_status=False) for result in results),
        format_observation(results[0], inbox, sent_to=["agent2"]),
        format_observation(parse_error="no command found"),
        format_observation(),
        format_summary(["ls", "cat a"], "a"),
    ]


@case("prompts", "prompts")
def prompts() -> dict[str, Any]:
    """The first messages of each prompt, plain and steered, and the schemas of tools."""
    names = {"coop": True, "coop_short": True, "solo": False, "tools": False, "terminal": False}
    task = Task("t1", "s", "harbor", "train", "Moor the boat.", {}, "h")
    role = Role("agent1", "f1", "Moor the boat.", "agent2")
    shown = {name: render_prompts(AgentSection(prompt=name), task, role) for name in names}
    steered = {
        f"{name}_steered": render_prompts(AgentSection(prompt=n, steering=True), task, role)
        for n, s in names.items()
        if s
        for name in [n]
    }
    return {**shown, **steered, "tools": TOOLS}  # fmt: skip


@case("agent", "patches")
def patches() -> list[str]:
    start = {"a.py": "1\n2\n3\n", "b.py": "x", "gone": "y\n"}
    long = "".join(f"line {n}\n" for n in range(400))
    return [
        unified_diff(start, {"a.py": "1\nzwei\n3\n", "b.py": "x\n", "new/é": "z\n"}),
        unified_diff({"a": long}, {"a": long.replace("line 7\n", "sieben\n")}),
        unified_diff(start, start),
    ]


# --- rollouts ---------------------------------------------------------------------------------------------------------


class Pair(Family):
    """Agents with a workspace of two files; an agent that leaves `done` in a.txt passes."""

    def __init__(self, agents: int = 2) -> None:
        self.names = [f"agent{n + 1}" for n in range(agents)]

    def roles(self, task: Task) -> list[Role]:
        partners = {name: other for name, other in zip(self.names, reversed(self.names), strict=True) if name != other}
        return [Role(name, f"f{n}", f"do {name}", partners.get(name)) for n, name in enumerate(self.names)]

    def workspace(self, task: Task, role: Role) -> dict[str, str]:
        return {"a.txt": "start\n", "dir/b.txt": "kept\n"}

    def judge(self, task: Task, final: Mapping[str, Mapping[str, str]], sandboxes: Any) -> Verdict:
        passed = all("done" in files.get("a.txt", "") for files in final.values())
        return Verdict(float(passed), "passed" if passed else "failed_tests", {})


def bash(command: str) -> str:
    return str(format_action(command))


SUBMITS = bash(f"echo {SUBMIT}")


def lines(**turns: list[str]) -> Callable[[Request], str]:
    """Return a policy that says each agent's lines, the last one again and again."""

    def policy(request: Request) -> str:
        said = turns[request.privileged["role"].agent_id]
        return said[min(sum(m["role"] == "assistant" for m in request.messages), len(said) - 1)]

    return policy


def rolled(
    policy: Any, family: Any, task: Task | None = None, noncanonical: float = 0.3, **section: Any
) -> RolloutRecord:
    chat = load_chat_format("tiny")
    engine = ScriptedEngine(policy, chat, "t", noncanonical=noncanonical)
    job = RolloutJob(
        task or Task("t1", "suite", "repo", "train", "do it", {}, "hash"),
        AgentSection(**{"max_tokens": 256, **section}),
        Identity(spec_key="spec", origin="set", engine="scripted", teacher="t"),
    )
    return run_rollout(job, RolloutRuntime(family, engine, BubblewrapFactory(), chat))


ALONE = [
    bash("ls; cat a.txt"), bash("false"), "No action.", bash("echo done > a.txt; printf '\\xff' > raw"),
    bash("seq 5000"), bash("cat dir/b.txt nothing"), SUBMITS,
]  # fmt: skip


@case("agent", "one agent")
def one_agent() -> dict[str, pa.Table]:
    return tables(rolled(lines(agent1=ALONE), Pair(1)))


@case("agent", "two agents")
def two_agents() -> dict[str, pa.Table]:
    first = [bash(format_message("agent2", "I take a.txt")), bash("echo done > a.txt"), SUBMITS]
    second = [bash("ls"), bash(format_message("agent1", "Fine.")), bash("echo done >> a.txt"), "x", SUBMITS]
    return tables(rolled(lines(agent1=first, agent2=second), Pair()))


@case("agent", "ends")
def ends() -> dict[str, Any]:
    """Agents that reach a limit of turns, context or tokens; unreadable turns; compacted and stripped histories."""
    think = f"<think>\nI think.\n</think>\n{bash('ls')}"
    runs = {
        "turns": rolled(lines(agent1=[bash("ls")]), Pair(1), max_steps=3),
        "context": rolled(lines(agent1=[bash("seq 300")]), Pair(1), max_model_len=1500, max_steps=20),
        "output": rolled(lines(agent1=[bash("echo " + "long " * 60)]), Pair(1), max_tokens=24, max_steps=2),
        "unreadable": rolled(lines(agent1=["No action."]), Pair(1), max_steps=9),
        "compacted": rolled(lines(agent1=[*ALONE[:2], bash("ls"), bash("pwd"), SUBMITS]), Pair(1), compact_after=2),
        "stripped": rolled(lines(agent1=[think, think, SUBMITS]), Pair(1), history_think="strip"),
    }
    ends = {name: tables(record) for name, record in runs.items()}
    read = ("content", "observation", "parse_error", "finish_reason", "prefix_turn", "suffix_ids", "output_ids")
    return {
        name: {"exit": table["agents"]["exit_status"], "turns": table["turns"].select(read)}
        for name, table in ends.items()
    }


SKILLS: Mapping[str, tuple[dict[str, Any], dict[str, float]]] = {
    "coop_tiny_shared": ({"steering": True}, {"wrong_edit": 0.5, "markdown": 0.3, "malformed": 0.2}),
    "repo_fix_tiny": ({"prompt": "repo_fix_tiny", "max_steps": 5}, {"compact": 0.5}),
    "running_sum": ({"prompt": "running_sum", "max_model_len": 1024, "max_tokens": 64, "compact_after": 3}, {}),
    "terminal_tiny": (
        {"prompt": "terminal_tiny", "action_format": "thinking_bash", "max_steps": 1},
        {"unformatted": 0.3, "wrong_verb": 0.3},
    ),
    "arithmetic_tiny": (
        {"prompt": "arithmetic_tiny", "tools": ["code_interpreter"], "action_format": "tool_or_answer", "max_steps": 4},
        {"calls": 0.9, "prints": 0.7, "exact": 0.7},
    ),
}  # fmt: skip

for world_name in SKILLS:

    @case(f"family.{world_name}", "scripted rollouts")
    def _(name: str = world_name) -> dict[str, pa.Table]:
        section, skill = SKILLS[name]
        family: Any = load_family(name)
        policy = (POLICIES.get(name) or family.scripted_policy)(skill, 0)
        records = [rolled(policy, family, task, **section) for task in world(name)[:3]]
        return {k: t.drop_columns([c for c in OWN["ids"] if c in t.column_names]) for k, t in tables(*records).items()}


@case("engine.scripted", "token ids")
def scripted_ids() -> dict[str, Any]:
    chat = load_chat_format("tiny")
    text = "I look at `src/harbor.py`.\n" + bash("sed -i s/1/7/ src/harbor.py")
    prompt = [{"role": "user", "content": "Go."}]
    completions = {}
    for share in (0.0, 0.5, 1.0):
        for most in (512, 12):
            request = Request("s/a", "r1", chat.prompt_ids(prompt), prompt, Sampler(1.0, 1.0, most, 3))
            (completion,) = ScriptedEngine(lambda _: text, chat, "t", noncanonical=share).complete([request])
            completions[f"{share}_{most}"] = completion
    return completions


@case("plan_first", "conversations")
def plan_first() -> dict[str, Any]:
    family = load_family("coop_tiny_shared")
    chat = load_chat_format("tiny")
    sections = {
        "default": TemplatedSection(),
        "acknowledged": TemplatedSection(second="acknowledge", paths="fixed", calls="inline"),
        "proposer": TemplatedSection(second="wait", roles="proposer", run_tests=True),
    }
    result = {}
    for name, section in sections.items():
        spec = RolloutSetSpec(
            title="t",
            kind="templated",
            suite="s",
            engine=EngineSection(kind="scripted", teacher="t"),
            templated=section,
        )
        runtime = RolloutRuntime(family, plan_first_engine(spec, family), ScriptSandboxes(), chat)
        identity = Identity(spec_key="k", origin="set", engine="scripted", teacher="t")
        records = [
            run_plan_first(RolloutJob(task, AgentSection(steering=True), identity), runtime, section)
            for task in world("coop_tiny_shared")[:2]
        ]
        result[name] = tables(*records)
    return result


# --- rollouts as tables, sandboxes ------------------------------------------------------------------------------------


@case("rollouts", "tables")
def as_tables() -> dict[str, Any]:
    """Tables of written rollouts: prefixes, a drift, mail; what is read back, and digests."""
    forked = agent("agent1", [run("ls"), run("pwd"), "no action"], role="solo", exit_status="LimitsExceeded")
    for turn, ids in zip(forked.turns, ([1, 2], [1, 2, *[1] * 10, 3], [1, 2, 9, 4]), strict=True):
        turn.prompt_ids, turn.logprobs = ids, [-0.5, -0.25]
    records = [
        planning_pair(),
        rollout(forked, rollout_id="r2", task_id=None, outcome={"reward": None, "verdict": "unknown"}),
    ]
    written = to_tables(records, decode=lambda ids: " ".join(map(str, ids)))
    return {
        **written,
        "prompts": dict(iter_prompts(written["turns"])),
        "same": from_tables(written) == records,
        "digests": [captured_digest(record) for record in records],
    }


COMMANDS = (
    "pwd; ls -a", "echo out; echo err >&2; exit 3", "cat a.txt > c.txt; rm dir/b.txt", "printf '\\xff\\x00é'",
    "seq 100000", "kill -9 $$", "env | cut -d= -f1 | sort", "exit 300", "ln -s a.txt l; mkfifo p; echo x > new/a",
    "false | true; echo $?", "sleep 60 & echo started",
)  # fmt: skip


@case("sandbox.bubblewrap", "commands")
def bubblewrap() -> dict[str, Any]:
    limits = Limits(output_bytes=4096)
    with BubblewrapFactory().create({"a.txt": "start\n", "dir/b.txt": "kept\n"}, limits) as sandbox:
        results = [sandbox.run(command) for command in COMMANDS] + [sandbox.run("sleep 5", timeout=0.2)]
        sandbox.write_files({"new/d.txt": "é\n"})
        files = sandbox.read_files()
    rows = [{k: v for k, v in vars(result).items() if k != "seconds"} for result in results]
    return {"results": rows, "files": files}


# --- calls of a foreign harness ---------------------------------------------------------------------------------------

CALLING = ("gemma4", "glm4_5", "gpt_oss", "llama3_1", "qwen3", "qwen3_6")
"""Template families with a form of calls."""


def ids(numbers: list[int]) -> np.ndarray:
    return np.asarray(numbers, dtype=np.int32)


@cache
def calls() -> list[dict[str, Any]]:
    """Return the rows of a log: a call, one that extends it, one after a compaction, and one of a helper."""
    tools = [{"type": "function", "function": {"name": "bash", "parameters": {"type": "object", "properties": {}}}}]
    rows: list[dict[str, Any]] = [{"attempt": "a", "vocabulary": "v", "tokenizer": "t"}]
    system, task = {"role": "system", "content": "You fix."}, {"role": "user", "content": "The sum is wrong."}

    def text_of(message: dict[str, Any]) -> str:
        written = "".join(
            f"\n<tool_call>\n{json.dumps(c['function'])}\n</tool_call>" for c in message.get("tool_calls", ())
        )
        return message["content"] + written

    def answer(text: str, call: str | None = None) -> dict[str, Any]:
        asked = {"id": call, "type": "function", "function": {"name": "bash", "arguments": '{"command": "ls"}'}}
        return {"role": "assistant", "content": text, **({"tool_calls": [asked]} if call else {})}

    first, second = answer("I look.", "c1"), answer("Done.")
    result = {"role": "tool", "tool_call_id": "c1", "content": "calc.py"}
    talks = [
        ([system, task], first, [1, 2, 3], [4, 5], None, "root"),
        ([system, task, first, result], second, [1, 2, 3, 4, 5, 6], [7], 0, "exact"),
        ([system, task, {"role": "user", "content": "So far."}], second, [1, 2, 9], [7, 8], None, "root"),
        ([{"role": "user", "content": "A title?"}], answer("Sum"), [30], [31], None, "root"),
    ]
    for call, (talk, message, prompt, output, parent, link) in enumerate(talks):
        rows.append(
            {
                "call": call, "at": 1000.0 + call, "seconds": 0.5, "messages": talk, "tools": tools, "tools_hash": "t",
                "prompt_ids": ids(prompt), "history": ids([*prompt, *output]), "output_ids": output,
                "logprobs": [-0.5] * len(output),
                "text": text_of(message), "message": message, "finish": "stop", "headers": {}, "parent": parent,
                "link": link, "model": "m",
            }
        )  # fmt: skip
    return rows


@case("harness", "calls")
def harness() -> dict[str, Any]:
    main = AgentRecord("agent1", "f", "main", "Submitted")
    assembled = assemble(calls(), "The sum is wrong.", read_actions, main=main)
    return {"agents": assembled.agents, "figures": assembled.figures, "tools": assembled.tools}


@case("harness", "dialects")
def dialects() -> dict[str, Any]:
    """Requests of each interface as messages and schemas."""
    schema = {"name": "bash", "description": "run", "parameters": {"type": "object", "properties": {}}}
    task, answer = "The sum is wrong.", {"role": "assistant", "content": "I look."}
    bodies = {
        "chat/completions": {
            "messages": [{"role": "system", "content": "You fix."}, {"role": "user", "content": task}, answer],
            "tools": [{"type": "function", "function": schema}],
        },
        "messages": {
            "max_tokens": 300, "system": [{"type": "text", "text": "You fix."}],
            "messages": [{"role": "user", "content": [{"type": "text", "text": task}]}, answer],
            "tools": [{"name": "bash", "description": "run", "input_schema": schema["parameters"]}],
        },
        "responses": {"instructions": "You fix.", "input": task, "tools": [{"type": "function", **schema}]},
    }  # fmt: skip
    return {name: DIALECTS[name].read({"model": "m", **body}) for name, body in bodies.items()}


SPELLED = {
    "glm4_5": (
        "<tool_call>submit</tool_call>",
        "<tool_call>bash\n<arg_key>command</arg_key>\n<arg_value>ls</arg_value>\n</tool_call>",
    ),
    "gpt_oss": ('<|channel|>commentary to=functions.bash <|constrain|>json<|message|>{"command": "ls"}',),
    "qwen3_6": ("<tool_call><function=bash><parameter=command>ls</parameter></function></tool_call>",),
}
"""Calls as models write them that differ from those that etpi writes."""

for harness_family in CALLING:

    @case("harness", f"answers {harness_family}")
    def _(name: str = harness_family) -> list[Any]:
        """Outputs of a template family as messages: a call after words, calls with faults, thoughts."""
        chat = chat_of(name)
        form = chat.tool_form
        assert form is not None
        call = form.render([Call("bash", {"command": "ls"})])
        texts = [f"I look.\n{call}", f"<think>\nhm\n</think>\n\n{call}", call[:-9], f"{call}\n{call}", "Only words."]
        texts += [form.render([Call("bash", {})]), *(f"I look.\n{text}" for text in SPELLED.get(name, ()))]
        messages = [output_message(chat, [*chat.encode(text, allow_special=True)], False, []) for text in texts]
        for message in messages:
            for number, made in enumerate(message.get("tool_calls") or ()):
                made["id"] = f"c{number}"
        return messages
