"""`etpi fetch`: public data sets and models that specs name, at a pinned revision and with the hash of every file.

The first fetch of a data set pins it: the revision and the files' hashes go to `fetched.json` beside the lake's data.
Later fetches, and another machine that has that file, get the same bytes or an error.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from etpi_assets.planning.planner import SETS, set_of
from etpi_assets.specs.experiment import ExperimentSpec
from etpi_assets.specs.load import Specs
from etpi_resources.checkpoints import COMMIT, HUB, checkpoint_folder
from etpi_resources.lake.files import write_atomically
from etpi_resources.lake.lake import Lake, LakeError, sha256_of

DATA_SETS: Mapping[str, str] = {
    "ETPI_OPEN_AGENTRL": "y-ohtani/open_agentrl_grpo_2k",
    "ETPI_OPEN_AGENTRL_SFT": "y-ohtani/open_agentrl_like_sft",
    "ETPI_R2E_GYM": "R2E-Gym/R2E-Gym-Lite",
    "ETPI_SWE_BENCH": "princeton-nlp/SWE-bench_Verified",
}
"""Variable that a spec's path names -> data set of the hub."""

LOCK = "fetched.json"
_VARIABLE, _MODEL = re.compile(r"\$\{(\w+)\}"), re.compile(rf"{HUB}[\w./-]+@{COMMIT.pattern}")


def fetch(names: Sequence[str], specs: Specs, lake: Lake) -> int:
    """Fetch what the named experiments, rollout sets and suites read; print where it is. Returns 1 if anything is left.

    Raises:
        SpecError: no spec has a name.
        LakeError: a file differs from its pin, or a model cannot be downloaded.
    """
    texts = [text for name in names for text in _texts(name, specs)]
    for model in sorted({name for text in texts for name in _MODEL.findall(text)}):
        print(f"{model}: {checkpoint_folder(lake.root, model)}")
    missing = 0
    for variable in sorted({name for text in texts for name in _VARIABLE.findall(text)}):
        if path := os.environ.get(variable):
            print(f"{variable} is set: {path}")
        elif variable in DATA_SETS:
            print(f"export {variable}={_data_set(variable, lake.root)}")
        else:
            missing += 1
            print(f"{variable} is not set, and the hub has no data for it: see docs/reference/environment.md")
    return 1 if missing else 0


def _texts(name: str, specs: Specs) -> Iterator[str]:
    """Yield the resolved specs that a name stands for, as JSON: its own, and those upstream of it."""
    kind = set_of(name, specs)
    for upstream in SETS:
        for key in specs.upstream_keys(kind, name, upstream):
            spec = specs.get(upstream, key)
            yield json.dumps(spec.model_dump(mode="json"))
            if isinstance(spec, ExperimentSpec) and spec.base.kind == "hub":
                yield f"{HUB}{spec.base.repo}@{spec.base.revision}"


def _data_set(variable: str, root: Path) -> Path:
    """Return the folder of a data set at its pinned revision; pin it if this is its first fetch.

    Raises LakeError: it cannot be downloaded, or a file is not the pinned one."""
    from huggingface_hub import HfApi, snapshot_download

    repo, lock = DATA_SETS[variable], root / LOCK
    pins: dict[str, Any] = json.loads(lock.read_text(encoding="utf-8")) if lock.is_file() else {}
    pin = pins.get(repo)
    try:
        revision = pin["revision"] if pin else str(HfApi().dataset_info(repo).sha)
        folder = Path(snapshot_download(repo, repo_type="dataset", revision=revision))
    except Exception as error:  # the client raises a dozen unrelated classes for this one fault
        raise LakeError(
            f"{repo} cannot be downloaded and is not in the hub's cache ({type(error).__name__}: {error}). "
            f"Where there is network, run `hf download {repo} --repo-type dataset --local-dir FOLDER`; "
            f"bring FOLDER here, and set {variable}=FOLDER"
        ) from error
    hashes = {
        file.relative_to(folder).as_posix(): sha256_of(file) for file in sorted(folder.rglob("*")) if file.is_file()
    }
    if pin and pin["files"] != hashes:
        changed = sorted(name for name in pin["files"].keys() | hashes if pin["files"].get(name) != hashes.get(name))
        raise LakeError(f"{folder}: {', '.join(changed)} differ from {lock}; remove the folder and fetch again")
    if not pin:
        write_atomically(lock, json.dumps({**pins, repo: {"revision": revision, "files": hashes}}, indent=1))
        print(f"{repo} is pinned at {revision} in {lock}")
    return folder
