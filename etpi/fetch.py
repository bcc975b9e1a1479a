"""`etpi fetch`: public data sets and models that specs name, at a pinned revision and with the hash of every file.

A data set whose revision is known here is fetched at that revision; the first fetch of another pins its newest one. The
files' hashes go to `fetched.json` beside the lake's data. Later fetches, and another machine that has that file, get
the same bytes or an error.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from etpi_assets.planning.planner import SETS, set_of
from etpi_assets.specs.experiment import ExperimentSpec
from etpi_assets.specs.load import Specs
from etpi_resources.checkpoints import COMMIT, HUB, checkpoint_folder
from etpi_resources.lake.files import write_atomically
from etpi_resources.lake.lake import Lake, LakeError, sha256_of


@dataclass(frozen=True)
class DataSet:
    """A data set of the hub.

    Attributes:
        only: the files that are rows of the set; others of its repository are other splits.
        pin: its revision, and the hashes of its files where public records agree on them; {}: no revision is known.
        rows: the number of its rows, if known.
    """

    repo: str
    only: str | None = None
    pin: Mapping[str, Any] = field(default_factory=dict)
    rows: int | None = None


DATA_SETS: Mapping[str, DataSet] = {
    "ETPI_COOPERBENCH": DataSet("CodeConflict/cooperbench-dataset"),
    "ETPI_OPEN_AGENTRL": DataSet("y-ohtani/open_agentrl_grpo_2k"),
    "ETPI_OPEN_AGENTRL_SFT": DataSet("y-ohtani/open_agentrl_like_sft"),
    "ETPI_R2E_GYM": DataSet(
        "R2E-Gym/R2E-Gym-Lite", "data/train-*.parquet", {"revision": "8d3163011f01f9393bb3dc7700497a79a8686ae5"}, 4578
    ),
    "ETPI_SWE_BENCH": DataSet(
        "princeton-nlp/SWE-bench_Verified",
        "data/test-*.parquet",
        {
            "revision": "c104f840cc67f8b6eec6f759ebc8b2693d585d4a",
            "files": {
                "data/test-00000-of-00001.parquet": "a45b1fe4e2f0c8390b2b2938ac83e92ed5979000856808f3679c07812e9e6dcd"
            },
        },
    ),
}
"""Variable that a spec's path names -> its data set. R2E-Gym-Lite has nine `dev` splits beside `train`."""

ELSEWHERE: Mapping[str, str] = {
    "ETPI_TERMINAL_BENCH": "git clone https://github.com/laude-institute/terminal-bench-2 FOLDER && git -C FOLDER "
    "checkout 69671fbaac6d67a7ef0dfec016cc38a64ef7a77c (version 2.0 of Harbor's registry)"
}
"""Variable -> the command that brings its data."""

LOCK = "fetched.json"
_VARIABLE, _MODEL = re.compile(r"\$\{(\w+)\}"), re.compile(rf"{HUB}[\w./-]+@{COMMIT.pattern}")


def rows_of(path: str) -> int | None:
    """Return the number of rows of the public data set that a spec's path names; None if it is not known."""
    match = _VARIABLE.fullmatch(path)
    data = DATA_SETS.get(match[1]) if match else None
    return data.rows if data else None


def fetch(names: Sequence[str], specs: Specs, lake: Lake) -> int:
    """Fetch what the named experiments, rollout sets and suites read; print where it is. Returns 1 if anything is left.

    Raises:
        SpecError: no spec has a name.
        LakeError: a file differs from its pin, or a model cannot be downloaded.
    """
    texts = [text for name in names for text in _texts(name, specs)]
    models, variables = ({n for text in texts for n in named.findall(text)} for named in (_MODEL, _VARIABLE))
    for model in sorted(models):
        print(f"{model}: {checkpoint_folder(lake.root, model)}")
    missing = 0
    for variable in sorted(variables):
        if path := os.environ.get(variable):
            print(f"{variable} is set: {path}")
        elif variable in DATA_SETS:
            print(f"export {variable}={_data_set(variable, lake.root)}")
        else:
            missing += 1
            known = ELSEWHERE.get(
                variable, "no public data set is known for it; docs/reference/environment.md says more"
            )
            print(f"{variable} is not set: {known}")
    if not models | variables:
        print(f"{', '.join(names)}: there is nothing to download")
    return 1 if missing else 0


def _texts(name: str, specs: Specs) -> Iterator[str]:
    """Yield the resolved spec of a name and those upstream of it, as JSON."""
    kind = set_of(name, specs)
    for upstream in SETS:
        for key in specs.upstream_keys(kind, name, upstream):
            spec = specs.get(upstream, key)
            yield json.dumps(spec.model_dump(mode="json"))
            if isinstance(spec, ExperimentSpec) and spec.base.kind == "hub":
                yield spec.base.name_in_hub


def _data_set(variable: str, root: Path) -> Path:
    """Return the folder of a data set at its pinned revision; pin it if this is its first fetch.

    Raises LakeError: it cannot be downloaded, or a file is not the pinned one."""
    from huggingface_hub import HfApi, snapshot_download

    data, lock = DATA_SETS[variable], root / LOCK
    pins: dict[str, Any] = json.loads(lock.read_text(encoding="utf-8")) if lock.is_file() else {}
    pin = pins.get(data.repo, data.pin)
    try:
        revision = pin.get("revision") or str(HfApi().dataset_info(data.repo).sha)
        folder = Path(snapshot_download(data.repo, repo_type="dataset", revision=revision, allow_patterns=data.only))
    except Exception as error:  # the client raises a dozen unrelated classes for this one fault
        which = f" --revision {pin['revision']}" if pin else ""
        which += f" --include '{data.only}'" if data.only else ""
        raise LakeError(
            f"{data.repo} cannot be downloaded and is not in the hub's cache ({type(error).__name__}: {error}). "
            f"Where there is network, run `hf download {data.repo} --repo-type dataset{which} --local-dir FOLDER`; "
            f"bring FOLDER here, and set {variable}=FOLDER"
        ) from error
    hashes = {
        file.relative_to(folder).as_posix(): sha256_of(file)
        for file in sorted(folder.glob("**/*.parquet" if data.only else "**/*"))
        if file.is_file()
    }
    if other_splits := [name for name in hashes if data.only and not fnmatch(name, data.only)]:
        raise LakeError(f"{folder} has other splits too, which would be read as rows: remove {', '.join(other_splits)}")
    files = pin.get("files", hashes)
    if changed := sorted(name for name in files.keys() | hashes if files.get(name) != hashes.get(name)):
        known = lock if data.repo in pins else "the published ones"
        raise LakeError(f"{folder}: {', '.join(changed)} differ from {known}; remove the folder and fetch again")
    if data.repo not in pins:
        write_atomically(lock, json.dumps({**pins, data.repo: {"revision": revision, "files": hashes}}, indent=1))
        print(f"{data.repo} is pinned at {revision} in {lock}")
    return folder
