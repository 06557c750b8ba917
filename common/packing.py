"""Sequences of token ids <-> packed rows, and the plan of which sequences share a row.

A packed row lays sequences end to end without padding. Everything per token is aligned to actions:
entry t describes the prediction made at position t (p prompt, r response, two sequences):

    input_ids      p0  p1  r0  r1  eos | q0  s0  eos
    target_ids     p1  r0  r1  eos -1  | s0  eos -1       next token of the same sequence
    response_mask  0   1   1   1   0   | 1   1   0        True iff target_ids[t] is trained
    position_ids   0   1   2   3   4   | 0   1   2
    cu_seqlens     0                     5           8

Sequences with a common beginning may share it: it is laid out, and computed, once. Attention then
gathers every sequence in full, so that results are those of separate sequences (Wang and Hegde
2024, arXiv:2410.20305).

Dims: T tokens of a row, S sequences of a row, F tokens of its sequences in full (T, unless some
share their beginnings); sequences are numbered as in the caller's own lists.
"""

import bisect
import dataclasses
import heapq
import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


def plan_microbatches(
    lengths: Sequence[int], *, world_size: int, max_tokens: int, packing: bool = True
) -> list[list[list[int]]]:
    """Distribute sequences over ranks and micro-batches of at most max_tokens tokens.

    Every rank gets the same number of micro-batches, because each forward is a collective, and as
    few as a heuristic finds (bin packing is NP-hard). Micro-batches that run at the same time on
    different ranks have similar loads, since all ranks wait for the largest. Cost is counted in
    tokens: attention, quadratic in the length of a sequence, is not counted; it is a small part of
    the work until sequences are several times longer than the hidden size. Deterministic, so all
    ranks may compute the plan for themselves.

    Args:
        lengths: tokens of each sequence (global list, same on every rank), each >= 1.
        world_size: number of data-parallel ranks.
        max_tokens: most tokens of one micro-batch.
        packing: False puts one sequence in each micro-batch.

    Returns:
        [rank][micro-batch] -> sequence indices, shortest first. Each index occurs once. Lists may
        be empty (`pack` makes a dummy row of them); largest micro-batches first, so that one too
        large for the memory shows at once.

    Raises:
        ValueError: a sequence is empty, or longer than max_tokens.
    """
    for index, length in enumerate(lengths):
        if length < 1:
            raise ValueError(f"sequence {index} has no tokens")
        if length > max_tokens:
            raise ValueError(
                f"--max_tokens_per_microbatch={max_tokens} is too small: sequence {index} has "
                f"{length} tokens"
            )
    order = sorted(range(len(lengths)), key=lambda i: -lengths[i])  # longest first, ties by index
    if packing:
        bins = _balanced_bins(lengths, order, world_size, max_tokens)
    else:
        bins = [[index] for index in order]
    bins += [[]] * (-len(bins) % world_size)
    loads = [sum(lengths[i] for i in indices) for indices in bins]
    largest_first = sorted(range(len(bins)), key=lambda b: -loads[b])
    plan: list[list[list[int]]] = [[] for _ in range(world_size)]
    for start in range(0, len(bins), world_size):
        # Equal lengths side by side: attention handles a run of them in one call.
        group = [
            sorted(bins[b], key=lambda i: (lengths[i], i))
            for b in largest_first[start : start + world_size]
        ]
        # Alternate the direction, or rank 0 would get the largest one every time.
        if start // world_size % 2:
            group.reverse()
        for rank, indices in enumerate(group):
            plan[rank].append(indices)
    return plan


def _balanced_bins(
    lengths: Sequence[int], order: list[int], world_size: int, max_tokens: int
) -> list[list[int]]:
    """Few bins of at most max_tokens each, as evenly loaded as their number allows."""
    # Best fit, longest first, finds how many bins it takes (about 11/9 of the optimum at worst)
    packed: list[list[int]] = []
    rooms: list[tuple[int, int]] = []  # (free tokens, bin), sorted
    for index in order:
        at = bisect.bisect_left(rooms, (lengths[index], 0))
        if at < len(rooms):
            room, b = rooms.pop(at)
        else:
            room, b = max_tokens, len(packed)
            packed.append([])
        packed[b].append(index)
        bisect.insort(rooms, (room - lengths[index], b))
    # but leaves the last ones light. Each sequence to the least loaded bin, longest
    # first, balances the same number of bins, unless they are so full that this does not fit.
    balanced: list[list[int]] = [[] for _ in range(-(-len(packed) // world_size) * world_size)]
    heap = [(0, b) for b in range(len(balanced))]  # (load, bin)
    for index in order:
        load, b = heap[0]
        if load + lengths[index] > max_tokens:
            return packed
        balanced[b].append(index)
        heapq.heapreplace(heap, (load + lengths[index], b))
    return balanced


@dataclass(frozen=True, eq=False)  # comparing tensors with == has no single answer
class PackedRow:
    """One packed row; see the module's docstring for the layout. Tensors share one device."""

    input_ids: Tensor
    """(T,) i64"""
    target_ids: Tensor
    """(T,) i64; next token of the same sequence, -1 at each sequence's last position"""
    position_ids: Tensor
    """(T,) i64; restarts at 0 in each sequence"""
    cu_seqlens: Tensor
    """(S+1,) i32; boundaries of the sequences"""
    response_mask: Tensor
    """(T,) bool; True iff target_ids[t] is trained"""
    sequence_ids: list[int]
    """(S,); each sequence's index in the caller's lists; empty for a dummy row"""
    seqlens: list[int]
    """(S,) tokens that each sequence lays out itself, as ints: reading cu_seqlens would be a host
    sync"""
    response_lengths: list[int]
    """(S,) True entries of response_mask in each sequence"""
    full_seqlens: list[int]
    """(S,) tokens of each sequence, those that it shares included"""
    full_cu_seqlens: Tensor
    """(S+1,) i32; boundaries of the full sequences"""
    full_index: Tensor | None = None
    """(F,) i64; where in the row each token of the full sequences is; None if nothing is shared"""
    own_index: Tensor | None = None
    """(T,) i64; where among the F tokens each token of the row is; None if nothing is shared"""

    @property
    def num_tokens(self) -> int:
        """T, tokens of the row."""
        return len(self.input_ids)

    def to(self, device: torch.device | str) -> "PackedRow":
        """The same row with its tensors on a device."""
        tensors = {k: v.to(device) for k, v in vars(self).items() if isinstance(v, Tensor)}
        return dataclasses.replace(self, **tensors)

    def expand(self, values: Tensor | Sequence[float]) -> Tensor:
        """Repeat one value per sequence over the sequence's tokens.

        Args:
            values: one number for each of the caller's sequences, indexed by sequence_ids; a
                sequence of numbers or a 1-D tensor on any device.

        Returns:
            (T,) f32 on the row's device, without gradient; a dummy row gives zeros.
        """
        device = self.input_ids.device
        if not self.sequence_ids:
            return torch.zeros(self.num_tokens, device=device)
        per_sequence = torch.as_tensor(values, dtype=torch.float32).detach()[self.sequence_ids]
        repeats = self.cu_seqlens.diff()
        return per_sequence.to(device).repeat_interleave(repeats, output_size=self.num_tokens)

    def lay_out(self, values: Sequence[Sequence[float] | Tensor]) -> Tensor:
        """Put the values of trained tokens at the positions that predict them.

        Args:
            values: for each sequence of this row, in the row's order (sequence_ids), one value per
                trained token, in order.

        Returns:
            (T,) f32 on the row's device, 0 outside the response_mask.

        Raises:
            ValueError: the number of sequences, or of values of a sequence, does not match.
        """
        if len(values) != len(self.sequence_ids):
            raise ValueError(f"{len(values)} value lists for {len(self.sequence_ids)} sequences")
        for sequence_id, of_sequence, expected in zip(
            self.sequence_ids, values, self.response_lengths, strict=True
        ):
            if len(of_sequence) != expected:
                raise ValueError(
                    f"sequence {sequence_id} has {expected} trained tokens, "
                    f"but {len(of_sequence)} values"
                )
        out = torch.zeros(self.num_tokens, device=self.input_ids.device)
        flat = [torch.as_tensor(v, dtype=torch.float32) for v in values]
        if flat:  # one copy to the device, not one for each sequence
            out.masked_scatter_(self.response_mask, torch.cat(flat).to(out.device))
        return out

    def sum_sequences(self, values: Tensor) -> Tensor:
        """Sum over the tokens of each sequence.

        Args:
            values: (T,) float, 0 outside the response_mask; gradients flow back.

        Returns:
            (S,) f64 on the row's device, in the order of sequence_ids; (0,) for a dummy row, still
            a function of `values`, so that every rank can run a backward.
        """
        sums = values.new_zeros(len(self.seqlens), dtype=torch.float64)
        index = torch.arange(len(self.seqlens), device=values.device)
        index = index.repeat_interleave(self.cu_seqlens.diff(), output_size=self.num_tokens)
        return sums.index_add(0, index, values.double())[: len(self.sequence_ids)]

    def split(self, values: Tensor) -> list[Tensor]:
        """Per sequence, the values at its trained tokens; the inverse of `lay_out`.

        Args:
            values: (T,) aligned to actions, any dtype, on the row's device.

        Returns:
            One 1-D tensor for each of sequence_ids, in that order. A host sync on CUDA.

        Raises:
            ValueError: values has another length than the row.
        """
        if values.shape != self.input_ids.shape:
            raise ValueError(f"values {tuple(values.shape)} for a row of {self.num_tokens} tokens")
        if not self.sequence_ids:
            return []
        return list(values[self.response_mask].split(self.response_lengths))


def pack(
    sequence_ids: Sequence[int],
    input_ids: Sequence[Sequence[int]],
    masks: Sequence[Sequence[bool]],
    *,
    shared: Sequence[int] | None = None,
) -> PackedRow:
    """Lay sequences end to end.

    A sequence's first token has no context and is never predicted: masks[i][0] has no effect, and
    no target crosses from one sequence into the next.

    Args:
        sequence_ids: the number of each sequence in the caller's lists. None at all gives a dummy
            row of two tokens, no target and nothing to train, for a rank that has to take part in
            a forward without data of its own.
        input_ids: token ids of each sequence, parallel to sequence_ids.
        masks: per sequence and token, whether the token is to be trained (as a target).
        shared: per sequence, how many of its first tokens are not laid out again, because the
            nearest earlier sequence with a 0 here begins with the same ones. The last of them
            predicts nothing for this sequence: its masks[i][: shared[i] + 1] must be False.

    Returns:
        The row, on the CPU.

    Raises:
        ValueError: lengths do not match, a sequence is empty, or what is said to be shared is not.
    """
    if not len(sequence_ids) == len(input_ids) == len(masks):
        raise ValueError(
            f"{len(sequence_ids)} sequence ids, {len(input_ids)} sequences, {len(masks)} masks"
        )
    for sequence_id, ids, mask in zip(sequence_ids, input_ids, masks, strict=True):
        if not ids or len(ids) != len(mask):
            raise ValueError(
                f"sequence {sequence_id} has {len(ids)} tokens and a mask of {len(mask)}"
            )
    shared = [0] * len(sequence_ids) if shared is None else shared
    tokens: list[int] = []
    targets: list[int] = []
    positions: list[int] = []
    response_mask: list[bool] = []
    full_index: list[int] = []
    own_index: list[int] = []
    leader, leader_start = 0, 0  # the sequence that the next ones share with, its place in the row
    for i, (ids, mask, count) in enumerate(zip(input_ids, masks, shared, strict=True)):
        if count == 0:
            leader, leader_start = i, len(tokens)
        elif not (
            0 < count < len(ids) and i > leader and ids[:count] == input_ids[leader][:count]
        ) or any(mask[: count + 1]):
            raise ValueError(
                f"sequence {sequence_ids[i]} does not share {count} untrained tokens with sequence "
                f"{sequence_ids[leader]}"
            )
        full_index += range(leader_start, leader_start + count)
        own_index += range(len(full_index), len(full_index) + len(ids) - count)
        full_index += range(len(tokens), len(tokens) + len(ids) - count)
        tokens += ids[count:]
        targets += [*ids[count + 1 :], -1]
        positions += range(count, len(ids))
        response_mask += [*mask[count + 1 :], False]
    full_seqlens = [len(ids) for ids in input_ids]
    seqlens = [length - count for length, count in zip(full_seqlens, shared, strict=True)]
    if not seqlens:
        tokens, targets, positions, response_mask = [0, 0], [-1, -1], [0, 1], [False, False]
        seqlens = full_seqlens = [2]
    shares = len(full_index) > len(tokens)
    return PackedRow(
        input_ids=torch.tensor(tokens, dtype=torch.int64),
        target_ids=torch.tensor(targets, dtype=torch.int64),
        position_ids=torch.tensor(positions, dtype=torch.int64),
        cu_seqlens=_boundaries(seqlens),
        response_mask=torch.tensor(response_mask, dtype=torch.bool),
        sequence_ids=list(sequence_ids),
        seqlens=seqlens,
        response_lengths=[sum(map(bool, mask[1:])) for mask in masks],
        full_seqlens=full_seqlens,
        full_cu_seqlens=_boundaries(full_seqlens),
        full_index=torch.tensor(full_index) if shares else None,
        own_index=torch.tensor(own_index) if shares else None,
    )


def _boundaries(seqlens: list[int]) -> Tensor:
    return torch.tensor([0, *itertools.accumulate(seqlens)], dtype=torch.int32)
