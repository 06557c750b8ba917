"""Rows in any accepted format -> token ids and masks, with every dropped row counted and explained.

Rules: one BOS and one stop token, wherever the template or tokenizer wants them; masks come from
token positions, never from comparing ids with the pad id; rows that do not fit are dropped (or, if
asked for, cut) and counted by reason. `common/files.py` reads, `common/formats.py` understands
rows, `common/chat.py` renders conversations; `common/pairs.py` makes pairs of preference rows.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import pickle
import shutil
import sys
import time
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import dataclass, field, fields, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, ClassVar, Literal, overload

import numpy as np

from common.cache import Arrays, cache_key, load_arrays, save_arrays, share_arrays
from common.chat import TEMPLATE_REASONS, ChatTemplate, encode
from common.chat import stop_token_ids as stop_token_ids  # for the scripts
from common.dist import from_rank0
from common.files import Source, open_sources
from common.formats import (
    Drop,
    Example,
    Messages,
    Row,
    TrainOn,
    detect_format,
    parse_prompt,
    parse_row,
)

PromptFormat = Literal["auto", "chat", "text"]
Overlong = Literal["drop", "truncate"]

CHUNK_ROWS = 1000
PARALLEL_ROWS = 20_000
"""from here on worker processes are worth the seconds that their imports take"""


@dataclass
class PromptRow:
    """One RL prompt."""

    prompt_ids: list[int]
    """what the engine continues; generation prompt included"""
    prompt: str | Messages
    """as in the dataset, with its `system` column but without `system_prompt`; for the rewards"""
    columns: dict[str, Any]
    """every other column of the row, plus `ground_truth` for verl rows"""
    tools: list[dict[str, Any]] = field(default_factory=list)
    """that the prompt offers, as `common.formats` makes them"""
    source: int = 0
    """which name on the command line it came from, counted from 0"""


@dataclass
class TokenRow:
    """One SFT sequence; `loss_mask[t]` is True iff token t is a target (never for t = 0)."""

    input_ids: list[int]
    loss_mask: list[bool]


class TokenDataset(Sequence[TokenRow]):
    """SFT sequences in flat arrays: five bytes a token, shared between processes if memory-mapped.

    Args:
        input_ids, loss_mask: (T,) i32, bool, all sequences one after the other.
        offsets: (S+1,) i64, where each sequence begins and the last one ends.
        num_targets: (S,) i64, trained tokens of each sequence; counted if not given.
        source_sizes: sequences of each dataset name, in order.
        largest_id: largest token id; looked up if not given.
    """

    def __init__(
        self,
        input_ids: np.ndarray,
        loss_mask: np.ndarray,
        offsets: np.ndarray,
        num_targets: np.ndarray | None = None,
        *,
        source_sizes: Sequence[int] | None = None,
        largest_id: int | None = None,
    ) -> None:
        self.input_ids, self.loss_mask, self.offsets = input_ids, loss_mask, offsets
        self.lengths = np.diff(offsets)  # (S,) i64
        if num_targets is None:
            num_targets = np.add.reduceat(loss_mask, offsets[:-1], dtype=np.int64)
        self.num_targets = num_targets
        self.source_sizes = [len(self)] if source_sizes is None else list(source_sizes)
        self.largest_id = int(input_ids.max()) if largest_id is None else largest_id

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @overload
    def __getitem__(self, index: int) -> TokenRow: ...
    @overload
    def __getitem__(self, index: slice) -> list[TokenRow]: ...
    def __getitem__(self, index: int | slice) -> TokenRow | list[TokenRow]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        i = range(len(self))[index]  # negative indices; IndexError beyond the end
        start, end = self.offsets[i], self.offsets[i + 1]
        return TokenRow(self.input_ids[start:end].tolist(), self.loss_mask[start:end].tolist())


@dataclass
class LoadReport:
    """What became of the rows of a dataset; `str()` is what scripts print."""

    flag: str
    rows: int = 0
    """read"""
    formats: Counter[str] = field(default_factory=Counter)
    """rows of each format, named by its columns"""
    unit: str = "sequences"
    """what a row becomes: sequences, or pairs of two sequences each"""
    sequences: int = 0
    """kept: SFT sequences, RL prompts or pairs"""
    tokens: int = 0
    """of what is kept"""
    target_tokens: int = 0
    """trained ones"""
    dropped: dict[str, int] = field(default_factory=dict)
    """rows (of rows that were split: sequences) by reason"""
    examples: dict[str, str] = field(default_factory=dict)
    """first occurrence of each reason"""
    truncated: int = 0
    """sequences or pairs cut at the limit"""
    split_rows: int = 0
    """rows that needed several sequences"""
    split_sequences: int = 0
    """which are so many"""
    checks: list[str] = field(default_factory=list)
    """what is to be known of the units as a whole, such as how many repeat each other"""
    notes: list[str] = field(default_factory=list)
    """what the reader should know"""
    sources: list[str] = field(default_factory=list)
    """what became of each dataset name, if there are several"""
    limited: bool = False
    """reading stopped early"""
    from_cache: str | None = None
    """the folder that it came from: nothing was tokenised"""

    def __str__(self) -> str:
        formats = ", ".join(f"{name} {count:,}" for name, count in self.formats.items())
        rows = f"{'the first ' if self.limited else ''}{counted(self.rows, 'rows')}"
        line = f"{self.flag}: {rows} ({formats}) -> {counted(self.sequences, self.unit)}, "
        line += counted(self.tokens, "tokens")
        if self.target_tokens:
            line += f", {self.target_tokens:,} trained ({self.target_tokens / self.tokens:.1%})"
        lines = [line + (f", from the cache ({self.from_cache})" if self.from_cache else "")]
        lines += [f"  {source}" for source in self.sources]
        lines += [f"  dropped {n:,}: {self.describe(r)}" for r, n in self.dropped.items()]
        if self.truncated:
            lost = (
                "prompts have lost their beginning, responses their tail"
                if self.unit == "pairs"
                else "they have lost their tail"
            )
            lines.append(f"  truncated {counted(self.truncated, self.unit)}: {lost}")
        if self.split_rows:
            lines.append(
                f"  split {counted(self.split_rows, 'rows')} into {self.split_sequences:,} "
                "sequences: earlier turns read differently once they are history "
                "(--train_on last_turn needs no split)"
            )
        lines += [f"  {check}" for check in self.checks]
        return "\n".join(lines + [f"  note: {note}" for note in self.notes])

    def describe(self, reason: str) -> str:
        """Reason of a drop with its first occurrence."""
        return f"{reason} ({self.examples[reason]})" if self.examples.get(reason) else reason

    def count_drop(self, drop: Drop, where: str) -> None:
        """Count one drop; the first of its reason is described."""
        self.dropped[drop.reason] = self.dropped.get(drop.reason, 0) + 1
        detail = f"{where}: {drop.detail}" if drop.detail else where
        self.examples.setdefault(drop.reason, detail)


def counted(number: int, things: str) -> str:
    """Number and noun, which is given in the plural: 2 rows, 1 row."""
    return f"{number:,} {things.removesuffix('s') if number == 1 else things}"


# ---- one row -> ids and masks --------------------------------------------------------------------


@dataclass
class RowEncoder:
    """Tokenizer plus the settings that decide how a row becomes ids: those of SFT sequences."""

    unit: ClassVar[str] = "sequences"
    """what rows become"""
    nothing: ClassVar[Arrays] = {
        "input_ids": np.zeros(0, np.int32),
        "loss_mask": np.zeros(0, bool),
        "lengths": np.zeros(0, np.int64),
    }
    """the arrays of no rows: the first two per token, the others per unit"""

    tokenizer: Any
    system_prompt: str | None
    prompt_format: PromptFormat
    template_kwargs: dict[str, Any] | None
    train_on: TrainOn = "all_turns"
    overlong: Overlong = "drop"
    max_tokens: int = 0
    stop_ids: Sequence[int] = ()

    def __post_init__(self) -> None:
        for name, choices in (
            ("prompt_format", ("auto", "chat", "text")),
            ("train_on", ("all_turns", "last_turn", "full")),
            ("overlong", ("drop", "truncate")),
        ):
            if getattr(self, name) not in choices:
                expected = f"{', '.join(choices[:-1])} or {choices[-1]}"
                raise ValueError(f"--{name}={getattr(self, name)}: expected {expected}")
        has_template = bool(self.tokenizer.chat_template)
        if self.prompt_format == "chat" and not has_template:
            raise ValueError(
                "--prompt_format=chat: the tokenizer has no chat template; bring one with "
                "--chat_template FILE"
            )
        use_template = has_template and self.prompt_format != "text"
        if self.system_prompt and not use_template:
            raise ValueError(
                "--system_prompt needs a chat template, but prompts are formatted as plain text"
            )
        if self.template_kwargs and not use_template:
            raise ValueError(
                f"--chat_template_args={self.template_kwargs}: no chat template is used"
            )
        self.template = (
            ChatTemplate(self.tokenizer, self.template_kwargs, self.stop_ids)
            if use_template
            else None
        )
        # what the tokenizer writes before a text; what it writes after (EOS) is wrong in a prompt
        bare, full = encode(self.tokenizer, "a"), self.tokenizer("a")["input_ids"]
        starts = [i for i in range(len(full)) if full[i : i + len(bare)] == bare]
        self.prefix: list[int] = full[: starts[0]] if starts else []

    # -- plain text --

    def plain(self, text: str) -> list[int]:
        """Plain text with the tokenizer's BOS exactly once (the text may spell it), without EOS."""
        ids = encode(self.tokenizer, text)
        return ids if ids[: len(self.prefix)] == self.prefix else self.prefix + ids

    def _only_text(self, messages: str | Messages, role: str) -> str:
        if isinstance(messages, str):
            return messages
        if len(messages) != 1 or messages[0]["role"] != role:
            roles = [m["role"] for m in messages]
            raise ValueError(f"--prompt_format=text: expected a single {role} turn, found {roles}")
        if role == "assistant" and not messages[0].get("trained", True):
            raise Drop("no_target", "the only answer is marked as not to be trained")
        if messages[0].keys() & {"tool_calls", "reasoning"}:
            raise Drop("tools_need_template", "tool calls and reasoning need a chat template")
        return messages[0]["content"]

    def _completion(self, prompt: str, target: str) -> TokenRow:
        """Prompt, completion, one EOS; the completion and EOS are targets."""
        prompt_ids, ids = self.plain(prompt), self.plain(prompt + target)
        # a token across the boundary cannot be generated: a rollout starts from the prompt's ids
        if ids[: len(prompt_ids)] != prompt_ids:
            ids = prompt_ids + encode(self.tokenizer, target)
        return self._closed(ids, 1 if self.train_on == "full" else len(prompt_ids))

    def _closed(self, ids: list[int], first_target: int) -> TokenRow:
        eos = self.tokenizer.eos_token_id
        if eos is None:
            raise ValueError(
                "the tokenizer has no EOS token: a model trained on plain text could not stop"
            )
        if ids[-1:] != [eos]:
            ids = [*ids, eos]
        return TokenRow(ids, [t >= max(1, first_target) for t in range(len(ids))])

    # -- any format --

    def _is_chat(self, prompt: str | Messages, tools: list[dict[str, Any]]) -> bool:
        """Whether a prompt goes through the chat template."""
        if self.template:
            return True
        if not isinstance(prompt, str) and self.prompt_format != "text":
            raise ValueError(
                "rows have messages, but the tokenizer has no chat template; bring one with "
                "--chat_template FILE"
            )
        if tools:
            raise Drop("tools_need_template", "tools need a chat template")
        return False

    def _with_system(self, messages: Messages) -> Messages:
        if self.system_prompt and messages[0]["role"] not in ("system", "developer"):
            return [{"role": "system", "content": self.system_prompt}, *messages]
        return messages

    def _refuse_additions(self, tools: list[dict[str, Any]]) -> None:
        """Rows of whole texts are what the model sees: nothing is put before them."""
        if self.system_prompt:
            raise ValueError("--system_prompt has no place in rows of whole texts")
        if tools:
            raise Drop("tools_need_template", "tools have no place in rows of whole texts")

    def prompt(self, prompt: str | Messages, tools: list[dict[str, Any]]) -> list[int]:
        """Ids that the model continues."""
        if not self._is_chat(prompt, tools):
            return self.plain(self._only_text(prompt, "user"))
        assert self.template
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        return self.template.prompt_ids(self._with_system(messages), tools)

    def rows(self, example: Example) -> list[TokenRow]:
        """Sequences of one row, before limits on their length.

        Raises:
            Drop: see `common/chat.py`; also `no_target`.
        """
        prompt, completion, tools = example.prompt, example.completion, example.tools
        if not completion or (isinstance(completion, str) and not completion.strip()):
            raise Drop("no_target", "nothing to train on")
        if isinstance(completion, str) and isinstance(prompt, list) and not prompt:
            self._refuse_additions(tools)
            return [self._closed(self.plain(completion), 1)]
        if not self._is_chat(completion, tools):
            if not prompt and isinstance(completion, list):
                prompt, completion = completion[:-1], completion[-1:]
            texts = self._only_text(prompt, "user"), self._only_text(completion, "assistant")
            return [self._completion(*texts)]
        assert self.template
        if isinstance(prompt, str):
            prompt = [{"role": "user", "content": prompt}]
        if isinstance(completion, str):
            completion = [{"role": "assistant", "content": completion}]
        messages = self._with_system(prompt + completion)
        num_context = len(messages) - len(completion)
        sequences = self.template.sequences(
            messages, tools, num_context=num_context, train_on=self.train_on
        )
        return [TokenRow(ids, mask) for ids, mask in sequences]

    def check(self) -> None:
        """Refuse a chat template that cannot be trained on.

        Raises:
            ValueError: see `ChatTemplate.check`.
        """
        if self.template:
            self.template.check()

    def _note_format(self, name: str, chunk: Chunk) -> None:
        """Note in the chunk what is to be known of the rows of a format."""
        if not self.template and name.startswith(("instruction+", "question+")):
            chunk.notes.add(
                "no chat template is used: answers follow their prompts without any separator "
                "(--chat_template FILE brings a template)"
            )

    def encode(self, row: Row, index: int, chunk: Chunk) -> list[Arrays]:
        """Arrays of each unit of a row; counts in the chunk what became of it.

        Raises:
            Drop: the row gives nothing.
            ValueError: a column that is not what it should be.
        """
        name = detect_format(row)
        chunk.formats[name] += 1
        sequences = self.rows(parse_row(row, name))
        self._note_format(name, chunk)
        if len(sequences) > 1:
            chunk.split_rows += 1
            chunk.split_sequences += len(sequences)
        kept: list[Arrays] = []
        for sequence in sequences:
            length = len(sequence.input_ids)
            if length > self.max_tokens and self.overlong == "drop":
                chunk.drops.append((index, "too_long", f"{length:,} tokens"))
                continue
            mask = np.array(sequence.loss_mask[: self.max_tokens], dtype=bool)
            if not mask.any():
                what = "no_target" if length == len(mask) else "too_long"
                chunk.drops.append((index, what, f"no target among the first {len(mask):,} tokens"))
                continue
            chunk.truncated += length > len(mask)
            ids = np.array(sequence.input_ids[: len(mask)], dtype=np.int32)
            kept.append({"input_ids": ids, "loss_mask": mask, "lengths": np.array([len(ids)])})
        return kept


# ---- many rows -> arrays -------------------------------------------------------------------------


class _BadRow(ValueError):
    """(index of the row, message)"""


@dataclass
class Chunk:
    """Some rows of a source, encoded; indices are those of the source."""

    rows: int
    arrays: Arrays = field(default_factory=dict)
    drops: list[tuple[int, str, str]] = field(default_factory=list)
    """index, reason, detail"""
    formats: Counter[str] = field(default_factory=Counter)
    notes: set[str] = field(default_factory=set)
    truncated: int = 0
    split_rows: int = 0
    split_sequences: int = 0

    @property
    def num_units(self) -> int:
        """Sequences, or pairs of them."""
        return len(self.arrays["lengths"])

    def without_last(self, count: int) -> Chunk:
        """Without the last `count` units."""
        units = self.num_units - count
        tokens = int(self.arrays["lengths"][:units].sum())
        arrays = {
            name: array[: tokens if name in ("input_ids", "loss_mask") else units]
            for name, array in self.arrays.items()
        }
        return replace(self, arrays=arrays)


def _encode_chunk(rows: list[Row], start: int, encoder: RowEncoder) -> Chunk:
    chunk = Chunk(len(rows))
    units = [encoder.nothing]
    for index, row in enumerate(rows, start=start):
        try:
            units += encoder.encode(row, index, chunk)
        except Drop as drop:
            chunk.drops.append((index, drop.reason, drop.detail))
        except RecursionError as error:
            chunk.drops.append((index, "nested_too_deep", str(error)))
        except ValueError as error:
            raise _BadRow(index, str(error)) from error
    chunk.arrays = {name: np.concatenate([unit[name] for unit in units]) for name in units[0]}
    if encoder.template:
        chunk.notes |= encoder.template.notes
    return chunk


_worker_encoder: list[RowEncoder] = []


def _start_worker(encoder: RowEncoder, parent: int) -> None:
    if sys.platform == "linux":  # a killed run must not leave its workers behind
        ctypes.CDLL(None).prctl(1, 15)
    if os.getppid() != parent:  # it was killed before
        os._exit(1)
    _worker_encoder.append(encoder)


def _encode_in_worker(pickled: bytes, start: int) -> Chunk:
    return _encode_chunk(pickle.loads(pickled), start, _worker_encoder[0])


def _num_cores() -> int:
    if sys.platform == "linux":  # those that a job scheduler has given us
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _encode_rows(rows: list[Row], encoder: RowEncoder, chunk_rows: int) -> Iterator[Chunk]:
    """Encode chunk by chunk, in order; many rows in as many processes as there are cores."""
    jobs = ((rows[i : i + chunk_rows], i) for i in range(0, len(rows), chunk_rows))
    num_workers = min(_num_cores(), 16)
    if len(rows) < PARALLEL_ROWS or chunk_rows < CHUNK_ROWS or num_workers == 1:
        yield from (_encode_chunk(chunk, start, encoder) for chunk, start in jobs)
        return
    with ProcessPoolExecutor(
        num_workers,
        mp_context=multiprocessing.get_context("spawn"),
        initializer=_start_worker,
        initargs=(encoder, os.getpid()),
    ) as pool:
        pending: deque[Future[Chunk] | Chunk] = deque()
        for chunk, start in jobs:
            try:
                pending.append(pool.submit(_encode_in_worker, pickle.dumps(chunk), start))
            except RecursionError:  # nested too deep to be sent, but perhaps not to be read
                pending.append(_encode_chunk(chunk, start, encoder))
        while pending:
            result = pending.popleft()
            yield result.result() if isinstance(result, Future) else result


def _build(
    sources: list[Source], encoder: RowEncoder, report: LoadReport, limit: int | None
) -> Arrays:
    """Read and encode all sources; fills in the report."""
    encoder.check()
    chunks: list[Chunk] = []
    source_sizes = np.zeros(len(sources), np.int64)
    report.limited = limit is not None
    # of several sources, about as many units from each
    limits = [len(part) for part in np.array_split(range(limit or 0), len(sources))]
    chunk_rows = min(CHUNK_ROWS, max(limits) or CHUNK_ROWS)
    for number, source in enumerate(sources):
        if limit and not limits[number]:
            break
        if len(source.files) > 1:
            files = ", ".join(file.name for file in source.files)
            report.notes.append(f"{source.name}: {files:.300}")
        rows = 0
        dropped: Counter[str] = Counter()
        for chunk in _progress(source, _encode_source(source, encoder, chunk_rows)):
            chunks.append(chunk)
            source_sizes[number] += chunk.num_units
            report.rows += chunk.rows
            rows += chunk.rows
            report.formats += chunk.formats
            report.truncated += chunk.truncated
            report.split_rows += chunk.split_rows
            report.split_sequences += chunk.split_sequences
            report.notes = sorted({*report.notes, *chunk.notes})
            for index, reason, detail in chunk.drops:
                report.count_drop(Drop(reason, detail), source.locate(index))
            dropped.update(reason for _, reason, _ in chunk.drops)
            if limit and source_sizes[number] >= limits[number]:
                surplus = int(source_sizes[number]) - limits[number]
                chunks[-1] = chunk.without_last(surplus)
                source_sizes[number] -= surplus
                break
        if not source_sizes[number]:
            raise _all_dropped(
                report, source, dropped, f"--max_sequence_tokens={encoder.max_tokens}"
            )
        if len(sources) > 1:
            report.sources.append(
                f"{source.name}: {counted(rows, 'rows')} -> "
                f"{counted(int(source_sizes[number]), encoder.unit)}, {dropped.total():,} dropped"
            )
    failed = [reason for reason in TEMPLATE_REASONS if reason in report.dropped]
    if 2 * sum(report.dropped[reason] for reason in failed) > report.rows:
        details = "; ".join(report.describe(reason) for reason in failed)
        raise ValueError(f"{report.flag}: the chat template fails on most rows: {details}")
    arrays = {
        name: np.concatenate([chunk.arrays[name] for chunk in chunks]) for name in encoder.nothing
    }
    lengths = arrays.pop("lengths")
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    ids, mask = arrays["input_ids"], arrays["loss_mask"]
    report.sequences, report.tokens = len(lengths), len(ids)
    report.target_tokens = int(mask.sum())
    return arrays | {
        "offsets": offsets,
        "num_targets": np.add.reduceat(mask, offsets[:-1], dtype=np.int64),
        "source_sizes": source_sizes,
        "largest_id": ids.max(keepdims=True),
    }


def _encode_source(source: Source, encoder: RowEncoder, chunk_rows: int) -> Iterator[Chunk]:
    try:
        yield from _encode_rows(source.read(), encoder, chunk_rows)
    except _BadRow as error:
        index, message = error.args
        raise ValueError(f"{source.flag}: {source.locate(index)}: {message}") from error


def _progress(source: Source, chunks: Iterator[Chunk]) -> Iterator[Chunk]:
    """A line every ten seconds."""
    rows, said = 0, time.monotonic()
    for chunk in chunks:
        yield chunk
        rows += chunk.rows
        if time.monotonic() > said + 10:
            said = time.monotonic()
            print(f"{source.flag}={source.name}: {rows:,} rows tokenised", flush=True)


def _all_dropped(
    report: LoadReport, source: Source, dropped: Counter[str], limit: str
) -> ValueError:
    reasons = "; ".join(f"{n} {report.describe(reason)}" for reason, n in dropped.items())
    num_rows = sum(dropped.values())
    what = "the only row" if num_rows == 1 else f"all {num_rows:,} rows"
    were = "was" if num_rows == 1 else "were"
    limit = f" ({limit})" if "too_long" in dropped else ""
    return ValueError(f"{source.flag}: {what} of {source.name} {were} dropped: {reasons}{limit}")


def load_encoded(
    paths: Sequence[str],
    encoder: RowEncoder,
    *,
    cache_dir: Path | None,
    limit: int | None,
    flag: str,
    split: str,
) -> tuple[Arrays, LoadReport]:
    """What an encoder makes of all rows; arguments as in `load_sft_rows`.  # collective: all ranks

    Returns:
        `input_ids`, `loss_mask`, `offsets`, `num_targets`, `source_sizes` and `largest_id` as
        `TokenDataset` has them (source_sizes in units), and the encoder's other arrays.
    """
    arrays: Arrays = {}

    def load() -> tuple[LoadReport, Path | None]:
        sources = open_sources(paths, flag=flag, split=split)
        folder = None
        if cache_dir is not None and limit is None:
            settings = {f.name: getattr(encoder, f.name) for f in fields(encoder)}
            tokenizer = settings.pop("tokenizer")
            fingerprints = [source.fingerprint() for source in sources]
            key = cache_key(tokenizer, type(encoder).__name__, fingerprints, settings)
            folder = Path(os.path.expanduser(cache_dir)).resolve() / key
            cached = load_arrays(folder, verify=True)
            if cached and cached[1].keys() == vars(LoadReport(flag)).keys():
                arrays.update(cached[0])
                about: dict[str, Any] = cached[1] | {"flag": flag, "from_cache": str(folder)}
                report = LoadReport(**about)
                report.formats = Counter(report.formats)
                return report, folder
            shutil.rmtree(folder, ignore_errors=True)  # damaged, or not there
        report = LoadReport(flag, unit=encoder.unit)
        arrays.update(_build(sources, encoder, report, limit))
        if folder:
            try:
                save_arrays(folder, arrays, vars(report))
            except OSError as error:
                report.notes.append(f"not cached: {error}")
                folder = None
        return report, folder

    report, folder = from_rank0(load)
    return share_arrays(arrays, folder), report


def token_dataset(arrays: Arrays) -> TokenDataset:
    """The sequences among the arrays of `load_encoded`."""
    return TokenDataset(
        *(arrays[name] for name in ("input_ids", "loss_mask", "offsets", "num_targets")),
        source_sizes=arrays["source_sizes"].tolist(),
        largest_id=int(arrays["largest_id"][0]),
    )


# ---- SFT -----------------------------------------------------------------------------------------


def load_sft_rows(
    paths: Sequence[str],
    tokenizer: Any,
    *,
    max_tokens: int,
    system_prompt: str | None = None,
    prompt_format: PromptFormat = "auto",
    train_on: TrainOn = "all_turns",
    overlong: Overlong = "drop",
    template_kwargs: dict[str, Any] | None = None,
    stop_ids: Sequence[int] = (),
    cache_dir: Path | None = None,
    limit: int | None = None,
    flag: str = "--dataset",
    split: str = "train",
) -> tuple[TokenDataset, LoadReport]:
    """SFT sequences as token ids and loss masks.  # collective: all ranks

    Rank 0 reads and tokenises, once per content and settings if there is a cache.

    Args:
        paths: see `common.files.open_sources`; formats: `common.formats.SFT_FORMATS`. Of preference
            rows the chosen side is trained. `text` rows are never templated.
        max_tokens: longest sequence.
        system_prompt: put before conversations that have no system turn.
        prompt_format: auto (chat template if there is one), chat (insist on it), text (plain).
        train_on: all_turns (all assistant turns; of prompt+completion and preference rows those of
            the completion), last_turn (the last of them), full (all tokens but a sequence's first).
        overlong: drop longer sequences, or truncate them: their tail is lost.
        template_kwargs: variables for the chat template, for example {"enable_thinking": False}.
        stop_ids: tokens that end a turn, besides the tokenizer's EOS and the template's own.
        cache_dir: keep the result here and use it next time.
        limit: stop after so many sequences, without cache.
        flag, split: see `common.files.open_sources`.
    Raises:
        ValueError: the same on all ranks: unreadable data, unknown columns, a dataset without a row
            left, a chat template that cannot be trained on, a setting that does not fit.
    """
    encoder = RowEncoder(
        *(tokenizer, system_prompt, prompt_format, template_kwargs),
        train_on=train_on,
        overlong=overlong,
        max_tokens=max_tokens,
        stop_ids=sorted(stop_ids),
    )
    arrays, report = load_encoded(
        paths, encoder, cache_dir=cache_dir, limit=limit, flag=flag, split=split
    )
    return token_dataset(arrays), report


# ---- RL prompts ----------------------------------------------------------------------------------


def _prompt_row(row: Row, encoder: RowEncoder, report: LoadReport, source: int) -> PromptRow:
    key, prompt, tools = parse_prompt(row)
    report.formats["question+answer" if key == "question" else key] += 1
    columns = {name: value for name, value in row.items() if name != key}
    grading = columns.get("reward_model")
    if isinstance(grading, dict) and "ground_truth" in grading:
        columns.setdefault("ground_truth", grading["ground_truth"])
    turns = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    if not any(m["content"].strip() for m in turns if m["role"] != "system"):
        raise Drop("empty_prompt")
    if turns[-1]["role"] == "assistant":
        raise Drop("prompt_ends_with_assistant")
    prompt_ids = encoder.prompt(prompt, tools)
    if not prompt_ids:  # a tokenizer may normalise a text away
        raise Drop("empty_prompt")
    if len(prompt_ids) > encoder.max_tokens:
        raise Drop("too_long", f"{len(prompt_ids):,} tokens")
    return PromptRow(prompt_ids, prompt, columns, tools, source)


def load_prompts(
    paths: Sequence[str],
    tokenizer: Any,
    *,
    max_prompt_tokens: int,
    system_prompt: str | None = None,
    prompt_format: PromptFormat = "auto",
    template_kwargs: dict[str, Any] | None = None,
    flag: str = "--dataset",
    split: str = "train",
) -> tuple[list[PromptRow], LoadReport]:
    """RL prompts as token ids; every rank loads them itself.

    Args:
        paths: see `common.files.open_sources`. Formats: `prompt` (text or messages, with `tools`),
            `question`+`answer`, verl, and preference rows with a prompt in any column.
        max_prompt_tokens: longer prompts (generation prompt included) are dropped, never truncated.
        system_prompt, prompt_format, template_kwargs, flag, split: as in `load_sft_rows`.
    Returns:
        Rows in file order, and what was dropped.
    Raises:
        ValueError: unreadable data, unknown columns, a format that does not fit, or no row left.
    """
    encoder = RowEncoder(
        *(tokenizer, system_prompt, prompt_format, template_kwargs), max_tokens=max_prompt_tokens
    )
    report = LoadReport(flag)
    kept: list[PromptRow] = []
    for number, source in enumerate(open_sources(paths, flag=flag, split=split)):
        dropped: Counter[str] = Counter()
        rows = source.read()
        for index, row in enumerate(rows):
            try:
                kept.append(_prompt_row(row, encoder, report, number))
            except (Drop, RecursionError) as error:
                drop = error if isinstance(error, Drop) else Drop("nested_too_deep", str(error))
                report.count_drop(drop, source.locate(index))
                dropped[drop.reason] += 1
            except ValueError as error:
                raise ValueError(f"{flag}: {source.locate(index)}: {error}") from error
        report.rows += len(rows)
        if dropped.total() == len(rows):
            raise _all_dropped(report, source, dropped, f"--max_prompt_tokens={max_prompt_tokens}")
    report.sequences, report.tokens = len(kept), sum(len(row.prompt_ids) for row in kept)
    if encoder.template:
        report.notes = sorted(encoder.template.notes)
    return kept, report


def render_example(
    row: TokenRow | PromptRow, tokenizer: Any, *, max_chars: int = 600, color: bool = False
) -> str:
    """Decoded row with «trained tokens» marked (or green); longer stretches lose their middle."""
    left, right = ("\x1b[32m", "\x1b[0m") if color else ("«", "»")
    ids, mask = (
        (row.input_ids, row.loss_mask)
        if isinstance(row, TokenRow)
        else (row.prompt_ids, [False] * len(row.prompt_ids))
    )
    starts = [t for t in range(len(mask)) if t == 0 or mask[t] != mask[t - 1]]
    parts: list[str] = []
    for start, end in pairwise([*starts, len(mask)]):  # none of an empty row
        text = tokenizer.decode(ids[start:end], skip_special_tokens=False)
        if len(text) > max_chars:
            half = max_chars // 2
            text = f"{text[:half]} [... {len(text) - 2 * half} characters ...] {text[-half:]}"
        parts.append(f"{left}{text}{right}" if mask[start] else text)
    return "".join(parts)
