"""The algorithm's pure functions against slow float64 loops and published numbers."""

import math
import random

import numpy as np
import pytest
import torch

import grpo
import sft


def slow_advantages(scores: list[float | None], group: int, eps: float = 1e-4) -> list[float]:
    result = []
    for start in range(0, len(scores), group):
        members = scores[start : start + group]
        known = [s for s in members if s is not None]
        mean = sum(known) / len(known) if known else 0.0
        std = (
            math.sqrt(sum((s - mean) ** 2 for s in known) / (len(known) - 1))
            if len(known) > 1
            else 0.0
        )
        for s in members:
            flat = std <= 1e-6 * max((abs(k) for k in known), default=0.0)
            result.append(0.0 if s is None or flat else (s - mean) / (std + eps))
    return result


def as_scores(values: list[float | None]) -> torch.Tensor:
    return torch.tensor([math.nan if v is None else v for v in values], dtype=torch.float64)


def test_group_advantages_published_numbers() -> None:
    """P34: "group" must divide by the group's sample std, "none" must not divide at all."""
    scores = as_scores([1, 0, 0, 0, 1, 1, 0, 1])
    group = grpo.group_advantages(scores, 4, scale="group")
    assert torch.allclose(group[:4], torch.tensor([1.4997, -0.4999, -0.4999, -0.4999]), atol=1e-4)
    none = grpo.group_advantages(scores, 4, scale="none")
    assert none.tolist() == [0.75, -0.25, -0.25, -0.25, 0.25, 0.25, -0.75, 0.25]
    batch = grpo.group_advantages(scores, 4, scale="batch")
    assert torch.allclose(batch, none / (scores.std().float() + 1e-4), atol=1e-6)


def test_group_advantages_against_loop() -> None:
    random.seed(0)
    scores = [random.choice([None, random.gauss(0, 3), 1.0]) for _ in range(5 * 64)]
    fast = grpo.group_advantages(as_scores(scores), 5, scale="group")
    assert torch.allclose(fast, torch.tensor(slow_advantages(scores, 5)), atol=1e-5)


def test_constant_rewards_give_exactly_zero() -> None:
    """P35: seven rewards of 0.1 have a float32 std of 8e-9; dividing by it made noise huge."""
    for scale in ("group", "batch", "none"):
        scores = torch.full((14,), 0.1, dtype=torch.float32)
        scores[7:] = torch.tensor([0.0, 1, 0, 1, 0, 1, 0])
        assert (grpo.group_advantages(scores, 7, scale=scale)[:7] == 0).all()


def test_unscored_members_do_not_poison_their_group() -> None:
    """P36: a reward of None became NaN for the whole group, or counted as 0."""
    assert grpo.group_advantages(as_scores([1, None, 0, 1]), 4, scale="none").tolist() == (
        pytest.approx([1 / 3, 0, -2 / 3, 1 / 3])
    )
    for scores in ([None] * 4, [None, 2.0, None, None]):
        for scale in ("group", "batch", "none"):
            assert grpo.group_advantages(as_scores(scores), 4, scale=scale).tolist() == [0.0] * 4


def test_policy_loss_against_loop() -> None:
    torch.manual_seed(0)
    old = torch.randn(200, dtype=torch.float64)
    new = (old + 0.4 * torch.randn_like(old)).requires_grad_()
    advantages = torch.randn_like(old)
    loss, ratio = grpo.policy_loss(new, old, advantages, clip_low=0.2, clip_high=0.28)
    loss.sum().backward()
    for i in range(200):
        r, a = math.exp(new[i].item() - old[i].item()), advantages[i].item()
        clipped = min(max(r, 0.8), 1.28)
        assert loss[i].item() == pytest.approx(-min(r * a, clipped * a))
        assert ratio[i].item() == pytest.approx(r)
        dead = (a > 0 and r > 1.28) or (a < 0 and r < 0.8)
        assert new.grad[i].item() == pytest.approx(0.0 if dead else -r * a)


def test_dual_clip_against_loop() -> None:
    """Without a bound, one token of a negative advantage and a ratio of 100 outweighs all others.

    Ye et al. 2020, arXiv:1912.09729, eq. 5: where A < 0, max(min(r A, clip(r) A), c A). No gradient
    exactly where the bound is in force, and not the least difference elsewhere.
    """
    torch.manual_seed(0)
    old = torch.randn(400, dtype=torch.float64)
    new = (old + 1.5 * torch.randn_like(old)).requires_grad_()
    advantages = torch.randn_like(old)
    advantages[:3] = 0.0
    clips = {"clip_low": 0.2, "clip_high": 0.28}
    plain, plain_ratio = grpo.policy_loss(new, old, advantages, **clips)
    (plain_gradient,) = torch.autograd.grad(plain.sum(), new)
    for c in (3.0, 1.1):  # the second one inside the interval
        loss, ratio = grpo.policy_loss(new, old, advantages, **clips, dual_clip=c)
        (gradient,) = torch.autograd.grad(loss.sum(), new)
        assert torch.equal(ratio, plain_ratio)
        bound = (advantages < 0) & (ratio > c)
        assert 20 < bound.sum() < 200
        assert torch.equal(loss[~bound], plain[~bound])
        assert torch.equal(gradient[~bound], plain_gradient[~bound])
        assert (gradient[bound] == 0).all() and (plain_gradient[bound] != 0).all()
        for i in range(400):
            r, a = math.exp(new[i].item() - old[i].item()), advantages[i].item()
            surrogate = min(r * a, min(max(r, 0.8), 1.28) * a)
            expected = -max(surrogate, c * a) if a < 0 else -surrogate
            assert loss[i].item() == pytest.approx(expected, abs=1e-15)


def test_a_ratio_beyond_float32_gives_no_nan() -> None:
    """exp(100) is infinite in float32: the clipped tokens' gradient was 0 * inf."""
    new = torch.zeros(2, requires_grad=True)
    old, advantages = torch.full((2,), -100.0), torch.tensor([-1.0, 1.0])
    loss, _ = grpo.policy_loss(new, old, advantages, clip_low=0.2, clip_high=0.2, dual_clip=3)
    loss.sum().backward()
    assert loss.tolist() == pytest.approx([3, -1.2]) and new.grad.tolist() == [0, 0]


def test_positive_advantage_raises_the_logprob() -> None:
    logprobs = torch.tensor([-1.0, -1.0], requires_grad=True)
    loss, _ = grpo.policy_loss(
        logprobs, logprobs.detach(), torch.tensor([1.0, -1.0]), clip_low=0.2, clip_high=0.2
    )
    loss.sum().backward()
    assert logprobs.grad.tolist() == [-1.0, 1.0]  # descent raises the first and lowers the second


def test_kl_gradients_on_the_enumerated_vocabulary() -> None:
    """P37, P38: k2 has the gradient of the reverse KL, k3 that of the forward KL, k1 has none."""
    p, q = torch.tensor([0.5, 0.3, 0.2]).double(), torch.tensor([0.2, 0.3, 0.5]).double()
    expected = {"k1": [0, 0, 0], "k2": [0.3207, -0.0825, -0.2382], "k3": [0.3, 0.0, -0.3]}
    for estimator, numbers in expected.items():
        logits = p.log().requires_grad_()
        logprobs = logits.log_softmax(-1)
        (p * grpo.kl_estimate(logprobs, q.log(), estimator)).sum().backward()
        assert torch.allclose(logits.grad, torch.tensor(numbers).double(), atol=1e-4), estimator
    # In expectation k1 and k3 are the KL itself.
    kl = (p * (p / q).log()).sum()
    for estimator in ("k1", "k3"):
        assert torch.allclose((p * grpo.kl_estimate(p.log(), q.log(), estimator)).sum(), kl)


def test_pass_at_k_is_the_mean_over_all_subsets() -> None:
    from itertools import combinations

    right = [True, False, False, True, False]
    for k in range(1, 6):
        subsets = list(combinations(right, k))
        assert grpo.pass_at_k(5, 2, k) == pytest.approx(sum(map(any, subsets)) / len(subsets))


PLAN = {"total_steps": 20, "warmup_steps": 4, "decay_ratio": 0.1, "min_ratio": 0.0}


@pytest.mark.parametrize("schedule", ["constant", "linear", "cosine", "wsd"])
def test_schedule_warms_up_and_ends_where_it_should(schedule: str) -> None:
    """P20: one tick per optimizer step; the last planned step is the last of the decay."""
    factors = [grpo.lr_factor(step, schedule=schedule, **PLAN) for step in range(21)]
    assert factors[:5] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0])
    assert factors[20] == pytest.approx(1.0 if schedule == "constant" else 0.0)
    assert all(a >= b for a, b in zip(factors[4:], factors[5:], strict=False))
    assert factors == [sft.lr_factor(step, schedule=schedule, **PLAN) for step in range(21)]


def test_batches_visit_every_row_once_per_epoch() -> None:
    """P65: rows were repeated or lost where an epoch ends inside a step."""
    seen = [
        i
        for step in range(1, 11)
        for i in grpo.batch_indices(step, sizes=(4, 3), weights=None, rows_per_step=3, seed=1)
    ]
    for epoch in range(4):
        assert sorted(seen[7 * epoch : 7 * epoch + 7]) == list(range(7))
    assert seen[:7] != seen[7:14]
    again = grpo.batch_indices(5, sizes=(4, 3), weights=None, rows_per_step=3, seed=1)
    assert again == seen[12:15]


def test_mixtures_keep_their_shares_and_visit_rows_evenly() -> None:
    """A small dataset with a large weight is repeated, a large one is not drawn from at random."""
    sizes, weights = (50, 7, 40), (0.5, 0.4, 0.1)
    flags = {"sizes": sizes, "weights": weights, "rows_per_step": 97, "seed": 3}
    visits = np.zeros(97, dtype=int)
    for epoch in range(1, 21):  # 97 rows a step: a step is an epoch
        rows = np.array(sft.batch_indices(epoch, **flags))
        shares = [((rows >= a) & (rows < b)).sum() for a, b in ((0, 50), (50, 57), (57, 97))]
        assert np.abs(np.array(shares) - 97 * np.array(weights)).max() < 1
        visits += np.bincount(rows, minlength=97)
        for a, b in ((0, 50), (50, 57), (57, 97)):
            assert visits[a:b].max() - visits[a:b].min() <= 1
    assert not np.array_equal(np.sort(rows), rows)
    # ratios, not shares; and an epoch that ends inside a step changes nothing
    scaled = [
        i
        for step in range(1, 98)
        for i in sft.batch_indices(
            step, sizes=sizes, weights=(5.0, 4.0, 1.0), rows_per_step=20, seed=3
        )
    ]
    first = sft.batch_indices(1, **flags) + sft.batch_indices(2, **flags)
    assert scaled[:194] == first
    with pytest.raises(ValueError, match="--dataset_weights"):
        sft.batch_indices(1, sizes=sizes, weights=(1.0, 1.0, 1e-6), rows_per_step=2, seed=3)
    with pytest.raises(ValueError, match=r"--dataset_weights.*\[50, 0\]"):  # all its rows dropped
        sft.batch_indices(1, sizes=(50, 0), weights=(1.0, 1.0), rows_per_step=2, seed=3)


def test_wsd_holds_then_decays_and_schedules_end_at_their_floor() -> None:
    factors = [
        sft.lr_factor(step, schedule="wsd", **PLAN | {"total_steps": 40, "decay_ratio": 0.25})
        for step in range(41)
    ]
    assert factors[4:31] == [1.0] * 27
    assert factors[30:41] == pytest.approx([1 - i / 10 for i in range(11)])
    for schedule in ("linear", "cosine", "wsd"):
        settings = PLAN | {"total_steps": 40, "schedule": schedule, "min_ratio": 0.1}
        assert sft.lr_factor(40, **settings) == pytest.approx(0.1)
        assert sft.lr_factor(400, **settings) == pytest.approx(0.1)
        assert sft.lr_factor(4, **settings) == 1.0
    # a decay longer than what the warm-up leaves starts where the warm-up ends
    assert sft.lr_factor(5, schedule="wsd", **PLAN | {"total_steps": 6, "decay_ratio": 1.0}) == 0.5


def test_warmup_is_in_steps_or_a_ratio() -> None:
    base = {"model": "m", "output_dir": "o", "dataset": ("d",), "num_steps": 200}
    assert sft.Args(**base).num_warmup_steps == 6
    assert sft.Args(**base, warmup_ratio=0.1).num_warmup_steps == 20
    assert sft.Args(**base, warmup_ratio=0.1, warmup_steps=0).num_warmup_steps == 0


def test_token_slots_count_waiting_and_dummies() -> None:
    lengths = np.array([10, 4, 6, 3])
    assert sft.token_slots([[[0], [3]], [[1, 2], []]], lengths) == 2 * (10 + 3)
    assert sft.token_slots([[[0, 1], [2, 3]]], lengths) == 23


def test_request_seeds_differ_by_run_purpose_step_prompt_and_sample() -> None:
    """P57: equal seeds on several ranks or samples returned the same completion many times."""
    streams = [
        (seed, purpose, step, prompt, sample)
        for seed in range(2)
        for purpose in range(3)
        for step in range(4)
        for prompt in range(8)
        for sample in range(8)
    ]
    seeds = {grpo.request_seed(*stream) for stream in streams}
    assert len(seeds) == len(streams)
    assert all(0 <= seed < 2**32 for seed in seeds)


BASE = {"model": "m", "output_dir": "o", "dataset": ("d",), "rewards": ("math",)}


@pytest.mark.parametrize(
    "flags",
    [
        {"samples_per_prompt": 1},
        {"num_minibatches": 3},
        {"max_tokens_per_microbatch": 100},
        {"learning_rate": -1.0},
        {"learning_rate": math.nan},
        {"temperature": 0.0},
        {"dataset": ()},
        {"rewards": ()},
        {"tis_cap": 0.5},
        {"eval_samples_per_prompt": 4},
        {"num_steps": 0},
        {"clip_low": 1.5},
    ],
)
def test_bad_flags_are_refused_by_name(flags: dict) -> None:
    """P35 and others: values that cannot work failed late, or silently trained on nothing."""
    with pytest.raises(ValueError, match=f"--{next(iter(flags))}"):
        grpo.Args(**(BASE | flags))
