"""Stored rollouts come back bit for bit, in order; what is wrong names flag, file and line."""

import json
import math
import os
import re
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from common.data import PromptRow
from common.rollouts import StoredRollouts, replay_order
from common.tracking import Tracker
from grpo import Rollouts


def sample(first_id: int = 1, /, **fields: Any) -> dict[str, Any]:
    """A line with the required fields, and what else is given."""
    ids = {"prompt_ids": [first_id, 7], "response_ids": [3, 4]}
    return ids | {"rollout_logprobs": [-0.5, -0.25], "score": 1.0} | fields


def write(path: Path, samples: list[dict[str, Any]]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in samples))
    return path


def stored(path: Path, samples_per_prompt: int = 2, **limits: int) -> StoredRollouts:
    limits = {"max_prompt_tokens": 8, "max_response_tokens": 8} | limits
    return StoredRollouts(str(path), samples_per_prompt=samples_per_prompt, **limits)


def refused(path: Path, message: str, samples_per_prompt: int = 2, **limits: int) -> None:
    """The error starts with the flag and the path, and goes on with the message, a pattern."""
    with pytest.raises(ValueError, match=re.escape(f"--rollouts_from={path}: ") + message):
        stored(path, samples_per_prompt, **limits)


def prompts(rollouts: StoredRollouts) -> list[int]:
    """First prompt token of each group."""
    samples = rollouts.read(range(len(rollouts)))
    return [s.prompt_ids[0] for s in samples[:: len(samples) // len(rollouts)]]


# ---- what comes back ----


def test_round_trip_through_a_run(tmp_path: Path) -> None:
    """Bit for bit what a script dumps: floats, broken text, messages, missing scores."""
    generator = torch.Generator().manual_seed(0)
    turns = [{"role": "user", "content": "1 + 1\u2028?"}]
    rows = [
        PromptRow([5, 6], turns, {"answer": "2", "parts": [1, {"a": None}]}),
        PromptRow([8], "text\r\n", {}),
    ]
    rows = [row for row in rows for _ in range(2)]
    ids = [[1], [2, 3, 4], [9] * 7, [11, 2**31]]
    samples = Rollouts(
        rows=rows,
        response_ids=ids,
        # float32 numbers as the engine gives them, then some that are hard to print
        rollout_logprobs=[(-torch.rand(len(i), generator=generator)).tolist() for i in ids[:2]]
        + [[-0.1 - 0.2, -5e-324, -1e300, -0.0, 1e-7, -1 / 3, -math.pi], [0.0, -1.0]],
        truncated=torch.tensor([False, True, False, True]),
        scores=torch.tensor([0.1 + 0.2, math.nan, -1 / 3, 0.0], dtype=torch.float64),
        components={
            "math": torch.tensor([0.1, math.nan, 1e-17, 0.0], dtype=torch.float64),
            "judge": torch.tensor([0.2, 7.0, math.nan, 0.0], dtype=torch.float64),
        },
        responses=["two", "broken \udc80 utf-8 \ud83d", "\n\r\x00\u2028é", ""],
        exceptions=0,
        timeouts=0,
        refused=0,
        rollout_s=0.0,
        reward_s=0.0,
    )
    tracker = Tracker(
        tmp_path,
        {},
        enabled=True,
        total_steps=1,
        columns={},
        wandb_project=None,
        wandb_name=None,
        source=__file__,
    )
    tracker.dump_samples("step_1", samples.dump(torch.ones(4)))
    tracker.finish()
    rollouts = stored(tmp_path)
    assert len(rollouts) == 2 and rollouts.largest_id == 2**31
    read = rollouts.read([0, 1])

    def bits(values: list[float]) -> bytes:
        return np.array(values, np.float64).tobytes()

    assert [s.prompt_ids for s in read] == [row.prompt_ids for row in rows]
    assert [s.prompt for s in read] == [row.prompt for row in rows]
    assert [s.columns for s in read] == [row.columns for row in rows]
    assert [s.response_ids for s in read] == ids
    assert [s.response for s in read] == samples.responses
    assert [s.truncated for s in read] == samples.truncated.tolist()
    assert list(map(bits, (s.rollout_logprobs for s in read))) == list(
        map(bits, samples.rollout_logprobs)
    )
    assert bits([s.score for s in read]) == samples.scores.numpy().tobytes()
    for name, values in samples.components.items():
        assert bits([s.components[name] for s in read]) == values.numpy().tobytes()
    assert list(read[0].components) == ["math", "judge"]


def test_only_four_fields_are_needed(tmp_path: Path) -> None:
    """What another generator may leave out; whole numbers become floats."""
    row = sample(rollout_logprobs=[-1, 0], score=2, extra="ignored")
    (read,) = stored(write(tmp_path / "mine.jsonl", [row]), samples_per_prompt=1).read([0])
    assert (read.prompt, read.response, read.components, read.columns) == ("", "", {}, {})
    assert read.truncated is None
    assert [type(v) for v in (read.score, *read.rollout_logprobs)] == [float] * 3


def test_report(tmp_path: Path) -> None:
    lines = [sample(1, truncated=True), sample(1), sample(2, score=None), sample(2)]
    write(tmp_path / "step_1.jsonl", lines)
    write(tmp_path / "step_2.jsonl", [sample(3, response_ids=[4, 900])] * 2 + lines)
    rollouts = stored(tmp_path)
    assert str(rollouts) == (
        "--rollouts_from: 2 files -> 10 samples of 5 prompts, 40 tokens, 20 sampled (50.0%), "
        "20.0% of the samples truncated, 20.0% without a score"
    )
    assert (rollouts.num_files, len(rollouts), rollouts.largest_id) == (2, 5, 900)
    write(tmp_path / "step_1.jsonl", [sample(1000)] * 4)
    assert stored(tmp_path / "step_1.jsonl").largest_id == 1000
    # twice as many samples as told: groups are halves, which is allowed but hardly meant
    assert "no prompt has fewer than 4 samples in a row" in str(stored(tmp_path / "step_1.jsonl"))
    for samples_per_prompt in (1, 4):
        assert "note" not in str(stored(tmp_path / "step_1.jsonl", samples_per_prompt))


def test_read_gives_the_groups_asked_for(tmp_path: Path) -> None:
    write(tmp_path / "step_1.jsonl", [sample(i // 3, score=i) for i in range(9)])
    write(tmp_path / "step_2.jsonl", [sample(i // 3, score=i) for i in range(9, 15)])
    rollouts = stored(tmp_path, 3)
    scores = [s.score for s in rollouts.read([4, 0, 2, 0])]
    assert scores == [12, 13, 14, 0, 1, 2, 6, 7, 8, 0, 1, 2]
    assert rollouts.read([]) == [] and rollouts.read([-1]) == rollouts.read([4])
    with pytest.raises(IndexError):
        rollouts.read([5])


def test_texts_of_other_editors(tmp_path: Path) -> None:
    """Byte order mark, CRLF, blank lines, line breaks of Unicode, no newline at the end."""
    rows = [sample(i // 2, response="é\u2028\x85", score=i) for i in range(4)]
    lines = [json.dumps(row, ensure_ascii=False) for row in rows]
    path = tmp_path / "a.jsonl"
    for text in (
        "\ufeff" + "\r\n".join(lines) + "\r\n",
        "\n\n" + "\n \t\n\n".join(lines) + "\n\n",
        "\ufeff\n" + "\n".join(lines),
    ):
        path.write_bytes(text.encode())
        read = stored(path).read([1, 0])
        assert [s.score for s in read] == [2, 3, 0, 1]
        assert all(s.response == "é\u2028\x85" for s in read)


# ---- which files ----


def test_steps_are_read_by_number_and_evaluations_never(tmp_path: Path) -> None:
    folder = tmp_path / "run" / "rollouts"
    for number in (10, 9, 1, 100, 11):
        write(folder / f"step_{number}.jsonl", [sample(number)] * 2)
    write(folder / "eval_0.jsonl", [sample(0)] * 2)
    write(folder / "other.jsonl", [sample(0)] * 2)
    write(folder / "step_2.jsonl.partial", [sample(0)] * 2)
    write(tmp_path / "run" / "metrics.jsonl", [{"step": 1}])
    for path in (tmp_path / "run", folder):
        assert prompts(stored(path)) == [1, 9, 10, 11, 100]
    assert prompts(stored(folder / "other.jsonl")) == [0]
    for path in folder.glob("step_*.jsonl"):
        path.unlink()
    write(folder / "b.jsonl", [sample(2)] * 2)
    assert prompts(stored(folder)) == [2, 0]  # b, other
    refused(folder / "eval_0.jsonl", "expected a run's folder.*not eval_")
    (folder / "b.jsonl").unlink()
    (folder / "other.jsonl").unlink()
    refused(tmp_path / "run", "expected a run's folder.*not eval_")


def test_nothing_to_read(tmp_path: Path) -> None:
    refused(tmp_path, "expected a run's folder, .* not compressed")
    refused(tmp_path / "none", "no such file or directory")
    refused(write(tmp_path / "a.jsonl.gz", [sample()]), "expected .* not compressed")
    (tmp_path / "step_3.jsonl").mkdir()
    refused(tmp_path, "expected a run's folder")
    with pytest.raises(ValueError, match="--from=: no such file"):
        StoredRollouts(
            "", samples_per_prompt=1, max_prompt_tokens=1, max_response_tokens=1, flag="--from"
        )
    for text in ("", "\n\n"):
        path = tmp_path / "a.jsonl"
        path.write_text(text)
        refused(path, "no samples")


def test_home_is_understood(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "a.jsonl", [sample()] * 2)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert len(stored(Path("~/a.jsonl"))) == 1


# ---- lines that are none ----


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "invalid JSON: Expecting property name"),
        ("[" * 100_000, "invalid JSON: "),
        (f'{{"score": {"1" * 5000}}}', "invalid JSON: Exceeds"),
        ("[1]", r"\[1\] is not an object"),
        ({"step": 1}, "no prompt_ids, response_ids, rollout_logprobs, score among .*'step'"),
        ({"prompt_ids": [1], "response_ids": [1], "rollout_logprobs": [0.0]}, "no score among"),
        (sample(prompt_ids=[]), "prompt_ids is empty"),
        (sample(prompt_ids="12"), "prompt_ids='12': expected list"),
        (sample(prompt_ids=[1, -2]), "prompt_ids holds -2, which is no token id"),
        (sample(prompt_ids=[1, 2.0]), r"prompt_ids holds 2\.0, which"),
        (sample(response_ids=[], rollout_logprobs=[]), "response_ids is empty"),
        (sample(response_ids=[1, True]), "response_ids holds True, which"),
        (sample(response_ids=[1, None]), "response_ids holds None, which"),
        (sample(rollout_logprobs=[-1.0]), "1 rollout_logprobs for 2 response_ids"),
        (sample(rollout_logprobs=None), "rollout_logprobs=None: expected list"),
        (sample(rollout_logprobs=[-1.0, 0.002]), r"rollout_logprobs holds 0\.002, which"),
        (sample(rollout_logprobs=[-1.0, math.nan]), "rollout_logprobs holds nan, which"),
        (sample(rollout_logprobs=[-math.inf, 0]), "rollout_logprobs holds -inf, which"),
        (sample(rollout_logprobs=[-(10**400), 0]), "rollout_logprobs holds -1000+, which"),
        (sample(rollout_logprobs=[False, 0]), "rollout_logprobs holds False, which"),
        (sample(score="1"), "score='1': expected a finite number or null"),
        (sample(score=True), "score=True: expected"),
        (sample(score=math.nan), "score=nan: expected"),
        (sample(score=-math.inf), "score=-inf: expected"),
        (sample(score=10**400), "score=1000+: expected"),
        (sample(rewards={"math": math.nan}), r"rewards\.math=nan: expected a finite number"),
        (sample(rewards={"math": [1]}), r"rewards\.math=\[1\]: expected"),
        (sample(rewards=[1.0]), r"rewards=\[1\.0\]: expected dict"),
        (sample(truncated=0), "truncated=0: expected bool"),
        (sample(response=None), "response=None: expected str"),
        (sample(columns="a"), "columns='a': expected dict"),
        (sample(prompt=3), "prompt=3: expected str or list"),
        (sample(prompt=["a"]), r"prompt=\['a'\]: expected messages"),
    ],
)
def test_a_wrong_line_is_named(tmp_path: Path, line: Any, message: str) -> None:
    path = tmp_path / "step_1.jsonl"
    good, bad = json.dumps(sample()), line if isinstance(line, str) else json.dumps(line)
    path.write_text(f"{good}\n\n{bad}\n{good}\n")
    refused(path, f"line 3: {message}", 1)


def test_values_in_errors_are_short(tmp_path: Path) -> None:
    for name in ("score", "columns"):
        path = write(tmp_path / "a.jsonl", [sample(**{name: "x" * 10_000})])
        with pytest.raises(ValueError) as caught:
            stored(path)
        assert len(str(caught.value)) < len(str(path)) + 200


def test_rounding_and_long_integers_are_fine(tmp_path: Path) -> None:
    row = sample(rollout_logprobs=[1e-4, -0.0], response_ids=[10**30, 2], columns={"a": 10**30})
    rollouts = stored(write(tmp_path / "a.jsonl", [row] * 2))
    assert rollouts.largest_id == 10**30
    (first, second) = rollouts.read([0])
    assert first == second and first.columns == {"a": 10**30}


def test_invalid_utf8_is_named(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", [sample()] * 2)
    path.write_bytes(path.read_bytes() + b'{"a": "\xff"}\n')
    refused(path, "line 3: invalid JSON: .*utf-8")


def test_an_unfinished_last_line_is_named(tmp_path: Path) -> None:
    """A run that was killed while it wrote, at any byte."""
    path = write(tmp_path / "a.jsonl", [sample(), sample(response="é")])
    text = json.dumps(sample(response="é"), ensure_ascii=False).encode()
    start = path.read_bytes()
    for end in range(1, len(text)):
        path.write_bytes(start + text[:end])
        refused(path, "line 3, the last, is unfinished")
    path.write_bytes(start + text)  # the third line is whole, its group is not
    refused(path, "line 3: the file ends after 3 samples")


# ---- limits and groups ----


@pytest.mark.parametrize("what", ["prompt", "response"])
def test_too_long_samples_are_refused(tmp_path: Path, what: str) -> None:
    rows = [sample(), sample(prompt_ids=[1] * 5, response_ids=[1] * 5, rollout_logprobs=[-1] * 5)]
    path = write(tmp_path / "a.jsonl", rows)
    assert len(stored(path, 1, max_prompt_tokens=5, max_response_tokens=5)) == 2
    message = f"line 2: a {what} of 5 tokens; raise --max_{what}_tokens=4"
    refused(path, message, 1, **{f"max_{what}_tokens": 4})


def test_groups_of_another_size_are_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", [sample(i // 3) for i in range(9)])
    assert len(stored(path, 3)) == 3 and len(stored(path, 1)) == 9
    message = "line 4: another prompt begins after 3 samples of one prompt, not a multiple of "
    message += "--samples_per_prompt={}; .* written with --samples_per_prompt 3$"
    for samples_per_prompt in (2, 4, 9):
        refused(path, message.format(samples_per_prompt), samples_per_prompt)
    path = write(tmp_path / "b.jsonl", [sample()] * 3)
    refused(path, "line 3: the file ends after 3 samples .* --samples_per_prompt 3$")
    # longer runs are the same prompt twice
    assert len(stored(write(tmp_path / "c.jsonl", [sample(1)] * 4 + [sample(2)] * 2))) == 3


def test_a_group_does_not_cross_files(tmp_path: Path) -> None:
    write(tmp_path / "step_1.jsonl", [sample()] * 3)
    write(tmp_path / "step_2.jsonl", [sample()] * 1)
    with pytest.raises(ValueError, match=r"step_1\.jsonl: line 3: the file ends after 3 samples"):
        stored(tmp_path)


# ---- between the check and the reading ----


def test_a_file_that_changes_is_refused(tmp_path: Path) -> None:
    write(tmp_path / "step_1.jsonl", [sample(1)] * 2)
    path = write(tmp_path / "step_2.jsonl", [sample(2)] * 2)
    before = path.stat()

    def refuses(message: str) -> None:
        rollouts.read([0])  # the other file is as it was
        with pytest.raises(ValueError, match=re.escape(f"={path}: ") + message):
            rollouts.read([0, 1])

    rollouts = stored(tmp_path)
    assert prompts(rollouts) == [1, 2]
    write(path, [sample(3)] * 2)  # the same size
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns + 1))
    refuses("has changed since it was checked")
    write(path, [sample(2)] * 4)  # the same time
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    refuses("has changed since it was checked")
    path.unlink()
    refuses("cannot be read: .*No such file")


def test_only_places_are_kept(tmp_path: Path) -> None:
    """A folder may be larger than the memory: a sample costs the same whatever it holds."""
    rows = [sample(response="x" * 10_000, columns={"a": "y" * 10_000})] * 50
    rollouts = stored(write(tmp_path / "a.jsonl", rows))
    arrays = [value for value in vars(rollouts).values() if isinstance(value, np.ndarray)]
    assert sum(array.nbytes for array in arrays) == 50 * 3 * 8
    others = [value for value in vars(rollouts).values() if not isinstance(value, np.ndarray)]
    assert len(repr(others)) < 1000


def test_a_large_file_takes_no_minute(tmp_path: Path) -> None:
    """200,000 tokens in 400 lines: a fifth of a second on one core, most of it in json."""
    ids, logprobs = list(range(150_000, 150_400)), [-1 / (3 + i) for i in range(400)]
    row = sample(prompt_ids=ids[:100], response_ids=ids, rollout_logprobs=logprobs)
    path = write(tmp_path / "a.jsonl", [row] * 400)
    start = time.perf_counter()
    rollouts = stored(path, 8, max_prompt_tokens=100, max_response_tokens=400)
    assert rollouts.read([49])[7].rollout_logprobs == logprobs
    assert time.perf_counter() - start < 5


# ---- order of replay ----


def test_replay_order() -> None:
    """In the order of writing, then shuffled anew in each pass; nothing is lost between them."""
    walk: list[int] = []
    for step in range(1, 31):
        groups = replay_order(step, num_groups=20, groups_per_step=6, seed=3)
        assert len(groups) == 6 and all(type(group) is int for group in groups)
        walk += groups
    passes = [walk[start : start + 20] for start in range(0, 180, 20)]
    assert passes[0] == list(range(20))
    assert all(sorted(order) == list(range(20)) for order in passes)
    assert len(set(map(tuple, passes))) == 9
    other = replay_order(5, num_groups=20, groups_per_step=6, seed=4)
    assert other != walk[24:30] == replay_order(5, num_groups=20, groups_per_step=6, seed=3)


def test_replay_of_fewer_groups_than_a_step(tmp_path: Path) -> None:
    groups = replay_order(1, num_groups=2, groups_per_step=7, seed=0)
    assert groups[:2] == [0, 1] and len(groups) == 7
    assert all(sorted(groups[i : i + 2]) == [0, 1] for i in (2, 4))
    path = write(tmp_path / "a.jsonl", [sample(i // 2) for i in range(4)])
    assert [s.prompt_ids[0] for s in stored(path).read(groups)][::2] == groups
