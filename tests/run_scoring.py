"""Launched by test_scoring.py with torchrun: scores of a sharded reward model, on every rank."""

import common  # noqa: F401  isort: skip  (sets the environment for torch and vLLM)

import json
import sys
from pathlib import Path

import torch

from common.dist import all_gather_objects, setup, shutdown
from common.scoring import RewardModel
from tests.test_scoring import PROMPTS, RESPONSES

path, out = sys.argv[1:]
env = setup(timeout_s=60)
model = RewardModel(path, env, dtype=torch.float32, max_tokens=100)
results = {
    "all": model.score(PROMPTS, RESPONSES),
    "one": model.score([PROMPTS[0]] * 2, [RESPONSES[0], "<|im_end|>"]),
    "none": model.score([], []),
}
rounded = RewardModel(path, env, dtype=torch.bfloat16, max_tokens=100)
results["bfloat16"] = rounded.score(PROMPTS, RESPONSES)
for others in all_gather_objects(results):
    assert others == results
if env.rank == 0:
    Path(out).write_text(json.dumps(results))
shutdown()
