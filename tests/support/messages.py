"""Commands that send a message, as agents may write them."""

from __future__ import annotations

from typing import Literal

Quoting = Literal["heredoc", "single", "double"]
_QUOTE_IN_SINGLE = "'\\''"


def format_message(
    to: str,
    message: str,
    quoting: Quoting = "heredoc",
    *,
    wait: Literal["before", "after"] | None = None,
    name: str = "send_message",
) -> str:
    """Write the command that sends `message` to `to`, the inverse of `split_command`."""
    head = f"{name} --wait {to}" if wait == "before" else f"{name} {to}"
    tail = " --wait" if wait == "after" else ""
    if quoting == "heredoc":
        lines = {line.rstrip() for line in message.split("\n")}
        mark, number = "MSG", 0
        while mark in lines:
            number += 1
            mark = f"MSG{number}"
        return f"{head} <<'{mark}'{tail}\n{message}\n{mark}"
    if quoting == "single":
        return f"{head} '{message.replace(chr(39), _QUOTE_IN_SINGLE)}'{tail}"
    escaped = "".join("\\" + c if c in '\\"$`' else c for c in message)
    return f'{head} "{escaped}"{tail}'
