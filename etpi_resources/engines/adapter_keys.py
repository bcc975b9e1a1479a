"""Adapters as vLLM reads them: their keys name modules as the base's files name the weights.

A base may be stored below a wrapper (Qwen3.5 and 3.6 with their vision part: `model.language_model.layers.0`), while a
training that loads the language model alone calls the same module `model.layers.0`. vLLM translates names of the
base's files; a key that it cannot translate is loaded without effect and without an error.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from etpi_resources.engines import EngineUnavailable
from etpi_resources.lake.lake import folder_hash

PEFT, BELOW = "base_model.model.", "language_model."
WEIGHTS = "adapter_model.safetensors"


def served_adapter(adapter: Path, base: Path, trained: str | None, folder: Path) -> Path:
    """Return the folder that vLLM loads: the adapter itself, or a copy in `folder` with the keys of the base's names.

    Args:
        trained: the adapter's hash after training.

    Raises:
        EngineUnavailable: the adapter to copy is not the trained one, or no form of its keys names weights of the base.
    """
    from safetensors.torch import load_file, save_file

    names = _weight_names(base)
    modules = {key: key.removeprefix(PEFT).partition(".lora_")[0] for key in _names_in(adapter / WEIGHTS)}
    if not names or all(f"{module}.weight" in names for module in modules.values()):
        return adapter
    wrapped = {key: module.replace("model.", f"model.{BELOW}", 1) for key, module in modules.items()}
    if unnamed := next((module for module in wrapped.values() if f"{module}.weight" not in names), None):
        raise EngineUnavailable(
            f"{adapter}: neither {unnamed} nor the same without {BELOW!r} is a weight of {base}, so vLLM would not "
            'apply this adapter; serve it merged, with serving.engine = "transformers"'
        )
    if trained and folder_hash(adapter) != trained:
        raise EngineUnavailable(f"{adapter} is not the adapter that was trained ({trained}); restore it")
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(adapter, folder)
    tensors = load_file(adapter / WEIGHTS)
    renamed = {key.replace(modules[key], wrapped[key], 1): tensor for key, tensor in tensors.items()}
    save_file(renamed, folder / WEIGHTS, metadata={"format": "pt"})
    return folder


def _weight_names(base: Path) -> set[str]:
    """Return the names of the weights in a checkpoint's safetensors files."""
    index = base / "model.safetensors.index.json"
    if index.is_file():
        return set(json.loads(index.read_text(encoding="utf-8"))["weight_map"])
    return {name for file in base.glob("*.safetensors") for name in _names_in(file)}


def _names_in(file: Path) -> list[str]:
    """Return the names of the tensors in a safetensors file."""
    from safetensors import safe_open

    with safe_open(file, "pt") as opened:
        return list(opened.keys())
