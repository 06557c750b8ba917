"""Hugging Face weights -> FSDP2-sharded model with attention for packed rows -> HF checkpoint.

Language models, and reward models: the same decoder with one linear layer that makes a score of the
last token's hidden state.
"""

import itertools
import math
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

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
    MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING,
    AttentionInterface,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    GenerationConfig,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.modeling_layers import GradientCheckpointingLayer

from common.checkpoint import replace_folder
from common.dist import DistEnv
from common.logprobs import (
    Boundaries,
    add_packed_methods,
    compute_logprobs,
    compute_scores,
    score_head,
)
from common.lora import LoraSettings, add_adapters, with_adapters, write_peft_folder
from common.packing import PackedRow, pack
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
    row = boundaries.row
    if row.full_index is not None:  # every sequence in full, with the beginning that it shares
        query, key, value = (
            x.transpose(1, 2).index_select(1, row.full_index).transpose(1, 2)
            for x in (query, key, value)
        )
    output = _attend(query, key, value, row, scaling, sliding_window, softcap)
    if row.own_index is not None:
        output = output.index_select(0, row.own_index)
    return output[None], None


def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    row: PackedRow,
    scaling: float | None,
    sliding_window: int | None,
    softcap: float | None,
) -> Tensor:
    """Attention of full sequences, (1, heads, F, head_dim) each -> (F, heads, head_dim)."""
    if query.is_cuda and query.dtype != torch.float32 and softcap is None:
        # One fused kernel for all sequences; it exists for 16-bit CUDA tensors only.
        longest = max(row.full_seqlens)
        q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))  # (F, heads, head_dim)
        output = varlen_attn(
            q,
            k,
            v,
            row.full_cu_seqlens,
            row.full_cu_seqlens,
            longest,
            longest,
            scale=scaling,
            window_size=(-1 if sliding_window is None else sliding_window - 1, 0),
            enable_gqa=True,
        )
        assert isinstance(output, Tensor)
        return output
    # Runs of sequences of one length are a batch; the planner puts equal lengths side by side.
    runs = [(length, len(list(run))) for length, run in itertools.groupby(row.full_seqlens)]
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
    return torch.cat(outputs)


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


def load_tokenizer(
    name: str, *, chat_template: str | None = None, flag: str = "--model"
) -> PreTrainedTokenizerBase:
    """The tokenizer of a model folder or hub name.

    Args:
        name: folder or hub name.
        chat_template: file with a Jinja template to use instead of the tokenizer's own.
        flag: that brought the name, for errors.

    Raises:
        ValueError: there is none, or it names no end-of-sequence token.
    """
    if not Path(name).is_dir() and (name.count("/") > 1 or name.startswith((".", "/", "~"))):
        raise ValueError(f"{flag}={name}: no such folder, and not the form of a hub name")
    if (Path(name) / "adapter_config.json").is_file():
        raise ValueError(f"{flag}={name}: holds LoRA adapters; the merged model is in `final`")
    try:
        tokenizer = AutoTokenizer.from_pretrained(name)
    except (OSError, ValueError) as error:
        raise ValueError(f"{flag}={name}: no tokenizer found ({error})") from error
    if not tokenizer("a", add_special_tokens=False)["input_ids"]:
        raise ValueError(f"{flag}={name}: the tokenizer makes no token of a text; files missing?")
    if tokenizer.eos_token_id is None:
        raise ValueError(f"{flag}={name}: the tokenizer has no eos token, so no response can end")
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


def choose_pad_token(
    tokenizer: PreTrainedTokenizerBase, stop_ids: list[int], *, flag: str = "--model"
) -> str:
    """A padding token for a reward model: one with which no sequence ends.

    A classifier of transformers reads the score at the last token that is not the padding token,
    of unpadded sequences too: if sequences end with that token, it reads the wrong one. The
    tokenizer's own padding token stays if it will do; else it is the unknown token, or a special
    token that neither the model nor the chat template uses.

    Args:
        tokenizer: from `load_tokenizer`; not changed.
        stop_ids: ids that end a response; the end-of-sequence token counts as one.
        flag: that brought the model's name, for errors.

    Raises:
        ValueError: no token is left, or there is no model beside the tokenizer.
    """
    name = tokenizer.name_or_path
    ends: tuple[Any, ...] = (tokenizer.eos_token_id, *stop_ids)
    template = str(tokenizer.chat_template)
    unused = {
        token_id: token.content.lower()
        for token_id, token in tokenizer.added_tokens_decoder.items()
        if token.special and token_id != tokenizer.bos_token_id and token.content not in template
    }
    # First those that are there for nothing else: a template may put other tokens together.
    spare = ("pad", "reserved", "unused")
    by_name = sorted(unused, key=lambda i: (not any(w in unused[i] for w in spare), i))
    own: list[Any] = [tokenizer.pad_token_id, tokenizer.unk_token_id]
    num_embeddings = _read_config(name, flag).get_text_config().vocab_size
    for token_id in own + by_name:
        if token_id is not None and token_id not in ends and token_id < num_embeddings:
            return str(tokenizer.convert_ids_to_tokens(token_id))
    raise ValueError(
        f"{flag}={name}: no token is left for padding, which must not be one that ends sequences; "
        "add one to the tokenizer"
    )


def _read_config(name: str, flag: str) -> PretrainedConfig:
    try:
        return AutoConfig.from_pretrained(name)
    except (OSError, ValueError) as error:
        raise ValueError(f"{flag}={name}: no model found ({error})") from error


def load_model(
    name: str,
    env: DistEnv,
    *,
    dtype: torch.dtype,
    head: Literal["lm", "score"] = "lm",
    new_head: Literal["normal", "zero"] | None = None,
    trainable: bool = True,
    activation_checkpointing: bool = False,
    cpu_offload: bool = False,
    compile: bool = False,  # noqa: A002
    lora: LoraSettings | None = None,
    seed: int = 0,
    flag: str = "--model",
) -> PreTrainedModel:
    """Load a language or reward model and shard it over the ranks.  # collective: all ranks

    Rank 0 reads the checkpoint into host memory and sends each parameter to the shards of the
    others, so any checkpoint that transformers reads will do, and only one host holds it whole.
    Trained parameters and gradient reductions are fp32 whatever the compute `dtype`: AdamW on bf16
    parameters loses small updates (bf16 has 0.0078 between neighbours just above 1). Frozen ones
    (a reference model, the base under LoRA) are in `dtype`, but for the head of a reward model:
    that is fp32, and so is the product with it.

    Args:
        name: folder or hub name.
        env: device and mesh.
        dtype: compute dtype of forward and backward: float32 or bfloat16.
        head: "lm" for a causal language model, "score" for a reward model or critic, whose
            checkpoint is a sequence classifier of transformers with one output.
        new_head: let a checkpoint without a score head have one; a trained one is kept. "normal",
            for a reward model, draws it from N(0, 1 / (D + 1)) (Stiennon et al. 2020,
            arXiv:2009.01325). "zero" is for a critic: V = 0 at first, so that the first advantages
            are those of the returns alone.
        trainable: False for a reference model: no gradients.
        activation_checkpointing: recompute each layer in backward; less memory, same results.
        cpu_offload: keep parameters, gradients and with them the optimizer state in host memory;
            only the layers at work are on the GPU. Much less GPU memory, much slower.
        compile: let torch.compile fuse what lies between the matrix products of each layer.
        lora: train adapters instead of the model's own parameters, which are frozen.
        seed: of the initial values of adapters and of a new head; the global generator is not used.
        flag: that brought the name, for errors.

    Returns:
        The model in eval mode (no dropout anywhere), for `compute_logprobs`, or `compute_scores`
        and `compute_values`.

    Raises:
        ValueError: no model is found under `name`, or it is not a plain dense text model, or has
            another head, or the adapters do not fit it.
    """
    config = _read_config(name, flag)
    _check_config(config, head, f"{flag}={name}")
    assert trainable or lora is None, "a frozen model has no use for adapters"
    base_dtype = torch.float32 if trainable and lora is None else dtype
    config.dtype = base_dtype
    if head == "score":
        config.num_labels = 1
    auto = AutoModelForCausalLM if head == "lm" else AutoModelForSequenceClassification
    with torch.device("meta"):
        model = auto.from_config(config, dtype=base_dtype, attn_implementation="packed")
    if head == "score":
        layer = score_head(model)
        if layer is None:
            raise ValueError(f"{flag}={name}: {type(model).__name__} has no linear layer `score`")
        layer.float()
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
    add_packed_methods(model)
    _load_from_rank0(
        model,
        name,
        env,
        base_dtype,
        new_head=new_head,
        exact=dtype == torch.float32,
        seed=seed,
        flag=flag,
    )
    # No dropout, ever: it would make old and new log-probs differ by noise. Layers ask for
    # `training` before they checkpoint activations; the flag alone switches no dropout on.
    model.eval()
    if activation_checkpointing:
        for module in model.modules():
            if isinstance(module, GradientCheckpointingLayer):
                module.training = True
    return model


def context_tokens(model: PreTrainedModel) -> float:
    """Longest sequence that a model computes as it was made to; infinite if there is no limit.

    Longrope and dynamic rotary embeddings depend on the longest sequence of a batch from their
    original context on: a sequence would have other log-probs in another row.
    """
    rope = getattr(model.config, "rope_parameters", None) or {}
    limits = [getattr(model.config, "max_position_embeddings", None)]
    if rope.get("rope_type") in ("longrope", "dynamic"):
        limits.append(rope.get("original_max_position_embeddings"))
    return min((limit for limit in limits if limit is not None), default=math.inf)


def check_fits(
    model: PreTrainedModel, name: str, *, max_tokens: int, largest_id: int, flag: str = "--model"
) -> None:
    """Refuse sequences that a model cannot read.

    Args:
        model: from `load_model`.
        name, flag: what it was loaded from, for errors.
        max_tokens: of the longest sequence that there may be.
        largest_id: of all token ids.

    Raises:
        ValueError: one of these is too large.
    """
    if max_tokens > (context := context_tokens(model)):
        raise ValueError(
            f"sequences of up to {max_tokens} tokens do not fit into the context of {flag}={name}, "
            f"{context} tokens (for longrope and dynamic rotary embeddings: the original one)"
        )
    num_embeddings = model.config.get_text_config().vocab_size
    if largest_id >= num_embeddings:
        raise ValueError(
            f"{flag}={name}: the tokenizer makes token id {largest_id}, but the model has "
            f"{num_embeddings} embeddings"
        )


def _check_config(config: PretrainedConfig, head: Literal["lm", "score"], place: str) -> None:
    """Refuse checkpoints of other models than this module's; `place` begins the error."""
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise ValueError(f"{place}: model type {config.model_type!r} is not a causal LM")
    if hasattr(config, "vision_config"):
        raise ValueError(f"{place}: {config.model_type!r} takes images; text models only")
    classifier = any("ForSequenceClassification" in name for name in config.architectures or [])
    if head == "lm" and classifier:
        raise ValueError(f"{place}: is a reward model or classifier, not a language model")
    if head == "score" and type(config) not in MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING:
        raise ValueError(
            f"{place}: transformers has no sequence classifier of model type {config.model_type!r}"
        )
    if head == "score" and classifier and config.num_labels != 1:
        raise ValueError(f"{place}: its head has {config.num_labels} outputs, not one score")


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
    if (head := score_head(model)) is not None:  # in a group of its own, it is not cast to bf16
        exact: dict[str, Any] = options | {"mp_policy": MixedPrecisionPolicy()}
        fully_shard(head, **exact)
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
    new_head: Literal["normal", "zero"] | None,
    exact: bool,
    seed: int,
    flag: str,
) -> None:
    """Fill the sharded, uninitialised `model` from the checkpoint that rank 0 reads, and check that
    its packed log-probs or scores are those of the plain model.
    """
    scores = score_head(model) is not None
    generator = torch.Generator().manual_seed(0)
    vocab_size = model.config.get_text_config().vocab_size
    test_ids = [
        torch.randint(vocab_size, (n,), generator=generator).tolist() for n in (17, 9, 9, 30, 20)
    ]
    test_ids[4][:12] = test_ids[3][:12]  # which the row lays out once
    shared = [0, 0, 0, 0, 12]
    masks = [
        [count == 0 or t > count for t in range(len(ids))]
        for ids, count in zip(test_ids, shared, strict=True)
    ]
    expected: list[Tensor] = []
    state: dict[str, Any] = {}
    failure: str | None = None
    buffers: dict[str, Tensor] = {}
    clear_head = False
    if env.rank == 0:
        try:
            full, missing = _read_checkpoint(name, type(model.config), base_dtype, scores=scores)
            if new_head is not None and missing == ["score.weight"]:
                _draw_head(full, seed)
                clear_head = new_head == "zero"
            elif missing == ["score.weight"]:
                failure = "no trained head (score.weight); train one with reward_model.py"
            elif missing:  # transformers would go on with random values
                failure = f"the checkpoint lacks {missing[:3]}"
            state = with_adapters(model, full.state_dict(), seed=seed)
            measure = _plain_score if scores else _plain_logprobs
            expected = [measure(full, ids, mask) for ids, mask in zip(test_ids, masks, strict=True)]
            # Buffers that no checkpoint stores (rotary frequencies) are lost on the meta device.
            buffers = {key: value.cpu() for key, value in full.named_buffers()}
        except (OSError, ValueError, RuntimeError, SafetensorError) as error:
            failure = str(error)
    # All ranks learn how it went before the first collective that needs the weights.
    outcome: list[Any] = [failure, buffers, clear_head]
    dist.broadcast_object_list(outcome, src=0, device=torch.device("cpu"))
    failure, buffers, clear_head = outcome
    if failure is not None:
        raise ValueError(f"{flag}={name}: {failure}")
    set_model_state_dict(
        model,
        state,
        options=StateDictOptions(full_state_dict=True, broadcast_from_rank0=True, strict=True),
    )
    for key, value in buffers.items():
        module_name, _, leaf = key.rpartition(".")
        setattr(model.get_submodule(module_name), leaf, value.to(env.device))

    # A packed row against plain transformers. An architecture may mix tokens in other ways than
    # attention (state spaces, ALiBi, sinks) or scale its logits; then packing would be wrong.
    row = pack(range(len(test_ids)), test_ids, masks, shared=shared)
    with torch.no_grad():
        if scores:
            ours = compute_scores(model.eval(), row.to(env.device)).cpu()
        else:
            ours = torch.cat(row.split(compute_logprobs(model.eval(), row.to(env.device))[0].cpu()))
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()  # the optimizer must find the fp32 shards, not their gathered copies
    if env.rank == 0:
        theirs = torch.cat(expected)
        gaps = (ours - theirs).abs()
        scale = 1 + theirs.abs().max()
        # A score is a sum that nearly cancels: 8e-6 of rounding in one of 2, of a 135M model.
        gap, limit = gaps.max(), (1e-4 if scores else 2e-5) * scale
        if not exact:  # nor has it a scale of its own, as a log-prob has
            gap, limit = gaps.mean(), 0.15 * (scale if scores else torch.ones(()))
        if not theirs.isfinite().all():
            failure = "plain transformers computes NaN with it; are all its weights finite?"
        elif not gap <= limit:
            failure = (
                f"its {'scores' if scores else 'log-probs'} in packed rows differ from plain "
                f"transformers by {gap:.2g}; "
                f"{type(model).__name__.removeprefix('FSDP')} computes something that common/ lacks"
            )
    outcome = [failure]
    dist.broadcast_object_list(outcome, src=0, device=torch.device("cpu"))
    if outcome[0] is not None:
        raise ValueError(f"{flag}={name}: {outcome[0]}")
    if clear_head:  # only now: the scores of a head of zeros would have proven nothing
        head = score_head(model)
        assert head is not None
        nn.init.zeros_(head.weight)


def _read_checkpoint(
    name: str, config_class: type[PretrainedConfig], dtype: torch.dtype, *, scores: bool
) -> tuple[PreTrainedModel, list[str]]:
    """The plain model in host memory, and the names of what the checkpoint does not have."""
    reader: Any = AutoModelForCausalLM
    settings: dict[str, Any] = {}
    if scores:
        # The same class, but it reads the head in fp32 whatever the others are read in.
        plain: Any = MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING[config_class]
        reader = type(plain.__name__, (plain,), {"_keep_in_fp32_modules_strict": {"score"}})
        settings["num_labels"] = 1
    with torch.random.fork_rng(devices=[]):  # transformers draws what is missing
        full, report = reader.from_pretrained(
            name,
            dtype=dtype,
            attn_implementation="eager",  # what the others leave out (soft caps) it has
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # they are reported, and refused below
            **settings,
        )
    for key, *shapes in report["mismatched_keys"]:
        found, wanted = (tuple(shape) for shape in shapes)
        raise ValueError(f"{key} has the shape {found} in the checkpoint, not {wanted}")
    if scores:
        if any(key.startswith("score.") for key in report["unexpected_keys"]):
            raise ValueError("its head is not that of a sequence classifier")
        full.score.float().register_forward_pre_hook(lambda _, inputs: inputs[0].float())
        # or a sequence that happens to end with this token would be scored elsewhere
        full.config.get_text_config().pad_token_id = None
    return full.eval(), sorted(report["missing_keys"])


@torch.no_grad()
def _draw_head(model: PreTrainedModel, seed: int) -> None:
    """Values of a new score head, N(0, 1 / (D + 1)), which depend on the seed alone."""
    head = score_head(model)
    assert head is not None
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(head.weight.shape, generator=generator)
    head.weight.copy_(values * (head.in_features + 1) ** -0.5)


@torch.no_grad()
def _plain_logprobs(model: PreTrainedModel, ids: list[int], mask: list[bool]) -> Tensor:
    """Log-probs of a sequence's trained tokens by the model's own forward."""
    logits = model(torch.tensor([ids]), use_cache=False).logits[0, :-1].float()
    logprobs = logits.log_softmax(-1).gather(1, torch.tensor(ids[1:])[:, None])[:, 0]
    return logprobs[torch.tensor(mask[1:])]


@torch.no_grad()
def _plain_score(model: PreTrainedModel, ids: list[int], mask: list[bool]) -> Tensor:
    """(1,) score of a whole sequence by the model's own forward; the mask plays no part."""
    return model(torch.tensor([ids]), use_cache=False).logits[0].float()


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
    score_bias: float | None = None,
) -> None:
    """Write a checkpoint that transformers and vLLM load as it is.  # collective: all ranks

    It is written beside `path` and renamed, so a folder of that name is always whole. A reward
    model becomes a sequence classifier with one output, to which no loader applies a sigmoid.

    Args:
        model, tokenizer: what to write; the tokenizer brings its chat template.
        tensors: every full tensor by HF name (`weight_sync.stream_full_tensors`).
        path: folder to write; an older one is replaced.
        source: the checkpoint the run started from, whose config is kept.
        stop_token_ids: ids that end a response, for a language model's generation config. A reward
            model's tokenizer must pad with another one (`choose_pad_token`).
        score_bias: what is to be added to a reward model's scores, written into the config: the
            head itself has no bias.
    """
    if score_head(model) is not None:
        ends = (None, tokenizer.eos_token_id, *stop_token_ids)
        assert tokenizer.pad_token_id not in ends, "choose_pad_token comes first"
    _write_folder(
        path,
        tensors,
        lambda folder, state: _write_checkpoint(
            model, tokenizer, state, folder, source, stop_token_ids, score_bias
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
        partial = path.with_name(path.name + ".partial")
        try:
            shutil.rmtree(partial, ignore_errors=True)
            write(partial, state)
            replace_folder(partial, path)
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
    score_bias: float | None,
) -> None:
    dtype = next(iter(state.values())).dtype
    model.save_pretrained(folder, state_dict=state)
    tokenizer.save_pretrained(folder)
    # The model's own config describes the fp32 masters; the user's describes the checkpoint.
    config = AutoConfig.from_pretrained(source)
    config.architectures = model.config.architectures
    config.dtype = dtype
    if score_head(model) is not None:
        config.num_labels = 1
        config.problem_type = "regression"  # without it, pipeline() and vLLM apply a sigmoid
        # The classifier looks for padding by the text part's id, the tokenizer pads by its own.
        config.pad_token_id = tokenizer.pad_token_id
        config.get_text_config().pad_token_id = tokenizer.pad_token_id
        config.score_bias = score_bias
        config.save_pretrained(folder)
        return
    config.save_pretrained(folder)
    # Sampling fields of published generation configs are often inconsistent, and saving such a
    # one raises after days of training. Only what ends or pads a response is kept.
    GenerationConfig(
        bos_token_id=tokenizer.bos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=stop_token_ids,
    ).save_pretrained(folder)
