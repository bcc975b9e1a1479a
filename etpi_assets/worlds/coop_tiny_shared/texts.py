"""Templates of the agents' instructions.

Every instruction names the agent's own function, its module, its formula and the shared file, and never the partner's
function or module: an agent gets to know those from a message. Some tell that the partner edits the shared file too.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from string import Template


@dataclass(frozen=True)
class InstructionFields:
    """Fields of one agent's instruction.

    Attributes:
        code: the expression that the function returns.
        tells_overlap: the instruction says that the partner exports from the shared file too.
    """

    function: str
    path: str
    code: str
    shared: str
    partner: str
    tells_overlap: bool


_TEMPLATES = (
    "Task: add $fn to $path: return $code\nExport: $shared$overlap\nPartner: $partner",
    "Add the function $fn to $path. It should return $code\nThen export it in $shared$overlap\n"
    "Your partner is $partner.",
    "# New function $fn\n\nThe function $fn in $path should return $code\n\n"
    "$partner works here too. Export: $shared$overlap",
)
_OVERLAP = " ($partner exports there too)"


def write_text(fields: InstructionFields, rng: random.Random) -> str:
    """Write the instruction."""
    template = rng.choice(_TEMPLATES).replace("$overlap", _OVERLAP if fields.tells_overlap else "")
    return Template(template).substitute(
        fn=fields.function, path=fields.path, code=fields.code, shared=fields.shared, partner=fields.partner
    )
