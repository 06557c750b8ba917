"""Packed rows -> log-probs and entropy of the policy. Temperature is applied here and only here."""

from types import MethodType
from typing import Any

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule, register_fsdp_forward_method
from transformers import PreTrainedModel

from common.packing import PackedRow
from kernels.logprob import fused_logprobs


class Boundaries:
    """Where the sequences of a packed row start and end, for `model.packed_attention`.

    A plain class on purpose: torch.compile looks into lists, dataclasses and tuples that a layer
    hands on, and would compile it again for every row of other lengths.
    """

    def __init__(self, seqlens: list[int], cu_seqlens: Tensor) -> None:
        self.seqlens = seqlens  # (S,) tokens of each sequence
        self.cu_seqlens = cu_seqlens  # (S+1,) i32


def compute_logprobs(
    model: PreTrainedModel, row: PackedRow, *, temperature: float = 1.0
) -> tuple[Tensor, Tensor]:
    """Log-probs of a packed row's tokens, without ever holding the logits.  # collective: all ranks

    Args:
        model: from `model.load_model`.
        row: T tokens on the model's device; only positions in its response_mask are computed.
        temperature: divides the logits before the softmax.

    Returns:
        logprobs, entropy: (T,) f32 each, aligned to actions, 0 outside the response_mask.
    """
    return model.packed_logprobs(row, temperature)  # pyright: ignore[reportCallIssue]


def add_logprobs_method(model: PreTrainedModel) -> None:
    """Attach the forward that `compute_logprobs` calls; after `fully_shard`.

    It is a method of the model because FSDP gathers the root's parameters (the output head among
    them) only around methods that it knows.
    """
    method: Any = MethodType(_packed_logprobs, model)
    model.packed_logprobs = method
    if isinstance(model, FSDPModule):
        register_fsdp_forward_method(model, "packed_logprobs")


def _packed_logprobs(
    model: PreTrainedModel, row: PackedRow, temperature: float
) -> tuple[Tensor, Tensor]:
    # use_cache=False and no attention_mask: either would make transformers ignore the row's
    # sequence boundaries. "packed" attention reads them from the extra keyword.
    hidden = (
        model.get_decoder()(
            input_ids=row.input_ids[None],
            position_ids=row.position_ids[None],
            use_cache=False,
            boundaries=Boundaries(row.seqlens, row.cu_seqlens),
        )
        .last_hidden_state[0]
        .contiguous()
    )  # (T, D)
    head: Any = model.get_output_embeddings()
    return fused_logprobs(
        hidden,
        head.weight,
        torch.where(row.response_mask, row.target_ids, -1),
        temperature=temperature,
        bias=getattr(head, "bias", None),
        softcap=getattr(model.config, "final_logit_softcapping", None),
    )
