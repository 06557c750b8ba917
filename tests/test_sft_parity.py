"""SFT against a peer: TRL's SFTTrainer on the same rows gives the same tokens, loss and gradients.

The peer runs its own code from the data file to the optimizer step: tokenization, masks, collator,
packing, loss scaling. Both sides read the same file and the same checkpoint.
"""

import json
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedTokenizerBase

from common.data import TokenRow, load_sft_rows
from common.dist import DistEnv, setup
from common.logprobs import compute_logprobs
from common.model import load_model, load_tokenizer
from common.packing import pack, plan_microbatches
from sft import batch_indices
from tests.launch import metrics, run
from tests.tiny import CHAT_TEMPLATE, full, make_tiny_model, make_tokenizer

trl = pytest.importorskip("trl")

MAX_TOKENS = 256
# Measured: loss 2e-7, gradients 2e-6 of the parameter's largest one.
LOSS_TOLERANCE = 1e-6
GRADIENT_TOLERANCE = 2e-5

Row = dict[str, Any]
LAUNCHER = ("RANK", "LOCAL_RANK", "WORLD_SIZE")

# ---- rows ----------------------------------------------------------------------------------------

# Very unequal lengths and shares of trained tokens: a mean of per-row or per-microbatch means would
# differ from the mean over all trained tokens. A completion may spell its EOS. No token merges over
# a prompt's end: there TRL tokenizes prompt and completion as one text and drops the prompt's last
# token, while we keep the prompt's ids, from which a rollout starts.
COMPLETIONS: list[Row] = [
    {"prompt": "hello", "completion": " x"},
    {"prompt": "a long question: " + "hello 12 " * 9, "completion": "no"},
    {"prompt": "q ", "completion": "hello " * 12 + "\n\n12 naïve 日本 "},
    {"prompt": "2+2", "completion": " is 4<eos>"},
    {"prompt": "hello hello\n", "completion": "12 12 12"},
]
TEXTS: list[Row] = [
    {"text": "hello 12 " * 8},
    {"text": "z"},
    {"text": "two\nlines, naïve 日本 "},
    {"text": "spells its end<eos>"},
    {"text": "<bos>spells its start"},
]


def turns(*contents: str, system: str | None = None) -> list[dict[str, str]]:
    """User and assistant in turn, after an optional system message."""
    roles = ("user", "assistant")
    chat = [{"role": roles[i % 2], "content": content} for i, content in enumerate(contents)]
    return ([{"role": "system", "content": system}] if system else []) + chat


# An assistant turn without text is left out: TRL trains its stop token, our loader drops the row.
CHATS: list[Row] = [
    {"messages": turns("hello", "12")},
    {"messages": turns("q1", "hello " * 9, "q2", "no", "q3", "12\n\n12 ", system="be brief")},
    {"messages": turns("hello 12 " * 7, "a", "and?", " b ")},
    {"messages": turns("says little", ".", "well?", "日本")},
    {"messages": turns("ends with a question", "yes", "why?")},
]
# Only the completion's turns are targets, not the assistant turn in the prompt.
CHAT_COMPLETIONS: list[Row] = [
    {"prompt": turns("hello"), "completion": turns("", "12 hello")[1:]},
    {"prompt": turns("q1", "a1", "q2", system="be brief"), "completion": turns("", "a2")[1:]},
    {"prompt": turns("q1 " * 9, "a1", "q2"), "completion": turns("", "a2", "q3", "a3 " * 5)[1:]},
]
# The markers enclose what a rollout would sample: the content and the stop token, not the newline
# after it. ({{ '\n' }}: jinja drops a plain newline after a block.)
MARKED_TEMPLATE = CHAT_TEMPLATE.replace(
    "{{ m['content'] }}<|im_end|>\n",
    "{% if m['role'] == 'assistant' %}{% generation %}{{ m['content'] }}<|im_end|>"
    "{% endgeneration %}{% else %}{{ m['content'] }}<|im_end|>{% endif %}{{ '\n' }}",
)


def write(path: Path, rows: Sequence[Row]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


# ---- both sides ----------------------------------------------------------------------------------


@dataclass
class Result:
    """What one side computes of a file of rows."""

    rows: list[TokenRow]
    losses: list[float]
    """of each optimizer step"""
    gradients: dict[str, Tensor]
    """of the last step, before clipping"""
    loss_tokens: int
    """of the last step"""


@contextmanager
def one_process() -> Iterator[DistEnv]:
    """Our process group of one rank. TRL runs outside: it would take it for a launcher's."""
    hook = sys.excepthook
    try:
        yield setup(timeout_s=60)
    finally:
        dist.destroy_process_group()
        sys.excepthook = hook
        for name in LAUNCHER:
            os.environ.pop(name, None)


@pytest.fixture(autouse=True)
def no_launcher() -> Iterator[None]:
    """Hide what another test's engine has left in the environment and looks like torchrun."""
    saved = {name: os.environ.pop(name) for name in LAUNCHER if name in os.environ}
    yield
    os.environ.update(saved)


def ours(
    model_path: Path,
    data: Path,
    *,
    tokenizer: PreTrainedTokenizerBase | None = None,
    max_tokens: int = MAX_TOKENS,
    packing: bool = True,
) -> Result:
    """One step of sft.py over all rows."""
    tokenizer = tokenizer or load_tokenizer(str(model_path))
    rows = our_rows(data, tokenizer)
    loss_tokens = sum(sum(row.loss_mask) for row in rows)
    lengths = [len(row.input_ids) for row in rows]
    plan = plan_microbatches(lengths, world_size=1, max_tokens=max_tokens, packing=packing)
    with one_process() as env:
        model = load_model(str(model_path), env, dtype=torch.float32)
        total = 0.0
        for members in plan[0]:
            row = pack(
                members, [rows[m].input_ids for m in members], [rows[m].loss_mask for m in members]
            )
            loss = -compute_logprobs(model, row.to(env.device))[0].sum() / loss_tokens
            loss.backward()
            total += loss.item()
        gradients = {n: full(p.grad).cpu() for n, p in model.named_parameters()}
    return Result(rows, [total], gradients, loss_tokens)


def our_rows(data: Path, tokenizer: PreTrainedTokenizerBase) -> list[TokenRow]:
    rows, _ = load_sft_rows([str(data)], tokenizer, max_tokens=MAX_TOKENS)
    return [rows[i] for i in range(len(rows))]


def peer_trainer(
    model_path: Path,
    data: Path,
    *,
    tokenizer: PreTrainedTokenizerBase | None = None,
    attention: str = "eager",
    trainer_class: Any = trl.SFTTrainer,
    **settings: Any,
) -> Any:
    """A real SFTTrainer in float32 that takes the rows in the file's order."""
    from datasets import load_dataset

    folder = data.parent / "peer"
    model = AutoModelForCausalLM.from_pretrained(
        model_path, dtype=torch.float32, attn_implementation=attention
    )
    defaults: dict[str, Any] = {"max_steps": 1, "lr_scheduler_type": "constant", "max_grad_norm": 0}
    config = trl.SFTConfig(
        output_dir=str(folder),
        train_sampling_strategy="sequential",
        bf16=False,
        use_cpu=True,
        gradient_checkpointing=False,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        **defaults | {"max_length": MAX_TOKENS} | settings,
    )
    cache = str(folder / "cache")
    return trainer_class(
        model=model,
        args=config,
        train_dataset=load_dataset("json", data_files=str(data), split="train", cache_dir=cache),
        processing_class=tokenizer or load_tokenizer(str(model_path)),
    )


def peer(model_path: Path, data: Path, **settings: Any) -> tuple[Result, Any]:
    """Train with TRL; also the trainer, for its log and its weights."""
    losses: list[float] = []
    gradients: dict[str, Tensor] = {}
    counts: list[int] = []

    class Recorded(trl.SFTTrainer):
        def training_step(
            self, model: Any, inputs: Any, num_items_in_batch: Any = None, **kwargs: Any
        ) -> Tensor:
            """TRL's forward and backward; the gradients are those accumulated so far."""
            loss = super().training_step(model, inputs, num_items_in_batch, **kwargs)
            step = self.state.global_step
            losses.extend([0.0] * (step + 1 - len(losses)))
            losses[step] += loss.item()
            gradients.update({n: p.grad.clone() for n, p in model.named_parameters()})
            counts.append(int(num_items_in_batch))
            return loss

    trainer = peer_trainer(model_path, data, trainer_class=Recorded, **settings)
    trainer.train()
    return Result(peer_rows(trainer), losses, gradients, counts[-1]), trainer


def peer_rows(trainer: Any) -> list[TokenRow]:
    """TRL's own preparation of the rows, unpacked. Its labels name a sequence's first token, which
    the shift by one then drops; our masks say so."""
    rows = []
    for example in trainer.train_dataset:
        start = 0
        for length in example.get("seq_lengths") or [len(example["input_ids"])]:
            ids, labels = (example[key][start : start + length] for key in ("input_ids", "labels"))
            rows.append(TokenRow(ids, [t > 0 and label != -100 for t, label in enumerate(labels)]))
            start += length
    return rows


# ---- comparison ----------------------------------------------------------------------------------


def assert_same_rows(rows: Sequence[TokenRow], expected: Sequence[TokenRow]) -> None:
    assert len(rows) == len(expected)
    for i, (row, other) in enumerate(zip(rows, expected, strict=True)):
        assert row.input_ids == other.input_ids, f"row {i}"
        assert row.loss_mask == other.loss_mask, f"row {i}"


def assert_same_step(result: Result, expected: Result) -> None:
    assert result.loss_tokens == expected.loss_tokens
    assert result.losses == pytest.approx(expected.losses, rel=LOSS_TOLERANCE)
    assert result.gradients.keys() == expected.gradients.keys()
    for name, gradient in expected.gradients.items():
        largest = gradient.abs().max()
        assert largest > 0, name
        error = (result.gradients[name] - gradient).abs().max()
        assert error <= GRADIENT_TOLERANCE * largest, f"{name}: {error / largest:.2g}"


def tiny_model(folder: Path, arch: str = "qwen3", **settings: Any) -> Path:
    """With the usual 0.02 attention is so flat that a leak between rows would not show."""
    return make_tiny_model(folder / "model", arch, initializer_range=0.15, **settings)


# ---- one step ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "arch, settings",
    [
        ("qwen3", {}),
        ("llama", {"tie_word_embeddings": False}),
        ("gemma2", {"sliding_window": 8}),  # caps its scores and logits
    ],
)
def test_completions_as_text(tmp_path: Path, arch: str, settings: Row) -> None:
    model = tiny_model(tmp_path, arch, flavour="no_template", **settings)
    data = write(tmp_path / "rows.jsonl", COMPLETIONS)
    expected, _ = peer(model, data, per_device_train_batch_size=len(COMPLETIONS))
    result = ours(model, data)
    assert_same_rows(result.rows, expected.rows)
    assert_same_step(result, expected)


def test_completions_in_microbatches(tmp_path: Path) -> None:
    """P13: the loss was a mean of microbatch means. TRL accumulates padded batches of two rows."""
    model = tiny_model(tmp_path, flavour="no_template")
    data = write(tmp_path / "rows.jsonl", COMPLETIONS)
    expected, trainer = peer(
        model, data, per_device_train_batch_size=2, gradient_accumulation_steps=3
    )
    assert trainer.state.global_step == 1
    assert_same_step(ours(model, data, packing=False), expected)
    assert_same_step(ours(model, data, max_tokens=100), expected)


def test_empty_prompts(tmp_path: Path) -> None:
    """With an empty prompt only the last character of a completion was trained."""
    model = tiny_model(tmp_path, flavour="no_template")
    rows = [{"prompt": "", "completion": "from nothing"}, {"prompt": "a", "completion": "b"}]
    data = write(tmp_path / "rows.jsonl", rows)
    expected, _ = peer(model, data)
    result = ours(model, data)
    assert_same_rows(result.rows, expected.rows)
    assert_same_step(result, expected)


@pytest.mark.parametrize("flavour", ["distinct", "pad_is_eos"])
@pytest.mark.parametrize(
    "rows", [CHATS, CHAT_COMPLETIONS], ids=["messages", "prompt and completion"]
)
def test_chats(tmp_path: Path, rows: list[Row], flavour: Any) -> None:
    """Masks from rendered prefixes (ours) and from markers in the template (TRL's) are the same."""
    model = tiny_model(tmp_path, flavour=flavour)
    data = write(tmp_path / "rows.jsonl", rows)
    expected, _ = peer(
        model,
        data,
        tokenizer=make_tokenizer(flavour, chat_template=MARKED_TEMPLATE),
        assistant_only_loss=True,
        per_device_train_batch_size=len(rows),
    )
    result = ours(model, data)
    assert_same_rows(result.rows, expected.rows)
    assert_same_step(result, expected)


@pytest.mark.parametrize("add_bos", [True, False])
def test_texts(tmp_path: Path, add_bos: bool) -> None:
    tokenizer = make_tokenizer(add_bos=add_bos)
    model = tiny_model(tmp_path, tokenizer=tokenizer)
    # TRL adds a BOS to a text that spells its own.
    rows = TEXTS[:-1] if add_bos else TEXTS
    data = write(tmp_path / "rows.jsonl", rows)
    expected, _ = peer(model, data, per_device_train_batch_size=len(rows))
    result = ours(model, data)
    eos = tokenizer.eos_token_id
    assert all(row.input_ids.count(eos) == 1 and row.input_ids[-1] == eos for row in result.rows)
    assert_same_rows(result.rows, expected.rows)
    assert_same_step(result, expected)


@pytest.mark.parametrize(
    "arch, attention", [("qwen3", "sdpa"), ("qwen3", "eager"), ("gemma2", "eager")]
)
@pytest.mark.parametrize("kind", ["completions", "chats"])
def test_packed_rows(tmp_path: Path, arch: str, attention: str, kind: str) -> None:
    """P16, P17, P18: packed samples saw each other. TRL's sdpa is right here because SFTTrainer
    passes no attention mask and use_cache=False; Gemma 2 needs eager for its soft caps."""
    settings = {"sliding_window": 8} if arch == "gemma2" else {}
    model = tiny_model(tmp_path, arch, **settings)
    tokenizer = make_tokenizer(chat_template=MARKED_TEMPLATE if kind == "chats" else None)
    data = write(tmp_path / "rows.jsonl", CHATS if kind == "chats" else COMPLETIONS)
    expected, trainer = peer(
        model,
        data,
        tokenizer=tokenizer,
        attention=attention,
        packing=True,
        packing_strategy="bfd",
        padding_free=True,
        assistant_only_loss=kind == "chats",
        per_device_train_batch_size=8,
    )
    # All rows in one forward, some of them packed by TRL.
    packed = [len(example["seq_lengths"]) for example in trainer.train_dataset]
    assert max(packed) > 1 and sum(packed) == len(expected.rows)

    def key(row: TokenRow) -> list[int]:
        return row.input_ids

    one_row, several, unpacked = (
        ours(model, data, tokenizer=tokenizer, **layout)
        for layout in ({"max_tokens": 2000}, {"max_tokens": 200}, {"packing": False})
    )
    assert_same_rows(sorted(one_row.rows, key=key), sorted(expected.rows, key=key))
    for result in (one_row, several, unpacked):
        assert_same_step(result, expected)
    assert_same_step(one_row, unpacked)


# ---- published chat templates --------------------------------------------------------------------


@pytest.mark.parametrize(
    "name, extra",
    [
        # What TRL's variants of the templates train beyond our rule, which is the content and its
        # first stop token: the newline before (Qwen 2.5; it belongs to the prompt a rollout starts
        # from) or after it, and a second end of the last turn. They are never sampled.
        ("llama3", set()),
        ("qwen2_5", {("<|im_end|>", "\n"), ("t", "\n")}),
        ("qwen3_instruct_2507", {("<|im_end|>", "\n")}),
        ("gemma", {("<end_of_turn>", "\n")}),
        ("phi3", {("<|end|>", "\n"), ("\n", "<eos>")}),
    ],
)
def test_masks_of_published_templates(
    tmp_path: Path, name: str, extra: set[tuple[str, str]]
) -> None:
    """Same tokens; TRL's targets, from the markers of its own authors, are ours plus those named
    above as (token before, token)."""
    template = (Path(trl.__file__).parent / "chat_templates" / f"{name}.jinja").read_text()
    assert "generation %}" not in template
    tokenizer = make_tokenizer(chat_template=template)
    special = ["<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<start_of_turn>"]
    special += ["<end_of_turn>", "<|system|>", "<|user|>", "<|assistant|>", "<|end|>"]
    tokenizer.add_special_tokens({"additional_special_tokens": special})
    model = tiny_model(tmp_path, tokenizer=tokenizer)
    # Gemma's template refuses system messages.
    chats = [c for c in CHATS if name != "gemma" or c["messages"][0]["role"] != "system"]
    data = write(tmp_path / "rows.jsonl", chats)
    result = our_rows(data, tokenizer)
    expected = peer_rows(peer_trainer(model, data, assistant_only_loss=True))
    assert len(result) == len(expected) == len(chats)
    found = set()
    for row, theirs in zip(result, expected, strict=True):
        assert row.input_ids == theirs.input_ids
        tokens = [tokenizer.decode([i]) for i in row.input_ids]
        for t, (mine, yours) in enumerate(zip(row.loss_mask, theirs.loss_mask, strict=True)):
            assert yours or not mine, f"token {t}"
            if yours and not mine:
                found.add((tokens[t - 1], tokens[t]))
    assert found == extra


# ---- whole runs ----------------------------------------------------------------------------------


def row_order(num_rows: int, *, steps: int, rows_per_step: int, seed: int) -> list[int]:
    """Rows of a whole run, as sft.py takes them."""
    settings = {"sizes": (num_rows,), "weights": None, "rows_per_step": rows_per_step, "seed": seed}
    return [i for step in range(1, steps + 1) for i in batch_indices(step, **settings)]


@pytest.mark.parametrize(
    "kind, flags, settings",
    [
        (
            "completions",
            ["--lr_schedule", "constant", "--learning_rate", 1e-4, "--packing", "False"],
            {"lr_scheduler_type": "constant", "learning_rate": 1e-4},
        ),
        (
            "chats",
            ["--lr_schedule", "cosine", "--learning_rate", 1e-4, "--max_grad_norm", 50]
            + ["--weight_decay", 0.1],
            {
                **{"lr_scheduler_type": "cosine", "learning_rate": 1e-4},
                **{"max_grad_norm": 50, "weight_decay": 0.1},
            },
        ),
    ],
    ids=["completions, constant", "chats, cosine, weight decay"],
)
def test_runs_of_three_steps(tmp_path: Path, kind: str, flags: list[object], settings: Row) -> None:
    """sft.py from the command line and TRL's trainer log the same and end with the same weights."""
    steps, rows_per_step, seed = 3, 4, 5
    chats = kind == "chats"
    model = tiny_model(tmp_path, flavour="distinct" if chats else "no_template", seed=1)
    rows = CHATS if chats else COMPLETIONS
    data = write(tmp_path / "rows.jsonl", rows)
    out = tmp_path / "ours"
    answer = run(
        "sft.py",
        *("--model", model, "--dataset", data, "--output_dir", out, "--num_steps", steps),
        *("--sequences_per_step", rows_per_step, "--seed", seed, "--warmup_steps", 0),
        *("--max_sequence_tokens", MAX_TOKENS, "--max_tokens_per_microbatch", 300),
        *("--export_dtype", "float32", "--cache_dir", tmp_path / "cache", *flags),
    )
    assert answer.returncode == 0, answer.stderr[-3000:]

    order = row_order(len(rows), steps=steps, rows_per_step=rows_per_step, seed=seed)
    assert order != sorted(order) and len(order) > len(rows)  # shuffled, into the next epoch
    expected, trainer = peer(
        model,
        write(tmp_path / "ordered.jsonl", [rows[i] for i in order]),
        tokenizer=make_tokenizer(chat_template=MARKED_TEMPLATE) if chats else None,
        assistant_only_loss=chats,
        max_steps=steps,
        per_device_train_batch_size=rows_per_step,
        **{"adam_beta2": 0.95, "max_grad_norm": 1.0} | settings,
    )
    logged = [entry for entry in trainer.state.log_history if "grad_norm" in entry]
    rows_of_metrics = metrics(out)
    assert len(logged) == len(rows_of_metrics) == len(expected.losses) == steps
    for row, loss, log in zip(rows_of_metrics, expected.losses, logged, strict=True):
        assert row["policy/loss"] == pytest.approx(loss, rel=LOSS_TOLERANCE)
        assert row["optim/grad_norm"] == pytest.approx(log["grad_norm"], rel=1e-5)
        assert row["optim/learning_rate"] == pytest.approx(log["learning_rate"])
        assert row["policy/entropy"] == pytest.approx(log["entropy"], rel=1e-5)
    before, after = (load_file(p / "model.safetensors") for p in (model, out / "final"))
    weights = trainer.model.state_dict()
    assert after.keys() == before.keys()
    for name, tensor in after.items():
        # AdamW divides a gradient by its own size, so rounding decides where a gradient is almost
        # nothing: single weights differ by more than the whole.
        error, update = tensor - weights[name], weights[name] - before[name]
        assert update.abs().max() > 1e-4, name
        assert error.abs().max() <= 1e-5, name
        assert error.norm() <= 1e-3 * update.norm(), name
