"""A vLLM server that ends before it is ready: its error is in the message."""

from __future__ import annotations

from pathlib import Path

import pytest

from etpi_resources.engines import EngineUnavailable
from etpi_resources.engines.vllm_server import PROGRAM_VARIABLE, VllmServer

LOG = """\
(APIServer pid=1) INFO 11-28 01:33:40 [x.py:1] an INFO line that names an Error
(APIServer pid=1) WARNING 11-28 01:33:40 [x.py:1] This can cause fd limit errors like `OSError: [Errno 24]`.
(EngineCore pid=2) ERROR 11-28 01:33:41 [core.py:1] Traceback (most recent call last):
(EngineCore pid=2) ERROR 11-28 01:33:41 [core.py:1] RuntimeError: CUDA error: no kernel image
pydantic_core._pydantic_core.ValidationError: 1 validation error for ModelConfig
  Value error, Sleep mode is not supported on current platform. [type=value_error]
"""


def test_message_has_the_errors_of_the_log_and_no_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "vllm"
    program.write_text(f"#!/bin/sh\ncat <<'END'\n{LOG}END\nexit 1\n")
    program.chmod(0o755)
    monkeypatch.setenv(PROGRAM_VARIABLE, str(program))
    with pytest.raises(EngineUnavailable) as caught:
        VllmServer(tmp_path, "m", log=tmp_path / "log")
    shown = str(caught.value)
    assert all(line in shown for line in LOG.splitlines()[3:])
    assert not any(line in shown for line in LOG.splitlines()[:3])
