"""Launched by test_lora.py with torchrun: trains a LoRA model, and saves what came out of it."""

import common  # noqa: F401  isort: skip  (sets the environment for torch and vLLM)

import sys
from pathlib import Path

import torch

from common.dist import setup, shutdown
from common.logprobs import compute_logprobs
from common.lora import LoraSettings
from common.model import clip_grad_norm, export_adapter, load_model
from common.packing import pack
from common.weight_sync import stream_adapters, stream_full_tensors
from tests.test_lora import packed_row, sequences
from tests.tiny import full

out, replicas, *cases = sys.argv[1:]
env = setup(timeout_s=60, replicas=int(replicas))
ids, masks = sequences()
mine = [[0, 3], [1, 2, 4]][env.rank] if env.world_size == 2 else list(range(5))
row = pack(mine, [ids[i] for i in mine], [masks[i] for i in mine])
for case in cases:
    model_path, dtype = case.split(":")
    lora = LoraSettings(rank=3, alpha=7)
    model = load_model(model_path, env, dtype=getattr(torch, dtype), lora=lora, seed=5)
    trained = {n: p for n, p in model.named_parameters() if p.requires_grad}
    optimizer = torch.optim.AdamW(trained.values(), lr=1e-2, fused=True)
    results: dict[str, object] = {"start": {n: t.clone() for n, t in stream_adapters(model)}}
    for step in range(2):  # B starts at zero, so A has a gradient from the second step on
        logprobs, _ = compute_logprobs(model, row)
        (-logprobs.sum() / 70).backward()
        results[f"gradients_{step}"] = {n: full(p.grad).clone() for n, p in trained.items()}
        results[f"norm_{step}"] = clip_grad_norm(model, 0.5)
        optimizer.step()
        optimizer.zero_grad()
    results["adapters"] = {n: t.clone() for n, t in stream_adapters(model)}
    results["merged"] = {n: t.clone() for n, t in stream_full_tensors(model, dtype=torch.float32)}
    with torch.no_grad():
        results["logprobs"], _ = compute_logprobs(model, packed_row())
    export_adapter(model, path=Path(out) / f"adapter-{dtype}", source=model_path)
    if env.rank == 0:
        torch.save(results, Path(out) / f"{dtype}.pt")
shutdown()
