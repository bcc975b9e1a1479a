"""The student of a new experiment: its `[base]` section, and the parts of the model that are on this machine."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from os.path import isfile, join
from pathlib import Path

from etpi.models import family
from etpi_assets.specs.load import SpecError
from etpi_resources.chat.format import ChatFormat, load_chat_format
from etpi_resources.checkpoints import COMMIT, HUB, cached_file, context_length
from etpi_resources.lake.lake import folder_hash
from etpi_resources.packages import PACKAGE, package_folder

_REPO = re.compile(r"(?:hub:)?(?P<repo>[\w.-]+/[\w.-]+)(?:@(?P<revision>[\w./-]+))?")


@dataclass(frozen=True)
class Student:
    """The model to train.

    Attributes:
        names: keys of the experiment's `[base]`, without the hash of a folder.
        chat: its tokenizer and template; None if they cannot be loaded here.
        context: the longest sequence it takes, in tokens, if known.
        folder: its files, if they are here.
        unknown: why something of it could not be looked at; empty if everything was.
    """

    names: Mapping[str, str] = field(default_factory=dict)
    chat: ChatFormat | None = None
    context: int | None = None
    folder: Path | None = None
    unknown: str = ""

    @cached_property
    def base(self) -> Mapping[str, str]:
        """The experiment's `[base]`; all weights of a folder are read for its hash."""
        local = self.folder is not None and self.names["kind"] == "path"
        return {**self.names, **({"sha256": folder_hash(self.folder)} if local else {})}  # type: ignore[arg-type]

    @property
    def thinking_switch(self) -> bool:
        """Return whether its template has the argument `enable_thinking`."""
        return self.chat is not None and "enable_thinking" in self.chat.template


def read_student(model: str) -> Student:
    """Return the student of a name: `tiny`, a folder, REPO@COMMIT of the hub, or a package's pinned name.

    Raises SpecError: it is none of them, it names no commit, or the folder holds no model with a chat template, or
    one without bounds.
    """
    if model == "tiny":
        return Student({"kind": "tiny"}, load_chat_format("tiny"), 4096)
    if model.startswith(PACKAGE):
        return _packaged(model)
    if (folder := Path(model).expanduser()).is_dir():
        return _local(folder.resolve())
    match = None if model.startswith((".", "/", "~")) else _REPO.fullmatch(model)
    if match is None:
        raise SpecError(
            f"model {model}: neither `tiny`, nor a folder, nor package:NAME==VERSION@SHA256, nor REPO@COMMIT such as "
            "Qwen/Qwen3-4B@<commit>"
        )
    repo, revision = match["repo"], match["revision"]
    if COMMIT.fullmatch(revision or "") is None:
        problem = f"{revision!r} is no commit; a branch or tag can move" if revision else "it names no commit"
        raise SpecError(
            f"model {model}: {problem}. Write {repo}@ and the commit's 40 hex digits: "
            f"git ls-remote https://huggingface.co/{repo} HEAD"
        )
    return _hub(repo, revision)


def _local(folder: Path) -> Student:
    if not (folder / "config.json").is_file():
        raise SpecError(f"model {folder}: it holds no config.json; name a folder with a saved model")
    try:
        chat, context = load_chat_format(str(folder)), context_length(folder / "config.json")
    except (OSError, ValueError) as error:
        raise SpecError(f"model {folder}: {error}") from error
    base = {"kind": "path", "path": str(folder), "tokenizer": str(folder), "chat_template": str(folder)}
    return Student(base, chat, context, folder)


def _packaged(name: str) -> Student:
    """Return a package's model, which is fetched and converted if it is not cached."""
    try:
        folder = package_folder(name)
    except OSError as error:
        raise SpecError(f"model {name}: {error}") from error
    package, _, pin = name.removeprefix(PACKAGE).partition("@")
    sha256, _, dtype = pin.partition(":")
    base = {"kind": "package", "package": package, "sha256": sha256} | ({"dtype": dtype} if dtype else {})
    names = {"tokenizer": name, "chat_template": name}
    return Student({**base, **names}, load_chat_format(name), context_length(folder / "config.json"), folder)


def family_vocabulary(name: str) -> str | None:
    """Return the chat format of a served model, from its repository or folder; None if etpi does not know it."""
    if (known := family(name)) is not None:
        return known["vocabulary"]
    return name if isfile(join(name, "tokenizer.json")) else None


def _hub(repo: str, revision: str) -> Student:
    """Return a model of the hub; nothing is downloaded now, only files in the hub's cache are read."""
    name = f"{HUB}{repo}@{revision}"
    known = family(repo) or {}
    template = known.get("template")
    base = {
        "kind": "hub",
        "repo": repo,
        "revision": revision,
        "tokenizer": known["vocabulary"] if template else name,
        "chat_template": template or name,
    }
    config = cached_file(repo, revision, "config.json")
    unknown = [] if config else [f"the context length of {repo} (its config.json is not in the hub's cache here)"]
    chat = context = None
    if template or config:
        try:
            chat = load_chat_format(base["tokenizer"], template)
            context = context_length(config) if config else None
        except (OSError, ValueError) as error:
            unknown.append(" ".join(str(error).split()))
    if chat is None:
        unknown.append(f"lengths in tokens (the tokenizer of {repo} is not on this machine)")
    return Student(base, chat, context, config.parent if config else None, "; ".join(unknown))
