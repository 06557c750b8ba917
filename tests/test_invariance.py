"""Loss, gradient norm and updated weights do not depend on ranks, micro-batches or packing."""

import json
import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.launch import copy_task, launch, metrics

Layouts = dict[str, tuple[int | None, list[object]]]
LAYOUTS: Layouts = {
    "small microbatches": (None, ["--max_tokens_per_microbatch", 96]),
    "one sequence per row": (None, ["--packing", "False"]),
    "activation checkpointing": (None, ["--activation_checkpointing", "True"]),
    "two ranks": (2, []),
    "two ranks, unpacked": (2, ["--packing", "False"]),
    "two replicas, small microbatches": (
        2,
        ["--replicas", 2, "--max_tokens_per_microbatch", 96],
    ),
}
LORA_LAYOUTS: Layouts = {
    "recomputed, small microbatches": (
        None,
        ["--activation_checkpointing", "True", "--max_tokens_per_microbatch", 96],
    ),
    "two ranks, unpacked, offloaded": (2, ["--packing", "False", "--cpu_offload", "True"]),
}
LORA = ["--lora_rank", 4, "--lora_alpha", 8, "--learning_rate", 1e-3]


def check(
    script: str, flags: list[object], tmp_path: Path, layouts: Layouts
) -> list[dict[str, float]]:
    """Run all layouts and compare them with one rank, packed. Returns the reference's metrics."""
    not_compared = ("time/", "memory/", "data/padding")  # what a layout is about
    reference = None
    for name, (ranks, extra) in {"reference": (None, []), **layouts}.items():
        out = tmp_path / name.replace(" ", "_")
        answer = launch(script, *flags, "--output_dir", out, *extra, ranks=ranks)
        assert answer.returncode == 0, f"{name}: {answer.stderr[-3000:]}"
        rows, weights = metrics(out), load_file(out / "final" / "model.safetensors")
        for row in rows:  # pairs: tokens in full, whether their beginning is shared or not
            if "data/shared_tokens" in row:
                row["data/tokens"] += row.pop("data/shared_tokens")
        if reference is None:
            reference = rows, weights
            continue
        for row, expected in zip(rows, reference[0], strict=True):
            for key, value in expected.items():
                if not key.startswith(not_compared):
                    assert row[key] == pytest.approx(value, rel=1e-5, abs=1e-5), f"{name}: {key}"
        for key, tensor in reference[1].items():
            assert torch.allclose(weights[key], tensor, rtol=0, atol=1e-5), f"{name}: {key}"
    assert reference is not None
    return reference[0]


@pytest.mark.timeout(600)
@pytest.mark.parametrize("lora", [False, True])
def test_grpo(tmp_path: Path, lora: bool) -> None:
    """P13, P14, P32: gradients changed with the number of micro-batches and of ranks."""
    model, data = copy_task(tmp_path)
    flags: list[object] = ["--model", model, "--dataset", data, "--engine", "transformers"]
    flags += ["--rewards", f"{tmp_path / 'reward.py'}:letters", "--num_steps", 2]
    flags += ["--prompts_per_step", 6, "--samples_per_prompt", 3, "--num_minibatches", 2]
    flags += ["--max_prompt_tokens", 64, "--max_response_tokens", 16, "--learning_rate", 1e-4]
    flags += ["--kl_coef", 0.1, "--truncated_responses", "mask", "--temperature", 0.8]
    flags += ["--export_dtype", "float32", "--eval_dataset", data, "--eval_max_prompts", 5]
    if lora:
        rows = check("grpo.py", [*flags, *LORA], tmp_path, LORA_LAYOUTS)
    else:
        rows = check("grpo.py", flags, tmp_path, LAYOUTS)
    assert all(row["optim/grad_norm"] > 0.01 for row in rows[1:])
    assert 0 < rows[1]["rollout/truncated"] < 1
    # P42: at the first minibatch old and new log-probs are the same; later ones have moved.
    assert rows[1]["policy/kl_old"] > 0
    # The reference is the starting model, with LoRA the model without its adapters.
    assert rows[2]["policy/kl_ref"] > 0


@pytest.mark.timeout(600)
@pytest.mark.parametrize("lora", [False, True])
def test_ppo(tmp_path: Path, lora: bool) -> None:
    """P13, P39, P44, P46: as above, with a critic, and statistics that are those of all ranks."""
    model, data = copy_task(tmp_path)
    flags: list[object] = ["--model", model, "--dataset", data, "--engine", "transformers"]
    flags += ["--rewards", f"{tmp_path / 'reward.py'}:letters", "--num_steps", 2]
    flags += ["--prompts_per_step", 6, "--samples_per_prompt", 4, "--num_minibatches", 2]
    flags += ["--max_prompt_tokens", 64, "--max_response_tokens", 16, "--learning_rate", 1e-4]
    flags += ["--critic_learning_rate", 1e-3, "--temperature", 0.8, "--export_dtype", "float32"]
    flags += ["--normalize_scores", "True", "--score_clip", 2, "--missing_eos_penalty", 0.5]
    flags += ["--filtration", "best_random", "--filtration_k", 3, "--entropy_coef", 0.01]
    flags += ["--critic_gae_lambda", 1.0, "--kl_controller", "adaptive", "--guard", "stop"]
    if lora:
        rows = check("ppo.py", [*flags, *LORA], tmp_path, {"two ranks": (2, [])})
    else:
        ranks, layout = LAYOUTS["two ranks, unpacked"]
        name = "two replicas, small microbatches"
        offloaded = (ranks, [*layout, "--offload_frozen", "True"])
        layouts: Layouts = {"reference offloaded": offloaded, name: LAYOUTS[name]}
        rows = check("ppo.py", flags, tmp_path, layouts)
    assert all(row["policy/first_ratio_error"] == 0 for row in rows)
    assert all(row["optim/grad_norm"] > 0.01 for row in rows)
    assert rows[1]["policy/kl_ref"] > 0 and rows[1]["value/mean"] != 0


@pytest.mark.timeout(600)
@pytest.mark.parametrize("lora", [False, True])
def test_sft(tmp_path: Path, lora: bool) -> None:
    """P13, P14, P18, P21, P63: as above, and an evaluation that counts every row once."""
    model, _ = copy_task(tmp_path)
    rows = [
        {"prompt": "12 " * (1 + i % 7), "completion": "hello " * (i % 4 + 1)} for i in range(23)
    ]
    data = tmp_path / "sft.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    flags: list[object] = ["--model", model, "--dataset", data, "--num_steps", 2]
    flags += ["--sequences_per_step", 9, "--max_sequence_tokens", 96, "--learning_rate", 1e-4]
    flags += ["--warmup_steps", 0, "--eval_dataset", data, "--export_dtype", "float32"]
    flags += ["--cache_dir", tmp_path / "cache"]
    if lora:
        logged = check("sft.py", [*flags, *LORA], tmp_path, LORA_LAYOUTS)
    else:
        logged = check("sft.py", flags, tmp_path, LAYOUTS)
    assert logged[-1]["eval/loss"] < logged[0]["eval/loss"]


PAIR_LAYOUTS: Layouts = {
    "small microbatches, prompts twice": (
        None,
        ["--max_tokens_per_microbatch", 192, "--prefix_sharing", "False"],
    ),
    "two ranks, one pair per row": (2, ["--packing", "False"]),
    "two replicas, recomputed": (2, ["--replicas", 2, "--activation_checkpointing", "True"]),
}
LORA_PAIR_LAYOUTS: Layouts = {
    "two ranks, unpacked, offloaded": (2, ["--packing", "False", "--cpu_offload", "True"])
}


def write_pairs(folder: Path, num_rows: int = 23) -> Path:
    """Pairs of very unequal lengths, with margins and grades."""
    rows = [
        {
            "prompt": "12 " * (1 + i % 7),
            "chosen": "hello " * (i % 4 + 1),
            "rejected": "hell" * (1 + i % 5),
            "margin": i % 3 / 4,
            "chosen_score": i % 4,
            "rejected_score": -(i % 5),
        }
        for i in range(num_rows)
    ]
    path = folder / "pairs.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def pair_flags(tmp_path: Path) -> list[object]:
    model, _ = copy_task(tmp_path)
    data = write_pairs(tmp_path)
    flags: list[object] = ["--model", model, "--dataset", data, "--num_steps", 2]
    flags += ["--pairs_per_step", 9, "--max_sequence_tokens", 96, "--learning_rate", 1e-4]
    flags += ["--warmup_steps", 0, "--eval_dataset", data, "--export_dtype", "float32"]
    return [*flags, "--cache_dir", tmp_path / "cache"]


@pytest.mark.timeout(600)
@pytest.mark.parametrize("lora", [False, True])
def test_dpo(tmp_path: Path, lora: bool) -> None:
    """P13, P25, P26: as above, and the reference's log-probs may be cached or computed anew."""
    flags = pair_flags(tmp_path)
    loss = math.log(2)
    if lora:  # [D3]: the baselines of kto_pair are those of the whole step
        ((ranks, layout),) = LORA_PAIR_LAYOUTS.values()
        layouts: Layouts = {"live, offloaded": (ranks, [*layout, "--reference", "live"])}
        rows = check("dpo.py", [*flags, *LORA, "--loss", "kto_pair"], tmp_path, layouts)
        loss = 1.0
    else:
        ranks, layout = PAIR_LAYOUTS["two replicas, recomputed"]
        layouts = {"live, two replicas": (ranks, [*layout, "--reference", "live"])}
        layouts |= {name: how for name, how in PAIR_LAYOUTS.items() if "replicas" not in name}
        rows = check("dpo.py", [*flags, "--sft_coef", 0.1], tmp_path, layouts)
        loss += 0.1 * rows[0]["eval/sft_loss"]
        assert rows[1]["policy/chosen_kl"] == pytest.approx(0, abs=1e-9)
    assert rows[0]["eval/loss"] == pytest.approx(loss, abs=1e-6)
    assert (rows[0]["eval/ties"], rows[0]["eval/accuracy"]) == (1, 0)
    assert rows[0]["eval/margin"] == pytest.approx(0, abs=1e-6)
    assert rows[-1]["eval/loss"] < rows[0]["eval/loss"]
    assert rows[-1]["policy/chosen_kl"] > 1e-6


@pytest.mark.timeout(600)
@pytest.mark.parametrize("lora", [False, True])
def test_reward_model(tmp_path: Path, lora: bool) -> None:
    """P13, P28, P31: as above; the random head is the same on any number of ranks."""
    flags = [*pair_flags(tmp_path), "--label_smoothing", 0.1, "--center_coef", 0.01]
    if lora:
        rows = check("reward_model.py", [*flags, *LORA], tmp_path, LORA_PAIR_LAYOUTS)
    else:
        rows = check("reward_model.py", flags, tmp_path, PAIR_LAYOUTS)
    assert rows[-1]["eval/loss"] < rows[0]["eval/loss"]
    assert -1 <= rows[0]["eval/grade_correlation"] <= 1
