"""Responses -> scores of a trained reward model, which is sharded over the ranks like the policy.

It is any sequence classifier of transformers with one output. It reads whole conversations, written
by its own chat template and tokenizer: the policy's token ids mean nothing to it.
"""

import itertools
import math
import os
from collections import Counter
from collections.abc import Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from common.dist import DistEnv, all_gather_objects, print0
from common.formats import Drop, Messages, num_common
from common.logprobs import compute_scores
from common.model import context_tokens, load_model, load_tokenizer
from common.packing import pack, plan_microbatches
from common.pairs import ResponseEncoder

T = TypeVar("T")


class RewardModel:
    """A frozen reward model and its tokenizer."""

    def __init__(
        self,
        path: str,
        env: DistEnv,
        *,
        dtype: torch.dtype,
        max_tokens: int,
        packing: bool = True,
        cpu_offload: bool = False,
        system_prompt: str | None = None,
    ) -> None:
        """Load it and shard it over the ranks.  # collective: all ranks

        Args:
            path: folder or hub name.
            env: device and mesh.
            dtype: compute dtype: float32 or bfloat16.
            max_tokens: packed tokens per forward (per rank); a longer sequence has one of its own.
            packing: False: one sequence per forward; slower, same results.
            cpu_offload: see `load_model`.
            system_prompt: put before conversations without a system message, as for the policy.

        Raises:
            ValueError: no reward model with one trained output, or no tokenizer, is found under
                `path`, or it has no place for the system prompt.
        """
        self.flag = f"--rewards=model:{path}"
        self.refused: Counter[str] = Counter()
        """responses that were not scored so far, by reason"""
        path = os.path.expanduser(path)
        try:
            tokenizer = load_tokenizer(path, flag="--rewards")
            self._encoder = ResponseEncoder(tokenizer, system_prompt=system_prompt)
            self._model = load_model(
                path,
                env,
                dtype=dtype,
                head="score",
                trainable=False,
                cpu_offload=cpu_offload,
                flag="--rewards",
            )
        except ValueError as error:
            message = str(error).removeprefix(f"--rewards={path}: ")
            raise ValueError(f"{self.flag}: {message}") from error
        self._device, self._max_tokens, self._packing = env.device, max_tokens, packing
        config: Any = self._model.config
        self._bias = float(getattr(config, "score_bias", None) or 0.0)
        self._pad_id = config.get_text_config().pad_token_id
        self._num_embeddings = config.get_text_config().vocab_size
        self._context = context_tokens(self._model)

    @torch.no_grad()
    def score(
        self,
        prompts: Sequence[str | Messages],
        responses: Sequence[str],
        tools: Sequence[list[dict[str, Any]]] | None = None,
    ) -> list[float | None]:
        """Score responses; every rank computes its share.  # collective: all ranks

        Args:
            prompts: text or messages; samples of one prompt that follow each other share its
                computation. All lists are global, the same on every rank.
            responses: decoded text of the assistant's turn.
            tools: of each prompt, as `common.formats` makes them.

        Returns:
            One score per response, the same on every rank. None where the model was not asked: the
            sequence is longer than its context, or the response cannot be written in its chat
            template, for example because it spells special tokens. `refused` counts these.

        Raises:
            ValueError: the lists differ in length, or the tokenizer does not belong to the model.
        """
        tools = [[]] * len(prompts) if tools is None else tools
        samples = list(zip(prompts, responses, tools, strict=True))
        rank, world_size = dist.get_rank(), dist.get_world_size()
        # Templates and tokenizers are slow, so each rank writes out its share for all.
        mine = {s: self._encode(*samples[s]) for s in range(rank, len(samples), world_size)}
        ids: dict[int, list[int]] = {}
        refusals: dict[int, Drop] = {}
        for s, encoded in sorted(_merged(mine).items()):
            if isinstance(encoded, ValueError):
                # the encoder's advice is for the policy's tokenizer
                message = str(encoded).partition("; bring one with --chat_template")[0]
                raise ValueError(f"{self.flag}: {message}") from encoded
            if isinstance(encoded, Drop):
                refusals[s] = encoded
            else:
                ids[s] = encoded

        budget = max([self._max_tokens, *map(len, ids.values())])
        fair_share = sum(map(len, ids.values())) // world_size
        units: list[list[tuple[int, int]]] = []
        for _, group in itertools.groupby(ids, key=lambda s: (prompts[s], tools[s])):
            units += self._share(list(group), ids, max_tokens=min(budget, fair_share))
        plan = plan_microbatches(
            [sum(len(ids[s]) - shared for s, shared in unit) for unit in units],
            world_size=world_size,
            max_tokens=budget,
            packing=self._packing,
        )
        values: dict[int, float] = {}
        for microbatch in plan[rank]:
            members = [member for u in microbatch for member in units[u]]
            row = pack(
                [s for s, _ in members],
                [ids[s] for s, _ in members],
                [[False] * len(ids[s]) for s, _ in members],
                shared=[shared for _, shared in members],
            )
            scored = compute_scores(self._model, row.to(self._device)).tolist()
            values |= zip(row.sequence_ids, scored, strict=True)

        scores: list[float | None] = [None] * len(samples)
        for s, value in _merged(values).items():
            if math.isfinite(value):
                scores[s] = value + self._bias
            else:
                refusals[s] = Drop("not_finite", f"the model says {value}")
        for s, drop in sorted(refusals.items()):
            if drop.reason not in self.refused:
                print0(f"{self.flag}: {drop.reason}, so no score ({drop.detail}): {responses[s]!r}")
            self.refused[drop.reason] += 1
        return scores

    def _encode(
        self, prompt: str | Messages, response: str, tools: list[dict[str, Any]]
    ) -> list[int] | Drop | ValueError:
        """Ids of a conversation, or why there are none: for all ranks to see."""
        try:
            ids = self._encoder.ids(prompt, response, tools)
        except (Drop, ValueError) as error:
            return error
        if (largest := max(ids)) >= self._num_embeddings:
            return ValueError(
                f"the tokenizer makes token id {largest}, but the model has "
                f"{self._num_embeddings} embeddings"
            )
        # A classifier of transformers reads the score at the last token that is not padding. If it
        # pads with a token that sequences end with, it was trained to read it before that token.
        while len(ids) > 1 and ids[-1] == self._pad_id:
            ids = ids[:-1]
        if len(ids) > self._context:
            return Drop("too_long", f"{len(ids):,} tokens, the model reads {self._context:,}")
        return ids

    def _share(
        self, group: list[int], ids: dict[int, list[int]], *, max_tokens: int
    ) -> list[list[tuple[int, int]]]:
        """Split samples of one prompt into units of about `max_tokens` that share their beginnings.

        Returns:
            For each unit its samples, and how many tokens each has in common with the first one.
        """
        units: list[list[tuple[int, int]]] = []
        size = 0
        for s in sorted(group, key=lambda s: len(ids[s])):  # runs of equal lengths: see the planner
            shared = 0
            if units and self._packing:
                shared = num_common(ids[units[-1][0][0]], ids[s][:-1])
            if shared and size + len(ids[s]) - shared <= max_tokens:
                units[-1].append((s, shared))
                size += len(ids[s]) - shared
            else:
                units.append([(s, 0)])
                size = len(ids[s])
        return units


def _merged(mine: dict[int, T]) -> dict[int, T]:
    """What each rank has for its samples, together.  # collective: all ranks"""
    return {s: value for part in all_gather_objects(mine) for s, value in part.items()}
