"""The syntaxes ("forms") in which models write tool calls, each with a renderer and a parser.

`FORMS` holds them by name, in the order in which an unknown template's calls are tried. `template` determines the form
of a chat template.
"""

from __future__ import annotations

from collections.abc import Mapping

from etpi_resources.chat.tool_forms.call import Call, ParsedCall, ToolForm, message_calls, parse_structured
from etpi_resources.chat.tool_forms.gemma import GEMMA
from etpi_resources.chat.tool_forms.markdown import MARKDOWN
from etpi_resources.chat.tool_forms.marked import ATEM, DEEPSEEK, DEEPSEEK_V31, HARMONY, LLAMA, MISTRAL, MISTRAL_V11
from etpi_resources.chat.tool_forms.tagged import GLM, HERMES, XML

__all__ = ["FORMS", "Call", "ParsedCall", "ToolForm", "message_calls", "parse_structured"]

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
        GEMMA,
        LLAMA,
        MARKDOWN,
    )  # fmt: skip
}
