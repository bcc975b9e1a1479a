"""The LoRA adapter that a training section asks for."""

from __future__ import annotations

from typing import TYPE_CHECKING

from etpi_resources.trainers.contracts import LoraSettings

if TYPE_CHECKING:
    from peft import LoraConfig


def lora_config(settings: LoraSettings) -> LoraConfig:
    """PEFT's config of an adapter for a causal language model."""
    from peft import LoraConfig

    return LoraConfig(
        task_type="CAUSAL_LM",
        r=settings.lora_rank,
        lora_alpha=settings.lora_alpha,
        lora_dropout=settings.lora_dropout,
        target_modules=settings.target_modules,
    )
