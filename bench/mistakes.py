"""Messages for mistakes, and the seconds until they come: `python bench/mistakes.py`, or with WORDs the commands that
have them.

Each command below is wrong in one way. It has to fail without a stack trace; the table shows its first line. Commands
of Dagster import Dagster and every asset first, so they are listed after etpi's.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from machine import machine

ROOT = Path(__file__).parents[1]
TAKEN = socket.create_server(("127.0.0.1", 0))
"""Holds a port until this process ends."""
LONGEST = 120
"""Seconds after which a command that should have failed is stopped."""
ROW = '{"messages":[{"role":"user","content":"hi"},{"role":"assistant","content":"ok"}]}\n'
COMMANDS = (
    "runn x",
    "run",
    "run plan_first_tinny",
    "run nope --dry-run",
    "run plan_first_tiny --frob",
    "export plan_first_tiny --format trll --to o",
    "export plan_first_tiny --format trl --to o",
    "export plan_first_tiny --format trl --to runs",
    "explain nope nope",
    "explain tasks",
    "accept tasks coop_tiny_shared",
    "accept tasks coop_tiny_shared --because x",
    "status nope",
    "init",
    "init runs missing.jsonl --model tiny",
    "init runs nothing.jsonl --model tiny",
    "init runs odd.jsonl --model tiny",
    "init runs table.csv --model tiny",
    "init runs empty --model tiny",
    "init runs runs --model Qwen/Qwen3-4B",
    "init runs runs --model ./no_model",
    "init runs runs --model tiny --preset planfirst",
    "init runs runs/r.jsonl --model tiny --name a/b --yes",
    "init --from runs --tasks empty --model tiny",
    "init runs odd.jsonl --model tiny --format hub",
    "init endpoint localhost:1 --suite coop_tiny_shared --model m",
    "init endpoint http://localhost:1 --model m",
    "init tasks empty --yes",
    "init tasks missing --yes",
    "template missing",
    "model Qwen/Qwen3-4B",
    "run grpo_tcr_4b",
    "run cooperbench_import",
    "rehearse nope",
    "verify --since yesterday",
    "rm nope",
    "rm",
    "gc --older-than -1",
    "view",
    "view --port 99999",
    "ui --port http",
    "sql",
    "sql solved_pared",
    "sql solved_paired experimnt=x",
    "sql --format yaml solved_paired",
    "schema nope",
)
EXPERIMENT = 'extends = "plan_first_tiny"\n'
SPECS = (
    'extends = "plan_first_tinny"',
    'extends = "a"',
    EXPERIMENT + "train.epoch = 3",
    EXPERIMENT + 'train.epochs = "three"',
    EXPERIMENT + "train.epochs = inf",
    EXPERIMENT + "seeds = []",
    EXPERIMENT + "train = 3",
    EXPERIMENT + "title",
    'title = "x',
    "title = 'x",
    'title = "x"\ntitle = "y"',
    '{"title": "x"}',
    EXPERIMENT + 'rollout_sets = ["nope"]',
    EXPERIMENT + 'preset = "plan_frist"',
    EXPERIMENT + 'evaluate.suite = "coop_tinny"',
    EXPERIMENT + 'metrics.main = "solvd"',
    EXPERIMENT + 'rl.method = "grpo"\nrl.suite = "terminal_tiny"\nrl.rewards = [{function = "no_such_reward"}]',
)
"""Experiments `a` that cannot be read."""
PLACES = (
    ("ETPI_DATA", "odd.jsonl", "run plan_first_tiny"),
    ("ETPI_DATA", "odd.jsonl", "status plan_first_tiny"),
    ("DAGSTER_HOME", "odd.jsonl", "run plan_first_tiny"),
    ("ETPI_SPECS", "no_specs", "status"),
    ("ETPI_CATALOG", "odd.jsonl", "sql --list-nothing"),
    ("ETPI_CATALOG", "odd.jsonl", "sql solved_paired"),
    ("ETPI_CATALOG", "odd.jsonl", "view"),
    ("ETPI_CATALOG", "odd.jsonl", "run catalog"),
)
"""(variable, the wrong path it names, command)."""
DAGSTER = (
    "dg launch --job run_experimnt --partition plan_first_tiny",
    "dg launch --job run_experiment --partition nope",
)


@dataclass(frozen=True)
class Mistake:
    """A command, the folder it runs in, the text of the spec `a`, and further variables of its environment."""

    words: list[str]
    place: Path
    spec: str = ""
    variables: Mapping[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        of_spec = f": `{self.spec.splitlines()[-1]}`" if self.spec else ""
        return (
            " ".join([*(f"{name}={Path(path).name}" for name, path in self.variables.items()), *self.words]) + of_spec
        )


def mistakes(folder: Path) -> list[Mistake]:
    """Return the mistakes, over the files that `prepare` wrote into a folder."""
    cases = [Mistake(["etpi", *line.split()], folder) for line in COMMANDS]
    cases += [Mistake(["etpi", "run", "a"], folder, text) for text in SPECS]
    cases += [Mistake(["etpi", *line.split()], folder, "", {name: str(folder / path)}) for name, path, line in PLACES]
    port = str(TAKEN.getsockname()[1])
    cases += [Mistake(["etpi", command, "--port", port], folder) for command in ("ui", "view")]
    cases += [Mistake(["etpi", "run", "gone"], folder), Mistake(["etpi", "sql", "-c", "SELEC 1"], folder)]
    return cases + [Mistake([*line.split()], ROOT) for line in DAGSTER]


def prepare(folder: Path) -> None:
    """Write the files that the mistakes are about; the runs of experiment `gone` are gone."""
    for name in ("runs", "empty", "home", "specs/experiments", "specs/rollout_sets"):
        (folder / name).mkdir(parents=True)
    (folder / "runs" / "r.jsonl").write_text(ROW + "\n" + ROW + '{"messages": [{"role"\n')
    (folder / "odd.jsonl").write_text('{"a":1}\n')
    (folder / "nothing.jsonl").write_text("")
    (folder / "table.csv").write_text("prompt,answer\n1,2\n")
    (folder / "specs/rollout_sets/gone.toml").write_text('title = "t"\nkind = "imported"\npath = "gone.jsonl"\n')
    experiment = 'title = "t"\nrollout_sets = ["gone"]\nbase = {kind = "tiny"}\ntrain.method = "none"\n'
    (folder / "specs/experiments/gone.toml").write_text(experiment)


def answer(mistake: Mistake, data: Path) -> tuple[float, int, str]:
    """Return the seconds, the exit status, and the output of a mistake; a command that goes on is stopped."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("ETPI_")}
    environment |= {"DAGSTER_HOME": str(data / "home"), "ETPI_DATA": str(data), "COLUMNS": "200", **mistake.variables}
    words = [str(Path(sys.executable).parent / mistake.words[0]), *mistake.words[1:]]
    start = time.perf_counter()
    process = subprocess.Popen(
        words, cwd=mistake.place, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    try:
        output, code = process.communicate(timeout=LONGEST)[0], process.returncode
    except subprocess.TimeoutExpired:
        process.terminate()
        output, code = process.communicate()[0], 0
    return time.perf_counter() - start, code, output


def main() -> int:
    """Print the table; return 1 if a mistake is accepted, or its answer has a stack trace or a next step."""
    wanted, wrong = sys.argv[1:], 0
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        prepare(folder)
        spec = folder / "specs" / "experiments" / "a.toml"
        print(machine(), end="\n\n")
        print("| mistake | seconds | exit | lines | answer |\n|---|---|---|---|---|")
        for mistake in mistakes(folder):
            if not all(word in str(mistake) for word in wanted):
                continue
            spec.unlink(missing_ok=True)
            if mistake.spec:
                spec.write_text(mistake.spec)
            seconds, code, output = answer(mistake, folder)
            lines = [line for line in output.replace(str(folder), ".").splitlines() if line.strip()]
            shown = next((line for line in lines if "rror" in line or line.startswith("etpi:")), "".join(lines[:1]))
            bad = code == 0 or "Traceback" in output or "Next: write" in output
            wrong += bad
            text = f"{'WRONG: ' if bad else ''}{shown.strip()[:200].replace('|', '/')}"
            print(f"| {mistake} | {seconds:.1f} | {code} | {len(lines)} | {text} |", flush=True)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
