"""A policy of downloads is a part of a task, and explains a rejection; no request is made."""

from __future__ import annotations

from unittest.mock import Mock

import pytest

from etpi_assets.tasks import downloads, proof
from etpi_assets.tasks.family import Rejected, RejectedInput
from etpi_resources.sandboxes.bubblewrap import BubblewrapFactory


@pytest.mark.parametrize(("network", "identity"), [("none", []), ("index", ["index", ["a.org"]])])
def test_policy_is_a_part_of_a_task_where_it_can_change_a_verdict(network, identity):
    assert downloads.identity({"grading": {"network": network, "hosts": ["a.org"]}}) == identity


@pytest.mark.parametrize(("reason", "named"), [("reference_fails", " Refused: a.org."), ("no_reference", "")])
def test_refused_downloads_are_named_where_the_reference_ran(monkeypatch, reason, named):
    monkeypatch.setattr(downloads, "refusals", lambda place: " Refused: a.org.")
    trial = Mock(place={"image": None}, reference=Mock(side_effect=Rejected(reason, "why.")))
    rejected = proof.prove(Mock(task_id="t"), [trial], BubblewrapFactory())
    assert rejected == RejectedInput("t", reason, f"why.{named}")
