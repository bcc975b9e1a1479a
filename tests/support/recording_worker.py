"""A worker's program that also records which dtypes its matrix multiplications have, in all its threads.

Started in the place of the module that $RECORDED_WORKER names (`RECORDER` is what a test puts there), in the worker's
own process; leaves {operation: [dtype, ...]} as JSON in the file $RECORDED_OPERATIONS.
"""

from __future__ import annotations

import json
import os
import runpy
import threading
from collections import defaultdict
from pathlib import Path

from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

RECORDER = "tests.support.recording_worker"
MATRIX_OPERATIONS = ("mm", "addmm", "bmm", "baddbmm", "scaled_dot_product", "convolution", "linear", "matmul")


class Recorder(TorchDispatchMode):
    """Notes the dtypes of every tensor that a matrix operation is given; below autocast, so as the kernel sees them."""

    seen: dict[str, set[str]] = defaultdict(set)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        if any(part in name for part in MATRIX_OPERATIONS):
            self.seen[name] |= {str(x.dtype) for x in tree_leaves((args, kwargs)) if hasattr(x, "dtype")}
        return func(*args, **(kwargs or {}))


def main() -> None:
    run = threading.Thread.run

    def recorded(thread: threading.Thread) -> None:
        with Recorder():  # a mode is of one thread
            run(thread)

    threading.Thread.run = recorded
    with Recorder():
        runpy.run_module(os.environ["RECORDED_WORKER"], run_name="__main__")
    found = {name: sorted(dtypes) for name, dtypes in Recorder.seen.items()}
    Path(os.environ["RECORDED_OPERATIONS"]).write_text(json.dumps(found))


if __name__ == "__main__":
    main()
