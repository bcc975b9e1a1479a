"""The pages of `etpi view` that an asset's page links to."""

from __future__ import annotations

from collections.abc import Mapping

from etpi_resources import links
from etpi_resources.lake.manifest import Ref


def pages(ref: Ref) -> Mapping[str, str]:
    """Return label -> address of the pages about a partition; empty where there is none."""
    key = ref.key
    if ref.set == "experiment":
        paths = _OF_EXPERIMENT.get(ref.asset, ("experiment",))
        every = {
            "experiment": links.experiment_page(key),
            "report": links.report_page(key),
            "regressions": links.regressions_page(key),
            "data set": links.dataset_page(key),
            "evaluation rollouts": links.rollouts_page(origin="eval", made_for=key),
            "training rollouts": links.rollouts_page(origin="rl", made_for=key),
        }
        named = {name: every[name] for name in paths}
    elif ref.asset in ("raw_rollouts", "scored_rollouts"):
        named = {"rollouts": links.rollouts_page(origin="set", made_for=key)}
    elif ref.asset in ("leaderboard", "teacher_ceiling"):
        named = {"experiments": "/"}
    else:
        named = {}
    return {f"view {name}": links.view_url(path) for name, path in named.items()}


_OF_EXPERIMENT: Mapping[str, tuple[str, ...]] = {
    "experiment_spec": (),
    "selected_trajectories": ("data set",),
    "tito_pairs": ("data set",),
    "upweighted_dataset": ("data set",),
    "rl_checkpoint": ("training rollouts", "experiment"),
    "rl_rewards": ("training rollouts",),
    "eval_rollouts": ("evaluation rollouts",),
    "eval_metrics": ("regressions", "evaluation rollouts", "experiment"),
    "experiment_report": ("report", "regressions", "experiment"),
    "model_card": ("report", "experiment"),
}
"""Asset -> its pages; any other asset of an experiment links to the experiment's page."""
