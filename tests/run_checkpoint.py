"""Launched by test_checkpoint.py with torchrun on two ranks."""

import common  # noqa: F401  isort: skip  (sets the environment for torch and vLLM)

import shutil
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh

import common.checkpoint
from common.checkpoint import load_checkpoint, save_checkpoint
from common.dist import all_gather_objects, setup, shutdown
from tests.test_checkpoint import EXTRA, build, check_continuation, equal, snapshot, train
from tests.test_scores import SETTINGS

out, path = Path(sys.argv[1]), sys.argv[2]
env = setup(timeout_s=60)
hybrid = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))

# 1. what one rank has saved
models = build(path, env)
extra = load_checkpoint(out / "one", models)
results = snapshot(models)
if env.rank == 0:
    torch.save((extra, results), out / "two.pt")

# 2. shards, of which rank 1 has none of a critic's head, and replicas
for mesh, lora in ((env.mesh, None), (hybrid, SETTINGS)):
    check_continuation(lambda m=mesh, x=lora: build(path, replace(env, mesh=m), x), out / "main")

# 3. a failure of one rank is one of all, and the checkpoint before it stays
save_checkpoint(out / "main", models, EXTRA | {"rank": env.rank})
train(models, range(1))


def fail(*arguments: Any) -> None:
    raise OSError("no space left")


for rank, place, function in (
    (1, dcp.FileSystemWriter, "write_data"),
    (0, common.checkpoint, "replace_folder"),
):
    with pytest.MonkeyPatch.context() as patch:
        if env.rank == rank:
            patch.setattr(place, function, fail)
        with pytest.raises(RuntimeError, match="could not write .*main: .*OSError: no space left"):
            save_checkpoint(out / "main", models, {})
assert load_checkpoint(out / "main", models) == EXTRA | {"rank": 0}
assert equal(snapshot(models), results)
with pytest.raises(ValueError, match="nowhere is no checkpoint"):
    load_checkpoint(out / ("main" if env.rank else "nowhere"), models)

# 4. nor does a rank wait for one whose data are broken
if env.rank == 0:
    shutil.copytree(out / "main", out / "broken")
    first, second = sorted((out / "broken").glob("*.distcp"))
    second.write_bytes(second.read_bytes()[:1000])
all_gather_objects(None)
with pytest.raises(ValueError, match="broken cannot be read: rank [01]: "):
    load_checkpoint(out / "broken", models)
shutdown()
