"""The reference of checks: what each check catches, and what to do when it fails.

The checks themselves are functions beside the data they judge. Their descriptions are here, in a module that no asset's
code version covers, so that better words recompute nothing. Dagster's web page and docs/reference/checks.md show them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class CheckInfo:
    """A check of one asset.

    Attributes:
        catches: the faults that fail it.
        remedy: what to do then.
        answers: the failure of published work that it answers, unless docs/faults.md already names it.
        blocking: whether a failure stops every consumer; otherwise it only warns.
    """

    name: str
    catches: str
    remedy: str
    answers: str = ""
    blocking: bool = True

    @property
    def description(self) -> str:
        """The text on Dagster's web page."""
        return f"{self.catches} Remedy: {self.remedy}"


_TRAINED = (
    CheckInfo(
        "weights_differ_from_base",
        "Training that changed nothing: some of the trained tensors equal the base's, or all do once they are rounded "
        "to the dtype of the files.",
        "Look for a learning rate of zero or frozen parts.",
    ),
    CheckInfo(
        "adapter_not_zero",
        "A LoRA adapter with a lora_B matrix that is still zero, and so equal to the base there.",
        "Check the learning rate, and that target_modules names modules that the model uses.",
        answers="adapter equal to base",
    ),
    CheckInfo(
        "reload_equals_saved",
        "A saved or merged checkpoint whose tensors, read back, differ from the trained model's, or whose logits do, "
        "computed in the same dtype on the same device.",
        "Do not serve it; look at the tensors that the message names.",
        answers="hot reload that did nothing",
    ),
)

CHECKS: Mapping[str, tuple[CheckInfo, ...]] = {
    "tasks": (
        CheckInfo(
            "tasks_accounted",
            "A suite without tasks, repeated task ids, or tasks that are neither taken nor quarantined.",
            "Look at the table `quarantined` and at the suite's params; if the counts do not add up, the family is "
            "wrong.",
        ),
        CheckInfo(
            "tasks_valid",
            "More than 10 % of the tasks quarantined: the reference solution fails, the null solution passes, or a "
            "name does not exist.",
            "Read the reasons in `quarantined`: a broken suite, a broken sandbox or a stale list of names.",
        ),
        CheckInfo(
            "split_by_repo",
            "A repository with tasks in both the training and the held-out split.",
            "Give every task of a repository the same split.",
            answers="held-out repositories leaked into training",
        ),
        CheckInfo(
            "heldout_names_unseen",
            "Fewer than 95 % of held-out paths and names absent from training tasks. Suites of real repositories, "
            "which share conventional names, only get a warning.",
            "Draw held-out names from a pool of their own; otherwise results measure memory.",
        ),
    ),
    "raw_rollouts": (
        CheckInfo(
            "prompts_reconstruct",
            "A stored prompt that does not read back as captured, token id for token id.",
            "Do not use this version; the prefix encoding is broken.",
        ),
        CheckInfo(
            "native_ids_present",
            "Turns that claim native capture but have no token ids, or a live set without any turn.",
            "Use an engine that returns ids, or import the rollouts and re-tokenise them.",
        ),
        CheckInfo(
            "counts_reconcile",
            "Inputs that are neither rollouts nor quarantined; repeated ids; agents, turns or messages without a "
            "rollout, or of another number than their parent states.",
            "Do not use this version; look at the importer or the journal.",
        ),
        CheckInfo(
            "tasks_as_asked",
            "A suite with fewer tasks than the spec's `tasks`.",
            "Set `tasks` to the number there is, or repair the tasks that the suite quarantined.",
            blocking=False,
        ),
    ),
    "scored_rollouts": (
        CheckInfo(
            "every_rollout_scored",
            "A rollout or an agent without a score, or with two.",
            "Do not use this version; materialize scored_rollouts again.",
        ),
    ),
    "selected_trajectories": (
        CheckInfo(
            "selection_reconciles",
            "Selected and dropped rollouts that are not all rollouts once, or an empty selection.",
            "Loosen [select], or collect rollouts of a better teacher.",
        ),
    ),
    "tito_pairs": (
        CheckInfo(
            "label_syntax",
            "Outputs whose calls the serving parser cannot read or the template would write otherwise, that do not end "
            "their turn, or finished conversations whose last turn is lost.",
            "Import structured calls, or name the base.chat_template whose syntax the rollouts use.",
        ),
        CheckInfo(
            "labels_equal_template",
            "A prompt or label, rendered from messages, that `apply_chat_template` of the student's tokenizer writes "
            "otherwise, but for differences that the spec asks for.",
            "Compare base.tokenizer, base.chat_template and serving.template_kwargs with the model's own.",
        ),
        CheckInfo(
            "recorded_text",
            "Recorded ids that do not decode to the recorded text and calls of their turn.",
            'Name the tokenizer that wrote the ids, or set pairs.capture = "retokenised".',
        ),
        CheckInfo(
            "tools_offered",
            "Labels that call a tool although their prompts offer none.",
            "Import the tool schemas (rows or options.tools), set pairs.tools, or accept it in gates.override.",
        ),
        CheckInfo(
            "pairs_reconcile",
            "Turns of selected rollouts that are neither pairs nor dropped, or no pairs at all.",
            'Read the reasons in `dropped`; turns without ids need pairs.capture = "retokenised".',
        ),
        CheckInfo(
            "capture_not_mixed",
            "Pairs of another capture than pairs.capture.",
            "Make one experiment of each capture, or set pairs.capture.",
        ),
        CheckInfo(
            "history_as_captured",
            "Re-tokenised prompts that differ from the prompts that the model was given.",
            'Set pairs.capture = "native": a compacted or edited history is in the captured ids only.',
        ),
        CheckInfo(
            "no_think_in_output",
            "Think text in an output, or an input that ends in an open think block, with pairs.strip_think; tags that "
            "a turn quotes are not counted.",
            "Look at one such turn token by token: the strip rule does not know this template's form.",
        ),
        CheckInfo(
            "no_steering_leak",
            "Text of the steering prompt in an input or output.",
            "Compare the rollout set's messages with its agent section; drop rollouts that quote the steering.",
        ),
        CheckInfo(
            "prompt_is_default_render",
            "First prompts that differ from the student's default rendering of the same task.",
            "Compare agent.prompt, agent.tools, base.tokenizer and base.chat_template with those of the rollouts.",
            answers="steering prompt left in training data",
        ),
    ),
    "upweighted_dataset": (
        CheckInfo(
            "dataset_reconciles",
            "Pairs that are neither training rows nor dropped, or nothing to train on.",
            "Read the reasons in `dropped`; raise dataset.max_length if pairs are too long.",
        ),
        CheckInfo(
            "label_tokens",
            "Merged sequences whose label tokens are not exactly the outputs of the rows, or no labels.",
            "Materialize upweighted_dataset again; if it stays, the merge is broken.",
            answers="all-zero loss mask with a healthy loss",
        ),
        CheckInfo(
            "heldout_split",
            "Held-out repositories or tasks in the data set, a repository in both train and val, rows without one.",
            "Name the repositories in select.exclude_repos, or set the rollout set's split.",
        ),
        CheckInfo(
            "teacher_gate",
            "A teacher whose own rates are below gates.teacher.",
            "Take a stronger teacher, or give the reason in gates.override.",
        ),
        CheckInfo(
            "turn_loss_share",
            "Turn 0 with less of the weighted loss than gates.first_turn_loss_share.",
            "Raise dataset.upweight_factor for turn 0.",
        ),
        CheckInfo(
            "format_exposure",
            "Fewer tool calls trained on in an epoch than gates.format_exposure.",
            "Collect more rollouts, or raise dataset.upweight_factor.",
        ),
        CheckInfo(
            "role_balance",
            "The rarer role with less of the training rows than gates.role_balance.",
            "Select whole rollouts, with the turns of both agents.",
        ),
        CheckInfo(
            "plan_paths_in_task",
            "Fewer plans than gates.plan_paths_in_task whose files and functions occur in their task.",
            "Require plan_content in [select], or take another teacher.",
        ),
        CheckInfo(
            "prompt_length_ratio",
            "Median first prompts of training and evaluation whose lengths differ by more than "
            "gates.prompt_length_ratio.",
            "Train on tasks of the lengths that evaluation has.",
        ),
        CheckInfo(
            "template_distance",
            "Training prompts that lack more of the evaluation prompts' common text than gates.template_distance.",
            "Compare the system and user messages of training and evaluation.",
            answers="synthetic 3-line prompts in training",
        ),
        CheckInfo(
            "generation_prompt",
            "Evaluation prompts that end with another think block than training prompts do.",
            "Give training and serving the same arguments of the chat template.",
            answers="an empty think block in serving only",
        ),
        CheckInfo(
            "skip_rate",
            "More inputs lost before training than gates.skip_rate, for other reasons than selection.",
            "Repair the inputs that the message names, or give the reason in gates.override.",
            answers="stale task names silently skipped",
        ),
        CheckInfo(
            "turns_lost",
            "More turns, or output tokens, of selected rollouts lost than gates.turns_lost.",
            "Follow the commonest reason in `dropped`, such as dataset.max_length.",
        ),
    ),
    "base_checkpoint": (
        CheckInfo(
            "base_is_pinned",
            "A hub base named by a branch or tag, or a local base whose files hash to another sha256.",
            "Name the commit in base.revision, or set base.sha256 to the files meant.",
        ),
        CheckInfo(
            "base_learnt",
            "A tiny base whose final pretraining loss is above 0.6 nats per token, too high for an agent.",
            "Raise base.tiny.conversations, or look at its learning rates.",
        ),
        CheckInfo(
            "base_recipe_unchanged",
            "A shipped tiny base that was trained before its recipe changed.",
            "In a checkout, run `etpi lab tiny-bases`.",
            blocking=False,
        ),
    ),
    "sft_checkpoint": (
        CheckInfo(
            "label_tokens_match",
            "A trainer that counts other label tokens, or reads other sequences, than the data set has.",
            "Look at the worker's collate and compute_loss.",
        ),
        CheckInfo(
            "no_sequence_cut",
            "A trainer that reads other tokens than the data set has, such as sequences cut at a length.",
            "Look at the worker's collate: it must not truncate.",
        ),
        CheckInfo(
            "loss_finite_and_falls",
            "A validation loss (without a validation split, a training loss) that is not finite or does not fall.",
            "Look at train.learning_rate, the labels and the base.",
        ),
        *_TRAINED,
    ),
    "rl_checkpoint": (
        CheckInfo(
            "rollouts_recorded",
            "Rounds of rollouts that are missing, incomplete or lack a reward.",
            "Remove the run's folder below checkpoints/rounds and train again.",
        ),
        CheckInfo(
            "advantages_hold",
            "Advantages that do not follow from their group's rewards, or groups of several tasks.",
            "Do not use the checkpoint; the rounds and the trainer disagree.",
        ),
        CheckInfo(
            "logprobs_agree",
            "Log-probabilities of rollouts and trainer that differ by more than the precision explains.",
            "Give rollouts and trainer the same weights, temperature and template.",
        ),
        CheckInfo(
            "prompts_fit",
            "Tasks whose first prompt is longer than rl.max_prompt_tokens; they are left out.",
            "Raise rl.max_prompt_tokens, if the tasks matter.",
            blocking=False,
        ),
        CheckInfo(
            "groups_vary",
            "More than 95 % of the groups with equal rewards, which give no gradient.",
            "Take tasks that the start solves sometimes, larger groups, or a finer reward.",
            blocking=False,
        ),
        *_TRAINED,
    ),
    "rl_rewards": (
        CheckInfo(
            "rewards_as_applied",
            "Recorded rollouts whose rewards, computed with today's functions, differ from those trained on.",
            "Train again if the change of the reward function matters.",
            blocking=False,
        ),
    ),
    "serving_probe": (
        CheckInfo(
            "served_name",
            "A served name without the hash of the trained checkpoint or adapter.",
            "Serve the checkpoint under a name that embeds its hash, and unload the old one.",
        ),
        CheckInfo(
            "served_root",
            "A server that lists another folder behind the name, or whose files changed since training.",
            "Unload that model, and load the trained files under a new name.",
        ),
        CheckInfo(
            "ids_returned",
            "A completion without token ids, or prompt ids other than those sent.",
            "Make the server return token ids.",
        ),
        CheckInfo(
            "prompt_parity",
            "Prompts that serving renders otherwise than training did, token id for token id.",
            "Give both the same messages, tools, chat template and template arguments.",
        ),
        CheckInfo(
            "content_visible",
            "A chat turn with reasoning but neither content nor a call.",
            "Start the server without a reasoning parser, or with that of the trained template.",
            answers="a reasoning parser that swallowed the output",
        ),
        CheckInfo(
            "calls_round_trip",
            "Calls that the server's parser reads otherwise than the generated text says.",
            "Start the server with the tool parser of the trained call form, or without one.",
        ),
        CheckInfo(
            "differs_from_base",
            "Greedy first turns that equal the base's, in their ids and within twice the base's own noise in their "
            "probabilities, more often than probe.min_differs allows.",
            "Look for other weights being served, and at the checks of sft_checkpoint.",
        ),
        CheckInfo(
            "first_turn_parses",
            "First turns of the last trained role with a readable action less often than probe.min_parse.",
            "Compare a failing turn with a training row token by token; look at format_exposure.",
        ),
    ),
    "eval_rollouts": (
        CheckInfo(
            "every_condition_ran",
            "A checkpoint, decoding or seed with more or fewer rollouts than there are tasks.",
            "Materialize eval_rollouts again.",
        ),
        CheckInfo(
            "infrastructure_held",
            "More than 5 % of the rollouts ended by infrastructure errors.",
            "Repair the cause that the message names, and materialize eval_rollouts again.",
        ),
        CheckInfo(
            "tasks_as_asked",
            "A suite with fewer tasks than evaluate.tasks.",
            "Set evaluate.tasks to the number there is, or repair the tasks that the suite quarantined.",
            blocking=False,
        ),
    ),
    "eval_metrics": (
        CheckInfo(
            "every_rollout_scored",
            "A rollout or an agent of the evaluation without a score, or with two.",
            "Do not use this version; materialize eval_metrics again.",
        ),
        *(
            CheckInfo(
                f"{rate}_threshold",
                f"A trained checkpoint whose {rate} rate is below metrics.thresholds.{rate}. Where n is too small to "
                "decide, the message says so.",
                "Look at the teacher's rate and the training data; evaluate more tasks if n cannot decide.",
                answers="2 pairs read as a result",
                blocking=False,
            )
            for rate in ("plan_first", "plan_content", "follow_through")
        ),
    ),
    "catalog": (
        CheckInfo(
            "checkpoints_have_lineage",
            "Trained checkpoints without training rows: their data version is unknown or was pruned.",
            "Train again, or restore the data version.",
            blocking=False,
        ),
        CheckInfo(
            "inputs_come_back",
            "Pairs whose rebuilt input has another length than the stored one.",
            "Materialize tito_pairs again, then the catalog.",
            blocking=False,
        ),
        CheckInfo(
            "prompts_come_back",
            "Turns whose rebuilt prompt has another length than the captured one.",
            "Materialize the rollouts again, then the catalog.",
            blocking=False,
        ),
        CheckInfo(
            "rows_have_pairs",
            "Training rows whose pairs are not in the lake although both versions are current.",
            "Materialize tito_pairs and upweighted_dataset again.",
            blocking=False,
        ),
        CheckInfo(
            "turns_have_rollouts",
            "Turns whose rollout is not in the lake.",
            "Materialize the rollouts again.",
            blocking=False,
        ),
    ),
}
"""Asset -> its checks, in the order in which the asset declares them."""


_IDS = "Independent of weights: it compares ids or counts exactly."
_SMOL = "Seen to pass on an H200 with SmolLM2-135M, trained in bf16"

REAL: Mapping[str, str] = {
    **dict.fromkeys(
        (
            "tasks_accounted",
            "tasks_valid",
            "split_by_repo",
            "heldout_names_unseen",
            "prompts_reconstruct",
            "counts_reconcile",
            "every_rollout_scored",
            "selection_reconciles",
            "pairs_reconcile",
            "capture_not_mixed",
            "history_as_captured",
            "no_steering_leak",
            "dataset_reconciles",
            "label_tokens",
            "heldout_split",
            "role_balance",
            "plan_paths_in_task",
            "skip_rate",
            "turns_lost",
            "base_is_pinned",
            "label_tokens_match",
            "no_sequence_cut",
            "rollouts_recorded",
            "advantages_hold",
            "served_name",
            "served_root",
            "ids_returned",
            "every_condition_ran",
        ),
        _IDS,
    ),
    "native_ids_present": (
        "Independent of weights. An engine that returns no ids (a hosted API) fails it, as it should."
    ),
    "label_syntax": (
        "Reasoned: a template without calls (SmolLM2's) is judged by its text form; real templates are "
        "tested in docs/own_model.md."
    ),
    "no_think_in_output": (
        "Independent of weights. SmolLM2 writes <think> in several tokens, so its labels are searched as text; tested "
        "with its vocabulary."
    ),
    "labels_equal_template": (
        "Independent of weights. Tested with SmolLM2's vocabulary and with twelve templates that TRL ships."
    ),
    "recorded_text": "Independent of weights: it decodes recorded ids with the student's tokenizer.",
    "tools_offered": "Independent of weights: it reads calls and tools of messages.",
    "prompt_is_default_render": "Seen to pass with SmolLM2's vocabulary and template, token for token.",
    "teacher_gate": "Reasoned: a 4B teacher's rates are measured over its own rollouts, in any dtype.",
    "turn_loss_share": "Reasoned: shares of weights and label counts, without a forward pass.",
    "format_exposure": (
        "Independent of weights. SmolLM2 writes <tool_call> in several tokens, so its labels are searched as text; "
        "tested with its vocabulary."
    ),
    "prompt_length_ratio": "Seen to pass with SmolLM2's vocabulary; a ratio of the same tokenizer's counts.",
    "template_distance": "Seen to pass with SmolLM2's template.",
    "generation_prompt": "Seen to pass with SmolLM2's template; it compares rendered ids.",
    "base_learnt": "Does not apply: only the tiny base is pretrained here.",
    "loss_finite_and_falls": (
        f"{_SMOL}, fully in 7 to 138 steps. Reasoned: training for many epochs on few conversations can end "
        "with a higher validation loss than the base's; that is overfitting, and save_steps keeps earlier "
        "steps."
    ),
    "weights_differ_from_base": (
        f"{_SMOL}, full and LoRA. Tensors are compared in float32, because rounding to bf16 undoes the "
        "change of a norm weight at a small learning rate; it fails only if rounding undoes all of it."
    ),
    "adapter_not_zero": (
        f"{_SMOL} with LoRA. Reasoned: an expert that no token reached keeps a lora_B of zero, if experts "
        "are separate modules; name target_modules without them."
    ),
    "reload_equals_saved": (
        "Before, it blocked SmolLM2 stored in bf16: logits 0.063 apart, bound 0.05, because one side "
        "computed in float32. Now both compute alike: equal weights gave equal logits. A merge in 16 bits "
        "is compared by its tensors; its logits are reported."
    ),
    "logprobs_agree": (
        f"{_SMOL} against rollouts in float32, full tuning and LoRA (bound 0.1 nats a token). Reasoned: vLLM "
        "in bf16 against a trainer in bf16 differs by 0.01 to 0.03."
    ),
    "prompt_parity": f"{_SMOL}; ids alone are compared.",
    "content_visible": (
        "Reasoned: it judges the server's parsers, not weights; an untrained form may fail it rightly."
    ),
    "calls_round_trip": "Reasoned: as content_visible.",
    "differs_from_base": (
        f"{_SMOL}. Before, a turn with the base's ids and less than 0.1 nats a token of difference was no "
        "difference, which stopped short trainings; the bound is now twice what the base differs from "
        "itself by."
    ),
    "first_turn_parses": (
        "Seen to stop a true result: it judged the warm start of terminal_grpo_smol, which acts in 2 % of "
        "its turns, and not only the reinforced checkpoint, which acts in 95 %. Now only the last role "
        "counts."
    ),
    "infrastructure_held": (
        f"{_SMOL}, with 768 rollouts. Reasoned: an engine that runs out of memory ends the asset, not single rollouts."
    ),
}
"""Blocking check -> what a real model of billions of weights, in bfloat16 on a GPU, does there: seen, or reasoned."""


def check_info(asset: str, name: str) -> CheckInfo | None:
    """Return the reference entry of an asset's check, or None for an asset that is not etpi's own."""
    return next((info for info in CHECKS.get(asset, ()) if info.name == name), None)
