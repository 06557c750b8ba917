"""Log-probabilities and entropies of a language-model head without the (T, V) logits.

With z = logits / temperature, per token (target y, p = softmax(z)):

    logprob  = z_y - lse(z)              d logprob / dz = onehot(y) - p
    entropy  = lse(z) - sum(p z) = H     d entropy / dz = -p (log p + H)

Both are computed for a chunk of tokens at a time, and the backward makes each chunk's logits again:
memory beyond inputs, outputs and gradients is two (chunk, V) buffers, three with a softcap. The
price is a fourth matrix product on top of the three that keeping the logits needs. Where everything
fits one chunk, its logits are kept instead.

Dims: T tokens, N tokens that have a target, D hidden size, V vocabulary.
"""

import math
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

# Size of one (chunk, V) buffer of logits. Each chunk adds a (V, D) product to the weight gradient,
# whose memory traffic must stay small against its arithmetic: a GPU needs thousands of rows for
# that, a CPU about a hundred.
CPU_CHUNK_BYTES = 64 * 2**20
GPU_CHUNK_BYTES = 1024 * 2**20
MIN_CHUNK_ROWS = 16


def fused_logprobs(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    temperature: float,
    bias: Tensor | None = None,
    softcap: float | None = None,
    chunk_rows: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Log-probability of each target and entropy of its distribution; `reference.py` defines both.

    Differentiable once, through both outputs, with respect to hidden, weight and bias. Only rows
    that have a target pass through the head, so prompts and padding cost nothing.

    Precision: log-softmax and entropy are in f32 whatever the operands (f64 for f64 operands). For
    bf16 operands a CUDA device accumulates and returns the logits in f32; on the CPU the product
    itself comes back in bf16, as in eager code.

    Args:
        hidden: (T, D) float, final hidden states.
        weight: (V, D), the head's weight. Its gradient is summed over chunks in f32 at least.
        targets: (T,) i64 in [0, V), or -1: that row's outputs are 0 and carry no gradient.
        temperature: divides the logits, after the softcap; > 0.
        bias: (V,).
        softcap: logits become softcap * tanh(logits / softcap) before the temperature; > 0.
        chunk_rows: tokens per chunk, for tests and measurements. Default: as many as fit
            CPU_CHUNK_BYTES or GPU_CHUNK_BYTES of f32 logits, at least MIN_CHUNK_ROWS.

    Returns:
        logprobs, entropy: (T,), (T,) in nats; f64 for f64 operands, else f32.

    Raises:
        ValueError: shapes, dtypes or values do not fit together.
    """
    _check(hidden, weight, targets, bias, temperature, softcap, chunk_rows)
    rows = (targets != -1).nonzero().squeeze(1)  # (N,) i64; host sync on CUDA
    num_tokens = targets.numel()
    if chunk_rows is None:
        budget = GPU_CHUNK_BYTES if hidden.is_cuda else CPU_CHUNK_BYTES
        chunk_rows = max(MIN_CHUNK_ROWS, budget // (4 * weight.shape[0]))
        # Chunks of equal length: a short last one would cost as much weight traffic as a full one.
        num_chunks = max(1, math.ceil(rows.numel() / chunk_rows))
        chunk_rows = max(1, math.ceil(rows.numel() / num_chunks))
    if rows.numel() == num_tokens:
        return _Head.apply(hidden, weight, bias, targets, temperature, softcap, chunk_rows)
    # Selecting and scattering outside the Function leaves their gradients to autograd.
    logprobs, entropy = _Head.apply(
        hidden.index_select(0, rows),
        weight,
        bias,
        targets.index_select(0, rows),
        temperature,
        softcap,
        chunk_rows,
    )
    zeros = logprobs.new_zeros(num_tokens)
    return zeros.index_copy(0, rows, logprobs), zeros.index_copy(0, rows, entropy)


class _Head(torch.autograd.Function):
    """(N, D) x (V, D) -> logprobs, entropy (N,), for rows that all have a target."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        temperature: float,
        softcap: float | None,
        chunk_rows: int,
    ) -> tuple[Tensor, Tensor]:
        num_rows, vocab = hidden.shape[0], weight.shape[0]
        dtype = torch.promote_types(hidden.dtype, torch.float32)
        logprobs = hidden.new_empty(num_rows, dtype=dtype)
        entropy, row_max, sum_exp = (torch.empty_like(logprobs) for _ in range(3))
        # Reused by every chunk: on a CPU, fresh pages of this size cost as much as the arithmetic.
        shape = (min(chunk_rows, num_rows), vocab)
        logits_buffer, exp_buffer = (hidden.new_empty(shape, dtype=dtype) for _ in range(2))
        for start in range(0, num_rows, chunk_rows):
            chunk = slice(start, min(start + chunk_rows, num_rows))
            size = chunk.stop - start
            z = logits_buffer[:size]
            _logits(hidden[chunk], weight, bias, temperature, softcap, z)
            torch.amax(z, dim=1, out=row_max[chunk])
            z.sub_(row_max[chunk, None])
            e = torch.exp(z, out=exp_buffer[:size])
            torch.sum(e, dim=1, out=sum_exp[chunk])
            log_sum = sum_exp[chunk].log()
            logprobs[chunk] = z.gather(1, targets[chunk, None])[:, 0] - log_sum
            # With the maximum taken out, both terms are >= 0: nothing cancels.
            entropy[chunk] = log_sum - e.mul_(z).sum(dim=1) / sum_exp[chunk]
        ctx.set_materialize_grads(False)  # an output that the loss does not use costs nothing
        # The maximum and the sum are kept apart: one f32 logsumexp would carry an error that grows
        # with the size of the logits (5e-4 at 1e4) into every probability of the row.
        ctx.save_for_backward(hidden, weight, bias, targets, row_max, sum_exp, entropy)
        ctx.temperature, ctx.softcap, ctx.chunk_rows = temperature, softcap, chunk_rows
        # A single chunk's logits are kept for the backward (a quarter of the time at V = 512). A
        # plain attribute, since the backward overwrites them: see there.
        single = num_rows <= chunk_rows and softcap is None
        ctx.logits = logits_buffer if single else None
        return logprobs, entropy

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, grad_logprobs: Tensor | None, grad_entropy: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, targets, row_max, sum_exp, entropy = ctx.saved_tensors
        need_hidden, need_weight, need_bias = ctx.needs_input_grad[:3]
        if grad_logprobs is None and grad_entropy is None:
            return (None,) * 7
        num_rows, vocab = hidden.shape[0], weight.shape[0]
        dtype = row_max.dtype
        # dz = onehot(y) g + e (a + b z), with z and e = exp(z) relative to the row's maximum. The
        # normalisation of e and the derivative 1 / temperature are folded into a, b, g: (N, 1).
        inv_sum = (1.0 / (ctx.temperature * sum_exp))[:, None]
        a = torch.zeros_like(inv_sum)
        if grad_logprobs is not None:
            a -= grad_logprobs[:, None] * inv_sum
        if grad_entropy is not None:
            b = -grad_entropy[:, None] * inv_sum
            a += b * (entropy - sum_exp.log())[:, None]

        grad_hidden = torch.empty_like(hidden) if need_hidden else None
        grad_weight = torch.zeros_like(weight, dtype=dtype) if need_weight else None
        grad_bias = weight.new_zeros(vocab, dtype=dtype) if need_bias else None
        shape = (min(ctx.chunk_rows, num_rows), vocab)
        # Kept logits serve once; a second backward through a retained graph makes them again.
        kept, ctx.logits = ctx.logits, None
        logits_buffer = hidden.new_empty(shape, dtype=dtype) if kept is None else kept
        exp_buffer = torch.empty_like(logits_buffer) if grad_entropy is not None else logits_buffer
        slope_buffer = None if ctx.softcap is None else torch.empty_like(logits_buffer)
        for start in range(0, num_rows, ctx.chunk_rows):
            chunk = slice(start, min(start + ctx.chunk_rows, num_rows))
            size = chunk.stop - start
            slope = None if slope_buffer is None else slope_buffer[:size]
            z = logits_buffer[:size]
            if kept is None:
                _logits(hidden[chunk], weight, bias, ctx.temperature, ctx.softcap, z, slope)
                z.sub_(row_max[chunk, None])
            dz = torch.exp(z, out=exp_buffer[:size])  # in place without an entropy gradient
            if grad_entropy is None:
                dz.mul_(a[chunk])
            else:
                dz.mul_(z.mul_(b[chunk]).add_(a[chunk]))
            if grad_logprobs is not None:
                target_grad = grad_logprobs[chunk, None] / ctx.temperature
                dz.scatter_add_(1, targets[chunk, None], target_grad)
            if slope is not None:
                dz.mul_(slope)
            if grad_bias is not None:
                grad_bias += dz.sum(dim=0)
            if grad_hidden is not None:
                torch.mm(dz.to(weight.dtype), weight, out=grad_hidden[chunk])
            if grad_weight is not None:
                _accumulate(grad_weight, dz, hidden[chunk])
        return (
            grad_hidden,
            None if grad_weight is None else grad_weight.to(weight.dtype),
            None if grad_bias is None else grad_bias.to(bias.dtype),
            *(None,) * 4,
        )


def _logits(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    temperature: float,
    softcap: float | None,
    out: Tensor,
    slope: Tensor | None = None,
) -> None:
    """Write the logits of a chunk, capped and divided by the temperature, into out (n, V).

    slope (n, V), if given, receives the softcap's derivative 1 - tanh^2.
    """
    scale = 1.0 / (temperature if softcap is None else softcap)
    if hidden.dtype == out.dtype:  # scale and bias cost no pass of their own
        if bias is None:
            out.addmm_(hidden, weight.t(), beta=0.0, alpha=scale)
        else:
            torch.addmm(bias, hidden, weight.t(), beta=scale, alpha=scale, out=out)
    else:
        if hidden.is_cuda:  # the only device with a bf16 product that keeps its f32 accumulator
            torch.mm(hidden, weight.t(), out_dtype=out.dtype, out=out)
        else:
            out.copy_(torch.mm(hidden, weight.t()))
        if bias is not None:
            out.add_(bias)
        if scale != 1.0:
            out.mul_(scale)
    if softcap is not None:
        out.tanh_()
        if slope is not None:
            torch.mul(out, out, out=slope).neg_().add_(1.0)
        out.mul_(softcap / temperature)


def _accumulate(grad_weight: Tensor, dz: Tensor, hidden: Tensor) -> None:
    """grad_weight (V, D) += dz.T (V, n) @ hidden (n, D), with the sum in grad_weight's dtype."""
    if hidden.is_cuda and hidden.dtype != grad_weight.dtype:
        # bf16 operands for the tensor cores. addmm with out_dtype would save this temporary, but
        # its handling of an f32 addend is unsettled (pytorch issue 154086).
        product = torch.mm(dz.to(hidden.dtype).t(), hidden, out_dtype=grad_weight.dtype)
        grad_weight.add_(product)
    else:
        grad_weight.addmm_(dz.t(), hidden.to(grad_weight.dtype))


def _check(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    bias: Tensor | None,
    temperature: float,
    softcap: float | None,
    chunk_rows: int | None,
) -> None:
    shapes = f"hidden {tuple(hidden.shape)}, weight {tuple(weight.shape)}"
    if hidden.ndim != 2 or weight.ndim != 2 or hidden.shape[1] != weight.shape[1]:
        raise ValueError(f"expected hidden (T, D) and weight (V, D), got {shapes}")
    if targets.shape != hidden.shape[:1] or targets.dtype != torch.int64:
        raise ValueError(
            f"expected targets ({hidden.shape[0]},) int64, "
            f"got {tuple(targets.shape)} {targets.dtype}"
        )
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(f"expected bias ({weight.shape[0]},), got {tuple(bias.shape)}")
    dtypes = [x.dtype for x in (hidden, weight, bias) if x is not None]
    if len(set(dtypes)) > 1 or not hidden.is_floating_point():
        raise ValueError(f"hidden, weight and bias need one floating-point dtype, got {dtypes}")
    if not temperature > 0.0:
        raise ValueError(f"temperature={temperature} must be positive")
    if softcap is not None and not softcap > 0.0:
        raise ValueError(f"softcap={softcap} must be positive")
    if chunk_rows is not None and chunk_rows < 1:
        raise ValueError(f"chunk_rows={chunk_rows} must be at least 1")
    if targets.numel():
        low, high = torch.stack(targets.aminmax()).tolist()  # host sync on CUDA
        if low < -1 or high >= weight.shape[0]:
            raise ValueError(
                f"targets must be -1 or in [0, {weight.shape[0]}), found {low} to {high}"
            )
