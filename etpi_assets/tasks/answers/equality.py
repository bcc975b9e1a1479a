"""Compare mathematical answers with math-verify: a program, because a symbolic comparison may never end.

`python equality.py SECONDS` answers each line of standard input, JSON [expected, answer, digits], with a line of JSON:
whether they are equal, decimal numbers to that many digits, or the name of the error. It ends itself if a
comparison takes longer.
"""

from __future__ import annotations

import contextlib
import json
import resource
import signal
import sys
from typing import Any

MEMORY = 3 << 30
"""Bytes of the process's addresses."""


def serve(seconds: int) -> None:
    """Answer until standard input ends."""
    from math_verify import parse, verify
    from math_verify.parser import LatexExtractionConfig

    # Plain expressions would go through Python's parser, which runs code; LaTeX goes through a grammar.
    latex = [LatexExtractionConfig(boxed_match_priority=0)]

    def parsed(text: str) -> Any:
        return parse(f"$\\boxed{{{text}}}$", extraction_config=latex, parsing_timeout=0)

    for name, limit in ((resource.RLIMIT_AS, MEMORY), (resource.RLIMIT_CORE, 0), (resource.RLIMIT_FSIZE, 0)):
        resource.setrlimit(name, (limit, limit))
    # Only the answers go to the pipe, whatever the libraries print.
    answers, sys.stdout = sys.stdout, sys.stderr
    for line in sys.stdin:
        wanted, answer, digits = json.loads(line)
        signal.alarm(seconds)
        try:
            result: bool | str = bool(
                verify(parsed(wanted), parsed(answer), float_rounding=digits, strict=True, timeout_seconds=0)
            )
        except Exception as error:
            result = type(error).__name__
        signal.alarm(0)
        print(json.dumps(result), file=answers, flush=True)


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        serve(int(sys.argv[1]))
