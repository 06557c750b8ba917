"""LoRA (Hu et al. 2021, arXiv:2106.09685): frozen W, trained A and B, y = W x + scaling * B (A x).

The layers are peft's, put into the model in place: it stays the Hugging Face class that the other
modules know, and the adapters can be written in peft's format. There is no dropout: it would make
old and new log-probs differ by noise.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, inject_adapter_in_model
from peft.tuners.lora import Linear as LoraLinear
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from common.logprobs import score_head

_NAME = "default"  # peft's name of an adapter that is the only one


@dataclass(frozen=True)
class LoraSettings:
    """Which layers get adapters, and how large."""

    rank: int
    """rows of A and columns of B"""
    alpha: int
    """scaling is alpha / rank"""
    target: tuple[str, ...] = ()
    """last parts of module names, such as q_proj; empty: every linear layer of the decoder"""

    def __post_init__(self) -> None:
        """Refuse what no model could take; names the flag."""
        for flag, value in (("lora_rank", self.rank), ("lora_alpha", self.alpha)):
            if value < 1:
                raise ValueError(f"--{flag}={value} must be at least 1")


@dataclass(frozen=True)
class Adapter:
    """What one layer adds to its frozen weight, in full; tensors share one device."""

    a: Tensor
    """(rank, in) f32"""
    b: Tensor
    """(out, rank) f32"""
    scaling: float
    transposed: bool
    """the weight is stored as (in, out), as in GPT-2's Conv1D"""

    def merged(self, rows: Tensor, first_row: int) -> Tensor:
        """Some rows of W + scaling * B A.

        Args:
            rows: (n, columns) of the stored W, any float dtype.
            first_row: where in W they start.

        Returns:
            (n, columns) f32, a new tensor: W itself never changes, so nothing can drift.
        """
        chosen = slice(first_row, first_row + rows.shape[0])
        if self.transposed:
            update = self.a[:, chosen].T @ self.b.T
        else:
            update = self.b[chosen] @ self.a
        return rows.float() + self.scaling * update


def add_adapters(model: PreTrainedModel, settings: LoraSettings) -> None:
    """Put adapters into a model on the meta device, in place, and freeze all other parameters.

    A score head is not adapted but trained itself: there is nothing in it yet to keep. What is
    trained is float32 whatever the base has.

    Raises:
        ValueError: the target does not fit the model; names the flag.
    """
    target = _check_target(model, settings.target)
    config = LoraConfig(
        r=settings.rank,
        lora_alpha=settings.alpha,
        target_modules=target,
        lora_dropout=0.0,
        bias="none",
        fan_in_fan_out=any(isinstance(module, Conv1D) for module in model.modules()),
        init_lora_weights=False,  # values come with those of the checkpoint
        task_type="CAUSAL_LM" if score_head(model) is None else "SEQ_CLS",
    )
    with torch.device("meta"):
        inject_adapter_in_model(config, model)
    for layer in adapted_layers(model).values():
        layer.lora_A.float()
        layer.lora_B.float()
    if (head := score_head(model)) is not None:
        head.float().requires_grad_(True)


def _check_target(model: PreTrainedModel, target: tuple[str, ...]) -> list[str]:
    """Last parts of the names of the layers to adapt, sorted."""
    linear = (nn.Linear, Conv1D)
    inside = {id(module) for module in model.get_decoder().modules()}
    fitting: set[str] = set()
    others: set[str] = set()  # what an adapter must not or cannot go into
    for name, module in model.named_modules():
        fits = isinstance(module, linear) and id(module) in inside
        (fitting if fits else others).add(name.rpartition(".")[2])
    fitting -= others  # a name that also stands for something else would match both
    for name in target:
        if name not in fitting:
            what = "output head, embedding or other module" if name in others else "unknown name"
            raise ValueError(
                f"--lora_target={name}: {what}; the decoder's linear layers are "
                f"{', '.join(sorted(fitting))}"
            )
    return sorted(set(target) or fitting)


def clean_name(name: str) -> str:
    """Name of a module or parameter without what wrappers and adapters have put into it."""
    for inserted in ("_checkpoint_wrapped_module.", "_orig_mod.", "base_layer."):
        name = name.replace(inserted, "")
    return name


def adapted_layers(model: nn.Module) -> dict[str, LoraLinear]:
    """The layers that have adapters, by clean name; empty without LoRA."""
    return {
        clean_name(name): module
        for name, module in model.named_modules()
        if isinstance(module, LoraLinear)
    }


def adapter_names(layer_name: str) -> tuple[str, str]:
    """Clean parameter names of A and B of a layer."""
    return f"{layer_name}.lora_A.{_NAME}.weight", f"{layer_name}.lora_B.{_NAME}.weight"


def trained_names(model: nn.Module) -> set[str]:
    """Clean names of what a model with adapters trains: their matrices and a score head."""
    names = {name for layer in adapted_layers(model) for name in adapter_names(layer)}
    return names | {"score.weight"} if names and score_head(model) is not None else names


def make_adapter(layer: LoraLinear, a: Tensor, b: Tensor) -> Adapter:
    """A layer's adapter from its gathered matrices."""
    return Adapter(a, b, scaling=layer.scaling[_NAME], transposed=layer.fan_in_fan_out)


def with_adapters(
    model: PreTrainedModel, state: dict[str, Tensor], *, seed: int
) -> dict[str, Tensor]:
    """Turn a plain state dict into that of the model with adapters, which it fills in.

    A is Kaiming-uniform and B zero, as in peft, so that training starts from the plain model. The
    values depend on the seed and nothing else, not even on the global generator.

    Args:
        model: with adapters, on any device; only names and shapes are read.
        state: full tensors by plain name.
        seed: of A.
    """
    layers = adapted_layers(model)
    renamed: dict[str, Tensor] = {}
    for name, value in state.items():
        module_name, _, leaf = name.rpartition(".")
        renamed[f"{module_name}.base_layer.{leaf}" if module_name in layers else name] = value
    shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
    generator = torch.Generator().manual_seed(seed)
    for layer_name in layers:
        name_a, name_b = adapter_names(layer_name)
        a = torch.empty(shapes[name_a])
        renamed[name_a] = nn.init.kaiming_uniform_(a, a=math.sqrt(5), generator=generator)
        renamed[name_b] = torch.zeros(shapes[name_b])
    return renamed


def write_peft_folder(
    model: PreTrainedModel, state: dict[str, Tensor], folder: Path, *, base: str
) -> None:
    """Write what `peft.PeftModel.from_pretrained` reads.

    Args:
        model: with adapters; only their settings are read.
        state: full tensors by the names of `trained_names`.
        folder: created if missing.
        base: folder or hub name of the model that the adapters belong to.
    """
    configs: Any = model.peft_config
    config = replace(
        configs[_NAME],
        base_model_name_or_path=base,
        inference_mode=True,
        modules_to_save=None if score_head(model) is None else ["score"],
    )
    config.save_pretrained(folder)
    prefix = "base_model.model."  # peft's wrapper around the model, and the model in it
    tensors = {prefix + name.replace(f".{_NAME}.", "."): value for name, value in state.items()}
    save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})


@contextmanager
def adapters_off(model: nn.Module) -> Iterator[None]:
    """Inside, the model computes what its frozen base does: the reference policy of a LoRA run."""
    layers = adapted_layers(model).values()
    assert layers, "the model has no adapters"
    # Not peft's enable_adapters(): it also flips requires_grad, of whichever of a parameter's two
    # tensors (shard or gathered copy) FSDP has in place, and the adapters would no longer train.
    for layer in layers:
        layer._disable_adapters = True  # pyright: ignore[reportPrivateUsage]
    try:
        yield
    finally:
        for layer in layers:
            layer._disable_adapters = False  # pyright: ignore[reportPrivateUsage]
