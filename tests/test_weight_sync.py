"""Weight sync: every tensor arrives, in every architecture, or training stops."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from engine_helpers import (
    BACKENDS,
    largest_gap,
    load_trainer,
    make_engine,
    make_prompts,
    trainer_group,
)
from tiny import local, make_tiny_model
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from transformers import PreTrainedModel

from common.dist import DistEnv
from common.engine import Engine
from common.logprobs import compute_logprobs
from common.lora import LoraSettings
from common.model import load_model
from common.packing import pack
from common.weight_sync import WeightSync, stream_adapters, stream_full_tensors

ARCHITECTURES = {
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {}),
    "qwen3-untied": ("qwen3", {"tie_word_embeddings": False}),
    "llama": ("llama", {}),
    "llama-untied": ("llama", {"tie_word_embeddings": False}),
    "mistral": ("mistral", {"tie_word_embeddings": False}),
    "gemma2": ("gemma2", {}),
    "gemma3": ("gemma3_text", {}),
    "phi3": ("phi3", {"tie_word_embeddings": False}),
    "gpt2": ("gpt2", {}),
    # vLLM pads vocabularies to a multiple of 64: the padding rows are no missing elements
    "odd-vocab": ("qwen3", {"vocab_size": 271, "tie_word_embeddings": False}),
}


@pytest.fixture(scope="module", autouse=True)
def process_group() -> Iterator[None]:
    with trainer_group():
        yield


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("models")
    for name, (arch, overrides) in ARCHITECTURES.items():
        make_tiny_model(root / name, arch, **overrides)
    return root


@torch.no_grad()
def perturb(model: nn.Module) -> None:
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.1)


def engine_gap(engine: Engine, model: PreTrainedModel, *lengths: int) -> float:
    prompts = make_prompts(*lengths)
    completions = engine.generate(
        prompts, list(range(len(lengths))), max_tokens=10, temperature=0.9, stop_token_ids=[]
    )
    return largest_gap(model, prompts, completions, 0.9)


def stream(model: nn.Module, engine: Engine) -> list[tuple[str, Tensor]]:
    alias = engine.needs_lm_head_alias
    return list(stream_full_tensors(model, dtype=engine.dtype, alias_lm_head=alias))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_engine_follows_the_trainer(name: str, backend: str, models: Path) -> None:
    """Of every architecture, first and second sync; P54: a tied lm_head kept its first values.

    The prompt of 50 tokens is longer than the sliding windows of Gemma (32).
    """
    engine, model = make_engine(models / name, backend), load_trainer(models / name)
    weight_sync = WeightSync(model, engine)
    for version in (1, 2):
        weight_sync.sync()
        assert weight_sync.version == version
        assert engine_gap(engine, model, 3, 17, 50) < 5e-5
        perturb(model)
    assert engine_gap(engine, model, 3, 17, 50) > 1e-2  # the check can see a stale engine


def test_prefix_cache_is_reset(models: Path) -> None:
    """P52: blocks of a prompt that were computed by the old weights served the new ones."""
    engine, model = make_engine(models / "qwen3", "vllm"), load_trainer(models / "qwen3")
    weight_sync = WeightSync(model, engine)
    for _ in range(2):
        weight_sync.sync()
        assert engine_gap(engine, model, 300, 300) < 5e-5  # two full blocks of 128 tokens each
        perturb(model)


@pytest.mark.parametrize("backend", BACKENDS)
def test_bfloat16_engine_of_a_float32_trainer(backend: str, models: Path) -> None:
    """P59: tensors are cast before they are sent. The bound is the rounding of bf16 activations."""
    engine = make_engine(models / "qwen3", backend, dtype="bfloat16")
    model = load_trainer(models / "qwen3")
    assert engine.dtype == torch.bfloat16
    assert {tensor.dtype for _, tensor in stream(model, engine)} == {torch.bfloat16}
    WeightSync(model, engine).sync()
    assert engine_gap(engine, model, 5, 40) < 0.05


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", ["qwen3", "qwen3-untied", "gpt2"])
def test_engine_follows_a_trainer_with_adapters(name: str, backend: str, models: Path) -> None:
    """P55: rollouts came from the frozen base, or the base drifted from merging into it."""
    mesh = init_device_mesh("cpu", (1, 1), mesh_dim_names=("replicate", "shard"))
    env = DistEnv(0, 1, 0, torch.device("cpu"), mesh)
    lora = LoraSettings(rank=3, alpha=7)
    model = load_model(str(models / name), env, dtype=torch.float32, lora=lora)
    engine = make_engine(models / name, backend)
    weight_sync = WeightSync(model, engine)
    weight_sync.sync()
    shards = dict(model.named_parameters())  # a forward puts gathered copies in their places
    base = {n: local(p).clone() for n, p in shards.items() if "lora" not in n}

    def gap() -> float:
        prompts = make_prompts(3, 17, 50)
        completions = engine.generate(
            prompts, [0, 1, 2], max_tokens=10, temperature=0.9, stop_token_ids=[]
        )
        ids = [p + c.response_ids for p, c in zip(prompts, completions, strict=True)]
        masks = [[t >= len(p) for t in range(len(p) + 10)] for p in prompts]
        row = pack(range(3), ids, masks)
        with torch.no_grad():
            ours = torch.cat(row.split(compute_logprobs(model, row, temperature=0.9)[0]))
        theirs = torch.tensor([x for c in completions for x in c.rollout_logprobs])
        return (ours - theirs).abs().max().item()

    assert gap() < 5e-5
    for _ in range(3):
        for parameter_name, shard in shards.items():
            if "lora_B" in parameter_name:
                local(shard).data.normal_(std=0.1)
        list(stream_adapters(model))  # puts the shards back
        assert gap() > 1e-2
        weight_sync.sync()
        assert gap() < 5e-5
    assert all(torch.equal(local(shards[n]), base[n]) for n in base)


LAYER = "model.layers.1."


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    "name, dropped, engine_name",
    [
        ("qwen3", LAYER + "self_attn.q_proj.weight", LAYER + "self_attn.qkv_proj.weight"),
        ("qwen3", LAYER + "self_attn.v_proj.weight", LAYER + "self_attn.qkv_proj.weight"),
        ("qwen3", LAYER + "mlp.gate_proj.weight", LAYER + "mlp.gate_up_proj.weight"),
        ("qwen3", LAYER + "mlp.down_proj.weight", LAYER + "mlp.down_proj.weight"),
        ("qwen3", LAYER + "self_attn.k_norm.weight", LAYER + "self_attn.k_norm.weight"),
        ("qwen3", "model.norm.weight", "model.norm.weight"),
        ("qwen3", "model.embed_tokens.weight", "model.embed_tokens.weight"),
        ("qwen3", "lm_head.weight", "lm_head.weight"),
        ("qwen3-untied", "lm_head.weight", "lm_head.weight"),
        ("qwen2", LAYER + "self_attn.k_proj.bias", LAYER + "self_attn.qkv_proj.bias"),
        ("qwen2", LAYER + "self_attn.q_proj.weight", LAYER + "self_attn.qkv_proj.weight"),
        ("gemma2", "model.embed_tokens.weight", "model.embed_tokens.weight"),
        ("gemma3", LAYER + "pre_feedforward_layernorm.weight", "pre_feedforward_layernorm.weight"),
        ("phi3", LAYER + "mlp.gate_up_proj.weight", LAYER + "mlp.gate_up_proj.weight"),
        ("gpt2", "transformer.h.0.attn.c_attn.bias", "transformer.h.0.attn.c_attn.bias"),
        ("gpt2", "transformer.wpe.weight", "transformer.wpe.weight"),
        ("odd-vocab", "model.embed_tokens.weight", "model.embed_tokens.weight"),
    ],
)
def test_a_missing_tensor_is_an_error(
    name: str, dropped: str, engine_name: str, backend: str, models: Path
) -> None:
    """A tensor that did not arrive left the old values in place, with a log message at most.

    It happens in the second sync: an engine that had everything once must not be content.
    """
    engine, model = make_engine(models / name, backend), load_trainer(models / name)
    tensors = stream(model, engine)
    engine.load_weights(tensors)
    kept = [(n, tensor) for n, tensor in tensors if n != dropped]
    if backend == "transformers":
        if len(kept) == len(tensors):
            pytest.skip("this backend ties the head itself")
        engine_name = dropped
    assert len(kept) == len(tensors) - 1
    with pytest.raises(RuntimeError, match=f"did not arrive.*{engine_name}") as caught:
        engine.load_weights(kept)
    assert str(caught.value).count("weight") <= 4  # and nothing else is accused
    with pytest.raises(RuntimeError, match="no weights"):
        engine_gap(engine, model, 5)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    "name, extra",
    [
        ("qwen3", "model.layers.0.mlp.extra_proj.weight"),
        ("qwen3", "model.layers.2.mlp.down_proj.weight"),
        ("qwen3", "model.layers.0.self_attn.q_proj.bias"),  # vLLM drops unknown biases silently
        ("qwen3", "model.layers.0.self_attn.rotary_emb.inv_freq"),  # and these
        ("gemma2", "lm_head.weight"),
        ("gpt2", "score.weight"),
    ],
)
def test_an_unknown_tensor_is_an_error(name: str, extra: str, backend: str, models: Path) -> None:
    """A tensor without a place means that trainer and engine disagree about the architecture."""
    engine, model = make_engine(models / name, backend), load_trainer(models / name)
    with pytest.raises(RuntimeError, match=f"no place for.*{extra}"):
        engine.load_weights([*stream(model, engine), (extra, torch.zeros(64, 64))])


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_repeated_tensor_is_an_error(backend: str, models: Path) -> None:
    """Counts of elements prove nothing when one part of a fused projection comes twice."""
    engine, model = make_engine(models / "qwen3", backend), load_trainer(models / "qwen3")
    tensors = stream(model, engine)
    with pytest.raises(RuntimeError, match=f"{tensors[3][0]} twice"):
        engine.load_weights([*tensors[:4], tensors[3], *tensors[4:]])


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_tensor_of_another_shape_is_an_error(backend: str, models: Path) -> None:
    engine, model = make_engine(models / "qwen3", backend), load_trainer(models / "qwen3")
    tensors = [
        (name, tensor[:-1] if "down_proj" in name else tensor)
        for name, tensor in stream(model, engine)
    ]
    with pytest.raises((RuntimeError, AssertionError)):
        engine.load_weights(tensors)


def test_stream_of_a_plain_model(models: Path) -> None:
    """P54: tied parameters come once, and the head again only on request; names are the HF ones."""
    model = load_trainer(models / "qwen3")
    names = [name for name, _ in model.named_parameters()]
    wrapped = load_trainer(models / "qwen3")
    for i, layer in enumerate(wrapped.model.layers):
        wrapped.model.layers[i] = checkpoint_wrapper(layer)
    for source in (model, wrapped, torch.compile(wrapped)):
        tensors = dict(stream_full_tensors(source, dtype=torch.float32))
        assert list(tensors) == names and "lm_head.weight" not in names
        for name, parameter in model.named_parameters():
            assert torch.equal(tensors[name], parameter)
            assert not tensors[name].requires_grad
    aliased = dict(stream_full_tensors(model, dtype=torch.bfloat16, alias_lm_head=True))
    assert sorted(aliased) == sorted([*names, "lm_head.weight"])
    assert torch.equal(aliased["lm_head.weight"], aliased["model.embed_tokens.weight"])
    assert {tensor.dtype for tensor in aliased.values()} == {torch.bfloat16}
    untied = load_trainer(models / "qwen3-untied")
    assert "lm_head.weight" in dict(stream_full_tensors(untied, dtype=torch.float32))


def test_stream_and_sync_of_fsdp2_shards(tmp_path: Path) -> None:
    """Two ranks, uneven and empty shards, HSDP meshes: see run_weight_sync.py."""
    make_tiny_model(tmp_path / "model", "qwen3", vocab_size=271)
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"),
        *(str(Path(__file__).parent / "run_weight_sync.py"), str(tmp_path / "model")),
    ]
    root = str(Path(__file__).parent.parent)
    env_command = ["env", f"PYTHONPATH={root}", "OMP_NUM_THREADS=1", *command]
    job = subprocess.run(env_command, capture_output=True, text=True, timeout=280)
    assert job.returncode == 0, job.stdout + job.stderr
    assert job.stdout.count("rank done") == 2
