"""Bases trained elsewhere: a pinned revision on the hub, a pinned package, or a local folder with its hash."""

from __future__ import annotations

import hashlib

from etpi_assets.checks import outcome
from etpi_assets.specs.paths import expand
from etpi_assets.specs.training import BaseSection
from etpi_resources.checkpoints import COMMIT
from etpi_resources.lake.check_outcome import CheckOutcome
from etpi_resources.lake.lake import LakeError, folder_hash

PINNED = "base_is_pinned"


def pointer(base: BaseSection) -> tuple[dict[str, str], CheckOutcome]:
    """Return the checkpoint_id and path of a base that etpi did not train, and whether it is pinned."""
    return {"hub": hub_pointer, "path": path_pointer, "package": package_pointer}[base.kind](base)


def package_pointer(base: BaseSection) -> tuple[dict[str, str], CheckOutcome]:
    """Return the checkpoint_id and path of a package's model, which its name pins. Nothing is fetched here."""
    name = base.name_in_package
    row = {"checkpoint_id": hashlib.sha256(name.encode()).hexdigest()[:16], "path": name}
    return row, outcome(PINNED, True, case="package", base=base)


def hub_pointer(base: BaseSection) -> tuple[dict[str, str], CheckOutcome]:
    """Return the checkpoint_id and path of a hub base, and whether it is pinned. Nothing is downloaded here."""
    row = {"checkpoint_id": hashlib.sha256(base.name_in_hub.encode()).hexdigest()[:16], "path": base.name_in_hub}
    pinned = bool(COMMIT.fullmatch(base.revision or ""))
    figures = {} if pinned else {"revision": base.revision}
    return row, outcome(PINNED, pinned, figures, case="commit" if pinned else "branch", base=base)


def path_pointer(base: BaseSection) -> tuple[dict[str, str], CheckOutcome]:
    """Return the checkpoint_id and path of a local base, and whether its files hash to `base.sha256`.

    The hash is `lake.folder_hash`, which is also the name of a checkpoint's folder in a lake.

    Raises:
        LakeError: the folder does not exist or holds no model.
        PathError: the path names a variable that is not set.
    """
    assert base.path and base.sha256  # BaseSection requires both of a path base
    folder = expand(base.path).resolve()
    if not (folder / "config.json").is_file():
        raise LakeError(f"base.path = {base.path!r} ({folder}) holds no config.json; name a folder with a saved model")
    actual = folder_hash(folder)
    row = {"checkpoint_id": actual, "path": str(folder)}
    pinned = actual == base.sha256
    figures = {} if pinned else {"found": actual, "wanted": base.sha256}
    return row, outcome(PINNED, pinned, figures, folder=folder, actual=actual)
