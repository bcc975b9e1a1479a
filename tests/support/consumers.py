"""Reads exports with the packages of `make consumers`, in a process with their own path."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

from tests.support.students import CONSUMERS

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
