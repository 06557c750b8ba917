"""Sharded models on packed rows against plain transformers, one sequence at a time."""

import copy
import json
import os
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from common.dist import DistEnv, setup
from common.logprobs import Boundaries, compute_logprobs
from common.lora import LoraSettings, adapters_off
from common.model import clip_grad_norm, export_hf, load_model, load_tokenizer, packed_attention
from common.packing import PackedRow, pack
from common.weight_sync import stream_full_tensors
from tests.tiny import full, local, make_tiny_model

# Large initial weights: with transformers' default of 0.02 attention is so flat that a leak between
# sequences would stay below the tolerance.
ARCHITECTURES = {
    "qwen2": {},
    "qwen3": {},
    "qwen3-untied": {"tie_word_embeddings": False},
    "llama": {},
    "mistral": {"sliding_window": 8},
    "gemma2": {"sliding_window": 8},
    "gemma3_text": {"sliding_window": 8},
    "phi3": {"sliding_window": 8},
    "gpt2": {},
}


@pytest.fixture(scope="module")
def env() -> Iterator[DistEnv]:
    saved = {name: os.environ.get(name) for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE")}
    for name in saved:  # what another test's engine has left would look like torchrun
        os.environ.pop(name, None)
    hook = sys.excepthook
    yield setup(timeout_s=60)
    dist.destroy_process_group()
    sys.excepthook = hook
    for name, value in saved.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


def sequences(seed: int = 0) -> tuple[list[list[int]], list[list[bool]]]:
    generator = random.Random(seed)
    ids = [[generator.randrange(320) for _ in range(n)] for n in (5, 23, 2, 40, 11)]
    return ids, [[t >= 2 or len(s) == 2 for t in range(len(s))] for s in ids]


@pytest.mark.parametrize("fsdp", [False, True])
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_packed_logprobs_and_gradients_equal_plain_ones(
    name: str, fsdp: bool, tmp_path: Path, env: DistEnv
) -> None:
    """P16, P17, P18: packed samples attended to each other, or kept counting positions."""
    arch = name.split("-")[0]
    settings = {"initializer_range": 0.15} | ARCHITECTURES[name]
    path = make_tiny_model(tmp_path, arch, **settings)
    model = load_model(str(path), env, dtype=torch.float32, cpu_offload=fsdp)
    assert isinstance(model, FSDPModule) == fsdp  # one rank in float32 needs no sharding
    plain = AutoModelForCausalLM.from_pretrained(
        path,
        dtype=torch.float32,
        attn_implementation="eager",  # transformers' sdpa drops Gemma 2's soft-capping
    ).eval()
    ids, masks = sequences()
    row = pack(range(len(ids)), ids, masks)
    logprobs, entropy = compute_logprobs(model, row, temperature=0.7)
    logprobs.sum().backward()

    expected, expected_entropy = [], []
    for sequence, mask in zip(ids, masks, strict=True):
        logits = plain(torch.tensor([sequence]), use_cache=False).logits[0, :-1].float() / 0.7
        table = logits.log_softmax(-1)
        keep = torch.tensor(mask[1:])
        chosen = table.gather(1, torch.tensor(sequence[1:])[:, None])[:, 0]
        expected.append(torch.where(keep, chosen, 0.0))
        expected_entropy.append(torch.where(keep, -(table.exp() * table).sum(-1), 0.0))
    torch.cat(expected).sum().backward()
    for ours, theirs in ((logprobs, expected), (entropy, expected_entropy)):
        ours = torch.cat([part[:-1] for part in ours.split(row.seqlens)])
        assert torch.allclose(ours, torch.cat(theirs), atol=2e-5)
    gradients = {n: p.grad for n, p in plain.named_parameters()}
    for parameter_name, parameter in model.named_parameters():
        ours, theirs = full(parameter.grad), gradients[parameter_name]
        error = (ours - theirs).abs().max()
        assert error <= 1e-5 * theirs.abs().max() + 1e-6, parameter_name


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_a_shared_beginning_changes_nothing(name: str, tmp_path: Path, env: DistEnv) -> None:
    """Prefix sharing computes a prompt once for several responses; results are those of copies."""
    settings = {"initializer_range": 0.15} | ARCHITECTURES[name]
    path = make_tiny_model(tmp_path, name.split("-")[0], **settings)
    model = load_model(str(path), env, dtype=torch.float32, activation_checkpointing=True)
    rng = random.Random(0)
    draw = lambda n: [rng.randrange(320) for _ in range(n)]  # noqa: E731
    prompt, other = draw(41), draw(6)  # longer than the sliding windows
    ids = [prompt + draw(9), prompt + draw(1), prompt + draw(30), draw(5), other + draw(7)]
    ids += [other + draw(3)]
    masks = [
        [t >= n for t in range(len(s))] for s, n in zip(ids, [41] * 3 + [2, 6, 6], strict=True)
    ]
    results = []
    for shared in (None, [0, 40, 40, 0, 0, 5]):
        row = pack([3, 1, 4, 0, 2, 5], ids, masks, shared=shared)
        model.zero_grad()
        logprobs, entropy = compute_logprobs(model, row)
        weights = torch.arange(1.0, 7.0, dtype=torch.float64)
        (
            (row.sum_sequences(logprobs) + 0.1 * row.sum_sequences(entropy)) * weights
        ).sum().backward()
        gradients = [full(p.grad) for p in model.parameters()]
        results.append([torch.cat(row.split(logprobs)), row.sum_sequences(entropy), *gradients])
    for ours, theirs in zip(*results, strict=True):
        assert (ours - theirs).abs().max() <= 1e-5 * (1 + theirs.abs().max())


def test_sequences_of_a_row_do_not_see_each_other(tmp_path: Path, env: DistEnv) -> None:
    """P16: changing one sequence changed the log-probs of its neighbours."""
    model = load_model(
        str(make_tiny_model(tmp_path, initializer_range=0.15)), env, dtype=torch.float32
    )
    ids, masks = sequences()
    with torch.no_grad():
        before = compute_logprobs(model, pack(range(5), ids, masks))[0].split([len(s) for s in ids])
        other = copy.deepcopy(ids)
        other[1] = [(token + 1) % 320 for token in other[1]]
        after = compute_logprobs(model, pack(range(5), other, masks))[0].split(
            [len(s) for s in ids]
        )
    for i in (0, 2, 3, 4):
        assert torch.equal(before[i], after[i])
    assert not torch.allclose(before[1], after[1])


def test_activation_checkpointing_changes_nothing(tmp_path: Path, env: DistEnv) -> None:
    path = str(make_tiny_model(tmp_path, attention_dropout=0.3))
    ids, masks = sequences()
    row = pack(range(5), ids, masks)
    gradients = []
    for checkpointing in (False, True):
        model = load_model(path, env, dtype=torch.float32, activation_checkpointing=checkpointing)
        compute_logprobs(model, row)[0].sum().backward()
        gradients.append([full(p.grad) for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


def test_dropout_is_off(tmp_path: Path, env: DistEnv) -> None:
    """P42: dropout made old and new log-probs differ, so ratios were not 1 at the first update."""
    for arch, rates in (("gpt2", ["resid_pdrop", "embd_pdrop", "attn_pdrop"]), ("qwen3", [])):
        path = make_tiny_model(tmp_path / arch, arch, **dict.fromkeys(rates, 0.5))
        model = load_model(str(path), env, dtype=torch.float32, activation_checkpointing=True)
        ids, masks = sequences()
        row = pack(range(5), ids, masks)
        assert torch.equal(compute_logprobs(model, row)[0], compute_logprobs(model, row)[0])


def test_masters_are_float32_and_small_updates_arrive(tmp_path: Path, env: DistEnv) -> None:
    """P62: bf16 parameters swallowed updates: a norm weight of 1.0 never moved at lr 1e-5."""
    model = load_model(str(make_tiny_model(tmp_path)), env, dtype=torch.bfloat16)
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True, weight_decay=0.0)
    ids, masks = sequences()
    for _ in range(10):
        (-compute_logprobs(model, pack(range(5), ids, masks))[0].sum()).backward()
        assert {p.grad.dtype for p in model.parameters()} == {torch.float32}
        optimizer.step()
        optimizer.zero_grad()
    norm = full(model.get_decoder().norm.weight)
    assert (norm != 1.0).all()
    assert {state["exp_avg"].dtype for state in optimizer.state.values()} == {torch.float32}


def test_bf16_compute_stays_close_to_float32(tmp_path: Path, env: DistEnv) -> None:
    path = str(make_tiny_model(tmp_path))
    ids, masks = sequences()
    row = pack(range(5), ids, masks)
    with torch.no_grad():
        exact = compute_logprobs(load_model(path, env, dtype=torch.float32), row)[0]
        rounded, entropy = compute_logprobs(load_model(path, env, dtype=torch.bfloat16), row)
    assert rounded.dtype == entropy.dtype == torch.float32
    assert (exact - rounded).abs().max() < 0.03


@pytest.mark.parametrize("tied", [True, False])
def test_export_reloads_with_the_same_logits(tmp_path: Path, env: DistEnv, tied: bool) -> None:
    """P54, P70: exports lacked the template, duplicated the tied head, or refused at the end."""
    path = make_tiny_model(tmp_path / "start", tie_word_embeddings=tied)
    # A published generation config that transformers refuses to save.
    (path / "generation_config.json").write_text(
        json.dumps({"do_sample": False, "temperature": 0.6, "top_p": 0.9, "eos_token_id": [1, 4]})
    )
    model, tokenizer = load_model(str(path), env, dtype=torch.float32), load_tokenizer(str(path))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.01)
    for dtype in (torch.float32, torch.bfloat16):
        export_hf(
            model,
            tokenizer,
            stream_full_tensors(model, dtype=dtype),
            path=tmp_path / "final",
            source=str(path),
            stop_token_ids=[1, 4],
        )
        again = AutoModelForCausalLM.from_pretrained(tmp_path / "final", dtype="auto")
        assert again.dtype == dtype
        assert again.generation_config.eos_token_id == [1, 4]
        assert again.config.architectures == ["Qwen3ForCausalLM"]
        shared = again.lm_head.weight.data_ptr() == again.model.embed_tokens.weight.data_ptr()
        assert shared == tied
        expected = {n: t.clone() for n, t in stream_full_tensors(model, dtype=dtype)}
        assert all(torch.equal(expected[n], p) for n, p in again.named_parameters())
    reloaded = AutoTokenizer.from_pretrained(tmp_path / "final")
    assert reloaded.chat_template == tokenizer.chat_template
    assert not list(tmp_path.glob("final.*"))


def test_models_that_do_not_fit_are_refused(tmp_path: Path, env: DistEnv) -> None:
    with pytest.raises(ValueError, match="--model=.*nowhere"):
        load_model(str(tmp_path / "nowhere"), env, dtype=torch.float32)
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "config.json").write_text("{}")
    with pytest.raises(ValueError, match="--model=.*empty: no model found"):
        load_model(str(tmp_path / "empty"), env, dtype=torch.float32)
    path = make_tiny_model(tmp_path / "cut", tie_word_embeddings=False)
    from safetensors.torch import load_file, save_file

    weights = load_file(path / "model.safetensors")
    del weights["model.layers.1.self_attn.q_proj.weight"]
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    # P29: a missing tensor was initialised at random, with a warning nobody saw.
    with pytest.raises(ValueError, match="q_proj"):
        load_model(str(path), env, dtype=torch.float32)


WORKER = """
import sys, torch, torch.distributed as dist
import common
from common.dist import setup
from common.logprobs import compute_logprobs
from common.model import load_model
from common.packing import pack
replicas = int(sys.argv[3])
env = setup(timeout_s=60, replicas=replicas)
model = load_model(sys.argv[1], env, dtype=torch.float32)
sys.path.insert(0, "tests/..")
from tests.test_model import full, sequences
ids, masks = sequences()
mine = [[0, 3], [1, 2, 4]][env.rank] if env.world_size == 2 else list(range(5))
logprobs, _ = compute_logprobs(model, pack(mine, [ids[i] for i in mine], [masks[i] for i in mine]))
(-logprobs.sum() / 70).backward()
norm = full(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5))
gradients = {n: full(p.grad) for n, p in model.named_parameters()}
if env.rank == 0:
    torch.save({"norm": norm, "gradients": gradients}, sys.argv[2])
dist.destroy_process_group()
"""


def test_gradients_and_norm_do_not_depend_on_ranks(tmp_path: Path) -> None:
    """P14, P60: gradients were averaged over ranks, and clipped by the norm of one shard."""
    path = make_tiny_model(tmp_path / "model", vocab_size=323)  # not divisible by 2
    script = tmp_path / "worker.py"
    script.write_text(WORKER)
    results = []
    for ranks, replicas in ((1, 1), (2, 1), (2, 2)):
        out = tmp_path / f"{ranks}-{replicas}.pt"
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        command += ["--nproc-per-node", str(ranks), str(script), str(path), str(out), str(replicas)]
        root = str(Path(__file__).parent.parent)
        answer = subprocess.run(
            command,
            cwd=root,
            env=os.environ | {"PYTHONPATH": root},
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert answer.returncode == 0, answer.stderr[-3000:]
        results.append(torch.load(out))
    for result in results[1:]:
        assert torch.allclose(result["norm"], results[0]["norm"], rtol=1e-5)
        for name, gradient in results[0]["gradients"].items():
            assert torch.allclose(result["gradients"][name], gradient, atol=1e-7), name


def test_cpu_offload_changes_nothing_on_the_cpu(tmp_path: Path, env: DistEnv) -> None:
    """What there is to move is on the CPU already; the policy and the rest of the path are real."""
    path = str(make_tiny_model(tmp_path))
    ids, masks = sequences()
    results = []
    for offload in (False, True):
        model = load_model(path, env, dtype=torch.float32, cpu_offload=offload)
        policies = {
            type(module._get_fsdp_state()._fsdp_param_group.offload_policy)
            for module in model.modules()
            if isinstance(module, FSDPModule)
        }
        assert policies == ({CPUOffloadPolicy} if offload else set())
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
        norms = []
        for _ in range(2):
            compute_logprobs(model, pack(range(5), ids, masks))[0].sum().backward()
            norms.append(clip_grad_norm(model, 0.5))
            optimizer.step()
            optimizer.zero_grad()
        results.append((norms, dict(stream_full_tensors(model, dtype=torch.float32))))
    (norms, weights), (offloaded_norms, offloaded) = results
    assert norms == offloaded_norms
    assert all(torch.equal(weights[n], offloaded[n]) for n in weights | offloaded)


def test_cpu_offload_needs_a_backend_for_cpu_tensors(
    tmp_path: Path, env: DistEnv, monkeypatch: pytest.MonkeyPatch
) -> None:
    """P61: "no backend for device cpu" at the first clipping of gradients."""
    path = str(make_tiny_model(tmp_path))
    with monkeypatch.context() as patch:
        patch.setattr(dist, "get_backend_config", lambda: "cuda:nccl")
        with pytest.raises(AssertionError, match="cpu_offload"):
            load_model(path, env, dtype=torch.float32, cpu_offload=True)
    # and the process group that every script gets on a GPU has one
    given: list[str] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(
        dist, "init_process_group", lambda backend, **settings: given.append(backend)
    )
    monkeypatch.setattr("common.dist.init_device_mesh", lambda *args, **settings: None)
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    setup(timeout_s=60)
    assert len(given) == 1 and "cpu:gloo" in given[0] and "cuda:nccl" in given[0]


def random_row(generator: random.Random) -> PackedRow:
    count = generator.randrange(1, 7)
    ids = [
        [generator.randrange(320) for _ in range(generator.randrange(2, 60))] for _ in range(count)
    ]
    return pack(range(count), ids, [[True] * len(sequence) for sequence in ids])


@torch.no_grad()
def perturb_adapters(model: PreTrainedModel) -> None:
    """Give B values, as training does; small enough that the model stays a model."""
    generator = torch.Generator().manual_seed(1)
    for name, parameter in sorted(model.named_parameters()):
        if "lora_B" in name:
            local(parameter).add_(torch.randn(parameter.shape, generator=generator) * 0.05)


def logprobs_and_gradients(model: PreTrainedModel, row: PackedRow) -> list[torch.Tensor]:
    with torch.no_grad():
        detached = compute_logprobs(model, row)[0]
    logprobs, _ = compute_logprobs(model, row)
    logprobs.sum().backward()
    gradients = [full(p.grad).clone() for p in model.parameters() if p.grad is not None]
    model.zero_grad()
    return [detached, logprobs.detach(), *gradients]


@pytest.mark.parametrize(
    "arch, checkpointing, lora", [("qwen3", True, True), ("gemma2", False, False)]
)
def test_compiled_layers_compute_the_same_and_compile_once(
    arch: str,
    checkpointing: bool,
    lora: bool,
    tmp_path: Path,
    env: DistEnv,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Lengths of a row's sequences were constants to the compiler: every row compiled anew.

    The graphs are run as they are; generating code for them would take minutes.
    """
    compile_in_place = torch.nn.Module.compile
    monkeypatch.setattr(
        torch.nn.Module,
        "compile",
        lambda self, **settings: compile_in_place(self, backend="eager", **settings),
    )
    torch._dynamo.reset()
    counters = torch._dynamo.utils.counters
    counters.clear()
    settings = {"initializer_range": 0.15} | ARCHITECTURES[arch]
    path = str(make_tiny_model(tmp_path, arch, **settings))
    adapters = LoraSettings(rank=3, alpha=7) if lora else None
    models = [
        load_model(
            path,
            env,
            dtype=torch.float32,
            activation_checkpointing=checkpointing,
            compile=compiled,
            lora=adapters,
        )
        for compiled in (False, True)
    ]
    for model in models:
        perturb_adapters(model)
    graphs = []
    generator = random.Random(0)
    for _ in range(5):
        row = random_row(generator)
        for eager, compiled in zip(*(logprobs_and_gradients(m, row) for m in models), strict=True):
            assert (eager - compiled).abs().max() <= 1e-5 * (1 + eager.abs().max())
        graphs.append(counters["stats"]["unique_graphs"])
    assert 0 < graphs[0] == graphs[-1]
    if lora:
        with torch.no_grad():
            for _ in range(3):
                row = random_row(generator)
                with adapters_off(models[0]), adapters_off(models[1]):
                    off = [compute_logprobs(model, row)[0] for model in models]
                assert torch.allclose(*off, atol=1e-5)
                graphs.append(counters["stats"]["unique_graphs"])
        assert graphs[-3] == graphs[-1]
    names = [[n for n, _ in stream_full_tensors(m, dtype=torch.float32)] for m in models]
    assert names[0] == names[1]
    assert list(models[0].state_dict()) == list(models[1].state_dict())


def test_generated_code_computes_the_same(tmp_path: Path, env: DistEnv) -> None:
    torch._dynamo.reset()
    path = str(make_tiny_model(tmp_path, num_hidden_layers=1, initializer_range=0.15))
    settings = {"activation_checkpointing": True, "lora": LoraSettings(rank=3, alpha=7)}
    results = []
    for compiled in (True, False):
        model = load_model(path, env, dtype=torch.float32, compile=compiled, **settings)
        perturb_adapters(model)
        results.append(logprobs_and_gradients(model, random_row(random.Random(0))))
    for ours, theirs in zip(*results, strict=True):
        assert (ours - theirs).abs().max() <= 1e-5 * (1 + theirs.abs().max())


@pytest.mark.gpu
@pytest.mark.parametrize("window", [None, 8])
def test_fused_varlen_attention_equals_one_sequence_at_a_time(window: int | None) -> None:
    torch.manual_seed(0)
    seqlens = [5, 23, 23, 2, 40]
    total = sum(seqlens) - 22 - 2
    query = torch.randn(1, 4, total, 64, device="cuda", dtype=torch.bfloat16)
    key, value = (torch.randn_like(query[:, :2]) for _ in range(2))
    ids = [[0] * length for length in seqlens]
    row = pack(range(5), ids, [[False] * len(s) for s in ids], shared=[0, 0, 22, 0, 2])
    settings = {"sliding_window": window, "boundaries": Boundaries(row.to("cuda"))}
    module = torch.nn.Identity()
    fused, _ = packed_attention(module, query, key, value, None, **settings)
    exact, _ = packed_attention(module, query.float(), key.float(), value.float(), None, **settings)
    assert (fused.float() - exact).abs().max() < 0.03


def test_architectures_that_packing_does_not_fit_are_refused(tmp_path: Path, env: DistEnv) -> None:
    """Scaled logits (Granite) or states that run on (Mamba 2) trained on the wrong log-probs."""
    granite = make_tiny_model(tmp_path / "granite", "granite", logits_scaling=4.0)
    with pytest.raises(ValueError, match="differ from plain transformers"):
        load_model(str(granite), env, dtype=torch.float32)
