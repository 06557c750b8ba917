"""PPO's pure functions against slow float64 loops and the numbers of other implementations.

TRL: `trl.experimental.ppo`, which releases from September 2026 on no longer have; verl: its
`core_algos.py`. Their results stand here as numbers, made with their own formulas from the same
inputs, padded as they want them.
"""

import itertools
import math
import os
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import ppo
from common.packing import pack
from tests.launch import environment

Masks = list[list[bool]]  # one list per sequence of a row

GARBAGE = (math.nan, math.inf, -math.inf, 1e30)
SETTINGS = [(1.0, 0.95), (1.0, 1.0), (0.9, 0.8), (0.97, 0.0), (0.0, 0.5)]  # gamma, lambda


def pattern(text: str) -> list[bool]:
    return [c == "r" for c in text]


def random_masks(seed: int) -> Masks:
    rng = random.Random(seed)
    lengths = [rng.choice([1, 2, 3, rng.randrange(4, 90)]) for _ in range(12)]
    return [[rng.random() < rng.choice([0.2, 0.9]) for _ in range(n)] for n in lengths]


ROWS: dict[str, Masks] = {
    "unequal": [
        pattern("ppppppr."),  # one action
        pattern("p" + "r" * 150 + "."),
        pattern("pprrrttttrttrr."),  # results of tools in the middle
        pattern("ppp."),  # nothing to train
        pattern("r."),
        pattern("pr" + "t" * 40 + "r."),
    ],
    "to the last position": [pattern("r"), pattern("prr"), pattern("r" * 33)],
    "one sequence fills the row": [pattern("r" * 64)],
    "one action": [pattern("r")],
    "dummy": [pattern("..")],
    **{f"random {seed}": random_masks(seed) for seed in range(4)},
}
every_row = pytest.mark.parametrize("masks", ROWS.values(), ids=list(ROWS))


def row_of(masks: Masks) -> tuple[Tensor, Tensor]:
    """response_mask (T,) bool and cu_seqlens (S+1,) i32."""
    cu_seqlens = [0, *itertools.accumulate(map(len, masks))]
    return torch.tensor(sum(masks, [])), torch.tensor(cu_seqlens, dtype=torch.int32)


def split(values: Tensor, masks: Masks) -> list[Tensor]:
    return list(values.split([len(mask) for mask in masks]))


def per_token(of_sequences: Tensor, masks: Masks) -> Tensor:
    return of_sequences.repeat_interleave(torch.tensor([len(mask) for mask in masks]))


def noise(masks: Masks, count: int, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    generator = torch.Generator().manual_seed(len(masks))
    size = sum(map(len, masks))
    return [torch.randn(size, generator=generator, dtype=dtype) for _ in range(count)]


def with_garbage(values: Tensor, mask: Tensor) -> Tensor:
    """The same where the mask is True, elsewhere what no one should look at."""
    garbage = torch.tensor(GARBAGE, dtype=values.dtype).repeat(len(mask) // len(GARBAGE) + 1)
    return torch.where(mask, values, garbage[: len(mask)])


@pytest.fixture(scope="module")
def group() -> Iterator[None]:
    """A process group of one, as a plain `python ppo.py` has."""
    ours = not dist.is_initialized()
    if ours:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    if ours:
        dist.destroy_process_group()


# ---- rewards of tokens ---------------------------------------------------------------------------


@every_row
def test_last_actions(masks: Masks) -> None:
    """P44: the last position of the row, or the first padding, was taken for the last action."""
    expected = []
    for mask in masks:
        last = max((t for t, is_action in enumerate(mask) if is_action), default=None)
        expected += [t == last for t in range(len(mask))]
    assert ppo.last_actions(*row_of(masks)).tolist() == expected


def test_last_actions_of_packed_sequences() -> None:
    """In the project's own layout an action stands where its token is predicted."""
    ids = [[5, 6, 7, 8, 9], [5, 6], [5, 6, 7], [5, 6, 7]]
    trained = [pattern("pprtr"), pattern("pr"), pattern("ppp"), pattern("rrr")]
    row = pack(range(4), ids, trained)
    last = ppo.last_actions(row.response_mask, row.cu_seqlens)
    assert row.target_ids[last].tolist() == [9, 6, 7]
    dummy = pack([], [], [])
    assert not ppo.last_actions(dummy.response_mask, dummy.cu_seqlens).any()


@every_row
def test_token_rewards_against_loop(masks: Masks) -> None:
    """P39, P44: the rewards of a sequence sum up to score - kl_coef * KL, at its actions alone."""
    scores, kl = torch.randn(len(masks), dtype=torch.float64), noise(masks, 1)[0]
    row = row_of(masks)
    rewards = ppo.token_rewards(per_token(scores, masks), kl, *row, kl_coef=0.3)
    of_sequences = zip(masks, split(rewards, masks), split(kl, masks), scores, strict=True)
    for mask, got, kl_of, score in of_sequences:
        expected = [-0.3 * kl_of[t].item() if mask[t] else 0.0 for t in range(len(mask))]
        if any(mask):
            expected[max(t for t in range(len(mask)) if mask[t])] += score.item()
            total = score.item() - 0.3 * sum(kl_of[t].item() for t in range(len(mask)) if mask[t])
            assert got.sum().item() == pytest.approx(total, abs=1e-12)
        assert got.tolist() == pytest.approx(expected, abs=1e-14)
    assert (rewards[~row[0]] == 0).all()


def test_more_kl_is_less_reward() -> None:
    """Where the policy says more than the reference did (k1 > 0), the token loses."""
    kl = ppo.kl_estimate(torch.tensor([-0.1, -3.0]), torch.tensor([-2.0, -1.0]), "k1")
    rewards = ppo.token_rewards(torch.zeros(2), kl, *row_of([[True, True]]), kl_coef=0.5)
    assert rewards.tolist() == pytest.approx([-0.95, 1.0])


# ---- advantages and returns ----------------------------------------------------------------------


def slow_gae(r: list[float], v: list[float], gamma: float, gae_lambda: float) -> list[float]:
    """Eq. 16 as it stands: the sum over all later deltas, for the actions of one sequence."""
    deltas = [r[t] + gamma * (v[t + 1] if t + 1 < len(v) else 0.0) - v[t] for t in range(len(r))]
    return [
        math.fsum((gamma * gae_lambda) ** k * delta for k, delta in enumerate(deltas[t:]))
        for t in range(len(r))
    ]


@every_row
@pytest.mark.parametrize("gamma, gae_lambda", SETTINGS)
def test_gae_against_loop(masks: Masks, gamma: float, gae_lambda: float) -> None:
    """P44. Results of tools are no steps: nothing is discounted for them, no V is read there."""
    rewards, values = noise(masks, 2)
    row = row_of(masks)
    results = ppo.gae(rewards, values, *row, gamma=gamma, gae_lambda=gae_lambda)
    singles = ppo.gae(rewards.float(), values.float(), *row, gamma=gamma, gae_lambda=gae_lambda)
    for got, single in zip(results, singles, strict=True):
        assert (got.dtype, single.dtype) == (torch.float64, torch.float32)
        assert torch.allclose(single.double(), got, rtol=1e-6, atol=1e-5)
        assert (got[~row[0]] == 0).all() and (single[~row[0]] == 0).all()
    parts = zip(masks, *(split(x, masks) for x in (rewards, values, *results)), strict=True)
    for mask, r, v, advantages, returns in parts:
        actions = torch.tensor(mask)
        expected = slow_gae(r[actions].tolist(), v[actions].tolist(), gamma, gae_lambda)
        assert advantages[actions].tolist() == pytest.approx(expected, rel=1e-11, abs=1e-11)
        targets = [a + x for a, x in zip(expected, v[actions].tolist(), strict=True)]
        assert returns[actions].tolist() == pytest.approx(targets, rel=1e-11, abs=1e-11)


def test_gae_of_one_action_and_of_monte_carlo() -> None:
    """P44: V is 0 after the last action, however the response ended."""
    one = ppo.gae(torch.tensor([2.0]), torch.tensor([0.5]), *row_of([[True]]), **GAE)
    assert [x.tolist() for x in one] == [[1.5], [2.0]]
    masks = [pattern("prrrtr."), pattern("prr")]
    rewards, values = noise(masks, 2)
    row = row_of(masks)
    _, returns = ppo.gae(rewards, values, *row, gamma=1.0, gae_lambda=1.0)
    for mask, r, got in zip(masks, split(rewards, masks), split(returns, masks), strict=True):
        actions = torch.tensor(mask)  # lambda 1: the rewards still to come, whatever V says
        to_come = r[actions].flip(0).cumsum(0).flip(0)
        assert torch.allclose(got[actions], to_come)


GAE: dict[str, Any] = {"gamma": 0.9, "gae_lambda": 0.8}


@every_row
def test_what_stands_at_masked_positions_does_not_matter(masks: Masks) -> None:
    """P39, P40, P44: tool and padding positions changed advantages; 0 * NaN is NaN."""
    mask, cu_seqlens = row_of(masks)
    kl, scores, values = noise(masks, 3, torch.float32)
    clean = ppo.token_rewards(scores, kl, mask, cu_seqlens, kl_coef=0.1)
    dirty = ppo.token_rewards(
        with_garbage(scores, mask), with_garbage(kl, mask), mask, cu_seqlens, kl_coef=0.1
    )
    assert torch.equal(clean, dirty)
    expected = ppo.gae(clean, values, mask, cu_seqlens, **GAE)
    got = ppo.gae(with_garbage(clean, mask), with_garbage(values, mask), mask, cu_seqlens, **GAE)
    assert all(map(torch.equal, got, expected))
    assert all(x.isfinite().all() for x in got)


def test_a_broken_sequence_breaks_no_other() -> None:
    masks = [pattern("prrr."), pattern("rrrrr"), pattern("prr."), pattern("r")]
    row = row_of(masks)
    rewards, values = noise(masks, 2, torch.float32)
    expected = ppo.gae(rewards, values, *row, **GAE)
    rewards[5:10], values[7] = math.nan, math.inf
    outside = torch.ones(len(rewards), dtype=torch.bool)
    outside[5:10] = False
    for got, clean in zip(ppo.gae(rewards, values, *row, **GAE), expected, strict=True):
        assert torch.equal(got[outside], clean[outside]) and got[5:10].isnan().any()


@every_row
def test_gae_is_the_same_bit_by_bit_packed_and_alone(masks: Masks) -> None:
    rewards, values = noise(masks, 2, torch.float32)
    together = ppo.gae(rewards, values, *row_of(masks), gamma=0.99, gae_lambda=0.95)
    parts = zip(masks, *(split(x, masks) for x in (rewards, values, *together)), strict=True)
    for mask, r, v, advantages, returns in parts:
        alone = ppo.gae(r, v, *row_of([mask]), gamma=0.99, gae_lambda=0.95)
        assert torch.equal(alone[0], advantages) and torch.equal(alone[1], returns)


def test_gae_of_a_long_row_takes_no_loop_over_its_tokens() -> None:
    masks = [[True] * 100_000]
    rewards, values = noise(masks, 2, torch.float32)
    row = row_of(masks)
    start = time.thread_time()  # not of the clock: other processes may be at work
    advantages, _ = ppo.gae(rewards, values, *row, gamma=1.0, gae_lambda=0.95)
    assert time.thread_time() - start < 1
    expected = 0.0
    following = 0.0
    for t in range(99_999, -1, -1):
        expected = rewards[t].item() + following - values[t].item() + 0.95 * expected
        following = values[t].item()
        if t in (0, 1, 65_536, 99_998):
            assert advantages[t].item() == pytest.approx(expected, rel=1e-6)


def test_gae_refuses_tensors_of_unequal_lengths() -> None:
    row = row_of([[True, True]])
    for lengths in ((3, 2), (2, 3), (1, 2), (3, 3)):
        r, v = (torch.zeros(n) for n in lengths)
        with pytest.raises(ValueError, match=f"{lengths[0]} rewards, {lengths[1]} values, 2 mask"):
            ppo.gae(r, v, *row, **GAE)


# Three responses, of 5, 3 and 1 tokens; KL and V at each of them.
TRL_KL = [[0.2, -0.2, 0.4, -0.5, 0.0], [0.6, -0.1, -0.5], [0.5]]
TRL_VALUES = [[0.1, 0.3, -0.2, 0.5, 0.4], [0.2, -0.1, 0.6], [-0.3]]
TRL_SCORES = [1.0, -0.5, 2.0]


def trl_case(after: list[float] | None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Rewards and values; with V `after` the last token there is one step more, if it fits."""
    kl, values = [list(x) for x in TRL_KL], [list(x) for x in TRL_VALUES]
    if after is not None:
        for s in (1, 2):  # the first response fills the row
            kl[s].append(0.0)
            values[s].append(after[s])
    masks = [[True] * len(x) for x in kl]
    row = row_of(masks)
    scores = per_token(torch.tensor(TRL_SCORES, dtype=torch.float64), masks)
    kl_of_tokens = torch.tensor(sum(kl, []), dtype=torch.float64)
    rewards = ppo.token_rewards(scores, kl_of_tokens, *row, kl_coef=0.1)
    return rewards, torch.tensor(sum(values, []), dtype=torch.float64), *row


def test_gae_of_trl_in_numbers() -> None:
    """P44: TRL's steps do not end with the last token, unless the response fills the row.

    One step more, that of the padding, has the score and a V of its own, .25 and .15 here. The
    critic also trains there, and for lambda < 1 its error reaches all earlier advantages. Returns
    of both are advantages + values before whitening.
    """
    trl = {
        "rewards": [
            *[-0.02, 0.02, -0.04, 0.05, 1.0],
            *[-0.06, 0.01, 0.05, -0.5],
            *[-0.05, 2.0],
        ],
        "advantages": [
            *[0.262674816, 0.1564928, 0.85624, 0.342, 0.6],
            *[-0.330416, 0.0272, -0.865, -0.75],
            *[1.717, 1.85],
        ],
        "returns": [
            *[0.362674816, 0.4564928, 0.65624, 0.842, 1.0],
            *[-0.130416, -0.0728, -0.265, -0.5],
            *[1.417, 2.0],
        ],
    }
    rewards, values, *row = trl_case(after=[0.0, 0.25, 0.15])
    assert rewards.tolist() == pytest.approx(trl["rewards"])
    advantages, returns = ppo.gae(rewards, values, *row, **GAE)
    assert advantages.tolist() == pytest.approx(trl["advantages"])
    assert returns.tolist() == pytest.approx(trl["returns"])
    # Ours, in which a response ends with its last token: the same where it fills the row,
    rewards, values, *row = trl_case(after=None)
    advantages, returns = ppo.gae(rewards, values, *row, **GAE)
    assert advantages[:5].tolist() == pytest.approx(trl["advantages"][:5])
    assert returns[:5].tolist() == pytest.approx(trl["returns"][:5])
    # and elsewhere the score in full: delta of the single action is -.05 + 2 + .3.
    assert advantages[5:].tolist() == pytest.approx([-0.42632, -0.106, -1.05, 2.25])
    assert returns[5:].tolist() == pytest.approx([-0.22632, -0.206, -0.45, 1.95])


VERL_MASKS = [pattern("rrttrr"), pattern("rrr"), pattern("r")]
VERL_REWARDS = [[0.02, -0.05, 7, 7, 0.03, 1.04], [-0.01, 0.06, -0.45], [2.0]]
VERL_VALUES = [[0.1, 0.3, 5, 5, -0.2, 0.5], [0.2, -0.1, 0.6], [-0.3]]


def test_gae_and_whitening_of_verl_in_numbers(group: None) -> None:
    """Steps are ours; results of tools too are left out: 7 and 5 stand there, without effect.

    Whitening is over the whole batch, as ours, but with the variance of a sample, N - 1; ours of
    the population makes values larger by sqrt(N / (N - 1)), here N = 8.
    """
    verl_returns = [0.46246592, 0.539536, 0.8688, 1.04, -0.14032, -0.156, -0.45, 2.0]
    verl_whitened = [
        *[-0.0206530210, -0.1439333343, 0.6876943582, 0.1573870932],
        *[-0.7254421267, -0.4403117153, -1.4371449630],
        1.9224037089,
    ]
    mask, cu_seqlens = row_of(VERL_MASKS)
    rewards, values = (
        torch.tensor(sum(x, []), dtype=torch.float64) for x in (VERL_REWARDS, VERL_VALUES)
    )
    advantages, returns = ppo.gae(rewards, values, mask, cu_seqlens, **GAE)
    assert returns[mask].tolist() == pytest.approx(verl_returns)
    whitened = ppo.whiten([advantages.float()], [mask])[0][mask] * math.sqrt(7 / 8)
    assert whitened.tolist() == pytest.approx(verl_whitened, abs=1e-6)


# ---- whitening -----------------------------------------------------------------------------------


def slow_whiten(values: list[float]) -> list[float]:
    """Mean 0 and population variance 1, but for the 1e-8 that TRL and verl have there as well."""
    mean = math.fsum(values) / len(values)
    variance = math.fsum((x - mean) ** 2 for x in values) / len(values)
    return [(x - mean) / math.sqrt(variance + 1e-8) for x in values]


def test_whitening_against_loop(group: None) -> None:
    """P46: padding was counted, and microbatches or ranks were whitened for themselves."""
    masks = [row_of(m)[0] for m in ROWS.values()]
    values = [3 * v + 2 for m in ROWS.values() for v in noise(m, 1, torch.float32)]
    before = [v.clone() for v in values]
    got = ppo.whiten(values, masks)
    expected = slow_whiten([x for v, m in zip(values, masks, strict=True) for x in v[m].tolist()])
    inside = torch.cat([g[m] for g, m in zip(got, masks, strict=True)])
    assert inside.tolist() == pytest.approx(expected, abs=1e-6)
    assert inside.double().mean().item() == pytest.approx(0, abs=1e-6)
    assert inside.double().var(correction=0).item() == pytest.approx(1, abs=1e-6)
    assert all((g[~m] == 0).all() for g, m in zip(got, masks, strict=True))
    assert all(g.dtype == torch.float32 for g in got)
    assert all(map(torch.equal, values, before))
    dirty = [with_garbage(v, m) for v, m in zip(values, masks, strict=True)]
    assert all(map(torch.equal, ppo.whiten(dirty, masks), got))  # P40


def test_whitening_with_the_variance_of_the_population(group: None) -> None:
    """P46 and [D5]: TRL and verl divide by N - 1, which gives .866 times as much here.

    TRL: -.7348469, -.4898979, -.2449490, 1.4696938 for 1, 2, 3, 10 (of one rank alone).
    """
    masks = [torch.tensor([True, False, True, True]), torch.tensor([True])]
    got = ppo.whiten([torch.tensor([1.0, 99.0, 2.0, 3.0]), torch.tensor([10.0])], masks)
    assert got[0].tolist() == pytest.approx([-0.8485281, 0.0, -0.5656854, -0.2828427])
    assert got[1].tolist() == pytest.approx([1.6970563])
    assert (10 - 4) / got[1].item() == pytest.approx(math.sqrt(12.5))


def test_whitening_where_there_is_nothing_to_scale(group: None) -> None:
    """P35: rounding noise of equal values was blown up to size 1."""
    x = torch.tensor([1 / 3, 1000.0])
    small, large = torch.stack([x, x.nextafter(x + 1), x], dim=1)
    for values in (torch.full((7,), 0.1), torch.zeros(3), torch.tensor([-5.0]), small, large):
        (got,) = ppo.whiten([values], [torch.ones(len(values), dtype=torch.bool)])
        assert (got == 0).all() and got.shape == values.shape, values
    nowhere = torch.zeros(3, dtype=torch.bool)
    (got,) = ppo.whiten([torch.full((3,), math.nan)], [nowhere])
    assert got.tolist() == [0, 0, 0]
    assert ppo.whiten([], []) == []
    some = torch.tensor([True, True, False])
    got = ppo.whiten([torch.full((3,), math.inf), torch.tensor([1.0, 3.0, 9.0])], [nowhere, some])
    assert [x.tolist() for x in got] == [[0, 0, 0], pytest.approx([-1, 1, 0])]


def test_whitening_far_from_zero(group: None) -> None:
    """The mean of squares less the square of the mean: no digit left in f32, few in f64."""
    generator = torch.Generator().manual_seed(0)
    values = 1e6 + torch.randint(0, 64, (999,), generator=generator) / 8  # f32 holds these exactly
    assert 2e-6 < (values.double().std() / values.mean()).item() < 3e-6  # small, but no noise
    (got,) = ppo.whiten([values], [torch.ones(999, dtype=torch.bool)])
    assert got.tolist() == pytest.approx(slow_whiten(values.tolist()), abs=1e-6)


def test_whitening_of_what_is_tiny(group: None) -> None:
    """Not noise, as it is not small beside its mean: but for the 1e-8, .001 would be 1."""
    (got,) = ppo.whiten([torch.tensor([1e-7, 3e-7])], [torch.tensor([True, True])])
    assert got.tolist() == pytest.approx([-0.001, 0.001], rel=1e-4)


Shares = list[list[tuple[list[float], str]]]  # of each rank, of each microbatch: values, mask
LONG = [math.sin(i) * i for i in range(60)]
TWO_RANKS: dict[str, Shares] = {
    "the example": [[([1.0, 2.0, 3.0], "rrr")], [([10.0], "r")]],
    "masks": [
        [([1.0, math.nan, 2.0], "rtr"), (LONG, "r" * 60)],
        [([5.0, math.inf], "r."), ([-1.0, 8.0, 0.5], "rtr")],
    ],
    "a dummy row": [[([1.0, 2.0, 3.0], "rrr")], [([7.0, math.nan], "..")]],
    "no microbatch": [[(LONG, "r" * 60), ([4.0], "r")], []],
    "no microbatch on rank 0": [[], [([1.0, 3.0], "rr")]],
    "nothing at all": [[], [([7.0, 7.0], "..")]],
    "equal on all ranks": [[([0.1, 0.1], "rr")], [([0.1], "r")]],
    "equal on each rank": [[([1.0, 1.0], "rr")], [([3.0, 3.0], "rr")]],
}


def whiten_share(share: list[tuple[list[float], str]]) -> list[Tensor]:
    return ppo.whiten(
        [torch.tensor(values) for values, _ in share],
        [torch.tensor(pattern(mask)) for _, mask in share],
    )


def whiten_on_rank(rank: int, folder: Path) -> None:
    """What each of the two processes does."""
    torch.set_num_threads(1)
    store = dist.FileStore(str(folder / "store"), 2)
    limit = timedelta(seconds=20)  # a rank that skips a collective fails instead of hanging
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=limit)
    torch.save({k: whiten_share(v[rank]) for k, v in TWO_RANKS.items()}, folder / f"{rank}.pt")
    dist.destroy_process_group()


def fork_ranks(folder: Path) -> None:
    torch.multiprocessing.start_processes(
        whiten_on_rank, args=(folder,), nprocs=2, start_method="fork"
    )


def test_whitening_on_two_ranks(tmp_path: Path, group: None) -> None:
    """P46: each rank used its own statistics, or waited forever for one that had no tokens."""
    # The ranks are forks of a process of their own: ppo.py is imported once, and ours has threads.
    code = "import sys, test_ppo_losses as t; t.fork_ranks(t.Path(sys.argv[1]))"
    answer = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)],
        env=environment() | {"PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert answer.returncode == 0, answer.stderr[-3000:]
    ranks = [torch.load(tmp_path / f"{rank}.pt") for rank in range(2)]
    for name, shares in TWO_RANKS.items():
        together = whiten_share([*shares[0], *shares[1]])
        for got, expected in zip([*ranks[0][name], *ranks[1][name]], together, strict=True):
            assert torch.allclose(got, expected, atol=1e-6), name
    example = [ranks[0]["the example"][0].tolist(), ranks[1]["the example"][0].tolist()]
    assert example == [
        pytest.approx([(x - 4) / math.sqrt(12.5) for x in (1, 2, 3)]),
        pytest.approx([6 / math.sqrt(12.5)]),
    ]
    assert ranks[1]["a dummy row"][0].tolist() == [0, 0]
    assert ranks[1]["nothing at all"][0].tolist() == [0, 0]
    assert (torch.cat([r["equal on all ranks"][0] for r in ranks]) == 0).all()
    for rank, sign in ((0, -1.0), (1, 1.0)):
        assert ranks[rank]["equal on each rank"][0].tolist() == pytest.approx([sign, sign])


# ---- critic's loss -------------------------------------------------------------------------------


@pytest.mark.parametrize("clip", [None, 0.2, 5.0])
def test_value_loss_and_its_gradient(clip: float | None) -> None:
    """Half a square, so the gradient is the error itself; none exactly where the clip binds."""
    torch.manual_seed(0)
    values, returns = torch.randn(2, 500, dtype=torch.float64)
    new_values = (values + 0.3 * torch.randn(500, dtype=torch.float64)).requires_grad_()
    loss, cut = ppo.value_loss(new_values, values, returns, clip=clip)
    loss.sum().backward()
    assert loss.shape == cut.shape == (500,) and cut.dtype == torch.bool
    assert new_values.grad is not None
    binds = 0
    for i in range(500):
        v, old, target = (x[i].item() for x in (new_values, values, returns))
        c = math.inf if clip is None else clip
        limited = min(max(v, old - c), old + c)
        expected = max((v - target) ** 2, (limited - target) ** 2) / 2
        assert loss[i].item() == pytest.approx(expected)
        away = abs(limited - target) > abs(v - target)  # it has come too close to the return
        binds += away
        assert cut[i].item() == away
        gradient = new_values.grad[i].item()
        assert gradient == (0.0 if away else pytest.approx(v - target))
    assert (20 < binds < 480) == (clip == 0.2)


def test_value_loss_by_hand() -> None:
    """Old value 0, clip .2. Baselines, TRL and verl have the 0.5 as well; none has it twice."""
    new_values = torch.tensor([0.1, 0.5, 0.5, -0.5, 0.5], requires_grad=True)
    returns = torch.tensor([1.0, 1.0, 0.3, 1.0, 0.2])
    loss, cut = ppo.value_loss(new_values, torch.zeros(5), returns, clip=0.2)
    # inside; too far towards the return; beyond it, so the error grows; away from it; beyond it
    assert loss.tolist() == pytest.approx([0.405, 0.32, 0.02, 1.125, 0.045])
    assert cut.tolist() == [False, True, False, False, False]
    loss.sum().backward()
    assert new_values.grad is not None
    assert new_values.grad.tolist() == pytest.approx([-0.9, 0.0, 0.2, -1.5, 0.3])
    loss, cut = ppo.value_loss(new_values, torch.zeros(5), returns, clip=None)
    assert loss.tolist() == pytest.approx([0.405, 0.125, 0.02, 1.125, 0.045])
    assert not cut.any()


def test_a_clip_that_does_not_bind_is_not_counted() -> None:
    """Its error differed from the plain one by rounding, so the metric depended on the packing."""
    numbers = ("0x1.0d862cp-7", "0x1.853244p-5", "-0x1.8a29fp-3")
    new, old, target = (torch.tensor([float.fromhex(number)]) for number in numbers)
    assert not ppo.value_loss(new, old, target, clip=0.2)[1].any()


def test_value_loss_of_trl_and_verl_in_numbers() -> None:
    """Both average half of the larger square over tokens, verl over those of the responses.

    TRL also over the step after the last token, if there is one: 11 terms here in place of 9.
    """
    values = torch.tensor(sum(TRL_VALUES, []), dtype=torch.float64)
    returns = [0.362674816, 0.4564928, 0.65624, 0.842, 1.0, -0.130416, -0.0728, -0.265, 1.417]
    changes = [0.05, -0.5, 0.3, 0.1, -0.25, 0.4, 0.1, -0.3, 0.6]
    new_values = values + torch.tensor(changes, dtype=torch.float64)  # 3 of 9 are cut
    targets = torch.tensor(returns, dtype=torch.float64)
    loss, cut = ppo.value_loss(new_values, values, targets, clip=0.2)
    assert loss.mean().item() == pytest.approx(0.27612498247)
    assert cut.sum().item() == 3
    free, _ = ppo.value_loss(new_values, values, targets, clip=None)
    assert free.mean().item() == pytest.approx(0.2040223158)
    # TRL's two other steps, of V .25 -> .3 and .15 -> .05 with the returns -.5 and 2
    more, _ = ppo.value_loss(
        torch.tensor([0.3, 0.05]), torch.tensor([0.25, 0.15]), torch.tensor([-0.5, 2.0]), clip=0.2
    )
    assert torch.cat([loss, more]).mean().item() == pytest.approx(0.42785225838)


# ---- coefficient of the KL -----------------------------------------------------------------------


def test_adaptive_kl_coefficient() -> None:
    """P49. Nats are per response, as Ziegler's 6 and TRL's sums; verl's controller gets means.

    The numbers of verl's (and once TRL's) controller for the same sequence of measurements.
    """
    settings: dict[str, Any] = {"target": 6, "horizon": 10_000}
    assert ppo.adapt_kl_coef(0.2, 12, **settings, num_responses=256) == 0.201024
    coefficient = 0.2
    for kl, num_responses, expected in (
        (12, 256, 0.201024),  # twice the target: as much as 20 % above
        (6.6, 512, 0.20205324288),
        (3, 256, 0.20101873027645442),  # half of it: as little as 20 % below
        (5.7, 100, 0.2009182209113162),
    ):
        coefficient = ppo.adapt_kl_coef(coefficient, kl, **settings, num_responses=num_responses)
        assert coefficient == pytest.approx(expected, rel=1e-14)


@pytest.mark.parametrize(
    "kl, factor",
    [(6, 1.0), (6.3, 1.005), (7.2, 1.02), (1e9, 1.02), (5.7, 0.995), (4.8, 0.98), (-3, 0.98)],
)
def test_adaptive_kl_coefficient_moves_to_its_target(kl: float, factor: float) -> None:
    """k1 of a sample can be below 0. A tenth of a horizon: a tenth of 20 % at most."""
    new = ppo.adapt_kl_coef(0.5, kl, target=6, horizon=1000, num_responses=100)
    assert new == pytest.approx(0.5 * factor, rel=1e-12)


# ---- selection of responses ----------------------------------------------------------------------


def kept(scores: list[float], size: int, keep: str, k: int, seed: int = 0) -> set[int]:
    rng = np.random.default_rng(seed)
    given = torch.tensor(scores, dtype=torch.float64)
    mask = ppo.filter_by_rank(given, size, keep=keep, k=k, rng=rng)
    assert mask.dtype == torch.bool and mask.shape == given.shape
    return {i for i, flag in enumerate(mask.tolist()) if flag}


SIX = [0.3, -1.0, 0.2, 0.5, 0.4, 0.0]


@pytest.mark.parametrize(
    "keep, k, expected",
    [
        ("best_k", 1, {3}),
        ("best_k", 2, {3, 4}),
        ("best_k", 5, {3, 4, 0, 2, 5}),
        ("best_worst", 1, {3}),
        ("best_worst", 2, {3, 1}),  # verl's "max_min": all weight on these two
        ("best_worst", 3, {3, 4, 1}),
        ("best_worst", 4, {3, 4, 1, 5}),
        ("best_worst", 5, {3, 4, 0, 1, 5}),
        ("best_random", 1, {3}),
        *((keep, k, set(range(6))) for keep in ("best_k", "best_worst") for k in (6, 9)),
        *(("best_random", k, set(range(6))) for k in (6, 9)),
    ],
)
def test_filtration_by_hand(keep: str, k: int, expected: set[int]) -> None:
    """PF-PPO draws responses by weights of their ranks; with all or nothing there is no draw."""
    assert kept(SIX, 6, keep, k) == expected
    other = [-s for s in SIX]  # a group for itself: here the order of the ranks is reversed
    both = kept(SIX + other, 6, keep, k)
    assert {i for i in both if i < 6} == expected
    assert {i - 6 for i in both if i >= 6} == kept(other, 6, keep, k)


def slow_filter(group: list[float], keep: str, k: int) -> set[int]:
    known = [i for i, s in enumerate(group) if not math.isnan(s)]
    ahead = {
        i: sum(group[j] > group[i] or (group[j] == group[i] and j < i) for j in known)
        for i in known
    }
    if keep == "best_k":
        return {i for i in known if ahead[i] < k}
    best = math.ceil(k / 2)
    return {i for i in known if ahead[i] < best or len(known) - 1 - ahead[i] < k - best}


@pytest.mark.parametrize("keep", ["best_k", "best_worst"])
def test_filtration_with_ties_and_unscored_against_loop(keep: str) -> None:
    rng = random.Random(0)
    for size in (2, 3, 4, 7):
        choices = [math.nan, 0.0, 1.0, -math.inf, rng.random(), -rng.random()]
        scores = [rng.choice(choices) for _ in range(20 * size)]
        for k in range(1, size + 2):
            expected = set()
            for start in range(0, len(scores), size):
                of_group = slow_filter(scores[start : start + size], keep, k)
                expected |= {start + i for i in of_group}
            assert kept(scores, size, keep, k) == expected, (size, k)


def test_filtration_of_ties_and_unscored_by_hand() -> None:
    """P36: a response without a score was ranked, here as the best of all."""
    nan = math.nan
    assert kept([1, 1, 1, 1], 4, "best_k", 2) == {0, 1}
    assert kept([1, 1, 1, 1], 4, "best_worst", 2) == {0, 3}
    assert kept([2, 1, 1, 2], 4, "best_worst", 3) == {0, 3, 2}
    for keep in ("best_k", "best_random", "best_worst"):
        assert kept([nan, 1, nan, 0], 4, keep, 3) == {1, 3}, keep
        assert kept([nan, 1, nan, 0], 4, keep, 1) == {1}, keep
        assert kept([nan] * 4 + [nan, nan, 3, nan], 4, keep, 2) == {6}, keep
    for seed in range(20):
        chosen = kept([nan, 1, 5, nan, 0], 5, "best_random", 2, seed)
        assert len(chosen) == 2 and 2 in chosen and chosen <= {1, 2, 4}


def test_random_members_are_uniform_and_repeatable() -> None:
    """The best one always, and every other one equally often (verl's "max_random": .4 and .1)."""
    for k in (2, 3):
        counts = np.zeros(6)
        scores = torch.tensor(SIX * 4000)
        rng = np.random.default_rng(1)
        mask = ppo.filter_by_rank(scores, 6, keep="best_random", k=k, rng=rng).view(-1, 6)
        assert (mask.sum(1) == k).all()
        counts = mask.double().mean(0)
        assert counts[3] == 1
        others = counts[[0, 1, 2, 4, 5]]
        assert ((others - (k - 1) / 5).abs() < 0.03).all(), others  # 4 standard errors and more
    many = SIX * 20
    assert kept(many, 6, "best_random", 3, 7) == kept(many, 6, "best_random", 3, 7)
    assert kept(many, 6, "best_random", 3, 7) != kept(many, 6, "best_random", 3, 8)


# ---- running statistics --------------------------------------------------------------------------


@pytest.mark.parametrize("offset", [0.0, 1e8])
def test_moments_are_those_of_all_values_at_once(offset: float) -> None:
    """Sums of squares would have no digit left at 1e8; means of batch means weigh wrongly."""
    generator = torch.Generator().manual_seed(0)
    batches = [
        offset + scale * torch.randn(n, generator=generator, dtype=torch.float64) + shift
        for n, scale, shift in (
            *((0, 1.0, 0.0), (1, 1.0, 5.0), (1000, 0.1, -2.0), (3, 10.0, 0.0)),
            *((0, 1.0, 0.0), (20_000, 1.0, 1.0), (1, 1.0, -50.0), (2, 1.0, 0.0)),
        )
    ]
    moments = [0.0, 0.0, 0.0]
    for i, batch in enumerate(batches):
        before = list(moments)
        moments = ppo.add_to_moments(moments, batch)
        assert len(batch) or moments == before
        so_far = torch.cat(batches[: i + 1])
        assert moments[0] == len(so_far)
        if len(so_far):
            assert moments[1] == pytest.approx(so_far.mean().item(), rel=1e-12, abs=1e-12)
            spread = so_far.var(correction=0).item() * len(so_far)
            assert moments[2] == pytest.approx(spread, rel=1e-6 if offset else 1e-11, abs=1e-12)


def test_moments_of_f32_scores_are_taken_in_f64() -> None:
    scores = torch.tensor([2.0**24 - 1, 2.0**24, 2.0**24 - 1, 2.0**24])
    count, mean, squares = ppo.add_to_moments([0.0, 0.0, 0.0], scores)
    assert (count, mean, squares) == (4, 2.0**24 - 0.5, 1.0)
    moments = [3, 1.0, 2.0]
    ppo.add_to_moments(moments, scores)
    assert moments == [3, 1.0, 2.0]


def test_usual_values_forget_in_about_ten_steps() -> None:
    usual = ppo.add_to_usual({}, {"a": 5.0})
    assert usual == {"a": 5.0}
    first = dict(usual)
    expected = 5.0
    for i in range(10):
        before = dict(usual)
        updated = ppo.add_to_usual(usual, {"a": 1.0 + i, "b": 2.0})
        assert usual == before  # not in place
        usual = updated
        expected = 0.9 * expected + 0.1 * (1.0 + i)
        assert usual == {"a": pytest.approx(expected), "b": pytest.approx(2.0)}
    assert ppo.add_to_usual({"a": 1.0, "b": 3.0}, {"a": 2.0}) == {"a": 1.1, "b": 3.0}
    assert first == {"a": 5.0}


# ---- guard ---------------------------------------------------------------------------------------

USUAL = {"reward": 1.0, "reward_std": 0.2, "kl": 0.05, "entropy": 2.0}
LIMITS: dict[str, Any] = {"max_kl": 1.0, "reward_drop": 0.5, "entropy_share": 0.1}
LIMITS["num_responses"] = 1000


def breach(usual: dict[str, float] | None = None, **measured: float) -> str:
    """The first word of the reason, or nothing; "no" usual values stand for the first step."""
    reference = USUAL if usual is None else usual
    return (ppo.guard_breach(USUAL | measured, reference, **LIMITS) or "").partition(" ")[0]


def test_each_reason_of_the_guard() -> None:
    assert breach() == ""
    assert breach(kl=0.99) == breach(kl=1.0) == breach(kl=-3.0) == ""
    assert breach(kl=1.01) == "KL"
    assert breach(reward=0.51) == breach(reward=0.5) == breach(reward=100.0) == ""
    assert breach(reward=0.49) == breach(reward=-1e6) == "reward"
    assert breach(entropy=0.21) == breach(entropy=0.2) == breach(entropy=50.0) == ""
    assert breach(entropy=0.19) == breach(entropy=0.0) == "entropy"
    assert breach(reward_std=0.0) == breach(reward_std=9.0) == ""


@pytest.mark.parametrize("name", list(USUAL))
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_guard_takes_numbers_that_are_none_for_a_breach(name: str, value: float) -> None:
    """A comparison with NaN is False, so no limit is exceeded."""
    for usual in (USUAL, {}):
        assert ppo.guard_breach(USUAL | {name: value}, usual, **LIMITS) == f"{name} is {value}"


def test_guard_at_the_first_step() -> None:
    """Nothing to compare with: only the limit of the KL stands by itself."""
    assert breach({}, reward=-1e6, entropy=0.0) == ""
    assert breach({}, kl=1.01) == "KL"


def test_guard_on_rewards_that_are_negative_or_near_zero() -> None:
    """A share of a negative mean is negative: every value would be a breach, or none."""
    negative = USUAL | {"reward": -2.0}
    assert breach(negative, reward=-2.9) == breach(negative, reward=-1.0) == ""
    assert breach(negative, reward=-3.1) == "reward"
    # around 0 the std is the scale: half of 3
    zero = USUAL | {"reward": 0.01, "reward_std": 3.0}
    assert breach(zero, reward=-1.4) == ""
    assert breach(zero, reward=-1.6) == "reward"
    # neither: no scale to measure a fall by
    none = USUAL | {"reward": 0.0, "reward_std": 0.0}
    assert breach(none, reward=0.0) == breach(none, reward=-1.0) == ""
    # and a std of 0 alone is no obstacle
    assert breach(USUAL | {"reward_std": 0.0}, reward=0.4) == "reward"


def test_guard_leaves_room_for_the_noise_of_a_small_batch() -> None:
    """16 scores of 0 or 1 with mean 0.3: their mean is 0 once in 300 steps."""
    usual = USUAL | {"reward": 0.3, "reward_std": 0.46}
    for num_responses, reward, reason in ((16, 0.0, None), (64, 0.0, "reward"), (64, 0.1, None)):
        measured = usual | {"reward": reward}
        limits = LIMITS | {"num_responses": num_responses}
        found = ppo.guard_breach(measured, usual, **limits)
        assert (found and found.partition(" ")[0]) == reason


def test_guard_names_its_flags() -> None:
    for measured, flag in (
        ({"kl": 7.5}, "7.5 nats per token > --guard_kl=1.0"),
        ({"reward": -3.0}, "-3 fell from a running mean of 1 by more than --guard_reward_drop=0.5"),
        ({"entropy": 0.1}, "0.1 < --guard_entropy=0.1 times its running mean, 2"),
    ):
        assert flag in (ppo.guard_breach(USUAL | measured, USUAL, **LIMITS) or "")


# ---- policy's loss -------------------------------------------------------------------------------


def test_dual_clip_of_verl_in_numbers() -> None:
    """Bounded at 3 |A| where A < 0. Verl also keeps the ratio between e^-20 and e^20."""
    ratios = [0.5, 0.9, 1.1, 1.5, 2.5, 3.5, 0.5, 1.5, 25.0]
    advantages = [-2.0] * 6 + [1.0, 1.0, -0.5]
    logprobs = torch.tensor(ratios, dtype=torch.float64).log().requires_grad_()
    loss, ratio = ppo.policy_loss(
        logprobs,
        torch.zeros(9, dtype=torch.float64),
        torch.tensor(advantages, dtype=torch.float64),
        clip_low=0.2,
        clip_high=0.28,
        dual_clip=3.0,
    )
    assert loss.tolist() == pytest.approx([1.6, 1.8, 2.2, 3.0, 5.0, 6.0, -0.5, -1.28, 1.5])
    assert ratio.tolist() == pytest.approx(ratios)
    loss.sum().backward()
    assert logprobs.grad is not None
    expected = [0.0, 1.8, 2.2, 3.0, 5.0, 0.0, -0.5, 0.0, 0.0]
    assert logprobs.grad.tolist() == pytest.approx(expected)


@pytest.mark.parametrize("dual_clip", [None, 3.0])
def test_learning_goes_the_right_way(dual_clip: float | None) -> None:
    """From scores to weights: what scored more than V said becomes likelier, and V follows."""
    masks = [pattern("pr."), pattern("pr.")]
    row = row_of(masks)
    actions = torch.tensor([0, 2, 0, 0, 1, 0])  # the tokens sampled at positions 1 and 4
    logits = torch.zeros(6, 3, requires_grad=True)
    critic = torch.full((6,), 0.25, requires_grad=True)
    logprobs = logits.log_softmax(-1).gather(1, actions[:, None])[:, 0]
    scores = per_token(torch.tensor([1.0, -1.0]), masks)
    kl = torch.zeros(6)
    rewards = ppo.token_rewards(scores, kl, *row, kl_coef=0.05)
    advantages, returns = ppo.gae(rewards, critic.detach(), *row, gamma=1.0, gae_lambda=0.95)
    token_loss, _ = ppo.policy_loss(
        logprobs, logprobs.detach(), advantages, clip_low=0.2, clip_high=0.2, dual_clip=dual_clip
    )
    value_loss, _ = ppo.value_loss(critic, critic.detach(), returns, clip=0.2)
    (
        torch.where(row[0], token_loss, 0.0).sum() + torch.where(row[0], value_loss, 0.0).sum()
    ).backward()
    assert logits.grad is not None and critic.grad is not None
    after = (logits - 0.1 * logits.grad).log_softmax(-1).gather(1, actions[:, None])[:, 0]
    change = (after - logprobs).tolist()
    assert change[1] > 0.01 and change[4] < -0.01
    assert [change[i] for i in (0, 2, 3, 5)] == [0.0] * 4
    assert critic.grad.tolist() == pytest.approx([0, -0.75, 0, 0, 1.25, 0])  # descent: to 1 and -1
