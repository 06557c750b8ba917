"""Toy pairs whose best policy is known: the reward model, DPO and PPO find it, in minutes."""

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


def preferences(toy: Path) -> list[object]:
    """Flags of a run that learns from the toy's pairs."""
    flags: list[object] = ["--model", toy / "sft" / "final", "--dataset", toy / "pairs.jsonl"]
    flags += ["--eval_dataset", toy / "pairs_eval.jsonl", "--cache_dir", "None"]
    return [*flags, "--max_sequence_tokens", 64, "--eval_every_steps", 1000]


@pytest.fixture(scope="module")
def judge(toy: Path) -> Path:
    """The run of a reward model, which has learned from pairs only."""
    out = toy / "rm"
    more = ["--num_steps", 100, "--pairs_per_step", 64, "--learning_rate", 1e-3]
    answer = run("reward_model.py", *preferences(toy), "--output_dir", out, *more)
    assert answer.returncode == 0, answer.stderr
    return out


@pytest.mark.timeout(600)
def test_the_best_policy_is_found(toy: Path, judge: Path) -> None:
    """From pairs to a better policy: what DPO learns, the reward model sees in vLLM's samples."""
    before, after = metrics(judge)[0], metrics(judge)[-1]
    assert before["eval/accuracy"] < 0.7 and after["eval/accuracy"] > 0.95

    out = toy / "dpo"
    more = ["--num_steps", 120, "--pairs_per_step", 64, "--learning_rate", 1e-4, "--beta", 0.5]
    more += ["--online_dataset", f"{toy / 'pairs_eval.jsonl'}[:128]"]
    more += ["--rewards", f"model:{judge / 'final'}"]
    more += ["--max_prompt_tokens", 16, "--max_response_tokens", 12, "--online_every_steps", 1000]
    answer = run("dpo.py", *preferences(toy), "--output_dir", out, *more)
    assert answer.returncode == 0, answer.stderr
    before, after = metrics(out)[0], metrics(out)[-1]
    assert (before["eval/ties"], before["eval/margin"]) == (1, 0)
    assert after["eval/accuracy"] > 0.95 and after["eval/margin"] > 1
    # its samples, by the reward model: the starting model sorts mostly the wrong way round
    assert after["eval/online_win_rate"] > 0.75
    assert after["eval/online_reward"] > before["eval/online_reward"] + 1


@pytest.mark.timeout(600)
def test_ppo_raises_an_accuracy_that_is_hidden_from_it(toy: Path, judge: Path) -> None:
    """PPO raises the score of a learned reward model; `exact`, with weight 0, only measures.

    Measured on three chains (task, imitation, reward model) with four seeds of PPO each: the hidden
    accuracy of greedy answers rises from 0.10 to 0.14 to between 0.94 and 0.99, that of samples
    from at most 0.48 to at least 0.79; the KL per response stays below 1.34, and the critic
    explains 0.39 to 0.73 of the variance.
    """
    out, target = toy / "ppo", 1.5
    flags: list[object] = ["--model", toy / "sft" / "final", "--dataset", toy / "rl.jsonl"]
    flags += ["--rewards", f"model:{judge / 'final'}", "exact", "--reward_weights", 1, 0]
    flags += ["--num_steps", 10, "--prompts_per_step", 128, "--max_prompt_tokens", 32]
    flags += ["--max_response_tokens", 12, "--learning_rate", 1e-4, "--critic_learning_rate", 5e-4]
    flags += ["--kl_coef", 5, "--kl_controller", "adaptive", "--kl_controller_target", target]
    flags += ["--kl_controller_horizon", 2000]
    flags += ["--eval_dataset", f"{toy / 'eval.jsonl'}[:128]", "--eval_every_steps", 1000]
    answer = run("ppo.py", *flags, "--output_dir", out)
    assert answer.returncode == 0, answer.stderr
    start, *steps = metrics(out)
    before, after = start["eval/reward/exact"], steps[-1]["eval/reward/exact"]
    assert before < 0.3 and after > 0.8
    assert steps[0]["rollout/reward/exact"] < 0.6 < 0.7 < steps[-1]["rollout/reward/exact"]
    assert steps[-1]["eval/reward"] > start["eval/reward"] + 5  # what training sees
    assert all(step["policy/kl_response"] < target for step in steps)
    assert steps[-1]["policy/kl_response"] > 0.1 > steps[0]["policy/kl_response"]
    coefs = [step["policy/kl_coef"] for step in steps]
    assert coefs[0] == 5 and all(b < a for a, b in zip(coefs, coefs[1:], strict=False))
    assert steps[-1]["value/explained_variance"] > 0.1
    assert all(step["policy/first_ratio_error"] == 0 for step in steps)
