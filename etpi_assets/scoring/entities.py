"""Files and functions in texts and bash commands: which are named, which spellings mean one file, which are edited.

These count as edits: `sed -i` and `perl -i`, redirections (heredocs too), `tee`, the target of `cp` and `mv`, `patch`,
`git apply` and `apply_patch` with the patch in the command, Python code (a heredoc or `-c`) that writes and names the
file, and the writing commands of editor tools (`str_replace_editor`, `Edit`, `Write`, ...); each also in the body of a
loop over named files, and in the text of `bash -c`. An editor call without a file name (SWE-agent's windowed `edit`)
does not count, because the command does not show which file it writes.
"""

from __future__ import annotations

import posixpath
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from etpi_assets.agent.bash_tree import commands
from etpi_assets.specs.rollout_set import ScoringSection
from etpi_resources.outside import loads

_CD = re.compile(r"(?:^|[;&|\n(])[^\S\n]*cd\s+([\"']?)([\w./-]+)\1")
_MAY_EDIT = re.compile(
    r">|\bsed\b|\bperl\b|\btee\b|\bcp\b|\bmv\b|patch|apply|python|write|edit|replace|create|insert", re.IGNORECASE
)
_PYTHON_WRITES = re.compile(
    r"open\((?:(?!open\()[^)])*[\"'][rb]?[wax+][b+]{0,2}[\"']|\.write_text\(|\.write_bytes\(|\.writelines?\(|fileinput"
)
_PATCHED = re.compile(r"^(?:\+\+\+ (?:b/)?|\*\*\* (?:(?:Update|Add) File|Move to): )(\S+)", re.MULTILINE)
_EDITORS = frozenset(
    {"str_replace_editor", "str_replace_based_edit_tool", "edit", "multiedit", "multi_edit", "write", "notebookedit",
     "edit_file", "write_file", "write_to_file", "create_file", "create", "insert", "str_replace", "replace",
     "replace_in_file", "search_replace", "insert_content", "apply_diff", "apply_patch", "patch"}
)  # fmt: skip
"""Names of tools that write a file, in lower case."""
_EDITOR_VERBS = frozenset({"create", "str_replace", "insert", "append", "write"})
_EDITOR_PATHS = ("path", "file_path", "filePath", "filename", "file", "notebook_path", "target_file")
_SHELL_NAMES = frozenset({"bash", "sh", "zsh", "dash", "ksh"})
_BEFORE_COMMAND = frozenset({"sudo", "env", "time", "xargs"})
_MOST_SHELLS = 3
"""Shells within shells that are read."""
_LONGEST_PATH = 4096
"""Characters of a path."""


@dataclass(frozen=True)
class Patterns:
    """The spec's compiled patterns. `ignored` holds the message commands, which are never functions of a task."""

    path: re.Pattern[str]
    function: re.Pattern[str]
    ignored: frozenset[str] = frozenset()

    @classmethod
    def of(cls, scoring: ScoringSection) -> Patterns:
        """Compile the patterns of a scoring section; raises re.error if one is not a regular expression."""
        return cls(
            re.compile(scoring.path_pattern), re.compile(scoring.function_pattern), frozenset(scoring.message_commands)
        )

    def paths(self, text: str) -> list[str]:
        """Return the paths a text names, normalised, each once, in order."""
        return list(dict.fromkeys(normalise(match) for match in self.path.findall(text)))

    def functions(self, text: str) -> list[str]:
        """Return the functions a text names, each once, in order; not parts of paths, and not message commands."""
        names = dict.fromkeys(self.function.findall(self.path.sub(" ", text)))
        return [name for name in names if name not in self.ignored]


def normalise(path: str) -> str:
    """Normalise a path: `./a//b/../c.py` becomes `a/c.py`; an absolute path stays absolute."""
    return posixpath.normpath(re.sub("/+", "/", path))


class KnownFiles:
    """A set of files that recognises other spellings of their paths.

    A spelling may be relative, absolute, prefixed by `./`, `a/` or the checkout's folder, or shortened from the left
    where that is unambiguous.
    """

    def __init__(self, known: Iterable[str]) -> None:
        self._known = {path: tuple(path.strip("/").split("/")) for path in map(normalise, known)}
        self._by_name: defaultdict[str, list[str]] = defaultdict(list)
        for path, parts in self._known.items():
            self._by_name[parts[-1]].append(path)

    def __contains__(self, path: str) -> bool:
        return self.canonical(path) in self._known

    def canonical(self, path: str) -> str:
        """Return the known spelling of a path, or the normalised path if it is not a known file.

        A longer spelling is a known path behind further folders; for a known bare file name it must be absolute, so
        that `docs/setup.py` is not `setup.py`. A shorter spelling counts if exactly one known path ends in it.
        """
        path = normalise(path)
        if path in self._known:
            return path
        parts = tuple(path.strip("/").split("/"))
        same_name = self._by_name.get(parts[-1], ())
        longer = [
            known
            for known in same_name
            if _ends_in(parts, self._known[known]) and (len(self._known[known]) > 1 or path.startswith("/"))
        ]
        if longer:
            return max(longer, key=lambda known: len(self._known[known]))
        shorter = [known for known in same_name if _ends_in(self._known[known], parts)]
        return shorter[0] if len(shorter) == 1 else path


def _ends_in(parts: tuple[str, ...], end: tuple[str, ...]) -> bool:
    return len(end) <= len(parts) and parts[len(parts) - len(end) :] == end


def touched(command: str, patterns: Patterns, files: KnownFiles) -> set[str]:
    """Return the files (canonical) and functions that a bash command names; a path after `cd DIR` is in DIR."""
    folders = [(match.end(), match[2]) for match in _CD.finditer(command)] if "cd " in command else []
    named, folder, passed = set(), "", 0
    for match in patterns.path.finditer(command):
        while passed < len(folders) and folders[passed][0] <= match.start():
            folder, passed = folders[passed][1], passed + 1
        named.add(files.canonical(posixpath.join(folder, match[0])))
    named.update(patterns.functions(command))
    return named


def edited(command: str, patterns: Patterns, files: KnownFiles) -> set[str]:
    """Return the files that a bash command writes to and, if there are any, the functions it names.

    The module's docstring lists which commands count. Files in /tmp do not.
    """
    if not _MAY_EDIT.search(command):
        return set()
    written = {files.canonical(path) for path in _written(command, patterns.path) if not path.startswith("/tmp/")}
    return written.union(patterns.functions(command)) if written else written


def _written(command: str, pattern: re.Pattern[str], depth: int = 0) -> Iterator[str]:
    editor_files = _editor_call(command)
    if editor_files is not None:
        yield from editor_files
        return
    folder = ""
    for each in commands(command):
        words = each.words
        while len(words) > 1 and words[0] in _BEFORE_COMMAND:
            words = words[1:]
        paths = [word for word in words[1:] if pattern.fullmatch(word)]
        name = posixpath.basename(words[0]) if words else ""
        if name in _SHELL_NAMES and (script := _script(words)) and depth < _MOST_SHELLS:
            inner = _written(script, pattern, depth + 1)
            yield from (posixpath.join(folder, path) for path in inner)
            continue
        if name == "cd" and len(words) > 1 and len(folder) + len(words[1]) < _LONGEST_PATH:
            folder = posixpath.join(folder, words[1])
        files = [target for target in each.targets if pattern.fullmatch(target)]
        in_place = name in ("sed", "perl") and any(re.match(r"-[a-zA-Z]*i|--in-place", word) for word in words[1:])
        edits = name == "create" or (name.lower() in _EDITORS and len(words) > 1 and words[1] in _EDITOR_VERBS)
        if in_place or edits or name == "tee":
            files += paths
        elif name in ("cp", "mv"):
            files += paths[-1:] if words[-1:] == paths[-1:] else []
        elif name in ("patch", "apply_patch") or (name == "git" and "apply" in words[1:]):
            files += paths if name == "patch" else []
            files += [path for text in (*each.bodies, *words[1:]) for path in _PATCHED.findall(text)]
        elif name.startswith("python"):
            code = "\n".join([*each.bodies, *(b for a, b in zip(words, words[1:], strict=False) if a == "-c")])
            if _PYTHON_WRITES.search(code):
                files += pattern.findall(code)
        yield from (posixpath.join(folder, path) for path in files)


def _editor_call(command: str) -> list[str] | None:
    """Return the files that an editor tool's call (`NAME {json}`) writes to; None if the command is not such a call."""
    name, _, arguments = command.partition(" ")
    if name.lower() not in _EDITORS or not arguments.lstrip().startswith("{"):
        return None
    try:
        values = loads(arguments)
    except ValueError:
        return []
    verb = values.get("command")
    if verb is not None and verb not in _EDITOR_VERBS:
        return []
    named = [values[key] for key in _EDITOR_PATHS if isinstance(values.get(key), str)]
    return named or [path for text in values.values() if isinstance(text, str) for path in _PATCHED.findall(text)]


def _script(words: Sequence[str]) -> str | None:
    """Return the commands of `bash -c COMMANDS`, whose flags may be joined (`-lc`)."""
    flags = (at for at, word in enumerate(words[1:-1], 1) if re.fullmatch(r"-[a-z]*c", word))
    return next((words[at + 1] for at in flags), None)
