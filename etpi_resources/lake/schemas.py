"""Every table of the lake, its columns, types and meaning, in one registry.

The lake writes only tables that fit, the catalog creates typed views from it, and the Dagster assets take their column
descriptions from it.

Ids: `rollout_id` is a content hash; `agent_id` names an agent within a rollout ("agent1"); `turn` counts an agent's
assistant turns from 0. Token ids are int32. Times are UTC. JSON columns hold a JSON object or array as text.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

IDS = pa.list_(pa.int32())
FLOATS = pa.list_(pa.float32())
TIME = pa.timestamp("us", tz="UTC")


@dataclass(frozen=True)
class Table:
    """A stored table: its name, the meaning of a row in one line, and its columns as (name, type, meaning)."""

    name: str
    row: str
    columns: tuple[tuple[str, pa.DataType, str], ...]

    @property
    def schema(self) -> pa.Schema:
        return pa.schema([pa.field(n, t, metadata={"description": d}) for n, t, d in self.columns])


def _table(name: str, row: str, *columns: tuple[str, pa.DataType, str]) -> Table:
    return Table(name, row, columns)


s, i32, i64, f64, b = pa.string(), pa.int32(), pa.int64(), pa.float64(), pa.bool_()

_ROLLOUT_KEY = (
    ("rollout_id", s, "content hash of what was rolled out"),
    ("agent_id", s, "the agent within the rollout"),
)

TABLES: dict[str, Table] = {
    t.name: t
    for t in (
        _table(
            "specs",
            "one resolved spec",
            ("kind", s, "suite, rollout_set or experiment"),
            ("name", s, "the spec file's stem, which is the partition key"),
            ("title", s, "one line for people"),
            ("spec", s, "the resolved spec as JSON"),
            ("sha256", s, "hash of the resolved JSON"),
        ),
        _table(
            "tasks",
            "one task of a suite",
            ("task_id", s, "unique in the suite"),
            ("suite", s, "the suite"),
            ("repo", s, "the repository the task is of; splits are by repository"),
            ("split", s, "train or heldout"),
            ("instruction", s, "the task as a person reads it, for all roles"),
            ("payload", s, "JSON: the data that the family's runner and verifier need"),
            ("content_hash", s, "sha256 of the payload and instruction"),
        ),
        _table(
            "quarantined",
            "one rejected input, with the reason",
            ("asset", s, "the asset that rejected it"),
            ("source", s, "file, folder or id of the input"),
            ("row", i64, "row or line within the source, if it has rows"),
            ("reason", s, "a short stable code: empty, errored, unknown_form, truncated_json, ..."),
            ("detail", s, "the fault, and how to fix it"),
        ),
        _table(
            "rollouts",
            "one rollout: all agents on one task, once",
            ("rollout_id", s, "content hash of task, sample and spec (live) or of the source (imported)"),
            ("origin", s, "set (a rollout set), eval or rl"),
            ("rollout_set", s, "the rollout set, for origin = set"),
            ("experiment", s, "the experiment, for origin = eval or rl"),
            ("checkpoint_role", s, "base, sft or rl for origin = eval or rl"),
            ("checkpoint_id", s, "the checkpoint that acted, for origin = eval or rl"),
            ("seed", i32, "the training seed of the checkpoint (eval) or of the sampler (set)"),
            ("sample_seed", i32, "the seed of the sampler"),
            ("decoding", s, "greedy, t1, ... ; null where unknown"),
            ("suite", s, "the task's suite"),
            ("task_id", s, "the task"),
            ("task_hash", s, "the task's content hash"),
            ("repo", s, "the task's repository"),
            ("sample", i32, "0..K-1 among the rollouts of this task"),
            ("engine", s, "scripted, transformers, vllm, openai or imported"),
            ("teacher", s, "the name of the model or policy that acted"),
            ("sampler", s, "JSON: temperature, top_p, max_tokens, seed"),
            ("exit_status", s, "the worst exit status of its agents"),
            ("agents", i32, "how many agents took part"),
            ("outcome", s, "JSON: the verifier's verdict (imported: the source's verdict); null if there is none"),
            ("final_files", s, "JSON: agent_id -> unified diff of its workspace"),
            ("source", s, "imported: path of the run, relative to the rollout set's path"),
            ("started_at", TIME, "start"),
            ("wall_seconds", f64, "wall time"),
            ("error", s, "the infrastructure error, if there was one"),
            (
                "tools",
                s,
                "imported: JSON list of the tool schemas that the source recorded, keys in its order; null if none",
            ),
        ),
        _table(
            "agents",
            "one agent of one rollout",
            *_ROLLOUT_KEY,
            ("feature_id", s, "the part of the task that this agent has"),
            ("role", s, "proposer, responder or solo"),
            ("exit_status", s, "Submitted, LimitsExceeded, ContextWindowExceeded, FormatError, Error, ..."),
            ("turns", i32, "assistant turns"),
            ("output_tokens", i64, "assistant output tokens as captured"),
            ("patch", s, "unified diff of the agent's work, null where unknown"),
        ),
        _table(
            "turns",
            "one assistant turn, with its prompt ids and output ids",
            *_ROLLOUT_KEY,
            ("turn", i32, "0-based, within the agent"),
            (
                "prefix_turn",
                i32,
                "the earlier turn whose prompt + output this prompt extends; null: there is none",
            ),
            ("suffix_ids", IDS, "prompt ids after the prefix (the whole prompt if prefix_turn is null)"),
            ("output_ids", IDS, "ids the engine generated, with the end-of-turn id if it generated one"),
            ("logprobs", FLOATS, "log-probability of each output id; null if unknown"),
            ("capture", s, "native, retokenised or none"),
            ("drift_at", i32, "first position where the prompt differs from the last turn's prompt + output"),
            ("drift", s, "JSON: ids and text of both at that position"),
            ("prompt_tokens", i32, "length of the prompt"),
            ("output_tokens", i32, "length of the output"),
            ("finish_reason", s, "stop, length or error"),
            ("content", s, "the turn's text"),
            ("reasoning", s, "the reasoning that the engine returned separately from the text"),
            ("think_tokens", i32, "ids inside the think block"),
            ("post_think_tokens", i32, "ids after the think block; the whole output if there is no block"),
            ("actions", s, "JSON list: {kind: bash | send_message, command, to, message, form, pure}"),
            ("parse_error", s, "why no action could be read; null if one was read"),
            ("observation", s, "the observation that the agent received"),
            ("exit_code", i32, "the last command's exit code"),
            ("inbox", s, "JSON list of messages shown in this turn's observation: {from, message}"),
            ("at", TIME, "when"),
        ),
        _table(
            "messages",
            "one chat message as captured",
            *_ROLLOUT_KEY,
            ("index", i32, "0-based position in the agent's conversation"),
            ("turn", i32, "the assistant turn that it is part of or answers; null before the first"),
            ("role", s, "system, user, assistant or tool"),
            ("content", s, "text"),
            ("reasoning", s, "reasoning, recorded separately from the text"),
            ("tool_calls", s, "JSON list, as captured"),
            ("kind", s, "prompt, action, observation, inbox or other"),
            ("at", TIME, "when"),
        ),
        _table(
            "scores",
            "one scored rollout",
            ("rollout_id", s, "the rollout"),
            ("task_id", s, "the task"),
            ("repo", s, "the repository"),
            ("reward", f64, "the verifier's reward; null if there is no verdict"),
            ("verdict", s, "passed, failed_tests, low_reward, merge_conflict, no_patch, infrastructure, unknown"),
            ("plan_first", b, "whether every agent sent the other a message before its first work in the repository"),
            ("plan_first_reason", s, "why plan_first is false"),
            ("plan_content", b, "whether the plans say who does what and name files or functions of the task"),
            ("plan_content_reason", s, "why plan_content is false"),
            ("follow_through", f64, "share of its agents that followed through (union)"),
            ("plan_first_published", b, "plan_first as the published report words it: any first message counts"),
            ("plan_content_published", b, "plan_content as its report words it"),
            ("follow_through_published", f64, "follow_through as its report words it"),
            ("output_tokens", i64, "assistant output tokens of all agents, before stripping"),
            ("turns", i32, "assistant turns of all agents"),
            ("exit_status", s, "as in rollouts"),
            ("infrastructure_error", b, "excluded from rates and counted"),
        ),
        _table(
            "agent_scores",
            "one scored agent",
            *_ROLLOUT_KEY,
            ("plan_first", b, "this agent's part of plan_first"),
            ("plan_content", b, "this agent's part of plan_content"),
            ("follow_through", b, "touched an entity of the pair's union after its plan"),
            ("follow_own", b, "touched an entity of its own plan"),
            ("follow_edited", b, "edited an entity of the union"),
            ("follow_by_turn_5", b, "touched one of the union by turn 5"),
            ("plan_first_published", b, "this agent's part of the rollout's"),
            ("plan_content_published", b, "this agent's part of the rollout's"),
            ("follow_through_published", b, "a command contains a path of the pair's first messages"),
            ("reason", s, "why it did not follow through"),
            ("plan_entities", s, "JSON list: entities its first message named"),
            ("parse_rate", f64, "share of turns with a readable action"),
            ("turns", i32, "assistant turns"),
            ("output_tokens", i64, "assistant output tokens"),
            ("think_tokens", i64, "ids inside think blocks"),
            ("post_think_tokens", i64, "ids after think blocks"),
            ("tool_turns", i32, "turns with a tool call that ran and was answered; null if no tool was offered"),
            (
                "adherent_turns",
                i32,
                "turns whose think block has the form of scoring.structure; null if that is not set",
            ),
            ("exit_status", s, "as in agents"),
        ),
        _table(
            "turn_scores",
            "one assistant turn compared with scoring.structure; no rows if that is not set",
            *_ROLLOUT_KEY,
            ("turn", i32, "the turn"),
            ("think_tokens", i32, "ids inside the think block"),
            ("post_think_tokens", i32, "ids after it, which can grow as thinking shrinks"),
            ("adheres", b, "whether the turn begins with a think block that has one line per slot"),
        ),
        _table(
            "selected",
            "one rollout selected for an experiment",
            ("rollout_id", s, "the rollout"),
            ("rollout_set", s, "its rollout set"),
            ("task_id", s, "the task"),
            ("repo", s, "the repository"),
            ("teacher", s, "who acted"),
            ("sample", i32, "its number among the K rollouts of the task"),
            ("reward", f64, "its reward"),
            ("output_tokens", i64, "the figure that shortest-correct compares"),
            ("turns", i32, "the tie-breaker"),
            ("rule", s, "the rule that selected it"),
        ),
        _table(
            "dropped",
            "one rollout or turn dropped from an experiment, with the reason",
            ("stage", s, "selection, pairs or dataset"),
            ("rollout_id", s, "the rollout"),
            ("agent_id", s, "the agent, if one turn was dropped"),
            ("turn", i32, "the turn, if one turn was dropped"),
            ("reason", s, "a short stable code"),
            ("detail", s, "the figures for the reason"),
            ("output_tokens", i32, "ids of the turn's output, if one turn was dropped and its ids are known"),
        ),
        _table(
            "pairs",
            "one assistant turn as the student sees it; the view tito_pairs adds the full input_ids",
            ("pair_id", s, "<rollout_id>/<agent_id>/<turn>"),
            *_ROLLOUT_KEY,
            ("turn", i32, "the turn"),
            ("prefix_turn", i32, "the earlier pair of this agent whose input + output this input extends; null: whole"),
            ("suffix_ids", IDS, "input ids after the prefix"),
            ("output_ids", IDS, "the ids to train on"),
            ("input_tokens", i32, "length of the full input"),
            ("capture", s, "native or retokenised"),
            (
                "prompt_edit",
                s,
                "none, spliced (steering removed) or stripped (think blocks of the history removed), + joined",
            ),
            ("think_removed", i32, "ids that strip-think removed from the output"),
            ("format_tokens", i32, "ids of the output that belong to the tool-call form"),
            ("metadata", s, "JSON: task_id, repo, teacher, source, original output length, tail form, ..."),
        ),
        _table(
            "dataset_rows",
            "one training row: a pair with its weight and split",
            ("dataset_row_id", s, "content hash of the row"),
            ("pair_id", s, "the pair"),
            *_ROLLOUT_KEY,
            ("turn", i32, "the turn"),
            ("task_id", s, "the task"),
            ("repo", s, "the repository"),
            ("teacher", s, "who acted"),
            ("split", s, "train or val"),
            ("weight", f64, "loss weight of each output token"),
            ("copies", i32, "how often the row is repeated (the duplicating form); 1 in the weighted form"),
            ("output_tokens", i32, "tokens in the loss"),
            ("sequence_id", s, "the merged sequence that contains it"),
            ("span_start", i32, "first output position within the sequence"),
            ("span_end", i32, "one past the last"),
        ),
        _table(
            "sequences",
            "one merged training sequence: a prefix tree of tokens",
            ("sequence_id", s, "content hash"),
            ("split", s, "train or val"),
            *_ROLLOUT_KEY,
            ("input_ids", IDS, "the tokens, depth first; without branches, in order"),
            ("node_starts", IDS, "index of each node's first token"),
            ("node_parents", IDS, "number of the node that each continues; -1 for the first, the root"),
            ("node_positions", IDS, "position of each node's first token in its branch"),
            ("span_starts", IDS, "index of the first token of each span in the loss"),
            ("span_ends", IDS, "one past the index of the last of each"),
            ("span_weights", FLOATS, "weight of each span (copies x weight)"),
            ("rows", i32, "dataset rows merged into it"),
        ),
        _table(
            "checkpoints",
            "one checkpoint, intermediate steps included",
            ("checkpoint_id", s, "content hash of its files"),
            ("experiment", s, "the experiment"),
            ("role", s, "base, sft or rl"),
            ("seed", i32, "training seed; null for base"),
            ("step", i32, "optimiser step; the last one is final"),
            ("final", b, "whether evaluation uses it"),
            ("method", s, "base, lora or full"),
            ("dtype", s, "dtype of the training computation: bf16 or fp32; null for a base that etpi did not train"),
            ("path", s, "folder, relative to the lake's root, or a hub id with revision"),
            ("adapter_path", s, "the adapter's folder, if there is one"),
            ("adapter_hash", s, "content hash of the adapter"),
            ("parent_id", s, "the checkpoint it was trained from"),
            ("dataset_version", s, "data version of upweighted_dataset"),
            ("label_tokens", i64, "label tokens the trainer counted in one epoch"),
            ("train_loss", f64, "last training loss"),
            ("token_accuracy", f64, "sft: share of label tokens ranked first, of the steps of that loss"),
            ("val_loss", f64, "last validation loss"),
            ("wall_seconds", f64, "training wall time"),
            ("hyperparameters", s, "JSON"),
        ),
        _table(
            "training_log",
            "one logged step",
            ("experiment", s, "the experiment"),
            ("role", s, "sft or rl"),
            ("seed", i32, "training seed"),
            ("step", i32, "optimiser step"),
            ("epoch", f64, "epochs done, in weighted rows"),
            ("loss", f64, "training loss"),
            ("token_accuracy", f64, "sft: share of label tokens ranked first, since the line before"),
            ("val_loss", f64, "validation loss, if measured"),
            ("learning_rate", f64, "learning rate at this step"),
            ("tokens", i64, "tokens trained on so far (rl: tokens of the policy)"),
            ("seconds", f64, "since the start"),
            ("reward", f64, "rl: mean reward of the step's rollouts"),
            ("reward_std", f64, "rl: their standard deviation"),
            ("parsed", f64, "rl: share of them with a readable action in every turn"),
            ("solved", f64, "rl: share that the verifier passed"),
            ("called", f64, "rl: share in which a tool was called: an action ran and was answered"),
            ("constant_groups", f64, "rl: share of groups whose rewards are all equal"),
            ("staleness", f64, "rl: optimiser steps since the weights that generated the rollouts"),
            ("logprob_gap", f64, "rl: mean |rollout - trainer| log-probability of a token, nats"),
            ("logprob_gap_max", f64, "rl: the largest of them"),
            ("entropy", f64, "rl: mean entropy of a token's distribution, nats"),
            ("clip_share", f64, "rl: share of tokens whose ratio was clipped"),
            ("kl", f64, "rl: mean KL estimate against the initial policy, if beta > 0"),
            ("staleness_max", f64, "rl: largest staleness of a pass of the step"),
            ("weight_mean", f64, "rl: mean importance weight of a token, if rl.correction is set"),
            ("weight_clipped", f64, "rl: share of tokens whose weight was above rl.correction_max"),
            ("rollout_seconds", f64, "rl: wall time of the step's rollouts, 0 where it trains on an earlier round"),
            ("update_seconds", f64, "rl: wall time of the rest of the step: passes, optimiser, checkpoint"),
            ("publish_seconds", f64, "rl: wall time in which the engine got the weights and proved them"),
        ),
        _table(
            "rl_samples",
            "one rollout that reinforcement learning trained on",
            ("rollout_id", s, "the rollout"),
            ("task_id", s, "the task: its group within a step"),
            ("seed", i32, "training seed"),
            ("step", i32, "optimiser steps done when it was generated"),
            ("place", i32, "position in its round; the rollouts of a group are adjacent"),
            ("reward", f64, "weighted sum of its rewards"),
            ("advantage", f64, "group-relative advantage"),
            ("parsed", b, "every turn had a readable action"),
            ("solved", b, "the verifier passed it; null if there is no verdict"),
            ("called", b, "an action ran and was answered"),
            ("prompt_tokens", i32, "ids of the first prompt"),
            ("policy_tokens", i32, "ids that the policy generated, which are in the loss"),
            ("read_tokens", i32, "ids of observations after the first prompt, which are not in the loss"),
            (
                "policy_logprobs",
                FLOATS,
                "the trainer's log-probability (nats, at the sampling temperature) of each id that the policy "
                "generated, before the first update on the rollout: turns.output_ids of its turns, one after the "
                "other, policy_tokens in all; null if not computed",
            ),
            (
                "entropies",
                FLOATS,
                "entropy (nats) of the distribution that each of policy_logprobs is of",
            ),
            ("version", i32, "optimiser steps done by the weights that generated it"),
        ),
        _table(
            "rewards",
            "one reward function's value for one rollout of reinforcement learning",
            ("rollout_id", s, "the rollout"),
            ("task_id", s, "the task"),
            ("seed", i32, "training seed"),
            ("step", i32, "as in rl_samples"),
            ("function", s, "the function's name"),
            ("version", s, "hash of its source"),
            ("weight", f64, "its weight in the sum"),
            ("value", f64, "its value, before the weight"),
            ("applied", b, "whether training used it; false: it was scored again later"),
        ),
        _table(
            "probes",
            "one probe of a served checkpoint",
            ("checkpoint_id", s, "the checkpoint"),
            ("role", s, "base, sft or rl"),
            ("seed", i32, "training seed"),
            ("step", i32, "optimiser steps done, of an intermediate checkpoint; null if it is final"),
            ("probe", s, "served_name, differs_from_base, prompt_parity, first_turn_message, ..."),
            ("prompt_set", s, "train or heldout"),
            ("n", i32, "prompts"),
            ("value", f64, "share that passed"),
            ("passed", b, "the verdict"),
            ("detail", s, "JSON"),
        ),
        _table(
            "metrics",
            "one measured rate or mean",
            ("experiment", s, "the experiment"),
            ("checkpoint_role", s, "base, sft, rl or teacher"),
            ("seed", i32, "training seed; null where pooled or not applicable"),
            ("decoding", s, "greedy, t1, ..."),
            ("metric", s, "plan_first, plan_content, follow_through, solved, parse_rate, ..."),
            ("value", f64, "the estimate"),
            ("n", i32, "number of units"),
            ("unit", s, "pair, rollout, agent or turn"),
            ("ci_low", f64, "lower end of the 95 % interval"),
            ("ci_high", f64, "upper end"),
            ("interval", s, "wilson, wilson_clustered or mean_clustered"),
            ("excluded", i32, "infrastructure errors, which n excludes"),
        ),
        _table(
            "changes",
            "one metric's change between two checkpoints of an evaluation, paired by task",
            ("experiment", s, "the experiment"),
            ("metric", s, "plan_first, follow_through, solved, parse_rate, ..."),
            ("decoding", s, "greedy, t1, ..."),
            ("before", s, "base or sft"),
            ("after", s, "sft or rl"),
            ("tasks", i32, "tasks that both were evaluated on"),
            ("value_before", f64, "the metric over these tasks, pooled over samples and seeds"),
            ("value_after", f64, "the same of the later checkpoint"),
            ("difference", f64, "value_after - value_before"),
            ("ci_low", f64, "lower end of the 95 % interval of the difference (Newcombe, paired by task)"),
            ("ci_high", f64, "upper end"),
            ("higher", i32, "tasks whose value rose"),
            ("lower", i32, "tasks whose value fell"),
            ("sign_p", f64, "two-sided exact sign test of these counts"),
            ("word", s, "same, improved, fell, lower, higher or even, by the rules of the report"),
        ),
        _table(
            "reports",
            "one written report",
            ("experiment", s, "the experiment"),
            ("kind", s, "html or model_card"),
            ("path", s, "file, relative to the lake's root"),
            ("sha256", s, "hash of the file"),
            ("bytes", i64, "size"),
        ),
        _table(
            "leaderboard",
            "one headline metric of an experiment",
            ("experiment", s, "the experiment"),
            ("title", s, "its title"),
            ("spec", s, "loaded; missing or invalid if the last run had no valid spec of this name"),
            ("checkpoint_role", s, "base, sft, rl or teacher"),
            ("decoding", s, "greedy, t1, ..."),
            ("metric", s, "the metric"),
            ("value", f64, "estimate, pooled over seeds"),
            ("n", i32, "units"),
            ("ci_low", f64, "95 % interval"),
            ("ci_high", f64, "95 % interval"),
            ("seeds", i32, "training seeds behind it"),
        ),
        _table(
            "teacher_ceiling",
            "one teacher of an experiment compared with its student",
            ("experiment", s, "the experiment"),
            ("teacher", s, "the teacher"),
            ("filtered", b, "whether selection filtered on the metric or on the reward"),
            ("checkpoint_role", s, "which student: sft or rl"),
            ("decoding", s, "greedy, t1, ..."),
            ("metric", s, "the metric"),
            ("teacher_value", f64, "among all rollouts of the teacher"),
            ("selected_value", f64, "among the rollouts trained on"),
            ("student_value", f64, "on held-out tasks"),
            ("student_ci_low", f64, "95 % interval"),
            ("student_ci_high", f64, "95 % interval"),
            ("n", i32, "held-out units"),
        ),
    )
}


LATER: Mapping[str, frozenset[str]] = {
    "training_log": frozenset(
        {"staleness_max", "weight_mean", "weight_clipped", "rollout_seconds", "update_seconds", "publish_seconds"}
    ),
    "rl_samples": frozenset({"version"}),
}
"""Columns that tables got after versions were published. A file leaves them out where they are null in every row, and
code versions leave them out too: versions without them stay equal."""


def empty(name: str) -> pa.Table:
    """Return the named table with no rows."""
    return TABLES[name].schema.empty_table()


def from_rows(name: str, rows: list[dict]) -> pa.Table:
    """Return the rows as the named table; a missing key is null. Raises KeyError for an unknown key."""
    schema = TABLES[name].schema
    known = set(schema.names)
    for row in rows:
        if not row.keys() <= known:
            raise KeyError(f"table {name}: unknown column(s) {sorted(row.keys() - known)}; it has {schema.names}")
    # Column by column: Table.from_pylist takes three times as long.
    columns = [pa.array([row.get(field.name) for row in rows], field.type) for field in schema]
    return pa.Table.from_arrays(columns, schema=schema)


def from_tuples(name: str, rows: Sequence[tuple[Any, ...]]) -> pa.Table:
    """Return rows, values in the order of the columns, as the named table."""
    schema = TABLES[name].schema
    columns = zip(*rows, strict=True) if rows else [()] * len(schema)
    arrays = [pa.array(column, field.type) for column, field in zip(columns, schema, strict=True)]
    return pa.Table.from_arrays(arrays, schema=schema)


def from_columns(name: str, columns: Mapping[str, Any], rows: int) -> pa.Table:
    """Return the named table from columns (Arrow or numpy arrays, or lists); a missing one is null.

    Raises:
        KeyError: the table has no such column.
    """
    schema = TABLES[name].schema
    if unknown := sorted(columns.keys() - set(schema.names)):
        raise KeyError(f"table {name}: unknown column(s) {unknown}; it has {schema.names}")
    arrays = [
        pa.nulls(rows, field.type) if field.name not in columns else _array(columns[field.name], field.type)
        for field in schema
    ]
    return pa.Table.from_arrays(arrays, schema=schema)


def _array(values: Any, kind: pa.DataType) -> Any:
    return values.cast(kind) if isinstance(values, pa.Array | pa.ChunkedArray) else pa.array(values, kind)
