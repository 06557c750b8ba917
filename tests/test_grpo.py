"""grpo.py as users run it, on real vLLM: reproducible, resumable by eye, loud when it fails."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import grpo
from tests.launch import command, copy_task, environment, launch, metrics, run, same_every_time
from tests.test_scoring import make_reward_model, plain_scores
from tests.tiny import make_tiny_model, make_tokenizer


def flags(folder: Path, **overrides: object) -> list[object]:
    """A run of two steps in a few seconds; a tuple gives its flag several values."""
    settings: dict[str, object] = {
        "model": folder / "model",
        "dataset": folder / "data.jsonl",
        "rewards": f"{folder / 'reward.py'}:letters",
        "output_dir": folder / "run",
        "num_steps": 2,
        "prompts_per_step": 4,
        "samples_per_prompt": 4,
        "max_prompt_tokens": 64,
        "max_response_tokens": 16,
        "learning_rate": 1e-3,
        "engine_kv_cache_gb": 0.1,
        "timeout_s": 60,
    } | overrides
    parts: list[object] = []
    for name, value in settings.items():
        parts += [f"--{name}", *(value if isinstance(value, tuple) else (value,))]
    return parts


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("task")
    copy_task(folder)
    return folder


@pytest.fixture(scope="module")
def finished(task: Path) -> Path:
    """A finished run of one rank under torchrun."""
    out = task / "finished"
    extra = {"output_dir": out, "eval_dataset": task / "data.jsonl", "eval_max_prompts": 6}
    extra |= {"eval_samples_per_prompt": 4, "eval_temperature": 0.7, "num_minibatches": 2}
    shared_memory = set(os.listdir("/dev/shm"))
    answer = run("grpo.py", *flags(task, **extra), ranks=1)
    assert answer.returncode == 0, answer.stderr
    assert "Traceback" not in answer.stderr and "Error" not in answer.stderr
    assert set(os.listdir("/dev/shm")) <= shared_memory
    return out


def test_output_is_complete(finished: Path) -> None:
    rows = metrics(finished)
    assert [row["step"] for row in rows] == [0, 1, 2]
    assert {"eval/accuracy", "eval/pass_at_2", "eval/pass_at_4"} <= set(rows[0])
    assert json.loads((finished / "args.json").read_text())["world_size"] == 1
    for row in rows[1:]:
        assert 0 <= row["rollout/logprob_gap_max"] < 1e-4
        assert None not in row.values()
    samples = [
        json.loads(line)
        for line in (finished / "rollouts" / "step_2.jsonl").read_text().splitlines()
    ]
    assert len(samples) == 16
    for sample in samples:
        assert len(sample["response_ids"]) == len(sample["rollout_logprobs"]) <= 16
        assert sample["truncated"] == (sample["response_ids"][-1] % 16 != 1)
    # P57: every sample of a step is its own draw.
    assert len({tuple(sample["response_ids"]) for sample in samples}) > 12
    assert not list(finished.glob("*.partial"))


def test_plain_python_gives_the_same_numbers(task: Path, finished: Path) -> None:
    """The same seed, bit for bit: without torchrun, and in a second process."""
    extra = {"output_dir": task / "again", "eval_dataset": task / "data.jsonl"}
    extra |= {"eval_max_prompts": 6, "eval_samples_per_prompt": 4, "eval_temperature": 0.7}
    answer = run("grpo.py", *flags(task, num_minibatches=2, **extra))
    assert answer.returncode == 0, answer.stderr
    assert list(map(same_every_time, metrics(task / "again"))) == list(
        map(same_every_time, metrics(finished))
    )
    for name in ("final/model.safetensors", "rollouts/step_1.jsonl", "rollouts/step_2.jsonl"):
        assert (task / "again" / name).read_bytes() == (finished / name).read_bytes()


def test_two_ranks_and_two_jobs_at_once(task: Path, finished: Path) -> None:
    """P78: two jobs on one host took the same port. And two ranks must be the same algorithm."""
    jobs = []
    for name, ranks in (("two", 2), ("one", None)):
        extra = {"output_dir": task / name, "eval_dataset": task / "data.jsonl"}
        extra |= {"eval_max_prompts": 6, "eval_samples_per_prompt": 4, "eval_temperature": 0.7}
        line = command("grpo.py", *flags(task, num_minibatches=2, **extra), ranks=ranks)
        jobs.append(
            subprocess.Popen(
                line, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, env=environment()
            )
        )
    for job in jobs:
        _, errors = job.communicate(timeout=240)
        assert job.returncode == 0, errors.decode()
    for two, one in zip(metrics(task / "two"), metrics(finished), strict=True):
        for key, value in same_every_time(one).items():
            assert two[key] == pytest.approx(value, rel=1e-4, abs=1e-5), key


def test_tensor_parallel_engine(task: Path, finished: Path) -> None:
    """Two ranks share one engine: the same samples and updates as with an engine each."""
    extra = {"output_dir": task / "tp", "eval_dataset": task / "data.jsonl", "eval_max_prompts": 6}
    extra |= {"eval_samples_per_prompt": 4, "eval_temperature": 0.7, "num_minibatches": 2}
    extra |= {"engine_tensor_parallel": 2}
    answer = run("grpo.py", *flags(task, **extra), ranks=2)
    assert answer.returncode == 0, answer.stderr
    for ours, expected in zip(metrics(task / "tp"), metrics(finished), strict=True):
        for key, value in same_every_time(expected).items():
            assert ours[key] == pytest.approx(value, rel=1e-4, abs=1e-5), key


def read_samples(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_rewards_of_a_model(task: Path) -> None:
    """Its scores of the decoded responses are those of plain transformers, on two ranks."""
    reward_model = make_reward_model(task / "judge" / "final")  # with a chat template
    out = task / "judged"
    answer = run(
        "grpo.py",
        *flags(task, rewards=f"model:{reward_model}", output_dir=out, engine="transformers"),
        ranks=2,
    )
    assert answer.returncode == 0, answer.stderr
    for step, row in enumerate(metrics(out), start=1):
        samples = read_samples(out / "rollouts" / f"step_{step}.jsonl")
        scored = [sample for sample in samples if sample["score"] is not None]
        assert len(samples) == 16 and len(scored) >= 12  # an empty response has no score
        assert row["rollout/reward_refused"] == 16 - len(scored)
        assert row["rollout/unscored"] == (16 - len(scored)) / 16
        assert all(sample["rewards"] == {"judge": sample["score"]} for sample in samples)
        scores = [sample["score"] for sample in scored]
        texts = [sample["prompt"] for sample in scored], [sample["response"] for sample in scored]
        assert scores == pytest.approx(plain_scores(reward_model, *texts), abs=1e-5)
        assert row["rollout/reward"] == pytest.approx(sum(scores) / len(scores))
        assert row["rollout/reward/judge"] == row["rollout/reward"]


def test_rewards_of_a_function_and_a_model(task: Path) -> None:
    reward_model = make_reward_model(task / "judge2", tokenizer=make_tokenizer("no_template"))
    out = task / "mixed"
    extra = {"rewards": (f"{task / 'reward.py'}:letters", f"model:{reward_model}")}
    extra |= {"reward_weights": (1, 0.5), "eval_dataset": task / "data.jsonl"}
    extra |= {"output_dir": out, "engine": "transformers", "eval_max_prompts": 6, "num_steps": 1}
    answer = run("grpo.py", *flags(task, **extra))
    assert answer.returncode == 0, answer.stderr
    before, after = metrics(out)
    for row, prefix, name in (
        (before, "eval", "eval_0"),
        (after, "eval", "eval_1"),
        (after, "rollout", "step_1"),
    ):
        samples = read_samples(out / "rollouts" / f"{name}.jsonl")
        scored = [s for s in samples if s["rewards"]["judge2"] is not None]
        assert len(scored) > len(samples) / 2
        texts = [s["prompt"] for s in scored], [s["response"] for s in scored]
        theirs = plain_scores(reward_model, *texts)
        assert [s["rewards"]["judge2"] for s in scored] == pytest.approx(theirs, abs=1e-5)
        for sample in samples:
            letters, judged = sample["rewards"]["letters"], sample["rewards"]["judge2"]
            expected = None if judged is None else letters + 0.5 * judged
            assert sample["score"] == pytest.approx(expected)
        assert row[f"{prefix}/reward/judge2"] == pytest.approx(sum(theirs) / len(theirs))
        letters = [s["rewards"]["letters"] for s in samples]
        assert row[f"{prefix}/reward/letters"] == pytest.approx(sum(letters) / len(letters))
        assert row[f"{prefix}/unscored"] == 1 - len(scored) / len(samples)


def test_weights_belong_to_rewards() -> None:
    settings: dict[str, Any] = {"model": "m", "output_dir": "o", "dataset": ("d",)}
    grpo.Args(**settings, rewards=("math", "model:rm"), reward_weights=(1.0, 2.0))
    with pytest.raises(ValueError, match=r"--reward_weights=1\.0: expected .* the 2 --rewards"):
        grpo.Args(**settings, rewards=("math", "model:rm"), reward_weights=(1.0,))


def test_final_checkpoint_serves_the_same_greedy_text(task: Path, finished: Path) -> None:
    """The checkpoint as it lies: transformers and a fresh vLLM agree on it."""
    prompt = [7, 30, 8, 31]
    code = (
        "import json, os, sys, common, torch, torch.distributed as dist\n"
        "from vllm import LLM, SamplingParams\n"
        "llm = LLM(sys.argv[1], dtype='float32', enforce_eager=True, max_model_len=64,\n"
        "          kv_cache_memory_bytes=2**26)\n"
        "out = llm.generate({'prompt_token_ids': json.loads(sys.argv[2])},\n"
        "                   SamplingParams(temperature=0, max_tokens=12), use_tqdm=False)\n"
        "print('IDS', json.dumps(list(out[0].outputs[0].token_ids)))\n"
    )
    answer = subprocess.run(
        [sys.executable, "-c", code, str(finished / "final"), json.dumps(prompt)],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=Path(__file__).parent.parent,
    )
    assert answer.returncode == 0, answer.stderr
    served = json.loads(answer.stdout.split("IDS")[1])
    model = AutoModelForCausalLM.from_pretrained(finished / "final", dtype=torch.float32)
    plain = model.generate(torch.tensor([prompt]), do_sample=False, max_new_tokens=12)
    assert served == plain[0, len(prompt) :].tolist()
    assert AutoTokenizer.from_pretrained(finished / "final").decode(served) is not None


def fails(task: Path, message: str, ranks: int | None = None, **overrides: object) -> str:
    """Run into an error; it must be told once, with a non-zero exit, and leave nothing whole."""
    out = task / "failing"
    settings = {"output_dir": out, "overwrite": True, "engine": "transformers"} | overrides
    answer = launch("grpo.py", *flags(task, **settings), ranks=ranks, timeout=120)
    assert answer.returncode != 0
    text = answer.stderr + answer.stdout
    assert text.count(message) == 1, text
    assert not (out / "final").exists()
    return text


def test_bad_flags_and_files_are_one_clear_message(task: Path) -> None:
    (task / "empty.jsonl").write_text("")
    (task / "long.jsonl").write_text(json.dumps({"prompt": "a" * 500, "answer": "b"}) + "\n")
    (task / "broken.py").write_text(
        "def f(prompts, completions, **columns):\n    raise KeyError(3)\n"
    )
    for message, overrides in {
        "--num_minibatches=3 must divide --prompts_per_step=4": {"num_minibatches": 3},
        "empty.jsonl": {"dataset": task / "empty.jsonl"},
        "missing.jsonl": {"dataset": task / "missing.jsonl"},
        "too_long": {"dataset": task / "long.jsonl"},
        "KeyError: 3": {"rewards": f"{task / 'broken.py'}:f"},
        "context of": {"max_response_tokens": 4000},
        "has no no_such_function": {"rewards": f"{task / 'broken.py'}:no_such_function"},
        "no such folder": {"model": task / "nowhere"},
        "no trained head": {"rewards": ("exact", f"model:{task / 'model'}")},
    }.items():
        text = fails(task, message, **overrides)
        if "KeyError" not in message:
            assert "Traceback" not in text, text


def test_an_error_on_one_rank_ends_all(task: Path) -> None:
    """P63, P64: one rank raised and the others waited in a collective until the time-out."""
    (task / "rank1.py").write_text(
        "import os\n"
        "def f(prompts, completions, **columns):\n"
        "    if os.getppid() and os.environ['RANK'] == '1':\n"
        "        raise RuntimeError('only on rank one')\n"
        "    return [0.0] * len(completions)\n"
    )
    start = time.monotonic()
    text = fails(
        task,
        "RuntimeError: only on rank one",
        2,
        rewards=f"{task / 'rank1.py'}:f",
        max_reward_failures=0.1,
    )
    assert time.monotonic() - start < 60
    assert text.count("Traceback (most recent call last)") == 2, (
        text
    )  # ours, the reward's, torchrun's


def test_more_ranks_than_prompts(task: Path) -> None:
    """A rank without a prompt of its own crashed on its empty list of responses."""
    out = task / "few"
    extra = {"output_dir": out, "engine": "transformers", "prompts_per_step": 1, "num_steps": 1}
    extra |= {"eval_dataset": task / "data.jsonl", "eval_max_prompts": 1}
    answer = run("grpo.py", *flags(task, **extra), ranks=2)
    assert answer.returncode == 0, answer.stderr
    assert len((out / "rollouts" / "step_1.jsonl").read_text().splitlines()) == 4


def test_a_token_id_beyond_the_embeddings_is_told(task: Path) -> None:
    """It was an IndexError in the middle of the first forward (on CUDA a device assert)."""
    make_tiny_model(task / "small", flavour="no_template", vocab_size=200)
    fails(task, "token id", model=task / "small")


def test_a_killed_rank_ends_the_job(task: Path) -> None:
    """kill -9 of one rank: the job ends with an error, soon, and nothing looks finished."""
    out = task / "killed"
    line = command(
        "grpo.py",
        *flags(task, output_dir=out, num_steps=500, engine="transformers", timeout_s=30),
        ranks=2,
    )
    job = subprocess.Popen(
        line, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True, env=environment()
    )
    deadline = time.monotonic() + 120
    while not (out / "metrics.jsonl").exists() or not metrics(out):
        assert job.poll() is None and time.monotonic() < deadline
        time.sleep(0.2)
    children = Path(f"/proc/{job.pid}/task/{job.pid}/children").read_text().split()
    victims = [
        int(pid) for pid in children if "grpo.py" in Path(f"/proc/{pid}/cmdline").read_text()
    ]
    assert len(victims) == 2
    os.kill(max(victims), signal.SIGKILL)
    _, errors = job.communicate(timeout=60)
    assert job.returncode != 0
    assert "SIGKILL" in errors
    assert not (out / "final").exists()
    assert not any(Path(f"/proc/{pid}").exists() for pid in victims)


def test_a_finished_run_is_not_overwritten_by_accident(task: Path, finished: Path) -> None:
    before = (finished / "metrics.jsonl").read_bytes()
    answer = launch("grpo.py", *flags(task, output_dir=finished, engine="transformers"))
    assert answer.returncode != 0 and "--overwrite" in answer.stderr
    assert (finished / "metrics.jsonl").read_bytes() == before
