"""Run `convert_hf_to_gguf.py`, llama.cpp's converter of Hugging Face checkpoints, and explain its errors."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from etpi_resources.errors import ExpectedError
from etpi_resources.process.supervise import supervised

CONVERTER_VARIABLE = "ETPI_GGUF_CONVERTER"
SCRIPT = "convert_hf_to_gguf.py"
LAST_LINES = 15

_PASSED_ON = ("PATH", "HOME", "LANG", "LC_ALL", "TMPDIR", "LD_LIBRARY_PATH")
_ENVIRONMENT: Mapping[str, str] = {
    "HF_HUB_OFFLINE": "1",  # the checkpoint is a local folder
    "PYTHONUNBUFFERED": "1",
}
_OUTTYPES = {"float32": "f32", "float16": "f16", "bfloat16": "bf16"}
_REASONS = {
    "pre-tokenizer was not recognized": "llama.cpp does not know this tokenizer, so no program that reads GGUF "
    "could tokenise text as it does. It knows the tokenizers of published models, not the embedded tiny one",
    r"Model \S+ is not supported": "this llama.cpp does not know the architecture; a newer one may",
    "ModuleNotFoundError": f"its interpreter lacks a package it imports: install that (etpi's own lacks "
    f"sentencepiece), or set another interpreter with {CONVERTER_VARIABLE}='PYTHON {SCRIPT}'",
}
"""Pattern in the converter's output -> its cause."""


class NotConverted(ExpectedError, RuntimeError):
    """There is no converter, or it failed; the message says what to do."""


def converter() -> list[str]:
    """Return the converter's command line: $ETPI_GGUF_CONVERTER, or `convert_hf_to_gguf.py` on PATH.

    The variable holds a command ("/opt/llama/python /opt/llama.cpp/convert_hf_to_gguf.py") or only the script's path; a
    script that is not executable runs in this interpreter.

    Raises:
        NotConverted: there is none.
    """
    words = shlex.split(os.environ.get(CONVERTER_VARIABLE, "")) or [SCRIPT]
    program = shutil.which(words[0])
    if program is not None:
        return [program, *words[1:]]
    if words[0].endswith(".py") and Path(words[0]).is_file():
        return [sys.executable, str(Path(words[0]).resolve()), *words[1:]]
    raise NotConverted(
        f"no GGUF converter: {words[0]} is neither a file nor a program on PATH. Install llama.cpp, or unpack it from "
        f"the source distribution of llama-cpp-python, and set {CONVERTER_VARIABLE} to its {SCRIPT}"
    )


def convert(folder: Path, to: Path, metadata: Mapping[str, Any]) -> None:
    """Write a checkpoint as GGUF in the dtype of its stored weights, so that none is rounded.

    Args:
        folder: a full checkpoint: config.json, safetensors, tokenizer.
        to: the file to write.
        metadata: GGUF keys ("general.name", ...) and their values, which override the converter's guesses.

    Raises:
        NotConverted: there is no converter, the checkpoint is only an adapter, or the converter failed; the message
            ends with its last lines.
    """
    if not (folder / "config.json").is_file():
        content = (
            "only an adapter; merge it with its base" if (folder / "adapter_config.json").is_file() else "no model"
        )
        raise NotConverted(f"{folder} contains {content}: GGUF needs a full checkpoint")
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    command = converter()
    with tempfile.TemporaryDirectory() as scratch:
        override = Path(scratch) / "metadata.json"
        override.write_text(json.dumps(metadata), encoding="utf-8")
        command += [str(folder), "--outfile", str(to), "--metadata", str(override)]
        ran = subprocess.run(
            supervised([*command, "--outtype", _OUTTYPES.get(config.get("dtype"), "auto")]),
            env={**{name: os.environ[name] for name in _PASSED_ON if name in os.environ}, **_ENVIRONMENT},
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            text=True, errors="replace", check=False,
        )  # fmt: skip
    if ran.returncode or not to.is_file():
        raise NotConverted(_refusal(folder, command, ran.returncode, ran.stdout))


def _refusal(folder: Path, command: list[str], status: int, output: str) -> str:
    reason = next((f": {words}" for pattern, words in _REASONS.items() if re.search(pattern, output)), "")
    last = "\n".join(f"  {line}" for line in output.splitlines()[-LAST_LINES:]) or "  (no output)"
    end = f"ended with status {status}" if status else "ended without a file"
    return f"{folder} was not converted{reason}. {shlex.join(command)} {end}; its last lines:\n{last}"
