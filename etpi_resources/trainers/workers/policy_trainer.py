"""TRL's GRPOTrainer on rollouts that another process runs and rewards.

Loss and clipping are TRL's. Its advantage (float32, an eps of 1e-4 that cannot be set) is replaced by the one that
comes with each rollout. The trainer also measures how far rollout and trainer log-probs differ, and keeps the
log-probs and entropies of the first passes over a round.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from peft import PeftModel
from trl.trainer.grpo_trainer import GRPOTrainer

from etpi_resources.trainers.policy_link import Sample
from etpi_resources.trainers.workers.sample_trees import pack_samples
from etpi_resources.trainers.workers.token_statistics import RoundStatistics
from etpi_resources.trainers.workers.tree_attention import refuses_trees

RollOut = Callable[[int, Sequence[int]], Sequence[Sample]]
"""(optimiser steps done, rows of tasks) -> one sample per row, in order."""


class PolicyTrainer(GRPOTrainer):
    """GRPOTrainer whose dataset is a column of task rows ("prompt": the row's number as text).

    Attributes:
        round: the samples that are trained on, in the order of generation.
        generated_at: optimiser steps done when they were generated.
        gaps: rollout against trainer log-probs, for each pass (sum of absolute differences, largest, tokens, staleness
            in steps); the log empties it.
        largest_gap: a mean difference above this stops the run before the update; None only logs it.
        statistics: log-probs and entropies of the round's tokens, from the first passes over it.
        no_trees: why the samples of a prompt are not packed as a tree (see `sample_trees`); None if they are.
    """

    def __init__(self, roll_out: RollOut, **arguments: Any) -> None:
        self._roll_out = roll_out
        self.round: list[Sample] = []
        self.generated_at = 0
        self.gaps: list[tuple[float, float, int, int]] = []
        self.largest_gap: float | None = None
        self.statistics = RoundStatistics()
        self._scores: tuple[torch.Tensor, torch.Tensor] | None = None
        super().__init__(rollout_func=self._rollouts, reward_funcs=[self._rewards], **arguments)
        models: list[Any] = [m for m in (self.model, self.ref_model) if m is not None]
        # Without the wrapper of 16 bits accelerate would take TRL's fused head off too, whose `__wrapped__` it follows.
        unwrapped: list[Any] = [self.accelerator.unwrap_model(m) for m in models]
        bare: list[Any] = [m.get_base_model() if isinstance(m, PeftModel) else m for m in unwrapped]
        self.no_trees = next((refusal for m in bare if (refusal := refuses_trees(m))), None)

    def _rollouts(self, prompts: list[str], trainer: GRPOTrainer) -> dict[str, Any]:
        self.generated_at = self.state.global_step
        self.round = list(self._roll_out(self.generated_at, [int(prompt) for prompt in prompts]))
        if len(self.round) != len(prompts):
            raise RuntimeError(f"{len(prompts)} prompts returned {len(self.round)} rollouts")
        for sample in self.round:
            if not len(sample.completion_ids) == len(sample.mask) == len(sample.logprobs) or not any(sample.mask):
                raise RuntimeError(
                    f"a rollout of {len(sample.completion_ids)} ids has {len(sample.mask)} mask bits, "
                    f"{len(sample.logprobs)} log-probs and {sum(sample.mask)} ids of the policy"
                )
        return {
            "prompt_ids": [list(s.prompt_ids) for s in self.round],
            "completion_ids": [list(s.completion_ids) for s in self.round],
            "logprobs": [list(s.logprobs) for s in self.round],
            "env_mask": [list(s.mask) for s in self.round],
        }

    def _rewards(self, **columns: Any) -> list[float | None]:
        return [sample.reward for sample in self.round]

    def _generate_and_score_completions(self, inputs: Any) -> dict[str, Any]:
        output = super()._generate_and_score_completions(inputs)
        advantages = torch.tensor([sample.advantage for sample in self.round], dtype=torch.float64)
        if not torch.isfinite(advantages).all():
            raise RuntimeError("an advantage is not finite; look at the rewards of this step")
        output["advantages"] = advantages.to(output["advantages"])
        # TRL shuffles the samples before it divides them into passes, this column with them.
        output["places"] = torch.arange(len(self.round))
        self.statistics = RoundStatistics(self.round)
        return output

    def _get_per_token_logps_and_entropies(self, *arguments: Any, **named: Any) -> Any:
        """As TRL's, but of prefix trees of each prompt's samples if the model can be trained on them."""
        if self.no_trees is None and not named.get("compute_aux_loss"):
            model, *batch = arguments
            samples = pack_samples(*batch[:3])
            with self.accelerator.autocast():
                row = model(**samples.arguments, fused_lm_head=True)
            entropies = samples.unpack(row.entropy) if named.get("compute_entropy") else None
            scores = samples.unpack(row.log_probs), entropies, None
        else:
            scores = super()._get_per_token_logps_and_entropies(*arguments, **named)
        if named.get("compute_entropy"):
            logps, entropies = scores[0], scores[1]
            assert entropies is not None  # asked for
            self._scores = logps.detach(), entropies.detach()
        return scores

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> torch.Tensor:
        loss = super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        assert self._scores is not None  # set by the call above
        logps, entropies = self._scores
        staleness = self.state.global_step - self.generated_at
        if staleness == 0:
            self.statistics.add(inputs["places"], inputs["completion_mask"].any(dim=1), logps, entropies)
        mask = (inputs["completion_mask"] * inputs["tool_mask"]).bool()
        gap = (logps - inputs["sampling_per_token_logps"]).abs()[mask]
        if gap.numel():
            self.gaps.append((float(gap.sum()), float(gap.max()), gap.numel(), staleness))
            if staleness == 0 and self.largest_gap is not None and not float(gap.mean()) <= self.largest_gap:
                raise RuntimeError(
                    f"step {self.generated_at}: rollouts were sampled with log-probs that differ from the trainer's by "
                    f"{float(gap.mean()):.2g} nats a token (bound {self.largest_gap:g}); the update was not applied. "
                    "Generate in the dtype of training (rl.options.dtype), or set "
                    'rl.engine = "transformers"'
                )
        return loss

    def create_model_card(self, *arguments: Any, **named: Any) -> None:
        """Do nothing: the model card is an asset of its own."""
