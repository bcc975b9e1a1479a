"""docs/reference/environment.md: the registry of environment variables that etpi reads or sets."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from etpi.reference.markdown import prose, table


@dataclass(frozen=True)
class Variable:
    """An environment variable: its meaning, the value without it, and the module (or spec) that reads it."""

    name: str
    meaning: str
    default: str
    reader: str


FOLDERS_AND_PROGRAMS: Sequence[Variable] = (
    Variable(
        "ETPI_DATA",
        "Folder for everything that etpi writes: the lake, the catalog and Dagster's home.",
        "`data`, `etpi.duckdb` and `.dagster_home` in the working folder",
        "etpi_resources.lake.lake, etpi_resources.lake.catalog, etpi.dagster_home",
    ),
    Variable(
        "ETPI_CLUSTER",
        "The settings of several machines, `cluster.toml` (docs/cluster.md): lake, Postgres and Ray.",
        "one machine, without Ray and Postgres",
        "etpi_resources.backend",
    ),
    Variable("ETPI_CATALOG", "File of the catalog.", "`etpi.duckdb` as above", "etpi_resources.lake.catalog"),
    Variable("DAGSTER_HOME", "Dagster's home.", "`.dagster_home` as above", "etpi.dagster_home"),
    Variable(
        "ETPI_SPECS",
        "Folders of your own specs, separated by `:`, each with `suites`, `rollout_sets` or `experiments`. They add to "
        "the shipped ones; a name occurs once. It overrides `etpi.toml` and the folder `specs`.",
        "what `etpi.toml` in the working folder lists, else `specs` in the working folder",
        "etpi_assets.specs.folders",
    ),
    Variable(
        "ETPI_SHIPPED",
        "Which shipped specs the web page offers: `demo` (those of the demo and those with data) or `all`. Your own "
        "are always there, and commands take every name.",
        "`demo` for `etpi ui`, else `all`",
        "etpi_assets.specs.shown",
    ),
    Variable(
        "ETPI_VIEW_URL",
        "Address of `etpi view` in links from Dagster's web page.",
        "`http://localhost:3001`",
        "etpi_resources.links",
    ),
    Variable(
        "ETPI_SCHEDULE",
        "Cron expression of the schedule `run_experiments`, in UTC.",
        "no schedule",
        "etpi_assets.orchestration.automation.schedule",
    ),
    Variable(
        "ETPI_SCHEDULE_EXPERIMENTS",
        "Experiments that the schedule brings up to date, separated by commas.",
        "none",
        "etpi_assets.orchestration.automation.schedule",
    ),
    Variable(
        "ETPI_ALERT_URL",
        "Address to which the sensor `alert_on_failure` posts failed runs.",
        "none",
        "etpi_assets.orchestration.automation.alerts",
    ),
    Variable(
        "ETPI_PAGE_URL",
        "Address of Dagster's web page in alerts.",
        "`http://localhost:3000`",
        "etpi_assets.orchestration.automation.alerts",
    ),
    Variable(
        "ETPI_WORKERS",
        "Processes that share the work of scoring and pairs; 1 for none beside the run. Results do not depend on it. "
        "Small inputs need none.",
        "one for each core",
        "etpi_resources.process.pool",
    ),
    Variable(
        "ETPI_TRAINER_PYTHON",
        "Interpreter that trainers run in, such as one of an environment with CUDA.",
        "the interpreter that runs etpi",
        "etpi_resources.trainers.pipes",
    ),
    Variable(
        "ETPI_VLLM",
        "The `vllm` program.",
        "the program beside the interpreter, then `.venv-vllm/bin/vllm` of the checkout",
        "etpi_resources.engines.vllm_server",
    ),
    Variable(
        "ETPI_MITMDUMP",
        "mitmproxy's program `mitmdump`, which records what grading downloads.",
        "`.venv-mitmproxy/bin/mitmdump` of the checkout",
        "etpi_resources.sandboxes.downloads.proxy",
    ),
    Variable(
        "ETPI_GGUF_CONVERTER",
        "llama.cpp's `convert_hf_to_gguf.py`, or an interpreter and the script, for `etpi export --format gguf`.",
        "the script on PATH",
        "etpi_resources.gguf_converter",
    ),
    Variable(
        "ETPI_DOCKER_IMAGE",
        "Image of Docker sandboxes for tasks that bring none; it needs bash and Python.",
        "the image named in the module",
        "etpi_resources.sandboxes.docker_images",
    ),
    Variable(
        "ETPI_DOCKER_RUNTIME",
        "Runtime of Docker sandboxes, such as gVisor's `runsc`, where the engine has it.",
        "the engine's own",
        "etpi_resources.sandboxes.docker",
    ),
    Variable(
        "ETPI_CGROUP",
        "A control group with the memory controller in which this user may create groups for bubblewrap sandboxes.",
        "found, where this user may create groups",
        "etpi_resources.sandboxes.memory_group",
    ),
    Variable(
        "ETPI_MICRO_TOKENS",
        "Most tokens of one forward pass in fine-tuning; lower it if the GPU runs out of memory.",
        "8192",
        "etpi_assets.training.sft",
    ),
    Variable(
        "ETPI_STATE_SECONDS",
        "Least seconds between two saved states that a killed fine-tuning continues from; 0 saves one after each step.",
        "600",
        "etpi_assets.training.sft",
    ),
)
"""Read by etpi itself."""

INPUTS: Sequence[Variable] = (
    Variable("ETPI_TRAJECTORIES", "Folder of recorded runs.", "none", "rollout sets cooperbench_logs, ..."),
    Variable("ETPI_COOPERBENCH", "CooperBench's data set.", "none", "suite cooperbench"),
    Variable("ETPI_PYPI_BUGS", "Folder that `etpi lab pypi-bugs` wrote.", "none", "suite pypi_bugs"),
    Variable("ETPI_R2E_GYM", "R2E-Gym's rows.", "none", "suite r2e_gym_lite"),
    Variable("ETPI_SWE_BENCH", "SWE-bench Verified's rows.", "none", "suite swe_bench_verified"),
    Variable("ETPI_TERMINAL_BENCH", "Folder of Terminal-Bench tasks.", "none", "suite terminal_bench"),
    Variable("ETPI_OPEN_AGENTRL", "Open-AgentRL's training rows.", "none", "suite open_agentrl"),
    Variable("ETPI_OPEN_AGENTRL_HELDOUT", "Open-AgentRL's held-out rows.", "none", "suite open_agentrl_heldout"),
    Variable("ETPI_OPEN_AGENTRL_SFT", "Open-AgentRL's conversations.", "none", "rollout set open_agentrl_sft"),
)
"""Named by shipped specs as `${VARIABLE}`: a spec of yours may name any other."""

READ_FROM_THE_SYSTEM: Sequence[Variable] = (
    Variable(
        "PGPASSWORD",
        "Password of a cluster's Postgres, or PGPASSFILE names a file with it; in the environment of every node's Ray.",
        "unset",
        "etpi_cluster.postgres_locks, libpq",
    ),
    Variable(
        "RAY_AUTH_MODE",
        "`token`: Ray takes jobs from holders of its token alone, which RAY_AUTH_TOKEN or RAY_AUTH_TOKEN_PATH gives; "
        "the same on every node and where runs are launched.",
        "unset: whoever reaches Ray's ports can run code",
        "etpi_cluster.environment, etpi_cluster.doctor, Ray",
    ),
    Variable(
        "XDG_CACHE_HOME",
        "Cache folder of the user; in `etpi` below it are the assets and their code versions, which are computed again "
        "after any change of the code.",
        "`~/.cache`",
        "etpi_resources.process.stored_values",
    ),
    Variable(
        "SSL_CERT_FILE",
        "Certificate authorities that the proxy of grading trusts.",
        "the system's",
        "etpi_resources.sandboxes.downloads.proxy",
    ),
    Variable(
        "HF_ENDPOINT",
        "The hub that `etpi export --push` writes to; the token is HF_TOKEN or the stored login of `hf`.",
        "huggingface.co",
        "etpi_assets.exports.hub_repository",
    ),
    Variable(
        "TENSORBOARD_LOGGING_DIR",
        "Folder of tensorboard's runs (`train.report_to`); each run has one of its own below it.",
        "`trackers/tensorboard` in the lake",
        "etpi_resources.trainers.workers.tracking",
    ),
    Variable(
        "TRACKIO_DIR",
        "Folder of trackio's runs; TRACKIO_PROJECT names their project.",
        "`trackers/trackio` in the lake; `etpi`",
        "etpi_resources.trainers.workers.tracking, trackio",
    ),
    Variable(
        "WANDB_DIR",
        "Folder of wandb's runs; WANDB_PROJECT names their project, and WANDB_API_KEY or WANDB_MODE are wandb's own.",
        "`trackers/wandb` in the lake; `etpi`",
        "etpi_resources.trainers.workers.tracking, wandb",
    ),
    Variable(
        "MLFLOW_TRACKING_URI",
        "Server or folder of mlflow's runs; MLFLOW_EXPERIMENT_NAME names their experiment.",
        "`trackers/mlflow` in the lake; `etpi`",
        "etpi_resources.trainers.workers.tracking, mlflow",
    ),
    Variable(
        "CUDA_VISIBLE_DEVICES",
        "The accelerators that a run locks, as Ray sets it; unset, it locks all of the machine.",
        "unset",
        "etpi_assets.resources",
    ),
    Variable("PYTHONPATH", "Kept behind etpi's own folder for workers.", "empty", "etpi_resources.trainers.pipes, ..."),
    Variable(
        "container",
        "Set by container engines; it only shapes the advice when sandboxes cannot start.",
        "unset",
        "etpi_resources.sandboxes.namespaces",
    ),
    Variable(
        "PATH",
        "Passed to the GGUF converter, as are HOME, LANG, LC_ALL, TMPDIR and LD_LIBRARY_PATH.",
        "the system's",
        "etpi_resources.gguf_converter",
    ),
)
"""Variables of the system."""

SET_FOR_PROCESSES: Sequence[Variable] = (
    Variable("DAGSTER_PIPES_CONTEXT", "Dagster Pipes' channel to a worker.", "unset", "Dagster; workers.reporting"),
    Variable("RANK", "Rank of a worker's process in sharded training.", "0", "workers.reporting"),
    Variable("LOCAL_WORLD_SIZE", "Number of a worker's processes on this node.", "WORLD_SIZE", "workers.sharding"),
    Variable("WORLD_SIZE", "Number of a worker's processes.", "1", "workers.sharding"),
    Variable(
        "OMP_NUM_THREADS",
        "Threads of each process that shares the cores with others.",
        "its share of the cores",
        "etpi.run.client, workers.ranks",
    ),
    Variable(
        "ETPI_RUN_CODE",
        "Hash of a run's code, which its steps on nodes must have.",
        "unset",
        "etpi_cluster.environment",
    ),
    Variable(
        "RAY_ADDRESS",
        "Address of a cluster's Ray, which Ray sets in its jobs.",
        "`ray` of `cluster.toml`",
        "etpi_cluster.session, etpi_cluster.environment",
    ),
    Variable("RAY_JOB_CONFIG_JSON_ENV_VAR", "A Ray job's own settings: its code.", "unset", "etpi_cluster.environment"),
    Variable("RAY_USAGE_STATS_ENABLED", "0: Ray sends no statistics.", "0", "etpi_cluster.session"),
    Variable("ETPI_DOWNLOADS", "Settings of the proxy's process.", "unset", "etpi_resources.sandboxes.downloads.proxy"),
    Variable(
        "CUBLAS_WORKSPACE_CONFIG",
        "Work space of cuBLAS, which reinforcement that repeats needs on a GPU.",
        "`:4096:8` with `rl.repeatable`",
        "etpi_resources.cuda",
    ),
    Variable("GLOO_SOCKET_IFNAME", "Network interface on which a worker's processes meet.", "lo", "workers.ranks"),
)
"""Set by etpi for processes that it starts; a value of yours wins where one is useful."""

_SECTIONS = (
    ("Folders and programs", "", FOLDERS_AND_PROGRAMS),
    (
        "Inputs of shipped specs",
        "A spec names files as `${VARIABLE}/...`. Only the specs in the last column need these; a run that lacks one "
        "says which to export. An `[engine]` names the variable of its API key in `api_key_env`.",
        INPUTS,
    ),
    ("Variables of the system", "", READ_FROM_THE_SYSTEM),
    (
        "Set by etpi for its own processes",
        "You need not set these. Besides them, trainers and vLLM servers start with quiet defaults (no telemetry, no "
        "downloads while serving); a variable in your environment overrides each of those.",
        SET_FOR_PROCESSES,
    ),
)

REGISTRY: Sequence[Variable] = tuple(variable for _, _, variables in _SECTIONS for variable in variables)


def page() -> str:
    """Return the page."""
    lines = ["# Environment variables", ""]
    for heading, text, variables in _SECTIONS:
        rows = [[f"`{v.name}`", prose(v.meaning), prose(v.default), prose(v.reader)] for v in variables]
        lines += [f"## {heading}", "", *([prose(text), ""] if text else [])]
        lines += [*table(["Variable", "Meaning", "Default", "Read by"], rows), ""]
    return "\n".join(lines).rstrip() + "\n"
