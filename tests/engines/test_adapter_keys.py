"""Adapters are served under the names that the base's files give its weights."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from etpi_resources.engines import EngineUnavailable
from etpi_resources.engines.adapter_keys import WEIGHTS, served_adapter
from etpi_resources.engines.vllm_server import with_context
from etpi_resources.lake.lake import folder_hash

KEY = "base_model.model.model.layers.0.mlp.up_proj.lora_A.weight"


def adapter(folder: Path, key: str = KEY) -> Path:
    folder.mkdir()
    (folder / "adapter_config.json").write_text("{}")
    save_file({key: torch.ones(2, 3)}, folder / WEIGHTS)
    return folder


def base(folder: Path, name: str) -> Path:
    folder.mkdir()
    save_file({name: torch.ones(3, 3)}, folder / "model.safetensors")
    return folder


def test_adapter_of_a_plain_base_is_served_as_it_is(tmp_path):
    trained = adapter(tmp_path / "adapter")
    plain = base(tmp_path / "base", "model.layers.0.mlp.up_proj.weight")
    assert served_adapter(trained, plain, None, tmp_path / "copy") == trained


def test_adapter_of_a_wrapped_base_is_served_under_the_names_of_its_weights(tmp_path):
    trained, wrapped = adapter(tmp_path / "adapter"), tmp_path / "base"
    wrapped.mkdir()
    index = {"weight_map": {"model.language_model.layers.0.mlp.up_proj.weight": "model-1.safetensors"}}
    (wrapped / "model.safetensors.index.json").write_text(json.dumps(index))
    copy = served_adapter(trained, wrapped, folder_hash(trained), tmp_path / "copy")
    assert copy == tmp_path / "copy" and (copy / "adapter_config.json").is_file()
    assert list(load_file(copy / WEIGHTS)) == [KEY.replace("model.layers", "model.language_model.layers")]
    with pytest.raises(EngineUnavailable, match=f"{trained} .* .another.;"):
        served_adapter(trained, wrapped, "another", tmp_path / "copy")


def test_adapter_that_no_weight_of_the_base_belongs_to_is_refused(tmp_path):
    trained = adapter(tmp_path / "adapter")
    other = base(tmp_path / "base", "transformer.h.0.mlp.weight")
    with pytest.raises(EngineUnavailable, match=r"model\.language_model\.layers\.0\.mlp\.up_proj"):
        served_adapter(trained, other, None, tmp_path / "copy")


def test_context_of_a_server_is_the_budget_unless_the_spec_says_otherwise():
    assert with_context({}, 4096) == {"max-model-len": 4096}
    assert with_context({"max_model_len": 8192}, 4096) == {"max_model_len": 8192} and with_context({}, None) == {}
