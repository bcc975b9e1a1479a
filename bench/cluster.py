"""Calls with real sandboxes over the nodes of a cluster: one worker against two, and how 64 that mostly wait scale.

Three machines in podman containers (tests/support/machines.py), half a core for each worker, so that two workers have
twice the CPU of one however many cores the machine has. A call starts a bubblewrap sandbox, runs a command in each
turn, and ends it, as a rollout does whose policy answers at once or after some seconds. Needs root, podman, runc and
Postgres.

    python bench/cluster.py [--turns 5] [--latency 2] [--calls 64]

Prints calls/s by one and by two workers, and the time of 64 calls at once against turns x latency.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from concurrent.futures import as_completed
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
MARK = "FIGURES "


def call(turns: int, latency: float) -> str:
    """Do what a rollout does on a node; return the node."""
    import socket

    from etpi_resources.sandboxes.bubblewrap import BubblewrapFactory

    with BubblewrapFactory().create({"a.txt": "a"}) as sandbox:
        for _ in range(turns):
            time.sleep(latency)
            result = sandbox.run("ls; cat a.txt")
            assert result.exit_code == 0, result
    return socket.gethostname()


def drive(calls: int, turns: int, latency: float) -> None:
    """Run that number of calls on all nodes and print the figures; on the head, as a driver of Ray."""
    from collections import Counter

    from etpi_cluster.fan_out import ClusterExecutor

    with ClusterExecutor() as executor:
        places = executor.places
        list(
            executor.map(call, *zip(*[(1, 0.0)] * (2 * sum(places.values())), strict=True))
        )  # every process has started
        began = time.monotonic()
        futures = [executor.submit(call, turns, latency) for _ in range(calls)]
        nodes = Counter(future.result() for future in as_completed(futures))
        seconds = time.monotonic() - began
    print(MARK + json.dumps({"seconds": seconds, "calls": calls, "nodes": nodes, "places": places}), flush=True)


def _measured(services, calls: int, turns: int, latency: float) -> dict:
    line = f"from bench.cluster import drive; drive({calls}, {turns}, {latency})"
    done = services.head.run("python", "-c", line, timeout=900, **services.environment(), PYTHONPATH=str(ROOT))
    return json.loads(next(text for text in done.stdout.splitlines() if text.startswith(MARK)).removeprefix(MARK))


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--latency", type=float, default=2.0)
    parser.add_argument("--calls", type=int, default=64)
    options = parser.parse_args()
    sys.path.insert(0, str(ROOT))
    from machine import machine

    from tests.support import cluster_services
    from tests.support.machines import Machines, missing

    if reason := missing():
        sys.exit(reason)
    print(machine(), flush=True)
    half = options.calls // 2
    for name in ("worker1", "worker2"):
        cluster_services.RESOURCES[name] = {"etpi_sandbox": half}
    machines = Machines({"head": 1.0, "worker1": 0.5, "worker2": 0.5})
    try:
        services = cluster_services.ClusterServices(machines)
        services.start()
        two = _measured(services, 2 * options.calls, options.turns, 0.0)
        waiting = _measured(services, options.calls, options.turns, options.latency)
        services.machines["worker2"].kill_everything()
        time.sleep(40)  # until Ray counts the node as dead
        one = _measured(services, 2 * options.calls, options.turns, 0.0)
    finally:
        machines.close()
    rates = {name: figures["calls"] / figures["seconds"] for name, figures in (("one", one), ("two", two))}
    ideal = options.turns * options.latency
    print(f"policy without latency: {rates['one']:.2f} calls/s by one worker, {rates['two']:.2f} by two: "
          f"{rates['two'] / rates['one']:.2f}x; {dict(two['nodes'])}")  # fmt: skip
    print(f"{options.calls} at once, {options.latency:g} s a turn: {waiting['seconds']:.1f} s, {ideal:.1f} if nothing "
          f"else took time: efficiency {ideal / waiting['seconds']:.2f}; {dict(waiting['nodes'])}")  # fmt: skip
    return 0


if __name__ == "__main__":
    sys.exit(main())
