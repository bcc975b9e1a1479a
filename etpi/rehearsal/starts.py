"""The needs of the real run, a line each: proved, or with the missing part."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from etpi.rehearsal import costs
from etpi.rehearsal.costs import GIB
from etpi.rehearsal.memory import Shape
from etpi.rehearsal.stages import Stage, first_stop
from etpi_assets.resources import Resources
from etpi_assets.specs.experiment import ExperimentSpec
from etpi_assets.specs.load import Specs
from etpi_assets.tasks.families import load_family
from etpi_resources.engines.vllm_options import accelerators_of, named
from etpi_resources.sandboxes import SandboxUnavailable

State = Literal["proved", "estimated", "not proved", "FAULT"]

UTILISED, USABLE = 0.9, 0.97
"""Shares of a GPU's memory: of vLLM (its default), and usable beside the driver. A card of "80 GB" has 80 GiB."""

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


def starts(name: str, specs: Specs, stages: Sequence[Stage], needs: Mapping[str, Sequence[str]]) -> list[Start]:
    """Return the lines of an experiment, from its rehearsal's stages and replacements, and its real specs."""
    spec = specs.get("experiment", name)
    return [
        *_graph(stages),
        *_docker(name, specs),
        *_gpus(spec, specs),
        *(Start(place, "not proved", text) for place, texts in needs.items() for text in texts),
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
        why = "fail here, where amounts, behaviour or data are not those of the real run"
        yield Start(", ".join(unjudged), "not proved", why)


# --- the machine -----------------------------------------------------------------------------------------------------


def docker_suites(names: Iterable[str], specs: Specs) -> list[str]:
    """Return those of the suites whose tasks run in containers."""
    suites = {name: specs.get("suite", name) for name in names}
    return [name for name, spec in suites.items() if load_family(spec.family).sandbox(dict(spec.params)) == "docker"]


def docker_answers() -> bool:
    """Return whether a container engine answers here."""
    try:
        Resources().sandboxes("docker").check()
    except SandboxUnavailable:
        return False
    return True


def _docker(name: str, specs: Specs) -> Iterator[Start]:
    if suites := docker_suites(specs.upstream_keys("experiment", name, "suite"), specs):
        what = f"containers for {', '.join(suites)}"
        if docker_answers():
            yield Start(what, "proved", "a container engine answers on this machine")
        else:
            yield Start(what, "FAULT", f"no container engine answers on this machine. {NO_DOCKER}")


@dataclass(frozen=True)
class Program:
    """A program on GPUs: how many it takes, the bytes that it needs on each at least, how they are made up, and whether
    they are not known."""

    name: str
    gpus: int
    needed: float
    how: str
    unknown: bool = False


def _gpus(spec: ExperimentSpec, specs: Specs) -> Iterator[Start]:
    """Yield for each program the GPUs that it takes, and whether they are those that the spec requires."""
    if spec.requires == "cpu" or spec.base.kind in ("tiny", "none"):
        return
    stated = spec.requires
    if (shape := costs.model_shape(spec.base.model)) is None:
        yield Start("GPUs", "not proved", f"the size of {spec.base.model} is not known here")
        return
    if isinstance(stated, str):
        for program in _programs(spec, specs, shape, None):
            needs = f"{program.gpus} of {program.needed / GIB:.0f} GiB or more, and `requires` names no GPUs"
            yield Start(f"GPUs of {program.name}", "not proved", f"{program.how}; {needs}")
        return
    count, size = stated.gpus, stated.memory_gb
    for program in _programs(spec, specs, shape, size * GIB):
        what, room = f"{program.name} on {program.gpus} of {count} x {size} GB", size * GIB * USABLE
        fits = f"{program.how}; {program.needed / GIB:.0f} GiB of {room / GIB:.0f} GiB on each"
        if program.gpus > count:
            yield Start(what, "FAULT", f"`requires` has gpus = {count}, and this takes {program.gpus}")
        elif program.needed > room:
            yield Start(what, "FAULT", f"{fits}: shard it (shards, tensor-parallel-size), or rent larger GPUs")
        else:
            yield Start(what, "not proved" if program.unknown else "estimated", fits)


def _programs(spec: ExperimentSpec, specs: Specs, shape: Shape, size: float | None) -> Iterator[Program]:
    """Yield the programs. Args: size: bytes of a GPU, if known."""
    for key, model, rollouts in costs.teachers(spec, specs):
        options = rollouts.engine.options if rollouts.engine else {}
        yield _server(f"teacher of {key}", costs.model_shape(model), rollouts.agent.max_model_len, options, size)
    if spec.train.method != "none":
        training = costs.supervised(spec)
        each = f"{training.shards} of them see one GPU each" if training.shards > 1 else "its process sees one GPU"
        yield Program("training", training.shards, sum(training.memory(shape).values()), each)
    if spec.rl.method != "none":
        rl, memory = spec.rl, costs.reinforcement(spec, shape).memory(shape)
        needed, shared = sum(memory.values()), rl.engine == "vllm" and rl.placement == "shared"
        how = f"{rl.processes} of them see one GPU each" if rl.processes > 1 else "its process sees one GPU"
        if shared and size:
            taken = float(named(rl.options).get("gpu-memory-utilization", UTILISED)) * size
            passing = memory["activations"] + memory["logits"] + memory["copies"]
            needed = max(needed, needed - passing + taken)  # a server gives its memory back while the policy is trained
            how += ", and its server, which sleeps in training"
        if rl.engine == "vllm" and not shared:
            context = rl.max_prompt_tokens + rl.max_response_tokens
            yield _server("servers of the policy", shape, context, rl.options, size)
            how += f"; {rl.gpus - rl.processes} more for its servers"
        yield Program("reinforcement", rl.gpus, needed, how)
    if spec.evaluate is not None:
        served = spec.serving.engine != "transformers"
        yield _server("evaluation", shape, spec.evaluate.longest_context(), spec.serving.options, size, vllm=served)


def _server(
    name: str, shape: Shape | None, context: int, options: Mapping[str, Any], size: float | None, *, vllm: bool = True
) -> Program:
    """Return a server of a model: weights, and the keys and values of at least one sequence of the longest budget."""
    gpus = accelerators_of(options) if vllm else 1
    if shape is None or "quantization" in named(options):
        return Program(name, gpus, 0, "the size of its weights is not known", unknown=True)
    weights, each = 2 * shape.parameters / gpus, costs.cache_bytes(shape, context) / gpus
    how = f"weights {weights / GIB:.0f} GiB, {each / GIB:.2f} GiB a sequence of {context:,} tokens"
    how += " (etpi passes max-model-len)" if vllm else ""
    if size:
        how += f", at most {max(0, int((UTILISED * size - weights) // each)):,} at once"
    return Program(name, gpus, (weights + each) / UTILISED, how)
