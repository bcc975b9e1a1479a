"""Write new specs into the user's folder, check them by loading all specs, and list the assets of a run."""

from __future__ import annotations

import json
import re
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from etpi.run.columns import WIDTH
from etpi.run.console_table import step_lines
from etpi_assets.planning.planner import open_steps, plan
from etpi_assets.specs.folders import DEFAULT, FOLDERS, FORMATS, user_folders
from etpi_assets.specs.json_schema import FOLDER, directive, schema
from etpi_assets.specs.load import SpecError, load_specs
from etpi_resources.lake.lake import Lake
from etpi_resources.templates import templates

TEMPLATES = Path(__file__).with_name("specs")
FORMAT = "format"
"""The set of a new format of recorded runs."""
_NAME = re.compile(r"[^A-Za-z0-9_.-]+")


@dataclass(frozen=True)
class NewSpec:
    """A spec to write: its set ("suite", "rollout_set", "experiment", or FORMAT), its name, and its TOML."""

    set: str
    name: str
    text: str


def spec_name(text: str) -> str:
    """Return a valid spec name that resembles the text."""
    return _NAME.sub("_", text).strip("_.-") or "mine"


def quoted(value: str | Mapping[str, str] | Sequence[str]) -> str:
    """Return a text, or a list or a table of texts, as TOML."""
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{key} = {quoted(text)}' for key, text in value.items())}}}"
    return f"[{', '.join(map(quoted, value))}]"


def rendered(template: str, **values: Any) -> str:
    """Return the TOML of a new spec: a template of `etpi/init/specs` with its values."""
    return templates(TEMPLATES, toml=quoted).get_template(f"{template}.toml.jinja").render(values).rstrip("\n") + "\n"


def write_specs(specs: Iterable[NewSpec], *, force: bool = False) -> list[Path]:
    """Write specs into the first folder of the user's specs (default: `specs` in the working folder).

    Nothing stays written if one of them is invalid.

    Args:
        force: replace files that exist.

    Raises SpecError: a file or another spec has the name, or the specs are invalid.
    """
    files = {_file_of(spec.set, spec.name): spec for spec in specs}
    before = {file: file.read_text(encoding="utf-8") if file.exists() else None for file in files}
    if not force:
        refuse_existing([(spec.set, spec.name) for spec in files.values()])
    for file, spec in files.items():
        file.parent.mkdir(parents=True, exist_ok=True)
        if spec.set == FORMAT:
            file.write_text(spec.text, encoding="utf-8")
            continue
        file.write_text(directive(spec.set) + spec.text, encoding="utf-8")
        schema_file = file.parents[1] / FOLDER / f"{spec.set}.json"
        schema_file.parent.mkdir(exist_ok=True)
        schema_file.write_text(json.dumps(schema(spec.set), indent=1) + "\n", encoding="utf-8")
    try:
        loaded = load_specs()
        for spec in files.values():
            if spec.set != FORMAT:
                loaded.get(spec.set, spec.name)
    except SpecError:
        for file, text in before.items():
            file.unlink() if text is None else file.write_text(text, encoding="utf-8")
        raise
    return list(files)


def refuse_existing(names: Iterable[tuple[str, str]]) -> None:
    """Raise SpecError if the file of a new spec ((set, name) each) exists."""
    if existing := [str(file) for file in (_file_of(*name) for name in names) if file.exists()]:
        raise SpecError(f"{', '.join(existing)} exist already; choose another --name, or replace them with --force")


def _file_of(set: str, name: str) -> Path:
    folders = user_folders()
    folder = folders[0].path if folders else Path(DEFAULT).absolute()
    return folder / FOLDERS.get(set, FORMATS) / f"{name}.toml"


def announcement(files: Sequence[Path], name: str, export: str = "trl", first: Sequence[str] = ()) -> str:
    """Return the text that ends `etpi init`: the files, the assets of a run, and the next commands.

    Args:
        name: of the experiment, or of the rollout set where there is none.
        export: the format that the last command names; empty: no such command.
        first: experiments to run before.
    """
    steps = open_steps(plan(name, load_specs(), Lake.open()))
    shown = [file.relative_to(Path.cwd()) if file.is_relative_to(Path.cwd()) else file for file in files]
    lines = [textwrap.fill(line, WIDTH, subsequent_indent="    ") for line in step_lines(steps)]
    template = templates(Path(__file__).parent).get_template("announcement.txt.jinja")
    return template.render(files=shown, steps=steps, lines=lines, name=name, first=first, export=export).rstrip("\n")
