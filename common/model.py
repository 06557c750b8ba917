"""Hugging Face weights -> FSDP2-sharded model with attention for packed rows -> HF checkpoint."""

import itertools
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from safetensors import SafetensorError
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.attention.varlen import varlen_attn
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AttentionInterface,
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.modeling_layers import GradientCheckpointingLayer

from common.dist import DistEnv
from common.logprobs import Boundaries, add_logprobs_method, compute_logprobs
from common.lora import LoraSettings, add_adapters, with_adapters, write_peft_folder
from common.packing import pack
from common.weight_sync import stream_adapters


@torch.compiler.disable  # it reads the boundaries, which differ from row to row
def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    boundaries: Boundaries | None = None,
    **unused: Any,
) -> tuple[Tensor, None]:
    """Causal attention inside each sequence of a packed row, none across (transformers' protocol).

    Args:
        query, key, value: (1, heads, T, head_dim); key and value may have fewer heads.
        attention_mask: must be None; the sequences come from `boundaries`.
        scaling: factor of the scores; None is head_dim ** -0.5.
        dropout: must be 0: old and new log-probs have to come from the same function.
        sliding_window: a token sees itself and the `sliding_window - 1` tokens before it.
        softcap: scores become softcap * tanh(scores / softcap) (Gemma 2).
        boundaries: of the row's sequences.

    Returns:
        (1, T, heads, head_dim) and None for the attention weights.
    """
    if boundaries is None or attention_mask is not None or dropout:
        raise RuntimeError("packed attention needs boundaries and no mask or dropout")
    seqlens, cu_seqlens = boundaries.seqlens, boundaries.cu_seqlens
    if query.is_cuda and query.dtype != torch.float32 and softcap is None:
        # One fused kernel for all sequences; it exists for 16-bit CUDA tensors only.
        longest = max(seqlens)
        q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))  # (T, heads, head_dim)
        output = varlen_attn(
            q,
            k,
            v,
            cu_seqlens,
            cu_seqlens,
            longest,
            longest,
            scale=scaling,
            window_size=(-1 if sliding_window is None else sliding_window - 1, 0),
            enable_gqa=True,
        )
        assert isinstance(output, Tensor)
        return output[None], None
    # Runs of sequences of one length are a batch; the planner puts equal lengths side by side.
    runs = [(length, len(list(run))) for length, run in itertools.groupby(seqlens)]
    tokens = [length * count for length, count in runs]
    outputs: list[Tensor] = []
    for (length, count), *qkv in zip(
        runs, *(x[0].split(tokens, dim=1) for x in (query, key, value)), strict=True
    ):
        # from (heads, tokens, head_dim) to (count, heads, length, head_dim)
        q, k, v = (x.unflatten(1, (count, length)).transpose(0, 1) for x in qkv)
        window = length if sliding_window is None else min(sliding_window, length)
        if softcap is None and window == length:
            attended = F.scaled_dot_product_attention(
                q, k, v, is_causal=True, scale=scaling, enable_gqa=True
            )
        else:
            mask = torch.ones(length, length, dtype=torch.bool, device=q.device)
            mask = mask.tril().triu(1 - window)
            if softcap is None:
                attended = F.scaled_dot_product_attention(
                    q, k, v, mask, scale=scaling, enable_gqa=True
                )
            else:
                attended = _softcapped_attention(q, k, v, mask, scaling, softcap)
        outputs.append(attended.transpose(1, 2).flatten(0, 1))  # (count * length, heads, head_dim)
    return torch.cat(outputs)[None], None


def _softcapped_attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scaling: float | None, softcap: float
) -> Tensor:
    """Attention with soft-capped scores, batched; no fused kernel offers the cap."""
    groups = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(groups, dim=1) for x in (k, v))
    scores = q @ k.transpose(2, 3) * (q.shape[-1] ** -0.5 if scaling is None else scaling)
    scores = (softcap * torch.tanh(scores / softcap)).masked_fill(~mask, float("-inf"))
    return scores.float().softmax(dim=-1).to(q.dtype) @ v


# No mask function is registered under this name, so transformers builds no (T, T) mask.
AttentionInterface.register("packed", packed_attention)


def load_tokenizer(name: str, *, chat_template: str | None = None) -> PreTrainedTokenizerBase:
    """The tokenizer of a model folder or hub name.

    Args:
        name: folder or hub name.
        chat_template: file with a Jinja template to use instead of the tokenizer's own.

    Raises:
        ValueError: there is none, or it names no end-of-sequence token.
    """
    if not Path(name).is_dir() and (name.count("/") > 1 or name.startswith((".", "/", "~"))):
        raise ValueError(f"--model={name}: no such folder, and not the form of a hub name")
    if (Path(name) / "adapter_config.json").is_file():
        raise ValueError(f"--model={name}: holds LoRA adapters; the merged model is in `final`")
    try:
        tokenizer = AutoTokenizer.from_pretrained(name)
    except (OSError, ValueError) as error:
        raise ValueError(f"--model={name}: no tokenizer found ({error})") from error
    if not tokenizer("a", add_special_tokens=False)["input_ids"]:
        raise ValueError(f"--model={name}: the tokenizer makes no token of a text; files missing?")
    if tokenizer.eos_token_id is None:
        raise ValueError(f"--model={name}: the tokenizer has no eos token, so no response can end")
    if chat_template is not None:
        try:
            tokenizer.chat_template = Path(chat_template).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(f"--chat_template={chat_template}: cannot be read: {error}") from error
    return tokenizer


def load_generation_config(name: str) -> GenerationConfig | None:
    """The checkpoint's generation config, or None; only its stop tokens are used, see data.py."""
    try:
        return GenerationConfig.from_pretrained(name)
    except OSError:
        return None


def load_model(
    name: str,
    env: DistEnv,
    *,
    dtype: torch.dtype,
    trainable: bool = True,
    activation_checkpointing: bool = False,
    cpu_offload: bool = False,
    compile: bool = False,  # noqa: A002
    lora: LoraSettings | None = None,
    seed: int = 0,
) -> PreTrainedModel:
    """Load a causal language model and shard it over the ranks.  # collective: all ranks

    Rank 0 reads the checkpoint into host memory and sends each parameter to the shards of the
    others, so any checkpoint that transformers reads will do, and only one host holds it whole.
    Trained parameters and gradient reductions are fp32 whatever the compute `dtype`: AdamW on bf16
    parameters loses small updates (bf16 has 0.0078 between neighbours just above 1). Frozen ones
    (a reference model, the base under LoRA) are in `dtype`.

    Args:
        name: folder or hub name.
        env: device and mesh.
        dtype: compute dtype of forward and backward: float32 or bfloat16.
        trainable: False for a reference model: no gradients.
        activation_checkpointing: recompute each layer in backward; less memory, same results.
        cpu_offload: keep parameters, gradients and with them the optimizer state in host memory;
            only the layers at work are on the GPU. Much less GPU memory, much slower.
        compile: let torch.compile fuse what lies between the matrix products of each layer.
        lora: train adapters instead of the model's own parameters, which are frozen.
        seed: of the adapters' initial values.

    Returns:
        The model in eval mode (no dropout anywhere), with a `logprobs` method (logprobs.py).

    Raises:
        ValueError: no model is found under `name`, or it is not a plain dense text model, or the
            adapters do not fit it.
    """
    try:
        config = AutoConfig.from_pretrained(name)
    except (OSError, ValueError) as error:
        raise ValueError(f"--model={name}: no model found ({error})") from error
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise ValueError(f"--model={name}: model type {config.model_type!r} is not a causal LM")
    if hasattr(config, "vision_config"):
        raise ValueError(f"--model={name}: {config.model_type!r} takes images; text models only")
    assert trainable or lora is None, "a frozen model has no use for adapters"
    base_dtype = torch.float32 if trainable and lora is None else dtype
    config.dtype = base_dtype
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(
            config, dtype=base_dtype, attn_implementation="packed"
        )
    if lora is not None:
        add_adapters(model, lora)
    elif not trainable:
        model.requires_grad_(False)
    if activation_checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})

    if compile:
        for layer in _layers(model):
            layer.compile(dynamic=True)  # in place: names stay as they are
    # One rank in float32 has nothing to shard and nothing to cast: FSDP would only keep copies.
    sharded = env.world_size > 1 or dtype != torch.float32 or cpu_offload
    if sharded:
        _shard(model, env, dtype=dtype, cpu_offload=cpu_offload)
    # Buffers follow to env.device when they are loaded.
    model.to_empty(device="cpu" if cpu_offload else env.device)
    if not sharded:
        model.tie_weights()  # new storage unties plain parameters; FSDP's stay one
    add_logprobs_method(model)
    _load_from_rank0(model, name, env, base_dtype, exact=dtype == torch.float32, seed=seed)
    # No dropout, ever: it would make old and new log-probs differ by noise. Layers ask for
    # `training` before they checkpoint activations; the flag alone switches no dropout on.
    model.eval()
    if activation_checkpointing:
        for module in model.modules():
            if isinstance(module, GradientCheckpointingLayer):
                module.training = True
    return model


def _layers(model: PreTrainedModel) -> list[nn.Module]:
    """The decoder's layers, each of which is sharded and compiled as a whole."""
    names: set[str] = set(model._no_split_modules or ())  # pyright: ignore[reportPrivateUsage]
    return [module for module in model.modules() if type(module).__name__ in names]


def _shard(model: PreTrainedModel, env: DistEnv, *, dtype: torch.dtype, cpu_offload: bool) -> None:
    """Shard a model on the meta device, one group per decoder layer and one for the rest."""
    shard = env.mesh["shard"] if env.mesh["replicate"].size() == 1 else env.mesh
    options: dict[str, Any] = dict(
        mesh=shard,
        # One group holds a layer's bf16 base and its fp32 adapters; both are gathered in `dtype`.
        mp_policy=MixedPrecisionPolicy(
            param_dtype=None if dtype == torch.float32 else dtype, reduce_dtype=torch.float32
        ),
        # One shard on the GPU is all there is: nothing to free between forward and backward.
        reshard_after_forward=env.mesh["shard"].size() > 1 or cpu_offload,
    )
    if cpu_offload:
        # The gradient norm is reduced where the gradients are, and the weights arrive there.
        backends = dist.get_backend_config()
        assert "cpu:" in backends, f"--cpu_offload: no backend for CPU tensors in {backends}"
        options["offload_policy"] = CPUOffloadPolicy(pin_memory=env.device.type == "cuda")
    for layer in _layers(model):
        fully_shard(layer, **options)
    # Embedding and head stay in the root's group: they may be one tied tensor.
    fully_shard(model, **options)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            # The scripts divide by global counts themselves, so FSDP sums and does not average.
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)


def _load_from_rank0(
    model: PreTrainedModel,
    name: str,
    env: DistEnv,
    base_dtype: torch.dtype,
    *,
    exact: bool,
    seed: int,
) -> None:
    """Fill the sharded, uninitialised `model` from the checkpoint that rank 0 reads, and check that
    its packed log-probs are those of the plain model.
    """
    generator = torch.Generator().manual_seed(0)
    vocab_size = model.config.get_text_config().vocab_size
    test_ids = [
        torch.randint(vocab_size, (n,), generator=generator).tolist() for n in (17, 9, 9, 30)
    ]
    expected: list[Tensor] = []
    state: dict[str, Any] = {}
    failure: str | None = None
    buffers: dict[str, Tensor] = {}
    if env.rank == 0:
        try:
            loaded: Any = AutoModelForCausalLM.from_pretrained(
                name,
                dtype=base_dtype,
                attn_implementation="eager",  # what the others leave out (soft caps) it has
                output_loading_info=True,
            )
            full, report = loaded
            state = with_adapters(model, full.state_dict(), seed=seed)
            if report["missing_keys"]:  # transformers would go on with random values
                failure = f"the checkpoint lacks {sorted(report['missing_keys'])[:3]}"
            full.eval()
            expected = [_plain_logprobs(full, ids) for ids in test_ids]
            # Buffers that no checkpoint stores (rotary frequencies) are lost on the meta device.
            buffers = {key: value.cpu() for key, value in full.named_buffers()}
        except (OSError, ValueError, RuntimeError, SafetensorError) as error:
            failure = str(error)
    # All ranks learn how it went before the first collective that needs the weights.
    outcome: list[Any] = [failure, buffers]
    dist.broadcast_object_list(outcome, src=0, device=torch.device("cpu"))
    failure, buffers = outcome
    if failure is not None:
        raise ValueError(f"--model={name}: {failure}")
    set_model_state_dict(
        model,
        state,
        options=StateDictOptions(full_state_dict=True, broadcast_from_rank0=True, strict=True),
    )
    for key, value in buffers.items():
        module_name, _, leaf = key.rpartition(".")
        setattr(model.get_submodule(module_name), leaf, value.to(env.device))

    # Packed log-probs against plain transformers. An architecture may mix tokens in other ways than
    # attention (state spaces, ALiBi, sinks) or scale its logits; then packing would be wrong.
    row = pack(range(len(test_ids)), test_ids, [[True] * len(ids) for ids in test_ids])
    with torch.no_grad():
        ours = compute_logprobs(model.eval(), row.to(env.device))[0].cpu()
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()  # the optimizer must find the fp32 shards, not their gathered copies
    if env.rank == 0:
        theirs = torch.cat(expected)
        gaps = (torch.cat(row.split(ours)) - theirs).abs()
        gap, limit = gaps.max(), 2e-5 * (1 + theirs.abs().max())
        if not exact:
            gap, limit = gaps.mean(), torch.tensor(0.15)
        if not gap <= limit:
            failure = (
                f"its log-probs in packed rows differ from plain transformers by {gap:.2g}; "
                f"{type(model).__name__.removeprefix('FSDP')} computes something that common/ lacks"
            )
    outcome = [failure]
    dist.broadcast_object_list(outcome, src=0, device=torch.device("cpu"))
    if outcome[0] is not None:
        raise ValueError(f"--model={name}: {outcome[0]}")


@torch.no_grad()
def _plain_logprobs(model: PreTrainedModel, ids: list[int]) -> Tensor:
    """(len(ids) - 1,) log-probs of a sequence by the model's own forward."""
    logits = model(torch.tensor([ids]), use_cache=False).logits[0, :-1].float()
    return logits.log_softmax(-1).gather(1, torch.tensor(ids[1:])[:, None])[:, 0]


def clip_grad_norm(model: PreTrainedModel, max_norm: float) -> float:
    """Scale all gradients down to a global norm; returns the norm before.  # collective: all ranks

    Call it after the last backward of an optimizer step. The norm is over all shards, so every
    rank gets the same number and scales by the same factor.
    """
    norm = nn.utils.clip_grad_norm_(model.parameters(), max_norm)
    return (norm.full_tensor() if isinstance(norm, DTensor) else norm).item()


def export_hf(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    tensors: Iterator[tuple[str, Tensor]],
    *,
    path: Path,
    source: str,
    stop_token_ids: list[int],
) -> None:
    """Write a checkpoint that transformers and vLLM load as it is.  # collective: all ranks

    It is written beside `path` and renamed, so a folder of that name is always whole.

    Args:
        model, tokenizer: what to write; the tokenizer brings its chat template.
        tensors: every full tensor by HF name (`weight_sync.stream_full_tensors`).
        path: folder to write; an older one is replaced.
        source: the checkpoint the run started from, whose config is kept.
        stop_token_ids: ids that end a response, for the generation config.
    """
    _write_folder(
        path,
        tensors,
        lambda folder, state: _write_checkpoint(
            model, tokenizer, state, folder, source, stop_token_ids
        ),
    )


def export_adapter(model: PreTrainedModel, *, path: Path, source: str) -> None:
    """Write the adapters of a LoRA model in peft's format.  # collective: all ranks

    `peft.PeftModel.from_pretrained(base, path)` loads the folder. Like `export_hf`, it is written
    beside `path` and renamed.

    Args:
        model: from `load_model` with `lora`.
        path: folder to write; an older one is replaced.
        source: the checkpoint the run started from, to which the adapters belong.
    """
    _write_folder(
        path,
        stream_adapters(model),
        lambda folder, state: write_peft_folder(model, state, folder, base=source),
    )


def _write_folder(
    path: Path,
    tensors: Iterator[tuple[str, Tensor]],
    write: Callable[[Path, dict[str, Tensor]], None],
) -> None:
    """Gather `tensors`, let rank 0 `write` them into a folder, and rename that to `path`."""
    rank0 = dist.get_rank() == 0
    # All ranks take part in gathering each tensor; only rank 0 keeps them, in host memory.
    state: dict[str, Tensor] = {}
    for key, value in tensors:
        if rank0:
            state[key] = value.cpu().clone()
    failure: str | None = None
    broken = [key for key, value in state.items() if not value.isfinite().all()]
    if broken:
        failure = f"{len(broken)} tensors are not finite, the first is {broken[0]}"
    elif rank0:
        partial, replaced = (path.with_name(path.name + end) for end in (".partial", ".replaced"))
        try:
            for leftover in (partial, replaced):
                shutil.rmtree(leftover, ignore_errors=True)
            write(partial, state)
            if path.exists():
                path.rename(replaced)
            partial.rename(path)
            shutil.rmtree(replaced, ignore_errors=True)
        except (OSError, ValueError, RuntimeError, SafetensorError) as error:
            failure = f"{type(error).__name__}: {error}"
    outcome = [failure]
    dist.broadcast_object_list(outcome, src=0, device=torch.device("cpu"))
    if outcome[0] is not None:
        raise RuntimeError(f"could not write {path}: {outcome[0]}")


def _write_checkpoint(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    state: dict[str, Tensor],
    folder: Path,
    source: str,
    stop_token_ids: list[int],
) -> None:
    dtype = next(iter(state.values())).dtype
    model.save_pretrained(folder, state_dict=state)
    tokenizer.save_pretrained(folder)
    # The model's own config describes the fp32 masters; the user's describes the checkpoint.
    config = AutoConfig.from_pretrained(source)
    config.architectures = model.config.architectures
    config.dtype = dtype
    config.save_pretrained(folder)
    # Sampling fields of published generation configs are often inconsistent, and saving such a
    # one raises after days of training. Only what ends or pads a response is kept.
    GenerationConfig(
        bos_token_id=tokenizer.bos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=stop_token_ids,
    ).save_pretrained(folder)
