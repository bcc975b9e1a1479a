"""Lines of progress: rate and time left do not count what the first units waited for."""

from __future__ import annotations

from types import SimpleNamespace

from etpi_resources.process import progress


def test_start_of_workers_is_in_no_estimate(monkeypatch):
    now, lines = [0.0], list[str]()
    monkeypatch.setattr(progress, "time", SimpleNamespace(monotonic=lambda: now[0]))
    counted = progress.Progress("tasks of a", "validated", 101, lines.append)
    for seconds in (60.0, *(60.0 + number for number in range(1, 101))):
        now[0] = seconds
        counted.advance()
    assert "left" not in lines[0] and "each" not in lines[0]
    assert lines[1].startswith("tasks of a: validated 61/101 (60%), 1.0/s, 2:00 so far, 0:40 left")
