"""Names of the checks that `gates.override` may name, by the asset that runs them."""

from __future__ import annotations

SELECTED = ("selection_reconciles", "turns_trained_once")
PAIRS = (
    "label_syntax", "labels_equal_template", "recorded_text", "tools_offered", "calls_answered",
    "pairs_reconcile", "capture_not_mixed", "history_as_captured", "no_think_in_output",
    "no_steering_leak", "prompt_is_default_render",
)  # fmt: skip
DATASET = (
    "dataset_reconciles", "validation_rows", "label_tokens", "heldout_split", "teacher_gate", "turn_loss_share",
    "format_exposure", "role_balance", "plan_paths_in_task", "prompt_length_ratio", "template_distance",
    "generation_prompt", "skip_rate", "turns_lost",
)  # fmt: skip
PROBES = (
    "served_name", "served_root", "ids_returned", "prompt_parity", "content_visible", "calls_round_trip",
    "differs_from_base", "first_turn_parses",
)  # fmt: skip

OVERRIDABLE = (*SELECTED, *PAIRS, *DATASET, *PROBES)
