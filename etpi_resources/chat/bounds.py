"""Bounds for the chat templates of strangers: a program that may loop for ever, or write billions of characters.

A template is rendered for conversations of growing length in a process that has little time and memory, before this
process renders it. One that behaves differently for other conversations is not noticed.
"""

from __future__ import annotations

import json
import subprocess
import sys
from functools import lru_cache

SECONDS, MOST_BYTES, MOST_CHARACTERS = 20, 1 << 30, 2_000_000
_TOO_LONG = 7
_PROGRAM = """
import json, resource, sys
import jinja2.ext, jinja2.sandbox

class Generation(jinja2.ext.Extension):  # {% generation %} of transformers
    tags = {"generation"}

    def parse(self, parser):
        next(parser.stream)
        return parser.parse_statements(["name:endgeneration"], drop_needle=True)

def refuse(message):
    raise jinja2.TemplateError(message)

request = json.loads(sys.stdin.buffer.read())
resource.setrlimit(resource.RLIMIT_CPU, (request["seconds"], request["seconds"]))
resource.setrlimit(resource.RLIMIT_AS, (request["bytes"], request["bytes"]))
environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
    trim_blocks=True, lstrip_blocks=True, extensions=[Generation, jinja2.ext.loopcontrols]
)
environment.filters["tojson"] = lambda value, indent=None, **_: json.dumps(value, indent=indent)
environment.globals |= {"raise_exception": refuse, "strftime_now": lambda _: "2026-01-01"}
try:
    template = environment.from_string(request["template"])
except MemoryError:  # of constants, which are computed here
    sys.exit(7)
except Exception:
    sys.exit(0)  # rendering it reports what is wrong with it
for conversation in request["conversations"]:
    written = 0
    try:
        for text in template.generate(conversation):
            written += len(text)
            if written > request["most"]:
                sys.exit(7)
    except MemoryError:
        sys.exit(7)
    except Exception:
        pass
"""


class TemplateUnbounded(ValueError):
    """A chat template takes too long, or writes too much, for a small conversation."""


@lru_cache
def require_bounded(template: str) -> None:
    """Render a template for small conversations within bounds of time, memory and length.

    Raises:
        TemplateUnbounded: it does not keep within them.
    """
    request = {"template": template, "conversations": _conversations(), "most": MOST_CHARACTERS}
    request |= {"seconds": SECONDS, "bytes": MOST_BYTES}
    line = [sys.executable, "-I", "-c", _PROGRAM]
    done = subprocess.run(line, input=json.dumps(request).encode(), capture_output=True, check=False)
    if done.returncode < 0:
        raise TemplateUnbounded(f"the chat template takes more than {SECONDS} s of computing for small conversations")
    if done.returncode == _TOO_LONG:
        raise TemplateUnbounded(
            f"the chat template writes more than {MOST_CHARACTERS:,} characters for a small conversation, or needs "
            f"more than {MOST_BYTES >> 20} MiB"
        )


def _conversations() -> list[dict[str, object]]:
    call = {"type": "function", "id": "callaaaa1", "function": {"name": "look", "arguments": {"at": "x"}}}
    rounds = [
        [
            {"role": "user", "content": "Look."},
            {"role": "assistant", "content": "Yes.", "reasoning_content": "So.", "tool_calls": [call]},
            {"role": "tool", "content": "x", "name": "look", "tool_call_id": "callaaaa1"},
            {"role": "assistant", "content": "Done."},
        ],
        [{"role": "user", "content": "And?"}, {"role": "assistant", "content": "No."}],
    ]
    long = [{"role": "user", "content": "Look. " * 5000}, {"role": "assistant", "content": "No."}]
    function = {"name": "look", "description": "Look.", "parameters": {"type": "object", "properties": {}}}
    tools = [{"type": "function", "function": function}]
    return [
        {
            "messages": [*start, *messages * count], "tools": offered, "add_generation_prompt": opened,
            "bos_token": "<s>", "eos_token": "</s>", "enable_thinking": opened,
        }
        for count in (1, 6, 36)
        for messages, offered in (
            (rounds[0], tools), (rounds[0][:-1], tools), (rounds[1], None), (long, tools * 40),
        )
        for start in ([], [{"role": "system", "content": "Act."}])
        for opened in (False, True)
    ]  # fmt: skip
