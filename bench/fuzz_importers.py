"""Fuzz every importer, guided by coverage: no input crashes one, and its rows match its counts.

    python bench/fuzz_importers.py [RUNS_PER_FORMAT] [FORMAT ...]

Each format runs in a process of its own under atheris (libFuzzer), from valid samples, with the importers instrumented.
An input is the bytes of one file of a rollout. The script prints inputs, rollouts and refusals of each format, and ends
with 1 at the first crash, whose input it keeps. It needs atheris: pip install -e ".[bench]".
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import subprocess
import sys
import tempfile
from collections import Counter
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from machine import machine

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
LONGEST = 16_384
"""Most bytes of an input."""

MAP = {"messages": "a.talk", "role": "who", "text": "said"}
JUNK = (
    None,
    True,
    0,
    -1,
    2**70,
    1.5,
    float("nan"),
    1e300,
    "",
    "x",
    "\ud800",
    "\0",
    [],
    {},
    [[]],
    [{}],
    {"function": None},
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="?", type=int, default=10_000, help="inputs of each format")
    parser.add_argument("formats", nargs="*", help="by default all")
    parser.add_argument("--one", metavar="FOLDER", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if find_spec("atheris") is None:
        sys.exit("not measured: no atheris; Python 3.11: pip install --constraint constraints.txt '.[bench]'")
    if options.one:
        _fuzz(options.formats[0], options.one, options.runs)
        return 0
    from etpi_assets.importers import IMPORTERS

    print(machine(), flush=True)
    total = Counter[str]()
    for name in options.formats or IMPORTERS:
        with tempfile.TemporaryDirectory() as folder:
            command = [sys.executable, __file__, str(options.runs), name, "--one", folder]
            done = subprocess.run(command, capture_output=True, text=True)
            figures = _figures(Path(folder))
            print(f"{name:16} {_words(figures)}", flush=True)
            if done.returncode:
                for crash in Path(folder).glob("crash-*"):
                    crash.rename(Path.cwd() / f"{name}-{crash.name}")
                print(done.stderr[-4000:], file=sys.stderr)
                return 1
            total += figures
    print(f"{'all':16} {_words(total)}")
    return 0


def _figures(folder: Path) -> Counter[str]:
    path = folder / "figures.json"
    return Counter(json.loads(path.read_text())) if path.exists() else Counter()


def _words(figures: Counter[str]) -> str:
    return ", ".join(f"{figures[name]:,} {name}" for name in ("inputs", "rollouts", "refusals"))


def _fuzz(name: str, folder: Path, runs: int) -> None:
    """Run libFuzzer in this process; it ends the process."""
    import atheris  # pyright: ignore[reportMissingImports]

    with atheris.instrument_imports(include=["etpi_assets.importers"]):  # pyright: ignore
        from etpi_assets.importers import count_found, import_runs
    from etpi_assets.trajectories.records import RolloutRecord
    from etpi_assets.trajectories.tables import from_tables, to_tables

    root, file, corpus = _sample(name, folder)
    valid = file.read_bytes()
    figures = Counter[str]()

    def one_input(data: bytes) -> None:
        file.write_bytes(data)
        if name == "inspect":
            _write_archive(file.with_suffix(".eval"), data)
        items = list(import_runs(name, root, {"tokenizer": "tiny", "map": MAP, "secrets": "mask"}))
        records = [item for item in items if isinstance(item, RolloutRecord)]
        assert len(items) == count_found(name, root), "read and counted differ"
        assert from_tables(to_tables(records)) == records, "stored and read differ"
        figures.update(inputs=1, rollouts=len(records), refusals=len(items) - len(records))
        if figures["inputs"] % 500 == 0 or figures["inputs"] >= runs:
            (folder / "figures.json").write_text(json.dumps(figures))

    arguments = [f"-runs={runs}", f"-max_len={LONGEST}", f"-artifact_prefix={folder}/", "-seed=1", "-rss_limit_mb=4096"]

    def mutate(data: bytes, longest: int, seed: int) -> bytes:
        """Replace values of the input or of the sample in three of four cases; otherwise change bytes."""
        rng = random.Random(seed)
        if rng.random() < 0.75:
            for text in (data, valid) if rng.random() < 0.5 else (valid,):
                with contextlib.suppress(ValueError):
                    lines = [json.loads(line) for line in text.splitlines() if line.strip()]
                    return b"\n".join(_with_junk(lines, rng))[:longest]
        return atheris.Mutate(data, longest)

    atheris.Setup([sys.argv[0], *arguments, str(corpus)], one_input, custom_mutator=mutate)
    atheris.Fuzz()


def _write_archive(path: Path, data: bytes) -> None:
    """Write the log as Inspect's archive; bytes that are no log as they are."""
    from tests.support.sessions import write_archive

    try:
        write_archive(path, json.loads(data))
    except (ValueError, TypeError, KeyError, AttributeError):
        path.write_bytes(data)


def _with_junk(value: Any, rng: random.Random) -> list[bytes]:
    """Return lines of JSON with one to three values replaced by junk or by another value of them."""
    from tests.support.fuzz import places, replaced

    for _ in range(rng.randint(1, 3)):
        at = rng.choice(places(value))
        other: Any = value
        for key in rng.choice(places(value)):
            other = other[key]
        value = replaced(value, at, rng.choice([*JUNK, other]))
    return [json.dumps(line).encode() for line in (value if isinstance(value, list) else [value])]


def _sample(name: str, folder: Path) -> tuple[Path, Path, Path]:
    """Write a valid sample of a format; return its root, the file to fuzz, and the folder of first inputs."""
    from tests.support import recorded_runs, rows, sessions

    root, corpus = folder / "root", folder / "corpus"
    corpus.mkdir()
    native = {"info": {"exit_status": "Submitted"}, "messages": recorded_runs.native_messages()}
    pair = {"input_ids": [1, 2], "output_ids": [3], "metadata": {"rollout_id": "r", "turn": 0}}
    documents: dict[str, tuple[str, Any]] = {
        "tito": ("t.jsonl", pair),
        "mini_swe_agent": ("x.traj.json", native),
        "swe_agent": ("x.traj", recorded_runs.windowed_history("tool_calls")),
        "atif": ("t.json", rows.atif_document()),
        "mapped": ("t.jsonl", {"a": {"talk": [{"who": "user", "said": "Moor."}, {"who": "ai", "said": "Moored."}]}}),
    }
    if name == "harbor":
        file = rows.trial(root, verifier_result={"rewards": {"reward": 1}}) / "agent" / "trajectory.json"
    elif name == "cooperbench":
        talk = recorded_runs.native_messages()
        file = recorded_runs.pair_run(root, messages=[talk, talk], verdict=recorded_runs.verdict()) / "agent1_traj.json"
    else:
        file_name, value = documents.get(name, ("t.jsonl", rows.ROWS.get(name)))
        lines = [value]
        if name in sessions.FILES:
            file_name, lines = sessions.FILES[name][0]
        root.mkdir()
        file = root / file_name
        file.write_text("\n".join(map(json.dumps, lines)))
    (corpus / "valid").write_bytes(file.read_bytes())
    return root, file, corpus


if __name__ == "__main__":
    sys.exit(main())
