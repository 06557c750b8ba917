"""Verifiers give the right verdicts; workers survive whatever a reward function does."""

import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from contextlib import closing
from dataclasses import dataclass
from types import SimpleNamespace

import pytest

from common.rewards import (
    RewardBatch,
    RewardScorer,
    combine_rewards,
    extract_answer,
    math_equal,
    math_gold,
    reward_labels,
    reward_weights,
    validate_golds,
)

TOWER = r"\boxed{9^{9^{9^{9^{9}}}}}"  # sympy never returns from this


def reward_file(tmp_path, source, name="my_rewards.py"):
    path = tmp_path / name
    path.write_text(textwrap.dedent(source))
    return str(path)


@dataclass(frozen=True)
class ScoredBatch(RewardBatch):
    """What the scorer returns, and the scores that a script makes of it."""

    scores: list[float | None]


def combined(batch, weights=None):
    weights = reward_weights(list(batch.components), weights)
    return combine_rewards(batch.components, weights, batch.failed)


def score(names, completions, columns=None, *, prompts=None, weights=None, **options):
    columns = columns or [{} for _ in completions]
    prompts = prompts or [""] * len(completions)
    with closing(RewardScorer(names, **({"timeout_s": 20.0} | options))) as scorer:
        batch = scorer.score(prompts, completions, columns)
    return ScoredBatch(**vars(batch), scores=combined(batch, weights))


def is_alive(pid):
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def wait_until(condition, timeout_s=10.0):
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


# ---- verifiers ----

VERDICTS = [
    # P73: brace matching, the last box decides, signs, thousands
    (r"so \boxed{\frac{1}{2}}", r"\frac{1}{2}", 1),
    (r"so \boxed{\frac{1}{2}}", "1", 0),
    (r"\boxed{-3}", "3", 0),
    (r"\boxed{-3}", "-3", 1),
    ("so it is \N{MINUS SIGN}3.", "-3", 1),
    (r"\boxed{5} no, \boxed{6}", "5", 0),
    (r"\boxed{5} no, \boxed{6}", "6", 1),
    (r"\boxed{5} no, \boxed{", "5", 0),
    (r"\boxed{5} no, \boxed{6", "6", 0),
    (r"\boxed{5} no, \boxed{}", "5", 0),
    (r"\boxed{\{1, 2\}}", r"\{2, 1\}", 1),
    (r"\boxed{ 72.00 }", "72", 1),
    (r"\boxed{1,234}", "1234", 1),
    ("it is 1,234", "1234", 1),
    (r"\boxed{1{,}234}", "1,234", 1),
    (r"\boxed{12,34}", "1234", 0),
    (r"\boxed{(1,234)}", "(1,234)", 1),
    (r"\boxed{(1,234)}", "1234", 0),
    (r"\boxed{1234}", "(1,234)", 0),
    (r"\boxed{\$1,234.50}", "1234.5", 1),
    (r"\boxed{18\text{ dollars}}", "18", 1),
    (r"\boxed{50\%}", "50", 1),
    # order: box, then ####, then the last number
    (r"\boxed{5} #### 6", "5", 1),
    ("1 + 1 = 3\n#### 6\nthat is 7 - 1", "6", 1),
    ("#### $18 dollars", "18", 1),
    ("#### 3/4", "3/4", 1),
    ("#### 3/4", "3", 0),
    ("#### 1,234", "1234", 1),
    ("5-3 = 2, so 2 left.", "2", 1),
    ("the range 5-10", "10", 1),
    ("x = -3", "-3", 1),
    ("it is 3/4.", "0.75", 1),
    ("it is .5", "1/2", 1),
    ("no idea", "0", 0),
    ("", "0", 0),
    # only what follows the reasoning counts
    (r"<think>\boxed{4}</think> \boxed{5}", "5", 1),
    (r"<think>\boxed{4}</think> unsure", "4", 0),
    (r"<think>perhaps \boxed{4}", "4", 0),
    # P74: gold bare, in delimiters, boxed
    (r"\boxed{2/3}", r"\frac{2}{3}", 1),
    (r"\boxed{2/3}", r"$\frac{2}{3}$", 1),
    (r"\boxed{2/3}", r"\(\frac{2}{3}\)", 1),
    (r"\boxed{2/3}", r"\boxed{\frac{2}{3}}", 1),
    (r"\boxed{2}", r"\frac{2}{3}", 0),
    (r"\boxed{\frac{\sqrt{2}}{2}}", r"\frac{1}{\sqrt{2}}", 1),
    (r"\boxed{x=5}", "5", 1),
    (r"\boxed{x^2+2x+1}", "(x+1)^2", 1),
    (r"\boxed{\frac{1}{3}}", "0.3333", 0),
    (r"\boxed{\text{Evelyn}}", "evelyn", 1),
    (r"\boxed{Evelyn.}", r"\text{Evelyn}", 1),
    (r"\boxed{silent}", "listen", 0),
    (r"\boxed{[0,1)}", "[0,1)", 1),
    (r"\boxed{[0,1)}", "(0,1]", 0),
]


def test_math_verdicts_in_a_thread():
    """P71: alarm-based time-outs raise outside the main thread; swallowed, every reward was 0."""
    responses, golds, expected = zip(*VERDICTS, strict=True)
    result = []

    def run():
        result.append(score(["math"], responses, [{"answer": gold} for gold in golds]))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    (batch,) = result
    assert (batch.exceptions, batch.timeouts) == (0, 0)
    wrong = [v for v, s in zip(VERDICTS, batch.scores, strict=True) if s != v[2]]
    assert not wrong
    # plain numbers never reach sympy, so these run here as well
    assert extract_answer("a 7 then 8.") == "8" and math_equal("1,000", "1000.0")


def test_math_gold_columns():
    assert math_gold({"answer": "6 * 12 = 72\n#### 1,072"}) == "1,072"
    assert math_gold({"solution": r"thus \boxed{\frac12}", "answer": "9"}) == r"\frac12"
    assert math_gold({"solution": "first add, then double", "answer": "9"}) == "9"
    assert math_gold({"solution": "9"}) == "9"
    assert math_gold({"ground_truth": 3, "solution": "4", "answer": "5"}) == "3"
    assert math_gold({"ground_truth": ["34"], "answer": "5"}) == "34"
    assert math_gold({"ground_truth": None, "answer": " "}) is None
    assert math_gold({"ground_truth": r"\boxed{"}) is None


def test_unusable_golds_are_dropped_not_rewarded():
    """P72: completions of prompts with an unparsable gold were all counted as correct."""
    golds = ["72", r"\frac{1}{2}", "???", None, r"\frac{", "Evelyn"]
    rows = [SimpleNamespace(columns={"ground_truth": gold}) for gold in golds]
    kept, counts = validate_golds(["math"], rows)
    assert [row.columns["ground_truth"] for row in kept] == [*golds[:2], "Evelyn"]
    assert counts == {"missing_gold": 1, "unparsable_gold": 2}
    with pytest.raises(ValueError, match="--rewards=math: no row has a usable gold"):
        validate_golds(["math"], rows[3:4])
    assert validate_golds(["exact"], rows)[1] == {"missing_gold": 1}
    assert validate_golds(["x.py:f"], rows) == (rows, {})
    # and a row that was not validated is "not scored", never right
    batch = score(["math", "exact"], ["1", "1"], [{}, {"answer": "1"}])
    assert batch.components == {"math": [None, 1.0], "exact": [None, 1.0]}
    assert batch.scores == [None, 2.0]


def test_hostile_expression_leaves_the_pool_working():
    """P71: without the alarm, one tower of powers hung the run."""
    with closing(RewardScorer(["math"], timeout_s=2.0)) as scorer:
        scorer.wait_ready()
        started = time.monotonic()
        completions = [r"\boxed{2}", TOWER, r"\boxed{\frac{4}{2}}"]
        batch = scorer.score([""] * 3, completions, [{"answer": r"\frac{6}{3}"}] * 3)
        assert batch.components == {"math": [1.0, None, 1.0]}
        assert (batch.timeouts, batch.exceptions) == (1, 0)
        assert time.monotonic() - started < 10
        for _ in range(20):
            again = scorer.score([""], [r"\boxed{2}"], [{"answer": "4/2"}])
            assert (again.components["math"], again.timeouts) == ([1.0], 0)


# ---- user functions ----


def test_trl_signature_gets_columns_and_messages(tmp_path):
    file = reward_file(
        tmp_path,
        """
        import sys
        import helper  # a neighbour of this file
        from common.data import TokenRow  # the repository is importable too

        def seen(prompts, completions, difficulty, **columns):
            assert sorted(columns) == ["tag"], columns
            print("printed to stdout", file=sys.stdout, flush=True)
            sys.__stdout__.write("and to the original")
            return [f"{c}" == "[{'role': 'assistant', 'content': 'a'}]" if isinstance(p, list)
                    else helper.value(c, d) for p, c, d in zip(prompts, completions, difficulty)]

        def narrow(completions):
            return [None if c == "c" else len(c) for c in completions]
        """,
    )
    (tmp_path / "helper.py").write_text("def value(c, d): return ord(c) + (d or 0)")
    batch = score(
        [f"{file}:seen", f"{file}:narrow"],
        ["a", "b", "c"],
        [{"tag": 1}, {"difficulty": 2}, {"tag": 3}],
        prompts=[[{"role": "user", "content": "x"}], "y", "z"],
        weights=[1.0, 0.5],
    )
    assert batch.first_traceback is None
    seen, narrow = batch.components.items()
    assert seen == (f"{file}:seen", [1.0, 100.0, 99.0])
    assert narrow == (f"{file}:narrow", [1.0, 1.0, None])
    assert batch.scores == [1.5, 100.5, 99.0]


def test_verl_signature(tmp_path):
    file = reward_file(
        tmp_path,
        """
        def compute_score(data_source, solution_str, ground_truth, extra_info=None):
            if data_source == "dict":
                return {"score": 0.25, "acc": True}
            return solution_str == ground_truth and extra_info["index"] == 3
        """,
    )
    columns = [
        {"data_source": "gsm8k", "ground_truth": "a", "extra_info": {"index": 3}, "other": 1},
        {"data_source": "dict", "ground_truth": "a"},
    ]
    prompts = [[{"role": "user", "content": "x"}]] * 2
    batch = score([f"{file}:compute_score"], ["a", "a"], columns, prompts=prompts)
    assert batch.scores == [1.0, 0.25] and batch.first_traceback is None


def test_every_third_sample_raises(tmp_path):
    """P76: one bad sample killed the run; now it is isolated, counted and shown once."""
    file = reward_file(
        tmp_path,
        """
        import sys

        def third(prompts, completions, **columns):
            if any(int(c) % 3 == 0 for c in completions):
                sys.exit("a multiple of three")
            return [float(c) for c in completions]
        """,
    )
    for num_workers in (1, 2):
        batch = score([f"{file}:third"], [str(i) for i in range(7)], num_workers=num_workers)
        assert batch.scores == [None, 1.0, 2.0, None, 4.0, 5.0, None]
        assert (batch.exceptions, batch.timeouts) == (3, 0)
        assert "a multiple of three" in (batch.first_traceback or "")


@pytest.mark.parametrize(
    ("body", "scores", "message"),
    [
        ("return [1.0]", [None] * 3, "returned 1 values for 3 completions"),
        ("return 1.0", [None] * 3, "returned 1.0, not one value per completion"),
        ("return {'score': 1}", [None] * 3, "not one value per completion"),
        ("return [1, float('nan'), float('-inf')]", [1.0, None, None], "nan, not a finite number"),
        ("return ['1.0', True, None]", [None, 1.0, None], "'1.0', not a finite number or None"),
        ("return [[1], 2, 3]", [None, 2.0, 3.0], r"[1], not a finite number"),
        ("import numpy; return numpy.arange(3)", [0.0, 1.0, 2.0], None),
    ],
)
def test_invalid_values(tmp_path, body, scores, message):
    """P76: a list of another length mis-aligned the rewards; NaN reached the advantages."""
    file = reward_file(tmp_path, f"def f(completions, **_):\n    {body}\n")
    batch = score([f"{file}:f"], ["a", "b", "c"])
    assert batch.scores == scores
    if message is None:
        assert batch.first_traceback is None
    else:
        assert message in (batch.first_traceback or "")
        assert batch.exceptions == sum(s is None for s in scores) - body.count("None")


def test_worker_that_dies_or_hangs_is_replaced(tmp_path):
    file = reward_file(
        tmp_path,
        """
        import os, subprocess, time

        def f(completions, **columns):
            if "die" in completions:
                os._exit(3)
            if "hang" in completions:
                child = subprocess.Popen(["sleep", "100"])
                print(child.pid, file=open(__file__ + ".pids", "a"), flush=True)
                time.sleep(100)
            return [1.0] * len(completions)
        """,
    )
    with closing(RewardScorer([f"{file}:f"], timeout_s=1.5)) as scorer:
        completions = ["a", "die", "hang", "b"]
        batch = scorer.score([""] * 4, completions, [{}] * 4)
        assert combined(batch) == [1.0, None, None, 1.0]
        assert batch.failed == [False, True, True, False]
        assert (batch.exceptions, batch.timeouts) == (1, 1)
        assert "worker died in the reward function (code=3)" in (batch.first_traceback or "")
        assert combined(scorer.score([""], ["a"], [{}])) == [1.0]
    with open(file + ".pids") as pids:  # what a late reward had started is gone with it
        wait_until(lambda: not any(is_alive(int(pid)) for pid in pids))


def test_worker_killed_while_idle_blames_nobody(tmp_path):
    with closing(RewardScorer(["exact"], timeout_s=10.0)) as scorer:
        scorer.wait_ready()
        for process in worker_pids():
            os.kill(process, signal.SIGKILL)
        wait_until(lambda: not worker_pids())
        batch = scorer.score(["", ""], ["a", "b"], [{"answer": "a"}] * 2)
        assert (batch.components["exact"], batch.exceptions) == ([1.0, 0.0], 0)


def worker_pids(parent=None):
    """Living children of a process (default: this one) that run a reward worker."""
    found = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{pid}/stat") as file:
                ppid = int(file.read().rpartition(")")[2].split()[1])
            with open(f"/proc/{pid}/cmdline") as file:
                command = file.read()
        except (FileNotFoundError, ProcessLookupError):
            continue
        if ppid == (parent or os.getpid()) and "worker_main" in command and is_alive(pid):
            found.append(int(pid))
    return found


def test_calls_from_a_finished_thread_leave_the_worker_alive(tmp_path):
    """Linux kills a child when the thread that forked it ends; threads of rollouts are short."""
    file = reward_file(
        tmp_path,
        """
        import os, time

        def f(completions, **_):
            if completions == ["hang"]:
                time.sleep(100)
            return [os.getpid()] * len(completions)
        """,
    )
    with closing(RewardScorer([f"{file}:f"], timeout_s=1.0)) as scorer:
        scorer.wait_ready()
        thread = threading.Thread(target=scorer.score, args=([""], ["hang"], [{}]))
        thread.start()
        thread.join()  # the worker was restarted on behalf of this thread
        pids = [combined(scorer.score([""], ["a"], [{}]))[0] for _ in range(2)]
        assert pids[0] == pids[1] == worker_pids()[0]


def test_concurrent_calls_keep_their_order(tmp_path):
    source = "def f(completions, **_): return [float(c) for c in completions]"
    file = reward_file(tmp_path, source)
    with closing(RewardScorer([f"{file}:f"], timeout_s=10.0, num_workers=2)) as scorer:
        results = {}

        def run(offset):
            values = [str(offset + i) for i in range(5)]
            results[offset] = combined(scorer.score([""] * 5, values, [{}] * 5))

        threads = [threading.Thread(target=run, args=(100 * k,)) for k in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert results == {100 * k: [100.0 * k + i for i in range(5)] for k in range(6)}
        assert combined(scorer.score([], [], [])) == []


def test_close_is_prompt_while_a_reward_hangs(tmp_path):
    file = reward_file(tmp_path, "import time\ndef f(completions): time.sleep(100)")
    scorer = RewardScorer([f"{file}:f"], timeout_s=60.0)
    scorer.wait_ready()
    errors = []

    def run():
        try:
            scorer.score([""], ["a"], [{}])
        except RuntimeError as error:
            errors.append(str(error))

    thread = threading.Thread(target=run)
    thread.start()
    time.sleep(0.2)
    started = time.monotonic()
    scorer.close()
    thread.join(5)
    assert time.monotonic() - started < 2
    assert errors == ["the reward scorer was closed"] and not worker_pids()
    scorer.close()  # twice is fine, also before the workers are up
    RewardScorer(["exact"], timeout_s=1.0).close()
    assert not worker_pids()


def test_workers_die_with_their_parent_and_import_neither_torch_nor_its_script(tmp_path):
    """Spawned workers re-import the main script (with torch) and outlive a killed trainer."""
    file = reward_file(
        tmp_path,
        """
        import sys

        def f(completions, **_):
            if completions == ["hang"]:
                9 ** 9 ** 9 ** 9  # in C code that never looks at its pipes
            heavy = {"torch", "transformers", "numpy", "trainer"} & set(sys.modules)
            assert not heavy, heavy
            assert not hasattr(sys.modules["__main__"], "MARK")
            return [1.0] * len(completions)
        """,
    )
    trainer = tmp_path / "trainer.py"
    trainer.write_text(
        textwrap.dedent(
            f"""
            import sys
            sys.path.insert(0, {os.getcwd()!r})
            from common.rewards import RewardScorer
            MARK = 1
            scorer = RewardScorer(["math", {file + ":f"!r}], timeout_s=100.0)
            batch = scorer.score([""], ["4"], [{{"answer": "4"}}])
            print(*batch.components.values(), batch.first_traceback, flush=True)
            scorer.score([""], ["hang"], [{{"answer": "4"}}])
            """
        )
    )
    command = [sys.executable, str(trainer)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "[1.0] [1.0] None\n"
        pids = worker_pids(process.pid)
        assert len(pids) == 1
        time.sleep(0.3)
        process.kill()
        wait_until(lambda: not any(is_alive(pid) for pid in pids))


# ---- user mistakes ----


@pytest.mark.parametrize(
    ("names", "options", "message"),
    [
        (["maths"], {}, r"--rewards=maths: expected math, exact, path/to/file\.py:function or"),
        (["FILE"], {}, "expected math, exact, path/"),
        (["no/such.py:f"], {}, r"--rewards=no/such\.py:f: there is no file /.*no/such\.py"),
        (["FILE:g"], {}, r"has no g, only \['f'\]"),
        (["BROKEN:f"], {}, r"--rewards=.*broken\.py:f: .*line 1"),
        (["model:rm"], {}, "--rewards=model:rm: expected"),  # the caller's to take out
        (["math"], {"timeout_s": 0.0}, "--reward_timeout_s=0.0"),
        (["math"], {"num_workers": 0}, "--reward_workers=0"),
    ],
)
def test_mistakes_are_named_at_construction(tmp_path, names, options, message):
    file = reward_file(tmp_path, "def f(completions): ...")
    broken = reward_file(tmp_path, "def f(:", "broken.py")
    names = [name.replace("FILE", file).replace("BROKEN", broken) for name in names]
    with pytest.raises(ValueError, match=message):
        RewardScorer(names, **({"timeout_s": 1.0} | options))


@pytest.mark.parametrize(
    ("names", "weights", "message"),
    [
        (["math", "math"], None, "--rewards=math math: expected different"),
        (["math", "model:"], None, "--rewards=model: needs a folder"),
        (["math"], [1.0, 2.0], r"--reward_weights=1\.0 2\.0: .* the 1 --rewards"),
        ([], [1.0], r"--reward_weights=1\.0: .* the 0 --rewards"),
        (["math"], [float("nan")], "--reward_weights=nan"),
    ],
)
def test_mistakes_in_names_and_weights(names, weights, message):
    with pytest.raises(ValueError, match=message):
        reward_weights(names, weights)


def test_names_of_functions_and_models_become_short_labels():
    names = ["math", "a/x.py:f", "model:org/judge", "model:runs/rm/final", "model:final"]
    assert list(reward_labels(names).items()) == list(
        zip(names, ["math", "f", "judge", "rm", "final"], strict=True)
    )
    same = ["a/x.py:rm", "model:runs/rm/final", "model:other/rm/", "b/x.py:g", "a/x.py:g"]
    assert reward_labels(same) == dict(zip(same, same, strict=True))


def test_no_function_needs_no_worker():
    with closing(RewardScorer([], timeout_s=1.0)) as scorer:
        batch = scorer.score(["p", "q"], ["a", "b"], [{}, {}])
        assert not worker_pids()
    assert (batch.components, batch.failed) == ({}, [False, False])
    assert (batch.exceptions, batch.timeouts, batch.first_traceback) == (0, 0, None)


def test_scores_are_weighted_sums_in_the_order_of_the_names():
    components = {"b": [1.0, None, None, 5.0], "a": [0.5, -2.0, None, 1.0]}
    weights = reward_weights(["a", "b"], [2.0, 0.25])
    assert list(weights.items()) == [("a", 2.0), ("b", 0.25)]
    lost = [False, False, False, True]
    assert combine_rewards(components, weights, lost) == [1.25, -4.0, None, None]


def test_import_error_in_a_reward_file(tmp_path):
    file = reward_file(tmp_path, "import no_such_module\ndef f(completions): ...")
    with closing(RewardScorer([f"{file}:f"], timeout_s=5.0)) as scorer:
        for call in (scorer.wait_ready, lambda: scorer.score([""], ["a"], [{}])):
            with pytest.raises(ValueError, match="(?s)--rewards: .*No module named 'no_such"):
                call()


def test_a_failed_component_leaves_the_sample_unscored(tmp_path):
    """A judge that crashed on one sample left it with the other reward alone: a low score."""
    file = tmp_path / "two.py"
    file.write_text(
        "def a(prompts, completions, **columns):\n"
        "    return [1.0] * len(completions)\n"
        "def b(prompts, completions, **columns):\n"
        "    return [None if c == 'none' else 1 / (c != 'crash') for c in completions]\n"
    )
    scorer = RewardScorer([f"{file}:a", f"{file}:b"], timeout_s=20)
    try:
        batch = scorer.score(["p"] * 3, ["fine", "crash", "none"], [{}] * 3)
    finally:
        scorer.close()
    assert combined(batch) == [2.0, None, 1.0]
    assert batch.failed == [False, True, False]
    assert (batch.exceptions, batch.timeouts) == (1, 0)
