"""torchrun's environment (or a plain `python x.py`) -> process group, mesh, error report."""

import contextlib
import ctypes
import datetime
import io
import itertools
import os
import pickle
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

import torch
import torch.distributed as dist
import tyro
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

T = TypeVar("T")

_from_rank0_calls = itertools.count()
_REPOSITORY = str(Path(__file__).resolve().parent.parent)


@dataclass(frozen=True)
class DistEnv:
    """Where this process stands.

    `mesh` has the dimensions ("replicate", "shard"): parameters are sharded over "shard" and
    replicated over "replicate" (HSDP); data is split over both.
    """

    rank: int
    world_size: int
    local_rank: int
    device: torch.device
    mesh: DeviceMesh


ArgsT = TypeVar("ArgsT")


def parse_args(cls: type[ArgsT]) -> ArgsT:
    """Flags of the command line -> `cls`. A mistake is told once, by rank 0, and ends all ranks."""
    if os.environ.get("RANK", "0") == "0":
        return tyro.cli(cls, use_underscores=True)
    try:
        with contextlib.redirect_stderr(io.StringIO()), contextlib.redirect_stdout(io.StringIO()):
            return tyro.cli(cls, use_underscores=True)
    except SystemExit:
        _let_rank_0_speak()
        raise


def _let_rank_0_speak() -> None:
    """torchrun ends all ranks as soon as one exits; rank 0 may be slower and has the message."""
    time.sleep(5)


def setup(*, timeout_s: float, replicas: int = 1) -> DistEnv:
    """Create the default process group and the device mesh.  # collective: all ranks

    Args:
        timeout_s: seconds after which a collective that not all ranks have reached fails.
        replicas: number of full copies of the sharded model (HSDP); 1 shards over all ranks.

    Raises:
        ValueError: `replicas` does not divide the number of ranks.
    """
    world_size = int(os.environ.get("WORLD_SIZE", 1))
    if world_size % replicas:
        raise ValueError(f"--replicas={replicas} must divide the number of ranks ({world_size})")
    cuda = torch.cuda.is_available()
    local_rank = int(os.environ.get("LOCAL_RANK", 0))
    device = torch.device("cuda", local_rank) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    backend = "cpu:gloo,cuda:nccl" if cuda else "gloo"
    timeout = datetime.timedelta(seconds=timeout_s)
    if "TORCHELASTIC_RUN_ID" in os.environ and sys.platform == "linux":
        # A killed torchrun must not leave its ranks behind: SIGTERM (15) when the parent dies.
        ctypes.CDLL(None).prctl(1, 15)
    if "RANK" in os.environ:
        dist.init_process_group(backend, timeout=timeout)
    else:  # plain python: an in-process store needs no port, so any number of jobs can run at once
        os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1")  # vLLM's launcher reads these
        dist.init_process_group(
            backend, store=dist.HashStore(), rank=0, world_size=1, timeout=timeout
        )
    sys.excepthook = _report_first_error  # init_process_group has put its own in place
    mesh = init_device_mesh(
        device.type,
        (replicas, world_size // replicas),
        mesh_dim_names=("replicate", "shard"),
    )
    return DistEnv(dist.get_rank(), world_size, local_rank, device, mesh)


def print0(*values: object) -> None:
    """Print on rank 0 only."""
    if dist.get_rank() == 0:
        print(*values, flush=True)


def all_gather_objects(value: Any) -> list[Any]:
    """Every rank's picklable `value`, in rank order, on every rank.  # collective: all ranks"""
    if dist.get_world_size() == 1:
        # Not just a shortcut: gloo's thread would copy the bytes with an OpenMP team of its own,
        # and with more teams than cores libgomp stops spinning (common/__init__.py) for good.
        return [value]
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, value)
    return gathered


def from_rank0(work: Callable[[], T]) -> T:
    """Let rank 0 do something, and give its result to every rank.  # collective: all ranks

    The others wait without a collective, so that the work may take longer than the time-out.

    Args:
        work: runs on rank 0 only; its result is pickled, so keep it small.
    Returns:
        Rank 0's result.
    Raises:
        Exception: whatever `work` raises on rank 0, on every rank.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return work()
    store = dist.distributed_c10d._get_default_store()  # pyright: ignore[reportPrivateUsage]
    # every rank counts its own calls: they are made in the same order everywhere
    key = f"unroll/from_rank0/{next(_from_rank0_calls)}"
    if dist.get_rank() != 0:
        while not store.check([key]):
            time.sleep(0.1)
        result, error = pickle.loads(store.get(key))
        if error is not None:
            raise error
        return result
    try:
        result = work()
    except Exception as error:
        try:
            outcome = pickle.dumps((None, error))
            pickle.loads(outcome)  # not every exception survives
        except Exception:  # noqa: BLE001  whatever its class does when it is pickled
            outcome = pickle.dumps((None, RuntimeError(f"{type(error).__name__}: {error}")))
        store.set(key, outcome)  # pyright: ignore[reportArgumentType]  bytes are fine
        raise
    store.set(key, pickle.dumps((result, None)))  # pyright: ignore[reportArgumentType]
    return result


def shutdown() -> None:
    """Leave the process group after the last collective.  # collective: all ranks"""
    if dist.is_initialized():  # vLLM's shutdown may already have destroyed it
        dist.destroy_process_group()
    # A gloo thread wakes us when a collective is done, and only then frees its tensors, for which
    # it needs the GIL. Should the interpreter be finalizing by then, Python ends that thread in the
    # middle of a C++ destructor, and the finished run aborts (SIGABRT; 1 run in 15 on busy cores).
    # torch has no call that waits for those threads, so let them have the GIL for a moment.
    time.sleep(0.2)


def _report_first_error(
    kind: type[BaseException], error: BaseException, trace: TracebackType | None
) -> None:
    """Print the first error of the job in full, and one line for those that follow from it.

    A rank that dies breaks the connections of the others, whose tracebacks would bury the cause.
    A `ValueError` raised by our own code is a message to the user and needs no traceback.
    """
    rank = os.environ.get("RANK", "0")
    if dist.is_initialized():
        try:
            store = dist.distributed_c10d._get_default_store()  # pyright: ignore[reportPrivateUsage]
            first = store.add("unroll/errors", 1) == 1
        except RuntimeError:  # the store died with the rank that held it
            first = False
    else:  # flags are checked before the group exists, by all ranks alike
        first = rank == "0"
        if not first:
            _let_rank_0_speak()
            return
    frame = traceback.extract_tb(trace)[-1] if trace else None
    raised_in = frame.filename if frame else ""
    ours = raised_in.startswith(_REPOSITORY) and "site-packages" not in raised_in
    if issubclass(kind, KeyboardInterrupt):
        print(f"[rank {rank}] interrupted", file=sys.stderr)
    elif not first:
        reason = str(error).partition("\n")[0][:100]
        print(f"[rank {rank}] stopped as well: {kind.__name__}: {reason}", file=sys.stderr)
    elif issubclass(kind, ValueError) and ours:
        where = f"{Path(raised_in).name}:{frame.lineno}" if frame else ""
        print(f"[rank {rank}] error: {error}  [{where}]", file=sys.stderr)
    else:
        print(f"[rank {rank}] error:", file=sys.stderr)
        traceback.print_exception(kind, error, trace)
    sys.stderr.flush()


sys.excepthook = _report_first_error
