"""sft.py as users run it: preview, mixtures, epochs, LoRA, cached data."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

import sft
from tests.launch import launch, metrics, same_every_time
from tests.tiny import make_tiny_model


def chats(folder: Path, name: str, answer: str, num_rows: int) -> Path:
    path = folder / name
    rows = [
        {
            "messages": [
                {"role": "user", "content": f"hi {i}"},
                {"role": "assistant", "content": f"{answer} {i}"},
                {"role": "user", "content": "12"},
                {"role": "assistant", "content": answer},
            ]
        }
        for i in range(num_rows)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def flags(folder: Path, *datasets: object) -> list[object]:
    model = make_tiny_model(folder / "model")
    return [
        *("--model", model, "--dataset", *datasets, "--cache_dir", folder / "cache"),
        *("--num_steps", 2, "--sequences_per_step", 4, "--max_sequence_tokens", 128),
    ]


def test_preview_shows_what_is_trained_and_leaves_nothing(tmp_path: Path) -> None:
    data = chats(tmp_path, "a.jsonl", "hello", 5)
    out = tmp_path / "out"
    base = [*flags(tmp_path, data), "--output_dir", out, "--preview", 2]
    answer = launch("sft.py", *base)
    assert answer.returncode == 0, answer.stderr
    assert answer.stdout.count("---- example") == 2
    assert "«hello 0<|im_end|>»" in answer.stdout and "«hello<|im_end|>»" in answer.stdout
    assert "hello 2" not in answer.stdout
    assert not out.exists() and not (tmp_path / "cache").exists()
    answer = launch("sft.py", *base, "--train_on", "last_turn", ranks=2)
    assert answer.returncode == 0, answer.stderr
    assert answer.stdout.count("«hello<|im_end|>»") == 2 and "«hello 0" not in answer.stdout


def test_mixture_slices_epochs_and_cache(tmp_path: Path) -> None:
    """P09: the second run finds the tokenised data and is the same, step by step."""
    first = chats(tmp_path, "a.jsonl", "hello", 10)
    second = chats(tmp_path, "b.jsonl", "bye", 6)
    base = [*flags(tmp_path, f"{first}[:8]", second), "--dataset_weights", 3, 1]
    base += ["--num_epochs", 2.5, "--eval_dataset", f"{first}[80%:]", "--lr_schedule", "wsd"]
    logged = []
    for name in ("one", "two"):
        answer = launch("sft.py", *base, "--output_dir", tmp_path / name)
        assert answer.returncode == 0, answer.stderr
        assert ("from the cache" in answer.stdout) == (name == "two")
        logged.append([same_every_time(row) for row in metrics(tmp_path / name)])
    assert logged[0] == logged[1]
    assert logged[0][-1]["step"] == 9  # 2.5 epochs of 14 rows, 4 a step, rounded up
    assert logged[0][-1]["data/epoch"] == 9 * 4 / 14
    assert logged[0][-1]["eval/loss"] < logged[0][0]["eval/loss"]
    assert json.loads((tmp_path / "one" / "args.json").read_text())["num_steps"] == 9


def test_lora_leaves_a_merged_model_and_an_adapter(tmp_path: Path) -> None:
    data = chats(tmp_path, "a.jsonl", "hello", 8)
    base = flags(tmp_path, data)
    out = tmp_path / "out"
    lora = ["--lora_rank", 4, "--lora_alpha", 8, "--lora_target", "q_proj", "down_proj"]
    answer = launch(
        "sft.py", *base, *lora, "--learning_rate", 1e-2, "--output_dir", out, "--export_dtype",
        "float32",
    )  # fmt: skip
    assert answer.returncode == 0, answer.stderr
    start = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    merged = AutoModelForCausalLM.from_pretrained(out / "final")
    before, after = start.state_dict(), merged.state_dict()
    changed = {name.split(".")[-2] for name in before if not torch.equal(before[name], after[name])}
    assert changed == {"q_proj", "down_proj"}
    ids = torch.arange(20)[None]
    adapted = PeftModel.from_pretrained(start, out / "adapter")
    assert torch.allclose(adapted(ids).logits, merged(ids).logits, atol=1e-5)


def test_mistakes_are_named_before_anything_starts(tmp_path: Path) -> None:
    data = chats(tmp_path, "a.jsonl", "hello", 3)
    base: dict[str, Any] = {"model": "m", "output_dir": "o", "dataset": ("d",)}
    for extra in (
        {"dataset_weights": (1.0, 2.0)},
        {"dataset_weights": (0.0,)},
        {"lora_target": ("q_proj",)},
        {"lora_rank": 0},
        {"chat_template": "nowhere"},
        {"chat_template_args": "[1]"},
        {"chat_template_args": "{"},
        {"num_epochs": 0.0},
        {"decay_ratio": 2.0},
        {"warmup_ratio": -0.1},
        {"preview": -1},
    ):
        name, value = next(iter(extra.items()))
        with pytest.raises(ValueError, match=rf"--{name}=.*{re.escape(str(value))}"):
            sft.Args(**base | extra)
    for extra, message in {
        ("--dataset", f"{data}[5:]"): "[5:]",
        ("--lora_rank", "2", "--lora_target", "lm_head"): "--lora_target=lm_head",
    }.items():
        answer = launch("sft.py", *flags(tmp_path, data), "--output_dir", tmp_path / "out", *extra)
        assert answer.returncode != 0 and message in answer.stderr, (extra, answer.stderr)
        assert "Traceback" not in answer.stderr, answer.stderr
