# ruff: noqa: E501 - a table of data, a row an edit
"""Edits of the project's own code, each one line that changes what is computed, with the results that it can change.

The expectations come from what the code does, not from what a tool says of it; `test_code_versions.py` compares the two.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

from etpi_assets.graph import GRAPH
from etpi_assets.planning.versioning.choices import applies
from etpi_assets.specs.experiment import ExperimentSpec
from etpi_assets.specs.load import Specs
from etpi_assets.specs.rollout_set import RolloutSetSpec

EXPERIMENTS = (
    "plan_first_tiny",
    "native",
    "plan_first_tiny_lora",
    "retokenised",
    "etpi_phase1_tiny",
    "etpi_phase2_tiny",
    "grpo_tcr_tiny",
    "terminal_grpo_tiny",
    "compacted",
    "plan_first_v1",
    "grpo_tcr_4b",
    "tito_native_v1",
    "teacher_gemini_unprompted",
    "etpi_phase1",
    "cooperbench_import",
    "solo_import",
    "terminal_grpo_0_8b",
    "opened",
    "foreign",
)
"""Experiments, shipped or own, that together have every shipped family, every engine and every kind of training."""
OWN = {
    "experiments/native": 'extends = "plan_first_tiny"\n[dataset]\nupweight_factor = 4\n',
    "experiments/retokenised": 'extends = "native"\n[pairs]\ncapture = "retokenised"\n',
    "experiments/compacted": 'extends = "running_sum_tiny"\nrollout_sets = ["compacted"]\n[evaluate.agent]\ncompact_after = 3\n',
    "rollout_sets/compacted": 'extends = "running_sum"\n[agent]\ncompact_after = 3\n',
    "experiments/opened": 'extends = "terminal_grpo_0_8b"\nrollout_sets = ["opened"]\n',
    "rollout_sets/opened": 'extends = "terminal_teacher"\n[agent]\ntokenizer = "qwen3_6"\n',
    "experiments/foreign": 'extends = "native"\nrollout_sets = ["foreign"]\n[evaluate]\nsuite = "repo_fix_tiny"\n[evaluate.harness]\nname = "codex"\nfolder = "/codex"\n',
    "rollout_sets/foreign": 'extends = "repo_fix_tiny_base"\nkind = "agent"\n[harness]\nname = "codex"\nfolder = "/codex"\n',
}
"""Specs beside the shipped ones."""

Where = Callable[[Specs, str], bool]
"""Whether a partition, of these specs and this name, is one whose result changes."""


@dataclass(frozen=True, eq=False)
class Edit:
    """One edit.

    Attributes:
        file: from the root of the project.
        old, new: the text to replace, which the file holds once.
        what: what the edit changes, in words.
        changes: asset -> which of its partitions; partitions that compute nothing are left out by themselves.
    """

    file: str
    old: str
    new: str
    what: str
    changes: Mapping[str, Where]

    def partitions(self, specs: Specs, known: Collection[tuple[str, str]]) -> set[tuple[str, str]]:
        """The asset partitions, of those that are known, whose result the edit can change."""
        return {
            (asset, key)
            for asset, key in known
            if asset in self.changes and applies(GRAPH[asset], key, specs) and self.changes[asset](specs, key)
        }


# --- which partitions ------------------------------------------------------------------------------------------------


def every(specs: Specs, key: str) -> bool:
    return True


def either(*conditions: Where) -> Where:
    return lambda specs, key: any(condition(specs, key) for condition in conditions)


def both(*conditions: Where) -> Where:
    return lambda specs, key: all(condition(specs, key) for condition in conditions)


def suites(*families: str) -> Where:
    return lambda specs, key: specs.suites[key].family in families


def sets(test: Callable[[RolloutSetSpec], bool]) -> Where:
    return lambda specs, key: test(specs.rollout_sets[key])


def experiments(test: Callable[[ExperimentSpec], bool]) -> Where:
    return lambda specs, key: test(specs.experiments[key])


def engine(*kinds: str) -> Where:
    return sets(lambda s: s.is_collected and s.engine is not None and s.engine.kind in kinds)


def imported(*formats: str) -> Where:
    return sets(lambda s: s.kind == "imported" and s.format in formats)


live = sets(lambda s: s.is_collected)
spoken = sets(lambda s: s.kind != "imported")
"""Rollouts that the agent loop makes, with or without sandboxes; a harness runs in its place and shares its code."""
plan_first = sets(lambda s: s.templated is not None)
builds_base = sets(lambda s: s.engine is not None and s.engine.model == "tiny")


def _family(specs: Specs, suite: str | None) -> str:
    return specs.suites[suite].family if suite else ""


def set_family(*families: str) -> Where:
    return lambda specs, key: _family(specs, specs.rollout_sets[key].suite) in families


def set_prompt(prompt: str) -> Where:
    return sets(lambda s: s.agent.prompt == prompt)


def evaluates(*families: str) -> Where:
    def where(specs: Specs, key: str) -> bool:
        section = specs.experiments[key].evaluate
        return section is not None and _family(specs, section.suite) in families

    return where


def reinforces(*families: str) -> Where:
    return lambda specs, key: _family(specs, specs.experiments[key].rl.suite) in families


def draws_on(where: Where) -> Where:
    """An experiment with such a rollout set."""
    return lambda specs, key: any(where(specs, name) for name in specs.experiments[key].rollout_sets)


def base(kind: str, *worlds: str) -> Where:
    return experiments(lambda e: e.base.kind == kind and (not worlds or e.base.tiny.world in worlds))


def base_of_set(world: str) -> Where:
    return sets(lambda s: s.engine is not None and s.engine.tiny is not None and s.engine.tiny.world == world)


def served(name: str) -> Where:
    return experiments(lambda e: e.serving.engine == name)


def asks(prompt: str) -> Where:
    return experiments(lambda e: e.evaluate is not None and e.evaluate.agent.prompt == prompt)


def rewarded(*functions: str) -> dict[str, Where]:
    where = experiments(lambda e: any(term.function in functions for term in e.rl.rewards))
    return {"rl_checkpoint": where, "rl_rewards": where}


def chats(template: str) -> dict[str, Where]:
    """What renders or decodes by a template."""
    where = experiments(lambda e: e.base.chat_template == template)
    assets = ("tito_pairs", "upweighted_dataset", "sft_checkpoint", "rl_checkpoint", "serving_probe", "eval_rollouts")
    return dict.fromkeys(assets, where)


def judged(*families: str) -> dict[str, Where]:
    """What a verdict of these families is in."""
    return {
        "tasks": suites(*families),
        "raw_rollouts": both(live, set_family(*families)),
        "eval_rollouts": evaluates(*families),
        "rl_checkpoint": reinforces(*families),
    }


def judged_later(*families: str) -> dict[str, Where]:
    """As `judged`, where the tasks are proven another way."""
    return {asset: where for asset, where in judged(*families).items() if asset != "tasks"}


def sandboxed(kind: str) -> dict[str, Where]:
    """What runs commands in a kind of sandbox."""
    return {
        "tasks": lambda specs, key: specs.suites[key].params.get("sandbox", "bubblewrap") == kind,
        "raw_rollouts": both(live, sets(lambda s: s.sandbox == kind)),
        "eval_rollouts": experiments(lambda e: e.serving.sandbox == kind),
        "rl_checkpoint": experiments(lambda e: e.rl.sandbox == kind),
    }


def served_by(kind: str) -> dict[str, Where]:
    """What a model served in this way generates."""
    return {
        "raw_rollouts": engine(kind),
        "serving_probe": served(kind),
        "eval_rollouts": served(kind),
        "rl_checkpoint": experiments(lambda e: e.rl.engine == kind),
    }


ROLLS_OUT: dict[str, Where] = {
    "raw_rollouts": spoken,
    "eval_rollouts": every,
    "rl_checkpoint": every,
}
"""The assets whose rollouts the agent loop computes."""
TOKENIZED: dict[str, Where] = {
    "raw_rollouts": both(live, sets(lambda s: s.agent.tokenizer == "tiny")),
    **chats("tiny"),
}

T, R, S = "etpi_assets/tasks", "etpi_assets/rollouts", "etpi_assets/scoring"
C, E, P = "etpi_assets/curation", "etpi_assets/evaluation", "etpi_assets/reports"
F, W = "etpi_assets/training", "etpi_resources/trainers/workers"
G, B, K = "etpi_resources/engines", "etpi_resources/sandboxes", "etpi_resources/chat/tokenizers"

EDITS = (
    # suite families
    Edit("etpi_assets/worlds/coop_tiny_shared/judge.py", "if not any(patched.values()):", "if not all(patched.values()):", "coop_tiny_shared's judge", judged_later("coop_tiny_shared")),
    Edit("etpi_assets/worlds/repo_fix_tiny/judge.py", "return bool(outcomes) and bool(expected) and not wrong, wrong", "return bool(outcomes) and not wrong, wrong", "repo_fix_tiny's judge", judged("repo_fix_tiny")),
    Edit("etpi_assets/worlds/terminal_tiny/judge.py", "return expected.rstrip() == actual.rstrip()", "return expected == actual", "terminal_tiny's judge", judged("terminal_tiny")),
    Edit(f"{T}/answers/maths.py", "_LONGEST = 2000", "_LONGEST = 1000", "how long an answer is compared", judged("answers", "arithmetic_tiny")),
    Edit(f"{T}/answers/equality.py", "strict=True", "strict=False", "how mathematics is compared", judged("answers", "arithmetic_tiny")),
    Edit("etpi_assets/worlds/running_sum/__init__.py", "return Verdict(1.0, ", "return Verdict(0.5, ", "running_sum's reward", judged("running_sum")),
    Edit(f"{T}/cooperbench_verdict.py", "if not any(work.values()):", "if not all(work.values()):", "cooperbench's verdict", judged_later("cooperbench")),
    Edit(f"{T}/harbor/verifier.py", "0.0 <= reward <= 1.0", "0.0 <= reward < 1.0", "harbor's reward", judged("harbor")),
    Edit(f"{T}/r2e.py", "return bool(outcomes) and bool(wanted) and not wrong,", "return bool(wanted) and not wrong,", "r2e's verdict", judged("r2e")),
    Edit(f"{T}/swe_bench.py", 'outcomes.get(name) != "PASSED"', 'outcomes.get(name) == "FAILED"', "swe_bench's verdict", judged("swe_bench")),
    Edit(f"{T}/hidden_tests.py", "except Exception:", "except BaseException:", "the program that runs hidden tests", judged("coop_tiny_shared", "repo_fix_tiny")),
    Edit("etpi_assets/worlds/arithmetic_tiny/__init__.py", 'return f"({rng.randint(12, 99)} *', 'return f"({rng.randint(11, 99)} *', "numbers of arithmetic tasks", {"tasks": suites("arithmetic_tiny")}),
    Edit(f"{T}/table.py", "for row in table.to_pylist() if split in", "for row in table.to_pylist()[1:] if split in", "which tasks are taken", {"raw_rollouts": spoken, **dict.fromkeys(("scored_rollouts", "tito_pairs", "upweighted_dataset", "rl_checkpoint", "rl_rewards", "serving_probe", "eval_rollouts", "eval_metrics"), every)}),
    # rollouts
    Edit("etpi_assets/agent/actions.py", 'return content[close + len("</think>") :]', 'return content[close + len("</think>") :].strip()', "text after a think block", {**ROLLS_OUT, "raw_rollouts": every, "serving_probe": every}),
    Edit("etpi_assets/agent/contract.py", "if not thinking.strip():", "if not thinking:", "the contract's form", {**ROLLS_OUT, "rl_rewards": rewarded("format", "relevance", "conciseness")["rl_rewards"], "serving_probe": every}),
    Edit("etpi_assets/agent/loop.py", "MIN_OUTPUT = 16", "MIN_OUTPUT = 32", "when an agent has no room left", ROLLS_OUT),
    Edit("etpi_assets/agent/observation.py", 'lines.append(f"[{status}]")', 'lines.append(f"({status})")', "what an agent sees of a command", ROLLS_OUT),
    Edit("etpi_assets/agent/mailbox.py", "other_agents if to is None else", "other_agents[:1] if to is None else", "who gets a message to all", ROLLS_OUT),
    Edit("etpi_assets/agent/think.py", "return len(output) - closed[1]", "return len(output) - closed[0]", "tokens after a think block", ROLLS_OUT),
    Edit("etpi_assets/agent/harness.py", "GRACE_SECONDS = 3.0", "GRACE_SECONDS = 0.0", "the time that a foreign harness has to end", {"raw_rollouts": sets(lambda s: s.kind == "agent"), "eval_rollouts": experiments(lambda e: e.evaluate is not None and e.evaluate.agent.harness is not None)}),
    Edit("etpi_assets/agent/prompts/coop/system.md", "One command a turn:", "A single command a turn:", "the coop prompt", {"raw_rollouts": both(spoken, set_prompt("coop")), "tito_pairs": draws_on(set_prompt("coop")), **dict.fromkeys(("upweighted_dataset", "serving_probe", "eval_rollouts"), asks("coop"))}),
    Edit("etpi_assets/agent/prompts/solo/user.md", "$instruction", "Task: $instruction", "the solo prompt", {"raw_rollouts": both(spoken, set_prompt("solo")), "tito_pairs": draws_on(set_prompt("solo")), **dict.fromkeys(("upweighted_dataset", "serving_probe", "eval_rollouts"), asks("solo"))}),
    Edit("etpi_assets/agent/tools.py", '"Run Python code. What', '"Run Python. What', "what a tool says of itself", {**ROLLS_OUT, **dict.fromkeys(("tito_pairs", "upweighted_dataset", "serving_probe"), every)}),
    Edit("etpi_assets/agent/interpreter_cell.py", "print(repr(value))", "print(value)", "how a cell shows its value", ROLLS_OUT),
    Edit("etpi_assets/worlds/coop_tiny_shared/policy.py", 'if "INBOX" in observation else None', "if observation else None", "coop_tiny_shared's policy", {"raw_rollouts": both(engine("scripted"), set_family("coop_tiny_shared"))}),
    Edit("etpi_assets/worlds/running_sum/policy.py", 'return str(format_action("sh next"))', 'return str(format_action("sh  next"))', "running_sum's policy", {"raw_rollouts": set_family("running_sum")}),
    Edit(f"{R}/teachers.py", "SCRIPTED_KINDS = (", 'SCRIPTED_KINDS = ("openai", ', "which engines are scripts", {"raw_rollouts": spoken}),
    Edit("etpi_assets/rollouts/plan_first/script.py", 'WAITING = "echo waiting"', 'WAITING = "echo wait"', "words of templated plan-first rollouts", {"raw_rollouts": plan_first}),
    Edit("etpi_assets/trajectories/tables.py", "_DRIFT_IDS = 16", "_DRIFT_IDS = 8", "how much of a drift is kept", {"raw_rollouts": every, "eval_rollouts": every, "rl_checkpoint": every}),
    Edit("etpi_assets/importers/cooperbench.py", 're.compile(r"API Error: \\d{3}\\b")', 're.compile(r"API Error")', "the cooperbench importer", {"raw_rollouts": imported("cooperbench")}),
    Edit("etpi_assets/importers/messages.py", '[entry for entry in entries if entry.role == "assistant" and entry.learn]', '[entry for entry in entries if entry.role == "assistant"]', "the messages importer", {"raw_rollouts": imported("messages")}),
    Edit("etpi_assets/importers/mini_swe_agent.py", "next((turn.at for turn in agent.turns if turn.at), None)", "None", "the mini-swe-agent importer", {"raw_rollouts": imported("mini_swe_agent")}),
    Edit("etpi_assets/importers/swe_agent.py", 'else "fenced"', 'else "xml"', "the SWE-agent importer", {"raw_rollouts": imported("swe_agent")}),
    # scoring
    Edit(f"{S}/behaviours.py", "EARLY_TURN = 5", "EARLY_TURN = 6", "which turns are early", {"scored_rollouts": every, "eval_metrics": every}),
    Edit(f"{S}/intervals.py", "Z = 1.959963984540054", "Z = 1.64", "the width of intervals", {"upweighted_dataset": every, "eval_metrics": every, "experiment_report": every}),
    Edit(f"{S}/rewards/tools.py", "return min(ceiling, -1.0 + (turns - 2) / 2 * step)", "return min(ceiling, -1.0 + turns / 2 * step)", "the reward of tool calls", rewarded("tool_call_reward")),
    Edit(f"{S}/rewards/terminal.py", "max(0, len(text) - free) / scale)", "max(0, len(text) - free) / (scale + 1))", "the reward of short answers", rewarded("conciseness")),
    # curation
    Edit(f"{C}/strip_think.py", 'return bool(text) and not text.strip("\\r\\n")', 'return bool(text) and not text.strip("\\n")', "stripping of think blocks", {"tito_pairs": every}),
    Edit(f"{C}/steering.py", "NGRAM_WORDS = 6", "NGRAM_WORDS = 7", "traces of steering", {"tito_pairs": every}),
    Edit(f"{C}/upweight.py", "np.where(upweighted, float(section.upweight_factor)", "np.where(upweighted, 1 + float(section.upweight_factor)", "weights", {"upweighted_dataset": every}),
    Edit(f"{C}/merge.py", "if 2 * shared >= size and", "if shared >= size and", "merging of rows", {"upweighted_dataset": every}),
    Edit(f"{C}/gates.py", "_COMMON = 0.9", "_COMMON = 0.8", "the gate on templates", {"upweighted_dataset": every}),
    Edit(f"{C}/select.py", "if value is None or value < 1:", "if value is None or value < 0.5:", "selection", {"selected_trajectories": every}),
    Edit(f"{C}/retokenise.py", 'elif role in ("system", "user"):', 'elif role in ("system",):', "re-tokenising", {"tito_pairs": every}),
    Edit(f"{C}/student_form.py", 'return _RESULT.sub("", content)', 'return _RESULT.sub(" ", content)', "observations as the student sees them", {"tito_pairs": every}),
    Edit(f"{C}/captured.py", 'for m in messages if m["kind"] == "prompt"]', "for m in messages]", "messages before the first turn", {"tito_pairs": every}),
    # training and its workers
    Edit(f"{F}/sft.py", "MICRO_TOKENS = 8192", "MICRO_TOKENS = 4096", "tokens of a pass", {"sft_checkpoint": every}),
    Edit(f"{F}/sft_checks.py", "SAME_IN_HALF = 1e-2", "SAME_IN_HALF = 2e-2", "the bound of a check", {"sft_checkpoint": every, "rl_checkpoint": every}),
    Edit(f"{F}/rounds.py", "if len(first_prompt(section, environment, task)) <= section.max_prompt_tokens:", "if len(first_prompt(section, environment, task)) < section.max_prompt_tokens:", "which prompts are too long", {"rl_checkpoint": every}),
    Edit(f"{F}/grpo.py", "RESUME_CHECKPOINTS = 10", "RESUME_CHECKPOINTS = 5", "how often reinforcement is saved", {"rl_checkpoint": every}),
    Edit(f"{F}/pointers.py", 'if COMMIT.fullmatch(base.revision or ""):', "if base.revision:", "what a pinned revision is", {"base_checkpoint": base("hub")}),
    Edit(f"{W}/packing.py", "LENGTH_MULTIPLE = 64", "LENGTH_MULTIPLE = 32", "padding", {"sft_checkpoint": every}),
    Edit(f"{W}/weighted_trainer.py", 'return (nll * inputs["weights"]).sum(), hits', "return nll.sum(), hits", "the loss", {"sft_checkpoint": every}),
    Edit(f"{W}/sft_worker.py", "GRADIENT_NORM = 1.0", "GRADIENT_NORM = 2.0", "gradient clipping", {"sft_checkpoint": every}),
    Edit(f"{W}/plan.py", "return rise * fall", "return fall", "the schedule of the learning rate", {"sft_checkpoint": every}),
    Edit(f"{W}/label_head.py", "logits.detach().argmax(-1) == labels", "logits.detach().argmin(-1) == labels", "token accuracy", {"sft_checkpoint": every}),
    Edit(f"{W}/sample_trees.py", "ROW_MULTIPLE = 128", "ROW_MULTIPLE = 64", "padding of samples", {"rl_checkpoint": every}),
    Edit("etpi_resources/trainers/policy_servers.py", "NEARER = 3.0", "NEARER = 2.0", "when a hand-over is refused", {"rl_checkpoint": experiments(lambda e: e.rl.engine == "vllm")}),
    Edit(f"{W}/grpo_worker.py", '"group" if rl.scale_advantage', '"batch" if rl.scale_advantage', "the scale of advantages", {"rl_checkpoint": every}),
    Edit(f"{W}/sharding.py", "set_gradient_divide_factor(float(dist.get_world_size()))", "set_gradient_divide_factor(1.0)", "gradients of a sharded policy", {"rl_checkpoint": experiments(lambda e: e.rl.sharded)}),
    # engines and sandboxes
    Edit(f"{G}/scripted.py", "SHORTEST_SPLIT = 3", "SHORTEST_SPLIT = 4", "which ids are split", {"raw_rollouts": engine("scripted")}),
    Edit(f"{G}/scripted.py", 'f"</think>\\n\\n{text}"', 'f"</think>\\n{text}"', "a text behind a begun think block", {"raw_rollouts": sets(lambda s: s.agent.tokenizer == "qwen3_6")}),
    Edit(f"{G}/transformers.py", "SLOTS = 64", "SLOTS = 32", "rows of a batch", served_by("transformers")),
    Edit(f"{G}/slots.py", "_GROWTH = 256", "_GROWTH = 128", "growth of the cache", served_by("transformers")),
    Edit(f"{G}/openai.py", 'ended {request.request_id} with', 'left {request.request_id} with', "an endpoint's error", {"raw_rollouts": engine("openai")}),
    Edit(f"{G}/vllm.py", '"prompt": PROBE, "add_special_tokens": False', '"prompt": PROBE, "add_special_tokens": True', "the first request to vLLM", served_by("vllm")),
    Edit(f"{B}/bubblewrap.py", "_OVERHEAD = 64 * 1024**2", "_OVERHEAD = 32 * 1024**2", "memory of a sandbox", sandboxed("bubblewrap")),
    Edit(f"{B}/guest.py", "MOST_FILES = 50_000", "MOST_FILES = 40_000", "the guest program", {asset: either(sandboxed("docker")[asset], where) for asset, where in sandboxed("bubblewrap").items()}),
    Edit(f"{B}/docker.py", "OVERHEAD = 64 * 1024**2", "OVERHEAD = 32 * 1024**2", "memory of a container", sandboxed("docker")),
    # evaluation and reports
    Edit(f"{E}/metrics.py", 'judged = [unit for unit in units if unit["reward"] is not None]', "judged = units", "the denominator of solved", {"eval_metrics": every}),
    Edit(f"{E}/probes.py", "hits / max(1, len(completions)), True)", "float(hits), True)", "a probe's share", {"serving_probe": every}),
    Edit(f"{E}/probe_plan.py", "random.Random(0).sample", "random.Random(1).sample", "which prompts are probed", {"serving_probe": every}),
    Edit(f"{E}/rollouts.py", "else section.sample_seeds[:1]", "else section.sample_seeds", "conditions of evaluation", {"eval_rollouts": every}),
    Edit(f"{P}/html.py", 'row["metric"] in thresholds and row["checkpoint_role"] in ("sft", "rl")', 'row["metric"] in thresholds', "rows of the report's table", {"experiment_report": every}),
    Edit(f"{P}/facts.py", 'filter(stage="selection")', 'filter(stage="pairs")', "figures of the report", {"experiment_report": every}),
    Edit(f"{P}/changes.py", "sum(sign > _EQUAL for sign in signs)", "sum(sign >= _EQUAL for sign in signs)", "tasks that rose", {"experiment_report": every, "model_card": every}),
    Edit("sql/reports/failures.sql", "s.reward IS DISTINCT FROM 1", "s.reward = 0", "rollouts that failed", {"experiment_report": every}),
    Edit(f"{P}/model_card.py", 'if train.method == "lora":', 'if train.method == "full":', "words of the model card", {"model_card": every}),
    Edit(f"{P}/templates/model_card.md.jinja", "license:", "licence:", "the model card's template", {"model_card": every}),
    Edit("etpi_resources/charts.py", 'stroke-width="{width}"/>', 'stroke-width="2"/>', "lines of charts", {"experiment_report": every}),
    # tokenizers
    Edit(f"{K}/terminal.jinja", "'### System:\\n'", "'### Sys:\\n'", "the terminal template", chats("terminal")),
    Edit(f"{K}/tiny/tiny.jinja", "+ message.content +", "+ message.content.strip() +", "the tiny template", TOKENIZED),
)  # fmt: skip
"""The edits, by package."""

SAME: tuple[tuple[str, str, str], ...] = (
    (
        "etpi_assets/worlds/coop_tiny_shared/judge.py",
        "    merged = base\n",
        "    # Nothing is merged yet.\n    merged = base\n",
    ),
    (
        "etpi_assets/worlds/coop_tiny_shared/judge.py",
        '"""Tasks validated in one sandbox."""',
        '"""Tasks that share a sandbox."""',
    ),
    (
        "etpi_assets/agent/actions.py",
        "    body = after_think(content)\n",
        "\n    body = (\n        after_think(content)\n    )\n",
    ),
    ("etpi_assets/agent/think.py", "at = closed[1]\n", "at = closed [1]   # past the tag\n"),
    ("etpi_assets/agent/loop.py", "MIN_OUTPUT = 16", "MIN_OUTPUT = (16)"),
    (
        f"{C}/select.py",
        '"""Return the first rule that the rollout fails by itself, as (reason, detail)."""',
        '"""Why a rollout is dropped."""',
    ),
    (
        "etpi_assets/specs/experiment.py",
        "Floor of tool calls trained on in one epoch",
        "Least calls of an epoch",
    ),
    (
        "etpi_assets/trajectories/records.py",
        '"""One assistant turn. ',
        '"""An assistant turn. ',
    ),
    (f"{K}/terminal.jinja", "that follows. An earlier", "that follows; an earlier"),
    (f"{B}/guest.py", "MOST_FILES = 50_000", "MOST_FILES = 50000  # enough"),
    (f"{W}/packing.py", "MAX_LENGTHS = 8", "MAX_LENGTHS = 0x8"),
)
"""(file, old, new): edits of words and layout alone."""
