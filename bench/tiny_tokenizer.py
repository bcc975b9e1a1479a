"""Rebuild `etpi_resources/chat/tokenizers/tiny/tokenizer.json`: `python bench/tiny_tokenizer.py [out]`.

The vocabulary is shipped and no run builds it, because ids in the lake are valid only with it. Train it again if the
tiny worlds' wording has changed so much that texts have become long; every tiny dataset and checkpoint is then stale.
Without `out` the script only compares the shipped file.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterator
from pathlib import Path

from etpi_assets.specs.rollout_set import AgentSection
from etpi_assets.worlds.names import SYLLABLES
from etpi_lab.tiny_bases import tokenizer
from etpi_lab.tiny_bases.corpora.coop_tiny import transcripts
from etpi_lab.worlds.coop_tiny.policy import BASE_HABITS, CoopTinySkill
from etpi_resources.chat import tokenizers

SHIPPED = Path(tokenizers.__file__).parent / "tiny" / "tokenizer.json"
SIZE = 1024
AGENTS = 3000
SEED = 20_000


def texts() -> Iterator[str]:
    """Return the prompts and turns of both kinds of agents on training tasks, with and without the steering prompt."""
    planner, dawdler = CoopTinySkill(), CoopTinySkill(follow_through=0.3, malformed=0.1)
    planner, dawdler = CoopTinySkill(), CoopTinySkill(follow_through=0.3, malformed=0.1)
    kinds = ((BASE_HABITS, False), (planner, True), (dawdler, False))
    for number, (skill, steering) in enumerate(kinds):
        agent = AgentSection(steering=steering)
        for messages in itertools.islice(transcripts(SEED + number, AGENTS // 3, skill, agent), AGENTS // 3):
            yield "".join(f"<|im_start|>{m['role']}\n{m['content']}<|im_end|>\n" for m in messages)


def main() -> int:
    trained = tokenizer.train(texts(), SIZE, SYLLABLES)
    if len(sys.argv) > 1:
        trained.save(sys.argv[1])
        return 0
    same = trained.to_str(pretty=True) == SHIPPED.read_text(encoding="utf-8")
    verdict = "the same" if same else "another: write it with an argument"
    print(f"{trained.get_vocab_size()} ids; the shipped file is {verdict}")
    return not same


if __name__ == "__main__":
    raise SystemExit(main())
