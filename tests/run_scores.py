"""Launched by test_scores.py with torchrun: trains score heads, and saves what came out of it."""

import common  # noqa: F401  isort: skip  (sets the environment for torch and vLLM)

import sys
from dataclasses import replace
from pathlib import Path

import torch
from torch.distributed.device_mesh import init_device_mesh

from common.dist import setup, shutdown
from tests.test_scores import train

out, path, *cases = sys.argv[1:]
env = setup(timeout_s=60)
# rank 1 has nothing to score in the second microbatch
shares = ([[0, 3], [5]], [[1, 2, 4], []])[env.rank]
for replicas in (1, 2):
    shape = (replicas, 2 // replicas)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))
    for case in cases:
        results = train(path, case, replace(env, mesh=mesh), shares)
        if env.rank == 0:
            torch.save(results, Path(out) / f"{case}-{replicas}.pt")
shutdown()
