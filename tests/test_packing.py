import random

import pytest
import torch

from common.packing import PackedRow, pack, plan_microbatches


def random_sequences(rng: random.Random, num: int) -> tuple[list[list[int]], list[list[bool]]]:
    ids = [[rng.randrange(100) for _ in range(rng.randint(1, 9))] for _ in range(num)]
    masks = [[False, *(rng.random() < 0.5 for _ in row[1:])] for row in ids]
    return ids, masks


def loads_of(plan: list[list[list[int]]], lengths: list[int]) -> list[list[int]]:
    return [[sum(lengths[i] for i in indices) for indices in rank] for rank in plan]


# -- layout --


def test_alignment_table():
    p0, p1, r0, r1, eos = range(10, 15)
    row = pack([7], [[p0, p1, r0, r1, eos]], [[False, False, True, True, True]])
    assert row.input_ids.tolist() == [p0, p1, r0, r1, eos]
    assert row.target_ids.tolist() == [p1, r0, r1, eos, -1]
    assert row.response_mask.tolist() == [False, True, True, True, False]
    assert row.position_ids.tolist() == [0, 1, 2, 3, 4]
    assert row.cu_seqlens.tolist() == [0, 5]
    assert (row.sequence_ids, row.seqlens, row.response_lengths) == ([7], [5], [3])


def test_dtypes_and_sizes():
    row = pack([0, 1], [[1, 2], [3, 4, 5]], [[False, True], [False, False, True]])
    for name in ("input_ids", "target_ids", "position_ids"):
        assert getattr(row, name).dtype == torch.int64, name
    assert row.cu_seqlens.dtype == torch.int32
    assert row.response_mask.dtype == torch.bool
    assert row.num_tokens == 5


def test_no_target_crosses_a_boundary():
    """P18: the last token of one sample predicted the first token of the next."""
    rng = random.Random(0)
    ids, masks = random_sequences(rng, 20)
    row = pack(range(20), ids, masks)
    alone = [pack([i], [ids[i]], [masks[i]]) for i in range(20)]
    assert (row.target_ids >= 0).sum() == sum((r.target_ids >= 0).sum() for r in alone)
    for name in ("input_ids", "target_ids", "position_ids", "response_mask"):
        assert torch.equal(getattr(row, name), torch.cat([getattr(r, name) for r in alone])), name
    assert (row.target_ids[row.cu_seqlens[1:].long() - 1] == -1).all()


def test_positions_restart():
    """P17: position ids kept counting across the sequences of a row."""
    row = pack([0, 1], [[1, 2, 3], [4, 5]], [[False] * 3, [False] * 2])
    assert row.position_ids.tolist() == [0, 1, 2, 0, 1]


def test_trained_positions_equal_response_tokens():
    """P06: the mask was shifted the wrong way: 4 response tokens are 4 trained positions."""
    ids = [[1, 2, 3, 4, 5, 6, 7]]
    row = pack([0], ids, [[False] * 3 + [True] * 4])
    assert row.response_mask.tolist() == [False, False, True, True, True, True, False]
    assert row.target_ids[row.response_mask].tolist() == [4, 5, 6, 7]


def test_first_token_is_never_trained():
    row = pack([0, 1], [[1, 2], [3]], [[True, True], [True]])
    assert row.response_mask.tolist() == [True, False, False]
    assert row.response_lengths == [1, 0]


def test_a_shared_beginning_is_laid_out_once():
    p0, p1, c0, c1, r0 = range(10, 15)
    ids = [[p0, p1, c0, c1], [p0, p1, r0]]
    masks = [[False, False, True, True], [False, False, True]]
    row = pack([4, 9], ids, masks, shared=[0, 1])
    assert row.input_ids.tolist() == [p0, p1, c0, c1, p1, r0]
    assert row.target_ids.tolist() == [p1, c0, c1, -1, r0, -1]
    assert row.response_mask.tolist() == [False, True, True, False, True, False]
    assert row.position_ids.tolist() == [0, 1, 2, 3, 1, 2]
    assert (row.seqlens, row.cu_seqlens.tolist()) == ([4, 2], [0, 4, 6])
    assert (row.full_seqlens, row.full_cu_seqlens.tolist()) == ([4, 3], [0, 4, 7])
    assert row.full_index is not None and row.own_index is not None
    assert row.input_ids[row.full_index].tolist() == [*ids[0], *ids[1]]
    assert row.full_index[row.own_index].tolist() == list(range(6))
    assert [part.tolist() for part in row.split(row.target_ids)] == [[c0, c1], [r0]]


@pytest.mark.parametrize(
    "shared",
    [
        [1, 0],  # nothing before it
        [0, 2],  # a target is among them
        [0, 3],  # nothing is left
        [0, -1],
    ],
)
def test_what_cannot_be_shared_is_refused(shared):
    masks = [[False, False, True, True], [False, False, True]]
    with pytest.raises(ValueError, match="does not share"):
        pack([0, 1], [[1, 2, 3, 4], [1, 2, 5]], masks, shared=shared)
    with pytest.raises(ValueError, match="does not share"):
        pack([0, 1], [[1, 2, 3, 4], [7, 2, 5]], masks, shared=[0, 1])


def test_sums_of_sequences():
    rng = random.Random(0)
    ids, masks = random_sequences(rng, 8)
    row = pack(range(8), ids, masks)
    values = torch.where(row.response_mask, torch.rand(row.num_tokens), 0.0).requires_grad_()
    sums = row.sum_sequences(values)
    assert sums.dtype == torch.float64
    assert sums.tolist() == pytest.approx(
        [part.double().sum().item() for part in row.split(values)]
    )
    (sums * torch.arange(8)).sum().backward()
    assert values.grad is not None and torch.equal(values.grad, row.expand(list(range(8))))
    dummy = pack([], [], [])
    assert dummy.sum_sequences(torch.zeros(2, requires_grad=True)).requires_grad


def test_dummy_row():
    row = pack([], [], [])
    assert row.num_tokens == 2 and row.seqlens == [2] and row.cu_seqlens.tolist() == [0, 2]
    assert not row.response_mask.any() and (row.target_ids == -1).all()
    assert row.position_ids.tolist() == [0, 1]
    assert row.sequence_ids == [] and row.response_lengths == []
    assert row.expand([1.0, 2.0]).tolist() == [0.0, 0.0]
    assert row.lay_out([]).tolist() == [0.0, 0.0]
    assert row.split(torch.ones(2)) == []


@pytest.mark.parametrize(
    "arguments",
    [
        ([0], [[]], [[]]),
        ([0], [[1, 2]], [[False]]),
        ([0, 1], [[1, 2]], [[False, True]]),
        ([0], [[1, 2]], []),
    ],
)
def test_pack_refuses_mismatches(arguments):
    with pytest.raises(ValueError):
        pack(*arguments)


def test_to_moves_every_tensor():
    row = pack([3, 4], [[1, 2], [1, 3]], [[False] * 2] * 2, shared=[0, 1]).to("meta")
    assert isinstance(row, PackedRow)
    tensors = [v for v in vars(row).values() if isinstance(v, torch.Tensor)]
    assert len(tensors) == 8 and all(t.is_meta for t in tensors)
    assert row.sequence_ids == [3, 4]


# -- per-sequence and per-token values --


@pytest.mark.parametrize("as_tensor", [False, True])
def test_expand_indexes_by_sequence_id(as_tensor):
    row = pack([2, 0], [[1, 2, 3], [4, 5]], [[False] * 3, [False] * 2])
    values = [10.0, 11.0, 12.0]
    expanded = row.expand(torch.tensor(values, dtype=torch.float64) if as_tensor else values)
    assert expanded.dtype == torch.float32
    assert expanded.tolist() == [12.0, 12.0, 12.0, 10.0, 10.0]


def test_lay_out_places_values_at_actions():
    row = pack(
        [4, 1],
        [[1, 2, 3, 4], [5, 6, 7]],
        [[False, False, True, True], [False, True, False]],  # the last token: a tool's, untrained
    )
    values = row.lay_out([[-0.25, -0.5], torch.tensor([-1.0])])
    assert values.dtype == torch.float32
    assert values.tolist() == [0.0, -0.25, -0.5, 0.0, -1.0, 0.0, 0.0]


def test_lay_out_and_split_are_inverse():
    rng = random.Random(1)
    for num in range(1, 12):
        ids, masks = random_sequences(rng, num)
        row = pack(range(num), ids, masks)
        values = [[rng.random() for _ in range(sum(mask))] for mask in masks]
        laid_out = row.lay_out(values)
        assert (laid_out[~row.response_mask] == 0).all()
        parts = row.split(laid_out)
        assert len(parts) == num
        for part, expected in zip(parts, values, strict=True):
            assert torch.equal(part, torch.tensor(expected, dtype=torch.float32))
        assert torch.equal(row.lay_out(parts), laid_out)


def test_split_returns_the_predicted_tokens():
    rng = random.Random(2)
    ids, masks = random_sequences(rng, 8)
    row = pack(range(8), ids, masks)
    expected = [
        [t for t, trained in zip(*pair, strict=True) if trained]
        for pair in zip(ids, masks, strict=True)
    ]
    assert [part.tolist() for part in row.split(row.target_ids)] == expected


def test_values_of_another_length_are_refused():
    row = pack([5, 6], [[1, 2, 3], [4, 5]], [[False, True, True], [False, True]])
    with pytest.raises(ValueError, match="sequence 5 has 2 trained tokens, but 3 values"):
        row.lay_out([[1.0] * 3, [1.0]])
    with pytest.raises(ValueError):  # right in total, wrong per sequence
        row.lay_out([[1.0], [1.0, 1.0]])
    with pytest.raises(ValueError):
        row.lay_out([[1.0, 1.0]])
    with pytest.raises(ValueError):
        row.split(torch.zeros(4))


# -- plan --


@pytest.mark.parametrize("packing", [True, False])
def test_plan_properties(packing):
    rng = random.Random(3)
    for trial in range(200):
        world_size = rng.choice([1, 2, 3, 8])
        max_tokens = rng.choice([20, 50, 64])
        longest = rng.randint(1, max_tokens)
        lengths = [rng.randint(1, longest) for _ in range(rng.randint(0, 60))]
        options = {"world_size": world_size, "max_tokens": max_tokens, "packing": packing}
        plan = plan_microbatches(lengths, **options)
        assert len(plan) == world_size, trial
        assert len({len(rank) for rank in plan}) == 1, trial
        flat = [i for rank in plan for indices in rank for i in indices]
        assert sorted(flat) == list(range(len(lengths))), trial
        for indices in (indices for rank in plan for indices in rank):
            assert indices == sorted(indices, key=lambda i: (lengths[i], i)), trial
        assert all(load <= max_tokens for rank in loads_of(plan, lengths) for load in rank), trial
        assert plan == plan_microbatches(lengths, **options), trial
        if packing:
            lower_bound = -(-sum(lengths) // (max_tokens * world_size))
            assert len(plan[0]) <= -(-lower_bound * 3 // 2) + 1, trial
        else:
            assert all(len(indices) <= 1 for rank in plan for indices in rank), trial
            assert len(plan[0]) == -(-len(lengths) // world_size), trial


def test_plan_uses_as_few_microbatches_as_possible():
    """Evening out the loads alone would need a third bin for 6 + 4 and 4 + 3 + 3."""
    plan = plan_microbatches([6, 4, 4, 3, 3], world_size=1, max_tokens=10)
    assert len(plan[0]) == 2
    assert len(plan_microbatches([10] * 6, world_size=2, max_tokens=10)[0]) == 3
    assert len(plan_microbatches([5] * 8, world_size=2, max_tokens=20)[0]) == 1


def test_plan_balances_tokens():
    rng = random.Random(4)
    lengths = [rng.randint(10, 400) for _ in range(256)]
    plan = plan_microbatches(lengths, world_size=4, max_tokens=4096)
    loads = loads_of(plan, lengths)
    totals = [sum(rank) for rank in loads]
    assert max(totals) <= 1.01 * min(totals)
    for concurrent in zip(*loads, strict=True):
        assert max(concurrent) <= 1.02 * min(concurrent)


def test_plan_without_packing_runs_similar_lengths_together():
    plan = plan_microbatches([1, 9, 2, 8], world_size=2, max_tokens=10, packing=False)
    assert plan == [[[1], [0]], [[3], [2]]]


def test_fewer_sequences_than_ranks():
    plan = plan_microbatches([3, 5], world_size=4, max_tokens=10)
    assert [len(rank) for rank in plan] == [1, 1, 1, 1]
    assert sorted(len(rank[0]) for rank in plan) == [0, 0, 1, 1]


def test_no_sequences():
    assert plan_microbatches([], world_size=2, max_tokens=10) == [[], []]


def test_empty_microbatches_are_separate_lists():
    plan = plan_microbatches([1], world_size=4, max_tokens=10)
    plan[3][0].append(99)
    assert sum(len(indices) for rank in plan for indices in rank) == 2


@pytest.mark.parametrize("packing", [True, False])
def test_too_long_a_sequence_names_the_flag(packing):
    with pytest.raises(ValueError, match="--max_tokens_per_microbatch=10 .* sequence 1 has 11"):
        plan_microbatches([5, 11], world_size=1, max_tokens=10, packing=packing)


def test_sequences_stay_whole():
    """P19: overflow was cut off and packed as a headless sequence of its own."""
    lengths = [4, 1, 3, 2]
    plan = plan_microbatches(lengths, world_size=1, max_tokens=4)
    assert sorted(loads_of(plan, lengths)[0]) == [3, 3, 4]
    rows = [
        pack(ids, [[1] * lengths[i] for i in ids], [[True] * lengths[i] for i in ids])
        for ids in plan[0]
    ]
    assert sorted(n for row in rows for n in row.seqlens) == [1, 2, 3, 4]
    # Every token except the first of each sequence is a target, once.
    assert sum(int(row.response_mask.sum()) for row in rows) == sum(lengths) - len(lengths)


def test_planning_a_large_step_is_quick():
    """Hundreds of nearly full micro-batches must not make the search quadratic."""
    rng = random.Random(5)
    lengths = [rng.randint(520, 1000) for _ in range(20_000)]
    plan = plan_microbatches(lengths, world_size=8, max_tokens=1024)
    assert len(plan[0]) == 2500
