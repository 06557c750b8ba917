"""Launched by test_weight_sync.py with torchrun on two ranks."""

import common  # noqa: F401  isort: skip  (sets the environment for torch and vLLM)

import sys
from pathlib import Path

import torch
from engine_helpers import largest_gap, load_trainer, make_engine, make_prompts
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from common import dist
from common.weight_sync import WeightSync, stream_full_tensors


class Odd(nn.Module):
    """Shapes that do not divide: 131 rows, a single row (rank 1 holds nothing), 3 dimensions."""

    def __init__(self) -> None:
        super().__init__()
        shapes = [(131, 7), (1, 5), (1,), (3,), (5, 3, 2), (64, 8)]
        for i, shape in enumerate(shapes):
            setattr(self, f"p{i}", nn.Parameter(torch.randn(shape)))
        self.tied = self.p0
        self.inner = nn.Linear(9, 3)


env = dist.setup(timeout_s=120)

# 1. what the stream yields is what full_tensor() gives, for every mesh, dtype and bucket size
for shape, names in (((2,), ("s",)), ((1, 2), ("r", "s")), ((2, 1), ("r", "s"))):
    torch.manual_seed(0)
    odd = Odd()
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    fully_shard(odd.inner, mesh=mesh)
    fully_shard(odd, mesh=mesh)
    assert all(isinstance(p, DTensor) for p in odd.parameters())
    want = {name: p.full_tensor() for name, p in odd.named_parameters()}
    for dtype in (torch.float32, torch.bfloat16):
        for bucket_bytes in (1, 700, 2**20):
            tensors = list(stream_full_tensors(odd, dtype=dtype, bucket_bytes=bucket_bytes))
            assert [name for name, _ in tensors] == list(want)
            for name, tensor in tensors:
                assert type(tensor) is torch.Tensor and tensor.dtype == dtype
                assert torch.equal(tensor, want[name].to(dtype)), name

# 2. a sharded trainer, also right after a forward that leaves full parameters behind
model = load_trainer(Path(sys.argv[1]))
for layer in model.model.layers:
    fully_shard(layer)
fully_shard(model, reshard_after_forward=False)
engine = make_engine(Path(sys.argv[1]), "vllm")
weight_sync = WeightSync(model, engine, bucket_bytes=2**16)
weight_sync.sync()
shards = list(model.parameters())
with torch.no_grad():
    model(input_ids=torch.tensor([[5, 6, 7]]))
    assert not all(isinstance(p, DTensor) for p in model.parameters())
    for shard in shards:
        shard.mul_(1.5)
weight_sync.sync()
whole = load_trainer(Path(sys.argv[1]))
with torch.no_grad():
    for parameter in whole.parameters():
        parameter.mul_(1.5)


def sample(prompts: list[list[int]], seeds: list[int]) -> list[list[int]]:
    completions = engine.generate(prompts, seeds, max_tokens=10, temperature=1.0, stop_token_ids=[])
    assert not prompts or largest_gap(whole, prompts, completions) < 5e-5
    return [completion.response_ids for completion in completions]


# 3. P57: ranks draw equal streams for equal seeds and others for other seeds; uneven and no work
prompt = make_prompts(9)[0]
assert env.rank == 0 or sample([], []) == []
same = dist.all_gather_objects(sample([prompt] * 3, [1, 2, 3]))
assert same[0] == same[1]
mine = sample([prompt] * (2 + env.rank), [10 * (env.rank + 1) + i for i in range(2 + env.rank)])
streams = [tuple(ids) for rank in dist.all_gather_objects(mine) for ids in rank]
assert len(set(streams)) == 5

dist.all_gather_objects(None)
engine.close()
dist.shutdown()
print("rank done")
