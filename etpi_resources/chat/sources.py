"""Find tokenizers and chat templates by name, and render templates: shipped ones, folders, and pinned names.

A pinned name is `hub:REPO@COMMIT` or `package:NAME==VERSION@SHA256`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from etpi_resources.chat import bounds
from etpi_resources.chat.template_worker import compiled
from etpi_resources.chat.tokenizer_files import CHAT_TEMPLATE, TOKENIZER_CONFIG, read_tokenizer, vocab_size
from etpi_resources.errors import ExpectedError
from etpi_resources.inside import read_text
from etpi_resources.outside import read_object
from etpi_resources.packages import PACKAGE, PackageUnavailable, package_folder
from etpi_resources.process.pool import in_order

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

_HOME = Path(__file__).parent / "tokenizers"
_HUB = "hub:"
_PART = 8
"""Conversations that a thread renders before it hands them over, which costs a switch of threads."""
Item = TypeVar("Item")
Result = TypeVar("Result")


class TokenizerUnavailable(ExpectedError, OSError):
    """A tokenizer of the hub is neither cached nor can it be downloaded; the message has the remedy."""


def named_tokenizer(name: str) -> PreTrainedTokenizerFast:
    """Load a tokenizer by name. Raises as `tokenizer_folder`."""
    if name == "qwen3":
        from etpi_resources.chat.tokenizers import qwen3

        return qwen3.load_tokenizer()
    return read_tokenizer(tokenizer_folder(name))


def token_texts(name: str) -> list[str]:
    """Return the text of each id of a tokenizer, by its number; it needs no chat template.

    Raises:
        FileNotFoundError, TokenizerUnavailable: as `load_chat_format`.
    """
    core = named_tokenizer(name).backend_tokenizer
    return core.decode_batch([[number] for number in range(vocab_size(core))], skip_special_tokens=False)


def tokenizer_folder(name: str) -> Path:
    """Return the folder with a name's tokenizer.json; download a pinned one once.

    Raises:
        FileNotFoundError: the name is neither known nor a folder with tokenizer.json.
        TokenizerUnavailable: the hub's files are not cached and cannot be downloaded.
    """
    folder = _HOME / "tiny" if name == "tiny" else _remote_folder(name) or Path(name)
    if not (folder / "tokenizer.json").is_file():
        raise FileNotFoundError(f"chat format {name!r}: it is neither tiny, qwen3, nor a folder with tokenizer.json")
    return folder


def _remote_folder(name: str) -> Path | None:
    """Return the folder of `hub:<repo>@<commit>` or `package:<name>==<version>@<sha256>`; None for any other name."""
    if name.startswith(PACKAGE):
        try:
            return package_folder(name)
        except PackageUnavailable as error:
            raise TokenizerUnavailable(str(error)) from error
    return _hub_folder(name) if name.startswith(_HUB) else None


def _hub_folder(name: str) -> Path:
    """Return the folder of a pinned repository's tokenizer and template; download them once."""
    from huggingface_hub import snapshot_download

    repo, _, commit = name.removeprefix(_HUB).partition("@")
    patterns = ["tokenizer.json", TOKENIZER_CONFIG, CHAT_TEMPLATE, "*.jinja"]
    try:
        return Path(snapshot_download(repo, revision=commit or None, allow_patterns=patterns))
    except Exception as error:
        # The client raises a dozen unrelated classes for this one fault.
        raise TokenizerUnavailable(
            f"the tokenizer {name} is not in the hub's cache here and cannot be downloaded ({type(error).__name__}). "
            f"Run where the hub can be reached, or download it there (`hf download {repo} --revision {commit}`) and "
            "name the folder in base.tokenizer and base.chat_template"
        ) from error


def template_source(name: str) -> str:
    """Return the Jinja source of a template by name, of a file, or of a model's folder. Raises as `folder_template`."""
    if name == "tiny":
        return (_HOME / "tiny" / "tiny.jinja").read_text(encoding="utf-8")
    if name == "terminal":
        return (_HOME / "terminal.jinja").read_text(encoding="utf-8")
    if folder := _remote_folder(name):
        return folder_template(folder)
    if Path(name).is_dir():
        return folder_template(Path(name))
    if os.path.lexists(name):
        return _template(Path(name))
    from etpi_resources.chat.tokenizers import qwen3

    return qwen3.chat_template(name)


def _template(file: Path) -> str:
    if not (text := read_text(file)).strip():
        raise ValueError(f"{file} is empty: write a chat template to it, or name another in base.chat_template")
    return text


def folder_template(folder: Path) -> str:
    """Return the template in a model's folder.

    That is its `chat_template.jinja` or first other `*.jinja`, else `chat_template` in chat_template.json or in its
    tokenizer's configuration. Of several templates by name, it is the one named "default".

    Raises:
        FileNotFoundError: there is none, or none of several is named "default".
        OSError, ValueError: its file is no regular file, too large, not UTF-8 or empty.
    """
    files = sorted(folder.glob("*.jinja"), key=lambda file: (file.name != "chat_template.jinja", file.name))
    if files:
        return _template(files[0])
    for file in (folder / CHAT_TEMPLATE, folder / TOKENIZER_CONFIG):
        template = read_object(file).get("chat_template") if file.exists() else None
        if isinstance(template, str) and template.strip():
            return template
        if template:
            listed = [one for one in template if isinstance(one, dict)] if isinstance(template, list) else []
            named = template if isinstance(template, dict) else {one.get("name"): one.get("template") for one in listed}
            if isinstance(default := named.get("default"), str):
                return default
            raise FileNotFoundError(
                f"{file}: `chat_template` has the templates {', '.join(map(str, named))} and none named default; write "
                "one to a .jinja file and name it in base.chat_template"
            )
    raise FileNotFoundError(
        f"{folder}: no *.jinja, and no `chat_template` in {CHAT_TEMPLATE} or {TOKENIZER_CONFIG}; name one"
    )


@lru_cache(maxsize=1)
def own_templates() -> frozenset[str]:
    """Return etpi's own templates; under them, a call is part of a message's text."""
    return frozenset(template_source(name) for name in ("tiny", "terminal"))


def is_shipped(template: str) -> bool:
    """Return whether etpi or TRL ships a template, so that this process renders it."""
    from etpi_resources.chat.tokenizers import qwen3

    return template in own_templates() or template in qwen3.chat_templates()


def map_conversations(
    template: str, function: Callable[[Item], Result], conversations: Iterable[Item]
) -> Iterator[Result]:
    """Yield what a function that renders returns for each conversation, in order.

    Several are in work at a time if workers render the template: each renders while this process prepares others.
    """
    if is_shipped(template):
        yield from map(function, conversations)
        return
    rest = iter(conversations)
    parts = iter(lambda: list(islice(rest, _PART)), [])
    with ThreadPoolExecutor(bounds.AT_ONCE, thread_name_prefix="render") as threads:
        for results in in_order((threads.submit(_all, function, part) for part in parts), 2 * bounds.AT_ONCE):
            yield from results


def _all(function: Callable[[Item], Result], items: Iterable[Item]) -> list[Result]:
    return [function(item) for item in items]


def render_template(
    tokenizer: Any,
    template: str,
    messages: list[Any],
    tools: list[Any] | None = None,
    generation_prompt: bool = False,
    **kwargs: Any,
) -> str:
    """Return what `apply_chat_template` does; only templates that etpi or TRL ships are rendered in this process.

    These need no sandbox either, which takes a third of a rendering.

    Raises:
        TemplateUnbounded: the template does not keep within the bounds of `bounds`.
        Exception: the template's own, of any class.
    """
    variables = {"messages": messages, "tools": tools, "documents": None, "add_generation_prompt": generation_prompt}
    variables = {**tokenizer.special_tokens_map, **variables, **kwargs}
    if is_shipped(template):
        return compiled(template, trusted=True).render(variables)
    return bounds.render(template, variables)
