"""Meanings of the columns that SQL views add to those of the stored tables."""

from __future__ import annotations

from collections.abc import Mapping

TABLES_BEHIND: Mapping[str, tuple[str, ...]] = {
    "full_turns": ("turns",),
    "dataset_history": ("dataset_rows",),
    "prompt_chains": ("turns",),
    "tito_pairs": ("pairs",),
    "lineage": ("dataset_rows", "checkpoints"),
    "suites": ("specs",),
    "rollout_sets": ("specs",),
    "experiments": ("specs",),
}
"""View -> the tables whose columns it shows, where it is not called like its table."""

_PUBLICATION = {
    "asset": "the asset",
    "set": "the partition set: suite, rollout_set or experiment; all for an asset without partitions",
    "key": "the partition's name",
    "version": "the data version: a content hash",
    "state": "current, blocked (newer than current, and refused) or past",
    "created_at": "when the version was published",
}
COLUMNS: Mapping[str, Mapping[str, str]] = {
    "checks": {
        **_PUBLICATION,
        "check_name": "the check",
        "passed": "whether the data passed",
        "blocking": "whether a failure stops every consumer",
        "message": "the outcome in words, with the remedy of a failure",
        "figures": "JSON: the numbers behind the outcome",
        "applicable": "whether there was something to decide; if not, it counts as passed",
    },
    "manifests": {
        **_PUBLICATION,
        "total_rows": "rows of all its tables",
        "rows": "JSON: rows by table",
        "inputs": 'JSON: "asset/key" -> data version that it read',
        "input_key": "hash of spec sections, inputs and code; the same key is not computed again",
        "spec_hash": "hash of the spec sections that it depends on",
        "code_version": "hash of the code that made it",
        "cause": "why it was made: first, spec, inputs or code",
        "accepted": "JSON: changes of code that a person accepted",
        "seconds": "wall time of computing it",
        "seeds": "the seeds that it used",
        "notes": "JSON: further facts, such as why an asset does not apply",
        "git_revision": "commit of the checkout that made it",
        "fingerprint": "JSON: versions of Python and of packages",
        "schema_version": "version of the manifest's form",
    },
    "versions": {
        **_PUBLICATION,
        "version": "the current data version",
        "blocked_version": "the newer version that a failed check blocks, if any",
        "total_rows": "rows of the current version",
        "created_at": "when the current version was published",
    },
    "dataset_history": {
        "version": "the data version that has the row",
        "created_at": "when the version was last published",
        "is_current": "whether it is the current version",
    },
    "rl_turns": {
        "rollout_id": "the rollout",
        "agent_id": "the agent within the rollout",
        "turn": "0-based, within the agent",
        "output_ids": "ids the policy generated",
        "logprobs": "their log-probabilities when they were sampled",
        "task_id": "the task",
        "seed": "training seed",
        "step": "optimiser steps done when it was generated",
        "advantage": "group-relative advantage",
        "policy_logprobs": "the trainer's log-probability of each output id, before its first update on the rollout",
        "entropies": "entropy of the trainer's distribution at each output id, nats",
    },
    "lineage": {
        "via_checkpoint_id": "the checkpoint whose own training read the row: this one, or one it was trained from",
        "origin": "set: a row of the data set; rl: a turn of a reinforcement rollout",
        "weight": "loss weight of each output token; for rl the advantage",
    },
    "prompt_chains": {
        "source": "turns or pairs: what the prompts are of",
        "numbers": "the agent's turns in order",
        "pieces": "the token ids that each turn adds: prompt suffix and output",
        "paths": "for each turn, the positions of the pieces that its prompt begins with; null where one is missing",
    },
    "rollouts": {"model": "checkpoint_role for evaluation and reinforcement, else the teacher"},
    "experiments": {
        "rollout_sets": "its rollout sets",
        "seeds": "its training seeds",
        "base": "base.kind",
        "method": "train.method",
        "rl_method": "rl.method",
    },
    "rollout_sets": {
        "kind": "live, imported or templated",
        "teacher": "engine.teacher",
        "k": "rollouts per task",
        "tokenizer": "agent.tokenizer",
    },
    "suites": {"family": "the family that makes the tasks"},
    "vocabulary": {
        "tokenizer": "the name that specs call the tokenizer",
        "id": "the token id",
        "text": "the text of the token",
    },
}
"""View -> column -> meaning."""

SHARED: Mapping[str, str] = {
    "origin": "set (a rollout set), eval or rl",
    "made_for": "the rollout set or experiment whose partition holds the row",
    "rollout_set": "the rollout set",
    "experiment": "the experiment",
    "suite": "the suite",
    "prompt_ids": "the whole prompt as token ids",
    "input_ids": "the whole input as token ids",
}
"""Column -> meaning in every other view."""
