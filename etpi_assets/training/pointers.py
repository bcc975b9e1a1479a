"""Bases that are not made here: a pinned revision of a model on the hub, or a local folder with its hash.

Belongs here: naming them, verifying them, and finding their files when something needs them. Does not belong here: the
tiny base that is built here (`base`).
"""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

from etpi_assets.specs.models import BaseSection
from etpi_assets.specs.paths import expand
from etpi_resources.checks import CheckOutcome
from etpi_resources.lake import LakeError, folder_hash

HUB = "hub:"
PINNED = "base_is_pinned"
COMMIT = re.compile(r"[0-9a-f]{40}")


def hub_pointer(base: BaseSection) -> tuple[dict[str, str], CheckOutcome]:
    """(checkpoint_id and path of a hub base, whether it is pinned). Nothing is downloaded: `checkpoint_folder` does."""
    path = f"{HUB}{base.repo}@{base.revision}"
    row = {"checkpoint_id": hashlib.sha256(path.encode()).hexdigest()[:16], "path": path}
    if COMMIT.fullmatch(base.revision or ""):
        return row, CheckOutcome(PINNED, True, f"{base.repo} at commit {base.revision}")
    words = (
        f"base.revision = {base.revision!r} is a branch or tag, which can move; name the commit (40 hex digits, under "
        f"'Files and versions' of {base.repo})"
    )
    return row, CheckOutcome(PINNED, False, words, figures={"revision": base.revision})


def path_pointer(base: BaseSection) -> tuple[dict[str, str], CheckOutcome]:
    """(checkpoint_id and path of a local base, whether its files hash to `base.sha256`).

    The hash is that of `lake.folder_hash`: the name of a checkpoint's folder in a lake is its hash already.

    Raises:
        LakeError: the folder does not exist or holds no model.
        PathError: the path names a variable that is not set.
    """
    assert base.path and base.sha256  # what a path base has to have, as its model says
    folder = expand(base.path).resolve()
    if not (folder / "config.json").is_file():
        raise LakeError(f"base.path = {base.path!r} ({folder}) holds no config.json; name a folder with a saved model")
    found = folder_hash(folder)
    row = {"checkpoint_id": found, "path": str(folder)}
    if found == base.sha256:
        return row, CheckOutcome(PINNED, True, f"{folder} hashes to {found}")
    words = f"{folder} hashes to {found}, the spec says {base.sha256}; put the right files there, or set base.sha256"
    return row, CheckOutcome(PINNED, False, words, figures={"found": found, "wanted": base.sha256})


def checkpoint_folder(root: Path, path: str) -> Path:
    """Where the files of a checkpoint are, by its `path` in the table `checkpoints`; a hub model is downloaded once.

    Args:
        root: the lake's root, for relative paths.

    Raises:
        LakeError: the folder is gone; or the hub cannot be reached and its cache lacks the revision.
    """
    if not path.startswith(HUB):
        if not (folder := root / path).is_dir():
            raise LakeError(f"the checkpoint {folder} is gone; put it back, or materialize its asset again")
        return folder
    from huggingface_hub import snapshot_download

    repo, _, revision = path.removeprefix(HUB).partition("@")
    try:
        wanted = ["*.safetensors", "*.json", "*.txt", "*.jinja"]
        return Path(snapshot_download(repo, revision=revision, allow_patterns=wanted))
    except Exception as error:
        # The client raises a dozen unrelated classes for one thing a person can act on.
        raise LakeError(
            f"{repo} at {revision} is not in the hub's cache here and cannot be downloaded ({type(error).__name__}: "
            f"{error}). Run where the hub can be reached, or download it there with `hf download {repo} --revision "
            f"{revision}` and name the folder as base = {{kind = 'path', path, sha256}}."
        ) from error
