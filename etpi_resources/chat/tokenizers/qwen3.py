"""The Qwen3 tokenizer, built offline from the byte-pair ranks in the `dashscope` package, and TRL's chat templates.

The ranks are in tiktoken's format: a token's rank is its position in the training of the vocabulary, and its id. A fast
tokenizer needs merges instead. They follow from the ranks: if a token's bytes are merged with only the lower ranks, the
two parts of its own merge remain. The files of `dashscope` and `trl` are read without importing the packages.
"""

from __future__ import annotations

import base64
import importlib.util
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

from etpi_resources.errors import PackageMissing

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

# Qwen's pre-tokenisation, from its published tokenizer configuration.
_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

_FIRST_ADDED = 151643
# Control tokens never occur in a model's text; in messages, `ChatFormat` encodes them as plain characters.
_CONTROL = (
    "<|endoftext|>", "<|im_start|>", "<|im_end|>",
    "<|object_ref_start|>", "<|object_ref_end|>", "<|box_start|>", "<|box_end|>", "<|quad_start|>", "<|quad_end|>",
    "<|vision_start|>", "<|vision_end|>", "<|vision_pad|>", "<|image_pad|>", "<|video_pad|>",
)  # fmt: skip
# Inline tokens: single ids that a model writes in its text.
_INLINE = (
    "<tool_call>", "</tool_call>",
    "<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>", "<|fim_pad|>", "<|repo_name|>", "<|file_sep|>",
    "<tool_response>", "</tool_response>", "<think>", "</think>",
)  # fmt: skip


@lru_cache(maxsize=1)
def load_tokenizer() -> PreTrainedTokenizerFast:
    """Return the Qwen3 tokenizer with the ids of the published checkpoints: 151,669 tokens.

    It is built once per process, in about 2 s.

    Raises:
        PackageMissing: `dashscope` is not installed; the message names the extra to install.
        ValueError: the ranks are not Qwen's, because `dashscope` is another release.
    """
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
    from transformers import PreTrainedTokenizerFast
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    ranks = _ranks(_package_file("dashscope", "resources/qwen.tiktoken", install="'etpi[import]'"))
    spell = bytes_to_unicode()
    vocab = {"".join(map(spell.__getitem__, token)): rank for token, rank in ranks.items()}
    merges = [
        ("".join(map(spell.__getitem__, left)), "".join(map(spell.__getitem__, right)))
        for left, right in _merges(ranks)
    ]
    core = Tokenizer(models.BPE(vocab=vocab, merges=merges, fuse_unk=False, byte_fallback=False))
    core.normalizer = normalizers.NFC()
    core.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_PATTERN), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in _CONTROL])
    core.add_tokens([AddedToken(text, special=False, normalized=False) for text in _INLINE])
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        clean_up_tokenization_spaces=False,
        model_max_length=131072,
    )


def chat_template(name: str = "qwen3") -> str:
    """Return one of TRL's chat templates by file stem ("qwen3", "qwen3_training", "qwen3_instruct_2507", ...).

    Raises:
        PackageMissing: `trl` is not installed.
        FileNotFoundError: TRL has no such template; the message lists its templates.
    """
    folder = _package_file("trl", "chat_templates", install="'etpi[train]'")
    path = folder / f"{name}.jinja"
    if not path.is_file():
        known = sorted(p.stem for p in folder.glob("*.jinja"))
        raise FileNotFoundError(f"chat template {name!r}: TRL has no template of that name; it has {', '.join(known)}")
    return path.read_text(encoding="utf-8")


@lru_cache(maxsize=1)
def chat_templates() -> frozenset[str]:
    """Return all of TRL's chat templates; none if it is not installed."""
    try:
        folder = _package_file("trl", "chat_templates", install="trl")
    except PackageMissing:
        return frozenset()
    return frozenset(path.read_text(encoding="utf-8") for path in folder.glob("*.jinja"))


def _package_file(package: str, relative: str, *, install: str) -> Path:
    """Return the path of a file in an installed package, without importing the package."""
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        raise PackageMissing(
            f"the qwen3 chat format needs {relative} of the package {package!r}, which is not installed: "
            f"pip install {install}"
        )
    return Path(spec.submodule_search_locations[0]) / relative


def _ranks(path: Path) -> dict[bytes, int]:
    lines = path.read_bytes().split(b"\n")
    ranks = {base64.b64decode(token): int(rank) for token, rank in (line.split() for line in lines if line)}
    if sorted(ranks.values()) != list(range(_FIRST_ADDED)):
        raise ValueError(
            f"{path}: {len(ranks)} byte-pair ranks, expected exactly 0..{_FIRST_ADDED - 1}; "
            "install the release of dashscope named in pyproject.toml"
        )
    return ranks


def _merges(ranks: dict[bytes, int]) -> list[tuple[bytes, bytes]]:
    """Return one merge per token longer than a byte, in rank order."""
    merges = []
    for token in sorted(ranks, key=ranks.__getitem__):
        if len(token) == 1:
            continue
        parts = [token[i : i + 1] for i in range(len(token))]
        while len(parts) > 2:
            pair_ranks = [ranks.get(parts[i] + parts[i + 1], _FIRST_ADDED) for i in range(len(parts) - 1)]
            best = min(range(len(pair_ranks)), key=pair_ranks.__getitem__)
            if pair_ranks[best] >= ranks[token]:
                raise ValueError(f"token {ranks[token]} ({token!r}) cannot be built from tokens of lower rank")
            parts[best : best + 2] = [parts[best] + parts[best + 1]]
        merges.append((parts[0], parts[1]))
    return merges
