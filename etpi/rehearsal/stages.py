"""Run a rehearsal and judge each asset of its chain from the lake's manifests."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from etpi.rehearsal.shrink import PREFIX, REASON, Rehearsal
from etpi_assets.planning.planner import plan
from etpi_assets.specs.load import load_specs
from etpi_resources.backend import CLUSTER_VARIABLE
from etpi_resources.lake.lake import Lake, LakeError, Ref
from etpi_resources.lake.manifest import Manifest
from etpi_resources.process.supervise import supervised

Verdict = Literal["passes", "would block", "not reached", "not applicable"]


@dataclass(frozen=True)
class Finding:
    """A failed check, or the error that ended an asset: the check ("" for an error) and its message with the remedy."""

    check: str
    message: str


@dataclass(frozen=True)
class Stage:
    """The outcome of one asset partition.

    Attributes:
        key: the name of the real spec.
        blocks: what would stop the real run here.
        unjudged: failed checks whose outcome says nothing at this size.
        accepted: failed checks that the spec itself overrides.
    """

    asset: str
    key: str
    verdict: Verdict
    seconds: float
    blocks: tuple[Finding, ...] = ()
    unjudged: tuple[str, ...] = ()
    accepted: tuple[str, ...] = ()


def run(rehearsal: Rehearsal) -> list[Stage]:
    """Run the chain by `etpi run`; return its stages in order. Raises LakeError: it ended without a result."""
    lake_folder, specs_folder = rehearsal.folder / "lake", rehearsal.folder / "specs"
    lake_folder.mkdir(parents=True, exist_ok=True)
    result_file, log_file = rehearsal.folder / "result.json", rehearsal.folder / "run.log"
    environment = {**os.environ, "ETPI_DATA": str(lake_folder), "ETPI_SPECS": str(specs_folder)}
    for variable in (CLUSTER_VARIABLE, "DAGSTER_HOME", "ETPI_CATALOG"):  # a rehearsal runs on this machine, by itself
        environment.pop(variable, None)
    line = supervised([sys.executable, "-m", "etpi", "run", PREFIX + rehearsal.name, "--rebuild", "--json"])
    with (
        result_file.open("w") as result,
        log_file.open("w", buffering=1) as log,
        subprocess.Popen(
            line, env=environment, stdout=result, stderr=subprocess.PIPE, text=True, errors="replace"
        ) as chain,
    ):
        assert chain.stderr is not None
        try:
            for text in chain.stderr:
                log.write(text)
                print(text.replace(PREFIX, ""), end="", file=sys.stderr)
        except BaseException:
            chain.terminate()
            raise
        code = chain.wait()
    text = result_file.read_text(encoding="utf-8")
    failures = [line for lines in json.loads(text)["failures"].values() for line in lines] if text else []
    if code and not failures:
        raise LakeError(f"the run ended with status {code}; its log is {log_file}")
    return list(_stages(rehearsal, failures))


def _stages(rehearsal: Rehearsal, failures: Sequence[str]) -> Iterator[Stage]:
    specs, lake = load_specs(rehearsal.folder / "specs"), Lake(rehearsal.folder / "lake")
    for step in plan(PREFIX + rehearsal.name, specs, lake):
        if step.asset.endswith("_spec"):
            continue
        ref = Ref(step.asset, step.set, step.key)
        manifest = lake.blocked(ref) or lake.current(ref)
        error = next((line for line in failures if line.startswith((f"{step.asset}:", f"{step.asset} "))), None)
        key, seconds = step.key.removeprefix(PREFIX), round(manifest.seconds or 0.0, 1) if manifest else 0.0
        if manifest is None:
            findings = (Finding("", error.partition(": ")[2]),) if error else ()
            yield Stage(step.asset, key, "would block" if error else "not reached", 0.0, findings)
        elif reason := manifest.notes.get("not_applicable"):
            yield Stage(step.asset, key, "not applicable", seconds, (Finding("", reason),))
        else:
            yield judged(rehearsal, Stage(step.asset, key, "passes", seconds), manifest)


def judged(rehearsal: Rehearsal, passed: Stage, manifest: Manifest) -> Stage:
    """Return the stage with what its failed checks, which the small spec overrides, say about the real run."""
    blocks, unjudged, accepted = [], [], []
    for check in manifest.checks:
        name, message = check["name"], check["message"]
        if overridden := check.get("overridden"):
            if overridden["reason"] != REASON:
                accepted.append(name)
                continue
        elif check["passed"] or not check["blocking"]:
            continue
        if name in rehearsal.undecided:
            unjudged.append(name)
        else:
            blocks.append(Finding(name, message))
    verdict: Verdict = "would block" if blocks else "passes"
    return replace(passed, verdict=verdict, blocks=tuple(blocks), unjudged=tuple(unjudged), accepted=tuple(accepted))


def first_stop(stages: Sequence[Stage]) -> Stage | None:
    """Return the first stage that would block the real run."""
    return next((stage for stage in stages if stage.verdict == "would block"), None)
