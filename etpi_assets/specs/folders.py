"""The folders of specs besides those that etpi ships: a user's own, and those of installed plugins.

A user's are the folders in `ETPI_SPECS` (separated as in `PATH`), else `specs` in the working folder. A plugin's is the
package that an entry point of the group `etpi.specs` names (docs/own_tasks.md).
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.metadata import entry_points
from importlib.util import find_spec
from pathlib import Path

VARIABLE = "ETPI_SPECS"
DEFAULT = "specs"
PLUGINS = "etpi.specs"
"""The group of entry points that name packages of specs."""
FOLDERS = {"suite": "suites", "rollout_set": "rollout_sets", "experiment": "experiments"}
"""The set of a spec -> the subfolder that holds its file. Subfolders of that one group files."""


FORMATS = "formats"
"""The subfolder of a user's formats of recorded runs (docs/own_data.md)."""


@dataclass(frozen=True)
class SpecFolder:
    """One folder of specs.

    Attributes:
        origin: what names it: the variable, the working folder, or the plugin.
        problems: one text for each fault of its layout, with the remedy; a folder with problems is not read.
    """

    path: Path
    origin: str
    problems: tuple[str, ...] = ()


def user_folders() -> list[SpecFolder]:
    """Return the folders of a user's specs, in order; an unrelated `specs` in the working folder is none."""
    if named := os.environ.get(VARIABLE):
        return [checked(Path(name).expanduser(), VARIABLE) for name in named.split(os.pathsep) if name]
    default = Path(DEFAULT)
    if any((default / name).is_dir() for name in (*FOLDERS.values(), FORMATS)) or any(default.glob("*.toml")):
        return [checked(default, "the working folder")]
    return []


def format_files() -> dict[str, Path]:
    """Return name -> file of the formats of recorded runs in the user's folders."""
    files = (file for folder in user_folders() for file in sorted((folder.path / FORMATS).glob("*.toml")))
    return {file.stem: file for file in files}


@cache
def plugin_folders() -> tuple[SpecFolder, ...]:
    """Return the folders of specs of installed plugins, in the order of their names; of their code, only the
    packages around these folders are imported."""
    points = {(point.name, point.module) for point in entry_points(group=PLUGINS)}
    return tuple(_plugin_folder(name, package) for name, package in sorted(points))


def _plugin_folder(name: str, package: str) -> SpecFolder:
    try:
        spec = find_spec(package)
    except ModuleNotFoundError:
        spec = None
    if spec is None or not spec.submodule_search_locations:
        problem = f"the plugin {name} names {package} as its specs, which is not an installed package; install it again"
        return SpecFolder(Path(package), f"plugin {name}", (problem,))
    return checked(Path(spec.submodule_search_locations[0]), f"plugin {name}")


def checked(path: Path, origin: str) -> SpecFolder:
    """Return the folder with its absolute path and the problems of its layout."""
    absolute = path.absolute()
    return SpecFolder(absolute, origin, tuple(_problems(absolute, origin)))


def where_read(folders: Sequence[SpecFolder]) -> str:
    """Return, for messages, which folders of the user's specs were read and how to name others."""
    if not folders:
        return f"No specs of your own were read: {Path(DEFAULT).absolute()} has none, and {VARIABLE} is not set."
    names = ", ".join(f"{folder.path} ({folder.origin})" for folder in folders)
    other = "" if folders[0].origin == VARIABLE else f" {VARIABLE} can name others."
    return f"Your specs were read from {names}.{other}"


def _problems(folder: Path, origin: str) -> Iterator[str]:
    if not folder.is_dir():
        yield f"the specs folder {folder} ({origin}) does not exist; make it, or name another in {VARIABLE}"
        return
    subfolders = [name for name in FOLDERS.values() if (folder / name).is_dir()]
    if not subfolders and not (folder / FORMATS).is_dir():
        yield f"the specs folder {folder} ({origin}) has none of {', '.join(FOLDERS.values())}; {_remedy(folder)}"
        return
    for file in sorted(folder.rglob("*.toml")):
        parts = file.relative_to(folder).parts
        if any(part.startswith(".") for part in parts):
            continue
        if parts[0] == FORMATS and len(parts) == 2:
            continue
        if parts[0] not in subfolders or len(parts) == 1:
            near = difflib.get_close_matches(parts[0], FOLDERS.values(), n=1)
            targets = " or ".join(f"{name}/" for name in near or FOLDERS.values())
            yield f"{file} would not be read; move it to {targets} in {folder}, or out of that folder"
        elif wrong := set(parts[1:-1]) & set(FOLDERS.values()):
            yield f"{file} is in {wrong.pop()}/ below {parts[0]}/, one level too deep; move it to {folder}/"


def _remedy(folder: Path) -> str:
    """Return which folder was probably meant: the parent, or the one folder below that has the subfolders."""
    if folder.name in FOLDERS.values():
        return f"it is one level too deep: name {folder.parent}"
    below = [path for path in folder.iterdir() if any((path / name).is_dir() for name in FOLDERS.values())]
    if len(below) == 1:
        return f"it is one level too high: name {below[0]}"
    return f"a spec is FOLDER/experiments/NAME.toml: mkdir {folder / 'experiments'}"
