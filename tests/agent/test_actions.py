"""Reading what a turn does: every form, messages inside commands, and text that nobody meant."""

from __future__ import annotations

import json
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from etpi_assets.agent.actions import (
    EMPTY,
    NO_ACTION,
    SUBMIT,
    UNCLOSED_THINK,
    format_action,
    next_turn,
    read_actions,
)
from etpi_assets.agent.bash import split_command
from etpi_assets.scoring.entities import KnownFiles, Patterns, edited, touched
from etpi_assets.scoring.rewards.attempt import Attempt
from etpi_assets.scoring.rewards.terminal import form_unhardened
from etpi_assets.specs.rollout_set import ScoringSection
from etpi_resources.chat.marks import split_thought
from etpi_resources.chat.tool_forms import FORMS as FORMS_BY_NAME
from etpi_resources.chat.tool_forms.call import BAD_JSON, UNCLOSED_CALL, Call
from etpi_resources.engines import Request, Sampler
from tests.support.rollouts import format_message

FORMS = ("tool_calls", "xml", "hermes", "fenced", "bracket")


def read(form: str, command: str):
    written = format_action(command, form)  # type: ignore[arg-type]
    return read_actions("", written) if isinstance(written, list) else read_actions(f"I will look.\n\n{written}\n")


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    "command", ["ls", "cat > a.py <<'EOF'\ndef f():\n    return \"x\"\n\nEOF\npython a.py", "echo 'é ≥'"]
)
def test_every_form_round_trips(form, command):
    actions, error = read(form, command)
    assert error is None
    assert [(a.kind, a.command, a.form) for a in actions] == [("bash", command, form)]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("quoting", ["heredoc", "double", "single"])
@pytest.mark.parametrize("wait", [None, "before", "after"])
def test_messages_are_read_in_every_form(form, quoting, wait):
    text = 'Plan: I\'ll do `src/a.py`, you "b.py" for $5'
    actions, error = read(form, format_message("agent2", text, quoting, wait=wait))
    assert error is None
    (action,) = actions
    assert (action.kind, action.to, action.message, action.pure, action.wait) == (
        "send_message",
        "agent2",
        text,
        True,
        wait is not None,
    )


@settings(deadline=None)
@given(
    st.text(st.characters(blacklist_categories=("Cs",), blacklist_characters="\0")),
    st.sampled_from(["heredoc", "double", "single"]),
)
def test_a_message_survives_its_quoting(text, quoting):
    split = split_command(format_message("agent2", text, quoting))
    assert [(s.to, s.message) for s in split.sent] == [("agent2", text)]
    assert split.rest == ""


def test_message_is_pure_if_no_command_is_left_for_the_shell():
    def parts(command):
        actions, _ = read_actions(format_action(command))  # type: ignore[arg-type]
        return [(a.kind, a.message if a.kind == "send_message" else a.command, a.pure) for a in actions]

    assert parts("ls && send_message agent2 'hi'") == [("bash", "ls && :", True), ("send_message", "hi", False)]
    assert parts("send_message agent2 'hi'; ls") == [("send_message", "hi", False), ("bash", ":; ls", True)]
    assert parts("send_message a 'one'\nsend_message b <<'M'\ntwo\nM\n") == [
        ("send_message", "one", True),
        ("send_message", "two", True),
    ]
    assert parts("# say hello | wave\nsend_message a hello there") == [("send_message", "hello there", True)]
    assert parts("send_message a 'x' | tee log")[0] == ("send_message", "x", False)
    assert parts("send_message a 'x' > log")[0] == ("send_message", "x", False)
    assert parts("send_message agent2 <<'M' && cat a.py\nplan\nM\nls") == [
        ("send_message", "plan", False),
        ("bash", ": && cat a.py\nls", True),
    ]


@pytest.mark.parametrize(
    "command",
    [
        "cat > notes <<'EOF'\nsend_message agent2 'hi'\nEOF",
        "echo \"send_message agent2 'hi'\"",
        "echo send_message agent2 'hi'",
        "if true; then send_message agent2 'hi'; fi",
        "echo $(ls; send_message agent2 'hi')",
        "grep -rn send_message .",
        "send_message agent2",
        "send_message",
    ],
)
def test_command_that_only_mentions_a_message_is_bash(command):
    actions, _ = read_actions(format_action(command))  # type: ignore[arg-type]
    assert [(a.kind, a.command) for a in actions] == [("bash", command)]


def test_other_harnesses_commands_and_tools():
    names = ("send_message", "coop-send", "coop-broadcast")
    content = '[tool_use Bash] {"command": "coop-broadcast \\"agent1: taking core.py\\""}'
    (action,), _ = read_actions(content, message_commands=names)
    assert (action.kind, action.to, action.message, action.form) == (
        "send_message",
        None,
        "agent1: taking core.py",
        "bracket",
    )
    (action,), _ = read_actions('[tool_use Edit] {"file_path": "src/a.py", "old_string": "x"}')
    assert action.kind == "bash" and "src/a.py" in action.command
    call = {"name": "send_message", "input": {"to": "agent2", "message": "hi"}}
    (action,), _ = read_actions("", [call])
    assert (action.kind, action.to, action.message) == ("send_message", "agent2", "hi")
    (action,), _ = read_actions("", [{"function": {"name": "bash", "arguments": {"command": "ls"}}}])
    assert action.command == "ls"
    (action,), _ = read_actions("```mswea_bash_command\nls -la\n```")
    assert action.command == "ls -la"


def test_several_calls_are_one_list_in_order():
    content = format_action("ls") + "\n" + format_action("pwd")  # type: ignore[operator]
    actions, _ = read_actions(content)
    assert [a.command for a in actions] == ["ls", "pwd"]


def test_the_think_block_is_not_read():
    call = format_action("ls")
    assert [a.command for a in read_actions(f"<think>```bash\nrm x\n```</think>\n{call}")[0]] == ["ls"]
    assert read_actions("<think>maybe\n```bash\nrm x\n```\n") == ([], UNCLOSED_THINK)
    assert [a.command for a in read_actions(f"reasoning, no opening</think>{call}")[0]] == ["ls"]
    # A close after the first call does not delimit: the call stands.
    assert [a.command for a in read_actions(f"<think>{call}</think>")[0]] == ["ls"]


@pytest.mark.parametrize(
    ("content", "error"),
    [
        ("", NO_ACTION),
        ("I would run ls.", NO_ACTION),
        ('[Makes bash tool call with {"command": "ls -la"} as arguments]', NO_ACTION),
        ("<tool_call>\n<function=bash>\n<parameter=command>\nls", UNCLOSED_CALL),
        ("<tool_call>", UNCLOSED_CALL),
        ("<tool_call>ls</tool_call>", NO_ACTION),
        ('<tool_call>{"name": "bash", "arguments": {"command": </tool_call>', BAD_JSON),
        ("<tool_call>\n<function=bash>\n<parameter=command>\n\n</parameter>\n</function>\n</tool_call>", EMPTY),
        ("```bash\nls", UNCLOSED_CALL),
        ("```python\nprint(1)\n```", NO_ACTION),
    ],
)
def test_turn_without_action_has_a_reason(content, error):
    assert read_actions(content) == ([], error)


PIECES = [
    *("<tool_call>", "</tool_call>", "<function=bash>", "</function>", "<parameter=command>", "</parameter>"),
    *("```bash\n", "\n```\n", "[tool_use Bash] ", '{"command": "', '"}', "{", "[", "<think>", "</think>"),
    *("send_message ", "agent2 ", "--wait", "<<'M'", "<<", "\nM\n", "'", '"', "\\", "$(", "`", "(", ")"),
    *("&&", "|", "&", ";", "\n", "#", "<", ">", "ls", " ", "\0", "é"),
]


@settings(deadline=None)
@given(
    st.lists(st.sampled_from(PIECES) | st.text(max_size=3)).map("".join),
    st.sampled_from([None, [{}], [None], [{"function": {"name": "bash"}}]]),
)
def test_nothing_raises_and_an_empty_list_has_a_reason(text, tool_calls):
    for content in (text, f"<tool_call><function=bash><parameter=command>{text}</parameter>"):
        actions, error = read_actions(content, tool_calls)
        assert bool(actions) == (error is None)
    for arguments in (text, json.dumps({"command": text})):
        read_actions("", [{"function": {"name": "bash", "arguments": arguments}}])
    split_command("send_message " + text)


@pytest.mark.parametrize(
    "piece",
    PIECES
    + [
        '<tool_call>{"a":',
        "<tool_call>\n{",
        "[tool_use Bash] {",
        '[tool_use Bash] {"a',
        "<tool_call><function=bash><parameter=command>",
        "send_message a <<M\n",
        "a <<",
        "$('",
        "a;",
        "if a; then b; fi\n",
    ],
)
def test_time_is_linear_in_hostile_text(piece):
    text = piece * (300_000 // len(piece))
    started = time.process_time()
    read_actions(text)
    split_command("send_message " + text)
    assert time.process_time() - started < 6


def test_message_of_plain_words_among_other_commands_is_sent_and_arguments_are_not() -> None:
    assert split_command("ls; send_message a hello; ls").rest == "ls; :; ls"
    assert split_command("ls &>log send_message a hello; ls").sent == ()


FILES = KnownFiles(["src/a.py"])
PATTERNS = Patterns.of(ScoringSection())
ATEM_PARAMETER = '<atem:parameter name="a">'


@pytest.mark.parametrize(
    ("parse", "text"),
    [
        (split_thought, "</think>\n" + "<think>\n" * 40_000),
        (split_thought, "<think>" + "`" * 300_000),
        (FORMS_BY_NAME["mistral_v11"].parse, "[TOOL_CALLS]a" * 100_000),
        (
            FORMS_BY_NAME["atem"].parse,
            '<atem:invoke name="a">' + '<atem:parameter name="a">' * 40_000 + "</atem:invoke>",
        ),
        (lambda text: touched(text, PATTERNS, FILES), "cd " + "\n" * 100_000),
        (lambda text: edited(text, PATTERNS, FILES), "python -c open(" + "open(" * 60_000),
        (lambda text: edited(text, PATTERNS, FILES), "> a.py " + "cd a\n" * 60_000),
        (lambda text: form_unhardened(Attempt("r", "t", "find", text)), "<thinking>" + " " * 40_000),
    ],
)
def test_time_of_other_parsers_is_linear(parse, text: str) -> None:
    started = time.process_time()
    parse(text)
    assert time.process_time() - started < 3


@pytest.mark.parametrize(
    ("before", "after"),
    [("a b; c &&", ""), ("ls | wc;\n", "; d&>log"), ("", "\ne &"), ("#x\n", " ; "), ("send_messages;", "&&&>f")],
)
def test_other_commands_stay_beside_a_message(before: str, after: str) -> None:
    split = split_command(f"{before}send_message a 'hi'{after}")
    assert (split.sent[0].message, split.leads) == ("hi", not before.strip("#x\n"))
    assert split.rest == ("" if before == "#x\n" else f"{before}:{after}")


def test_call_whose_json_is_longer_than_a_piece_is_read_whole() -> None:
    for cut in range(30):
        command = "x" * (1000 + cut) + '\\u00e9 "\\n' + "é" * 5000
        call = json.dumps({"name": "bash", "arguments": {"command": command}})
        (action,), _ = read_actions(f"<tool_call>\n{call}\n</tool_call>")
        assert action.command == command


@pytest.mark.parametrize(
    ("tools", "argument", "submits"),
    [
        ({}, "command", True),  # etpi's own loop
        ({"bash": ["command"]}, "command", True),  # mini-swe-agent
        ({"bash": ["command", "description"]}, "command", True),  # OpenCode with its shell alone
        ({"edit": ["path"], "bash": ["command", "description"]}, "command", False),  # OpenCode
        ({"read": [], "Bash": ["command"]}, "command", False),
        ({"read": [], "run_shell_command": ["command", "is_background"]}, "command", False),
        ({"apply_patch": [], "exec_command": ["cmd"]}, "cmd", False),
    ],
)
def test_script_runs_its_commands_through_the_offered_shell_and_then_ends(tools, argument, submits):
    offered = [{"function": {"name": name, "parameters": {"required": needed}}} for name, needed in tools.items()]
    shell = next((name for name in tools if argument in tools[name]), "bash")

    def turn(before: int) -> str:
        messages = [{"role": "assistant", "content": ""}] * before
        return next_turn(Request("r", "s", (), messages, Sampler(), tools=offered), ["ls", "rm a"])

    for before, command in enumerate(["ls", "rm a", *([f"echo {SUBMIT}"] * submits)]):
        (call,) = FORMS_BY_NAME["qwen_xml"].parse(turn(before))
        assert isinstance(call, Call) and call.name == shell and call.arguments[argument] == command
        assert set(tools.get(shell, [argument])) == set(call.arguments), "all that the tool requires"
    for before in range(2 + submits, 5):
        assert not FORMS_BY_NAME["qwen_xml"].parse(turn(before)), "OpenCode with its shell alone asks until then"
