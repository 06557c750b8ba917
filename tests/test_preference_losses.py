"""Losses and evaluation of dpo.py and reward_model.py against slow loops and known numbers."""

import math
import random
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch

import dpo
import reward_model

LOSSES = ("sigmoid", "ipo", "hinge", "robust", "simpo", "kto_pair")


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x)) if x >= 0 else math.exp(x) / (1 + math.exp(x))


def log_sigmoid(x: float) -> float:
    return -math.log1p(math.exp(-x)) if x >= 0 else x - math.log1p(math.exp(x))


def slow_loss(
    c: float, r: float, loss: str, beta: float, e: float, gamma: float, kl: tuple[float, float]
) -> float:
    """The formulas of the papers, one pair at a time."""
    d = beta * (c - r)
    if loss == "sigmoid":
        return -(1 - e) * log_sigmoid(d) - e * log_sigmoid(-d)
    if loss == "robust":
        return (-(1 - e) * log_sigmoid(d) + e * log_sigmoid(-d)) / (1 - 2 * e)
    if loss == "hinge":
        return max(0.0, 1 - d)
    if loss == "ipo":
        return (c - r - 0.5 / beta) ** 2
    if loss == "simpo":
        return -(1 - e) * log_sigmoid(d - gamma) - e * log_sigmoid(gamma - d)
    return 1 - sigmoid(beta * (c - kl[1])) + 1 - sigmoid(beta * (kl[0] - r))


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("label_smoothing", [0.0, 0.2])
def test_every_loss_and_its_gradient(loss: str, label_smoothing: float) -> None:
    """P27: a sign or scale slip let the margin fall while the loss fell."""
    rng = random.Random(0)
    pairs = [(rng.gauss(0, 9), rng.gauss(0, 9)) for _ in range(32)] + [(0.0, 0.0), (2.0, 2.0)]
    settings: dict[str, Any] = {"loss": loss, "beta": 0.3, "label_smoothing": label_smoothing}
    settings |= {"simpo_gamma": 0.7, "chosen_kl": 0.4, "rejected_kl": 1.3}
    slow = lambda c, r: slow_loss(c, r, loss, 0.3, label_smoothing, 0.7, (0.4, 1.3))  # noqa: E731
    chosen, rejected = torch.tensor(pairs, dtype=torch.float64).unbind(1)
    chosen.requires_grad_(), rejected.requires_grad_()
    losses = dpo.preference_loss(chosen, rejected, **settings)
    assert losses.tolist() == pytest.approx([slow(c, r) for c, r in pairs], rel=1e-12)
    losses.sum().backward()
    assert chosen.grad is not None and rejected.grad is not None
    h = 1e-6
    for i, (c, r) in enumerate(pairs):
        numeric = (slow(c + h, r) - slow(c - h, r)) / (2 * h)
        assert chosen.grad[i].item() == pytest.approx(numeric, rel=1e-5, abs=1e-7)
        numeric = (slow(c, r + h) - slow(c, r - h)) / (2 * h)
        assert rejected.grad[i].item() == pytest.approx(numeric, rel=1e-5, abs=1e-7)


def test_loss_where_policy_and_reference_agree() -> None:
    zero = torch.zeros(3, dtype=torch.float64)
    expected = {
        "sigmoid": math.log(2),
        "robust": math.log(2),
        "hinge": 1.0,
        "ipo": 25.0,
        "kto_pair": 1.0,
    }
    for loss, value in expected.items():
        losses = dpo.preference_loss(zero, zero, loss=loss, beta=0.1)
        assert losses.tolist() == pytest.approx([value] * 3, abs=1e-12), loss
    wins, ties = dpo.wins_and_ties(zero)
    assert (wins.item(), ties.item()) == (0, 3)


@pytest.mark.parametrize("loss", LOSSES)
def test_twenty_steps_raise_the_margin(loss: str) -> None:
    """P27."""
    ratios = torch.zeros(4, 2, dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.SGD([ratios], lr=0.2)
    margins = []
    for _ in range(20):
        margins.append((ratios[:, 0] - ratios[:, 1]).sum().item())
        dpo.preference_loss(*ratios.unbind(1), loss=loss, beta=0.1).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert all(a < b for a, b in pairwise(margins))


def test_robust_loss_is_unbiased_under_flipped_labels() -> None:
    """arXiv:2403.00409: its mean over flips of a share e of the labels is the clean loss."""
    d = torch.linspace(-30, 30, 7, dtype=torch.float64)
    zero, e = torch.zeros_like(d), 0.3
    right = dpo.preference_loss(d, zero, loss="robust", beta=0.2, label_smoothing=e)
    flipped = dpo.preference_loss(zero, d, loss="robust", beta=0.2, label_smoothing=e)
    clean = dpo.preference_loss(d, zero, loss="sigmoid", beta=0.2)
    assert torch.allclose((1 - e) * right + e * flipped, clean, atol=1e-12)


# -- reward model --


def test_bradley_terry_corner_cases() -> None:
    """P30: log(sigmoid(x)) was -inf for a large gap, and ties counted as right."""
    chosen = torch.tensor([1.5, -100.0, 3.0], dtype=torch.float64, requires_grad=True)
    rejected = torch.tensor([1.5, 100.0, 1.0], dtype=torch.float64, requires_grad=True)
    margins = torch.tensor([0.0, 0.0, 1.5], dtype=torch.float64)
    none = {"label_smoothing": 0.0, "center_coef": 0.0}
    losses = reward_model.bradley_terry_loss(chosen, rejected, margins, **none)
    assert losses.tolist() == pytest.approx([math.log(2), 200.0, -log_sigmoid(0.5)], abs=1e-12)
    losses.sum().backward()
    assert chosen.grad is not None and chosen.grad[1].item() == pytest.approx(-1.0)
    wins, ties = reward_model.wins_and_ties(chosen - rejected)
    assert (wins.item(), ties.item()) == (1, 1)


def test_bradley_terry_terms() -> None:
    rng = random.Random(1)
    rows = [[rng.gauss(0, 4) for _ in range(3)] for _ in range(40)]
    losses = reward_model.bradley_terry_loss(
        *torch.tensor(rows, dtype=torch.float64).unbind(1), label_smoothing=0.1, center_coef=0.02
    )
    slow = [
        -0.9 * log_sigmoid(c - r - m) - 0.1 * log_sigmoid(r + m - c) + 0.02 * (c + r) ** 2
        for c, r, m in rows
    ]
    assert losses.tolist() == pytest.approx(slow, rel=1e-12)


def slow_spearman(a: list[float], b: list[float]) -> float:
    def ranks(values: list[float]) -> list[float]:
        return [sum(v < x for v in values) + (sum(v == x for v in values) + 1) / 2 for x in values]

    return float(np.corrcoef(ranks(a), ranks(b))[0, 1])


def test_spearman_with_ties() -> None:
    rng = random.Random(2)
    a = [rng.randrange(8) for _ in range(50)]
    b = [x + rng.randrange(5) for x in a]
    ours = reward_model.spearman(np.array(a, float), np.array(b, float))
    assert ours == pytest.approx(slow_spearman(a, b), abs=1e-12)
    assert reward_model.spearman(np.array([1.0, 2, 3]), np.array([5.0, 9, 70])) == 1.0
    assert reward_model.spearman(np.array([1.0, 2, 3]), np.array([4.0, 4, 4])) == 0.0


def test_a_scorer_of_length_is_found_out() -> None:
    """Mean accuracy looked good because the better responses of the data were mostly longer."""
    rng = np.random.default_rng(0)
    lengths = rng.integers(10, 100, (1000, 2))
    longer_first = rng.random(1000) < 0.8
    lengths.sort(axis=1)
    lengths[longer_first] = lengths[longer_first, ::-1]
    scores = 0.1 * lengths.astype(float)
    grades = np.full((1000, 2), np.nan)
    metrics = reward_model.score_metrics(scores, lengths, grades)
    assert metrics["eval/accuracy"] > 0.75
    assert metrics["eval/length_correlation"] == pytest.approx(1.0)
    assert metrics["eval/accuracy_length_balanced"] == pytest.approx(0.5, abs=0.02)
    assert "eval/grade_correlation" not in metrics
    grades[::2] = -scores[::2]
    metrics = reward_model.score_metrics(scores, lengths, grades)
    assert metrics["eval/grade_correlation"] == pytest.approx(-1.0)


def test_calibration() -> None:
    """Labels drawn from the model's own probabilities are what a calibrated model sees."""
    rng = np.random.default_rng(0)
    margins = rng.normal(0, 2, 200_000)
    right = rng.random(200_000) < 1 / (1 + np.exp(-np.abs(margins)))
    scores = np.zeros((200_000, 2))
    scores[:, 0] = np.where(right, np.abs(margins), -np.abs(margins))
    lengths, grades = np.ones((200_000, 2), int), np.full((200_000, 2), np.nan)
    metrics = reward_model.score_metrics(scores, lengths, grades)
    assert metrics["eval/calibration_error"] < 0.01
    deciles = [metrics[f"eval/decile_accuracy/{number}"] for number in range(1, 11)]
    assert deciles == sorted(deciles) and deciles[0] < 0.55 and deciles[-1] > 0.95
    overconfident = reward_model.score_metrics(10 * scores, lengths, grades)
    assert overconfident["eval/calibration_error"] > 0.1
    assert overconfident["eval/accuracy"] == pytest.approx(metrics["eval/accuracy"], abs=1e-4)


def test_ties_are_no_wins() -> None:
    scores = np.array([[1.0, 1.0], [1.0, 1.0 + 1e-7], [2.0, 1.0], [0.0, 1.0]])
    metrics = reward_model.score_metrics(scores, np.ones((4, 2), int), np.full((4, 2), np.nan))
    assert (metrics["eval/accuracy"], metrics["eval/ties"]) == (0.25, 0.5)
    assert "eval/accuracy_length_balanced" not in metrics  # all lengths are equal
