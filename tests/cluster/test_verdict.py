"""Every kind of fault of a cluster is found, at the right node and column, and a sound cluster has none."""

from __future__ import annotations

import pytest

from etpi.cli import main
from etpi_cluster.doctor.command import table
from etpi_cluster.doctor.node import NodeExaminer, NodeReport, Postgres
from etpi_cluster.doctor.survey import KINDS, PairLock, Survey
from etpi_cluster.doctor.verdict import findings
from etpi_cluster.settings import Cluster

NAMES = ("head", "one", "two")


def sound() -> Survey:
    reports = [
        NodeReport(
            name=name,
            offers={"CPU": 8.0, "etpi_sandbox": 0.0 if name == "head" else 8.0, "GPU": 2.0 if name == "two" else 0.0},
            python="3.12.1",
            ray="2.60.0",
            code="c0de",
            lake_kind="nfs4 (rw,relatime,rw)",
            sees=list(NAMES),
            accelerators=["nvidia0", "nvidia1"] if name == "two" else [],
            postgres=Postgres(version=150004, server="started etpi", superuser=False),
            free_gb={"lake": 900.0, "local": 100.0},
        )
        for name in NAMES
    ]
    locks = [
        PairLock(kind=kind, holder=holder, other=other, excluded=True)
        for kind in KINDS
        for holder in NAMES
        for other in NAMES
        if holder != other
    ]
    return Survey(code="c0de", nodes=reports, locks=locks)


def faults(survey: Survey) -> list[tuple[str, str]]:
    return [(found.node, found.column) for found in findings(survey) if found.fault]


def notes(survey: Survey) -> list[tuple[str, str]]:
    return [(found.node, found.column) for found in findings(survey) if not found.fault]


def test_a_sound_cluster_has_no_findings():
    assert findings(sound()) == []
    lines = table(sound(), []).splitlines()
    assert len(lines) == 1 + len(NAMES) and "nfs4" in lines[1] and "FAULT" not in table(sound(), [])


def test_a_node_that_cannot_write_is_the_fault_of_no_other_node():
    survey = sound()
    for place, report in enumerate(survey.nodes):
        change = {"sees": ["head", "one"], "lake_error": "Read-only file system" if report.name == "two" else None}
        survey.nodes[place] = report.model_copy(update=change)
    assert faults(survey) == [("two", "lake")]


@pytest.mark.parametrize(
    ("column", "change"),
    [
        ("code", {"code": "0ther"}),
        ("lake", {"lake_error": "Read-only file system: /shared/lake"}),
        ("lake", {"sees": ["two"]}),
        ("lake", {"sees": ["head", "one"]}),
        ("lake", {"local_error": "Permission denied: /var/tmp"}),
        ("sandboxes", {"sandbox_error": "bubblewrap is not installed"}),
        ("accelerators", {"accelerators": ["nvidia0"]}),
        ("clock", {"clock_offset": -3.0, "clock_within": 0.4}),
        ("postgres", {"postgres": None, "postgres_error": "connection refused"}),
        ("postgres", {"postgres": Postgres(version=110005, server="started etpi", superuser=False)}),
        ("postgres", {"postgres": Postgres(version=150004, server="another", superuser=False)}),
        ("ray", {"ray": "2.59.0"}),
        ("ray", {"python": "3.11.9"}),
    ],
)
def test_a_fault_of_one_node_is_found_there_and_nowhere_else(column, change):
    survey = sound()
    survey.nodes[2] = survey.nodes[2].model_copy(update=change)
    assert set(faults(survey)) == {("two", column)}
    assert all(found.remedy for found in findings(survey))
    assert table(survey, findings(survey)).splitlines()[3].count("FAULT") == 1


def test_a_slow_answer_does_not_read_as_a_wrong_clock():
    survey = sound()
    survey.nodes[1] = survey.nodes[1].model_copy(update={"clock_offset": 3.0, "clock_within": 2.5})
    assert faults(survey) == []


def test_a_node_without_sandboxes_is_no_fault_if_it_offers_none_unless_no_node_does():
    survey = sound()
    survey.nodes[0] = survey.nodes[0].model_copy(update={"sandbox_error": "not installed"})
    assert faults(survey) == [] and notes(survey) == [("head", "sandboxes")]
    for place, report in enumerate(survey.nodes):
        survey.nodes[place] = report.model_copy(update={"offers": {"CPU": 8.0}, "accelerators": []})
    assert faults(survey) == [("all", "sandboxes")]


def test_a_lock_that_lets_another_node_in_is_a_fault_and_node_local_flock_a_note():
    survey = sound()
    survey.locks[0] = PairLock(kind="lake", holder="head", other="one", excluded=False)
    assert faults(survey) == [("head", "locks")]
    survey = sound()
    survey.locks[-1] = PairLock(kind="flock", holder="two", other="one", excluded=False)
    assert faults(survey) == [] and notes(survey) == [("two", "locks")]
    survey = sound()
    survey.nodes[1].lake_kind = "nfs4 (rw,relatime,rw,local_lock=all)"
    assert notes(survey) == [("one", "locks")]


def test_a_lock_that_stays_taken_is_a_fault():
    survey = sound()
    survey.locks[0] = PairLock(kind="lake", holder="head", other="one", excluded=True, freed=False)
    assert faults(survey) == [("head", "locks")]


def test_a_node_that_gives_no_report_is_a_fault_with_its_reason():
    survey = sound()
    survey.failed["three"] = "ModuleNotFoundError: No module named 'etpi.doctor'"
    assert faults(survey) == [("three", "code")]
    assert "etpi.doctor" in findings(survey)[0].what and "three" in table(survey, findings(survey))


def test_missing_token_and_superuser_are_notes():
    survey = sound()
    survey.token = False
    survey.nodes[1].postgres = Postgres(version=150004, server="started etpi", superuser=True)
    assert faults(survey) == [] and set(notes(survey)) == {("one", "postgres"), ("all", "ray")}


def test_doctor_without_settings_says_what_writes_them(monkeypatch, capsys):
    monkeypatch.delenv("ETPI_CLUSTER", raising=False)
    assert main(["cluster", "doctor"]) == 1
    assert "etpi cluster init" in capsys.readouterr().err


def test_two_nodes_see_each_others_files_and_another_folder_shows_none(tmp_path):
    def examiner_of(name: str, lake: str) -> NodeExaminer:
        settings = Cluster(
            lake=tmp_path / lake, postgres="postgresql://etpi@127.0.0.1:1/etpi", ray="127.0.0.1:2",
            jobs="http://127.0.0.1:3", local=tmp_path / "local",
        )  # fmt: skip
        return NodeExaminer(settings, name, {}, "token")

    one, two, elsewhere = examiner_of("one", "lake"), examiner_of("two", "lake"), examiner_of("three", "other")
    for examiner in (one, two, elsewhere):
        examiner.report()
    assert one.seen() == two.seen() == ["one", "two"]
    assert elsewhere.seen() == ["three"]
