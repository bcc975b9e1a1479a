"""The doctor's list of programs that listen on all interfaces, on sockets of this process, and what it says of them."""

from __future__ import annotations

import socket
from contextlib import closing
from pathlib import Path

from etpi_cluster.doctor.listeners import on_all_interfaces
from etpi_cluster.doctor.node import NodeReport
from etpi_cluster.doctor.survey import Survey
from etpi_cluster.doctor.verdict import findings


def test_a_port_on_all_interfaces_is_listed_with_its_program_and_one_on_loopback_is_not() -> None:
    # Bound to the loopback address until the table has been read once: then a copy of it says "any address".
    with closing(socket.create_server(("127.0.0.1", 0))) as server:
        port = server.getsockname()[1]
        assert port not in [number for ports in on_all_interfaces().values() for number in ports]


def test_table_of_the_kernel_is_read(tmp_path: Path) -> None:
    (tmp_path / "net").mkdir()
    (tmp_path / "net" / "tcp").write_text(
        "  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode\n"
        "   0: 00000000:1538 00000000:0000 0A 00000000:00000000 00:00000000 00000000   99        0 7 1 0\n"
        "   1: 0100007F:1539 00000000:0000 0A 00000000:00000000 00:00000000 00000000   99        0 8 1 0\n"
        "   2: 00000000:153A 00000000:0000 01 00000000:00000000 00:00000000 00000000   99        0 9 1 0\n"
    )
    assert on_all_interfaces(5432, tmp_path) == {"postgres": [5432]}
    assert on_all_interfaces(5433, tmp_path) == {}


def test_each_server_that_is_open_to_all_is_a_note_with_its_remedy() -> None:
    open_to_all = {
        "gcs_server": [6379], "raylet": [40000], "postgres": [5432], "dagster_webserver": [3000],
        "etpi_cluster.doctor.survey": [40001],  # the doctor itself, while it asks
    }  # fmt: skip
    report = NodeReport(name="head", offers={"etpi_sandbox": 1}, code="c", sees=["head"], listens=open_to_all)
    notes = [finding for finding in findings(Survey(code="c", nodes=[report])) if "interfaces" in finding.what]
    assert not any(note.fault for note in notes)
    said = {note.column: note for note in notes}
    assert len(notes) == 3 and "gcs_server 6379, raylet 40000" in notes[0].what + notes[1].what + notes[2].what
    assert "listen_addresses" in said["postgres"].remedy
    assert not any("survey" in note.what for note in notes)
    assert any("firewall" in note.remedy for note in notes) and any("--host" in note.remedy for note in notes)
