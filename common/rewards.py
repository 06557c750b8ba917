"""Reward functions by name or `file.py:function`, run in worker processes that can be killed.

Built in: `math` (answers compared through math-verify) and `exact` (string equality). A user
function has the signature of TRL, `fn(prompts, completions, **columns) -> list[float | None]`, or
of verl, `compute_score(data_source, solution_str, ground_truth, extra_info) -> float`. None means
"not scored". Reward models, `model:PATH`, are loaded and asked by `common/scoring.py`.

User code and sympy may hang, crash or print, so none of it runs in the trainer: each worker is a
fresh interpreter (neither torch nor the training script is imported) that speaks length-prefixed
frames over two private pipes.
"""

from __future__ import annotations

import ast
import contextlib
import ctypes
import importlib.util
import inspect
import io
import json
import logging
import math
import os
import pickle
import queue
import re
import select
import signal
import struct
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any, BinaryIO, Protocol, TypeVar

MODEL = "model:"  # before the folder or hub name of a reward model
START_TIMEOUT_S = 300.0  # imports of a user's reward file, on a cold network file system

Sample = tuple[Any, str, dict[str, Any]]  # prompt, completion text, columns
Result = tuple[float | None, str | None, bool]  # score, traceback of an exception, timed out
PerSample = Callable[[Any, str, dict[str, Any]], Any]


# ---- verifiers -----------------------------------------------------------------------------------

_BOX = re.compile(r"\\(?:boxed|fbox)\s*\{")
_DIGITS = r"(?:(?:[1-9]\d{0,2}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|\.\d+)"
_NUMBER = rf"[-+]?{_DIGITS}(?:/{_DIGITS})?"
# a sign counts only where it cannot be an operator: "5-3" ends in 3, "= -3" and "$-3" in -3
_LAST_NUMBER = re.compile(rf"(?:(?<![\w)\]}}.,])[-+])?(?<![\d.]){_DIGITS}(?:/{_DIGITS})?")
# sympy reads words as products of letters, in which "listen" equals "silent"
_WORDS = re.compile(r"(?=.*[A-Za-z]{4})[A-Za-z][A-Za-z .,'-]*")
_MARKED = re.compile(r"####[ \t]*(.*)")


def extract_answer(response: str) -> str | None:
    r"""Final answer of a response: last `\boxed{}`, else `#### x`, else the last number.

    Only the text after a closing `</think>` is searched. The last box decides: when it is
    unterminated or empty there is no answer, even if an earlier box or number looks right.
    """
    _, closed, rest = response.rpartition("</think>")
    if not closed and "<think>" in response:
        return None
    text = (rest if closed else response).replace("\u2212", "-")
    if (marked := _marked_answer(text)) is not None:
        return marked or None
    numbers = _LAST_NUMBER.findall(text)
    return numbers[-1] if numbers else None


def _marked_answer(text: str) -> str | None:
    """Content of the last box, else of the last `####` line; "" if broken, None without a mark."""
    boxes = list(_BOX.finditer(text))
    if boxes:
        start, depth = boxes[-1].end(), 1
        for brace in re.finditer(r"\\.|[{}]", text[start:], re.DOTALL):
            depth += {"{": 1, "}": -1}.get(brace.group(), 0)  # an escaped brace is content
            if depth == 0:
                return text[start : start + brace.start()].strip()
        return ""
    lines = _MARKED.findall(text)
    if not lines:
        return None
    answer = lines[-1].strip()
    with_unit = re.match(rf"\$?({_NUMBER})\s+[A-Za-z]", answer)  # "#### 18 dollars"
    return with_unit.group(1) if with_unit else answer


def math_gold(columns: dict[str, Any]) -> str | None:
    """Gold answer from column `ground_truth`, `solution` or `answer`, in this order, or None.

    Boxes and GSM8K's `#### x` are unwrapped. A `solution` without such a mark is prose as often as
    an answer, so `answer` goes before it.
    """
    unmarked_solution = None
    for key in ("ground_truth", "solution", "answer"):
        value = columns.get(key)
        if isinstance(value, list | tuple) and len(value) == 1:
            value = value[0]
        if value is None or isinstance(value, list | tuple | dict) or not str(value).strip():
            continue
        text = str(value).strip().replace("\u2212", "-")
        marked = _marked_answer(text)
        if marked is not None:
            return marked or None
        if key != "solution":
            return text
        unmarked_solution = text
    return unmarked_solution


def _clean_math(text: str) -> str:
    """Without math delimiters, dollar signs and LaTeX forms of the thousands separator."""
    text = " ".join(text.split()).replace("{,}", ",").replace(",\\!", ",").replace("\\$", "")
    text = re.sub(r"^\\[(\[](.*)\\[)\]]$", r"\1", text.rstrip(" ."))
    text = re.sub(r"^\\text(?:bf)?\{([^{}]*)\}$", r"\1", text.strip())
    return re.sub(r"^([-+]?)\$+", r"\1", text.strip()).rstrip(" .$").strip()


def _plain_number(text: str) -> Fraction | None:
    if len(text) > 100 or not re.fullmatch(_NUMBER, text):
        return None
    top, _, bottom = text.replace(",", "").partition("/")
    divisor = Fraction(bottom or 1)
    return Fraction(top) / divisor if divisor else None


def _parse_math(text: str, fallback: str) -> list[Any]:
    from math_verify import parse  # half a second: only workers with `math` pay it

    # Bare LaTeX is found only inside delimiters. The library's alarm-based time-outs are off: they
    # work in main threads only, and the deadline of the worker process does their job.
    wrapped = text if "$" in text else f"${text}$"
    return parse(wrapped, parsing_timeout=None, fallback_mode=fallback)  # type: ignore[arg-type]


def math_equal(gold: str, answer: str) -> bool:
    """Whether two answers, numbers or LaTeX, are mathematically the same. May run for ever."""
    gold, answer = _clean_math(gold), _clean_math(answer)
    a, b = _plain_number(gold), _plain_number(answer)
    if a is not None and b is not None and (a == b or "/" not in gold + answer):
        return a == b
    if _WORDS.fullmatch(gold):
        return gold.casefold() == answer.casefold()
    from math_verify import verify

    parsed = _parse_math(gold, "first_match"), _parse_math(answer, "first_match")
    return bool(verify(*parsed, timeout_seconds=None))


def _math_reward(prompt: Any, completion: str, columns: dict[str, Any]) -> float | None:
    gold = math_gold(columns)
    if gold is None:
        return None
    answer = extract_answer(completion)
    return float(answer is not None and math_equal(gold, answer))


def _exact_gold(columns: dict[str, Any]) -> str | None:
    value = columns.get("answer")
    value = columns.get("ground_truth") if value is None else value
    return None if value is None else str(value).strip()


def _exact_reward(prompt: Any, completion: str, columns: dict[str, Any]) -> float | None:
    gold = _exact_gold(columns)
    return None if gold is None else float(completion.strip() == gold)


def _gold_parses(prompt: Any, completion: str, columns: dict[str, Any]) -> float:
    return float(bool(_parse_math(_clean_math(completion), "no_fallback")))


_CHECK_GOLD = "check math gold"
_BUILTINS: dict[str, PerSample] = {"math": _math_reward, "exact": _exact_reward}


class _HasColumns(Protocol):
    columns: dict[str, Any]


_Row = TypeVar("_Row", bound=_HasColumns)


def validate_golds(
    names: Sequence[str], rows: Sequence[_Row], *, timeout_s: float = 10.0
) -> tuple[list[_Row], dict[str, int]]:
    """Drop rows whose gold answer the built-in rewards among `names` cannot use.

    Args:
        names: reward names as given to `--rewards`.
        rows: anything with `columns`, for example `common.data.PromptRow`.
        timeout_s: seconds to parse one gold; slower ones are unparsable.
    Returns:
        The rows that are left, and the number of dropped rows by reason (`missing_gold`,
        `unparsable_gold`).
    Raises:
        ValueError: every row was dropped.
    """
    kept = [True] * len(rows)
    counts = {"missing_gold": 0, "unparsable_gold": 0}
    to_parse: list[tuple[int, str]] = []
    for i, row in enumerate(rows):
        gold = math_gold(row.columns) if "math" in names else ""
        if gold is None or ("exact" in names and _exact_gold(row.columns) is None):
            kept[i] = False
            counts["missing_gold"] += 1
        elif "math" in names and _plain_number(_clean_math(gold)) is None:
            to_parse.append((i, gold))
    if to_parse:  # sympy on unseen text: in workers, because some of it never returns
        golds = list({gold for _, gold in to_parse})
        num_workers = min(4, 1 + len(golds) // 1000)
        scorer = RewardScorer([_CHECK_GOLD], timeout_s=timeout_s, num_workers=num_workers)
        try:
            batch = scorer.score(golds, golds, [{}] * len(golds))
        finally:
            scorer.close()
        values = batch.components[_CHECK_GOLD]
        parses = {gold: value == 1.0 for gold, value in zip(golds, values, strict=True)}
        for i, gold in to_parse:
            kept[i] = parses[gold]
            counts["unparsable_gold"] += not kept[i]
    if rows and not any(kept):
        raise ValueError(
            f"--rewards={' '.join(names)}: no row has a usable gold answer ({counts}); looked in "
            "the columns ground_truth, solution and answer, but the first row has "
            f"{sorted(rows[0].columns)}"
        )
    counts = {reason: n for reason, n in counts.items() if n}
    return [row for row, keep in zip(rows, kept, strict=True) if keep], counts


# ---- several rewards -----------------------------------------------------------------------------


def reward_weights(names: Sequence[str], weights: Sequence[float] | None) -> dict[str, float]:
    """Weight of each reward by its name as given to `--rewards`, in order; None is 1.0 each.

    Raises:
        ValueError: a name occurs twice, a reward model has no path, or the weights do not fit.
    """
    if len(set(names)) != len(names):
        raise ValueError(f"--rewards={' '.join(names)}: expected different names")
    if MODEL in names:
        raise ValueError(
            f"--rewards={MODEL} needs a folder or hub name, as in {MODEL}runs/rm/final"
        )
    weights = [1.0] * len(names) if weights is None else weights
    if len(weights) != len(names) or not all(math.isfinite(w) for w in weights):
        raise ValueError(
            f"--reward_weights={' '.join(map(str, weights))}: expected a finite number for each of "
            f"the {len(names)} --rewards"
        )
    return dict(zip(names, weights, strict=True))


def reward_labels(names: Sequence[str]) -> dict[str, str]:
    """Short label of each reward for metrics and samples; its whole name where two share one.

    A function goes by its own name, a reward model by its folder's, or that of the run if the
    folder is a run's `final`.
    """
    short: list[str] = []
    for name in names:
        path = Path(name.removeprefix(MODEL))
        if not name.startswith(MODEL):
            short.append(name.rpartition(":")[2])
        else:
            short.append((path.name == "final" and path.parent.name) or path.name)
    return {n: s if short.count(s) == 1 else n for n, s in zip(names, short, strict=True)}


def combine_rewards(
    components: Mapping[str, Sequence[float | None]],
    weights: Mapping[str, float],
    lost: Sequence[bool],
) -> list[float | None]:
    """Score of each sample: the weighted sum of its components that are not None.

    Args:
        components: values of each reward, one per sample; None is "not scored".
        weights: of the same rewards; they are added up in this order.
        lost: samples that lost a component against the will of its judge: to an exception, a
            time-out, or because a reward model cannot read the response.
    Returns:
        One score per sample; None where all components are, or where one was lost: a sum without
        that part would punish the sample for a crash of its judge, or let it escape from one.
    """
    scores: list[float | None] = []
    for s, without_score in enumerate(lost):
        values = [(weights[name], components[name][s]) for name in weights]
        scored = [weight * value for weight, value in values if value is not None]
        scores.append(sum(scored) if scored and not without_score else None)
    return scores


# ---- scorer: the trainer's side ------------------------------------------------------------------


@dataclass(frozen=True)
class RewardBatch:
    """Values in the caller's order; None is "not scored", also after an exception or time-out."""

    components: dict[str, list[float | None]]
    """by name as given to `--rewards`"""
    exceptions: int
    """(sample, component) pairs lost to an exception, a dead worker or an invalid value"""
    timeouts: int
    """(sample, component) pairs lost to the deadline"""
    failed: list[bool]
    """whether a sample lost at least one component to either"""
    first_traceback: str | None
    """of the first exception, for one log line"""


class RewardScorer:
    """Scores completions with one or several reward functions in `num_workers` processes.

    The workers start on construction without being waited for: their imports overlap model
    loading. `score` may be called from any thread, also concurrently. `close` is prompt even while
    a reward hangs.
    """

    def __init__(self, names: Sequence[str], *, timeout_s: float, num_workers: int = 1):
        """Check the names and start the workers.

        Args:
            names: `math`, `exact` or `path/to/file.py:function`, each once; without any there is
                nothing to score and no worker.
            timeout_s: seconds that one call may take. `math`, `exact` and functions of verl's kind
                are called per sample. One of TRL's kind is called once for the whole chunk of a
                worker; when that is late, its samples are scored again one by one.
            num_workers: processes; a batch is cut into that many contiguous chunks.
        Raises:
            ValueError: unknown name, or missing file or function.
        """
        if not timeout_s > 0:
            raise ValueError(f"--reward_timeout_s={timeout_s}: must be positive")
        if num_workers < 1:
            raise ValueError(f"--reward_workers={num_workers}: must be at least 1")
        self.names = list(names)
        specs = [_checked_spec(name) for name in names]
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        num_workers = num_workers if names else 0
        self._workers = [_Worker(specs, timeout_s, self._jobs) for _ in range(num_workers)]
        for worker in self._workers:
            worker.start()

    def wait_ready(self) -> None:
        """Block until every worker has loaded its functions.

        Raises:
            ValueError: a reward file cannot be imported; the message has the traceback.
        """
        for worker in self._workers:
            worker.ready.result()

    def score(
        self, prompts: Sequence[Any], completions: Sequence[str], columns: Sequence[dict[str, Any]]
    ) -> RewardBatch:
        """Score completions; all three lists have one entry per sample.

        Args:
            prompts: text or messages; a TRL function gets the completion of messages as messages.
            completions: decoded responses.
            columns: other columns of the row, passed by name (None where a row lacks one).
        Raises:
            ValueError: lengths differ, or a reward file cannot be imported.
        """
        self.wait_ready()
        samples: list[Sample] = list(zip(prompts, completions, columns, strict=True))
        size = max(1, -(-len(samples) // max(1, len(self._workers))))
        futures: list[list[Future[list[Result]]]] = []
        for component in range(len(self.names)):
            futures.append([])
            for start in range(0, len(samples), size):
                futures[-1].append(Future())
                self._jobs.put((futures[-1][-1], component, samples[start : start + size]))
        results = [[r for future in chunks for r in future.result()] for chunks in futures]
        errors = [r[1] for component in results for r in component if r[1] is not None]
        return RewardBatch(
            components={n: [r[0] for r in rs] for n, rs in zip(self.names, results, strict=True)},
            exceptions=len(errors),
            failed=[
                any(component[s][1] is not None or component[s][2] for component in results)
                for s in range(len(samples))
            ],
            timeouts=sum(r[2] for component in results for r in component),
            first_traceback=errors[0] if errors else None,
        )

    def close(self) -> None:
        """Kill the workers and everything they started. Calls in flight raise RuntimeError."""
        for worker in self._workers:
            worker.close()
        for _ in self._workers:
            self._jobs.put(None)
        for worker in self._workers:
            worker.join(timeout=5.0)


def _checked_spec(name: str) -> tuple[str, str]:
    """(absolute file, function), or ("", name) for a built-in. Static: no user code runs here."""
    if name in _BUILTINS or name == _CHECK_GOLD:
        return "", name
    file, _, function = name.rpartition(":")
    if not file.endswith(".py") or not function.isidentifier():
        raise ValueError(
            f"--rewards={name}: expected {', '.join(_BUILTINS)}, path/to/file.py:function or "
            f"{MODEL}PATH"
        )
    path = Path(file).expanduser().absolute()
    if not path.is_file():
        raise ValueError(f"--rewards={name}: there is no file {path}")
    try:
        tree = ast.parse(path.read_bytes(), filename=str(path))
    except SyntaxError as error:
        raise ValueError(f"--rewards={name}: {error}") from error
    # Bound anywhere in the file, for example in a branch, is enough: the import decides.
    bound: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            bound.add(node.name)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            bound.update(alias.asname or alias.name for alias in node.names)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            bound.add(node.id)
    if function not in bound and "*" not in bound:
        functions = [node.name for node in tree.body if isinstance(node, ast.FunctionDef)]
        raise ValueError(f"--rewards={name}: {path} has no {function}, only {functions}")
    return str(path), function


_Job = tuple["Future[list[Result]]", int, list[Sample]]


class _Worker(threading.Thread):
    """Owns one worker process: starts it, feeds it, kills it at a deadline and starts the next one.

    A thread per process, because Linux sends the parent-death signal when the *thread* that forked
    ends: a worker started from a short-lived rollout thread would die with that.
    """

    def __init__(
        self, specs: list[tuple[str, str]], timeout_s: float, jobs: queue.SimpleQueue[_Job | None]
    ):
        super().__init__(daemon=True, name="reward-worker")
        self.ready: Future[None] = Future()
        self._specs, self._timeout_s, self._jobs = specs, timeout_s, jobs
        self._process: subprocess.Popen[bytes] | None = None
        self._buffer = b""
        self._loaded = self._killed = False
        self._per_sample: list[bool] = []
        self._closed = False

    def run(self) -> None:
        self._spawn()
        try:
            self._load()
            self.ready.set_result(None)
        except (ValueError, RuntimeError) as error:
            self.ready.set_exception(error)
        while (job := self._jobs.get()) is not None:
            future, component, samples = job
            try:
                future.set_result(self._score(component, samples))
            except Exception as error:  # noqa: BLE001  handed to the thread that waits for the result
                future.set_exception(error)
        self._kill()

    def close(self) -> None:
        self._closed = True
        self._kill()

    def _spawn(self) -> None:
        root = str(Path(__file__).resolve().parent.parent)
        boot = f"import sys; sys.path.insert(0, {root!r}); from common import rewards as r; "
        boot += "r.worker_main()"
        self._buffer, self._loaded, self._killed = b"", False, False
        self._process = subprocess.Popen(
            [sys.executable, "-c", boot],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
            start_new_session=True,  # a group to kill as a whole, which Ctrl-C does not reach
        )
        if self._closed:
            self._kill()

    def _load(self) -> None:
        """Wait until the process has imported its functions."""
        if self._loaded:
            return
        try:
            self._send((os.getpid(), self._specs))
            self._per_sample, error = self._receive(time.monotonic() + START_TIMEOUT_S)
        except (EOFError, TimeoutError):
            if self._closed:
                raise RuntimeError("the reward scorer was closed") from None
            self._kill()
            raise ValueError("--rewards: the worker process died or hung at its start") from None
        if error is not None:
            self._kill()
            raise ValueError(f"--rewards: cannot load the reward function:\n{error}")
        self._loaded = True

    def _score(self, component: int, samples: list[Sample]) -> list[Result]:
        results: list[Result] = []
        size = len(samples)
        while len(results) < len(samples):
            part = samples[len(results) : len(results) + size]
            done, failure = self._call(component, part)
            results += done
            if failure is None:
                continue
            # Results arrive in order: where they come one by one, the first missing one is guilty.
            if len(part) == 1 or self._per_sample[component]:
                results.append(failure)
            else:
                size = 1
        return results

    def _call(self, component: int, samples: list[Sample]) -> tuple[list[Result], Result | None]:
        """One request. The results that arrived and, if the process had to be replaced, why."""
        results: list[Result] = []
        try:
            self._begin(component, samples)
            while len(results) < len(samples):
                for score, error in self._receive(time.monotonic() + self._timeout_s):
                    results.append((score, error, False))
        except TimeoutError:
            self._restart()
            return results, (None, None, True)
        except EOFError:
            self._kill()
            assert self._process is not None
            died = f"the worker died in the reward function (code={self._process.returncode})"
            self._restart()
            return results, (None, died, False)
        return results, None

    def _begin(self, component: int, samples: list[Sample]) -> None:
        """Hand over a request. Until the worker confirms it, its death is no sample's fault."""
        for attempt in range(3):
            assert self._process is not None
            if self._process.poll() is not None:
                self._restart()  # it died while idle (out of memory?)
            self._load()
            try:
                self._send((component, samples))
                self._receive(time.monotonic() + START_TIMEOUT_S)
                return
            except EOFError:
                if attempt == 2:
                    raise
                self._restart()

    def _send(self, message: Any) -> None:
        assert self._process is not None and self._process.stdin is not None
        payload = pickle.dumps(message)
        data = memoryview(struct.pack("<Q", len(payload)) + payload)
        try:
            while data:
                data = data[self._process.stdin.write(data) :]
        except OSError as error:
            raise EOFError from error

    def _receive(self, deadline: float) -> Any:
        """Next frame. Raises EOFError when the process is gone and TimeoutError at the deadline."""
        assert self._process is not None and self._process.stdout is not None
        descriptor = self._process.stdout.fileno()
        poller = select.poll()
        poller.register(descriptor, select.POLLIN)
        while True:
            if len(self._buffer) >= 8:
                end = 8 + struct.unpack("<Q", self._buffer[:8])[0]
                if len(self._buffer) >= end:
                    payload, self._buffer = self._buffer[8:end], self._buffer[end:]
                    return json.loads(payload)  # not pickle: the worker runs code that is not ours
            remaining = deadline - time.monotonic()
            if remaining <= 0:
                raise TimeoutError
            if poller.poll(1000 * min(remaining, 0.2)):
                data = os.read(descriptor, 1 << 20)
                if not data:
                    raise EOFError
                self._buffer += data
            elif self._process.poll() is not None:
                raise EOFError  # something that it started still holds the pipe open

    def _restart(self) -> None:
        self._kill()
        if self._closed:
            raise RuntimeError("the reward scorer was closed")
        self._spawn()

    def _kill(self) -> None:
        process = self._process
        if process is None:
            return
        if not self._killed:  # once: afterwards the number may belong to another process group
            self._killed = True
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        if threading.current_thread() is self:  # else this thread may be polling the pipes
            for pipe in (process.stdin, process.stdout):
                if pipe is not None:
                    pipe.close()


# ---- worker: the other side ----------------------------------------------------------------------


def worker_main() -> None:
    """Entry point of a worker process; never returns."""
    try:
        _serve()
    except (EOFError, BrokenPipeError):  # the trainer is gone already
        os._exit(0)


def _serve() -> None:
    # Frames go over private copies of the pipes: `print` and `input` in a reward cannot touch them.
    requests, replies = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(line_buffering=True)
    parent, specs = _read_frame(requests)
    if sys.platform == "linux":
        # Ends also a worker that is deep in C code and cannot see its pipe close.
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # 1 = PR_SET_PDEATHSIG
    if os.getppid() != parent:
        os._exit(0)
    logging.getLogger("math_verify").setLevel(logging.ERROR)  # warns that its own time-outs are off
    functions: list[tuple[Callable[..., Any], bool]] = []
    error = None
    try:
        functions = [_load_function(file, name) for file, name in specs]
    except (Exception, SystemExit):  # noqa: BLE001  user code at import; reported to the parent
        error = traceback.format_exc()
    _write_frame(replies, ([per_sample for _, per_sample in functions], error))
    inbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
    # The main thread stays free for the rewards: signal-based time-outs in them work only there.
    threading.Thread(target=_read_requests, args=(requests, inbox), daemon=True).start()
    while True:
        component, samples = inbox.get()
        _write_frame(replies, "begun")
        function, per_sample = functions[component]
        for results in (_score_each if per_sample else _score_chunk)(function, samples):
            _write_frame(replies, results)


def _read_requests(requests: BinaryIO, inbox: queue.SimpleQueue[Any]) -> None:
    try:
        while True:
            inbox.put(_read_frame(requests))
    except EOFError:  # the trainer is gone; take along whatever the rewards started
        os.killpg(0, signal.SIGKILL)


def _read_frame(pipe: BinaryIO) -> Any:
    header = pipe.read(8)
    if len(header) < 8:
        raise EOFError
    return pickle.loads(pipe.read(struct.unpack("<Q", header)[0]))


def _write_frame(pipe: BinaryIO, message: Any) -> None:
    payload = json.dumps(message).encode()
    pipe.write(struct.pack("<Q", len(payload)) + payload)
    pipe.flush()


def _load_function(file: str, name: str) -> tuple[Callable[..., Any], bool]:
    """The function, and whether it takes one sample (prompt, completion, columns) or a chunk."""
    if not file:
        if name != "exact":
            math_equal("x", "y")  # loads grammars now, not on the first sample's deadline
        return (_gold_parses if name == _CHECK_GOLD else _BUILTINS[name]), True
    module_name = "reward_file_" + re.sub(r"\W", "_", file)
    module = sys.modules.get(module_name)
    if module is None:
        spec = importlib.util.spec_from_file_location(module_name, file)
        assert spec is not None and spec.loader is not None
        module = sys.modules[module_name] = importlib.util.module_from_spec(spec)
        sys.path.insert(0, str(Path(file).parent))  # as for a script: to import its neighbours
        spec.loader.exec_module(module)
    function = getattr(module, name)
    parameters = inspect.signature(function).parameters
    takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    if {"data_source", "solution_str", "ground_truth"} <= set(parameters):

        def verl(prompt: Any, completion: str, columns: dict[str, Any]) -> Any:
            keys = ("data_source", "ground_truth", "extra_info")
            fields = {key: columns.get(key) for key in keys} | {"solution_str": completion}
            value = function(**{k: v for k, v in fields.items() if takes_all or k in parameters})
            return value["score"] if isinstance(value, dict) else value

        return verl, True

    def trl(samples: list[Sample]) -> Any:
        keys = dict.fromkeys(key for _, _, columns in samples for key in columns)
        fields: dict[str, list[Any]] = {
            k: [columns.get(k) for _, _, columns in samples] for k in keys
        }
        fields["prompts"] = [prompt for prompt, _, _ in samples]
        fields["completions"] = [
            text if isinstance(prompt, str) else [{"role": "assistant", "content": text}]
            for prompt, text, _ in samples
        ]
        return function(**{k: v for k, v in fields.items() if takes_all or k in parameters})

    return trl, False


WireResult = tuple[float | None, str | None]


def _guarded(function: Callable[..., Any], *args: Any) -> tuple[Any, str | None]:
    try:
        return function(*args), None
    except (Exception, SystemExit):  # noqa: BLE001  user code: counted and reported by the parent
        return None, traceback.format_exc()


def _checked(value: Any, error: str | None) -> WireResult:
    if error is not None or value is None:
        return None, error
    shown = type(value).__name__
    number = math.nan
    try:  # a user's object may raise anything here, and a huge int overflows
        shown = f"{value!r:.200}"
        number = math.nan if isinstance(value, str | bytes) else float(value)
    except Exception:  # noqa: BLE001
        pass
    if not math.isfinite(number):
        return None, f"the reward function returned {shown}, not a finite number or None"
    return number, None


def _score_each(function: PerSample, samples: list[Sample]) -> Iterator[list[WireResult]]:
    for sample in samples:
        yield [_checked(*_guarded(function, *sample))]


def _score_chunk(
    function: Callable[[list[Sample]], Any], samples: list[Sample]
) -> Iterator[list[WireResult]]:
    values, error = _guarded(lambda: _as_list(function(samples), len(samples)))
    if error is not None and len(samples) > 1:  # isolate the sample that raises
        for sample in samples:
            yield from _score_chunk(function, [sample])
    elif isinstance(values, list):
        yield [_checked(value, None) for value in values]
    else:
        yield [(None, error or values)] * len(samples)


def _as_list(values: Any, expected: int) -> list[Any] | str:
    """The values, or what is wrong with them: a list of another length cannot be aligned."""
    if isinstance(values, str | bytes | dict) or not hasattr(values, "__len__"):
        return f"the reward function returned {values!r:.200}, not one value per completion"
    if len(values) != expected:
        return f"the reward function returned {len(values)} values for {expected} completions"
    return list(values)
