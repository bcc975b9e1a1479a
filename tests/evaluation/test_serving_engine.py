"""`serving.engine`: which engine serves on a machine."""

from __future__ import annotations

from pathlib import Path

import pytest

from etpi_assets import resources
from etpi_assets.specs.experiment import ServingSection
from etpi_resources.engines.vllm_server import PROGRAM_VARIABLE


@pytest.mark.parametrize(
    ("engine", "gpu", "vllm", "serves"),
    [
        ("auto", True, True, "vllm"),
        ("auto", False, True, "transformers"),
        ("auto", True, False, "transformers"),
        ("transformers", True, True, "transformers"),
        ("vllm", False, False, "vllm"),
    ],
)
def test_auto_is_vllm_where_a_gpu_and_a_vllm_are(
    engine: str, gpu: bool, vllm: bool, serves: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "vllm"
    if vllm:
        program.touch(mode=0o755)
    monkeypatch.setenv(PROGRAM_VARIABLE, str(program))
    monkeypatch.setattr(resources, "accelerators", lambda: gpu)
    section = ServingSection.model_validate(
        {"engine": engine, "options": {} if engine == "transformers" else {"seed": 1}}
    )
    assert resources.serving_kind(section) == serves


def test_options_of_vllm_need_an_engine_that_may_read_them() -> None:
    with pytest.raises(ValueError, match="vllm"):
        ServingSection.model_validate({"engine": "transformers", "options": {"seed": 1}})
