"""Launched by test_weight_sync.py with torchrun on two ranks."""

import common  # noqa: F401  isort: skip  (sets the environment for torch and vLLM)

import sys
from pathlib import Path

import torch
from engine_helpers import largest_gap, load_trainer, make_engine, make_prompts
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor

from common import dist
from common.logprobs import compute_logprobs
from common.lora import LoraSettings
from common.model import load_model
from common.packing import pack
from common.weight_sync import WeightSync, stream_full_tensors
from tests.tiny import full


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
    want = {name: full(p) for name, p in odd.named_parameters()}
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

# 4. P55: adapters, merged on the way, on a mesh that shards and on one that replicates
for shape in ((1, 2), (2, 1)):
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))
    lora_env = dist.DistEnv(env.rank, 2, env.local_rank, env.device, mesh)
    lora = LoraSettings(rank=3, alpha=7)
    model = load_model(sys.argv[1], lora_env, dtype=torch.float32, lora=lora)
    trained = [p for n, p in model.named_parameters() if "lora" in n]
    frozen = {n: full(p) for n, p in model.named_parameters() if "lora" not in n}
    optimizer = torch.optim.AdamW(trained, lr=0.03)
    weight_sync = WeightSync(model, engine, bucket_bytes=2**16)
    prompt = make_prompts(20)[0]
    row = pack([0], [prompt], [[True] * 20])
    for _ in range(3):
        (-compute_logprobs(model, row)[0].sum()).backward()
        optimizer.step()
        optimizer.zero_grad()
    for _ in range(2):
        weight_sync.sync()
    completion = engine.generate([prompt], [7], max_tokens=10, temperature=1.0, stop_token_ids=[])[
        0
    ]
    row = pack([0], [prompt + completion.response_ids], [[False] * 20 + [True] * 10])
    with torch.no_grad():
        ours = row.split(compute_logprobs(model, row)[0])[0]
        plain = load_trainer(Path(sys.argv[1]))
    assert (ours - torch.tensor(completion.rollout_logprobs)).abs().max() < 5e-5
    assert largest_gap(plain, [prompt], [completion]) > 1e-2  # the adapters make a difference
    for module in reversed(list(model.modules())):
        if isinstance(module, FSDPModule):
            module.reshard()
    for name, parameter in model.named_parameters():
        assert "lora" in name or torch.equal(full(parameter), frozen[name])

dist.all_gather_objects(None)
engine.close()
dist.shutdown()
print("rank done")
