"""Trainer's FSDP2 shards -> rollout engine: streamed in buckets, one all-gather each."""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Shard
from torch.utils._python_dispatch import TorchDispatchMode

from common.lora import (
    Adapter,
    adapted_layers,
    adapter_names,
    clean_name,
    make_adapter,
    trained_names,
)

if TYPE_CHECKING:
    from common.engine import Engine

BUCKET_BYTES = 256 * 2**20


class WeightSync:
    """Copies the trainer's weights into the rollout engine, and counts how often it has."""

    version: int = 0
    """number of syncs so far; 0 means that the engine has no weights yet"""

    def __init__(self, model: nn.Module, engine: Engine, bucket_bytes: int = BUCKET_BYTES) -> None:
        self.model = model
        self.engine = engine
        self.bucket_bytes = bucket_bytes

    def sync(self) -> None:
        """Replace all weights of the engine by the trainer's.  # collective: all ranks

        Raises:
            RuntimeError: an engine parameter did not arrive in full, or a tensor has no place in
                the engine (see Engine.load_weights). Fatal: the engine cannot be used afterwards.
        """
        self.engine.load_weights(
            stream_full_tensors(
                self.model,
                dtype=self.engine.dtype,
                bucket_bytes=self.bucket_bytes,
                alias_lm_head=self.engine.needs_lm_head_alias,
            )
        )
        self.version += 1


def stream_full_tensors(
    model: nn.Module,
    *,
    dtype: torch.dtype,
    bucket_bytes: int = BUCKET_BYTES,
    alias_lm_head: bool = False,
) -> Iterator[tuple[str, Tensor]]:
    """Yield (Hugging Face name, full tensor) of every parameter.  # collective: all ranks

    Shards are cast first and sent flattened, many in one all-gather: one gather per parameter would
    pay the latency hundreds of times. Peak extra memory is about one bucket, with LoRA also the
    gathered adapters. All ranks must consume the stream to its end.

    A layer with an adapter yields W + scaling * B A under the plain layer's name, added up in f32
    in a copy: W keeps its bits.

    Args:
        model: plain, or sharded by FSDP2 on dim 0 (also HSDP: gathers within one replica only).
        dtype: of the yielded tensors.
        bucket_bytes: size of the gathered buffer; a larger parameter is a bucket of its own.
        alias_lm_head: yield a tied output head under its own name too (some engines keep a copy).

    Yields:
        Names without wrapper prefixes, detached tensors on the mesh's device. Tied parameters
        come once. A tensor may share memory with the parameter or the bucket: copy, do not keep.
    """
    layers = adapted_layers(model)
    gathered = dict(stream_adapters(model, bucket_bytes=bucket_bytes))
    adapters: dict[str, Adapter] = {}  # by the name of the weight that they add to
    merged: set[str] = set()  # matrices that have no name of their own in the stream
    for name, layer in layers.items():
        name_a, name_b = adapter_names(name)
        adapters[f"{name}.weight"] = make_adapter(layer, gathered[name_a], gathered[name_b])
        merged |= {name_a, name_b}
    base = (
        _Source(names, parameter, adapters.get(names[0]))
        for names, parameter in _named_parameters(model, alias_lm_head)
        if names[0] not in merged
    )
    yield from _gather(base, dtype, bucket_bytes)


def stream_adapters(
    model: nn.Module, *, bucket_bytes: int = BUCKET_BYTES
) -> Iterator[tuple[str, Tensor]]:
    """Yield (name, full f32 tensor) of what a LoRA run trains.  # collective: all ranks

    Names as in `lora.trained_names`; nothing comes from a model without adapters.
    """
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()  # a forward may have left full copies, older than the shards
    wanted = trained_names(model)
    adapters = (
        _Source(names, parameter)
        for names, parameter in _named_parameters(model, alias_lm_head=False)
        if names[0] in wanted
    )
    yield from _gather(adapters, torch.float32, bucket_bytes)


@dataclass
class _Source:
    """A parameter, the names it travels under, and what is added to it on the way."""

    names: list[str]
    parameter: Tensor
    adapter: Adapter | None = None

    def merged(self, rows: Tensor, first_row: int = 0) -> Tensor:
        if self.adapter is None:
            return rows
        return self.adapter.merged(rows.to(self.adapter.a.device), first_row)


def _gather(
    sources: Iterable[_Source], dtype: torch.dtype, bucket_bytes: int
) -> Iterator[tuple[str, Tensor]]:
    bucket = _Bucket()
    for source in sources:
        group = _shard_group(source.parameter)
        if group is None:
            full = source.merged(_whole(source.parameter)).to(dtype)
            yield from ((name, full.detach()) for name in source.names)
            continue
        assert isinstance(source.parameter, DTensor)
        shard = _Shard(source, source.parameter, _chunk_rows(source.parameter, group))
        total_bytes = (bucket.numel + shard.numel) * group.size() * dtype.itemsize
        if bucket.shards and (bucket.group != group or total_bytes > bucket_bytes):
            yield from bucket.gather(dtype)
            bucket = _Bucket()
        bucket.group = group
        bucket.shards.append(shard)
    if bucket.shards:
        yield from bucket.gather(dtype)


@dataclass
class _Shard:
    """This rank's rows of one parameter: a dim-0 chunk, the last ones shorter or empty."""

    source: _Source
    parameter: DTensor
    chunk_rows: int

    @property
    def numel(self) -> int:
        return self.chunk_rows * self.parameter.shape[1:].numel()


@dataclass
class _Bucket:
    """Parameters that travel in one all-gather over one group."""

    group: dist.ProcessGroup | None = None
    shards: list[_Shard] = field(default_factory=list[_Shard])

    @property
    def numel(self) -> int:
        return sum(shard.numel for shard in self.shards)

    def gather(self, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
        assert self.group is not None
        device = torch.device(self.shards[0].parameter.device_mesh.device_type)
        sent = torch.empty(self.numel, dtype=dtype, device=device)
        offset = 0
        for shard in self.shards:
            first_row = _first_local_row(shard.parameter)
            local = shard.source.merged(shard.parameter.to_local(), first_row)
            sent[offset : offset + local.numel()].copy_(local.reshape(-1))  # casts; rest is padding
            offset += shard.numel
        gathered = sent.new_empty(self.group.size() * self.numel)
        dist.all_gather_single(gathered, sent, group=self.group)
        gathered = gathered.view(self.group.size(), self.numel)
        offset = 0
        for shard in self.shards:
            # Chunks are in rank order and only the tail is padding, so rows need no reordering.
            chunks = gathered[:, offset : offset + shard.numel]
            rows, *rest = shard.parameter.shape
            full = chunks.reshape(-1, *rest)[:rows]
            yield from ((name, full.detach()) for name in shard.source.names)
            offset += shard.numel


def _shard_group(parameter: Tensor) -> dist.ProcessGroup | None:
    """The ranks that hold the parts of dim 0, or None if this is not how the tensor is laid out."""
    if not isinstance(parameter, DTensor):
        return None
    sharded = [i for i, p in enumerate(parameter.placements) if not p.is_replicate()]
    if len(sharded) != 1 or parameter.placements[sharded[0]] != Shard(0):
        return None
    group = parameter.device_mesh.get_group(sharded[0])
    return group if group.size() > 1 else None


def _first_local_row(parameter: Tensor) -> int:
    """Where in the full tensor this rank's rows start."""
    group = _shard_group(parameter)
    return 0 if group is None else group.rank() * _chunk_rows(parameter, group)


def _chunk_rows(parameter: Tensor, group: dist.ProcessGroup) -> int:
    """Rows of a full chunk; ranks at the end may hold fewer."""
    return -(-parameter.shape[0] // group.size())


def _whole(parameter: Tensor) -> Tensor:
    """The full tensor of a parameter that no bucket gathers."""
    if not isinstance(parameter, DTensor):
        return parameter
    mesh = parameter.device_mesh
    whole = parameter.to_local() if mesh.size() == 1 else parameter.full_tensor()
    return whole.to(mesh.device_type)  # with CPU offload, shards are in host memory


def _named_parameters(model: nn.Module, alias_lm_head: bool) -> Iterator[tuple[list[str], Tensor]]:
    """Each parameter once, with the names it travels under; same order on every rank."""
    names: dict[int, list[str]] = {}
    parameters: dict[int, Tensor] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        name = clean_name(name)
        if id(parameter) not in parameters:
            parameters[id(parameter)] = parameter.detach()
            names[id(parameter)] = [name]
        elif alias_lm_head and name.endswith("lm_head.weight"):
            names[id(parameter)].append(name)
    for key, tensor in parameters.items():
        yield names[key], tensor


class _CopyCounter(TorchDispatchMode):
    """Counts copies, so that a tensor from which no weight loader copied can be named."""

    def __init__(self) -> None:
        super().__init__()
        self.copies = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        self.copies += func is torch.ops.aten.copy_.default
        return func(*args, **(kwargs or {}))


def reload_vllm(worker: Any, named_tensors: Iterator[tuple[str, Tensor]]) -> None:
    """vLLM's own `reload_weights`, and between its steps the proof that it was complete.

    vLLM counts, per module, the elements that its weight loaders copy, and finishes the module when
    all have come. A module that still waits after the last tensor misses some; vLLM itself would
    only warn and keep the old values. It also drops some unknown tensors silently (any `.bias`).
    """
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.model_loader.reload import (
        finalize_layerwise_reload,
        initialize_layerwise_reload,
    )

    model = worker.get_model()
    counter = _CopyCounter()
    sent: list[str] = []
    unused: list[str] = []

    def watched() -> Iterator[tuple[str, Tensor]]:
        for name, tensor in named_tensors:
            sent.append(name)
            before = counter.copies
            yield name, tensor
            if counter.copies == before:
                unused.append(name)

    with set_current_vllm_config(worker.vllm_config):
        initialize_layerwise_reload(model)
        try:
            with counter:
                model.load_weights(watched())
        except (ValueError, KeyError) as error:
            raise RuntimeError(f"the engine has no place for the tensor {sent[-1]}") from error
        prove_complete(_missing_elements(model), unused)
        finalize_layerwise_reload(model, worker.model_config)


def _missing_elements(model: nn.Module) -> list[str]:
    """Engine parameters that have not received all elements in the reload that is under way."""
    from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
    from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info
    from vllm.model_executor.model_loader.reload.meta import get_numel_loaded

    missing: list[str] = []
    for prefix, module in model.named_modules():
        info = get_layerwise_info(module)
        if not info.can_load():  # every element came, and vLLM has finished the module
            continue
        received: Counter[str] = Counter()
        for name, arguments in info.loaded_weights:
            loader = inspect.unwrap(getattr(module, name).weight_loader)
            received[name] += get_numel_loaded(loader, arguments)[0]
        for name, parameter in module.named_parameters(recurse=False):
            expected = parameter.numel()
            if isinstance(module, VocabParallelEmbedding) and parameter.ndim == 2:
                # Rows above the vocabulary are padding, which loaders fill with zeros.
                expected = module.shard_indices.num_org_elements * parameter.shape[1]
            if received[name] < expected:
                missing.append(f"{prefix}.{name} ({received[name]} of {expected} elements)")
    return missing


def unique(named_tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """Refuse a name that comes twice: counts of elements prove nothing with repeats among them."""
    seen: set[str] = set()
    for name, tensor in named_tensors:
        if name in seen:
            raise RuntimeError(f"weight sync sent {name} twice")
        seen.add(name)
        yield name, tensor


def prove_complete(missing: list[str], unused: list[str]) -> None:
    """Raise RuntimeError unless both lists, of engine parameters and of tensors sent, are empty."""
    if missing or unused:
        raise RuntimeError(
            f"incomplete weight sync. Engine parameters that did not arrive: {missing or 'none'}; "
            f"tensors that the engine has no place for: {unused or 'none'}"
        )
