"""Critics: values of packed rows against plain transformers, and heads that start at zero."""

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from transformers import PreTrainedModel

import common.model
from common.dist import DistEnv
from common.logprobs import compute_scores, compute_values
from common.lora import LoraSettings
from common.model import load_model
from common.packing import pack
from tests import test_model
from tests.test_model import perturb_adapters
from tests.test_scores import (
    PROMPTS,
    SETTINGS,
    assert_same_gradients,
    exported,
    plain,
    scored_row,
    sequences,
    tiny,
    value_row,
)
from tests.tiny import full

env = test_model.env  # the fixture


def weights(i: int) -> Tensor:
    """Of the values of a sequence's response, in the sum that is trained."""
    rng = random.Random(i)
    return torch.tensor([rng.uniform(-2, 2) for _ in sequences()[i][PROMPTS[i] :]])


def plain_values(model: PreTrainedModel, i: int) -> Tensor:
    """Of one sequence: the head's products with all hidden states that choose a response token."""
    hidden = model.base_model(torch.tensor([sequences()[i]]), use_cache=False).last_hidden_state
    return model.score(hidden[0].float())[PROMPTS[i] - 1 : -1, 0]


@pytest.mark.parametrize("name, fsdp", [("qwen3", True), ("gemma2", False), ("gpt2", False)])
def test_values_and_gradients_equal_plain_ones(
    name: str, fsdp: bool, tmp_path: Path, env: DistEnv
) -> None:
    path = tiny(tmp_path, name, head=True)
    model = load_model(path, env, dtype=torch.float32, head="score", cpu_offload=fsdp)
    assert isinstance(model, FSDPModule) == fsdp
    theirs = plain(path)
    expected = [plain_values(theirs, i) for i in range(6)]
    sum((value * weights(i)).sum() for i, value in enumerate(expected)).backward()
    gradients = {n: p.grad for n, p in theirs.named_parameters()}
    for shared in (False, True):
        row = value_row(shared=shared)
        values = compute_values(model, row)
        assert values.shape == (row.num_tokens,) and values.dtype == torch.float32
        assert not values[~row.response_mask].any()
        for ours, value in zip(row.split(values), expected, strict=True):
            assert torch.allclose(ours, value, atol=2e-5)
        # What lies outside the mask has no gradient, whatever a loss makes of it.
        factors = row.lay_out([weights(i) for i in range(6)])
        (values * torch.where(row.response_mask, factors, 1e3)).sum().backward()
        assert_same_gradients(model, gradients)
        model.zero_grad()


def test_values_do_not_depend_on_order_or_company(tmp_path: Path, env: DistEnv) -> None:
    model = load_model(tiny(tmp_path, head=True), env, dtype=torch.float32, head="score")
    with torch.no_grad():
        together = value_row().split(compute_values(model, value_row()))
        for order in ([5, 0, 3, 1, 4, 2], [1], [4, 3]):
            row = value_row(order)
            for i, ours in zip(order, row.split(compute_values(model, row)), strict=True):
                assert torch.allclose(ours, together[i], atol=1e-6)


def test_the_last_value_is_the_score(tmp_path: Path, env: DistEnv) -> None:
    """Of a whole sequence, which no action follows, and of every beginning of one."""
    model = load_model(tiny(tmp_path, head=True), env, dtype=torch.float32, head="score")
    with torch.no_grad():
        for shared in (False, True):
            row = scored_row(shared=shared)
            values = compute_values(
                model, replace(row, response_mask=torch.ones_like(row.response_mask))
            )
            scores = compute_scores(model, row)
            assert torch.allclose(values[row.cu_seqlens[1:].long() - 1], scores, atol=1e-6)
        ids = sequences()[4]
        row = pack(
            range(19), [ids[: t + 1] for t in range(19)], [[False] * (t + 1) for t in range(19)]
        )
        start = sum(len(sequence) for sequence in sequences()[:4])
        row_values = compute_values(model, value_row())[start + 9 : start + 18]
        assert torch.allclose(row_values, compute_scores(model, row)[9:18], atol=1e-5)


def test_what_is_not_finite_outside_the_mask_stays_there(tmp_path: Path, env: DistEnv) -> None:
    """Zero times NaN is NaN."""
    model = load_model(tiny(tmp_path, head=True), env, dtype=torch.float32, head="score")
    row = pack([0, 1], [[5, 6, 5], [8, 9, 10, 11]], [[False] * 3, [False, False, True, True]])
    with torch.no_grad():
        before = compute_values(model, row)
        model.get_input_embeddings().weight[5] = torch.nan
        values = compute_values(model, row)
    assert compute_scores(model, row).isnan().tolist() == [True, False]
    assert torch.equal(values, before) and values.count_nonzero() == 2


@pytest.mark.parametrize("fsdp, lora", [(False, None), (True, SETTINGS)])
def test_a_rank_without_sequences_takes_part(
    fsdp: bool, lora: LoraSettings | None, tmp_path: Path, env: DistEnv
) -> None:
    path = tiny(tmp_path, head=True)
    model = load_model(path, env, dtype=torch.float32, head="score", cpu_offload=fsdp, lora=lora)
    row = pack([], [], [])
    values = compute_values(model, row)
    assert values.tolist() == [0.0] * row.num_tokens
    values.sum().backward()
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            assert not full(parameter.grad).any(), name


def test_lora_critic(tmp_path: Path, env: DistEnv) -> None:
    """In bf16 too the head is trained as it is, in float32, and so is the product with it."""
    path = tiny(tmp_path / "start", head=True)
    results = []
    for dtype in (torch.float32, torch.bfloat16):
        model = load_model(path, env, dtype=dtype, head="score", lora=SETTINGS)
        perturb_adapters(model)
        row = value_row()
        values = compute_values(model, row)
        (values * row.lay_out([weights(i) for i in range(6)])).sum().backward()
        trained = {n: p for n, p in model.named_parameters() if p.requires_grad}
        assert len(trained) == 2 * 7 * 2 + 1 and "score.weight" in trained
        for name, parameter in trained.items():
            assert parameter.dtype == torch.float32 and full(parameter.grad).any(), name
        results.append((values.detach(), full(model.score.weight.grad)))
        if dtype == torch.float32:
            merged = plain(exported(model, path, tmp_path / "final"))
            expected = [plain_values(merged, i) for i in range(6)]
            for ours, value in zip(row.split(values), expected, strict=True):
                assert torch.allclose(ours, value, atol=2e-5)
            sum((value * weights(i)).sum() for i, value in enumerate(expected)).backward()
            assert torch.allclose(results[0][1], merged.score.weight.grad, rtol=1e-4, atol=1e-4)
    (exact, gradient), (rounded, other_gradient) = results
    assert rounded.dtype == torch.float32
    assert 0 < (rounded - exact).abs().max() < 0.05 * (1 + exact.abs().max())
    assert 0 < (other_gradient - gradient).abs().max() < 0.05 * gradient.abs().max()


# ---- the head ------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("lora", [None, SETTINGS])
def test_a_new_critic_says_zero_and_learns(
    dtype: torch.dtype, lora: LoraSettings | None, tmp_path: Path, env: DistEnv
) -> None:
    path = tiny(tmp_path)
    model = load_model(path, env, dtype=dtype, head="score", new_head="zero", lora=lora)
    assert isinstance(model, FSDPModule) == (dtype == torch.bfloat16)
    head = full(model.score.weight)
    assert head.shape == (1, 64) and head.dtype == torch.float32 and not head.any()
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=1.0)
    row = value_row()
    values = compute_values(model, row)
    assert not values.any()
    torch.where(row.response_mask, values - 1, 0.0).square().mean().backward()
    optimizer.step()
    assert full(model.score.weight).all()  # none waits for another to move first
    assert compute_values(model, row)[row.response_mask].all()


@pytest.mark.parametrize("lora", [None, SETTINGS])
@pytest.mark.parametrize("new_head", ["normal", "zero"])
def test_training_goes_on_from_a_trained_head(
    new_head: Any, lora: LoraSettings | None, tmp_path: Path, env: DistEnv
) -> None:
    path = tiny(tmp_path, head=True)
    settings = {"head": "score", "new_head": new_head, "lora": lora}
    model = load_model(path, env, dtype=torch.float32, **settings)
    head = load_file(Path(path) / "model.safetensors")["score.weight"]
    assert torch.equal(full(model.score.weight), head)


@pytest.mark.parametrize("new_head", ["normal", "zero"])
def test_a_model_that_packing_does_not_fit_is_refused(
    new_head: Any, tmp_path: Path, env: DistEnv, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A head of zeros agrees with everything."""
    path = tiny(tmp_path)
    measure = common.model._plain_score
    monkeypatch.setattr(
        common.model, "_plain_score", lambda model, ids, mask: measure(model, ids[-3:], mask)
    )
    with pytest.raises(ValueError, match="scores in packed rows differ from plain transformers"):
        load_model(path, env, dtype=torch.float32, head="score", new_head=new_head)
