"""What the tests of the engine and of the weight sync share."""

import contextlib
import gc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, PreTrainedModel

from common.engine import Completion, Engine, build_engine

BACKENDS = ("vllm", "transformers")
# vLLM tears down the process group when an engine is collected, so all live until the module ends.
_engines: list[Engine] = []


@contextlib.contextmanager
def trainer_group() -> Iterator[None]:
    """The default process group of a plain `python` run, and afterwards the end of all engines."""
    if not dist.is_initialized():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    with pytest.MonkeyPatch.context() as patch:
        # An engine that ends collects garbage twice, half a second each; dozens of them end here.
        patch.setattr(gc, "collect", lambda generation=2: 0)
        for engine in _engines:
            engine.close()
    _engines.clear()
    gc.collect()
    if dist.is_initialized():
        dist.destroy_process_group()


def make_engine(path: Path, backend: str, **overrides: Any) -> Engine:
    """An engine without weights; contexts of 384 tokens, 16 sequences at once, float32."""
    settings: dict[str, Any] = dict(
        backend=backend,
        dtype="float32",
        max_model_len=384,
        max_num_seqs=16,
        tensor_parallel=1,
        seed=0,
        kv_cache_bytes=2**24,
        gpu_memory_utilization=0.3,
        device=torch.device("cpu"),
    )
    engine = build_engine(str(path), **settings | overrides)
    _engines.append(engine)
    return engine


def load_trainer(path: Path) -> PreTrainedModel:
    """The model as a trainer holds it; eager attention, because others lack Gemma 2's soft cap."""
    model = AutoModelForCausalLM.from_pretrained(
        path, dtype=torch.float32, attn_implementation="eager"
    )
    return model.eval()


def make_prompts(*lengths: int) -> list[list[int]]:
    """Random prompts of ids that every tiny model has."""
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(5, 125, (n,), generator=generator).tolist() for n in lengths]


@torch.no_grad()
def next_token_logits(model: PreTrainedModel, prompt: list[int], completion: Completion):
    """(len(response), V) f32 logits from which each response token was sampled."""
    ids = torch.tensor([prompt + completion.response_ids])
    return model(input_ids=ids, use_cache=False).logits[0, len(prompt) - 1 : -1].float()


def largest_gap(
    model: PreTrainedModel,
    prompts: list[list[int]],
    completions: list[Completion],
    temperature: float = 1.0,
) -> float:
    """Largest difference of a token's log-prob between the engine and the trainer's model."""
    gap = 0.0
    for prompt, completion in zip(prompts, completions, strict=True):
        logits = next_token_logits(model, prompt, completion) / temperature
        tokens = torch.tensor(completion.response_ids)[:, None]
        logprobs = logits.log_softmax(-1).gather(1, tokens)[:, 0]
        difference = logprobs - torch.tensor(completion.rollout_logprobs)
        gap = max(gap, difference.abs().max().item())
    return gap
