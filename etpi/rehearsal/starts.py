"""The things that the real run needs, a line each, with what proves it or what is missing."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from etpi.rehearsal import costs
from etpi.rehearsal.costs import GIB
from etpi.rehearsal.memory import HYBRID
from etpi.rehearsal.shrink import Machine
from etpi.rehearsal.stages import Stage, first_stop
from etpi_assets.specs.experiment import ExperimentSpec
from etpi_assets.specs.load import Specs
from etpi_assets.specs.rollout_set import RolloutSetSpec
from etpi_assets.specs.suite import SuiteSpec
from etpi_assets.tasks.families import load_family
from etpi_resources.engines import EngineUnavailable
from etpi_resources.engines.vllm_options import named
from etpi_resources.engines.vllm_server import vllm_program

State = Literal["proved", "estimated", "not proved", "FAULT"]

_GPUS = re.compile(r"(one|two|three|four|eight|\d+) GPUs? of (\d+)\s*GB")
_COUNTS = {"one": 1, "two": 2, "three": 3, "four": 4, "eight": 8}
GB = 10**9

NO_DOCKER = (
    "Start Docker or rootless podman (podman system service); or name an engine on another machine in DOCKER_HOST; or "
    'unpack the images for bubblewrap (params.sandbox = "bubblewrap" with params.checkouts, docs/sandboxes.md). A '
    "rented GPU is often a container in which no engine starts."
)
"""The remedy where suites need containers and no engine answers."""


@dataclass(frozen=True)
class Start:
    """A thing that the real run needs, whether it is there, and what proves that or what to do."""

    what: str
    state: State
    why: str


def starts(name: str, specs: Specs, stages: Sequence[Stage], machine: Machine) -> list[Start]:
    """Return the lines of an experiment, from its rehearsal's stages and its real specs."""
    spec = specs.get("experiment", name)
    assert isinstance(spec, ExperimentSpec)
    return [
        *_graph(stages),
        *_docker(name, specs, machine),
        *_gpus(spec),
        *_contexts(spec, specs),
        *_adapters(spec),
        *(Start(f"{stage.asset} of {stage.key}", "not proved", need) for stage in stages for need in stage.needs),
    ]


def faults(lines: Sequence[Start]) -> list[Start]:
    """Return the lines that would stop the real run."""
    return [line for line in lines if line.state == "FAULT"]


def _graph(stages: Sequence[Stage]) -> Iterator[Start]:
    if stop := first_stop(stages):
        yield Start("assets and checks", "FAULT", f"the run stops at {stop.asset} of {stop.key}, see there")
        return
    passed = sum(stage.verdict == "passes" for stage in stages)
    yield Start("assets and checks", "proved", f"{passed} assets ran here at a small size and passed their checks")
    if unjudged := sorted({check for stage in stages for check in stage.unjudged}):
        yield Start(", ".join(unjudged), "not proved", "checks of amounts, of behaviour or of data that are not here")


# --- the machine -----------------------------------------------------------------------------------------------------


def in_containers(name: str, specs: Specs) -> bool:
    """Return whether a suite's tasks run in containers."""
    suite = specs.get("suite", name)
    assert isinstance(suite, SuiteSpec)
    return load_family(suite.family).sandbox(dict(suite.params)) == "docker"


def docker_suites(name: str, specs: Specs) -> list[str]:
    """Return the suites of an experiment whose tasks run in containers."""
    return [key for key in specs.upstream_keys("experiment", name, "suite") if in_containers(key, specs)]


def _docker(name: str, specs: Specs, machine: Machine) -> Iterator[Start]:
    if suites := docker_suites(name, specs):
        what = f"containers for {', '.join(suites)}"
        if machine.docker:
            yield Start(what, "proved", "a container engine answers here; the images were not pulled")
        else:
            yield Start(what, "FAULT", f"no container engine answers on this machine. {NO_DOCKER}")


def gpus_asked(spec: ExperimentSpec) -> tuple[int, int] | None:
    """Return the number of GPUs and the GB of each that the spec's notes ask for; None: they name none."""
    match = _GPUS.search(" ".join(spec.notes.split()))
    if match is None:
        return None
    return _COUNTS.get(match[1]) or int(match[1]), int(match[2])


def _gpus(spec: ExperimentSpec) -> Iterator[Start]:
    """Yield the placement of each program on GPUs, and whether the estimates fit there."""
    shape = costs.student_shape(spec) if spec.base.kind not in ("tiny", "none") else None
    if spec.requires == "cpu" or shape is None:
        return
    stated = gpus_asked(spec)
    if stated is None:
        yield Start("GPUs", "not proved", "the spec's notes do not say how many GPUs of how many GB it needs")
        return
    count, size = stated
    parts: list[tuple[str, int, float]] = []
    if spec.train.method != "none":
        training = costs.supervised(spec)
        parts.append(("training", training.shards, sum(training.memory(shape).values())))
    if spec.rl.method != "none":
        rl, memory = spec.rl, costs.reinforcement(spec).memory(shape)
        needed = sum(memory.values())
        if rl.engine == "vllm" and rl.placement == "shared":
            taken = float(named(rl.options).get("gpu-memory-utilization", costs.UTILISED)) * size * GB
            passing = memory["activations"] + memory["logits"] + memory["copies"]
            needed = max(needed, needed - passing + taken)  # a server gives its memory back while the policy is trained
            yield Start("servers of the policy", "estimated", "on the trainers' GPUs, asleep in training")
        elif rl.engine == "vllm":
            where = f"on the GPUs {rl.processes} to {rl.gpus - 1}, the trainers before"
            yield Start("servers of the policy", "estimated", where)
        parts.append(("reinforcement", rl.gpus, needed))
    for part, processes, needed in parts:
        seen = f"{processes} {'process sees one GPU' if processes == 1 else 'processes see one GPU each'}"
        fits = f"{needed / GIB:.0f} GiB of {size * GB / GIB:.0f} GiB"
        if processes > count:
            yield Start(f"{part} on {count} GPUs", "FAULT", f"{seen}, and the spec asks for {count}: mend its notes")
        elif needed > size * GB:
            yield Start(f"{part} on {count} x {size} GB", "FAULT", f"{seen}; it takes {fits}. Shard it, or rent more")
        else:
            yield Start(f"{part} on {count} x {size} GB", "estimated", f"{seen}; {fits}, by the formula above")
    if spec.evaluate is not None:
        tensor = int(named(spec.serving.options).get("tensor-parallel-size", 1))
        room = costs.UTILISED * size * GB * tensor - 2 * shape.parameters
        longest = spec.evaluate.longest_context()
        at_once = int(room // costs.cache_bytes(shape, longest)) if room > 0 else 0
        what = f"serving on {tensor} x {size} GB"
        if at_once < 1:
            yield Start(
                what,
                "FAULT",
                f"no sequence of {longest:,} tokens fits beside the weights; set serving.options.tensor-parallel-size",
            )
        else:
            yield Start(what, "estimated", f"{at_once:,} sequences of {longest:,} tokens fit beside the weights")


# --- servers ---------------------------------------------------------------------------------------------------------


def _contexts(spec: ExperimentSpec, specs: Specs) -> Iterator[Start]:
    """Yield the context of each vLLM server that etpi starts."""
    why = "etpi passes it as max-model-len, from the spec's budgets"
    for key in spec.rollout_sets:
        rollouts = specs.get("rollout_set", key)
        if isinstance(rollouts, RolloutSetSpec) and rollouts.starts_vllm:
            yield Start(f"context of the teacher of {key}", "proved", f"{rollouts.agent.max_model_len:,} tokens: {why}")
    if spec.serving.engine != "transformers" and spec.evaluate:
        yield Start("context of served checkpoints", "proved", f"{spec.evaluate.longest_context():,} tokens: {why}")


_MAPPED = """
import sys
from vllm.model_executor.models.registry import ModelRegistry
model = ModelRegistry.models[sys.argv[1]].load_model_cls()
mapper = getattr(model, "hf_to_vllm_mapper", None)
print(*[mapper._map_name(name) if mapper else name for name in sys.argv[2:]])
"""
WRAPPER, WEIGHT = "Qwen3_5ForConditionalGeneration", "model.language_model.layers.3.mlp.down_proj"


def _adapters(spec: ExperimentSpec) -> Iterator[Start]:
    """Yield whether vLLM applies the adapters of a model that is stored below a wrapper with a vision part."""
    if (
        spec.serving.engine == "transformers"
        or spec.train.method != "lora"
        or not HYBRID.search(costs.student_name(spec))
    ):
        return
    what = f"adapters of {WRAPPER} in vLLM"
    try:
        program = vllm_program()
    except EngineUnavailable:
        yield Start(
            what, "not proved", "there is no vLLM here; etpi writes their keys as the base's files name the weights"
        )
        return
    python = program.resolve().with_name("python")
    if not python.exists():
        yield Start(what, "not proved", f"{program} is not in an environment with Python")
        return
    line = [str(python), "-c", _MAPPED, WRAPPER, WEIGHT, WEIGHT.replace(".language_model", "")]
    answer = subprocess.run(line, capture_output=True, text=True, timeout=300)
    mapped = (answer.stdout.strip().splitlines() or [""])[-1].split()
    if answer.returncode or len(mapped) != 2:
        yield Start(
            what,
            "not proved",
            f"its mapper could not be read: {(answer.stderr.strip().splitlines() or ['no output'])[-1]}",
        )
    elif mapped[0].startswith("language_model."):
        yield Start(what, "proved", f"this vLLM maps {WEIGHT}, the form in which etpi serves them, to {mapped[0]}")
    else:
        yield Start(
            what, "FAULT", f"this vLLM maps {WEIGHT} to {mapped[0]}, no module of the model; serve merged models"
        )
