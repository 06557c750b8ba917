"""Toy pairs whose best policy is known: the reward model and DPO both find it, in minutes."""

from pathlib import Path

import pytest

from tests.launch import metrics, run


@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The toy task, and in `sft` a model that imitates its mostly mistaken demonstrations."""
    folder = tmp_path_factory.mktemp("toy")
    answer = run("scripts/make_toy.py", "--output_dir", folder)
    assert answer.returncode == 0, answer.stderr
    flags: list[object] = ["--model", folder / "model", "--dataset", folder / "sft.jsonl"]
    flags += ["--output_dir", folder / "sft", "--num_steps", 250, "--sequences_per_step", 128]
    flags += ["--max_sequence_tokens", 64, "--learning_rate", 3e-3, "--lr_schedule", "linear"]
    answer = run("sft.py", *flags, "--warmup_steps", 20, "--cache_dir", "None")
    assert answer.returncode == 0, answer.stderr
    return folder


@pytest.mark.timeout(600)
def test_the_best_policy_is_found(toy: Path) -> None:
    """From pairs to a better policy: what DPO learns, the reward model sees in vLLM's samples."""
    flags: list[object] = ["--model", toy / "sft" / "final", "--dataset", toy / "pairs.jsonl"]
    flags += ["--eval_dataset", toy / "pairs_eval.jsonl", "--cache_dir", "None"]
    flags += ["--max_sequence_tokens", 64, "--eval_every_steps", 1000]

    out = toy / "rm"
    more = ["--num_steps", 100, "--pairs_per_step", 64, "--learning_rate", 1e-3]
    answer = run("reward_model.py", *flags, "--output_dir", out, *more)
    assert answer.returncode == 0, answer.stderr
    before, after = metrics(out)[0], metrics(out)[-1]
    assert before["eval/accuracy"] < 0.7 and after["eval/accuracy"] > 0.95

    out = toy / "dpo"
    more = ["--num_steps", 120, "--pairs_per_step", 64, "--learning_rate", 1e-4, "--beta", 0.5]
    more += ["--online_dataset", f"{toy / 'pairs_eval.jsonl'}[:128]"]
    more += ["--rewards", f"model:{toy / 'rm' / 'final'}"]
    more += ["--max_prompt_tokens", 16, "--max_response_tokens", 12, "--online_every_steps", 1000]
    answer = run("dpo.py", *flags, "--output_dir", out, *more)
    assert answer.returncode == 0, answer.stderr
    before, after = metrics(out)[0], metrics(out)[-1]
    assert (before["eval/ties"], before["eval/margin"]) == (1, 0)
    assert after["eval/accuracy"] > 0.95 and after["eval/margin"] > 1
    # its samples, by the reward model: the starting model sorts mostly the wrong way round
    assert after["eval/online_win_rate"] > 0.75
    assert after["eval/online_reward"] > before["eval/online_reward"] + 1
