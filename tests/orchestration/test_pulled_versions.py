"""Dagster's page shows versions of a lake that was copied or pulled."""

from __future__ import annotations

import dagster as dg

from etpi_assets.orchestration.webpage import report_unseen
from etpi_resources.lake.lake import Lake
from tests.support.small_lake import PAIRS, publish


def test_versions_that_the_instance_has_never_seen_are_reported_once(tmp_path):
    lake = Lake(tmp_path / "lake")
    first = publish(lake, PAIRS, 5, inputs={})
    with dg.DagsterInstance.ephemeral() as instance:
        assert (report_unseen(instance, lake), report_unseen(instance, lake)) == (1, 0)
        second = publish(lake, PAIRS, 6, inputs={})
        assert report_unseen(instance, lake) == 1
        records = instance.fetch_materializations(dg.AssetKey(PAIRS.asset), limit=5).records
        shown = [record.asset_materialization for record in records]
        assert [event.tags["dagster/data_version"] for event in shown] == [second.version, first.version]
        assert {event.partition for event in shown} == {PAIRS.key}
        assert shown[0].metadata["rows/turns"].value == 6
