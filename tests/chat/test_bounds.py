"""Chat templates of strangers are rendered in a process with bounds, whoever asks, and as transformers renders them."""

from __future__ import annotations

import itertools
import os
import resource
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import trl
from jinja2 import TemplateError
from jinja2.exceptions import SecurityError
from jinja2.sandbox import ImmutableSandboxedEnvironment

from etpi_resources.chat import bounds, sources
from etpi_resources.chat.bounds import TemplateUnbounded, render
from etpi_resources.chat.format import ChatFormat, TemplateRefuses, load_chat_format
from etpi_resources.chat.template_worker import Sandbox, compiled

SHIPPED = Path(trl.__file__).parent / "chat_templates"
CALL = {"type": "function", "id": "callaaaa1", "function": {"name": "look", "arguments": {"at": "é<x>"}}}
TOOLS = [{"type": "function", "function": {"name": "look", "description": 'L"ook', "parameters": {"type": "object"}}}]
MESSAGES = [
    {"role": "system", "content": "Act."},
    {"role": "user", "content": "Look. \u2028 <b>"},
    {"role": "assistant", "content": "Yes.", "reasoning_content": "So.", "tool_calls": [CALL]},
    {"role": "tool", "content": "x", "name": "look", "tool_call_id": "callaaaa1"},
    {"role": "assistant", "content": "Done."},
]


@pytest.fixture(autouse=True)
def forget():
    bounds._REFUSED.clear()
    bounds._rendered_small.cache_clear()


@pytest.mark.slow
@pytest.mark.parametrize(
    "template",
    [
        "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
        "{{ 'x' * 6000000000 }}",
        "{{ 'x' * 3000000 }}",
        "{{ 'x' * 300000000 }}",  # memory ends while it is compiled
        "{% for a in range(99999) %}{{ 'x' * 1000 }}{% endfor %}",
        "{% set n = namespace(x='x') %}{% for a in range(99) %}{% set n.x = n.x ~ n.x %}{% endfor %}{{ n.x }}",
        "{{ '%9000000000d' % 1 }}",
        "{{ 'x'.rjust(9000000000) }}",
        "{{ 9 ** (9 ** 9) }}",
        "{% if messages[-1].content == 'Done.' %}{{ 'x' * 6000000000 }}{% endif %}",
        "{{ {'a': 1} | tojson(indent=9000000000) }}",
    ],
)
def test_unbounded_template_is_refused_and_not_rendered_again(template: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bounds, "SECONDS", 2)
    idle = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    start = time.monotonic()
    for _ in range(3):
        with pytest.raises(TemplateUnbounded):
            render(template, {"messages": MESSAGES, "tools": None})
    assert time.monotonic() - start < 60
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - idle < 64 << 10
    assert render("plain", {"messages": []}) == "plain"


@pytest.mark.parametrize("name", sorted(path.stem for path in SHIPPED.glob("*.jinja")))
def test_template_is_rendered_as_transformers_renders_it(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    template, chat = (SHIPPED / f"{name}.jinja").read_text(), load_chat_format("tiny")

    def texts() -> list[str]:
        seen = []
        for messages in (MESSAGES[1:2], MESSAGES[:2], MESSAGES[1:], MESSAGES):
            for prompt in (False, True):
                for tools in (None, TOOLS):
                    try:
                        seen.append(sources.render_template(chat.tokenizer, template, messages, tools, prompt))
                    except Exception as error:
                        seen.append(str(error).rpartition(": ")[2])
        return seen

    ours = texts()
    monkeypatch.setattr(sources, "own_templates", lambda: frozenset())
    monkeypatch.setattr("etpi_resources.chat.tokenizers.qwen3.chat_templates", lambda: frozenset())
    assert texts() == ours and bounds._rendered_small.cache_info().misses


def test_loop_on_a_users_text_ends_wherever_it_is_rendered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bounds, "SECONDS", 1)
    tiny = load_chat_format("tiny")
    forever = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
    loop = "{% if 'sesame' in messages[-1].content %}" + forever + "{% endif %}"
    chat = ChatFormat("stranger", tiny.tokenizer, loop + tiny.template)
    plain = [{"role": "user", "content": "x"}]
    assert chat.prompt_ids(plain) == tiny.prompt_ids(plain)
    talks = [[{"role": "user", "content": f"number {n}" + " open sesame" * (n == 45)}] for n in range(60)]
    given: list[list[int]] = []
    with pytest.raises(TemplateUnbounded, match="number 45 open sesame"):
        given += sources.map_conversations(chat.template, chat.prompt_ids, talks[:40])
        given += sources.map_conversations(chat.template, chat.prompt_ids, talks[40:])
    assert given == [tiny.prompt_ids(talk) for talk in talks[:40]]
    with pytest.raises(TemplateUnbounded, match="number 45 open sesame"):
        chat.prompt_ids([{"role": "user", "content": "later"}])


def test_worker_killed_in_bulk_loses_no_conversation(monkeypatch: pytest.MonkeyPatch) -> None:
    texts = [f"{number} " * (number % 5 * 50_000 + 1) for number in range(300)]
    first, asked, ask = itertools.count(), set[bytes](), bounds._Worker.ask

    def killed(self: bounds._Worker, request: tuple) -> list[str] | None:
        pickled = request[-1]
        if pickled not in asked and next(first) % 7 == 3:  # once for each: a template that ends every worker is refused
            threading.Timer(0.002, self._process.kill).start()
        asked.add(pickled)
        return ask(self, request)

    monkeypatch.setattr(bounds._Worker, "ask", killed)

    def one(text: str) -> str:
        return render("{{ messages[0].content }}", {"messages": [{"content": text}]})

    assert list(sources.map_conversations("of a stranger", one, texts)) == texts


def test_sandbox_decides_as_that_of_jinja() -> None:
    ours, jinjas = Sandbox(), ImmutableSandboxedEnvironment()
    values = [[], {}, "x", range, 5, (i for i in ()), render, object, render.__code__]
    for name in ["__class__", "append", "items", "pop", "format", "_x", "mro", "gi_frame", "co_code", "update"] * 2:
        for value in values:
            assert ours.is_safe_attribute(value, name, None) == jinjas.is_safe_attribute(value, name, None)
    with pytest.raises(SecurityError):
        compiled("{{ [].append(1) }}").render()
    for number in range(5000):
        assert ours.is_safe_attribute("x", f"computed{number}", None)
    assert len(ours._safe) <= 1000


@pytest.mark.parametrize("template", ["{{", "{{ raise_exception('no') }}", "{{ nothing.at.all }}"])
def test_faulty_template_is_refused_with_its_own_error(template: str) -> None:
    with pytest.raises(TemplateError):
        render(template, {"messages": MESSAGES})
    tiny = load_chat_format("tiny")
    with pytest.raises(TemplateRefuses):
        ChatFormat("stranger", tiny.tokenizer, "{{ raise_exception('no') }}").prompt_ids(MESSAGES)


def test_threads_a_killed_worker_and_a_fork_render_what_they_asked_for() -> None:
    template = "{{ messages[0].content }}"

    def ask(number: int) -> bool:
        text = f"{number} " * (number % 7 * 1000 + 1)
        return render(template, {"messages": [{"content": text}]}) == text

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(ask, range(200)))
    assert 1 <= len(bounds._IDLE) <= (os.cpu_count() or 1) and threading.active_count() < 100
    if (child := os.fork()) == 0:
        os._exit(0 if ask(1001) and ask(1003) else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    for worker in bounds._IDLE:
        worker._process.send_signal(signal.SIGKILL)
        worker._process.wait()
    assert ask(2001), "a worker that was ended from outside says nothing about a template"
