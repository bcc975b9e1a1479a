"""The values of variables in a spec's path reach no message that Dagster stores."""

from __future__ import annotations

import dagster as dg
import pytest

from etpi_assets.orchestration.materialize import expected_failures
from etpi_assets.specs.load import SpecError
from etpi_assets.specs.paths import as_written, expand


@pytest.fixture
def secret(monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("WRITTEN_SECRET", "hunter2-of-the-test")
    return str(expand("/runs/${WRITTEN_SECRET}/logs"))


@pytest.mark.parametrize("error", [SpecError, FileNotFoundError, ZeroDivisionError])
def test_error_names_the_variable(secret: str, error: type[Exception]) -> None:
    with pytest.raises(dg.Failure) as failed, expected_failures("raw_rollouts"):
        try:
            raise KeyError(secret)
        except KeyError as cause:
            raise error(f"{secret}: no file") from cause
    text = f"{failed.value.description} {failed.value.__cause__}"
    assert "hunter2" not in text and "/runs/${WRITTEN_SECRET}/logs" in text


def test_other_errors_stay_as_they_are(secret: str) -> None:
    with pytest.raises(ZeroDivisionError), expected_failures("raw_rollouts"):
        raise ZeroDivisionError("no path")


def test_longest_value_is_replaced_first(secret: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WRITTEN_SHORT", "hunter2")
    monkeypatch.setenv("WRITTEN_EMPTY", "")
    expand("${WRITTEN_SHORT}${WRITTEN_EMPTY}")
    assert as_written(f"{secret} hunter2") == "/runs/${WRITTEN_SECRET}/logs ${WRITTEN_SHORT}"
