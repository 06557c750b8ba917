"""ppo.py as users start it: outputs, replay, guards, filters, wrong flags."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

import ppo
from common.rollouts import StoredRollouts
from tests.launch import copy_task, launch, metrics, same_every_time
from tests.test_grpo import read_samples
from tests.test_scoring import make_reward_model
from tests.tiny import make_tiny_model, make_tokenizer


def flags(folder: Path, **overrides: object) -> list[object]:
    """A run of two steps in a few seconds; a tuple gives its flag several values."""
    settings: dict[str, object] = {
        "model": folder / "model",
        "dataset": folder / "data.jsonl",
        "rewards": f"{folder / 'variety.py'}:variety",
        "output_dir": folder / "run",
        "num_steps": 2,
        "prompts_per_step": 8,
        "samples_per_prompt": 2,
        "num_minibatches": 2,
        "max_prompt_tokens": 64,
        "max_response_tokens": 16,
        "learning_rate": 1e-3,
        "critic_learning_rate": 1e-3,
        "engine": "transformers",
        "engine_kv_cache_gb": 0.1,
        "timeout_s": 60,
    } | overrides
    parts: list[object] = []
    for name, value in settings.items():
        if value is not None:
            parts += [f"--{name}", *(value if isinstance(value, tuple) else (value,))]
    return parts


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model, prompts, and a reward that a policy without variety does not get."""
    folder = tmp_path_factory.mktemp("task")
    copy_task(folder)
    (folder / "variety.py").write_text(
        "def variety(prompts, completions, **columns):\n"
        "    return [min(1, len(set(c)) / 6) for c in completions]\n"
    )
    return folder


def finish(task: Path, name: str, **overrides: object) -> Path:
    """A run that has to succeed; returns its folder."""
    out = task / name
    ranks: Any = overrides.pop("ranks", None)
    answer = launch("ppo.py", *flags(task, output_dir=out, **overrides), ranks=ranks)
    assert answer.returncode == 0, answer.stderr
    return out


@pytest.fixture(scope="module")
def finished(task: Path) -> Path:
    """A finished run of one rank under torchrun, with vLLM."""
    return finish(
        task,
        "finished",
        ranks=1,
        engine="vllm",
        update_epochs=2,
        eval_dataset=task / "data.jsonl",
        eval_max_prompts=6,
    )


def test_output_is_complete(task: Path, finished: Path) -> None:
    rows = metrics(finished)
    assert [row["step"] for row in rows] == [0, 1, 2]
    assert "eval/reward" in rows[0] and "eval/reward" in rows[2]
    for row in rows[1:]:
        assert None not in row.values()
        assert 0 <= row["rollout/logprob_gap_max"] < 1e-4
        # P42: the ratio of the first minibatch is 1, not nearly 1
        assert row["policy/first_ratio_error"] == 0
        assert row["policy/kl_old"] > 0 and row["value/loss"] > 0
    # at first the policy is the reference, and the critic says 0
    assert rows[1]["policy/kl_response"] == rows[1]["policy/kl_ref"] == rows[1]["value/mean"] == 0
    assert rows[2]["policy/kl_ref"] > 0 and rows[2]["value/mean"] != 0
    samples = read_samples(finished / "rollouts" / "step_2.jsonl")
    assert len(samples) == 16 and all(math.isfinite(s["advantage"]) for s in samples)
    AutoModelForCausalLM.from_pretrained(finished / "final")
    critic: Any = AutoModelForSequenceClassification.from_pretrained(finished / "critic")
    assert critic.config.num_labels == 1 and critic.score.weight.abs().max() > 0


@pytest.mark.parametrize("script", ["ppo.py", "grpo.py"])
def test_replay_is_the_run_that_wrote_the_rollouts(task: Path, finished: Path, script: str) -> None:
    """From the stored samples come the same updates, bit for bit, and no engine is started."""
    online = finished
    settings: dict[str, object] = {"update_epochs": 2}
    if script == "grpo.py":
        online = task / "grpo"
        settings = {"critic_learning_rate": None}
        answer = launch(script, *flags(task, output_dir=online, **settings))
        assert answer.returncode == 0, answer.stderr
    replayed = task / f"replayed_{script}"
    settings |= {"dataset": None, "rewards": None, "engine": "vllm", "rollouts_from": online}
    answer = launch(script, *flags(task, output_dir=replayed, **settings))
    assert answer.returncode == 0, answer.stderr
    assert "self-test" not in answer.stdout and "INFO" not in answer.stderr
    for theirs, ours in zip(metrics(online)[-2:], metrics(replayed), strict=True):
        for key, value in same_every_time(ours).items():
            assert value == theirs[key], key
    for name in ("final/model.safetensors", "rollouts/step_1.jsonl", "rollouts/step_2.jsonl"):
        assert (replayed / name).read_bytes() == (online / name).read_bytes(), name


def test_a_replay_is_evaluated_with_an_engine(task: Path, finished: Path) -> None:
    """The engine then has the weights of the step, and the critic is the saved one."""
    settings: dict[str, object] = {"dataset": None, "rollouts_from": finished, "update_epochs": 2}
    settings |= {"eval_dataset": task / "data.jsonl", "eval_max_prompts": 6}
    out = finish(task, "evaluated", **settings)
    for theirs, ours in zip(metrics(finished), metrics(out), strict=True):
        assert ours.get("eval/reward") == theirs.get("eval/reward")


def test_a_run_goes_on_from_policy_critic_and_reference(task: Path, finished: Path) -> None:
    settings: dict[str, object] = {"model": finished / "final", "num_steps": 1}
    out = finish(task, "forgetful", **settings)
    assert metrics(out)[0]["value/mean"] == metrics(out)[0]["policy/kl_ref"] == 0
    settings |= {"critic_model": finished / "critic", "ref_model": task / "model"}
    out = finish(task, "continued", **settings)
    assert metrics(out)[0]["value/mean"] > 0.01 and metrics(out)[0]["policy/kl_ref"] > 1e-4


def test_rollouts_that_do_not_belong_to_the_run(task: Path, finished: Path) -> None:
    """Of another temperature: said. Too few, or with ids that the model lacks: refused."""
    settings: dict[str, object] = {"dataset": None, "rewards": None, "num_steps": 1}
    settings |= {"output_dir": task / "foreign", "overwrite": True, "rollouts_from": finished}
    said = "were the samples made by another model, or at another temperature?"
    for temperature in (1.0, 0.2):
        answer = launch("ppo.py", *flags(task, **settings, temperature=temperature))
        assert answer.returncode == 0, answer.stderr
        assert answer.stdout.count(said) == (temperature != 1.0), answer.stdout
    sample = read_samples(finished / "rollouts" / "step_1.jsonl")[0]
    path = task / "wrong.jsonl"
    path.write_text(json.dumps(sample | {"response_ids": [320] * len(sample["response_ids"])}))
    settings |= {"rollouts_from": path, "samples_per_prompt": 1}
    for size, message in ((8, "has 1 prompts, fewer than --prompts_per_step=8"), (1, "id 320,")):
        more = {"prompts_per_step": size, "num_minibatches": 1}
        answer = launch("ppo.py", *flags(task, **settings | more))
        assert answer.returncode != 0 and message in answer.stderr, answer.stderr


def test_a_stored_response_without_a_stop_token_was_cut_off(tmp_path: Path) -> None:
    lines = [
        {"prompt_ids": [1], "response_ids": ids, "rollout_logprobs": [-1.0] * 2, "score": 0.0}
        for ids in ([2, 5], [5, 2], [5, 2], [2, 5])
    ]
    lines[2]["truncated"], lines[3]["truncated"] = False, True  # what is said counts
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    stored = StoredRollouts(
        str(path), samples_per_prompt=1, max_prompt_tokens=9, max_response_tokens=9
    )
    samples = ppo.replay(stored, [0, 1, 2, 3], stop_ids=[5, 6])
    assert samples.truncated.tolist() == [False, True, False, True]


def diverging(task: Path, kind: str, name: str, **overrides: object) -> Any:
    settings: dict[str, object] = {"num_steps": 8, "num_minibatches": 1}
    settings |= {"guard_save_every_steps": 2}
    settings |= {"save_critic": False, "output_dir": task / name} | overrides
    ranks: Any = settings.pop("ranks", None)
    return launch("tests/run_ppo_diverging.py", kind, 5, *flags(task, **settings), ranks=ranks)


def test_guard_stops_a_diverging_run(task: Path) -> None:
    answer = diverging(task, "rate", "stopped", guard="stop")
    assert answer.returncode != 0
    assert answer.stderr.count("guard: step 6: KL ") == 1, answer.stderr
    assert "Traceback" not in answer.stderr
    rows = metrics(task / "stopped")
    assert [row["optim/rollbacks"] for row in rows] == [0, 0, 0, 0, 0, 1]
    # nothing is lost: `final` is the last policy that was sound
    check_near_start(task, task / "stopped" / "final")


@pytest.mark.parametrize("ranks", [1, 2])
def test_guard_rolls_a_diverging_run_back(task: Path, ranks: int) -> None:
    """The learning rate of step 5 is 1000 times too high; step 6 sees it and goes on without it."""
    settings: dict[str, object] = {"guard": "rollback", "kl_controller": "adaptive"}
    settings |= {"kl_controller_horizon": 100, "prompts_per_step": 24}
    if ranks == 1:  # here it is the reward that tells
        settings |= {"guard_kl": 1e9, "guard_entropy": 0.0, "guard_reward_drop": 0.25}
    answer = diverging(task, "rate", f"back_{ranks}", ranks=ranks, **settings)
    assert answer.returncode == 0, answer.stderr
    rows = metrics(task / f"back_{ranks}")
    reason = "reward" if ranks == 1 else "KL"
    assert answer.stdout.count(f"guard: step 6: {reason} ") == 1, answer.stdout
    assert "those of step_4 again" in answer.stdout
    assert [row["optim/rollbacks"] for row in rows] == [0] * 5 + [1] * 3
    rewards = [row["rollout/reward"] for row in rows]
    healthy = sum(rewards[:5]) / 5
    assert rewards[5] < healthy - 0.25 and rows[5]["optim/grad_norm"] == 0
    assert sum(rewards[6:]) / 2 > healthy - 0.1  # as if nothing had been
    for row in rows[6:]:
        assert row["policy/entropy"] > 5 and abs(row["policy/kl_response"]) < 2
    # P49: what the controller had learned by then is part of the checkpoint
    assert rows[6]["policy/kl_coef"] == rows[4]["policy/kl_coef"] != rows[5]["policy/kl_coef"]
    assert not (task / f"back_{ranks}" / "checkpoints").exists()  # the run is over


def test_guard_does_not_roll_back_for_ever(task: Path) -> None:
    """A limit that the run cannot keep: it returned to the same checkpoint again and again."""
    name = "hopeless"
    overrides: dict[str, object] = {"guard": "rollback", "guard_max_rollbacks": 2}
    overrides |= {"output_dir": task / name, "learning_rate": 1.0, "num_steps": 20}
    answer = launch("ppo.py", *flags(task, **overrides, num_minibatches=1, update_epochs=1))
    assert answer.returncode != 0 and "Traceback" not in answer.stderr
    assert metrics(task / name)[-1]["optim/rollbacks"] == 3
    check_near_start(task, task / name / "final")


def check_near_start(task: Path, final: Path) -> None:
    """Its weights are not those of a policy that has exploded."""
    weights, start = (
        load_file(final / "model.safetensors"),
        load_file(task / "model" / "model.safetensors"),
    )
    assert max((weights[k].float() - v).abs().max() for k, v in start.items() if k in weights) < 0.1


def test_guard_allows_the_first_gradient_after_none(task: Path) -> None:
    """While all scores are 0 there is no gradient; the first one was 100 times their mean."""
    (task / "late.py").write_text(
        "calls = 0\n"
        "def late(prompts, completions, **columns):\n"
        "    global calls\n"
        "    calls += 1\n"
        "    return [float(calls > 3) * len(c) for c in completions]\n"
    )
    out = finish(task, "sparse", rewards=f"{task / 'late.py'}:late", guard="stop", num_steps=4)
    norms = [row["optim/grad_norm"] for row in metrics(out)]
    assert norms[0] == norms[1] == 0 and norms[-1] > 0.01


def test_guard_checks_the_last_update_too(task: Path) -> None:
    """`final` and the last evaluation are those of a policy that the guard has seen to be sound."""
    extra: dict[str, object] = {"eval_dataset": task / "data.jsonl", "eval_temperature": 1.0}
    extra |= {"num_steps": 5, "eval_every_steps": 100}
    answer = diverging(task, "rate", "last", guard="rollback", **extra)
    assert answer.returncode == 0, answer.stderr
    rows = metrics(task / "last")
    assert [row["step"] for row in rows] == [0, 1, 2, 3, 4, 5, 6]
    assert rows[6]["optim/rollbacks"] == 1
    assert rows[5]["eval/reward"] < 0.6 < rows[0]["eval/reward"] - 0.1 < rows[6]["eval/reward"]
    check_near_start(task, task / "last" / "final")


@pytest.mark.parametrize("guard", ["off", "rollback"])
def test_a_gradient_that_is_not_finite_reaches_no_optimizer(task: Path, guard: str) -> None:
    name = f"nan_{guard}"
    answer = diverging(task, "nan", name, guard=guard, num_steps=6)
    message = "step 5: the policy's gradient norm is nan; this update was not made"
    if guard == "off":
        assert answer.returncode != 0 and answer.stderr.count(message) == 1, answer.stderr
        return
    assert answer.returncode == 0, answer.stderr
    assert "guard: step 5: the policy's gradient norm is nan" in answer.stdout
    assert [row["optim/rollbacks"] for row in metrics(task / name)] == [0, 0, 0, 0, 1, 1]
    weights = load_file(task / name / "final" / "model.safetensors")
    assert all(value.isfinite().all() for value in weights.values())


def test_critic_warmup_and_early_stop(task: Path) -> None:
    """In the first step only the critic learns; then the KL bound ends the policy's updates."""
    out = finish(
        task, "warm", critic_warmup_steps=1, target_kl=1e-9, update_epochs=2, num_minibatches=2
    )
    first, second = metrics(out)
    assert first["optim/grad_norm"] == first["policy/loss"] == first["policy/kl_old"] == 0
    assert first["policy/skipped_updates"] == 0
    assert second["policy/kl_response"] == 0  # the policy had not moved yet
    assert second["value/mean"] != 0  # but the critic had
    assert first["optim/critic_grad_norm"] > 0 and second["optim/critic_grad_norm"] > 0
    # of 2 x 2 updates the first is made; the second sees a KL above the bound
    assert second["policy/skipped_updates"] == 0.75


def test_nothing_left_to_train_on(task: Path) -> None:
    """P48: all samples filtered out: no update, no division by zero, no end without a word."""
    out = finish(task, "nothing", min_score=9, export_dtype="float32", ranks=2)
    for row in metrics(out):
        assert row["rollout/filtered"] == 1 and row["policy/loss_tokens"] == 0
        assert row["policy/skipped_updates"] == 1
        assert None not in row.values()
    weights = load_file(out / "final" / "model.safetensors")
    for name, value in load_file(task / "model" / "model.safetensors").items():
        assert name not in weights or torch.equal(weights[name], value)


def test_scores_are_shaped_before_they_are_rewards(task: Path) -> None:
    """Normalised over all steps, clipped, and less the penalty of cut-off responses (P45)."""
    out = finish(
        task,
        "shaped",
        normalize_scores=True,
        score_clip=1.0,
        missing_eos_penalty=0.5,
        filtration="best_worst",
        samples_per_prompt=4,
        num_minibatches=1,
    )
    seen: list[float] = []
    for step, row in enumerate(metrics(out), start=1):
        samples = read_samples(out / "rollouts" / f"step_{step}.jsonl")
        scores = [sample["score"] for sample in samples]
        seen += scores
        history = torch.tensor(seen, dtype=torch.float64)
        shaped = (torch.tensor(scores, dtype=torch.float64) - history.mean()) / history.std(
            correction=0
        )
        shaped = shaped.clamp(-1, 1) - 0.5 * torch.tensor([s["truncated"] for s in samples])
        assert row["rollout/shaped_reward"] == pytest.approx(shaped.mean().item())
        assert 0 < row["rollout/truncated"] < 1
        assert row["rollout/filtered"] == 0.5  # two of four
        # those that are left out are not trained on
        for start in range(0, len(samples), 4):
            group = samples[start : start + 4]
            ranked = sorted(group, key=lambda sample: -sample["score"])
            kept = sorted(s["score"] for s in group if s["advantage"] is not None)
            assert kept == [ranked[-1]["score"], ranked[0]["score"]]


def test_critic_starts_from_the_reward_model(task: Path) -> None:
    """Its value of a whole response is the score, and it must read the policy's token ids."""
    tokenizer = make_tokenizer("no_template")
    judge = make_reward_model(task / "judge" / "final", tokenizer=tokenizer)
    settings: dict[str, Any] = {"model": "m", "output_dir": "o", "dataset": ("d",)}
    assert ppo.Args(**settings, rewards=("model:a", "exact")).critic_source == "a"
    assert ppo.Args(**settings, rewards=("model:a", "model:b")).critic_source == "m"
    assert ppo.Args(**settings, rewards=("model:a",), critic_model="c").critic_source == "c"
    out = finish(task, "judged", rewards=f"model:{judge}", critic_learning_rate=1e-9, num_steps=1)
    (row,) = metrics(out)
    assert row["value/mean"] != 0
    settings = {"rewards": f"model:{judge}", "normalize_scores": True, "num_steps": 1}
    (row,) = metrics(finish(task, "rescaled", **settings))  # its scale is not that of the scores
    assert row["value/mean"] == 0 and row["optim/critic_grad_norm"] > 0
    tokenizer.add_tokens(["zz"])  # a token more does no harm, one less does
    other = make_tiny_model(task / "other", tokenizer=tokenizer)
    finish(task, "wider", critic_model=other, num_steps=1)
    bad: dict[str, object] = {"model": other, "critic_model": task / "model"}
    answer = launch("ppo.py", *flags(task, output_dir=task / "bad", **bad))
    assert answer.returncode != 0 and "--critic_model=" in answer.stderr, answer.stderr
    assert "its tokenizer does not have the tokens of" in answer.stderr


def test_wrong_flags_are_told_by_name() -> None:
    settings: dict[str, Any] = {"model": "m", "output_dir": "o", "dataset": ("d",)}
    settings |= {"rewards": ("exact",)}
    for message, overrides in {
        "--num_minibatches=3 must divide --prompts_per_step=256": {"num_minibatches": 3},
        "--gae_lambda=1.5 must be in": {"gae_lambda": 1.5},
        "--critic_gae_lambda=-1 must be in": {"critic_gae_lambda": -1},
        "--gamma=nan must be in": {"gamma": math.nan},
        "--value_clip=0 must be positive": {"value_clip": 0},
        "--target_kl=-1 must be positive": {"target_kl": -1},
        "--score_clip=inf must be": {"score_clip": math.inf},
        "--min_score=nan must be": {"min_score": math.nan},
        "--critic_warmup_steps=100 must be below --num_steps=100": {"critic_warmup_steps": 100},
        "--kl_controller=adaptive needs a --kl_coef": {"kl_controller": "adaptive", "kl_coef": 0},
        "--kl_controller_horizon=9 must not be below the 256 responses": {
            "kl_controller": "adaptive",
            "kl_controller_horizon": 9,
        },
        "--filtration=best_k keeps --filtration_k=2 of": {"filtration": "best_k"},
        "--filtration_k=0 must be": {"filtration_k": 0},
        "--samples_per_prompt=0 must be": {"samples_per_prompt": 0},
        "--dual_clip=1 must be above 1": {"dual_clip": 1},
        "--tis_cap=nan must be at least 1": {"tis_cap": math.nan},
        "--missing_eos_penalty=-1 must be": {"missing_eos_penalty": -1},
        "--guard_kl=0 must be": {"guard_kl": 0},
        "--ref_model=r is not used with --kl_coef=0": {"ref_model": "r", "kl_coef": 0},
        "--kl_controller=adaptive: --rollouts_from=r does not hold": {
            "rollouts_from": "r",
            "dataset": (),
            "rewards": (),
            "kl_controller": "adaptive",
        },
        "--rewards=exact has nothing to score": {"rollouts_from": "r", "dataset": ()},
        "--rollouts_from=r replaces --dataset=d": {"rollouts_from": "r"},
        "--dataset is required": {"dataset": ()},
        "--rewards is required": {"rewards": ()},
    }.items():
        with pytest.raises(ValueError, match=message.replace("(", r"\(")):
            ppo.Args(**settings | overrides)
    ppo.Args(**settings | {"dataset": (), "rewards": (), "rollouts_from": "r"})


def test_the_inputs_of_a_run_are_not_overwritten(task: Path, finished: Path) -> None:
    before = json.dumps(metrics(finished))
    for name in ("rollouts_from", "critic_model"):
        value = finished if name == "rollouts_from" else finished / "critic"
        extra: dict[str, object] = {name: value, "overwrite": True, "output_dir": finished}
        if name == "rollouts_from":
            extra |= {"dataset": None, "rewards": None}
        answer = launch("ppo.py", *flags(task, **extra))
        assert answer.returncode != 0 and "would overwrite" in answer.stderr, answer.stderr
    assert json.dumps(metrics(finished)) == before
