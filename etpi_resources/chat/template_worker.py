"""The process that renders chat templates of strangers: each is a program, which may loop for ever or fill the memory.

It reads pickled requests (seconds, bytes, characters, template, conversations) from its parent and answers with a
status, a newline and the text in UTF-8, so that nothing of a template is unpickled there. The limits bound each
request; the environment is that of `transformers`, whose import takes seconds.
"""

from __future__ import annotations

import json
import pickle
import resource
import signal
import sys
from datetime import date
from functools import lru_cache
from typing import Any

import jinja2.ext
import jinja2.nodes
import jinja2.sandbox

DATE = date(2026, 1, 1)
"""The day that templates which write today's date (gpt-oss, Llama 3.2) write here, so that ids do not depend on it."""
_MOST_DECISIONS = 1000


class Generation(jinja2.ext.Extension):
    """The tag {% generation %}, which marks an assistant's text and writes nothing itself."""

    tags = {"generation"}

    def parse(self, parser: Any) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.CallBlock(self.call_method("_inside"), [], [], body).set_lineno(line)

    def _inside(self, caller: Any) -> str:
        return caller()


class Sandbox(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """The sandbox of `transformers`, which decides once for each type and attribute: that is a third of its time."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._safe: dict[tuple[type, str], bool] = {}

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        key = type(obj), attr
        if (safe := self._safe.get(key)) is None:
            safe = super().is_safe_attribute(obj, attr, value)
            if len(self._safe) < _MOST_DECISIONS:  # a template can compute names
                self._safe[key] = safe
        return safe


def _refuse(message: str) -> None:
    raise jinja2.TemplateError(message)


def _json(
    x: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    return json.dumps(x, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


@lru_cache(maxsize=16)
def compiled(template: str, *, trusted: bool = False) -> jinja2.Template:
    """Return a chat template as `transformers` compiles it; a trusted one without a sandbox."""
    kind = jinja2.Environment if trusted else Sandbox
    environment = kind(trim_blocks=True, lstrip_blocks=True, extensions=[Generation, jinja2.ext.loopcontrols])
    environment.filters["tojson"] = _json
    environment.globals |= {"raise_exception": _refuse, "strftime_now": DATE.strftime}
    return environment.from_string(template)


def _render(template: str, conversation: dict[str, Any], most: int) -> list[str]:
    """Return a status and a text: "ok", "refused" and "failed" with the error's, or "large" and nothing."""
    try:
        parts, length = [], 0
        for part in compiled(template).generate(conversation):
            parts.append(part)
            length += len(part)
            if length > most:
                return ["large", ""]
        return ["ok", "".join(parts)]
    except MemoryError:
        return ["large", ""]
    except jinja2.TemplateError as error:
        return ["refused", str(error)[:2000]]
    except Exception as error:  # of Python, in an expression of the template
        return ["failed", f"{type(error).__name__}: {error}"[:2000]]


def _limit(kind: int, value: int) -> None:
    resource.setrlimit(kind, (value, resource.getrlimit(kind)[1]))


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, whose end closes stdin
    requests, answers = sys.stdin.buffer, sys.stdout.buffer
    while head := requests.read(8):
        seconds, most_bytes, most, template, pickled = pickle.loads(requests.read(int.from_bytes(head, "big")))
        used = resource.getrusage(resource.RUSAGE_SELF)
        _limit(resource.RLIMIT_CPU, int(used.ru_utime + used.ru_stime) + 1 + seconds)
        _limit(resource.RLIMIT_AS, most_bytes)
        answer = "\n".join(_render(template, pickle.loads(pickled), most)).encode("utf-8", "surrogatepass")
        answers.write(len(answer).to_bytes(8, "big") + answer)
        answers.flush()


if __name__ == "__main__":
    main()
