"""The output of `etpi model` except for the template's report: the `[base]` section, and facts of the model's files."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from math import prod
from pathlib import Path
from typing import Any

from etpi.init.student import Student
from etpi_resources.chat.report import Finding


def base_lines(student: Student) -> list[str]:
    """Return the lines of the experiment's `[base]` section; the names of tokenizer and template are the base's own."""
    keys = {name: value for name, value in student.base.items() if name not in ("tokenizer", "chat_template")}
    return ["[base]", *(f"{name} = {json.dumps(value)}" for name, value in keys.items()), ""]


def facts(student: Student) -> Iterator[Finding]:
    """Yield facts from a model's configuration and weights, if its files are here."""
    if student.folder is None:
        yield Finding("files", "not on this machine: nothing of the weights was looked at")
        return
    config = json.loads((student.folder / "config.json").read_text(encoding="utf-8"))
    text = config.get("text_config") or config
    yield Finding("architecture", ", ".join(config.get("architectures") or [config.get("model_type", "unknown")]))
    yield _weights(student.folder)
    context = student.context
    yield Finding("context", f"{context} tokens" if context else "not in config.json: set dataset.max_length")
    yield _cache(text)


def _weights(folder: Path) -> Finding:
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        problem = "weights must be in safetensors files; save the model with `save_pretrained`"
        return Finding("weights", "no *.safetensors", problem)
    tensors = [tensor for file in files for name, tensor in _header(file).items() if name != "__metadata__"]
    parameters = sum(prod(tensor["shape"]) for tensor in tensors)
    size = sum(file.stat().st_size for file in files)
    dtypes = ", ".join(sorted({tensor["dtype"] for tensor in tensors}))
    return Finding(
        "weights", f"{parameters / 1e6:,.0f} M parameters in {dtypes}, {size / 1e9:.2f} GB, {len(files)} files"
    )


def _header(file: Path) -> dict[str, Any]:
    """Return the JSON header of a safetensors file: tensor -> dtype, shape and offsets."""
    with file.open("rb") as stream:
        (length,) = struct.unpack("<Q", stream.read(8))
        return json.loads(stream.read(length))


def _cache(text: dict[str, Any]) -> Finding:
    """Say how the in-process engine caches the model, from the kinds of its layers."""
    kinds = set(text.get("layer_types") or ["full_attention"])
    if kinds <= {"full_attention", "linear_attention"}:
        return Finding("in-process engine", "one cache and one forward pass for all conversations")
    seen = f"a cache and a forward pass for each conversation ({', '.join(sorted(kinds))}): slow; prefer vLLM"
    return Finding("in-process engine", seen)
