"""Adapters under FSDP2 against peft on plain transformers, and against the merged model."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from common.dist import DistEnv
from common.logprobs import compute_logprobs
from common.lora import LoraSettings, adapted_layers, adapters_off
from common.model import export_adapter, export_hf, load_model, load_tokenizer
from common.packing import PackedRow, pack
from common.weight_sync import stream_adapters, stream_full_tensors
from tests import test_model
from tests.test_model import perturb_adapters, sequences
from tests.tiny import full, make_tiny_model

env = test_model.env  # the fixture

# Large initial weights: attention of transformers' default of 0.02 would hide errors.
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "qwen3": {},
    "qwen3-untied": {"tie_word_embeddings": False},
    "llama": {},
    "gemma2": {"sliding_window": 8},
    "phi3": {"sliding_window": 8},
    "gpt2": {},
}
SETTINGS = LoraSettings(rank=3, alpha=7)  # a scaling that no rounding to 1 or 2 could pass for


def tiny(folder: Path, name: str = "qwen3", **overrides: Any) -> str:
    settings = {"initializer_range": 0.15} | ARCHITECTURES[name] | overrides
    return str(make_tiny_model(folder, name.split("-")[0], **settings))


def packed_row() -> PackedRow:
    ids, masks = sequences()
    return pack(range(len(ids)), ids, masks)


def plain_loss(model: PreTrainedModel) -> Tensor:
    """Sum of the trained tokens' log-probs, one sequence at a time by the model's own forward."""
    total = torch.zeros(())
    for ids, mask in zip(*sequences(), strict=True):
        table = model(torch.tensor([ids]), use_cache=False).logits[0, :-1].float().log_softmax(-1)
        chosen = table.gather(1, torch.tensor(ids[1:])[:, None])[:, 0]
        total = total + chosen[torch.tensor(mask[1:])].sum()
    return total


def plain(path: str | Path) -> PreTrainedModel:
    # eager: transformers' sdpa drops Gemma 2's soft-capping
    return AutoModelForCausalLM.from_pretrained(
        path, dtype=torch.float32, attn_implementation="eager"
    ).eval()


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_loss_and_gradients_equal_those_of_peft(
    name: str,
    tmp_path: Path,
    env: DistEnv,
) -> None:
    path = tiny(tmp_path, name)
    model = load_model(path, env, dtype=torch.float32, lora=SETTINGS)
    perturb_adapters(model)
    loss = compute_logprobs(model, packed_row())[0].sum()
    loss.backward()

    config = peft.LoraConfig(
        r=3,
        lora_alpha=7,
        target_modules=sorted({n.rpartition(".")[2] for n in adapted_layers(model)}),
        fan_in_fan_out=name == "gpt2",
    )
    theirs = peft.get_peft_model(plain(path), config)
    trained = dict(stream_adapters(model))
    with torch.no_grad():
        for parameter_name, parameter in theirs.named_parameters():
            if parameter.requires_grad:
                parameter.copy_(trained[parameter_name.removeprefix("base_model.model.")])
    expected = plain_loss(theirs)
    expected.backward()
    assert abs(loss - expected) <= 1e-5 * abs(expected)
    gradients = {
        n.removeprefix("base_model.model."): p.grad
        for n, p in theirs.named_parameters()
        if p.grad is not None
    }
    ours = {n: full(p.grad) for n, p in model.named_parameters() if p.grad is not None}
    assert sorted(ours) == sorted(gradients) == sorted(trained)
    for parameter_name, gradient in gradients.items():
        error = (ours[parameter_name] - gradient).abs().max()
        assert error <= 1e-5 * gradient.abs().max(), parameter_name
        assert gradient.abs().max() > 0


def test_every_linear_layer_of_the_decoder_has_an_adapter(tmp_path: Path, env: DistEnv) -> None:
    model = load_model(
        tiny(tmp_path, "qwen3-untied"), env, dtype=torch.float32, lora=LoraSettings(2, 2)
    )
    layers = {n.rpartition(".")[2] for n in adapted_layers(model)}
    assert layers == {
        *("q_proj", "k_proj", "v_proj", "o_proj"),
        *("gate_proj", "up_proj", "down_proj"),
    }
    assert len(adapted_layers(model)) == 14
    trained = [n for n, p in model.named_parameters() if p.requires_grad]
    assert len(trained) == 28 and all("lora_" in n for n in trained)


@pytest.mark.parametrize(
    "target", ["lm_head", "embed_tokens", "q_pro", "self_attn", "input_layernorm", "layers.0"]
)
def test_targets_that_are_no_linear_layers_are_refused(
    target: str,
    tmp_path: Path,
    env: DistEnv,
) -> None:
    path = tiny(tmp_path)
    with pytest.raises(ValueError, match=f"--lora_target={target}: .*down_proj"):
        load_model(path, env, dtype=torch.float32, lora=LoraSettings(2, 2, ("q_proj", target)))
    model = load_model(path, env, dtype=torch.float32, lora=LoraSettings(2, 2, ("q_proj",)))
    assert len(adapted_layers(model)) == 2


def test_rank_and_alpha_are_checked() -> None:
    for rank, alpha, flag in ((0, 8, "lora_rank=0"), (4, 0, "lora_alpha=0")):
        with pytest.raises(ValueError, match=f"--{flag}"):
            LoraSettings(rank, alpha)


def test_dtypes_and_precision(tmp_path: Path, env: DistEnv) -> None:
    """P62 for adapters: their parameters, gradients and optimizer state are float32."""
    path = tiny(tmp_path)
    exact = load_model(path, env, dtype=torch.float32, lora=SETTINGS)
    model = load_model(path, env, dtype=torch.bfloat16, lora=SETTINGS)
    for name, parameter in model.named_parameters():
        expected = torch.float32 if "lora_" in name else torch.bfloat16
        assert parameter.dtype == expected, name
    for each in (exact, model):
        perturb_adapters(each)
    logprobs, rounded = (compute_logprobs(m, packed_row())[0] for m in (exact, model))
    assert (logprobs - rounded).abs().max() < 0.2
    rounded.sum().backward()
    gradients = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    assert {g.dtype for g in gradients.values()} == {torch.float32}
    # Not a multiple of what bf16 could hold: the merge is made of the float32 adapters.
    merged = dict(stream_full_tensors(model, dtype=torch.float32))
    weight = merged["model.layers.0.self_attn.q_proj.weight"]
    assert not torch.equal(weight, weight.bfloat16().float())


def test_initial_values_depend_on_the_seed_alone(tmp_path: Path, env: DistEnv) -> None:
    path = tiny(tmp_path)
    before = torch.random.get_rng_state()
    first, again, other = (
        {
            n: t.clone()
            for n, t in stream_adapters(
                load_model(path, env, dtype=torch.float32, lora=SETTINGS, seed=s)
            )
        }
        for s in (5, 5, 6)
    )
    assert torch.equal(before, torch.random.get_rng_state())
    for name, value in first.items():
        assert torch.equal(value, again[name])
        if "lora_B" in name:
            assert not value.any()
        else:
            assert not torch.equal(value, other[name])
            bound = value.shape[1] ** -0.5  # Kaiming-uniform with a = sqrt(5)
            assert 0.9 * bound < value.abs().max() <= bound


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_adapters_off_is_the_base_model(dtype: torch.dtype, tmp_path: Path, env: DistEnv) -> None:
    path, row = tiny(tmp_path), packed_row()
    model = load_model(path, env, dtype=dtype, lora=SETTINGS)
    base = load_model(path, env, dtype=dtype, trainable=False)
    perturb_adapters(model)
    with torch.no_grad():
        expected = compute_logprobs(base, row)[0]
        adapted = compute_logprobs(model, row)[0]
        with adapters_off(model):
            assert torch.equal(compute_logprobs(model, row)[0], expected)
        assert torch.equal(compute_logprobs(model, row)[0], adapted)
    assert (adapted - expected).abs().max() > 0.01
    with pytest.raises(KeyError), adapters_off(model):
        raise KeyError
    compute_logprobs(model, row)[0].sum().backward()  # and everything trains as before
    assert sum(p.grad is not None for p in model.parameters()) == 28


@pytest.mark.parametrize("name", ["qwen3", "gpt2"])
def test_activation_checkpointing_changes_nothing(name: str, tmp_path: Path, env: DistEnv) -> None:
    """The first layer's input has no gradient when the embedding is frozen."""
    path, gradients = tiny(tmp_path, name), []
    for checkpointing in (False, True):
        model = load_model(
            path, env, dtype=torch.float32, activation_checkpointing=checkpointing, lora=SETTINGS
        )
        perturb_adapters(model)
        compute_logprobs(model, packed_row())[0].sum().backward()
        gradients.append({n: p.grad for n, p in model.named_parameters() if p.grad is not None})
    assert len(gradients[0]) == 2 * len(adapted_layers(model))
    for parameter_name, gradient in gradients[0].items():
        other = full(gradients[1][parameter_name])
        assert torch.equal(full(gradient), other) and other.any()


@pytest.mark.parametrize("name", ["qwen3", "qwen3-untied", "gpt2"])
def test_stream_yields_merged_weights_and_leaves_the_base_alone(
    name: str,
    tmp_path: Path,
    env: DistEnv,
) -> None:
    """P55: merging in place and back let the base drift, and adapter names went nowhere."""
    path = tiny(tmp_path, name)
    start = load_file(Path(path) / "model.safetensors")
    model = load_model(path, env, dtype=torch.float32, lora=SETTINGS)
    unchanged = dict(stream_full_tensors(model, dtype=torch.float32))
    assert sorted(unchanged) == sorted(n for n, _ in plain(path).named_parameters())
    assert all(torch.equal(unchanged[n], start[n]) for n in start)
    perturb_adapters(model)
    for _ in range(3):
        merged = dict(stream_full_tensors(model, dtype=torch.float32))
    for module_name, layer in adapted_layers(model).items():
        key = f"{module_name}.weight"
        assert torch.equal(full(layer.base_layer.weight), start[key])
        delta = full(layer.get_delta_weight("default"))
        assert torch.allclose(merged[key], start[key] + delta, atol=1e-6)
        assert not torch.allclose(merged[key], start[key], atol=1e-3)
    loaded = plain(path)
    loaded.load_state_dict(merged, strict=False)
    loaded.tie_weights()
    ours = compute_logprobs(model, packed_row())[0].sum()
    assert abs(plain_loss(loaded) - ours) <= 1e-5 * abs(ours)


@pytest.mark.parametrize("name", ["qwen3", "qwen3-untied", "gpt2"])
def test_exports_load_in_peft_and_transformers(name: str, tmp_path: Path, env: DistEnv) -> None:
    path = tiny(tmp_path / "start", name)
    model = load_model(path, env, dtype=torch.float32, lora=SETTINGS)
    perturb_adapters(model)
    export_hf(
        model,
        load_tokenizer(path),
        stream_full_tensors(model, dtype=torch.float32),
        path=tmp_path / "final",
        source=path,
        stop_token_ids=[1],
    )
    for _ in range(2):  # the second replaces the first
        export_adapter(model, path=tmp_path / "adapter", source=path)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["adapter", "final", "start"]
    config = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == path and config["task_type"] == "CAUSAL_LM"
    assert (config["r"], config["lora_alpha"], config["lora_dropout"]) == (3, 7, 0.0)
    merged = plain(tmp_path / "final")
    assert sorted(n for n, _ in merged.named_parameters()) == sorted(
        n for n, _ in plain(path).named_parameters()
    )
    adapted = peft.PeftModel.from_pretrained(plain(path), tmp_path / "adapter").eval()
    with torch.no_grad():
        ours = compute_logprobs(model, packed_row())[0].sum()
        assert abs(plain_loss(merged) - ours) <= 1e-5 * abs(ours)
        assert abs(plain_loss(adapted) - ours) <= 1e-5 * abs(ours)
        ids = torch.tensor([sequences()[0][3]])
        assert torch.allclose(merged(ids).logits, adapted(ids).logits, atol=1e-4)


def test_a_failed_export_leaves_the_last_one(tmp_path: Path, env: DistEnv) -> None:
    path = tiny(tmp_path / "start")
    model = load_model(path, env, dtype=torch.float32, lora=SETTINGS)
    export_adapter(model, path=tmp_path / "adapter", source=path)
    before = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    with torch.no_grad():
        next(p for n, p in model.named_parameters() if "lora_B" in n).fill_(float("nan"))
    with pytest.raises(RuntimeError, match="not finite"):
        export_adapter(model, path=tmp_path / "adapter", source=path)
    after = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    assert all(torch.equal(after[n], before[n]) for n in before)


def test_training_does_not_depend_on_ranks(tmp_path: Path) -> None:
    """One, two, and two replicated ranks: start, gradients, weights after AdamW, merge, export."""
    # rows that do not divide, and for A a rank of 3
    cases = [
        tiny(tmp_path / name, name, vocab_size=323) + ":" + dtype
        for name, dtype in (("qwen3", "float32"), ("gpt2", "bfloat16"))
    ]
    root = str(Path(__file__).parent.parent)
    outs: list[Path] = []
    for ranks, replicas in ((1, 1), (2, 1), (2, 2)):
        outs.append(tmp_path / f"{ranks}-{replicas}")
        outs[-1].mkdir()
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        command += ["--nproc-per-node", str(ranks), str(Path(root) / "tests" / "run_lora.py")]
        answer = subprocess.run(
            [*command, str(outs[-1]), str(replicas), *cases],
            env=os.environ | {"PYTHONPATH": root, "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert answer.returncode == 0, answer.stderr[-3000:]
    for dtype in ("float32", "bfloat16"):
        compare_runs([torch.load(out / f"{dtype}.pt") for out in outs], exact=dtype == "float32")
        for out in outs:
            file = load_file(out / f"adapter-{dtype}" / "adapter_model.safetensors")
            for key, value in torch.load(out / f"{dtype}.pt")["adapters"].items():
                assert torch.equal(file["base_model.model." + key.replace(".default.", ".")], value)


def compare_runs(results: list[dict[str, Any]], *, exact: bool) -> None:
    first = results[0]
    assert len(first["start"]) > 0
    assert all(not torch.equal(first["adapters"][n], first["start"][n]) for n in first["start"])
    scale = 1 if exact else 2**14  # in bf16, matrix products of other rows round differently
    for result in results[1:]:
        for key, value in first["start"].items():
            assert torch.equal(result["start"][key], value)
        for step in range(2):
            assert abs(result[f"norm_{step}"] / first[f"norm_{step}"] - 1) < 1e-6 * scale
            for key, value in first[f"gradients_{step}"].items():
                assert torch.allclose(result[f"gradients_{step}"][key], value, atol=1e-7 * scale)
        if exact:  # AdamW's first steps follow the sign of a gradient, however small
            for kind in ("adapters", "merged"):
                for key, value in first[kind].items():
                    assert torch.allclose(result[kind][key], value, atol=2e-6), key
            assert torch.allclose(result["logprobs"], first["logprobs"], atol=1e-4)
