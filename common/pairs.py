"""Preference rows -> pairs of sequences that begin with the same prompt; a prompt and a response
-> the sequence that a reward model judges.

To compare log-probs, the sides are prompt and response as an engine would sample them: targets are
the assistant turns after the prompt, and nothing follows the last one. To score, they are what the
standard loaders of classifiers are given: the conversation as the chat template writes it, or the
text with its BOS and EOS.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, overload

import numpy as np

from common.cache import Arrays
from common.chat import special_tokens
from common.data import (
    Chunk,
    LoadReport,
    Overlong,
    PromptFormat,
    RowEncoder,
    TokenDataset,
    TokenRow,
    counted,
    load_encoded,
    render_example,
    token_dataset,
)
from common.formats import (
    Drop,
    Example,
    Messages,
    PairExample,
    Row,
    detect_pair_format,
    is_empty,
    num_common,
    parse_pair,
    text_or_messages,
)


@dataclass
class PairRow:
    """Two sequences for one prompt; without targets (all False) if they are to be scored."""

    chosen: TokenRow
    rejected: TokenRow
    num_shared: int
    """how many first tokens a packed row needs only once: those of the prompt but its last, which
    predicts another token on each side; to score, all that are alike but each side's last"""
    prompt_length: int
    """how many first tokens are the prompt's"""
    margin: float
    """how much better the chosen side is; 0 if the data does not say"""
    grades: tuple[float, float]
    """of chosen and rejected; NaN if the data does not say"""


class PairDataset(Sequence[PairRow]):
    """P pairs in flat arrays, shared between processes if memory-mapped.

    Args:
        arrays: from `load_encoded`; the sides of pair i are its sequences 2i and 2i + 1.
    """

    def __init__(self, arrays: Arrays) -> None:
        self.sides: TokenDataset = token_dataset(arrays)
        self.source_sizes: list[int] = self.sides.source_sizes  # pairs of each dataset name
        self.largest_id: int = self.sides.largest_id
        self.lengths = self.sides.lengths.reshape(-1, 2)  # (P, 2) i64, tokens of each whole side
        self.num_targets = self.sides.num_targets.reshape(-1, 2)  # (P, 2) i64
        self.num_shared = arrays["num_shared"]  # (P,) i64, see `PairRow`
        self.prompt_lengths = arrays["prompt_lengths"]  # (P,) i64, tokens of both sides' prompt
        # (P, 2) i64, tokens after the prompt that both sides have; the template's end of the
        # conversation is among them, and so are later questions of a response of several turns
        self.response_lengths = self.lengths - self.prompt_lengths[:, None]
        self.num_margins = int((~np.isnan(arrays["margins"])).sum())  # pairs that have one
        self.margins = np.nan_to_num(arrays["margins"])  # (P,) f64, 0 where the data has none
        self.grades = arrays["grades"]  # (P, 2) f64, NaN where the data has none
        # (P,) bool, two texts without a prompt column, which no template was applied to
        self.whole_texts = arrays["whole_texts"]
        # (P, 3) i64, hashes of the ids of prompt, chosen and rejected response
        self.keys = arrays["keys"]

    def __len__(self) -> int:
        return len(self.num_shared)

    @overload
    def __getitem__(self, index: int) -> PairRow: ...
    @overload
    def __getitem__(self, index: slice) -> list[PairRow]: ...
    def __getitem__(self, index: int | slice) -> PairRow | list[PairRow]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        i = range(len(self))[index]  # negative indices; IndexError beyond the end
        chosen_grade, rejected_grade = self.grades[i].tolist()
        return PairRow(
            *(self.sides[2 * i], self.sides[2 * i + 1]),
            num_shared=int(self.num_shared[i]),
            prompt_length=int(self.prompt_lengths[i]),
            margin=float(self.margins[i]),
            grades=(chosen_grade, rejected_grade),
        )


# ---- one row -> two sequences --------------------------------------------------------------------


@dataclass
class _PairEncoder(RowEncoder):
    """Settings that decide how a row becomes a pair."""

    for_scoring: bool = False

    unit: ClassVar[str] = "pairs"
    nothing: ClassVar[Arrays] = RowEncoder.nothing | {
        "lengths": np.zeros((0, 2), np.int64),
        "num_shared": np.zeros(0, np.int64),
        "prompt_lengths": np.zeros(0, np.int64),
        "margins": np.zeros(0, np.float64),
        "grades": np.zeros((0, 2), np.float64),
        "whole_texts": np.zeros(0, bool),
        "keys": np.zeros((0, 3), np.int64),
    }

    def __post_init__(self) -> None:
        super().__post_init__()
        self._special = special_tokens(self.tokenizer)

    def check(self) -> None:
        """Refuse a chat template that cannot be trained on; any will do to score."""
        if not self.for_scoring:
            super().check()

    def encode(self, row: Row, index: int, chunk: Chunk) -> list[Arrays]:
        """Arrays of the row's pair; raises as `RowEncoder.encode`."""
        name = detect_pair_format(row)
        chunk.formats[name] += 1
        example = parse_pair(row, name)
        self._note_format(name, chunk)
        if example.whole_texts:
            example = self._after_special(example)
            chunk.notes.add(
                "of two texts without a prompt column the prompt is what both begin with, of "
                "Human/Assistant dialogues up to the last Assistant: that they share; no chat "
                "template is applied"
            )
        sides: list[TokenRow] = []
        for column, response in (("chosen", example.chosen), ("rejected", example.rejected)):
            try:
                sides.append(self._side(example, response))
            except Drop as drop:
                raise Drop(drop.reason, f"{column}: {drop.detail}") from drop
        prompt_length = self._prompt_length(example, sides)
        longest = max(len(side.input_ids) for side in sides)
        if longest > self.max_tokens:
            if self.overlong == "drop":
                raise Drop("too_long", f"{longest:,} tokens")
            sides, prompt_length = self._cut(sides, prompt_length)
            chunk.truncated += 1
        chosen, rejected = (side.input_ids for side in sides)
        num_shared = (
            min(num_common(chosen, rejected), len(chosen) - 1, len(rejected) - 1)
            if self.for_scoring
            else prompt_length - 1
        )
        keys = [_hash(ids) for ids in (chosen[:prompt_length], chosen[prompt_length:])]
        keys.append(_hash(rejected[prompt_length:]))
        margin = np.nan if example.margin is None else example.margin
        return [
            {
                "input_ids": np.array(chosen + rejected, np.int32),
                "loss_mask": np.array(sides[0].loss_mask + sides[1].loss_mask, bool),
                "lengths": np.array([[len(chosen), len(rejected)]]),
                "num_shared": np.array([num_shared]),
                "prompt_lengths": np.array([prompt_length]),
                "margins": np.array([margin]),
                "grades": np.array([example.grades]),
                "whole_texts": np.array([example.whole_texts]),
                "keys": np.array([keys]),
            }
        ]

    def _after_special(self, example: PairExample) -> PairExample:
        """Two whole texts whose prompt has all control tokens of what they begin with.

        Templates that put no white space behind them ("<|assistant|>yes") need that.
        """
        prompt, chosen, rejected = example.prompt, example.chosen, example.rejected
        assert isinstance(prompt, str) and isinstance(chosen, str) and isinstance(rejected, str)
        shared = chosen[: num_common(chosen, rejected)]
        ends = [match.end() for match in self._special.finditer(shared)]
        # one behind which nothing follows ends a response
        ends = [end for end in ends if chosen[end:].strip() and rejected[end:].strip()]
        end = max(ends, default=0)
        return replace(
            example,
            prompt=prompt + chosen[:end],
            chosen=chosen[end:],
            rejected=rejected[end:],
        )

    def _refuse_special(self, response: str | Messages) -> None:
        """A response of plain text ends where it spells a control token; its EOS may be there."""
        text = self._only_text(response, "assistant")
        found = self._special.search(text.removesuffix(self.tokenizer.eos_token or ""))
        if found:
            detail = f"the response spells {found[0]!r}; only an EOS may be there, at its very end"
            raise Drop("special_token_in_text", detail)

    def _side(self, example: PairExample, response: str | Messages) -> TokenRow:
        prompt, tools = example.prompt, example.tools
        if self.for_scoring:
            ids = self.whole(prompt, response, tools, whole_texts=example.whole_texts)
            return TokenRow(ids, [False] * len(ids))
        if example.whole_texts or not self._is_chat(prompt, tools):
            self._refuse_special(response)
        if example.whole_texts:
            self._refuse_additions(tools)
            assert isinstance(prompt, str) and isinstance(response, str)
            rows = [self._completion(prompt, response)]
        else:
            rows = self.rows(Example(prompt, response, tools))
        if len(rows) > 1:
            raise Drop("several_contexts", "the template rewrites earlier turns of the response")
        (row,) = rows
        end = len(row.loss_mask) - row.loss_mask[::-1].index(True)  # after the last target
        return TokenRow(row.input_ids[:end], row.loss_mask[:end])

    def whole(
        self,
        prompt: str | Messages,
        response: str | Messages,
        tools: list[dict[str, Any]],
        *,
        whole_texts: bool = False,
    ) -> list[int]:
        """Ids of a prompt and its response, to be scored.

        Raises:
            Drop: see `common/chat.py`; also `empty_response`, and `special_token_in_text` for plain
                text whose response spells one, but for an EOS at its end.
        """
        if is_empty(response):
            raise Drop("empty_response", "nothing to score")
        if whole_texts:
            self._refuse_additions(tools)
        if whole_texts or not self._is_chat(prompt, tools):
            self._refuse_special(response)
            text = self._only_text(prompt, "user") + self._only_text(response, "assistant")
            return self._closed(self.plain(text), 1).input_ids
        assert self.template
        if isinstance(prompt, str):
            prompt = [{"role": "user", "content": prompt}]
        if isinstance(response, str):
            response = [{"role": "assistant", "content": response}]
        prompt = self._with_system(prompt)
        return self.template.whole_ids(prompt + response, tools, num_context=len(prompt))

    def _prompt_length(self, example: PairExample, sides: list[TokenRow]) -> int:
        """Tokens of the prompt, as many as both sides begin with."""
        chosen, rejected = (side.input_ids for side in sides)
        if self.for_scoring:
            if example.whole_texts:
                prompt_ids = self.plain(self._only_text(example.prompt, "user"))
            else:
                prompt_ids = self.prompt(example.prompt, example.tools)
            return min(num_common(prompt_ids, chosen), num_common(prompt_ids, rejected))
        first_targets = [side.loss_mask.index(True) for side in sides]
        length = min(num_common(chosen, rejected), *first_targets)
        if length == 0:
            raise Drop("empty_prompt", "nothing predicts the first token of the responses")
        return length

    def _cut(self, sides: list[TokenRow], prompt_length: int) -> tuple[list[TokenRow], int]:
        """Sides and prompt length within the limit.

        The prompt loses its beginning (but for a BOS) until both sides fit or half of the limit is
        reached; then each response loses its own tail.

        Raises:
            Drop: `too_long`, no target is left.
        """
        prompt = sides[0].input_ids[:prompt_length]
        longest = max(len(side.input_ids) for side in sides)
        kept = max(prompt_length - (longest - self.max_tokens), (self.max_tokens + 1) // 2)
        kept = min(prompt_length, kept)
        if kept >= self.max_tokens:
            raise Drop("too_long", f"a limit of {self.max_tokens} leaves no room for a response")
        # where the BOS also begins turns, the first one is no mark of the beginning
        bos = self.tokenizer.bos_token_id
        bos_ids = prompt[:1] if prompt.count(bos) == 1 and prompt[0] == bos else []
        ids = bos_ids + prompt[prompt_length - kept + len(bos_ids) :]
        cut: list[TokenRow] = []
        for side in sides:
            row_ids = ids + side.input_ids[prompt_length:]
            mask = [False] * len(ids) + side.loss_mask[prompt_length:]
            cut.append(TokenRow(row_ids[: self.max_tokens], mask[: self.max_tokens]))
            if not (self.for_scoring or any(cut[-1].loss_mask)):
                raise Drop("too_long", f"no target among the first {self.max_tokens:,} tokens")
        return cut, kept


def _hash(ids: list[int]) -> int:
    digest = hashlib.blake2b(np.array(ids, np.int32).tobytes(), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)


# ---- all rows ------------------------------------------------------------------------------------


def load_pairs(
    paths: Sequence[str],
    tokenizer: Any,
    *,
    max_tokens: int,
    for_scoring: bool,
    system_prompt: str | None = None,
    prompt_format: PromptFormat = "auto",
    overlong: Overlong = "drop",
    template_kwargs: dict[str, Any] | None = None,
    stop_ids: Sequence[int] = (),
    cache_dir: Path | None = None,
    limit: int | None = None,
    flag: str = "--dataset",
    split: str = "train",
) -> tuple[PairDataset, LoadReport]:
    """Preference pairs as token ids and masks.  # collective: all ranks

    Rank 0 reads and tokenises, once per content and settings if there is a cache.

    Args:
        paths: see `common.files.open_sources`; formats: `common.formats.PREFERENCE_FORMATS`.
        max_tokens: longest sequence, prompt and response.
        for_scoring: sequences for a reward model, else for log-probs; see this file's beginning.
        overlong: drop pairs of which a side is longer, or truncate them: the prompt from the left,
            down to half of `max_tokens`, then each response from the right; the sides keep the
            same prompt, and at least one token each after it.
        limit: stop after so many pairs, without cache.
        system_prompt, prompt_format, template_kwargs, stop_ids, cache_dir, flag, split: as in
            `common.data.load_sft_rows`. Rows that are two texts without a prompt column are never
            templated.
    Raises:
        ValueError: the same on all ranks: unreadable data, rows that are no preferences, a dataset
            without a pair left, a chat template that cannot be trained on, a setting that does not
            fit.
    """
    encoder = _PairEncoder(
        *(tokenizer, system_prompt, prompt_format, template_kwargs),
        overlong=overlong,
        max_tokens=max_tokens,
        stop_ids=sorted(stop_ids),
        for_scoring=for_scoring,
    )
    arrays, report = load_encoded(
        paths, encoder, cache_dir=cache_dir, limit=limit, flag=flag, split=split
    )
    dataset = PairDataset(arrays)
    report.checks = _checks(dataset, limited=report.limited)
    return dataset, report


def _checks(pairs: PairDataset, *, limited: bool) -> list[str]:
    """What is to be known of the pairs, a line each; `limited` if the data has more."""
    _, numbers = np.unique(
        np.concatenate([pairs.keys, pairs.keys[:, [0, 2, 1]]]), axis=0, return_inverse=True
    )
    given, swapped = numbers.reshape(2, -1)  # a number for each different pair
    identical = given == swapped
    chosen, rejected = pairs.response_lengths.T
    better, worse = pairs.grades.T  # NaN is neither lower nor equal
    lower, equal = (better < worse).sum(), (better == worse).sum()
    counts = (
        (identical.sum(), "with identical responses: nothing to learn from"),
        (len(pairs) - len(np.unique(given)), "repeating an earlier one"),
        (
            (np.isin(swapped, given) & ~identical).sum(),
            "present with their sides exchanged as well: labels contradict",
        ),
        (pairs.num_margins, "with a margin"),
        ((pairs.margins < 0).sum(), "with a negative margin, which contradicts the label"),
        ((~np.isnan(pairs.grades)).all(axis=1).sum(), "with grades"),
    )
    lines = [
        f"responses: chosen {chosen.mean():.1f} tokens on average, rejected {rejected.mean():.1f}; "
        f"chosen is longer in {(chosen > rejected).mean():.1%} of the pairs, rejected in "
        f"{(chosen < rejected).mean():.1%}"
    ]
    lines += [f"{counted(int(count), 'pairs')} {what}" for count, what in counts if count]
    if lower or equal:
        lines.append(
            f"{counted(int(lower), 'pairs')} with a chosen side that is graded lower, "
            f"{equal:,} equal"
        )
    if limited:  # what is further down the file may repeat or contradict them
        return [f"of {counted(len(pairs), 'pairs')} only:", *(f"  {line}" for line in lines)]
    return lines


def overlap_report(train: PairDataset, evaluation: PairDataset) -> str | None:
    """How much of the evaluation occurs in training, in words; None if nothing does.

    Both must have been loaded with the same settings. A pair is the same with its sides exchanged.
    """
    known, held_out = (
        np.column_stack([pairs.keys[:, 0], np.sort(pairs.keys[:, 1:], axis=1)])
        for pairs in (train, evaluation)
    )
    _, numbers = np.unique(np.concatenate([known, held_out]), axis=0, return_inverse=True)
    numbers = numbers.reshape(-1)
    num_pairs = int(np.isin(numbers[len(train) :], numbers[: len(train)]).sum())
    prompts = np.unique(held_out[:, 0])
    num_prompts = int(np.isin(prompts, known[:, 0]).sum())
    if not num_prompts:
        return None
    return (
        f"evaluation overlaps with training: {num_pairs:,} of {len(evaluation):,} pairs "
        f"({num_pairs / len(evaluation):.1%}, in either order), {num_prompts:,} of "
        f"{len(prompts):,} prompts ({num_prompts / len(prompts):.1%})"
    )


class ResponseEncoder:
    """A prompt and a response -> the ids that `load_pairs(for_scoring=True)` makes of them."""

    def __init__(
        self,
        tokenizer: Any,
        *,
        system_prompt: str | None = None,
        prompt_format: PromptFormat = "auto",
        template_kwargs: dict[str, Any] | None = None,
    ) -> None:
        self._encoder = _PairEncoder(
            *(tokenizer, system_prompt, prompt_format, template_kwargs), for_scoring=True
        )

    def ids(
        self, prompt: str | Messages, response: str, tools: list[dict[str, Any]] | None = None
    ) -> list[int]:
        """Ids of a prompt and its response, to be scored at the last one.

        Args:
            prompt: as in a dataset: text, or messages in any accepted form.
            response: text of one assistant turn.
            tools: as `common.formats` makes them.
        Raises:
            Drop: the template refuses the conversation or loses what it says, the text (without a
                template, the response but for an EOS at its end) spells special tokens, an empty
                response.
            ValueError: messages without a chat template, and the like.
        """
        return self._encoder.whole(text_or_messages(prompt, "prompt"), response, tools or [])


def render_pair(row: PairRow, tokenizer: Any, *, max_chars: int = 600, color: bool = False) -> str:
    """Decoded pair: the prompt, then each side's response, «targets» marked.

    The responses of a pair that is to be scored are marked as a whole.
    """
    start = row.prompt_length
    parts = [
        render_example(
            TokenRow(row.chosen.input_ids[:start], [False] * start), tokenizer, max_chars=max_chars
        )
    ]
    for name, side in (("chosen", row.chosen), ("rejected", row.rejected)):
        ids, mask = side.input_ids[start:], side.loss_mask[start:]
        if not any(side.loss_mask):
            mask = [True] * len(ids)
        text = render_example(TokenRow(ids, mask), tokenizer, max_chars=max_chars, color=color)
        parts.append(f"---- {name}: {text}")
    return "\n".join(parts)
