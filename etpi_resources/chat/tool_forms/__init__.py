"""The syntaxes in which models write tool calls: one registry for rendering, parsing and grammars.

`FORMS` is in the order in which they are tried on an unknown text. `template` finds the form of a chat template.
"""

from __future__ import annotations

from collections.abc import Mapping

from etpi_resources.chat.tool_forms.call import Call, Read, ToolForm, message_calls, structured
from etpi_resources.chat.tool_forms.markdown import MARKDOWN
from etpi_resources.chat.tool_forms.marked import ATEM, DEEPSEEK, DEEPSEEK_V31, HARMONY, LLAMA, MISTRAL, MISTRAL_V11
from etpi_resources.chat.tool_forms.tagged import GLM, HERMES, XML

__all__ = ["FORMS", "Call", "Read", "ToolForm", "message_calls", "structured"]

FORMS: Mapping[str, ToolForm] = {
    form.name: form
    for form in (
        HERMES,
        XML,
        GLM,
        MISTRAL,
        MISTRAL_V11,
        DEEPSEEK,
        DEEPSEEK_V31,
        HARMONY,
        ATEM,
        LLAMA,
        MARKDOWN,
    )  # fmt: skip
}
