"""Reward models: scores of packed rows against plain transformers, and what other loaders read."""

import json
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from transformers import (
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    PreTrainedModel,
    pipeline,
)

from common.dist import DistEnv
from common.logprobs import compute_scores, compute_values
from common.lora import LoraSettings
from common.model import (
    choose_pad_token,
    clip_grad_norm,
    export_adapter,
    export_hf,
    load_model,
    load_tokenizer,
)
from common.packing import PackedRow, pack
from common.weight_sync import stream_adapters, stream_full_tensors
from tests import test_model
from tests.launch import environment
from tests.test_model import ARCHITECTURES, perturb_adapters
from tests.tiny import Flavour, full, make_tiny_model, make_tokenizer

env = test_model.env  # the fixture

ROOT = Path(__file__).parent.parent
SETTINGS = LoraSettings(rank=3, alpha=7)  # a scaling that no rounding to 1 or 2 could pass for
WEIGHTS = [1.0, -2.0, 0.5, 3.0, -0.25, 1.5]  # of the sequences' scores, in the sum that is trained
PROMPTS = [2, 4, 1, 40, 10, 11]  # their tokens; the third and the fourth have no response
# Turns end with the EOS token, and so does the conversation.
EOS_TEMPLATE = (
    "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}{{ eos_token }}{% endfor %}"
)


def sequences() -> list[list[int]]:
    """Six sequences; some end with the tiny models' padding token, the last two share 9 tokens."""
    generator = random.Random(0)
    ids = [[generator.randrange(320) for _ in range(n)] for n in (5, 23, 1, 40, 19, 12)]
    ids[5][:9] = ids[4][:9]
    ids[1][-1] = ids[3][-1] = ids[3][-2] = 2
    return ids


def scored_row(order: list[int] | None = None, *, shared: bool = False) -> PackedRow:
    ids = sequences()
    order = list(range(6)) if order is None else order
    counts = [9 if shared and i == 5 else 0 for i in order]
    masks = [[False] * len(ids[i]) for i in order]
    return pack(order, [ids[i] for i in order], masks, shared=counts)


def value_row(order: list[int] | None = None, *, shared: bool = False) -> PackedRow:
    """The same sequences with responses of which every token has a value."""
    ids = sequences()
    order = list(range(6)) if order is None else order
    masks = [[t >= PROMPTS[i] for t in range(len(ids[i]))] for i in order]
    counts = [9 if shared and i == 5 else 0 for i in order]
    return pack(order, [ids[i] for i in order], masks, shared=counts)


def tiny(folder: Path, name: str = "qwen3", *, head: bool = False, **overrides: Any) -> str:
    """A language model or, with a head, a reward model as transformers writes it."""
    settings = {"initializer_range": 0.15} | ARCHITECTURES[name] | overrides
    path = make_tiny_model(folder, name.split("-")[0], **settings)
    if head:
        model = plain(path)
        torch.manual_seed(3)
        torch.nn.init.normal_(model.score.weight, std=0.3)
        model.save_pretrained(path)
    return str(path)


def plain(path: str | Path) -> PreTrainedModel:
    # eager: transformers' sdpa drops Gemma 2's soft-capping
    return AutoModelForSequenceClassification.from_pretrained(
        path, num_labels=1, dtype=torch.float32, attn_implementation="eager"
    ).eval()


def plain_scores(model: PreTrainedModel, ids: list[list[int]] | None = None) -> Tensor:
    """One sequence at a time: the head's product with the last token's hidden state."""
    scores = []
    for sequence in sequences() if ids is None else ids:
        hidden = model.base_model(torch.tensor([sequence]), use_cache=False).last_hidden_state
        scores.append(model.score(hidden[0, -1].float())[0])
    return torch.stack(scores)


def exported(model: PreTrainedModel, source: str, path: Path, **settings: Any) -> Path:
    tokenizer = load_tokenizer(source)
    tokenizer.pad_token = choose_pad_token(tokenizer, [1, 4])
    tensors = stream_full_tensors(model, dtype=torch.float32)
    settings |= {"path": path, "source": source, "stop_token_ids": [1, 4]}
    export_hf(model, tokenizer, tensors, **settings)
    return path


def assert_same_gradients(model: PreTrainedModel, expected: dict[str, Tensor]) -> None:
    for name, parameter in model.named_parameters():
        ours, theirs = full(parameter.grad), expected[name]
        assert (ours - theirs).abs().max() <= 1e-5 * theirs.abs().max() + 1e-6, name


# ---- scores and gradients ------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name, fsdp", [*((name, False) for name in ARCHITECTURES), ("qwen3", True), ("gpt2", True)]
)
def test_scores_and_gradients_equal_plain_ones(
    name: str, fsdp: bool, tmp_path: Path, env: DistEnv
) -> None:
    """P28: the last token is the last one, also where it looks like padding."""
    path = tiny(tmp_path, name, head=True)
    model = load_model(path, env, dtype=torch.float32, head="score", cpu_offload=fsdp)
    assert isinstance(model, FSDPModule) == fsdp
    theirs = plain(path)
    expected = plain_scores(theirs)
    (expected * torch.tensor(WEIGHTS)).sum().backward()
    gradients = {n: p.grad for n, p in theirs.named_parameters()}
    for shared in (False, True):
        scores = compute_scores(model, scored_row(shared=shared))
        assert scores.shape == (6,) and scores.dtype == torch.float32
        assert torch.allclose(scores, expected, atol=2e-5)
        assert len({round(score, 3) for score in scores.tolist()}) == 6
        (scores * torch.tensor(WEIGHTS)).sum().backward()
        assert_same_gradients(model, gradients)
        model.zero_grad()


def test_scores_do_not_depend_on_order_or_company(tmp_path: Path, env: DistEnv) -> None:
    model = load_model(tiny(tmp_path, head=True), env, dtype=torch.float32, head="score")
    with torch.no_grad():
        together = compute_scores(model, scored_row())
        for order in ([5, 0, 3, 1, 4, 2], [2], [4, 3]):
            assert torch.allclose(compute_scores(model, scored_row(order)), together[order])


@pytest.mark.parametrize("flavour", ["distinct", "pad_is_eos", "no_pad"])
@pytest.mark.parametrize("trained", [False, True])
def test_padded_batches_of_transformers_give_our_scores(
    flavour: Flavour, trained: bool, tmp_path: Path, env: DistEnv
) -> None:
    """P28: padding with a token that ends turns moved the score to another token."""
    tokenizer = make_tokenizer(flavour, chat_template=EOS_TEMPLATE)
    path = tiny(tmp_path / "start", head=True, flavour=flavour, tokenizer=tokenizer)
    chats = [
        [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "12 " * n}]
        for n in (1, 9, 4)
    ]
    chats[2] += chats[0]
    ids = [tokenizer.apply_chat_template(chat, return_dict=False) for chat in chats]
    assert all(sequence[-1] == 1 and sequence.count(1) >= 2 for sequence in ids)
    model = load_model(path, env, dtype=torch.float32, head="score", trainable=trained)
    masks = [[False] * len(sequence) for sequence in ids]
    scores = compute_scores(model, pack(range(3), ids, masks)).detach()

    final = exported(model, path, tmp_path / "final")
    classifier, reloaded = plain(final), load_tokenizer(str(final))
    assert reloaded.pad_token == "<pad>"
    for side in ("left", "right"):
        batch = reloaded.pad({"input_ids": ids}, padding_side=side, return_tensors="pt")
        with torch.no_grad():
            assert torch.allclose(classifier(**batch).logits[:, 0], scores, atol=1e-5)
    for sequence, score in zip(ids, scores, strict=True):
        with torch.no_grad():
            alone = classifier(torch.tensor([sequence])).logits[0, 0]
        assert torch.allclose(alone, score, atol=1e-5)


@pytest.mark.parametrize("lora", [None, SETTINGS])
@pytest.mark.parametrize("fsdp", [False, True])
def test_a_rank_without_pairs_takes_part(
    fsdp: bool, lora: LoraSettings | None, tmp_path: Path, env: DistEnv
) -> None:
    path = tiny(tmp_path, head=True)
    model = load_model(path, env, dtype=torch.float32, head="score", cpu_offload=fsdp, lora=lora)
    scores = compute_scores(model, pack([], [], []))
    assert scores.shape == (0,)
    scores.sum().backward()
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            assert not full(parameter.grad).any(), name


def test_bf16_keeps_the_head_exact(tmp_path: Path, env: DistEnv) -> None:
    path = tiny(tmp_path, head=True)
    head = load_file(Path(path) / "model.safetensors")["score.weight"]
    assert not torch.equal(head, head.bfloat16().float())
    exact = compute_scores(load_model(path, env, dtype=torch.float32, head="score"), scored_row())
    for settings in ({}, {"trainable": False}, {"lora": SETTINGS}):
        model = load_model(path, env, dtype=torch.bfloat16, head="score", **settings)
        assert torch.equal(full(model.score.weight), head)
        base = torch.bfloat16 if settings else torch.float32
        assert full(model.get_decoder().norm.weight).dtype == base
        scores = compute_scores(model, scored_row())
        assert scores.dtype == torch.float32
        assert 0 < (scores - exact).abs().max() < 0.05 * (1 + exact.abs().max())
        if "trainable" in settings:
            assert not any(p.requires_grad for p in model.parameters())
            continue
        assert torch.equal(full(model.score.weight), head)  # not the copy in a lower precision
        scores.sum().backward()
        assert full(model.score.weight.grad).dtype == torch.float32


def test_checkpointing_and_compilation_change_nothing(
    tmp_path: Path, env: DistEnv, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The graphs are run as they are; generating code for them would take minutes."""
    compile_in_place = torch.nn.Module.compile
    monkeypatch.setattr(
        torch.nn.Module,
        "compile",
        lambda self, **settings: compile_in_place(self, backend="eager", **settings),
    )
    path, results = tiny(tmp_path, head=True), []
    for settings in ({}, {"activation_checkpointing": True}, {"compile": True}):
        model = load_model(path, env, dtype=torch.float32, head="score", **settings)
        scores = compute_scores(model, scored_row())
        scores.square().sum().backward()
        results.append([scores.detach(), *(p.grad for p in model.parameters())])
    for result in results[1:]:
        for ours, theirs in zip(result, results[0], strict=True):
            assert torch.allclose(ours, theirs, rtol=1e-5, atol=1e-6)


def train(path: str, case: str, env: DistEnv, shares: list[list[int]]) -> dict[str, Any]:
    """Two steps on this rank's microbatches, and all that must not depend on the ranks."""
    dtype, kind = case.split("-")
    critic = kind == "critic"
    model = load_model(
        path,
        env,
        dtype=getattr(torch, dtype),
        head="score",
        new_head="zero" if critic else "normal",
        lora=SETTINGS if kind == "lora" else None,
        seed=5,
    )
    trained = {n: p for n, p in model.named_parameters() if p.requires_grad}
    optimizer = torch.optim.AdamW(trained.values(), lr=1e-2, fused=True)
    results: dict[str, Any] = {"head": full(model.score.weight).detach().clone()}
    for step in range(2):  # adapters' B starts at zero, so A has a gradient from the second step on
        for members in shares:
            if critic:
                row = value_row(members)
                errors = compute_values(model, row) - row.expand(WEIGHTS)
                torch.where(row.response_mask, errors, 0.0).square().sum().backward()
            else:
                weights = torch.tensor(WEIGHTS)[members]
                (compute_scores(model, scored_row(members)) * weights).sum().backward()
        results[f"gradients_{step}"] = {n: full(p.grad).clone() for n, p in trained.items()}
        results[f"norm_{step}"] = clip_grad_norm(model, 0.5)
        optimizer.step()
        optimizer.zero_grad()
    results["merged"] = {n: t.clone() for n, t in stream_full_tensors(model, dtype=torch.float32)}
    with torch.no_grad():
        results["scores"] = compute_scores(model, scored_row())
    return results


def test_training_does_not_depend_on_ranks(tmp_path: Path, env: DistEnv) -> None:
    """One, two, and two replicated ranks; one of them has less to score than the other."""
    path = tiny(tmp_path / "model", vocab_size=323)  # rows that do not divide
    cases = ["float32-full", "float32-lora", "bfloat16-lora", "float32-critic"]
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", "2", str(ROOT / "tests" / "run_scores.py")]
    answer = subprocess.run(
        [*command, str(tmp_path), path, *cases],
        env=environment() | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert answer.returncode == 0, answer.stderr[-3000:]
    for case in cases:
        first = train(path, case, env, [list(range(6))])
        for replicas in (1, 2):
            result = torch.load(tmp_path / f"{case}-{replicas}.pt")
            # in bf16, matrix products of other rows round differently
            exact = case.startswith("float32")
            compare(first, result, scale=1 if exact else 2**12)
            # AdamW's first step follows the sign of a gradient, however small. Behind a head of
            # zeros all but the head's own make it last, and all at once.
            if exact and case != "float32-critic":
                for key, value in first["merged"].items():
                    assert torch.allclose(result["merged"][key], value, atol=1e-5), key
                assert torch.allclose(result["scores"], first["scores"], atol=1e-4)


def compare(first: dict[str, Any], result: dict[str, Any], *, scale: int) -> None:
    assert torch.equal(result["head"], first["head"])
    for step in range(2):
        assert abs(result[f"norm_{step}"] / first[f"norm_{step}"] - 1) < 1e-5 * scale
        for key, value in first[f"gradients_{step}"].items():
            error = (result[f"gradients_{step}"][key] - value).abs().max()
            assert error <= (1e-5 * value.abs().max() + 1e-7) * scale, key


# ---- the head ------------------------------------------------------------------------------------


def test_a_new_head_depends_on_the_seed_alone(tmp_path: Path, env: DistEnv) -> None:
    """P31: the head was drawn before anything was seeded."""
    path = tiny(tmp_path, hidden_size=512, num_hidden_layers=1)
    before = torch.random.get_rng_state()
    heads = [
        full(
            load_model(path, env, head="score", new_head="normal", **settings).score.weight
        ).detach()
        for settings in (
            {"dtype": torch.float32, "seed": 5},
            {"dtype": torch.bfloat16, "seed": 5, "lora": SETTINGS},
            {"dtype": torch.float32, "seed": 6},
        )
    ]
    assert torch.equal(before, torch.random.get_rng_state())
    assert torch.equal(heads[0], heads[1]) and not torch.equal(heads[0], heads[2])
    assert heads[0].shape == (1, 512) and heads[0].dtype == torch.float32
    assert abs(heads[0].std() * 513**0.5 - 1) < 0.1 and abs(heads[0].mean()) < 0.01


def test_checkpoints_without_one_trained_score_are_refused(tmp_path: Path, env: DistEnv) -> None:
    """P29: a causal checkpoint got a random head, and a warning that nobody saw."""

    def load(path: object, **settings: Any) -> None:
        load_model(str(path), env, dtype=torch.float32, **{"head": "score"} | settings)

    path = tiny(tmp_path / "causal")
    with pytest.raises(ValueError, match="--model=.*causal: no trained head .*reward_model.py"):
        load(path)
    with pytest.raises(ValueError, match="--rewards=.*causal: no trained head"):
        load(path, flag="--rewards")

    two = AutoModelForSequenceClassification.from_pretrained(path, num_labels=2)
    two.save_pretrained(tmp_path / "two")
    config = json.loads((tmp_path / "two" / "config.json").read_text())
    for architectures in (config["architectures"], ["Qwen3ForCausalLM"]):  # by name, by shape
        (tmp_path / "two" / "config.json").write_text(
            json.dumps(config | {"architectures": architectures})
        )
        for new_head in (None, "normal", "zero"):
            with pytest.raises(
                ValueError,
                match=r"--model=.*two: .*(2 outputs|\(2, 64\) in the checkpoint, not \(1, 64\))",
            ):
                load(tmp_path / "two", new_head=new_head)
    tokens = AutoModelForTokenClassification.from_pretrained(path, num_labels=1)
    tokens.save_pretrained(tmp_path / "tokens")
    with pytest.raises(ValueError, match="--model=.*tokens: its head is not"):
        load(tmp_path / "tokens")

    cut = Path(tiny(tmp_path / "cut", head=True))
    weights = load_file(cut / "model.safetensors")
    del weights["model.layers.1.self_attn.q_proj.weight"], weights["score.weight"]
    save_file(weights, cut / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match="q_proj"):
        load(cut, new_head="normal")

    with pytest.raises(ValueError, match="is a reward model"):
        load(tiny(tmp_path / "score", head=True), head="lm")
    granite = make_tiny_model(tmp_path / "granite", "granite")
    with pytest.raises(ValueError, match="no sequence classifier of model type 'granite'"):
        load(granite, new_head="normal")


def test_an_unexpected_output_head_is_no_obstacle(tmp_path: Path, env: DistEnv) -> None:
    path = tiny(tmp_path, "qwen3-untied")
    assert "lm_head.weight" in load_file(Path(path) / "model.safetensors")
    model = load_model(path, env, dtype=torch.float32, head="score", new_head="normal")
    assert "lm_head.weight" not in dict(model.named_parameters())


# ---- LoRA ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["qwen3", "gpt2"])
def test_lora_trains_the_whole_head(name: str, tmp_path: Path, env: DistEnv) -> None:
    """Scores and gradients are peft's, and so are those of both exports."""
    path = tiny(tmp_path / "start", name, head=True)
    model = load_model(path, env, dtype=torch.float32, head="score", lora=SETTINGS)
    perturb_adapters(model)
    with torch.no_grad():
        model.score.weight.mul_(1.5)
    trained = {n: p for n, p in model.named_parameters() if p.requires_grad}
    assert {n.rpartition(".lora_")[0] or n for n in trained} > {"score.weight"}
    assert sorted(dict(stream_adapters(model))) == sorted(trained)

    final = exported(model, path, tmp_path / "final")
    export_adapter(model, path=tmp_path / "adapter", source=path)
    config = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert config["task_type"] == "SEQ_CLS" and config["modules_to_save"] == ["score"]
    theirs = peft.PeftModel.from_pretrained(plain(path), tmp_path / "adapter", is_trainable=True)
    scores = compute_scores(model, scored_row())
    expected = plain_scores(theirs.eval().base_model.model)
    assert torch.allclose(scores, expected, atol=2e-5)
    assert torch.allclose(scores, plain_scores(plain(final)), atol=2e-5)
    assert (scores - plain_scores(plain(path))).abs().max() > 0.1

    for values in (scores, expected):
        (values * torch.tensor(WEIGHTS)).sum().backward()
    gradients = {
        n.removeprefix("base_model.model.").replace("modules_to_save.default.", ""): p.grad
        for n, p in theirs.named_parameters()
        if p.grad is not None
    }
    assert sorted(gradients) == sorted(trained)
    for key, parameter in trained.items():
        error = (full(parameter.grad) - gradients[key]).abs().max()
        assert 0 < gradients[key].abs().max() and error <= 1e-5 * gradients[key].abs().max(), key


def test_the_head_is_no_target_of_adapters(tmp_path: Path, env: DistEnv) -> None:
    path = tiny(tmp_path, head=True)
    with pytest.raises(ValueError, match="--lora_target=score: "):
        load_model(
            path, env, dtype=torch.float32, head="score", lora=LoraSettings(2, 2, ("score",))
        )


# ---- export --------------------------------------------------------------------------------------


def trained_model(path: str, env: DistEnv) -> PreTrainedModel:
    """One large step away from the checkpoint."""
    model = load_model(path, env, dtype=torch.float32, head="score", new_head="normal")
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    compute_scores(model, scored_row()).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    return model


@pytest.mark.parametrize("name", ["qwen3", "qwen3-untied", "gemma3_text", "gpt2"])
def test_export_is_a_standard_classifier(name: str, tmp_path: Path, env: DistEnv) -> None:
    path = tiny(tmp_path / "start", name)
    model = trained_model(path, env)
    scores = compute_scores(model, scored_row()).detach()
    final = exported(model, path, tmp_path / "final", score_bias=-1.25)
    assert not [n for n in load_file(final / "model.safetensors") if "lm_head" in n]
    assert not (final / "generation_config.json").exists()
    config = json.loads((final / "config.json").read_text())
    assert config["architectures"] == [type(model).__name__.removeprefix("FSDP")]
    assert config["architectures"][0].endswith("ForSequenceClassification")
    assert config["id2label"] == {"0": "LABEL_0"} and config["problem_type"] == "regression"
    assert config["pad_token_id"] == load_tokenizer(str(final)).pad_token_id == 2
    assert config["score_bias"] == -1.25
    loaded, report = AutoModelForSequenceClassification.from_pretrained(
        final, output_loading_info=True
    )
    assert loaded.config.num_labels == 1
    assert not any(report.values()), report
    again = load_model(str(final), env, dtype=torch.float32, head="score", trainable=False)
    with torch.no_grad():
        assert torch.allclose(compute_scores(again, scored_row()), scores, rtol=0, atol=1e-6)
        assert torch.allclose(plain_scores(plain(final)), scores, atol=2e-5)
    assert again.config.score_bias == -1.25
    # Training that starts from there has scores without a bias again.
    more = exported(again, str(final), tmp_path / "more")
    assert getattr(plain(more).config, "score_bias", None) is None


def test_pipeline_and_trl_give_our_scores(tmp_path: Path, env: DistEnv) -> None:
    """One number per text, without a sigmoid, in batches of unequal lengths."""
    tokenizer = make_tokenizer("pad_is_eos", chat_template=EOS_TEMPLATE, add_bos=False)
    path = tiny(tmp_path / "start", tokenizer=tokenizer)
    model = trained_model(path, env)
    final = exported(model, path, tmp_path / "final")

    def ours(ids: list[list[int]]) -> list[float]:
        masks = [[False] * len(sequence) for sequence in ids]
        return compute_scores(model, pack(range(len(ids)), ids, masks)).tolist()

    texts = ["hello<eos>", "a longer text of 12 words<eos>and two turns<eos>", "x", "12<eos>" * 3]
    classify = pipeline("text-classification", model=str(final), batch_size=4, device="cpu")
    results = classify(texts)
    expected = ours([tokenizer(text)["input_ids"] for text in texts])
    assert [result["score"] for result in results] == pytest.approx(expected, abs=1e-4)
    assert min(expected) < 0 < max(expected)  # which no sigmoid would give

    trl = pytest.importorskip("trl")
    from datasets import Dataset

    rows = [
        {
            "prompt": [{"role": "user", "content": "hello"}],
            **{
                side: [{"role": "assistant", "content": word * n}]
                for side, word in (("chosen", "yes "), ("rejected", "12"))
            },
        }
        for n in (1, 7, 3)
    ]
    trainer = trl.RewardTrainer(
        model=str(final),
        args=trl.RewardConfig(
            output_dir=str(tmp_path / "peer"),
            per_device_train_batch_size=3,
            model_init_kwargs={"dtype": "float32"},
            bf16=False,
            use_cpu=True,
            gradient_checkpointing=False,
            report_to="none",
        ),
        train_dataset=Dataset.from_list(rows),
    )
    batch = next(iter(trainer.get_train_dataloader()))
    keys = ("input_ids", "attention_mask")
    with torch.no_grad():
        logits = trainer.model.eval()(**{key: batch[key] for key in keys}).logits[:, 0]
    ids = [
        row[mask.bool()].tolist()
        for row, mask in zip(batch["input_ids"], batch["attention_mask"], strict=True)
    ]
    assert len(ids) == 6 and len({len(sequence) for sequence in ids}) > 2
    assert logits.tolist() == pytest.approx(ours(ids), abs=1e-4)


def test_vllm_gives_our_scores(tmp_path: Path, env: DistEnv) -> None:
    request, expected = {}, {}
    for name, bias in (("qwen3", None), ("gpt2", 0.75)):
        path = tiny(tmp_path / name, name)
        model = trained_model(path, env)
        final = str(exported(model, path, tmp_path / f"{name}-final", score_bias=bias))
        request[final] = [sequences(), None if bias is None else -bias]
        expected[final] = (compute_scores(model, scored_row()) + (bias or 0)).tolist()
    answer = subprocess.run(
        [sys.executable, str(ROOT / "tests" / "run_classify.py"), json.dumps(request)],
        env=environment() | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert answer.returncode == 0, answer.stderr[-3000:]
    scores = json.loads(answer.stdout.splitlines()[-1])
    for path, values in expected.items():
        assert scores[path] == pytest.approx(values, abs=1e-4)


# ---- padding token -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "flavour, template, stop_ids, expected",
    [
        ("distinct", EOS_TEMPLATE, [1], "<pad>"),  # its own
        ("no_pad", EOS_TEMPLATE, [1], "<pad>"),  # named so, before <|im_start|>
        ("pad_is_eos", EOS_TEMPLATE, [1], "<pad>"),
        ("distinct", EOS_TEMPLATE, [1, 2], "<|im_start|>"),  # padding that ends responses
        ("no_pad", EOS_TEMPLATE, [2], "<|im_start|>"),
        ("no_pad", EOS_TEMPLATE + "<|im_start|>", [2], "<|im_end|>"),
        ("no_pad", None, [1, 2, 3], "<|im_end|>"),
    ],
)
def test_padding_is_a_token_that_ends_nothing(
    flavour: Flavour, template: str | None, stop_ids: list[int], expected: str, tmp_path: Path
) -> None:
    tokenizer = make_tokenizer(flavour, chat_template=template)
    path = make_tiny_model(tmp_path, tokenizer=tokenizer)
    assert choose_pad_token(load_tokenizer(str(path)), stop_ids) == expected


def test_padding_needs_a_token_of_its_own(tmp_path: Path) -> None:
    tokenizer = make_tokenizer("pad_is_eos", chat_template="<|im_start|><|im_end|>")
    path = make_tiny_model(tmp_path / "unknown", tokenizer=tokenizer)
    with pytest.raises(ValueError, match="--model=.*unknown: no token is left for padding"):
        choose_pad_token(load_tokenizer(str(path)), [2])
    tokenizer.add_special_tokens({"unk_token": "<bos>"})
    tokenizer.save_pretrained(path)
    assert choose_pad_token(load_tokenizer(str(path)), [2]) == "<bos>"
    # A token without an embedding cannot be in a batch.
    tokenizer = make_tokenizer("no_pad", chat_template="<|im_start|><|im_end|><pad>")
    tokenizer.add_special_tokens({"pad_token": "<new pad>"})
    path = make_tiny_model(tmp_path / "small", vocab_size=267)
    tokenizer.save_pretrained(path)
    with pytest.raises(ValueError, match="--model=.*small: no token is left for padding"):
        choose_pad_token(load_tokenizer(str(path)), [])
