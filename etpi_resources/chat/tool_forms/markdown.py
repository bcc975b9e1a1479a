"""Commands in fenced shell blocks: the form of agents without tool calling."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from etpi_resources.chat.tool_forms.call import UNCLOSED_CALL, Call, ParsedCall, ToolForm, dumps

_FENCES = frozenset({"```bash", "```sh", "```shell", "```mswea_bash_command"})


def read_fenced(text: str) -> Iterator[ParsedCall]:
    """Yield each shell block of the text as a bash call."""
    block: list[str] | None = None
    for line in text.split("\n"):
        stripped = line.strip()
        if block is None:
            block = [] if stripped in _FENCES else None
        elif stripped == "```":
            yield Call("bash", {"command": "\n".join(block)})
            block = None
        else:
            block.append(line)
    if block is not None:
        yield UNCLOSED_CALL


def _render(calls: Sequence[Call]) -> str:
    """Raise ValueError for a call other than a bash command: a block has no place for a name or other arguments."""
    blocks = []
    for name, arguments in calls:
        if name != "bash" or set(arguments) != {"command"} or not isinstance(arguments["command"], str):
            raise ValueError(f"a markdown block carries only a bash command, not {name} {dumps(dict(arguments))}")
        blocks.append(f"```bash\n{arguments['command']}\n```")
    return "\n".join(blocks)


MARKDOWN = ToolForm("markdown", _render, lambda text: list(read_fenced(text)), typed=True)
