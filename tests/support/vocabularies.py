"""Small tokenizers with the rules of real vocabularies about blanks, prefixes and control tokens, and such templates.

The vocabularies consist of characters, bytes and a few words.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

from etpi_resources.chat.format import ChatFormat

_WORDS = ("▁H", "Hi", "▁Hi", "▁l", "▁lo", "▁loo", "▁look", "lo", "loo", "look", "▁▁")
_CHARACTERS = "▁ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789.,:?!<>|/[]#_"
_ROLES = "{% for m in messages %}"


@dataclass(frozen=True)
class Vocabulary:
    """A tokenizer's rules and its template.

    Attributes:
        prefix: "legacy" (a blank before each piece, Llama 2), "first" (before a whole text, Mistral 7B v0.3), or "".
        control: the special tokens; ordinary: added tokens that are not special.
        lstrip, rstrip: whether the special tokens remove white space beside them.
    """

    template: str
    control: str
    ordinary: str = ""
    prefix: str = ""
    lstrip: bool = False
    rstrip: bool = False
    eos: str = "</s>"


VOCABULARIES = {
    "llama2": Vocabulary(
        _ROLES + "{% if m.role == 'user' %}{{ bos_token + '[INST] ' + m.content.strip() + ' [/INST]' }}"
        "{% else %}{{ ' ' + m.content.strip() + ' ' + eos_token }}{% endif %}{% endfor %}",
        "<s> </s>", prefix="legacy",
    ),
    "header_of_text": Vocabulary(  # TinyLlama-Chat
        _ROLES + "{{ '<|' + m.role + '|>\n' + m.content + eos_token + '\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}",
        "<s> </s>", prefix="legacy",
    ),
    "mistral_v03": Vocabulary(
        "{{ bos_token }}" + _ROLES + "{% if m.role == 'user' %}{{ '[INST]' + m.content + '[/INST]' }}"
        "{% else %}{{ m.content + eos_token }}{% endif %}{% endfor %}",
        "<s> </s> [INST] [/INST]", prefix="first",
    ),
    "chatml_with_prefix": Vocabulary(  # OpenHermes 2.5, without <|endoftext|>
        _ROLES + "{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}",
        "<s> </s> <|im_start|> <|im_end|>", prefix="legacy", eos="<|im_end|>",
    ),
    "phi3": Vocabulary(
        _ROLES + "{{ '<|' + m.role + '|>\n' + m.content + '<|end|>\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% else %}{{ eos_token }}{% endif %}",
        "<|endoftext|> <|user|> <|assistant|> <|end|>", prefix="legacy", rstrip=True, eos="<|endoftext|>",
    ),
    "phi4": Vocabulary(
        _ROLES + "{{ '<|im_start|>' + m.role + '<|im_sep|>' + m.content + '<|im_end|>' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant<|im_sep|>' }}{% endif %}",
        "<|endoftext|> <|im_start|> <|im_sep|> <|im_end|>", lstrip=True, rstrip=True, eos="<|im_end|>",
    ),
    "kimi": Vocabulary(
        _ROLES + "{{ '<|im_' + m.role + '|>' + m.role + '<|im_middle|>' + m.content + '<|im_end|>' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_assistant|>assistant<|im_middle|>' }}{% endif %}",
        "[EOS] <|im_user|> <|im_assistant|> <|im_middle|> <|im_end|>", eos="[EOS]",
    ),
    "deepseek": Vocabulary(
        "{{ bos_token }}" + _ROLES + "{% if m.role == 'user' %}{{ '<｜User｜>' + m.content }}"
        "{% else %}{{ '<｜Assistant｜>' + m.content + eos_token }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<｜Assistant｜>' }}{% endif %}",
        "<s> </s>", "<｜User｜> <｜Assistant｜>",
    ),
    "command_r7b": Vocabulary(  # two tokens end a turn
        _ROLES + "{{ '<|START|><|' + m.role + '|>' }}{% if m.role == 'assistant' %}"
        "{{ '<|START_RESPONSE|>' + m.content + '<|END_RESPONSE|>' }}{% else %}{{ m.content }}{% endif %}{{ '<|END|>' }}"
        "{% endfor %}{% if add_generation_prompt %}{{ '<|START|><|assistant|><|START_RESPONSE|>' }}{% endif %}",
        "<|END|>", "<|START|> <|user|> <|assistant|> <|START_RESPONSE|> <|END_RESPONSE|>", eos="<|END|>",
    ),
}  # fmt: skip


def tokenizer(name: str) -> Any:
    """Return the tokenizer with its template."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    rules = VOCABULARIES[name]
    pieces = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), *_CHARACTERS, *_WORDS]
    merges = [("▁", "H"), ("H", "i"), ("▁H", "i"), ("▁", "l"), ("▁l", "o"), ("▁lo", "o"), ("▁loo", "k"), ("▁", "▁")]
    merges += [("l", "o"), ("lo", "o"), ("loo", "k")]
    core = Tokenizer(models.BPE(vocab={p: i for i, p in enumerate(pieces)}, merges=merges, byte_fallback=True))
    blanks = normalizers.Replace(" ", "▁")
    core.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), blanks]) if rules.prefix == "legacy" else blanks
    if rules.prefix == "first":
        core.normalizer = None  # pyright: ignore[reportAttributeAccessIssue]
        core.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    core.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    for text, special in ((rules.control, True), (rules.ordinary, False)):
        core.add_tokens(
            [
                AddedToken(token, special=special, normalized=False, lstrip=rules.lstrip, rstrip=rules.rstrip)
                for token in text.split()
            ]
        )
    bos = {"bos_token": "<s>"} if "<s>" in rules.control else {}
    whole = PreTrainedTokenizerFast(tokenizer_object=core, eos_token=rules.eos, **bos)
    whole.chat_template = rules.template
    return whole


@cache
def chat_of(name: str) -> ChatFormat:
    """Return the format of a small vocabulary."""
    return ChatFormat(name, tokenizer(name), VOCABULARIES[name].template)
