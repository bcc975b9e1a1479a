"""Record that a person accepts a change of code: it does not matter to an existing version."""

from __future__ import annotations

import getpass
from dataclasses import replace
from datetime import UTC, datetime

from etpi_assets.planning.planner import Step, chain, node_of, plan, wanted
from etpi_assets.specs.load import Specs
from etpi_resources.lake.lake import Lake, LakeError, Manifest, Ref


class NotAcceptable(LakeError):
    """There is no change of code to accept; the message names the actual state."""


def accept(asset: str, key: str, specs: Specs, lake: Lake, *, because: str, by: str | None = None) -> Manifest:
    """Keep a version although the code that computes it has changed.

    The manifest records who accepted the change, when, why, and the two code versions. The data version does not
    change, so nothing downstream becomes stale.

    Args:
        because: the reason.
        by: who accepts; default: the user this process runs as.

    Returns:
        The manifest that is now current.

    Raises:
        NotAcceptable: the partition is not in the state "code", or no reason is given.
        SpecError: there is no such asset or partition.
    """
    node = node_of(asset)
    if node.set == "all":
        raise NotAcceptable(f"{asset} is rebuilt at the end of every run; there is nothing to accept")
    if not because.strip():
        raise NotAcceptable('say why the change does not matter: --because "..."')
    specs.entry(node.set, key)
    step = next(s for s in chain(node.set, key, specs, lake) if (s.asset, s.key) == (asset, key))
    if step.state != "code":
        reason = f": {step.reason}" if step.reason else ""
        raise NotAcceptable(f"{asset} of {key} is {step.state}{reason}; only a change of code can be accepted")
    current = lake.current(Ref(asset, node.set, key))
    assert current is not None  # it has the state "code"
    new = wanted(node, key, specs, lake)
    root = current.code.get("kept_root") or current.code.get("kept")
    entry = {
        "by": by or getpass.getuser(),
        "at": datetime.now(UTC).isoformat(timespec="seconds"),
        "because": because.strip(),
        "from": current.code.get("version") or "an older version of etpi",
        "to": new.code.whole.digest,
    }
    judged = replace(
        current,
        code={**new.code.to_json(), **({"kept_root": root} if root else {})},
        spec_hash=new.spec_hash,
        spec=new.spec,
        inputs=new.inputs,
        input_key=new.input_key,
        accepted=[*current.accepted, entry],
    )
    lake.store_code(new.code.whole.digest, new.code.whole.definitions)
    return lake.accept(judged)


def accept_all(experiment: str, specs: Specs, lake: Lake, *, because: str, by: str | None = None) -> list[Step]:
    """Accept every change of code in an experiment's chain; return the accepted steps.

    Raises:
        NotAcceptable, SpecError: as `accept`.
    """
    accepted: list[Step] = []
    # Planned again for each step: accepting an input may change a later step's state.
    while step := next((step for step in plan(experiment, specs, lake) if step.state == "code"), None):
        accept(step.asset, step.key, specs, lake, because=because, by=by)
        accepted.append(step)
    return accepted
