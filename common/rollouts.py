"""Stored rollouts (`rollouts/step_N.jsonl` of an earlier run, or of any generator) -> samples.

Every line is checked before anything expensive starts. Then only its place is kept, and `read`
parses it again: a folder may be larger than the memory.
"""

from __future__ import annotations

import json
import math
import os
import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np

from common.data import counted
from common.formats import Messages

MAX_LOGPROB = 1e-3
"""what is above 0 by more than rounding is no log-prob"""

_STEP = re.compile(r"step_([0-9]+)\.jsonl")
_REQUIRED = ("prompt_ids", "response_ids", "rollout_logprobs", "score")
_KINDS: dict[str, tuple[type, ...]] = {
    **dict.fromkeys(("prompt_ids", "response_ids", "rollout_logprobs"), (list,)),
    **{"truncated": (bool,), "response": (str,), "prompt": (str, list)},
    **dict.fromkeys(("rewards", "columns"), (dict,)),
}


@dataclass
class StoredSample:
    """One line of a file."""

    prompt: str | Messages
    prompt_ids: list[int]
    response_ids: list[int]
    """stop token included"""
    rollout_logprobs: list[float]
    """one per response token, from the engine at sampling time"""
    score: float
    """NaN where there is none"""
    components: dict[str, float]
    """the single rewards by their labels, NaN where there is none"""
    truncated: bool | None
    """None: not said"""
    response: str
    columns: dict[str, Any]


class StoredRollouts:
    """Groups of `samples_per_prompt` consecutive samples of one prompt, in the order written.

    No collectives: every rank makes its own, of the same files.

    Args:
        path: a run's folder, its `rollouts` folder, or one .jsonl file. Of a folder with
            step_N.jsonl files these are read, by number; of others every .jsonl file, by name.
            Those named eval_*.jsonl never are: their prompts are held out.
        samples_per_prompt: G; groups do not go on in the next file.
        max_prompt_tokens, max_response_tokens: longer ones are errors.
        flag: command line flag to name in errors.

    Raises:
        ValueError: nothing there, cannot be read, a line that is no sample or unfinished, a sample
            that is too long, samples of several prompts in a group.
    """

    def __init__(
        self,
        path: str,
        *,
        samples_per_prompt: int,
        max_prompt_tokens: int,
        max_response_tokens: int,
        flag: str = "--rollouts_from",
    ) -> None:
        self._flag, self._samples_per_prompt = flag, samples_per_prompt
        self._limits = {"prompt": max_prompt_tokens, "response": max_response_tokens}
        self._files = _find(path, flag)
        self._versions: dict[int, tuple[int, int]] = {}  # size, last change; when first opened
        self.num_files = len(self._files)
        self.largest_id = self._tokens = self._sampled = self._truncated = self._unscored = 0
        self._shortest_run = sys.maxsize  # samples of one prompt in a row
        # (S, 3) i64: file, first byte, line
        self._places = np.concatenate([self._check(number) for number in range(self.num_files)])

    def __len__(self) -> int:
        return len(self._places) // self._samples_per_prompt

    def __str__(self) -> str:
        size = len(self._places)
        line = f"{self._flag}: {counted(self.num_files, 'files')} -> {counted(size, 'samples')} of "
        line += f"{counted(len(self), 'prompts')}, {counted(self._tokens, 'tokens')}, "
        line += f"{self._sampled:,} sampled ({self._sampled / self._tokens:.1%}), "
        line += f"{self._truncated / size:.1%} of the samples truncated, "
        line += f"{self._unscored / size:.1%} without a score"
        if 1 < self._samples_per_prompt < self._shortest_run:
            line += f"\n  note: no prompt has fewer than {self._shortest_run} samples in a row; "
            line += f"--samples_per_prompt={self._samples_per_prompt} splits them"
        return line

    def read(self, groups: Sequence[int]) -> list[StoredSample]:
        """All samples of these groups, in order: len(groups) * samples_per_prompt.

        Raises:
            ValueError: a file cannot be read any more, or has changed since it was checked.
            IndexError: no such group.
        """
        samples: list[StoredSample] = []
        for group in groups:
            start = range(len(self))[group] * self._samples_per_prompt
            places = self._places[start : start + self._samples_per_prompt].tolist()
            with self._open(places[0][0]) as file:
                for number, offset, line in places:
                    file.seek(offset)
                    sample = self._parse(file.readline(), number, line)
                    assert sample is not None
                    samples.append(sample)
        return samples

    @contextmanager
    def _open(self, number: int) -> Iterator[IO[bytes]]:
        try:
            with self._files[number].open("rb") as file:
                status = os.fstat(file.fileno())
                version = (status.st_size, status.st_mtime_ns)
                if self._versions.setdefault(number, version) != version:
                    raise ValueError(f"{self._label(number)}: has changed since it was checked")
                yield file
        except OSError as error:
            raise ValueError(f"{self._label(number)}: cannot be read: {error}") from error

    def _check(self, number: int) -> np.ndarray:
        """Check every line of a file; returns the places of its samples, (n, 3) i64."""
        places: list[tuple[int, int, int]] = []
        offset = line = run = 0
        run_ids: list[int] = []  # prompt of the last `run` samples
        with self._open(number) as file:
            # bytes: text files would also break lines at other characters than \n
            for line, text in enumerate(file, start=1):
                if (sample := self._parse(text, number, line)) is not None:
                    if run and sample.prompt_ids != run_ids:
                        self._end_run(run, number, f"line {line}: another prompt begins")
                        run = 0
                    run, run_ids = run + 1, sample.prompt_ids
                    places.append((number, offset, line))
                    self.largest_id = max(self.largest_id, *run_ids, *sample.response_ids)
                    self._tokens += len(run_ids) + len(sample.response_ids)
                    self._sampled += len(sample.response_ids)
                    self._truncated += bool(sample.truncated)
                    self._unscored += math.isnan(sample.score)
                offset += len(text)
        if not places:
            raise ValueError(f"{self._label(number)}: no samples")
        self._end_run(run, number, f"line {line}: the file ends")
        return np.array(places)

    def _end_run(self, run: int, number: int, where: str) -> None:
        self._shortest_run = min(self._shortest_run, run)
        if run % self._samples_per_prompt:
            raise ValueError(
                f"{self._label(number)}: {where} after {counted(run, 'samples')} of one prompt, "
                f"not a multiple of --samples_per_prompt={self._samples_per_prompt}; the file "
                f"seems to have been written with --samples_per_prompt {run}"
            )

    def _parse(self, text: bytes, number: int, line: int) -> StoredSample | None:
        """The sample of a line; None if it is blank."""
        where = f"{self._label(number)}: line {line}"
        try:
            # Windows editors write a byte order mark
            decoded = text.decode("utf-8-sig" if line == 1 else "utf-8")
            if not decoded.strip():
                return None
            row = json.loads(decoded)
        except (ValueError, RecursionError) as error:
            if not text.endswith(b"\n"):
                raise ValueError(
                    f"{where}, the last, is unfinished: was its writer stopped, or is it writing?"
                ) from error
            reason = error.msg if isinstance(error, json.JSONDecodeError) else error
            raise ValueError(f"{where}: invalid JSON: {reason}") from error
        try:
            sample = _sample(row)
        except ValueError as error:
            raise ValueError(f"{where}: {error}") from error
        for what, ids in (("prompt", sample.prompt_ids), ("response", sample.response_ids)):
            if len(ids) > self._limits[what]:
                limit = f"--max_{what}_tokens={self._limits[what]}"
                raise ValueError(f"{where}: a {what} of {len(ids)} tokens; raise {limit}")
        return sample

    def _label(self, number: int) -> str:
        return f"{self._flag}={self._files[number]}"


def replay_order(step: int, *, num_groups: int, groups_per_step: int, seed: int) -> list[int]:
    """Groups of step `step` (from 1): passes over all of them follow each other without a gap.

    The first pass is in the order of writing, so that the first update is that of the run that
    wrote them; every later one is in a random order of its own, from (seed, pass).
    """
    positions = np.arange((step - 1) * groups_per_step, step * groups_per_step)
    passes, places = np.divmod(positions, num_groups)
    groups: list[int] = []
    for number in np.unique(passes).tolist():
        order = np.arange(num_groups)
        if number > 0:
            order = np.random.default_rng((seed, number)).permutation(num_groups)
        groups += order[places[passes == number]].tolist()
    return groups


def _find(path: str, flag: str) -> list[Path]:
    """The files of a path, in order."""
    place = Path(os.path.expanduser(path))
    try:
        if place.is_dir() and path:
            folder = place / "rollouts" if (place / "rollouts").is_dir() else place
            files = sorted(file for file in folder.glob("*.jsonl") if file.is_file())
        elif place.is_file():
            files = [place] if place.name.endswith(".jsonl") else []
        else:
            raise ValueError(f"{flag}={path}: no such file or directory")
    except OSError as error:
        raise ValueError(f"{flag}={path}: cannot be read: {error}") from error
    steps = [(int(match[1]), file) for file in files if (match := _STEP.fullmatch(file.name))]
    chosen = [file for _, file in sorted(steps)]
    chosen = chosen or [file for file in files if not file.name.startswith("eval_")]
    if not chosen:
        raise ValueError(
            f"{flag}={path}: expected a run's folder, one with .jsonl files, or such a file; plain "
            "ones, not compressed, and not eval_*.jsonl, whose prompts are held out"
        )
    return chosen


# ---- one line -> a sample; the caller adds file and line to errors ----


def _sample(row: Any) -> StoredSample:
    if not isinstance(row, dict):
        raise ValueError(f"{row!r:.80} is not an object")
    if missing := [name for name in _REQUIRED if name not in row]:
        raise ValueError(f"no {', '.join(missing)} among its keys, {list(row)!r:.120}")
    row = {"prompt": "", "rewards": {}, "response": "", "columns": {}} | row
    for name, kinds in _KINDS.items():
        if name in row and not isinstance(row[name], kinds):
            expected = " or ".join(kind.__name__ for kind in kinds)
            raise ValueError(f"{name}={row[name]!r:.80}: expected {expected}")
    for name in ("prompt_ids", "response_ids"):
        if not row[name]:
            raise ValueError(f"{name} is empty")
        # True is an int
        if wrong := [token for token in row[name] if type(token) is not int or token < 0]:
            raise ValueError(f"{name} holds {wrong[0]!r:.80}, which is no token id")
    logprobs, size = row["rollout_logprobs"], len(row["response_ids"])
    if len(logprobs) != size:
        raise ValueError(f"{len(logprobs)} rollout_logprobs for {size} response_ids")
    if wrong := [value for value in logprobs if not (_finite(value) and value <= MAX_LOGPROB)]:
        raise ValueError(f"rollout_logprobs holds {wrong[0]!r:.80}, which is no log-prob")
    if isinstance(row["prompt"], list) and not all(isinstance(m, dict) for m in row["prompt"]):
        raise ValueError(f"prompt={row['prompt']!r:.80}: expected messages")
    numbers = {"score": row["score"], **{f"rewards.{k}": v for k, v in row["rewards"].items()}}
    for name, value in numbers.items():
        if value is not None and not _finite(value):
            raise ValueError(f"{name}={value!r:.80}: expected a finite number or null")
    return StoredSample(
        prompt=row["prompt"],
        prompt_ids=row["prompt_ids"],
        response_ids=row["response_ids"],
        rollout_logprobs=[float(value) for value in logprobs],
        score=math.nan if row["score"] is None else float(row["score"]),
        components={k: math.nan if v is None else float(v) for k, v in row["rewards"].items()},
        truncated=row.get("truncated"),
        response=row["response"],
        columns=row["columns"],
    )


def _finite(value: Any) -> bool:
    """Whether it is a number that a float can hold; True and False are none."""
    return type(value) in (float, int) and abs(value) <= sys.float_info.max
