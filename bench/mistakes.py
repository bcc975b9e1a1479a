"""Messages for mistakes, and the seconds until they come: `python bench/mistakes.py`.

Each command below is wrong in one way. It has to fail without a stack trace; the table shows its first line. Commands
of Dagster import Dagster and every asset first, so they are listed after etpi's.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from machine import machine

ROOT = Path(__file__).parents[1]
ROW = '{"messages":[{"role":"user","content":"hi"},{"role":"assistant","content":"ok"}]}\n'
COMMANDS = [
    "",
    "runn x",
    "run",
    "run plan_first_tinny",
    "run nope --dry-run",
    "run plan_first_tiny --frob",
    "export plan_first_tiny --format trll --to o",
    "export plan_first_tiny --format trl --to o",
    "explain nope nope",
    "accept tasks coop_tiny",
    "status nope",
    "init",
    "init --from missing.jsonl --model tiny",
    "init --from nothing.jsonl --model tiny",
    "init --from odd.jsonl --model tiny",
    "init --from empty --model tiny",
    "init --from runs --model Qwen/Qwen3-4B",
    "init --from runs --model ./no_model",
    "init --from runs --model tiny --preset planfirst",
    "init --tasks empty --yes",
    "init --tasks missing --yes",
    "template missing",
    "run grpo_tcr_4b",
    "run cooperbench_import",
    "verify --since yesterday",
    "",
][1:-1]
EXPERIMENT = 'extends = "plan_first_tiny"\n'
SPECS = (
    'extends = "plan_first_tinny"',
    EXPERIMENT + "train.epoch = 3",
    EXPERIMENT + 'train.epochs = "three"',
    EXPERIMENT + "train.epochs = inf",
    'title = "x',
    EXPERIMENT + 'rollout_sets = ["nope"]',
    EXPERIMENT + 'preset = "plan_frist"',
)
"""Experiments `a` that cannot be read."""
DAGSTER = (
    "dg launch --job run_experimnt --partition plan_first_tiny",
    "dg launch --job run_experiment --partition nope",
)


def answer(words: list[str], place: Path, data: Path) -> tuple[float, int, str]:
    """Return the seconds, the exit status, and the output of a command that runs in `place`."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("ETPI_")}
    environment |= {"DAGSTER_HOME": str(data / "home"), "ETPI_DATA": str(data), "COLUMNS": "200"}
    start = time.perf_counter()
    done = subprocess.run(words, cwd=place, env=environment, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    return time.perf_counter() - start, done.returncode, done.stderr + done.stdout


def main() -> int:
    """Print the table; return 1 if a mistake is accepted or shows a stack trace."""
    bin_folder, wrong = Path(sys.executable).parent, 0
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "runs").mkdir()
        (folder / "empty").mkdir()
        (folder / "home").mkdir()
        (folder / "runs" / "r.jsonl").write_text(ROW + '{"messages": [{"role"\n')
        (folder / "odd.jsonl").write_text('{"a":1}\n')
        (folder / "nothing.jsonl").write_text("")
        spec = folder / "specs" / "experiments" / "a.toml"
        spec.parent.mkdir(parents=True)
        cases = [(["etpi", *line.split()], folder, "") for line in COMMANDS]
        cases += [(["etpi", "run", "a"], folder, text) for text in SPECS]
        cases += [(line.split(), ROOT, "") for line in DAGSTER]
        print(machine(), end="\n\n")
        print("| mistake | seconds | exit | answer |\n|---|---|---|---|")
        for words, place, text in cases:
            spec.unlink(missing_ok=True)
            if text:
                spec.write_text(text)
            seconds, code, output = answer([str(bin_folder / words[0]), *words[1:]], place, folder)
            lines = [line for line in output.replace(str(folder), ".").splitlines() if line.strip()]
            shown = next((line for line in lines if "rror" in line or line.startswith("etpi:")), "".join(lines[:1]))
            wrong += code == 0 or "Traceback" in output
            mistake = " ".join(words) + (f": `{text.splitlines()[-1]}`" if text else "")
            print(f"| {mistake} | {seconds:.1f} | {code} | {shown.strip()[:160].replace('|', '/')} |", flush=True)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
