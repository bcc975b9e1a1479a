"""A teacher behind vLLM servers (`[rl.teacher_engine]`), which scores rollouts by log-probabilities of prompts."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, cast

import numpy as np

from etpi_assets.rollouts.served_weights import TOLERANCE
from etpi_assets.rollouts.teachers import model_engine
from etpi_assets.specs.training import RLSection
from etpi_assets.training.forests import agents_of
from etpi_assets.trajectories.records import RolloutRecord
from etpi_resources.engines import EngineUnavailable
from etpi_resources.lake.files import write_atomically
from etpi_resources.lake.lake import Lake

if TYPE_CHECKING:
    from etpi_resources.chat.format import ChatFormat
    from etpi_resources.engines.vllm import VllmEngine

FILE = "round-000000.teacher"
"""Beside the rounds: the log-probs that the servers gave the probe in the first round, as JSON. It goes with it."""
NO_PROBABILITY = -9999.0
"""vLLM's log-prob of an id without probability; JSON has no infinity."""


class ServedTeacher:
    """Scores rollouts, in any number of threads.

    Args:
        engine: a client of the servers. probe: ids whose log-probs show which weights a server has.
        folder: of the rounds.
    """

    def __init__(self, engine: VllmEngine, probe: Sequence[int], folder: Path) -> None:
        self._engine, self._probe, self._file = engine, probe, folder / FILE

    def score(self, record: RolloutRecord) -> list[float]:
        """Return the log-prob of each id that the policy generated, turn by turn in the order of `rl_turns`, in nats.
        A turn is scored in its own context, by one request for all turns that extend each other.

        Raises:
            EngineUnavailable: no server answers, or one answers without log-probs.
            RuntimeError: a server refuses a turn, or an id has no probability.
        """
        whole, of_turns = list[tuple[list[int], list[float]]](), list[list[float]]()
        for turn in reversed([turn for agent in agents_of(record) for turn in agent.turns]):
            prompt = [*(turn.prompt_ids or ())]
            ids = [*prompt, *(turn.output_ids or ())]
            scores = next((scores for longer, scores in whole if longer[: len(ids)] == ids), None)
            if scores is None:
                scores = self._engine.prompt_logprobs(ids)
                whole.append((ids, scores))
            of_turns.append(scores[len(prompt) - 1 : len(ids) - 1])
        logprobs = [*chain(*reversed(of_turns))]
        if not all(logprob > NO_PROBABILITY for logprob in logprobs):
            raise RuntimeError(f"{self._engine.name} gives an id of rollout {record.rollout_id} no probability")
        return logprobs

    def require_same_weights(self) -> None:
        """Compare the servers that answer with the first round's. Raises EngineUnavailable if one has other weights."""
        for url, logprobs in self._engine.prompt_logprobs_by_server(self._probe).items():
            if not self._file.exists():
                write_atomically(self._file, json.dumps(logprobs).encode())
            gap = float(np.abs(np.subtract(json.loads(self._file.read_bytes()), logprobs)).mean())
            if not gap <= TOLERANCE:
                raise EngineUnavailable(
                    f"rl.teacher_engine: {url} serves other weights as {self._engine.name!r} than in the first round: "
                    f"log-probabilities of a fixed prompt differ by {gap:.3f} nats on average (bound {TOLERANCE:g}). "
                    "Serve the first weights again, or the new ones under another name (rl.teacher_engine.model)"
                )


@contextmanager
def served_teacher(
    section: RLSection, chat: ChatFormat, lake: Lake, folder: Path, probe: Sequence[int]
) -> Iterator[ServedTeacher | None]:
    """Open the teacher that a section names in `teacher_engine`; None without one. See `ServedTeacher`.

    Raises:
        EngineUnavailable: no server answers, or one has another model or vocabulary, too short a context, or gives no
            log-probs of prompts.
    """
    with ExitStack() as stack:
        if section.teacher_engine is None:
            yield None
            return
        try:
            engine = cast("VllmEngine", model_engine(section.teacher_engine, chat, lake))
            stack.callback(engine.close)
            engine.prompt_logprobs([probe[0]] * (section.max_prompt_tokens + section.max_response_tokens))
        except RuntimeError as error:
            raise EngineUnavailable(f"rl.teacher_engine: {error}") from None
        yield ServedTeacher(engine, probe, folder)
