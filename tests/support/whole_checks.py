"""The checks of pairs and data sets on whole tables, where the product computes their figures block by block."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from etpi_assets.checks import judged
from etpi_assets.curation.gates import (
    exposure_figures,
    exposure_outcome,
    loss_share_outcome,
    lost_figures,
    lost_outcome,
    role_figures,
    role_outcome,
)
from etpi_assets.curation.integrity import (
    AgentKey,
    capture_outcome,
    default_render_figures,
    heldout_figures,
    heldout_outcome,
    history_figures,
    label_figures,
    label_outcome,
    reconcile_figures,
    reconcile_outcome,
    steering_figures,
    think_figures,
    think_outcome,
)
from etpi_assets.curation.steering import SteeringNgrams
from etpi_assets.curation.upweight import loss_by_turn, shares
from etpi_assets.specs.experiment import GatesSection, PairsSection
from etpi_assets.trajectories.rollout_checks import merged
from etpi_resources.chat.format import ChatFormat
from etpi_resources.lake.check_outcome import CheckOutcome
from etpi_resources.lake.stored import counts


def pairs_reconcile(turns: pa.Table, pairs: pa.Table, dropped: pa.Table) -> CheckOutcome:
    return reconcile_outcome("pairs_reconcile", reconcile_figures(turns, pairs, dropped), len(turns))


def dataset_reconciles(pairs: pa.Table, rows: pa.Table, dropped: pa.Table) -> CheckOutcome:
    figures = reconcile_figures(pairs, rows, dropped)
    return reconcile_outcome("dataset_reconciles", figures, len(pairs), counts(rows, "split")["train"])


def capture_not_mixed(pairs: pa.Table, section: PairsSection) -> CheckOutcome:
    return capture_outcome(counts(pairs, "capture"), section)


def history_as_captured(pairs: pa.Table, captured: pa.Table, chat: ChatFormat) -> CheckOutcome:
    return judged("history_as_captured", history_figures(pairs, captured, chat))


def no_think_in_output(
    pairs: pa.Table, section: PairsSection, chat: ChatFormat, quoted: Mapping[str, int] | None = None
) -> CheckOutcome:
    return think_outcome(think_figures(pairs, section, chat, quoted or {}), section, chat)


def no_steering_leak(pairs: pa.Table, steering: SteeringNgrams) -> CheckOutcome:
    return judged("no_steering_leak", steering_figures(pairs, steering))


def prompt_is_default_render(
    pairs: pa.Table, expected: Mapping[AgentKey, Sequence[int] | np.ndarray], section: PairsSection, chat: ChatFormat
) -> CheckOutcome:
    return judged("prompt_is_default_render", default_render_figures(pairs, expected, section, chat))


def label_tokens(rows: pa.Table, pairs: pa.Table, sequences: pa.Table) -> CheckOutcome:
    return label_outcome(label_figures(rows, pairs, sequences))


def heldout_split(
    rows: pa.Table,
    heldout_repos: Collection[str],
    heldout_tasks: Collection[str] = (),
    val_by: Literal["repository", "conversation"] = "repository",
) -> CheckOutcome:
    return heldout_outcome(heldout_figures(rows), heldout_repos, heldout_tasks, val_by)


def turn_loss_share(rows: pa.Table, section: GatesSection) -> CheckOutcome:
    return loss_share_outcome(shares(loss_by_turn(rows)), section)


def format_exposure(rows: pa.Table, pairs: pa.Table, section: GatesSection) -> CheckOutcome:
    return exposure_outcome(exposure_figures(rows, pairs), section)


def role_balance(rows: pa.Table, pairs: pa.Table, section: GatesSection) -> CheckOutcome:
    return role_outcome(role_figures(rows, pairs), section)


def turns_lost(rows: pa.Table, from_pairs: pa.Table, from_rows: pa.Table, section: GatesSection) -> CheckOutcome:
    lost = merged([lost_figures(from_pairs), lost_figures(from_rows)])
    kept_tokens = pc.sum(rows["output_tokens"]).as_py() or 0  # pyright: ignore[reportAttributeAccessIssue]
    return lost_outcome(lost, len(rows), kept_tokens, section)
