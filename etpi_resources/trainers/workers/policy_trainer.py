"""TRL's GRPOTrainer on rollouts that another process runs and rewards.

Loss and clipping are TRL's. Its advantage (float32, an eps of 1e-4 that cannot be set) is replaced by the one that
comes with each rollout, times the weight that corrects for sampling from other probabilities. The trainer also measures
how far rollout and trainer log-probs differ, and keeps the log-probs and entropies of the first passes over a round.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, count, islice
from math import isfinite
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
import torch.distributed as dist
from accelerate.utils import gather_object
from peft import PeftModel
from trl.trainer.grpo_trainer import GRPOTrainer
from trl.trainer.utils import RepeatSampler, add_fused_lm_head

from etpi_resources.trainers.contracts import ROW_LOSSES, GrpoSettings
from etpi_resources.trainers.policy_link import Sample
from etpi_resources.trainers.workers.sample_trees import Branch, branches_of, pack_samples, pad_branches, parts_of
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
        self.teacher: list[np.ndarray] = []

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

    def take(self) -> np.ndarray | None:
        """Return the statistics once every sample has been added, and forget them; None before and after that.

        They are rows of little-endian float32: log-probs, entropies, and those of a teacher.
        """
        if not self._masks or len(self._values) < len(self._masks):
            return None
        rows = np.concatenate([self._values[place] for place in range(len(self._masks))], axis=1)
        self._masks, self._values = [], {}
        return np.vstack([rows, *self.teacher]).astype("<f4")


def _of_tokens(advantages: torch.Tensor) -> torch.Tensor:
    """Return advantages (B,) or (B, C) as (B, 1) or (B, C)."""
    return advantages if advantages.dim() == 2 else advantages[:, None]


def _padded(rows: Sequence[Sequence[float]], columns: int) -> torch.Tensor:
    """Return rows of values as (B, columns) float64, with zeros after their ends."""
    padded = torch.zeros(len(rows), columns, dtype=torch.float64)
    for row, values in zip(padded, rows, strict=True):
        row[: len(values)] = torch.tensor(values, dtype=torch.float64)
    return padded


@dataclass(frozen=True)
class _Deferred:
    """A pass in parts: the function that scores a part, and the scores (B, C) at which gradients stop.

    The first `idle` parts only take part in what other ranks gather.
    """

    score: Callable[[Sequence[Branch]], tuple[torch.Tensor, torch.Tensor]]
    parts: Sequence[Sequence[Branch]]
    idle: int
    logps: torch.Tensor
    entropies: torch.Tensor


class PolicyTrainer(GRPOTrainer):
    """GRPOTrainer whose dataset is a column of task rows ("prompt": the row's number as text).

    Attributes:
        round: the samples that all ranks train on, in the order of generation.
        share: this rank's, adjacent in the round.
        round_step: optimiser steps done before the first update on them.
        gaps: rollout against trainer log-probs, for each staleness in a pass (sum of absolute differences, largest,
            tokens, staleness in steps); the log empties it.
        weights: importance weights, for each pass (sum over tokens, tokens above the maximum, tokens); the log empties
            it.
        seconds: spent on publishing weights and on rollouts since the last log line, which empties it.
        largest_gap: a mean difference above this, over passes of BOUND_TOKENS tokens, stops the run before the update;
            None only logs it.
        statistics: log-probs and entropies of the share's tokens, from the first passes over it.
        sharded: whether each rank has a part of the policy's weights (FSDP2).
        no_trees: why the samples of a prompt are not packed as a tree (see `sample_trees`); None if they are.
        teacher: see `distil`; None: there is none, or it is served (`Sample.teacher_logprobs`).
        teacher_gaps: for each round (sum of log p_sampled - log p_teacher, tokens); the log empties it.
    """

    def __init__(self, roll_out: RollOut, settings: GrpoSettings, **arguments: Any) -> None:
        self._roll_out, self._rl = roll_out, settings
        self.round: Sequence[Sample] = ()
        self.share: Sequence[Sample] = ()
        self.round_step = 0
        self.gaps: list[tuple[float, float, int, int]] = []
        self.weights: list[tuple[float, int, int]] = []
        self.seconds: dict[str, float] = {}
        self._pass: dict[str, Any] = {}
        self._deferred: _Deferred | None = None
        self.largest_gap: float | None = None
        self._unchecked = 0.0, 0
        self.statistics = RoundStatistics()
        self._scores: tuple[torch.Tensor, torch.Tensor] | None = None
        self.teacher: Any = None
        self.teacher_gaps: list[tuple[float, int]] = []
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

    @cached_property
    def rows(self) -> dict[int, list[int]]:
        """The rows of tasks of each round for all ranks, by the optimiser steps done when it is trained on.

        TRL's sampler orders them, and has no look ahead: this is its order in a run that was never killed.
        """
        rl, tasks = self._rl, cast(Any, self.train_dataset)
        sampler = RepeatSampler(tasks, rl.group_size, rl.round_size // rl.group_size, shuffle=True, seed=self.args.seed)
        rows = chain.from_iterable(iter(sampler) for _ in count())
        return {step: [*islice(rows, rl.round_size)] for step in range(0, rl.last_step, rl.iterations)}

    def _rollouts(self, prompts: list[str], trainer: GRPOTrainer) -> dict[str, Any]:
        self.round_step = self.state.global_step
        rows = self.rows[self.round_step]
        rounds = [self._roll_out(self.round_step, rows)]
        if self._waiting is not None:
            dist.broadcast_object_list(rounds, src=0, group=self._waiting)
        self.round = rounds[0]
        if len(self.round) != len(rows):
            raise RuntimeError(f"{len(rows)} prompts returned {len(self.round)} rollouts")
        first = self.accelerator.process_index * len(prompts)
        self.share = self.round[first : first + len(prompts)]
        for sample in self.share:
            if not len(sample.completion_ids) == len(sample.mask) == len(sample.logprobs) or not (
                any(sample.mask) or sample.left_out
            ):
                raise RuntimeError(
                    f"a rollout of {len(sample.completion_ids)} ids has {len(sample.mask)} mask bits, "
                    f"{len(sample.logprobs)} log-probs and {sum(sample.mask)} ids of the policy"
                )
        return {
            "prompt_ids": [list(s.prompt_ids) for s in self.share],
            "completion_ids": [list(s.completion_ids) for s in self.share],
            "logprobs": [list(s.logprobs) for s in self.share],
            "env_mask": [list(s.mask) for s in self.share],
        }

    def _rewards(self, **columns: Any) -> list[float | None]:
        return [sample.reward for sample in self.share]

    def _generate_and_score_completions(self, inputs: Any) -> dict[str, Any]:
        output = super()._generate_and_score_completions(inputs)
        advantages = torch.tensor([sample.advantage for sample in self.share], dtype=torch.float64)
        if any(sample.advantages is not None for sample in self.share):
            of_tokens = [s.advantages or [s.advantage] * len(s.mask) for s in self.share]
            advantages = _padded(of_tokens, output["completion_ids"].shape[1])
        if not torch.isfinite(advantages).all():
            raise RuntimeError("an advantage is not finite; look at the rewards of this step")
        output["advantages"] = advantages.to(output["advantages"])
        # TRL shuffles the samples before it divides them into passes, this column with them.
        output["places"] = torch.arange(len(self.share))
        self.statistics = RoundStatistics(self.share)
        if self.teacher is not None or self.share[0].teacher_logprobs is not None:
            output["advantages"] = self._distilled(output)
        return output

    def distil(self, teacher: Any) -> None:
        """Take the advantages of tokens from a frozen teacher: log p_teacher - log p_sampled, times `distil_weight`,
        plus `outcome_weight` times the group's. Its policy gradient is that of the reverse KL from the teacher, token
        by token, in the states that the policy itself visits."""
        add_fused_lm_head(teacher, temperature=self.temperature)
        self.teacher = teacher.eval()
        self.no_trees = self.no_trees or refuses_trees(teacher.requires_grad_(False))

    @torch.no_grad()
    def _distilled(self, output: dict[str, Any]) -> torch.Tensor:
        """Return the advantages (B, C) of the share's tokens; a teacher in this process scores it once, in order."""
        began, ids, size = time.monotonic(), output["completion_ids"], self.args.per_device_train_batch_size
        if self.teacher is None:
            scores = _padded([sample.teacher_logprobs or () for sample in self.share], ids.shape[1]).to(ids.device)
        else:
            parts = [self.share[at : at + size] for at in range(0, len(self.share), size)]
            scores = torch.cat([self._scored(self.teacher, s, ids.shape[1], ids.device, False)[0] for s in parts])
        mask = (output["completion_mask"] * output["tool_mask"]).bool()
        gap = torch.where(mask, scores.float() - output["sampling_per_token_logps"], 0.0)
        rows = zip(scores.float().cpu().numpy(), self.share, strict=True)
        kept = [row[: len(sample.mask)][np.array(sample.mask, dtype=bool)] for row, sample in rows]
        self.statistics.teacher = [np.concatenate(kept)]
        self.teacher_gaps.append((-float(gap.sum()), int(mask.sum())))
        if self.teacher is not None:
            self.seconds["teacher"] = time.monotonic() - began
        return self._rl.distil_weight * gap + self._rl.outcome_weight * _of_tokens(output["advantages"])

    def _get_per_token_logps_and_entropies(self, *arguments: Any, **named: Any) -> Any:
        """As TRL's, but of prefix trees of the samples' branches if the model can be trained on them."""
        if named.get("compute_aux_loss") or not (self.no_trees is None or self._rl.pass_tokens or self._forked):
            if self._forked:
                raise RuntimeError(
                    "a mixture of experts is trained on rollouts that do not fork: keep thoughts, no compaction"
                )
            scores: Any = super()._get_per_token_logps_and_entropies(*arguments, **named)
        else:
            model, ids, _, columns = arguments
            samples = [self.share[place] for place in self._pass["places"].tolist()] if self._pass else self.share
            size = named.get("batch_size") or len(ids)
            parts = [samples[at : at + size] for at in range(0, len(samples), size)]
            entropy = bool(named.get("compute_entropy"))
            scored = [self._scored(model, part, columns, ids.device, entropy) for part in parts]
            logps, entropies = (torch.cat(each) for each in zip(*scored, strict=True))
            scores = logps, entropies if entropy else None, None
        if named.get("compute_entropy"):
            logps, entropies = scores[0], scores[1]
            assert entropies is not None  # asked for
            self._scores = logps.detach(), entropies.detach()
            if self._rl.correction != "none":
                self._correct(self._scores[0])
        return scores

    @property
    def _forked(self) -> bool:
        return any(sample.forks for sample in self.round)

    def _scored(
        self, model: Any, samples: Sequence[Sample], columns: int, device: torch.device, entropy: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return log-probs and entropies (B, C) of these samples; zeros without `entropy`.

        Branches of more ids than `pass_tokens` are scored in parts. So that memory holds the activations of one part,
        gradients then stop at the scores, and `compute_loss` scores each part again for its backward pass. Every rank
        of a sharded policy takes as many parts, since each forward pass gathers the weights from all. A teacher is
        whole on each rank.
        """
        trees = self.no_trees is None
        parts, idle = parts_of(branches_of(samples), self._rl.pass_tokens, shared=trees), 0
        if self.sharded and self._rl.pass_tokens and model is not self.teacher:
            idle = max(gather_object([len(parts)])) - len(parts)
            parts = [parts[0]] * idle + parts

        def score(part: Sequence[Branch]) -> tuple[torch.Tensor, torch.Tensor]:
            if trees:
                packed = pack_samples(samples, columns, device, part)
                with self.accelerator.autocast():
                    row = model(**packed.arguments, fused_lm_head=True)
                logps, entropies = row.log_probs, row.entropy
            else:
                packed = pad_branches(samples, columns, device, part, cast(int, self._tokenizer.pad_token_id))
                logps, entropies, _ = super(PolicyTrainer, self)._get_per_token_logps_and_entropies(
                    model, *packed.arguments, compute_entropy=entropy
                )
            zeros = torch.zeros_like(logps)
            return packed.unpack(logps), packed.unpack(entropies if entropy and entropies is not None else zeros)

        if len(parts) == 1:
            return score(parts[0])
        with torch.no_grad():
            logps, entropies = (torch.stack(each[idle:]).sum(0) for each in zip(*map(score, parts), strict=True))
        if torch.is_grad_enabled():
            self._deferred = _Deferred(score, parts, idle, logps.requires_grad_(), entropies.requires_grad_())
        return logps, entropies

    def _correct(self, logps: torch.Tensor) -> None:
        """Multiply the advantages of the running pass by importance weights; TRL's loss is linear in the advantage.

        TRL's own correction is for its own vLLM client, and takes another forward pass.

        Args:
            logps: (B, C), of the pass.
        """
        inputs, (average, over) = self._pass, self._rl.correction.split("_")
        least, most = self._rl.correction_min, self._rl.correction_max
        mask = (inputs["completion_mask"] * inputs["tool_mask"]).bool()
        ratio = (inputs.get("old_per_token_logps", logps) - inputs["sampling_per_token_logps"]) * mask
        weights = (ratio.sum(-1, keepdim=True).expand_as(ratio) if average == "sequence" else ratio).exp()
        outside = (weights > most) | (weights < least)
        weights = weights.clamp(least, most) if over == "truncate" else weights.masked_fill(outside, 0.0)
        inputs["advantages"] = _of_tokens(inputs["advantages"]) * weights
        self.weights.append((float(weights[mask].sum()), int(outside[mask].sum()), int(mask.sum())))

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> torch.Tensor:
        self._pass = dict(inputs)
        loss = super().compute_loss(model, self._pass, return_outputs, num_items_in_batch) * self._share_kept()
        self._pass = {}
        if self._deferred is not None:
            loss = self._backward_by_parts(model, loss)
        assert self._scores is not None  # set by the call above
        logps, entropies = self._scores
        step, places = self.state.global_step, inputs["places"].tolist()
        if step == self.round_step:
            self.statistics.add(inputs["places"], inputs["completion_mask"].any(dim=1), logps, entropies)
        versions = [self.share[place].version for place in places]
        lags = [step - (self.round_step if version is None else version) for version in versions]
        mask = (inputs["completion_mask"] * inputs["tool_mask"]).bool()
        gaps = (logps - inputs["sampling_per_token_logps"]).abs()
        for lag in sorted(set(lags)):
            of_lag = torch.tensor([other == lag for other in lags], device=mask.device)[:, None]
            gap = gaps[mask & of_lag]
            if gap.numel():
                self.gaps.append((float(gap.sum()), float(gap.max()), gap.numel(), lag))
                if lag == 0:
                    self._bound_gap(float(gap.sum()), gap.numel())
        return loss

    def _share_kept(self) -> float:
        """Return the factor of losses that TRL divides by rows: the round's rows over those that are in the loss."""
        kept = sum(sample.left_out is None for sample in self.round)
        return len(self.round) / kept if kept and self.loss_type in ROW_LOSSES else 1.0

    def _backward_by_parts(self, model: Any, loss: torch.Tensor) -> torch.Tensor:
        """Run the backward pass of all parts but the last, and return the loss with the gradient of the last."""
        deferred, self._deferred = self._deferred, None
        assert deferred is not None
        gradients = torch.autograd.grad(loss, (deferred.logps, deferred.entropies), allow_unused=True)
        for number, part in enumerate(deferred.parts):
            last = number == len(deferred.parts) - 1
            with nullcontext() if last else self.accelerator.no_sync(model):
                pairs = zip(deferred.score(part), gradients, strict=True)
                linear = sum(((scores * grad).sum() for scores, grad in pairs if grad is not None), loss.new_zeros(()))
                if last:
                    return loss.detach() + linear - linear.detach()
                self.accelerator.backward(linear * (number >= deferred.idle))
        raise AssertionError("a pass has a part")

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
                f"step {self.round_step}: rollouts were sampled with log-probs that differ from the trainer's by "
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
