"""llama.cpp's own converter of Hugging Face checkpoints to GGUF, run where it is installed.

Belongs here: finding `convert_hf_to_gguf.py`, running it, and saying why it refused. Does not belong here: converting
anything (each architecture and each tokenizer is the converter's business), or which checkpoints there are.
"""

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

from etpi_resources.process.supervise import supervised

CONVERTER_VARIABLE = "ETPI_GGUF_CONVERTER"
SCRIPT = "convert_hf_to_gguf.py"
LAST_LINES = 15

_PASSED_ON = ("PATH", "HOME", "LANG", "LC_ALL", "TMPDIR", "LD_LIBRARY_PATH")
_ENVIRONMENT: Mapping[str, str] = {
    "HF_HUB_OFFLINE": "1",  # a folder is converted; nothing is looked up
    "PYTHONUNBUFFERED": "1",
}
_OUTTYPES = {"float32": "f32", "float16": "f16", "bfloat16": "bf16"}
_REASONS = {
    "pre-tokenizer was not recognized": "llama.cpp does not know this tokenizer, so nothing that reads GGUF could "
    "split text as it does. It knows those of published models; the embedded tiny vocabulary is none of them",
    r"Model \S+ is not supported": "this llama.cpp does not know the architecture; a newer one may",
    "ModuleNotFoundError": f"the interpreter that ran it lacks what it imports: install that (sentencepiece is what "
    f"etpi's own lacks), or name another as {CONVERTER_VARIABLE}='PYTHON {SCRIPT}'",
}
"""What the converter says (a pattern) -> what that means."""


class NotConverted(RuntimeError):
    """There is no converter, or it refused; the message says what to do."""


def converter() -> list[str]:
    """The converter's command line: $ETPI_GGUF_CONVERTER, or `convert_hf_to_gguf.py` on PATH.

    The variable holds a command ("/opt/llama/python /opt/llama.cpp/convert_hf_to_gguf.py") or the script's path alone;
    a script that is not executable runs in this interpreter.

    Raises:
        NotConverted: there is none.
    """
    words = shlex.split(os.environ.get(CONVERTER_VARIABLE, "")) or [SCRIPT]
    found = shutil.which(words[0])
    if found is not None:
        return [found, *words[1:]]
    if words[0].endswith(".py") and Path(words[0]).is_file():
        return [sys.executable, str(Path(words[0]).resolve()), *words[1:]]
    raise NotConverted(
        f"no GGUF converter: {words[0]} is neither a file nor a program on PATH. Install llama.cpp, or unpack it from "
        f"the source distribution of llama-cpp-python, and set {CONVERTER_VARIABLE} to its {SCRIPT}"
    )


def convert(folder: Path, to: Path, metadata: Mapping[str, Any]) -> None:
    """Write a checkpoint as GGUF in the type that its weights are stored in, so that none of them is rounded.

    Args:
        folder: a whole checkpoint: config.json, safetensors, tokenizer.
        to: the file to write.
        metadata: GGUF keys and what they shall hold ("general.name", ...), over what the converter guesses.

    Raises:
        NotConverted: there is no converter, the checkpoint is an adapter alone, or the converter failed; the message
            holds its last lines.
    """
    if not (folder / "config.json").is_file():
        what = "an adapter alone; merge it with its base" if (folder / "adapter_config.json").is_file() else "no model"
        raise NotConverted(f"{folder} holds {what}: GGUF is made of a whole checkpoint")
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


def _refusal(folder: Path, command: list[str], status: int, said: str) -> str:
    reason = next((f": {words}" for sign, words in _REASONS.items() if re.search(sign, said)), "")
    last = "\n".join(f"  {line}" for line in said.splitlines()[-LAST_LINES:]) or "  (nothing)"
    how = f"ended with status {status}" if status else "ended without a file"
    return f"{folder} was not converted{reason}. {shlex.join(command)} {how}; its last lines:\n{last}"
