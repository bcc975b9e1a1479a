"""Prompt templates as data: those that come with etpi, and a user's own in the folder `prompts` of a specs folder.

A prompt is a folder of `user.md`, `system.md` and `steering.md`, of which only `user.md` is needed.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from string import Template
from typing import Any

from etpi_assets.specs.plugins import near
from etpi_assets.specs.section import SpecError
from etpi_resources.inside import read_text

FOLDER = "prompts"
_ROLE = ("agent_id", "partner")
VARIABLES: Mapping[str, tuple[str, ...]] = {
    "system": _ROLE,
    "user": (*_ROLE, "instruction", "repo"),
    "steering": _ROLE,
}
"""The parts of a prompt, and the variables ($name) that each may use."""
_AGENTS = {"rollout_set": (("agent",),), "experiment": (("rl", "agent"), ("evaluate", "agent")), "suite": ()}
"""Set of a spec -> where its agent sections stand."""


@cache
def shipped_prompts() -> Mapping[str, Path]:
    """Return the folders of the prompts that come with etpi, by name: shared ones, then those of embedded worlds."""
    root = Path(__file__).resolve().parents[1]
    worlds = {path.parent.name: path for path in sorted((root / "worlds").glob(f"*/{FOLDER}"))}
    return worlds | {path.parent.name: path.parent for path in sorted((root / "agent" / FOLDER).glob("*/user.md"))}


@cache
def shipped_templates(name: str) -> Mapping[str, str]:
    """Return the templates of a shipped prompt by part. Raises FileNotFoundError: there is no such prompt."""
    if name not in (known := shipped_prompts()):
        raise FileNotFoundError(f"agent.prompt = {name!r}: there is no such prompt; known: {', '.join(known)}")
    return _read_templates(known[name])


def _read_templates(folder: Path) -> dict[str, str]:
    """Return the templates of a folder by part.

    Raises SpecError: a file cannot be read, or has another name than a part.
    """
    texts = {}
    for file in sorted(path for path in folder.iterdir() if not path.name.startswith(".")):
        if file.suffix != ".md" or file.stem not in VARIABLES:
            raise SpecError(
                f"{file}: a prompt has the files {', '.join(f'{part}.md' for part in VARIABLES)} only; move it"
            )
        try:
            texts[file.stem] = read_text(file).removesuffix("\n")
        except (OSError, ValueError) as error:
            raise SpecError(f"{file}: cannot be read: {error}") from error
    return texts


def fault_of(templates: Mapping[str, str]) -> str | None:
    """Return the part of the templates that no task can fill, and the reason; None if each can be filled."""
    if unknown := templates.keys() - VARIABLES.keys():
        return f"{min(unknown)}: a prompt has the parts {', '.join(VARIABLES)}"
    if "user" not in templates:
        return "user: a prompt without the part `user` tells no task"
    for part, text in templates.items():
        template = Template(text)
        if not template.is_valid():
            return f"{part}: a $ that begins no variable is written $$"
        if unknown := [name for name in template.get_identifiers() if name not in VARIABLES[part]]:
            return f"{part}: ${unknown[0]} is no variable; it has {', '.join(f'${n}' for n in VARIABLES[part])}"
    return None


def with_own_prompts(set_name: str, document: Mapping[str, Any], folders: Sequence[Path], file: Path) -> dict[str, Any]:
    """Return a document whose agent sections have the templates of the user's prompts that they name.

    Args:
        folders: folders of specs, in which `prompts/NAME` are searched.

    Raises SpecError: a name is that of no prompt, or of two.
    """
    resolved = copy.deepcopy(dict(document))
    for keys in _AGENTS[set_name]:
        table: Any = resolved
        for key in keys:
            table = table.get(key) if isinstance(table, dict) else None
        name = table.get("prompt") if isinstance(table, dict) else None
        if not isinstance(name, str) or table.get("templates") is not None:
            continue
        users = [path for folder in folders for path in sorted((folder / FOLDER).glob("*/"))]
        mine = [path for path in users if path.name == name]
        place = f"{file}: {'.'.join(keys)}.prompt"
        if len(mine) + (name in shipped_prompts()) > 1:
            raise SpecError(f"{place}: {name!r} is the name of two prompts, also of {mine[-1]}; rename the folder")
        if mine:
            table["templates"] = _read_templates(mine[0])
        elif name not in shipped_prompts():
            guess = near(name, [*shipped_prompts(), *(path.name for path in users)])
            root = folders[0] if folders else Path("specs")
            needed = f"{root / FOLDER / (Path(name).name or 'NAME')}/user.md, and system.md where it has one"
            raise SpecError(f"{place}: there is no prompt {name!r}.{guess} One of your own is {needed}")
    return resolved
