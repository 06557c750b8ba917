"""reward_model.py as users run it: what `final` holds is what was trained."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

import reward_model
from tests.launch import launch, metrics
from tests.tiny import CHAT_TEMPLATE, make_tiny_model, make_tokenizer

TEMPLATE = CHAT_TEMPLATE.replace("<|im_end|>", "{% if mood == 'glad' %}!{% endif %}<|im_end|>")


def write_rows(path: Path, rows: list[Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def train(model: Path, data: Path, out: Path, *more: object) -> list[dict[str, float]]:
    flags: list[object] = ["--model", model, "--dataset", data, "--eval_dataset", data]
    flags += ["--output_dir", out, "--num_steps", 1, "--pairs_per_step", 4, "--cache_dir", "None"]
    answer = launch("reward_model.py", *flags, "--max_sequence_tokens", 200, *more)
    assert answer.returncode == 0, answer.stderr[-3000:]
    return metrics(out)


def mean_score(folder: Path, texts: list[str]) -> float:
    """Mean of what transformers makes of texts, one by one."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForSequenceClassification.from_pretrained(folder)
    with torch.no_grad():
        batches = [tokenizer(t, add_special_tokens=False, return_tensors="pt") for t in texts]
        scores = [model(input_ids=batch["input_ids"]).logits.item() for batch in batches]
    return sum(scores) / len(scores)


@pytest.mark.timeout(300)
def test_final_reads_conversations_as_they_were_trained(tmp_path: Path) -> None:
    """--chat_template_args were lost in `final`, so that it scored other texts."""
    model = make_tiny_model(tmp_path / "m", tokenizer=make_tokenizer(chat_template=TEMPLATE))
    chosen = [{"role": "assistant", "content": f"hello {i}"} for i in range(6)]
    rows = [{"prompt": f"hi {i}", "chosen": [c], "rejected": "12"} for i, c in enumerate(chosen)]
    data = write_rows(tmp_path / "pairs.jsonl", rows)
    more = ["--chat_template_args", '{"mood": "glad"}', "--center_dataset", data]
    logged = train(model, data, tmp_path / "out", *more)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out" / "final")
    texts = [
        tokenizer.apply_chat_template([{"role": "user", "content": f"hi {i}"}, c], tokenize=False)
        for i, c in enumerate(chosen)
    ]
    assert all(text.count("!") == 2 for text in texts)
    mean = mean_score(tmp_path / "out" / "final", texts)
    assert mean == pytest.approx(logged[-1]["eval/chosen_score"], abs=1e-5)
    config = json.loads((tmp_path / "out" / "final" / "config.json").read_text())
    assert config["score_bias"] == pytest.approx(-mean, abs=1e-5)
    assert tokenizer.pad_token == "<pad>"


@pytest.mark.timeout(300)
def test_final_of_whole_texts_has_no_template(tmp_path: Path) -> None:
    """A loader would have written them as a user's turn, which the model has never seen."""
    model = make_tiny_model(tmp_path / "m")
    texts = [f"\n\nHuman: hi {i}\n\nAssistant: hello {i}" for i in range(6)]
    rows = [{"chosen": text, "rejected": text[:-7] + "12"} for text in texts]
    data = write_rows(tmp_path / "pairs.jsonl", rows)
    logged = train(model, data, tmp_path / "out")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out" / "final")
    assert tokenizer.chat_template is None
    mean = mean_score(tmp_path / "out" / "final", [f"<bos>{text}<eos>" for text in texts])
    assert mean == pytest.approx(logged[-1]["eval/chosen_score"], abs=1e-5)


def test_mistakes_are_told_at_once() -> None:
    cases: list[tuple[dict[str, Any], str]] = [
        ({"center_coef": -1.0}, "--center_coef=-1.0"),
        ({"label_smoothing": 0.5}, "--label_smoothing=0.5"),
        ({"pairs_per_step": 0}, "--pairs_per_step=0"),
        ({"max_sequence_tokens": 9000}, "both sides of a pair"),
    ]
    for settings, message in cases:
        with pytest.raises(ValueError, match=message):
            reward_model.Args(model="m", output_dir="o", dataset=("d",), **settings)
