"""Small random models of families with templates of their own, each with a vocabulary of bytes and control tokens.

The templates are those of TRL and mistral-common; weights and vocabularies are made here.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from etpi.rehearsal.students import small_config
from etpi_assets.specs.load import load_shipped
from etpi_resources.chat.format import ChatFormat
from etpi_resources.lake.lake import Lake
from etpi_resources.packages import PackageUnavailable, package_folder

CONSUMERS = Path(__file__).parents[2] / ".consumers"
_CONVERTED = Path(__file__).parents[2] / ".pytest_cache" / "lake"


@dataclass(frozen=True)
class Family:
    """A family: its template, its control tokens (white space between them) and its model.

    Attributes:
        template: one of TRL's, or of mistral-common by its version.
        bos: the token that the template writes first, None if it writes none.
        eos: ends a turn, and pads.
        model_type: of transformers.
    """

    template: str
    control: str
    bos: str | None
    eos: str
    model_type: str

    def template_text(self) -> str:
        return mistral_template(self.template) if self.template.startswith("v") else trl_template(self.template)


@cache
def smollm2() -> Path:
    """Return the folder of SmolLM2, converted once for this checkout; skip where its package cannot be fetched."""
    base = load_shipped().experiments["plan_first_smol"].base
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ETPI_DATA", str(_CONVERTED))
        try:
            return package_folder(base.model)
        except PackageUnavailable as error:
            pytest.skip(str(error))


def link_smollm2() -> None:
    """Give the lake of this test the converted SmolLM2."""
    packages = Lake.folder() / "scratch" / "packages"
    packages.parent.mkdir(parents=True, exist_ok=True)
    packages.symlink_to(smollm2().parent)


@cache
def trl_template(name: str) -> str:
    import trl

    return (Path(trl.__file__).parent / "chat_templates" / f"{name}.jinja").read_text(encoding="utf-8")


@cache
def mistral_template(version: str) -> str:
    """Return the template that mistral-common writes for a version of its tokenizer (`make consumers` installs it)."""
    if not (CONSUMERS / "mistral_common").is_dir():
        pytest.skip("make consumers installs mistral-common")
    sys.path.append(str(CONSUMERS))
    try:
        from mistral_common.integrations.chat_templates.chat_templates import (  # pyright: ignore
            generate_chat_template,
        )
        from mistral_common.tokens.tokenizers.base import TokenizerVersion  # pyright: ignore
    finally:
        sys.path.remove(str(CONSUMERS))
    settings = {"model_settings_fields": None, "reasoning_effort_values": None, "reasoning_effort_default": None}
    switches = {"image_support": False, "audio_support": False, "thinking_support": False}
    return generate_chat_template(
        spm=version in ("v3", "v7"), tokenizer_version=TokenizerVersion(version), default_system_prompt=None,
        plain_thinking_support=False, use_special_token_variables=True, **switches, **settings,
    )  # fmt: skip


_CHATML = "<|endoftext|> <|im_start|> <|im_end|>"
_LLAMA = "<|begin_of_text|> <|end_of_text|> <|start_header_id|> <|end_header_id|> <|eot_id|> <|eom_id|> <|python_tag|>"
_MISTRAL = (
    "<s> </s> [INST] [/INST] [AVAILABLE_TOOLS] [/AVAILABLE_TOOLS] [TOOL_CALLS] [CALL_ID] [ARGS] [TOOL_RESULTS] "
    "[TOOL_CONTENT] [/TOOL_RESULTS] [SYSTEM_PROMPT] [/SYSTEM_PROMPT]"
)
_GEMMA3 = "<pad> <bos> <eos> <start_of_turn> <end_of_turn>"
_GEMMA4 = (
    "<pad> <bos> <eos> <|turn> <turn|> <|tool> <tool|> <|tool_call> <tool_call|> <|tool_response> <tool_response|> "
    '<|channel> <channel|> <|think|> <|"|>'
)
_GLM = "<|endoftext|> [gMASK] <sop> <|system|> <|user|> <|assistant|> <|observation|>"
_HARMONY = "<|startoftext|> <|endoftext|> <|return|> <|start|> <|end|> <|message|> <|channel|> <|constrain|> <|call|>"

FAMILIES = {
    "qwen3": Family("qwen3", _CHATML, None, "<|im_end|>", "qwen3"),
    "qwen3_6": Family("qwen3_6", _CHATML, None, "<|im_end|>", "qwen3_5_text"),
    "llama3_1": Family("llama3_1", _LLAMA, "<|begin_of_text|>", "<|eot_id|>", "llama"),
    "mistral_v3": Family("v3", _MISTRAL, "<s>", "</s>", "mistral"),
    "mistral_v11": Family("v11", _MISTRAL, "<s>", "</s>", "mistral"),
    "gemma3": Family("gemma3", _GEMMA3, "<bos>", "<eos>", "gemma3_text"),
    "gemma4": Family("gemma4_v5", _GEMMA4, "<bos>", "<eos>", "gemma4_text"),
    "glm4_5": Family("glm4moe", _GLM, None, "<|endoftext|>", "glm4_moe"),
    "gpt_oss": Family("gptoss", _HARMONY, "<|startoftext|>", "<|return|>", "gpt_oss"),
}

OF_CONSUMERS = {name for name in FAMILIES if name.startswith("mistral")}
"""Families whose template a package of `make consumers` writes."""


def byte_tokenizer(family: Family) -> Any:
    """Return a tokenizer of one id per byte, with the family's control tokens and template."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(alphabet)}, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in family.control.split()])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core, bos_token=family.bos, eos_token=family.eos, clean_up_tokenization_spaces=False
    )
    tokenizer.chat_template = family.template_text()
    return tokenizer


@cache
def chat_of(name: str) -> ChatFormat:
    """Return the format of a family with a vocabulary of bytes."""
    tokenizer = byte_tokenizer(FAMILIES[name])
    return ChatFormat(name, tokenizer, tokenizer.chat_template)


def make_student(name: str, folder: Path) -> Path:
    """Save a model of a family with two layers of random weights, its tokenizer and its template."""
    import torch
    from transformers import AutoModelForCausalLM

    tokenizer = byte_tokenizer(FAMILIES[name])
    tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    sizes = {
        "vocab_size": len(tokenizer), "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
        "num_attention_heads": 2, "num_key_value_heads": 2, "max_position_embeddings": 4096,
        "tie_word_embeddings": True, "eos_token_id": tokenizer.eos_token_id, "bos_token_id": tokenizer.bos_token_id,
        "pad_token_id": None,
    }  # fmt: skip
    config = small_config(FAMILIES[name].model_type, sizes)
    AutoModelForCausalLM.from_config(config).to(torch.float32).save_pretrained(folder)
    return folder


VERL_SFT = """
from omegaconf import OmegaConf
from verl.utils import hf_tokenizer
from verl.utils.dataset.multiturn_sft_dataset import MultiTurnSFTDataset

settings = OmegaConf.create({"pad_mode": "no_padding", "max_length": 8192})
tokenizer = hf_tokenizer(arguments["tokenizer"])
rows = MultiTurnSFTDataset(arguments["file"], tokenizer, settings)
answer = [tokenizer.decode(row["input_ids"][row["loss_mask"].bool()]) for row in (rows[i] for i in range(len(rows)))]
"""


def read_by(script: str, **arguments: object) -> Any:
    """Run a script with `arguments` where the consumers are installed; return its `answer`."""
    program = f"import json, sys\narguments = json.loads(sys.argv[1])\n{script}\nprint(json.dumps(answer))"
    encoded = json.dumps({name: str(value) for name, value in arguments.items()})
    environment = {**os.environ, "PYTHONPATH": str(CONSUMERS), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run([sys.executable, "-c", program, encoded], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])
