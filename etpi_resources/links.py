"""Addresses of the pages that `etpi view` serves; reports, asset metadata and tables link to them."""

from __future__ import annotations

import os
from urllib.parse import quote, urlencode

VIEW_PORT = 3001
REPORTED_VIEW = f"http://localhost:{VIEW_PORT}"
"""The address in written reports: a constant, so that a report's bytes do not depend on the machine that wrote it."""


def view_url(path: str) -> str:
    """Return the address of a page: below $ETPI_VIEW_URL, or where `etpi view` listens by default."""
    return (os.environ.get("ETPI_VIEW_URL") or REPORTED_VIEW).rstrip("/") + path


def _part(name: str) -> str:
    """Return a name as one part of a path; it may contain `/`."""
    return quote(name, safe="")


def experiment_page(experiment: str) -> str:
    """Return the path of an experiment's page."""
    return f"/experiment/{_part(experiment)}"


def rollouts_page(**filters: str | None) -> str:
    """Return the path of the list of rollouts, filtered by made_for, origin, role, decoding, task, verdict, ..."""
    query = urlencode({name: value for name, value in filters.items() if value is not None})
    return "/rollouts" + (f"?{query}" if query else "")


def rollout_page(origin: str, made_for: str, rollout_id: str) -> str:
    """Return the path of one rollout as a conversation.

    Args:
        origin: set, eval or rl.
        made_for: the rollout set, or the experiment.
    """
    return f"/rollout/{_part(origin)}/{_part(made_for)}/{_part(rollout_id)}"


def tokens_page(origin: str, made_for: str, rollout_id: str, agent: str, turn: int) -> str:
    """Return the path of one turn of a rollout as tokens."""
    return f"{rollout_page(origin, made_for, rollout_id)}/tokens?{urlencode({'agent': agent, 'turn': turn})}"


def task_page(experiment: str, task_id: str) -> str:
    """Return the path of the page that shows base, student and teacher on one task."""
    return f"/task/{_part(experiment)}?{urlencode({'task': task_id})}"


def regressions_page(experiment: str) -> str:
    """Return the path of the tasks that the base solved and the student did not."""
    return f"/regressions/{_part(experiment)}"


def dataset_page(experiment: str) -> str:
    """Return the path of an experiment's training data."""
    return f"/dataset/{_part(experiment)}"


def curves_page(experiment: str) -> str:
    """Return the path of an experiment's loss and reward over steps."""
    return f"/curves?{urlencode({'experiment': experiment})}"


def report_page(experiment: str) -> str:
    """Return the path of an experiment's HTML report."""
    return f"/report/{_part(experiment)}"


def sequence_page(experiment: str, sequence_id: str) -> str:
    """Return the path of one merged sequence of an experiment's training data."""
    return f"{dataset_page(experiment)}/sequence/{_part(sequence_id)}"


def live_page() -> str:
    """Return the path of the page of collections that are under way."""
    return "/live"


def journal_rollout_page(journal: str, offset: int) -> str:
    """Return the path of a finished rollout of a journal that is not in the lake's tables yet.

    Args:
        journal: path of the journal in the lake's scratch folder.
        offset: position of the rollout's line in bytes.
    """
    return f"/live/rollout?{urlencode({'journal': journal, 'offset': offset})}"
