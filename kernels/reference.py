"""The equations that define the kernels, as short and naive as possible. Tests compare with these.

Dims: T tokens, D hidden size, V vocabulary.
"""

import torch
from torch import Tensor


def fused_logprobs(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    temperature: float,
    bias: Tensor | None = None,
    softcap: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Log-probability of each target and entropy of its distribution, from the full logits.

    The definition of `kernels.logprob.fused_logprobs`; materialises several (T, V) tensors.

    Args:
        hidden, weight, bias: (T, D), (V, D), (V,) of one dtype; float64 gives the ground truth.
        targets: (T,) i64 in [0, V), or -1: that row's outputs are 0 and carry no gradient.
        temperature: divides the logits, after the softcap.
        softcap: logits become softcap * tanh(logits / softcap) (Gemma 2).

    Returns:
        logprobs, entropy: (T,), (T,) in nats; f64 for f64 operands, else f32.
    """
    logits = torch.nn.functional.linear(hidden, weight, bias)  # (T, V)
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    all_logprobs = torch.log_softmax(logits / temperature, dim=-1)
    logprobs = all_logprobs.gather(1, targets.clamp(min=0)[:, None])[:, 0]
    entropy = -(all_logprobs.exp() * all_logprobs).sum(dim=-1)
    ignored = targets == -1
    return logprobs.masked_fill(ignored, 0.0), entropy.masked_fill(ignored, 0.0)
