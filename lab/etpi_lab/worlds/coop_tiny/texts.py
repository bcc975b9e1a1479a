"""Templates of the agents' instructions, in several registers and lengths.

Every instruction names the agent's own function, its path and new behaviour, the partner's function and path, the
repository's files and the command of the visible check.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from string import Template

from etpi_assets.worlds.coop_tiny_shared.features import Formula
from etpi_lab.worlds.coop_tiny.formulas import PHRASES


@dataclass(frozen=True)
class InstructionFields:
    """Fields of one agent's instruction. `check`: command without the function name. `example`: (argument, result)."""

    function: str
    path: str
    wanted: Formula
    current: Formula
    partner: str
    partner_function: str
    partner_path: str
    files: tuple[str, ...]
    check: str
    example: tuple[int, int]


_TERSE = (
    "Task: $fn in $path should $phrase.\nPartner: $pfn in $ppath.\nFiles: $files\nCheck: $check $fn",
    "Files: $files\nTask: make $fn in $path $phrase.\n$partner has $pfn in $ppath.\nCheck: $check $fn",
    "Partner: $pfn in $ppath.\nTask: $fn in $path should $phrase.\nCheck: $check $fn\nFiles: $files",
)

_ISSUE = (
    "# Wrong result of $fn\n\nExpected: $fn in $path should $phrase.\nFound: `$current`.\n\n"
    "$partner works on $pfn in $ppath.\nFiles: $files\nCheck: $check $fn",
    "# $fn\n\nThe function $fn in $path does not do what it should. It should $phrase.\n\n"
    "Not here: $pfn in $ppath, which $partner works on.\nCheck: $check $fn\nFiles: $files",
)

_CONVERSATION = (
    "Hi, can you change $fn in $path for us? It should $phrase. Your partner $partner is on $pfn in $ppath. "
    "The files are $files and you can try it with $check $fn",
    "We need your help with two functions. $partner takes care of $pfn in $ppath. You look at $fn in $path, please: "
    "it should $phrase. To see if it works run $check $fn and these are the files: $files",
)

_BACKGROUND = (
    "People who use this package asked for the change some time ago.",
    "The old result was fine for the first release but not any more.",
    "There is no need to keep the old result, nobody depends on it.",
    "The signature stays the same, so no caller has to change.",
    "Please keep the change small and leave the other functions alone.",
    "The release is tested with many values, the check here with one.",
    "We talked about a new name for the function and decided against it.",
)

_TITLE = ("# Change $fn", "# New behaviour of $fn", "# Fix the result of $fn")
_SUMMARY = (
    "## Summary\n\nThis is about $fn in $path. From now on it should $phrase.",
    "## Summary\n\nThe function $fn in $path should $phrase.",
    "## What we want\n\nIn the next release $fn in $path should $phrase.",
)
_EXAMPLE = "## Example\n\n```python\n>>> $fn($value)\n$result\n```"
_SCOPE = (
    "## Scope\n\nOnly $fn is yours. $partner changes $pfn in $ppath and both patches are merged.",
    "## Partner\n\n$partner works on $pfn in $ppath at the same time.",
)
_CHECKS = ("## Check\n\nRun $check $fn before you finish.", "## How to check\n\nThe command is $check $fn")


def _pull_request(rng: random.Random) -> str:
    background = "## Background\n\n" + " ".join(rng.sample(_BACKGROUND, k=rng.randint(1, 3)))
    middle = [_EXAMPLE, background, rng.choice(_SCOPE)]
    rng.shuffle(middle)
    return "\n\n".join((rng.choice(_TITLE), rng.choice(_SUMMARY), *middle, "## Files\n\n$listing", rng.choice(_CHECKS)))


REGISTERS: Mapping[str, Callable[[random.Random], str]] = {
    "terse": lambda rng: rng.choice(_TERSE),
    "issue": lambda rng: rng.choice(_ISSUE),
    "conversation": lambda rng: rng.choice(_CONVERSATION),
    "pull_request": _pull_request,
}


def write_text(fields: InstructionFields, register: str, rng: random.Random) -> str:
    """Write the instruction. Raises KeyError for an unknown register."""
    value, result = fields.example
    return Template(REGISTERS[register](rng)).substitute(
        fn=fields.function,
        path=fields.path,
        phrase=rng.choice(PHRASES[fields.wanted.operation]).format(n=fields.wanted.number),
        current=f"return {fields.current.code}",
        partner=fields.partner,
        pfn=fields.partner_function,
        ppath=fields.partner_path,
        files=" ".join(fields.files),
        listing="\n".join(f"- {path}" for path in fields.files),
        check=fields.check,
        value=value,
        result=result,
    )
