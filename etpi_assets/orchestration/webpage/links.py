"""The page of `etpi view` that an asset's page links to."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from etpi_resources import links
from etpi_resources.lake.manifest import Ref


def _rollouts(origin: str) -> Callable[[str], str]:
    return lambda key: links.rollouts_page(origin=origin, made_for=key)


_PAGES: Mapping[str, Callable[[str], str]] = {
    "raw_rollouts": _rollouts("set"),
    "scored_rollouts": _rollouts("set"),
    "selected_trajectories": links.dataset_page,
    "tito_pairs": links.dataset_page,
    "upweighted_dataset": links.dataset_page,
    "rl_checkpoint": _rollouts("rl"),
    "rl_rewards": _rollouts("rl"),
    "eval_rollouts": _rollouts("eval"),
    "eval_metrics": links.regressions_page,
    "experiment_report": links.report_page,
    "leaderboard": lambda key: "/",
    "teacher_ceiling": lambda key: "/",
}
"""Asset -> the path of its page; any other asset of an experiment links to the experiment's page."""


def page(ref: Ref) -> str | None:
    """Return the address of the page about a partition; None if there is none."""
    path = _PAGES.get(ref.asset, links.experiment_page if ref.set == "experiment" else None)
    return links.view_url(path(ref.key)) if path else None
