"""Packed rows -> log-probs and entropy of the policy, scores of a reward model, values of a critic.

Temperature is applied here and only here.
"""

from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, register_fsdp_forward_method
from transformers import PreTrainedModel

from common.packing import PackedRow
from kernels.logprob import fused_logprobs


class Boundaries:
    """What `model.packed_attention` must know about the sequences of a packed row.

    A plain class on purpose: torch.compile looks into lists, dataclasses and tuples that a layer
    hands on, and would compile it again for every row of other lengths.
    """

    def __init__(self, row: PackedRow) -> None:
        self.row = row


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


def compute_scores(model: PreTrainedModel, row: PackedRow) -> Tensor:
    """Scores of a packed row's sequences, read at their last tokens.  # collective: all ranks

    Args:
        model: from `model.load_model` with `head="score"`.
        row: S sequences on the model's device; where they end is known from their lengths, whatever
            tokens they end with.

    Returns:
        (S,) f32 in the order of the row's sequence_ids. A dummy row gives (0,); its backward runs
        as any other, since every rank has to take part.
    """
    return model.packed_scores(row)  # pyright: ignore[reportCallIssue]


def compute_values(model: PreTrainedModel, row: PackedRow) -> Tensor:
    """Values of a critic: its score head on every token's hidden state.  # collective: all ranks

    Args:
        model: from `model.load_model` with `head="score"`.
        row: T tokens on the model's device.

    Returns:
        (T,) f32, aligned to actions: entry t is V(the sequence up to and including t), which is the
        state in which target_ids[t] is chosen; 0, without gradient, outside the response_mask. A
        dummy row gives zeros; its backward runs as any other, since every rank has to take part.
    """
    return model.packed_values(row)  # pyright: ignore[reportCallIssue]


def score_head(model: nn.Module) -> nn.Linear | None:
    """The layer that makes a score of a hidden state; None in a language model.

    Transformers gives it this name in all decoders whose classifier is one linear layer.
    """
    head = getattr(model, "score", None)
    return head if isinstance(head, nn.Linear) else None


def add_packed_methods(model: PreTrainedModel) -> None:
    """Attach the forwards that the functions above call; after `fully_shard`.

    They are methods of the model because FSDP gathers the root's parameters (an output head among
    them) only around methods that it knows.
    """
    scalar = (_packed_scores, _packed_values)
    for function in (_packed_logprobs,) if score_head(model) is None else scalar:
        name = function.__name__.removeprefix("_")
        setattr(model, name, MethodType(function, model))
        if isinstance(model, FSDPModule):
            register_fsdp_forward_method(model, name)


def _last_hidden(model: PreTrainedModel, row: PackedRow) -> Tensor:
    """(T, D) hidden states of a row behind the decoder's last norm."""
    # use_cache=False and no attention_mask: either would make transformers ignore the row's
    # sequence boundaries. "packed" attention reads them from the extra keyword.
    output = model.get_decoder()(
        input_ids=row.input_ids[None],
        position_ids=row.position_ids[None],
        use_cache=False,
        boundaries=Boundaries(row),
    )
    return output.last_hidden_state[0].contiguous()


def _packed_logprobs(
    model: PreTrainedModel, row: PackedRow, temperature: float
) -> tuple[Tensor, Tensor]:
    head: Any = model.get_output_embeddings()
    return fused_logprobs(
        _last_hidden(model, row),
        head.weight,
        torch.where(row.response_mask, row.target_ids, -1),
        temperature=temperature,
        bias=getattr(head, "bias", None),
        softcap=getattr(model.config, "final_logit_softcapping", None),
    )


def _packed_scores(model: PreTrainedModel, row: PackedRow) -> Tensor:
    head = score_head(model)
    assert head is not None
    ends = row.cu_seqlens[1 : len(row.sequence_ids) + 1].long() - 1  # (S,)
    # Called as a module: FSDP keeps the head in a group of its own, which is not cast to bf16.
    scores = head(_last_hidden(model, row)[ends].float())  # (S, 1)
    return scores.sum(dim=1)  # and no view, which FSDP warns of


def _packed_values(model: PreTrainedModel, row: PackedRow) -> Tensor:
    head = score_head(model)
    assert head is not None
    values = head(_last_hidden(model, row).float()).sum(dim=1)  # (T,) f32, as for scores
    # Selected after the head, for all ranks and rows alike: to select before it is a host sync.
    return torch.where(row.response_mask, values, 0.0)
