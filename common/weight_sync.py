"""Trainer's FSDP2 shards -> rollout engine: streamed in buckets, one all-gather each."""

from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Shard

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
    pay the latency hundreds of times. Peak extra memory is about one bucket. All ranks must consume
    the stream to its end.

    Args:
        model: plain, or sharded by FSDP2 on dim 0 (also HSDP: gathers within one replica only).
        dtype: of the yielded tensors.
        bucket_bytes: size of the gathered buffer; a larger parameter is a bucket of its own.
        alias_lm_head: yield a tied output head under its own name too (some engines keep a copy).

    Yields:
        Names without wrapper prefixes, detached tensors on the parameter's device. Tied parameters
        come once. A tensor may share memory with the parameter or the bucket: copy, do not keep.
    """
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()  # a forward may have left full copies, older than the shards
    bucket = _Bucket()
    for names, parameter in _named_parameters(model, alias_lm_head):
        group = _shard_group(parameter)
        if group is None:
            tensor = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
            yield from ((name, tensor.to(dtype)) for name in names)
            continue
        shard = _Shard(names, parameter, chunk_rows=-(-parameter.shape[0] // group.size()))
        full = bucket.numel * group.size() + shard.numel * group.size()
        if bucket.shards and (bucket.group != group or full * dtype.itemsize > bucket_bytes):
            yield from bucket.gather(dtype)
            bucket = _Bucket()
        bucket.group = group
        bucket.shards.append(shard)
    if bucket.shards:
        yield from bucket.gather(dtype)


@dataclass
class _Shard:
    """This rank's rows of one parameter: a dim-0 chunk, the last ones shorter or empty."""

    names: list[str]
    parameter: DTensor
    chunk_rows: int  # rows of a full chunk; ranks at the end may hold fewer

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
            local = shard.parameter.to_local()
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
            yield from ((name, full.detach()) for name in shard.names)
            offset += shard.numel


def _shard_group(parameter: Tensor) -> dist.ProcessGroup | None:
    """The group over which dim 0 is split, or None if a bucket does not apply."""
    if not isinstance(parameter, DTensor):
        return None
    sharded = [i for i, p in enumerate(parameter.placements) if not p.is_replicate()]
    if len(sharded) != 1 or parameter.placements[sharded[0]] != Shard(0):
        return None
    return parameter.device_mesh.get_group(sharded[0])


def _named_parameters(model: nn.Module, alias_lm_head: bool) -> Iterator[tuple[list[str], Tensor]]:
    """Each parameter once, with the names it travels under; same order on every rank."""
    names: dict[int, list[str]] = {}
    parameters: dict[int, Tensor] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        name = name.replace("_checkpoint_wrapped_module.", "").replace("_orig_mod.", "")
        if id(parameter) not in parameters:
            parameters[id(parameter)] = parameter.detach()
            names[id(parameter)] = [name]
        elif alias_lm_head and name.endswith("lm_head.weight"):
            names[id(parameter)].append(name)
    for key, tensor in parameters.items():
        yield names[key], tensor
