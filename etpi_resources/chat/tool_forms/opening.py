"""Find where the calls of a turn begin, headers and wrappers of the call included."""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Sequence

from etpi_resources.chat.tool_forms import gemma, marked, tagged
from etpi_resources.chat.tool_forms.call import Call, ParsedCall, ToolForm

_FIXED = (tagged.OPENING, gemma.OPENING, marked.TOOL_CALLS)
_OPENINGS = re.compile(
    "|".join(
        (
            *map(re.escape, _FIXED),
            r"(?:<｜tool▁calls▁begin｜>\s*)?<｜tool▁call▁begin｜>",
            r"(?:<\|start\|>assistant)?(?:<\|channel\|>commentary)? ?to=functions\.",
            r"(?:(?:(?:<\|start\|>assistant)? to=[\w.\-]{1,128}<\|message\|>)?<atem:function_calls>\s*)?<atem:invoke",
            r"^[ \t]*```(?:bash|sh|shell|mswea_bash_command)[ \t]*$",
        )
    ),
    re.MULTILINE,
)
"""The openings of all forms: the parser of the one that is used decides which of them begin a call."""


def text_before_calls(form: ToolForm, text: str, parsed: Sequence[ParsedCall]) -> str:
    """Return the text before the first call that can be read, without white space at its end.

    Calls before it that cannot be read stay: the model wrote them, and the message holds them nowhere else.

    Args:
        text: a turn after its think block.
        parsed: its calls as `form` reads them; at least one is a call.
    """
    unread = next(at for at, call in enumerate(parsed) if isinstance(call, Call))
    starts = [0, *(match.start() for match in _OPENINGS.finditer(text))]
    # The call begins at the last opening before which the parser reads no more than the unreadable calls.
    first = bisect_right(starts, unread, key=lambda at: len(form.parse(text[:at]))) - 1
    return text[: starts[max(first, 0)]].rstrip()
