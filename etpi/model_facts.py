"""The command `etpi model`: the `[base]` section of a model, facts of its files, and the report on its template."""

from __future__ import annotations

import json
from collections.abc import Iterator
from math import prod
from pathlib import Path

from safetensors import SafetensorError, safe_open

from etpi.init.student import Student, read_student
from etpi_assets.specs.section import SpecError
from etpi_resources.chat.format import load_chat_format
from etpi_resources.chat.report import Finding, report
from etpi_resources.chat.tokenizer_files import misread
from etpi_resources.checkpoints import text_settings
from etpi_resources.inside import require_file
from etpi_resources.outside import read_object


def show(model: str, template: str | None) -> int:
    """Print a model's `[base]` section, its size, and the effects of a chat template on training data.

    Returns:
        1 if something of it does not work.

    Raises:
        SpecError: the model or its tokenizer cannot be read on this machine.
    """
    student = read_student(model)
    if student.chat is None:
        raise SpecError(f"{model}: {student.unknown}")
    try:
        chat = load_chat_format(student.names.get("tokenizer", "tiny"), template) if template else student.chat
    except (OSError, ValueError) as error:
        raise SpecError(f"--template {template}: {error}") from error
    print("[base]")
    for name, value in student.base.items():
        if name not in ("tokenizer", "chat_template"):  # they are the base's own
            print(f"{name} = {json.dumps(value)}")
    print()
    findings = [*facts(student), *report(chat)]
    width = max(len(finding.subject) for finding in findings)
    for finding in findings:
        print(f"{finding.subject:{width}}  {finding.seen}")
    problems = [finding for finding in findings if finding.problem]
    for finding in problems:
        print(f"does not work: {finding.subject}: {finding.problem}")
    return 1 if problems else 0


def facts(student: Student) -> Iterator[Finding]:
    """Yield facts from a model's configuration and weights, if its files are here."""
    if student.folder is None:
        yield Finding("files", "not on this machine: nothing of the weights was looked at")
        return
    config = read_object(student.folder / "config.json")
    yield Finding("architecture", ", ".join(config.get("architectures") or [config.get("model_type", "unknown")]))
    yield _weights(student.folder)
    context = student.context
    yield Finding("context", f"{context} tokens" if context else "not in config.json: set dataset.max_length")
    if misread(student.folder):
        seen = "does not read tokenizer.json as it is; checkpoints and servers of etpi name PreTrainedTokenizerFast"
        yield Finding("AutoTokenizer", seen)
    kinds = set(text_settings(config).get("layer_types") or ["full_attention"])
    cache = "one cache and one forward pass for all conversations"
    if not kinds <= {"full_attention", "linear_attention"}:
        cache = f"a cache and a forward pass for each conversation ({', '.join(sorted(kinds))}): slow; prefer vLLM"
    yield Finding("in-process engine", cache)


def _weights(folder: Path) -> Finding:
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        problem = "weights must be in safetensors files; save the model with `save_pretrained`"
        return Finding("weights", "no *.safetensors", problem)
    try:
        tensors = [tensor for file in files for tensor in _tensors(file)]
    except (OSError, SafetensorError) as error:
        return Finding("weights", f"{len(files)} files", f"a file of weights cannot be read: {error}; save it again")
    parameters = sum(prod(shape) for shape, _ in tensors)
    size = sum(file.stat().st_size for file in files)
    dtypes = ", ".join(sorted({dtype for _, dtype in tensors}))
    return Finding(
        "weights", f"{parameters / 1e6:,.0f} M parameters in {dtypes}, {size / 1e9:.2f} GB, {len(files)} files"
    )


def _tensors(file: Path) -> list[tuple[list[int], str]]:
    """Return shape and dtype of each tensor. Raises OSError, SafetensorError."""
    require_file(file)
    with safe_open(file, "np") as opened:
        slices = map(opened.get_slice, opened.keys())
        return [(part.get_shape(), part.get_dtype()) for part in slices]
