"""`etpi fetch`: public data sets and models that specs name, at a pinned revision; data with the hash of every file.

A data set whose revision is known here is fetched at that revision; the first fetch of another pins its newest one. Its
files' hashes go to `fetched.json` beside the lake's data. Later fetches, and another machine that has that file, get
the same bytes or an error.
"""

from __future__ import annotations

import json
import os
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from etpi.models import published_facts
from etpi_assets.planning.planner import SETS, set_of
from etpi_assets.specs.experiment import ExperimentSpec
from etpi_assets.specs.load import Specs
from etpi_resources.checkpoints import COMMIT, HUB, cached_file, checkpoint_folder
from etpi_resources.lake.files import write_atomically
from etpi_resources.lake.lake import Lake, LakeError, sha256_of

LOCK = "fetched.json"
_DATA = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))["data"]
_VARIABLE, _MODEL = re.compile(r"\$\{(\w+)\}"), re.compile(rf"{HUB}[\w./-]+@{COMMIT.pattern}")


@dataclass(frozen=True)
class Needed:
    """A model or data that specs read, and what is known of it (`models.toml`, `fetch.toml`).

    Attributes:
        name: hub:REPO@COMMIT of a model, or the variable with the path of data.
        repo: its repository on the hub; "": it is elsewhere, and `command` brings it.
        only: the files that are rows of the data set; others of its repository are other splits.
        revision, files: its commit, and the hashes of its files where public records agree on them.
        rows: the number of the data set's rows.
        gigabytes: the size of the model's weights.
        images: the container images that its tasks run in.
        note: what is not known of the data that a published run read.
    """

    name: str
    repo: str = ""
    only: str | None = None
    revision: str = ""
    files: Mapping[str, str] = field(default_factory=dict)
    rows: int | None = None
    gigabytes: float | None = None
    licence: str = "licence unknown"
    images: str = ""
    command: str = ""
    note: str = ""

    @property
    def is_model(self) -> bool:
        """Return whether it is a model of the hub."""
        return self.name.startswith(HUB)

    def here(self) -> bool:
        """Return whether this machine has it: in the hub's cache, or at the path of the variable."""
        if self.is_model:
            return cached_file(self.repo, self.revision, "config.json") is not None
        variable = self.name
        return bool(path := os.environ.get(variable)) and Path(path).expanduser().exists()

    def facts(self) -> str:
        """Format its repository, revision, size, licence and images, as far as they are known."""
        rows = f"{self.rows:,} rows" if self.rows else "size unknown"
        hashes = "hashes known" if self.files else "hashes: pinned by the first fetch"
        parts = [
            self.repo,
            f"revision {self.revision}" if self.revision else "no known revision: the first fetch pins the newest",
            f"about {self.gigabytes:g} GB" if self.gigabytes else rows,
            "" if self.is_model else hashes,  # a model's are in its commit
            self.licence,
            f"images: {self.images}" if self.images else "",
            self.note,
        ]
        return "; ".join(part for part in parts if part)


def _model(name: str) -> Needed:
    repo, _, revision = name.removeprefix(HUB).partition("@")
    known = published_facts(repo)
    licence = known.get("licence", Needed.licence)
    return Needed(name, repo, revision=revision, gigabytes=known.get("gigabytes"), licence=licence)


def _data(variable: str) -> Needed:
    return Needed(variable, **_DATA.get(variable, {}))


def rows_of(path: str) -> int | None:
    """Return the number of rows of the public data set that a spec's path names; None if it is not known."""
    match = _VARIABLE.fullmatch(path)
    return _data(match[1]).rows if match else None


def needed(names: Sequence[str], specs: Specs) -> list[Needed]:
    """Return the models, then the data that the named specs and those upstream of them read.

    Raises:
        SpecError: no spec has a name.
    """
    texts = [text for name in names for text in _texts(name, specs)]
    models, variables = (sorted({n for text in texts for n in named.findall(text)}) for named in (_MODEL, _VARIABLE))
    return [*map(_model, models), *map(_data, variables)]


def fetch(names: Sequence[str], specs: Specs, lake: Lake) -> int:
    """List what the named experiments, rollout sets and suites read, fetch what can be, and say where the rest is put.

    Returns 1 if anything is left.

    Raises:
        SpecError: no spec has a name.
    """
    wanted, left = needed(names, specs), 0
    for each in wanted:
        print(f"{each.name}\n  {each.facts()}")
        try:
            print(_fetched(each, lake))
        except LakeError as error:
            left += 1
            print(f"LEFT: {error}")
    if not wanted:
        print(f"{', '.join(names)}: there is nothing to download")
    elif left:
        print(f"\n{left} of {len(wanted)} are left; each says what to put where")
    return 1 if left else 0


def _fetched(each: Needed, lake: Lake) -> str:
    """Return where a model or the data are, fetched if they were not there. Raises LakeError if they cannot be had."""
    if each.is_model:
        return f"here: {checkpoint_folder(lake.root, each.name)}"
    if each.here():
        variable = each.name
        return f"here: {variable} is set to {os.environ[variable]}"
    if each.repo:
        return f"export {each.name}={_data_set(each, lake.root)}"
    how = each.command or "no public data set is known for it; docs/reference/environment.md says more"
    raise LakeError(f"{how}; then set {each.name}=FOLDER")


def _texts(name: str, specs: Specs) -> Iterator[str]:
    """Yield the resolved spec of a name and those upstream of it, as JSON."""
    kind = set_of(name, specs)
    for upstream in SETS:
        for key in specs.upstream_keys(kind, name, upstream):
            spec = specs.get(upstream, key)
            yield json.dumps(spec.model_dump(mode="json"))
            if isinstance(spec, ExperimentSpec) and spec.base.kind == "hub":
                yield spec.base.model


def _data_set(data: Needed, root: Path) -> Path:
    """Return the folder of a data set at its pinned revision; pin it if this is its first fetch.

    Raises LakeError: it cannot be downloaded, or a file is not the pinned one."""
    from huggingface_hub import HfApi, snapshot_download

    lock = root / LOCK
    pins: dict[str, Any] = json.loads(lock.read_text(encoding="utf-8")) if lock.is_file() else {}
    pin = pins.get(data.repo, {"revision": data.revision, "files": data.files})
    try:
        revision = pin["revision"] or str(HfApi().dataset_info(data.repo).sha)
        folder = Path(snapshot_download(data.repo, repo_type="dataset", revision=revision, allow_patterns=data.only))
    except Exception as error:  # the client raises a dozen unrelated classes for this one fault
        which = f" --revision {pin['revision']}" if pin["revision"] else ""
        which += f" --include '{data.only}'" if data.only else ""
        raise LakeError(
            f"{data.repo} cannot be downloaded and is not in the hub's cache ({type(error).__name__}: {error}). "
            f"Where there is network, run `hf download {data.repo} --repo-type dataset{which} --local-dir FOLDER`; "
            f"bring FOLDER here, and set {data.name}=FOLDER"
        ) from error
    hashes = {
        file.relative_to(folder).as_posix(): sha256_of(file)
        for file in sorted(folder.glob("**/*.parquet" if data.only else "**/*"))
        if file.is_file()
    }
    if other_splits := [name for name in hashes if data.only and not fnmatch(name, data.only)]:
        raise LakeError(f"{folder} has other splits too, which would be read as rows: remove {', '.join(other_splits)}")
    files = pin["files"] or hashes
    if changed := sorted(name for name in files.keys() | hashes if files.get(name) != hashes.get(name)):
        known = lock if data.repo in pins else "the published ones"
        raise LakeError(f"{folder}: {', '.join(changed)} differ from {known}; remove the folder and fetch again")
    if data.repo not in pins:
        write_atomically(lock, json.dumps({**pins, data.repo: {"revision": revision, "files": hashes}}, indent=1))
        print(f"{data.repo} is pinned at {revision} in {lock}")
    return folder
