"""Launched by test_engine.py: sample from a synced engine and leave cleanly."""

import common  # noqa: F401  isort: skip  (sets the environment for torch and vLLM)

import sys
from pathlib import Path

import torch
from engine_helpers import load_trainer, make_engine, make_prompts

from common import dist
from common.weight_sync import WeightSync

env = dist.setup(timeout_s=60)
engine = make_engine(Path(sys.argv[1]), "vllm")
WeightSync(load_trainer(Path(sys.argv[1])), engine).sync()
completions = engine.generate(
    make_prompts(5, 9), [1, 2], max_tokens=8, temperature=1.0, stop_token_ids=[]
)
print([c.response_ids for c in completions])
assert torch.distributed.is_initialized()
engine.close()
dist.shutdown()
