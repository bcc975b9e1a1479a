"""Find and verify the folder of a checkpoint, by the name that a spec or the table `checkpoints` gives it."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from etpi_resources.lake.lake import Lake, LakeError, folder_hash
from etpi_resources.outside import read_object
from etpi_resources.packages import PACKAGE, PackageUnavailable, package_folder

HUB = "hub:"
LAKE = "checkpoint:"
COMMIT = re.compile(r"[0-9a-f]{40}")


def pinned_folder(lake: Lake, model: str, sha256: str | None) -> tuple[Path, str]:
    """Return (folder, identity) of a model that a spec names; the identity changes with the model's files.

    Args:
        model: "checkpoint:HASH" of this lake, "hub:REPO@COMMIT", "package:NAME==VERSION@SHA256", or a folder.
        sha256: `folder_hash` of a folder; the other names contain their pin.

    Raises:
        LakeError: the checkpoint does not exist, COMMIT is not a commit, or the folder's hash differs from the spec's.
    """
    if model.startswith(LAKE):
        identity = model.removeprefix(LAKE)
        folder = lake.checkpoint_dir(identity)
        if not (folder / "config.json").is_file():
            raise LakeError(
                f"{model}: this lake has no such checkpoint. The catalog lists them: select checkpoint_id, experiment, "
                "role, seed, step from checkpoints"
            )
        return folder, identity
    if model.startswith(HUB):
        if not COMMIT.fullmatch(model.partition("@")[2]):
            raise LakeError(f"{model} can move; name it as hub:REPO@COMMIT with the commit's 40 hex digits")
        return checkpoint_folder(lake.root, model), hashlib.sha256(model.encode()).hexdigest()[:16]
    if model.startswith(PACKAGE):
        return checkpoint_folder(lake.root, model), hashlib.sha256(model.encode()).hexdigest()[:16]
    folder = Path(model).resolve()
    if not (folder / "config.json").is_file():
        raise LakeError(f"{folder} contains no config.json; name a folder with a saved model")
    if (actual := folder_hash(folder)) != sha256:
        raise LakeError(
            f"{folder} hashes to {actual}, the spec's sha256 is {sha256}; put the right files there, or set it"
        )
    return folder, actual


def checkpoint_folder(root: Path, path: str) -> Path:
    """Return the folder of a checkpoint from its `path` in the table `checkpoints`; download other models once.

    Args:
        root: the lake's root, for relative paths.

    Raises:
        LakeError: the folder is missing; or the model cannot be downloaded and is not cached.
    """
    if path.startswith(PACKAGE):
        try:
            return package_folder(path)
        except PackageUnavailable as error:
            raise LakeError(str(error)) from error
    if not path.startswith(HUB):
        if not (folder := root / path).is_dir():
            raise LakeError(
                f"the checkpoint {folder} is missing. If the lake was pulled without weights, `etpi pull EXPERIMENT` "
                "fetches it. Else restore a backup; or `etpi verify --set-aside`, and `etpi run` trains it again"
            )
        return folder
    repo, _, revision = path.removeprefix(HUB).partition("@")
    from huggingface_hub import constants, snapshot_download

    try:
        wanted = ["*.safetensors", "*.json", "*.txt", "*.jinja"]
        return Path(snapshot_download(repo, revision=revision, allow_patterns=wanted))
    except Exception as error:
        # The client raises a dozen unrelated classes for this one fault.
        raise LakeError(
            f"{repo} at {revision} is not in the hub's cache here and cannot be downloaded ({type(error).__name__}: "
            f"{error}). Run where the hub can be reached; or download it there with `hf download {repo} --revision "
            f"{revision}`, and copy models--{repo.replace('/', '--')} of that cache into {constants.HF_HUB_CACHE}."
        ) from error


def text_settings(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the settings of the language model in a config.json: multimodal models have them in `text_config`."""
    text = config.get("text_config")
    return text if isinstance(text, dict) else config


def context_length(file: Path) -> int | None:
    """Return the context that a config.json states. Raises OSError, or ValueError if it is no config.json."""
    config, key = read_object(file), "max_position_embeddings"
    length = text_settings(config).get(key) or config.get(key)
    return length if type(length) is int and length > 0 else None


def cached_file(repo: str, revision: str, name: str) -> Path | None:
    """Return one file of a repository in the hub's cache; None if it is not there."""
    from huggingface_hub import try_to_load_from_cache

    path = try_to_load_from_cache(repo, name, revision=revision)
    return Path(path) if isinstance(path, str) else None


def hub_file(repo: str, revision: str, name: str) -> Path:
    """Return one file of a repository at a commit; download it once.

    Raises:
        OSError: it is not in the hub's cache and cannot be downloaded.
    """
    from huggingface_hub import hf_hub_download

    try:
        return Path(hf_hub_download(repo, name, revision=revision))
    except Exception as error:
        # The client raises a dozen unrelated classes for this one fault.
        raise OSError(f"it is not in the hub's cache and cannot be downloaded ({type(error).__name__})") from error
