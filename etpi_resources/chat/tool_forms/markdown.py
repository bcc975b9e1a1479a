"""A command in a fenced block, as agents without tool calling write it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from etpi_resources.chat.tool_forms.call import UNCLOSED_CALL, Call, Read, ToolForm, dumps

_FENCES = frozenset({"```bash", "```sh", "```shell", "```mswea_bash_command"})


def read_fenced(text: str) -> Iterator[Read]:
    """Yield the commands of the text's shell blocks."""
    block: list[str] | None = None
    for line in text.split("\n"):
        mark = line.strip()
        if block is None:
            block = [] if mark in _FENCES else None
        elif mark == "```":
            yield Call("bash", {"command": "\n".join(block)})
            block = None
        else:
            block.append(line)
    if block is not None:
        yield UNCLOSED_CALL


def _render(calls: Sequence[Call]) -> str:
    """Raises ValueError for a call that is no bash command: a block has no name and no further arguments."""
    blocks = []
    for name, arguments in calls:
        if name != "bash" or set(arguments) != {"command"} or not isinstance(arguments["command"], str):
            raise ValueError(f"a markdown block carries a bash command alone, not {name} {dumps(dict(arguments))}")
        blocks.append(f"```bash\n{arguments['command']}\n```")
    return "\n".join(blocks)


def _lark(names: Sequence[str]) -> str:
    return 'start: "```bash\\n" LINE* "```"\nLINE: /[^`\\n][^\\n]*\\n|\\n/\n'


MARKDOWN = ToolForm("markdown", _render, lambda text: list(read_fenced(text)), _lark, typed=True)
