"""TRL's GRPOTrainer on rollouts that another process runs and rewards.

Loss and clipping are TRL's. Its advantage (float32, an eps of 1e-4 that cannot be set) is replaced by the one that
comes with each rollout, times the weight that corrects for sampling from other probabilities. The trainer also measures
how far rollout and trainer log-probs differ, and keeps the log-probs and entropies of the first passes over a round.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import isfinite
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from accelerate.utils import gather_object
from peft import PeftModel
from trl.trainer.grpo_trainer import GRPOTrainer

from etpi_resources.trainers.policy_link import Sample, TokenStatistics
from etpi_resources.trainers.workers.sample_trees import pack_samples, pad_branches
from etpi_resources.trainers.workers.sharding import is_sharded, reshard
from etpi_resources.trainers.workers.states import read_shards, write_shards
from etpi_resources.trainers.workers.tree_attention import refuses_trees

BOUND_TOKENS = 256
"""Fewest tokens whose mean gap is compared with the bound: one token of a short rollout may be off by chance."""
SCHEDULER = "scheduler.pt"

RollOut = Callable[[int, Sequence[int]], Sequence[Sample]]
"""(optimiser steps done, rows of tasks of all ranks) -> one sample per row, in order; on ranks other than 0: []."""


class RoundStatistics:
    """The log-probability and the entropy of every policy token of a round; a pass adds some samples, in any order.

    Nothing is computed for them: the loss has both tensors. A pass copies them to memory once, 8 bytes a token.
    """

    def __init__(self, samples: Sequence[Sample] = ()) -> None:
        self._masks = [np.array(sample.mask, dtype=bool) for sample in samples]
        self._values: dict[int, np.ndarray] = {}

    def add(self, places: torch.Tensor, in_loss: torch.Tensor, logprobs: torch.Tensor, entropies: torch.Tensor) -> None:
        """Add the samples of a pass.

        Args:
            places: (B,) int64, the position of each sample in the round.
            in_loss: (B,) bool; a sample that is not in the loss was not processed, and gets NaN.
            logprobs, entropies: (B, C), of the tokens after the prompt, padded on the right; nats.
        """
        both = torch.stack((logprobs.detach(), entropies.detach()), dim=1).float()
        values = torch.where(in_loss[:, None, None], both, float("nan")).cpu().numpy()
        for place, of_sample in zip(places.tolist(), values, strict=True):
            mask = self._masks[place]
            self._values[place] = of_sample[:, : len(mask)][:, mask]

    def take(self) -> TokenStatistics | None:
        """Return the statistics once every sample has been added, and forget them; None before and after that."""
        if not self._masks or len(self._values) < len(self._masks):
            return None
        flat = np.concatenate([self._values[place] for place in range(len(self._masks))], axis=1).astype("<f4")
        self._masks, self._values = [], {}
        return TokenStatistics(*(row.tobytes() for row in flat))


def _nothing(sample: Sample) -> Sample:
    """Return the sample's first prompt alone."""
    return Sample(sample.prompt_ids, (), (), (), sample.reward, sample.advantage)


class PolicyTrainer(GRPOTrainer):
    """GRPOTrainer whose dataset is a column of task rows ("prompt": the row's number as text).

    Attributes:
        round: the samples that all ranks train on, in the order of generation.
        share: this rank's, adjacent in the round.
        generated_at: optimiser steps done when they were generated.
        gaps: rollout against trainer log-probs, for each pass (sum of absolute differences, largest, tokens, staleness
            in steps); the log empties it.
        correction, correction_max: as of an rl section.
        weights: importance weights, for each pass (sum over tokens, tokens above the maximum, tokens); the log empties
            it.
        seconds: spent on publishing weights and on rollouts since the last log line, which empties it.
        largest_gap: a mean difference above this, over passes of BOUND_TOKENS tokens, stops the run before the update;
            None only logs it.
        statistics: log-probs and entropies of the share's tokens, from the first passes over it.
        sharded: whether each rank has a part of the policy's weights (FSDP2).
        no_trees: why the samples of a prompt are not packed as a tree (see `sample_trees`); None if they are.
    """

    def __init__(self, roll_out: RollOut, **arguments: Any) -> None:
        self._roll_out = roll_out
        self.round: Sequence[Sample] = ()
        self.share: Sequence[Sample] = ()
        self.generated_at = 0
        self.gaps: list[tuple[float, float, int, int]] = []
        self.correction, self.correction_max = "none", 0.0
        self.weights: list[tuple[float, int, int]] = []
        self.seconds: dict[str, float] = {}
        self._pass: dict[str, Any] = {}
        self._places: list[int] | None = None
        self.largest_gap: float | None = None
        self._unchecked = 0.0, 0
        self.statistics = RoundStatistics()
        self._scores: tuple[torch.Tensor, torch.Tensor] | None = None
        super().__init__(rollout_func=self._rollouts, reward_funcs=[self._rewards], **arguments)
        # Ranks wait for a round in a gloo group, since NCCL would wait with a kernel that spins on the GPU.
        self._waiting: Any = None
        if self.accelerator.num_processes > 1:
            self._waiting = dist.new_group(backend="gloo", timeout=self.args.ddp_timeout_delta)
        models: list[Any] = [m for m in (self.model, self.ref_model) if m is not None]
        # The 16-bit wrapper stays: without it, TRL's fused head would go too (accelerate follows `__wrapped__`).
        unwrapped: list[Any] = [self.accelerator.unwrap_model(m) for m in models]
        bare: list[Any] = [m.get_base_model() if isinstance(m, PeftModel) else m for m in unwrapped]
        self.no_trees = next((refusal for m in bare if (refusal := refuses_trees(m))), None)
        self.sharded = any(map(is_sharded, bare))
        for model in bare:
            reshard(model)  # or the optimiser would get the tensors that this pass gathered

    def _rollouts(self, prompts: list[str], trainer: GRPOTrainer) -> dict[str, Any]:
        self.generated_at = self.state.global_step
        rows = gather_object([int(prompt) for prompt in prompts])
        rounds = [self._roll_out(self.generated_at, rows)]
        if self._waiting is not None:
            dist.broadcast_object_list(rounds, src=0, group=self._waiting)
        self.round = rounds[0]
        if len(self.round) != len(rows):
            raise RuntimeError(f"{len(rows)} prompts returned {len(self.round)} rollouts")
        first = self.accelerator.process_index * len(prompts)
        self.share = self.round[first : first + len(prompts)]
        for sample in self.share:
            if not len(sample.completion_ids) == len(sample.mask) == len(sample.logprobs) or not (
                any(sample.mask) or sample.broken == 2
            ):
                raise RuntimeError(
                    f"a rollout of {len(sample.completion_ids)} ids has {len(sample.mask)} mask bits, "
                    f"{len(sample.logprobs)} log-probs and {sum(sample.mask)} ids of the policy"
                )
        return {
            "prompt_ids": [list(s.prompt_ids) for s in self.share],
            "completion_ids": [list(s.completion_ids) for s in self.share],
            "logprobs": [list(s.logprobs) for s in self.share],
            "env_mask": [self._loss_mask(s) for s in self.share],
        }

    def _loss_mask(self, sample: Sample) -> list[int]:
        """Return the mask of a sample; all 0 if one of its agents was cut and such samples are left out. TRL sees the
        last id alone."""
        if self.mask_truncated_completions and sample.ends:
            ids, ended = (
                [*sample.prompt_ids, *sample.completion_ids],
                {*self.eos_token_ids, self._tokenizer.pad_token_id},
            )
            if any(ids[end] not in ended for end in sample.ends):
                return [0] * len(sample.mask)
        return list(sample.mask)

    def _rewards(self, **columns: Any) -> list[float | None]:
        return [sample.reward for sample in self.share]

    def _generate_and_score_completions(self, inputs: Any) -> dict[str, Any]:
        output = super()._generate_and_score_completions(inputs)
        advantages = torch.tensor([sample.advantage for sample in self.share], dtype=torch.float64)
        if any(sample.advantages is not None for sample in self.share):
            of_tokens = advantages[:, None].repeat(1, output["completion_ids"].shape[1])
            for row, sample in enumerate(self.share):
                if sample.advantages is not None:
                    of_tokens[row, : len(sample.mask)] = torch.tensor(sample.advantages, dtype=torch.float64)
            advantages = of_tokens
        if not torch.isfinite(advantages).all():
            raise RuntimeError("an advantage is not finite; look at the rewards of this step")
        output["advantages"] = advantages.to(output["advantages"])
        # TRL shuffles the samples before it divides them into passes, this column with them.
        output["places"] = torch.arange(len(self.share))
        self.statistics = RoundStatistics(self.share)
        return output

    def _get_per_token_logps_and_entropies(self, *arguments: Any, **named: Any) -> Any:
        """As TRL's, but of prefix trees of each prompt's samples if the model can be trained on them."""
        model, ids, mask, sample_tokens = arguments
        places = self._places if self._places is not None else range(len(self.share))
        # A sample without attention to its completion was cut at a limit, and is left out.
        kept = mask[:, -sample_tokens:].any(dim=1).tolist()
        size = named.get("batch_size") or len(ids)
        if (self.no_trees is None and not named.get("compute_aux_loss")) or any(s.forks for s in self.share):
            logps, entropies = [], []
            for first in range(0, len(ids), size):
                part = [
                    self.share[place] if kept[row] else _nothing(self.share[place]) for row, place in enumerate(places)
                ][first : first + size]
                of_pass = self._scored(model, part, sample_tokens, ids.device)
                logps.append(of_pass[0])
                entropies += [of_pass[1]] if named.get("compute_entropy") else []
            scores: Any = torch.cat(logps), torch.cat(entropies) if entropies else None, None
        else:
            scores = super()._get_per_token_logps_and_entropies(*arguments, **named)
        if named.get("compute_entropy"):
            logps, entropies = scores[0], scores[1]
            assert entropies is not None  # asked for
            self._scores = logps.detach(), entropies.detach()
            if self.correction != "none":
                self._correct(self._scores[0])
        return scores

    def _scored(
        self, model: Any, samples: Sequence[Sample], columns: int, device: torch.device
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return log-probs and entropies (B, C) of these samples, from one forward pass over their branches; a
        reference model has no entropies, so they are zeros."""
        if self.no_trees is None:
            packed = pack_samples(samples, columns, device)
            with self.accelerator.autocast():
                row = model(**packed.arguments, fused_lm_head=True)
            of_row = row.log_probs, row.log_probs.detach() * 0 if row.entropy is None else row.entropy
            return packed.unpack(of_row[0]), packed.unpack(of_row[1])
        padded = pad_branches(samples, columns, self._tokenizer.pad_token_id, 32)
        logps, entropies, _ = super()._get_per_token_logps_and_entropies(
            model, padded.ids.to(device), padded.mask.to(device), padded.keep, compute_entropy=True
        )
        return padded.unpack(logps), padded.unpack(logps.detach() * 0 if entropies is None else entropies)

    def _correct(self, logps: torch.Tensor) -> None:
        """Multiply the advantages of the running pass by importance weights; TRL's loss is linear in the advantage.

        TRL's own correction is for its own vLLM client, and takes another forward pass.

        Args:
            logps: (B, C), of the pass.
        """
        inputs, (average, over) = self._pass, self.correction.split("_")
        mask = (inputs["completion_mask"] * inputs["tool_mask"]).bool()
        ratio = (inputs.get("old_per_token_logps", logps) - inputs["sampling_per_token_logps"]) * mask
        weights = (ratio.sum(-1, keepdim=True).expand_as(ratio) if average == "sequence" else ratio).exp()
        above = weights > self.correction_max
        weights = weights.clamp(max=self.correction_max) if over == "truncate" else weights.masked_fill(above, 0.0)
        advantages = inputs["advantages"]
        inputs["advantages"] = (advantages if advantages.dim() == 2 else advantages[:, None]) * weights
        self.weights.append((float(weights[mask].sum()), int(above[mask].sum()), int(mask.sum())))

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> torch.Tensor:
        self._pass = dict(inputs)
        self._places = inputs["places"].tolist()
        loss = super().compute_loss(model, self._pass, return_outputs, num_items_in_batch)
        self._places = None
        assert self._scores is not None  # set by the call above
        logps, entropies = self._scores
        staleness = self.state.global_step - self.generated_at
        if staleness == 0:
            self.statistics.add(inputs["places"], inputs["completion_mask"].any(dim=1), logps, entropies)
        mask = (inputs["completion_mask"] * inputs["tool_mask"]).bool()
        gap = (logps - inputs["sampling_per_token_logps"]).abs()[mask]
        if gap.numel():
            self.gaps.append((float(gap.sum()), float(gap.max()), gap.numel(), staleness))
            if staleness == 0:
                self._bound_gap(float(gap.sum()), gap.numel())
        return loss

    def _bound_gap(self, total: float, tokens: int) -> None:
        """Raise RuntimeError if the mean gap of the passes since the last comparison is above the bound.

        Args:
            total: sum of absolute differences over the tokens of a pass.
        """
        total, tokens = total + self._unchecked[0], tokens + self._unchecked[1]
        self._unchecked = total, tokens
        if self.largest_gap is None or (tokens < BOUND_TOKENS and isfinite(total)):
            return
        self._unchecked = 0.0, 0
        if not total / tokens <= self.largest_gap:
            raise RuntimeError(
                f"step {self.generated_at}: rollouts were sampled with log-probs that differ from the trainer's by "
                f"{total / tokens:.2g} nats a token (bound {self.largest_gap:g}); the update was not applied. "
                'Generate in the dtype of training (rl.options.dtype), or set rl.engine = "transformers"'
            )

    # Trainer would save rank 0's shards alone.

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        if self.sharded and output_dir is not None:
            write_shards(self, Path(output_dir))
        else:
            super().save_model(output_dir, _internal_call)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        if not self.sharded:
            super()._save_optimizer_and_scheduler(output_dir)
        elif self.args.should_save:
            scheduler: Any = self.lr_scheduler
            torch.save(scheduler.state_dict(), Path(output_dir) / SCHEDULER)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        if not self.sharded:  # else they are loaded when the optimiser exists
            super()._load_from_checkpoint(resume_from_checkpoint, model)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if not self.sharded:
            super()._load_optimizer_and_scheduler(checkpoint)
        elif checkpoint is not None:
            read_shards(self, Path(checkpoint))
            scheduler: Any = self.lr_scheduler
            scheduler.load_state_dict(torch.load(Path(checkpoint) / SCHEDULER, weights_only=True))

    def create_model_card(self, *arguments: Any, **named: Any) -> None:
        """Do nothing: the model card is a separate asset."""
