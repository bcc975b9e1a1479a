"""Downloads that grading may make. The agents' sandboxes have no network in any case.

Nothing that an agent wrote runs with network either. The suite's own code (its runner, its tests, its reference) runs
once with a way to package indexes, and everything it fetches is recorded. Then all grading, of references and of
agents, is answered from the recording: the same versions every time, without a network.

The policy is `params.grading` of a suite:

    network    none: answer from a recording if there is one; index: record what is missing, from package indexes;
               open: record from any host
    hosts      further hosts that `index` may ask
    recording  the folder of the recording; default: downloads/<suite> beside the lake's assets
    most_gib   the recording's largest size; default: 20
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from etpi_assets.specs.paths import expand
from etpi_resources.hashes import json_hash
from etpi_resources.lake.lake import Lake
from etpi_resources.sandboxes import Environment, SandboxUnavailable
from etpi_resources.sandboxes.downloads.proxy import (
    INDEX_HOSTS,
    MOST_BYTES,
    ProxyUnavailable,
    shared_log,
    shared_proxy,
    through_proxy,
)

NETWORKS = ("none", "index", "open")
_KEYS = ("network", "hosts", "recording", "most_gib")


def policy(suite: str, grading: Any) -> dict[str, Any]:
    """Return a suite's policy as JSON, complete. Raises ValueError for a value that is none."""
    where = f"suite {suite}: params.grading"
    if not isinstance(grading, Mapping) or set(grading) - set(_KEYS):
        raise ValueError(f"{where} is a table with the keys {', '.join(_KEYS)}; found {grading!r}")
    network, hosts, recording = grading.get("network"), grading.get("hosts") or [], grading.get("recording")
    if network not in NETWORKS:
        raise ValueError(f"{where}.network is one of {', '.join(NETWORKS)}; found {network!r}")
    if not isinstance(hosts, list) or not all(isinstance(host, str) and host for host in hosts):
        raise ValueError(f"{where}.hosts is a list of host names; found {hosts!r}")
    most = grading.get("most_gib", MOST_BYTES >> 30)
    if isinstance(most, bool) or not isinstance(most, int | float) or not most > 0:
        raise ValueError(f"{where}.most_gib is a number of GiB; found {most!r}")
    return {"suite": suite, "network": network, "hosts": sorted(hosts), "recording": recording, "most_gib": most}


def identity(place: Mapping[str, Any]) -> list[Any]:
    """Return what of the policy can change a verdict; nothing where nothing may be downloaded."""
    rules = place["grading"]
    return [] if rules["network"] == "none" else [rules["network"], rules["hosts"]]


def recorded(place: Mapping[str, Any], task: object, record: Callable[[], bool]) -> None:
    """Let the suite's own code run once with a way to package indexes, if the policy allows it and it has not yet.

    Args:
        task: what decides which downloads the suite's code needs, JSON-serialisable.
        record: runs that code in a sandbox of `with_downloads(..., record=True)`; returns whether it came to its end.
    """
    if place["grading"]["network"] == "none":
        return
    mark = _folder(place) / "tasks" / f"{json_hash([identity(place), task])}.json"
    if mark.exists():
        return
    failed_before = _failures(place)
    if record() and _failures(place) == failed_before:
        mark.parent.mkdir(parents=True, exist_ok=True)
        mark.write_text(json.dumps({"task": task}, sort_keys=True), encoding="utf-8")


def available(place: Mapping[str, Any]) -> bool:
    """Return whether grading has downloads: it may record them, or there is a recording."""
    return place["grading"]["network"] != "none" or _folder(place).is_dir()


@contextmanager
def with_downloads(
    place: Mapping[str, Any], environment: Environment, *, record: bool = False
) -> Iterator[Environment]:
    """Yield the environment with the recording as its only way out and tools of its own to install into, if
    `available`.

    Raises:
        SandboxUnavailable: there is no proxy. OSError: it ended meanwhile.
    """
    if not available(place):
        yield environment
        return
    try:
        with shared_proxy(**_proxy_settings(place, record=record)) as proxy:
            yield replace(environment, downloads=proxy.folder, installs=True)
    except ProxyUnavailable as error:
        raise SandboxUnavailable(f"{error}; or set params.grading.network of the suite to none") from error


def command_with_downloads(place: Mapping[str, Any], command: str) -> str:
    """Return the bash command as a sandbox of `with_downloads` has to run it."""
    return through_proxy(command) if available(place) else command


def refusals(place: Mapping[str, Any]) -> str:
    """Return a sentence about the requests of this process that were refused, or not found; "" without any."""
    if not available(place):
        return ""
    kinds = (False,) if place["grading"]["network"] == "none" else (True, False)
    lines = list(dict.fromkeys(line for record in kinds for line in _log(place, record=record)))
    return f" Downloads that grading did not get: {'; '.join(lines[:5])}." if lines else ""


def _folder(place: Mapping[str, Any]) -> Path:
    rules = place["grading"]
    named = rules["recording"]
    return expand(str(named)) if named else Lake.open().root / "downloads" / rules["suite"]


def _proxy_settings(place: Mapping[str, Any], *, record: bool) -> dict[str, Any]:
    rules = place["grading"]
    hosts = None if rules["network"] == "open" else (*INDEX_HOSTS, *rules["hosts"])
    most_bytes = int(rules["most_gib"] * 2**30)
    return {"recording": _folder(place), "record": record, "hosts": hosts, "most_bytes": most_bytes}


def _log(place: Mapping[str, Any], *, record: bool) -> list[str]:
    return shared_log(**_proxy_settings(place, record=record))


def _failures(place: Mapping[str, Any]) -> list[str]:
    return [line for line in _log(place, record=True) if line.startswith("failed")]
