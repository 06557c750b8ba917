"""A run's trained parameters, optimizers and counters -> a folder, and back into the same objects.

Every rank writes its own shards (torch.distributed.checkpoint), and any number of ranks reads them.
"""

import json
import os
import pickle
import shutil
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.fsdp import FSDPModule
from transformers import PreTrainedModel

from common.dist import from_rank0
from common.lora import clean_name

Models = Mapping[str, tuple[PreTrainedModel, torch.optim.Optimizer]]
Groups = list[dict[str, Any]]
"""an optimizer's param_groups, with parameters by name"""

_SCHEDULED = ("lr", "initial_lr")  # of a parameter group; they belong to the scheduler


def save_checkpoint(path: Path, models: Models, extra: Mapping[str, Any]) -> None:
    """Write all that a run needs to go on from here.  # collective: all ranks

    Call it between optimizer steps: gradients are not kept. Nor are frozen parameters, the base
    under LoRA: they are those of the checkpoint the run started from. The folder is written as
    `<path>.partial` and renamed when every rank is done, so what has its final name is whole.

    Args:
        path: folder to write, on a file system that all ranks share; an older one is replaced.
        models: name (without slashes) -> a model, sharded or not, and the optimizer of all that it
            trains, which may have no state yet.
        extra: values for `extra.json`, which come back as they are: floats to the last bit, NaN and
            infinity too. Rank 0's are written.

    Raises:
        ValueError: JSON would not give back `extra` as it is; on all ranks.
        RuntimeError: a rank could not write; on all ranks. An older checkpoint stays.
    """
    tensors: dict[str, Tensor] = {}
    groups: dict[str, Groups] = {}
    for name, (model, optimizer) in models.items():
        trained = _trained(model, optimizer)
        groups[name] = _groups(optimizer, list(trained))
        for parameter_name, parameter in trained.items():
            tensors[f"{name}/parameters/{parameter_name}"] = parameter.detach()
            # Not get_optimizer_state_dict(): it lets an optimizer without state make a step, after
            # which AdamW corrects its moments' bias otherwise than one that has not made it.
            for key, value in optimizer.state.get(parameter, {}).items():
                assert isinstance(value, Tensor), f"optimizer state {key} is no tensor"
                tensors[f"{name}/optimizer/{parameter_name}/{key}"] = value
    partial = path.with_name(path.name + ".partial")

    def prepare() -> None:
        texts = {"extra.json": _exact_json(extra), "optimizers.json": json.dumps(groups, indent=1)}
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        for file_name, text in texts.items():
            with (partial / file_name).open("w") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())  # as DCP does: it is not only processes that die

    try:
        from_rank0(prepare)
        _run(dcp.save, tensors, storage_writer=dcp.FileSystemWriter(partial))
        from_rank0(lambda: replace_folder(partial, path))
    except (OSError, CheckpointException) as error:
        raise RuntimeError(f"could not write {path}: {_reason(error)}") from error


def load_checkpoint(path: Path, models: Models) -> dict[str, Any]:
    """Bring models and optimizers back to where they were saved.  # collective: all ranks

    Parameters keep their storage. All steps from here on are bitwise those that followed the save,
    if the hardware computes the same thing twice. An optimizer gets back everything it held, which
    may be no state at all, except learning rates (`lr` and `initial_lr` of its groups): they are
    the scheduler's. A resumed run brings its scheduler to the right step by itself; one that rolls
    back may go on along its schedule. Gradients are dropped.

    Args:
        path: written by `save_checkpoint`, by any number of ranks.
        models: the same names, with models and optimizers built as those that were saved.

    Returns:
        `extra` as it was saved, on every rank.

    Raises:
        ValueError: `path` is no checkpoint, or belongs to other models, or (parameters may then be
            a mixture of old and new) its data cannot be read; on all ranks.
    """
    trained = {name: _trained(*pair) for name, pair in models.items()}
    # Rank 0 looks for all: where one rank sees no checkpoint, none may wait for it.
    extra, groups, saved = from_rank0(lambda: _inspect(path, models, trained))
    tensors: dict[str, Tensor] = {}
    states: dict[str, dict[str, dict[str, Tensor]]] = {name: {} for name in models}
    for saved_name, (shape, dtype) in saved.items():
        name, _, parameter_name, *key = saved_name.split("/")
        parameter = trained[name][parameter_name]
        if not key:
            tensors[saved_name] = parameter.detach()
            continue
        tensor = models[name][1].state.get(parameter, {}).get(key[0])  # needs no second memory
        if tensor is None and shape == parameter.shape:
            tensor = torch.zeros_like(parameter, dtype=dtype, requires_grad=False)
        elif tensor is None:
            tensor = torch.zeros(shape, dtype=dtype)  # load_state_dict() knows its device
        tensors[saved_name] = tensor
        states[name].setdefault(parameter_name, {})[key[0]] = tensor
    try:
        _run(dcp.load, tensors, storage_reader=dcp.FileSystemReader(path))
    except CheckpointException as error:
        raise ValueError(f"{path} cannot be read: {_reason(error)}") from error
    for name, (_, optimizer) in models.items():
        kept = [
            {
                key: tuple(value) if isinstance(value, list) else value
                for key, value in group.items()
            }
            | {key: live[key] for key in _SCHEDULED if key in live}
            for group, live in zip(groups[name], optimizer.param_groups, strict=True)
        ]
        optimizer.load_state_dict({"state": states[name], "param_groups": kept})
        optimizer.zero_grad()
    return extra


def replace_folder(partial: Path, path: Path) -> None:
    """Give a finished folder its name, which an older one may have. Call it on one rank.

    Raises:
        OSError: it could not be renamed.
    """
    replaced = path.with_name(path.name + ".replaced")
    shutil.rmtree(replaced, ignore_errors=True)
    if path.exists():
        path.rename(replaced)
    partial.rename(path)
    shutil.rmtree(replaced, ignore_errors=True)


def _trained(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, nn.Parameter]:
    """Trained parameters by clean name, in the optimizer's order."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()  # a forward may have left full copies in the places of the shards
    names = {id(p): clean_name(n) for n, p in model.named_parameters() if p.requires_grad}
    trained = {names[id(p)]: p for group in optimizer.param_groups for p in group["params"]}
    assert len(trained) == len(names), "parameters without an optimizer would not be saved"
    return trained


def _groups(optimizer: torch.optim.Optimizer, names: list[str]) -> Groups:
    return [
        {key: value for key, value in group.items() if key not in _SCHEDULED}
        | {"params": [names[i] for i in group["params"]]}
        for group in optimizer.state_dict()["param_groups"]
    ]


def _exact_json(extra: Mapping[str, Any]) -> str:
    try:
        text = json.dumps(extra)
    except TypeError as error:
        raise ValueError(f"extra cannot be written as JSON: {error}") from error
    if repr(json.loads(text)) != repr(dict(extra)):  # by text, since no NaN equals another
        raise ValueError("extra has what JSON gives back otherwise, as tuples or numbers for keys")
    return text


def _inspect(
    path: Path, models: Models, trained: Mapping[str, Mapping[str, nn.Parameter]]
) -> tuple[dict[str, Any], dict[str, Groups], dict[str, tuple[torch.Size, torch.dtype]]]:
    """Extra values, parameter groups, shape and dtype of every tensor; checks that they fit."""
    try:
        extra = json.loads((path / "extra.json").read_text())
        groups = json.loads((path / "optimizers.json").read_text())
        metadata: dict[str, Any] = dcp.FileSystemReader(path).read_metadata().state_dict_metadata
    except (OSError, ValueError, EOFError, pickle.UnpicklingError) as error:
        raise ValueError(f"{path} is no checkpoint of a run: {error}") from error
    saved = {key: (tensor.size, tensor.properties.dtype) for key, tensor in metadata.items()}
    there = {key: value for key, value in saved.items() if "/parameters/" in key}
    here = {
        f"{name}/parameters/{parameter_name}": (parameter.shape, parameter.dtype)
        for name, parameters in trained.items()
        for parameter_name, parameter in parameters.items()
    }
    for key in sorted(there | here):
        found, wanted = (
            f"{tuple(of[key][0])} {of[key][1]}" if key in of else "missing" for of in (there, here)
        )
        if found != wanted:
            raise ValueError(f"{path} belongs to other models: {key} is {found}, here {wanted}")
    for name, (_, optimizer) in models.items():
        ours = [group["params"] for group in _groups(optimizer, list(trained[name]))]
        if ours != [group["params"] for group in groups[name]]:
            raise ValueError(f"{path}: {name} has its parameters in other groups of the optimizer")
    return extra, groups, saved


def _run(function: Callable[..., Any], tensors: dict[str, Tensor], **storage: Any) -> None:
    """`dcp.save` or `dcp.load`; what fails on one rank is raised on all."""
    with warnings.catch_warnings():
        # said of no_dist; dist.all_gather_objects tells why one rank avoids collectives
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        function(tensors, no_dist=dist.get_world_size() == 1, **storage)


def _reason(error: BaseException) -> str:
    """In one line: DCP's own text has the traces of all ranks."""
    rank = ""
    if isinstance(error, CheckpointException):
        number, (error, _) = min(error.failures.items())
        rank = f"rank {number}: "
    return f"{rank}{type(error).__name__}: {error}"
