import math

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from kernels import logprob, reference
from kernels.logprob import fused_logprobs


def make_inputs(
    num_tokens: int, dim: int, vocab: int, *, dtype=torch.float32, masked=0.3, scale=1.0, bias=False
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    generator = torch.Generator().manual_seed(num_tokens * 7919 + vocab)
    hidden = torch.randn(num_tokens, dim, generator=generator) * scale
    weight = torch.randn(vocab, dim, generator=generator) / math.sqrt(dim)
    targets = torch.randint(vocab, (num_tokens,), generator=generator)
    targets[torch.rand(num_tokens, generator=generator) < masked] = -1
    bias_ = torch.randn(vocab, generator=generator).to(dtype) if bias else None
    return hidden.to(dtype), weight.to(dtype), targets, bias_


def run(
    function, hidden, weight, targets, bias, *, upstream=("logprobs", "entropy"), **options
) -> dict[str, Tensor]:
    """Outputs and gradients of a random weighting of the named outputs, as float64."""
    leaves = {"hidden": hidden, "weight": weight}
    if bias is not None:
        leaves["bias"] = bias
    leaves = {name: x.detach().clone().requires_grad_() for name, x in leaves.items()}
    logprobs, entropy = function(
        leaves["hidden"], leaves["weight"], targets, bias=leaves.get("bias"), **options
    )
    generator = torch.Generator().manual_seed(1)
    results = {"logprobs": logprobs, "entropy": entropy}
    loss = sum(
        (results[name] * torch.randn(len(targets), generator=generator).to(logprobs)).sum()
        for name in upstream
    )
    loss.backward()
    results |= {f"grad_{name}": x.grad for name, x in leaves.items()}
    return {name: x.detach().double().cpu() for name, x in results.items()}


def truth(hidden, weight, targets, bias, **options) -> dict[str, Tensor]:
    bias = None if bias is None else bias.double()
    return run(reference.fused_logprobs, hidden.double(), weight.double(), targets, bias, **options)


def error(result: Tensor, expected: Tensor) -> float:
    """Largest error relative to the largest entry."""
    if not expected.numel():
        return 0.0
    return ((result - expected).abs().max() / expected.abs().max().clamp(min=1e-30)).item()


def assert_close(inputs, *, tol, chunk_rows=None, **options):
    result = run(fused_logprobs, *inputs, chunk_rows=chunk_rows, **options)
    expected = truth(*inputs, **options)
    assert result.keys() == expected.keys()
    for name in expected:
        assert result[name].isfinite().all(), name
        assert error(result[name], expected[name]) <= tol, name


OPTIONS = {
    "plain": {"temperature": 1.0},
    "temperature": {"temperature": 0.7},
    "softcap": {"temperature": 1.0, "softcap": 2.0},
    "softcap and temperature": {"temperature": 0.7, "softcap": 2.0},
}


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("upstream", [("logprobs",), ("entropy",), ("logprobs", "entropy")])
@pytest.mark.parametrize("chunk_rows", [None, 8], ids=["one chunk", "many chunks"])
def test_values_and_gradients(options, bias, upstream, chunk_rows):
    inputs = make_inputs(37, 24, 101, bias=bias)
    assert_close(inputs, tol=5e-6, chunk_rows=chunk_rows, upstream=upstream, **options)


@pytest.mark.parametrize("shape", [(1, 1, 2), (1, 8, 1), (3, 5, 7), (17, 33, 129), (130, 16, 1001)])
def test_odd_shapes(shape):
    assert_close(make_inputs(*shape, masked=0.0), tol=5e-6, temperature=0.7)
    assert_close(make_inputs(*shape, masked=0.5), tol=5e-6, temperature=0.7, chunk_rows=4)


@pytest.mark.parametrize("chunk_rows", [1, 2, 9, 10, 11, 1000])
def test_chunk_boundaries(chunk_rows):
    inputs = make_inputs(20, 8, 50, masked=0.0)
    assert_close(inputs, tol=5e-6, chunk_rows=chunk_rows, temperature=1.3)


def test_float64_matches_to_rounding():
    inputs = make_inputs(21, 16, 60, dtype=torch.float64, bias=True)
    for options in OPTIONS.values():
        assert_close(inputs, tol=1e-13, chunk_rows=4, **options)


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("chunk_rows", [None, 2], ids=["one chunk", "many chunks"])
def test_gradcheck(options, chunk_rows):
    hidden, weight, targets, bias = make_inputs(5, 4, 7, dtype=torch.float64, bias=True)
    assert (targets == -1).any() and (targets != -1).any()
    leaves = [x.requires_grad_() for x in (hidden, weight, bias)]
    assert torch.autograd.gradcheck(
        lambda h, w, b: fused_logprobs(h, w, targets, bias=b, chunk_rows=chunk_rows, **options),
        leaves,
    )


@pytest.mark.parametrize("chunk_rows", [None, 8], ids=["one chunk", "many chunks"])
def test_huge_logits(chunk_rows):
    """Logits of 1e4 must neither overflow nor lose the normalisation of the probabilities."""
    hidden, weight, targets, bias = make_inputs(33, 16, 64, scale=1e4)
    weight[1::2] = weight[::2] + 1e-5 * weight[1::2]  # near ties at the top: p is not one-hot
    inputs = (hidden, weight, targets, bias)
    # f32 logits of this size are spaced by 1e-3, whatever comes after them.
    eager = run(reference.fused_logprobs, *inputs, temperature=1.0)
    result = run(fused_logprobs, *inputs, temperature=1.0, chunk_rows=chunk_rows)
    expected = truth(*inputs, temperature=1.0)
    assert expected["entropy"].max() > 0.1
    for name in expected:
        assert result[name].isfinite().all(), name
        eager_error = error(eager[name], expected[name])
        assert error(result[name], expected[name]) <= 1.5 * eager_error + 1e-6, name


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_one_hot_distribution_has_entropy_zero(sign):
    weight = torch.tensor([[1e4], [0.0], [-1e4]])
    hidden = torch.full((2, 1), sign)
    likely = 0 if sign > 0 else 2
    targets = torch.tensor([likely, 1])
    logprobs, entropy = fused_logprobs(hidden, weight, targets, temperature=1.0)
    assert logprobs.tolist() == [0.0, -1e4]
    assert entropy.tolist() == [0.0, 0.0]


def test_uniform_distribution():
    logprobs, entropy = fused_logprobs(
        torch.zeros(3, 4), torch.randn(10, 4), torch.tensor([0, 5, 9]), temperature=1.0
    )
    torch.testing.assert_close(logprobs, torch.full((3,), -math.log(10)))
    torch.testing.assert_close(entropy, torch.full((3,), math.log(10)))


def test_temperature_divides_logits():
    """P43: for logits (2, 1, 0) the log-prob itself was scaled, or the temperature left out."""
    hidden, weight = torch.tensor([[1.0]]), torch.tensor([[2.0], [1.0], [0.0]])
    for function in (fused_logprobs, reference.fused_logprobs):
        for temperature, expected in [(1.0, -0.4076), (0.5, -0.1429)]:
            logprobs, _ = function(hidden, weight, torch.tensor([0]), temperature=temperature)
            assert logprobs.item() == pytest.approx(expected, abs=5e-5)


def test_low_precision_logprobs():
    """P41: log-softmax was computed in bf16; it has to be the f32 one of the bf16 logits."""
    hidden, weight, targets, _ = make_inputs(64, 32, 512, dtype=torch.bfloat16, masked=0.0, scale=3)
    logprobs, entropy = fused_logprobs(hidden, weight, targets, temperature=1.0, chunk_rows=16)
    assert logprobs.dtype == entropy.dtype == torch.float32
    expected = (hidden @ weight.t()).float().log_softmax(-1)
    gathered = expected.gather(1, targets[:, None])[:, 0]
    assert (logprobs - gathered).abs().max() < 1e-4
    assert (entropy + (expected.exp() * expected).sum(-1)).abs().max() < 1e-4


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("chunk_rows", [None, 16], ids=["one chunk", "many chunks"])
def test_bf16_is_no_worse_than_eager(options, chunk_rows):
    inputs = make_inputs(96, 32, 300, dtype=torch.bfloat16, bias=True)
    eager = run(reference.fused_logprobs, *inputs, **options)
    result = run(fused_logprobs, *inputs, chunk_rows=chunk_rows, **options)
    expected = truth(*inputs, **options)
    for name in expected:
        # Both round at a few places each; the margin is one bf16 rounding (2^-9).
        limit = error(eager[name], expected[name]) + 2**-9
        assert error(result[name], expected[name]) <= limit, name


def test_weight_gradient_is_summed_in_f32():
    """A bf16 sum over chunks stops growing once the parts fall below its spacing."""
    num_tokens = 1024
    hidden = torch.ones(num_tokens, 1, dtype=torch.bfloat16)
    weight = torch.zeros(2, 1, dtype=torch.bfloat16, requires_grad=True)
    targets = torch.zeros(num_tokens, dtype=torch.int64)
    fused_logprobs(hidden, weight, targets, temperature=1.0, chunk_rows=1)[0].sum().backward()
    assert weight.dtype == weight.grad.dtype == torch.bfloat16
    assert weight.grad.flatten().tolist() == [num_tokens / 2, -num_tokens / 2]


# -- masked rows --


def test_masked_rows_are_zero_and_carry_no_gradient():
    hidden, weight, targets, _ = make_inputs(40, 8, 30, masked=0.5)
    ignored = targets == -1
    hidden.requires_grad_()
    logprobs, entropy = fused_logprobs(hidden, weight, targets, temperature=1.0)
    assert (logprobs[ignored] == 0).all() and (entropy[ignored] == 0).all()
    assert (logprobs[~ignored] < 0).all() and (entropy[~ignored] > 0).all()
    (logprobs.sum() + entropy.sum()).backward()
    assert (hidden.grad[ignored] == 0).all() and (hidden.grad[~ignored] != 0).any()


def test_non_finite_masked_rows_do_not_spread():
    """P40: a NaN at a masked position reached the loss as 0 * NaN."""
    hidden, weight, targets, _ = make_inputs(10, 8, 30, masked=0.0)
    hidden[[2, 7]], targets[[2, 7]] = torch.nan, -1
    result = run(fused_logprobs, hidden, weight, targets, None, temperature=1.0)
    assert all(x.isfinite().all() for x in result.values())


@pytest.mark.parametrize("num_tokens", [0, 1, 6])
def test_nothing_to_do(num_tokens):
    """Empty and all-masked rows: a backward still runs, as FSDP's collectives need it to."""
    hidden = torch.randn(num_tokens, 4, requires_grad=True)
    weight, bias = torch.randn(9, 4, requires_grad=True), torch.randn(9, requires_grad=True)
    targets = torch.full((num_tokens,), -1)
    logprobs, entropy = fused_logprobs(hidden, weight, targets, temperature=1.0, bias=bias)
    assert logprobs.tolist() == entropy.tolist() == [0.0] * num_tokens
    (logprobs.sum() + entropy.sum()).backward()
    for leaf in (hidden, weight, bias):
        assert leaf.grad.shape == leaf.shape and (leaf.grad == 0).all()


# -- work and memory --


class Recorder(TorchDispatchMode):
    """Records the name and the largest tensor of every operation."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        sizes = [x.numel() for x in tree_leaves((args, kwargs, out)) if isinstance(x, Tensor)]
        self.calls.append((func.__name__.split(".")[0], max(sizes, default=0)))
        return out

    def num_products(self) -> int:
        return sum(name in ("mm", "addmm", "addmm_") for name, _ in self.calls)

    def largest(self) -> int:
        return max(numel for _, numel in self.calls)


@pytest.mark.parametrize("softcap", [None, 5.0])
def test_no_tensor_is_larger_than_a_chunk(softcap):
    num_tokens, dim, vocab, chunk_rows = 256, 4, 500, 16
    hidden, weight, targets, _ = make_inputs(num_tokens, dim, vocab, masked=0.0)
    hidden.requires_grad_(), weight.requires_grad_()
    with Recorder() as recorder:
        logprobs, entropy = fused_logprobs(
            hidden, weight, targets, temperature=0.7, softcap=softcap, chunk_rows=chunk_rows
        )
        (logprobs.sum() + entropy.sum()).backward()
    assert recorder.num_products() == 4 * num_tokens // chunk_rows
    assert recorder.largest() == chunk_rows * vocab < num_tokens * vocab / 10


def test_default_chunk_stays_within_the_stated_size():
    vocab = 200_000
    targets = torch.zeros(300, dtype=torch.int64)
    with Recorder() as recorder, torch.no_grad():
        fused_logprobs(torch.zeros(300, 1), torch.zeros(vocab, 1), targets, temperature=1.0)
    assert recorder.largest() * 4 <= logprob.CPU_CHUNK_BYTES
    assert recorder.num_products() == 4  # 83 rows fit; 300 make four chunks of 75


def test_only_needed_products_are_computed():
    """4 with recomputation: 1 forward, 1 recomputation, 1 for each wanted gradient."""
    for need_hidden, need_weight, expected in [(1, 1, 4), (1, 0, 3), (0, 1, 3), (0, 0, 1)]:
        hidden, weight, targets, _ = make_inputs(8, 4, 20, masked=0.0)
        hidden.requires_grad_(bool(need_hidden)), weight.requires_grad_(bool(need_weight))
        with Recorder() as recorder:
            logprobs, _ = fused_logprobs(hidden, weight, targets, temperature=1.0, chunk_rows=4)
            if logprobs.requires_grad:
                logprobs.sum().backward()
        assert recorder.num_products() == 2 * expected
        assert (hidden.grad is not None, weight.grad is not None) == (need_hidden, need_weight)


def test_only_rows_with_a_target_pass_the_head():
    hidden, weight, targets, _ = make_inputs(400, 1, 50)
    with Recorder() as recorder:
        fused_logprobs(hidden, weight, targets, temperature=1.0)
    assert recorder.largest() == int((targets != -1).sum()) * 50 < 400 * 50


def test_no_grad_keeps_nothing():
    hidden, weight, targets, _ = make_inputs(12, 4, 20)
    hidden.requires_grad_(), weight.requires_grad_()
    expected = fused_logprobs(hidden, weight, targets, temperature=1.0)
    with torch.no_grad():
        result = fused_logprobs(hidden, weight, targets, temperature=1.0)
    for x, y in zip(result, expected, strict=True):
        assert not x.requires_grad and x.grad_fn is None
        assert torch.equal(x, y)  # bitwise: first-minibatch ratios are exactly 1


@pytest.mark.parametrize("chunk_rows", [None, 5], ids=["one chunk", "many chunks"])
def test_backward_twice_through_a_retained_graph(chunk_rows):
    hidden, weight, targets, _ = make_inputs(12, 4, 20)
    hidden.requires_grad_(), weight.requires_grad_()
    logprobs, entropy = fused_logprobs(
        hidden, weight, targets, temperature=1.0, chunk_rows=chunk_rows
    )
    loss = logprobs.sum() + entropy.sum()
    first = torch.autograd.grad(loss, (hidden, weight), retain_graph=True)
    second = torch.autograd.grad(loss, (hidden, weight))
    for x, y in zip(first, second, strict=True):
        assert torch.equal(x, y)


def test_unused_outputs_change_nothing():
    inputs = make_inputs(12, 4, 20)
    alone = run(fused_logprobs, *inputs, temperature=1.0, upstream=("logprobs",))

    def with_zero_entropy_term(*args, **kwargs):
        logprobs, entropy = fused_logprobs(*args, **kwargs)
        return logprobs + 0.0 * entropy, entropy

    both = run(with_zero_entropy_term, *inputs, temperature=1.0, upstream=("logprobs",))
    for name in alone:
        torch.testing.assert_close(alone[name], both[name], rtol=1e-6, atol=1e-7)


# -- errors --


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden": torch.zeros(3, 5)}, "hidden"),
        ({"hidden": torch.zeros(1, 3, 4)}, "hidden"),
        ({"targets": torch.zeros(2, dtype=torch.int64)}, "targets"),
        ({"targets": torch.zeros(3, dtype=torch.int32)}, "targets"),
        ({"targets": torch.tensor([0, 7, 1])}, r"\[0, 7\), found 0 to 7"),
        ({"targets": torch.tensor([0, -100, 1])}, "found -100 to 1"),
        ({"bias": torch.zeros(6)}, "bias"),
        ({"weight": torch.zeros(7, 4, dtype=torch.bfloat16)}, "dtype"),
        ({"temperature": 0.0}, "temperature=0.0"),
        ({"temperature": math.nan}, "temperature=nan"),
        ({"softcap": 0.0}, "softcap=0.0"),
        ({"chunk_rows": 0}, "chunk_rows=0"),
    ],
)
def test_bad_arguments(change, message):
    arguments = {
        "hidden": torch.zeros(3, 4),
        "weight": torch.zeros(7, 4),
        "targets": torch.tensor([0, -1, 6]),
        "temperature": 1.0,
    }
    fused_logprobs(**arguments)
    arguments |= change
    positional = [arguments.pop(name) for name in ("hidden", "weight", "targets")]
    with pytest.raises(ValueError, match=message):
        fused_logprobs(*positional, **arguments)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("chunk_rows", [None, 64], ids=["one chunk", "many chunks"])
def test_cuda(dtype, options, chunk_rows):
    inputs = make_inputs(200, 64, 1003, dtype=dtype, bias=True)
    expected = truth(*inputs, **options)
    inputs = tuple(x.cuda() for x in inputs)
    eager = run(reference.fused_logprobs, *inputs, **options)
    result = run(fused_logprobs, *inputs, chunk_rows=chunk_rows, **options)
    margin = 5e-6 if dtype == torch.float32 else 2**-9
    for name in expected:
        limit = error(eager[name], expected[name]) + margin
        assert error(result[name], expected[name]) <= limit, name
